"""What a teacher said, kept on disk: the same numbers, made once, resumed, refused where they are of something else."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from wandistiller.data.buckets import Bucket
from wandistiller.data.teacher_records import RecordPlan, Records, RecordSamples, Shard, TeacherRecords
from wandistiller.distributed.ranks import Ranks
from wandistiller.errors import CheckpointError, OutOfRoomError, UsageError

ALONE = Ranks(0, 1, 0)
SHAPE = (2, 1, 3, 3)


def plan(shards=3, **about):
    """Four items in each shard but the last, which has two; one record an item."""
    parts = [range(start, min(start + 4, 4 * shards - 2)) for start in range(0, 4 * shards, 4)]
    made = [Shard(part, range(1), "origin", len(part)) for part in parts]
    return RecordPlan({"teacher": "a", "seed": 0, **about}, SHAPE, made)


def ask(shard):
    count = len(shard.items)
    generator = torch.Generator().manual_seed(shard.items.start)
    noisy, target = (torch.randn(count, *SHAPE, generator=generator) for _ in range(2))
    items = torch.tensor(shard.items)
    return Records(noisy, torch.linspace(0.1, 0.9, count), target, items, items + 100, items % 3 == 1)


def test_records_come_back(tmp_path):
    records = TeacherRecords(tmp_path / "r", plan())
    records.fill(ask, ALONE)
    assert records.is_complete and len(records) == 10
    for index in (0, 5, 9):
        number, row = divmod(index, 4)
        expected, found = ask(records.plan.shards[number]), records.read(index)
        torch.testing.assert_close(found["noisy"], expected.noisy[row], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found["target"], expected.target[row], rtol=1e-3, atol=1e-3)
        assert found["item"] == index and found["draw"] == 100 + index
        assert found["sigma"] == pytest.approx(expected.sigma[row].item())


def test_what_is_there_is_not_asked_again(tmp_path):
    records = TeacherRecords(tmp_path / "r", plan())
    asked = []

    def failing(shard):
        asked.append(shard.items.start)
        if shard.items.start == 8:
            raise KeyboardInterrupt
        return ask(shard)

    with pytest.raises(KeyboardInterrupt):
        records.fill(failing, ALONE)
    assert not records.is_complete
    again = TeacherRecords(tmp_path / "r", plan())
    again.fill(lambda shard: asked.append(shard.items.start) or ask(shard), ALONE)
    assert asked == [0, 4, 8, 8] and again.is_complete
    again.fill(lambda shard: pytest.fail("complete"), ALONE)


@pytest.mark.parametrize("damage", ["removed", "cut", "empty"])
def test_a_damaged_shard_is_made_again(tmp_path, damage):
    records = TeacherRecords(tmp_path / "r", plan())
    records.fill(ask, ALONE)
    path = tmp_path / "r" / records.plan.shards[1].file_name
    before = [records.read(index)["noisy"] for index in range(10)]
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-4] if damage == "cut" else b"")
    asked = []
    again = TeacherRecords(tmp_path / "r", plan())
    assert not again.is_complete
    again.fill(lambda shard: asked.append(shard.items.start) or ask(shard), ALONE)
    assert asked == [4] and again.is_complete
    assert all(torch.equal(again.read(index)["noisy"], value) for index, value in enumerate(before))


def test_a_record_that_has_changed_is_refused_when_it_is_read(tmp_path):
    records = TeacherRecords(tmp_path / "r", plan())
    records.fill(ask, ALONE)
    path = tmp_path / "r" / records.plan.shards[1].file_name
    content = bytearray(path.read_bytes())
    content[-7] ^= 1  # in the last record's latents, which come last but for a byte of each of the four
    path.write_bytes(content)
    again = TeacherRecords(tmp_path / "r", plan())
    again.fill(lambda shard: pytest.fail("all shards are there"), ALONE)
    assert again.read(6)["item"] == 6
    with pytest.raises(CheckpointError, match=r"(?s)is damaged.*record 3 .*Remove this file"):
        again.read(7)


def test_records_of_earlier_versions_are_taken_as_they_are(tmp_path):
    records = TeacherRecords(tmp_path / "r", plan())
    records.fill(ask, ALONE)
    path = tmp_path / "r" / records.plan.shards[0].file_name
    save_file({name: value for name, value in load_file(path).items() if name not in ("checksum", "is_empty")}, path)
    found = TeacherRecords(tmp_path / "r", plan()).read(1)
    assert (found["item"], found["is_empty"]) == (1, 0)


@pytest.mark.parametrize("content", ["", "[]", '{"about"', "{}"])
def test_a_marker_that_cannot_be_read_is_none(tmp_path, content):
    records = TeacherRecords(tmp_path / "r", plan())
    records.fill(ask, ALONE)
    (tmp_path / "r" / "records.json").write_text(content)
    assert not records.is_complete
    records.fill(lambda shard: pytest.fail("all shards are there"), ALONE)
    assert records.is_complete


def test_later_draws_take_the_place_of_earlier_ones(tmp_path):
    rounds = []
    for draw in (0, 1, 2):
        made = [replace(shard, draws=range(draw, draw + 1)) for shard in plan().shards]
        rounds.append(TeacherRecords(tmp_path / "r", replace(plan(), shards=made)))
        rounds[-1].fill(ask, ALONE)
    rounds[1].remove_earlier(ALONE)
    assert [len(each.missing) for each in rounds] == [3, 0, 0]


def test_what_there_is_to_ask_is_said_before(tmp_path, capsys):
    def failing(shard):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TeacherRecords(tmp_path / "r", plan()).fill(failing, ALONE)
    assert "10 answers of the teacher, 10 to ask for: 1010 B in" in capsys.readouterr().err


def test_records_of_something_else_are_refused(tmp_path):
    TeacherRecords(tmp_path / "r", plan()).fill(ask, ALONE)
    with pytest.raises(UsageError, match="another teacher") as caught:
        TeacherRecords(tmp_path / "r", plan(teacher="b")).check([])
    assert "teacher was a and is b" in str(caught.value)


def test_the_size_is_known_before_and_checked(tmp_path, monkeypatch):
    records = TeacherRecords(tmp_path / "r", plan(shards=1000))
    assert records.plan.num_bytes() == 3998 * (2 * 2 * 18 + 4 + 8 + 8 + 8 + 1)
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 1000})())
    with pytest.raises(OutOfRoomError, match="the disk has"):
        records.fill(ask, ALONE)
    assert not (tmp_path / "r").exists()


def test_ranks_share_the_shards(tmp_path):
    """What rank 1 of 2 makes; the waits of a single process are none."""
    records = TeacherRecords(tmp_path / "r", plan())
    asked = []

    class Second(Ranks):
        def wait(self):
            pass

        wait_long = wait

    (tmp_path / "r").mkdir()
    records.fill(lambda shard: asked.append(shard.items.start) or ask(shard), Second(1, 2, 1))
    assert asked == [4]


def test_samples_have_the_text_of_their_caption(tmp_path):
    records = TeacherRecords(tmp_path / "r", plan())
    records.fill(ask, ALONE)
    samples = RecordSamples(records, Bucket(1, 24, 24), lambda item: torch.full((2, 3), float(item)), torch.full((1, 3), -1.0))
    found = samples.read(8, torch.Generator())
    assert samples.read(7, torch.Generator())["text"].tolist() == [[-1.0] * 3], "asked without its caption"
    assert found["text"][0, 0] == 8.0 and found.keys() == {"noisy", "target", "sigma", "text"}
    assert len(samples.buckets) == len(samples) == 10


@pytest.mark.parametrize(("sigmas", "taken"), [((0.9, 0.5, 0.3, 0.7), [1, 2]), ((0.9, 0.8, 0.6, 0.6), [2, 3])])
def test_data_are_where_the_teacher_points_to_from_the_least_noise(tmp_path, sigmas, taken):
    whole = RecordPlan({}, SHAPE, [Shard(range(4), range(1), "origin", 4)])
    asked = replace(ask(whole.shards[0]), sigma=torch.tensor(sigmas))
    records = TeacherRecords(tmp_path / "r", whole)
    records.fill(lambda shard: asked, ALONE)
    found = list(RecordSamples(records, Bucket(1, 24, 24), lambda item: torch.zeros(2, 3), torch.zeros(1, 3)).some_data(9))
    assert len(found) == len(taken)
    for data, row in zip(found, taken, strict=True):
        torch.testing.assert_close(data[0], asked.noisy[row] - sigmas[row] * asked.target[row], atol=5e-3, rtol=1e-3)


def test_samples_have_what_they_are_made_of_where_it_is_wanted(tmp_path):
    records = TeacherRecords(tmp_path / "r", plan())
    records.fill(ask, ALONE)
    made_of = {"made_of": lambda item, draw: {"latents": torch.tensor(item), "noise": torch.tensor(draw)}}
    samples = RecordSamples(records, Bucket(1, 24, 24), lambda item: torch.zeros(2, 3), torch.zeros(1, 3), **made_of)
    found = samples.read(7, torch.Generator())
    assert (found["latents"], found["noise"]) == (7, 107)


def test_the_folder_says_what_it_is_of(tmp_path):
    TeacherRecords(tmp_path / "r", plan()).fill(ask, ALONE)
    found = json.loads((tmp_path / "r" / "records.json").read_text())
    assert found == {"about": {"teacher": "a", "seed": 0}, "count": 10, "complete": True}
