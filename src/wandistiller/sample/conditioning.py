"""What a transformer is told besides the noisy latents: text, and for image-to-video the first frame.

There are three ways of image-to-video in Wan, told apart by the transformer's shapes:

- Wan 2.1 takes the frame's latents and a mask as extra channels, and CLIP's view of the picture beside the text;
- Wan 2.2 A14B takes the extra channels only;
- Wan 2.2 5B has the first latent frame put in its place, noise-free, and told so token by token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from wandistiller.errors import CheckpointError, UsageError
from wandistiller.models.latents import normalise
from wandistiller.models.text import load_whole
from wandistiller.models.vae_tiles import encode_tiled
from wandistiller.sample.geometry import Geometry


@dataclass(frozen=True)
class Conditioning:
    """Tensors of one sampling, on the computing device; the first dimension of ``text`` counts the prompts."""

    text: Tensor
    """(prompts, tokens, width)"""
    negative_text: Tensor | None
    """(1, tokens, width), where guidance needs it"""
    image_tokens: Tensor | None = None
    """(1, tokens, width): CLIP's view of the first frame"""
    extra_channels: Tensor | None = None
    """(1, channels, frames, height, width): mask and latents of the first frame, put behind the noisy latents"""
    first_frame: Tensor | None = None
    """(1, channels, 1, height, width): latents that stand, noise-free, in the place of the first frame"""

    def moved(self, device: torch.device) -> Conditioning:
        """Return the same on another device."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return Conditioning(**{name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()})

    def place_first_frame(self, noisy: Tensor) -> Tensor:
        """Return the latents with the first frame in its place, where there is one."""
        if self.first_frame is None:
            return noisy
        first = self.first_frame.to(noisy.dtype).expand(noisy.shape[0], -1, -1, -1, -1)
        return torch.cat([first, noisy[:, :, 1:]], dim=2)


@dataclass(frozen=True)
class ImageInputs:
    """How a checkpoint takes a first frame."""

    extra_channels: int
    """Channels beyond the noisy latents: 0 or 4 for the mask plus the latents' own."""
    wants_image_tokens: bool
    replaces_first_frame: bool

    @property
    def is_needed(self) -> bool:
        return self.extra_channels > 0


def image_inputs(transformer_config: Mapping[str, Any], expand_timesteps: bool) -> ImageInputs:
    """Read from a transformer's configuration how it takes a first frame."""
    return ImageInputs(
        extra_channels=transformer_config["in_channels"] - transformer_config["out_channels"],
        wants_image_tokens=transformer_config["image_dim"] is not None,
        replaces_first_frame=expand_timesteps,
    )


def check_image(image: Path | None, inputs: ImageInputs, transformer_config: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` where a picture is given to a model that takes none, or missing from one that needs it."""
    extra, drawn = inputs.extra_channels, transformer_config["out_channels"]
    if extra not in (0, drawn + 4) or transformer_config["pos_embed_seq_len"] is not None:
        kind = "first and last frame" if transformer_config["pos_embed_seq_len"] is not None else f"{extra} extra channels"
        raise UsageError(
            f"This checkpoint takes {kind}, which sampling does not support.",
            fix="Use a text-to-video or image-to-video checkpoint.",
        )
    if image is None and inputs.is_needed:
        raise UsageError(
            "This is an image-to-video checkpoint and no picture was given.",
            why=f"it takes {transformer_config['in_channels']} channels for {transformer_config['out_channels']} drawn.",
            fix="Give the first frame with --image, or use a text-to-video checkpoint.",
        )
    if image is not None and not inputs.is_needed and not inputs.replaces_first_frame:
        raise UsageError(
            "This checkpoint draws from text alone.", fix="Leave --image away or use an image-to-video checkpoint."
        )


def to_pixels(image: Image.Image, geometry: Geometry) -> Tensor:
    """Turn a picture into pixels from -1 to 1, (1, 3, height, width), resized to what is drawn."""
    image = image.resize((geometry.width, geometry.height), Image.Resampling.LANCZOS)
    array = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
    return array / 127.5 - 1


@torch.no_grad()
def encode_first_frame(
    vae: nn.Module, pixels: Tensor, geometry: Geometry, inputs: ImageInputs, *, tiled: bool = False
) -> dict[str, Tensor]:
    """Return the image part of a ``Conditioning``: ``extra_channels`` or ``first_frame``."""
    parameter = next(vae.parameters())
    frame = pixels.to("cpu" if tiled else parameter.device, parameter.dtype)[:, :, None]

    def encode(clip: Tensor) -> Tensor:
        distribution = encode_tiled(vae, clip) if tiled else vae.encode(clip).latent_dist
        return normalise(distribution.mode().float(), vae.config)

    if inputs.replaces_first_frame and not inputs.is_needed:
        return {"first_frame": encode(frame)}
    clip = frame.new_zeros(1, 3, geometry.frames, geometry.height, geometry.width)
    clip[:, :, :1] = frame
    latents = encode(clip)
    return {"extra_channels": torch.cat([_known_frames(latents, geometry), latents], dim=1)}


def _known_frames(latents: Tensor, geometry: Geometry) -> Tensor:
    """Return the mask of given frames: the latent frame's share of pixel frames as channels, 1 where given."""
    mask = latents.new_zeros(1, geometry.temporal, *latents.shape[2:])
    # The first latent frame stands for one pixel frame; its mask is repeated to fill the channels.
    mask[:, :, 0] = 1
    return mask


@torch.no_grad()
def encode_image_tokens(encoder: Path, processor: Path, image: Image.Image, device: torch.device) -> Tensor:
    """Return CLIP's last but one hidden states of the picture; the encoder is gone afterwards."""
    from transformers import CLIPImageProcessor, CLIPVisionModel

    try:
        prepare = CLIPImageProcessor.from_pretrained(processor)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"The image processor {processor} cannot be loaded.", why=str(error).strip(), fix="Download the folder again."
        ) from error
    model = load_whole(CLIPVisionModel, encoder, torch.float32).to(device)
    inputs = prepare(images=image, return_tensors="pt").to(device)
    return model(**inputs, output_hidden_states=True).hidden_states[-2]
