"""Says for each attribute of a caption of the made-up world whether a picture or clip shows it.

A picture is looked at without its caption first. Its background is the one that most pixels are nearest to. Every pixel is
then a mixture of that and of one colour, so that smooth and blurred edges count for the thing that they belong to. In each
colour the size and shape is seen that is most like the pixels of it, wherever it fits best; its place is the cell that its
centre is in. What no colour of the world explains may still be a thing of an unknown colour.

Things of the caption are matched to things seen by colour, and those left over by place, the nearest first. A thing of which
nothing is seen has all its attributes wrong. In a clip the size, colour and shape of a thing and the background must hold in
the first and in the last frame, the place is that in the first, and the motion is what lies between the two.

What the caption does not speak of is not marked: things too many, and what happens between the first and the last frame.

Pictures that have nothing to do with their captions are marked by chance, which is below 1 / choices for size and shape,
as there may be nothing to see of a thing, and above it for place, as things left over are matched by it. For captions and
pictures drawn as ``world`` draws them: size 0.42, colour 0.25, shape 0.28, place 0.13, background 0.25, motion 0.21.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wandistiller.data.world import (
    BACKGROUNDS,
    COLOURS,
    GRID,
    MOTIONS,
    PLACES,
    SHAPES,
    SIZES,
    Scene,
    Thing,
    mask_of,
    parse_caption,
)

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("size", "colour", "shape", "place", "background", "motion")

# A thing is seen only if its template and the pixels of its colour have this much in common, of what either has.
LEAST_OVERLAP = 0.3
# A background is seen only if this much of the picture is nearest to it. Things take up a fifth at most.
LEAST_BACKGROUND = 0.5
# A pixel farther than this in RGB from every mixture of the background and one colour belongs to no colour.
FARTHEST_FROM_COLOUR = 80.0
# A pixel this far from the background is half covered by a thing, if nothing is known about its colour.
HALF_UNKNOWN = 90.0
# Templates are compared at no more than this: larger pictures are shrunk, which costs little and averages noise.
LARGEST_SIDE = 48
# Blurs, as shares of the smaller side, that a thing may have and still be compared with its like.
BLURS = (0.0, 0.03, 0.05)

Cover = NDArray[np.float32]


@dataclass(frozen=True)
class Finding:
    """One attribute: what the caption says and what was seen, None if nothing was."""

    kind: str
    expected: str
    seen: str | None

    @property
    def is_right(self) -> bool:
        return self.seen == self.expected


@dataclass(frozen=True)
class Verdict:
    """All attributes of one caption, those of each thing in its order, then the background, then the motion of a clip."""

    findings: tuple[Finding, ...]

    def of(self, kind: str) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.kind == kind)

    @property
    def is_right(self) -> bool:
        return all(finding.is_right for finding in self.findings)


@dataclass
class Marks:
    """How many attributes of each kind were right, over many verdicts."""

    right: Counter[str] = field(default_factory=Counter)
    total: Counter[str] = field(default_factory=Counter)

    def add(self, verdict: Verdict) -> None:
        self.total.update(finding.kind for finding in verdict.findings)
        self.right.update(finding.kind for finding in verdict.findings if finding.is_right)

    def share(self, kind: str) -> float:
        """Return the share that was right; not a number if there was nothing of the kind."""
        return self.right[kind] / self.total[kind] if self.total[kind] else math.nan

    @property
    def shares(self) -> dict[str, float]:
        return {kind: self.share(kind) for kind in KINDS if self.total[kind]}

    @property
    def overall(self) -> float:
        return self.right.total() / self.total.total() if self.total else math.nan

    def __str__(self) -> str:
        return " ".join(f"{kind} {share:.2f}" for kind, share in (self.shares | {"overall": self.overall}).items())


@dataclass(frozen=True)
class Seen:
    """A thing in a picture; ``colour`` is None if it is none of this world."""

    size: str
    colour: str | None
    shape: str
    row: float
    """Where its centre is, in cells of the grid from the top: 0.5 is in the middle of the upper row."""
    column: float
    """The same from the left."""

    @property
    def place(self) -> str:
        return next(place for place, cell in PLACES.items() if cell == (int(self.row), int(self.column)))


@dataclass(frozen=True)
class View:
    """All that is seen in one picture."""

    things: tuple[Seen, ...]
    background: str | None


def judge_many(clips: Iterable[NDArray[np.uint8] | Tensor], captions: Iterable[str | Scene]) -> Marks:
    """Judge each clip by its caption."""
    marks = Marks()
    for frames, caption in zip(clips, captions, strict=True):
        marks.add(judge(frames, caption))
    return marks


def judge(frames: NDArray[np.uint8] | Tensor, caption_or_scene: str | Scene) -> Verdict:
    """Judge a picture or clip, whole numbers from 0 to 255 as (frames, height, width, 3); motion only with 2 frames or more."""
    scene = parse_caption(caption_or_scene) if isinstance(caption_or_scene, str) else caption_or_scene
    clip = frames if isinstance(frames, np.ndarray) else frames.detach().cpu().numpy()
    if clip.ndim != 4 or clip.shape[0] < 1 or clip.shape[3] != 3 or clip.dtype != np.uint8:
        raise ValueError(f"A clip to judge is uint8 (frames, height, width, 3), not {clip.dtype} {clip.shape}")
    first = look(clip[0])
    last = look(clip[-1]) if len(clip) > 1 else first

    findings = []
    starts = _match(scene.things, first.things)
    ends = [None if seen is None else _again(seen, last.things) for seen in starts]
    for thing, start, end in zip(scene.things, starts, ends, strict=True):
        for kind in ("size", "colour", "shape"):
            expected = getattr(thing, kind)
            findings.append(Finding(kind, expected, _differing(expected, getattr(start, kind, None), getattr(end, kind, None))))
        findings.append(Finding("place", thing.place, start.place if start else None))
    background = _differing(scene.background, first.background, last.background)
    findings.append(Finding("background", scene.background, background))
    if len(clip) > 1:
        findings.append(Finding("motion", scene.motion, _motion_between(starts[0], ends[0])))
    return Verdict(tuple(findings))


def _differing(expected: str, first: str | None, last: str | None) -> str | None:
    """Return what is seen in the first frame, or in the last one if only that is not as expected."""
    return last if first == expected else first


def _match(things: Sequence[Thing], seen: Sequence[Seen]) -> list[Seen | None]:
    """Return what is seen of each thing."""
    by_colour = {one.colour: one for one in seen}
    matches = [by_colour.get(thing.colour) for thing in things]
    spare = [one for one in seen if one not in matches]
    pairs = [(_distance(thing.place, one), order, one) for order, thing in enumerate(things) for one in spare]
    for _, order, one in sorted(pairs, key=lambda pair: pair[0]):
        if matches[order] is None and one not in matches:
            matches[order] = one
    return matches


def _again(thing: Seen, seen: Sequence[Seen]) -> Seen | None:
    """Return the same thing as it is seen in a later frame."""
    alike = [one for one in seen if one.colour == thing.colour]
    return min(alike, key=lambda one: math.dist((thing.row, thing.column), (one.row, one.column)), default=None)


def _distance(place: str, seen: Seen) -> float:
    row, column = PLACES[place]
    return math.dist((row + 0.5, column + 0.5), (seen.row, seen.column))


def _motion_between(start: Seen | None, end: Seen | None) -> str | None:
    """Return the motion to the nearest whole cell, None if it is more than one cell or aslant."""
    if start is None or end is None:
        return None
    cells = (round(end.row - start.row), round(end.column - start.column))
    return next((motion for motion, direction in MOTIONS.items() if direction == cells), None)


def look(picture: NDArray[np.uint8]) -> View:
    """Say what is seen in a picture (height, width, 3), knowing nothing of its caption."""
    pixels = _shrunk(picture).astype(np.float32)
    background, behind = _find_background(pixels)
    offset = pixels - behind
    unexplained = _sharpened(np.linalg.norm(offset, axis=-1) / (2 * HALF_UNKNOWN))
    found = []
    for colour, cover in zip(COLOURS, _colour_covers(offset, behind), strict=True):
        fit = fit_template(cover)
        if fit is not None:
            found.append(fit.seen(colour))
            unexplained = fit.taken_from(unexplained) * (cover == 0)
    while len(found) < 2 and (fit := fit_template(unexplained)) is not None:
        found.append(fit.seen(None))
        unexplained = fit.taken_from(unexplained)
    return View(tuple(found), background)


def _shrunk(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width = picture.shape[:2]
    scale = LARGEST_SIDE / min(height, width)
    if scale >= 1:
        return picture
    return np.asarray(Image.fromarray(picture).resize((round(scale * width), round(scale * height)), Image.Resampling.BOX))


def _find_background(pixels: NDArray[np.float32]) -> tuple[str | None, NDArray[np.float32]]:
    """Return the name of the background, None if too little of the picture has it, and its colour as it is here."""
    palette = np.array([*BACKGROUNDS.values(), *COLOURS.values()], np.float32)
    # |pixel - colour|^2 without the part that is the same for all colours.
    distances = (palette**2).sum(axis=1) - 2 * pixels @ palette.T
    nearest = distances.argmin(axis=-1)
    counts = np.bincount(nearest.ravel(), minlength=len(palette))[: len(BACKGROUNDS)]
    most = int(counts.argmax())
    if counts[most] == 0:
        return None, palette[most]
    name = tuple(BACKGROUNDS)[most] if counts[most] >= LEAST_BACKGROUND * nearest.size else None
    return name, np.median(pixels[nearest == most], axis=0)


def _colour_covers(offset: NDArray[np.float32], behind: NDArray[np.float32]) -> Cover:
    """Return how much of each pixel each colour covers: (colours, height, width); a pixel has cover of one colour alone."""
    flat = offset.reshape(-1, 3).T
    directions = np.array([*COLOURS.values()], np.float32) - behind
    lengths = (directions**2).sum(axis=1, keepdims=True)
    along = directions @ flat
    cover = np.clip(along / lengths, 0, 1)
    # |offset - cover * direction|^2, written out.
    misses = (flat**2).sum(axis=0) - cover * (2 * along - cover * lengths)
    is_of = (misses == misses.min(axis=0)) & (misses <= FARTHEST_FROM_COLOUR**2)
    return (_sharpened(cover) * is_of).reshape(-1, *offset.shape[:2])


def _sharpened(cover: NDArray[np.float32]) -> Cover:
    """Push cover towards none and full, so that noise over the background does not add up."""
    return np.clip(2 * cover - 0.5, 0, 1)


@dataclass(frozen=True)
class Fit:
    """The template that a cover is most like, with its centre in cells and its pixels at a corner of the picture."""

    size: str
    shape: str
    row: float
    column: float
    top: int
    left: int
    mask: Cover

    def seen(self, colour: str | None) -> Seen:
        return Seen(self.size, colour, self.shape, self.row, self.column)

    def taken_from(self, cover: Cover) -> Cover:
        """Return a cover less what the template has of it."""
        extent = len(self.mask)
        padded = np.pad(cover, extent // 2)
        padded[self.top : self.top + extent, self.left : self.left + extent] *= 1 - self.mask
        inner = slice(extent // 2, -(extent // 2))
        return padded[inner, inner]


def fit_template(cover: Cover) -> Fit | None:
    """Return the template, anywhere in a picture, that is most like a cover; None if the two have little in common.

    Likeness is the length of the cover along the template, so that a faint thing counts as what it has the outline of.
    """
    height, width = cover.shape
    templates = _templates(min(height, width))
    # Too little or too much for any template to have enough in common with.
    if not LEAST_OVERLAP * templates.least_area <= cover.sum() <= templates.largest_area / LEAST_OVERLAP:
        return None
    extent = templates.extent
    padded = np.pad(cover, extent // 2)
    # For each size and shape the best position to the nearest pixel, by the sharp template; then what is around it there is
    # compared with the blurred ones too, and to a quarter of a pixel.
    likeness = np.fft.irfft2(np.fft.rfft2(padded) * _spectra(height, width), padded.shape)[:, :height, :width]
    corners = [divmod(int(index), width) for index in likeness.reshape(len(likeness), -1).argmax(axis=1)]
    around = np.stack([padded[top : top + extent, left : left + extent] for top, left in corners])
    fine = np.einsum("kvp,kp->kv", templates.units, around.reshape(len(around), -1))
    kind, variant = divmod(int(fine.argmax()), fine.shape[1])
    mask = templates.masks[kind, variant]
    both = float(np.minimum(mask, around[kind]).sum())
    if both < LEAST_OVERLAP * (float(mask.sum() + cover.sum()) - both):
        return None
    (top, left), (down, right) = corners[kind], templates.offsets[variant]
    size, shape = templates.kinds[kind]
    row, column = (top + 0.5 + down) / height, (left + 0.5 + right) / width
    return Fit(size, shape, GRID * _inside(row), GRID * _inside(column), top, left, mask)


def _inside(share: float) -> float:
    return min(max(share, 0.0), math.nextafter(1.0, 0.0))


@dataclass(frozen=True)
class _Templates:
    """How each size and shape looks, sharp and blurred, on and a little off the centre of a square of pixels."""

    kinds: tuple[tuple[str, str], ...]
    """Sizes and shapes."""
    offsets: tuple[tuple[float, float], ...]
    """How far down and right of the centre each variant is, in pixels."""
    masks: Cover
    """(kinds, variants, extent, extent)"""
    units: Cover
    """(kinds, variants, extent * extent): the masks at length 1."""
    sharp_in_centre: int
    """The variant that is neither blurred nor off the centre."""

    @property
    def extent(self) -> int:
        return self.masks.shape[-1]

    @functools.cached_property
    def least_area(self) -> float:
        return float(self.masks.sum(axis=(2, 3)).min())

    @functools.cached_property
    def largest_area(self) -> float:
        return float(self.masks.sum(axis=(2, 3)).max())


@functools.lru_cache(maxsize=4)
def _templates(side: int) -> _Templates:
    reach = math.ceil(side * (max(SIZES.values()) / 2 + 2 * max(BLURS)) + 1)
    extent = 2 * reach + 1
    kinds = tuple(itertools.product(SIZES, SHAPES))
    steps = (-0.5, -0.25, 0.0, 0.25, 0.5)
    offsets = tuple(itertools.product(steps, steps))
    sharp = np.empty((len(kinds), len(offsets), extent, extent), np.float32)
    for kind, (size, shape) in enumerate(kinds):
        for variant, (down, right) in enumerate(offsets):
            centre = (reach + 0.5 + down, reach + 0.5 + right)
            sharp[kind, variant] = mask_of(size, shape, side=side, centre=centre, extent=extent)
    masks = _sharpened(np.concatenate([_blurred(sharp, blur * side) for blur in BLURS], axis=1))
    units = masks.reshape(*masks.shape[:2], -1)
    units = units / np.linalg.norm(units, axis=-1, keepdims=True)
    return _Templates(kinds, offsets * len(BLURS), masks, units, offsets.index((0.0, 0.0)))


def _blurred(masks: Cover, sigma: float) -> Cover:
    if sigma == 0:
        return masks
    pixels = np.arange(masks.shape[-1])
    weights = np.exp(-0.5 * ((pixels[:, None] - pixels) / sigma) ** 2)
    weights = (weights / weights.sum(axis=1).max()).astype(np.float32)
    return np.asarray(weights @ masks @ weights.T, np.float32)


@functools.lru_cache(maxsize=8)
def _spectra(height: int, width: int) -> NDArray[np.complex64]:
    """Return what a picture's spectrum is multiplied with to compare it with each size and shape at every pixel."""
    templates = _templates(min(height, width))
    extent = templates.extent
    kernels = templates.units[:, templates.sharp_in_centre].reshape(-1, extent, extent)
    return np.conj(np.fft.rfft2(kernels, (height + extent - 1, width + extent - 1)))
