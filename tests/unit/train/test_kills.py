"""A run that is killed at any moment, also in the middle of saving, goes on as if nothing had happened."""

import multiprocessing
import os
import random
import signal
import time

import torch
from helpers.toy_training import ToyMethod, make_loop, weights_of

from wandistiller.checkpoint.training_state import is_complete

STEPS = 400


def train(folder, result):
    loop = make_loop(folder, steps=STEPS, save_every=1, resume=True, method=ToyMethod(dropout=0.2), log_every=7)
    loop.run()
    torch.save(weights_of(loop), result)


def test_50_kills(tmp_path):
    straight = make_loop(steps=STEPS, method=ToyMethod(dropout=0.2), log_every=7)
    straight.run()
    rng, context, kills, lengths = random.Random(0), multiprocessing.get_context("fork"), 0, []
    while not (tmp_path / "weights.pt").exists():
        process = context.Process(target=train, args=(tmp_path / "states", tmp_path / "weights.pt"))
        process.start()
        if kills < 50:
            # A step and its save take a few milliseconds, so most kills hit a save.
            time.sleep(rng.uniform(0.005, 0.12))
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.join()
        states = sorted(path for path in (tmp_path / "states").glob("step-*")) if (tmp_path / "states").exists() else []
        lengths.append(len(states))
        for path in states[:-1]:
            assert is_complete(path) or not (path / "state.json").exists()
    assert kills == 50
    assert max(lengths) <= 5, "old states are retired in spite of the kills"
    assert not list((tmp_path / "states").glob(".*")), "what was half-written is gone"
    found, expected = torch.load(tmp_path / "weights.pt"), weights_of(straight)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
