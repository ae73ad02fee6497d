"""A rank that is killed, stops, or leaves the others waiting: the job comes back, or ends in time and says who and what."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from helpers.ranks import free_port
from helpers.torchrun import SOURCE, torchrun
from safetensors.torch import load_file

from wandistiller.api import train

WORLD = ["--dataset-path", "world:12:1x32x32", "--width", "32", "--height", "32", "--frames", "1", "--max-aspect", "1"]
FLAGS = ["--model", "tiny-random", *WORLD, "--batch-size", "2", "--learning-rate", "1e-3", "--log-every", "1", "--workers", "0"]
TWO_STEPS = {
    "model": "tiny-random",
    "dataset_path": "world:12:1x32x32",
    "width": 32,
    "height": 32,
    "frames": (1,),
    "max_aspect": 1.0,
    "learning_rate": 1e-3,
    "workers": 0,
    "batch_size": 2,
    "num_steps": 2,
}
MISHAP = """
import os, signal, sys, time
from wandistiller.cli.main import main
from wandistiller.train.methods.finetune import FlowMatching

losses = FlowMatching.losses
def mishap(self, batch):
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if is_last and batch.step == {step} and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        {mishap}
    return losses(self, batch)
FlowMatching.losses = mishap
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.fixture
def run(tmp_path):
    def go(mishap, *flags, step=3, **options):
        script = tmp_path / "mishap.py"
        script.write_text(MISHAP.format(mishap=mishap, step=step))
        return torchrun(script, *FLAGS, "--output-dir", tmp_path / "run", *flags, **options)

    return go


def weights(folder):
    return load_file(folder / "model" / "transformer" / "diffusion_pytorch_model.safetensors")


def test_a_job_whose_rank_was_killed_comes_back_from_the_last_state(run, tmp_path):
    # The state of step 2 is complete when that of step 4 is begun; that one may be, or not.
    flags = ["--num-steps", "8", "--save-every", "2"]
    done = run("os.kill(os.getpid(), signal.SIGKILL)", *flags, step=5, launch=["--max-restarts=1"])
    assert done.returncode == 0, done.stderr
    assert re.search(r"Going on from .*, step [24]\n", done.stderr), done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))
    same = {"width": 32, "height": 32, "frames": (1,), "max_aspect": 1.0, "learning_rate": 1e-3, "num_steps": 8, "workers": 0}
    train(model="tiny-random", dataset_path="world:12:1x32x32", **same, batch_size=4, output_dir=tmp_path / "straight")
    expected = weights(tmp_path / "straight")
    for name, value in weights(tmp_path / "run").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4, msg=name)


def test_a_job_that_goes_on_from_another_run_is_killed_before_its_first_state(run, tmp_path):
    train(**TWO_STEPS, output_dir=tmp_path / "other")
    flags = ["--num-steps", "4", "--save-every", "0", "--resume", tmp_path / "other" / "states" / "step-00000002"]
    done = run("os.kill(os.getpid(), signal.SIGKILL)", *flags, ranks=1, launch=["--max-restarts=1"])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("other/states/step-00000002, step 2\n") == 2, "both times"


def test_a_folder_that_holds_a_training_is_not_taken_over_by_starting_again(run, tmp_path):
    train(**TWO_STEPS, output_dir=tmp_path / "run")
    for path in (tmp_path / "run" / "states").rglob("*"):
        os.utime(path, times=(0, 0))  # long before: a start is known to the second
    done = run("pass", "--num-steps", "4", ranks=1, launch=["--max-restarts=1"])
    assert done.returncode != 0
    assert "holds a training already, up to step-00000002" in done.stderr.partition("Root Cause")[2], done.stderr
    assert [path.name for path in (tmp_path / "run" / "states").iterdir()] == ["step-00000002"]


def test_flags_that_cannot_be_understood_are_the_root_cause(run):
    done = run("pass", "--num-stepz", "2", ranks=1)
    assert done.returncode != 0
    cause = done.stderr.partition("Root Cause")[2]
    assert "--num-stepz" in cause and "exitcode  : 2" in cause, done.stderr


def test_a_rank_of_one_of_two_machines_is_killed_and_both_come_back_at_once(tmp_path):
    """Where it died it is a restart, for the other machine a change of membership: they do not count alike."""
    script = tmp_path / "mishap.py"
    once = "os.path.exists('killed') or (open('killed', 'w'), os.kill(os.getpid(), signal.SIGKILL))"
    script.write_text(MISHAP.format(mishap=once, step=5))
    port = free_port()
    flags = [*FLAGS, "--num-steps", "6", "--save-every", "2", "--output-dir", "run"]
    launch = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.5", "--rdzv-backend=c10d"]
    launch += [f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=two"]
    machines = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *launch, f"--rdzv-conf=is_host={number}", str(script), *flags],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        )
        for number in (1, 0)
    ]
    printed = [each.communicate(timeout=240)[1] for each in machines]
    assert [each.returncode for each in machines] == [0, 0], printed
    assert (tmp_path / "killed").exists()
    text = "".join(printed)
    # The state of step 2 is complete when that of step 4 is begun; that one may be, or not.
    assert len(re.findall(r"Going on from .*, step [24]\n", text)) == 1, text
    assert "Another rank is gone" not in text, "nobody takes the dead for the living"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 7))


def test_a_rank_that_stops_is_named_within_the_set_time(run):
    mishap = "time.sleep(3); os.kill(os.getpid(), signal.SIGSTOP)"
    done = run(mishap, "--num-steps", "6", "--rank-timeout", "12")
    assert done.returncode != 0
    cause = done.stderr.partition("Root Cause")[2]
    assert "Rank 1 has been silent for 6 s." in cause, done.stderr
    assert re.search(r"rank 1 \(process \d+ on .*\): silent for \d+ s; before that in step 4", cause)


def test_ranks_that_wait_in_vain_say_for_whom(run):
    done = run("time.sleep(60)", "--num-steps", "6", "--rank-timeout", "5")
    assert done.returncode != 0
    cause = done.stderr.partition("Root Cause")[2]
    assert "Ranks have waited for each other for more than 5 s." in cause, done.stderr
    assert "rank 0 (this one): in step 4, computing and exchanging gradients of role 'student'" in cause
    assert "rank 1: in step 4, computing the losses of role 'student'" in cause
