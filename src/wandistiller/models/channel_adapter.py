"""A fixed linear map between the latent channels of two models, the same at every position.

A student with fewer (or more) latent channels than its teacher's VAE sees latents through one of these. The matrix has
orthonormal rows (fewer channels) or columns (more), so going back is its transpose. Data are centred before and divided by
their standard deviation after it, so that the student's latents have unit variance as the flow expects; noise goes through
the matrix alone (``rotate``), which keeps white noise white. Made once, saved beside the student, never trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from wandistiller.errors import CheckpointError, UsageError
from wandistiller.files import complete_or_absent

ADAPTER_NAME = "channel_adapter"
WEIGHTS_NAME = f"{ADAPTER_NAME}.safetensors"
CONFIG_NAME = f"{ADAPTER_NAME}.json"

_TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class ChannelAdapter:
    """The map; tensors are float32 on the host and follow the device and dtype of what they are applied to."""

    matrix: Tensor
    """Student channels x teacher channels, with orthonormal rows or columns."""
    mean: Tensor
    """What is taken off each of the teacher's channels before the map."""
    std: Tensor
    """What each of the student's channels is divided by after the map."""
    kind: str = "random"
    """How the matrix came about: ``random`` or ``pca``."""

    def __post_init__(self) -> None:
        _check(self.matrix, self.mean, self.std)

    @property
    def teacher_channels(self) -> int:
        return self.matrix.shape[1]

    @property
    def student_channels(self) -> int:
        return self.matrix.shape[0]

    def down(self, latents: Tensor) -> Tensor:
        """Return the student's latents for the teacher's (batch, channels, frames, height, width)."""
        _check_latents(latents, self.teacher_channels, "teacher")
        return self.rotate(latents - self._like(self.mean, latents)) / self._like(self.std, latents)

    def up(self, latents: Tensor) -> Tensor:
        """Return the teacher's latents for the student's: ``down`` undone, but for the channels that were dropped."""
        _check_latents(latents, self.student_channels, "student")
        spread = torch.einsum("st,bsfhw->btfhw", self.matrix.to(latents), latents * self._like(self.std, latents))
        return spread + self._like(self.mean, latents)

    def rotate(self, latents: Tensor) -> Tensor:
        """Return the matrix applied to the teacher's channels and nothing else: for noise, which has no mean to take off."""
        _check_latents(latents, self.teacher_channels, "teacher")
        return torch.einsum("st,btfhw->bsfhw", self.matrix.to(latents), latents)

    def save(self, folder: Path) -> None:
        """Write the adapter into a folder, as ``channel_adapter.safetensors`` and ``channel_adapter.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"matrix": self.matrix.contiguous(), "mean": self.mean.contiguous(), "std": self.std.contiguous()}
        config = {"teacher_channels": self.teacher_channels, "student_channels": self.student_channels, "kind": self.kind}
        with complete_or_absent(folder / WEIGHTS_NAME) as partial:
            save_file(tensors, partial)
        # Last: an adapter is there when this file is.
        with complete_or_absent(folder / CONFIG_NAME) as partial:
            partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> ChannelAdapter:
        """Read an adapter; raise ``CheckpointError`` where there is none or it is damaged."""
        try:
            config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
            tensors = load_file(folder / WEIGHTS_NAME)
            adapter = cls(tensors["matrix"], tensors["mean"], tensors["std"], str(config["kind"]))
            told = (config["student_channels"], config["teacher_channels"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError, UsageError) as error:
            why = error.what if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"{folder} has no usable channel adapter.", why=why, fix="Export the student again, with its adapter."
            ) from error
        if told != tuple(adapter.matrix.shape):
            raise CheckpointError(
                f"{folder / CONFIG_NAME} does not belong to {WEIGHTS_NAME}.",
                why=f"it tells of {told[1]} -> {told[0]} channels, the matrix is for "
                f"{adapter.teacher_channels} -> {adapter.student_channels}.",
                fix="Export the student again, with its adapter.",
            )
        return adapter

    def _like(self, values: Tensor, latents: Tensor) -> Tensor:
        return values.to(latents).view(1, -1, 1, 1, 1)


def random_adapter(
    teacher_channels: int, student_channels: int, *, seed: int = 0, latents: Iterable[Tensor] | None = None
) -> ChannelAdapter:
    """Return an adapter of a random direction for each channel; ``latents`` of the teacher tell mean and std, 0 and 1 without.

    Latents are batches (batch, channels, frames, height, width), read once.
    """
    _check_channels(teacher_channels, student_channels)
    larger, smaller = max(teacher_channels, student_channels), min(teacher_channels, student_channels)
    generator = torch.Generator().manual_seed(seed)
    columns, factors = torch.linalg.qr(torch.randn(larger, smaller, generator=generator, dtype=torch.float64))
    columns = columns * factors.diagonal().sign()  # without this the signs would be LAPACK's, and directions not uniform
    matrix = columns.T if student_channels <= teacher_channels else columns
    if latents is None:
        return ChannelAdapter(matrix.float().contiguous(), torch.zeros(teacher_channels), torch.ones(student_channels))
    mean, covariance = _moments(latents, teacher_channels)
    return _adapter(matrix, mean, covariance, "random")


def fit_adapter(student_channels: int, latents: Iterable[Tensor]) -> ChannelAdapter:
    """Return the adapter that loses least of these latents of the teacher: their principal components.

    Latents are batches (batch, channels, frames, height, width), read once. Raises ``UsageError`` for too few of them, or
    for more channels than they have: there is nothing to fit then.
    """
    mean, covariance = _moments(latents, None)
    _check_channels(len(mean), student_channels)
    if student_channels > len(mean):
        raise UsageError(
            f"{student_channels} channels cannot be fitted on latents of {len(mean)}.",
            why="principal components are at most as many as channels.",
            fix="Use a random adapter, or fewer channels.",
        )
    directions = torch.linalg.eigh(covariance).eigenvectors.flip(1).T[:student_channels]
    # Either sign is a principal component; the one with a positive largest entry is the same on every machine.
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    return _adapter(directions * largest.sign(), mean, covariance, "pca")


def _adapter(matrix: Tensor, mean: Tensor, covariance: Tensor, kind: str) -> ChannelAdapter:
    variance = torch.einsum("st,tu,su->s", matrix, covariance, matrix)
    if float(variance.min()) <= 1e-10 * float(covariance.trace()):
        raise UsageError(
            "Some channels of the student would be constant on these latents.",
            why="the latents vary in fewer directions than the student has channels, or hardly at all.",
            fix="Give more and different latents, or fewer channels.",
        )
    return ChannelAdapter(matrix.float().contiguous(), mean.float(), variance.sqrt().float(), kind)


def _moments(batches: Iterable[Tensor], channels: int | None) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the channels over all positions, in float64."""
    count, total, products = 0, torch.zeros(0), torch.zeros(0)
    for latents in [batches] if isinstance(batches, Tensor) else batches:
        channels = channels or (latents.shape[1] if latents.ndim == 5 else None)
        _check_latents(latents, channels, "teacher")
        rows = latents.movedim(1, -1).flatten(0, -2).cpu().double()
        if not rows.isfinite().all():
            raise UsageError("Some of the latents are not finite.", fix="Encode them again, and check their pictures.")
        if not count:
            total, products = rows.new_zeros(rows.shape[1]), rows.new_zeros(rows.shape[1], rows.shape[1])
        count, total, products = count + len(rows), total + rows.sum(0), products + rows.T @ rows
    if count <= len(total):
        raise UsageError(
            f"There are {count} positions of latents for {len(total)} channels.",
            why="that is too few to tell their statistics.",
            fix="Give more latents.",
        )
    mean = total / count
    return mean, products / count - torch.outer(mean, mean)


def _check_channels(teacher: int, student: int) -> None:
    if teacher < 1 or student < 1:
        raise UsageError(f"There is no adapter from {teacher} to {student} channels.", fix="Give numbers from 1 on.")


def _check_latents(latents: Tensor, channels: int | None, whose: str) -> None:
    if latents.ndim != 5 or (channels is not None and latents.shape[1] != channels):
        raise UsageError(
            f"The adapter got latents of shape {list(latents.shape)}.",
            why=f"the {whose}'s are (batch, {channels or 'channels'}, frames, height, width).",
            fix=f"Give it latents of the {whose}, with their batch dimension.",
        )


def _check(matrix: Tensor, mean: Tensor, std: Tensor) -> None:
    if matrix.ndim != 2 or mean.shape != matrix.shape[1:] or std.shape != matrix.shape[:1]:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (matrix, mean, std))
        raise UsageError(f"Matrix, mean and std of a channel adapter do not fit: their shapes are {shapes}.")
    product = (matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix).double()
    if not torch.allclose(product, torch.eye(len(product), dtype=torch.float64), atol=_TOLERANCE):
        raise UsageError("The matrix of a channel adapter is not orthonormal, so its transpose does not undo it.")
    if not mean.isfinite().all() or not std.isfinite().all() or not (std > 0).all():
        raise UsageError("Mean and std of a channel adapter must be finite, and every std positive.")
