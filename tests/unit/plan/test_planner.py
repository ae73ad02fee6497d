"""The planner: what the user gives is kept, what fits is ranked by time, and every figure has a second derivation."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from wandistiller.cli.main import main, parse
from wandistiller.config.plan import PlanConfig, PlanRequest, parse_rate
from wandistiller.config.sample import SampleConfig
from wandistiller.config.toml_file import read_config
from wandistiller.config.train import TrainConfig
from wandistiller.errors import UsageError
from wandistiller.memory.estimates import margin
from wandistiller.memory.hardware import described
from wandistiller.memory.step_limit import limit_of
from wandistiller.models.shapes import find_named, find_shapes
from wandistiller.models.sizes import SIZES
from wandistiller.models.stored import TRANSFORMER, build_empty
from wandistiller.plan.candidates import all_ways
from wandistiller.plan.planner import find_hardware, make_plan
from wandistiller.plan.ranking import reasons
from wandistiller.plan.show import describe
from wandistiller.sample.prediction import predict_sample
from wandistiller.sample.remedies import foresee
from wandistiller.train.prediction import predict_train
from wandistiller.units import Bytes

# On one worker: blocks that one has traced need not be traced again.
pytestmark = pytest.mark.xdist_group("planner")
TRAIN = ["train", "--model", "wan2.1-1.3b", "--frames", "1", "--width", "256", "--height", "256"]
DISTILL = ["distill", "--teacher-path", "wan2.1-1.3b", "--frames", "1"]
MACHINE = ["--card", "rtx4090", "--ram", "64GiB"]
CARD = described(card="rtx4090", host_memory=Bytes(2**36))


def plan_of(*flags):
    return make_plan(parse("plan", [*flags, *MACHINE]))


@pytest.fixture(scope="module")
def lora():
    return plan_of(*TRAIN, "--lora-rank", "4", "--batch-size", "4")


def test_the_fastest_that_fits_is_first(lora):
    exact = [each.seconds for each in lora.fitting if each.way.is_exact]
    assert exact == sorted(exact) and lora.best.seconds <= 1.02 * exact[0]
    assert all(each.fits for each in lora.fitting) and not any(each.fits for each in lora.losers)


def test_what_is_given_is_kept():
    plan = plan_of(*TRAIN, "--gradient-checkpointing", "--placement", "offload", "--weights-dtype", "bfloat16")
    for each in (*plan.fitting, *plan.losers):
        assert not each.changes.keys() & {"placement", "activation_policy", "gradient_checkpointing", "weights_dtype"}


@pytest.mark.parametrize("asked", [[], ["--parallel", "auto"]], ids=["open", "auto"])
def test_several_machines_exchange_as_little_as_they_can_and_are_told_where_to_meet(asked):
    """What passes between them counts as hidden behind the computation, so times alone do not tell fsdp and hsdp apart."""
    clip = ["--frames", "33", "--width", "512", "--height", "512", "--activation-policy", "full", "--weights-dtype", "float32"]
    machines = ["--gpu", "20GiB", "--gpus", "4", "--nodes", "2", "--network", "50GB/s", "--ram", "64GiB"]
    plan = make_plan(parse("plan", [*TRAIN, *clip, *asked, *machines]))
    seconds = {each.changes["parallel"]: each.seconds for each in plan.fitting}
    assert seconds["fsdp"] < seconds["hsdp"] < 1.02 * seconds["fsdp"], "about as fast"
    assert plan.best.changes["parallel"] == "hsdp"
    assert plan.command.startswith("torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=first:29500 --nproc-per-node=4 ")


def test_a_batch_that_does_not_fit_becomes_smaller_ones():
    """A step still trains on the same samples."""
    job = TrainConfig(
        model="wan2.1-1.3b",
        dataset_path="clips",
        width=256,
        height=256,
        frames=(17,),
        batch_size=8,
        lora_rank=4,
        weights_dtype="bfloat16",
    )
    given = frozenset({"activation_policy", "activations_to_host", "placement", "weights_dtype"})
    shapes, hardware = find_shapes("wan2.1-1.3b"), described(card="rtx4090", host_memory=Bytes(2**36))
    least, most = (predict_train(replace(job, batch_size=size), shapes, hardware).device for size in (2, 8))
    room = Bytes(least + margin(least) + 550 * 2**20 + (most - least) // 20)
    options = PlanConfig(card="rtx4090", gpu=f"{room // 2**20}MiB", ram="64GiB")
    plan = make_plan(PlanRequest(command="train", job=job, given=given, options=options))
    assert plan.best is not None and plan.best.changes == {"batch_size": 2, "gradient_accumulation": 4}


@pytest.mark.parametrize("gpu", ["3GiB", "200GiB"])
def test_more_memory_never_makes_it_slower(lora, gpu):
    plan = make_plan(parse("plan", [*TRAIN, "--lora-rank", "4", "--batch-size", "4", "--card", "rtx4090", "--gpu", gpu]))
    best, other = lora.best, plan.best
    assert best is not None
    if gpu == "200GiB":
        assert other is not None and other.seconds <= best.seconds
    else:
        assert other is None or other.seconds >= best.seconds
        assert plan.losers or plan.asked.lacks


def test_weights_are_counted_exactly():
    """Of a full fine-tune in float32: weights, gradients, and two moments, to the allocator's rounding."""
    plan = plan_of(*TRAIN, "--weights-dtype", "float32", "--placement", "gpu", "--optimizer", "adamw", "--rounding", "masters")
    whole = sum(each.numel() for each in build_empty(TRANSFORMER, SIZES["wan2.1-1.3b"].transformer).parameters()) * 4
    training = plan.asked.estimate.phases[-1]
    found = {item.kind: item.size for item in training.items if item.role == "student" and item.where == "device"}
    assert found["weights"] == pytest.approx(whole, rel=1e-3)
    assert found["gradients"] == pytest.approx(whole, rel=1e-3)
    assert found["optimiser"] == pytest.approx(2 * whole, rel=1e-2)


def test_the_command_can_be_copied_as_it_is_printed(capsys):
    data = ["--dataset-path", "world:100:1x64x64", "--width", "64", "--height", "64", "--frames", "1"]
    assert main(["plan", "train", "--model", "tiny", "--lora-rank", "4", *data, *MACHINE]) == 0
    assert " --dataset-path world:100:1x64x64 " in capsys.readouterr().out


def test_json_tells_the_same(capsys, lora):
    assert main(["plan", *TRAIN, "--lora-rank", "4", "--batch-size", "4", *MACHINE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["plans"][0]["device"] == lora.best.estimate.device
    assert found["run"] == lora.command
    phases = found["plans"][0]["phases"]
    assert [phase["name"] for phase in phases] == ["encoding text", "encoding media", "training"]


def test_json_of_what_is_hopeless_is_json(capsys):
    """Its time is not worked out, and an infinity would be no JSON."""
    flags = ["train", "--model", "wan2.1-14b", "--activation-policy", "none", "--no-activations-to-host"]
    assert main(["plan", *flags, "--gpu", "24GiB", "--ram", "64GiB", "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["asked"]["seconds_per_step"] is None and not found["fits"]


def test_other_commands_in_a_file_give_nothing(tmp_path):
    file = tmp_path / "all.toml"
    file.write_text('[train]\nmodel = "wan2.1-1.3b"\n[distill]\nactivation_policy = "full"\n')
    request = parse("plan", ["train", "--config", str(file), *MACHINE])
    assert "model" in request.given and "activation_policy" not in request.given


def test_a_file_with_a_mark_of_its_byte_order_is_read(tmp_path):
    file = tmp_path / "train.toml"
    file.write_text('model = "wan2.1-1.3b"\n', encoding="utf-8-sig")
    assert "model" in parse("plan", ["train", "--config", str(file), *MACHINE]).given


def test_prompts_are_planned_as_they_are_drawn(tmp_path):
    """As one picture of one shape, unless --frames says otherwise."""
    (tmp_path / "prompts.txt").write_text("a cat\n")
    flags = ["distill", "--teacher-path", "wan2.1-1.3b", "--data-path", str(tmp_path / "prompts.txt")]
    picture, clip = (["--frames", count, "--max-aspect", "1"] for count in ("1", "9"))
    as_run, said, longer = (plan_of(*flags, *more).asked.estimate for more in ([], picture, clip))
    assert as_run == said != longer


@pytest.mark.parametrize(
    ("student", "message"),
    [
        ({"num_frames": 1, "patch_size": 3}, "--width 832 does not divide into patches"),
        ({"latent_channels": 64, "patch_size": 16, "depth": 1, "ffn_dim": 16, "num_frames": 1}, "would come from its teacher"),
        ({"patch_size": [2, 2, 2]}, "have 21 in the latents, not a multiple of a patch's 2"),
    ],
)
def test_a_student_that_a_run_would_refuse_is_not_planned(student, message, tmp_path, capsys):
    file = tmp_path / "student.json"
    file.write_text(json.dumps(student))
    assert main(["plan", "distill", "--teacher-path", "wan2.1-1.3b", "--student-config", str(file), *MACHINE]) == 2
    assert message in capsys.readouterr().err


def test_the_plan_can_be_run_from_its_file(tmp_path, capsys, lora):
    file = tmp_path / "new" / "run.toml"
    assert main(["plan", *TRAIN, "--lora-rank", "4", "--batch-size", "4", *MACHINE, "--write", str(file)]) == 0
    config = read_config(file, TrainConfig, "train", ("train",))
    assert {name: getattr(config, name) for name in lora.best.changes} == lora.best.changes
    assert "What fits" in capsys.readouterr().out


def test_a_plan_is_run_with_the_weights_of_the_size_that_was_named(tmp_path, capsys, lora):
    file = tmp_path / "run.toml"
    assert main(["plan", *TRAIN, "--lora-rank", "4", "--batch-size", "4", *MACHINE, "--write", str(file)]) == 0
    assert "--model Wan-AI/Wan2.1-T2V-1.3B-Diffusers" in capsys.readouterr().out
    again = make_plan(parse("plan", ["train", "--config", str(file), *MACHINE]))
    assert again.best.seconds == pytest.approx(lora.best.seconds) and again.best.estimate.device == lora.best.estimate.device


def test_a_model_that_is_here_is_looked_at(monkeypatch, tmp_path):
    hub = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    monkeypatch.chdir(tmp_path)
    assert find_named(hub) is SIZES["wan2.1-1.3b"] is find_named("wan2.1-1.3b")
    assert find_named("somebody/Wan2.1-T2V-1.3B-Diffusers") is None and find_named("tiny") is None
    monkeypatch.setattr("wandistiller.models.shapes.is_downloaded", lambda repo: True)
    assert find_named(hub) is None and find_named("wan2.1-1.3b") is not None
    (tmp_path / "wan2.1-1.3b").mkdir()
    assert find_named("wan2.1-1.3b") is None


def test_a_file_for_several_ranks_is_run_by_all_of_them(tmp_path, capsys):
    file = tmp_path / "run.toml"
    data = ["--dataset-path", "world:100:1x64x64", "--width", "64", "--height", "64", "--frames", "1"]
    machine = [*MACHINE, "--gpus", "2", "--parallel", "fsdp"]
    assert main(["plan", "train", "--model", "tiny", *data, *machine, "--write", str(file)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"run it with: torchrun --nproc-per-node=2 -m wandistiller train --config {file}" in said
    assert file.read_text().startswith("# torchrun --nproc-per-node=2 -m wandistiller train --config run.toml\n")


def test_nothing_fits(capsys):
    assert main(["plan", *TRAIN, "--gpu", "100MiB", "--ram", "64GiB"]) == 1
    assert "Nothing fits" in capsys.readouterr().out


def test_where_nothing_fits_nothing_is_written_and_all_is_said(tmp_path, capsys):
    flags = ["plan", *TRAIN, "--gpu", "100MiB", "--ram", "64GiB", "--write", str(tmp_path / "run.toml")]
    assert main([*flags, "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["fits"] and not list(tmp_path.iterdir())
    assert main(flags) == 1
    assert "Nothing was written to " in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_more_host_memory_never_makes_it_slower():
    """Blocks of the 14B have room in host memory for nothing but a few at a time: streamed from the disk they would crawl."""
    flags = ["train", "--model", "wan2.1-14b", "--lora-rank", "16", "--frames", "1", "--gpu", "31GiB"]
    small, large = (make_plan(parse("plan", [*flags, "--ram", ram])).best for ram in ("3GiB", "20GiB"))
    assert small.way.tier == large.way.tier == 0 and large.seconds == pytest.approx(small.seconds)


def test_a_way_that_fits_with_some_blocks_on_the_card_has_not_lost():
    flags = ["train", "--model", "wan2.1-14b", "--lora-rank", "16", "--frames", "1", "--placement", "offload"]
    flags += ["--weights-dtype", "bfloat16", "--activation-policy", "selective", "--no-activations-to-host"]
    plan = make_plan(parse("plan", [*flags, "--card", "rtx4090", "--ram", "24GiB"]))
    assert plan.best.changes.keys() == {"resident"} and not any(each.changes == {} for each in plan.losers)


def test_features_of_a_teacher_cut_from_itself_are_planned():
    plan = make_plan(parse("plan", [*DISTILL, "--feature-weight", "1", "--card", "h200", "--ram", "64GiB"]))
    assert "student matched features" in {f"{item.role} {item.kind}" for item in plan.asked.estimate.phases[-1].items}


def test_a_teacher_is_asked_beforehand_in_batches_that_fit():
    size = ["--width", "832", "--height", "480", "--frames", "81"]
    stored = ["distill", "--teacher-path", "wan2.1-1.3b", "--dataset-path", "clips", "--cache-teacher", *size]
    machine = ["--gpu", "16GiB", "--ram", "64GiB"]
    plan = make_plan(parse("plan", [*stored, *machine]))
    batch = plan.best.changes["rollout_batch"]
    assert 1 <= batch < 16 and f"--rollout-batch {batch}" in plan.command
    twice = ["--rollout-batch", str(2 * batch), "--teacher-device-strategy", "offload"]
    assert not make_plan(parse("plan", [*stored, *machine, *twice])).fitting


def test_a_teacher_that_is_asked_again_is_asked_in_batches_that_fit_beside_the_student():
    size = ["--width", "832", "--height", "480", "--frames", "81"]
    stored = ["distill", "--teacher-path", "wan2.1-1.3b", "--dataset-path", "clips", "--cache-teacher", *size]
    flags = [*stored, "--refresh-every", "100", "--gpu", "24GiB", "--ram", "64GiB"]
    plan = make_plan(parse("plan", flags))
    assert plan.best.way.is_exact and plan.best.changes["rollout_batch"] < 8
    assert not any(each.way.is_exact for each in make_plan(parse("plan", [*flags, "--rollout-batch", "8"])).fitting)


def test_what_is_in_the_way_of_a_sharded_teacher_is_in_nobody_elses(tmp_path):
    """Slices of the 14B and the blocks that are brought together do not fit beside this student; streamed blocks do."""
    student = tmp_path / "student.json"
    student.write_text(json.dumps({"depth": 30, "hidden_size": 3072, "num_heads": 24, "ffn_dim": 13824}))
    flags = ["distill", "--teacher-path", "wan2.1-14b", "--student-config", str(student), "--frames", "1"]
    machine = ["--card", "l40s", "--gpus", "2", "--ram", "128GiB"]
    best = make_plan(parse("plan", [*flags, *machine])).best
    asked = make_plan(parse("plan", [*flags, *machine, "--teacher-device-strategy", "offload"])).best
    assert best.changes["teacher_device_strategy"] == "offload" and best.seconds == pytest.approx(asked.seconds)


def test_a_model_is_spread_over_the_cards_of_a_machine_where_that_is_faster_than_its_bus():
    flags = ["sample", "--model", "wan2.1-14b", "--output", "a.png", "--card", "rtx4080", "--ram", "64GiB", "--bus", "6GB/s"]
    alone, together = (make_plan(parse("plan", [*flags, "--gpus", count])).best for count in ("1", "2"))
    assert (alone.changes["placement"], together.changes["placement"]) == ("offload", "balanced")
    assert together.estimate.step_seconds < 0.5 * alone.estimate.step_seconds


def test_a_policy_that_is_none_of_the_usual_ones_hides_nothing_faster():
    """All that is kept goes over a slow bus as asked for; recomputing some of it is faster."""
    size = ["--width", "480", "--height", "288", "--frames", "33", "--lora-rank", "32", "--activations-to-host"]
    plan = make_plan(parse("plan", [*TRAIN, *size, "--card", "rtx4090", "--ram", "1TiB", "--bus", "6GB/s"]))
    assert plan.best.changes["activation_policy"] == "selective" and plan.best.seconds < 0.7 * plan.asked.seconds


def test_samples_are_compared_from_beginning_to_end():
    """A VAE in 16 bits decodes faster and takes less; that counts beside few steps, and is said, but not chosen."""
    flags = ["sample", "--model", "wan2.1-1.3b", "--output", "a.mp4", "--steps", "1", "--vae-tiling", "--card", "rtx4060"]
    plan = make_plan(parse("plan", [*flags, "--ram", "32GiB"]))
    assert plan.best.estimate.seconds == sum(each.seconds * max(each.num_steps, 1) for each in plan.best.estimate.phases)
    assert not plan.best.way.costs
    assert any("with --vae-dtype bfloat16" in line and "cost in accuracy" in line for line in reasons(plan))


def test_where_only_the_text_encoder_is_too_large_that_is_said(capsys):
    flags = ["plan", "sample", "--model", "wan2.1-14b", "--output", "a.png", "--card", "rtx3060", "--placement", "disk"]
    assert main([*flags, "--ram", "8GiB"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "of host memory for encoding text, 7.2 GiB may be used" in said
    assert "text encoder alone is too large: encode the text on another machine" in said
    assert main([*flags, "--ram", "8GiB", "--cond", "prompt.safetensors"]) == 0


def test_what_is_hopeless_is_said_role_by_role(capsys):
    flags = [
        "plan",
        "train",
        "--model",
        "wan2.1-14b",
        "--activation-policy",
        "none",
        "--no-activations-to-host",
        "--placement",
        "gpu",
    ]
    assert main([*flags, "--gpu", "24GiB", "--ram", "64GiB", "--weights-dtype", "float32"]) == 1
    said = capsys.readouterr().out
    training = said[said.index("│ training") :]
    assert all(word in training for word in ("student weights", "optimiser", "kept", "at least"))
    assert "As asked for it needs more than " in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["plan", "trian"], "There is no plan for 'trian'"),
        (["plan", "train", "--model", "wan2.1-1.4b"], "wan2.1-1.3b"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--card", "rtx4091"], "rtx4090"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--gpu", "much"], "'much' is not a size"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--bus", "25GB/h"], "is not a rate"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--gpu", "24"], "--gpu: '24' has no unit"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--bus", "25"], "--bus: '25' is not a rate"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--disk", "-3GB/s"], "--disk: '-3GB/s' is not a rate"),
        (["plan", *TRAIN, "--gpus", "0", "--card", "rtx4090"], "--gpus 0 is for a machine without a GPU"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--width", "-832", "--height", "480", *MACHINE], "--width -832 is out of"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--max-aspect", "0.5", *MACHINE], "--max-aspect 0.5 is out of range"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--width", "16400", "--height", "64", *MACHINE], "1 by 4 by 1025 patches"),
        (["plan", "sample", "--model", "wan2.1-1.3b", "--frames", "4105", *MACHINE], "1027 by 30 by 52 patches"),
        (["plan", *DISTILL, "--width", "16400", "--height", "64", *MACHINE], "Give at most 16384"),
        (["plan", "distill", "--teacher-path", "wan2.1-1.3b", "--frames", "4105", *MACHINE], "it would be 1027 by "),
        (["plan", "sample", "--model", "wan2.1-1.3b", "--width", "830", *MACHINE], "Take --width 832 or 816"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--gpus", "2"], "Which 2 GPUs there will be is not known"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--gpus", "0", "--device", "cuda"], "a machine without a GPU"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--device", "tpu", *MACHINE], "--device tpu is not a device"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--device", "mps", *MACHINE], "no plan yet for --device mps"),
        (["plan", "train", "--model", "", *MACHINE], "nothing to plan without a model"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--gpuu", "24GiB"], "no flag --gpuu; did you mean '--gpu'?"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--write", "plan.txt"], "no TOML file"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--bus", "0GB/s"], "--bus 0GB/s would take for ever"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--gpu", "0GiB"], "--gpu 0GiB is no memory"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--ram", "0GiB"], "--ram 0GiB is no memory"),
        (["plan", "train", "--model", "wan2.2-a14b", "--lora-rank", "8", *MACHINE], "Give --expert high or --expert low"),
        (["plan", "train", "--model", "wan2.1-i2v-14b", *MACHINE], "Only text-to-video models can be trained"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--placement", "offload", *MACHINE, "--gpus", "8"], "cannot each offload"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--parallel", "fsdp", *MACHINE], "this is a plan for one"),
        (["plan", *TRAIN, "--parallel", "hsdp", "--shard-size", "3", *MACHINE, "--gpus", "4"], "into groups of 3"),
        (["plan", *DISTILL, "--teacher-device-strategy", "sharded", *MACHINE], "sharded is for several GPUs"),
        (["plan", "train-vae", "--model", "wan2.1-1.3b", "--cuda-graphs", *MACHINE], "no plan yet for a VAE"),
        (["plan", "train-vae", "--model", "tiny", "--parallel", "fsdp", *MACHINE, "--gpus", "2"], "with --parallel fsdp"),
        (["plan", "sample", "--model", "wan2.1-14b", "--image", "a.png", *MACHINE], "draws from text alone"),
        (["plan", "sample", "--model", "wan2.1-i2v-14b", *MACHINE], "no picture was given"),
        (["plan", "sample"], "nothing to sample from"),
        (["plan", "train", "--model", "wan2.1-1.3b", "--card", "h200", "--verify"], "there is no GPU here"),
    ],
)
def test_wrong_input_exits_with_2(flags, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(flags) == 2
    assert message in capsys.readouterr().err


def test_ways_are_valid_and_differ():
    job = SampleConfig(model="wan2.1-1.3b", prompt=("a",), output=Path("a.mp4"))
    found = [way.changes for way in all_ways(job, frozenset(), CARD)]
    assert len(found) > 5 and all(found.count(each) == 1 for each in found)


def test_cards_of_one_process_have_a_teacher_between_them_and_the_first_one_the_student():
    """Half of the teacher is on each; where the student fills the first, all of it is on the other."""
    clips = ["--dataset-path", "clips", "--width", "256", "--height", "256", "--optimizer", "adamw"]
    flags = [*DISTILL, *clips, "--teacher-device-strategy", "balanced", "--activation-policy", "none", "--ram", "64GiB"]
    weights = sum(each.numel() for each in build_empty(TRANSFORMER, SIZES["wan2.1-1.3b"].transformer).parameters()) * 2
    shares = []
    for size, count in (("24GiB", 1), ("24GiB", 2), ("14GiB", 2), ("13GiB", 2)):
        plan = make_plan(parse("plan", [*flags, "--gpu", size, "--gpus", str(count)]))
        assert plan.best is not None and plan.command.startswith("wandistiller distill"), (size, count)
        items = plan.best.estimate.phases[-1].items
        shares.append(sum(each.size for each in items if (each.role, each.kind) == ("teacher", "weights")) / weights)
    assert shares == [pytest.approx(1, abs=0.01), pytest.approx(0.5, abs=0.05), pytest.approx(0.25, abs=0.1), 0]


@pytest.mark.parametrize(
    ("content", "message"), [('{"": 2}', "there are 2 GPUs"), ('{"": 0, "blcks": 1}', "did you mean 'blocks'")]
)
def test_a_map_is_checked_for_the_machine_that_is_planned_for(content, message, tmp_path, capsys):
    file = tmp_path / "map.json"
    file.write_text(content)
    given = ["--dataset-path", "clips", "--teacher-device-strategy", "custom", "--teacher-device-map", str(file)]
    assert main(["plan", *DISTILL, *given, *MACHINE, "--gpus", "2"]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_says_what_it_is_for(capsys):
    flags = [*TRAIN[:3], "--frames", "5", "--width", "256", "--height", "128", "--max-aspect", "1", "--lora-rank", "4"]
    assert main(["plan", *flags, "--batch-size", "2", "--gradient-accumulation", "3", *MACHINE]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Planning train of wan2.1-1.3b, 3 batches of 2 clips of 256x128 and 5 frames a step, for rtx4090" in said
    assert main(["plan", "sample", "--model", "tiny", "--output", "x.png", "--json", *MACHINE]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "tiny"
    assert found["samples"] == {"frames": 1, "height": 64, "width": 64, "batch_size": 1, "num_batches": 1}


def test_files_that_are_not_here_are_named(tmp_path, capsys):
    data, absent = tmp_path / "data", tmp_path / "held out"
    data.mkdir()
    flags = ["--dataset-path", str(data), "--held-out", str(absent), "--json"]
    assert main(["plan", "train", "--model", "tiny", "--lora-rank", "2", *flags, *MACHINE]) == 0
    assert json.loads(capsys.readouterr().out)["not_here"] == [str(absent)]


def test_machines_without_cards_are_started_too(capsys):
    flags = ["--model", "tiny", "--frames", "1", "--gpus", "0", "--nodes", "2", "--ram", "64GiB"]
    assert main(["plan", "train", *flags]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the CPU alone, with 64.0 GiB of memory, 2 machines" in said and "--nproc-per-node=1 " in said


def test_the_cpu_may_compute_in_half_the_memory():
    plan = make_plan(parse("plan", ["sample", "--model", "wan2.1-1.3b", "--gpus", "0", "--ram", "16GiB"]))
    assert not plan.asked.fits and dict(plan.best.changes) == {"dtype": "bfloat16"} and not plan.best.way.is_exact


def test_help_is_of_the_plan(capsys):
    with pytest.raises(SystemExit) as end:
        main(["plan", "train", "--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and "wandistiller train --help" in said and "--ram" in said and "--lora-rank" not in said


def test_a_job_for_the_cpu_is_planned_for_the_cpu():
    plan = plan_of(*TRAIN, "--lora-rank", "4", "--device", "cpu")
    assert plan.hardware.card is None and plan.hardware.host_memory == 2**36 and "--device cpu" in plan.command


def test_a_plan_for_the_cpu_speaks_of_no_card(capsys):
    sample = ["sample", "--model", "wan2.1-1.3b", "--prompt", "x", "--device", "cpu"]
    assert main(["plan", *sample, "--card", "rtx4090", "--ram", "8GiB"]) == 1
    said = capsys.readouterr().out
    assert "memory" in next(line for line in said.splitlines() if "phase" in line) and "card" not in said
    assert "--dtype bfloat16 (3 ways)" in said, "a way that its policy and place do not tell apart"
    assert not any(line.startswith(":") for line in said.splitlines())


def test_a_plan_for_the_cpu_has_all_of_its_memory_in_one_column(capsys):
    """What is kept for backward would be page-locked beside a card, and counts as the rest does."""
    kept = ["--activation-policy", "selective", "--activations-to-host", "--batch-size", "4"]
    flags = ["plan", *TRAIN, *kept, "--device", "cpu", "--ram", "64GiB"]
    assert main([*flags, "--json"]) == 0
    asked = json.loads(capsys.readouterr().out)["asked"]
    assert asked["page_locked"] > 2**27
    assert main(flags) == 0
    said = capsys.readouterr().out
    assert "kept activations" in said and "page-locked" not in said
    assert f"│ {Bytes(asked['device'] + asked['host'])} │ as asked for │" in said


def test_a_card_of_which_only_the_memory_is_known_has_the_speed_of_another():
    for card, whose in ((None, "h200"), ("h200", "h200"), ("rtx4090", "rtx4090")):
        machine = described(card=card, gpu=Bytes(2**33), host_memory=Bytes(2**36))
        assert f"8.0 GiB card (7.5 GiB for tensors, speed by that of the {whose})" in describe(machine)
    assert "speed by its published figures" in describe(CARD)
    assert "speed" not in describe(described(card="h200", host_memory=Bytes(2**36)))


def test_a_sampling_says_beforehand_what_limits_its_steps_whatever_is_largest():
    """Of this one the decoder is, which has no steps."""
    config = SampleConfig(model="wan2.1-1.3b", prompt=("x", "y"), output=Path("a.mp4"))
    shapes = find_shapes("wan2.1-1.3b")
    estimate = predict_sample(config, shapes, CARD)
    found = foresee(SimpleNamespace(settled=config, shapes=shapes, prompts=config.prompt, is_automatic=False), CARD)
    assert found.name == "decoding" and found.reserved == estimate.device
    assert found.seconds == 2 * estimate.step_seconds and limit_of(found, CARD) == "the card"


def test_rates():
    assert parse_rate("25GB/s") == 25e9 and parse_rate("1GiB") == 2**30
    with pytest.raises(UsageError):
        parse_rate("fast")


def test_a_clip_is_planned_without_a_word_about_its_file():
    flags = ["plan", "sample", "--model", "wan2.1-1.3b", "--frames", "81"]
    request = parse(flags[0], flags[1:])
    request.check()
    assert request.job.output == Path("sample.mp4")
    with pytest.raises(UsageError, match="81 frames do not go into"):
        parse(flags[0], [*flags[1:], "--output", "sample.png"]).check()


def test_the_disk_is_as_fast_as_it_reads_the_models_files_here(tmp_path, monkeypatch):
    for name, size in (("small", 10), ("large", 20)):
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(size))
    read = []
    monkeypatch.setattr(
        "wandistiller.memory.raw_reads.read_rate", lambda files: read.extend(file.name for file in files) or 5e9
    )
    assert find_hardware(PlanConfig(), str(tmp_path)).disk_rate == 5e9 and read == ["large.safetensors"]
    assert find_hardware(PlanConfig(disk="3GB/s"), str(tmp_path)).disk_rate == 3e9
    assert find_hardware(PlanConfig(card="rtx4090"), str(tmp_path)).disk_rate == 2e9, "another machine's disk"
    assert find_hardware(PlanConfig(), "wan2.1-14b").disk_rate == 2e9


def test_data_are_encoded_in_tiles_where_whole_frames_have_no_room():
    clip = ["--model", "wan2.1-1.3b", "--lora-rank", "4", "--ram", "64GiB", "--frames", "5"]
    small, large = (plan_of("train", *clip, "--gpu", size) for size in ("7GiB", "24GiB"))
    assert small.best.changes["vae_tiling"] and "--vae-tiling" in small.command
    assert not small.asked.changes and not small.asked.fits, "what was asked for is shown as it is"
    assert "vae_tiling" not in large.best.changes
    given = plan_of("train", *clip, "--gpu", "7GiB", "--no-vae-tiling")
    assert given.best is None and "encoding media alone needs" in given.untried[0].why
