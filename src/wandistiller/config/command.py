"""What all commands' configurations have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class CommandConfig:
    """Base of a command's configuration; precedence is defaults, then ``--config``, then flags."""

    config: Path | None = None
    """TOML file with any of the flags below as keys; flags on the command line win. Keep one beside each experiment."""

    def check(self) -> None:
        """Raise ``UsageError`` where values do not go together; needs no model and no device."""
