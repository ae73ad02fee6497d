"""The planner: estimates a job as it was asked for and in other ways, and ranks those that fit by their time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wandistiller.config.command import CommandConfig, command_line, launch_words
from wandistiller.config.distill import DistillConfig
from wandistiller.config.placement import SPREAD
from wandistiller.config.plan import PlanConfig, PlanRequest, parse_rate
from wandistiller.config.sample import SampleConfig
from wandistiller.config.train import TrainConfig
from wandistiller.config.training import TrainingConfig
from wandistiller.config.transformer_training import TransformerTrainingConfig
from wandistiller.distributed.parallel import check_parallel
from wandistiller.errors import UsageError
from wandistiller.memory.estimates import Estimate, fits
from wandistiller.memory.hardware import Hardware, described
from wandistiller.memory.raw_reads import rate_of_largest
from wandistiller.models.devices import device_named
from wandistiller.models.shapes import Shapes, find_named, find_shapes
from wandistiller.models.sizes import HUB_IDS
from wandistiller.plan.bounds import least_on_card
from wandistiller.plan.candidates import Changes, Way, all_ways, has_usual_policy, is_left_to_the_program, kept
from wandistiller.plan.search import Option, Search, Untried
from wandistiller.sample.conditioning import check_image, image_inputs
from wandistiller.sample.prediction import predict_sample
from wandistiller.train.distill_job import common_patch, read_student, with_sizes
from wandistiller.train.prediction import (
    asking_phase,
    check_planned_student,
    media_phase,
    planned_pixels,
    predict_distill,
    predict_train,
)
from wandistiller.train.start_checks import (
    check_expert,
    check_ranks,
    check_sizes,
    check_spread_teacher,
    check_text_to_video,
)
from wandistiller.train.vae_prediction import predict_train_vae
from wandistiller.units import Bytes

Predict = Callable[[Any, Shapes, Hardware], Estimate]
PREDICTIONS: dict[str, Predict] = {
    "distill": predict_distill,
    "train": predict_train,
    "train-vae": predict_train_vae,
    "sample": predict_sample,
}
_RESIDENT_FIELDS = {"distill": "teacher_resident", "train": "resident", "sample": "resident"}
_FILES = ("dataset_path", "data_path", "held_out", "prompt_file", "image", "cond", "uncond", "lora", "lora_2")
"""Fields that name what a run reads, and a plan does not."""
_ABOUT_AS_FAST = 1.02
_FAR_SLOWER = 10


@dataclass(frozen=True)
class Plan:
    """What came out: the job as asked for, the ways that fit from the fastest, and those that do not."""

    request: PlanRequest
    hardware: Hardware
    asked: Option
    """The job as it is; where it says ``auto``, the best that this stands for."""
    fitting: tuple[Option, ...]
    """Those that cost no accuracy first."""
    losers: tuple[Option, ...] = field(default=())
    untried: tuple[Untried, ...] = field(default=())

    @property
    def best(self) -> Option | None:
        """The fastest that costs no accuracy, unless it is far slower; of those about as fast, the one that changes least."""
        fastest = min((each.seconds for each in self.fitting), default=0.0)
        exact = [each for each in self.fitting if each.way.is_exact and each.seconds <= _FAR_SLOWER * fastest]
        among = exact or self.fitting
        least = min((each.seconds for each in among), default=0.0)
        near = [each for each in among if each.seconds <= _ABOUT_AS_FAST * least]
        return min(near, key=self._changed, default=None)

    def _changed(self, each: Option) -> tuple[bool, int, float, float, int]:
        return each is not self.asked, len(each.changes), _exchange(each), each.seconds, each.estimate.device

    @property
    def ranked(self) -> tuple[Option, ...]:
        """All that fit: the best, then the others from the fastest on."""
        others = sorted((each for each in self.fitting if each is not self.best), key=lambda each: each.seconds)
        return tuple(others) if self.best is None else (self.best, *others)

    @property
    def faster_ones(self) -> tuple[Option, ...]:
        """Ways that fit and are faster than the best, at a cost in accuracy."""
        best = self.best
        return tuple(each for each in self.fitting if best is not None and _ABOUT_AS_FAST * each.seconds < best.seconds)

    @property
    def absent(self) -> tuple[str, ...]:
        """Files and folders of the job that are not here, as they may be where it will run."""
        named = [str(getattr(self.request.job, name)) for name in _FILES if name in self.request.given]
        return tuple(name for name in named if not name.startswith("world:") and not Path(name).exists())

    @property
    def best_job(self) -> CommandConfig | None:
        """The configuration of the best way, with the weights that a run would fetch where only a size was named."""
        if self.best is None:
            return None
        job: Any = self.request.job
        sources = {name: str(getattr(job, name, None)) for name in ("model", "teacher_path")}
        named = {name: HUB_IDS[source] for name, source in sources.items() if source in HUB_IDS and find_named(source)}
        return replace(job, **named, **self.best.changes)

    @property
    def command(self) -> str | None:
        """What to type for the best way."""
        job = self.best_job
        return None if job is None else self.launched(command_line(self.request.command, job, {}))

    def launched(self, line: str) -> str:
        """Return a command as it is started on all ranks."""
        if self.hardware.num_ranks == 1:
            return line
        return " ".join([*launch_words(self.hardware.num_nodes, max(self.hardware.num_cards, 1)), line])


def make_plan(request: PlanRequest) -> Plan:
    """Estimate the job in all ways that could be the best, and rank them."""
    job = request.job
    shapes = find_shapes(model_of(job))
    hardware = as_started(job, find_hardware(request.options, model_of(job)))
    check_can_start(job, shapes, hardware)
    predict = PREDICTIONS[request.command]
    resident = _RESIDENT_FIELDS.get(request.command)
    for_data = {
        **_changes_for_data(job, request.given, shapes, hardware),
        **_changes_for_asking(job, request.given, shapes, hardware),
    }
    encoding = ("encoding text", "encoding media") if isinstance(job, TransformerTrainingConfig) else ()
    search = Search(
        predict=lambda changes: predict(replace(job, **changes), shapes, hardware),
        least_on_card=lambda changes: least_on_card(replace(job, **changes), shapes, hardware),
        hardware=hardware,
        resident_field=None if resident in request.given else resident,
        fixed_phases=() if "vae_tiling" in for_data else encoding,
        # Of a teacher that is spread, more is on the cards the less of them the student takes. How a picture is decoded changes
        # nothing about the steps before, and 16 bits are both smaller and faster.
        is_in_order=getattr(job, "strategy", "") not in SPREAD and not isinstance(job, SampleConfig) and has_usual_policy(job),
    )
    ways = sorted(all_ways(job, request.given, hardware), key=lambda way: bool(way.changes))
    if for_data:
        ways = [Way(changes={}), *(replace(way, changes={**way.changes, **for_data}) for way in ways)]
    search.run(ways)
    fitting = sorted(
        (each for each in search.found if each.fits),
        key=lambda each: (not each.way.is_exact, each.seconds, each.estimate.device),
    )
    asked = _stands_for([each for each in fitting if is_left_to_the_program(job, each.changes, request.given)])
    asked = asked or search.found[0]
    with_residents = [{name: value for name, value in each.changes.items() if name != resident} for each in fitting]
    losers = [each for each in search.found if not (each.fits or each is asked or each.changes in with_residents)]
    return Plan(request, hardware, asked, tuple(fitting), tuple(losers), tuple(search.untried))


def _changes_for_data(job: Any, given: frozenset[str], shapes: Shapes, hardware: Hardware) -> Changes:
    """Return what a data set needs to be encoded where the VAE has no room for whole frames: tiles."""
    if not isinstance(job, TransformerTrainingConfig) or job.dataset_path is None or "vae_tiling" in given:
        return {}

    def has_room(job: TransformerTrainingConfig) -> bool:
        return fits(media_phase(job, shapes, hardware).reserved, hardware.room)

    return {"vae_tiling": True} if not has_room(job) and has_room(replace(job, vae_tiling=True)) else {}


def _changes_for_asking(job: Any, given: frozenset[str], shapes: Shapes, hardware: Hardware) -> Changes:
    """Return in which batches a teacher can be asked at all beside what is there: as large ones as there is room for."""
    if not isinstance(job, DistillConfig) or not job.is_stored or "rollout_batch" in given or hardware.card is None:
        return {}
    smallest: Changes = {"teacher_device_strategy": "offload", "activation_policy": "full", "activations_to_host": True}
    is_given = kept(job, given)
    least = replace(job, **{name: value for name, value in smallest.items() if name not in is_given})
    batch = job.rollout_batch
    while batch > 1 and not _can_ask(replace(least, rollout_batch=batch), shapes, hardware):
        batch //= 2
    return {"rollout_batch": batch} if batch != job.rollout_batch else {}


def _can_ask(job: DistillConfig, shapes: Shapes, hardware: Hardware) -> bool:
    """Say whether there is room on the card to ask the teacher; beside the student, where it is asked again and again."""
    if job.refresh_every:
        training = predict_distill(job, shapes, hardware).phases[-1]
        return fits(training.reserved, hardware.room)
    student = read_student(job, shapes.transformers[0], shapes.vae)
    job = with_sizes(job, student).with_guidance(shapes.size.guidance)
    pixels = planned_pixels(job, shapes.vae, common_patch(student.config, shapes.transformers[0]))
    return fits(asking_phase(job, shapes, hardware, pixels).reserved, hardware.room)


def _stands_for(ways: Sequence[Option]) -> Option | None:
    """Return which of the ways that ``auto`` leaves open, in the order of those that fit, it stands for."""
    near = [
        each for each in ways if each.way.is_exact == ways[0].way.is_exact and each.seconds <= _ABOUT_AS_FAST * ways[0].seconds
    ]
    return min(near, key=_exchange, default=None)


def _exchange(option: Option) -> float:
    """Return for how long ranks exchange in a step. It counts as hidden behind the computation, which it may not be."""
    return sum(phase.exchange for phase in option.estimate.phases)


def check_can_start(job: Any, shapes: Shapes, hardware: Hardware) -> None:
    """Raise ``UsageError`` for a job that would be refused when it is run."""
    ranks_here, is_started = max(hardware.num_cards, 1), hardware.num_ranks > 1
    if isinstance(job, TrainingConfig):
        if job.is_sharded and not is_started:
            raise _for_several(f"--parallel {job.parallel}")
        check_parallel(job.parallel, job.shard_size or ranks_here, hardware.num_ranks if is_started else None)
    if isinstance(job, TrainConfig):
        check_ranks(job, hardware.num_ranks)
        check_expert(job, len(shapes.transformers), shapes.size.boundary or 0.875)
        check_text_to_video(shapes.transformers[0], "trained")
        check_sizes(job, shapes.vae, shapes.transformers[0])
    if isinstance(job, DistillConfig):
        check_text_to_video(shapes.transformers[0], "distilled")
        check_planned_student(job, shapes)
        if job.strategy == "sharded" and not is_started:
            raise _for_several("--teacher-device-strategy sharded")
        if hardware.card is not None:
            check_spread_teacher(job, ranks_here, hardware.cards_each)
    if isinstance(job, SampleConfig) and find_named(model_of(job)) is not None:  # of others their files know more
        transformer = shapes.transformers[0]
        check_image(job.image, image_inputs(transformer, shapes.size.expand_timesteps), transformer)


def _for_several(flag: str) -> UsageError:
    return UsageError(f"{flag} is for several GPUs, and this is a plan for one.", fix="Say how many with --gpus 2.")


def find_hardware(options: PlanConfig, model: str) -> Hardware:
    """Return the machine to plan for; of this one, how fast it reads the model's files."""
    is_here = options.card is None and options.gpu is None
    disk_rate = parse_rate(options.disk) if options.disk is not None else _rate_of_files(Path(model)) if is_here else None
    return described(
        card=options.card,
        gpu=None if options.gpu is None else Bytes.parse(options.gpu),
        num_cards=options.gpus,
        num_nodes=options.nodes,
        host_memory=None if options.ram is None else Bytes.parse(options.ram),
        bus_rate=None if options.bus is None else parse_rate(options.bus),
        disk_rate=disk_rate,
        network_rate=None if options.network is None else parse_rate(options.network),
    )


def as_started(job: Any, hardware: Hardware) -> Hardware:
    """Return a machine as a job has it: all cards in one process where it draws or spreads a teacher, else each in its own."""
    kind = "auto" if job.device == "auto" else device_named(job.device).type
    if kind == "mps":
        raise UsageError("There is no plan yet for --device mps.", fix="Plan for the CPU of that machine with --device cpu.")
    if hardware.card is None and kind == "cuda":
        raise UsageError(
            f"--device {job.device} is planned for a machine without a GPU.",
            fix="Say which GPU there will be with --card rtx4090 or --gpu 24GiB, or leave --device away.",
        )
    if kind == "cpu":
        return replace(hardware, card=None, num_cards=0, cards_each=1, num_nodes=1)
    is_together = isinstance(job, SampleConfig) or (isinstance(job, DistillConfig) and job.strategy in SPREAD)
    if not is_together:
        return replace(hardware, cards_each=1)
    num_nodes = 1 if isinstance(job, SampleConfig) else hardware.num_nodes
    cards_each = max(hardware.num_cards, hardware.cards_each)
    return replace(hardware, num_cards=min(hardware.num_cards, 1), cards_each=cards_each, num_nodes=num_nodes)


def _rate_of_files(model: Path) -> float | None:
    files = [model] if model.is_file() else list(model.rglob("*.safetensors")) if model.is_dir() else []
    return rate_of_largest(files) if files else None


def model_of(job: Any) -> str:
    """Return the model that a job is about."""
    source = getattr(job, "teacher_path", None) or getattr(job, "model", None)
    if not source:
        raise UsageError("There is nothing to plan without a model.", fix="Name one, such as --model wan2.2-5b.")
    return str(source)
