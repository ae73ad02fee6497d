"""Steps of the methods themselves, against what was foreseen of them: live tensors are counted on the CPU."""

import gc

import pytest
import torch
from helpers.live_bytes import LiveBytes

from wandistiller.data.loader import Batch
from wandistiller.memory.activations import apply_policy
from wandistiller.memory.hardware import described
from wandistiller.memory.scene import Scene
from wandistiller.memory.tape import BACKWARD
from wandistiller.memory.tracing import mark_blocks, materialise, recording
from wandistiller.memory.uses import PixelDecoder, Use
from wandistiller.memory.works import Training
from wandistiller.models.features import matched_blocks
from wandistiller.models.sizes import SIZES, TINY_VAE
from wandistiller.plan.trial_models import Ends, build_placed
from wandistiller.plan.trial_steps import OneTeacher, method_of, tensors_of
from wandistiller.train.method import Role
from wandistiller.train.methods.distill import Distillation, MatchedBlocks, Objectives
from wandistiller.train.methods.finetune import FlowMatching
from wandistiller.train.optimisation import Optimisation, OptimiserOptions
from wandistiller.units import Bytes

CPU = torch.device("cpu")
CARD = described(card="rtx4090", host_memory=Bytes(2**36))
CONFIG = {**SIZES["tiny"].transformer, "num_layers": 4}
USE = Use(name="student", config=CONFIG, latent_shape=(8, 3, 16, 16), batch_size=2, text_tokens=8, dtype=torch.float32)
STUDENT = USE.changed(trains="everything")


def live_bytes(work):
    """Return the most that a real step of the method has at once beside weights and batch."""
    with Ends() as ends:
        _, model = build_placed(work.student, work.placing, CPU, ends)
        method = method_of(work, Role("student", model, is_trained=True), CPU, ends)
        batch = Batch(tensors_of(work.student, CPU), ("", ""), 0, 0)
        method.losses(batch).total.backward()
        model.zero_grad()
        gc.collect()
        with LiveBytes() as live:
            method.losses(batch).total.backward()
        return live.peak


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_loss_in_pixels(is_checkpointed):
    student = STUDENT.changed(pixels=PixelDecoder(TINY_VAE, is_checkpointed))
    foreseen = Scene().play(student.tape, student.repeats).peak
    assert foreseen == pytest.approx(live_bytes(Training(student=student)), rel=0.05)


def recorded_training(use):
    """Return the tape of two steps of a training, with the updates as PyTorch does them."""
    with recording() as recorder:
        model = materialise(recorder, use.build(use.num_blocks))
        policy = apply_policy(list(model.get_submodule("blocks").children()), use.policy, CPU)
        optimisation = Optimisation(dict(model.named_parameters()), OptimiserOptions(), use.precision, CPU)
        tensors = batch_of(use, recorder)
        for number in range(2):
            recorder.begin((f"step {number}", -1))
            method = FlowMatching(Role("student", model, is_trained=True), dtype=use.dtype)
            loss = method.losses(Batch(tensors, ("",) * use.batch_size, 0, 0)).total
            recorder.begin((f"{BACKWARD}step {number}", -1))
            loss.backward()
            del loss
            recorder.begin((f"update {number}", -1))
            optimisation.step(number)
        policy.detach()
    return recorder.tape


@pytest.mark.parametrize(
    ("ffn_dim", "frames", "policy"), [(4096, 1, "full"), (4096, 5, "selective"), (512, 9, "none"), (512, 1, "none")]
)
def test_what_updates_take_and_when(ffn_dim, frames, policy, monkeypatch):
    """An optimiser's state is made while the first gradients are there, so that theirs is the room that is free later."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    config = {**CONFIG, "num_layers": 9, "ffn_dim": ffn_dim}
    use = STUDENT.changed(config=config, latent_shape=(8, frames, 16, 16), batch_size=8, policy=policy)
    scene = Scene()
    scene.hold("", "libraries", [CARD.card.workspace])
    scene.hold(use.name, "weights", [each.nbytes for each in (*use.model.parameters(), *use.model.buffers())])
    expected = scene.play(recorded_training(use), {})
    phase = Training(student=use).phase(CARD)
    assert phase.peak == pytest.approx(expected.peak, rel=0.01)
    assert phase.reserved == pytest.approx(scene.reserved, rel=0.02)


def batch_of(use, recorder):
    """Return a batch that was there before."""
    with recorder.elsewhere():
        shapes = {"latents": use.latent_shape, "noise": use.latent_shape, "text": (use.text_tokens, CONFIG["text_dim"])}
        tensors = {name: torch.empty(use.batch_size, *shape) for name, shape in shapes.items()}
        return {**tensors, "sigma": torch.empty(use.batch_size)}


def recorded_distillation(work):
    """Return the tape of the method's own step with its teacher's answer, of all blocks, one after the other."""
    own, other = work.student, work.teacher
    with recording() as recorder:
        student, teacher = (materialise(recorder, use.build(use.num_blocks)) for use in (own, other))
        blocks = list(student.get_submodule("blocks").children())
        policy = apply_policy(blocks, own.policy, CPU)
        mark_blocks(recorder, "student", blocks)
        channels = None if own.width == other.width else torch.arange(own.width)
        method = Distillation(
            Role("student", student, is_trained=True),
            OneTeacher(other, teacher, own.latent_shape[0]),
            Objectives(feature=1.0),
            guidance_scale=1.0,
            dtype=own.dtype,
            matched=MatchedBlocks(range(own.num_blocks), matched_blocks(own.num_blocks, other.num_blocks), channels),
        )
        method.losses(Batch(batch_of(own, recorder), ("", ""), 0, 0)).total.backward()
        policy.detach()
    return recorder.tape


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("num_heads", [1, 4])
def test_matched_features(policy, num_heads):
    """What is largest, and when, depends on what blocks keep, and on how much wider the teacher is."""
    student = STUDENT.changed(latent_shape=(8, 17, 16, 16), policy=policy, config={**CONFIG, "num_layers": 15})
    config = {**CONFIG, "num_layers": 21, "num_attention_heads": num_heads * CONFIG["num_attention_heads"], "ffn_dim": 64}
    teacher = student.changed(name="teacher", config=config, trains="nothing", policy="none")
    work = Training(student=student, teacher=teacher, matches_features=True)
    scene, whole = Scene(), Scene()
    asked = scene.play(teacher.tape, teacher.repeats, keeps=matched_blocks(15, 21))
    compared = scene.play(work.compared.tape, student.repeats, given=asked.results)
    expected = whole.play(recorded_distillation(work), {})
    assert max(asked.peak, compared.peak) == pytest.approx(expected.peak, rel=0.01)
    assert scene.reserved == pytest.approx(whole.reserved, rel=0.01)
    scene.drop(asked), scene.drop(compared), whole.drop(expected)
    assert scene.allocated == whole.allocated == 0, "what was given is let go"
