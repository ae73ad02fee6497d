"""Pictures and clips inside the page."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from wandistiller.report.markup import Markup, tag

_TINY = 128
"""Pictures no larger are enlarged so that one sees their pixels, and clips of them lose nothing."""
_SHOWN = 224
"""About how wide a tiny picture is shown."""


def show(frames: np.ndarray, fps: int, description: str) -> Markup:
    """Return an element with a picture or a clip (frames, height, width, 3), whole numbers from 0 to 255."""
    height, width = frames.shape[1:3]
    is_tiny = max(height, width) <= _TINY
    shown = width * max(_SHOWN // max(height, width), 1) if is_tiny else width
    data = base64.b64encode(encode_frames(frames, fps)).decode("ascii")
    kind = "png" if len(frames) == 1 else "webp"
    return tag(
        "img",
        src=f"data:image/{kind};base64,{data}",
        alt=description,
        width=width,
        height=height,
        style=f"width:{shown}px",
        class_="crisp" if is_tiny else None,
    )


def encode_frames(frames: np.ndarray, fps: int) -> bytes:
    """Return a picture as PNG, and a clip as WebP that plays without end."""
    first, *others = [Image.fromarray(frame) for frame in frames]
    file = io.BytesIO()
    if not others:
        first.save(file, format="PNG", optimize=True)
        return file.getvalue()
    is_tiny = max(frames.shape[1:3]) <= _TINY
    options = {"lossless": True} if is_tiny else {"quality": 80, "method": 2}
    first.save(file, format="WEBP", save_all=True, append_images=others, duration=round(1000 / fps), loop=0, **options)
    return file.getvalue()
