"""A few real steps of what was predicted, with random weights: memory and time as they are."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wandistiller.data.loader import Batch
from wandistiller.distributed.ranks import Ranks
from wandistiller.memory.activations import apply_policy
from wandistiller.memory.encoder_phases import Decoding
from wandistiller.memory.host import page_locked_bytes
from wandistiller.memory.placement import Placed, Subject
from wandistiller.memory.rates import synchronise
from wandistiller.memory.stage import Placing
from wandistiller.memory.streaming import bind
from wandistiller.memory.subjects import choose_placement
from wandistiller.memory.uses import Use
from wandistiller.memory.works import Passes, Training
from wandistiller.models.devices import free_memory
from wandistiller.models.random_weights import RandomWeights
from wandistiller.models.stored import VAE, build_empty
from wandistiller.train.ema import MovingAverage
from wandistiller.train.host_optimisation import HostOptimisation
from wandistiller.train.method import Role
from wandistiller.train.methods.finetune import FlowMatching
from wandistiller.train.optimisation import Optimisation, OptimiserOptions, Optimises, autocast
from wandistiller.train.vae_prediction import VaeStep
from wandistiller.units import Bytes

_WARM_UPS = 2


@dataclass(frozen=True)
class Measured:
    """What steps took."""

    allocated: Bytes
    reserved: Bytes
    page_locked: Bytes
    seconds: float
    """Of a step, the median."""


Work = Training | Passes | Decoding | VaeStep


def try_out(work: Work, device: torch.device, *, num_steps: int = 3) -> Measured:
    """Take a few steps on a device."""
    free_memory(device)
    with ExitStack() as ends:
        step = _STEPS[type(work)](work, device, ends)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        for number in range(_WARM_UPS):
            step(number)
        times = []
        for number in range(_WARM_UPS, _WARM_UPS + num_steps):
            synchronise(device)
            start = time.perf_counter()
            step(number)
            synchronise(device)
            times.append(time.perf_counter() - start)
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


def _training(work: Training, device: torch.device, ends: ExitStack) -> Callable[[int], None]:
    student = work.student
    precision = student.precision
    placed, model = _place(student, work.placing, device, ends)
    teacher = _place(work.teacher, work.teacher_placing, device, ends)[1] if work.teacher is not None else None
    role = Role(student.name, model, is_trained=True)
    average = MovingAverage(model, role.trained_parameters, 0.999) if work.averages else None
    options = OptimiserOptions(name=work.optimiser.name, rounding=work.optimiser.rounding)
    optimisation: Optimises
    if placed.stream is not None and placed.stream.gradients is not None:
        on_host = HostOptimisation(role.trained_parameters, placed.stream, options, precision, device)
        ends.callback(on_host.close)
        optimisation = on_host
    else:
        optimisation = Optimisation(role.trained_parameters, options, precision, device)
    method = FlowMatching(role, dtype=student.dtype)
    batch = Batch(_tensors(student, device), ("",) * student.batch_size, 0, 0)
    asked = _tensors(work.teacher, device) if work.teacher is not None else {}

    def step(number: int) -> None:
        for micro in range(work.accumulation):
            if teacher is not None and work.teacher is not None:
                for _ in range(work.teacher_passes):
                    _call(teacher, work.teacher, asked)
            with autocast(precision, device):
                loss = method.losses(batch).total
            optimisation.backward(loss, is_last=micro == work.accumulation - 1)
        optimisation.step(number)
        if average is not None:
            average.update(number)

    return step


def _passes(work: Passes, device: torch.device, ends: ExitStack) -> Callable[[int], None]:
    _, model = _place(work.use, work.placing, device, ends)
    held = [torch.empty(size, dtype=torch.uint8, device=device) for size in work.held]
    inputs = _tensors(work.use, device)
    ends.callback(held.clear)

    def step(number: int) -> None:
        for _ in range(work.passes):
            _call(model, work.use, inputs)

    return step


def _decoding(work: Decoding, device: torch.device, ends: ExitStack) -> Callable[[int], None]:
    vae = _filled(build_empty(VAE, work.config, dtype=work.dtype), device).requires_grad_(False)
    latents = torch.randn(1, *work.latent_shape, dtype=work.dtype, device=device)

    @torch.no_grad()
    def step(number: int) -> None:
        work.run(vae, latents)

    return step


def _vae_training(work: VaeStep, device: torch.device, ends: ExitStack) -> Callable[[int], None]:
    models = {name: _filled(model, device) for name, model in work.build().items()}
    method = work.method(models)
    optimisations = {
        name: Optimisation(role.trained_parameters, OptimiserOptions(), work.precision, device)
        for name, role in method.roles.items()
    }
    average = None
    if work.config.use_ema:
        average = MovingAverage(models["vae"], method.roles["vae"].trained_parameters, 0.999)
    count = work.config.batch_size
    batch = work.batch(torch.rand(count, 3, *work.shape, device=device) * 2 - 1, torch.arange(count))

    def step(number: int) -> None:
        for turn in method.turns:
            with autocast(work.precision, device):
                loss = turn.losses(batch).total
            optimisations[turn.role].backward(loss)
            optimisations[turn.role].step(number)
        method.finish_step(Ranks())
        if average is not None:
            average.update(number)

    return step


def _filled(model: nn.Module, device: torch.device) -> nn.Module:
    """Give a model on the meta device random weights."""
    weights = RandomWeights(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        bind(tensor, weights(name).to(device))
    return model


@torch.no_grad()
def _call(model: nn.Module, use: Use, inputs: dict[str, Tensor]) -> Tensor:
    velocity: Tensor = model(
        hidden_states=inputs["latents"].to(use.dtype),
        timestep=1000 * inputs["sigma"],
        encoder_hidden_states=inputs["text"].to(use.dtype),
        return_dict=False,
    )[0]
    return velocity.float()


def _place(use: Use, placing: Placing, device: torch.device, ends: ExitStack) -> tuple[Placed, nn.Module]:
    """Build a model with random weights where it belongs, in the order in which a run does it."""
    model = use.build(use.num_blocks)
    blocks = list(model.get_submodule("blocks").children())
    if use.is_compiled:
        for block in blocks:
            block.forward = torch.compile(block.forward)
    if use.policy != "none" or use.to_host:
        ends.callback(apply_policy(blocks, use.policy, device, to_host=use.to_host).detach)
    weights = RandomWeights(model)
    trains = use.trains == "everything"
    placement = choose_placement(placing.name, resident=placing.resident, eight_bit=placing.eight_bit, train=trains)
    placed = placement.attach(Subject(model=model, blocks=blocks, read=weights), device)
    if placed.stream is not None:
        ends.callback(placed.stream.close)
    return placed, model


def _tensors(use: Use, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (use.batch_size, *use.latent_shape)
    latents, noise = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    text = torch.randn(use.batch_size, use.text_tokens, use.config["text_dim"], generator=generator).to(device)
    return {"latents": latents, "noise": noise, "text": text, "sigma": torch.full((use.batch_size,), 0.5, device=device)}


_STEPS: dict[type, Callable[[Any, torch.device, ExitStack], Callable[[int], None]]] = {
    Training: _training,
    Passes: _passes,
    Decoding: _decoding,
    VaeStep: _vae_training,
}
