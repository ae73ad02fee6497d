"""What whole jobs are foreseen to take: phases, disks and ranks, from flags alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from wandistiller.cli.main import main
from wandistiller.config.distill import DistillConfig
from wandistiller.config.sample import SampleConfig
from wandistiller.config.train import TrainConfig
from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.memory.estimates import Phase
from wandistiller.memory.hardware import described
from wandistiller.memory.out_of_memory import Failure
from wandistiller.memory.tape import NUM_BLOCKS
from wandistiller.models.shapes import Shapes, find_shapes
from wandistiller.models.sizes import SIZES, TINY_VAE
from wandistiller.plan import run
from wandistiller.plan.trial import Measured
from wandistiller.plan.verify import Comparison
from wandistiller.sample.prediction import denoising_work, predict_sample
from wandistiller.train.prediction import asking_work, distill_work, predict_distill, predict_train
from wandistiller.train.remedies import find_distill_remedies
from wandistiller.train.vae_prediction import predict_train_vae
from wandistiller.units import Bytes

TINY = SIZES["tiny"].transformer
SHAPES = Shapes.of(TINY_VAE, TINY)
CARD = described(card="rtx4090", host_memory=Bytes(2**36))
SIZE = {"width": 64, "height": 64, "frames": (1,), "max_aspect": 1.0}
COUNT = sum(each.numel() for each in distill_work(DistillConfig(), SHAPES, TINY, CARD, (1, 64, 64)).student.model.parameters())


def train(**options):
    return predict_train(TrainConfig(model="tiny", dataset_path="clips", **SIZE, **options), SHAPES, CARD)


def distill(hardware=CARD, **options):
    return predict_distill(DistillConfig(teacher_path="tiny", **SIZE, **options), SHAPES, hardware)


def on_disk(estimate):
    return {f"{item.role} {item.kind}": item.size for item in estimate.disk}


def test_states_are_as_large_as_the_optimiser_makes_them():
    """The one that is kept, and the next while it is being written."""
    whole, short = (on_disk(train(optimizer=name, keep=1))["student states"] / 2 for name in ("adamw", "adamw8bit"))
    assert whole == pytest.approx(12 * COUNT, rel=0.01)
    # Two bytes for the moments, but for small tensors.
    assert 6 * COUNT < short < 7 * COUNT


def test_caches_are_counted():
    found = on_disk(distill(dataset_path="clips", cache_teacher=True, teacher_draws=3))
    latents = 8 * 8 * 8
    assert found["latents cache for 1000 samples"] == 4 * 1000 * latents
    assert found["text cache for 1000 captions of full length"] == 2 * 1000 * 512 * TINY["text_dim"]
    assert found["teacher records for 1000 samples"] == 2 * 2 * 3 * 1000 * latents, "two latents in 16 bits"
    anew = on_disk(distill(dataset_path="clips", cache_teacher=True, teacher_draws=3, refresh_every=10))
    of = "teacher records for 1000 samples"
    assert anew[of] == 3 * found[of], "the first round, the last one, and the next while it is made"


def test_a_vae_leaves_its_average_and_itself():
    plain, averaged = (
        on_disk(predict_train_vae(TrainVaeConfig(keep=1, use_ema=ema, **SIZE), SHAPES, CARD)) for ema in (False, True)
    )
    assert averaged["vae states"] - plain["vae states"] == 2 * plain["vae result"] == plain["vae states"] / 3


@pytest.mark.parametrize(
    ("weights", "passes"),
    [
        ({}, 1),
        ({"guidance_weight": 1.0, "output_weight": 0.0, "guidance_scale": 3.0}, 2),
        ({"guidance_weight": 1.0, "feature_weight": 1.0, "guidance_scale": 3.0}, 2),
        ({"guidance_scale": 3.0}, 1),
        ({"output_weight": 0.0, "data_weight": 1.0}, 0),
    ],
)
def test_the_teacher_is_asked_as_often_as_the_objectives_want(weights, passes):
    config = DistillConfig(teacher_path="tiny", dataset_path="clips", **SIZE, **weights)
    work = distill_work(config, SHAPES, TINY, CARD, (1, 64, 64))
    assert (work.teacher_passes, work.teacher is not None) == (passes, passes > 0)


@pytest.mark.parametrize(
    ("together", "slices"),
    [({}, 4), ({"parallel": "fsdp"}, 8), ({"parallel": "hsdp"}, 4), ({"parallel": "hsdp", "shard_size": 2}, 2)],
)
def test_ranks_that_share_the_student_share_the_teacher_and_else_those_of_a_machine(together, slices):
    machines = described(card="rtx4090", num_cards=4, num_nodes=2, host_memory=Bytes(2**36))
    config = DistillConfig(dataset_path="clips", teacher_device_strategy="sharded", **together)
    assert distill_work(config, SHAPES, TINY, machines, (1, 64, 64)).teacher_slices == slices


def test_one_teacher_answers_one_rank_after_the_other():
    machines = described(card="rtx4090", num_cards=4, host_memory=Bytes(2**36))
    seconds = {}
    for strategy in ("gpu", "gpu0"):
        work = distill_work(
            DistillConfig(dataset_path="clips", teacher_device_strategy=strategy, **SIZE), SHAPES, TINY, machines, (1, 64, 64)
        )
        seconds[strategy] = work.seconds(machines)
    answer = seconds["gpu"] - replace(work, teacher=None).seconds(machines)
    assert seconds["gpu0"] - seconds["gpu"] == pytest.approx(3 * answer) and answer > 0


@pytest.mark.parametrize(("scale", "passes"), [(1.0, 1), (5.0, 2), (None, 1)], ids=["plain", "guided", "as is usual"])
def test_guidance_takes_two_passes(scale, passes):
    config = SampleConfig(model="tiny", prompt=("a",), width=64, height=64, frames=1, cfg_scale=scale)
    assert denoising_work(config, SHAPES, CARD).passes == passes


def test_ranks_of_a_machine_take_host_memory_each():
    eight = described(card="rtx4090", num_cards=8, host_memory=Bytes(2**36))
    options = {"dataset_path": "clips", "activation_policy": "full", "activations_to_host": True, "batch_size": 512}
    options |= {"teacher_device_strategy": "gpu"}
    one, all_ranks = distill(**options), distill(eight, **options)
    assert one.host > 0 and all_ranks.host == 8 * one.host


def test_a_first_frame_is_encoded_and_looked_at():
    shapes = Shapes.of(TINY_VAE, {**TINY, "in_channels": 20, "image_dim": 16})
    config = SampleConfig(model="tiny", prompt=("a",), image="x.png", width=64, height=64, frames=5)
    names = [phase.name for phase in predict_sample(config, shapes, CARD).phases]
    assert names[:2] == ["encoding the picture", "looking at the picture"]


def test_a_first_frame_gives_each_token_its_own_modulation():
    options = {"model": "tiny", "prompt": ("a",), "width": 64, "height": 64, "frames": 81, "output": Path("a.mp4")}
    without, given = (denoising_work(SampleConfig(**options, image=image), SHAPES, CARD) for image in (None, "x.png"))
    plain, by_token = (work.phase(CARD, name="denoising") for work in (without, given))
    values = 6 * given.use.width * given.use.num_tokens
    # For all tokens, in 16 bits, and inside a block once more in float32 with the block's own added.
    assert by_token.peak - plain.peak > values * (2 + 4)


def test_what_clip_sees_of_a_picture_is_attended_to():
    shapes = Shapes.of(TINY_VAE, {**TINY, "in_channels": 20, "image_dim": 16, "added_kv_proj_dim": 96})
    work = denoising_work(SampleConfig(model="tiny", prompt=("a",), image="x.png", frames=5), shapes, CARD)
    assert (work.use.image_tokens, work.use.has_token_times) == (257, False)
    attended, unseen = (
        sum(
            kernel.flops * times for part in use.tape.parts for kernel, times in part.work.items() if kernel.kind == "attention"
        )
        for use in (work.use, work.use.changed(image_tokens=0))
    )
    # Two products of matrices for each token of the clip and each of the picture, in every block.
    blocks = min(work.use.num_blocks, NUM_BLOCKS)
    assert attended - unseen == 4 * work.use.num_tokens * 257 * work.use.width * blocks


def test_a_job_is_told_by_its_steps_however_few_there_are():
    config = SampleConfig(model="tiny", prompt=("a",), width=64, height=64, frames=17, steps=1, output=Path("a.mp4"))
    found = predict_sample(config, SHAPES, CARD)
    seconds = {phase.name: phase.seconds for phase in found.phases}
    assert seconds["decoding"] > seconds["denoising"] == found.step_seconds


def test_a_smaller_batch_of_trajectories_is_predicted():
    config = DistillConfig(teacher_path="tiny", data_path="prompts.txt", rollout_batch=64, **SIZE)
    failure = Failure("device", Bytes(10**6), role="teacher", in_use=Bytes(10**9))
    found = {name: remedy for remedy in find_distill_remedies(config, SHAPES, TINY, failure) for name in remedy.changes}
    whole, half = (
        predict_distill(config_with, SHAPES, described(gpu=Bytes(2**36), num_cards=0)).phases[-2].reserved
        for config_with in (config, DistillConfig(teacher_path="tiny", data_path="prompts.txt", rollout_batch=32, **SIZE))
    )
    assert found["rollout_batch"].saves == whole - half > 0


def test_what_was_measured_is_in_the_json(capsys, monkeypatch):
    phase = Phase(name="training", peak=Bytes(10), reserved=Bytes(20), seconds=1.0)
    found = [Comparison(phase, Measured(Bytes(11), Bytes(21), Bytes(0), 2.0))]
    monkeypatch.setattr(run, "check_can_verify", lambda: None)
    monkeypatch.setattr(run, "verify", lambda plan: found)
    flags = ["--model", "wan2.1-1.3b", "--frames", "1", "--width", "64", "--height", "64", "--lora-rank", "4", "--card", "h200"]
    assert main(["plan", "train", *flags, "--placement", "gpu", "--activation-policy", "full", "--verify", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert measured[0]["reserved"] == [20, 21] and measured[0]["seconds"] == [1.0, 2.0]


def test_a_text_encoder_takes_what_it_is_traced_to_take():
    """At least the scores of all heads in float32, which it makes; and streamed, far less of the card than its weights."""
    shapes = Shapes(transformers=[TINY], vae=TINY_VAE, text_encoder=_ENCODER, size=SIZES["tiny"])
    config = SampleConfig(model="tiny", prompt=("a",), width=64, height=64, frames=1, dtype="bfloat16")
    whole, streamed = (
        predict_sample(config, shapes, hardware).phases[0]
        for hardware in (CARD, described(gpu=Bytes.parse("2.6GiB"), host_memory=Bytes(2**36)))
    )
    working = {item.kind: item.size for item in whole.items if item.role == "text encoder"}["working memory"]
    assert working > 4 * _ENCODER["num_heads"] * 512**2
    assert streamed.total("page-locked") > 0 and streamed.reserved < whole.reserved


_ENCODER = {
    "d_model": 1024,
    "d_ff": 4096,
    "d_kv": 64,
    "num_heads": 16,
    "num_layers": 24,
    "vocab_size": 250000,
    "feed_forward_proj": "gated-gelu",
}


def test_all_prompts_of_a_sampling_are_there_at_once():
    """They take each step together: noise, latents and velocities of every sample, and its text."""
    one, eight = (
        denoising_work(SampleConfig(model="tiny", prompt=("a",) * count, batch_size=2), SHAPES, CARD) for count in (1, 8)
    )
    text = 512 * TINY["text_dim"] * 2
    assert sum(eight.held) == 8 * sum(one.held) + 8 * (1 + 2) * text
    assert denoising_work(SampleConfig(model="tiny", batch_size=2), SHAPES, CARD, num_prompts=8).held == eight.held


def test_a_text_encoder_is_where_the_transformer_is_unless_auto_has_chosen_that():
    """The 11 GiB of Wan's have no room on a card of 8 GB, on which the small transformer has."""
    small, shapes = described(card="rtx4060", host_memory=Bytes(2**36)), find_shapes("wan2.1-1.3b")

    def text(placement, **options):
        return predict_sample(SampleConfig(placement=placement, prompt=("a",)), shapes, small, **options).phases[0]

    assert text("gpu").reserved > small.room > text("gpu", is_automatic=True).reserved
    assert text("auto").reserved == text("gpu", is_automatic=True).reserved
    assert text("cpu").reserved < 2**27 and text("cpu").on_host > 10 * 2**30


def test_a_teacher_that_is_asked_along_trajectories_has_a_solver_beside_it(tmp_path):
    (tmp_path / "prompts.txt").write_text("a\n")
    config = DistillConfig(teacher_path="tiny", data_path=str(tmp_path / "prompts.txt"), rollout_batch=4, **SIZE)
    work = asking_work(config, SHAPES, CARD, (1, 64, 64))
    assert sum(work.held) == 6 * 4 * 4 * 8 * 8 * 8 + 4 * 4 * 512 * TINY["text_dim"]
