"""A device that delays what is asked of it, and what is computed with streamed blocks."""

from __future__ import annotations

import torch
from torch import nn


class LateLane:
    """A device that does all work as late as its tickets allow: only when the computation waits for it.

    Work that nobody waits for is never done, and a slot's bytes are spoilt as soon as work on it may begin, so a missing wait
    or a slot handed out too early gives wrong numbers.
    """

    def __init__(self):
        self.pending = {}
        self.count = 0

    def start(self, work, after):
        self.count += 1
        names = work.__code__.co_freevars
        dict(zip(names, (cell.cell_contents for cell in work.__closure__), strict=True))["target"].view(torch.uint8).fill_(255)
        self.pending[self.count] = work
        return self.count

    def wait(self, ticket):
        if ticket in self.pending:
            self.pending.pop(ticket)()

    wait_on_host = wait

    def mark(self):
        return None

    def guard(self, tensor):
        self.guarded = [*getattr(self, "guarded", []), tensor]


@torch.no_grad()
def run(model, inputs):
    return model(*inputs, return_dict=False)[0]


def gradients(model, inputs):
    model.zero_grad()
    model(*inputs, return_dict=False)[0].square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


class Plain(nn.Module):
    """Something else than a Wan's block."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.layer(x))


class Chain(nn.Module):
    def __init__(self, num_blocks=5, block=Plain):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
