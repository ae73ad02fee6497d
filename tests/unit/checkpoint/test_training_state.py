"""States on disk: those of earlier versions, those that are damaged, and those that are written while training goes on."""

import json
import pickle
import threading

import pytest
import torch
from helpers.toy_training import make_loop, weights_of
from safetensors.torch import load_file, save_file

from wandistiller.checkpoint import state_files, training_state
from wandistiller.checkpoint.training_state import TrainingState, TrainingStates, is_complete, load_state
from wandistiller.errors import CheckpointError, OutputError
from wandistiller.memory.out_of_memory import classify
from wandistiller.train.callbacks import Callback
from wandistiller.units import Bytes


def some_state(step=3):
    tensors = {"a/weight": torch.randn(4, 3), "a/step": torch.tensor(2.0), "b/bytes": torch.arange(7, dtype=torch.uint8)}
    return TrainingState(step, {**tensors, "b/short": torch.randn(5).bfloat16()}, {"position": 8})


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in expected.items())


def test_what_was_written_comes_back_to_the_bit(tmp_path):
    state = some_state()
    path = TrainingStates(tmp_path, 2).save(state)
    found = load_state(path)
    assert (found.step, found.facts) == (3, {"position": 8})
    assert_equal(found.tensors, state.tensors)
    assert_equal(load_file(next(path.glob("*.safetensors"))), state.tensors)


def test_a_state_of_an_earlier_version_is_read(tmp_path):
    state, path = some_state(), tmp_path / "step-00000003"
    path.mkdir()
    save_file(dict(state.tensors), path / "state.safetensors")
    size = (path / "state.safetensors").stat().st_size
    (path / "state.json").write_text(json.dumps({"step": 3, "tensor_bytes": size, "facts": {"position": 8}}))
    assert TrainingStates(tmp_path, 2).newest() == path
    assert_equal(load_state(path).tensors, state.tensors)


@pytest.mark.parametrize("damage", ["missing", "short", "no facts"])
def test_what_is_not_complete_is_passed_over(tmp_path, damage):
    states = TrainingStates(tmp_path, 3)
    older, newer = states.save(some_state(1)), states.save(some_state(2))
    file = next(newer.glob("*.safetensors")) if damage != "no facts" else newer / "state.json"
    if damage == "short":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    assert not is_complete(newer)
    assert states.newest() == older
    with pytest.raises(CheckpointError, match="not a complete training state"):
        load_state(newer)


class Watch(Callback):
    """Lets the writer go on only after a later step, and notes when a state was complete."""

    def __init__(self):
        self.later, self.saved_at = threading.Event(), []

    def stepped(self, loop):
        if loop.step == 4:
            self.later.set()

    def saved(self, loop, path):
        self.saved_at.append((path[-2:], loop.step))


def test_training_goes_on_while_a_state_is_written(tmp_path, monkeypatch):
    watch, write = Watch(), state_files.write_safetensors

    def slowly(*args):
        assert watch.later.wait(20), "steps have to be taken in the meantime"
        write(*args)

    monkeypatch.setattr(state_files, "write_safetensors", slowly)
    make_loop(tmp_path, steps=6, save_every=2, keep=9, callbacks=[watch]).run()
    # The first was finished when the second began, after step 4.
    assert watch.saved_at == [("02", 4), ("04", 6), ("06", 6)]
    monkeypatch.undo()
    straight = make_loop(steps=2)
    straight.run()
    found = load_state(tmp_path / "step-00000002").part("roles/student")
    assert_equal(found, weights_of(straight))  # as they were then, not as they were when they were written


def test_without_room_for_a_copy_it_is_written_in_place(tmp_path, monkeypatch):
    monkeypatch.setattr(training_state, "available_host_memory", lambda: Bytes(0))
    monkeypatch.setattr(TrainingStates, "start_saving", lambda *args: pytest.fail("there is no room"))
    make_loop(tmp_path, steps=4, save_every=2).run()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000002", "step-00000004"]


def test_a_disk_that_is_full_is_said_and_leaves_the_last_state(tmp_path, monkeypatch):
    states = TrainingStates(tmp_path, 3)
    older = states.save(some_state(1))

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_files, "write_safetensors", fail)
    for save in (states.save, lambda state: states.start_saving(state).wait()):
        with pytest.raises(OutputError, match="No space left") as caught:
            save(some_state(2))
        assert classify(caught.value).kind == "disk"
        # As an error of another rank arrives.
        assert classify(pickle.loads(pickle.dumps(caught.value))).kind == "disk"
        assert list(tmp_path.iterdir()) == [older], "nothing half-written is left"
    assert states.newest() == older
