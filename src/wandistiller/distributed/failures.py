"""How a rank ends that has failed: with its own message where torchrun shows it, and without waiting for anybody.

torchrun shows the message of the rank that failed first, from a file that it names, and stops the others. A rank whose
collective broke because another one died has nothing of its own to say, so it lets the other be first.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from wandistiller.errors import WanDistillerError

_BROKEN_COLLECTIVE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Gloo", "gloo", "Socket")
_PATIENCE_SECONDS = 5.0


def is_rank() -> bool:
    """Say whether this process was started by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def num_restarts() -> int:
    """Return how often torchrun has started this job again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def job_start() -> float:
    """Return when the torchrun that started this process was started itself, in seconds since the epoch."""
    import psutil  # not before it is needed: the command line imports this module

    return psutil.Process(os.getppid()).create_time()


def end_torchrun_later(seconds: float = 10.0) -> None:
    """End the torchrun that started this process, if it is still there then; that takes another five seconds.

    One that is cut off from the job's store waits for it without end, and does not see that its ranks have ended.
    """
    process = os.getppid()
    command = Path(f"/proc/{process}/cmdline")
    words = command.read_bytes() if command.exists() else b""
    if b"torchrun" in words or b"torch.distributed.run" in words:
        program = Path(__file__).with_name("torchrun_end.py")
        subprocess.Popen([sys.executable, "-P", str(program), str(process), str(seconds)], start_new_session=True)


def end_rank(error: BaseException, exit_code: int, *, with_processes: Sequence[int] = ()) -> NoReturn:
    """Leave the error where torchrun looks for it and end at once: no collective, no destructor, can hold it up.

    ``with_processes`` are killed: torchrun would wait half a minute for one that cannot answer.
    """
    if isinstance(error, WanDistillerError):
        text = str(error)
    elif any(sign in str(error) for sign in _BROKEN_COLLECTIVE):
        time.sleep(_PATIENCE_SECONDS)  # torchrun ends this process in the meantime if another rank failed
        text = f"Another rank is gone: {str(error).splitlines()[0]}"
    else:
        text = "".join(traceback.format_exception(error))
    print(f"error: {text}", file=sys.stderr)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The earliest failure is the one that torchrun shows, and those that are killed for this one come after it.
        moment = int(time.time()) - bool(with_processes)
        details = {"py_callstack": text, "timestamp": str(moment)}
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    for process in with_processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    os._exit(exit_code)
