"""Each command as a user runs it, in a process of its own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import run_command
from PIL import Image

ROOT = Path(__file__).parents[2]


def run(*arguments, cwd, code=0):
    result = run_command(arguments, cwd)
    assert result.returncode == code, result.stdout + result.stderr
    return result


def test_the_same_seed_gives_the_same_bytes(tmp_path, tiny_folder):
    common = ("sample", "--model", tiny_folder, "--prompt", "a red ball", "--steps", 3, "--width", 64, "--height", 64)
    for name in ("a.png", "b.png"):
        run(*common, "--output", name, cwd=tmp_path)
    run(*common, "--output", "c.png", "--seed", 1, cwd=tmp_path)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    pictures = [np.asarray(Image.open(tmp_path / name)) for name in ("a.png", "c.png")]
    assert pictures[0].shape == (64, 64, 3)
    assert not np.array_equal(*pictures)


def test_the_script_takes_the_described_flags(tmp_path, tiny_folder):
    import torch
    from safetensors.torch import load_file, save_file

    save_file({"embeddings": torch.randn(7, 32)}, tmp_path / "cond.safetensors")
    save_file({"embeddings": torch.randn(3, 32)}, tmp_path / "uncond.safetensors")
    command = [sys.executable, ROOT / "scripts" / "test_inference.py"]
    command += ["--checkpoint", tiny_folder / "transformer", "--cond", "cond.safetensors", "--uncond", "uncond.safetensors"]
    command += ["--vae-checkpoint", tiny_folder / "vae", "--steps", "2", "--cfg-scale", "3", "--sigma-shift", "5"]
    command += ["--width", "64", "--height", "32", "--frames", "5", "--seed", "4", "--dtype", "bfloat16", "--device", "cpu"]
    command += ["--batch-size", "2", "--offload-to-cpu", "--output-latent", "--output", "clip.mp4"]
    subprocess.run(list(map(str, command)), cwd=tmp_path, check=True, capture_output=True)
    assert {"clip-0.mp4", "clip-1.mp4", "clip-0.safetensors", "clip-1.safetensors"} <= {
        path.name for path in tmp_path.iterdir()
    }
    assert load_file(tmp_path / "clip-0.safetensors")["latent"].shape == (8, 2, 4, 8)


def test_only_the_parts_that_are_needed_are_read(tmp_path, tiny_folder):
    import torch
    from safetensors.torch import save_file

    shutil.copytree(tiny_folder, tmp_path / "pipeline")
    (tmp_path / "pipeline" / "vae" / "diffusion_pytorch_model.safetensors").write_text("broken")
    (tmp_path / "pipeline" / "text_encoder" / "config.json").write_text("broken")
    save_file({"embeddings": torch.randn(7, 32)}, tmp_path / "cond.safetensors")
    run(
        *("sample", "--model", "pipeline", "--cond", "cond.safetensors", "--cfg-scale", 1, "--steps", 1),
        *("--output", "x.safetensors", "--width", 32, "--height", 32, "--frames", 1),
        cwd=tmp_path,
    )


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ("truncate", (), "truncated"),
        (None, ("--width", "50"), "multiple of 16"),
        (None, ("--device", "cuda:7"), "is not there"),
        (None, ("--image", "none.png"), "draws from text alone"),
        (None, ("--vae-checkpoint", "pipeline/transformer"), "is not a Wan vae"),
        (None, ("--boundary", "0.5"), "models of two experts"),
        (None, ("--output", "prompts.txt/x.png"), "is not a folder"),
        (None, ("--cfg-scale-2", "3"), "models of two experts"),
        ("prompts", (), "has no prompts"),
        ("latin1", (), "UTF-8"),
    ],
)
def test_wrong_input_ends_with_2_and_writes_nothing(tmp_path, tiny_folder, change, arguments, message):
    shutil.copytree(tiny_folder, tmp_path / "pipeline")
    (tmp_path / "prompts.txt").touch()
    text = ("--prompt", "x")
    if change == "truncate":
        weights = tmp_path / "pipeline" / "transformer" / "diffusion_pytorch_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    elif change == "prompts":
        (tmp_path / "prompts.txt").write_text("\n \n")
        text = ("--prompt-file", "prompts.txt")
    elif change == "latin1":
        (tmp_path / "prompts.txt").write_bytes("käse".encode("latin-1"))
        text = ("--prompt-file", "prompts.txt")
    result = run("sample", "--model", "pipeline", *text, "--output", "x.png", *arguments, cwd=tmp_path, code=2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert "Loading" not in result.stderr
    assert not list(tmp_path.glob("*.png"))


def test_export_and_sample_what_was_exported(tmp_path, tiny_folder):
    run("export", "--model", tiny_folder, "--output", "pipeline", "--dtype", "bfloat16", cwd=tmp_path)
    run("export", "--model", "pipeline/transformer", "--output", "t.safetensors", "--format", "comfyui", cwd=tmp_path)
    common = ("sample", "--model", "pipeline", "--prompt", "x", "--steps", 2, "--width", 32, "--height", 32)
    run(*common, "--output", "a.png", cwd=tmp_path)
    run(*common, "--checkpoint", "t.safetensors", "--output", "b.png", cwd=tmp_path)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert "exists" in run("export", "--model", "tiny-random", "--output", "pipeline", cwd=tmp_path, code=2).stderr


def test_doctor_for_programs(tmp_path):
    result = run("doctor", "--json", "--device", "cpu", "--disk-megabytes", 16, cwd=tmp_path)
    found = json.loads(result.stdout)
    assert found["broken"] == []
    assert found["disk_read_gb_per_second"] > 0
    assert not list(tmp_path.iterdir())
    (device,) = found["devices"]
    assert set(device["checks"]) == {"float32", "bfloat16", "float16"}
    for checks in device["checks"].values():
        names = [check["name"] for check in checks]
        assert names == ["attention", "move", "forward", "backward", "checkpointed", "save/load"]
        assert all(check["error"] is None and check["seconds"] > 0 for check in checks)
    # PyTorch's own attention on the CPU for these shapes.
    assert device["attention"]["float32"] == "flash"


def test_doctor_for_people(tmp_path):
    result = run("doctor", "--device", "cpu", "--disk-megabytes", 0, cwd=tmp_path)
    assert "bfloat16" in result.stdout
    assert "Everything works" in result.stderr
