import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from wandistiller.data.buckets import Bucket
from wandistiller.data.damaged import find_damaged
from wandistiller.data.media import write_clip
from wandistiller.data.pixel_samples import PixelSamples
from wandistiller.data.source_samples import SourceSamples
from wandistiller.data.sources import open_source
from wandistiller.distributed.ranks import Ranks


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture
def folder(tmp_path):
    for name in ("a", "b"):
        Image.effect_noise((40, 24), 50).save(tmp_path / f"{name}.png")
    write_clip(tmp_path / "c.mp4", np.full((9, 32, 48, 3), 90, dtype=np.uint8), 8, {})
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text("a caption")
    cut_in_half(tmp_path / "b.png")
    return tmp_path


def open_samples(folder, frames=5):
    return SourceSamples(open_source(folder).source, [Bucket(1, 32, 32), Bucket(1, 32, 32), Bucket(frames, 32, 32)])


def names_of_decoded(samples):
    """Return a list that gets the name of whatever is decoded from now on."""
    decoded, read = [], samples.source.read
    samples.source.read = lambda index, bucket: (decoded.append(samples.source.name(index)), read(index, bucket))[1]
    return decoded


def test_what_a_good_header_hides_is_found(folder):
    samples = open_samples(folder)
    bad = find_damaged(samples, folder / ".cache", Ranks())
    assert list(bad) == [1]
    assert "b.png is not a readable picture" in str(bad[1])
    samples.leave_out(bad)
    assert [samples.name(number) for number in range(len(samples))] == ["a", "c"]
    assert [bucket.frames for bucket in samples.buckets] == [1, 5]


def test_what_was_good_is_decoded_again_only_when_it_changes(folder):
    find_damaged(open_samples(folder), folder / ".cache", Ranks())
    for change, frames, expected in (
        (lambda: None, 5, ["b"]),
        (lambda: Image.new("RGB", (48, 24)).save(folder / "a.png"), 5, ["a", "b"]),
        (lambda: None, 9, ["b", "c"]),
        (lambda: (folder / ".cache" / "decoded.jsonl").open("a").write('["a", "1'), 9, ["b"]),
    ):
        change()
        samples = open_samples(folder, frames)
        decoded = names_of_decoded(samples)
        find_damaged(samples, folder / ".cache", Ranks())
        assert sorted(decoded) == expected


def test_ranks_share_the_work(folder):
    samples = open_samples(folder)
    decoded = names_of_decoded(samples)
    find_damaged(samples, folder / ".cache", Share())
    assert decoded == ["b"]


def test_pixels_come_without_a_warning(folder):
    samples = PixelSamples(open_source(folder).source, [Bucket(1, 24, 40), None, None])
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert samples.pixels(0).shape == (3, 1, 24, 40)
    finally:
        torch.set_warn_always(False)


class Share(Ranks):
    """The second of two ranks, which hears nothing of the first."""

    def __init__(self):
        super().__init__(rank=1, world_size=2)

    def gather(self, value):
        return [value]
