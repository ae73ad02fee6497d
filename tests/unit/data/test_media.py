import json

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from wandistiller.data.media import read_picture, to_bytes, write_clip, write_latents, write_picture
from wandistiller.errors import MediaError


def test_pixels_become_bytes():
    pixels = torch.tensor([-1.0, 0.0, 1.0, 3.0]).view(1, 1, 2, 2).expand(3, 1, 2, 2)
    assert to_bytes(pixels)[0, :, :, 0].tolist() == [[0, 128], [255, 255]]


def test_a_picture_and_its_settings(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (1, 16, 32, 3), dtype=np.uint8)
    write_picture(tmp_path / "x.png", frames, {"seed": 3, "prompt": "ä"})
    with Image.open(tmp_path / "x.png") as image:
        assert np.array_equal(np.asarray(image), frames[0])
        assert json.loads(image.text["parameters"]) == {"seed": 3, "prompt": "ä"}


def test_a_clip_comes_back(tmp_path):
    ramp = np.linspace(0, 255, 64).astype(np.uint8)
    frames = np.stack([np.broadcast_to(np.roll(ramp, 4 * t)[None, :, None], (48, 64, 3)) for t in range(9)])
    write_clip(tmp_path / "x.mp4", np.ascontiguousarray(frames), 8, {"seed": 3})
    with av.open(str(tmp_path / "x.mp4")) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        assert container.streams.video[0].average_rate == 8
        decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert decoded.shape == frames.shape
    assert np.abs(decoded.astype(int) - frames).mean() < 4


def test_the_same_clip_is_the_same_bytes(tmp_path):
    """Small clips of noise showed it: with x264's defaults some thirty writings gave two or three files."""
    frames = np.random.default_rng(0).integers(90, 166, (5, 48, 64, 3), dtype=np.uint8)
    written, held = set(), []
    for index in range(60):
        held.append(np.empty(1 + 997 * index, dtype=np.uint8))  # so that memory lies otherwise each time
        write_clip(tmp_path / "x.mp4", frames, 8, {})
        written.add((tmp_path / "x.mp4").read_bytes())
    assert len(written) == 1


def test_latents_and_what_they_are(tmp_path):
    latents = torch.randn(8, 1, 4, 4)
    write_latents(tmp_path / "x.safetensors", latents, {"seed": 3})
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("latent"), latents)
        assert file.metadata()["normalised"] == "true"


def test_an_unreadable_picture_is_named(tmp_path):
    (tmp_path / "x.png").write_text("no picture")
    with pytest.raises(MediaError, match=r"x\.png is not a readable picture"):
        read_picture(tmp_path / "x.png")
    with pytest.raises(MediaError, match="does not exist"):
        read_picture(tmp_path / "none.png")


def test_a_picture_is_turned_upright(tmp_path):
    """Cameras write what their sensor sees and say in EXIF how they were held; 6 is a quarter turn to the right."""
    pixels = np.zeros((4, 8, 3), dtype=np.uint8)
    pixels[0, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "x.png", exif=exif)
    found = np.asarray(read_picture(tmp_path / "x.png"))
    assert np.array_equal(found, np.rot90(pixels, -1))
