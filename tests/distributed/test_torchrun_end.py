"""A torchrun whose store answers no more: a rank that has ended ends it, on a machine as in a container."""

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.ranks import free_port
from helpers.torchrun import SOURCE

STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("localhost", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(600)
"""
RANK = """
import os, sys, time
from pathlib import Path
from wandistiller.distributed.failures import end_torchrun_later
Path("started").touch()
while not Path("cut").exists():
    time.sleep(0.1)
Path("torchrun").write_text(str(os.getppid()))
end_torchrun_later(1)
os._exit(3)
"""
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def can_run(words):
    try:
        return subprocess.run([*words, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def store():
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", STORE, str(port)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    yield process, port
    process.kill()
    process.communicate()


@pytest.mark.parametrize("place", ["machine", "container"])
def test_a_torchrun_that_waits_for_its_store_is_ended(store, tmp_path, place):
    """In a container it is the first process, to which a SIGKILL of its own processes does nothing."""
    if place == "container" and not can_run(CONTAINER):
        pytest.skip("making process namespaces is not allowed here")
    holder, port = store
    (tmp_path / "rank.py").write_text(RANK)
    launch = ["--nnodes=1", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=one"]
    words = [sys.executable, "-m", "torch.distributed.run", *launch, "--rdzv-conf=is_host=0", "rank.py"]
    with (tmp_path / "log").open("w") as log:
        torchrun = subprocess.Popen(
            [*(CONTAINER if place == "container" else []), *words],
            cwd=tmp_path,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists():
            assert torchrun.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        holder.send_signal(signal.SIGSTOP)
        time.sleep(1)  # torchrun asks the store ten times a second
        (tmp_path / "cut").touch()
        assert torchrun.wait(timeout=20) != 0, "it waits a minute for an answer, and then without end"
    finally:
        torchrun.kill()
        torchrun.wait()
    assert (int((tmp_path / "torchrun").read_text()) == 1) == (place == "container")
