"""The shape of what is drawn, in pixels and in latents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wandistiller.errors import UsageError
from wandistiller.models.latents import check_positions


@dataclass(frozen=True)
class Geometry:
    """Width, height and frames, and the factors between pixels and latents."""

    width: int
    height: int
    frames: int
    spatial: int
    temporal: int

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Latent frames, height and width."""
        return (self.frames - 1) // self.temporal + 1, self.height // self.spatial, self.width // self.spatial


def check_geometry(
    width: int, height: int, frames: int, spatial: int, temporal: int, transformer_config: Mapping[str, Any]
) -> Geometry:
    """Return the geometry, or raise ``UsageError`` with the nearest that the model can draw."""
    _, patch_height, patch_width = transformer_config["patch_size"]
    for flag, value, multiple in (("--width", width, spatial * patch_width), ("--height", height, spatial * patch_height)):
        if value % multiple:
            below, above = value // multiple * multiple, -(-value // multiple) * multiple
            raise UsageError(
                f"{flag} {value} does not divide into this model's patches.",
                why=f"it must be a multiple of {multiple}.",
                fix=f"Take {flag} {above}" + (f" or {below}." if below else "."),
            )
    if (frames - 1) % temporal:
        below = (frames - 1) // temporal * temporal + 1
        raise UsageError(
            f"--frames {frames} does not divide into this model's latent frames.",
            why=f"it must be one more than a multiple of {temporal}.",
            fix=f"Take --frames {below} or {below + temporal}.",
        )
    geometry = Geometry(width, height, frames, spatial, temporal)
    check_positions(transformer_config, geometry.latent_shape)
    return geometry
