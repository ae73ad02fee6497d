import torch

from wandistiller.flow.guidance import guide, needs_unconditional


def test_guidance_by_hand():
    conditional, unconditional = torch.tensor([2.0]), torch.tensor([1.0])
    assert guide(conditional, unconditional, 5.0).item() == 6.0
    assert guide(conditional, unconditional, 1.0).item() == 2.0
    assert guide(conditional, unconditional, 0.0).item() == 1.0


def test_one_pass_is_enough_without_guidance():
    assert not needs_unconditional(1.0)
    assert needs_unconditional(1.5)
