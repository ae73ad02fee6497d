"""``train`` end to end on a tiny Wan and a small world."""

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from helpers.processes import call
from PIL import Image
from safetensors.torch import load_file

from wandistiller.api import encode, sample, train
from wandistiller.data.encode_job import default_cache_dir
from wandistiller.data.loader import sample_generator
from wandistiller.data.media import write_clip
from wandistiller.data.sources import WorldSource
from wandistiller.errors import CheckpointError, UsageError
from wandistiller.train import finetune_run, samples
from wandistiller.train.methods.finetune import FlowMatching
from wandistiller.train.metrics import ShowProgress

WORLD = {"dataset_path": "world:12:1x32x32", "width": 32, "height": 32, "frames": (1,), "max_aspect": 1.0}
QUICK = {"model": "tiny-random", **WORLD, "batch_size": 2, "workers": 0, "learning_rate": 1e-3, "save_every": 2, "log_every": 1}


def weights(folder):
    return load_file(folder / "model" / "transformer" / "diffusion_pytorch_model.safetensors")


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_from_data_to_a_pipeline_that_everybody_loads(tmp_path, capfd):
    run = tmp_path / "run"
    done = train(
        **QUICK,
        output_dir=run,
        num_steps=4,
        held_out="world-heldout:4:1x32x32",
        validate_every=2,
        sample_every=4,
        use_ema=True,
        judge_samples=2,
        sample_steps=2,
        cfg_scale=2.0,
    )
    assert done.step == 4
    assert done.output == run / "model"
    assert json.loads((run / "plan.json").read_text())["measured"]["bytes"] > 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert all(line["memory/host_gb"] > 0 for line in lines if "loss" in line)
    held_out = [line for line in lines if "held_out/loss" in line]
    assert [line["step"] for line in held_out] == [2, 4]
    assert done.losses["held_out/loss"] == held_out[-1]["held_out/loss"]
    said = capfd.readouterr().err
    assert f"Step 4, held-out data: loss {done.losses['held_out/loss']:.4f}" in said
    assert "Step 4, held-out captions: marks " in said
    pictures = sorted((run / "samples" / "step-00000004").glob("*.png"))
    assert len(pictures) == 4
    assert all(np.asarray(Image.open(picture)).shape == (32, 32, 3) for picture in pictures)
    assert list((run / "tensorboard").iterdir())
    pipeline = WanPipeline.from_pretrained(run / "model")
    drawn = pipeline("x", height=32, width=32, num_frames=1, num_inference_steps=2, output_type="latent", guidance_scale=1.0)
    assert torch.isfinite(drawn.frames).all()
    ours = sample(model=str(run / "model"), prompt="x", width=32, height=32, steps=2, output=tmp_path / "x.png")
    assert ours[0].files[0].exists()


def test_samples_of_pictures_and_clips_show_both(tmp_path):
    random, data = np.random.default_rng(0), tmp_path / "data"
    data.mkdir()
    Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(data / "a.png")
    write_clip(data / "b.mp4", random.integers(0, 256, (5, 32, 32, 3), dtype=np.uint8), 8, {})
    for name in "ab":
        (data / f"{name}.txt").write_text(f"caption {name}")
    options = {**QUICK, "dataset_path": str(data), "frames": (5,), "batch_size": 1, "sample_every": 1, "sample_steps": 1}
    for run, given, expected in (
        ("captions", {}, {"00-caption-a.png": 1, "01-caption-b.mp4": 5}),
        ("prompts", {"sample_prompts": ("a cube",)}, {"00-a-cube.mp4": 5}),
    ):
        train(**options, **given, output_dir=tmp_path / run, num_steps=1)
        drawn = {path.name: path for path in (tmp_path / run / "samples" / "step-00000001").iterdir()}
        assert {name: len(read_frames(path)) for name, path in drawn.items()} == expected


def read_frames(path):
    with av.open(str(path)) as file:
        return list(file.decode(video=0))


def test_a_training_by_hand(tmp_path, tiny_folder):
    """Three steps with diffusers' own model and PyTorch's AdamW: path, target, shift, clipping, warm-up, course, average."""
    options = {**QUICK, "batch_size": 1, "learning_rate": 0.01, "weight_decay": 0.1, "clip_norm": 0.7, "warmup_steps": 1}
    options |= {"lr_schedule": "linear", "sigma_sampling": "logit_normal", "sigma_mean": 0.4, "sigma_std": 0.9, "seed": 5}
    train(**options, output_dir=tmp_path, num_steps=3, sigma_shift=5.0, caption_dropout=0.5, use_ema=True, ema_decay=0.5)
    model = WanTransformer3DModel.from_pretrained(tiny_folder, subfolder="transformer")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    average = start
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    cache, order, drops = default_cache_dir(WORLD["dataset_path"]), np.random.default_rng((5, 0)).permutation(12), []
    for step, rate in enumerate((0.005, 0.01, 0.005)):
        index = int(order[step])
        name, generator = WorldSource(12).name(index), sample_generator(5, 0, index)
        place, drop = torch.rand(2, generator=generator, dtype=torch.float64)
        latents = load_file(cache / f"{name}.latent.safetensors")["latent"]
        noise = torch.randn(latents.shape, generator=generator)
        base = torch.sigmoid(0.4 + 0.9 * torch.special.ndtri(place))
        sigma = (5 * base / (1 + 4 * base)).float()
        drops.append(bool(drop < 0.5))
        caption = load_file(cache / f"{'.empty' if drops[-1] else name}.safetensors")["embeddings"]
        text = torch.zeros(1, 512, 32)
        text[0, : len(caption)] = caption
        velocity = model(((1 - sigma) * latents + sigma * noise)[None], 1000 * sigma[None], text)[0][0]
        optimiser.zero_grad()
        (velocity - (noise - latents)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimiser.param_groups[0]["lr"] = rate
        optimiser.step()
        decay = min(0.5, (2 + step) / (11 + step))
        average = {key: decay * average[key] + (1 - decay) * value for key, value in model.state_dict().items()}
    assert len(set(drops)) == 2, "captions and the empty one"
    found = weights(tmp_path)
    for key, value in average.items():
        # On average: AdamW moves single weights by the sign of gradients that are nothing but rounding.
        assert (found[key] - value).abs().mean() < 0.01 * (value - start[key]).abs().mean(), key


def train_until_terminated(options):
    stepped = ShowProgress.stepped

    def stop(self, loop):
        stepped(self, loop)
        if loop.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    ShowProgress.stepped = stop
    sys.exit(train(**options).exit_code)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_ema": True, "lr_schedule": "cosine", "warmup_steps": 2, "gradient_accumulation": 2, "workers": 1},
        {"weights_dtype": "bfloat16", "rounding": "stochastic", "gradient_checkpointing": True},
        {"weights_dtype": "bfloat16", "placement": "offload", "use_ema": True},
    ],
)
def test_stopped_and_resumed_is_the_same_to_the_bit(tmp_path, options):
    options = {**QUICK, **options}
    train(**options, output_dir=tmp_path / "straight", num_steps=4)
    # The schedule counts to the last step, so the interrupted run is one of the same length that is cut short.
    cut = call(train_until_terminated, {**options, "output_dir": tmp_path / "cut", "num_steps": 4}, folder=tmp_path)
    assert cut.returncode == 128 + 15, cut.stderr
    assert "Stopped at step 2" in cut.stderr
    assert not (tmp_path / "cut" / "model").exists()
    rest = train(**options, output_dir=tmp_path / "cut", num_steps=4, resume="auto")
    assert rest.step == 4
    assert equal(weights(tmp_path / "cut"), weights(tmp_path / "straight"))
    steps = [json.loads(line)["step"] for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def test_samples_and_held_out_data_at_the_step_of_a_state_change_nothing(tmp_path):
    """A run that goes on from that step is the same to the bit, in its weights, its metrics and its pictures."""
    looks = {"held_out": "world-heldout:4:1x32x32", "validate_every": 2, "sample_every": 2, "sample_steps": 2, "use_ema": True}
    train(**QUICK, output_dir=tmp_path / "plain", num_steps=4, use_ema=True)
    train(**QUICK, **looks, output_dir=tmp_path / "straight", num_steps=4)
    for number in (2, 4):
        train(**QUICK, **looks, output_dir=tmp_path / "cut", num_steps=number, resume="auto")
    for name in ("straight", "cut"):
        assert equal(weights(tmp_path / name), weights(tmp_path / "plain"))
    straight, cut = ([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()] for name in ("straight", "cut"))
    held_out = [
        [(line["step"], line["held_out/loss"]) for line in lines if "held_out/loss" in line] for lines in (straight, cut)
    ]
    assert held_out[0] == held_out[1] and [step for step, _ in held_out[0]] == [2, 4]
    pictures = {path.relative_to(tmp_path / "straight"): path.read_bytes() for path in (tmp_path / "straight").rglob("*.png")}
    assert len(pictures) == 8
    assert all((tmp_path / "cut" / name).read_bytes() == content for name, content in pictures.items())


def train_until_terminated_while_writing(options):
    save = WanTransformer3DModel.save_pretrained

    def stop(*arguments, **keywords):
        save(*arguments, **keywords)
        os.kill(os.getpid(), signal.SIGTERM)

    WanTransformer3DModel.save_pretrained = stop
    train(**options)


def test_a_result_that_a_signal_has_cut_off_is_written_anew_and_leaves_nothing(tmp_path):
    options = {**QUICK, "output_dir": tmp_path / "run", "num_steps": 2}
    cut = call(train_until_terminated_while_writing, options, folder=tmp_path)
    assert cut.returncode == -15, cut.stderr
    assert [path.is_dir() for path in (tmp_path / "run").glob(".model.*")] == [True]
    train(**options, resume="auto")
    assert (tmp_path / "run" / "model" / "model_index.json").exists()
    assert not list((tmp_path / "run").glob(".*"))


def test_lora_files_that_others_load(tmp_path, tiny_folder):
    done = train(**{**QUICK, "learning_rate": 0.05}, output_dir=tmp_path, num_steps=3, lora_rank=4, lora_alpha=8)
    assert {path.name for path in done.output.iterdir()} == {"pytorch_lora_weights.safetensors", "comfyui_lora.safetensors"}
    inputs = (torch.randn(1, 8, 1, 8, 8), torch.tensor([500.0]), torch.randn(1, 8, 32))
    plain = WanTransformer3DModel.from_pretrained(tiny_folder, subfolder="transformer")
    outputs = []
    for file in ("pytorch_lora_weights.safetensors", "comfyui_lora.safetensors"):
        pipeline = WanPipeline.from_pretrained(tiny_folder)
        pipeline.load_lora_weights(done.output, weight_name=file)
        with torch.no_grad():
            outputs.append(pipeline.transformer(*inputs)[0])
    with torch.no_grad():
        assert not torch.allclose(outputs[0], plain(*inputs)[0], atol=1e-4)
    torch.testing.assert_close(outputs[0], outputs[1])
    # By hand: the trained factors from the state, times alpha / rank, added to the weights.
    state = load_file(tmp_path / "states" / "step-00000003" / "state.safetensors")
    with torch.no_grad():
        for name, factor in state.items():
            if name.startswith("roles/student/") and ".lora_A." in name:
                other = state[name.replace(".lora_A.", ".lora_B.")]
                module = name.removeprefix("roles/student/").partition(".lora_A")[0]
                plain.get_submodule(module).weight += 8 / 4 * other @ factor
        torch.testing.assert_close(plain(*inputs)[0], outputs[0], rtol=1e-4, atol=1e-5)


def test_adapters_beside_short_weights_learn_what_small_steps_add_up_to(tmp_path):
    """Each update is below what bfloat16 can tell apart; the optimiser's own copies collect them."""
    options = {**QUICK, "learning_rate": 1e-5, "lora_rank": 4, "weights_dtype": "bfloat16"}
    train(**options, output_dir=tmp_path, num_steps=4)
    state = load_file(tmp_path / "states" / "step-00000004" / "state.safetensors")
    name = next(name for name in state if name.startswith("roles/student/") and ".lora_A." in name)
    master = state[name.replace("roles/student/", "optimisers/student/master.")]
    assert state[name].dtype == torch.bfloat16 and master.dtype == torch.float32
    torch.testing.assert_close(master.bfloat16(), state[name], rtol=0, atol=0)
    assert not torch.equal(master, state[name].float())


@pytest.mark.parametrize(
    "options",
    [
        {"activation_policy": "selective"},
        {"gradient_checkpointing": True, "activations_to_host": True},
        {"batch_size": 1, "gradient_accumulation": 2},
        {"placement": "offload"},
        {"placement": "offload", "gradient_checkpointing": True, "use_ema": True, "ema_decay": 0.0},
    ],
)
def test_memory_options_do_not_change_what_is_learnt(tmp_path, options):
    train(**QUICK, output_dir=tmp_path / "plain", num_steps=3)
    train(**{**QUICK, **options}, output_dir=tmp_path / "other", num_steps=3)
    for name, value in weights(tmp_path / "plain").items():
        torch.testing.assert_close(weights(tmp_path / "other")[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("placement", ["offload", "disk", "cpu", "auto"])
def test_adapters_are_the_same_wherever_the_weights_live(tmp_path, placement):
    options = {**QUICK, "lora_rank": 4, "num_steps": 3}
    expected = train(**options, output_dir=tmp_path / "gpu").output
    found = train(**options, output_dir=tmp_path / placement, placement=placement, gradient_checkpointing=True).output
    first, second = (load_file(folder / "pytorch_lora_weights.safetensors") for folder in (expected, found))
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_compiled_blocks_learn_the_same(tmp_path):
    options = {**QUICK, "batch_size": 6, "num_steps": 2}  # large enough for a long caption in each: one shape to compile for
    train(**options, output_dir=tmp_path / "plain")
    train(**options, output_dir=tmp_path / "compiled", torch_compile=True, activation_policy="selective")
    for name, value in weights(tmp_path / "plain").items():
        torch.testing.assert_close(weights(tmp_path / "compiled")[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_nothing_is_left_behind(tmp_path):
    """Whoever trains from Python has the process as it was: PyTorch's own attention, and no threads."""
    attention, threads = torch.nn.functional.scaled_dot_product_attention, set(threading.enumerate())
    for number, options in enumerate([{"activation_policy": "selective"}, {"placement": "offload"}]):
        train(**QUICK, **options, output_dir=tmp_path / str(number), num_steps=1)
    assert torch.nn.functional.scaled_dot_product_attention is attention
    left = [thread.name for thread in set(threading.enumerate()) - threads if thread.name.startswith("wandistiller")]
    assert not left


def test_pixels_through_the_vae(tmp_path):
    losses = []
    for checkpointing in (False, True):
        folder = tmp_path / str(checkpointing)
        train(**QUICK, output_dir=folder, num_steps=2, pixel_loss_weight=0.5, vae_gradient_checkpointing=checkpointing)
        losses.append([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])
    assert losses[0][0]["loss"] == pytest.approx(losses[0][0]["velocity_loss"] + 0.5 * losses[0][0]["pixel_loss"], rel=1e-5)
    assert [line["loss"] for line in losses[1]] == pytest.approx([line["loss"] for line in losses[0]], rel=1e-4)
    for name, value in weights(tmp_path / "False").items():
        torch.testing.assert_close(weights(tmp_path / "True")[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("expert", "part", "other", "low", "high"),
    [("high", "transformer", "transformer_2", 0.875, 1.0), ("low", "transformer_2", "transformer", 0.0, 0.875)],
)
def test_each_expert_has_its_range_of_sigma(tmp_path, monkeypatch, two_expert_folder, expert, part, other, low, high):
    sigmas, losses = [], FlowMatching.losses
    monkeypatch.setattr(
        FlowMatching, "losses", lambda self, batch: sigmas.append(batch.tensors["sigma"]) or losses(self, batch)
    )
    options = {**QUICK, "model": str(two_expert_folder), "batch_size": 12}
    done = train(**options, output_dir=tmp_path, num_steps=1, expert=expert, sigma_sampling="uniform", sigma_shift=1.0)
    assert low <= sigmas[0].min() and sigmas[0].max() <= high
    assert sigmas[0].max() - sigmas[0].min() > 0.5 * (high - low)
    folders = [two_expert_folder, done.output]
    before, after = (WanTransformer3DModel.from_pretrained(each, subfolder=other).state_dict() for each in folders)
    assert equal(before, after), "the other expert is as it was"
    old, trained = (WanTransformer3DModel.from_pretrained(each, subfolder=part).state_dict() for each in folders)
    assert not equal(old, trained)


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}, {"placement": "offload"}], ids=["full", "lora", "offload"])
def test_the_average_is_what_is_drawn_measured_and_exported(tmp_path, monkeypatch, options):
    seen = {}

    def note(label, model):
        seen[label] = {name: value.detach().clone() for name, value in model.state_dict().items()}

    drawing, errors = samples.draw, FlowMatching.held_out_errors
    monkeypatch.setattr(samples, "draw", lambda model, *rest, **how: note("drawn", model) or drawing(model, *rest, **how))
    monkeypatch.setattr(
        FlowMatching, "held_out_errors", lambda self, tensors: note("measured", self.student.model) or errors(self, tensors)
    )
    common = {**QUICK, "use_ema": True, "held_out": "world-heldout:2:1x32x32", "sample_every": 3, "sample_steps": 1}
    done = train(**common, **options, output_dir=tmp_path, num_steps=3)
    state = load_file(tmp_path / "states" / "step-00000003" / "state.safetensors")
    prefix, own = "callbacks/KeepAverage/", "roles/student/"
    averages = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    assert averages and not any(torch.equal(value, state[own + name]) for name, value in averages.items() if value.any())
    for found in seen.values():
        assert equal({name: found[name] for name in averages}, averages)
    assert seen.keys() == {"drawn", "measured"}
    if options.get("lora_rank"):
        exported = load_file(done.output / "pytorch_lora_weights.safetensors")
        exported = {name.removeprefix("transformer."): value for name, value in exported.items()}
        averages = {name.replace(".default.", "."): value for name, value in averages.items()}
    else:
        exported = weights(tmp_path)
    assert equal(exported, averages)


def test_the_held_out_loss_changes_with_the_weights_alone(tmp_path):
    done = train(
        **{**QUICK, "learning_rate": 0.0}, output_dir=tmp_path, num_steps=3, validate_every=1, held_out="world:3:1x32x32"
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [{name: value for name, value in line.items() if name.startswith("held_out/")} for line in lines]
    assert [each for each in found if each] == [done.losses] * 3
    assert len(done.losses) == 6


def test_the_held_out_loss_by_its_definition(tmp_path, tiny_folder):
    """With diffusers' own model: captions as they are, at the sigmas below which 10 to 90 per cent of training is."""
    data = "world:3:1x32x32"
    options = {**QUICK, "learning_rate": 0.0, "sigma_sampling": "uniform", "sigma_shift": 3.0, "held_out": data}
    done = train(**options, output_dir=tmp_path, num_steps=1)
    model = WanTransformer3DModel.from_pretrained(tiny_folder, subfolder="transformer")
    cache, errors = default_cache_dir(data), []
    for index in range(3):
        name = WorldSource(3).name(index)
        latents = load_file(cache / f"{name}.latent.safetensors")["latent"]
        text = torch.zeros(1, 512, 32)
        found = load_file(cache / f"{name}.safetensors")["embeddings"]
        text[0, : len(found)] = found
        noise = torch.randn(latents.shape, generator=sample_generator(0, 0, index))
        for place in (0.1, 0.3, 0.5, 0.7, 0.9):
            sigma = 3 * place / (1 + 2 * place)
            with torch.no_grad():
                velocity = model(((1 - sigma) * latents + sigma * noise)[None], torch.tensor([1000 * sigma]), text)[0][0]
            errors.append((velocity - (noise - latents)).square().mean().item())
    assert done.losses["held_out/loss"] == pytest.approx(sum(errors) / 15, rel=1e-5)
    assert done.losses["held_out/loss_at_0.75"] == pytest.approx(sum(errors[2::5]) / 3, rel=1e-5)


def test_weights_to_start_from_and_how_samples_are_drawn(tmp_path, monkeypatch, tiny_folder, two_expert_folder):
    """With a rate of 0 the result is what it began with."""
    asked, drawing = [], samples.draw
    monkeypatch.setattr(
        samples, "draw", lambda model, what, *rest, **how: asked.append(what) or drawing(model, what, *rest, **how)
    )
    start = two_expert_folder / "transformer"
    options = {**QUICK, "learning_rate": 0.0, "sample_every": 1, "sample_steps": 1, "cfg_scale": 2.5, "sample_prompts": ("a",)}
    train(**options, output_dir=tmp_path, num_steps=1, ckpt_path=start)
    assert equal(weights(tmp_path), WanTransformer3DModel.from_pretrained(start).state_dict())
    train(**options, output_dir=tmp_path / "shifted", num_steps=1, sigma_shift=7.0)
    assert [(each.cfg_scale, each.num_steps) for each in asked] == [(2.5, 1)] * 2
    own = json.loads((tiny_folder / "scheduler" / "scheduler_config.json").read_text())["flow_shift"]
    assert [each.shift for each in asked] == [own, 7.0] and own != 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "--model is missing"),
        ({"dataset_path": "nowhere"}, "nowhere"),
        ({"held_out": "nowhere", "cache_dir": Path("new")}, r"nowhere does not exist(.|\n)*--held-out"),
        ({"expert": "high"}, "one transformer"),
        ({"lora_rank": 4, "lora_targets": ("to_x",), "cache_dir": Path("new")}, "no such layer"),
        ({"sample_every": 1, "sample_dir": Path("/dev/null/x"), "cache_dir": Path("new")}, "/dev/null is not a folder"),
        ({"memory_snapshot": Path("/dev/null/x"), "cache_dir": Path("new")}, "/dev/null is not a folder"),
        ({"resume": "nowhere"}, "nowhere does not exist"),
        ({"distributed": True}, "torchrun did not start"),
        ({"learning_rate": -1.0}, "--learning-rate -1.0 is out of range"),
        ({"caption_dropout": 1.5}, "not a share"),
        ({"vae_gradient_checkpointing": True}, "without --pixel-loss-weight"),
        ({"placement": "offload", "optimizer": "adafactor"}, "with adamw"),
        ({"placement": "disk"}, "cannot train all weights"),
        ({"placement": "balanced"}, "not for training"),
    ],
)
def test_wrong_input(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message) as caught:
        train(**{**QUICK, **changes}, output_dir=tmp_path / "run", num_steps=1)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run" / "model").exists()
    assert not (tmp_path / "new").exists(), "nothing has been encoded"


@pytest.mark.parametrize("dialect", ["diffusers", "original"])
def test_the_result_has_the_vae_that_its_latents_are_of(tmp_path, given_vae, dialect):
    vae, paths = given_vae
    train(**QUICK, output_dir=tmp_path, cache_dir=tmp_path / "cache", num_steps=1, vae_checkpoint=paths[dialect])
    found = WanPipeline.from_pretrained(tmp_path / "model").vae
    assert equal(found.state_dict(), vae.state_dict())
    assert found.config.latents_mean == vae.config.latents_mean and found.config.latents_std == vae.config.latents_std


def test_a_vae_of_other_channels_is_refused_before_anything_is_encoded(tmp_path, monkeypatch, wide_vae):
    monkeypatch.setattr("wandistiller.models.stored.StoredModel.read", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(UsageError, match="The VAE has 12 latent channels, the transformer draws 8") as caught:
        train(**QUICK, output_dir=tmp_path / "run", cache_dir=tmp_path / "new", num_steps=1, vae_checkpoint=wide_vae)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists() and not (tmp_path / "new").exists()


def test_a_pipeline_without_a_scheduler_is_refused(tmp_path, tiny_folder):
    shutil.copytree(tiny_folder, tmp_path / "pipeline", ignore=shutil.ignore_patterns("scheduler"))
    with pytest.raises(CheckpointError, match="has no scheduler"):
        train(model=str(tmp_path / "pipeline"), dataset_path="world:4:1x32x32", output_dir=tmp_path / "run", num_steps=1)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"expert": "high"}, {"expert": "low"}, "--expert high --lora-rank 0, and this one has --expert low"),
        ({"lora_rank": 4}, {"lora_rank": 8}, "--lora-rank 4 .* this one has --expert high --lora-rank 8"),
        ({"lora_rank": 4}, {"lora_rank": 4, "lora_alpha": 8}, "--lora-alpha 4 .* this one has .* --lora-alpha 8"),
        ({"lora_rank": 4}, {"lora_rank": 4, "ckpt_path": "transformer_2"}, "beside weights .* this one has .* beside weights"),
        ({}, {"optimizer": "adafactor"}, "--optimizer adamw, and this one has --optimizer adafactor"),
        ({}, {"weights_dtype": "bfloat16"}, "this one has --optimizer adamw --weights-dtype bfloat16 --rounding masters"),
        ({}, {"placement": "offload"}, "this one has --optimizer adamw --placement offload"),
    ],
)
def test_a_state_whose_weights_mean_something_else_is_refused(tmp_path, two_expert_folder, before, after, message):
    options = {**QUICK, "model": str(two_expert_folder), "expert": "high", "output_dir": tmp_path}
    train(**{**options, **before}, num_steps=1)
    if "ckpt_path" in after:
        after = {**after, "ckpt_path": two_expert_folder / after["ckpt_path"]}
    with pytest.raises(UsageError, match=message):
        train(**{**options, **after}, num_steps=2, resume="auto", cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists(), "nothing has been encoded"


def test_a_run_that_is_over_says_so(tmp_path, capfd):
    train(**QUICK, output_dir=tmp_path, num_steps=2)
    assert train(**QUICK, output_dir=tmp_path, num_steps=1, resume="auto").step == 2
    assert "All 1 steps have been taken before" in capfd.readouterr().err


def test_an_expert_that_draws_alone_says_so(tmp_path, capfd, two_expert_folder):
    options = {**QUICK, "model": str(two_expert_folder), "sample_every": 1, "sample_steps": 1}
    train(**options, output_dir=tmp_path, num_steps=1, expert="low")
    assert "Pictures are drawn by this expert alone" in capfd.readouterr().err


def test_nothing_is_left_of_the_data(tmp_path):
    """Its header is whole, so that it is found damaged only when it is decoded."""
    data = tmp_path / "data"
    data.mkdir()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(data / "a.png")
    (data / "a.png").write_bytes((data / "a.png").read_bytes()[:2000])
    (data / "a.txt").write_text("x")
    with pytest.raises(UsageError, match=r"Nothing in .*data can be used") as caught:
        train(**{**QUICK, "dataset_path": str(data)}, output_dir=tmp_path / "run", num_steps=1, skip_bad=True)
    assert "a.png is not a readable picture" in caught.value.why


def test_a_bad_file_does_not_take_a_good_one_of_its_name_along(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("a.jpg.png", "b.png"):
        Image.new("RGB", (32, 32), "red").save(data / name)
    (data / "a.jpg").write_text("no picture")  # of the path that is the name of the good one
    for name in ("a.jpg.txt", "a.txt", "b.txt"):
        (data / name).write_text("red")
    options = {**QUICK, "dataset_path": str(data), "batch_size": 1, "num_steps": None, "num_epochs": 1}
    assert train(**options, output_dir=tmp_path / "run", skip_bad=True).step == 2


def test_the_caches_stay_as_they_are_until_the_run_ends(tmp_path, monkeypatch):
    cache = {"cache_dir": tmp_path / "cache", "model": "tiny-random"}
    data = {"dataset_path": "world:4:1x32x32", "held_out": "world-heldout:2:1x32x32"}
    write, tried = finetune_run._write_result, []

    def try_others(*arguments):
        for folder in (tmp_path / "cache", tmp_path / "cache" / ".held_out"):
            place = {**cache, "cache_dir": folder}
            with pytest.raises(UsageError, match=r"is in use by process .* with other sizes"):
                encode(**place, dataset_path="world:2:1x32x32", width=48, height=48, frames=(1,), max_aspect=1.0)
            tried.append(folder)
        assert encode(**{**cache, **WORLD, "dataset_path": data["dataset_path"]}).num_latents == 0
        return write(*arguments)

    monkeypatch.setattr(finetune_run, "_write_result", try_others)
    train(**{**QUICK, **cache, **data}, output_dir=tmp_path / "run", num_steps=1, validate_every=1)
    assert len(tried) == 2
    assert encode(**{**cache, **WORLD, "dataset_path": data["dataset_path"], "width": 48, "height": 48}).num_latents == 4


def test_a_folder_with_a_training_is_not_written_over(tmp_path):
    train(**QUICK, output_dir=tmp_path, num_steps=2)
    with pytest.raises(UsageError, match="holds a training already"):
        train(**QUICK, output_dir=tmp_path, num_steps=2)
