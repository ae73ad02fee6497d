"""``train-vae`` end to end on a tiny VAE and a small world."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from PIL import Image
from safetensors.torch import load_file, save_file

from wandistiller.api import sample, train_vae
from wandistiller.checkpoint.training_state import TrainingStates, load_state
from wandistiller.errors import TrainingError, UsageError
from wandistiller.models import lpips, vae_passes
from wandistiller.models.critic import PatchCritic
from wandistiller.models.vae_passes import decode_unclamped
from wandistiller.train import vae_quality, vae_run

WORLD = {"dataset_path": "world:6:1x32x32", "width": 32, "height": 32, "frames": (1,), "max_aspect": 1.0}
QUICK = {"model": "tiny-random", **WORLD, "batch_size": 2, "workers": 0, "learning_rate": 1e-3, "save_every": 2, "log_every": 1}


def weights(folder):
    return load_file(folder / "vae" / "diffusion_pytorch_model.safetensors")


def test_from_data_to_a_vae_that_everybody_loads(tmp_path, capfd):
    done = train_vae(**QUICK, output_dir=tmp_path, num_steps=2, held_out="world-heldout:3:1x32x32", use_ema=True)
    assert done.step == 2
    assert set(done.quality) == {f"held_out/{name}" for name in ("psnr", "psnr_pictures", "ssim", "marks", "marks_original")}
    assert done.quality["held_out/marks_original"] > 0.9 > done.quality["held_out/marks"]
    assert f"Step 2, held-out data: PSNR {done.quality['held_out/psnr']:.2f} dB, SSIM" in capfd.readouterr().err
    assert json.loads((tmp_path / "plan.json").read_text())["measured"]["bytes"] > 0
    picture = np.asarray(Image.open(tmp_path / "reconstructions" / "step-00000002.png"))
    assert picture.shape == (256, 3 * 132, 3), "32x32, four times as large"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "reconstruction" in line] == [1, 2]
    vae = AutoencoderKLWan.from_pretrained(done.output)
    # A second way to the statistics: many draws of the latents of the same six pictures.
    from wandistiller.data.buckets import Bucket
    from wandistiller.data.sources import open_source

    source = open_source("world:6:1x32x32").source
    pixels = np.stack([source.read(index, Bucket(1, 32, 32)) for index in range(6)])
    with torch.no_grad():
        inputs = torch.from_numpy(pixels).permute(0, 4, 1, 2, 3) / 127.5 - 1
        distribution = vae.encode(inputs).latent_dist
        latents = torch.cat([distribution.sample() for _ in range(2000)])
    mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    errors = std / (latents.numel() / len(std)) ** 0.5  # of a mean of so many draws; that of a spread is smaller
    assert (6 * errors < 0.02).all()
    assert ((torch.tensor(vae.config.latents_mean) - mean).abs() < 6 * errors).all()
    assert ((torch.tensor(vae.config.latents_std) - std).abs() < 6 * errors).all()
    options = {"model": "tiny-random", "vae_checkpoint": done.output, "width": 32, "height": 32, "steps": 1}
    assert sample(prompt="x", output=tmp_path / "x.png", **options)[0].files[0].exists()


def test_sizes_are_multiples_of_the_vaes_own_factor(tmp_path, capfd):
    """40 pixels are five latents: no patches of a transformer have to fit into them."""
    options = {**QUICK, "dataset_path": "world:2:1x40x40", "num_steps": 1}
    train_vae(**{**options, "width": 40, "height": 40}, output_dir=tmp_path / "run")
    assert "the largest 1x40x40" in capfd.readouterr().err
    with pytest.raises(UsageError, match=r"--width 44 (.|\n)*multiple of 8"):
        train_vae(**{**options, "width": 44, "height": 40}, output_dir=tmp_path / "other")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gan_training": True, "critic_width": 4, "r1_interval": 2, "use_ema": True},
        {"channels_last": True, "use_ema": True, "mixed_precision": "fp16", "gradient_accumulation": 2, "training_steps": 2},
    ],
)
def test_stopped_and_resumed_is_the_same_to_the_bit(tmp_path, options):
    """The critic's weights, its moments and its spectral norms are part of the state."""
    train_vae(**QUICK, **options, output_dir=tmp_path / "straight", num_steps=4)
    train_vae(**QUICK, **options, output_dir=tmp_path / "cut", num_steps=2)
    train_vae(**QUICK, **options, output_dir=tmp_path / "cut", num_steps=4, resume="auto")
    first, second = weights(tmp_path / "straight"), weights(tmp_path / "cut")
    assert all(torch.equal(second[name], value) for name, value in first.items())


def test_a_critic_of_another_width_is_refused_by_its_flag(tmp_path):
    both = {**QUICK, "gan_training": True, "output_dir": tmp_path}
    train_vae(**both, critic_width=2, num_steps=1)
    with pytest.raises(UsageError, match="made with --critic-width 2, and this one has --critic-width 4") as caught:
        train_vae(**both, critic_width=4, num_steps=2, resume="auto")
    assert caught.value.exit_code == 2


def test_lpips_is_learnt_from_and_measured(tmp_path, monkeypatch):
    widths, file = (4, 4, 8, 8, 8), tmp_path / "lpips.safetensors"
    save_file(lpips.Lpips(widths=widths).state_dict(), file)
    monkeypatch.setattr(lpips, "VGG16_WIDTHS", widths)
    monkeypatch.setattr(lpips, "lpips_file", lambda: file)
    options = {"use_lpips": True, "lambda_lpips": 0.4, "lpips_checkpointing": True, "held_out": "world-heldout:2:1x32x32"}
    done = train_vae(**QUICK, **options, output_dir=tmp_path / "run", num_steps=1)
    assert done.quality["held_out/lpips"] > 0
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    total = line["reconstruction"] + 0.4 * line["perceptual"] + 1e-6 * line["kl"]
    assert line["loss"] == pytest.approx(total, rel=1e-5)


def test_the_average_is_what_is_measured_and_exported(tmp_path, monkeypatch):
    seen, measuring = [], vae_quality.reconstruct

    def note(vae_pass, *rest):
        seen.append({name: value.detach().clone() for name, value in vae_pass.state_dict().items()})
        return measuring(vae_pass, *rest)

    monkeypatch.setattr(vae_quality, "reconstruct", note)
    options = {"use_ema": True, "ema_decay": 0.9, "held_out": "world-heldout:1:1x32x32", "num_steps": 2}
    train_vae(**QUICK, **options, output_dir=tmp_path)
    state = load_state(TrainingStates(tmp_path / "states", 2).newest())
    averages, exported = state.part("callbacks/KeepAverage"), weights(tmp_path)
    assert {name.removeprefix("vae.") for name in averages} == exported.keys()
    for name, value in averages.items():
        assert torch.equal(exported[name.removeprefix("vae.")], value), name
        assert torch.equal(seen[-1][name], value), name
    assert not all(torch.equal(state.part("roles/vae")[name], value) for name, value in averages.items())


def test_the_flags_reach_the_training(tmp_path, monkeypatch):
    """With as many turns and as large steps as were asked for; the critic's schedule is that of steps, not of turns."""
    made, methods, optimisation, training = {}, [], vae_run.Optimisation, vae_run.VaeTraining
    mirrored, samples = [], vae_run.PixelSamples

    def note(parameters, options, precision, *rest, **more):
        made[next(iter(parameters)).partition(".")[0]] = options.rate, options.betas, options.clip_norm, precision
        return optimisation(parameters, options, precision, *rest, **more)

    monkeypatch.setattr(vae_run, "Optimisation", note)
    monkeypatch.setattr(vae_run, "PixelSamples", lambda *some, mirror: mirrored.append(mirror) or samples(*some, mirror=mirror))
    monkeypatch.setattr(vae_run, "VaeTraining", lambda *some, **more: methods.append(training(*some, **more)) or methods[0])
    flags = {"gan_training": True, "critic_width": 4, "critic_learning_rate": 5e-4, "training_steps": 2, "use_fp16": True}
    more = {"reduced_min_sizes": (24,), "gradient_accumulation": 2, "kl_warmup_steps": 4, "r1_interval": 2, "clip_norm": 0.7}
    data = {"mirror": True, "held_out": "world-heldout:1:1x32x32"}
    assert train_vae(**QUICK, **flags, **more, **data, output_dir=tmp_path, num_steps=3).step == 3
    shared = ((0.5, 0.9), 0.7, "fp16")
    assert made == {"vae": (1e-3, *shared), "layers": (5e-4, *shared)}
    assert mirrored == [True, False], "what is measured is not turned round"
    assert [turn.role for turn in methods[0].turns] == ["vae", "critic"] * 2
    assert [tuple(each.shape[-2:]) for each in methods[0]._at_sizes(torch.zeros(1, 3, 1, 32, 32))] == [(32, 32), (24, 24)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert ["critic/r1" in line for line in lines if "critic/real" in line] == [True, False, True]


def test_the_statistics_are_not_those_of_the_first_samples():
    """Data are often sorted: here the first half is dark and the second bright."""

    class Sorted:
        def __len__(self):
            return 40

        def pixels(self, index):
            return torch.full((3, 1, 8, 8), -1.0 if index < 20 else 1.0)

    def encode(pixels):
        return SimpleNamespace(latent_dist=SimpleNamespace(mean=pixels, logvar=torch.full_like(pixels, -30.0)))

    vae = SimpleNamespace(config={"z_dim": 3}, encode=encode)
    mean, std = vae_run.measure_latents(vae, Sorted(), 20, torch.device("cpu"))
    assert max(abs(value) for value in mean) < 0.5
    assert std == pytest.approx([(1 - value**2) ** 0.5 for value in mean])


class PoisonedCritic(PatchCritic):
    """Breaks down after the third step."""

    num_updates = 0

    def update_norms(self):
        super().update_norms()
        self.num_updates += 1
        if self.num_updates == 3:
            self.layers[1].conv.parametrizations.weight.original.data[0, 0] = float("nan")


@pytest.mark.parametrize("gan_start", [0, 100], ids=["listened to", "not listened to yet"])
@pytest.mark.parametrize("log_every", [1, 100])
def test_a_critic_that_is_not_finite_stops_the_run_by_name(tmp_path, monkeypatch, gan_start, log_every):
    monkeypatch.setattr(vae_run, "PatchCritic", PoisonedCritic)
    options = {**QUICK, "log_every": log_every, "gan_training": True, "critic_width": 4, "gan_start": gan_start}
    with pytest.raises(TrainingError, match=r"of role 'critic' is nan at step 4, on world-\w+, world-") as caught:
        train_vae(**options, critic_learning_rate=2e-4, output_dir=tmp_path, num_steps=6)
    for change in ("--critic-learning-rate below 0.0002", "--r1-gamma above 5", "--r1-interval below 16"):
        assert change in caught.value.fix
    newest = TrainingStates(tmp_path / "states", 2).newest()
    assert newest.name == "step-00000002", "what is kept is from before"
    assert all(torch.isfinite(value).all() for value in load_state(newest).tensors.values())


def test_a_vae_that_is_not_finite_is_not_blamed_on_the_critic(tmp_path, monkeypatch):
    def broken(vae, latents):
        return decode_unclamped(vae, latents) * float("nan")

    monkeypatch.setattr(vae_passes, "decode_unclamped", broken)
    with pytest.raises(TrainingError, match="'reconstruction' of role 'vae' is nan at step 1") as caught:
        train_vae(**QUICK, gan_training=True, critic_width=4, output_dir=tmp_path, num_steps=1)
    assert caught.value.why == "the learning rate is too high, or a sample is broken."
    assert caught.value.fix.startswith("Resume from the last state with --learning-rate below 0.001; look")


def test_a_critic_that_comes_too_late_is_said(tmp_path, capfd):
    options = {"gan_training": True, "critic_width": 4, "num_steps": 1}
    train_vae(**QUICK, **options, gan_start=1, output_dir=tmp_path / "late")
    assert "will not listen to the critic: --gan-start 1 comes after the last step" in capfd.readouterr().err
    train_vae(**{**QUICK, "dataset_path": "world:5:1+5x32x32", "frames": (5,)}, **options, output_dir=tmp_path / "soon")
    said = capfd.readouterr().err
    assert "will not listen" not in said
    assert "for 1 steps of 2 samples, 0.3 epochs of 3 pictures and 2 clips, the largest 5x32x32" in said


def test_checkpointing_does_not_change_what_is_learnt(tmp_path):
    clips = {**QUICK, "dataset_path": "world:4:5x32x32", "frames": (5,)}
    train_vae(**clips, output_dir=tmp_path / "plain", num_steps=2)
    train_vae(**clips, output_dir=tmp_path / "checkpointed", num_steps=2, vae_gradient_checkpointing=True)
    for name, value in weights(tmp_path / "plain").items():
        torch.testing.assert_close(weights(tmp_path / "checkpointed")[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_channels_last_is_the_same_training(tmp_path):
    both = {**QUICK, "dataset_path": "world:4:1+5x32x32", "frames": (5,)}
    losses = []
    for is_last in (False, True):
        folder = tmp_path / str(is_last)
        train_vae(**both, output_dir=folder, num_steps=2, channels_last=is_last)
        losses.append([json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "--model is missing"),
        ({"dataset_path": "nowhere"}, "nowhere"),
        ({"held_out": "nowhere"}, r"nowhere does not exist(.|\n)*--held-out"),
        ({"width": 8, "height": 8, "held_out": "world-heldout:1:1x32x32"}, "--held-out needs pictures .* 11x11 .* are 8x8"),
        ({"use_lpips": True}, "LPIPS"),
        ({"gan_training": True, "reduced_min_sizes": (16,)}, "--gan-training needs pictures of at least 24x24 .* are 16x16"),
        ({"reduced_min_sizes": (24, 4)}, "--reduced-min-sizes 4 is no smaller size"),
        ({"reduced_min_sizes": (32,)}, "--reduced-min-sizes 32 is no smaller size"),
        ({"reduced_min_sizes": (30,)}, r"--reduced-min-sizes 30 is no smaller size(.|\n)*sizes from 8 to 24"),
        ({"max_aspect": 0.5}, "--max-aspect 0.5 is out of range"),
        ({"lpips_checkpointing": True}, "without --use-lpips"),
        ({"r1_interval": 0}, "--r1-interval 0 is out of range"),
        ({"gan_training": True, "r1_gamma": 0, "r1_interval": 4}, "--r1-interval changes nothing without --r1-gamma"),
        ({"kl_beta": 0.0, "kl_free_bits": 0.1}, "--kl-free-bits changes nothing without --kl-beta"),
        ({"kl_beta": 0.0, "kl_warmup_steps": 5}, "--kl-warmup-steps changes nothing without --kl-beta"),
        ({"validate_every": 5}, "--validate-every changes nothing without --held-out"),
    ],
)
def test_wrong_input(tmp_path, changes, message):
    with pytest.raises(UsageError, match=message) as caught:
        train_vae(**{**QUICK, **changes}, output_dir=tmp_path / "run", num_steps=1)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_damaged_media_are_found_before_the_first_step(tmp_path, capfd):
    for number in range(3):
        Image.effect_noise((48, 48), 50).convert("RGB").save(tmp_path / f"p{number}.png")
    broken = tmp_path / "p1.png"
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])
    options = {**QUICK, "dataset_path": str(tmp_path), "batch_size": 1, "num_steps": 3}
    with pytest.raises(UsageError, match=r"1 of 3 items(.|\n)*p1.png is not a readable picture(.|\n)*--skip-bad"):
        train_vae(**options, output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert train_vae(**options, output_dir=tmp_path / "run", skip_bad=True).step == 3
    assert "Left out p1: " in capfd.readouterr().err
