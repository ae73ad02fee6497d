"""What is written down of a step is what a card would do, not what fake tensors do."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from wandistiller.memory.tape import BACKWARD
from wandistiller.memory.tracing import recording

COUNT = 2**20


def most_in_backward(step, *shapes):
    """Return the most bytes that backward has made and not given back."""
    with recording() as recorder:
        with recorder.elsewhere():
            given = [torch.empty(shape, requires_grad=True) for shape in shapes]
        loss = step(*given)
        recorder.begin((BACKWARD + "model", -1))
        loss.backward()
    now = most = 0
    sizes = {}
    for key, num_bytes in recorder.tape.parts[-1].events:
        if num_bytes >= 0:
            sizes[key] = num_bytes
        now += num_bytes if num_bytes >= 0 else -sizes.pop(key, 0)
        most = max(most, now)
    return most


@pytest.mark.parametrize("num_uses", [2, 3, 7])
def test_gradients_of_a_value_that_is_used_often_add_up_in_place(num_uses):
    """There is the sum and the one that comes next, however many come."""

    def step(values):
        doubled = 2 * values
        return sum(factor * doubled for factor in range(2, num_uses + 2)).sum()

    assert 2 * 4 * COUNT <= most_in_backward(step, COUNT) < 2 * 4 * COUNT + 1024


def test_attention_adds_its_gradients_up_in_float32():
    """On a card; beside three gradients, the arriving one and the attention's own."""
    shape = (1, 4, 256, 64)
    with_scratch = most_in_backward(lambda *given: scaled_dot_product_attention(*given).sum(), *[shape] * 3)
    values = 4 * 256 * 64
    assert with_scratch >= 3 * 4 * values + 4 * values + 4 * 4 * 256
