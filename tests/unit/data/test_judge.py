import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from wandistiller.data.judge import KINDS, Finding, Marks, Verdict, judge, judge_many, look
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
    possible_motions,
    render,
    scene_at,
)
from wandistiller.errors import UsageError

SIZES_OF_PICTURES = [(32, 32), (48, 64), (64, 64)]
OF_THINGS = ("size", "colour", "shape", "place")


def clips_and_captions(world):
    return [world.frames_of(index) for index in range(len(world))], [world.caption(index) for index in range(len(world))]


def kinds_of(frames):
    return set(KINDS) if frames > 1 else set(KINDS) - {"motion"}


def spoilt(frames, random, *, noise=0.0, blur=0.0):
    soft = [np.asarray(Image.fromarray(frame).filter(ImageFilter.GaussianBlur(blur))) for frame in frames]
    return np.clip(np.rint(soft + random.normal(0, noise, frames.shape)), 0, 255).astype(np.uint8)


@pytest.mark.parametrize(("height", "width"), SIZES_OF_PICTURES)
@pytest.mark.parametrize(("frames", "count"), [(1, 200), (3, 100)])
def test_what_was_drawn_is_right(frames, count, height, width):
    marks = judge_many(*clips_and_captions(World(count, frames=frames, height=height, width=width, seed=11)))
    assert set(marks.shares) == kinds_of(frames)
    assert min(marks.shares.values()) >= 0.99


@pytest.mark.parametrize(("height", "width"), [(33, 57), (96, 32), (240, 416)])
def test_pictures_of_any_size_are_judged(height, width):
    marks = judge_many(*clips_and_captions(World(60, height=height, width=width, seed=12)))
    assert marks.overall >= 0.99


@pytest.mark.parametrize(
    ("noise", "blur"),
    [(20.0, 0.0), (20.0, 0.7), (0.0, 1.5)],
    ids=["noise", "noise and blur", "blur"],
)
@pytest.mark.parametrize(("frames", "count"), [(1, 150), (2, 75)])
def test_noise_and_blur_do_not_mislead(frames, count, noise, blur):
    random = np.random.default_rng(1)
    clips, captions = clips_and_captions(World(count, frames=frames, seed=13))
    marks = judge_many([spoilt(clip, random, noise=noise, blur=blur) for clip in clips], captions)
    assert min(marks.shares.values()) >= 0.97


def test_a_few_pixels_off_the_place_do_not_mislead():
    # A fifth of a cell, which no one would call another place.
    clips, captions = clips_and_captions(World(200, seed=14))
    marks = judge_many([np.roll(clip, (2, -2), axis=(1, 2)) for clip in clips], captions)
    assert min(marks.shares.values()) >= 0.97


def test_pale_things_keep_their_outline():
    clips, captions = clips_and_captions(World(120, height=48, width=48, seed=15))
    marks = judge_many([np.rint(128 + 0.6 * (clip - 128.0)).astype(np.uint8) for clip in clips], captions)
    assert min(marks.share(kind) for kind in OF_THINGS) >= 0.97


def chance_of_things():
    """The share right of each kind when pictures have nothing to do with captions, from the rules of both.

    Captions and pictures have one thing or two, as often. A thing of the caption has a picture of ``shown`` things; one of
    these has its colour with a chance of ``shown / 6`` and is then right in size, shape and place by 1 in 2, 3 and 9.
    Otherwise it gets one of those left over, if there is any for it, and the place is right if any of those left over is
    there.
    """
    right, total = dict.fromkeys(OF_THINGS, 0.0), 0
    for told, shown in itertools.product((1, 2), repeat=2):
        has_colour = shown / len(COLOURS)
        # The other thing of the caption, whose colour is one of the five others, takes its match away.
        other_has_colour = shown / (len(COLOURS) - 1) if told == 2 else 0.0
        left_over = shown - other_has_colour
        gets_one = 1.0 if told == 1 else other_has_colour * (shown - 1) + (1 - other_has_colour) * shown / 2
        is_seen = has_colour + (1 - has_colour) * gets_one
        right["colour"] += told * has_colour
        right["size"] += told * is_seen / len(SIZES)
        right["shape"] += told * is_seen / len(SHAPES)
        right["place"] += told * (has_colour + (1 - has_colour) * left_over) / len(PLACES)
        total += told
    return {kind: right[kind] / total for kind in OF_THINGS}


def chance_of_motion():
    """The same for motion, which is that of the first thing told and of whichever thing is taken for it.

    Left out: a thing left over is taken by its place, and motions from near places are a little more alike (+ 0.01).
    """
    cells = list(itertools.product(range(3), repeat=2))

    def motions(cell, taken):
        ends = {motion: (cell[0] + down, cell[1] + right) for motion, (down, right) in MOTIONS.items()}
        return [motion for motion, end in ends.items() if end in cells and end != taken]

    def distribution(pairs):
        chances = dict.fromkeys(MOTIONS, 0.0)
        for possible in (motions(*pair) for pair in pairs):
            for motion in possible:
                chances[motion] += 1 / len(possible) / len(pairs)
        return chances

    of = {1: distribution([(cell, None) for cell in cells]), 2: distribution(list(itertools.permutations(cells, 2)))}
    total = 0.0
    for told, shown in itertools.product((1, 2), repeat=2):
        alike = sum(of[told][motion] * of[shown][motion] for motion in MOTIONS)
        if shown == 2:
            # Its first thing, or its second, which rests.
            total += (alike + of[told]["still"]) / 2
        else:
            # Its only thing goes to the first of two things told as often as not.
            total += alike / told
    return total / 4


@pytest.mark.parametrize(("frames", "count"), [(1, 600), (2, 400)])
def test_shuffled_captions_are_right_by_chance(frames, count):
    clips, captions = clips_and_captions(World(count, frames=frames, seed=16))
    marks = judge_many(clips, captions[1:] + captions[:1])
    chance = chance_of_things() | {"background": 1 / len(BACKGROUNDS)} | ({"motion": chance_of_motion()} if frames > 1 else {})
    assert set(marks.shares) == set(chance)
    for kind, share in marks.shares.items():
        # Three standard deviations, and a little for what the chances leave out.
        allowed = 0.01 + 3 * math.sqrt(chance[kind] * (1 - chance[kind]) / marks.total[kind])
        assert share == pytest.approx(chance[kind], abs=allowed), kind


@pytest.mark.parametrize("frames", [1, 2])
def test_noise_is_nothing(frames):
    random = np.random.default_rng(2)
    captions = [caption_of(scene_at(index, moving=frames > 1)) for index in range(50)]
    even = judge_many(list(random.integers(0, 256, (50, frames, 32, 32, 3), dtype=np.uint8)), captions)
    assert even.overall <= 0.05
    # Around grey, so that grey is what most pixels are nearest to.
    grey = np.clip(random.normal(128, 60, (50, frames, 32, 32, 3)), 0, 255).astype(np.uint8)
    assert judge_many(list(grey), captions).overall <= 0.1


@pytest.mark.parametrize("colour", [*BACKGROUNDS.values(), *COLOURS.values(), (255, 128, 0)])
def test_blank_pictures_show_no_things(colour):
    blank = np.full((2, 32, 32, 3), colour, np.uint8)
    marks = judge_many([blank] * 20, [scene_at(index, moving=True) for index in range(20)])
    assert not any(marks.right[kind] for kind in (*OF_THINGS, "motion"))
    assert marks.overall < 0.15


def others(value, choices):
    return [choice for choice in choices if choice != value]


def changed(scene, kind, order, random):
    """Return a scene that differs in one attribute, of one thing if it is a thing's; None if there is none."""
    if kind in ("background", "motion"):
        possible = BACKGROUNDS if kind == "background" else possible_motions(*(thing.place for thing in scene.things))
        return replace(scene, **{kind: random.choice(others(getattr(scene, kind), possible)).item()})
    thing = scene.things[order]
    choices = {"size": SIZES, "colour": COLOURS, "shape": SHAPES, "place": PLACES}[kind]
    found = []
    for value in others(getattr(thing, kind), choices):
        things = list(scene.things)
        things[order] = replace(thing, **{kind: value})
        try:
            found.append(replace(scene, things=tuple(things)))
        except ValueError:
            # The colour or the place is taken, or the motion does not go with the place.
            continue
    return found[random.integers(len(found))] if found else None


@pytest.mark.parametrize(
    ("kind", "frames", "count"), [*((kind, 1, 150) for kind in KINDS[:-1]), *((kind, 2, 80) for kind in KINDS)]
)
def test_one_changed_attribute_is_wrong_and_no_other(kind, frames, count):
    random = np.random.default_rng(3)
    changed_marks, other_marks = Marks(), Marks()
    for index in range(count):
        told = scene_at(index, seed=17, moving=frames > 1)
        order = int(random.integers(len(told.things)))
        shown = changed(told, kind, order, random)
        if shown is None:
            continue
        verdict = judge(render(shown, frames=frames), told)
        at = order if kind in OF_THINGS else 0
        meant = verdict.of(kind)[at]
        changed_marks.add(Verdict((meant,)))
        other_marks.add(Verdict(tuple(finding for finding in verdict.findings if finding is not meant)))
    assert changed_marks.total[kind] >= 0.8 * count
    assert changed_marks.share(kind) <= 0.02
    assert min(other_marks.shares.values()) >= 0.97


def test_what_is_seen_is_named():
    told = Scene((Thing("large", "red", "circle", "top left"), Thing("small", "blue", "square", "right")), "grey", "down")
    shown = Scene(
        (Thing("large", "green", "circle", "top left"), Thing("small", "blue", "triangle", "bottom")), "white", "right"
    )
    findings = judge(render(shown, frames=3), told).findings
    assert findings == (
        Finding("size", "large", "large"),
        Finding("colour", "red", "green"),
        Finding("shape", "circle", "circle"),
        Finding("place", "top left", "top left"),
        Finding("size", "small", "small"),
        Finding("colour", "blue", "blue"),
        Finding("shape", "square", "triangle"),
        Finding("place", "right", "bottom"),
        Finding("background", "grey", "white"),
        Finding("motion", "down", "right"),
    )
    assert [finding.is_right for finding in findings] == [True, False, True, True, True, True, False, False, False, False]


def test_a_thing_that_is_not_there_is_wrong_in_all():
    told = Scene((Thing("large", "red", "circle", "top left"), Thing("small", "blue", "square", "right")), "grey")
    verdict = judge(render(Scene(told.things[:1], "grey")), told)
    assert [finding.seen for finding in verdict.findings] == [
        "large",
        "red",
        "circle",
        "top left",
        None,
        None,
        None,
        None,
        "grey",
    ]
    assert not verdict.is_right


def test_a_thing_of_an_unknown_colour_has_size_shape_and_place():
    # Salmon is none of the world's colours, and far from every mixture of one of them with black.
    picture = render(Scene((Thing("large", "red", "triangle", "left"),), "black"), height=48, width=48)
    salmon = np.rint(picture[..., :1] / COLOURS["red"][0] * np.array([255.0, 150.0, 110.0])).astype(np.uint8)
    (seen,) = look(salmon[0]).things
    assert (seen.size, seen.colour, seen.shape, seen.place) == ("large", None, "triangle", "left")
    verdict = judge(salmon, "a large red triangle at the left on a black background")
    assert [finding.kind for finding in verdict.findings if not finding.is_right] == ["colour"]


def test_a_clip_must_hold_to_its_end():
    scene = Scene((Thing("large", "red", "circle", "top left"),), "grey", "down")
    clip = render(scene, frames=3)
    assert judge(clip, scene).is_right
    clip[-1] = BACKGROUNDS["white"]
    wrong = {finding.kind for finding in judge(clip, scene).findings if not finding.is_right}
    assert wrong == {"size", "colour", "shape", "background", "motion"}


def test_half_a_cell_is_where_a_motion_begins():
    scene = Scene((Thing("large", "red", "circle", "top left"),), "grey", "down")
    clip = render(scene, frames=11, height=96, width=96)
    # Of ten steps to the next cell, four and six.
    assert judge(clip[[0, 4]], scene).of("motion")[0].seen == "still"
    assert judge(clip[[0, 6]], scene).of("motion")[0].seen == "down"


def test_one_frame_is_not_judged_by_motion():
    scene = Scene((Thing("large", "red", "circle", "top left"),), "grey", "down")
    assert judge(render(scene), scene).of("motion") == ()


def test_tensors_and_captions_are_judged_like_arrays_and_scenes():
    scene = scene_at(5, moving=True)
    clip = render(scene, frames=3)
    assert judge(torch.from_numpy(clip), caption_of(scene)) == judge(clip, scene)


def test_what_cannot_be_judged_is_refused():
    scene = scene_at(0)
    with pytest.raises(ValueError, match="uint8"):
        judge(np.zeros((1, 32, 32, 3), np.float32), scene)
    with pytest.raises(ValueError, match="frames, height, width, 3"):
        judge(np.zeros((32, 32, 3), np.uint8), scene)
    with pytest.raises(UsageError, match="Not a caption"):
        judge(render(scene), "a cat")
    with pytest.raises(ValueError, match="shorter"):
        judge_many([render(scene)], [])


def test_marks_by_hand():
    marks = Marks()
    assert math.isnan(marks.overall)
    marks.add(
        Verdict((Finding("size", "large", "large"), Finding("colour", "red", None), Finding("background", "grey", "grey")))
    )
    marks.add(
        Verdict((Finding("size", "large", "small"), Finding("colour", "red", "red"), Finding("background", "grey", "grey")))
    )
    assert marks.share("size") == 0.5
    assert math.isnan(marks.share("motion"))
    assert marks.shares == {"size": 0.5, "colour": 0.5, "background": 1.0}
    assert marks.overall == pytest.approx(4 / 6)
    assert str(marks) == "size 0.50 colour 0.50 background 1.00 overall 0.67"
