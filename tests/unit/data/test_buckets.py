import math

import pytest

from wandistiller.data.buckets import Bucket, MediaSize, choose_bucket, make_buckets
from wandistiller.errors import UsageError


def picture(width, height):
    return MediaSize(width, height, 1, 0.0)


def clip(width, height, frames):
    return MediaSize(width, height, frames, 16.0)


@pytest.mark.parametrize(("width", "height"), [(832, 480), (480, 832), (512, 512), (1280, 704), (32, 32)])
def test_every_bucket_divides_and_takes_no_more_than_was_asked_for(width, height):
    buckets = make_buckets(width, height, frame_counts=(1, 81), multiple=32, max_aspect=2)
    assert Bucket(81, height, width) in buckets
    assert len(buckets) == len(set(buckets))
    for bucket in buckets:
        assert bucket.width % 32 == bucket.height % 32 == 0
        assert bucket.width * bucket.height <= width * height
        assert max(bucket.width, bucket.height) / min(bucket.width, bucket.height) <= 2
    shapes = {(bucket.height, bucket.width) for bucket in buckets}
    assert shapes == {(width, height) for height, width in shapes}  # upright and lying alike


def test_buckets_are_near_to_the_asked_area():
    for bucket in make_buckets(832, 480, frame_counts=(1,)):
        assert bucket.width * bucket.height > 0.9 * 832 * 480


def test_a_fixed_size_is_one_bucket_a_frame_count():
    assert make_buckets(832, 480, frame_counts=(81, 1), max_aspect=1) == [Bucket(1, 480, 832), Bucket(81, 480, 832)]


def test_a_longer_size_than_the_limit_is_still_there():
    assert Bucket(1, 256, 1024) in make_buckets(1024, 256, frame_counts=(1,), max_aspect=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 830}, "Take --width 832 or 816"),
        ({"height": 7}, r"Take --height 16\."),
        ({"frame_counts": (80,)}, "Take --frames 77 or 81"),
        ({"frame_counts": (0,)}, "--frames 0"),
    ],
)
def test_what_does_not_divide(arguments, message):
    with pytest.raises(UsageError, match=message):
        make_buckets(**{"width": 832, "height": 480, "frame_counts": (81,), **arguments})


def test_the_nearest_aspect_ratio_is_chosen():
    buckets = make_buckets(832, 480, frame_counts=(1,))
    for width, height in [(1920, 1080), (1080, 1920), (4000, 3000), (300, 300), (10, 1)]:
        found = choose_bucket(picture(width, height), buckets)
        error = abs(math.log(found.width / found.height) - math.log(width / height))
        assert all(error <= abs(math.log(each.width / each.height) - math.log(width / height)) + 1e-12 for each in buckets)
    assert choose_bucket(picture(1664, 960), buckets) == Bucket(1, 480, 832)


def test_a_clip_gets_the_largest_frame_count_that_it_has():
    buckets = make_buckets(64, 64, frame_counts=(5, 17, 33), max_aspect=1)
    assert [choose_bucket(clip(64, 64, frames), buckets) and choose_bucket(clip(64, 64, frames), buckets).frames for frames in
            (4, 5, 16, 17, 32, 100)] == [None, 5, 5, 17, 17, 33]  # fmt: skip


def test_a_picture_is_one_frame_and_a_clip_becomes_one_only_if_asked():
    assert choose_bucket(picture(64, 64), make_buckets(64, 64, frame_counts=(5,))).frames == 1
    assert choose_bucket(clip(64, 64, 3), make_buckets(64, 64, frame_counts=(5,))) is None
    assert choose_bucket(clip(64, 64, 3), make_buckets(64, 64, frame_counts=(1, 5))).frames == 1
