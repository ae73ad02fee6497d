"""The end of a torchrun that waits without end: a program of its own, for it goes on when the rank that starts it has ended.

torchrun answers SIGTERM from Python, and so not at all while it waits for the job's store. SIGKILL needs no answer, but the
first process of a container, which torchrun is in most, is protected from what its own processes send it. It is not protected
from the system, which kills whoever has computed for longer than it may; and any process of the same user may set that limit.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

import psutil

_ANSWER_SECONDS = 4.0
_KILL_SECONDS = 1.0
_LIMIT_SECONDS = 60.0


def end_process(process: psutil.Process) -> None:
    """End a process, the first of a container too: let it end itself, then kill it, then let the system do so."""
    process.terminate()
    if _has_ended(process, _ANSWER_SECONDS):
        return
    process.kill()
    if not _has_ended(process, _KILL_SECONDS):
        _let_system_kill(process)


def _has_ended(process: psutil.Process, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _let_system_kill(process: psutil.Process) -> None:
    """Allow a process one second of computation, less than torchrun's start takes, and keep it from sleeping.

    The system looks at the limit while the process computes, at every tick of its clock; each signal is a little to compute.
    """
    process.rlimit(psutil.RLIMIT_CPU, (1, 1))
    deadline = time.monotonic() + _LIMIT_SECONDS
    while not _has_ended(process, 0) and time.monotonic() < deadline:
        for _ in range(1000):
            os.kill(process.pid, signal.SIGTERM)


def main(number: int, seconds: float) -> None:
    """End a process if it is still there after some seconds."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        process = psutil.Process(number)
        if not _has_ended(process, seconds):
            end_process(process)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
