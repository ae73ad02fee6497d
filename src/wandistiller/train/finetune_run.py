"""The job of ``wandistiller train``: check everything, encode, train, write the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from wandistiller.checkpoint.trained import follow_model, write_lora, write_model, write_pipeline
from wandistiller.config.placement import parse_resident
from wandistiller.config.train import TrainConfig
from wandistiller.data.buckets import largest_bucket
from wandistiller.data.cache_files import fingerprint_model
from wandistiller.data.cached_samples import CachedSamples, Randomness
from wandistiller.data.encoded import EncodedData, encode_data
from wandistiller.distributed.parallel import Parallel
from wandistiller.distributed.pieces import gather_to_host, local
from wandistiller.distributed.ranks import Ranks, joined, read_ranks
from wandistiller.distributed.sharding import Sharding
from wandistiller.flow.sigma import SigmaDistribution
from wandistiller.memory.activations import prepare_blocks
from wandistiller.memory.block_stream import BlockStream
from wandistiller.memory.estimates import Phase
from wandistiller.memory.forecast import hardware_of
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.monitor import Monitor
from wandistiller.memory.placement import Subject
from wandistiller.memory.stage import Placing
from wandistiller.memory.subjects import choose_placement, stored_subject
from wandistiller.memory.vae_checkpointing import checkpoint_vae
from wandistiller.memory.works import Training
from wandistiller.models.devices import DTYPES
from wandistiller.models.expert_pair import inspect_experts
from wandistiller.models.latents import check_channels, denormalise
from wandistiller.models.load import load_model
from wandistiller.models.pipeline import Pipeline, find_diffusers_pipeline
from wandistiller.models.shapes import Shapes
from wandistiller.models.stored import TRANSFORMER, VAE, StoredModel, build_empty, inspect_checkpoint, stays_in_float32
from wandistiller.models.text_padding import fold_padding
from wandistiller.terminal import say
from wandistiller.train.adapters import add_adapters, check_targets
from wandistiller.train.callbacks import Callback
from wandistiller.train.ema import MovingAverage, in_use
from wandistiller.train.graphs import GraphedCalls
from wandistiller.train.held_out import MeasureHeldOut
from wandistiller.train.host_optimisation import ON_HOST_FLAGS, HostOptimisation
from wandistiller.train.method import Role
from wandistiller.train.methods.finetune import FlowMatching, PixelLoss
from wandistiller.train.optimisation import (
    OTHER_WEIGHTS,
    MixedPrecision,
    Optimisation,
    Optimises,
    optimiser_flags,
    refuse_other_flags,
    travels_in,
)
from wandistiller.train.optimisers import check_optimiser
from wandistiller.train.parallel_choice import as_settled, settle_parallel
from wandistiller.train.prediction import drawn_pixels, planned_pixels, train_work
from wandistiller.train.remedies import find_remedies, going_on
from wandistiller.train.runs import (
    Foreseen,
    Run,
    choose_precision,
    exit_code,
    own_folder,
    prepare_device,
    prepare_parallel,
    saved_facts,
)
from wandistiller.train.start_checks import check_expert, check_ranks, check_sizes, check_text_to_video
from wandistiller.train.studio import Studio, check_drawing
from wandistiller.train.transformer_data import folds_padding, open_samples, prepare_data, prepare_held_out
from wandistiller.units import Bytes

_PARTS = ("transformer", "transformer_2", "vae", "text_encoder", "tokenizer", "scheduler")


@dataclass(frozen=True)
class Trained:
    """How a training ended."""

    step: int
    output: Path | None
    """The result: a pipeline's folder, or the folder of LoRA files; None if it was interrupted."""
    losses: dict[str, float]
    """Held-out losses, where they were asked for."""
    exit_code: int = 0


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A training that has been checked: everything found, no weights read."""

    config: TrainConfig
    device: torch.device
    parallel: Parallel
    pipeline: Pipeline
    part: str
    """Which part of the pipeline is trained."""
    transformer: StoredModel
    vae: StoredModel
    sigma: SigmaDistribution
    precision: MixedPrecision
    dtype: torch.dtype
    """What the transformer's inputs are in."""


@dataclass(frozen=True)
class _Student:
    """The model in its place."""

    role: Role
    num_bytes: Bytes
    """Weights that this process has on its device."""
    placing: Placing = field(default_factory=Placing)
    """Where the weights are, as it was asked for or chosen."""
    stream: BlockStream | None = None
    """The streamed blocks, where they are."""
    note: str = ""


def run_train(config: TrainConfig) -> Trained:
    """Do the whole job."""
    job = _settle(_prepare(config))
    with joined(job.device, config.rank_timeout, needs_group=job.parallel.is_sharded) as ranks, ExitStack() as ends:
        ends.enter_context(own_folder(config, ranks))
        return _run(job, ranks, ends)


def _run(job: _Job, ranks: Ranks, ends: ExitStack) -> Trained:
    config = job.config
    assert config.model is not None and config.dataset_path is not None
    settled = as_settled(config, job.parallel)
    remedies = going_on(config.output_dir, lambda failure: find_remedies(settled, _shapes(job), failure))
    monitor = Monitor([job.device], remedies)
    before = saved_facts(config, ranks)
    if before is not None:
        _check_goes_on(job, before.facts)
    # Both are looked at before either is encoded.
    training = prepare_data(config, config.model, config.dataset_path, config.cache_dir, job.device)
    validation = prepare_held_out(config, config.model, job.device)
    for each in (training, validation):
        if each is not None:
            ends.enter_context(each.using_caches())
    data = encode_data(training)
    held_out = None if validation is None else encode_data(validation)
    with monitor.phase("loading", "student"):
        student = _make_student(job, ranks, ends, data, held_out)
    return _train(job, ranks, monitor, student, data, held_out, ends)


def _prepare(config: TrainConfig) -> _Job:
    config.check()
    assert config.model is not None
    device = prepare_device(config)
    parallel = prepare_parallel(config)
    check_optimiser(config.optimizer_name)
    check_ranks(config, read_ranks().world_size)
    pipeline = find_diffusers_pipeline(config.model, _PARTS)
    part, low, high = _expert(config, pipeline)
    other = {"transformer", "transformer_2"} & set(pipeline.parts) - {part}
    transformer = inspect_experts([config.ckpt_path or pipeline.part(part), *map(pipeline.part, other)])[0]
    check_text_to_video(transformer.config, "trained")
    vae = inspect_checkpoint(config.vae_checkpoint or pipeline.part("vae"), VAE)
    check_channels(vae.config, transformer.config["out_channels"])
    check_sizes(config, vae.config, transformer.config)
    if config.lora_rank:
        check_targets(build_empty(TRANSFORMER, transformer.config), config.lora_targets)
    pipeline.part("scheduler")  # without one the result could not be sampled as a pipeline
    check_drawing(config, pipeline)
    shift = config.sigma_shift or pipeline.shift or 1.0
    sigma = SigmaDistribution(
        shape=config.sigma_sampling, mean=config.sigma_mean, std=config.sigma_std, shift=shift, low=low, high=high
    )
    weights = DTYPES[config.weights_dtype]
    return _Job(
        config=config,
        device=device,
        parallel=parallel,
        pipeline=pipeline,
        part=part,
        transformer=transformer,
        vae=vae,
        sigma=sigma,
        precision=choose_precision(config, device, weights),
        dtype=weights,
    )


def _settle(job: _Job) -> _Job:
    """Decide what was left open of how ranks train together."""

    def work(config: TrainConfig, hardware: Hardware) -> Training:
        shapes = _shapes(job)
        return train_work(config, shapes, hardware, planned_pixels(config, shapes.vae))

    return replace(job, parallel=settle_parallel(job.config, job.device, work))


def _expert(config: TrainConfig, pipeline: Pipeline) -> tuple[str, float, float]:
    """Return the part to train and its range of sigma."""
    has_two = "transformer_2" in pipeline.parts
    boundary = pipeline.find_boundary() if has_two else 0.0
    check_expert(config, 1 + has_two, boundary)
    if not has_two:
        return "transformer", 0.0, 1.0
    return ("transformer", boundary, 1.0) if config.expert == "high" else ("transformer_2", 0.0, boundary)


def _make_student(job: _Job, ranks: Ranks, ends: ExitStack, data: EncodedData, held_out: EncodedData | None) -> _Student:
    """Build the model where it belongs: adapters, then compilation, then the activation policy, then placement or sharding.

    ``ends`` is told what to undo when the run is over.
    """
    config = job.config
    # What is stored is still on the meta device: weights go from the files to where they belong, and nothing is there twice.
    subject = _random_subject(job) if config.from_scratch else stored_subject(job.transformer, job.dtype)
    model = subject.model
    model.requires_grad_(config.lora_rank == 0).train()
    if folds_padding(job.transformer.config, data):
        fold_padding(model)
    if config.lora_rank:
        subject = add_adapters(
            subject,
            rank=config.lora_rank,
            alpha=config.lora_alpha or config.lora_rank,
            targets=config.lora_targets,
            seed=config.seed,
        )
    blocks = list(subject.blocks)
    to_host = config.activations_to_host
    prepare_blocks(blocks, job.device, ends, compiled=config.torch_compile, policy=config.policy, to_host=to_host)
    mesh = job.parallel.mesh(ranks, job.device)
    if mesh is not None:
        sharding = Sharding(model, blocks, mesh, travels_in(job.precision))
        if subject.read is not None:
            sharding.fill(subject.read, job.device)
        slices = Bytes(sum(local(parameter).nbytes for parameter in model.parameters()))
        return _Student(Role("student", model, is_trained=True, sharding=sharding, flags=_flags(job)), slices)
    resident = parse_resident(config.resident, "--resident")
    headroom = _beside_weights(job, data, held_out) if config.placement == "auto" else None
    placement = choose_placement(config.placement, resident=resident, train=config.lora_rank == 0, headroom=headroom)
    placed = placement.attach(subject, job.device)
    if placed.stream is not None:
        ends.callback(placed.stream.close)
    stays = 0 if placed.stream is None else len(blocks) - len(placed.stream.layouts)
    placing = Placing(name=placed.name or config.placement, resident=stays)
    role = Role("student", model, is_trained=True, flags=_flags(job))
    return _Student(role, placed.footprint.device, placing, placed.stream, placed.note)


def _flags(job: _Job) -> str:
    """Return what a state of this training belongs to: adapters are nothing without their scale and the weights beside them."""
    config = job.config
    flags = [] if config.expert == "auto" else [f"--expert {config.expert}"]
    flags.append(f"--lora-rank {config.lora_rank}")
    if config.lora_rank:
        alpha = config.lora_alpha or config.lora_rank
        flags.append(f"--lora-alpha {alpha} beside weights {fingerprint_model(job.transformer)[:12]}")
    return " ".join(flags)


def _check_goes_on(job: _Job, saved: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for a state that this training cannot go on from, as far as it is known before weights are read."""
    config = job.config
    refuse_other_flags(saved.get("roles", {}).get("student", {}), _flags(job), OTHER_WEIGHTS)
    optimiser = saved.get("optimisers", {}).get("student", {})
    if config.lora_rank or config.placement == "auto":
        return  # where the optimiser will be is not known yet
    on_device = optimiser_flags(config.optimizer_name, config.rounding, is_short=job.dtype.itemsize < 4)
    refuse_other_flags(optimiser, ON_HOST_FLAGS if config.placement == "offload" else on_device)


def _beside_weights(job: _Job, data: EncodedData, held_out: EncodedData | None) -> Bytes | None:
    """Return what the training will hold of the device beside the weights; None where the device is the host."""
    if job.device.type != "cuda":
        return None
    hardware = hardware_of(job.device)
    return _work(job, data, held_out, hardware).phase(hardware).beside("student")


def _work(job: _Job, data: EncodedData, held_out: EncodedData | None, hardware: Hardware) -> Training:
    """Return the training as it will be on the largest samples."""
    shapes = Shapes.of(data.vae.config, job.transformer.config)
    drawn = drawn_pixels(job.config, data.buckets, held_out.buckets if held_out is not None else None)
    return train_work(as_settled(job.config, job.parallel), shapes, hardware, largest_bucket(data.buckets).shape, drawn)


def _random_subject(job: _Job) -> Subject:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.config.seed)
        model: nn.Module = WanTransformer3DModel(**job.transformer.config)
    for name, parameter in model.named_parameters():
        if not stays_in_float32(WanTransformer3DModel, name):
            parameter.data = parameter.data.to(job.dtype)
    return Subject(model=model, blocks=list(model.get_submodule("blocks")))


def _train(
    job: _Job,
    ranks: Ranks,
    monitor: Monitor,
    student: _Student,
    data: EncodedData,
    held_out: EncodedData | None,
    ends: ExitStack,
) -> Trained:
    config, role = job.config, student.role
    samples = _samples(job, data)
    samples.preload()
    validation = _samples(job, held_out) if held_out is not None else None
    run = Run.over(samples.buckets, config, job.device, job.precision, ranks, monitor)
    method = FlowMatching(role, dtype=job.dtype, pixels=_pixel_loss(job, data))
    average = run.make_average(role)
    callbacks: list[Callback] = []
    measure = None
    if validation is not None:
        measure = MeasureHeldOut(method, validation, job.sigma, run, average=average)
        callbacks.append(measure)
    studio = Studio(config=config, pipeline=job.pipeline, vae=data.vae, device=job.device, dtype=job.dtype)
    callbacks += studio.callbacks(run, role, samples, validation, average)
    optimisations = {role.name: _make_optimisation(job, run, student, ends)}
    about = _describe(job, run, student)
    foreseen = Foreseen(_foresee(job, student, data, held_out), job.transformer.files if student.placing.name == "disk" else ())
    stopped = run.train(method, optimisations, samples, average=average, callbacks=callbacks, about=about, foreseen=foreseen)
    output = None
    if stopped.signal is None:
        with monitor.phase("writing the result", "student"):
            output = _write_result(job, ranks, role, average)
    return Trained(stopped.step, output, measure.losses if measure else {}, exit_code(stopped, ranks))


def _shapes(job: _Job) -> Shapes:
    return Shapes.of(job.vae.config, job.transformer.config, stored_dtype=job.transformer.main_dtype())


def _foresee(job: _Job, student: _Student, data: EncodedData, held_out: EncodedData | None) -> Callable[[Hardware], Phase]:
    return lambda hardware: replace(_work(job, data, held_out, hardware), placing=student.placing).phase(hardware)


def _samples(job: _Job, data: EncodedData) -> CachedSamples:
    randomness = Randomness(sigma=job.sigma, caption_dropout=job.config.caption_dropout)
    config = job.transformer.config
    return open_samples(data, randomness, config, workers=job.config.workers, trims_text=folds_padding(config, data))


def _make_optimisation(job: _Job, run: Run, student: _Student, ends: ExitStack) -> Optimises:
    config, role, stream = job.config, student.role, student.stream
    parameters = role.trained_parameters
    betas = (config.beta1, config.beta2)
    options = run.optimiser_options(name=config.optimizer_name, betas=betas, rounding=config.rounding)
    if stream is not None and stream.gradients is not None:
        on_host = HostOptimisation(parameters, stream, options, job.precision, job.device)
        ends.callback(on_host.close)
        return on_host
    if config.cuda_graphs:
        role.call = GraphedCalls(role.model, job.precision, job.device)
    return Optimisation(parameters, options, job.precision, job.device, keeps_gradients=config.cuda_graphs)


def _pixel_loss(job: _Job, data: EncodedData) -> PixelLoss | None:
    if not job.config.pixel_loss_weight:
        return None
    vae = load_model(data.vae, dtype=torch.float32, device=job.device)
    if job.config.vae_gradient_checkpointing:
        checkpoint_vae(vae)

    def decode(latents: Tensor) -> Tensor:
        pixels: Tensor = vae.decode(denormalise(latents, data.vae.config), return_dict=False)[0]
        return pixels

    return PixelLoss(decode, job.config.pixel_loss_weight)


def _describe(job: _Job, run: Run, student: _Student) -> list[str]:
    count = sum(parameter.numel() for parameter in student.role.trained_parameters.values())
    what = f"adapters of rank {job.config.lora_rank}" if job.config.lora_rank else "all weights"
    about = [
        f"Training {what} of the {job.part.replace('_', ' ')} ({count / 1e6:.1f} M parameters, {student.num_bytes} of "
        f"weights on {job.device}) for {run.num_steps} steps of {run.samples_per_step} samples, {run.num_epochs:.1f} epochs"
    ]
    if student.note:
        about.append(f"Placement {student.note}")
    if job.config.expert != "auto" and (job.config.sample_every or job.config.judge_samples):
        about.append("Pictures are drawn by this expert alone, at all sigmas; 'wandistiller sample' draws with both")
    return about


def _write_result(job: _Job, ranks: Ranks, student: Role, average: MovingAverage | None) -> Path:
    config = job.config
    target = config.output_dir / ("lora" if config.lora_rank else "model")
    with in_use(average):
        if config.lora_rank:
            from peft import get_peft_model_state_dict

            adapters = gather_to_host(get_peft_model_state_dict(student.model))
            if ranks.is_first:
                write_lora(target, adapters, alpha=config.lora_alpha or config.lora_rank, rank=config.lora_rank)
        elif ranks.is_first:
            vae = job.vae if config.vae_checkpoint else None
            write_pipeline(target, job.pipeline, {job.part: lambda path: write_model(path, student.model)}, vae)
        else:
            follow_model(student.model)
    if ranks.is_first:
        say(f"Wrote {target}")
    ranks.wait_long()
    return target
