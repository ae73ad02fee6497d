"""Run a function on several ranks of this machine: torchrun's environment without its start-up time.

The ranks are forked from a server that has imported what they need and done nothing else. A process that has computed has
threads, of autograd and of CUDA's libraries, which a fork of it would lack.
"""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


def run_ranks(count: int, function: Callable[..., Any], *arguments: Any, folder: Path, timeout: float = 300) -> None:
    """Call ``function`` of a test's file on each rank; raise with what a rank printed if one fails or does not end in time."""
    processes = start_ranks(count, function, *arguments, folder=folder)
    for process in processes:
        process.join(timeout)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    codes = [process.exitcode for process in processes]
    printed = [f"rank {rank}: {log_of(folder, rank).read_text()[-4000:]}" for rank in range(count)]
    assert not late and not any(codes), "\n".join(printed)


def start_ranks(count: int, function: Callable[..., Any], *arguments: Any, folder: Path) -> list[BaseProcess]:
    """Let each rank begin."""
    port, environment = free_port(), dict(os.environ)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["wandistiller.api", "wandistiller.train.loop", "diffusers.models", "torch._dynamo"])
    job = (inspect.getfile(function), function.__name__, arguments)
    processes = [
        context.Process(target=run_rank, args=(rank, count, port, log_of(folder, rank), environment, *job))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    return processes


def log_of(folder: Path, rank: int) -> Path:
    """Return the file of what a rank prints."""
    return folder / f"rank-{rank}.log"


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_rank(
    rank: int, count: int, port: int, log: Path, environment: dict[str, str], file: str, name: str, arguments: tuple[Any, ...]
) -> None:
    """Be one rank, in a process of its own, with its output in a file."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    os.environ |= environment
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": f"test-{port}"}
    try:
        spec = importlib.util.spec_from_file_location("ranked", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        getattr(module, name)(*arguments)
    except BaseException:  # noqa: BLE001 - printed where the test looks
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
