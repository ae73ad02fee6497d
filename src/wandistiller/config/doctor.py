"""``wandistiller doctor``: what this machine can do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wandistiller.config.command import CommandConfig
from wandistiller.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(CommandConfig):
    """Check every device here in every precision, measure its buses and disks, and say what is broken.

    Ends with exit code 1 if something is broken.
    """

    device: str = "all"
    """Device to check: cuda, cuda:1, mps or cpu; 'all' checks every one there is."""

    disk: Path = Path()
    """Folder whose disk to measure; name the one that holds your checkpoints."""

    disk_megabytes: int = 256
    """Size of the file written, read and removed for the disk measurement; 0 skips it."""

    json: bool = False
    """Print JSON for programs instead of tables for people."""

    def check(self) -> None:
        if not self.disk.is_dir():
            raise UsageError(f"--disk {self.disk} is not a folder.", fix="Name a folder on the disk to measure.")
        if self.disk_megabytes < 0:
            raise UsageError("--disk-megabytes is negative.", fix="Give 0 to skip the measurement.")
