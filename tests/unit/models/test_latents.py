import torch

from wandistiller.models.latents import denormalise, normalise

CONFIG = {"latents_mean": [1.0, -2.0], "latents_std": [2.0, 0.5]}


def test_by_hand():
    latents = torch.tensor([3.0, -1.0]).view(1, 2, 1, 1, 1)
    assert normalise(latents, CONFIG).flatten().tolist() == [1.0, 2.0]
    assert denormalise(torch.tensor([1.0, 2.0]).view(1, 2, 1, 1, 1), CONFIG).flatten().tolist() == [3.0, -1.0]


def test_normalised_latents_have_mean_0_and_std_1():
    noise = torch.randn(8, 2, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    latents = noise * torch.tensor(CONFIG["latents_std"]).view(2, 1, 1, 1) + torch.tensor(CONFIG["latents_mean"]).view(
        2, 1, 1, 1
    )
    found = normalise(latents, CONFIG)
    torch.testing.assert_close(found.mean((0, 2, 3, 4)), torch.zeros(2), atol=0.02, rtol=0)
    torch.testing.assert_close(found.std((0, 2, 3, 4)), torch.ones(2), atol=0.02, rtol=0)
