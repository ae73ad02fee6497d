import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wandistiller.config.distill import DistillConfig
from wandistiller.data.judge import judge
from wandistiller.data.world import caption_of, parse_caption, render, scene_at
from wandistiller.report.drawing import Artist, Drawn
from wandistiller.report.judgement import caption_words, judge_drawings
from wandistiller.report.page import Column, Command, Content, build_page, count_parameters
from wandistiller.report.pictures import encode_frames, show
from wandistiller.report.run_folder import Metrics, RunFolder
from wandistiller.units import Bytes

EVIL = """<script>alert("x")</script> & 'a' </style>"""


def content(prompts, teacher, student, **options):
    config = DistillConfig(teacher_path=EVIL, data_path=EVIL, batch_size=3)
    metrics = Metrics([{"step": 10, "time": 60, "loss": 0.5, EVIL + "loss": 0.25, "memory/host_gb": 1.0}])
    return Content(
        run=RunFolder(folder=Path("run"), config=config, metrics=metrics),
        columns=[
            Column(Drawn(Artist(name, EVIL, 1.0), size, clips, 8), judge_drawings(clips, prompts))
            for name, size, clips in (("Teacher", 2_000_000, teacher), ("Student", 500_000, student))
        ],
        prompts=prompts,
        num_shown=8,
        how=EVIL,
        commands=[Command(EVIL, EVIL)],
        **options,
    )


def drawings(count, frames=1):
    scenes = [scene_at(index, moving=frames > 1) for index in range(count)]
    return [caption_of(scene) for scene in scenes], [render(scene, frames=frames) for scene in scenes]


def test_whatever_people_write_is_text():
    black = np.zeros((1, 32, 32, 3), np.uint8)
    page = build_page(content([EVIL], [black], [black]))
    assert "<script" not in page
    assert page.count("</style>") == 1
    # Title, headline, prompt, both pictures' descriptions, how, a command and what it is for, two settings, and in the chart.
    assert page.count("&lt;script&gt;alert(&quot;x&quot;)") >= 10


def test_the_page_needs_nothing_from_outside():
    prompts, clips = drawings(2)
    page = build_page(content(prompts, clips, clips))
    assert not re.findall(r"https?://|@import|<link|<script|<iframe", page)
    sources = re.findall(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)', page)
    assert len(sources) == 4
    assert all(source.startswith("data:image/png;base64,") for source, _ in sources)


def test_marks_are_of_all_prompts_and_only_some_are_shown():
    prompts, clips = drawings(12)
    wrong = [*clips[:-1], np.zeros_like(clips[-1])]
    page = build_page(content(prompts, clips, wrong))
    findings = [judge(clip, prompt).findings for clip, prompt in zip(clips, prompts, strict=True)]
    total = sum(map(len, findings))
    missed = sum(not finding.is_right for finding in judge(wrong[-1], prompts[-1]).findings)
    assert missed > 0
    assert f"{total} of {total}<" in page
    assert f"{total - missed} of {total}<" in page
    assert f"{(total - missed) / total:.1%}" in page
    assert "N = 12 captions" in page
    assert page.count("<article") == 8
    assert "4 more were drawn" in page


def test_the_same_drawings_are_the_whole_of_the_teachers_marks():
    prompts, clips = drawings(3)
    assert "<span>Quality</span><strong>100.0%</strong>" in build_page(content(prompts, clips, clips))
    blank = [np.zeros_like(clip) for clip in clips]
    assert "only" in build_page(content(prompts, blank, blank))  # a teacher that draws nothing is no measure


def test_prompts_that_are_no_captions_have_no_marks():
    black = np.zeros((1, 32, 32, 3), np.uint8)
    page = build_page(content(["a cat"], [black], [black]))
    assert "Marks" not in page
    assert "25%" in page  # the student's size


def test_memory_is_beside_what_was_predicted():
    prompts, clips = drawings(1)
    page = build_page(content(prompts, clips, clips, predicted={"host": Bytes(2**30), "cuda:0": Bytes(2**31)}))
    rows = re.findall(r"<tr><th>(host|cuda:0)</th><td>([^<]*)</td><td>([^<]*)</td></tr>", page)
    assert rows == [("host", "1.0 GiB", "953.7 MiB"), ("cuda:0", "2.0 GiB", "-")]
    assert "predicted" not in build_page(content(prompts, clips, clips))


@pytest.mark.parametrize("frames", [1, 5])
@pytest.mark.parametrize("index", range(12))
def test_a_caption_in_pieces_is_the_caption(frames, index):
    scene = scene_at(index, moving=index % 2 == 0)
    clip = render(scene, frames=frames)
    words = list(caption_words(caption_of(scene), judge(clip, scene)))
    assert "".join(piece.text for piece in words) == caption_of(scene)
    other = render(scene_at(index + 1, moving=True), frames=frames)
    verdict = judge(other, scene)
    wrong = [
        piece.finding for piece in caption_words(caption_of(scene), verdict) if piece.finding and not piece.finding.is_right
    ]
    assert wrong == [finding for finding in verdict.findings if not finding.is_right]


def test_a_thing_that_should_rest_and_moves():
    caption = "a small red circle at the left on a black background"
    moving = parse_caption(caption + ", the red circle moves right")
    words = list(caption_words(caption, judge(render(moving, frames=5), caption)))
    assert "".join(piece.text for piece in words) == caption + ", still"
    assert words[-1].finding.seen == "right"


@pytest.mark.parametrize("frames", [1, 5])
def test_pictures_come_back_as_they_were(frames):
    _, (clip,) = drawings(1, frames)
    element = show(clip, 8, 'a "cat"')
    kind, data = re.search(r"data:image/(\w+);base64,([^\"]*)", element).groups()
    assert kind == ("png" if frames == 1 else "webp")
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert getattr(image, "n_frames", 1) == frames
    for index, frame in enumerate(clip):
        image.seek(index)
        assert np.array_equal(np.asarray(image.convert("RGB")), frame)
    assert 'class="crisp"' in element
    assert "width:224px" in element
    assert "crisp" not in show(np.zeros((1, 256, 256, 3), np.uint8), 8, "")


def test_large_clips_are_compressed():
    clip = np.random.default_rng(0).integers(0, 255, (5, 160, 160, 3), np.uint8)
    assert len(encode_frames(clip, 8)) < clip.nbytes / 2


def test_parameters_in_words():
    assert [count_parameters(number).replace("\u00a0", " ") for number in (14_288_901_184, 466_000, 12)] == [
        "14.3 B",
        "466 k",
        "12",
    ]
