"""What is drawn where flags do not say it."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import WanTransformer3DModel

from wandistiller.config.sample import SampleConfig
from wandistiller.models.sizes import find_size
from wandistiller.sample import sampler
from wandistiller.sample.job import prepare


def test_a_student_of_no_named_size_is_drawn_as_its_teacher_is(tiny_folder, tmp_path):
    usual = find_size("tiny-world")
    student = WanTransformer3DModel(**{**find_size("tiny").transformer, "num_layers": 1, "ffn_dim": 40})
    student.save_pretrained(tmp_path / "student")
    flags = {"model": str(tiny_folder), "checkpoint": tmp_path / "student", "prompt": ("x",), "output": tmp_path / "x.mp4"}
    job = prepare(SampleConfig(**flags))
    assert (job.geometry.width, job.geometry.height, job.geometry.frames) == (usual.width, usual.height, usual.frames)
    assert (job.guidance[0], job.fps) == (usual.guidance, usual.fps)


@pytest.mark.parametrize(("is_automatic", "name"), [(False, "gpu"), (True, "auto")])
def test_a_text_encoder_has_no_room_by_right(is_automatic, name, monkeypatch):
    """Where ``auto`` has put the transformer onto the card, the text encoder goes where there is room."""
    asked = []
    monkeypatch.setattr(
        sampler, "choose_placement", lambda name, **options: asked.append(name) or SimpleNamespace(attach=lambda *given: None)
    )
    config = SampleConfig(model="tiny", placement="gpu")
    job = SimpleNamespace(config=config, device=torch.device("cuda"), is_automatic=is_automatic)
    encoder = torch.nn.ModuleDict({"encoder": torch.nn.ModuleDict({"block": torch.nn.ModuleList()})})
    sampler._place_text_encoder(job, encoder)
    assert asked == [name]
