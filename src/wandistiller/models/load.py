"""From a checkpoint to a model, one tensor at a time: file, dtype, device.

Host memory holds at most the model once and one tensor more; a device that is not named is never touched; and nothing is
returned unless everything was there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from wandistiller.models.stored import TRANSFORMER, VAE, Architecture, StoredModel, build_empty, inspect_checkpoint

OnTensor = Callable[[str, int], None]
"""Told the name and the stored bytes of each tensor as it is loaded."""


def load_model(
    stored: StoredModel,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    model_class: type[nn.Module] | None = None,
    on_tensor: OnTensor | None = None,
) -> nn.Module:
    """Return the model with its weights on ``device``; None for ``dtype`` keeps what is stored.

    Whatever the dtype, the modules that Wan keeps in float32 (``stored.kept_in_float32()``) are in float32.
    """
    model = build_empty(stored.architecture, stored.config, model_class)
    for key in stored.names:
        set_tensor(model, key, stored.read_for(key, dtype).to(device))
        if on_tensor is not None:
            on_tensor(key, stored.weights.entries[stored.names[key]].num_bytes)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=name not in module._non_persistent_buffers_set)
    return model.requires_grad_(False)


def load_transformer(path: Path, **options: object) -> nn.Module:
    """Inspect and load a Wan transformer; see ``load_model`` for the options."""
    return _load(path, TRANSFORMER, **options)


def load_vae(path: Path, **options: object) -> nn.Module:
    """Inspect and load a Wan VAE; see ``load_model`` for the options."""
    return _load(path, VAE, **options)


def set_tensor(model: nn.Module, key: str, value: Tensor) -> None:
    """Put a value in the place of a parameter or buffer, keeping whether it is trained."""
    module_name, _, name = key.rpartition(".")
    module = model.get_submodule(module_name)
    if name in module._parameters:
        old = module._parameters[name]
        module._parameters[name] = nn.Parameter(value, requires_grad=old is not None and old.requires_grad)
    else:
        module._buffers[name] = value


def _load(path: Path, architecture: Architecture, **options: object) -> nn.Module:
    return load_model(inspect_checkpoint(path, architecture), **options)  # type: ignore[arg-type]
