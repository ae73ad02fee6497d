"""``distill`` end to end on a tiny Wan: every source of questions, every strategy, what is written and what is refused."""

import gc
import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file

from wandistiller.api import distill, encode, report, sample, train
from wandistiller.cli.main import main
from wandistiller.config.distill import StrategyName
from wandistiller.config.sample import SampleConfig
from wandistiller.errors import UsageError, WanDistillerError
from wandistiller.flow.path import interpolate
from wandistiller.flow.solver import SOLVERS
from wandistiller.memory.experts import Experts
from wandistiller.models.channel_adapter import ChannelAdapter, random_adapter
from wandistiller.models.derive_student import derive_student
from wandistiller.models.pipeline import find_diffusers_pipeline
from wandistiller.models.sizes import find_size
from wandistiller.models.stored import TRANSFORMER, inspect_checkpoint
from wandistiller.models.student_config import read_student_config
from wandistiller.models.student_facts import read_learnt_guidance
from wandistiller.sample.job import prepare
from wandistiller.train import distill_run
from wandistiller.train.drawing import Drawing, draw
from wandistiller.train.methods.distill import Distillation

SIZE = {"width": 32, "height": 32, "frames": (1,), "max_aspect": 1.0}
QUICK = {
    "teacher_path": "tiny-random",
    **SIZE,
    "batch_size": 4,
    "workers": 0,
    "learning_rate": 1e-3,
    "log_every": 1,
    "save_every": 0,
}
PROMPTS = {"data_path": "world:8:1x32x32", "rollout_steps": 3, "rollout_batch": 4}
DATASET = {"dataset_path": "world:12:1x32x32"}


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    path = tmp_path_factory.mktemp("student") / "student.json"
    path.write_text(json.dumps({"depth": 2}))
    return path


def test_from_prompts_to_a_pipeline_that_everybody_loads(tmp_path, two_layers):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"thing number {number}" for number in range(8)) + "\n")
    run, drawn = tmp_path / "run", tmp_path / "drawn.txt"
    drawn.write_text("a cube\n\na cone\n")
    done = distill(
        **{**QUICK, **PROMPTS, "data_path": str(prompts)},
        student_config=two_layers,
        output_dir=run,
        num_steps=6,
        sample_every=6,
        sample_prompts=("a ball", str(drawn)),
        sample_steps=2,
    )
    assert json.loads((run / "plan.json").read_text())["measured"]["bytes"] > 0
    assert done.step == 6 and done.output == run / "model"
    found = losses(run)
    assert len(found) == 6
    assert json.loads(next((run / "cache" / "teacher").glob("*/records.json")).read_text())["complete"]
    pictures = sorted(path.name for path in (run / "samples" / "step-00000006").glob("*.png"))
    assert pictures == ["00-a-ball.png", "01-a-cube.png", "02-a-cone.png"], "a file stands for its lines"
    pipeline = WanPipeline.from_pretrained(run / "model")
    assert pipeline.transformer.config.num_layers == 2
    drawn = pipeline("x", height=32, width=32, num_frames=1, num_inference_steps=2, output_type="latent", guidance_scale=1.0)
    assert torch.isfinite(drawn.frames).all()
    ours = sample(model=str(run / "model"), prompt="x", width=32, height=32, steps=2, output=tmp_path / "x.png")
    assert ours[0].files[0].exists()


def test_a_student_that_is_the_teacher_has_nothing_to_learn(tmp_path):
    path = tmp_path / "student.json"
    path.write_text(json.dumps({"num_layers": 3}))
    for name, data in (("live", DATASET), ("stored", {**DATASET, "cache_teacher": True}), ("rolled", PROMPTS)):
        run = tmp_path / name
        distill(**QUICK, **data, student_config=path, output_dir=run, num_steps=1, feature_weight=float(name == "live"))
        # What is stored is in 16 bits.
        assert losses(run)[0] < (1e-10 if name == "live" else 1e-6)


def test_the_loss_falls(tmp_path, two_layers):
    distill(**QUICK, **PROMPTS, student_config=two_layers, output_dir=tmp_path / "run", num_steps=30)
    found = losses(tmp_path / "run")
    assert sum(found[-5:]) < 0.5 * sum(found[:5])


ASKED = {**QUICK, **DATASET, "num_steps": 3, "feature_weight": 0.5}


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory, two_layers):
    """Those of a teacher that is simply there."""
    run = tmp_path_factory.mktemp("plain")
    distill(**ASKED, student_config=two_layers, output_dir=run, teacher_device_strategy="gpu")
    return losses(run)


@pytest.mark.parametrize("strategy", sorted({*get_args(StrategyName)} - {"gpu", "sharded"}))
def test_every_strategy_gives_the_same_losses(tmp_path, two_layers, plain_losses, strategy):
    """But for sharded, which needs several ranks."""
    options = {"teacher_device_strategy": strategy}
    if strategy == "custom":
        options["teacher_device_map"] = tmp_path / "map.json"
        options["teacher_device_map"].write_text(json.dumps({"": "cpu"}))
    distill(**ASKED, student_config=two_layers, output_dir=tmp_path / "run", **options)
    assert losses(tmp_path / "run") == pytest.approx(plain_losses, rel=1e-4)


def test_layers_by_importance_are_those_that_change_most(tmp_path, monkeypatch):
    """A student of one layer starts from the one of the highest score; a resumed run does not measure again."""
    path = tmp_path / "student.json"
    path.write_text(json.dumps({"depth": 1}))
    both = {**QUICK, **DATASET, "student_config": path, "layer_choice": "importance", "output_dir": tmp_path / "run"}
    distill(**both, num_steps=1)
    scores = json.loads((tmp_path / "run" / "layer_scores.json").read_text())["scores"]
    facts = json.loads((tmp_path / "run" / "student.json").read_text())
    assert len(scores) == 3 and facts["layers"] == [scores.index(max(scores))]
    assert all(group["carried"] == group["total"] > 0 for group in facts["coverage"].values())
    monkeypatch.setattr("wandistiller.train.layer_choice._influences", lambda *a, **k: pytest.fail("measured again"))
    distill(**both, num_steps=2, resume="auto")
    assert json.loads((tmp_path / "run" / "student.json").read_text()) == facts


def test_stored_answers_are_asked_for_once(tmp_path, two_layers, monkeypatch):
    both = {**QUICK, **PROMPTS, "student_config": two_layers, "cache_dir": tmp_path / "cache", "num_steps": 2}
    distill(**both, output_dir=tmp_path / "a")
    monkeypatch.setattr("wandistiller.train.teacher.Teacher.answer", lambda *a, **k: pytest.fail("asked again"))
    distill(**both, output_dir=tmp_path / "b")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_stored_answers_and_real_latents_add_up(tmp_path, two_layers):
    """The losses of a step with both are those of a step with each, on the same draws."""
    both = {**QUICK, **DATASET, "student_config": two_layers, "cache_teacher": True, "teacher_draws": 1, "num_steps": 1}
    distill(**both, output_dir=tmp_path / "both", data_weight=0.5)
    line = json.loads((tmp_path / "both" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["loss"] == pytest.approx(line["output_loss"] + 0.5 * line["data_loss"], rel=1e-5)
    distill(**both, output_dir=tmp_path / "output")
    assert line["output_loss"] == pytest.approx(losses(tmp_path / "output")[0], rel=1e-6)
    # Where nothing is stored the first epoch draws what draw 0 is: noise and sigma of (seed, 0, sample).
    live = {**both, "cache_teacher": False, "output_weight": 0.0, "data_weight": 1.0}
    distill(**live, output_dir=tmp_path / "data")
    assert line["data_loss"] == pytest.approx(losses(tmp_path / "data")[0], rel=1e-3)


def test_a_teacher_that_has_been_asked_is_gone_when_the_student_learns(tmp_path, two_layers, monkeypatch):
    loaded, load, losses_of = [], Experts._load, Distillation.losses

    def noted(experts, index):
        model = load(experts, index)
        loaded.append(weakref.ref(model))
        return model

    def alone(method, batch):
        gc.collect()
        assert loaded and not any(model() for model in loaded)
        return losses_of(method, batch)

    monkeypatch.setattr(Experts, "_load", noted)
    monkeypatch.setattr(Distillation, "losses", alone)
    distill(**QUICK, **PROMPTS, student_config=two_layers, output_dir=tmp_path / "run", num_steps=2)


def test_what_is_kept_of_a_draw_lies_beside_the_latents_and_the_noise_of_that_draw(tmp_path, two_layers, monkeypatch):
    seen, losses_of = [], Distillation.losses
    monkeypatch.setattr(Distillation, "losses", lambda method, batch: seen.append(batch.tensors) or losses_of(method, batch))
    kept = {"cache_teacher": True, "teacher_draws": 3, "data_weight": 1.0, "num_steps": 3}
    distill(**QUICK, **DATASET, **kept, student_config=two_layers, output_dir=tmp_path / "run")
    for batch in seen:
        noisy = interpolate(batch["latents"], batch["noise"], batch["sigma"])
        torch.testing.assert_close(batch["noisy"], noisy, rtol=1e-2, atol=1e-2)
    assert len(seen) == 3


def test_trajectories_are_asked_about_where_sampling_asks(tmp_path, two_layers):
    run = tmp_path / "run"
    distill(**QUICK, **PROMPTS, student_config=two_layers, output_dir=run, num_steps=1, sigma_shift=7.0)
    shard = load_file(next((run / "cache" / "teacher").glob("*/shard-*")))
    solver = find_diffusers_pipeline("tiny-random", ("scheduler",)).solver
    expected = SOLVERS[solver].schedule(PROMPTS["rollout_steps"], 7.0).sigmas[:-1]
    assert sorted(set(shard["sigma"].tolist()), reverse=True) == pytest.approx(expected)


def test_a_solver_that_was_asked_for_draws_the_trajectories(tmp_path, tiny_folder, two_layers):
    """Also of a teacher whose own is none of ours."""
    odd = {"scheduler/scheduler_config.json": {"_class_name": "DPMSolverMultistepScheduler"}}
    teacher, run = wrong_teacher(odd, tiny_folder, tmp_path / "teacher"), tmp_path / "run"
    both = {**QUICK, **PROMPTS, "teacher_path": str(teacher), "student_config": two_layers, "solver": "euler"}
    distill(**both, output_dir=run, num_steps=1, sample_every=1, sample_steps=1)
    shard = load_file(next((run / "cache" / "teacher").glob("*/shard-*")))
    expected = SOLVERS["euler"].schedule(PROMPTS["rollout_steps"], 3.0).sigmas[:-1]
    assert sorted(set(shard["sigma"].tolist()), reverse=True) == pytest.approx(expected)


def test_the_result_is_the_average(tmp_path, two_layers):
    """After the first step of a run the average is 9/11 of the way from the start: its decay begins at 2/11."""
    both = {**QUICK, **DATASET, "student_config": two_layers, "num_steps": 1}
    runs = {"start": {"learning_rate": 0.0}, "plain": {}, "average": {"use_ema": True}}
    found = {}
    for name, options in runs.items():
        distill(**{**both, **options}, output_dir=tmp_path / name)
        found[name] = load_file(tmp_path / name / "model" / "transformer" / "diffusion_pytorch_model.safetensors")
    for key, start in found["start"].items():
        expected = start + 9 / 11 * (found["plain"][key] - start)
        torch.testing.assert_close(found["average"][key], expected, rtol=1e-4, atol=1e-6)


def test_guidance_is_learnt(tmp_path):
    """A student that is the teacher still has to learn what guidance adds, from either kind of question.

    That is (scale - 1) times what the caption adds, so twice as much at 7 as at 4 and, squared, four times the loss. On its
    trajectories guidance leads elsewhere.
    """
    path = tmp_path / "student.json"
    path.write_text(json.dumps({"num_layers": 3}))
    learns = {"guidance_weight": 1.0, "output_weight": 0.0, "student_config": path, "num_steps": 1}
    for name, data in (("live", DATASET), ("kept", {**DATASET, "cache_teacher": True}), ("rolled", PROMPTS)):
        distill(**QUICK, **data, **learns, guidance_scale=4.0, output_dir=tmp_path / name)
        assert losses(tmp_path / name)[0] > 1e-5
        if name != "rolled":
            distill(**QUICK, **data, **learns, guidance_scale=7.0, output_dir=tmp_path / f"more {name}")
            assert losses(tmp_path / f"more {name}")[0] == pytest.approx(4 * losses(tmp_path / name)[0], rel=0.05)


@pytest.mark.parametrize(("learns", "guidance"), [({"guidance_weight": 1.0, "output_weight": 0.0}, 1.0), ({}, 6.0)])
def test_a_student_that_has_learnt_guidance_is_drawn_without(tmp_path, monkeypatch, learns, guidance):
    """By default, and so in half the passes; others are drawn with the guidance that is usual for such models."""
    done = distill(**QUICK, **DATASET, **learns, guidance_scale=4.0, num_steps=1, output_dir=tmp_path / "run")
    usual = replace(find_size("tiny"), guidance=6.0)
    monkeypatch.setattr("wandistiller.sample.job._nearest_size", lambda transformers: usual)
    wanted = SampleConfig(model=str(done.output), prompt=("x",), output=tmp_path / "x.png", device="cpu")
    assert prepare(wanted).guidance[0] == guidance
    assert prepare(replace(wanted, cfg_scale=3.0)).guidance[0] == 3.0
    assert read_learnt_guidance(done.output) == (4.0 if learns else None)


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path, two_layers, monkeypatch):
    both = {**QUICK, **PROMPTS, "student_config": two_layers, "use_ema": True}
    distill(**both, output_dir=tmp_path / "straight", num_prompts=3, num_steps=4)
    # Two steps of four samples take three prompts of three steps each; two more steps change nothing about that.
    distill(**both, output_dir=tmp_path / "run", num_steps=2)
    monkeypatch.setattr("wandistiller.train.teacher.Teacher.answer", lambda *a, **k: pytest.fail("asked again"))
    with pytest.raises(UsageError, match="3 prompts, and --num-prompts is 4"):
        distill(**both, output_dir=tmp_path / "run", num_steps=4, resume="auto", num_prompts=4)
    with pytest.raises(UsageError, match="guidance was 1"):
        distill(**both, output_dir=tmp_path / "run", num_steps=4, resume="auto", guidance_scale=3.0)
    distill(**both, output_dir=tmp_path / "run", num_steps=4, resume="auto")
    name = "model/transformer/diffusion_pytorch_model.safetensors"
    straight, resumed = (load_file(tmp_path / folder / name) for folder in ("straight", "run"))
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)


OTHERS = {
    "another student": ({"student": {"depth": 1}}, "another student.\n  why: num_layers was 2 and is 1"),
    "other layers": ({"student": {"layers": [0, 1]}}, r"layers was spread and is \[0, 1\]"),
    "another start": ({"student_init": "random"}, "--student-init was teacher and is random"),
    "another teacher": ({}, "another teacher"),
    "kept answers": ({"cache_teacher": True, "teacher_draws": 1}, "--cache-teacher was False and is True"),
}


def test_a_run_goes_on_with_its_own_teacher_and_student_alone(tmp_path, two_layers, two_expert_folder, monkeypatch):
    both = {**QUICK, **DATASET, "student_config": two_layers, "output_dir": tmp_path / "run"}
    distill(**both, num_steps=1)
    facts = (tmp_path / "run" / "student.json").read_text()
    monkeypatch.setattr("wandistiller.models.stored.StoredModel.read", lambda *a, **k: pytest.fail("weights were read"))
    for name, (changes, words) in OTHERS.items():
        changes = dict(changes)
        if "student" in changes:
            changes["student_config"] = tmp_path / "other.json"
            changes["student_config"].write_text(json.dumps(changes.pop("student")))
        if name == "another teacher":
            changes["teacher_path"] = str(two_expert_folder)
        with pytest.raises(UsageError, match=words):
            distill(**{**both, **changes}, num_steps=2, resume="auto")
        assert (tmp_path / "run" / "student.json").read_text() == facts


def test_a_student_with_other_channels_draws_through_its_adapter(tmp_path, capsys):
    path = tmp_path / "student.json"
    path.write_text(json.dumps({"depth": 2, "latent_channels": 4}))
    run = tmp_path / "run"
    distill(**QUICK, **PROMPTS, student_config=path, output_dir=run, num_steps=2, sample_every=2, sample_steps=2)
    assert (run / "model" / "channel_adapter.json").is_file()
    assert "WanPipeline cannot apply the adapter" in capsys.readouterr().err
    assert len(list((run / "samples" / "step-00000002").glob("*.png"))) == 3
    ours = sample(model=str(run / "model"), prompt="x", width=32, height=32, steps=2, output=tmp_path / "x.png")
    assert ours[0].latents.shape[0] == 8, "the VAE's channels"
    page = report(run=run, num_prompts=1, steps=1, device="cpu").output.read_text()
    assert "wandistiller sample applies and WanPipeline cannot" in page


def test_through_an_adapter_the_same_seed_draws_the_same(tmp_path, tiny_folder):
    """A student of all layers that only sees more channels is its teacher, so both draw one picture from one seed."""
    path, folder, adapter = tmp_path / "student.json", tmp_path / "student", random_adapter(8, 12, seed=1)
    path.write_text(json.dumps({"latent_channels": 12}))
    stored = inspect_checkpoint(tiny_folder / "transformer", TRANSFORMER)
    student = derive_student(stored.read, stored.config, read_student_config(path, stored.config), adapter=adapter).model
    shutil.copytree(tiny_folder, folder)
    student.save_pretrained(folder / "transformer")
    adapter.save(folder)
    same = {"prompt": "x", "width": 32, "height": 32, "steps": 3, "seed": 2}
    theirs, ours = (sample(model=str(each), output=tmp_path / "x.png", **same)[0] for each in (tiny_folder, folder))
    torch.testing.assert_close(ours.latents, theirs.latents, rtol=0, atol=0.01)  # UniPC magnifies rounding close to sigma 1
    text, how = torch.randn(2, 4, 32), {"num_steps": 3, "shift": 3.0, "solver": "euler", "cfg_scale": 1.0, "seed": 2}
    drawing = Drawing(
        prompts="ab", text=text, empty_text=text[0], latent_shape=(8, 1, 4, 4), dtype=torch.float32, adapter=adapter, **how
    )
    plain = {"device": torch.device("cpu"), "precision": "no"}
    teacher = WanTransformer3DModel.from_pretrained(tiny_folder / "transformer")
    theirs, ours = draw(teacher, replace(drawing, adapter=None), [0, 1], **plain), draw(student, drawing, [0, 1], **plain)
    torch.testing.assert_close(adapter.up(ours), theirs, rtol=1e-3, atol=1e-4)


def test_through_an_adapter_drawing_starts_from_the_teachers_noise(tmp_path, tiny_folder, monkeypatch):
    """Noise has no mean to take off and no spread to divide by, whatever those of the data are."""
    path, folder, rotation = tmp_path / "student.json", tmp_path / "student", random_adapter(8, 4, seed=1)
    path.write_text(json.dumps({"latent_channels": 4}))
    adapter = replace(rotation, mean=torch.arange(8.0), std=torch.full((4,), 2.0))
    stored = inspect_checkpoint(tiny_folder / "transformer", TRANSFORMER)
    student = derive_student(stored.read, stored.config, read_student_config(path, stored.config), adapter=adapter).model
    shutil.copytree(tiny_folder, folder)
    student.save_pretrained(folder / "transformer")
    adapter.save(folder)
    given, forward = [], WanTransformer3DModel.forward

    def noted(model, hidden_states, *args, **options):
        if type(hidden_states) is torch.Tensor:  # what is predicted is traced without numbers
            given.append(hidden_states.clone())
        return forward(model, hidden_states, *args, **options)

    monkeypatch.setattr(WanTransformer3DModel, "forward", noted)
    for each in (tiny_folder, folder):
        sample(model=str(each), prompt="x", width=32, height=32, steps=1, cfg_scale=1.0, output=tmp_path / "x.png")
    text, how = torch.randn(1, 4, 32), {"num_steps": 1, "shift": 3.0, "solver": "euler", "cfg_scale": 1.0, "seed": 2}
    drawing = Drawing(prompts="a", text=text, empty_text=text[0], latent_shape=(8, 1, 4, 4), dtype=torch.float32, **how)
    teacher = WanTransformer3DModel.from_pretrained(tiny_folder / "transformer")
    for model, map_ in ((teacher, None), (student, adapter)):
        draw(model, replace(drawing, adapter=map_), [0], device=torch.device("cpu"), precision="no")
    assert len(given) == 4
    for theirs, ours in (given[:2], given[2:]):
        torch.testing.assert_close(ours, rotation.rotate(theirs))


def test_refreshed_answers_come_from_new_noise_and_resume_to_the_bit(tmp_path, two_layers):
    both = {**QUICK, **PROMPTS, "student_config": two_layers, "num_prompts": 6, "refresh_every": 2}
    distill(**both, output_dir=tmp_path / "straight", num_steps=5)
    refreshed = tmp_path / "straight" / "cache" / "refreshed"
    assert {path.name.split("-")[2] for path in refreshed.glob("*/shard-*")} == {"0002"}, "the last round alone"
    distill(**both, output_dir=tmp_path / "run", num_steps=3)
    # The state is of the middle of a round, whose answers are made again.
    shutil.rmtree(tmp_path / "run" / "cache" / "refreshed")
    distill(**both, output_dir=tmp_path / "run", num_steps=5, resume="auto")
    name = "model/transformer/diffusion_pytorch_model.safetensors"
    straight, resumed = (load_file(tmp_path / folder / name) for folder in ("straight", "run"))
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)
    assert losses(tmp_path / "straight") == losses(tmp_path / "run")


def test_an_adapter_is_of_the_run_that_it_lies_beside(tmp_path):
    path = tmp_path / "student.json"
    path.write_text(json.dumps({"depth": 2, "latent_channels": 4}))
    run, left = tmp_path / "run", random_adapter(8, 5, seed=3)
    left.save(run / "channel_adapter")
    both = {**QUICK, **PROMPTS, "student_config": path, "output_dir": run}
    distill(**both, num_steps=1)
    made = ChannelAdapter.load(run / "channel_adapter")
    assert made.student_channels == 4 and made.kind == "pca"
    changed = replace(made, mean=made.mean + 1)
    changed.save(run / "channel_adapter")
    distill(**both, num_steps=2, resume="auto")
    assert torch.equal(ChannelAdapter.load(run / "channel_adapter").mean, changed.mean)


def test_the_students_description_says_what_it_is_trained_at(tmp_path, monkeypatch):
    path = tmp_path / "student.json"
    path.write_text(json.dumps({"depth": 2, "image_size": 48, "num_frames": 5, "text_max_length": 3}))
    run = tmp_path / "run"
    sizes = {"width": None, "height": None, "frames": ()}
    distill(**{**QUICK, **sizes}, **PROMPTS, student_config=path, output_dir=run, num_steps=1, sample_every=1, sample_steps=1)
    about = json.loads(next((run / "cache" / "teacher").glob("*/records.json")).read_text())["about"]
    assert about["shape"] == [8, 2, 6, 6]
    assert list((run / "samples" / "step-00000001").glob("*.mp4"))
    beyond = []
    forward = WanTransformer3DModel.forward

    def noted(model, hidden_states, timestep, encoder_hidden_states, *args, **options):
        beyond.append(float(encoder_hidden_states[:, 3:].abs().max()))
        return forward(model, hidden_states, timestep, encoder_hidden_states, *args, **options)

    monkeypatch.setattr(WanTransformer3DModel, "forward", noted)
    prompt = "a prompt of many more tokens than three"
    sample(model=str(run / "model"), prompt=prompt, width=32, height=32, steps=1, output=tmp_path / "x.png")
    assert beyond and not any(beyond), "drawn with no more of a caption than it was taught with"


def test_a_teacher_of_two_experts(tmp_path, two_layers, two_expert_folder, monkeypatch):
    loads, load = [], Experts._load
    monkeypatch.setattr(Experts, "_load", lambda experts, index: loads.append(index) or load(experts, index))
    both = {**QUICK, "teacher_path": str(two_expert_folder), "student_config": two_layers, "num_steps": 4}
    distill(**both, **DATASET, output_dir=tmp_path / "live", expert_steps=2)
    assert loads == [0, 1], "each is loaded for its turn"
    distill(**both, **PROMPTS, output_dir=tmp_path / "rolled")
    for name in ("live", "rolled"):
        index = json.loads((tmp_path / name / "model" / "model_index.json").read_text())
        assert index["transformer_2"] == [None, None] and not (tmp_path / name / "model" / "transformer_2").exists()
        WanPipeline.from_pretrained(tmp_path / name / "model")


@pytest.fixture(scope="module")
def other_experts(two_expert_folder, tmp_path_factory):
    """A second expert of another shape, by the name of what is other about it."""
    config = inspect_checkpoint(two_expert_folder / "transformer", TRANSFORMER).config
    found = {}
    for name, value in (("text_dim", 16), ("in_channels", 4), ("num_layers", 1)):
        found[name] = tmp_path_factory.mktemp("expert") / name
        WanTransformer3DModel(**{**config, name: value}).save_pretrained(found[name])
    return found


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("text_dim", "text_dim is 32 in one and 16 in the other"),
        ("in_channels", "in_channels is 8 in one and 4 in the other"),
        ("0.5", "boundary_ratio in its model_index.json is '0.5'"),
        (1.5, "boundary_ratio in its model_index.json is 1.5"),
        (0.0, "boundary_ratio in its model_index.json is 0.0"),
        (None, "does not say at which sigma"),
    ],
)
def test_experts_that_cannot_take_over_are_refused_by_all(
    tmp_path, two_expert_folder, other_experts, monkeypatch, changed, words
):
    folder = tmp_path / "pipeline"
    shutil.copytree(two_expert_folder, folder)
    if changed in other_experts:
        shutil.copytree(other_experts[changed], folder / "transformer_2", dirs_exist_ok=True)
    else:
        index = json.loads((folder / "model_index.json").read_text())
        (folder / "model_index.json").write_text(json.dumps({**index, "boundary_ratio": changed}))
    monkeypatch.setattr("wandistiller.models.stored.StoredModel.read", lambda *a, **k: pytest.fail("weights were read"))
    monkeypatch.setattr("wandistiller.models.text.load_whole", lambda *a, **k: pytest.fail("the text encoder was read"))
    for run in (
        lambda: distill(**{**QUICK, **PROMPTS, "teacher_path": str(folder)}, output_dir=tmp_path / "run", num_steps=1),
        lambda: train(model=str(folder), **DATASET, **SIZE, expert="high", output_dir=tmp_path / "run", num_steps=1),
        lambda: sample(model=str(folder), prompt="x", width=32, height=32, output=tmp_path / "x.png"),
    ):
        with pytest.raises(WanDistillerError) as caught:
            run()
        assert caught.value.exit_code == 2 and words in str(caught.value)


def test_experts_need_not_be_of_one_depth(tmp_path, two_expert_folder, other_experts):
    folder = tmp_path / "pipeline"
    shutil.copytree(two_expert_folder, folder)
    shutil.copytree(other_experts["num_layers"], folder / "transformer_2", dirs_exist_ok=True)
    both = {**QUICK, "teacher_path": str(folder), "num_steps": 1, "output_dir": tmp_path / "run"}
    with pytest.raises(UsageError, match="experts of one depth and width"):
        distill(**both, **DATASET, feature_weight=1.0)
    distill(**both, **PROMPTS)
    assert sample(model=str(folder), prompt="x", width=32, height=32, steps=3, output=tmp_path / "x.png")[0].files[0].exists()


def test_the_caches_stay_as_they_are_until_the_run_ends(tmp_path, two_layers, monkeypatch):
    other = {"model": "tiny-random", **DATASET, **SIZE, "width": 48, "height": 48}
    write, tried = distill_run._write_result, []

    def try_others(*arguments):
        for folder in (tmp_path / "cache", tmp_path / "cache" / ".held_out"):
            with pytest.raises(UsageError, match=r"is in use by process .* with other sizes"):
                encode(**other, cache_dir=folder)
            tried.append(folder)
        return write(*arguments)

    monkeypatch.setattr(distill_run, "_write_result", try_others)
    options = {**QUICK, **DATASET, "cache_dir": tmp_path / "cache", "held_out": "world-heldout:2:1x32x32", "validate_every": 1}
    distill(**options, student_config=two_layers, output_dir=tmp_path / "run", num_steps=1)
    assert len(tried) == 2
    assert encode(**other, cache_dir=tmp_path / "cache").num_latents == 12


def test_noise_is_a_named_baseline_that_says_so(tmp_path, two_layers, capsys):
    distill(**QUICK, **PROMPTS, noisy_latents="noise", student_config=two_layers, output_dir=tmp_path / "run", num_steps=2)
    assert "baseline" in capsys.readouterr().err
    assert len(losses(tmp_path / "run")) == 2


def test_a_student_that_collapses_is_reported(tmp_path, two_layers, capsys):
    wild = {**QUICK, "learning_rate": 0.3, "num_steps": 24}
    distill(**wild, **DATASET, student_config=two_layers, output_dir=tmp_path / "run")
    assert "the student is collapsing" in capsys.readouterr().err


def test_a_random_start_is_worse_at_first(tmp_path, two_layers):
    both = {**QUICK, **DATASET, "student_config": two_layers, "num_steps": 1}
    distill(**both, output_dir=tmp_path / "teacher")
    distill(**both, output_dir=tmp_path / "random", student_init="random")
    assert losses(tmp_path / "random")[0] > losses(tmp_path / "teacher")[0]


NEW_ATTENTION = {"num_heads": 8, "attention_head_dim": 12, "ffn_dim": 16}
BAD = {
    "no teacher": ({"teacher_path": "nowhere"}, "nowhere"),
    "no such teacher on the hub": ({"teacher_path": "foo/bar"}, "point --teacher-path to"),
    "another architecture": ({"teacher": "flux"}, "is not a Wan transformer.\n  why: it looks like a Flux"),
    "another class": ({"teacher": "vace"}, "is a WanVACETransformer3DModel, not a Wan transformer"),
    "a part of a pipeline": ({"teacher": "vae"}, "is not a diffusers pipeline"),
    "a single file": ({"teacher": "transformer/diffusion_pytorch_model.safetensors"}, "Point --teacher-path to"),
    "no transformer": ({"teacher": "without transformer"}, "has no transformer"),
    "no tokenizer": ({"teacher": "without tokenizer"}, "Point --teacher-path to a complete pipeline"),
    "no scheduler": ({"teacher": "without scheduler"}, "copy the folder scheduler of the model"),
    "an empty scheduler": ({"teacher": "without scheduler/scheduler_config.json"}, "has no scheduler"),
    "another solver": (
        {"teacher": {"scheduler/scheduler_config.json": {"_class_name": "DPMSolverMultistepScheduler"}}},
        "with --solver, such as unipc",
    ),
    "other sigmas": ({"teacher": {"scheduler/scheduler_config.json": {"use_karras_sigmas": True}}}, "--solver unipc"),
    "a solver for nothing": ({"data_path": None, **DATASET, "solver": "euler"}, "--solver changes nothing"),
    "too much to draw": ({"samples": 101, "sample_every": 1}, "has 101 prompts"),
    "held-out data that are not there": ({"held_out": "nowhere"}, "Check --held-out"),
    "no prompts": ({"data_path": "missing.txt"}, "missing.txt"),
    "a student that does not divide": ({"student": {"hidden_size": 50, "num_heads": 3}}, "hidden_size"),
    "a patch that does not divide": ({"student": {"patch_size": 3, "image_size": 32}}, "patch"),
    "a patch beside the teacher's": ({"student": {"patch_size": 3}}, "multiple of 48"),
    "a larger patch": ({"student": {"patch_size": 4}, "width": 48, "height": 48}, "Take --width 64 or 32"),
    "a patch of frames": ({"student": {"patch_size": [2, 2, 2]}}, "Take --frames 5"),
    "a patch of frames for pictures": (
        {"student": {"patch_size": [2, 2, 2]}, "data_path": None, "dataset_path": "world:2:1x32x32", "frames": (5,)},
        "no pictures",
    ),
    "more patches than positions": ({"width": 32768}, "Give at most 16384"),
    "clips for a student of pictures": (
        {"student": {"num_frames": 1}, "data_path": None, "dataset_path": "world:4:9x32x32", "frames": (9,)},
        "num_frames = 1, and --frames 9 was given",
    ),
    "another size than the student's": (
        {"student": {"image_size": [32, 64]}},
        "image_size = [32, 64] (height, width), and --width 32 --height 32 was given",
    ),
    "one side": ({"student": {"image_size": 48}, "width": None}, "--width and --height go together"),
    "little from the teacher": ({"student": NEW_ATTENTION}, "attention (100.0 %)"),
    "how to go on with little": ({"student": NEW_ATTENTION}, "--allow-low-coverage"),
    "a state that is not there": ({"resume": "nowhere"}, "--resume nowhere does not exist"),
    "a map that is not there": ({"teacher_device_strategy": "custom", "teacher_device_map": Path("no.json")}, "no.json"),
    "a wrong map": ({"teacher_device_strategy": "custom", "map": {"blcks": "cpu"}}, "did you mean 'blocks'"),
    "a map without custom": ({"map": {"": "cpu"}}, "--teacher-device-strategy custom"),
    "resident without offload": ({"teacher_resident": "999"}, "--teacher-device-strategy offload"),
    "several lengths of what is drawn": ({"frames": (1, 5)}, "--frames 1 5"),
    "named layers and a choice": ({"student": {"layers": [0, 2]}, "layer_choice": "importance"}, "names its layers"),
    "a choice without layers": ({"student_init": "random", "layer_choice": "importance"}, "--student-init teacher"),
    "features without the teacher": ({"feature_weight": 1.0}, "--feature-weight"),
    "nothing to keep": (
        {"data_path": None, **DATASET, "cache_teacher": True, "output_weight": 0.0, "data_weight": 1.0},
        "--cache-teacher",
    ),
    "kept answers of several sizes": (
        {"data_path": None, "dataset_path": "world:2:1+5x32x32", "frames": (5,), "cache_teacher": True},
        "are 1x32x32, 5x32x32",
    ),
    "nothing to refresh": ({"data_path": None, **DATASET, "refresh_every": 2}, "--refresh-every"),
    "guidance without a scale": ({"guidance_weight": 1.0, "output_weight": 0.0}, "--guidance-scale"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_weights_are_read(tmp_path, tiny_folder, monkeypatch, name):
    changes, words = dict(BAD[name][0]), BAD[name][1]
    for given, flag in (("student", "student_config"), ("map", "teacher_device_map")):
        if given in changes:
            changes[flag] = tmp_path / f"{given}.json"
            changes[flag].write_text(json.dumps(changes.pop(given)))
    if "samples" in changes:
        (tmp_path / "samples.txt").write_text("a ball\n" * changes.pop("samples"))
        changes["sample_prompts"] = (str(tmp_path / "samples.txt"),)
    if "teacher" in changes:
        changes["teacher_path"] = str(wrong_teacher(changes.pop("teacher"), tiny_folder, tmp_path / "teacher"))
    monkeypatch.setattr("wandistiller.models.stored.StoredModel.read", lambda *a, **k: pytest.fail("weights were read"))
    monkeypatch.setattr("wandistiller.models.text.load_whole", lambda *a, **k: pytest.fail("the text encoder was read"))
    with pytest.raises(WanDistillerError) as caught:
        distill(**{**QUICK, **PROMPTS, **changes}, output_dir=tmp_path / "run", num_steps=1)
    assert caught.value.exit_code == 2
    assert words in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("data", "dialect"), [(DATASET, "diffusers"), (PROMPTS, "original")], ids=["latents", "prompts"])
def test_the_result_has_the_vae_that_was_given(tmp_path, two_layers, two_expert_folder, given_vae, data, dialect):
    """Also where the teacher's pipeline has none, and where its index loses an expert."""
    vae, paths = given_vae
    teacher = tmp_path / "teacher"
    shutil.copytree(two_expert_folder, teacher)
    shutil.rmtree(teacher / "vae")
    index = json.loads((teacher / "model_index.json").read_text())
    (teacher / "model_index.json").write_text(json.dumps({**index, "vae": [None, None]}))
    options = {**QUICK, **data, "teacher_path": str(teacher), "student_config": two_layers, "vae_checkpoint": paths[dialect]}
    distill(**options, output_dir=tmp_path / "run", cache_dir=tmp_path / "cache", num_steps=1)
    pipeline = WanPipeline.from_pretrained(tmp_path / "run" / "model")
    found, expected = pipeline.vae.state_dict(), vae.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert pipeline.vae.config.latents_std == vae.config.latents_std
    assert pipeline.transformer_2 is None


@pytest.mark.parametrize("data", [PROMPTS, DATASET], ids=["prompts", "latents"])
def test_a_vae_of_other_channels_is_refused_before_anything_is_encoded(tmp_path, monkeypatch, two_layers, wide_vae, data):
    monkeypatch.setattr("wandistiller.models.stored.StoredModel.read", lambda *a, **k: pytest.fail("weights were read"))
    options = {**QUICK, **data, "student_config": two_layers, "cache_dir": tmp_path / "new", "vae_checkpoint": wide_vae}
    with pytest.raises(UsageError, match="The VAE has 12 latent channels, the transformer draws 8") as caught:
        distill(**options, output_dir=tmp_path / "run", num_steps=1)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists() and not (tmp_path / "new").exists()


def wrong_teacher(kind, tiny_folder, folder):
    """Return a pipeline with something wrong (values of its JSON files, for a mapping), or a piece of one."""
    if isinstance(kind, str) and (tiny_folder / kind).exists():
        return tiny_folder / kind
    shutil.copytree(tiny_folder, folder)
    if isinstance(kind, dict):
        for name, values in kind.items():
            content = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**content, **values}))
        return folder
    if kind.startswith("without "):
        gone = folder / kind.removeprefix("without ")
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    elif kind == "vace":
        config = json.loads((folder / "transformer" / "config.json").read_text())
        (folder / "transformer" / "config.json").write_text(json.dumps({**config, "_class_name": "WanVACETransformer3DModel"}))
    else:
        (folder / "transformer" / "config.json").unlink()
        weights = {"double_blocks.0.img_attn.qkv.weight": torch.zeros(1)}
        save_file(weights, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return folder


@pytest.mark.parametrize("content", [b"", b"\n\n", b"caf\xe9\n"])
def test_prompt_files_that_cannot_be_used(tmp_path, capsys, content):
    (tmp_path / "prompts.txt").write_bytes(content)
    flags = [
        "--teacher_path",
        "tiny-random",
        "--data_path",
        str(tmp_path / "prompts.txt"),
        "--output_dir",
        str(tmp_path / "run"),
    ]
    assert main(["distill", *flags]) == 2
    assert "prompts.txt" in capsys.readouterr().err
