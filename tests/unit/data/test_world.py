import itertools
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from wandistiller.data.world import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    PLACES,
    SHAPES,
    SIZES,
    Scene,
    Thing,
    World,
    caption_of,
    is_held_out,
    parse_caption,
    possible_motions,
    render,
    scene_at,
)
from wandistiller.errors import UsageError

RED = Thing("large", "red", "circle", "top left")
BLUE = Thing("small", "blue", "square", "right")


def centre_of(thing, frame, background):
    """Where a thing's pixels are, from the picture alone: rows and columns from the upper left corner, in pixels."""
    # Each pixel's share of the way from the background to the colour. Two things never share a pixel.
    there = np.array(COLOURS[thing.colour], float) - BACKGROUNDS[background]
    weight = np.clip((frame - np.array(BACKGROUNDS[background], float)) @ there / (there @ there), 0, 1)
    rows, columns = np.indices(weight.shape) + 0.5
    return np.array([(weight * rows).sum(), (weight * columns).sum()]) / weight.sum()


def test_all_colours_and_backgrounds_are_far_apart():
    palette = [*COLOURS.values(), *BACKGROUNDS.values()]
    assert min(np.linalg.norm(np.subtract(*pair)) for pair in itertools.combinations(palette, 2)) >= 120
    pairs = itertools.product(COLOURS.values(), BACKGROUNDS.values())
    assert min(np.linalg.norm(np.subtract(*pair)) for pair in pairs) >= 130


def test_captions_by_hand():
    assert caption_of(Scene((RED,), "grey")) == "a large red circle at the top left on a grey background"
    assert caption_of(Scene((RED, BLUE), "grey", "down")) == (
        "a large red circle at the top left and a small blue square at the right on a grey background, "
        "the red circle moves down"
    )


@pytest.mark.parametrize("moving", [False, True])
def test_captions_are_parsed_to_the_scene_they_describe(moving):
    for index in range(1500):
        scene = scene_at(index, seed=5, moving=moving, held_out=index % 2 == 0)
        assert parse_caption(caption_of(scene)) == scene


def test_pictures_say_nothing_about_motion():
    assert all(scene_at(index).motion == "still" and "moves" not in caption_of(scene_at(index)) for index in range(200))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a cat on a mat",
        "a large red circle at the top left",
        "A large red circle at the top left on a grey background",
        " a large red circle at the top left on a grey background",
        "a large red circle at the top left on a grey background ",
        "a large red circle at the top left on a grey background.",
        "a huge red circle at the top left on a grey background",
        "a large pink circle at the top left on a grey background",
        "a large red circle at the middle on a grey background",
        "a large red circle at the top left on a red background",
        "a large red circle at the top left on a grey background\n",
        # Two things of one colour, or in one place.
        "a large red circle at the top left and a small red square at the right on a grey background",
        "a large red circle at the top left and a small blue square at the top left on a grey background",
        # Motions that cannot be: out of the picture, of the second thing, over it, of no thing, none at all.
        "a large red circle at the top left on a grey background, the red circle moves left",
        "a large red circle at the top and a small blue square at the left on a grey background, the blue square moves down",
        "a large red circle at the top and a small blue square at the centre on a grey background, the red circle moves down",
        "a large red circle at the top left on a grey background, the blue circle moves down",
        "a large red circle at the top left on a grey background, the red circle moves still",
    ],
)
def test_what_is_not_a_caption_is_refused(text):
    with pytest.raises(UsageError, match="Not a caption"):
        parse_caption(text)


def test_scenes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="has no huge red circle"):
        Thing("huge", "red", "circle", "top")
    with pytest.raises(ValueError, match="differ in colour and in place"):
        Scene((RED, Thing("small", "red", "square", "right")), "grey")
    with pytest.raises(ValueError, match="one or two things"):
        Scene((), "grey")
    with pytest.raises(ValueError, match="cannot move"):
        Scene((RED,), "grey", "up")


def test_possible_motions_by_hand():
    assert possible_motions("top left") == ("still", "right", "down")
    assert possible_motions("centre") == ("still", "left", "right", "up", "down")
    assert possible_motions("centre", "top") == ("still", "left", "right", "down")


def test_scenes_are_the_same_in_a_fresh_process():
    wanted = [caption_of(scene_at(index, seed=3, moving=True, held_out=True)) for index in range(40)]
    code = (
        "from wandistiller.data.world import caption_of, render, scene_at; import hashlib\n"
        "scenes = [scene_at(index, seed=3, moving=True, held_out=True) for index in range(40)]\n"
        "print('\\n'.join(map(caption_of, scenes)))\n"
        "print(hashlib.sha256(render(scenes[7], frames=5).tobytes()).hexdigest())\n"
    )
    # A salt of its own for hash(), as every process has.
    ran = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for salt in ("1", "2")
    ]
    assert ran[0] == ran[1]
    assert ran[0][:-1] == wanted


def test_seeds_and_indices_give_different_scenes():
    scenes = [scene_at(index, seed=seed) for seed in range(4) for index in range(50)]
    assert len(set(scenes)) > 180


def test_attributes_are_even():
    scenes = [scene_at(index, seed=1) for index in range(3000)]
    things = [thing for scene in scenes for thing in scene.things]
    for choices, values in [
        (SIZES, [thing.size for thing in things]),
        (COLOURS, [thing.colour for thing in things]),
        (SHAPES, [thing.shape for thing in things]),
        (PLACES, [thing.place for thing in things]),
        (BACKGROUNDS, [scene.background for scene in scenes]),
        ((1, 2), [len(scene.things) for scene in scenes]),
    ]:
        counts = Counter(values)
        assert set(counts) == set(choices)
        # Four standard deviations of that many draws; which scenes are held out tilts it by less.
        share = 1 / len(choices)
        allowed = 4 * np.sqrt(share * (1 - share) / len(values))
        assert all(count / len(values) == pytest.approx(share, abs=allowed) for count in counts.values())


def test_moving_scenes_move_in_every_way():
    motions = Counter(scene_at(index, moving=True).motion for index in range(1000))
    assert set(motions) == set(MOTIONS)
    assert min(motions.values()) > 100


def test_held_out_scenes_are_never_for_training():
    training = {
        frozenset((*scene.things, scene.background))
        for seed, moving in itertools.product((0, 1), (False, True))
        for scene in (scene_at(index, seed=seed, moving=moving) for index in range(1500))
    }
    held_out = {
        frozenset((*scene.things, scene.background))
        for seed, moving in itertools.product((0, 1), (False, True))
        for scene in (scene_at(index, seed=seed, moving=moving, held_out=True) for index in range(300))
    }
    assert len(held_out) > 400
    assert not training & held_out


def test_one_scene_in_ten_is_held_out():
    thing = [Thing(*values) for values in itertools.product(SIZES, COLOURS, SHAPES, PLACES)]
    held_out = [is_held_out(Scene((one,), background)) for one in thing for background in BACKGROUNDS]
    assert len(held_out) == 1296
    # Three standard deviations of 1,296 draws at 1 in 10 are 2.5 %.
    assert np.mean(held_out) == pytest.approx(0.1, abs=0.025)


def test_the_order_of_things_and_the_motion_do_not_change_the_side():
    for index in range(300):
        scene = scene_at(index, moving=True, held_out=index % 2 == 0)
        assert is_held_out(Scene(scene.things[::-1], scene.background)) == is_held_out(scene) == (index % 2 == 0)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (48, 64), (101, 37)])
def test_colours_and_areas_by_hand(height, width):
    for size, shape in itertools.product(SIZES, SHAPES):
        frame = render(Scene((Thing(size, "red", shape, "centre"),), "black"), height=height, width=width)[0]
        # The middle of the picture lies in all shapes in its centre.
        assert tuple(frame[height // 2, width // 2]) == COLOURS["red"]
        assert tuple(frame[0, 0]) == tuple(frame[-1, -1]) == BACKGROUNDS["black"]
        across = SIZES[size] * min(height, width)
        wanted = across**2 * {"circle": np.pi / 4, "square": 1, "triangle": 1 / 2}[shape]
        assert frame[..., 0].astype(float).sum() / COLOURS["red"][0] == pytest.approx(wanted, rel=0.1)


def test_a_triangle_stands_on_its_foot():
    frame = render(Scene((Thing("large", "red", "triangle", "centre"),), "black"), height=90, width=90)[0]
    widths = (frame[..., 0] > 128).sum(axis=1)[31:58]
    assert widths[0] <= 3
    assert widths[-1] >= 25
    assert all(below >= above for above, below in itertools.pairwise(widths))


def test_edges_are_smooth():
    frame = render(Scene((Thing("large", "red", "circle", "centre"),), "black"))[0]
    assert len(np.unique(frame[..., 0])) > 4


def shown_by(things, scene, motion, **extent):
    """Which pixels differ from the background."""
    clip = render(Scene(things, scene.background, motion), frames=5, **extent)
    return (clip != np.array(BACKGROUNDS[scene.background], np.uint8)).any(axis=-1)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (35, 48), (64, 40)])
def test_two_things_never_touch(height, width):
    for index in range(200):
        scene = scene_at(index, seed=2, moving=True)
        if len(scene.things) == 2:
            first = shown_by(scene.things[:1], scene, scene.motion, height=height, width=width)
            second = shown_by(scene.things[1:], scene, "still", height=height, width=width)
            assert first.any(axis=(1, 2)).all()
            assert second.any(axis=(1, 2)).all()
            assert not (first & second).any()


# From 60 pixels on the largest thing is more than one pixel away from the rim.
@pytest.mark.parametrize(("height", "width"), [(60, 60), (60, 100)])
def test_things_stay_in_the_picture(height, width):
    for index in range(150):
        scene = scene_at(index, seed=2, moving=True)
        shown = shown_by(scene.things, scene, scene.motion, height=height, width=width)
        assert not shown[:, [0, -1], :].any()
        assert not shown[:, :, [0, -1]].any()


@pytest.mark.parametrize(("frames", "height", "width"), [(5, 32, 32), (2, 48, 64), (9, 64, 64)])
def test_a_moving_thing_goes_one_cell_evenly(frames, height, width):
    for index in range(100):
        scene = scene_at(index, seed=4, moving=True)
        clip = render(Scene(scene.things[:1], scene.background, scene.motion), frames=frames, height=height, width=width)
        centres = np.array([centre_of(scene.things[0], frame, scene.background) for frame in clip])
        wanted = np.multiply(MOTIONS[scene.motion], (height / 3, width / 3))
        np.testing.assert_allclose(centres[-1] - centres[0], wanted, atol=0.25)
        np.testing.assert_allclose(np.diff(centres, axis=0), np.tile(wanted / (frames - 1), (frames - 1, 1)), atol=0.35)


def test_the_second_thing_rests():
    scene = Scene((RED, BLUE), "grey", "down")
    clip = render(scene, frames=4)
    alone = render(Scene((BLUE,), "grey"))[0]
    right = np.s_[11:21, 22:]
    assert all((frame[right] == alone[right]).all() for frame in clip)


def test_things_are_where_the_caption_says():
    for place, (row, column) in PLACES.items():
        thing = Thing("small", "green", "circle", place)
        found = centre_of(thing, render(Scene((thing,), "white"), height=48, width=96)[0], "white")
        np.testing.assert_allclose(found, ((row + 0.5) * 16, (column + 0.5) * 32), atol=0.1)


@pytest.mark.parametrize(("frames", "height", "width"), [(0, 32, 32), (1, 31, 64), (1, 64, 16)])
def test_what_cannot_be_drawn_is_refused(frames, height, width):
    with pytest.raises(UsageError, match="at least"):
        render(Scene((RED,), "grey"), frames=frames, height=height, width=width)
    with pytest.raises(UsageError, match=r"^The procedural world has no [^\n]*\.\n[^$]*at least [^\n]*\.$"):
        World(3, frames=frames, height=height, width=width)


def test_a_world_is_a_sequence():
    world = World(200, frames=3, height=32, width=48, seed=9, held_out=True)
    assert len(world) == 200
    assert world.name(123) == "world-000123"
    assert world.scene(123) == scene_at(123, seed=9, moving=True, held_out=True)
    assert world.caption(123) == caption_of(world.scene(123))
    assert world.frames_of(123).shape == (3, 32, 48, 3)
    assert world.frames_of(123).dtype == np.uint8
    np.testing.assert_array_equal(world.frames_of(123), render(world.scene(123), frames=3, height=32, width=48))
    for outside in (-1, 200):
        for ask in (world.scene, world.caption, world.name, world.frames_of):
            with pytest.raises(IndexError):
                ask(outside)


def test_a_world_of_pictures_does_not_move():
    assert all(World(100).scene(index).motion == "still" for index in range(100))
