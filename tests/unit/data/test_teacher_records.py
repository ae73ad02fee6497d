"""What a teacher said, kept on disk: the same numbers, made once, resumed, refused where they are of something else."""

import json

import pytest
import torch

from wandistiller.data.buckets import Bucket
from wandistiller.data.teacher_records import RecordPlan, Records, RecordSamples, TeacherRecords
from wandistiller.distributed.ranks import Ranks
from wandistiller.errors import OutOfRoomError, UsageError

ALONE = Ranks(0, 1, 0)
SHAPE = (2, 1, 3, 3)


def plan(shards=3, **about):
    return RecordPlan({"teacher": "a", "seed": 0, **about}, SHAPE, shards, 4)


def ask(number):
    generator = torch.Generator().manual_seed(number)
    noisy, target = (torch.randn(4, *SHAPE, generator=generator) for _ in range(2))
    return Records(noisy, torch.linspace(0.1, 0.9, 4), target, torch.arange(4) + 4 * number)


def test_records_come_back(tmp_path):
    records = TeacherRecords(tmp_path / "r", plan())
    records.fill(ask, ALONE)
    assert records.is_complete and len(records) == 12
    for index in (0, 5, 11):
        number, row = divmod(index, 4)
        expected, found = ask(number), records.read(index)
        torch.testing.assert_close(found["noisy"], expected.noisy[row], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found["target"], expected.target[row], rtol=1e-3, atol=1e-3)
        assert found["item"] == index and found["sigma"] == pytest.approx(expected.sigma[row].item())


def test_what_is_there_is_not_asked_again(tmp_path):
    records = TeacherRecords(tmp_path / "r", plan())
    asked = []

    def failing(number):
        asked.append(number)
        if number == 2:
            raise KeyboardInterrupt
        return ask(number)

    with pytest.raises(KeyboardInterrupt):
        records.fill(failing, ALONE)
    assert not records.is_complete
    again = TeacherRecords(tmp_path / "r", plan())
    again.fill(lambda number: asked.append(number) or ask(number), ALONE)
    assert asked == [0, 1, 2, 2] and again.is_complete
    again.fill(lambda number: pytest.fail("complete"), ALONE)


def test_records_of_something_else_are_refused(tmp_path):
    TeacherRecords(tmp_path / "r", plan()).fill(ask, ALONE)
    with pytest.raises(UsageError, match="another teacher") as caught:
        TeacherRecords(tmp_path / "r", plan(teacher="b")).check()
    assert "teacher was a and is b" in str(caught.value)


def test_the_size_is_known_before_and_checked(tmp_path, monkeypatch):
    records = TeacherRecords(tmp_path / "r", plan(shards=1000))
    assert records.plan.num_bytes == 4000 * (2 * 2 * 18 + 12)
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

    (tmp_path / "r").mkdir()
    records.fill(lambda number: asked.append(number) or ask(number), Second(1, 2, 1))
    assert asked == [1]


def test_samples_have_the_text_of_their_caption(tmp_path):
    records = TeacherRecords(tmp_path / "r", plan())
    records.fill(ask, ALONE)
    samples = RecordSamples(records, Bucket(1, 24, 24), lambda item: torch.full((2, 3), float(item)))
    found = samples.read(7, torch.Generator())
    assert found["text"][0, 0] == 7.0 and found.keys() == {"noisy", "target", "sigma", "text"}
    assert len(samples.buckets) == len(samples) == 12


def test_the_folder_says_what_it_is_of(tmp_path):
    TeacherRecords(tmp_path / "r", plan()).fill(ask, ALONE)
    found = json.loads((tmp_path / "r" / "records.json").read_text())
    assert found == {"about": {"teacher": "a", "seed": 0}, "count": 12, "complete": True}
