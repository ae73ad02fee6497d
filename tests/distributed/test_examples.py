"""The examples for clusters, as they stand, with this machine in the place of the cluster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.ranks import free_port

ROOT = Path(__file__).parents[2]
RUN = """
[train]
model = "tiny-random"
dataset_path = "world:12:1x32x32"
width = 32
height = 32
frames = [1]
max_aspect = 1.0
num_steps = 3
batch_size = 2
workers = 0
output_dir = "run"
"""
SCONTROL = '#!/bin/bash\n[ "$*" = "show hostnames a,b" ] && printf "localhost\\nother\\n"\n'
# Each task on a machine of its own: here, both on this one. The second knows that the first is the host of the store.
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] && [ "$2" = torchrun ] || exit 9
shift 2
{torchrun} --rdzv-conf is_host=1 "$@" & first=$!
{torchrun} --rdzv-conf is_host=0 "$@" || exit 1
wait $first
"""
TORCHRUN = f"{sys.executable} -m torch.distributed.run"


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_slurm(place, monkeypatch):
    tools = place / "bin"
    tools.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN.format(torchrun=TORCHRUN))):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    for name, value in (("NODELIST", "a,b"), ("NUM_NODES", "2"), ("ID", "17")):
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    script = (ROOT / "examples" / "slurm.sbatch").read_text().replace(":29500", f":{free_port()}")
    done = subprocess.run(["bash", "-c", script, "slurm.sbatch", "run.toml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "steps of 4 samples" in done.stderr, "two machines, a batch of two each"
    assert (place / "run" / "model" / "transformer").is_dir()


def test_kubernetes(place):
    service, job = yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"] == service["spec"]["selector"]["job-name"]
    torchrun, *words = pod["containers"][0]["command"]
    assert torchrun == "torchrun" and f"--nnodes={job['spec']['completions']}" in words
    assert f"--nproc-per-node={pod['containers'][0]['resources']['limits']['nvidia.com/gpu']}" in words
    # The name of the first pod is what a Job and its service make of it.
    first = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    port = free_port()
    words = [word.replace(f"{first}:29500", f"localhost:{port}").replace("node=8", "node=1") for word in words]
    assert any(f"localhost:{port}" in word for word in words)
    pods = [
        subprocess.Popen(
            [*TORCHRUN.split(), f"--rdzv-conf=is_host={int(index == 0)}", *words], stderr=subprocess.PIPE, text=True
        )
        for index in range(job["spec"]["completions"])
    ]
    printed = [each.communicate(timeout=180)[1] for each in pods]
    assert [each.returncode for each in pods] == [0, 0], printed
    assert any("steps of 4 samples" in each for each in printed)
    assert (place / "run" / "model" / "transformer").is_dir()
