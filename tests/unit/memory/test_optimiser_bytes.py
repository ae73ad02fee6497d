"""What optimisers hold, against the optimisers themselves."""

import pytest
import torch

from wandistiller.memory.optimiser_bytes import OptimiserChoice
from wandistiller.train.optimisation import Optimisation, OptimiserOptions

SHAPES = [(64, 32), (64,), (3, 5, 7), (1,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "rounding"), [("adamw", "masters"), ("adamw", "stochastic"), ("adafactor", "masters")])
def test_state_is_what_the_optimiser_makes(name, dtype, rounding):
    parameters = {f"p{i}": torch.nn.Parameter(torch.randn(shape).to(dtype)) for i, shape in enumerate(SHAPES)}
    optimisation = Optimisation(parameters, OptimiserOptions(name=name, rounding=rounding), "no", torch.device("cpu"))
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimisation.step(0)
    made = [v for state in optimisation.optimiser.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    choice = OptimiserChoice(name, rounding)
    assert sorted(each.nbytes for each in made) == sorted(choice.state(list(parameters.values())))
    masters = [each.nbytes for each in optimisation._masters.values()]
    assert sorted(masters) == sorted(choice.masters(list(parameters.values())))
