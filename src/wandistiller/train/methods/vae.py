"""Training a VAE: reconstruction, KL, a perceptual loss, and a critic that learns to tell pictures from reconstructions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as functional
from torch import Tensor

from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.data.loader import Batch
from wandistiller.distributed.ranks import Ranks
from wandistiller.models.critic import PatchCritic
from wandistiller.models.latents import latent_shape
from wandistiller.models.vae_passes import VaePass
from wandistiller.train.method import Losses, Role, Turn
from wandistiller.train.vae_losses import (
    adaptive_scale,
    hinge_critic,
    hinge_generator,
    kl_divergence,
    kl_weight,
    r1_penalty,
    reconstruction,
)

Perceptual = Callable[[Tensor, Tensor], Tensor]
"""One distance a sample between found and wanted pixels."""


@dataclass(frozen=True, kw_only=True)
class VaeWeights:
    """What counts how much."""

    reconstruction: float = 1.0
    high_frequency: float = 0.0
    kl_beta: float = 1e-6
    kl_warmup_steps: int = 0
    kl_free_bits: float = 0.0
    perceptual: float = 0.0
    adversarial: float = 0.0
    adversarial_start: int = 0
    """Step from which the critic is listened to; it learns from the start."""
    r1_gamma: float = 5.0
    r1_interval: int = 16

    @classmethod
    def of(cls, config: TrainVaeConfig) -> VaeWeights:
        """Return what a configuration asks for."""
        return cls(
            reconstruction=config.lambda_rec,
            high_frequency=config.high_frequency_weight,
            kl_beta=config.kl_beta,
            kl_warmup_steps=config.kl_warmup_steps,
            kl_free_bits=config.kl_free_bits,
            perceptual=config.lambda_lpips,
            adversarial=config.lambda_adv,
            adversarial_start=config.gan_start,
            r1_gamma=config.r1_gamma,
            r1_interval=config.r1_interval,
        )


class VaeTraining:
    """Roles ``vae`` (a ``VaePass``), ``critic`` where there is one; batches have ``pixels`` and ``seed``."""

    def __init__(
        self,
        vae: Role,
        weights: VaeWeights,
        *,
        critic: Role | None = None,
        perceptual: Perceptual | None = None,
        reduced_min_sizes: Sequence[int] = (),
        repeats: int = 1,
    ) -> None:
        """``reduced_min_sizes`` adds each batch at smaller sizes; ``repeats`` takes every turn so often in one step."""
        self._vae = vae
        self._critic = critic
        self._weights = weights
        self._perceptual = perceptual
        self._sizes = tuple(reduced_min_sizes)
        self.roles: Mapping[str, Role] = {role.name: role for role in (vae, critic) if role is not None}
        turns = [Turn(vae.name, self.vae_losses)]
        if critic is not None:
            turns.append(Turn(critic.name, self.critic_losses, self._update_norms))
        self.turns: Sequence[Turn] = turns * repeats
        self._num_noted = 0
        self._gradients: list[Tensor] = []
        """At the decoder's last layer, of closeness and of the critic's word, summed over the step."""
        self._fakes: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Wanted and found pixels of the step's batches, for the critic's turn: what the VAE was judged by is what it sees."""

    def vae_losses(self, batch: Batch) -> Losses:
        """Return the VAE's loss, the mean over the sizes that a batch is trained at."""
        found = [self._losses_at(batch, pixels) for pixels in self._at_sizes(batch.tensors["pixels"])]
        total = torch.stack([losses.total for losses in found]).mean()
        metrics = {name: torch.stack([losses.metrics[name] for losses in found]).mean() for name in found[0].metrics}
        # A critic that is broken breaks the VAE's loss before its own; pixels that are not finite break its word.
        culprits = {"reconstruction": self._vae.name, "kl": self._vae.name}
        if self._critic is not None and "adversarial" in metrics:
            culprits["adversarial"] = self._critic.name
        return Losses(total, metrics, culprits)

    def critic_losses(self, batch: Batch) -> Losses:
        """Return the critic's hinge loss and, every so often, R1 on the real ones."""
        assert self._critic is not None
        pairs, weights = self._fakes.pop(batch.position), self._weights
        totals, real_words, fake_words = [], [], []
        for wanted, found in pairs:
            # In one call, which takes less time than two.
            real, fake = self._critic(torch.cat([wanted, found])).float().chunk(2)
            totals.append(hinge_critic(real, fake))
            real_words.append(real.mean())
            fake_words.append(fake.mean())
        losses = Losses(torch.stack(totals).mean())
        losses.metrics = {"critic/real": torch.stack(real_words).mean(), "critic/fake": torch.stack(fake_words).mean()}
        # Beside the loss, which is 0 where these are infinite in the right direction.
        losses.culprits = dict.fromkeys(losses.metrics, self._critic.name)
        if weights.r1_gamma and batch.step % weights.r1_interval == 0:
            with torch.autocast(pairs[0][0].device.type, enabled=False):  # its second derivatives run over in 16 bits
                real_pixels = pairs[0][0].float()
                penalty = r1_penalty(self._critic.model, real_pixels, gamma=weights.r1_gamma, interval=weights.r1_interval)
            losses.metrics["critic/r1"] = penalty.detach()
            losses.total = losses.total + penalty
        return losses

    def _losses_at(self, batch: Batch, wanted: Tensor) -> Losses:
        weights, vae_pass = self._weights, cast(VaePass, self._vae.model)
        shape = latent_shape(vae_pass.vae.config, wanted.shape)
        seeds = batch.tensors["seed"].tolist()
        noise = torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
        found, mean, logvar = (each.float() for each in self._vae(wanted, noise.to(wanted.device)))
        metrics = {
            "reconstruction": reconstruction(found, wanted, high_frequency_weight=weights.high_frequency),
            "kl": kl_divergence(mean, logvar, free_bits=weights.kl_free_bits),
        }
        closeness = weights.reconstruction * metrics["reconstruction"]
        if self._perceptual is not None:
            metrics["perceptual"] = self._perceptual(found, wanted).mean()
            closeness = closeness + weights.perceptual * metrics["perceptual"]
        beta = kl_weight(batch.step, beta=weights.kl_beta, warmup_steps=weights.kl_warmup_steps)
        total = closeness + beta * metrics["kl"]
        if self._critic is not None:
            self._fakes.setdefault(batch.position, []).append((wanted.detach(), found.detach()))
            if batch.step >= weights.adversarial_start:
                with self._critic.frozen():
                    word = hinge_generator(self._critic.model(found).float())
                scale = self._scale(closeness, word, batch.num_samples, found.numel())
                metrics |= {"adversarial": word, "adversarial_weight": scale}
                total = total + weights.adversarial * scale * word
        return Losses(total, {name: value.detach() for name, value in metrics.items()})

    def finish_step(self, ranks: Ranks) -> None:
        """Learn from all gradients of the step, of every batch and rank, how loud the critic is in the next one.

        A scale from each batch's own gradients would make accumulation and ranks another training than the large batch.
        """
        if self._gradients:
            count = ranks.mean(torch.tensor(float(self._num_noted)))
            for_closeness, for_word = (ranks.mean(gradient.cpu()) / count for gradient in self._gradients)
            scale = adaptive_scale(for_closeness, for_word)
            cast(VaePass, self._vae.model).adversarial_scale.copy_(scale)
            self._gradients, self._num_noted = [], 0

    def _update_norms(self) -> None:
        """Let the critic's spectral norms follow its new weights: not in every call, which would tell batches apart."""
        assert self._critic is not None
        with self._critic.whole():
            cast(PatchCritic, self._critic.model).update_norms()

    def _scale(self, closeness: Tensor, word: Tensor, num_samples: int, num_pixels: int) -> Tensor:
        """Return the critic's scale for this step, and take note of the gradients at the last layer for the next."""
        vae_pass = cast(VaePass, self._vae.model)
        # For float16, in which the gradients of a mean over a clip's pixels vanish, and those of a sum run over.
        size = math.sqrt(num_pixels)
        found = [
            torch.autograd.grad(loss * size, vae_pass.last_layer, retain_graph=True)[0].float() * (num_samples / size)
            for loss in (closeness, word)
        ]
        self._num_noted += num_samples
        before = self._gradients or [torch.zeros_like(each) for each in found]
        self._gradients = [earlier + now for earlier, now in zip(before, found, strict=True)]
        return vae_pass.adversarial_scale.clone()

    def _at_sizes(self, pixels: Tensor) -> list[Tensor]:
        """Return the batch as it is and at each smaller size, the shorter side of which is given."""
        vae = cast(VaePass, self._vae.model).vae
        height, width = pixels.shape[-2:]
        found = [pixels]
        for shape in reduced_shapes(height, width, self._sizes, vae.config["scale_factor_spatial"]):
            frames = pixels.transpose(1, 2).flatten(0, 1)
            small = functional.interpolate(frames, shape, mode="bilinear", antialias=True)
            found.append(small.unflatten(0, (pixels.shape[0], -1)).transpose(1, 2))
        return found


def reduced_shapes(height: int, width: int, sizes: Sequence[int], multiple: int) -> list[tuple[int, int]]:
    """Return the shapes of the given shorter sides that pictures are also trained at, rounded to what the VAE can take.

    Only smaller ones are made, and each once.
    """

    def scaled(side: int, size: int) -> int:
        return max(round(side * size / min(height, width) / multiple), 1) * multiple

    shapes = dict.fromkeys((scaled(height, size), scaled(width, size)) for size in sizes)
    return [shape for shape in shapes if min(shape) < min(height, width)]
