import pytest

from wandistiller.config.toml_file import read_config, write_config
from wandistiller.config.train import TrainConfig
from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.errors import UsageError

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


@pytest.mark.parametrize("config", [TrainConfig(**DATA), TrainVaeConfig(**DATA)])
def test_what_a_run_writes_of_itself_can_be_given_again(tmp_path, config):
    """It has every setting, also those that change nothing."""
    write_config(tmp_path / "run.toml", config, config.command)
    read_config(tmp_path / "run.toml", type(config), config.command, [config.command]).check()
