import itertools

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from wandistiller.flow.schedule import Schedule, euler_schedule, shift, unipc_schedule, unshift

SHIFTS = (1.0, 3.0, 5.0, 12.0)
STEPS = (1, 2, 3, 10, 50)


@pytest.mark.parametrize("amount", SHIFTS)
@pytest.mark.parametrize("num_steps", STEPS)
def test_the_euler_schedule_is_that_of_diffusers(num_steps, amount):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=amount)
    scheduler.set_timesteps(num_steps)
    schedule = euler_schedule(num_steps, amount)
    torch.testing.assert_close(torch.tensor(schedule.sigmas), scheduler.sigmas)
    torch.testing.assert_close(torch.tensor(schedule.timesteps), scheduler.timesteps)


@pytest.mark.parametrize("amount", SHIFTS)
@pytest.mark.parametrize("num_steps", STEPS)
def test_the_unipc_schedule_is_that_of_diffusers(num_steps, amount):
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=amount)
    scheduler.set_timesteps(num_steps)
    schedule = unipc_schedule(num_steps, amount)
    torch.testing.assert_close(torch.tensor(schedule.sigmas), scheduler.sigmas)
    assert list(schedule.timesteps) == scheduler.timesteps.tolist()


def test_the_shift_by_hand():
    # 3 * 0.5 / (1 + 2 * 0.5)
    assert shift(0.5, 3.0) == pytest.approx(0.75)
    assert shift(0.0, 7.0) == 0.0
    assert shift(1.0, 7.0) == 1.0


def test_unshift_undoes_shift():
    sigma = torch.linspace(0, 1, 11, dtype=torch.float64)
    torch.testing.assert_close(unshift(shift(sigma, 5.0), 5.0), sigma)


@pytest.mark.parametrize("make", [euler_schedule, unipc_schedule])
def test_schedules_fall_to_exactly_zero(make):
    sigmas = make(20, 5.0).sigmas
    assert sigmas[-1] == 0.0
    assert all(later < earlier for earlier, later in itertools.pairwise(sigmas))


def test_a_schedule_that_does_not_end_at_data_is_refused():
    with pytest.raises(ValueError, match="ends at sigma 0"):
        Schedule((1.0, 0.5), (1000.0,))
