"""What the training of a VAE will take: the method's own step on fake tensors, in one piece."""

from __future__ import annotations

import torch

from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.data.loader import Batch
from wandistiller.memory.durations import step_seconds
from wandistiller.memory.estimates import Estimate, Item, Stage
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.layout import named_tensors
from wandistiller.memory.optimiser_bytes import OptimiserChoice
from wandistiller.memory.tape import BACKWARD, Tape
from wandistiller.memory.tracing import Recorder, materialise, recording
from wandistiller.memory.vae_checkpointing import checkpoint_vae
from wandistiller.models.critic import PatchCritic
from wandistiller.models.lpips import Lpips
from wandistiller.models.shapes import Shapes
from wandistiller.models.stored import VAE, build_empty
from wandistiller.models.vae_passes import VaePass
from wandistiller.train.method import Role, Turn
from wandistiller.train.methods.vae import VaeTraining, VaeWeights
from wandistiller.train.optimisation import MixedPrecision, autocast
from wandistiller.units import Bytes

_CPU = torch.device("cpu")


def predict_train_vae(config: TrainVaeConfig, shapes: Shapes, hardware: Hardware) -> Estimate:
    """Return what ``train-vae`` takes."""
    vae = VaePass(build_empty(VAE, shapes.vae).requires_grad_(True).train())
    with torch.device("meta"):
        critic = PatchCritic(base_width=config.critic_width) if config.gan_training else None
        perceptual = Lpips(checkpointing=config.lpips_checkpointing) if config.use_lpips else None
    stage = Stage("training", hardware)
    optimiser, roles = OptimiserChoice(), {"vae": vae, "critic": critic, "perceptual": perceptual}
    for name, model in roles.items():
        if model is not None:
            stage.scene.hold(name, "weights", [tensor.nbytes for _, tensor in named_tensors(model)])
    tape = _record(config, vae, critic, perceptual, pixel_shape(config, shapes), precision_of(config, hardware))
    trained = {"vae": list(vae.parameters()), "critic": list(critic.parameters()) if critic is not None else []}
    for name, parameters in trained.items():
        stage.scene.hold(name, "optimiser", optimiser.state(parameters))
    if config.use_ema:
        stage.scene.hold("vae", "average", [each.nbytes for each in trained["vae"]])
    for _ in range(2):
        stage.scene.drop(stage.play_tape("vae", tape))
    count = sum(each.numel() for parameters in trained.values() for each in parameters)
    seconds = step_seconds(tape, {}, hardware).total * config.gradient_accumulation
    disk = (Item("vae", "states", "disk", Bytes(config.keep * 12 * count)),)
    return Estimate(phases=(stage.finished(seconds, config.num_steps or 1000),), disk=disk)


def pixel_shape(config: TrainVaeConfig, shapes: Shapes) -> tuple[int, int, int]:
    """Return frames, height and width of the largest samples."""
    if config.dataset_path is not None and config.dataset_path.startswith("world:"):
        frames, height, width = config.dataset_path.split(":")[2].split("x")
        return max(map(int, frames.split("+"))), int(height), int(width)
    size = shapes.size
    return max(config.frames, default=size.frames), config.height or size.height, config.width or size.width


def precision_of(config: TrainVaeConfig, hardware: Hardware) -> MixedPrecision:
    """Return what is computed in 16 bits on such hardware."""
    if config.use_fp16:
        return "fp16"
    if config.mixed_precision != "auto":
        return config.mixed_precision
    return "bf16" if hardware.card is not None else "no"


def _record(
    config: TrainVaeConfig,
    vae: VaePass,
    critic: PatchCritic | None,
    perceptual: Lpips | None,
    shape: tuple[int, int, int],
    precision: MixedPrecision,
) -> Tape:
    """Write down one whole step, with the gradient penalty where there is one."""
    if config.vae_gradient_checkpointing:
        checkpoint_vae(vae.vae)
    seeds = torch.arange(config.batch_size)  # real numbers, which the method reads
    step = -(-config.gan_start // config.r1_interval) * config.r1_interval
    with recording() as recorder:
        for model in (vae, critic, perceptual):
            if model is not None:
                materialise(recorder, model)
        with recorder.elsewhere():
            pixels = torch.empty(config.batch_size, 3, *shape)
        batch = Batch({"pixels": pixels, "seed": seeds}, ("",) * config.batch_size, 0, 0, step)
        method = VaeTraining(
            Role("vae", vae, is_trained=True),
            VaeWeights.of(config),
            critic=None if critic is None else Role("critic", critic, is_trained=True),
            perceptual=perceptual,
            reduced_min_sizes=config.reduced_min_sizes,
        )
        for turn in method.turns:
            _take_turn(recorder, method, turn, batch, precision)
    return recorder.tape


def _take_turn(recorder: Recorder, method: VaeTraining, turn: Turn, batch: Batch, precision: MixedPrecision) -> None:
    with autocast(precision, _CPU):
        losses = turn.losses(batch)
    recorder.begin((BACKWARD + turn.role, -1))
    losses.total.backward()
    method.roles[turn.role].model.zero_grad(set_to_none=True)
