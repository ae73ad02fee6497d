import dataclasses
import itertools
import math
import typing
from pathlib import Path

import pytest

from wandistiller.config.distill import DistillConfig
from wandistiller.config.encode import EncodeConfig
from wandistiller.config.report import ReportConfig
from wandistiller.config.sample import SampleConfig
from wandistiller.config.toml_file import read_config, write_config
from wandistiller.config.train import TrainConfig
from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.errors import UsageError
from wandistiller.flow.sigma import SigmaDistribution

DATA = {"model": "tiny", "dataset_path": "world"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beta1": 1.0}, "--beta1 1.0 is out of range"),
        ({"beta2": 1.0}, "--beta2 1.0 is out of range"),
        ({"sigma_shift": 0.0}, "--sigma-shift 0.0 is not between"),
        ({"sigma_shift": -1.0}, "--sigma-shift -1.0 is not between"),
        ({"lora_rank": 4, "lora_alpha": 0}, "--lora-alpha 0 is out of range"),
        ({"lora_alpha": 8}, "--lora-alpha changes nothing without --lora-rank"),
        ({"lora_rank": 8, "lora_targets": ()}, "--lora-targets names no layers"),
        ({"sigma_std": 250.0}, "--sigma-std 250.0 is not between 0.001 and 10"),
        ({"sigma_mean": 1e9}, "--sigma-mean 1000000000.0 is not between -20 and 20"),
        ({"lora_targets": ("to_q",)}, "--lora-targets changes nothing without --lora-rank"),
        ({"rounding": "stochastic"}, "--rounding changes nothing without --weights-dtype bfloat16"),
        (
            {"rounding": "stochastic", "weights_dtype": "bfloat16", "placement": "offload"},
            "not go with --placement offload",
        ),
        ({"mixed_precision": "fp16", "placement": "offload"}, "trains all weights in bf16 or float32"),
        ({"ema_decay": 0.99}, "--ema-decay changes nothing without --use-ema"),
        ({"optimizer": "adafactor", "beta2": 0.95}, "--beta2 changes nothing without --optimizer adamw"),
        (
            {"sigma_sampling": "uniform", "sigma_mean": 1.0},
            "--sigma-mean changes nothing without --sigma-sampling",
        ),
        ({"sample_prompts": ("a",)}, "--sample-prompts changes nothing without --sample-every"),
        ({"validate_every": 5}, "--validate-every changes nothing without --held-out"),
        ({"resident": "3"}, "--resident changes nothing without --placement offload"),
        ({"vae_gradient_checkpointing": True}, r"without --pixel-loss-weight 0\.1 or the like"),
    ],
)
def test_what_does_not_go_together_in_train(fields, message):
    with pytest.raises(UsageError, match=message):
        TrainConfig(**DATA, **fields).check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gan_training": True, "gan_start": -1}, "--gan-start -1 is out of range"),
        ({"gan_start": 4}, "--gan-start changes nothing without --gan-training"),
        ({"lambda_rec": 0.0}, "--lambda-rec 0 was given without LPIPS"),
        ({"lambda_rec": 0.0, "use_lpips": True, "lambda_lpips": 0.0}, "--lambda-rec 0 and --lambda-lpips 0 were both given"),
        (
            {"lambda_rec": 0.0, "use_lpips": True, "high_frequency_weight": 1.0},
            "--high-frequency-weight changes nothing without --lambda-rec",
        ),
        ({"lambda_adv": 3.0}, "--lambda-adv changes nothing without --gan-training"),
        ({"critic_learning_rate": 1e-4}, "--critic-learning-rate changes nothing without --gan-training"),
        ({"lambda_lpips": 2.0}, "--lambda-lpips changes nothing without --use-lpips"),
        ({"lpips_checkpointing": True}, "--lpips-checkpointing changes nothing without --use-lpips"),
    ],
)
def test_what_does_not_go_together_in_train_vae(fields, message):
    with pytest.raises(UsageError, match=message):
        TrainVaeConfig(**DATA, **fields).check()


WHOLE = (
    TrainConfig(**DATA),
    TrainVaeConfig(**DATA),
    DistillConfig(teacher_path="tiny", data_path="world"),
    EncodeConfig(**DATA),
    SampleConfig(model="tiny", prompt=("a",)),
    ReportConfig(run=Path("runs")),
)


@pytest.mark.parametrize("config", WHOLE, ids=lambda config: type(config).__name__)
def test_no_command_takes_numbers_that_are_not_finite(config):
    config.check()
    hints = typing.get_type_hints(type(config))
    names = [name for name, hint in hints.items() if hint is float or float in typing.get_args(hint)]
    assert names
    for name, value in itertools.product(names, (math.nan, math.inf, -math.inf)):
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} {value} is not a finite number"):
            dataclasses.replace(config, **{name: value}).check()


@pytest.mark.parametrize("config", WHOLE, ids=lambda config: type(config).__name__)
@pytest.mark.parametrize("seed", [-1, 10**23])
def test_no_command_takes_a_seed_that_is_none(config, seed):
    if hasattr(config, "seed"):
        with pytest.raises(UsageError, match=f"--seed {seed} is out of range"):
            dataclasses.replace(config, seed=seed).check()


@pytest.mark.parametrize(("mean", "std"), [(-20.0, 10.0), (20.0, 10.0), (20.0, 0.001), (-20.0, 0.001)])
def test_every_sigma_that_may_be_asked_for_can_be_drawn(mean, std):
    TrainConfig(**DATA, sigma_mean=mean, sigma_std=std).check()
    sigmas = SigmaDistribution(shape="logit_normal", mean=mean, std=std)
    for u in (0.0, math.ulp(0.0), 1e-16, 0.5, 1 - 2**-53, 1.0):
        assert 0 <= sigmas.quantile(u) <= 1


@pytest.mark.parametrize("config", [TrainConfig(**DATA), TrainVaeConfig(**DATA)])
def test_what_a_run_writes_of_itself_can_be_given_again(tmp_path, config):
    """It has every setting, also those that change nothing."""
    write_config(tmp_path / "run.toml", config, config.command)
    read_config(tmp_path / "run.toml", type(config), config.command, [config.command]).check()


@pytest.mark.parametrize(
    ("fields", "share"), [({}, 0.1), ({"guidance_weight": 1.0}, 0.0), ({"guidance_weight": 1.0, "caption_dropout": 0.3}, 0.3)]
)
def test_a_student_that_will_be_guided_learns_the_empty_caption(fields, share):
    assert DistillConfig(**fields).empty_share == share


@pytest.mark.parametrize(
    ("fields", "guidance"),
    [
        ({"data_path": "a.txt"}, 5.0),
        ({"data_path": "a.txt", "guidance_scale": 2.0}, 2.0),
        ({"dataset_path": "a"}, 1.0),
        ({"dataset_path": "a", "guidance_weight": 1.0}, 5.0),
    ],
)
def test_a_teacher_has_the_usual_guidance_where_it_is_guided(fields, guidance):
    assert DistillConfig(teacher_path="a", **fields).with_guidance(5.0).guidance == guidance


def test_guidance_that_is_none_is_not_learnt():
    with pytest.raises(UsageError, match="--guidance-weight needs guidance"):
        DistillConfig(teacher_path="a", dataset_path="a", guidance_weight=1.0).with_guidance(1.0)
