import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wandistiller.data.buckets import Bucket, MediaSize, make_buckets
from wandistiller.data.media import write_clip
from wandistiller.data.sources import assign_buckets, open_source
from wandistiller.data.world import World
from wandistiller.errors import MediaError, UsageError


def add_picture(path, caption=None, value=100, size=(40, 24)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 0, 0)).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")


def add_clip(path, caption=None, frames=6):
    write_clip(path, np.full((frames, 32, 48, 3), 90, dtype=np.uint8), 8, {})
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")


def contents(source):
    return {source.name(index): source.caption(index) for index in range(len(source))}


def test_a_folder_is_read_with_what_is_below_it(tmp_path):
    add_picture(tmp_path / "b.png", "second\n")
    add_picture(tmp_path / "sub" / "a.JPG", "  ä picture ")
    add_clip(tmp_path / "a.v1.mp4", "a clip")
    (tmp_path / "notes.txt").write_text("of nothing")
    add_picture(tmp_path / ".cache" / "x.png")
    add_picture(tmp_path / "._b.png")
    opened = open_source(tmp_path)
    assert opened.bad == []
    assert contents(opened.source) == {"a.v1": "a clip", "b": "second", "sub/a": "ä picture"}
    assert opened.source.media_size(0) == MediaSize(48, 32, 6, 8.0)
    assert opened.source.media_size(1) == MediaSize(40, 24, 1, 0.0)
    assert opened.source.read(0, Bucket(5, 32, 32)).shape == (5, 32, 32, 3)
    assert (opened.source.read(1, Bucket(1, 16, 16)) == [100, 0, 0]).all()


def test_links_are_followed_but_not_in_circles(tmp_path):
    add_picture(tmp_path / "elsewhere" / "a.png", "a")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "data")
    assert contents(open_source(tmp_path / "data").source) == {"link/a": "a"}


def test_a_list_file(tmp_path):
    add_picture(tmp_path / "pictures" / "a.png", "not this one")
    add_picture(tmp_path / "far" / "b.png")
    (tmp_path / "lists").mkdir()
    lines = ["../pictures/a.png\tfirst\twith a tab", "", f"{tmp_path}/far/b.png\tsecond"]
    (tmp_path / "lists" / "train.txt").write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    found = contents(open_source(tmp_path / "lists" / "train.txt").source)
    top = str(tmp_path).lstrip("/")
    assert found == {f"{top}/pictures/a": "first\twith a tab", f"{top}/far/b": "second"}
    (tmp_path / "near.txt").write_text("pictures/a.png\tfirst\n")
    assert contents(open_source(tmp_path / "near.txt").source) == {"pictures/a": "first"}


@pytest.mark.parametrize("field", ["file", "media", "video", "image"])
@pytest.mark.parametrize("caption", ["caption", "text"])
def test_json_lines(tmp_path, field, caption):
    add_picture(tmp_path / "a.png")
    (tmp_path / "x.jsonl").write_text(json.dumps({field: "a.png", caption: "ä\nb", "more": 1}) + "\n\n")
    assert contents(open_source(tmp_path / "x.jsonl").source) == {"a": "ä\nb"}


def break_folder(folder):
    """Spoil a folder in every way; the names of what is spoilt."""
    add_picture(folder / "good.png", "good")
    add_picture(folder / "nocaption.png")
    add_picture(folder / "empty.png", " \n")
    add_picture(folder / "latin.png", "")
    (folder / "latin.txt").write_bytes("käse".encode("latin-1"))
    add_picture(folder / "broken.png", "x")
    (folder / "broken.png").write_bytes(b"no picture")
    add_clip(folder / "short.mp4", "x")
    (folder / "short.mp4").write_bytes((folder / "short.mp4").read_bytes()[:300])
    add_picture(folder / "twice.png", "x")
    add_clip(folder / "twice.mp4")
    add_picture(folder / "x.latent.png", "x")
    (folder / "gone.png").symlink_to(folder / "nowhere.png")
    (folder / "gone.txt").write_text("x")
    return {
        "nocaption.png": "has no caption (there is no nocaption.txt beside it)",
        "empty.png": "empty caption",
        "latin.png": "not UTF-8",
        "broken.png": "is not a readable picture",
        "short.mp4": "is not a readable clip",
        "twice.png": "has the same name as",
        "x.latent.png": "name that caches use",
        "gone.png": "does not exist",
    }


def test_whatever_is_wrong_is_named(tmp_path):
    expected = break_folder(tmp_path)
    with pytest.raises(UsageError, match=f"{len(expected)} of 10 items") as caught:
        open_source(tmp_path)
    assert caught.value.exit_code == 2
    assert "broken.png: is not a readable picture" in caught.value.why
    assert "and 3 more" in caught.value.why
    assert "--skip-bad" in caught.value.fix


def test_what_is_bad_can_be_left_out(tmp_path):
    expected = break_folder(tmp_path)
    opened = open_source(tmp_path, skip_bad=True)
    assert list(contents(opened.source)) == ["good", "twice"]
    found = {Path(item.name).name: item.reason for item in opened.bad}
    assert found.keys() == expected.keys()
    for name, reason in expected.items():
        assert reason in found[name]


def test_nothing_left_is_an_error(tmp_path):
    add_picture(tmp_path / "a.png", " ")
    with pytest.raises(UsageError, match="Nothing in") as caught:
        open_source(tmp_path, skip_bad=True)
    assert "a.png: has an empty caption" in caught.value.why


def test_an_empty_folder(tmp_path):
    (tmp_path / "readme.md").touch()
    with pytest.raises(UsageError, match="has no pictures or clips"):
        open_source(tmp_path)


def test_a_folder_without_any_caption(tmp_path):
    add_picture(tmp_path / "a.png")
    add_picture(tmp_path / "b.png")
    with pytest.raises(UsageError, match="None of the 2 pictures and clips") as caught:
        open_source(tmp_path, skip_bad=True)
    assert "a.txt" in caught.value.why


def test_captions_may_be_left_away_where_nobody_reads_them(tmp_path):
    add_picture(tmp_path / "a.png")
    add_picture(tmp_path / "b.png", " ")
    add_picture(tmp_path / "c.png", "")
    (tmp_path / "c.txt").write_bytes(b"\xff")
    (tmp_path / "list.tsv").write_text("a.png\nb.png\t\nc.png\ta caption\n")
    (tmp_path / "list.jsonl").write_text('{"file": "a.png"}\n{"file": "b.png", "caption": 3}\n{"image": "c.png", "text": ""}\n')
    for place in (tmp_path, tmp_path / "list.tsv", tmp_path / "list.jsonl"):
        opened = open_source(place, captioned=False)
        assert [opened.source.name(index) for index in range(len(opened.source))] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("x.tsv", b"a.png a caption", "has no tab between file and caption"),
        ("x.tsv", b"\tcaption", "has no tab"),
        ("x.tsv", b"a.png\t ", "has an empty caption"),
        ("x.tsv", b"none.png\tx", "does not exist"),
        ("x.tsv", b"a.gif\tx", "does not end in one of"),
        ("x.tsv", "a.png\tkäse".encode("latin-1"), "is not UTF-8"),
        ("x.jsonl", b"{", "is not JSON"),
        ("x.jsonl", b"[]", "has no text under 'file'"),
        ("x.jsonl", b'{"file": "a.png"}', "has no text under 'caption'"),
        ("x.jsonl", b'{"file": "a.png", "caption": 3}', "has no text under 'caption'"),
        ("x.tsv", b"~no-such-user/a.png\tx", "does not exist"),
        pytest.param("x.jsonl", b"[" * 100_000, "is not JSON", id="nested"),
        ("x.jsonl", b'{"file": "a.png", "caption": "half \\ud800"}', "half a character (a lone surrogate) under 'caption'"),
        ("x.jsonl", b'{"file": "\\ud800.png", "caption": "x"}', "half a character (a lone surrogate) under 'file'"),
        ("x.jsonl", b'{"file": ".empty.png", "caption": "x"}', "name that caches use"),
        ("x.jsonl", b'{"file": ".held_out/a.png", "caption": "x"}', "name that caches use"),
    ],
)
def test_lines_of_lists_that_are_wrong(tmp_path, name, line, reason):
    add_picture(tmp_path / "a.png")
    add_picture(tmp_path / "b.png")
    add_picture(tmp_path / ".empty.png")
    good = b'{"file": "b.png", "caption": "x"}' if name.endswith("jsonl") else b"b.png\tx"
    (tmp_path / name).write_bytes(good + b"\n" + line)
    with pytest.raises(UsageError, match="1 of 2 items") as caught:
        open_source(tmp_path / name)
    assert reason in caught.value.why
    assert "line 2" in caught.value.why or ".png" in caught.value.why
    assert contents(open_source(tmp_path / name, skip_bad=True).source) == {"b": "x"}


def test_a_listed_file_may_begin_with_a_tilde(tmp_path):
    add_picture(tmp_path / "~k.png")
    (tmp_path / "x.tsv").write_text("~k.png\thello\n")
    assert contents(open_source(tmp_path / "x.tsv").source) == {"~k": "hello"}
    with pytest.raises(UsageError, match="~no-such-user/data does not exist"):
        open_source("~no-such-user/data")


def test_a_name_that_is_not_utf8_is_named(tmp_path):
    add_picture(tmp_path / "b.png", "x")
    try:
        shutil.copy(tmp_path / "b.png", os.fsencode(tmp_path) + b"/caf\xe9.png")
    except OSError:
        pytest.skip("this file system has no such names")
    (bad,) = open_source(tmp_path, skip_bad=True).bad
    assert str(bad).endswith(r"caf\udce9.png: has a name that is not UTF-8")


def test_a_file_listed_twice(tmp_path):
    add_picture(tmp_path / "a.png")
    (tmp_path / "x.tsv").write_text("a.png\tone\n./a.png\ttwo\n")
    with pytest.raises(UsageError, match="1 of 2") as caught:
        open_source(tmp_path / "x.tsv")
    assert "has the same name as" in caught.value.why


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "does not exist"),
        ("a.png", "is a single picture"),
        ("a.json", "one JSON object"),
        ("a.tsv", "lists nothing"),
    ],
)
def test_what_is_no_data_set(tmp_path, name, message):
    for file in ("a.png", "a.json", "a.tsv"):
        (tmp_path / file).touch()
    with pytest.raises(UsageError, match=message):
        open_source(tmp_path / name)


def test_fingerprints_are_of_the_content(tmp_path):
    add_picture(tmp_path / "a.png", "x")
    add_picture(tmp_path / "b.png", "y")
    source = open_source(tmp_path).source
    assert source.fingerprint(0) == source.fingerprint(1)
    before = source.stamp(0), source.fingerprint(0)
    os.utime(tmp_path / "a.png", (1, 1))
    assert source.stamp(0) != before[0] and source.fingerprint(0) == before[1]
    add_picture(tmp_path / "a.png", "x", value=7)
    assert source.fingerprint(0) != before[1]
    (tmp_path / "a.png").unlink()
    with pytest.raises(MediaError, match=r"a\.png is gone"):
        source.stamp(0)


def test_buckets_for_all(tmp_path):
    add_picture(tmp_path / "a.png", "x", size=(40, 40))
    add_clip(tmp_path / "b.mp4", "y", frames=9)
    add_clip(tmp_path / "c.mp4", "z", frames=3)
    assigned = assign_buckets(open_source(tmp_path).source, make_buckets(32, 32, frame_counts=(5, 9), max_aspect=1))
    assert assigned.buckets == [Bucket(1, 32, 32), Bucket(9, 32, 32), None]
    assert [str(item) for item in assigned.bad] == ["c: has 3 frames; the smallest of --frames is 5"]


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("world:3", World(3)),
        ("world:4:5x32x48", World(4, frames=5, height=32, width=48)),
        ("world-heldout:2", World(2, held_out=True)),
    ],
)
def test_the_world_is_a_source(name, world):
    source = open_source(name).source
    assert len(source) == len(world)
    for index in range(len(world)):
        assert source.caption(index) == world.caption(index)
        assert source.name(index) == world.name(index)
        bucket = Bucket(world.frames, world.height, world.width)
        assert np.array_equal(source.read(index, bucket), world.frames_of(index))
        size = source.media_size(index)
        assert (size.frames, size.height, size.width) == (world.frames, world.height, world.width)
        assert size.is_picture == (world.frames == 1)
    assert source.fingerprint(0) == open_source(name).source.fingerprint(0) != source.fingerprint(1)
    assert source.read(0, Bucket(1, 64, 64)).shape == (1, 64, 64, 3)


def test_worlds_that_are_none():
    assert len(open_source("world").source) == 1000
    with pytest.raises(UsageError, match="empty world"):
        open_source("world:0")
    with pytest.raises(UsageError, match="world:COUNT:FRAMESxHEIGHTxWIDTH"):
        open_source("world:many")


def test_pictures_and_clips_that_are_not_read_are_told(tmp_path, capsys):
    for name in ("a.png", "b.gif", "c.GIF", "d.m4v"):
        Image.new("RGB", (16, 16)).save(tmp_path / name, format="PNG")
        (tmp_path / name).with_suffix(".txt").write_text("x")
    (tmp_path / "notes.md").write_text("of no interest")
    assert len(open_source(tmp_path).source) == 1
    said = capsys.readouterr().err
    assert "2 .gif, 1 .m4v" in " ".join(said.split()) and ".md" not in said
