"""Proof that a written checkpoint is its source: every tensor bit for bit, then what the two models compute.

The models are run with one block in memory at a time, so that a 14B is proved on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from wandistiller.checkpoint.formats import WRITERS, target_dtypes
from wandistiller.errors import OutputError, shortened
from wandistiller.models.load import set_tensor
from wandistiller.models.stored import TRANSFORMER, StoredModel, build_empty, inspect_checkpoint
from wandistiller.models.text import MAX_TEXT_TOKENS
from wandistiller.terminal import progress


def write_and_prove(stored: StoredModel, path: Path, format_name: str, dtype: torch.dtype | None = None) -> None:
    """Write a model in a format, in a dtype or in its own, and raise ``OutputError`` unless it is the same when read again."""
    dtypes = target_dtypes(stored, dtype)
    name = stored.architecture.name
    with progress(f"Writing {name}", len(dtypes), "tensor") as advance:
        WRITERS[format_name](path, stored, dtypes, advance)
    with progress(f"Proving {name}", len(dtypes), "tensor") as advance:
        prove_equal(stored, inspect_checkpoint(path, stored.architecture), dtypes, advance)


def prove_equal(
    source: StoredModel, written: StoredModel, dtypes: Mapping[str, torch.dtype], on_tensor: Callable[[], None]
) -> None:
    """Raise ``OutputError`` unless ``written`` has the source's configuration, keys, values and outputs."""
    if dict(source.config) != dict(written.config):
        fields = [name for name in source.config if source.config[name] != written.config.get(name)]
        raise OutputError(f"What was written has another configuration: {shortened(fields)}.")
    if set(source.names) != set(written.names):
        raise OutputError(f"What was written has other keys: {shortened(set(source.names) ^ set(written.names))}.")
    for key in source.names:
        exact, rounded = source.read(key), written.read(key)
        if torch.isinf(rounded).sum() > torch.isinf(exact).sum():
            raise OutputError(
                f"'{key}' has values beyond the range of {str(dtypes[key]).removeprefix('torch.')}.",
                fix="Export in bfloat16 or float32.",
            )
        # Compared as bytes: a NaN must come back as the same NaN.
        if not torch.equal(_bytes(exact.to(dtypes[key])), _bytes(rounded)):
            raise OutputError(f"What was written differs from its source in tensor '{key}'.")
        on_tensor()
    if not torch.equal(_bytes(run_once(source, dtypes)), _bytes(run_once(written, dtypes))):
        raise OutputError("What was written computes something else than its source.")


@torch.no_grad()
def run_once(stored: StoredModel, dtypes: Mapping[str, torch.dtype]) -> Tensor:
    """Return what the model computes for one small, fixed input, in float32 on weights rounded to ``dtypes``."""
    generator = torch.Generator().manual_seed(0)
    if stored.architecture is not TRANSFORMER:
        vae = build_empty(stored.architecture, stored.config)
        _fill(vae, stored, dtypes, "")
        side = 2 * stored.config["scale_factor_spatial"]
        pixels = torch.rand(1, 3, 1 + stored.config["scale_factor_temporal"], side, side, generator=generator) * 2 - 1
        return vae(pixels, return_dict=False)[0]
    config = stored.config
    model = build_empty(TRANSFORMER, {**config, "num_layers": 1})
    block, model.blocks = model.blocks[0], nn.ModuleList()
    _fill(model, stored, dtypes, "", leave_out="blocks.")
    model.blocks = _BlocksInTurn(block, stored, dtypes)
    patch_frames, patch_height, patch_width = config["patch_size"]
    latents = torch.randn(1, config["in_channels"], 2 * patch_frames, 2 * patch_height, 3 * patch_width, generator=generator)
    reads_image = config["image_dim"] is not None
    # Attention to a picture takes for granted that the text fills its 512 tokens.
    text = torch.randn(1, MAX_TEXT_TOKENS if reads_image else 16, config["text_dim"], generator=generator)
    # Two pictures of 257 tokens where there are positions for two, as first-and-last-frame models have.
    pictures = 2 if config["pos_embed_seq_len"] else 1
    image = torch.randn(pictures, 257, config["image_dim"], generator=generator) if reads_image else None
    return model(latents, torch.tensor([500.0]), text, image, return_dict=False)[0]


class _BlocksInTurn(nn.Module):
    """Stands for the list of blocks; walking over it fills one block with each one's weights."""

    def __init__(self, block: nn.Module, stored: StoredModel, dtypes: Mapping[str, torch.dtype]) -> None:
        super().__init__()
        self.block = block
        self._stored = stored
        self._dtypes = dtypes

    def __iter__(self) -> Iterator[nn.Module]:
        for index in range(self._stored.config["num_layers"]):
            _fill(self.block, self._stored, self._dtypes, f"blocks.{index}.")
            yield self.block


def _fill(
    module: nn.Module, stored: StoredModel, dtypes: Mapping[str, torch.dtype], prefix: str, leave_out: str | None = None
) -> None:
    """Give a module the weights below ``prefix``, rounded to ``dtypes`` and held in float32."""
    for key in stored.names:
        if key.startswith(prefix) and not (leave_out and key.startswith(leave_out)):
            set_tensor(module, key.removeprefix(prefix), stored.read(key, dtypes[key]).float())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
