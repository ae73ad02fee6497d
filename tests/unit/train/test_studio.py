"""What is drawn while training, and in which shapes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from wandistiller.config.train import TrainConfig
from wandistiller.data.buckets import AllOne, Bucket
from wandistiller.train import studio as studio_module
from wandistiller.train.drawing import draw
from wandistiller.train.samples import DrawSamples
from wandistiller.train.studio import Studio

CPU = torch.device("cpu")
PICTURE, WIDE, SHORT, LONG, SMALL_LONG = (
    Bucket(1, 32, 32),
    Bucket(1, 64, 64),
    Bucket(5, 32, 32),
    Bucket(9, 32, 32),
    Bucket(9, 16, 48),
)


class Samples:
    """Captions by number, of given sizes: a latent for 8x8 pixels, and one frame more for four."""

    trims_text = False
    empty_text = torch.zeros(3, 4)

    def __init__(self, buckets):
        self.buckets = buckets

    def __len__(self):
        return len(self.buckets)

    def caption(self, index):
        return f"caption {index}"

    def text(self, index):
        return torch.full((3, 4), float(index))

    def latent_shape(self, index):
        frames, height, width = self.buckets[index].shape
        return 2, 1 + (frames - 1) // 4, height // 8, width // 8


def make_studio(**options):
    pipeline = SimpleNamespace(shift=1.0, choose_solver=lambda name: "euler", part=lambda name: name)
    config = TrainConfig(sample_every=1, sample_steps=1, cfg_scale=1.0, **options)
    return Studio(config=config, pipeline=pipeline, vae=None, device=CPU, dtype=torch.float32)


def test_captions_are_drawn_in_the_shapes_of_their_own_items():
    found = make_studio().draw_prompts(Samples([PICTURE, SHORT, PICTURE, LONG, SHORT]))
    assert [(each.latent_shape, each.prompts, each.numbers) for each in found] == [
        ((2, 1, 4, 4), ["caption 0", "caption 2"], [0, 2]),
        ((2, 2, 4, 4), ["caption 1"], [1]),
        ((2, 3, 4, 4), ["caption 3"], [3]),
    ]
    assert [each.text[:, 0, 0].tolist() for each in found] == [[0.0, 2.0], [1.0], [3.0]]


@pytest.mark.parametrize(
    ("buckets", "drawn"),
    [
        ([PICTURE] * 6 + [SHORT, LONG, LONG], [0, 1, 2, 7]),
        ([PICTURE, LONG] + [PICTURE] * 3 + [LONG], [0, 1, 2, 3]),
        ([PICTURE] * 2 + [SHORT], [0, 1, 2]),
        ([PICTURE], [0]),
        (AllOne(LONG, 10), [0, 1, 2, 3]),
    ],
    ids=["clips come late", "a clip is among the first", "few", "one", "prompts"],
)
def test_a_longest_clip_is_among_what_is_drawn(buckets, drawn):
    found = make_studio().draw_prompts(Samples(buckets))
    prompts = {number: prompt for each in found for number, prompt in zip(each.numbers, each.prompts, strict=True)}
    assert [prompts[number] for number in sorted(prompts)] == [f"caption {index}" for index in drawn]


@pytest.mark.parametrize(
    ("buckets", "shape"),
    [
        ([WIDE, SMALL_LONG, LONG, SHORT], (2, 3, 4, 4)),
        ([PICTURE, WIDE], (2, 1, 8, 8)),
        (AllOne(SHORT, 3), (2, 2, 4, 4)),
    ],
)
def test_given_prompts_are_as_long_and_then_as_large_as_the_data(monkeypatch, buckets, shape):
    def encode(*parts, **how):
        assert how["place"] is not None, "it may have no room beside what is trained"
        return torch.zeros(len(parts[2]), 3, 4)

    monkeypatch.setattr(studio_module, "encode_prompts", encode)
    (found,) = make_studio(sample_prompts=("a cube", "a cone")).draw_prompts(Samples(buckets))
    assert (found.latent_shape, found.prompts) == (shape, ["a cube", "a cone"])


class Nothing(nn.Module):
    def forward(self, noisy, times, text, return_dict):
        return [torch.zeros_like(noisy)]


def test_noise_goes_by_the_number_of_the_prompt():
    """A model that predicts no velocity gives back the noise: that of the seed and the number."""
    _, clip = make_studio(seed=7).draw_prompts(Samples([PICTURE, SHORT]))
    (drawn,) = draw(Nothing(), clip, [0], device=CPU, precision="no")
    assert torch.equal(drawn, torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(7 + 1)))


def test_pictures_and_clips_are_decoded_together_and_named_in_the_order_of_the_captions(tmp_path):
    decoded = []

    def decode(latents):
        decoded.append([tuple(each.shape) for each in latents])
        return [torch.zeros(3, 4 * each.shape[1] - 3, 32, 32) for each in latents]

    drawings = make_studio().draw_prompts(Samples([PICTURE, SHORT, PICTURE]))
    ranks = SimpleNamespace(turns=lambda count: [(index, True) for index in range(count)], wait_long=lambda: None)
    loop = SimpleNamespace(device=CPU, options=SimpleNamespace(precision="no"), ranks=ranks, step=4, heed_signals=lambda: None)
    DrawSamples(SimpleNamespace(model=Nothing()), drawings, decode, tmp_path, fps=8, every=1).act(loop)
    assert decoded == [[(2, 1, 4, 4), (2, 1, 4, 4), (2, 2, 4, 4)]]
    names = sorted(path.name for path in (tmp_path / "step-00000004").iterdir())
    assert names == ["00-caption-0.png", "01-caption-1.mp4", "02-caption-2.png"]
