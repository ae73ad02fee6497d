"""Held-out measures of a VAE that is perfect, and of one that draws nothing."""

import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.toy_training import make_loop

from wandistiller.data.buckets import Bucket
from wandistiller.data.pixel_samples import PixelSamples
from wandistiller.data.sources import open_source
from wandistiller.distributed.ranks import Ranks
from wandistiller.train import vae_quality
from wandistiller.train.method import Role
from wandistiller.train.picture_quality import psnr


def measure(monkeypatch, folder, reconstruct):
    """Return what is written for a held-out world of two pictures and two clips."""
    monkeypatch.setattr(vae_quality, "reconstruct", lambda vae_pass, pixels, loop: reconstruct(pixels))
    buckets = [Bucket(frames, 64, 64) for frames in (1, 5, 1, 5)]
    samples = PixelSamples(open_source("world-heldout:4:1+5x64x64").source, buckets)
    role = Role("vae", torch.nn.Identity(), is_trained=True)
    written = {}
    metrics = SimpleNamespace(write=lambda loop, values: written.update(values))
    callback = vae_quality.MeasureReconstructions(role, samples, metrics, folder, every=0)
    callback.act(SimpleNamespace(ranks=Ranks(), device=torch.device("cpu"), step=3, heed_signals=lambda: None))
    return written, [samples.pixels(index)[None] for index in range(4)]


def test_pictures_and_clips_apart(monkeypatch, tmp_path):
    written, pixels = measure(monkeypatch, tmp_path, lambda pixels: pixels * 0.9)
    ratios = [psnr(each * 0.9, each).item() for each in pixels]
    assert written["held_out/psnr"] == pytest.approx(sum(ratios) / 4)
    assert written["held_out/psnr_pictures"] == pytest.approx((ratios[0] + ratios[2]) / 2)
    assert written["held_out/psnr_clips"] == pytest.approx((ratios[1] + ratios[3]) / 2)


def test_the_judge_reads_reconstructions_and_originals(monkeypatch, tmp_path):
    written, _ = measure(monkeypatch, tmp_path, lambda pixels: pixels + 0.001)
    assert written["held_out/marks"] == written["held_out/marks_original"] == 1.0
    written, _ = measure(monkeypatch, tmp_path, torch.zeros_like)
    assert written["held_out/marks"] < 0.5 < written["held_out/marks_original"]


def test_samples_are_taken_from_all_over(monkeypatch, tmp_path):
    """Data are often sorted: here all clips come after the pictures."""
    shown = []
    monkeypatch.setattr(vae_quality, "side_by_side", lambda pairs: shown.extend(pairs) or np.zeros((1, 8, 8, 3), np.uint8))
    monkeypatch.setattr(vae_quality, "reconstruct", lambda vae_pass, pixels, loop: pixels * 0.9)
    buckets = [Bucket(1, 32, 32)] * 40 + [Bucket(5, 32, 32)] * 40
    samples = PixelSamples(open_source("world-heldout:80:5x32x32").source, buckets)
    role = Role("vae", torch.nn.Identity(), is_trained=True)
    metrics = SimpleNamespace(write=lambda loop, values: None)
    callback = vae_quality.MeasureReconstructions(role, samples, metrics, tmp_path, every=0, limit=30)
    callback.act(SimpleNamespace(ranks=Ranks(), device=torch.device("cpu"), step=3, heed_signals=lambda: None))
    assert "held_out/psnr_pictures" in callback.quality and "held_out/psnr_clips" in callback.quality
    assert len(callback._chosen) == len(set(callback._chosen)) == 30
    frames = [wanted.shape[1] for wanted, _ in shown]
    assert len(frames) == 8 and set(frames) == {1, 5} and frames == sorted(frames)


def test_a_signal_ends_the_measuring_and_the_run_is_saved(monkeypatch, tmp_path, capfd):
    seen, written = [], []

    def reconstruct(vae_pass, pixels, loop):
        seen.append(pixels)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return pixels * 0.9

    monkeypatch.setattr(vae_quality, "reconstruct", reconstruct)
    samples = PixelSamples(open_source("world-heldout:8:1x32x32").source, [Bucket(1, 32, 32)] * 8)
    role = Role("vae", torch.nn.Identity(), is_trained=True)
    metrics = SimpleNamespace(write=lambda loop, values: written.append(values))
    callback = vae_quality.MeasureReconstructions(role, samples, metrics, tmp_path, every=3)
    stopped = make_loop(tmp_path / "states", steps=6, callbacks=[callback]).run()
    assert (stopped.step, stopped.signal) == (3, signal.SIGTERM)
    assert len(seen) == 2, "the other six were left out"
    assert not written and not callback.quality
    assert (tmp_path / "states" / "step-00000003" / "state.json").exists()
    assert "left out the reconstructions of held-out data" in capfd.readouterr().err


def test_what_is_measured_is_what_a_decoders_user_gets(monkeypatch):
    """Through the mean, not a draw, and clamped."""
    monkeypatch.setattr(vae_quality, "encode_distribution", lambda vae, pixels: (pixels, torch.zeros_like(pixels)))
    monkeypatch.setattr(vae_quality, "decode_unclamped", lambda vae, latents: 3 * latents)
    pixels = torch.linspace(-1, 1, 48).view(1, 3, 1, 4, 4)
    loop = SimpleNamespace(options=SimpleNamespace(precision="no"), device=torch.device("cpu"))
    assert torch.equal(vae_quality.reconstruct(SimpleNamespace(vae=None), pixels, loop), (3 * pixels).clamp(-1, 1))


def test_what_is_shown_is_large_enough_and_has_the_middle_of_a_clip():
    clip = torch.linspace(-1, 1, 5).view(1, 5, 1, 1).expand(3, 5, 32, 64)
    picture = torch.zeros(3, 1, 200, 100)
    shown = vae_quality.side_by_side([(clip, -clip), (picture, picture)])[0]
    assert shown.shape == (400, 3 * (256 + 4) + 100 + 4, 3), "32x64 four times as large, 200x100 as it is"
    firsts, lasts = shown[0, [0, 260, 520], 0].tolist(), shown[128, [0, 260, 520], 0].tolist()
    assert firsts == [0, 128, 255] and lasts == [255, 128, 0]
