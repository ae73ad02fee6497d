"""The VAE's turns: who learns from what, and at which size and step."""

import pytest
import torch
from diffusers import AutoencoderKLWan

from wandistiller.config.train_vae import TrainVaeConfig
from wandistiller.data.loader import Batch
from wandistiller.distributed.ranks import Ranks
from wandistiller.models.critic import PatchCritic
from wandistiller.models.latents import latent_shape
from wandistiller.models.vae_passes import VaePass, decode_unclamped, encode_distribution, lay_channels_last
from wandistiller.train.method import Role
from wandistiller.train.methods.vae import VaeTraining, VaeWeights, reduced_shapes
from wandistiller.train.vae_losses import kl_divergence, r1_penalty, reconstruction


@pytest.fixture
def vae(tiny_size):
    torch.manual_seed(0)
    return AutoencoderKLWan(**tiny_size.vae)


def batch(step=0, frames=1, size=32):
    torch.manual_seed(1)
    pixels = torch.rand(2, 3, frames, size, size) * 2 - 1
    return Batch({"pixels": pixels, "seed": torch.tensor([5, 6])}, ("a", "b"), 3, 0, step)


def make(vae, with_critic=True, **weights):
    torch.manual_seed(2)
    critic = Role("critic", PatchCritic(base_width=4, num_layers=1), is_trained=True) if with_critic else None
    weights.setdefault("adversarial", 0.5 if with_critic else 0.0)
    return VaeTraining(Role("vae", VaePass(vae), is_trained=True), VaeWeights(**weights), critic=critic)


@pytest.mark.parametrize("frames", [1, 5])
def test_the_passes_are_diffusers_own_but_for_the_clamp(vae, frames):
    pixels = batch(frames=frames).tensors["pixels"]
    with torch.no_grad():
        mean, logvar = encode_distribution(vae, pixels)
        expected = vae.encode(pixels).latent_dist
        assert torch.equal(mean, expected.mean)
        assert torch.equal(logvar, expected.logvar)
        assert mean.shape[1:] == latent_shape(vae.config, tuple(pixels.shape))
        found = decode_unclamped(vae, mean)
        assert all(entry is None for entry in vae._feat_map), "nothing is kept beyond the call"
        assert torch.equal(found.clamp(-1, 1), vae.decode(mean).sample)


def test_channels_last_gives_the_same_gradients(vae):
    pixels, noise, gradients = batch(frames=5).tensors["pixels"], torch.randn(2, 8, 2, 4, 4), []
    for is_last in (False, True):
        if is_last:
            lay_channels_last(vae)
        found = VaePass(vae)(pixels, noise)[0]
        gradients.append(torch.autograd.grad((found - pixels).square().mean(), list(vae.parameters()), allow_unused=True))
    assert vae.decoder.conv_in.weight.is_contiguous(memory_format=torch.channels_last_3d)
    for last, plain in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(last, plain, rtol=1e-3, atol=1e-5)


def test_each_turn_trains_its_own_role(vae):
    method = make(vae)
    method.vae_losses(batch()).total.backward()
    roles = method.roles
    assert all(parameter.grad is None for parameter in roles["critic"].model.parameters()), (
        "the critic is not the VAE's to train"
    )
    assert any(parameter.grad.abs().sum() > 0 for parameter in roles["vae"].model.parameters())
    for parameter in roles["vae"].model.parameters():
        parameter.grad = None
    method.critic_losses(batch()).total.backward()
    assert all(parameter.grad is None for parameter in roles["vae"].model.parameters())
    assert any(parameter.grad.abs().sum() > 0 for parameter in roles["critic"].model.parameters())
    assert not method._fakes, "nothing is kept beyond the step"


def test_the_critic_is_listened_to_from_its_step_on(vae):
    method = make(vae, adversarial_start=10)
    assert "adversarial" not in method.vae_losses(batch(step=9)).metrics
    assert "adversarial" in method.vae_losses(batch(step=10)).metrics


@pytest.mark.parametrize(("step", "expected"), [(0, True), (1, False), (15, False), (16, True)])
def test_r1_comes_every_so_often(vae, step, expected):
    method = make(vae, r1_interval=16)
    method.vae_losses(batch(step))
    assert ("critic/r1" in method.critic_losses(batch(step)).metrics) == expected


def test_the_weight_of_the_kl_counts_global_steps(vae):
    method = make(vae, with_critic=False, kl_beta=2.0, kl_warmup_steps=10)
    for step, factor in ((0, 0.0), (5, 0.5), (10, 1.0), (99, 1.0)):
        losses = method.vae_losses(batch(step))
        expected = losses.metrics["reconstruction"] + 2.0 * factor * losses.metrics["kl"]
        assert losses.total.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_critic_is_as_loud_as_the_gradients_of_the_step_before_say(vae):
    """Two batches of one sample each say the same as one of two: it is the gradient of all samples that counts."""

    def parts(number):
        tensors = {name: value[number : number + 1] for name, value in batch().tensors.items()}
        return Batch(tensors, ("x",), number, 0, 0)

    whole, split = make(vae), make(vae)
    assert whole.vae_losses(batch()).metrics["adversarial_weight"].item() == 0
    for number in range(2):
        split.vae_losses(parts(number))
    scales = []
    for method in (whole, split):
        method.finish_step(Ranks())
        scales.append(method.roles["vae"].model.adversarial_scale.item())
    assert scales[0] > 0
    assert scales[1] == pytest.approx(scales[0], rel=0.02)
    assert whole.vae_losses(batch(step=1)).metrics["adversarial_weight"].item() == pytest.approx(scales[0])


def test_the_critic_is_as_loud_as_all_that_asks_for_closeness(vae):
    """A perceptual loss that is the reconstruction's own, with a weight of 3, makes four of it."""
    scales = []
    for weight in (0.0, 3.0):
        method = make(vae, perceptual=weight, kl_beta=1.0)
        method._perceptual = lambda found, wanted: (found - wanted).abs().mean((1, 2, 3, 4))
        method.vae_losses(batch())
        method.finish_step(Ranks())
        scales.append(method.roles["vae"].model.adversarial_scale.item())
    assert scales[1] == pytest.approx(4 * scales[0], rel=1e-4)


def test_the_critics_loudness_counts_every_sample_the_same(vae):
    """Also in a last batch that is not full: slopes of 1 for two samples and of 4 for a third are 2 on average."""
    method, weight = make(vae), vae.decoder.conv_out.weight
    for slope, num_samples in ((1.0, 2), (4.0, 1)):
        method._scale(slope * weight.sum(), -weight.sum(), num_samples, 64)
    method.finish_step(Ranks())
    assert method.roles["vae"].model.adversarial_scale.item() == pytest.approx(2.0, rel=1e-4)
    method._scale(3.0 * weight.sum(), -weight.sum(), 1, 64)
    method.finish_step(Ranks())
    assert method.roles["vae"].model.adversarial_scale.item() == pytest.approx(3.0, rel=1e-4), "a step forgets those before"


def test_the_critics_loudness_survives_float16(vae):
    """A mean over many pixels has gradients that float16 has no numbers for; the same pixels, many times, scale alike."""
    method, few, many = make(vae), torch.rand(1, 16, 16), 2**24
    weight, scales = vae.decoder.conv_out.weight, []
    for count in (few.numel(), many):
        pixels = (few.half() * weight.sum().half()).repeat(count // few.numel(), 1, 1).float()
        method._scale(pixels.abs().mean(), -0.1 * pixels.mean(), 1, pixels.numel())
        method.finish_step(Ranks())
        scales.append(method.roles["vae"].model.adversarial_scale.item())
    assert scales == pytest.approx([10.0, 10.0], rel=0.02)


@pytest.mark.parametrize("weight", [0.5, 0.0])
def test_the_vaes_total_is_every_loss_by_its_weight(vae, weight):
    def distance(found, wanted):
        return (found - wanted).square().mean((1, 2, 3, 4))

    method = make(
        vae, adversarial=weight, reconstruction=2.5, perceptual=0.3, kl_beta=0.2, kl_free_bits=0.5, high_frequency=0.7
    )
    method._perceptual = distance
    method.roles["vae"].model.adversarial_scale.fill_(3.0)
    losses = method.vae_losses(batch())
    ((wanted, found),) = method._fakes[3]
    with torch.no_grad():
        words = method.roles["critic"].model(found)
        noise = [torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6)]
        by_hand, mean, logvar = VaePass(vae)(wanted, torch.stack(noise))
    torch.testing.assert_close(found, by_hand)
    expected = {
        "reconstruction": reconstruction(found, wanted, high_frequency_weight=0.7),
        "kl": kl_divergence(mean, logvar, free_bits=0.5),
        "perceptual": distance(found, wanted).mean(),
        "adversarial": -words.mean(),
    }
    counts = {"reconstruction": 2.5, "kl": 0.2, "perceptual": 0.3, "adversarial": weight * 3.0}
    for name, value in expected.items():
        assert losses.metrics[name].item() == pytest.approx(value.item(), rel=1e-4), name
    assert losses.total.item() == pytest.approx(sum(counts[name] * expected[name].item() for name in counts), rel=1e-4)


@pytest.mark.parametrize("step", [0, 1])
def test_the_critics_total_is_its_hinge_and_the_penalty_of_real_ones_by_interval(vae, step):
    method = make(vae, r1_gamma=0.3, r1_interval=4)
    method.vae_losses(batch(step))
    ((wanted, found),) = method._fakes[3]
    critic, real = method.roles["critic"].model, wanted.clone().requires_grad_(True)
    words = critic(real)
    hinge = (1 - words).relu().mean() + (1 + critic(found)).relu().mean()
    (slope,) = torch.autograd.grad(words.flatten(1).mean(1).sum(), real)
    penalty = 4 * 0.3 / 2 * slope.square().sum((1, 2, 3, 4)).mean() if step == 0 else 0.0
    losses = method.critic_losses(batch(step))
    assert losses.total.item() == pytest.approx(float(hinge + penalty), rel=1e-4)
    assert losses.metrics["critic/real"].item() == pytest.approx(words.mean().item(), rel=1e-4)
    assert losses.metrics["critic/fake"].item() == pytest.approx(critic(found).mean().item(), rel=1e-4)


def test_the_penalty_is_never_taken_in_16_bits(vae):
    method = make(vae, r1_interval=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        method.vae_losses(batch())
        found = method.critic_losses(batch()).metrics["critic/r1"]
    expected = r1_penalty(method.roles["critic"].model, batch().tensors["pixels"], gamma=5.0, interval=4)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_weights_are_those_of_the_flags():
    flags = {"kl_beta": 1.0, "kl_warmup_steps": 2, "kl_free_bits": 3.0, "r1_gamma": 4.0, "r1_interval": 5}
    config = TrainVaeConfig(lambda_rec=5.0, high_frequency_weight=6.0, lambda_lpips=7.0, lambda_adv=8.0, gan_start=9, **flags)
    others = {"reconstruction": 5.0, "high_frequency": 6.0, "perceptual": 7.0, "adversarial": 8.0, "adversarial_start": 9}
    assert VaeWeights.of(config) == VaeWeights(**flags, **others)


def test_smaller_sizes_share_the_step(vae):
    role = Role("vae", VaePass(vae), is_trained=True)
    method = VaeTraining(role, VaeWeights(), reduced_min_sizes=(16, 64))
    shapes = [tuple(pixels.shape[-2:]) for pixels in method._at_sizes(batch().tensors["pixels"])]
    assert shapes == [(32, 32), (16, 16)], "larger than the batch is not made"
    both = method.vae_losses(batch())
    each = [method._losses_at(batch(), pixels) for pixels in method._at_sizes(batch().tensors["pixels"])]
    assert both.total.item() == pytest.approx(sum(losses.total.item() for losses in each) / 2, rel=1e-5)
    for name, value in both.metrics.items():
        assert value.item() == pytest.approx(sum(losses.metrics[name].item() for losses in each) / 2, rel=1e-5), name


def test_the_critic_looks_at_every_size(vae):
    method = make(vae, r1_gamma=0.0)
    method._sizes = (16,)
    method.vae_losses(batch())
    pairs, critic = method._fakes[3], method.roles["critic"].model
    assert [wanted.shape[-1] for wanted, _ in pairs] == [32, 16]
    with torch.no_grad():
        words = [(critic(wanted), critic(found)) for wanted, found in pairs]
    hinges = [((1 - real).relu().mean() + (1 + fake).relu().mean()).item() for real, fake in words]
    losses = method.critic_losses(batch())
    assert losses.total.item() == pytest.approx(sum(hinges) / 2, rel=1e-4)
    for name, place in (("critic/real", 0), ("critic/fake", 1)):
        assert losses.metrics[name].item() == pytest.approx(sum(each[place].mean().item() for each in words) / 2, rel=1e-4)


def test_smaller_sizes_are_smaller_and_of_the_same_picture(vae):
    role = Role("vae", VaePass(vae), is_trained=True)
    method = VaeTraining(role, VaeWeights(), reduced_min_sizes=(16,))
    # Every other column is white: an average of them is grey, and a picture of every other one black or white.
    stripes = torch.tensor([-1.0, 1.0]).repeat(16).expand(1, 3, 5, 32, 32)
    small = method._at_sizes(stripes)[1]
    assert small.shape == (1, 3, 5, 16, 16)
    assert small[..., 1:-1].abs().max() < 0.2


@pytest.mark.parametrize(
    ("size", "sizes", "expected"),
    [
        ((32, 64), (24, 16), [(24, 48), (16, 32)]),
        ((32, 32), (24, 25, 23), [(24, 24)]),
        ((32, 32), (30, 32, 64), []),
        ((96, 40), (32,), [(80, 32)]),
    ],
)
def test_each_smaller_size_is_taken_once(size, sizes, expected):
    """Sizes are rounded to multiples of what the VAE shrinks by, where two may meet, or the whole picture."""
    assert reduced_shapes(*size, sizes, 8) == expected


def test_repeats_are_turns_of_one_step(vae):
    role = Role("vae", VaePass(vae), is_trained=True)
    assert [turn.role for turn in VaeTraining(role, VaeWeights(), repeats=3).turns] == ["vae"] * 3


def test_the_spectral_norms_follow_every_update_of_the_critic(vae):
    critic = Role("critic", PatchCritic(base_width=4), is_trained=True)
    method = VaeTraining(Role("vae", VaePass(vae), is_trained=True), VaeWeights(), critic=critic, repeats=3)
    assert [turn.role for turn in method.turns if turn.finish is not None] == ["critic"] * 3
    norms = {name: value.clone() for name, value in critic.model.state_dict().items() if name.endswith("._u")}
    for parameter in critic.model.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    method.turns[1].finish()
    assert not any(torch.equal(critic.model.state_dict()[name], value) for name, value in norms.items() if value.numel() > 1)


def test_the_noise_is_the_samples_own(vae):
    first, second = make(vae, with_critic=False), make(vae, with_critic=False)
    assert first.vae_losses(batch()).total.item() == second.vae_losses(batch()).total.item()
