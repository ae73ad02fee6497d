"""``wandistiller encode``: captions and media into caches, once, before any training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wandistiller.config.command import CommandConfig, DtypeName
from wandistiller.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class EncodeConfig(CommandConfig):
    """Write the text embeddings and latents of a data set, so that training needs neither text encoder nor VAE.

    What is up to date is kept; run it again after any change, or after it was stopped. Several processes may work at once.
    """

    model: str | None = None
    """Pipeline whose text encoder and VAE are used: a diffusers folder, a hub id (owner/name), or 'tiny'."""

    dataset_path: str | None = None
    """Folder of pictures and clips with NAME.txt beside each; or a list file (file TAB caption); or a .jsonl file; or the
    procedural world, as world:COUNT:FRAMESxHEIGHTxWIDTH (1+9x64x64 is pictures and clips in turn)."""

    cache_dir: Path | None = None
    """Where the caches are written. Default: the folder .cache in the data set's folder."""

    vae_checkpoint: Path | None = None
    """VAE weights in any dialect, in the place of the pipeline's VAE."""

    width: int | None = None
    """Width in pixels, with --height. Default: what the model is usually sampled at."""

    height: int | None = None
    """Height in pixels, with --width. Default: what the model is usually sampled at."""

    frames: tuple[int, ...] = ()
    """Frames of clips, each one more than a multiple of 4; of several, a clip gets the largest that it can fill. Pictures
    always have 1. Default: what the model is usually sampled at."""

    max_aspect: float = 2.0
    """Media go to the nearest of a few sizes of about --width x --height pixels, the most elongated of which has sides of
    this ratio. 1 crops everything to exactly --width x --height."""

    batch_size: int | None = None
    """Media encoded together by the VAE. Default: as many small ones as have the pixels of one frame of 832x480."""

    text_batch_size: int = 1
    """Captions encoded together. More is faster for thousands of short ones; numbers then differ in their last digits."""

    dtype: DtypeName = "auto"
    """Precision of the text encoder and of the embeddings. 'auto' is bfloat16 on a GPU and float32 on the CPU, and takes
    what is in the cache already in either."""

    vae_dtype: DtypeName = "float32"
    """Precision of the VAE; latents are kept in float32. bfloat16 halves its memory at a small loss. 'auto' follows --dtype,
    and takes what is in the cache already in any."""

    device: str = "auto"
    """Where to compute: cuda, cuda:1, mps or cpu. 'auto' takes the best there is, under torchrun one GPU for each process."""

    vae_tiling: bool = False
    """Encode large media in tiles: take it when memory runs out. Latents are those of the whole frame to rounding, 1e-5 in
    float32. Frames of up to 24x24 latents are not cut. It takes up to twice as long."""

    skip_bad: bool = False
    """Go on without media that cannot be read, captions that are empty and the like, and list them at the end."""

    def check(self) -> None:
        super().check()
        if self.model is None or self.dataset_path is None:
            missing = "--model" if self.model is None else "--dataset-path"
            raise UsageError(
                f"{missing} is missing.", fix="Say what to encode with --dataset-path, and with which pipeline with --model."
            )
        if (self.width is None) != (self.height is None):
            raise UsageError("--width and --height go together.", fix="Give both, or neither.")
        sizes = [("--width", self.width), ("--height", self.height), ("--batch-size", self.batch_size)]
        sizes.append(("--text-batch-size", self.text_batch_size))
        for flag, value in [*sizes, *(("--frames", count) for count in self.frames)]:
            if value is not None and value < 1:
                raise UsageError(f"{flag} {value} is too small.", fix="Give 1 or more.")
        if self.max_aspect < 1:
            raise UsageError(f"--max-aspect {self.max_aspect} is not a ratio of 1 or more.", fix="2 is usual; 1 is one size.")
