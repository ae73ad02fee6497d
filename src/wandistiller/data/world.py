"""A small world of captioned pictures and clips, made from a seed whenever they are asked for and never stored.

A scene is one or two things on a plain background: a thing has a size, a colour, a shape and a place on a grid of three by
three; in a clip the first thing may move by one cell of that grid. Two things differ in colour and in place and never touch.
A caption says all that there is to say: ``caption_of`` and ``parse_caption`` are each other's inverse, and a scene is
always drawn the same way, so whether a picture shows its caption can be checked without a model (see ``judge``).

Held-out scenes are never among those for training, whatever the seed, whether still or moving, in whichever order the two
things are named.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wandistiller.errors import UsageError

# The width of a thing as a share of the picture's smaller side. The largest is below a third, so that it fits a cell.
SIZES = {"small": 0.18, "large": 0.30}

# Any two of these colours and backgrounds are at least 120 apart in RGB, a thing and a background at least 130. Orange is
# left out: over black it is hardly told from yellow once it is blurred, and it is brown in the shade.
COLOURS = {
    "red": (225, 20, 35),
    "green": (20, 170, 50),
    "blue": (30, 70, 235),
    "yellow": (250, 235, 30),
    "purple": (170, 20, 200),
    "cyan": (0, 215, 230),
}
BACKGROUNDS = {
    "black": (0, 0, 0),
    "grey": (128, 128, 128),
    "white": (255, 255, 255),
    "brown": (100, 60, 30),
}

SHAPES = ("circle", "square", "triangle")

GRID = 3

# Row and column on the grid.
PLACES = {
    "top left": (0, 0),
    "top": (0, 1),
    "top right": (0, 2),
    "left": (1, 0),
    "centre": (1, 1),
    "right": (1, 2),
    "bottom left": (2, 0),
    "bottom": (2, 1),
    "bottom right": (2, 2),
}

# Rows and columns that a thing goes over a whole clip.
MOTIONS = {"still": (0, 0), "left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}

SMALLEST_SIDE = 32
HELD_OUT_ONE_IN = 10

_SUPERSAMPLING = 4
_PLACE_AT = {cell: place for place, cell in PLACES.items()}


@dataclass(frozen=True)
class Thing:
    """One coloured shape; ``place`` is where it is in the first frame."""

    size: str
    colour: str
    shape: str
    place: str

    def __post_init__(self) -> None:
        if self.size not in SIZES or self.colour not in COLOURS or self.shape not in SHAPES or self.place not in PLACES:
            raise ValueError(f"This world has no {self.size} {self.colour} {self.shape} at the {self.place}")

    def __str__(self) -> str:
        return f"a {self.size} {self.colour} {self.shape} at the {self.place}"


@dataclass(frozen=True)
class Scene:
    """All that a picture or clip shows. ``motion`` is that of the first thing; the second one always rests."""

    things: tuple[Thing, ...]
    background: str
    motion: str = "still"

    def __post_init__(self) -> None:
        if len(self.things) not in (1, 2) or self.background not in BACKGROUNDS:
            raise ValueError(f"A scene is one or two things on a known background: {self.things} on {self.background}")
        if len({thing.colour for thing in self.things}) + len({thing.place for thing in self.things}) != 2 * len(self.things):
            raise ValueError(f"Two things differ in colour and in place: {self.things}")
        if self.motion not in possible_motions(*(thing.place for thing in self.things)):
            raise ValueError(f"{self.things[0]} cannot move '{self.motion}' in the picture and past the other thing")


def place_after(place: str, motion: str) -> str | None:
    """Return where a thing is after a motion, or None if that is outside the picture."""
    (row, column), (down, right) = PLACES[place], MOTIONS[motion]
    return _PLACE_AT.get((row + down, column + right))


def possible_motions(place: str, *taken: str) -> tuple[str, ...]:
    """Return the motions that keep a thing in the picture and off the places that are taken; "still" is always one."""
    ends = {motion: place_after(place, motion) for motion in MOTIONS}
    return tuple(motion for motion, end in ends.items() if end is not None and end not in taken)


@functools.lru_cache(maxsize=2**16)
def scene_at(index: int, *, seed: int = 0, moving: bool = False, held_out: bool = False) -> Scene:
    """Return the scene with an index: the same one on every machine, each attribute drawn evenly from what is possible."""
    random = np.random.default_rng((seed, index))
    while True:
        scene = _draw(random, moving)
        if is_held_out(scene) == held_out:
            return scene


@functools.cache
def drawing_version() -> str:
    """Return what changes whenever scenes may be drawn or described in another way: a hash of this file."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _draw(random: np.random.Generator, moving: bool) -> Scene:
    # Without replacement, so that two things differ in both.
    colours = random.permutation(len(COLOURS))
    places = random.permutation(len(PLACES))
    things = tuple(
        Thing(
            size=_pick(random, tuple(SIZES)),
            colour=tuple(COLOURS)[colours[order]],
            shape=_pick(random, SHAPES),
            place=tuple(PLACES)[places[order]],
        )
        for order in range(1 + int(random.integers(2)))
    )
    background = _pick(random, tuple(BACKGROUNDS))
    motion = _pick(random, possible_motions(*(thing.place for thing in things))) if moving else "still"
    return Scene(things, background, motion)


def _pick(random: np.random.Generator, choices: tuple[str, ...]) -> str:
    return choices[int(random.integers(len(choices)))]


def is_held_out(scene: Scene) -> bool:
    """Say whether a scene is kept from training.

    Neither the motion nor the order of the things counts, or a picture kept from training could be seen there under
    another caption, or as the first frame of a clip.
    """
    text = " and ".join(sorted(map(str, scene.things))) + f" on {scene.background}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def caption_of(scene: Scene) -> str:
    """Describe a scene completely; that nothing moves is left unsaid."""
    caption = f"{' and '.join(map(str, scene.things))} on a {scene.background} background"
    if scene.motion == "still":
        return caption
    # With its colour, for both things may have the same shape.
    return f"{caption}, the {scene.things[0].colour} {scene.things[0].shape} moves {scene.motion}"


def parse_caption(text: str) -> Scene:
    """Return the scene that a caption describes; raises ``UsageError`` for any text that ``caption_of`` never returns."""
    found = _CAPTION.fullmatch(text)
    if found is None:
        raise _not_a_caption(text, "its words are not those of this world, or not in their order")
    first, second, background, subject, motion = found.groups()
    things = tuple(_parse_thing(part) for part in (first, second) if part is not None)
    if subject is not None and subject != f"{things[0].colour} {things[0].shape}":
        raise _not_a_caption(text, "only the thing that is named first can move")
    try:
        return Scene(things, background, motion or "still")
    except ValueError as error:
        raise _not_a_caption(text, str(error)) from error


def _parse_thing(text: str) -> Thing:
    _, size, colour, shape, _, _, place = text.split(" ", 6)
    return Thing(size, colour, shape, place)


def _not_a_caption(text: str, why: str) -> UsageError:
    example = caption_of(scene_at(0))
    return UsageError(f"Not a caption of the made-up world: '{text}'", why=why, fix=f"write one like '{example}'")


def _caption_pattern() -> re.Pattern[str]:
    def one_of(names: Iterable[str]) -> str:
        return f"(?:{'|'.join(names)})"

    kind = f"{one_of(COLOURS)} {one_of(SHAPES)}"
    thing = f"(a {one_of(SIZES)} {kind} at the {one_of(PLACES)})"
    moves = f"(?:, the ({kind}) moves ({one_of(name for name in MOTIONS if name != 'still')}))?"
    return re.compile(f"{thing}(?: and {thing})? on a ({one_of(BACKGROUNDS)}) background{moves}")


_CAPTION = _caption_pattern()


def render(scene: Scene, *, frames: int = 1, height: int = 32, width: int = 32) -> NDArray[np.uint8]:
    """Draw a scene with smooth edges, as (frames, height, width, 3).

    A motion is even and takes the whole clip: the last frame is where it ends.
    """
    check_extent(frames, height, width)
    picture = np.empty((frames, height, width, 3), np.uint8)
    picture[:] = BACKGROUNDS[scene.background]
    for order, thing in enumerate(scene.things):
        if order > 0 or scene.motion == "still" or frames == 1:
            _paint(picture, thing, 0.0, 0.0)
            continue
        down, right = MOTIONS[scene.motion]
        for frame in range(frames):
            done = frame / (frames - 1)
            _paint(picture[frame : frame + 1], thing, done * down, done * right)
    return picture


def check_extent(frames: int, height: int, width: int) -> None:
    """Refuse pictures so small that shapes can no longer be told apart, and clips of no frames."""
    if frames < 1:
        raise UsageError(f"The procedural world has no clips of {frames} frames.", fix="Ask for at least 1 frame.")
    if min(height, width) < SMALLEST_SIDE:
        raise UsageError(
            f"The procedural world has no pictures of {height}x{width}.",
            why="shapes cannot be told apart in so few pixels.",
            fix=f"Make both sides at least {SMALLEST_SIDE}.",
        )


def mask_of(size: str, shape: str, *, side: int, centre: tuple[float, float], extent: int) -> NDArray[np.float32]:
    """Return how much of each pixel, from 0 to 1, a thing covers: (extent, extent), around a centre (y, x) in pixels.

    The thing is as large as in a picture whose smaller side is ``side``, and must fit.
    """
    patch = _patch(size, shape, *centre, side)
    mask = np.zeros((extent, extent), np.float32)
    mask[patch.rows, patch.columns] = patch.cover
    return mask


def _paint(picture: NDArray[np.uint8], thing: Thing, down: float, right: float) -> None:
    """Draw a thing into all frames of a clip, moved by so many cells."""
    height, width = picture.shape[1:3]
    patch = _kept_patch(thing.size, thing.shape, *_centre(thing.place, down, right, height, width), min(height, width))
    cover = patch.cover[..., None]
    # Only the pixels around the thing become floats; a whole clip of them would be four times the memory.
    behind = picture[:, patch.rows, patch.columns]
    colour = np.array(COLOURS[thing.colour], np.float32)
    picture[:, patch.rows, patch.columns] = np.rint(behind + cover * (colour - behind)).astype(np.uint8)


def _centre(place: str, down: float, right: float, height: int, width: int) -> tuple[float, float]:
    row, column = PLACES[place]
    return (row + 0.5 + down) * height / GRID, (column + 0.5 + right) * width / GRID


@dataclass(frozen=True)
class _Patch:
    """The cover of the pixels around a thing, and where in the picture they are."""

    rows: slice
    columns: slice
    cover: NDArray[np.float32]


def _patch(size: str, shape: str, y: float, x: float, side: int) -> _Patch:
    radius = SIZES[size] * side / 2
    rows, columns = (slice(int(np.floor(at - radius)), int(np.ceil(at + radius))) for at in (y, x))
    dy = (_sample_points(rows) - y)[:, None]
    dx = np.abs(_sample_points(columns) - x)[None, :]
    if shape == "circle":
        inside = dx**2 + dy**2 <= radius**2
    elif shape == "square":
        inside = (dx <= radius) & (np.abs(dy) <= radius)
    else:
        # Point up, as wide at its foot as it is high.
        inside = (dx <= (dy + radius) / 2) & (dy <= radius)
    blocks = inside.reshape(rows.stop - rows.start, _SUPERSAMPLING, columns.stop - columns.start, _SUPERSAMPLING)
    cover = blocks.mean(axis=(1, 3), dtype=np.float32)
    cover.flags.writeable = False
    return _Patch(rows, columns, cover)


# Things at rest are drawn over and over in the same 54 ways. At 512 pixels a side this keeps 12 MiB.
_kept_patch = functools.lru_cache(maxsize=128)(_patch)


def _sample_points(pixels: slice) -> NDArray[np.float64]:
    count = (pixels.stop - pixels.start) * _SUPERSAMPLING
    return pixels.start + (np.arange(count) + 0.5) / _SUPERSAMPLING


@dataclass(frozen=True)
class World:
    """A sequence of captioned pictures, or of clips if they have more than one frame."""

    count: int
    _: KW_ONLY
    frames: int = 1
    height: int = 32
    width: int = 32
    seed: int = 0
    held_out: bool = False
    """Scenes that no other world, of any seed, has unless it is held out too."""

    def __post_init__(self) -> None:
        check_extent(self.frames, self.height, self.width)

    def __len__(self) -> int:
        return self.count

    def scene(self, index: int) -> Scene:
        if not 0 <= index < self.count:
            raise IndexError(f"{index} is outside a world of {self.count}")
        return scene_at(index, seed=self.seed, moving=self.frames > 1, held_out=self.held_out)

    def caption(self, index: int) -> str:
        return caption_of(self.scene(index))

    def name(self, index: int) -> str:
        if not 0 <= index < self.count:
            raise IndexError(f"{index} is outside a world of {self.count}")
        return f"world-{index:06d}"

    def frames_of(self, index: int) -> NDArray[np.uint8]:
        """Return (frames, height, width, 3), drawn now."""
        return render(self.scene(index), frames=self.frames, height=self.height, width=self.width)
