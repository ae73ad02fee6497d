"""What a step of distillation allocates: the two passes, the losses, and nothing that stays."""

import gc

import pytest
import torch
from diffusers import WanTransformer3DModel
from helpers.live_bytes import LiveBytes

from wandistiller.data.loader import Batch
from wandistiller.models.sizes import find_size
from wandistiller.train.method import Role
from wandistiller.train.methods.distill import Distillation, MatchedBlocks, Objectives
from wandistiller.train.teacher import Teacher

CPU = torch.device("cpu")


class OneModel:
    def __init__(self, model):
        self.model = model

    def index_at(self, timestep):
        return 0

    def expert(self, index):
        return self.model

    def keep_up(self):
        pass


def make_batch():
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(2, 8, 1, 8, 8, generator=generator) for name in ("latents", "noise")}
    tensors |= {"sigma": torch.tensor([0.3, 0.8]), "text": torch.randn(2, 16, 32, generator=generator)}
    return Batch(tensors, ("a", "b"), 0, 0)


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    config = find_size("tiny").transformer
    teacher = WanTransformer3DModel(**config).requires_grad_(False).eval()
    return teacher, WanTransformer3DModel(**{**config, "num_layers": 2}).train()


def made_by(work):
    """Return how many tensors some work makes, and the bytes of them that are left when it is done."""
    gc.collect()
    with LiveBytes() as live:
        work()
        gc.collect()
        return live.num_made, live.now


@pytest.mark.parametrize("feature", [0.0, 0.5])
def test_a_step_is_the_two_passes_and_the_loss(models, feature):
    teacher, student = models
    role = Role("student", student, is_trained=True)
    answers = Teacher(OneModel(teacher), torch.zeros(16, 32), device=CPU, dtype=torch.float32)
    matched = MatchedBlocks([0, 1], [1, 2])
    method = Distillation(role, answers, Objectives(feature=feature), guidance_scale=1.0, dtype=torch.float32, matched=matched)
    batch = make_batch()
    inputs = (batch.tensors["latents"], 1000 * batch.tensors["sigma"], batch.tensors["text"])
    for parameter in student.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step():
        method.losses(batch).total.backward()

    def teach():
        with torch.no_grad():
            teacher(*inputs, return_dict=False)

    def learn():
        student(*inputs, return_dict=False)[0].mean().backward()

    modules = sum(1 for _ in student.modules())
    step()
    first, second = made_by(step), made_by(step)
    assert first == second and first[1] == 0, "nothing is left of a step, and each is like the one before"
    both = made_by(teach)[0] + made_by(learn)[0]
    # Interpolation, the difference to the target and its gradient, three health numbers; with features a few for each block.
    assert 0 <= first[0] - both <= 60 + (40 if feature else 0)
    assert sum(1 for _ in student.modules()) == modules, "no layer is made in the loop"
    assert all(parameter.grad is None for parameter in teacher.parameters())
