"""Run a function on several ranks of this machine: torchrun's environment without its start-up time."""

from __future__ import annotations

import inspect
import itertools
import os
import socket
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from helpers.processes import load, start

from wandistiller.train import runs


def run_ranks(count: int, function: Callable[..., Any], *arguments: Any, folder: Path, timeout: float = 300) -> None:
    """Call ``function`` of a test's file on each rank; raise with what a rank printed if one fails or does not end in time."""
    processes = start_ranks(count, function, *arguments, folder=folder)
    for process in processes:
        process.join(timeout)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    codes = [process.exitcode for process in processes]
    printed = [f"rank {rank}: {_log(folder, rank).read_text()[-4000:]}" for rank in range(count)]
    assert not late and not any(codes), "\n".join(printed)


def start_ranks(count: int, function: Callable[..., Any], *arguments: Any, folder: Path) -> list[BaseProcess]:
    """Let each rank begin."""
    port, job = free_port(), (inspect.getfile(function), function.__name__, arguments)
    for rank in range(count):
        _log(folder, rank).unlink(missing_ok=True)
    return [
        start(_be_rank, rank, count, port, *job, output=_log(folder, rank), errors=_log(folder, rank)) for rank in range(count)
    ]


_PORTS_EACH = 16
_numbers = itertools.count(os.getpid())


def free_port() -> int:
    """Return a port that nobody listens on, nor on the next ones.

    It is none of those that the system gives to connections, which could take it before the ranks listen there, and each
    process of the suite has its own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
    for number in _numbers:
        port = 12_000 + 5_000 * worker + _PORTS_EACH * (number % (5_000 // _PORTS_EACH))
        if all(_is_free(port + each) for each in range(_PORTS_EACH)):
            return port
    raise AssertionError("numbers do not end")


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _be_rank(rank: int, count: int, port: int, file: str, name: str, arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": f"test-{port}"}
    # What a run will take is foreseen in other tests; here that would take longer than the run.
    runs.forecast = lambda *arguments, **options: None  # type: ignore[assignment]
    load(file, name)(*arguments)
