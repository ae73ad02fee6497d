"""A teacher's answers against the model itself, and its trajectories against a flow that is known exactly."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from diffusers import WanTransformer3DModel

from wandistiller.flow.schedule import euler_schedule
from wandistiller.memory.out_of_memory import note_failure
from wandistiller.models.features import tapped
from wandistiller.models.sizes import find_size
from wandistiller.train.rollout import roll_out
from wandistiller.train.teacher import Answer, Teacher

CPU = torch.device("cpu")


class Shelf:
    """Models by the boundary, all in memory; notes who was asked."""

    def __init__(self, models, boundary=None):
        self.models, self.boundary, self.asked = models, boundary, []

    def index_at(self, timestep):
        return 0 if self.boundary is None or timestep >= self.boundary * 1000 else 1

    def expert(self, index):
        self.asked.append(index)
        return self.models[index]

    def keep_up(self):
        pass


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    return [WanTransformer3DModel(**find_size("tiny").transformer).eval() for _ in range(2)]


@pytest.fixture
def question():
    generator = torch.Generator().manual_seed(1)
    noisy = torch.randn(3, 8, 1, 4, 4, generator=generator)
    return noisy, torch.tensor([0.9, 0.2, 0.6]), torch.randn(3, 16, 32, generator=generator)


def direct(model, noisy, sigma, text):
    with torch.no_grad():
        return model(noisy, 1000 * sigma, text, return_dict=False)[0]


def test_an_answer_is_the_models_velocity_without_a_graph(models, question):
    teacher = Teacher(Shelf(models[:1]), torch.zeros(16, 32), device=CPU, dtype=torch.float32)
    answer = teacher.answer(*question)
    torch.testing.assert_close(answer.velocity, direct(models[0], *question))
    assert not answer.velocity.requires_grad


def test_an_error_says_that_the_teacher_was_at_work(question):
    class Empty(Shelf):
        def expert(self, index):
            raise MemoryError

    with pytest.raises(MemoryError) as caught:
        Teacher(Empty([]), torch.zeros(16, 32), device=CPU, dtype=torch.float32).answer(*question)
    note_failure(caught.value, lambda failure: None)
    assert caught.value._wandistiller_failure.role == "teacher"


def test_guidance_is_the_pipelines_own_formula(models, question):
    empty = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))
    teacher = Teacher(Shelf(models[:1]), empty, device=CPU, dtype=torch.float32)
    noisy, sigma, _ = question
    plain, without = direct(models[0], *question), direct(models[0], noisy, sigma, empty.expand(3, -1, -1))
    answer = teacher.answer(*question, scale=4.0)
    torch.testing.assert_close(answer.velocity, without + 4.0 * (plain - without))
    torch.testing.assert_close(answer.plain, plain)


def test_each_expert_gets_its_own_side_of_the_boundary(models, question):
    shelf = Shelf(models, boundary=0.5)
    teacher = Teacher(shelf, torch.zeros(16, 32), device=CPU, dtype=torch.float32)
    answer = teacher.answer(*question, blocks=[0, 2])
    noisy, sigma, text = question
    for row, expert in enumerate((0, 1, 0)):
        alone = direct(models[expert], noisy[row : row + 1], sigma[row : row + 1], text[row : row + 1])
        torch.testing.assert_close(answer.velocity[row], alone[0], rtol=1e-4, atol=1e-5)
    assert shelf.asked == [0, 1], "each is loaded once"
    assert len(answer.features) == 2 and answer.features[0].shape[0] == 3
    torch.testing.assert_close(teacher.answer(*question, scale=4.0).plain, answer.velocity)
    # Experts answer in their own order: an order that is not its own inverse shows answers that are not put back.
    rolled = teacher.answer(*(each.roll(-1, 0) for each in question), blocks=[0])
    torch.testing.assert_close(rolled.velocity, answer.velocity.roll(-1, 0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rolled.features[0], answer.features[0].roll(-1, 0), rtol=1e-4, atol=1e-5)


def test_an_expert_that_others_ask_computes_along_and_changes_nothing(models, question):
    shelf = Shelf(models, boundary=0.1)
    teacher = Teacher(shelf, torch.zeros(16, 32), device=CPU, dtype=torch.float32)
    answer = teacher.answer(*question, also={1})
    assert shelf.asked == [0, 1]
    torch.testing.assert_close(answer.velocity, direct(models[0], *question))


def test_a_teacher_answers_in_its_own_precision_inside_of_a_students_autocast(models, question):
    teacher = Teacher(Shelf(models, boundary=0.1), torch.zeros(16, 32), device=CPU, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answer = teacher.answer(*question)
    torch.testing.assert_close(answer.velocity, direct(models[0], *question))


def test_features_come_to_where_answers_do(models, question, monkeypatch):
    """From wherever blocks compute: a placement brings back a model's result, and knows nothing of these."""
    elsewhere = SimpleNamespace(to=lambda device: f"brought to {device}")
    monkeypatch.setattr("wandistiller.train.teacher.tapped", lambda model, blocks: nullcontext([elsewhere for _ in blocks]))
    teacher = Teacher(Shelf(models, boundary=0.1), torch.zeros(16, 32), device=CPU, dtype=torch.float32)
    assert teacher.answer(*question, blocks=[0, 2]).features == ["brought to cpu"] * 2


def test_taps_collect_in_order_and_leave_no_trace(models, question):
    with tapped(models[0], [0, 2]) as found:
        direct(models[0], *question)
    assert [each.shape for each in found] == [(3, 4, 96), (3, 4, 96)]
    direct(models[0], *question)
    assert len(found) == 2


class GaussianTeacher:
    """Data are N(0, s^2): the velocity at sigma is (sigma - (1 - sigma) s^2) / var * noisy, var = (1-sigma)^2 s^2 + sigma^2."""

    s = 0.5

    def answer(self, noisy, sigma, text, *, scale=1.0, blocks=()):
        view = sigma.view(-1, 1, 1, 1, 1)
        variance = (1 - view) ** 2 * self.s**2 + view**2
        velocity = (view - (1 - view) * self.s**2) / variance * noisy
        return Answer(velocity, velocity)


def test_trajectories_lie_where_the_flow_goes():
    """Along the exact flow noisy = sqrt(var) * z with one z, whatever the sigma."""
    shape, items = (2, 1, 3, 3), [4, 7]
    how = {"solver": "euler", "num_steps": 400, "shift": 1.0, "scale": 1.0, "learns_guided": False, "seed": 3, "device": CPU}
    records = roll_out(GaussianTeacher(), torch.zeros(2, 1, 1), items, shape, **how, draw=0)
    assert records.noisy.shape == (800, *shape) and records.item.tolist() == items * 400
    assert records.sigma[::2].tolist() == pytest.approx(list(euler_schedule(400, 1.0).sigmas[:-1]))
    variance = (1 - records.sigma) ** 2 * GaussianTeacher.s**2 + records.sigma**2
    shapes = records.noisy / variance.sqrt().view(-1, 1, 1, 1, 1)
    start = shapes[:2]
    for step in (100, 200, 399):
        torch.testing.assert_close(shapes[2 * step : 2 * step + 2], start, rtol=0.02, atol=0.02)
    expected = GaussianTeacher().answer(records.noisy, records.sigma, None).velocity
    torch.testing.assert_close(records.target, expected)


class ScaledTeacher:
    """Says as many times what it is asked as it is guided."""

    num_asked = 0

    def answer(self, noisy, sigma, text, *, scale=1.0, blocks=()):
        self.num_asked += 1
        return Answer(scale * noisy, noisy)


@pytest.mark.parametrize("learns_guided", [False, True])
def test_guidance_leads_the_way_and_is_the_target_where_it_is_learnt(learns_guided):
    how = {"solver": "euler", "num_steps": 2, "shift": 2.0, "scale": 3.0, "seed": 3, "draw": 0, "device": CPU}
    teacher = ScaledTeacher()
    found = roll_out(teacher, torch.zeros(1, 1, 1), [4], (2, 1, 3, 3), **how, learns_guided=learns_guided)
    assert teacher.num_asked == 2, "once a step, for the way and the target"
    torch.testing.assert_close(found.target, (3.0 if learns_guided else 1.0) * found.noisy)
    first, second, _ = euler_schedule(2, 2.0).sigmas
    torch.testing.assert_close(found.noisy[1], found.noisy[0] + (second - first) * 3.0 * found.noisy[0])


class HearingTeacher:
    """Says what text it was asked with."""

    def __init__(self):
        self.num_rows = []

    def answer(self, noisy, sigma, text, *, scale=1.0, blocks=()):
        self.num_rows.append(len(noisy))
        velocity = text.mean((1, 2)).view(-1, 1, 1, 1, 1).expand_as(noisy)
        return Answer(velocity, velocity)


@pytest.mark.parametrize("asks_in_step", [False, True])
def test_some_questions_are_asked_without_the_caption(asks_in_step):
    """At the same places: where guidance, which follows the caption, will ask for an answer without it."""
    how = {"solver": "euler", "num_steps": 100, "shift": 1.0, "scale": 1.0, "learns_guided": False, "seed": 3, "device": CPU}
    items, shape, text = list(range(8)), (2, 1, 3, 3), torch.ones(8, 4, 5)
    plain = roll_out(HearingTeacher(), text, items, shape, **how, draw=0)
    teacher = HearingTeacher()
    without = {"empty_text": torch.full((2, 5), -1.0), "empty_share": 0.1, "asks_in_step": asks_in_step}
    found = roll_out(teacher, text, items, shape, **how, **without, draw=0)
    torch.testing.assert_close(found.noisy, plain.noisy)
    expected = torch.where(found.is_empty, -1.0, 1.0).view(-1, 1, 1, 1, 1).expand_as(found.target)
    torch.testing.assert_close(found.target, expected)
    # A share of 0.1 of 800, within four standard deviations.
    assert 80 - 34 < found.is_empty.sum() < 80 + 34
    assert len(teacher.num_rows) == 200 if asks_in_step else 100 < len(teacher.num_rows) < 200
    again = roll_out(HearingTeacher(), text[:1], [3], shape, **how, **without, draw=0)
    assert torch.equal(again.is_empty, found.is_empty[3::8]), "whoever is asked together"


def test_the_noise_of_a_caption_and_a_draw_is_its_own():
    how = {"solver": "euler", "num_steps": 2, "shift": 1.0, "scale": 1.0, "learns_guided": False, "seed": 3, "device": CPU}
    both = roll_out(GaussianTeacher(), torch.zeros(2, 1, 1), [4, 7], (2, 1, 3, 3), **how, draw=0)
    one = roll_out(GaussianTeacher(), torch.zeros(1, 1, 1), [7], (2, 1, 3, 3), **how, draw=0)
    torch.testing.assert_close(both.noisy[1], one.noisy[0])
    other = roll_out(GaussianTeacher(), torch.zeros(1, 1, 1), [7], (2, 1, 3, 3), **how, draw=1)
    assert other.draw.tolist() == [1, 1] and not torch.isclose(other.noisy[0], one.noisy[0]).any()
