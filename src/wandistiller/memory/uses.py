"""How a transformer is used in a step, and that step on tape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wandistiller.memory.activations import apply_policy
from wandistiller.memory.compiled_blocks import stand_in_for_compiled
from wandistiller.memory.kept import HostKeeper
from wandistiller.memory.layout import lay_out, named_tensors
from wandistiller.memory.tape import NUM_BLOCKS, Tape
from wandistiller.memory.tracing import Recorder, mark_blocks, materialise, recording
from wandistiller.models.stored import TRANSFORMER, build_empty

_CPU = torch.device("cpu")
Trains = Literal["nothing", "adapters", "everything"]


@dataclass(frozen=True, kw_only=True)
class Use:
    """A transformer, what it is given, and how it is computed."""

    name: str
    """Its role."""
    config: Mapping[str, Any]
    latent_shape: tuple[int, int, int, int]
    """Channels, frames, height, width."""
    batch_size: int = 1
    text_tokens: int = 512
    dtype: torch.dtype = torch.bfloat16
    """Of the weights and of what they are given."""
    trains: Trains = "nothing"
    adapt: Callable[[nn.Module], None] = field(default=lambda model: None)
    """Adds adapters to a model on the meta device."""
    precision: str = "no"
    """no, bf16, fp16: what is computed in 16 bits."""
    policy: str = "none"
    to_host: bool = False
    is_compiled: bool = False
    is_streamed: bool = False
    """Whether blocks visit the device, so that gradients of trained ones leave it at once."""

    @cached_property
    def model(self) -> nn.Module:
        """The whole model on the meta device."""
        return self._build(self.config["num_layers"])

    @property
    def num_blocks(self) -> int:
        return int(self.config["num_layers"])

    @property
    def num_tokens(self) -> int:
        """Tokens of a sample."""
        patch = self.config["patch_size"]
        frames, height, width = (size // each for size, each in zip(self.latent_shape[1:], patch, strict=True))
        return int(frames * height * width)

    @property
    def trained(self) -> list[nn.Parameter]:
        """What an optimiser changes."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def block_bytes(self) -> list[int]:
        """What each block takes as one flat run of bytes."""
        return [lay_out(named_tensors(block)).num_bytes for block in self.model.get_submodule("blocks").children()]

    def _build(self, num_layers: int) -> nn.Module:
        model = build_empty(TRANSFORMER, {**self.config, "num_layers": num_layers}, dtype=self.dtype)
        model.requires_grad_(self.trains == "everything").train(self.trains != "nothing")
        if self.trains == "adapters":
            self.adapt(model)
        return model

    @cached_property
    def tape(self) -> Tape:
        """A step: forward, and backward where something is trained."""
        num_layers = min(self.num_blocks, NUM_BLOCKS)
        empty = self._build(num_layers)
        with recording() as recorder:
            model = materialise(recorder, empty)
            blocks = list(model.get_submodule("blocks").children())
            mark_blocks(recorder, self.name, blocks)
            if self.is_compiled:
                stand_in_for_compiled(recorder, blocks)
            policy = None
            if self.policy != "none" or self.to_host:
                keeper = HostKeeper(_CPU, allocate=recorder.allocate_host) if self.to_host else None
                policy = apply_policy(blocks, self.policy, _CPU, keeper=keeper)
            if self.is_streamed and self.trains == "everything":
                _let_gradients_leave(blocks)
            try:
                self._step(recorder, model)
            finally:
                if policy is not None:
                    policy.detach()
        return recorder.tape

    @property
    def repeats(self) -> dict[str, int]:
        """How many blocks the tape's are to stand for."""
        return {self.name: self.num_blocks} if self.num_blocks >= NUM_BLOCKS else {}

    def _step(self, recorder: Recorder, model: nn.Module) -> None:
        with recorder.elsewhere():
            latents, noise = (torch.empty(self.batch_size, *self.latent_shape) for _ in range(2))
            sigma = torch.empty(self.batch_size)
            text = torch.empty(self.batch_size, self.text_tokens, self.config["text_dim"])
        is_trained = self.trains != "nothing"
        casts = nullcontext() if self.precision == "no" else torch.autocast("cpu", dtype=_SHORT[self.precision])
        with torch.set_grad_enabled(is_trained), casts:
            velocity = self._velocity(model, latents, noise, sigma, text)
            loss = (velocity - (noise - latents)).square().flatten(1).mean(1).mean() if is_trained else None
            del velocity
        if loss is not None:
            loss.backward()

    def _velocity(self, model: nn.Module, latents: Tensor, noise: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        weight = sigma.view(-1, 1, 1, 1, 1)
        noisy = (1 - weight) * latents + weight * noise if self.trains != "nothing" else latents
        velocity: Tensor = model(noisy.to(self.dtype), 1000 * sigma, text.to(self.dtype), return_dict=False)[0]
        return velocity.float()

    def changed(self, **changes: Any) -> Use:
        """Return another use."""
        return replace(self, **changes)


_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _let_gradients_leave(blocks: list[nn.Module]) -> None:
    """Drop a block's gradients when the next block's arrive: by then they have been copied to the host."""
    leaving: list[tuple[int, Tensor]] = []

    def leave(parameter: Tensor, index: int) -> None:
        while leaving and leaving[0][0] != index:
            leaving.pop(0)
        assert parameter.grad is not None
        leaving.append((index, parameter.grad))
        parameter.grad = None

    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            parameter.register_post_accumulate_grad_hook(lambda each, index=index: leave(each, index))
