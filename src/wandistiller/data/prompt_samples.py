"""Prompts as training samples: pure noise and a sigma for each. A baseline; trajectories are the way to learn from prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wandistiller.data.buckets import AllOne, Bucket
from wandistiller.data.cached_samples import Randomness
from wandistiller.data.prompt_texts import PromptTexts
from wandistiller.data.prompts import Prompts


class PromptSamples:
    """The first prompts of a file, all to be drawn at one size."""

    def __init__(
        self,
        prompts: Prompts,
        texts: PromptTexts,
        count: int,
        bucket: Bucket,
        latent_shape: tuple[int, int, int, int],
        randomness: Randomness,
    ) -> None:
        self._prompts = prompts
        self._texts = texts
        self._latent_shape = latent_shape
        self._randomness = randomness
        self.buckets: Sequence[Bucket] = AllOne(bucket, count)
        self.trims_text = texts.trims_text
        self.empty_text = texts.empty_text

    def __len__(self) -> int:
        return len(self.buckets)

    def name(self, index: int) -> str:
        """Return what a message calls a sample."""
        return self._prompts.name(index)

    def caption(self, index: int) -> str:
        """Return a prompt."""
        return self._prompts.prompt(index)

    def text(self, index: int) -> Tensor:
        """Return a prompt's embeddings."""
        return self._texts.read(index)

    def fingerprint(self, index: int) -> str:
        """Return another string for another prompt, or for another text encoder or precision of it."""
        return f"{self._texts.folder.name} {self.caption(index)}"

    def latent_shape(self, index: int) -> tuple[int, int, int, int]:
        """Return the shape of what is drawn for a prompt."""
        return self._latent_shape

    def read(self, index: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return pure noise as the noisy latents of a sigma that it does not belong to."""
        place, drop = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        return {
            "noisy": torch.randn(self._latent_shape, generator=generator),
            "place": torch.tensor(place, dtype=torch.float64),
            "sigma": torch.tensor(self._randomness.sigma.quantile(place), dtype=torch.float32),
            "text": self.empty_text if drop < self._randomness.caption_dropout else self.text(index),
        }
