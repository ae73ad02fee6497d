"""WanDistiller: distil, fine-tune and sample Wan video diffusion models on the hardware you have.

``WanModel`` and ``WanVAE`` are here; every command is a function of the same name in ``wandistiller.api``. They are imported
when they are first used, so that ``import wandistiller`` is instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wandistiller.api import WanModel, WanVAE

__all__ = ["WanModel", "WanVAE"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("wandistiller.api"), name)
    raise AttributeError(f"module 'wandistiller' has no attribute '{name}'")
