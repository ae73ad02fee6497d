"""Two machines, as two network namespaces with a link between: torchrun's rendezvous over it, and what follows a cut."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from wandistiller.api import train

SOURCE = Path(__file__).parents[2] / "src"
NAMES, ADDRESSES = ("wan-a", "wan-b"), ("10.77.77.1", "10.77.77.2")
FLAGS = {"model": "tiny-random", "dataset_path": "world:12:1x32x32", "width": 32, "height": 32, "max_aspect": 1.0}
STEPS = {"learning_rate": 1e-3, "num_steps": 60, "log_every": 1, "workers": 0, "save_every": 5, "validate_every": 0}


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True).returncode == 0


@pytest.fixture(scope="module")
def machines():
    try:
        can = os.geteuid() == 0 and ip("netns", "add", NAMES[0], check=False)
    except FileNotFoundError:
        can = False
    if not can:
        pytest.skip("making network namespaces is not allowed here")
    try:
        ip("netns", "add", NAMES[1])
        ip("link", "add", "wan-link-a", "netns", NAMES[0], "type", "veth", "peer", "name", "wan-link-b", "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            link = f"wan-link-{name[-1]}"
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in NAMES:
            ip("netns", "del", name, check=False)


def start(folder, *flags):
    """Start the same command on both machines."""
    options = [word for name, value in {**FLAGS, **STEPS}.items() for word in (f"--{name}", str(value))]
    command = ["train", *options, "--frames", "1", "--batch_size", "2", "--output_dir", str(folder), *flags]
    processes = []
    for number, name in enumerate(NAMES):
        launch = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=two"]
        launch += [
            f"--rdzv-endpoint={ADDRESSES[0]}:29511",
            f"--local-addr={ADDRESSES[number]}",
            f"--rdzv-conf=is_host={int(number == 0)},read_timeout=5",
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": f"wan-link-{name[-1]}",
        }
        words = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", *launch, "-m", "wandistiller"]
        log = (folder.parent / f"{name}.log").open("w")
        processes.append(subprocess.Popen([*words, *command], env=environment, stdout=log, stderr=subprocess.STDOUT))
    return processes


def logs(folder):
    return "\n".join((folder.parent / f"{name}.log").read_text() for name in NAMES)


def test_a_link_that_is_cut_and_mended(machines, tmp_path):
    folder = tmp_path / "run"
    processes = start(folder, "--rank_timeout", "10")
    deadline = time.monotonic() + 120
    while not (folder / "states" / "step-00000005").exists() and time.monotonic() < deadline:
        assert all(process.poll() is None for process in processes), logs(folder)
        time.sleep(0.1)
    ip("-n", NAMES[0], "link", "set", "wan-link-a", "down")
    cut = time.monotonic()
    while "error:" not in logs(folder):
        assert time.monotonic() < cut + 60, logs(folder)
        time.sleep(0.1)
    for process in processes:
        process.wait(timeout=120)
    assert all(process.returncode for process in processes)
    assert "no contact with the job" in logs(folder) or "been silent for 5 s" in logs(folder), logs(folder)
    ip("-n", NAMES[0], "link", "set", "wan-link-a", "up")
    ended = [process.wait(timeout=180) for process in start(folder, "--resume", "auto")]
    assert ended == [0, 0], logs(folder)
    assert "Going on from" in logs(folder)
    train(**FLAGS, **STEPS, frames=(1,), batch_size=4, output_dir=tmp_path / "straight")
    found, expected = (
        load_file(each / "model" / "transformer" / "diffusion_pytorch_model.safetensors")
        for each in (folder, tmp_path / "straight")
    )
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-3, msg=name)
