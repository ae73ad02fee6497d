"""The search: what could be the best is tried, the rest is counted with its reason, and as many blocks stay as fit."""

from dataclasses import replace
from pathlib import Path

import pytest

from wandistiller.config.distill import DistillConfig
from wandistiller.config.plan import PlanConfig, PlanRequest
from wandistiller.config.sample import SampleConfig
from wandistiller.config.train import TrainConfig
from wandistiller.memory.estimates import Estimate, Item, Phase
from wandistiller.memory.hardware import described
from wandistiller.memory.uses import Use
from wandistiller.memory.works import Training
from wandistiller.models.shapes import Shapes, find_shapes
from wandistiller.models.sizes import SIZES
from wandistiller.models.stored import TRANSFORMER, build_empty
from wandistiller.plan.bounds import Least, least_on_card
from wandistiller.plan.candidates import Way
from wandistiller.plan.planner import Plan, make_plan
from wandistiller.plan.ranking import reasons
from wandistiller.plan.search import Option, Search
from wandistiller.sample.prediction import predict_sample
from wandistiller.train.prediction import predict_distill, predict_train
from wandistiller.units import Bytes

GIB = 2**30
CARD = described(card="rtx4090", host_memory=Bytes(64 * GIB))


def searched(ways, **options):
    """Try ways of which the changes say what is predicted: gibibytes and seconds."""

    def predict(changes):
        size, waits = Bytes(round(changes["gib"] * GIB)), changes.get("waits", 0.0)
        phase = Phase(name="training", peak=size, reserved=size, seconds=changes["seconds"], waits=waits)
        return Estimate(phases=(phase,))

    search = Search(predict=predict, least_on_card=lambda changes: Least(), hardware=CARD, **options)
    search.run(ways)
    return search


def way(gib, seconds, changes=None, **place):
    return Way(changes={"gib": gib, "seconds": seconds, **(changes or {})}, **place)


def plan_of(search):
    job = TrainConfig(model="wan2.1-1.3b", dataset_path="clips")
    fitting = sorted((each for each in search.found if each.fits), key=lambda each: (not each.way.is_exact, each.seconds))
    losers = tuple(each for each in search.found[1:] if not each.fits)
    request = PlanRequest(command="train", job=job)
    return Plan(request, CARD, search.found[0], tuple(fitting), losers, tuple(search.untried))


def test_a_smaller_batch_is_tried_although_a_slower_way_fits():
    search = searched([way(30, 1.0), way(10, 2.3, tier=1), way(15, 1.7, halvings=1), way(5, 2.5, policy=1)])
    assert [each.seconds for each in search.found if each.fits] == [2.3, 1.7, 2.5]
    assert plan_of(search).best.seconds == 1.7


def test_nothing_slower_than_the_fastest_place_is_tried_once_it_fits():
    search = searched([way(10, 1.0), way(5, 2.0, tier=1), way(8, 1.5, halvings=1), way(3, 3.0, policy=1)])
    assert len(search.found) == 1 and len(search.untried) == 3
    assert any("Not tried: 2 ways, slower than what fits" in line for line in reasons(plan_of(search)))


def test_what_fits_in_a_slow_place_alone_tells_nothing_of_faster_ones():
    """Two policies fit from the disk; the third fits on the card."""
    disk = [way(10, 28.0, tier=2), way(9, 29.0, policy=1, tier=2)]
    search = searched(
        [way(30, 0.2), *disk[:1], way(28, 0.3, policy=1), *disk[1:], way(15, 0.4, policy=2), way(5, 30.0, policy=2, tier=2)]
    )
    assert plan_of(search).best.seconds == 0.4
    assert [each.way.changes["seconds"] for each in search.untried] == [30.0]
    smaller = searched([way(30, 0.2), *disk, way(12, 0.5, policy=2, halvings=1)])
    assert plan_of(smaller).best.seconds == 0.5


def test_ranks_that_wait_for_each_other_say_nothing_of_those_that_share_otherwise():
    """The order of the ways is that of their computation, which is not what such a step is long for."""
    sliced = {"parallel": "fsdp", "waits": 3.0}
    ways = [way(30, 1.0, {"parallel": "ddp"}), way(10, 4.0, sliced)]
    later = [way(20, 2.0, {"parallel": "ddp"}, policy=1), way(8, 5.0, sliced, policy=1), way(15, 2.5, policy=2, halvings=1)]
    search = searched([*ways, *later])
    assert [each.seconds for each in search.found if each.fits] == [4.0, 2.0]
    assert [each.way.changes["seconds"] for each in search.untried] == [5.0, 2.5]


def test_what_the_host_has_no_room_for_is_not_played_through():
    search = Search(
        predict=lambda changes: Estimate(phases=(Phase(name="training", seconds=1.0),)),
        least_on_card=lambda changes: Least(host=changes["gib"] * GIB),
        hardware=CARD,
    )
    search.run([way(1, 1.0), way(60, 1.0), way(50, 1.0)])
    assert [each.lacks for each in search.found] == [(), ("needs more than 60.0 GiB of host memory, 57.6 GiB may be used",), ()]


def test_blocks_that_may_stay_on_the_card_need_no_room_on_the_host():
    """Of 60 GiB 10 fit beside 10 on a card with 23 for tensors; a way whose blocks may not stay is left out."""
    search = Search(
        predict=lambda changes: Estimate(phases=(Phase(name="training", seconds=1.0),)),
        least_on_card=lambda changes: Least(held=10 * GIB, host=60 * GIB, may_stay=changes["gib"] * GIB),
        hardware=CARD,
        resident_field="resident",
    )
    search.run([way(0, 1.0), way(60, 1.0), way(1, 1.0)])
    why = "needs more than 59.0 GiB of host memory, 57.6 GiB may be used"
    assert [each.lacks for each in search.found] == [(), (), (why,)]


def test_half_a_batch_is_not_played_through_where_half_of_what_the_whole_had_does_not_fit():
    def predict(changes):
        size = Bytes(round(changes["gib"] * GIB))
        work = Training(student=Use(name="student", config=SIZES["tiny"].transformer, latent_shape=(8, 1, 8, 8)))
        return Estimate(phases=(Phase(name="training", peak=size, reserved=size, passing=size, seconds=1.0, work=work),))

    search = Search(predict=predict, least_on_card=lambda changes: Least(held=2 * GIB), hardware=CARD)
    search.run([way(102, 1.0), way(52, 1.0, halvings=1), way(27, 1.0, halvings=2), way(14, 1.0, halvings=3)])
    assert [each.lacks[0].split(" and")[0] if each.lacks else "" for each in search.found] == [
        "needs 102.0 GiB",
        "needs more than 52.0 GiB",
        "needs more than 27.0 GiB",
        "",
    ]


def test_of_several_losers_the_nearest_is_told_whatever_it_lacks():
    """One that was left out by what it lacks of the host says little of the card."""
    lack = "needs more than {} GiB of host memory, 57.6 GiB may be used"

    def option(on_card, on_host, **changes):
        items = (Item("student", "weights", "host", Bytes(on_host * GIB)),)
        phase = Phase(name="training", items=items, reserved=Bytes(on_card * GIB), is_least=True)
        return Option(way(0, 0, changes), Estimate(phases=(phase,)), (lack.format(on_host),))

    losers = (option(5, 88, weights_dtype="float32"), option(10, 60, weights_dtype="bfloat16"))
    plan = replace(plan_of(searched([way(10, 1.0)])), losers=losers)
    (line,) = (line for line in reasons(plan) if "host memory" in line)
    assert line.endswith(f"(2 ways): {lack.format(60)}")


def test_a_teacher_that_is_asked_again_is_held_like_one_that_is_asked_in_each_step(tmp_path):
    (tmp_path / "prompts.txt").write_text("a prompt\n" * 8)
    shapes, again = find_shapes("wan2.1-1.3b"), {"data_path": str(tmp_path / "prompts.txt"), "refresh_every": 5}
    on_card, streamed = (
        least_on_card(DistillConfig(teacher_path="wan2.1-1.3b", teacher_device_strategy=name, **again), shapes, CARD)
        for name in ("gpu", "offload")
    )
    blocks = 30 * 2 * sum(each.numel() for each in build_empty(TRANSFORMER, {**shapes.transformers[0]}).blocks[0].parameters())
    assert on_card.held - streamed.held == pytest.approx(28 / 30 * blocks, rel=0.01)


def test_a_loser_has_a_name_though_it_changes_nothing():
    search = searched([way(30, 1.0), way(31, 1.0), way(10, 2.0, tier=1)])
    plan = plan_of(search)
    loser = replace(search.found[1], way=Way(changes={}))
    (line,) = (line for line in reasons(replace(plan, losers=(loser,))) if ": needs 31.0 GiB" in line)
    assert line.startswith("--activation-policy none --placement gpu: ")


def test_what_costs_accuracy_is_listed_and_chosen_only_where_nothing_else_fits():
    rough = way(10, 0.5, tier=1, is_exact=False, costs=("weights in 8 bits",))
    search = searched([way(30, 0.4), way(10, 2.0, tier=1), rough])
    plan = plan_of(search)
    assert plan.best.seconds == 2.0 and [each.seconds for each in plan.faster_ones] == [0.5]
    assert "weights in 8 bits" in reasons(plan)[0]
    far_slower = plan_of(searched([way(30, 0.4), way(10, 9.0, tier=1), rough]))
    assert far_slower.best.seconds == 0.5
    alone = plan_of(searched([way(30, 0.4), rough]))
    assert alone.best.seconds == 0.5 and "Nothing fits without a cost in accuracy" in reasons(alone)[0]


def test_what_costs_accuracy_for_memory_alone_is_left_out_where_its_like_fits():
    slim = way(8, 1.0, is_slim=True, is_exact=False, costs=("optimiser in 8 bits",))
    search = searched([way(10, 1.0), slim])
    assert [each.why for each in search.untried] == ["costs accuracy and is no faster"]
    assert len(searched([way(30, 1.0), slim]).found) == 2


def test_what_was_asked_for_wins_among_those_as_fast():
    search = searched([way(10, 1.01), way(5, 1.0)])
    assert plan_of(search).best.seconds == 1.01


def test_a_phase_that_no_way_changes_ends_the_search():
    search = searched([way(30, 1.0), way(10, 1.0), way(5, 1.0)], fixed_phases=("training",))
    assert len(search.found) == 1 and "training alone needs 30.0 GiB" in search.untried[0].why


def test_losers_are_told_by_policy_and_place():
    options = [way(30 + n, 1.0) for n in range(3)]
    lines = reasons(plan_of(searched(options)))
    assert any("--activation-policy none --placement gpu (2 ways): needs 31.0 GiB" in each for each in lines)


@pytest.fixture(scope="module")
def streamed():
    """Latents alone, so that there is nothing but the transformer."""
    job = SampleConfig(model="wan2.1-1.3b", cond=Path("c"), output=Path("a.safetensors"), width=64, height=64, cfg_scale=1.0)
    options = PlanConfig(card="rtx4090", gpu="3000MiB", ram="64GiB")
    return job, make_plan(PlanRequest(command="sample", job=job, options=options))


def test_as_many_blocks_stay_as_fit(streamed):
    job, plan = streamed
    best = plan.best.changes
    exact = [each.seconds for each in plan.fitting if each.way.is_exact]
    assert len(exact) > 1 and exact == sorted(exact)
    assert best["placement"] == "offload" and 0 < int(best["resident"]) < 28
    one_more = replace(job, **{**best, "resident": str(int(best["resident"]) + 1)})
    assert predict_sample(one_more, find_shapes("wan2.1-1.3b"), plan.hardware).lacks(plan.hardware)
    assert plan.best.seconds < next(each.seconds for each in plan.fitting if each.changes == {"placement": "offload"})


def test_the_least_is_never_more_than_the_prediction():
    size = SIZES["tiny"]
    shapes = Shapes(transformers=[size.transformer], vae=size.vae, text_encoder=None, size=size)
    about = {"dataset_path": "clips", "frames": (9,), "width": 64, "height": 64}
    train, distill = TrainConfig(model="tiny", **about), DistillConfig(teacher_path="tiny", **about)
    jobs = [
        (predict_train, train),
        (predict_train, replace(train, weights_dtype="bfloat16", rounding="stochastic")),
        (predict_train, replace(train, optimizer="adafactor", activation_policy="full")),
        (predict_train, replace(train, placement="offload")),
        (predict_train, replace(train, lora_rank=4, placement="offload")),
        (predict_distill, distill),
        (predict_distill, replace(distill, teacher_device_strategy="offload", optimizer="adamw8bit", use_ema=True)),
    ]
    for predict, job in jobs:
        least, estimate = least_on_card(job, shapes, CARD), predict(job, shapes, CARD)
        peak = estimate.phases[-1].peak
        assert 0 < least.total() <= peak and least.total(least.working(estimate)) <= peak
        assert least.host <= estimate.host
        assert (least.host > 0) == ("offload" in repr(job))
