"""The job of ``wandistiller train-vae``: check everything, train, measure the latents, write the VAE."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan

from wandistiller.checkpoint.trained import follow_model, write_model
from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.data.buckets import Bucket, largest_bucket
from wandistiller.data.damaged import find_damaged
from wandistiller.data.encode_job import default_cache_dir, plan_buckets
from wandistiller.data.pixel_samples import PixelSamples, from_all_over
from wandistiller.data.sources import assign_buckets, open_source, refuse
from wandistiller.distributed.parallel import Parallel
from wandistiller.distributed.ranks import Ranks, joined
from wandistiller.distributed.sharding import Sharding
from wandistiller.errors import UsageError
from wandistiller.files import complete_or_absent
from wandistiller.memory.activations import compile_vae
from wandistiller.memory.advice import Remedy
from wandistiller.memory.estimates import Phase
from wandistiller.memory.forecast import hardware_of
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.monitor import Monitor
from wandistiller.memory.out_of_memory import Failure
from wandistiller.memory.vae_checkpointing import checkpoint_vae
from wandistiller.models.critic import PatchCritic, smallest_side
from wandistiller.models.load import load_model
from wandistiller.models.lpips import SMALLEST_SIDE, load_lpips, open_lpips
from wandistiller.models.pipeline import find_part
from wandistiller.models.stored import VAE, StoredModel, inspect_checkpoint
from wandistiller.models.vae_passes import VaePass, encode_distribution, lay_channels_last
from wandistiller.models.vae_start import initialise_vae
from wandistiller.terminal import progress, say
from wandistiller.train.ema import in_use
from wandistiller.train.graphs import GraphedCalls
from wandistiller.train.method import Advice, Role
from wandistiller.train.methods.vae import Perceptual, VaeTraining, VaeWeights, reduced_shapes
from wandistiller.train.optimisation import MixedPrecision, Optimisation
from wandistiller.train.picture_quality import WINDOW
from wandistiller.train.remedies import going_on, smaller_batches
from wandistiller.train.runs import Foreseen, Run, choose_precision, exit_code, own_folder, prepare_device, prepare_parallel
from wandistiller.train.vae_prediction import VaeStep
from wandistiller.train.vae_quality import MeasureReconstructions
from wandistiller.units import Bytes


@dataclass(frozen=True)
class TrainedVae:
    """How a training ended."""

    step: int
    output: Path | None
    """The VAE's folder; None if it was interrupted."""
    quality: dict[str, float]
    """Held-out PSNR, SSIM and LPIPS, where they were asked for."""
    exit_code: int = 0


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A training that has been checked: everything found, no weights read."""

    config: TrainVaeConfig
    device: torch.device
    parallel: Parallel
    vae: StoredModel
    precision: MixedPrecision
    samples: PixelSamples
    held_out: PixelSamples | None


def run_train_vae(config: TrainVaeConfig) -> TrainedVae:
    """Do the whole job."""
    job = _prepare(config)
    monitor = Monitor([job.device], going_on(config.output_dir, lambda failure: _find_remedies(job, failure)))
    with joined(job.device, config.rank_timeout, needs_group=job.parallel.is_sharded) as ranks, own_folder(config, ranks):
        _leave_out_damaged(job, ranks)
        return _train(job, ranks, monitor)


def _prepare(config: TrainVaeConfig) -> _Job:
    config.check()
    assert config.model is not None and config.dataset_path is not None
    device = prepare_device(config)
    parallel = prepare_parallel(config)
    vae = inspect_checkpoint(find_part(config.model, "vae"), VAE)
    buckets = plan_buckets(vae.config, config.width, config.height, config.frames, config.max_aspect, patch=1)
    if config.use_lpips:
        open_lpips()
    samples = _open(config, config.dataset_path, "--dataset-path", buckets, mirror=config.mirror)
    _check_sizes(config, set(samples.buckets), vae.config["scale_factor_spatial"])
    held_out = _open(config, config.held_out, "--held-out", buckets) if config.held_out else None
    if held_out is not None:
        _check_held_out(config, held_out.buckets)
    return _Job(
        config=config,
        device=device,
        parallel=parallel,
        vae=vae,
        precision=choose_precision(config, device),
        samples=samples,
        held_out=held_out,
    )


def _check_sizes(config: TrainVaeConfig, buckets: Collection[Bucket], multiple: int) -> None:
    """Raise ``UsageError`` for sizes that nothing is trained at, or that a loss cannot look at."""
    sizes = {(bucket.height, bucket.width) for bucket in buckets}
    for size in config.reduced_min_sizes:
        if size < multiple or not any(reduced_shapes(*each, [size], multiple) for each in sizes):
            largest = max(min(each) for each in sizes)
            raise UsageError(
                f"--reduced-min-sizes {size} is no smaller size to train at.",
                why=f"the VAE takes multiples of {multiple}, and the shorter sides of the data are {largest} at most.",
                fix=f"Give sizes from {multiple} to {largest - multiple}, or larger --width and --height.",
            )
    shapes = [shape for each in sizes for shape in [each, *reduced_shapes(*each, config.reduced_min_sizes, multiple)]]
    height, width = min(shapes, key=min)
    for flag, is_used, least in (
        ("--gan-training", config.gan_training, smallest_side()),
        ("--use-lpips", config.use_lpips, SMALLEST_SIDE),
    ):
        if is_used and min(height, width) < least:
            raise UsageError(
                f"{flag} needs pictures of at least {least}x{least} pixels, and some are {width}x{height}.",
                why="the network that looks at them halves them several times.",
                fix="Give larger --reduced-min-sizes, or larger --width and --height, or a smaller --max-aspect.",
            )


def _check_held_out(config: TrainVaeConfig, buckets: Collection[Bucket]) -> None:
    """Raise ``UsageError`` for held-out pictures that cannot be measured."""
    least = max(WINDOW, SMALLEST_SIDE) if config.use_lpips else WINDOW
    smallest = min(buckets, key=lambda bucket: min(bucket.height, bucket.width))
    if min(smallest.height, smallest.width) < least:
        raise UsageError(
            f"--held-out needs pictures of at least {least}x{least} pixels, and some are {smallest.width}x{smallest.height}.",
            why=f"{'LPIPS and ' if config.use_lpips else ''}structural similarity cannot look at smaller ones.",
            fix="Give larger --width and --height, or a smaller --max-aspect, or leave --held-out away.",
        )


def _open(config: TrainVaeConfig, path: str, flag: str, buckets: Sequence[Bucket], *, mirror: bool = False) -> PixelSamples:
    opened = open_source(path, skip_bad=config.skip_bad, flag=flag, captioned=False)
    assigned = assign_buckets(opened.source, list(buckets))
    if assigned.bad and (not config.skip_bad or len(assigned.bad) == len(opened.source)):
        raise refuse(path, len(opened.source), assigned.bad)
    for item in (*opened.bad, *assigned.bad):
        say(f"Left out {item}")
    return PixelSamples(opened.source, assigned.buckets, mirror=mirror)


def _leave_out_damaged(job: _Job, ranks: Ranks) -> None:
    """Decode everything once; raise what cannot be read, or go on without it."""
    config = job.config
    for path, samples in ((config.dataset_path, job.samples), (config.held_out, job.held_out)):
        if path is None or samples is None:
            continue
        total, bad = len(samples), find_damaged(samples, default_cache_dir(path), ranks)
        if bad and (not config.skip_bad or len(bad) == total):
            raise refuse(path, total, list(bad.values()))
        samples.leave_out(bad)
        for item in bad.values() if ranks.is_first else ():
            say(f"Left out {item}")


def _train(job: _Job, ranks: Ranks, monitor: Monitor) -> TrainedVae:
    config = job.config
    with monitor.phase("loading", "vae"):
        vae, critic = _make_roles(job)
        mesh = job.parallel.mesh(ranks, job.device)
        for role in (vae, critic) if mesh is not None else ():
            # In one piece: a VAE's layers are called for every frame, and a critic is differentiated twice.
            if role is not None:
                role.sharding = Sharding(role.model, (), mesh)
    perceptual: Perceptual | None = None
    if config.use_lpips:
        with monitor.phase("loading", "perceptual"):
            perceptual = load_lpips(checkpointing=config.lpips_checkpointing).to(job.device)
    run = Run.over(job.samples.buckets, config, job.device, job.precision, ranks, monitor)
    method = VaeTraining(
        vae,
        VaeWeights.of(config),
        critic=critic,
        perceptual=perceptual,
        reduced_min_sizes=config.reduced_min_sizes,
        repeats=config.training_steps,
    )
    if config.cuda_graphs:
        vae.call = GraphedCalls(vae.model, job.precision, job.device)
    average = run.make_average(vae)
    measure = None
    if job.held_out is not None:
        measure = MeasureReconstructions(
            vae,
            job.held_out,
            run.metrics,
            config.output_dir / "reconstructions",
            every=config.validate_every,
            average=average,
            perceptual=perceptual,
        )
    stopped = run.train(
        method,
        {name: _optimisation(run, role) for name, role in method.roles.items()},
        job.samples,
        average=average,
        callbacks=[measure] if measure is not None else [],
        about=_describe(job, run, vae),
        foreseen=None if config.cuda_graphs or job.parallel.is_sharded else Foreseen(_foresee(job)),
    )
    output = None
    if stopped.signal is None:
        output = config.output_dir / "vae"
        with monitor.phase("measuring the latents", "vae"), in_use(average):
            _write_result(job, ranks, vae, output)
        ranks.wait_long()
    return TrainedVae(stopped.step, output, measure.quality if measure else {}, exit_code(stopped, ranks))


def _describe(job: _Job, run: Run, vae: Role) -> list[str]:
    config, buckets = job.config, job.samples.buckets
    count = sum(parameter.numel() for parameter in vae.trained_parameters.values())
    pictures, largest = sum(bucket.frames == 1 for bucket in buckets), largest_bucket(buckets)
    about = [
        f"Training a VAE of {count / 1e6:.2f} M parameters for {run.num_steps} steps of {run.plan.num_samples(0)} samples, "
        f"{run.num_epochs:.1f} epochs of {pictures} pictures and {len(buckets) - pictures} clips, the largest {largest}"
    ]
    if config.gan_training and config.gan_start >= run.num_steps:
        about.append(f"The VAE will not listen to the critic: --gan-start {config.gan_start} comes after the last step")
    return about


def _foresee(job: _Job) -> Callable[[Hardware], Phase]:
    shape = largest_bucket(job.samples.buckets).shape
    return VaeStep(config=job.config, vae=job.vae.config, shape=shape, precision=job.precision).phase


def _make_roles(job: _Job) -> tuple[Role, Role | None]:
    config = job.config
    if config.from_scratch:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = AutoencoderKLWan(**job.vae.config)
            initialise_vae(model)
        model.to(job.device)
    else:
        model = load_model(job.vae, dtype=torch.float32, device=job.device)
    model.requires_grad_(True).train()
    if config.channels_last:
        lay_channels_last(model)
    if config.vae_gradient_checkpointing:
        checkpoint_vae(model)
    if config.torch_compile:
        compile_vae(model)
    vae = Role("vae", VaePass(model), is_trained=True, uses_all=False, advice=_vae_advice(job))
    if not config.gan_training:
        return vae, None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed + 1)
        critic = PatchCritic(base_width=config.critic_width)
    critic.to(job.device).train()
    flags = f"--critic-width {config.critic_width}"
    return vae, Role("critic", critic, is_trained=True, advice=_critic_advice(job), flags=flags)


def _vae_advice(job: _Job) -> Advice:
    return Advice(
        why=_causes(job, "the learning rate is too high"),
        fix=_go_on_with(job, [f"--learning-rate below {job.config.learning_rate:g}"]),
    )


def _critic_advice(job: _Job) -> Advice:
    config = job.config
    rate = config.learning_rate if config.critic_learning_rate is None else config.critic_learning_rate
    changes = [f"--critic-learning-rate below {rate:g}", f"--r1-gamma above {config.r1_gamma:g}"]
    if config.r1_interval > 1:
        changes.append(f"--r1-interval below {config.r1_interval}")
    return Advice(
        why=_causes(job, "the critic learns too fast", "its gradient penalty is too weak"),
        fix=_go_on_with(job, changes),
    )


def _causes(job: _Job, *causes: str) -> str:
    """Return why a number may not be finite."""
    return ", ".join([*causes, *(["16 bits ran over"] if job.precision != "no" else []), "or a sample is broken."])


def _go_on_with(job: _Job, changes: Sequence[str]) -> str:
    """Return what to do where a number is not finite."""
    wider = {"fp16": ["--mixed-precision bf16"], "bf16": ["--mixed-precision no"], "no": []}
    changes = [*changes, *wider[job.precision]]
    most = ", ".join(changes[:-1])
    return f"Resume from the last state with {most and f'{most} or '}{changes[-1]}; look at these samples."


def _optimisation(run: Run, role: Role) -> Optimisation:
    config = run.config
    assert isinstance(config, TrainVaeConfig)
    # A critic that remembers long lags behind the VAE that it judges.
    changes: dict[str, Any] = {"betas": (0.5, 0.9)} if config.gan_training else {}
    if role.name == "critic" and config.critic_learning_rate is not None:
        changes["rate"] = config.critic_learning_rate
    keeps_gradients = isinstance(role.call, GraphedCalls)
    options = run.optimiser_options(**changes)
    return Optimisation(role.trained_parameters, options, run.precision, run.device, keeps_gradients=keeps_gradients)


@torch.no_grad()
def _write_result(job: _Job, ranks: Ranks, role: Role, output: Path) -> None:
    """Measure the latents' mean and std by channel, write them into the configuration, and save."""
    vae_pass = role.model
    assert isinstance(vae_pass, VaePass)
    with role.whole():
        if ranks.is_first:
            mean, std = measure_latents(vae_pass.vae, job.samples, job.config.statistics_samples, job.device)
            vae_pass.vae.register_to_config(latents_mean=mean, latents_std=std)
        ranks.wait_long()
    if not ranks.is_first:
        follow_model(vae_pass.vae)
        return
    with complete_or_absent(output) as partial:
        write_model(partial, vae_pass.vae)
    say(f"Wrote {output}")


def measure_latents(
    vae: AutoencoderKLWan, samples: PixelSamples, count: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each latent channel over samples, drawn from their distributions."""
    sums, squares, total = (torch.zeros(vae.config["z_dim"], dtype=torch.float64) for _ in range(3))
    chosen = from_all_over(len(samples), count)
    with progress("Measuring latents", len(chosen), "sample") as advance:
        for index in chosen:
            pixels = samples.pixels(index)[None].to(device)
            # Apple's GPUs have no float64.
            mean, logvar = (each.cpu().double() for each in encode_distribution(vae, pixels))
            # Of a normal distribution the second moment is mean^2 + variance.
            sums += mean.sum((0, 2, 3, 4))
            squares += (mean.square() + logvar.exp()).sum((0, 2, 3, 4))
            total += mean[0, 0].numel()
            advance()
    mean_each = sums / total
    return mean_each.tolist(), (squares / total - mean_each.square()).clamp_min(1e-12).sqrt().tolist()


def _find_remedies(job: _Job, failure: Failure) -> Iterator[Remedy]:
    """Yield what the flags of ``train-vae`` can do, each predicted as the training itself is."""
    if not failure.is_computing:
        return
    hardware = hardware_of(job.device, measures=False)  # measuring would need memory
    now = _foresee(job)(hardware)
    for changes in _ways(job.config):
        other = _foresee(replace(job, config=replace(job.config, **changes)))(hardware)
        slowdown = other.seconds / now.seconds if now.seconds else 1.0
        yield Remedy(changes=changes, saves=Bytes(now.peak - other.peak), slowdown=slowdown)


def _ways(config: TrainVaeConfig) -> Iterator[dict[str, Any]]:
    if not config.vae_gradient_checkpointing:
        yield {"vae_gradient_checkpointing": True}
    if config.use_lpips and not config.lpips_checkpointing:
        yield {"lpips_checkpointing": True}
    if config.batch_size > 1:
        yield smaller_batches(config)
