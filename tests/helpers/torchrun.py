"""Run a script under torchrun on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def torchrun(
    script: Path, *arguments: object, ranks: int = 2, timeout: float = 180, launch: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Return what the job printed and its exit code; ``launch`` is for torchrun itself."""
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}:{Path(__file__).parents[1]}", "OMP_NUM_THREADS": "1"}
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*runner, *launch, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, check=False)
