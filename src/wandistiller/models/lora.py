"""LoRA files on top of a checkpoint: what they add is added to its weights as these are read, wherever they then live."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from wandistiller.errors import CheckpointError, shortened
from wandistiller.models.stored import StoredModel
from wandistiller.models.weight_files import Entry, Weights, open_weights

LORA_FILE = "pytorch_lora_weights.safetensors"
"""What diffusers calls the file in a folder."""
_PREFIX = r"(?:(?:transformer|diffusion_model|model\.diffusion_model)\.)?"
_FACTOR = re.compile(_PREFIX + r"(.+)\.lora_(A|B|down|up)(?:\.default)?\.weight")
_IS_SECOND = {"A": False, "down": False, "B": True, "up": True}


@dataclass(frozen=True)
class _Product:
    """Stored names of the two factors of what is added to a weight, and of the alpha that, divided by the rank, scales it."""

    first: str
    second: str
    alpha: str | None


@dataclass(frozen=True)
class AdaptedModel(StoredModel):
    """A checkpoint whose weights are read with a LoRA's products added."""

    lora: Weights
    products: Mapping[str, _Product]
    """By the diffusers name of the weight."""
    strength: float

    @property
    def identity(self) -> str:
        return f"{super().identity} + {self.strength} * {self.lora.path.resolve()}"

    def read(self, key: str, dtype: torch.dtype | None = None) -> Tensor:
        if key not in self.products:
            return super().read(key, dtype)
        product = self.products[key]
        first, second = (self.lora.read(name).to(torch.float32) for name in (product.first, product.second))
        scale = self.strength
        if product.alpha is not None:
            scale *= float(self.lora.read(product.alpha)) / len(first)
        added = super().read(key, torch.float32).addmm(second, first, alpha=scale)
        return added.to(dtype or self.stored_dtype(key))

    def locate(self, key: str, dtype: torch.dtype | None) -> Entry | None:
        return None if key in self.products else super().locate(key, dtype)


def with_lora(stored: StoredModel, path: Path, strength: float) -> AdaptedModel:
    """Return a transformer with a LoRA file of diffusers' or the original (ComfyUI) names; nothing is read but headers."""
    lora = open_weights(path / LORA_FILE if path.is_dir() else path)
    originals = stored.architecture.original_names(stored.config, stored.names)
    known = {name: name for name in stored.names} | {original: name for name, original in originals.items()}
    factors: dict[str, dict[bool, str]] = {}
    odd = []
    for name in lora.entries:
        found = _FACTOR.fullmatch(name)
        if found is None:
            odd += [name] if not name.endswith(".alpha") else []
        elif f"{found[1]}.weight" in known:
            factors.setdefault(known[f"{found[1]}.weight"], {})[_IS_SECOND[found[2]]] = name
        else:
            odd.append(name)
    odd += [name for pair in factors.values() for name in pair.values() if len(pair) == 1]
    if odd or not factors:
        raise CheckpointError(
            f"{path} does not fit this transformer.",
            why=f"it has {shortened(odd)}, which are no factors for its layers." if odd else "it has no LoRA factors.",
            fix="Give a LoRA of this model, with factors lora_A and lora_B or lora_down and lora_up alone.",
        )
    products = {key: _product(lora, pair) for key, pair in factors.items()}
    for key, product in products.items():
        _check_shape(stored, key, lora, product, path)
    own = {field.name: getattr(stored, field.name) for field in fields(StoredModel)}
    return AdaptedModel(**own, lora=lora, products=products, strength=strength)


def _product(lora: Weights, pair: Mapping[bool, str]) -> _Product:
    alpha = f"{pair[False].rpartition('.lora_')[0]}.alpha"
    return _Product(pair[False], pair[True], alpha if alpha in lora.entries else None)


def _check_shape(stored: StoredModel, key: str, lora: Weights, product: _Product, path: Path) -> None:
    first, second = (tuple(lora.entries[name].shape) for name in (product.first, product.second))
    wanted = tuple(stored.weights.entries[stored.names[key]].shape)
    if len(first) != 2 or len(second) != 2 or first[0] != second[1] or (second[0], first[1]) != wanted:
        raise CheckpointError(
            f"{path} is for another model.",
            why=f"{product.second} {second} times {product.first} {first} is not of the shape of {key}, {wanted}.",
            fix="Give a LoRA of this model.",
        )
