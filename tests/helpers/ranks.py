"""Run a function on several ranks of this machine, in forked processes: torchrun's environment without its start-up time."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_ranks(count: int, function: Callable[..., Any], *arguments: Any, folder: Path, timeout: float = 300) -> None:
    """Call ``function`` on each rank; raise with what a rank printed if one fails or does not end in time."""
    port = free_port()
    context = multiprocessing.get_context("fork")
    logs = [folder / f"rank-{rank}.log" for rank in range(count)]
    tasks = [(rank, count, port, log, function, arguments) for rank, log in enumerate(logs)]
    processes = [context.Process(target=run_rank, args=task) for task in tasks]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    codes = [process.exitcode for process in processes]
    assert not late and not any(codes), "\n".join(f"rank {rank}: {log.read_text()[-4000:]}" for rank, log in enumerate(logs))


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_rank(rank: int, count: int, port: int, log: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Be one rank, in a process of its own, with its output in a file."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": f"test-{port}"}
    try:
        function(*arguments)
    except BaseException:  # noqa: BLE001 - printed where the test looks
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
