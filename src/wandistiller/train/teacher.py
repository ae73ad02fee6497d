"""A teacher: a frozen transformer, or two experts, that is asked for velocities. What it answers carries no graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wandistiller.distributed.context import ClipGroup
from wandistiller.distributed.ranks import Ranks
from wandistiller.flow.guidance import guide, needs_unconditional
from wandistiller.flow.path import NUM_TIMESTEPS
from wandistiller.memory.experts import Experts
from wandistiller.memory.out_of_memory import working_with
from wandistiller.models.devices import DTYPES
from wandistiller.models.features import tapped
from wandistiller.models.latents import num_tokens


@dataclass
class Answer:
    """Velocities for a batch, and what blocks gave where that was asked for."""

    velocity: Tensor
    plain: Tensor
    """Velocities without guidance; the same where there is none."""
    features: list[Tensor] = field(default_factory=list)


def teacher_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return what a teacher computes in; one whose blocks have 8 bits computes in 16."""
    usual = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if name == "float8" else DTYPES.get(name, usual)


class Teaches(Protocol):
    """Whoever answers, wherever the weights are."""

    def answer(self, noisy: Tensor, sigma: Tensor, text: Tensor, *, scale: float = 1.0, blocks: Sequence[int] = ()) -> Answer:
        """Return velocities in float32, guided if ``scale`` is above 1, and the hidden states after some blocks."""
        ...

    def release(self) -> None:
        """Give the memory back; whoever asks again loads it again."""
        ...


class Teacher:
    """Answers from weights that this process holds."""

    def __init__(self, experts: Experts, empty_text: Tensor, *, device: torch.device, dtype: torch.dtype) -> None:
        """``device`` is where questions come from and answers go to."""
        self._experts = experts
        self._empty_text = empty_text
        self._device = device
        self._dtype = dtype

    def experts_for(self, sigma: Tensor) -> list[int]:
        """Return which expert each sample of a batch is for."""
        return [self._experts.index_at(NUM_TIMESTEPS * value) for value in sigma.tolist()]

    @torch.no_grad()
    def answer(
        self,
        noisy: Tensor,
        sigma: Tensor,
        text: Tensor,
        *,
        scale: float = 1.0,
        blocks: Sequence[int] = (),
        also: Collection[int] = (),
    ) -> Answer:
        """Answer; experts in ``also`` compute something too, whether or not this batch is for them."""
        # Of a batch that lies on both sides of the boundary each expert gets its own.
        experts = self.experts_for(sigma)
        if {*experts, *also} == {experts[0]}:
            return self._ask(experts[0], noisy, sigma, text, scale, blocks)
        parts, answers = [], []
        for expert in sorted({*experts, *also}):
            rows = [i for i, each in enumerate(experts) if each == expert]
            some = rows or [0]
            answer = self._ask(expert, noisy[some], sigma[some], text[some], scale, blocks)
            if rows:
                parts.append(rows)
                answers.append(answer)
        order = torch.tensor([i for rows in parts for i in rows]).argsort()

        def together(tensors: list[Tensor]) -> Tensor:
            return torch.cat(tensors)[order.to(tensors[0].device)]

        features = [together([answer.features[k] for answer in answers]) for k in range(len(blocks))]
        velocity, plain = (together([getattr(answer, name) for answer in answers]) for name in ("velocity", "plain"))
        return Answer(velocity, plain, features)

    def release(self) -> None:
        self._experts.release()

    def _ask(self, expert: int, noisy: Tensor, sigma: Tensor, text: Tensor, scale: float, blocks: Sequence[int]) -> Answer:
        # In its own precision, as where it is asked beforehand: a student's autocast would cast its weights in each pass.
        with working_with("teacher"), torch.autocast(self._device.type, enabled=False):
            model = self._experts.expert(expert)
            with tapped(model, blocks) as features:
                plain = velocity = self._call(model, noisy, sigma, text)
                # Blocks that are spread over devices give where they compute.
                kept = [each.to(self._device) for each in features]
            if needs_unconditional(scale):
                empty = self._empty_text.to(text.device).expand(len(noisy), -1, -1)
                velocity = guide(plain, self._call(model, noisy, sigma, empty), scale)
            self._experts.keep_up()
        return Answer(velocity, plain, kept)

    def _call(self, model: nn.Module, noisy: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        velocity: Tensor = model(
            hidden_states=noisy.to(self._dtype),
            timestep=NUM_TIMESTEPS * sigma,
            encoder_hidden_states=text.to(self._dtype),
            return_dict=False,
        )[0]
        return velocity.to(self._device, torch.float32)


class TeacherInStep:
    """Answers from weights of which every rank holds a slice: all ranks must ask at the same time, and use the same experts."""

    def __init__(self, teacher: Teacher, ranks: Ranks) -> None:
        self._teacher = teacher
        self._ranks = ranks

    def release(self) -> None:
        self._teacher.release()

    def answer(self, noisy: Tensor, sigma: Tensor, text: Tensor, *, scale: float = 1.0, blocks: Sequence[int] = ()) -> Answer:
        wanted = {expert for each in self._ranks.gather(self._teacher.experts_for(sigma)) for expert in each}
        return self._teacher.answer(noisy, sigma, text, scale=scale, blocks=blocks, also=wanted)


class TeacherTogether:
    """Answers with a group of ranks, each with a share of the tokens: all ranks must ask at the same time.

    What each of them asks is computed by the whole group, one question after the other.
    """

    def __init__(self, teacher: Teacher | TeacherInStep, group: ClipGroup, config: Mapping[str, Any]) -> None:
        """The group's ranks have spread this teacher's transformers, which are of this configuration."""
        self._teacher = teacher
        self._group = group
        self._config = config

    def release(self) -> None:
        self._teacher.release()

    def answer(self, noisy: Tensor, sigma: Tensor, text: Tensor, *, scale: float = 1.0, blocks: Sequence[int] = ()) -> Answer:
        mine = [each.contiguous() for each in (noisy, sigma, text)]
        asked = self._group.gather([(each.shape, each.dtype) for each in mine])
        answers = []
        for place, question in enumerate(asked):
            is_mine = place == self._group.place
            room = mine if is_mine else [torch.empty(shape, dtype=dtype, device=noisy.device) for shape, dtype in question]
            given = [self._group.from_place(place, each) for each in room]
            found = self._teacher.answer(*given, scale=scale, blocks=blocks)
            tokens = num_tokens(self._config, given[0].shape)
            features = [self._group.whole(feature, tokens) for feature in found.features]
            if is_mine:
                answers.append(Answer(found.velocity, found.plain, features))
        return answers[0]


class ServedTeacher:
    """Rank 0 holds the teacher and answers every rank's questions; all ranks must ask at the same time."""

    def __init__(self, teacher: Teacher | None, ranks: Ranks, device: torch.device) -> None:
        """``teacher`` is None on all ranks but the first."""
        self._teacher = teacher
        self._ranks = ranks
        self._device = device

    def release(self) -> None:
        if self._teacher is not None:
            self._teacher.release()

    def alone(self) -> Teacher | None:
        """Return the teacher itself, on the rank that has it, for questions that nobody else asks."""
        return self._teacher

    def answer(self, noisy: Tensor, sigma: Tensor, text: Tensor, *, scale: float = 1.0, blocks: Sequence[int] = ()) -> Answer:
        shapes = self._ranks.gather([tuple(each.shape) for each in (noisy, sigma, text)])
        if self._teacher is None:
            for each in (noisy, sigma, text):
                dist.send(each.contiguous().float(), 0)
            return self._receive_answer(noisy, needs_unconditional(scale), len(blocks))
        mine = None
        for rank, asked in enumerate(shapes):
            question = [noisy, sigma, text] if rank == 0 else [self._receive(shape, rank) for shape in asked]
            found = self._teacher.answer(*question, scale=scale, blocks=blocks)
            if rank == 0:
                mine = found
                continue
            for velocity in (found.velocity, found.plain) if needs_unconditional(scale) else (found.velocity,):
                dist.send(velocity.contiguous(), rank)
            for feature in found.features:
                dist.send(torch.tensor(feature.shape, device=self._device), rank)
                dist.send(feature.contiguous().float(), rank)
            del found  # before the next one is made
        assert mine is not None
        return mine

    def _receive_answer(self, like: Tensor, is_guided: bool, num_features: int) -> Answer:
        velocity = self._receive(tuple(like.shape), 0)
        plain = self._receive(tuple(like.shape), 0) if is_guided else velocity
        features = []
        for _ in range(num_features):
            shape = torch.zeros(3, dtype=torch.int64, device=self._device)
            dist.recv(shape, 0)
            features.append(self._receive(tuple(shape.tolist()), 0))
        return Answer(velocity, plain, features)

    def _receive(self, shape: tuple[int, ...], rank: int) -> Tensor:
        tensor = torch.empty(shape, device=self._device)
        dist.recv(tensor, rank)
        return tensor
