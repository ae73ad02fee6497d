"""Buckets: the few shapes that all media of a data set are brought to, so that several fit into one batch.

A bucket is a size in pixels and a number of frames. Media go to the bucket whose aspect ratio is nearest to theirs and, if they
are clips, to the longest one that they can fill. How pixels get there is for ``pictures``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import overload

from wandistiller.errors import UsageError

# Short side to long side as cameras and screens have them; more steps would only make more buckets that do not fill a batch.
_ASPECTS = (1.0, 5 / 4, 4 / 3, 3 / 2, 16 / 9, 2.0, 21 / 9, 3.0, 4.0)


@dataclass(frozen=True)
class MediaSize:
    """What a file's header says of it, as it is seen: turned upright, pixels square."""

    width: int
    height: int
    frames: int
    fps: float
    """Frames a second; 0 for a picture."""

    @property
    def is_picture(self) -> bool:
        return self.fps == 0


@dataclass(frozen=True, order=True)
class Bucket:
    """A shape in pixels."""

    frames: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Frames, height, width."""
        return self.frames, self.height, self.width

    def __str__(self) -> str:
        """Return frames x height x width, as it is kept with cached latents."""
        return f"{self.frames}x{self.height}x{self.width}"


class AllOne(Sequence[Bucket]):
    """One bucket for each of many samples, in the room of one."""

    def __init__(self, bucket: Bucket, count: int) -> None:
        self.bucket = bucket
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Bucket: ...

    @overload
    def __getitem__(self, index: slice) -> AllOne: ...

    def __getitem__(self, index: int | slice) -> Bucket | AllOne:
        found = range(self._count)[index]
        return AllOne(self.bucket, len(found)) if isinstance(found, range) else self.bucket


def make_buckets(
    width: int,
    height: int,
    *,
    frame_counts: Sequence[int],
    multiple: int = 16,
    temporal: int = 4,
    max_aspect: float = 2.0,
) -> list[Bucket]:
    """Return ``width`` x ``height`` and the other usual aspect ratios of at most as many pixels, in every frame count.

    Sides are multiples of ``multiple``; no side is more than ``max_aspect`` times the other, but for ``width`` x ``height``
    themselves, and 1 gives these alone. Raises ``UsageError`` for what does not divide.
    """
    for flag, value in (("--width", width), ("--height", height)):
        if value < multiple or value % multiple:
            below, above = value // multiple * multiple, max(-(-value // multiple), 1) * multiple
            raise UsageError(
                f"{flag} {value} does not divide into this model's patches.",
                why=f"it must be a multiple of {multiple}.",
                fix=f"Take {flag} {above}" + (f" or {below}." if below else "."),
            )
    for count in frame_counts:
        if count < 1 or (count - 1) % temporal:
            below = max((count - 1) // temporal, 0) * temporal + 1
            raise UsageError(
                f"--frames {count} does not divide into this model's latent frames.",
                why=f"it must be one more than a multiple of {temporal}.",
                fix=f"Take --frames {below} or {below + temporal}.",
            )
    sizes = {(height, width)}
    if max_aspect > 1:
        for aspect in _ASPECTS:
            # Rounded down: no bucket takes more memory than the size that was asked for.
            long = round(math.sqrt(width * height * aspect) / multiple) * multiple
            short = width * height // long // multiple * multiple if long else 0
            if short and max(long, short) / min(long, short) <= max_aspect:
                sizes |= {(short, long), (long, short)}
        if max(width, height) / min(width, height) <= max_aspect:
            sizes.add((width, height))
    return sorted(Bucket(count, *size) for count in set(frame_counts) for size in sizes)


def largest_bucket(buckets: Iterable[Bucket | None]) -> Bucket:
    """Return the one with the most pixels; samples that have none do not count."""
    if isinstance(buckets, AllOne):
        return buckets.bucket
    return max({each for each in buckets if each is not None}, key=lambda each: math.prod(each.shape))


def choose_bucket(size: MediaSize, buckets: Sequence[Bucket]) -> Bucket | None:
    """Return the bucket for a picture or clip; None for a clip that is shorter than every bucket.

    A picture goes to one frame, whether or not that is among the frame counts. Small media are enlarged.
    """
    if size.is_picture:
        fitting = [replace(bucket, frames=1) for bucket in buckets]
    else:
        longest = max((bucket.frames for bucket in buckets if bucket.frames <= size.frames), default=None)
        fitting = [bucket for bucket in buckets if bucket.frames == longest]
    aspect = math.log(size.width / size.height)
    return min(
        fitting,
        # Of two that are as near, the larger.
        key=lambda bucket: (abs(math.log(bucket.width / bucket.height) - aspect), -bucket.width * bucket.height, bucket),
        default=None,
    )
