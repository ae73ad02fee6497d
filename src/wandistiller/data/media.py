"""Pictures, clips and latents as files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from wandistiller.errors import MediaError
from wandistiller.files import complete_or_absent
from wandistiller.models.weight_files import Planned, write_safetensors


def to_bytes(pixels: Tensor) -> np.ndarray:
    """Turn pixels from -1 to 1 (channels, frames, height, width) into bytes (frames, height, width, channels)."""
    scaled = (pixels.float() * 0.5 + 0.5).clamp(0, 1) * 255
    return scaled.round().to(torch.uint8).permute(1, 2, 3, 0).contiguous().cpu().numpy()


def write_picture(path: Path, frames: np.ndarray, settings: Mapping[str, Any]) -> None:
    """Write the first frame as PNG, with the settings that drew it in its ``parameters`` text."""
    info = PngInfo()
    info.add_text("parameters", json.dumps(settings))
    with complete_or_absent(path) as partial:
        Image.fromarray(frames[0]).save(partial, format="PNG", pnginfo=info)


def write_clip(path: Path, frames: np.ndarray, fps: int, settings: Mapping[str, Any]) -> None:
    """Write frames as MP4 in H.264, which browsers and players take everywhere."""
    with complete_or_absent(path) as partial, av.open(str(partial), "w", format="mp4") as container:
        container.metadata["comment"] = json.dumps(settings)
        # x264's macroblock tree comes out differently by how memory happens to lie: the same clip gave different bytes.
        options = {"crf": "14", "preset": "medium", "x264-params": "no-mbtree=1"}
        stream = container.add_stream("libx264", rate=Fraction(fps), options=options)
        # H.264 in 4:2:0 wants even sides; Wan's are multiples of 16.
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def write_latents(path: Path, latents: Tensor, settings: Mapping[str, Any]) -> None:
    """Write one sample's latents (channels, frames, height, width) under the key ``latent``, normalised as the model's."""
    latents = latents.float().cpu()
    planned = Planned("latent", torch.float32, tuple(latents.shape), lambda: latents)
    write_safetensors(path, [planned], {"normalised": "true", "parameters": json.dumps(settings)})


def read_picture(path: Path) -> Image.Image:
    """Read a picture as RGB, turned upright as its EXIF says."""
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except FileNotFoundError as error:
        raise MediaError(f"{path} does not exist.", fix="Check the path for a typing error.") from error
    except (UnidentifiedImageError, OSError) as error:
        raise MediaError(f"{path} is not a readable picture.", why=str(error), fix="Give a PNG, JPEG or WebP file.") from error
