"""Pictures and clips from files into bytes: what a header says, and the frames at the size of a bucket.

Everything is turned upright (EXIF, rotation of the track) and made of square pixels. What is transparent is laid on white. The
size is reached by covering the bucket and cutting off evenly what stands over, with antialiasing; small media are enlarged.
Frames are resized one by one as they are decoded, so a clip is never in memory at its full size.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av
import numpy as np
from PIL import ExifTags, Image, ImageOps

from wandistiller.data.buckets import Bucket, MediaSize
from wandistiller.errors import MediaError

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
CLIP_SUFFIXES = (".mp4", ".mov", ".mkv", ".avi", ".webm")
MEDIA_SUFFIXES = PICTURE_SUFFIXES + CLIP_SUFFIXES

_COUNTED_FRAMES = 1000
"""As far as frames are counted where the header does not say; nobody trains on longer clips."""
# What PIL and PyAV raise for damaged files, by experience: their decoders let many kinds through.
_DAMAGE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    av.FFmpegError,
)


def probe(path: Path) -> MediaSize:
    """Return the size of a picture from its header, or of a clip from its header and first frame."""
    with _naming(path):
        return _probe_picture(path) if _is_picture(path) else _probe_clip(path)


def read_media(path: Path, bucket: Bucket) -> np.ndarray:
    """Return the first ``bucket.frames`` frames as bytes (frames, height, width, 3) in the size of the bucket."""
    with _naming(path):
        if _is_picture(path):
            return fit(_read_upright(path), bucket.height, bucket.width)[None]
        frames = np.empty((bucket.frames, bucket.height, bucket.width, 3), dtype=np.uint8)
        count = 0
        for image, stretch in _clip_frames(path):
            frames[count] = fit(image, bucket.height, bucket.width, stretch)
            count += 1
            if count == bucket.frames:
                return frames
    raise MediaError(
        f"{path} is damaged.",
        why=f"only {count} frames of {bucket.frames} can be decoded.",
        fix="Copy or encode the clip again, or remove it.",
    )


def fit(image: Image.Image, height: int, width: int, stretch: float = 1.0) -> np.ndarray:
    """Return an RGB picture as bytes in another size, what stands over cut off evenly; ``stretch`` is a pixel's aspect."""
    if image.size == (width, height) and stretch == 1:
        return np.asarray(image)
    seen_width, seen_height = image.width * stretch, image.height
    scale = max(width / seen_width, height / seen_height)
    kept_width, kept_height = min(width / scale / stretch, image.width), min(height / scale, image.height)
    left, top = (image.width - kept_width) / 2, (image.height - kept_height) / 2
    box = (left, top, left + kept_width, top + kept_height)
    return np.asarray(image.resize((width, height), Image.Resampling.LANCZOS, box=box))


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in PICTURE_SUFFIXES


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn what the decoders raise into an error with the file's name."""
    kind = "picture" if _is_picture(path) else "clip"
    try:
        yield
    except FileNotFoundError as error:
        raise MediaError(f"{path} does not exist.", fix="Check the path for a typing error.") from error
    except _DAMAGE as error:
        reason = str(error).strip() or type(error).__name__
        raise MediaError(
            f"{path} is not a readable {kind}.", why=reason, fix=f"Copy or make the {kind} again, or remove it."
        ) from error


def _probe_picture(path: Path) -> MediaSize:
    with Image.open(path) as image:
        width, height = image.size
        # Asked for EXIF that the header does not have, PIL decodes all of a PNG.
        is_told = image.format == "PNG" and not _tells_more_at_the_end(path)
        exif = Image.Image.getexif(image) if is_told else image.getexif()
        if exif.get(ExifTags.Base.Orientation) in (5, 6, 7, 8):  # lies on its side
            width, height = height, width
    return MediaSize(width, height, frames=1, fps=0.0)


def _tells_more_at_the_end(path: Path) -> bool:
    """Say whether a PNG has chunks after its pixels that may say how it is turned."""
    has_pixels = False
    with path.open("rb", buffering=0) as file:
        file.seek(8)
        while len(start := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", start)
            has_pixels |= kind == b"IDAT"
            if has_pixels and kind in (b"eXIf", b"iTXt", b"tEXt", b"zTXt"):
                return True
            file.seek(length + 4, os.SEEK_CUR)
    return False


def _read_upright(path: Path) -> Image.Image:
    with Image.open(path) as opened:
        image = ImageOps.exif_transpose(opened)
    if image.mode.startswith("I"):  # 16 bits a pixel, which PIL would cut off at 255
        values = np.asarray(image).astype(np.int64)
        image = Image.fromarray((values >> 8 if values.max(initial=0) > 255 else values).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _probe_clip(path: Path) -> MediaSize:
    count, first = 0, None
    with av.open(str(path)) as container:
        stream = _video_stream(container)
        told = _told_frames(stream)
        for packet in container.demux(stream):
            count += packet.size > 0 and not packet.is_discard
            if first is None:
                # How a clip is turned is told by its frames alone.
                first = next(iter(packet.decode()), None)
            # Matroska and WebM do not say how many frames there are; their packets are counted, not decoded.
            if first is not None and (told or count == _COUNTED_FRAMES):
                break
        if first is None:
            raise ValueError("no frame of it can be decoded.")
        image, stretch = _upright(first, stream)
        rate = stream.average_rate or stream.guessed_rate
        return MediaSize(round(image.width * stretch), image.height, told or count, float(rate or 1))


def _told_frames(stream: av.VideoStream) -> int:
    """Return how many frames the header says there are; 0 if it does not, or if they last longer than the clip.

    A clip that was cut without encoding it again still has the frames from its last key frame on, and a list of edits that
    leaves them out.
    """
    if stream.duration and stream.time_base and stream.average_rate:
        seen = stream.duration * stream.time_base * stream.average_rate
        return 0 if seen < stream.frames - 0.5 else stream.frames
    return stream.frames


def _clip_frames(path: Path) -> Iterator[tuple[Image.Image, float]]:
    with av.open(str(path)) as container:
        stream = _video_stream(container)
        stream.thread_type = "AUTO"
        for frame in container.decode(stream):
            yield _upright(frame, stream)


def _video_stream(container: av.container.InputContainer) -> av.VideoStream:
    if not container.streams.video:
        raise ValueError("there are no pictures in it.")
    return container.streams.video[0]


def _upright(frame: av.VideoFrame, stream: av.VideoStream) -> tuple[Image.Image, float]:
    """Return a frame as it is to be seen, and the aspect of its pixels."""
    turns = round(frame.rotation / 90) % 4
    pixels = np.rot90(frame.to_ndarray(format="rgb24"), turns)
    aspect = float(stream.sample_aspect_ratio or 1)
    return Image.fromarray(np.ascontiguousarray(pixels)), 1 / aspect if turns % 2 else aspect
