"""Recorded computations give the gradients that computing gives."""

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel

from wandistiller.models.sizes import TINY_VAE, find_size
from wandistiller.models.text_padding import fold_padding
from wandistiller.models.vae_passes import VaePass
from wandistiller.train.graphs import GraphedCalls
from wandistiller.train.optimisation import Optimisation, OptimiserOptions, autocast

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda")


def transformer_batch(frames, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"hidden_states": (4, 8, frames, 8, 8), "encoder_hidden_states": (4, tokens, 32)}
    batch = {name: torch.randn(shape, generator=generator).to(CUDA) for name, shape in shapes.items()}
    return {**batch, "timestep": torch.rand(4, generator=generator).to(CUDA) * 1000, "return_dict": False}


def make_transformer():
    torch.manual_seed(0)
    model = WanTransformer3DModel(**find_size("tiny").transformer).to(CUDA).train()
    fold_padding(model)
    return model


@pytest.mark.parametrize(("precision", "is_compiled"), [("no", False), ("bf16", False), ("bf16", True)])
def test_training_through_graphs_is_training(precision, is_compiled):
    """Two shapes of batch, two batches of the same shape in one step: gradients add up, also while a shape is new."""
    steps = [[(1, 16, 0), (1, 16, 1)], [(1, 16, 2), (3, 32, 2)], [(1, 16, 3), (3, 32, 4)], [(3, 32, 5), (3, 32, 6)]]
    weights, losses = [], []
    for is_graphed in (False, True):
        model = make_transformer()
        for block in model.blocks if is_compiled else ():
            block.compile()
        call = GraphedCalls(model, precision, CUDA) if is_graphed else model
        options = OptimiserOptions(rate=1e-3)
        optimisation = Optimisation(dict(model.named_parameters()), options, precision, CUDA, keeps_gradients=is_graphed)
        found = []
        for number, batches in enumerate(steps):
            for batch in batches:
                with autocast(precision, CUDA):
                    loss = call(**transformer_batch(*batch))[0].float().square().mean()
                optimisation.backward(loss)
                found.append(loss.item())
            optimisation.step(number)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        losses.append(found)
    tolerance = 1e-4 if precision == "no" else 2e-2
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)
    moved = [(a - b).abs().max().item() for a, b in zip(*weights, strict=True)]
    assert max(moved) < (2e-4 if precision == "no" else 5e-3)


def test_a_vae_through_graphs():
    torch.manual_seed(0)
    vae = VaePass(AutoencoderKLWan(**TINY_VAE)).to(CUDA).train()
    call = GraphedCalls(vae, "no", CUDA)
    for frames, latent_frames in ((1, 1), (9, 3), (1, 1)):
        pixels = torch.randn(2, 3, frames, 32, 32, device=CUDA)
        noise = torch.randn(2, 8, latent_frames, 4, 4, device=CUDA)
        gradients = []
        for way in (vae, call):
            for parameter in vae.parameters():
                parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter)
            way(pixels, noise)[0].square().mean().backward()
            gradients.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in vae.parameters()])
        for expected, found in zip(*gradients, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
