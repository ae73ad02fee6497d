import torch

from wandistiller.flow.path import data_from_velocity, interpolate, noise_from_velocity, velocity_target


def test_the_path_starts_at_data_and_ends_at_noise():
    data, noise = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    assert torch.equal(interpolate(data, noise, 0.0), data)
    assert torch.equal(interpolate(data, noise, 1.0), noise)


def test_the_velocity_is_the_derivative_of_the_path_by_sigma():
    data, noise = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    step = 1e-6
    slope = (interpolate(data, noise, 0.4 + step) - interpolate(data, noise, 0.4 - step)) / (2 * step)
    torch.testing.assert_close(slope, velocity_target(data, noise), rtol=1e-6, atol=1e-8)


def test_one_sigma_a_sample():
    data, noise = torch.zeros(2, 3, 4, 4, 4), torch.ones(2, 3, 4, 4, 4)
    noisy = interpolate(data, noise, torch.tensor([0.25, 0.75]))
    assert torch.equal(noisy[0], torch.full_like(noisy[0], 0.25))
    assert torch.equal(noisy[1], torch.full_like(noisy[1], 0.75))


def test_data_and_noise_come_back_from_the_velocity():
    data, noise = torch.randn(3, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    sigma = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    noisy, velocity = interpolate(data, noise, sigma), velocity_target(data, noise)
    torch.testing.assert_close(data_from_velocity(noisy, velocity, sigma), data)
    torch.testing.assert_close(noise_from_velocity(noisy, velocity, sigma), noise)


def test_the_path_is_that_of_diffusers():
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    data, noise = torch.randn(2, 4), torch.randn(2, 4)
    timestep = scheduler.timesteps[[100, 600]]
    expected = scheduler.scale_noise(data, timestep, noise)
    torch.testing.assert_close(interpolate(data, noise, timestep / 1000), expected)
