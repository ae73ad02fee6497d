"""The public Python API: the models, and every command as a function.

This is the one place that joins the layers for a caller, so that ``WanModel.enable_offloading()`` can use ``memory`` while
``models`` knows nothing of it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args, get_type_hints

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wandistiller.config.command import CommandConfig
from wandistiller.config.distill import DistillConfig
from wandistiller.config.doctor import DoctorConfig
from wandistiller.config.encode import EncodeConfig
from wandistiller.config.export import ExportConfig
from wandistiller.config.lpips import LpipsConfig
from wandistiller.config.plan import PlanConfig, PlanRequest
from wandistiller.config.presets import find_preset
from wandistiller.config.report import ReportConfig
from wandistiller.config.sample import SampleConfig
from wandistiller.config.train import TrainConfig
from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.config.training import TrainingConfig
from wandistiller.config.values import convert_value
from wandistiller.errors import UsageError, nearest
from wandistiller.memory.block_stream import BlockStream
from wandistiller.memory.out_of_memory import advising
from wandistiller.memory.streaming import stream_blocks
from wandistiller.memory.vae_checkpointing import checkpoint_vae, uncheckpoint_vae
from wandistiller.models.devices import find_device
from wandistiller.models.load import load_model
from wandistiller.models.pipeline import find_part
from wandistiller.models.sizes import find_size
from wandistiller.models.stored import TRANSFORMER, VAE, inspect_checkpoint
from wandistiller.models.vae_tiles import decode_tiled, encode_tiled

if TYPE_CHECKING:
    from wandistiller.checkpoint.export import Exported
    from wandistiller.data.encode import Encoded
    from wandistiller.doctor import Diagnosis
    from wandistiller.plan.run import Planned
    from wandistiller.report.report import Reported
    from wandistiller.sample.sampler import Sample
    from wandistiller.train.distill_run import Distilled
    from wandistiller.train.finetune_run import Trained
    from wandistiller.train.vae_run import TrainedVae

ModelType = Literal["t2v", "i2v", "flf2v", "ti2v"]
ConfigT = TypeVar("ConfigT", bound=CommandConfig)
ModelT = TypeVar("ModelT", bound=type[nn.Module])


def _saved_as(base: type[nn.Module]) -> Any:
    """Let a subclass be saved under its base's name, so that whoever has diffusers alone loads it.

    diffusers writes ``type(model).__name__`` into ``config.json`` and ``__module__`` into ``model_index.json``.
    """

    def rename(subclass: ModelT) -> ModelT:
        name = subclass.__name__
        subclass.__name__ = base.__name__
        subclass.__module__ = base.__module__
        # Pickling looks a class up under the name that it says it has, so instances say how to find theirs.
        setattr(subclass, "__reduce_ex__", lambda self, protocol: (_new_instance, (name,), self.__dict__))  # noqa: B010
        return subclass

    return rename


def _new_instance(name: str) -> nn.Module:
    model_class = globals()[name]
    return model_class.__new__(model_class)


@_saved_as(WanTransformer3DModel)
class WanModel(WanTransformer3DModel):
    """A Wan transformer: diffusers' own, with offloading and the argument names of the original Wan code as well.

    Without arguments it is a Wan 2.1 1.3B. ``gradient_checkpointing`` and ``offload_to_cpu`` are states of the running
    model; they are not saved with it.
    """

    def __init__(
        self,
        patch_size: tuple[int, ...] = (1, 2, 2),
        num_attention_heads: int | None = None,
        attention_head_dim: int | None = None,
        in_channels: int | None = None,
        out_channels: int | None = None,
        text_dim: int = 4096,
        freq_dim: int = 256,
        ffn_dim: int = 8960,
        num_layers: int = 30,
        cross_attn_norm: bool = True,
        qk_norm: str | bool | None = "rms_norm_across_heads",
        eps: float = 1e-6,
        image_dim: int | None = None,
        added_kv_proj_dim: int | None = None,
        rope_max_seq_len: int = 1024,
        pos_embed_seq_len: int | None = None,
        *,
        model_type: ModelType | None = None,
        dim: int | None = None,
        num_heads: int | None = None,
        in_dim: int | None = None,
        out_dim: int | None = None,
        gradient_checkpointing: bool = False,
        offload_to_cpu: bool = False,
        device: str | torch.device = "auto",
    ) -> None:
        """Build with random weights; ``device`` is where the blocks compute when ``offload_to_cpu`` is set."""
        if model_type is not None and model_type not in get_args(ModelType):
            known = ", ".join(get_args(ModelType))
            raise UsageError(f"There is no model type '{model_type}'.", fix=f"Use one of {known}.")
        for first, second in (("num_attention_heads", "num_heads"), ("in_channels", "in_dim"), ("out_channels", "out_dim")):
            if locals()[first] is not None and locals()[second] is not None and locals()[first] != locals()[second]:
                raise UsageError(f"{first} and {second} are two names of one thing.", fix="Give one of them.")
        heads = num_attention_heads or num_heads or 12
        if dim is not None and dim % heads:
            raise UsageError(f"dim {dim} does not divide into {heads} heads.", fix="Choose num_heads that divides dim.")
        head_dim = attention_head_dim or (dim // heads if dim else 128)
        latent_channels = out_channels or out_dim or (48 if model_type == "ti2v" else 16)
        reads_image = model_type in ("i2v", "flf2v")
        super().__init__(
            patch_size=patch_size,
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            # An image-to-video model also reads the first frame's latents and a mask of 4 channels.
            in_channels=in_channels or in_dim or (2 * latent_channels + 4 if reads_image else latent_channels),
            out_channels=latent_channels,
            text_dim=text_dim,
            freq_dim=freq_dim,
            ffn_dim=ffn_dim,
            num_layers=num_layers,
            cross_attn_norm=cross_attn_norm,
            qk_norm="rms_norm_across_heads" if qk_norm is True else qk_norm,
            eps=eps,
            image_dim=image_dim or (1280 if reads_image else None),
            added_kv_proj_dim=added_kv_proj_dim or (heads * head_dim if reads_image else None),
            rope_max_seq_len=rope_max_seq_len,
            pos_embed_seq_len=pos_embed_seq_len or (514 if model_type == "flf2v" else None),
        )
        self._stream: BlockStream | None = None
        if gradient_checkpointing:
            self.enable_gradient_checkpointing()
        if offload_to_cpu:
            self.enable_offloading(device)

    @classmethod
    def from_size(cls, name: str, **state: Any) -> Self:
        """Build a named size (``wan2.1-1.3b``, ``wan2.2-5b``, ...) with random weights."""
        return cls(**{**find_size(name).transformer, **state})

    @classmethod
    def from_checkpoint(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        trainable: bool = False,
        gradient_checkpointing: bool = False,
        offload_to_cpu: bool = False,
    ) -> Self:
        """Load from a file or folder in any dialect, or from a pipeline's folder or hub id; frozen unless ``trainable``.

        With ``offload_to_cpu`` the weights go to host memory and ``device`` only computes.
        """
        stored = inspect_checkpoint(find_part(str(source), "transformer"), TRANSFORMER)
        place = "cpu" if offload_to_cpu else find_device(str(device))
        model = load_model(stored, dtype=dtype, device=place, model_class=cls).requires_grad_(trainable)
        assert isinstance(model, cls)
        if gradient_checkpointing:
            model.enable_gradient_checkpointing()
        if offload_to_cpu:
            model.enable_offloading(device)
        return model

    @property
    def model_type(self) -> ModelType:
        """What the model draws from, read from its shapes."""
        if self.config.pos_embed_seq_len is not None:
            return "flf2v"
        if self.config.in_channels != self.config.out_channels:
            return "i2v"
        return "ti2v" if self.config.in_channels == 48 else "t2v"

    def enable_gradient_checkpointing(self, gradient_checkpointing_func: Any = None) -> None:
        """Recompute the inside of each block in backward."""
        super().enable_gradient_checkpointing(gradient_checkpointing_func or _recompute)

    @property
    def is_offloading(self) -> bool:
        """Whether the blocks live in host memory."""
        return self._stream is not None

    def enable_offloading(self, device: str | torch.device = "auto", *, gradients_to_cpu: bool = False) -> None:
        """Keep the blocks in host memory and bring each to ``device`` when it computes; a second call changes nothing.

        A PyTorch optimiser updates the blocks in host memory. With ``gradients_to_cpu`` their gradients go there as soon as
        each is complete instead of waiting on the device, out of the sight of whoever looks at ``parameter.grad``.
        """
        if self._stream is None:
            self._stream = stream_blocks(self, list(self.blocks), find_device(str(device)), train=gradients_to_cpu)

    def disable_offloading(self) -> None:
        """Bring the weights back into ordinary host memory; move the model with ``.to()`` afterwards."""
        if self._stream is not None:
            self._stream.detach()
            self._stream = None


@_saved_as(AutoencoderKLWan)
class WanVAE(AutoencoderKLWan):
    """A Wan VAE: diffusers' own, with gradient checkpointing that works for clips and keeps gradients equal.

    After ``enable_tiling()`` what is larger than a tile goes in tiles without seams: equal to the whole to rounding.
    """

    _supports_gradient_checkpointing = True

    def __init__(
        self,
        base_dim: int = 96,
        decoder_base_dim: int | None = None,
        z_dim: int = 16,
        dim_mult: tuple[int, ...] | list[int] = (1, 2, 4, 4),
        num_res_blocks: int = 2,
        attn_scales: tuple[float, ...] | list[float] = (),
        temperal_downsample: tuple[bool, ...] | list[bool] = (False, True, True),
        dropout: float = 0.0,
        latents_mean: list[float] | None = None,
        latents_std: list[float] | None = None,
        is_residual: bool = False,
        in_channels: int = 3,
        out_channels: int = 3,
        patch_size: int | None = None,
        scale_factor_temporal: int | None = 4,
        scale_factor_spatial: int | None = 8,
        *,
        gradient_checkpointing: bool = False,
    ) -> None:
        """Build with random weights; latent statistics not given are those of the released VAE, or mean 0 and std 1."""
        released = find_size({16: "wan2.1-14b", 48: "wan2.2-5b"}.get(z_dim, "tiny")).vae
        known = released if released["z_dim"] == z_dim else {"latents_mean": [0.0] * z_dim, "latents_std": [1.0] * z_dim}
        super().__init__(
            base_dim=base_dim,
            decoder_base_dim=decoder_base_dim,
            z_dim=z_dim,
            dim_mult=list(dim_mult),
            num_res_blocks=num_res_blocks,
            attn_scales=list(attn_scales),
            temperal_downsample=list(temperal_downsample),
            dropout=dropout,
            latents_mean=list(latents_mean or known["latents_mean"]),
            latents_std=list(latents_std or known["latents_std"]),
            is_residual=is_residual,
            in_channels=in_channels,
            out_channels=out_channels,
            patch_size=patch_size,
            scale_factor_temporal=scale_factor_temporal,
            scale_factor_spatial=scale_factor_spatial,
        )
        self.gradient_checkpointing = False
        if gradient_checkpointing:
            self.enable_gradient_checkpointing()

    @classmethod
    def from_size(cls, name: str, **state: Any) -> Self:
        """Build the VAE of a named size with random weights."""
        return cls(**{**find_size(name).vae, **state})

    @classmethod
    def from_checkpoint(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        trainable: bool = False,
        gradient_checkpointing: bool = False,
    ) -> Self:
        """Load from a file or folder in any dialect, or from a pipeline's folder or hub id; frozen unless ``trainable``."""
        stored = inspect_checkpoint(find_part(str(source), "vae"), VAE)
        model = load_model(stored, dtype=dtype, device=find_device(str(device)), model_class=cls).requires_grad_(trainable)
        assert isinstance(model, cls)
        if gradient_checkpointing:
            model.enable_gradient_checkpointing()
        return model

    def enable_gradient_checkpointing(self, gradient_checkpointing_func: object = None) -> None:
        """Recompute the inside of each layer in backward; gradients stay the same."""
        if gradient_checkpointing_func is not None:
            raise UsageError("The VAE's checkpointing function is its own.", why="its feature cache needs special care.")
        checkpoint_vae(self)
        self.gradient_checkpointing = True

    def disable_gradient_checkpointing(self) -> None:
        """Keep everything for backward."""
        uncheckpoint_vae(self)
        self.gradient_checkpointing = False

    def tiled_encode(self, x: Tensor) -> Tensor:
        """Return what ``_encode`` would; diffusers calls it with patched pixels."""
        return encode_tiled(self, unpatchify(x, self.config.patch_size or 1), tile=self._tile).parameters

    def tiled_decode(self, z: Tensor, return_dict: bool = True) -> DecoderOutput | tuple[Tensor]:
        """Return what ``_decode`` would, on the latents' device."""
        pixels = decode_tiled(self, z, tile=self._tile).to(z.device)
        return DecoderOutput(sample=pixels) if return_dict else (pixels,)

    @property
    def _tile(self) -> int:
        """The tile in latents for what ``enable_tiling`` was told in pixels; tiles do not overlap, so strides do not matter."""
        side = min(self.tile_sample_min_height, self.tile_sample_min_width)
        if side < self.spatial_compression_ratio:
            raise UsageError(
                f"A tile of {side} pixels is smaller than a latent.", fix=f"Give {self.spatial_compression_ratio} or more."
            )
        return side // self.spatial_compression_ratio


def _recompute(module: nn.Module, *args: Any) -> Any:
    return checkpoint(module.__call__, *args, use_reentrant=False)


def distill(config: DistillConfig | None = None, **fields: Any) -> Distilled:
    """Distil a teacher into a student; give a ``DistillConfig`` or its fields."""
    from wandistiller.train.distill_run import run_distill

    config = _config(DistillConfig, config, fields)
    with advising("distill", config):
        return run_distill(config)


def train(config: TrainConfig | None = None, **fields: Any) -> Trained:
    """Fine-tune with flow matching; give a ``TrainConfig`` or its fields."""
    from wandistiller.train.finetune_run import run_train

    config = _config(TrainConfig, config, fields)
    with advising("train", config):
        return run_train(config)


def train_vae(config: TrainVaeConfig | None = None, **fields: Any) -> TrainedVae:
    """Train a VAE; give a ``TrainVaeConfig`` or its fields."""
    from wandistiller.train.vae_run import run_train_vae

    config = _config(TrainVaeConfig, config, fields)
    with advising("train-vae", config):
        return run_train_vae(config)


def lpips(config: LpipsConfig | None = None, **fields: Any) -> Path:
    """Convert the weights of LPIPS into the user's cache and return the file; give an ``LpipsConfig`` or its fields."""
    from wandistiller.models.lpips_weights import make_lpips_weights
    from wandistiller.terminal import say

    config = _config(LpipsConfig, config, fields)
    assert config.source is not None  # check() has made sure
    with advising("lpips", config):
        target = make_lpips_weights(config.source)
    say(f"Wrote {target}")
    return target


def encode(config: EncodeConfig | None = None, **fields: Any) -> Encoded:
    """Write the caches of a data set; give an ``EncodeConfig`` or its fields."""
    from wandistiller.data.encode import run_encode

    config = _config(EncodeConfig, config, fields)
    with advising("encode", config):
        return run_encode(config)


def sample(config: SampleConfig | None = None, **fields: Any) -> list[Sample]:
    """Generate; give a ``SampleConfig`` or its fields."""
    from wandistiller.sample.sampler import run_sample

    config = _config(SampleConfig, config, fields)
    with advising("sample", config):
        return run_sample(config)


def report(config: ReportConfig | None = None, **fields: Any) -> Reported:
    """Write the page about a run, teacher and student side by side; give a ``ReportConfig`` or its fields."""
    from wandistiller.report.report import run_report

    config = _config(ReportConfig, config, fields)
    with advising("report", config):
        return run_report(config)


def export(config: ExportConfig | None = None, **fields: Any) -> list[Exported]:
    """Write a checkpoint in another format and prove it equal; give an ``ExportConfig`` or its fields."""
    from wandistiller.checkpoint.export import run_export

    config = _config(ExportConfig, config, fields)
    with advising("export", config):
        return run_export(config)


def doctor(config: DoctorConfig | None = None, **fields: Any) -> Diagnosis:
    """Check this machine and print what was found; give a ``DoctorConfig`` or its fields."""
    from wandistiller.doctor import run_doctor

    config = _config(DoctorConfig, config, fields)
    with advising("doctor", config):
        return run_doctor(config)


def plan(request: PlanRequest | CommandConfig, **options: Any) -> Planned:
    """Print what a command would take on a machine; give its configuration, and fields of a ``PlanConfig``."""
    from wandistiller.plan.run import run_plan

    if not isinstance(request, PlanRequest):
        command = getattr(request, "command", "")
        given = {field.name for field in dataclasses.fields(request) if getattr(request, field.name) != field.default}
        request = PlanRequest(command=command, job=request, given=frozenset(given), options=_config(PlanConfig, None, options))
    with advising(request.command, request.job):
        return run_plan(request)


def _config(config_class: type[ConfigT], config: ConfigT | None, fields: dict[str, Any]) -> ConfigT:
    if config is not None and fields:
        raise UsageError("Both a configuration and fields were given.", fix="Give one or the other.")
    known = {field.name for field in dataclasses.fields(config_class)}
    unknown = sorted(set(fields) - known)
    if unknown:
        hint = nearest(unknown[0], known)
        raise UsageError(f"{config_class.__name__} has no field '{unknown[0]}'{hint}")
    hints = get_type_hints(config_class)
    given = {name: convert_value(value, hints[name], name) for name, value in fields.items() if value is not None}
    if "preset" in given:
        assert issubclass(config_class, TrainingConfig)
        given = {**find_preset(config_class.command, given["preset"]), **given}
    config = config or config_class(**given)
    config.check()
    return config
