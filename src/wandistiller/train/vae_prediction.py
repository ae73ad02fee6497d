"""What the training of a VAE will take: the method's own step on fake tensors, in one piece."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.data.loader import Batch
from wandistiller.errors import UsageError
from wandistiller.memory.durations import step_seconds
from wandistiller.memory.encoder_phases import extended
from wandistiller.memory.estimates import Estimate, Item, Phase
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.layout import named_tensors
from wandistiller.memory.optimiser_bytes import OptimiserChoice
from wandistiller.memory.stage import Stage
from wandistiller.memory.tape import BACKWARD, UPDATE, Tape
from wandistiller.memory.tracing import materialise, recording
from wandistiller.memory.vae_checkpointing import checkpoint_vae
from wandistiller.models.critic import PatchCritic
from wandistiller.models.lpips import Lpips
from wandistiller.models.shapes import Shapes
from wandistiller.models.stored import VAE, build_empty
from wandistiller.models.vae_passes import VaePass
from wandistiller.train.method import Role
from wandistiller.train.methods.vae import VaeTraining, VaeWeights
from wandistiller.train.optimisation import MixedPrecision, autocast
from wandistiller.train.prediction import foreseen_precision, planned_pixels, samples_of
from wandistiller.units import Bytes

_CPU = torch.device("cpu")
_SHORTER, _LONGER = 13, 21
"""Frames of the clips that tell of longer ones."""
_FEW, _LEAST_GROWTH = 5, 0.4
"""Frames that tell whether a clip is hopeless, and how much every four more add at least, as a share of what these take."""


def predict_train_vae(config: TrainVaeConfig, shapes: Shapes, hardware: Hardware) -> Estimate:
    """Return what ``train-vae`` takes."""
    flag = "--cuda-graphs" if config.cuda_graphs else f"--parallel {config.parallel}" if config.is_sharded else None
    if flag is not None:
        raise UsageError(
            f"There is no plan yet for a VAE that is trained with {flag}.", fix="Leave it away to plan without it."
        )
    work = vae_step(config, shapes, hardware)
    counts = {name: sum(each.numel() for each in found) for name, found in work.trained(work.build()).items()}
    average = counts["vae"] if config.use_ema else 0
    # Weights and two moments, and the average, in float32.
    states = Bytes((config.keep + 1) * 4 * (3 * sum(counts.values()) + average))  # one more while it is being written
    disk = (Item("vae", "states", "disk", states), Item("vae", "result", "disk", Bytes(4 * counts["vae"])))
    phases = (work.phase(hardware, num_steps=config.num_steps or 1000),)
    return Estimate(phases=phases, samples=samples_of(config, work.shape), disk=disk)


def vae_step(config: TrainVaeConfig, shapes: Shapes, hardware: Hardware) -> VaeStep:
    """Return a step on the largest samples that there will be."""
    shape, precision = planned_pixels(config, shapes.vae, patch=1), foreseen_precision(config, hardware)
    return VaeStep(config=config, vae=shapes.vae, shape=shape, precision=precision)


Models = dict[str, nn.Module]
_few_frames: dict[Hashable, tuple[int, int]] = {}
_tapes: dict[Hashable, Tape] = {}


@dataclass(frozen=True)
class Least:
    """What a training takes of a card at least."""

    held: int
    """Weights, the optimisers' states and the average."""
    working: int
    """What is beside them in forward and backward."""


@dataclass(frozen=True, kw_only=True)
class VaeStep:
    """A step of a VAE's training, with critic, gradient penalty and perceptual loss where they are asked for."""

    config: TrainVaeConfig
    vae: Mapping[str, Any]
    shape: tuple[int, int, int]
    """Frames, height, width."""
    precision: MixedPrecision

    def build(self) -> Models:
        """Return the models on the meta device."""
        config = self.config
        found: Models = {"vae": VaePass(build_empty(VAE, self.vae).requires_grad_(True).train())}
        with torch.device("meta"):
            if config.gan_training:
                found["critic"] = PatchCritic(base_width=config.critic_width)
            if config.use_lpips:
                found["perceptual"] = Lpips(checkpointing=config.lpips_checkpointing)
        if config.vae_gradient_checkpointing:
            checkpoint_vae(found["vae"].vae)
        return found

    def trained(self, models: Models) -> dict[str, list[nn.Parameter]]:
        """Return what optimisers change, by role."""
        return {name: list(models[name].parameters()) for name in ("vae", "critic") if name in models}

    def method(self, models: Models, *, repeats: int = 1) -> VaeTraining:
        """Return the training of these models, in which a step takes every turn so often."""
        return VaeTraining(
            Role("vae", models["vae"], is_trained=True),
            VaeWeights.of(self.config),
            critic=Role("critic", models["critic"], is_trained=True) if "critic" in models else None,
            perceptual=models.get("perceptual"),
            reduced_min_sizes=self.config.reduced_min_sizes,
            repeats=repeats,
        )

    def batch(self, pixels: Tensor, seeds: Tensor) -> Batch:
        """Return a batch of a step in which everything happens, the gradient penalty too; only its seeds are looked at."""
        config = self.config
        step = -(-config.gan_start // config.r1_interval) * config.r1_interval
        return Batch({"pixels": pixels, "seed": seeds}, ("",) * len(pixels), 0, 0, step)

    def phase(self, hardware: Hardware, *, num_steps: int = 1) -> Phase:
        """Return what it takes."""
        frames = self.shape[0]
        if frames <= _LONGER:
            return self._phase(hardware, num_steps)
        # A clip goes through the VAE a few frames at a time, and what grows with it grows evenly.
        shorter, longer = (self._with_frames(each)._phase(hardware, num_steps) for each in (_SHORTER, _LONGER))
        return replace(extended(shorter, longer, (frames - _SHORTER) / (_LONGER - _SHORTER)), work=self)

    def seconds(self, hardware: Hardware) -> float:
        """Return the time of a step."""
        frames = self.shape[0]
        if frames > _LONGER:
            shorter, longer = (self._with_frames(each).seconds(hardware) for each in (_SHORTER, _LONGER))
            return shorter + (longer - shorter) * (frames - _SHORTER) / (_LONGER - _SHORTER)
        batches = self.config.gradient_accumulation * self.config.training_steps
        return step_seconds(self._tape, {}, hardware).total * batches

    def least(self, hardware: Hardware) -> Least:
        """Return what it takes at least, from one sample of a few frames: the samples of a batch take as much each."""
        frames = min(self.shape[0], _FEW)
        one = replace(self._with_frames(frames), config=replace(self.config, batch_size=1, gradient_accumulation=1))
        held, working = one._few(hardware)
        growth = 1 + _LEAST_GROWTH * (self.shape[0] - frames) / 4
        # Gradients, and weights made short for products, are as large for any batch.
        fixed = sum((4 + 2) * each.numel() for model in self.build().values() for each in model.parameters())
        return Least(held, max(working, round(0.9 * self.config.batch_size * growth * (working - fixed))))

    def _few(self, hardware: Hardware) -> tuple[int, int]:
        """Return what is held and the most that is in use beside it; worked out once for all steps that are alike."""
        key = (repr(self), hardware.card)
        if key not in _few_frames:
            phase = self._phase(hardware, 1)
            kinds = ("libraries", "weights", "optimiser", "average")
            held = sum(item.size for item in phase.items if item.where == "device" and item.kind in kinds)
            _few_frames[key] = held, phase.peak - held
        return _few_frames[key]

    def _with_frames(self, frames: int) -> VaeStep:
        return replace(self, shape=(frames, *self.shape[1:]))

    def _phase(self, hardware: Hardware, num_steps: int) -> Phase:
        stage, models, optimiser = Stage("training", hardware), self.build(), OptimiserChoice()
        for name, model in models.items():
            stage.scene.hold(name, "weights", [tensor.nbytes for _, tensor in named_tensors(model)])
        for name, parameters in self.trained(models).items():
            stage.scene.hold(name, "optimiser", optimiser.state(parameters))
            # DDP collects gradients in buckets beside them.
            stage.scene.hold(name, "exchanged gradients", [each.nbytes for each in parameters if hardware.num_ranks > 1])
        if self.config.use_ema:
            stage.scene.hold("vae", "average", [each.nbytes for each in models["vae"].parameters()])
        # All batches of a step are brought before its first, and what the critic is to see of each is kept for its turn.
        pixels, accumulation = 4 * self.config.batch_size * 3 * math.prod(self.shape), self.config.gradient_accumulation
        stage.scene.hold("", "batch", [pixels] * accumulation)
        stage.scene.hold("vae", "pictures for the critic", [pixels] * (accumulation - 1 if self.config.gan_training else 0))
        tape = self._tape
        if accumulation > 1:
            stage.scene.hold("vae", "added gradients", [each.nbytes for each in models["vae"].parameters()])
            tape = tape.with_added_gradients()
        for _ in range(2):
            stage.scene.drop(stage.play_tape("vae", tape))
        return replace(stage.finished(self.seconds(hardware), num_steps), work=self)

    @property
    def _tape(self) -> Tape:
        """A step's, written down once for all that are alike."""
        key = repr(self)
        if key not in _tapes:
            _tapes[key] = self._record(self.build())
        return _tapes[key]

    def _record(self, models: Models) -> Tape:
        seeds = torch.arange(self.config.batch_size)
        with recording() as recorder:
            for model in models.values():
                materialise(recorder, model)
            with recorder.elsewhere():
                batch = self.batch(torch.empty(self.config.batch_size, 3, *self.shape), seeds)
            method = self.method(models)
            for turn in method.turns:
                recorder.begin((turn.role, -1))
                with autocast(self.precision, _CPU):
                    losses = turn.losses(batch)
                recorder.begin((BACKWARD + turn.role, -1))
                losses.total.backward()
                recorder.begin((UPDATE + turn.role, -1))
                method.roles[turn.role].model.zero_grad(set_to_none=True)
        return recorder.tape
