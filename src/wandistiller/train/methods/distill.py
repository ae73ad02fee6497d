"""Distillation: the student learns to say what the teacher says, where sampling will ask it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wandistiller.config.distill import DistillConfig
from wandistiller.data.loader import Batch
from wandistiller.distributed.ranks import Ranks
from wandistiller.flow.path import (
    NUM_TIMESTEPS,
    data_from_velocity,
    interpolate,
    noise_from_velocity,
    velocity_target,
)
from wandistiller.flow.sigma import SigmaDistribution
from wandistiller.models.channel_adapter import ChannelAdapter
from wandistiller.models.features import feature_error, tapped
from wandistiller.models.text_padding import TEXT_TOKENS, cut_text
from wandistiller.train.method import Losses, Role, Turn
from wandistiller.train.teacher import Teaches


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """What counts how much."""

    output: float = 1.0
    """The teacher's velocity for the caption."""
    guidance: float = 0.0
    """The teacher's guided velocity, so that the student needs no second pass."""
    feature: float = 0.0
    """What matched blocks give, relative to how much that is."""
    data: float = 0.0
    """Flow matching on real latents."""

    @classmethod
    def of(cls, config: DistillConfig) -> Objectives:
        """Return what a configuration asks for."""
        return cls(
            output=config.output_weight,
            guidance=config.guidance_weight,
            feature=config.feature_weight,
            data=config.data_weight,
        )

    @property
    def needs_teacher(self) -> bool:
        return bool(self.output or self.guidance or self.feature)


@dataclass(frozen=True)
class MatchedBlocks:
    """Which block of the teacher each block of the student follows, and which of its channels the student has."""

    student: Sequence[int]
    teacher: Sequence[int]
    channels: Tensor | None = None
    """None for all."""


@dataclass(frozen=True)
class Stretches:
    """Turns of a teacher's experts: each is asked about its own range of sigma for some steps, then the next.

    A batch drawn from all sigmas would need both of them in memory, or both loaded for every step.
    """

    ranges: Sequence[SigmaDistribution]
    num_steps: int

    def sigma(self, step: int, places: Tensor) -> Tensor:
        """Return sigmas for places from 0 to 1 in the range of the expert whose turn it is."""
        turn = self.ranges[step // self.num_steps % len(self.ranges)]
        return torch.tensor([turn.quantile(place) for place in places.tolist()], dtype=torch.float32, device=places.device)


class Distillation:
    """Trains ``student``. Batches have ``sigma``, ``text`` and ``noisy``, or ``latents`` and ``noise`` to make it from.

    Where a batch brings its ``target`` along the teacher is not asked: it has been, once, and what it said was stored.
    """

    def __init__(
        self,
        student: Role,
        teacher: Teaches | None,
        objectives: Objectives,
        *,
        guidance_scale: float,
        dtype: torch.dtype,
        matched: MatchedBlocks | None = None,
        adapter: ChannelAdapter | None = None,
        stretches: Stretches | None = None,
        max_text_tokens: int = TEXT_TOKENS,
    ) -> None:
        """``adapter`` is for a student whose latents have other channels than the teacher's, in which batches are.

        ``max_text_tokens`` is how much of a caption the student is given.
        """
        self.student = student
        self.roles: Mapping[str, Role] = {student.name: student}
        self.turns: Sequence[Turn] = (Turn(student.name, self.losses),)
        self._teacher = teacher
        self._objectives = objectives
        self._scale = guidance_scale
        self._dtype = dtype
        self._matched = matched if objectives.feature else None
        self._adapter = adapter
        self._stretches = stretches
        self._max_text_tokens = max_text_tokens

    def finish_step(self, ranks: Ranks) -> None:
        """Nothing is left to do."""

    def losses(self, batch: Batch) -> Losses:
        """Return the weighted sum of the objectives, and each of them."""
        tensors, weights = batch.tensors, self._objectives
        sigma, text = tensors["sigma"], tensors["text"]
        if self._stretches is not None and "place" in tensors:
            sigma = self._stretches.sigma(batch.step, tensors["place"]).to(sigma.device)
        noisy = tensors["noisy"] if "noisy" in tensors else interpolate(tensors["latents"], tensors["noise"], sigma)
        targets: dict[str, Tensor] = {}
        features: list[Tensor] = []
        if "target" in tensors:
            targets["guidance" if weights.guidance else "output"] = tensors["target"]
        elif weights.needs_teacher:
            assert self._teacher is not None
            blocks = self._matched.teacher if self._matched is not None else ()
            scale = self._scale if weights.guidance else 1.0
            answer = self._teacher.answer(noisy, sigma, text, scale=scale, blocks=blocks)
            features = answer.features
            if weights.output or blocks:
                targets["output"] = answer.plain
            if weights.guidance:
                targets["guidance"] = answer.velocity
        if weights.data:
            targets["data"] = velocity_target(tensors["latents"], tensors["noise"])
        if self._adapter is not None:
            noisy, targets = self._see_through(noisy, sigma, targets)
        with tapped(self.student.model, self._matched.student if self._matched is not None else ()) as found:
            velocity = self._call(noisy, sigma, text)
        metrics = {name: (velocity - target).square().mean() for name, target in targets.items() if getattr(weights, name)}
        if self._matched is not None:
            metrics["feature"] = _feature_loss(found, features, self._matched)
        total = torch.stack([getattr(weights, name) * value for name, value in metrics.items()]).sum()
        named = {f"{name}_loss": value.detach() for name, value in metrics.items()}
        reference = next(iter(targets.values()))
        return Losses(total, {**named, **_health(noisy, sigma, velocity.detach(), reference)})

    @torch.no_grad()
    def held_out_errors(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the error of the velocity against the data's own, of each sample."""
        sigma, latents, noise = tensors["sigma"], tensors["latents"], tensors["noise"]
        if self._adapter is not None:
            latents, noise = self._adapter.down(latents), self._adapter.rotate(noise)
        velocity = self._call(interpolate(latents, noise, sigma), sigma, tensors["text"])
        return (velocity - velocity_target(latents, noise)).square().flatten(1).mean(1)

    def _see_through(self, noisy: Tensor, sigma: Tensor, targets: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the question and the answers in the student's channels.

        A velocity says which data and which noise a noisy point is made of; these go through the adapter each in its own way.
        """
        assert self._adapter is not None
        found: dict[str, Tensor] = {}
        mine = noisy
        for number, (name, velocity) in enumerate(targets.items()):
            data = self._adapter.down(data_from_velocity(noisy, velocity, sigma))
            noise = self._adapter.rotate(noise_from_velocity(noisy, velocity, sigma))
            found[name] = velocity_target(data, noise)
            if number == 0:
                mine = interpolate(data, noise, sigma)
        return mine, found

    def _call(self, noisy: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        velocity: Tensor = self.student(
            hidden_states=noisy.to(self._dtype),
            timestep=NUM_TIMESTEPS * sigma,
            encoder_hidden_states=cut_text(text, self._max_text_tokens).to(self._dtype),
            return_dict=False,
        )[0]
        return velocity.float()


def _feature_loss(found: list[Tensor], wanted: list[Tensor], matched: MatchedBlocks) -> Tensor:
    """Return the mean over blocks of how far they are from those that they follow.

    Both lists are used up: what has been compared is not needed any more, and large.
    """
    assert len(found) == len(wanted)
    errors = []
    while found:
        errors.append(feature_error(found.pop(), wanted.pop(), matched.channels))
    return torch.stack(errors).mean()


@torch.no_grad()
def _health(noisy: Tensor, sigma: Tensor, velocity: Tensor, reference: Tensor) -> dict[str, Tensor]:
    """Compare the data that both predict: their spread, values far out, and what changes from frame to frame.

    A student that collapses paints the average: its spread falls far below the teacher's while the loss looks fine.
    """
    mine, theirs = (data_from_velocity(noisy, each, sigma) for each in (velocity, reference))
    found = {
        "health/spread": mine.std() / theirs.std().clamp_min(1e-6),
        "health/saturation": (mine.abs() > 4).float().mean() - (theirs.abs() > 4).float().mean(),
    }
    if mine.shape[2] > 1:
        motion, expected = (each.diff(dim=2).square().mean() for each in (mine, theirs))
        found["health/motion"] = (motion / expected.clamp_min(1e-6)).sqrt()
    return found
