"""A compiled VAE computes what a plain one does, and stays compiled."""

import torch
from diffusers import AutoencoderKLWan
from torch._dynamo.testing import CompileCounterWithBackend

from wandistiller.memory.activations import compile_vae
from wandistiller.models.sizes import TINY_VAE
from wandistiller.models.vae_passes import VaePass


def test_a_compiled_vae_learns_the_same_from_clips_and_is_not_compiled_again():
    torch.manual_seed(0)
    model = AutoencoderKLWan(**{**TINY_VAE, "num_res_blocks": 1}).train()
    run, pixels, noise = VaePass(model), torch.randn(1, 3, 9, 16, 16), torch.randn(1, 8, 3, 2, 2)

    def gradients():
        model.zero_grad()
        run(pixels, noise)[0].square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = gradients()
    counter = CompileCounterWithBackend("eager")
    compile_vae(model, counter)
    torch.testing.assert_close(gradients(), plain)
    # The first chunk of a clip, the second, which looks back on it, and all others.
    assert counter.frame_count == 2 * 3
    torch.testing.assert_close(gradients(), plain)
    assert counter.frame_count == 2 * 3
