"""``wandistiller distill``: a smaller Wan that draws what a large one draws."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from wandistiller.config.placement import SPREAD, parse_resident
from wandistiller.config.training import check_least, check_shares
from wandistiller.config.transformer_training import TransformerTrainingConfig
from wandistiller.errors import UsageError

StrategyName = Literal["auto", "gpu", "gpu0", "sharded", "offload", "disk", "cpu", "balanced", "sequential", "custom"]
NoisyName = Literal["auto", "dataset", "trajectories", "noise"]


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TransformerTrainingConfig):
    """Distil a Wan teacher into a smaller student that draws what the teacher draws.

    The student starts from the teacher's own layers and learns the teacher's velocities where sampling will take it: on a data
    set's latents, or, from prompts alone, on the teacher's own trajectories. The result is a diffusers pipeline.
    """

    command: ClassVar[str] = "distill"

    preset: Literal["one-24gb", "one-48gb", "two-24gb", "four-40gb", "no-gpu"] | None = None
    """Settings for a machine: one card of 24 GB, one of 48 GB or more, two of 24 GB, four of 40 GB under torchrun, or none.
    Flags and --config change any of them."""

    teacher_path: str | None = None
    """The teacher: a diffusers folder, a hub id (owner/name), or 'tiny', the one in the box. Its encoders prepare
    the data."""

    student_config: Path | None = None
    """JSON or TOML file that describes the student: num_layers, num_attention_heads, ffn_dim, ... or depth, hidden_size,
    num_heads, ...; what it does not say is the teacher's. Default: every second layer of the teacher."""

    student_init: Literal["teacher", "random"] = "teacher"
    """Start from the teacher's layers, or from random weights, which takes far longer."""

    layer_choice: Literal["spread", "importance"] = "spread"
    """Which of the teacher's layers a student of fewer has: evenly spread, or those that change the most of what goes through
    them, which the teacher is asked about before training. The first and the last are always among them."""

    allow_low_coverage: bool = False
    """Go on although less than half of the student's weights could be taken from the teacher."""

    data_path: str | None = None
    """Prompts: a UTF-8 text file with one a line, or captions of the procedural world, as world:COUNT:FRAMESxHEIGHTxWIDTH.
    Then noisy latents come from the teacher's own trajectories."""

    num_prompts: int | None = None
    """How many of the prompts are used, from the first. Default: as many as the steps need, or all."""

    noisy_latents: NoisyName = "auto"
    """Where the student is asked: 'dataset' (noise on real latents, with --dataset-path), 'trajectories' (the way that the
    teacher takes from noise to a picture, with --data-path), or 'noise' (pure noise at every sigma: a baseline, not
    recommended, as sampling never asks there). 'auto' follows from what is given."""

    output_weight: float = 1.0
    """Weight of the teacher's velocity as the target."""

    feature_weight: float = 0.0
    """Weight of matching what the teacher's blocks compute; helps a student of few layers early on."""

    guidance_weight: float = 0.0
    """Weight of the teacher's guided velocity as the target: the student then draws with one pass a step."""

    data_weight: float = 0.0
    """Weight of flow matching on the data set's own latents."""

    guidance_scale: float | None = None
    """Guidance of the teacher, on its trajectories and for --guidance-weight. Default: what such models are usually drawn with,
    so that trajectories lie where sampling will go."""

    caption_dropout: float | None = None
    """Share of questions that are asked without a caption, so that guidance can be used when the student draws. Default: 0.1,
    and 0 with --guidance-weight, whose student draws without guidance."""

    rollout_steps: int = 20
    """Solver steps of a trajectory; the student is asked at each."""

    rollout_batch: int = 16
    """Trajectories computed together."""

    rollouts_per_prompt: int = 1
    """Trajectories of each prompt, each from other noise: more of them are more to learn from, at the teacher's expense."""

    cache_teacher: bool = False
    """Ask the teacher once about the data set and keep what it says on disk, so that training needs no teacher in memory.
    Trajectories are always kept."""

    refresh_every: int = 0
    """Steps after which trajectories, or the answers of --cache-teacher, are replaced by others from new noise; 0 never does.
    The teacher is loaded again for that, beside the student, and asked as much as at the start."""

    teacher_draws: int = 4
    """With --cache-teacher: noise and sigmas that are drawn for each sample of the data set."""

    teacher_device_strategy: StrategyName = "auto"
    """Where the teacher lives: 'gpu' (on each card), 'gpu0' (on rank 0, which answers for all), 'sharded' (a slice on each
    rank's card, blocks brought together ahead of their use), 'offload' (host memory, streamed), 'disk' (streamed from its
    files), 'cpu' (computes there), 'balanced', 'sequential' or 'custom' (over several GPUs), or 'auto' (the fastest that
    fits)."""

    teacher_on_cpu: bool = False
    """The same as --teacher-device-strategy cpu."""

    balanced_teacher: bool = False
    """The same as --teacher-device-strategy balanced."""

    teacher_device_map: Path | None = None
    """Map of modules to devices for 'custom', a JSON or TOML file."""

    teacher_resident: str = "auto"
    """With 'offload': blocks that stay on the card, or 'auto' for as many as the bus needs."""

    teacher_context_parallel: int = 1
    """Under torchrun: how many ranks compute the teacher's answers together, each with a share of a clip's tokens, so that it
    can be asked about longer clips. 1: each rank asks by itself."""

    expert_steps: int = 100
    """With a teacher of two experts that is asked while training: steps before the other one takes over. Each change loads
    one of them, so few changes are faster."""

    teacher_dtype: Literal["auto", "float32", "float16", "bfloat16", "float8"] = "auto"
    """Precision of the teacher. float8 stores its blocks in 8 bits and computes in bfloat16, with 'offload'."""

    output_dir: Path = Path("runs/distill")
    """Folder of the run: states to resume from, samples, metrics.jsonl, TensorBoard files, and the student at the end."""

    learning_rate: float = 1e-4
    """Step size after the warm-up: 1e-4 is usual for a student that starts from its teacher."""

    def check(self) -> None:
        super().check()
        if self.teacher_path is None:
            raise UsageError("--teacher-path is missing.", fix="Say which model to distil, such as --teacher-path tiny.")
        if self.data_path is None and self.dataset_path is None:
            raise UsageError(
                "Neither --data-path nor --dataset-path was given.",
                fix="Give a file of prompts with --data-path, or pictures and clips with --dataset-path.",
            )
        if self.data_path is not None and self.dataset_path is not None:
            raise UsageError("--data-path and --dataset-path were both given.", fix="Choose prompts or a data set.")
        self._check_source()
        if not self.output_weight and not self.guidance_weight and not self.feature_weight and not self.data_weight:
            raise UsageError("All weights of objectives are 0.", fix="Give --output-weight 1.")
        if self.guidance_weight and self.guidance_scale is not None and self.guidance_scale <= 1:
            raise UsageError("--guidance-weight needs guidance.", fix="Give a --guidance-scale above 1.")
        if self.output_weight and self.guidance_weight and (self.is_stored):
            raise UsageError(
                "What is kept of the teacher is one velocity, with guidance or without.",
                fix="Add --output-weight 0 to learn the guided one.",
            )
        if self.cache_teacher and not (self.output_weight or self.guidance_weight or self.feature_weight):
            raise UsageError(
                "--cache-teacher keeps what the teacher says, and no objective learns from it.",
                fix="Leave it away, or give --output-weight 1.",
            )
        if self.feature_weight and self.is_stored:
            raise UsageError(
                "--feature-weight needs the teacher in memory.",
                why="hidden states are too large to keep on disk.",
                fix="Use --dataset-path without --cache-teacher.",
            )
        if self.feature_weight and self.cuda_graphs:
            raise UsageError("--feature-weight does not go with --cuda-graphs.", fix="Leave one of them away.")
        self._check_strategy()
        self._check_layer_choice()
        check_least(
            ("--num-prompts", self.num_prompts, 1),
            ("--output-weight", self.output_weight, 0),
            ("--feature-weight", self.feature_weight, 0),
            ("--guidance-weight", self.guidance_weight, 0),
            ("--data-weight", self.data_weight, 0),
            ("--guidance-scale", self.guidance_scale, 0),
            ("--rollout-steps", self.rollout_steps, 1),
            ("--rollout-batch", self.rollout_batch, 1),
            ("--rollouts-per-prompt", self.rollouts_per_prompt, 1),
            ("--expert-steps", self.expert_steps, 1),
            ("--teacher-context-parallel", self.teacher_context_parallel, 1),
            ("--teacher-draws", self.teacher_draws, 1),
            ("--refresh-every", self.refresh_every, 0),
        )
        check_shares(("--caption-dropout", self.empty_share))
        parse_resident(self.teacher_resident, "--teacher-resident")

    def _check_strategy(self) -> None:
        name = self.strategy
        if (self.teacher_on_cpu and name != "cpu") or (self.balanced_teacher and name != "balanced"):
            raise UsageError("Two strategies were given for the teacher.", fix="Choose one.")
        if name == "custom" and self.teacher_device_map is None:
            raise UsageError("'custom' needs a map.", fix="Give --teacher-device-map with a JSON or TOML file.")
        if name != "custom" and self.teacher_device_map is not None:
            raise UsageError(
                f"--teacher-device-map is not used by --teacher-device-strategy {name}.",
                fix="Add --teacher-device-strategy custom, or leave the map away.",
            )
        if name != "offload" and self.teacher_resident != "auto":
            raise UsageError(
                f"--teacher-resident is not used by --teacher-device-strategy {name}.",
                fix="Add --teacher-device-strategy offload, or leave it away.",
            )
        if self.teacher_context_parallel > 1 and name in ("gpu0", *SPREAD):
            raise UsageError(
                f"--teacher-context-parallel does not go with --teacher-device-strategy {name}.",
                why="each rank computes with a teacher on its own card.",
                fix="Take gpu, sharded, offload or disk, or leave one of them away.",
            )
        if self.teacher_dtype == "float8" and name != "offload":
            raise UsageError(
                "float8 is how offloaded weights are stored.", fix="Add --teacher-device-strategy offload, or take bfloat16."
            )

    def _check_layer_choice(self) -> None:
        if self.layer_choice == "spread":
            return
        if self.student_init == "random":
            raise UsageError("--layer-choice is for a student of the teacher's layers.", fix="Use --student-init teacher.")
        if not self.output_weight and not self.guidance_weight and not self.feature_weight:
            raise UsageError("--layer-choice importance asks the teacher, which this run does not have.", fix="Take spread.")

    def _check_source(self) -> None:
        source = self.noisy_source
        if source == "dataset" and self.dataset_path is None:
            raise UsageError("--noisy-latents dataset needs a data set.", fix="Give --dataset-path.")
        if source in ("trajectories", "noise") and self.data_path is None:
            raise UsageError(f"--noisy-latents {source} needs prompts.", fix="Give --data-path.")
        if self.data_weight and source != "dataset":
            raise UsageError("--data-weight needs a data set.", fix="Give --dataset-path.")
        if self.data_path is not None and len(self.frames) > 1:
            raise UsageError(
                f"--frames {' '.join(map(str, self.frames))} were given for prompts.",
                why="all prompts are drawn with one number of frames.",
                fix=f"Give one, such as --frames {self.frames[-1]}.",
            )
        if self.cache_teacher and source == "noise":
            raise UsageError("--cache-teacher is for a data set.", fix="Leave it away.")
        if self.refresh_every and not self.is_stored:
            raise UsageError(
                "--refresh-every is for what is kept of the teacher.",
                why="it is asked anew in every step anyway.",
                fix="Leave it away, or add --cache-teacher.",
            )

    @property
    def guidance(self) -> float:
        """The teacher's guidance once it is settled; before, none."""
        return 1.0 if self.guidance_scale is None else self.guidance_scale

    def with_guidance(self, usual: float) -> DistillConfig:
        """Return the configuration with the teacher's guidance, by the flag or as usual; 1 where nothing is guided."""
        is_guided = self.noisy_source == "trajectories" or self.guidance_weight > 0
        config = replace(self, guidance_scale=usual if is_guided else 1.0) if self.guidance_scale is None else self
        config.check()
        return config

    @property
    def empty_share(self) -> float:
        """The share of questions without a caption."""
        if self.caption_dropout is not None:
            return self.caption_dropout
        return 0.0 if self.guidance_weight else 0.1

    @property
    def noisy_source(self) -> str:
        """Where noisy latents come from."""
        if self.noisy_latents != "auto":
            return self.noisy_latents
        return "dataset" if self.dataset_path is not None else "trajectories"

    @property
    def uses_solver(self) -> bool:
        """Whether anything is drawn, by the student or by the teacher."""
        return super().uses_solver or self.noisy_source == "trajectories"

    @property
    def is_stored(self) -> bool:
        """Whether the teacher's answers are on disk before the first step."""
        return self.noisy_source == "trajectories" or self.cache_teacher

    @property
    def asks_while_training(self) -> bool:
        """Whether the teacher has to have room beside the student, in every step or now and then."""
        return not self.is_stored or self.refresh_every > 0

    @property
    def strategy(self) -> str:
        """Where the teacher lives, by whichever flag it was asked for."""
        if self.teacher_device_strategy == "auto":
            return "cpu" if self.teacher_on_cpu else "balanced" if self.balanced_teacher else "auto"
        return self.teacher_device_strategy
