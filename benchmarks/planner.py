"""Predicted against measured: memory and time of every job, several sizes, lengths, placements and policies, in one run.

python benchmarks/planner.py --output benchmarks/results [--only sample train distill vae] [--match offload] [--small]
python benchmarks/planner.py --untried 30 --seed 7      configurations drawn at random, instead of the chosen ones
python benchmarks/planner.py --predict FILE      beforehand, for an H200, on any machine
python benchmarks/planner.py --against FILE      on the card, which then does not wait for predictions

Otherwise the predictions are made first; what a disk gives is measured beside its trial. The bounds: what is reserved within
3 % or 300 MiB of the prediction, whichever is larger; a step's time within 15 %.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from untried import untried

from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.memory.allocator_model import expandable_segments
from wandistiller.memory.encoder_phases import Decoding
from wandistiller.memory.estimates import fits_host, margin
from wandistiller.memory.hardware import H200, Hardware, detect
from wandistiller.memory.optimiser_bytes import OptimiserChoice
from wandistiller.memory.rates import fastest_cpu_dtype
from wandistiller.memory.raw_reads import read_rate
from wandistiller.memory.stage import Placing
from wandistiller.memory.uses import Adapters, PixelDecoder, Use
from wandistiller.memory.works import Passes, Training
from wandistiller.models.sizes import SIZES
from wandistiller.plan.trial import Measured, Work, try_out
from wandistiller.train.vae_prediction import VaeStep
from wandistiller.units import Bytes

GIB = 2**30
Named = tuple[str, str, Work]
"""A kind, a name, and what it is."""
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
    return replace(work, use=shrink(work.use)) if isinstance(work, Passes) else None


@dataclass(frozen=True)
class Predicted:
    """What was said beforehand, in the words of ``plan.trial.Measured``."""

    allocated: int
    reserved: int
    page_locked: int
    seconds: float
    planning_seconds: float


def predict(work: Work, hardware: Hardware) -> Predicted:
    torch.set_num_threads(1)
    started = time.perf_counter()
    phase = work.phase(hardware)
    planning = time.perf_counter() - started
    return Predicted(phase.peak, phase.reserved, phase.total("page-locked"), phase.seconds, planning)


def beforehand(file: Path, works: list[Named], hardware: Hardware, workers: int) -> None:
    """Write down what is predicted, for a card of which only the name is known."""
    found: dict[str, Any] = {}
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        predictions = [pool.submit(predict, work, hardware) for _, _, work in works]
        for (kind, name, work), prediction in zip(works, predictions, strict=True):
            found[f"{kind}: {name}"] = {"work": repr(work), **asdict(prediction.result())}
            print(f"{kind:8} {name:52} {prediction.result()}", flush=True)
            file.write_text(json.dumps(found, indent=1) + "\n")


def read_beforehand(file: Path | None, kind: str, name: str, work: Work) -> Predicted | None:
    """Return what was predicted for just this work."""
    content = {} if file is None else json.loads(file.read_text())
    found = content.get(f"{kind}: {name}", {"work": None})
    return Predicted(**found) if found.pop("work") == repr(work) else None


def row_of(kind: str, name: str, predicted: Predicted, measured: Measured) -> dict[str, Any]:
    return {
        "job": kind,
        "what": name,
        "predicted_reserved_gib": predicted.reserved / GIB,
        "measured_reserved_gib": measured.reserved / GIB,
        "predicted_allocated_gib": predicted.allocated / GIB,
        "measured_allocated_gib": measured.allocated / GIB,
        "predicted_seconds": predicted.seconds,
        "measured_seconds": measured.seconds,
        "predicted_page_locked_gib": predicted.page_locked / GIB,
        "measured_page_locked_gib": measured.page_locked / GIB,
        "is_memory_within": abs(measured.reserved - predicted.reserved) <= margin(Bytes(predicted.reserved)),
        "is_time_within": abs(measured.seconds / predicted.seconds - 1) <= 0.15 if predicted.seconds else False,
        "planning_seconds": predicted.planning_seconds,
    }


class Results:
    """The table, which is printed and kept row by row: a run that is cut short has shown what it has."""

    def __init__(self, file: Path, device: torch.device, hardware: Hardware) -> None:
        self._file = file
        self._facts = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "expandable_segments": expandable_segments(),
            "bus_gb_per_second": hardware.bus_rate / 1e9,
            "pageable_gb_per_second": hardware.pageable_rate / 1e9,
            "disk_gb_per_second": hardware.disk_rate / 1e9,
            "host_gb_per_second": hardware.update_rate / 1e9,
            "host_tflops": hardware.host_flops / 1e12,
        }
        self._rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.left_out: list[str] = []
        """What there was no time for, or no host memory."""

    def add(self, row: dict[str, Any], seconds: float) -> None:
        self._rows.append(row)
        print(
            f"{row['job']:8} {row['what']:52} "
            f"reserved {row['predicted_reserved_gib']:7.2f} / {row['measured_reserved_gib']:7.2f} "
            f"in use {row['predicted_allocated_gib']:7.2f} / {row['measured_allocated_gib']:7.2f} GiB "
            f"locked {row['predicted_page_locked_gib']:5.1f} / {row['measured_page_locked_gib']:5.1f} "
            f"step {row['predicted_seconds']:8.3f} / {row['measured_seconds']:8.3f} s "
            f"{'' if row['is_memory_within'] else 'MEMORY '}{'' if row['is_time_within'] else 'TIME '}({seconds:.0f} s)",
            flush=True,
        )
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps({**self._facts, "failed": self.failed, "rows": self._rows}, indent=1) + "\n")

    def leave_out(self, kind: str, name: str) -> None:
        self.left_out.append(f"{kind}: {name}")

    def fail(self, kind: str, name: str, error: Exception) -> None:
        self.failed.append(name)
        print(f"{kind:8} {name:52} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)

    def __str__(self) -> str:
        within = sum(row["is_memory_within"] for row in self._rows), sum(row["is_time_within"] for row in self._rows)
        rest = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        return f"{len(self._rows)} configurations: memory within its bound in {within[0]}, time in {within[1]}{rest}"


def compare(works: list[Named], arguments: argparse.Namespace, device: torch.device, hardware: Hardware) -> Results:
    """Measure one after the other what was predicted, all of it before: the host has other things to do while it predicts."""
    chosen = "-" + "-".join(arguments.only) if len(arguments.only) < len(KINDS) else ""
    name_of_kinds = f"-untried-{arguments.seed}" if arguments.untried else chosen
    results = Results(arguments.output / f"planner{name_of_kinds}.json", device, hardware)
    started = time.perf_counter()
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        predictions = [
            read_beforehand(arguments.against, *work) or pool.submit(predict, work[2], hardware).result for work in works
        ]
        predicted = [each if isinstance(each, Predicted) else each() for each in predictions]
    print(f"predicted after {time.perf_counter() - started:.0f} s", flush=True)
    for (kind, name, work), said in zip(works, predicted, strict=True):
        begun = time.perf_counter()
        if begun - started > arguments.budget or said.seconds > arguments.longest or not fits_host(said.page_locked, hardware):
            results.leave_out(kind, name)
            continue
        try:
            measured = try_out(work, device, num_steps=3)
        except Exception as error:  # noqa: BLE001 - the others are still worth measuring
            results.fail(kind, name, error)
            continue
        torch._dynamo.reset()
        if measured.disk_rate is not None:  # others use it, too
            seconds = work.phase(replace(hardware, disk_rate=measured.disk_rate)).seconds
            said = replace(said, seconds=seconds)
        results.add(row_of(kind, name, said, measured), time.perf_counter() - begun)
    return results


def disk_rate() -> float:
    """Return the bytes a second of the disk that trials write to."""
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(64):
            file.write(os.urandom(2**24))
        file.flush()
        os.fsync(file.fileno())
        return read_rate(Path(file.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--untried", type=int, default=0, help="so many drawn at random, instead of those that were chosen")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn with")
    parser.add_argument("--match", default="", help="take only what has this expression in its name")
    parser.add_argument("--skip", default="\0", help="leave out what has this in its name")
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which no other one is begun")
    parser.add_argument("--longest", type=float, default=60, help="seconds a step that are too long to wait for")
    parser.add_argument("--predict", type=Path, help="only predict, and write the predictions to this file")
    parser.add_argument("--against", type=Path, help="the file of predictions made beforehand")
    parser.add_argument("--workers", type=int, default=4, help="processes that predict")
    parser.add_argument("--bus", type=float, default=55.4, help="GB a second over the bus, for --predict")
    parser.add_argument("--host", type=float, default=92.0, help="GB a second of updates on the host, for --predict")
    parser.add_argument("--small", action="store_true", help="tiny models, for trying this without a card")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hardware = Hardware(card=H200, host_memory=Bytes(2**37))
    if device.type == "cuda":
        hardware = detect()
        # Measured here once: those that predict beside each other would measure each other's work.
        hardware = replace(hardware, disk_rate=disk_rate(), pageable=hardware.pageable_rate, host_rate=hardware.update_rate)
    kinds = KINDS | {"untried": partial(untried, arguments.seed, arguments.untried)}
    works = [
        (kind, name, found)
        for kind in (["untried"] if arguments.untried else arguments.only)
        for name, work in kinds[kind]()
        if re.search(arguments.match, name) and arguments.skip not in name
        if (found := small(name, work) if arguments.small else work) is not None
    ]
    if arguments.predict is not None:
        rates = {"bus_rate": arguments.bus * 1e9, "host_rate": arguments.host * 1e9}
        beforehand(arguments.predict, works, replace(hardware, **rates), arguments.workers)
        return
    results = compare(works, arguments, device, hardware)
    print(results)
    if results.failed:
        sys.exit(f"{len(results.failed)} failed: {'; '.join(results.failed)}")


if __name__ == "__main__":
    main()
