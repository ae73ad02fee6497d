"""Configurations that were chosen to be held against measurements: every job, placement, policy and several sizes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.memory.encoder_phases import Decoding
from wandistiller.memory.optimiser_bytes import OptimiserChoice
from wandistiller.memory.rates import fastest_cpu_dtype
from wandistiller.memory.stage import Placing
from wandistiller.memory.uses import Adapters, PixelDecoder, Use
from wandistiller.memory.works import Passes, Training
from wandistiller.models.sizes import SIZES
from wandistiller.plan.trial_steps import Work
from wandistiller.train.vae_prediction import VaeStep

GIB = 2**30
LORA = Adapters(32, ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"))
# Latents: frames, height, width.
IMAGE_5B, VIDEO_5B = (1, 44, 80), (31, 44, 80)
IMAGE, CLIP, VIDEO = (1, 60, 104), (9, 60, 104), (21, 60, 104)


def use(size: str, shape: tuple[int, int, int], batch: int = 1, **changes: Any) -> Use:
    config = dict(SIZES[size].transformer)
    return Use(name="student", config=config, latent_shape=(config["in_channels"], *shape), batch_size=batch, **changes)


def trained(size: str, shape: tuple[int, int, int], batch: int = 1, **changes: Any) -> Use:
    """All weights in float32, computed in bfloat16: what ``train`` and ``distill`` do by default."""
    options = {"trains": "everything", "dtype": torch.float32, "precision": "bf16"}
    return use(size, shape, batch, **{**options, **changes})


def short(size: str, shape: tuple[int, int, int], batch: int = 1, **changes: Any) -> Use:
    """All weights in bfloat16."""
    return use(size, shape, batch, **{"trains": "everything", **changes})


def adapted(size: str, shape: tuple[int, int, int], batch: int = 1, **changes: Any) -> Use:
    return use(size, shape, batch, trains="adapters", adapters=LORA, **changes)


def half_on_host(num_blocks: int) -> Path:
    """Return a map of devices that leaves every second block in host memory."""
    rest = "rope patch_embedding condition_embedder norm_out proj_out scale_shift_table".split()
    blocks = {f"blocks.{index}": "cpu" if index % 2 else 0 for index in range(num_blocks)}
    file = Path(tempfile.gettempdir()) / "wandistiller-half-on-host.json"
    file.write_text(json.dumps({**dict.fromkeys(rest, 0), **blocks}))
    return file


def sampling() -> Iterator[tuple[str, Work]]:
    offload = Placing(name="offload")
    yield "1.3b image, gpu", Passes(use=use("wan2.1-1.3b", IMAGE), passes=2)
    yield "1.3b image, gpu, compiled", Passes(use=use("wan2.1-1.3b", IMAGE, is_compiled=True), passes=2)
    yield "1.3b video, gpu", Passes(use=use("wan2.1-1.3b", VIDEO))
    yield "1.3b video, offload", Passes(use=use("wan2.1-1.3b", VIDEO), placing=offload)
    yield "5b image, gpu", Passes(use=use("wan2.2-5b", IMAGE_5B), passes=2)
    yield "5b 8 images, gpu", Passes(use=use("wan2.2-5b", IMAGE_5B, 8))
    yield "5b 8 images, offload", Passes(use=use("wan2.2-5b", IMAGE_5B, 8), placing=offload)
    yield (
        "5b 8 images, offload, 10 resident",
        Passes(use=use("wan2.2-5b", IMAGE_5B, 8), placing=Placing(name="offload", resident=10)),
    )
    yield "5b image, offload, 8-bit", Passes(use=use("wan2.2-5b", IMAGE_5B), placing=Placing(name="offload", eight_bit=True))
    yield "5b video, gpu", Passes(use=use("wan2.2-5b", VIDEO_5B))
    yield "5b video, gpu, compiled", Passes(use=use("wan2.2-5b", VIDEO_5B, is_compiled=True))
    yield "5b video, offload, compiled", Passes(use=use("wan2.2-5b", VIDEO_5B, is_compiled=True), placing=offload)
    yield "5b image, disk", Passes(use=use("wan2.2-5b", IMAGE_5B), placing=Placing(name="disk"))
    for name in ("balanced", "sequential"):
        some = Placing(name=name, max_memory={0: 6 * GIB, "cpu": 64 * GIB})
        yield f"5b 8 images, {name}, 6 GiB", Passes(use=use("wan2.2-5b", IMAGE_5B, 8), placing=some)
    yield "14b image, custom", Passes(use=use("wan2.1-14b", IMAGE), placing=Placing(name="custom", device_map=half_on_host(40)))
    yield "1.3b image, cpu", Passes(use=use("wan2.1-1.3b", IMAGE, dtype=fastest_cpu_dtype()), placing=Placing(name="cpu"))
    yield "14b image, offload", Passes(use=use("wan2.1-14b", IMAGE), placing=offload)
    yield "14b clip, offload", Passes(use=use("wan2.1-14b", CLIP), placing=offload)
    for size, shape, dtype in (("wan2.1-14b", VIDEO, torch.bfloat16), ("wan2.2-5b", VIDEO_5B, torch.bfloat16)):
        vae = dict(SIZES[size].vae)
        name = f"{size} VAE, decode, {str(dtype).removeprefix('torch.')}"
        yield name, Decoding(config=vae, latent_shape=(vae["z_dim"], *shape), dtype=dtype)
    vae = dict(SIZES["wan2.1-14b"].vae)
    yield "wan2.1-14b VAE, decode, float32", Decoding(config=vae, latent_shape=(16, *CLIP), dtype=torch.float32)


def training() -> Iterator[tuple[str, Work]]:
    masters, stochastic = OptimiserChoice(), OptimiserChoice("adamw", "stochastic")
    offload = Placing(name="offload")
    yield "1.3b image x4, none", Training(student=trained("wan2.1-1.3b", IMAGE, 4), averages=True)
    yield "1.3b image x4, none, compiled", Training(student=trained("wan2.1-1.3b", IMAGE, 4, is_compiled=True))
    yield (
        "1.3b image x16, full, accumulated",
        Training(student=trained("wan2.1-1.3b", IMAGE, 16, policy="full"), accumulation=2),
    )
    yield "1.3b image, LoRA, none", Training(student=adapted("wan2.1-1.3b", IMAGE))
    yield (
        "1.3b image, LoRA, selective, compiled",
        Training(student=adapted("wan2.1-1.3b", IMAGE, policy="selective", is_compiled=True)),
    )
    yield "1.3b image, LoRA, full", Training(student=adapted("wan2.1-1.3b", IMAGE, policy="full"))
    yield "1.3b clip, none", Training(student=trained("wan2.1-1.3b", CLIP))
    yield "1.3b video, full", Training(student=trained("wan2.1-1.3b", VIDEO, policy="full"))
    yield "1.3b video, selective", Training(student=trained("wan2.1-1.3b", VIDEO, policy="selective"))
    yield "1.3b video, selective, to host", Training(student=trained("wan2.1-1.3b", VIDEO, policy="selective", to_host=True))
    yield "1.3b video, full, compiled", Training(student=trained("wan2.1-1.3b", VIDEO, policy="full", is_compiled=True))
    yield (
        "1.3b video, adafactor",
        Training(student=trained("wan2.1-1.3b", VIDEO, policy="full"), optimiser=OptimiserChoice("adafactor")),
    )
    yield "1.3b video, offload", Training(student=short("wan2.1-1.3b", VIDEO, policy="full"), placing=offload)
    yield "1.3b clip, offload, averaged", Training(student=short("wan2.1-1.3b", CLIP), placing=offload, averages=True)
    yield (
        "5b video, bf16, stochastic, full",
        Training(student=short("wan2.2-5b", VIDEO_5B, policy="full"), optimiser=stochastic),
    )
    yield (
        "5b video, bf16, masters, selective",
        Training(student=short("wan2.2-5b", VIDEO_5B, policy="selective"), optimiser=masters),
    )
    yield "5b image x4, bf16, masters, none", Training(student=short("wan2.2-5b", IMAGE_5B, 4), optimiser=masters)
    yield (
        "5b video, offload, selective, to host",
        Training(student=short("wan2.2-5b", VIDEO_5B, policy="selective", to_host=True), placing=offload),
    )
    yield "5b video, LoRA, full", Training(student=adapted("wan2.2-5b", VIDEO_5B, policy="full"))
    yield (
        "5b video, LoRA, selective, offload",
        Training(student=adapted("wan2.2-5b", VIDEO_5B, policy="selective"), placing=offload),
    )
    pixels = PixelDecoder(dict(SIZES["wan2.1-1.3b"].vae), is_checkpointed=True)
    yield "1.3b image, full, pixel loss", Training(student=trained("wan2.1-1.3b", IMAGE, policy="full", pixels=pixels))
    yield "1.3b image x4, recorded", Training(student=trained("wan2.1-1.3b", IMAGE, 4), recordings=1.0)
    yield "14b image, LoRA, full, offload", Training(student=adapted("wan2.1-14b", IMAGE, policy="full"), placing=offload)


def distilling() -> Iterator[tuple[str, Work]]:
    student = trained("wan2.1-1.3b", IMAGE, 8)
    teacher = use("wan2.1-14b", IMAGE, 8).changed(name="teacher")
    yield "14b to 1.3b, 8 images, teacher on the card", Training(student=student, teacher=teacher)
    yield (
        "14b to 1.3b, 8 images, teacher offloaded",
        Training(student=student, teacher=teacher, teacher_placing=Placing(name="offload")),
    )
    yield (
        "14b to 1.3b, 8 images, guided, full, 8-bit teacher",
        Training(
            student=student.changed(policy="full"),
            teacher=teacher,
            teacher_placing=Placing(name="offload", eight_bit=True),
            teacher_passes=2,
        ),
    )
    yield (
        "14b to 1.3b, 8 images, features, teacher offloaded",
        Training(student=student, teacher=teacher, teacher_placing=Placing(name="offload"), matches_features=True),
    )
    video = trained("wan2.1-1.3b", CLIP, policy="selective")
    clip_teacher = use("wan2.1-14b", CLIP).changed(name="teacher")
    yield (
        "14b to 1.3b, clip, selective, teacher offloaded",
        Training(student=video, teacher=clip_teacher, teacher_placing=Placing(name="offload")),
    )


def vaes() -> Iterator[tuple[str, Work]]:
    shape = (17, 256, 256)
    plain = TrainVaeConfig(batch_size=1)
    full = TrainVaeConfig(batch_size=1, gan_training=True, use_lpips=True, r1_interval=1, use_ema=True)
    kept = TrainVaeConfig(batch_size=2, gan_training=True, use_lpips=True, r1_interval=1, vae_gradient_checkpointing=True)
    vae = dict(SIZES["wan2.1-14b"].vae)
    yield "wan2.1 VAE, reconstruction", VaeStep(config=plain, vae=vae, shape=shape, precision="bf16")
    yield (
        "wan2.1 VAE, one frame, LPIPS",
        VaeStep(config=replace(plain, use_lpips=True), vae=vae, shape=(1, 128, 128), precision="bf16"),
    )
    yield "wan2.1 VAE, LPIPS, critic, R1", VaeStep(config=full, vae=vae, shape=shape, precision="bf16")
    yield "wan2.1 VAE, LPIPS, critic, R1, checkpointed", VaeStep(config=kept, vae=vae, shape=shape, precision="bf16")


KINDS = {"sample": sampling, "train": training, "distill": distilling, "vae": vaes}


def small(name: str, work: Work) -> Work | None:
    """Return the same kind of work on a tiny model, to try this file without a card."""
    tiny = SIZES["tiny"].transformer

    def shrink(found: Use) -> Use:
        return found.changed(config={**tiny, "num_layers": 7}, latent_shape=(8, 1, 8, 8), text_tokens=8)

    if isinstance(work, Training):
        teacher = None if work.teacher is None else shrink(work.teacher)
        return replace(work, student=shrink(work.student).changed(pixels=None), teacher=teacher, recordings=0.0)
    if isinstance(work, Passes) and work.placing.device_map is not None:
        work = replace(work, placing=replace(work.placing, device_map=half_on_host(7)))
    return replace(work, use=shrink(work.use)) if isinstance(work, Passes) else None
