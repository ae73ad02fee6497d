"""What a teacher is asked beforehand: other answers have other names, and nobody is left out."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from wandistiller.config.distill import DistillConfig
from wandistiller.distributed.ranks import Ranks
from wandistiller.errors import UsageError
from wandistiller.memory.monitor import Monitor
from wandistiller.models.sizes import find_size
from wandistiller.models.tiny import write_random_pipeline
from wandistiller.train.asking import Asking
from wandistiller.train.distill_job import prepare_distillation
from wandistiller.train.questions import open_questions
from wandistiller.train.teacher import Answer

SIZE = {"width": 32, "height": 32, "frames": (1,), "max_aspect": 1.0, "device": "cpu", "workers": 0}
DATASET = {"dataset_path": "world:3:1x32x32", "cache_teacher": True, "rollout_batch": 2}
PROMPTS = {"data_path": "world:3:1x32x32", "rollout_steps": 3, "rollout_batch": 2}


@pytest.fixture(scope="module")
def other_pipeline(tmp_path_factory):
    path = tmp_path_factory.mktemp("other") / "pipeline"
    write_random_pipeline(path, find_size("tiny"), seed=3)
    return path


def prepare(folder, **changes):
    options = {"teacher_path": "tiny-random", **SIZE, "cache_dir": folder / "cache", "output_dir": folder / "run", **changes}
    return prepare_distillation(DistillConfig(**options))


def files(job, questions):
    found = Asking(job, questions, None, Ranks(), None).plan()
    return [(found.name, shard.file_name) for shard in found.shards]


@pytest.fixture(scope="module", params=[DATASET, PROMPTS], ids=["data", "prompts"])
def asked(request, tmp_path_factory):
    """A kind of questions: its flags, folder, encoded questions and the names of its answers."""
    folder = tmp_path_factory.mktemp("asking")
    job = prepare(folder, **request.param)
    questions = open_questions(job)
    return request.param, folder, questions, files(job, questions)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"teacher_dtype": "bfloat16"},
        {"teacher_dtype": "float8", "teacher_device_strategy": "offload"},
        {"sigma_shift": 2.0},
        {"caption_dropout": 0.0},
        {"guidance_scale": 3.0, "guidance_weight": 1.0, "output_weight": 0.0},
    ],
)
def test_what_answers_depend_on_is_in_their_names(asked, changes):
    data, folder, questions, before = asked
    assert set(files(prepare(folder, **data, **changes), questions)).isdisjoint(before)


class Hearing:
    """A teacher that says what text it was asked with."""

    def answer(self, noisy, sigma, text, *, scale=1.0, blocks=()):
        velocity = text.float().sum((1, 2)).view(-1, 1, 1, 1, 1).expand_as(noisy)
        return Answer(velocity, velocity)


@pytest.mark.parametrize("data", [DATASET, PROMPTS], ids=["data", "prompts"])
def test_samples_have_the_text_that_was_asked_with(tmp_path, data):
    job = prepare(tmp_path, **data, caption_dropout=0.5)
    questions = open_questions(job)
    samples = Asking(job, questions, Hearing(), Ranks(), Monitor([job.device])).ask()
    seen = []
    for index in range(len(samples)):
        found = samples.read(index, None)
        assert float(found["target"].mean()) == pytest.approx(float(found["text"].sum()), rel=1e-2, abs=1e-2)
        seen.append(found["text"] is questions.samples.empty_text)
    assert {True, False} == set(seen)


def test_answers_with_and_without_guidance_have_other_names_at_the_same_scale(asked):
    data, folder, questions, _ = asked
    plain = files(prepare(folder, **data, guidance_scale=3.0), questions)
    guided = files(prepare(folder, **data, guidance_scale=3.0, guidance_weight=1.0, output_weight=0.0), questions)
    assert set(plain).isdisjoint(guided)


@pytest.mark.parametrize("name", ["teacher_path", "dtype", "size", "vae_checkpoint"])
def test_what_was_encoded_is_in_their_names(asked, other_pipeline, tmp_path, name):
    data, _, _, before = asked
    changes = {
        "teacher_path": {"teacher_path": str(other_pipeline)},
        "dtype": {"dtype": "bfloat16"},
        "size": {"width": 48, "height": 48},
        "vae_checkpoint": {"vae_checkpoint": other_pipeline / "vae"},
    }[name]
    job = prepare(tmp_path, **{**data, **changes})
    # Prompts are never seen by the VAE.
    is_same = name == "vae_checkpoint" and data is PROMPTS
    assert set(files(job, open_questions(job))).isdisjoint(before) != is_same


@pytest.mark.parametrize("name", ["second expert", "boundary", "solver", "--solver"])
def test_all_of_a_teacher_of_two_experts_is_in_their_names(two_expert_folder, tiny_folder, tmp_path, name):
    folder = tmp_path / "pipeline"
    shutil.copytree(two_expert_folder, folder)
    job = prepare(tmp_path, **{**PROMPTS, "teacher_path": str(folder)})
    before = files(job, open_questions(job))
    if name == "second expert":
        path = folder / "transformer_2" / "diffusion_pytorch_model.safetensors"
        weights = load_file(path)
        save_file({**weights, "proj_out.bias": weights["proj_out.bias"] + 1}, path)
    elif name == "boundary":
        index = json.loads((folder / "model_index.json").read_text())
        (folder / "model_index.json").write_text(json.dumps({**index, "boundary_ratio": 0.5}))
    elif name == "solver":
        shutil.copytree(tiny_folder / "scheduler", folder / "scheduler", dirs_exist_ok=True)
    asked = {"solver": "unipc"} if name == "--solver" else {}
    job = prepare(tmp_path, **{**PROMPTS, "teacher_path": str(folder)}, **asked)
    assert set(files(job, open_questions(job))).isdisjoint(before)


OF_DATA = [{"sigma_mean": 3.0}, {"sigma_std": 2.0}, {"sigma_sampling": "uniform"}, {"teacher_draws": 2}]
OF_PROMPTS = [{"guidance_scale": 3.0}, {"rollout_steps": 2}]


@pytest.mark.parametrize("changes", [*OF_DATA, *OF_PROMPTS])
def test_what_one_kind_depends_on_is_in_its_names_alone(asked, changes):
    data, folder, questions, before = asked
    is_own = changes in (OF_DATA if data is DATASET else OF_PROMPTS)
    assert (files(prepare(folder, **{**data, **changes}), questions) != before) == is_own


def test_what_answers_do_not_depend_on_is_not(asked):
    data, folder, questions, before = asked
    same = {"batch_size": 3, "learning_rate": 1.0, "teacher_device_strategy": "cpu", "num_steps": 99}
    assert files(prepare(folder, **data, **same), questions) == before


def test_a_replaced_picture_is_asked_about_again(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for number in range(3):
        Image.fromarray(np.full((32, 32, 3), 80 * number, np.uint8)).save(data / f"{number}.png")
        (data / f"{number}.txt").write_text(f"grey {number}")
    options = {**DATASET, "dataset_path": str(data), "rollout_batch": 1}
    job = prepare(tmp_path, **options)
    before = files(job, open_questions(job))
    Image.fromarray(np.full((32, 32, 3), 255, np.uint8)).save(data / "1.png")
    after = files(job, open_questions(prepare(tmp_path, **options)))
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]


def test_nobody_is_left_out_where_the_last_shard_is_not_full(asked):
    data, folder, questions, _ = asked
    shards = Asking(prepare(folder, **data), questions, None, Ranks(), None).plan().shards
    assert [list(shard.items) for shard in shards] == [[0, 1], [2]]
    per_item = {"data": 4, "prompts": 3}["data" if data is DATASET else "prompts"]
    assert [shard.num_records for shard in shards] == [2 * per_item, per_item]


@pytest.mark.parametrize("changes", [{"rollout_batch": 3}, {"rollouts_per_prompt": 2, "teacher_draws": 2}, {"seed": 1}])
def test_a_run_does_not_go_on_with_other_answers(asked, changes):
    data, folder, questions, _ = asked
    facts = json.loads(json.dumps(Asking(prepare(folder, **data), questions, None, Ranks(), None).facts()))
    Asking(prepare(folder, **data, num_steps=99), questions, None, Ranks(), None).check(facts)
    with pytest.raises(UsageError, match="other answers of the teacher"):
        Asking(prepare(folder, **{**data, **changes}), questions, None, Ranks(), None).check(facts)


def test_a_round_is_as_many_questions_from_other_noise(asked):
    data, folder, questions, before = asked
    job = prepare(folder, **data, refresh_every=10)
    asking = Asking(job, questions, None, Ranks(), None, 9)
    assert [asking.round_at(step) for step in (0, 9, 10, 29)] == [0, 0, 1, 2]
    first, later = asking.plan(), Asking(job, questions, None, Ranks(), None, 25).plan()
    assert [(first.name, shard.file_name) for shard in first.shards] == before
    num_draws = 4 if data is DATASET else 1
    assert [shard.items for shard in later.shards] == [shard.items for shard in first.shards]
    assert {shard.draws for shard in later.shards} == {range(2 * num_draws, 3 * num_draws)}


def test_more_prompts_and_more_draws_only_add_shards(tmp_path):
    few, some, more = (
        files(job, open_questions(job))
        for job in (
            prepare(tmp_path, **PROMPTS, num_prompts=2),
            prepare(tmp_path, **PROMPTS),
            prepare(tmp_path, **PROMPTS, rollouts_per_prompt=2),
        )
    )
    assert (len(few), len(some), len(more)) == (1, 2, 4)
    assert some[:1] == few and more[:2] == some
