"""The critic's shapes, the limits on its weights, and what it can see."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from wandistiller.models.critic import PatchCritic
from wandistiller.train.vae_losses import hinge_critic, r1_penalty


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def small_critic(**options):
    return PatchCritic(**{"base_width": 8, "num_layers": 2, **options})


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_every_frame_has_a_map_of_logits(frames):
    # Halved twice to 8x6, then one fewer for each of the two layers after.
    assert small_critic()(torch.randn(2, 3, frames, 32, 24)).shape == (2, 1, frames, 6, 4)


def test_the_default_critic_has_patches_of_70_pixels():
    critic = PatchCritic()
    pixels = torch.randn(1, 3, 1, 128, 128, requires_grad=True)
    logits = critic(pixels)
    assert logits.shape == (1, 1, 1, 14, 14)
    logits[0, 0, 0, 7, 7].backward()
    seen = pixels.grad[0].abs().sum((0, 1)) > 0
    assert int(seen.any(0).sum()) == int(seen.any(1).sum()) == 70


def test_the_spectral_norm_of_every_convolution_is_held():
    critic = small_critic()
    for parameter in critic.parameters():
        parameter.data *= 30  # far above 1, and nothing that was estimated before
    for _ in range(30):
        critic.update_norms()
    for layer in critic.layers:
        norms = torch.linalg.svdvals(layer.conv.weight.detach().flatten(1))
        assert norms[0].item() <= 1.02
        assert norms[0].item() == pytest.approx(1, rel=0.02)
        assert torch.linalg.svdvals(layer.conv.parametrizations.weight.original.detach().flatten(1))[0] > 5


def test_the_norm_is_held_while_weights_change():
    critic = small_critic()
    optimiser = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
    real, fake = torch.rand(2, 3, 2, 16, 16), -torch.rand(2, 3, 2, 16, 16)
    losses = []
    for _ in range(40):
        losses.append(hinge_critic(critic(real), critic(fake)))
        optimiser.zero_grad()
        losses[-1].backward()
        optimiser.step()
        critic.update_norms()
    assert losses[-1] < 0.5 * losses[0]
    for layer in critic.layers:
        assert torch.linalg.svdvals(layer.conv.weight.detach().flatten(1))[0] <= 1.1


@pytest.mark.parametrize("is_training", [True, False])
def test_only_an_update_moves_the_norms(is_training):
    """A call that moved them would change the logits of the next, and the step of a rank that makes more calls than others."""
    critic, pixels = small_critic().train(is_training), torch.randn(1, 3, 2, 16, 16)
    before = {name: buffer.clone() for name, buffer in critic.named_buffers()}
    assert torch.equal(critic(pixels), critic(pixels))
    assert all(torch.equal(critic.get_buffer(name), buffer) for name, buffer in before.items())
    critic.update_norms()
    assert not all(torch.equal(critic.get_buffer(name), buffer) for name, buffer in before.items())


def test_gradients_reach_every_pixel_and_every_weight():
    critic, pixels = small_critic(), torch.randn(2, 3, 3, 32, 32, requires_grad=True)
    critic(pixels).square().sum().backward()
    assert (pixels.grad != 0).all()
    assert all(parameter.grad.abs().sum() > 0 for parameter in critic.parameters())


def test_the_critic_sees_motion():
    critic, clip = small_critic().eval(), torch.randn(1, 3, 5, 24, 24)
    order = [0, 3, 1, 4, 2]
    shuffled = critic(clip[:, :, order])
    # A critic of single frames would only put its maps in the same order.
    assert (shuffled - critic(clip)[:, :, order]).abs().max() > 1e-3


def test_a_frame_alone_scores_as_in_a_clip_where_nothing_moves():
    critic, frame = small_critic().eval(), torch.randn(1, 3, 1, 24, 24)
    alone, still = critic(frame), critic(frame.expand(-1, -1, 4, -1, -1))
    torch.testing.assert_close(still, alone.expand(-1, -1, 4, -1, -1), rtol=1e-4, atol=1e-6)


def test_samples_score_alone():
    critic, clips = small_critic().eval(), torch.randn(3, 3, 2, 24, 24)
    torch.testing.assert_close(critic(clips)[1:2], critic(clips[1:2]), rtol=1e-4, atol=1e-6)


def test_one_seed_makes_one_critic():
    states = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        states.append(small_critic().state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_the_smallest_picture(num_layers):
    critic = PatchCritic(base_width=4, num_layers=num_layers)
    side = critic.smallest_side
    assert side == 3 * 2**num_layers
    assert critic(torch.randn(1, 3, 1, side, side)).shape == (1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match=f"at least {side}x{side} pixels, but the picture has {side}x{side - 1}"):
        critic(torch.randn(1, 3, 1, side, side - 1))


@pytest.mark.parametrize("shape", [(1, 3, 32, 32), (1, 4, 1, 32, 32), (1, 3, 0, 32, 32)])
def test_what_is_no_clip_is_refused(shape):
    with pytest.raises(ValueError, match="frames, height, width"):
        small_critic()(torch.zeros(shape))


def test_a_critic_needs_a_layer():
    with pytest.raises(ValueError, match="num_layers is 0"):
        PatchCritic(num_layers=0)


def checkpoint_layers(critic):
    for layer in critic.layers:
        plain = layer.forward
        layer.forward = lambda *inputs, plain=plain: checkpoint(plain, *inputs, use_reentrant=False)


def test_recomputed_activations_give_the_same_gradients():
    """Also through a second derivative."""
    real, fake = torch.randn(2, 3, 2, 16, 16), torch.randn(2, 3, 2, 16, 16)
    gradients = []
    for is_recomputed in (False, True):
        torch.manual_seed(1)
        critic = small_critic()
        if is_recomputed:
            checkpoint_layers(critic)
        loss = hinge_critic(critic(real), critic(fake)) + r1_penalty(critic, real, gamma=5.0, interval=16)
        loss.backward()
        gradients.append([parameter.grad for parameter in critic.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-8)


def test_norms_are_held_in_float32_where_the_rest_is_in_16_bits():
    critic, plain = small_critic(), small_critic()
    plain.load_state_dict(critic.state_dict())
    pixels = torch.randn(1, 3, 2, 16, 16)
    plain.update_norms()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        critic.update_norms()
        logits = critic(pixels)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), plain(pixels), rtol=0.1, atol=0.02)
    for name, buffer in plain.named_buffers():
        assert torch.equal(critic.get_buffer(name), buffer)
