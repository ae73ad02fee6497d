"""How a transformer is used in a step, and that step on tape."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wandistiller.flow.path import NUM_TIMESTEPS, data_from_velocity, interpolate
from wandistiller.memory.activations import apply_policy
from wandistiller.memory.kept import HostKeeper
from wandistiller.memory.layout import lay_out, named_tensors, travelling
from wandistiller.memory.tape import BACKWARD, COMPARED, GIVEN, NUM_BLOCKS, Tape
from wandistiller.memory.tracing import Recorder, mark_backward, mark_blocks, materialise, recording
from wandistiller.memory.vae_checkpointing import checkpoint_vae
from wandistiller.models.devices import CAST_LAYERS
from wandistiller.models.features import feature_error, tapped
from wandistiller.models.latents import denormalise
from wandistiller.models.stored import TRANSFORMER, VAE, build_empty

_CPU = torch.device("cpu")
Trains = Literal["nothing", "adapters", "everything"]


@dataclass(frozen=True)
class Adapters:
    """LoRA adapters: their rank, and the ends of the names of the layers that get them."""

    rank: int
    targets: tuple[str, ...]

    def add_to(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Add them to a model on the meta device, in the precision of its weights."""
        from peft import LoraConfig

        with torch.device("meta"):
            model.add_adapter(LoraConfig(r=self.rank, target_modules=list(self.targets)))
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.to(dtype)


@dataclass(frozen=True)
class PixelDecoder:
    """A VAE whose decoder a loss in pixels goes through, frozen and in float32."""

    config: Mapping[str, Any]
    is_checkpointed: bool = False

    def build(self) -> nn.Module:
        """Return the VAE on the meta device."""
        vae = build_empty(VAE, self.config, dtype=torch.float32).requires_grad_(False)
        if self.is_checkpointed:
            checkpoint_vae(vae)
        return vae

    @cached_property
    def weights(self) -> list[int]:
        """Bytes of each of its tensors."""
        return [tensor.nbytes for _, tensor in named_tensors(self.build())]

    def loss(self, vae: Any, data: Tensor, wanted: Tensor, sigma: Tensor) -> Tensor:
        """Return how far apart the pixels of two latents are."""

        def decode(latents: Tensor) -> Tensor:
            pixels: Tensor = vae.decode(denormalise(latents, self.config), return_dict=False)[0]
            return pixels

        with torch.no_grad():
            target = decode(wanted)
        return ((decode(data) - target).abs() * (1 - sigma).view(-1, 1, 1, 1, 1)).mean()


@dataclass(frozen=True)
class Features:
    """What each block of a student is compared with: what a block of its teacher gave for the same tokens."""

    width: int
    dtype: torch.dtype


_tapes: dict[Hashable, Tape] = {}
_models: dict[Hashable, nn.Module] = {}


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
    image_tokens: int = 0
    """What a picture is looked at with, beside the text."""
    has_token_times: bool = False
    """Whether each token has a timestep of its own, as where a first frame is given free of noise."""
    dtype: torch.dtype = torch.bfloat16
    """Of the weights and of what they are given."""
    stored_dtype: torch.dtype | None = None
    """Of most of the weights in their file; None for the one that they are used in."""
    trains: Trains = "nothing"
    adapters: Adapters | None = None
    """What is trained beside frozen weights."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """What is computed in 16 bits."""
    comes_cast: bool = False
    """Whether weights that autocast would cast are cast already where they are used, as ranks bring slices together."""
    policy: str = "none"
    to_host: bool = False
    is_compiled: bool = False
    is_streamed: bool = False
    """Whether blocks visit the device, so that gradients of trained ones leave it at once."""
    pixels: PixelDecoder | None = None
    """What the student's answer is looked at through, where pixels count too."""
    features: Features | None = None
    """What its blocks are compared with, where they learn what blocks of a teacher give."""

    @cached_property
    def model(self) -> nn.Module:
        """The whole model on the meta device."""
        key = (self._architecture, self.num_blocks, self.dtype, self.trains, self.adapters, self.comes_cast and self.precision)
        if key not in _models:
            _models[key] = self.build(self.num_blocks)
        return _models[key]

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
    def width(self) -> int:
        """Channels of a token."""
        return int(self.config["num_attention_heads"] * self.config["attention_head_dim"])

    @property
    def trained(self) -> list[nn.Parameter]:
        """What an optimiser changes."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def block_bytes(self) -> list[int]:
        """What each block takes as one flat run of bytes."""
        trains, blocks = self.trains == "everything", list(self.model.get_submodule("blocks").children())
        return [lay_out(tensors).num_bytes for tensors in travelling(self.model, blocks, train=trains)]

    def build(self, num_layers: int) -> nn.Module:
        """Return the model on the meta device with so many blocks."""
        model = build_empty(TRANSFORMER, {**self.config, "num_layers": num_layers}, dtype=self.dtype)
        model.requires_grad_(self.trains == "everything").train(self.trains != "nothing")
        if self.adapters is not None:
            self.adapters.add_to(model, self.dtype)
        for layer in model.modules() if self.comes_cast else ():
            if isinstance(layer, CAST_LAYERS):
                layer.to(_SHORT[self.precision])
        return model

    @property
    def _architecture(self) -> Hashable:
        return tuple((name, str(value)) for name, value in sorted(self.config.items()) if name != "num_layers")

    @cached_property
    def tape(self) -> Tape:
        """A step: forward, and backward where something is trained; written down once for all uses that are alike."""
        about = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("config", "is_streamed"):
            del about[name]
        about["pixels"] = repr(self.pixels)
        key = (self._architecture, min(self.num_blocks, NUM_BLOCKS), *about.values())
        if key not in _tapes:
            _tapes[key] = self._record()
        return _tapes[key]

    def _record(self) -> Tape:
        num_layers = min(self.num_blocks, NUM_BLOCKS)
        empty = self.build(num_layers)
        with recording() as recorder:
            model = materialise(recorder, empty)
            blocks = list(model.get_submodule("blocks").children())
            mark_blocks(recorder, self.name, blocks)
            if self.is_compiled:
                # Only here: it takes much of the compiler along.
                from wandistiller.memory.compiled_blocks import stand_in_for_compiled

                stand_in_for_compiled(recorder, blocks)
            policy = None
            if self.policy != "none" or self.to_host:
                keeper = HostKeeper(_CPU, allocate=recorder.allocate_host) if self.to_host else None
                policy = apply_policy(blocks, self.policy, _CPU, keeper=keeper)
            vae = materialise(recorder, self.pixels.build()) if self.pixels is not None else None
            try:
                self._step(recorder, model, vae)
                recorder.tape.gradients = recorder.keys(each.grad for block in blocks for each in block.parameters())
            finally:
                if policy is not None:
                    policy.detach()
        return recorder.tape

    @cached_property
    def placed_tape(self) -> Tape:
        """The step with the weights where they live."""
        leaves = self.is_streamed and self.trains == "everything"
        return self.tape.with_leaving_gradients(self.name) if leaves else self.tape

    @property
    def repeats(self) -> dict[str, int]:
        """How many blocks the tape's are to stand for."""
        return {self.name: self.num_blocks} if self.num_blocks >= NUM_BLOCKS else {}

    def _step(self, recorder: Recorder, model: nn.Module, vae: nn.Module | None) -> None:
        with recorder.elsewhere():
            latents, noise = (torch.empty(self.batch_size, *self.latent_shape) for _ in range(2))
            sigma = torch.empty(self.batch_size)
            text = torch.empty(self.batch_size, self.text_tokens, self.config["text_dim"])
        is_trained = self.trains != "nothing"
        casts = nullcontext() if self.precision == "no" else torch.autocast("cpu", dtype=_SHORT[self.precision])
        with torch.set_grad_enabled(is_trained), casts:
            noisy = interpolate(latents, noise, sigma) if is_trained else latents
            given = self._given(recorder)
            with tapped(model, range(len(given))) as found:
                velocity = self.call(model, noisy, sigma, text)
            loss = (velocity - (noise - latents)).square().flatten(1).mean(1).mean() if is_trained else None
            if loss is not None and vae is not None and self.pixels is not None:
                loss = loss + self.pixels.loss(vae, data_from_velocity(noisy, velocity, sigma), latents, sigma)
                recorder.begin((BACKWARD + "vae", -1))
            if loss is not None and found:
                loss = loss + self._feature_loss(recorder, found, given)
            del velocity, noisy
        if loss is not None:
            loss.backward()

    def _given(self, recorder: Recorder) -> list[Tensor]:
        """Return what the blocks are compared with: it is there when the step begins, and the step's to let go."""
        given = list[Tensor]()
        if self.features is not None:
            shape = (self.batch_size, self.num_tokens, self.features.width)
            for index in range(min(self.num_blocks, NUM_BLOCKS)):
                recorder.begin((GIVEN + self.name, index))
                given.append(torch.empty(shape, dtype=self.features.dtype))
            recorder.begin((f"start of {self.name}", -1))
        return given

    def _feature_loss(self, recorder: Recorder, found: list[Tensor], given: list[Tensor]) -> Tensor:
        """Compare blocks as a distillation does, from the last on; what has been compared is let go."""
        assert self.features is not None
        with recorder.elsewhere():
            channels = None if self.features.width == self.width else torch.arange(self.width)
        errors = list[Tensor]()
        while found:
            index = len(found) - 1
            recorder.begin((COMPARED + self.name, index))
            errors.append(feature_error(found.pop(), given.pop(), channels))
            mark_backward(recorder, errors[-1], (BACKWARD + COMPARED + self.name, index))
        recorder.begin((f"end of {COMPARED}{self.name}", -1))
        return torch.stack(errors).mean()

    def call(self, model: nn.Module, noisy: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        """Return the velocity in float32."""
        times = NUM_TIMESTEPS * sigma
        if self.has_token_times:
            times = times[:, None].expand(-1, self.num_tokens)
        picture = None
        if self.image_tokens:
            picture = text.new_zeros(self.batch_size, self.image_tokens, self.config["image_dim"], dtype=self.dtype)
        velocity: Tensor = model(
            hidden_states=noisy.to(self.dtype),
            timestep=times,
            encoder_hidden_states=text.to(self.dtype),
            encoder_hidden_states_image=picture,
            return_dict=False,
        )[0]
        return velocity.float()

    def changed(self, **changes: Any) -> Use:
        """Return another use."""
        return replace(self, **changes)


_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16}
