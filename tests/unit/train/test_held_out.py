"""Held-out data are measured for as long as nobody wants the run to be over."""

import os
import signal
from types import SimpleNamespace

import torch
from helpers.toy_training import make_loop

from wandistiller.flow.sigma import SigmaDistribution
from wandistiller.train.held_out import QUANTILES, MeasureHeldOut


class Samples:
    def __len__(self):
        return 8

    def latents(self, index):
        return torch.zeros(1, 1, 2, 2)

    def text(self, index):
        return torch.zeros(3, 4)


def test_a_signal_ends_the_measuring_and_the_run_is_saved(tmp_path, capfd):
    seen, written = [], []

    def held_out_errors(tensors):
        seen.append(len(tensors["sigma"]))
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return torch.zeros_like(tensors["sigma"])

    config = SimpleNamespace(validate_every=3, batch_size=len(QUANTILES))
    run = SimpleNamespace(config=config, metrics=SimpleNamespace(write=lambda loop, values: written.append(values)))
    method = SimpleNamespace(held_out_errors=held_out_errors)
    measure = MeasureHeldOut(method, Samples(), SigmaDistribution(), run)
    stopped = make_loop(tmp_path, steps=6, callbacks=[measure]).run()
    assert (stopped.step, stopped.signal) == (3, signal.SIGTERM)
    assert len(seen) == 2, "the other six samples were left out"
    assert not written and not measure.losses, "no mean of some of them"
    assert (tmp_path / "step-00000003" / "state.json").exists()
    assert "Step 3: left out the loss on held-out data, because a signal came" in capfd.readouterr().err
