"""``report`` end to end on a tiny distillation."""

import base64
import html
import io
import re
import shlex
import shutil

import numpy as np
import pytest
from PIL import Image

from wandistiller.api import distill, report, sample, train
from wandistiller.cli.main import main
from wandistiller.data.judge import judge_many
from wandistiller.data.world import caption_of, scene_at
from wandistiller.errors import UsageError

QUICK = {"width": 32, "height": 32, "batch_size": 4, "workers": 0, "log_every": 1, "seed": 3}
DRAWN = {"num_prompts": 3, "steps": 2, "seed": 5, "device": "cpu"}


@pytest.fixture(scope="module")
def distilled(tmp_path_factory, own_cache):
    run = tmp_path_factory.mktemp("runs") / "run"
    distill(teacher_path="tiny-random", data_path="world:24:1x32x32", rollout_steps=2, num_steps=4, output_dir=run, **QUICK)
    return run


def pictures(page):
    found = re.findall(r"data:image/(?:png|webp);base64,([^\"]*)", page)
    images = [Image.open(io.BytesIO(base64.b64decode(data))) for data in found]
    return [np.stack([_frame(image, index) for index in range(getattr(image, "n_frames", 1))]) for image in images]


def _frame(image, index):
    image.seek(index)
    return np.asarray(image.convert("RGB"))


def test_marks_are_of_the_pictures_on_the_page(distilled):
    done = report(run=distilled, **DRAWN)
    assert done.output == distilled / "report.html"
    page = done.output.read_text()
    shown = pictures(page)
    captions = [caption_of(scene_at(index, held_out=True)) for index in range(3)]
    assert all(f">{caption}<" in page for caption in captions)
    assert [picture.shape for picture in shown] == [(1, 32, 32, 3)] * 6
    assert done.marks == {"teacher": judge_many(shown[0::2], captions), "student": judge_many(shown[1::2], captions)}
    assert not np.array_equal(shown[0], shown[1])
    assert not re.search(r'(src|href)="http|url\(', page)


def test_the_commands_on_the_page_work(distilled, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    shutil.copytree(distilled, run)
    page = report(run=run, **DRAWN).output.read_text()
    go_on, draw = (shlex.split(html.unescape(line)) for line in re.findall(r"<pre>(.*?)</pre>", page))
    monkeypatch.chdir(tmp_path)
    assert main(draw[1:]) == 0
    assert np.array_equal(np.asarray(Image.open("student.png")), pictures(page)[1][0])
    assert main(go_on[1:]) == 0, capsys.readouterr().err
    assert report(run=run, **DRAWN).output.read_text().count("steps in") == 1
    assert (run / "states" / "step-00000008").is_dir()


def test_a_student_that_is_the_teacher_draws_the_same(distilled, tiny_folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(distilled, run)
    shutil.rmtree(run / "model")
    shutil.copytree(tiny_folder, run / "model")
    done = report(run=run, **DRAWN, frames=5, prompts=("<b>", caption_of(scene_at(0))), output=tmp_path / "page.html")
    assert done.marks["teacher"] == done.marks["student"]
    page = done.output.read_text()
    shown = pictures(page)
    assert shown[0].shape == (5, 32, 32, 3)
    assert all(np.array_equal(*pair) for pair in zip(shown[0::2], shown[1::2], strict=True))
    assert not np.array_equal(shown[0], shown[2])
    assert "<b></p>" not in page


def test_other_prompts_have_other_noise_that_sample_knows(distilled, tmp_path):
    # Drawn together with one of more tokens, which is no caption: whose padding is not left away is zeros.
    longer = "what a picture " * 20
    done = report(run=distilled, **DRAWN, prompts=(longer, "a"), output=tmp_path / "page.html")
    shown = pictures(done.output.read_text())
    common = {"model": "tiny-random", "prompt": "a", "width": 32, "height": 32, "steps": 2, "cfg_scale": 1.0}
    (second,) = sample(**common, seed=6, output=tmp_path / "second.png")
    assert np.array_equal(np.asarray(Image.open(second.files[0])), shown[2][0])
    assert done.marks == {}


def test_a_student_description_that_is_gone_is_not_missed_where_the_run_says_the_size(distilled, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(distilled, run)
    settings = (run / "run.toml").read_text().replace("frames = []", "frames = [1]")
    (run / "run.toml").write_text(f'{settings}student_config = "{tmp_path}/gone.json"\n')
    assert report(run=run, **DRAWN).marks["student"].total


def test_a_run_without_a_teacher_has_one_column(tmp_path):
    run = tmp_path / "run"
    train(
        **QUICK, model="tiny-random", dataset_path="world:8:1x32x32", frames=(1,), max_aspect=1.0, num_steps=2, output_dir=run
    )
    done = report(run=run, **DRAWN)
    assert list(done.marks) == ["model"]
    assert len(pictures(done.output.read_text())) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"teacher_path": "/no/such"}, "no pipeline"),
        ({"width": 50, "height": 32}, "multiple of 16"),
        ({"data_path": "/no/such.txt"}, "does not exist"),
        ({"output": "page.pdf"}, "not an HTML file"),
        ({"width": 32}, "go together"),
        ({"steps": 0}, "--steps"),
        ({"prompts": "x", "data_path": "world"}, "both given"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_drawn(distilled, fields, message, capsys):
    with pytest.raises(UsageError, match=message):
        report(run=distilled, **{**DRAWN, **fields})
    assert "drawing" not in capsys.readouterr().err


def test_a_folder_that_is_no_run_ends_with_2(tmp_path, capsys):
    assert main(["report", "--run", str(tmp_path)]) == 2
    assert "run.toml" in capsys.readouterr().err
    assert main(["report"]) == 2
    assert "--run is missing" in capsys.readouterr().err


def test_a_student_that_has_learnt_guidance_draws_in_one_pass_beside_a_guided_teacher(distilled, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(distilled, run)
    settings = (run / "run.toml").read_text()
    settings = re.sub(r"guidance_scale = .*", "guidance_scale = 3.0", settings)
    (run / "run.toml").write_text(re.sub(r"guidance_weight = .*", "guidance_weight = 1.0", settings))
    page = report(run=run, **DRAWN, prompts=("a",)).output.read_text()
    common = {"prompt": "a", "width": 32, "height": 32, "steps": 2, "seed": 5, "device": "cpu"}
    (guided,) = sample(model="tiny-random", cfg_scale=3.0, output=tmp_path / "teacher.png", **common)
    (plain,) = sample(model=str(run / "model"), cfg_scale=1.0, output=tmp_path / "student.png", **common)
    expected = [np.asarray(Image.open(made.files[0])) for made in (guided, plain)]
    assert all(np.array_equal(shown[0], wanted) for shown, wanted in zip(pictures(page), expected, strict=True))
    assert "half the passes" in page
