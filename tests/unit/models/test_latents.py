import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

from wandistiller.errors import UsageError
from wandistiller.models.latents import check_positions, denormalise, normalise

CONFIG = {"latents_mean": [1.0, -2.0], "latents_std": [2.0, 0.5]}


def test_by_hand():
    latents = torch.tensor([3.0, -1.0]).view(1, 2, 1, 1, 1)
    assert normalise(latents, CONFIG).flatten().tolist() == [1.0, 2.0]
    assert denormalise(torch.tensor([1.0, 2.0]).view(1, 2, 1, 1, 1), CONFIG).flatten().tolist() == [3.0, -1.0]


@pytest.mark.parametrize("shape", [(16, 2, 2), (17, 2, 2), (1, 32, 2), (1, 34, 2), (1, 2, 33), (1, 2, 34)])
def test_positions_end_where_those_of_diffusers_end(shape):
    config = {"patch_size": (1, 2, 2), "rope_max_seq_len": 16}
    rope = WanRotaryPosEmbed(attention_head_dim=12, patch_size=(1, 2, 2), max_seq_len=16)
    try:
        rope(torch.zeros(1, 4, *shape))
    except RuntimeError:
        with pytest.raises(UsageError, match="more than this model has positions for"):
            check_positions(config, shape)
    else:
        check_positions(config, shape)


def test_normalised_latents_have_mean_0_and_std_1():
    noise = torch.randn(8, 2, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    latents = noise * torch.tensor(CONFIG["latents_std"]).view(2, 1, 1, 1) + torch.tensor(CONFIG["latents_mean"]).view(
        2, 1, 1, 1
    )
    found = normalise(latents, CONFIG)
    torch.testing.assert_close(found.mean((0, 2, 3, 4)), torch.zeros(2), atol=0.02, rtol=0)
    torch.testing.assert_close(found.std((0, 2, 3, 4)), torch.ones(2), atol=0.02, rtol=0)
