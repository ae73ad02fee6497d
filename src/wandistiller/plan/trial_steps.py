"""Steps of a trial: those of the jobs themselves, on random data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wandistiller.data.loader import Batch
from wandistiller.distributed.ranks import Ranks
from wandistiller.flow.guidance import guide
from wandistiller.memory.encoder_phases import Decoding, Encoding, TextEncoding
from wandistiller.memory.subjects import choose_placement
from wandistiller.memory.uses import Use
from wandistiller.memory.works import Passes, Training
from wandistiller.models.features import matched_blocks, tapped
from wandistiller.models.latents import denormalise
from wandistiller.models.stored import VAE, build_empty
from wandistiller.plan.trial_models import Ends, attached, build_placed, filled
from wandistiller.train.ema import MovingAverage
from wandistiller.train.graphs import GraphedCalls
from wandistiller.train.host_optimisation import HostOptimisation
from wandistiller.train.method import Role
from wandistiller.train.methods.distill import Distillation, MatchedBlocks, Objectives
from wandistiller.train.methods.finetune import FlowMatching, PixelLoss
from wandistiller.train.optimisation import Optimisation, OptimiserOptions, Optimises, autocast
from wandistiller.train.teacher import Answer
from wandistiller.train.vae_prediction import VaeStep

WARM_UPS = 2
"""Steps before the first that counts."""
Work = Training | Passes | Decoding | Encoding | TextEncoding | VaeStep


def training(work: Training, device: torch.device, ends: Ends) -> Callable[[int], None]:
    """Return a step of a fine-tuning or a distillation."""
    student = work.student
    precision = student.precision
    placed, model = build_placed(student, work.placing, device, ends)
    role = Role(student.name, model, is_trained=True)
    if work.is_recorded:
        role.call = GraphedCalls(model, precision, device)
    method = method_of(work, role, device, ends)
    average = MovingAverage(model, role.trained_parameters, 0.999) if work.averages else None
    clip = 1.0 if work.clips else None
    options = OptimiserOptions(name=work.optimiser.name, rounding=work.optimiser.rounding, clip_norm=clip)
    optimisation: Optimises
    if placed.stream is not None and placed.stream.gradients is not None:
        on_host = HostOptimisation(role.trained_parameters, placed.stream, options, precision, device)
        ends.callback(on_host.close)
        if average is not None:
            on_host.follow(average)
        optimisation = on_host
    else:
        optimisation = Optimisation(role.trained_parameters, options, precision, device, keeps_gradients=work.is_recorded)
    ends.optimisations.append(optimisation)
    names = ("",) * student.batch_size
    batches = [Batch(tensors_of(student, device), names, 0, 0) for _ in range(work.accumulation)]

    def step(number: int) -> None:
        for batch in batches:
            with autocast(precision, device):
                loss = method.losses(batch).total
            optimisation.backward(loss, is_last=batch is batches[-1])
        optimisation.step(number)
        if average is not None:
            average.update(number)

    return step


def method_of(work: Training, role: Role, device: torch.device, ends: Ends) -> FlowMatching | Distillation:
    """Return the run's own method: with a teacher it is asked as often as a step does, and its blocks are followed."""
    student, teacher = work.student, work.teacher
    if teacher is None:
        return FlowMatching(role, dtype=student.dtype, pixels=_pixel_loss(work, device))
    guidance = float(work.teacher_passes == 2)
    objectives = Objectives(output=1.0 - guidance, guidance=guidance, feature=float(work.matches_features))
    channels = None if student.width == teacher.width else torch.arange(student.width, device=device)
    blocks = matched_blocks(student.num_blocks, teacher.num_blocks)
    return Distillation(
        role,
        OneTeacher(
            teacher,
            build_placed(teacher, work.teacher_placing, device, ends)[1],
            student.latent_shape[0],
            most_answers=WARM_UPS * work.accumulation if work.teacher_rests else None,
        ),
        objectives,
        guidance_scale=2.0,
        dtype=student.dtype,
        matched=MatchedBlocks(range(student.num_blocks), blocks, channels),
    )


class OneTeacher:
    """Answers as a run's teacher does; of its channels a student that has others is told the first, or some twice.

    After ``most_answers`` it says the last one again, as if that had been kept.
    """

    def __init__(self, use: Use, model: nn.Module, channels: int, *, most_answers: int | None = None) -> None:
        self._use = use
        self._model = model
        self._channels = channels
        self._most_answers = most_answers
        self._num_answers = 0
        self._last: Answer | None = None

    def release(self) -> None:
        """It stays for as long as the trial does."""

    @torch.no_grad()
    def answer(self, noisy: Tensor, sigma: Tensor, text: Tensor, *, scale: float = 1.0, blocks: Sequence[int] = ()) -> Answer:
        if self._last is not None and self._num_answers == self._most_answers:
            return self._last
        own, count = self._use.latent_shape[0], self._use.batch_size
        asked = {"latents": _of_size(_with_channels(noisy, own), count), "sigma": _of_size(sigma, count)}
        asked["text"] = _of_size(text, count)
        with torch.autocast(noisy.device.type, enabled=False):
            with tapped(self._model, blocks) as features:
                plain = velocity = _call(self._model, self._use, asked)
                kept = [each.to(noisy.device) for each in features]
            if scale != 1.0:
                velocity = guide(plain, _call(self._model, self._use, asked), scale)
        velocity, plain = (_with_channels(each, self._channels) for each in (velocity, plain))
        answer = Answer(_of_size(velocity, len(noisy)), _of_size(plain, len(noisy)), kept)
        if self._most_answers is not None:
            self._num_answers, self._last = self._num_answers + 1, answer
        return answer


def _with_channels(tensor: Tensor, count: int) -> Tensor:
    return tensor if tensor.shape[1] == count else tensor.repeat(1, -(-count // tensor.shape[1]), 1, 1, 1)[:, :count]


def _of_size(batch: Tensor, count: int) -> Tensor:
    """Return the first samples, or some of them again: a teacher that is asked beforehand has batches of its own."""
    return batch if len(batch) == count else batch[torch.arange(count, device=batch.device) % len(batch)]


def _pixel_loss(work: Training, device: torch.device) -> PixelLoss | None:
    pixels = work.student.pixels
    if pixels is None:
        return None
    vae: Any = filled(pixels.build(), device)
    return PixelLoss(lambda latents: vae.decode(denormalise(latents, pixels.config), return_dict=False)[0], 0.1)


def _passes(work: Passes, device: torch.device, ends: Ends) -> Callable[[int], None]:
    _, model = build_placed(work.use, work.placing, device, ends)
    held = [torch.empty(size, dtype=torch.uint8, device=device) for size in work.held]
    inputs = tensors_of(work.use, device)
    del inputs["noise"]
    inputs["text"] = inputs["text"].to(work.use.dtype)  # as an encoder gives it
    ends.callback(held.clear)

    def step(number: int) -> None:
        for _ in range(work.passes):
            _call(model, work.use, inputs)

    return step


def _decoding(work: Decoding, device: torch.device, ends: Ends) -> Callable[[int], None]:
    vae = filled(build_empty(VAE, work.config, dtype=work.dtype), device).requires_grad_(False)
    latents = torch.randn(1, *work.latent_shape, dtype=work.dtype, device=device)

    @torch.no_grad()
    def step(number: int) -> None:
        work.run(vae, latents)

    return step


def _encoding(work: Encoding, device: torch.device, ends: Ends) -> Callable[[int], None]:
    vae = filled(build_empty(VAE, work.config, dtype=work.dtype), device).requires_grad_(False)
    pixels = torch.rand(1, *work.pixel_shape, dtype=work.dtype, device=device) * 2 - 1

    @torch.no_grad()
    def step(number: int) -> None:
        work.run(vae, pixels)

    return step


def _text(work: TextEncoding, device: torch.device, ends: Ends) -> Callable[[int], None]:
    subject = replace(work, encoder=copy.deepcopy(work.encoder)).subject
    placement = choose_placement(work.placing, resident=work.resident)
    attached(placement, subject, device, ends)

    @torch.no_grad()
    def step(number: int) -> None:
        work.run(subject.model, device)

    return step


def vae_training(work: VaeStep, device: torch.device, ends: Ends) -> Callable[[int], None]:
    """Return a step of a VAE and its critic."""
    models = {name: filled(model, device) for name, model in work.build().items()}
    method = work.method(models, repeats=work.config.training_steps)
    optimisations = {
        name: Optimisation(role.trained_parameters, OptimiserOptions(), work.precision, device)
        for name, role in method.roles.items()
    }
    ends.optimisations += optimisations.values()
    average = None
    if work.config.use_ema:
        average = MovingAverage(models["vae"], method.roles["vae"].trained_parameters, 0.999)
    count = work.config.batch_size
    batches = [
        replace(work.batch(torch.rand(count, 3, *work.shape, device=device) * 2 - 1, torch.arange(count)), position=position)
        for position in range(work.config.gradient_accumulation)
    ]

    def step(number: int) -> None:
        for turn in method.turns:
            for batch in batches:
                with autocast(work.precision, device):
                    loss = turn.losses(batch).total
                optimisations[turn.role].backward(loss, is_last=batch is batches[-1])
            optimisations[turn.role].step(number)
        method.finish_step(Ranks())
        if average is not None:
            average.update(number)

    return step


@torch.no_grad()
def _call(model: nn.Module, use: Use, inputs: dict[str, Tensor]) -> Tensor:
    return use.call(model, inputs["latents"], inputs["sigma"], inputs["text"])


def tensors_of(use: Use, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (use.batch_size, *use.latent_shape)
    latents, noise = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    text = torch.randn(use.batch_size, use.text_tokens, use.config["text_dim"], generator=generator).to(device)
    return {"latents": latents, "noise": noise, "text": text, "sigma": torch.full((use.batch_size,), 0.5, device=device)}


STEPS: dict[type, Callable[[Any, torch.device, Ends], Callable[[int], None]]] = {
    Training: training,
    Passes: _passes,
    Decoding: _decoding,
    Encoding: _encoding,
    TextEncoding: _text,
    VaeStep: vae_training,
}
