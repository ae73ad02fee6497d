"""A few real steps of what was predicted, with random weights: memory and time as they are."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wandistiller.data.loader import Batch
from wandistiller.distributed.ranks import Ranks
from wandistiller.errors import UsageError
from wandistiller.flow.guidance import guide
from wandistiller.memory.activations import prepare_blocks
from wandistiller.memory.device_map import on_disk
from wandistiller.memory.encoder_phases import Decoding, Encoding, TextEncoding
from wandistiller.memory.host import page_locked_bytes
from wandistiller.memory.layout import named_tensors
from wandistiller.memory.placement import FromDisk, Placed, Placement, Subject, find_placement
from wandistiller.memory.rates import synchronise
from wandistiller.memory.raw_reads import forget_files, forgetting
from wandistiller.memory.spread import Custom
from wandistiller.memory.stage import Placing
from wandistiller.memory.subjects import choose_placement
from wandistiller.memory.uses import Use
from wandistiller.memory.works import Passes, Training
from wandistiller.models.devices import free_memory
from wandistiller.models.features import matched_blocks, tapped
from wandistiller.models.latents import denormalise
from wandistiller.models.random_weights import RandomWeights, write_weights
from wandistiller.models.stored import VAE, build_empty
from wandistiller.models.weight_files import Entry, open_weights
from wandistiller.train.ema import MovingAverage
from wandistiller.train.graphs import GraphedCalls
from wandistiller.train.host_optimisation import HostOptimisation
from wandistiller.train.method import Role
from wandistiller.train.methods.distill import Distillation, MatchedBlocks, Objectives
from wandistiller.train.methods.finetune import FlowMatching, PixelLoss
from wandistiller.train.optimisation import Optimisation, OptimiserOptions, Optimises, autocast
from wandistiller.train.teacher import Answer
from wandistiller.train.vae_prediction import VaeStep
from wandistiller.units import Bytes

_WARM_UPS, _MOST_WARM_UPS = 2, 24
"""Steps before the first that counts: the most where those of float16 are left out until its losses are scaled less."""
_LEAST_SECONDS = 1.0
"""How long a card is measured at least."""


@dataclass(frozen=True)
class Measured:
    """What steps took."""

    allocated: Bytes
    reserved: Bytes
    page_locked: Bytes
    seconds: float
    """Of a step, the median."""


Work = Training | Passes | Decoding | Encoding | TextEncoding | VaeStep


class Ends(ExitStack):
    """What is undone when a trial is over."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[Path] = []
        """Those that a step is to find on the disk, not in the system's cache."""
        self.optimisations: list[Optimises] = []
        self.callback(self.optimisations.clear)

    @property
    def loss_scales(self) -> list[float]:
        """What losses are multiplied by; less than before where a step was left out."""
        return [each.loss_scale for each in self.optimisations]


def try_out(
    work: Work, device: torch.device, *, num_steps: int = 3, between: Callable[[Sequence[Path]], None] | None = None
) -> Measured:
    """Take a few steps on a device, and more where they are so short that a busy host makes some much longer.

    ``between`` is called after each step that counts, with the files that it has read: a look at a machine that others use.
    Of files the next step's first blocks are read meanwhile, so a step that does not count uses them up.
    """
    free_memory(device)
    with Ends() as ends:
        step = _STEPS[type(work)](work, device, ends)
        ends.enter_context(forgetting(ends.files))
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        numbers = itertools.count(_warm_up(step, ends))
        times = list[float]()
        while len(times) < num_steps or (sum(times) < _LEAST_SECONDS and device.type == "cuda"):
            forget_files(ends.files)  # of small models, which are read again sooner than is looked for
            synchronise(device)
            start = time.perf_counter()
            step(next(numbers))
            synchronise(device)
            times.append(time.perf_counter() - start)
            if between is not None:
                between(ends.files)
            if between is not None and ends.files:
                step(next(numbers))
        is_cuda = device.type == "cuda"
        measured = Measured(
            Bytes(torch.cuda.max_memory_allocated(device) if is_cuda else 0),
            Bytes(torch.cuda.max_memory_reserved(device) if is_cuda else 0),
            page_locked_bytes(),
            statistics.median(times),
        )
        del step
    gc.collect()
    free_memory(device)
    return measured


def _warm_up(step: Callable[[int], None], ends: Ends) -> int:
    """Take steps until one is as all others will be; return how many that were."""
    for number in range(_MOST_WARM_UPS):
        before = ends.loss_scales
        step(number)
        is_taken = all(scale >= old for scale, old in zip(ends.loss_scales, before, strict=True))
        if number + 1 >= _WARM_UPS and is_taken:
            return number + 1
    raise UsageError(
        f"None of {_MOST_WARM_UPS} steps in float16 could be taken.",
        why="gradients of random weights are not finite there, however little the loss is scaled.",
        fix="Try it in bfloat16, which takes the same memory.",
    )


def _training(work: Training, device: torch.device, ends: Ends) -> Callable[[int], None]:
    student = work.student
    precision = student.precision
    placed, model = _place(student, work.placing, device, ends)
    role = Role(student.name, model, is_trained=True)
    if work.is_recorded:
        role.call = GraphedCalls(model, precision, device)
    method = _method(work, role, device, ends)
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
    batches = [Batch(_tensors(student, device), names, 0, 0) for _ in range(work.accumulation)]

    def step(number: int) -> None:
        for batch in batches:
            with autocast(precision, device):
                loss = method.losses(batch).total
            optimisation.backward(loss, is_last=batch is batches[-1])
        optimisation.step(number)
        if average is not None:
            average.update(number)

    return step


def _method(work: Training, role: Role, device: torch.device, ends: Ends) -> FlowMatching | Distillation:
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
        _OneTeacher(
            teacher,
            _place(teacher, work.teacher_placing, device, ends)[1],
            student.latent_shape[0],
            most_answers=_WARM_UPS * work.accumulation if work.teacher_rests else None,
        ),
        objectives,
        guidance_scale=2.0,
        dtype=student.dtype,
        matched=MatchedBlocks(range(student.num_blocks), blocks, channels),
    )


class _OneTeacher:
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
        with tapped(self._model, blocks) as features:
            plain = velocity = _call(self._model, self._use, asked)
            kept = list(features)
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
    vae: Any = _filled(pixels.build(), device)
    return PixelLoss(lambda latents: vae.decode(denormalise(latents, pixels.config), return_dict=False)[0], 0.1)


def _passes(work: Passes, device: torch.device, ends: Ends) -> Callable[[int], None]:
    _, model = _place(work.use, work.placing, device, ends)
    held = [torch.empty(size, dtype=torch.uint8, device=device) for size in work.held]
    inputs = _tensors(work.use, device)
    ends.callback(held.clear)

    def step(number: int) -> None:
        for _ in range(work.passes):
            _call(model, work.use, inputs)

    return step


def _decoding(work: Decoding, device: torch.device, ends: Ends) -> Callable[[int], None]:
    vae = _filled(build_empty(VAE, work.config, dtype=work.dtype), device).requires_grad_(False)
    latents = torch.randn(1, *work.latent_shape, dtype=work.dtype, device=device)

    @torch.no_grad()
    def step(number: int) -> None:
        work.run(vae, latents)

    return step


def _encoding(work: Encoding, device: torch.device, ends: Ends) -> Callable[[int], None]:
    vae = _filled(build_empty(VAE, work.config, dtype=work.dtype), device).requires_grad_(False)
    pixels = torch.rand(1, *work.pixel_shape, dtype=work.dtype, device=device) * 2 - 1

    @torch.no_grad()
    def step(number: int) -> None:
        work.run(vae, pixels)

    return step


def _text(work: TextEncoding, device: torch.device, ends: Ends) -> Callable[[int], None]:
    subject = replace(work, encoder=copy.deepcopy(work.encoder)).subject
    placement = choose_placement(work.placing, resident=work.resident)
    _attached(placement, subject, device, ends)

    @torch.no_grad()
    def step(number: int) -> None:
        work.run(subject.model, device)

    return step


def _vae_training(work: VaeStep, device: torch.device, ends: Ends) -> Callable[[int], None]:
    models = {name: _filled(model, device) for name, model in work.build().items()}
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


def _filled(model: nn.Module, device: torch.device) -> nn.Module:
    """Give a model on the meta device random weights."""
    find_placement("gpu").attach(Subject(model=model, blocks=[], read=RandomWeights(model)), device)
    return model


@torch.no_grad()
def _call(model: nn.Module, use: Use, inputs: dict[str, Tensor]) -> Tensor:
    return use.call(model, inputs["latents"], inputs["sigma"], inputs["text"])


def _place(use: Use, placing: Placing, device: torch.device, ends: Ends) -> tuple[Placed, nn.Module]:
    """Build a model with random weights where it belongs, in the order in which a run does it."""
    model = use.build(use.num_blocks)
    blocks = list(model.get_submodule("blocks").children())
    prepare_blocks(blocks, device, ends, compiled=use.is_compiled, policy=use.policy, to_host=use.to_host)
    trains = use.trains == "everything"
    placement = choose_placement(
        placing.name,
        resident=placing.resident,
        eight_bit=placing.eight_bit,
        train=trains,
        device_map=placing.device_map,
        max_memory=placing.max_memory,
    )
    return _attached(placement, Subject(model=model, blocks=blocks), device, ends, use.stored_dtype), model


def _attached(
    placement: Placement, subject: Subject, device: torch.device, ends: Ends, stored_dtype: torch.dtype | None = None
) -> Placed:
    """Put a model on the meta device where its placement has it, with random weights."""
    weights = RandomWeights(subject.model)
    subject = replace(subject, read=weights)
    read = _names_to_read(placement, subject.model)
    placed = placement.attach(_on_disk(subject, read, stored_dtype, ends) if read else subject, device)
    if placed.stream is not None:
        ends.callback(placed.stream.close)
    return placed


def _names_to_read(placement: Placement, model: nn.Module) -> list[str]:
    """Return what a step reads from files: all that is frozen, or what a map has there."""
    if isinstance(placement, Custom):
        return on_disk(model, placement.device_map(Subject(model=model, blocks=[])))
    is_streamed = isinstance(placement, FromDisk)
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad] if is_streamed else []


def _on_disk(subject: Subject, names: Sequence[str], dtype: torch.dtype | None, ends: Ends) -> Subject:
    """Write tensors of a model to files that are gone with the trial, in the ``dtype`` that the user's have, if another."""
    folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="wandistiller-")))
    weights, used = RandomWeights(subject.model, dtype), dict(named_tensors(subject.model))
    needed, free = Bytes(sum(map(weights.num_bytes, names))), Bytes(shutil.disk_usage(folder).free)
    if needed > free:
        raise UsageError(
            f"A trial of weights on disk writes {needed} to {folder.parent}, where {free} are free.",
            fix="Let TMPDIR name a folder on the disk that is to be tried, with room.",
        )
    ends.files += write_weights(weights, names, folder)
    os.sync()
    stored = open_weights(folder)
    dtypes = {name: used[name].dtype for name in names}

    def locate(name: str) -> Entry | None:
        return stored.entries[name] if name in dtypes and stored.entries[name].dtype == dtypes[name] else None

    def read(name: str) -> Tensor:
        assert subject.read is not None
        return stored.read(name).to(dtypes[name]) if name in dtypes else subject.read(name)

    return replace(subject, locate=locate, read=read)


def _tensors(use: Use, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (use.batch_size, *use.latent_shape)
    latents, noise = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    text = torch.randn(use.batch_size, use.text_tokens, use.config["text_dim"], generator=generator).to(device)
    return {"latents": latents, "noise": noise, "text": text, "sigma": torch.full((use.batch_size,), 0.5, device=device)}


_STEPS: dict[type, Callable[[Any, torch.device, Ends], Callable[[int], None]]] = {
    Training: _training,
    Passes: _passes,
    Decoding: _decoding,
    Encoding: _encoding,
    TextEncoding: _text,
    VaeStep: _vae_training,
}
