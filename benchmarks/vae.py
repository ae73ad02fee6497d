"""Training a VAE: seconds and memory of a step, ours against the plain way, and memory over 10,000 steps.

python benchmarks/vae.py --output benchmarks/results [--only speed compile leak] [--vaes tiny wan2.1] [--steps 10000]
python benchmarks/vae.py --small --device cpu --steps 40 --since 20 --output /tmp/vae   # whether it works, in minutes

``speed`` trains with reconstruction and KL, with LPIPS, and with LPIPS and a critic, on pictures and on clips of the world,
drawn as they are needed. The plain way draws each batch when its turn comes and recomputes nothing. ``compile`` shows what
``--torch-compile`` does, whose first steps take minutes. ``leak`` trains the tiny VAE with LPIPS, a critic and R1 on batches of
several shapes, in the plain way and in ours at the same time. All run the training's own loop.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import common
import psutil
import torch
from common import Measurement, release, save, with_memory
from diffusers import AutoencoderKLWan

from wandistiller.data.batches import BatchPlan, StepPlan
from wandistiller.data.buckets import Bucket
from wandistiller.data.pixel_samples import PixelSamples
from wandistiller.data.sources import WorldSource
from wandistiller.distributed.ranks import Ranks
from wandistiller.memory.activations import compile_vae
from wandistiller.memory.leak_watch import LeakWatch
from wandistiller.memory.vae_checkpointing import checkpoint_vae
from wandistiller.models.critic import PatchCritic
from wandistiller.models.lpips import Lpips, load_lpips
from wandistiller.models.lpips_weights import VGG16_WIDTHS, lpips_file
from wandistiller.models.sizes import TINY_VAE, WAN21_VAE
from wandistiller.models.vae_passes import VaePass, lay_channels_last
from wandistiller.train.callbacks import Callback
from wandistiller.train.loop import Loop, LoopOptions
from wandistiller.train.method import Role
from wandistiller.train.methods.vae import VaeTraining, VaeWeights
from wandistiller.train.optimisation import MixedPrecision, Optimisation, OptimiserOptions

STARTED = time.perf_counter()
VAES = {"tiny": dict(TINY_VAE), "wan2.1": dict(WAN21_VAE)}
WARMUP = 3


@dataclass(frozen=True)
class Data:
    """Samples of one shape or of several, a batch of one at a time."""

    name: str
    buckets: tuple[Bucket, ...]
    batch_size: int
    num_steps: int
    """Steps that are timed: more than are read ahead at the start."""

    def samples(self) -> PixelSamples:
        longest = max(bucket.frames for bucket in self.buckets)
        tallest, widest = (max(getattr(bucket, side) for bucket in self.buckets) for side in ("height", "width"))
        source = WorldSource(4096, frames=(longest,), height=tallest, width=widest)
        return PixelSamples(source, [self.buckets[index % len(self.buckets)] for index in range(len(source))], mirror=True)


DATA = {
    "tiny": [
        Data("32 pictures 64x64", (Bucket(1, 64, 64),), 32, 24),
        Data("4 clips 17x64x64", (Bucket(17, 64, 64),), 4, 12),
    ],
    "wan2.1": [
        Data("4 pictures 256x256", (Bucket(1, 256, 256),), 4, 12),
        Data("1 clip 5x256x256", (Bucket(5, 256, 256),), 1, 12),
    ],
}
MANY_SHAPES = Data(
    "pictures and clips of 6 shapes",
    tuple(Bucket(frames, height, width) for frames in (1, 5) for height, width in ((32, 32), (32, 48), (48, 32))),
    1,
    0,
)


@dataclass(frozen=True)
class Goal:
    """What is learnt from beside reconstruction and KL."""

    name: str
    has_lpips: bool = False
    has_critic: bool = False


GOALS = [Goal("VAE"), Goal("VAE+LPIPS", has_lpips=True), Goal("VAE+GAN+LPIPS", has_lpips=True, has_critic=True)]
EVERYTHING = GOALS[-1]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a step is computed."""

    name: str
    reads_ahead: bool = True
    recomputes_vae: bool = False
    recomputes_lpips: bool = False
    channels_last: bool = False
    compiled: bool = False

    def suits(self, goal: Goal) -> bool:
        """Say whether there is something to see that is not seen elsewhere."""
        if self.recomputes_lpips:
            return goal.has_lpips
        return not (goal.has_lpips and (self.recomputes_vae or self.channels_last or self.compiled))


PLAIN = Way(name="plain: reads in between, keeps everything", reads_ahead=False)
OURS = Way(name="reads ahead")
SPEED_WAYS = [
    PLAIN,
    OURS,
    replace(OURS, name="reads ahead, LPIPS recomputed", recomputes_lpips=True),
    replace(OURS, name="reads ahead, VAE recomputed", recomputes_vae=True),
    replace(OURS, name="reads ahead, LPIPS and VAE recomputed", recomputes_vae=True, recomputes_lpips=True),
    replace(OURS, name="reads ahead, channels last", channels_last=True),
]
LEAK_WAYS = [PLAIN, replace(OURS, name="reads ahead, LPIPS recomputed", recomputes_lpips=True)]
COMPILE_WAYS = [
    OURS,
    replace(OURS, name="reads ahead, compiled", compiled=True),
    replace(OURS, name="reads ahead, channels last, compiled", channels_last=True, compiled=True),
]


class Bench:
    """What all measurements of a run have in common."""

    def __init__(self, *, is_small: bool, workers: int) -> None:
        self.is_small = is_small
        self.workers = workers
        self.precision: MixedPrecision = "bf16" if common.DEVICE.type == "cuda" else "no"
        self._widths = (8, 8, 8, 8, 8) if is_small else VGG16_WIDTHS
        self._is_published = lpips_file().is_file() and not is_small

    @property
    def facts(self) -> dict[str, object]:
        lpips = "published weights" if self._is_published else f"random weights, widths {self._widths}"
        return {"lpips": lpips, "workers": self.workers, "precision": self.precision, "small": self.is_small}

    def loop(self, vae: str, goal: Goal, data: Data, way: Way, num_steps: int, callback: Callback, log_every: int) -> Loop:
        """Return a training that is ready to run."""
        torch.manual_seed(0)
        with common.DEVICE:
            model = AutoencoderKLWan(**VAES[vae]).requires_grad_(True).train()
            critic = PatchCritic(base_width=8 if self.is_small else 64).train() if goal.has_critic else None
        if way.channels_last:
            lay_channels_last(model)
        if way.recomputes_vae:
            checkpoint_vae(model)
        if way.compiled:
            compile_vae(model)
        perceptual = None
        if goal.has_lpips:
            perceptual = load_lpips() if self._is_published else Lpips(widths=self._widths)
            perceptual.checkpointing = way.recomputes_lpips
            perceptual.to(common.DEVICE)
        method = VaeTraining(
            Role("vae", VaePass(model), is_trained=True, uses_all=False),
            VaeWeights(kl_beta=1e-6, perceptual=1.0, adversarial=0.5 if goal.has_critic else 0.0),
            critic=Role("critic", critic, is_trained=True) if critic is not None else None,
            perceptual=perceptual,
        )
        options = OptimiserOptions(rate=1e-4, weight_decay=0.0, betas=(0.5, 0.9), num_steps=num_steps)
        optimisations = {
            name: Optimisation(role.trained_parameters, options, self.precision, common.DEVICE)
            for name, role in method.roles.items()
        }
        samples = data.samples()
        plan = StepPlan(BatchPlan(samples.buckets, data.batch_size, 0), 1, 1)
        workers = self.workers if way.reads_ahead else 0
        loop_options = LoopOptions(num_steps=num_steps, log_every=log_every, workers=workers, precision=self.precision)
        where = {"device": common.DEVICE, "ranks": Ranks(), "callbacks": [callback]}
        return Loop(method, optimisations, samples, plan, loop_options, **where)

    def measure(self, vae: str, goal: Goal, data: Data, way: Way) -> Measurement:
        """Return the mean time of a step after the first ones, and the peak of memory."""
        release()
        watch = Stopwatch()
        row = Measurement(f"{vae}, {goal.name}, {data.name}", way.name, None)
        try:
            self.loop(vae, goal, data, way, WARMUP + data.num_steps, watch, 10).run()
            row.seconds, row.note = watch.seconds, f"first {WARMUP} steps {watch.warmup_seconds:.1f} s"
        except torch.OutOfMemoryError:
            row.note = "out of memory"
        torch._dynamo.reset()
        row.note += f"; at {time.perf_counter() - STARTED:.0f} s"
        return with_memory(row)


class Stopwatch(Callback):
    """Times the steps after the first ones together, as the device works on while the host prepares the next."""

    def started(self, loop: Loop) -> None:
        self._start = time.perf_counter()

    def stepped(self, loop: Loop) -> None:
        if loop.step == WARMUP:
            synchronise()
            now = time.perf_counter()
            self.warmup_seconds, self._start = now - self._start, now

    def ended(self, loop: Loop) -> None:
        synchronise()
        self.seconds = (time.perf_counter() - self._start) / (loop.step - WARMUP)


def synchronise() -> None:
    if common.DEVICE.type == "cuda":
        torch.cuda.synchronize()


class Observe(Callback):
    """Reads memory when the loop has read its metrics: until then it keeps the losses of each step."""

    def __init__(self, since: int) -> None:
        self._since = since
        self._watch = LeakWatch(warmup_steps=since)
        self._start = time.perf_counter()
        self._before: dict[object, dict[str, int]] = {}
        self._after: dict[object, dict[str, int]] = {}
        self.at_since: dict[str, int] = {}
        self.at_end: dict[str, int] = {}

    def stepped(self, loop: Loop) -> None:
        if loop.step % loop.options.log_every and loop.step != loop.options.num_steps:
            return
        synchronise()
        seen = {"host": psutil.Process().memory_info().rss}
        if common.DEVICE.type == "cuda":
            seen |= {"device allocated": torch.cuda.memory_allocated(), "device reserved": torch.cuda.memory_reserved()}
        shape = tuple(loop.batches[0].tensors["pixels"].shape)
        for kind, value in seen.items():
            self._watch.observe(loop.step, kind, value, shape)
        if loop.step <= self._since:
            self._before[shape], self.at_since = seen, seen
        self._after[shape], self.at_end = seen, seen
        if loop.step % max(loop.options.num_steps // 10, loop.options.log_every) == 0:
            print(f"step {loop.step} at {time.perf_counter() - self._start:.0f} s {seen}", flush=True)

    def growth(self) -> dict[str, int]:
        """Return the most that each kind of memory grew by, compared between steps on batches of one shape."""
        shapes = self._before.keys() & self._after.keys()
        return {kind: max(self._after[shape][kind] - self._before[shape][kind] for shape in shapes) for kind in self.at_end}

    def leaks(self) -> list[str]:
        return list(map(str, self._watch.leaks()))


def run_speed(bench: Bench, name: str, goals: Sequence[Goal], ways: Sequence[Way], arguments: argparse.Namespace) -> None:
    rows: list[Measurement] = []
    left_out: list[str] = []
    for vae in arguments.vaes:
        for data in DATA[vae]:
            for goal in goals:
                for way in ways:
                    if not way.suits(goal):
                        continue
                    if time.perf_counter() - STARTED > arguments.budget:
                        left_out.append(f"{vae}, {goal.name}, {data.name}, {way.name}")
                        continue
                    rows.append(bench.measure(vae, goal, data, way))
                    save(name, rows, arguments.output, **bench.facts)
    if left_out:
        print(f"{len(left_out)} rows left out after {arguments.budget:.0f} s, from '{left_out[0]}' on", flush=True)
        save(name, rows, arguments.output, **bench.facts, left_out=left_out)


def run_leak(arguments: argparse.Namespace, facts: dict[str, object]) -> None:
    """Train both ways at once, each in a process of its own: what counts is memory, not seconds."""
    rows: list[Measurement] = []
    memory: dict[str, object] = {}
    with ProcessPoolExecutor(len(LEAK_WAYS), multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(leak, way, arguments) for way in LEAK_WAYS]):
            row, memory[done.result()[0].way] = done.result()
            rows.append(row)
            save("vae-leak", rows, arguments.output, **facts, memory=memory)


def leak(way: Way, arguments: argparse.Namespace) -> tuple[Measurement, dict[str, object]]:
    """Return how memory was after some steps and at the end."""
    bench = prepare(arguments)
    observe = Observe(arguments.since)
    loop = bench.loop("tiny", EVERYTHING, MANY_SHAPES, way, arguments.steps, observe, 10)
    start = time.perf_counter()
    loop.run()
    seconds = (time.perf_counter() - start) / arguments.steps
    row = Measurement(f"tiny, {EVERYTHING.name} with R1, {MANY_SHAPES.name}, {arguments.steps} steps", way.name, seconds)
    growth, leaks = observe.growth(), observe.leaks()
    row.note = f"growth from step {arguments.since} in bytes: {growth}; leaks: {'; '.join(leaks) or 'none'}"
    found = {"after_step": arguments.since, "steps": arguments.steps, "then": observe.at_since, "at_the_end": observe.at_end}
    return with_memory(row), {**found, "growth": growth, "leaks": leaks}


def prepare(arguments: argparse.Namespace) -> Bench:
    """Do what every process has to."""
    common.DEVICE = torch.device(arguments.device)
    if arguments.small:
        shrink()
    return Bench(is_small=arguments.small, workers=arguments.workers)


def shrink() -> None:
    """Make everything small enough for a processor."""
    global WARMUP, MANY_SHAPES
    WARMUP = 1
    VAES["wan2.1"]["base_dim"] = 16
    DATA["tiny"] = [
        Data("2 pictures 32x32", (Bucket(1, 32, 32),), 2, 2),
        Data("1 clip 5x32x32", (Bucket(5, 32, 32),), 1, 2),
    ]
    DATA["wan2.1"] = DATA["tiny"]
    MANY_SHAPES = Data("pictures of 2 shapes", (Bucket(1, 32, 32), Bucket(1, 32, 48)), 1, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", nargs="+", choices=["speed", "compile", "leak"], default=["speed", "leak"])
    parser.add_argument("--vaes", nargs="+", choices=list(VAES), default=["wan2.1", "tiny"])
    parser.add_argument("--steps", type=int, default=10_000, help="of the leak run")
    parser.add_argument("--since", type=int, default=500, help="step of the leak run from which memory may not grow")
    parser.add_argument("--workers", type=int, default=4, help="processes that read ahead")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no other row is begun")
    parser.add_argument("--device", default=str(common.DEVICE))
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it works")
    arguments = parser.parse_args()
    if not 10 <= arguments.since < arguments.steps:
        parser.error("--since is to be at least 10 and below --steps")
    bench = prepare(arguments)
    print(bench.facts, flush=True)
    if "speed" in arguments.only:
        run_speed(bench, "vae-speed", GOALS, SPEED_WAYS, arguments)
    if "leak" in arguments.only:
        run_leak(arguments, bench.facts)
    if "compile" in arguments.only:
        run_speed(bench, "vae-compile", GOALS[:1], COMPILE_WAYS, arguments)
    print(f"done at {time.perf_counter() - STARTED:.0f} s", flush=True)


if __name__ == "__main__":
    main()
