"""The job of ``wandistiller train``: check everything, encode, train, write the result."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from wandistiller.checkpoint.trained import write_lora, write_model, write_pipeline
from wandistiller.checkpoint.training_state import TrainingStates
from wandistiller.config.encode import EncodeConfig
from wandistiller.config.placement import parse_resident
from wandistiller.config.train import TrainConfig
from wandistiller.data.batches import BatchPlan, StepPlan
from wandistiller.data.buckets import Bucket
from wandistiller.data.cached_samples import CachedSamples, Randomness
from wandistiller.data.encoded import EncodedData, encode_data
from wandistiller.distributed.failures import is_rank
from wandistiller.distributed.ranks import Ranks, joined, rank_device, read_ranks
from wandistiller.errors import UsageError
from wandistiller.files import check_can_write
from wandistiller.flow.sigma import SigmaDistribution
from wandistiller.memory.activations import apply_policy
from wandistiller.memory.host_limits import available_host_memory
from wandistiller.memory.monitor import Monitor
from wandistiller.memory.placement import Placed, Subject
from wandistiller.memory.streaming import bind
from wandistiller.memory.subjects import choose_placement, stored_subject
from wandistiller.memory.vae_checkpointing import checkpoint_vae
from wandistiller.models.devices import DTYPES, find_device, find_dtype
from wandistiller.models.latents import denormalise, latent_shape, num_tokens
from wandistiller.models.load import load_model
from wandistiller.models.pipeline import Pipeline, find_pipeline
from wandistiller.models.stored import TRANSFORMER, StoredModel, inspect_checkpoint, stays_in_float32
from wandistiller.models.text import encode_prompts
from wandistiller.models.text_padding import can_fold_padding, fold_padding, trim_padding
from wandistiller.terminal import say
from wandistiller.train.callbacks import Callback, KeepAverage
from wandistiller.train.drawing import Drawing
from wandistiller.train.ema import MovingAverage
from wandistiller.train.graphs import GraphedCalls, check_can_graph
from wandistiller.train.held_out import MeasureHeldOut
from wandistiller.train.host_optimisation import HostOptimisation
from wandistiller.train.loop import Loop, LoopOptions
from wandistiller.train.marks import MeasureMarks
from wandistiller.train.memory_watch import WatchMemory
from wandistiller.train.method import Role
from wandistiller.train.methods.finetune import FlowMatching, PixelLoss
from wandistiller.train.metrics import ShowProgress, WriteMetrics
from wandistiller.train.optimisation import MixedPrecision, Optimisation, OptimiserOptions, Optimises
from wandistiller.train.remedies import find_remedies
from wandistiller.train.runs import exit_code, resume_run
from wandistiller.train.samples import DrawSamples
from wandistiller.units import Bytes

_PARTS = ("transformer", "transformer_2", "vae", "text_encoder", "tokenizer", "scheduler")
_DEFAULT_SAMPLES = 4


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
    pipeline: Pipeline
    part: str
    """Which part of the pipeline is trained."""
    transformer: StoredModel
    sigma: SigmaDistribution
    precision: MixedPrecision
    dtype: torch.dtype
    """What the transformer's inputs are in."""


def run_train(config: TrainConfig) -> Trained:
    """Do the whole job."""
    job = _prepare(config)
    monitor = Monitor([job.device], lambda failure: find_remedies(config, job.transformer, job.device, failure))
    with joined(job.device) as ranks, ExitStack() as ends:
        data = _encode(job, config.dataset_path, config.cache_dir)
        # In a folder of its own, as names may be the same.
        held_out_cache = config.cache_dir / "held_out" if config.cache_dir else None
        held_out = _encode(job, config.held_out, held_out_cache) if config.held_out else None
        with monitor.phase("loading", "student"):
            student, placed = _make_student(job, ends, folds_padding=_folds_padding(job, data))
        return _train(job, ranks, monitor, student, placed, data, held_out, ends)


def _prepare(config: TrainConfig) -> _Job:
    config.check()
    assert config.model is not None
    check_can_write(config.output_dir / "x")
    ranks = read_ranks()
    if config.distributed and not is_rank():
        raise UsageError("--distributed was given, but torchrun did not start this.", fix="Start it with torchrun.")
    if ranks.world_size > 1 and config.placement == "offload" and not config.lora_rank:
        raise UsageError(
            "Ranks that train together cannot each offload all weights.",
            why="gradients leave for the host before ranks could exchange them.",
            fix="Train adapters with --lora-rank, keep the weights on the cards, or start without torchrun.",
        )
    device = find_device(rank_device(config.device, ranks))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if config.cuda_graphs:
        check_can_graph(device, ranks)
    pipeline = find_pipeline(config.model, _PARTS)
    if not (pipeline.folder / "model_index.json").is_file():
        raise UsageError(f"{config.model} is not a diffusers pipeline.", fix="Convert it first with wandistiller export.")
    part, low, high = _expert(config, pipeline)
    transformer = inspect_checkpoint(config.ckpt_path or pipeline.part(part), TRANSFORMER)
    if transformer.config["in_channels"] != transformer.config["out_channels"]:
        raise UsageError("Only text-to-video models can be trained so far.", fix="Give a T2V or TI2V checkpoint.")
    shift = config.sigma_shift or pipeline.shift or 1.0
    sigma = SigmaDistribution(
        shape=config.sigma_sampling, mean=config.sigma_mean, std=config.sigma_std, shift=shift, low=low, high=high
    )
    weights = DTYPES[config.weights_dtype]
    precision = config.mixed_precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" and weights == torch.float32 else "no"
    return _Job(
        config=config,
        device=device,
        pipeline=pipeline,
        part=part,
        transformer=transformer,
        sigma=sigma,
        precision=precision,
        dtype=weights,
    )


def _expert(config: TrainConfig, pipeline: Pipeline) -> tuple[str, float, float]:
    """Return the part to train and its range of sigma."""
    if "transformer_2" not in pipeline.parts:
        if config.expert != "auto":
            raise UsageError(f"--expert {config.expert}: this model has one transformer.", fix="Leave it away.")
        return "transformer", 0.0, 1.0
    boundary = pipeline.boundary or 0.875
    if config.expert == "auto":
        raise UsageError(
            "This model has two experts, which are trained one at a time.",
            why=f"one is for sigma above {boundary}, the other for sigma below.",
            fix="Give --expert high or --expert low.",
        )
    return ("transformer", boundary, 1.0) if config.expert == "high" else ("transformer_2", 0.0, boundary)


def _encode(job: _Job, dataset: str | None, cache_dir: Path | None) -> EncodedData:
    """Encode a data set with the run's own settings; the encoders are gone afterwards."""
    config = job.config
    encode = EncodeConfig(
        model=config.model,
        dataset_path=dataset,
        cache_dir=cache_dir,
        vae_checkpoint=config.vae_checkpoint,
        width=config.width,
        height=config.height,
        frames=config.frames,
        max_aspect=config.max_aspect,
        device=str(job.device),
        dtype=config.dtype,
        skip_bad=config.skip_bad,
    )
    return encode_data(encode)


def _folds_padding(job: _Job, data: EncodedData) -> bool:
    """Say whether captions go without their padding: not where samples are as long as videos."""
    config = job.transformer.config
    buckets = {bucket for bucket in data.buckets if bucket is not None}
    shapes = [latent_shape(data.vae.config, (bucket.frames, bucket.height, bucket.width)) for bucket in buckets]
    return can_fold_padding(config, max(num_tokens(config, shape) for shape in shapes))


def _make_student(job: _Job, ends: ExitStack, *, folds_padding: bool) -> tuple[Role, Placed]:
    """Build the model where it belongs: adapters, then compilation, then the activation policy, then the placement.

    ``ends`` is told what to undo when the run is over.
    """
    config = job.config
    # What is stored is still on the meta device: weights go from the files to where they belong, and nothing is there twice.
    subject = _random_subject(job) if config.from_scratch else stored_subject(job.transformer, job.dtype)
    model = subject.model
    model.requires_grad_(config.lora_rank == 0).train()
    if folds_padding:
        fold_padding(model)
    if config.lora_rank:
        subject = _with_adapters(subject, config)
    blocks = list(subject.blocks)
    if config.torch_compile:
        for block in blocks:
            block.forward = torch.compile(block.forward)
    if config.policy != "none" or config.activations_to_host:
        ends.callback(apply_policy(blocks, config.policy, job.device, to_host=config.activations_to_host).detach)
    resident = parse_resident(config.resident, "--resident")
    placement = choose_placement(config.placement, resident=resident, train=config.lora_rank == 0)
    placed = placement.attach(subject, job.device)
    if placed.stream is not None:
        ends.callback(placed.stream.close)
    return Role("student", model, is_trained=True), placed


def _random_subject(job: _Job) -> Subject:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.config.seed)
        model: nn.Module = WanTransformer3DModel(**job.transformer.config)
    for name, parameter in model.named_parameters():
        if not stays_in_float32(WanTransformer3DModel, name):
            parameter.data = parameter.data.to(job.dtype)
    return Subject(model=model, blocks=list(model.get_submodule("blocks")))


def _with_adapters(subject: Subject, config: TrainConfig) -> Subject:
    """Add adapters, which are real and in float32 while the model is still empty."""
    from peft import LoraConfig

    model = subject.model
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in config.lora_targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise UsageError(f"--lora-targets {target}: the model has no such layer.", fix="to_q, to_k and to_v are usual.")
    alpha = config.lora_alpha or config.lora_rank
    model.add_adapter(LoraConfig(r=config.lora_rank, lora_alpha=alpha, target_modules=list(config.lora_targets)))
    generator = torch.Generator().manual_seed(config.seed)
    for name, parameter in model.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            values = torch.zeros(parameter.shape)
            if ".lora_A." in name:  # as peft does it: uniform up to 1 / sqrt(inputs), and zeros for the second factor
                values.uniform_(-1, 1, generator=generator).div_(parameter.shape[1] ** 0.5)
            bind(parameter, values)
    assert subject.read is not None and subject.locate is not None
    read, locate = subject.read, subject.locate
    # peft puts the layer itself one level down.
    return replace(
        subject,
        read=lambda name: read(name.replace(".base_layer.", ".")),
        locate=lambda name: None if ".lora_" in name else locate(name.replace(".base_layer.", ".")),
    )


def _train(
    job: _Job,
    ranks: Ranks,
    monitor: Monitor,
    student: Role,
    placed: Placed,
    data: EncodedData,
    held_out: EncodedData | None,
    ends: ExitStack,
) -> Trained:
    config = job.config
    samples = _samples(job, data)
    samples.preload()
    plan = StepPlan(BatchPlan(samples.buckets, config.batch_size, config.seed), ranks.world_size, config.gradient_accumulation)
    num_steps = config.num_steps or -(-config.num_epochs * plan.plan.batches_per_epoch // plan.batches_per_step)
    parameters = student.trained_parameters
    options = _optimiser_options(config, num_steps)
    optimisation: Optimises
    if placed.stream is not None and placed.stream.gradients is not None:
        optimisation = on_host = HostOptimisation(parameters, placed.stream, options, job.precision, job.device)
        ends.callback(on_host.close)
    else:
        if config.cuda_graphs:
            student.call = GraphedCalls(student.model, job.precision, job.device)
        optimisation = Optimisation(parameters, options, job.precision, job.device, keeps_gradients=config.cuda_graphs)
    method = FlowMatching(student, dtype=job.dtype, pixels=_pixel_loss(job, data))
    average = MovingAverage(student.model, parameters, config.ema_decay) if config.use_ema else None
    metrics = WriteMetrics(config.output_dir, monitor.observe)
    callbacks: list[Callback] = [KeepAverage(average)] if average is not None else []
    callbacks += [metrics, WatchMemory(snapshot=config.memory_snapshot)]
    measure = None
    if held_out is not None:
        measure = MeasureHeldOut(
            method, _samples(job, held_out), job.sigma, metrics, every=config.validate_every, average=average
        )
        callbacks.append(measure)
    decode = partial(_decode, job, data)
    if held_out is not None and config.judge_samples:
        drawings = _held_out_drawings(job, _samples(job, held_out))
        callbacks.append(MeasureMarks(student, drawings, decode, metrics, every=config.validate_every, average=average))
    if config.sample_every:
        drawing = _sample_drawing(job, samples)
        folder = config.output_dir / "samples"
        callbacks.append(DrawSamples(student, drawing, decode, folder, fps=16, every=config.sample_every, average=average))
    callbacks.append(ShowProgress(monitor.line))
    states = TrainingStates(config.output_dir / "states", config.keep)
    loop = Loop(
        method,
        {"student": optimisation},
        samples,
        plan,
        LoopOptions(
            num_steps=num_steps,
            log_every=config.log_every,
            save_every=config.save_every,
            workers=config.workers,
            seed=config.seed,
            precision=job.precision,
        ),
        device=job.device,
        ranks=ranks,
        states=states,
        callbacks=callbacks,
    )
    resume_run(config.resume, loop, states, config.output_dir)
    if ranks.is_first:
        _describe(job, loop, parameters, plan, num_steps, placed)
    with monitor.phase("training", "student"):
        stopped = loop.run()
    if ranks.is_first and job.device.type != "cpu":
        say("Memory by phase: " + "; ".join(monitor.summary()))
    output = None
    if stopped.signal is None:
        with monitor.phase("writing the result", "student"):
            output = _write_result(job, ranks, student, average)
    return Trained(stopped.step, output, measure.losses if measure else {}, exit_code(stopped, ranks))


def _samples(job: _Job, data: EncodedData) -> CachedSamples:
    # A quarter of what is free, for each process that reads.
    memory = Bytes(available_host_memory() // (4 * (job.config.workers + 1)))
    return CachedSamples(
        data.source,
        data.buckets,
        data.texts,
        data.latents,
        text_width=job.transformer.config["text_dim"],
        randomness=Randomness(sigma=job.sigma, caption_dropout=job.config.caption_dropout),
        memory=memory,
        trims_text=_folds_padding(job, data),
    )


def _optimiser_options(config: TrainConfig, num_steps: int) -> OptimiserOptions:
    return OptimiserOptions(
        name=config.optimizer_name,
        rate=config.learning_rate,
        weight_decay=config.weight_decay,
        betas=(config.beta1, config.beta2),
        clip_norm=config.clip_norm or None,
        schedule=config.lr_schedule,
        warmup_steps=config.warmup_steps,
        num_steps=num_steps,
        rounding=config.rounding,
        seed=config.seed,
    )


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


def _decode(job: _Job, data: EncodedData, latents: Sequence[Tensor]) -> list[Tensor]:
    """Decode samples; the VAE is in memory only for as long."""
    vae: Any = load_model(data.vae, dtype=torch.float32, device=job.device)
    return [vae.decode(denormalise(each[None], data.vae.config), return_dict=False)[0][0].cpu() for each in latents]


def _sample_drawing(job: _Job, samples: CachedSamples) -> Drawing:
    """Return what is drawn every so often: the prompts that were asked for, or the first captions."""
    config = job.config
    if config.sample_prompts:
        prompts: Sequence[str] = config.sample_prompts
        text = encode_prompts(
            job.pipeline.part("text_encoder"),
            job.pipeline.part("tokenizer"),
            prompts,
            device=job.device,
            dtype=find_dtype(config.dtype, job.device),
        ).float()
        text = trim_padding(text) if samples.trims_text else text
    else:
        chosen = range(min(_DEFAULT_SAMPLES, len(samples)))
        prompts = [samples.caption(index) for index in chosen]
        text = pad_sequence([samples.text(index) for index in chosen], batch_first=True)
    return _drawing(job, samples, prompts, text, samples.latents(0).shape)


def _held_out_drawings(job: _Job, samples: CachedSamples) -> list[Drawing]:
    """Return the captions that are judged, those of each size together."""
    found: dict[Bucket, list[int]] = {}
    for index in range(min(job.config.judge_samples, len(samples))):
        found.setdefault(samples.buckets[index], []).append(index)
    return [
        _drawing(
            job,
            samples,
            [samples.caption(index) for index in indices],
            pad_sequence([samples.text(index) for index in indices], batch_first=True),
            samples.latents(indices[0]).shape,
        )
        for indices in found.values()
    ]


def _drawing(job: _Job, samples: CachedSamples, prompts: Sequence[str], text: Tensor, shape: torch.Size) -> Drawing:
    config = job.config
    return Drawing(
        prompts=prompts,
        text=text,
        empty_text=samples.empty_text,
        latent_shape=(shape[0], shape[1], shape[2], shape[3]),
        num_steps=config.sample_steps,
        shift=config.sigma_shift or job.pipeline.shift or 1.0,
        solver=job.pipeline.solver,
        cfg_scale=config.cfg_scale,
        seed=config.seed,
        dtype=job.dtype,
    )


def _describe(
    job: _Job, loop: Loop, parameters: dict[str, nn.Parameter], plan: StepPlan, num_steps: int, placed: Placed
) -> None:
    count = sum(parameter.numel() for parameter in parameters.values())
    batch = job.config.batch_size * plan.batches_per_step
    what = f"adapters of rank {job.config.lora_rank}" if job.config.lora_rank else "all weights"
    say(
        f"Training {what} of the {job.part.replace('_', ' ')} ({count / 1e6:.1f} M parameters, {placed.footprint.device} of "
        f"weights on {job.device}) for {num_steps} steps of {batch} samples, "
        f"{num_steps * plan.batches_per_step / plan.plan.batches_per_epoch:.1f} epochs"
    )
    if placed.note:
        say(f"Placement {placed.note}")


def _write_result(job: _Job, ranks: Ranks, student: Role, average: MovingAverage | None) -> Path:
    config = job.config
    target = config.output_dir / ("lora" if config.lora_rank else "model")
    if ranks.is_first:
        with average.in_use() if average is not None else nullcontext():
            if config.lora_rank:
                from peft import get_peft_model_state_dict

                alpha = config.lora_alpha or config.lora_rank
                write_lora(target, get_peft_model_state_dict(student.model), alpha=alpha, rank=config.lora_rank)
            else:
                write_pipeline(target, job.pipeline, {job.part: lambda path: write_model(path, student.model)})
        say(f"Wrote {target}")
    ranks.wait()
    return target
