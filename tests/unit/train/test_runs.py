"""Where a run may go on, told before anything is loaded, for every training alike."""

import pytest
import torch

from wandistiller.checkpoint.training_state import TrainingState, TrainingStates, written_at
from wandistiller.config.distill import DistillConfig
from wandistiller.config.train import TrainConfig
from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.data.buckets import Bucket
from wandistiller.distributed.ranks import Ranks
from wandistiller.errors import CheckpointError, UsageError
from wandistiller.memory.monitor import Monitor
from wandistiller.train.optimisation import OptimiserOptions
from wandistiller.train.runs import Run, find_state, prepare_device


def states_with(folder, *steps):
    states = TrainingStates(folder / "states", keep=9)
    for step in steps:
        states.save(TrainingState(step, {"x": torch.zeros(1)}, {}))
    return states


@pytest.mark.parametrize("config_class", [DistillConfig, TrainConfig, TrainVaeConfig])
def test_every_training_looks_before_it_loads(config_class, tmp_path):
    states_with(tmp_path, 3)
    with pytest.raises(UsageError, match="holds a training already, up to step-00000003"):
        prepare_device(config_class(output_dir=tmp_path, device="cpu"))
    with pytest.raises(UsageError, match="--resume nowhere does not exist"):
        prepare_device(config_class(output_dir=tmp_path / "new", resume="nowhere", device="cpu"))
    assert prepare_device(config_class(output_dir=tmp_path, resume="auto", device="cpu")).type == "cpu"


def test_the_state_to_go_on_from(tmp_path):
    empty, states = TrainingStates(tmp_path / "none" / "states", keep=1), states_with(tmp_path, 1, 2)
    assert find_state(None, empty) is None and find_state("auto", empty) is None
    assert find_state("auto", states) == tmp_path / "states" / "step-00000002"
    assert find_state(str(tmp_path / "states" / "step-00000001"), empty) == tmp_path / "states" / "step-00000001"
    with pytest.raises(UsageError, match="is newer than"):
        find_state(str(tmp_path / "states" / "step-00000001"), states)
    other = states_with(tmp_path / "other", 5)
    with pytest.raises(UsageError, match="other holds another training, step-00000005") as caught:
        find_state(str(tmp_path / "states" / "step-00000002"), other)
    assert "two histories" in caught.value.why
    (tmp_path / "half").mkdir()
    with pytest.raises(CheckpointError, match="not a complete training state"):
        find_state(str(tmp_path / "half"), empty)


@pytest.mark.parametrize("name", ["model", "lora", "vae"])
@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_result_whose_states_are_gone_is_not_replaced(tmp_path, name, resume):
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=f"{name} stands there already"):
        find_state(resume, TrainingStates(tmp_path / "states", keep=1))
    states = states_with(tmp_path, 2)
    assert find_state("auto", states) == tmp_path / "states" / "step-00000002"


def test_a_job_that_was_started_again_goes_on_from_its_own_states_alone(tmp_path):
    """What lay in the folder before is as forbidden as at the start, and a state that was named counts until one is saved."""
    empty, states = TrainingStates(tmp_path / "none" / "states", keep=1), states_with(tmp_path, 1, 2)
    first, second = (str(tmp_path / "states" / f"step-0000000{step}") for step in (1, 2))
    before, after = written_at(tmp_path / "states" / "step-00000002") - 9, written_at(tmp_path / "states" / "step-00000002") + 9
    assert find_state(None, states, restarted=before) == tmp_path / "states" / "step-00000002"
    assert find_state(first, states, restarted=before) == tmp_path / "states" / "step-00000002"
    with pytest.raises(UsageError, match="holds a training already"):
        find_state(None, states, restarted=after)
    assert find_state(None, empty, restarted=after) is None
    assert find_state(second, empty, restarted=after) == tmp_path / "states" / "step-00000002"


def test_what_is_asked_of_the_optimiser_reaches_it(tmp_path):
    config = TrainConfig(
        output_dir=tmp_path,
        num_epochs=3,
        batch_size=2,
        gradient_accumulation=2,
        learning_rate=0.5,
        weight_decay=0.25,
        clip_norm=0.75,
        lr_schedule="linear",
        warmup_steps=4,
        seed=9,
    )
    device = torch.device("cpu")
    # Of 8 samples in two shapes: batches of 2, 2 and 1, and of 2 and 1, in each of 3 epochs: 15 batches, two a step.
    buckets = [Bucket(1, 32, 32)] * 5 + [Bucket(5, 32, 32)] * 3
    run = Run.over(buckets, config, device, "no", Ranks(), Monitor([device], lambda failure: []))
    assert run.num_steps == 8
    assert run.optimiser_options(betas=(0.8, 0.9)) == OptimiserOptions(
        rate=0.5,
        weight_decay=0.25,
        betas=(0.8, 0.9),
        clip_norm=0.75,
        schedule="linear",
        warmup_steps=4,
        num_steps=8,
        seed=9,
    )
