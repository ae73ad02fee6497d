"""Steps of a trial on fake tensors, whole: the program's own code at full depth, and each allocation in its order.

What is foreseen of a step is put together from a recording of seven blocks and from closed forms. This is the other way: the
trial's own steps, with its methods, teachers, optimisers and streams, of which all that is made is told to the model of the
allocator. Host memory is left out, and so is what threads do there.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from wandistiller.memory import block_store, streaming, tracing
from wandistiller.memory.activations import apply_policy
from wandistiller.memory.allocator_model import AllocatorModel
from wandistiller.memory.cuda_autocast import standing_in
from wandistiller.memory.hardware import H200
from wandistiller.memory.kept import HostKeeper
from wandistiller.memory.tape import BACKWARD
from wandistiller.plan import trial_steps
from wandistiller.plan.trial_models import Ends
from wandistiller.train.optimisation import Optimisation

CPU = torch.device("cpu")
_value_of = torch.ops.aten._local_scalar_dense.default


@dataclass(frozen=True)
class Whole:
    """What steps took, of the card."""

    peak: int
    reserved: int


class _Recorder(tracing.Recorder):
    """One whose tensors have other names in each part, as parts come again in each step."""

    def begin(self, place):
        super().begin(place)
        self.tape.parts[-1].num_made = 10**6 * len(self.tape.parts)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _value_of:  # a scaler's question whether something was infinite, an optimiser's step
            return 1.0 if args[0].dtype.is_floating_point else 1
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Placed:
    def __init__(self, stream):
        self.stream = stream


class _Gradients:
    """Holds gradients for as long as ``HostGradients`` does, which copies them beside the computation."""

    def __init__(self, layouts, device, take=None, *, budget=None, lane=None):
        trained = [[member for member in layout.members if member.tensor.requires_grad] for layout in layouts]
        self._places = {id(member.tensor): place for place, members in enumerate(trained) for member in members}
        self._counts = [len(members) for members in trained]
        tensors = (member.tensor for member in itertools.chain(*trained))
        self.hooks = [tensor.register_post_accumulate_grad_hook(self._leave) for tensor in tensors]
        self._before, self._leaving = list[torch.Tensor](), list[torch.Tensor]()

    def _leave(self, parameter):
        gradient, parameter.grad = parameter.grad, None
        self._leaving.append(gradient)
        if len(self._leaving) == self._counts[self._places[id(parameter)]]:
            self._before, self._leaving = self._leaving, []

    def wait(self):
        self._before, self._leaving = [], []

    clear = close = wait


def whole_steps(work, monkeypatch, *, num_steps=2):
    """Take a training's steps on fake tensors and return what they took."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = _Recorder(fake)

    class Marked(Optimisation):
        """Says where backward and update begin, which an allocation alone does not."""

        def backward(self, loss, *, is_last=True):
            recorder.begin((f"{BACKWARD}student", -1))
            super().backward(loss, is_last=is_last)
            recorder.begin(("after backward", -1))

        def step(self, number):
            recorder.begin(("update", -1))
            return super().step(number)

    class OnHost:
        """What ``HostOptimisation`` does on the card."""

        def __init__(self, parameters, stream, options, precision, device):
            self._stream = stream
            streamed = {id(member.tensor) for layout in stream.layouts for member in layout.members}
            rest = {name: each for name, each in parameters.items() if id(each) not in streamed}
            self._rest = Marked(rest, replace(options, clip_norm=None), precision, device)

        def backward(self, loss, *, is_last=True):
            self._rest.backward(loss)
            self._stream.gradients.wait()

        def step(self, number):
            self._rest.step(number)
            self._stream.invalidate()

        def close(self):
            self._stream = None

    def build_placed(use, placing, device, ends):
        model = use.build(use.num_blocks)
        blocks = list(model.get_submodule("blocks").children())
        if placing.is_streamed:
            tracing.materialise(recorder, model)
        else:
            tracing.materialise(SimpleNamespace(elsewhere=nullcontext), model)  # on the card, so it counts
        if use.name == "student":
            tracing.mark_blocks(recorder, "student", blocks)
        if use.policy != "none" or use.to_host:
            keeper = HostKeeper(CPU, allocate=recorder.allocate_host) if use.to_host else None
            ends.callback(apply_policy(blocks, use.policy, CPU, keeper=keeper).detach)
        if not placing.is_streamed:
            return _Placed(None), model
        trains = use.trains == "everything"
        stream = streaming.stream_blocks(model, blocks, CPU, resident=placing.resident, train=trains)
        for tensor, _ in stream.outside:
            tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype)
        ends.callback(stream.close)
        return _Placed(stream), model

    monkeypatch.setattr(trial_steps, "build_placed", build_placed)
    monkeypatch.setattr(trial_steps, "tensors_of", _tensors_of)
    monkeypatch.setattr(trial_steps, "Optimisation", Marked)
    monkeypatch.setattr(trial_steps, "HostOptimisation", OnHost)
    monkeypatch.setattr(streaming, "HostGradients", _Gradients)
    monkeypatch.setattr(block_store, "allocate_host", lambda size, device, budget=None: recorder.allocate_host(size, device))
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: 4096)  # blocks are laid out by it
    own_kernels = tracing.kernels(tracing._rms_norm, tracing._KeptAttention.apply)
    with standing_in(), fake, recorder, own_kernels, Ends() as ends:
        step = trial_steps.STEPS[type(work)](work, CPU, ends)
        recorder.begin(("steps", -1))
        for number in range(num_steps):
            recorder.begin((f"step {number}", -1))
            step(number)
        recorder.is_open = False
        del step
    return _played(recorder.tape)


def _played(tape):
    allocator = AllocatorModel(is_expandable=True)
    allocator.allocate("libraries", H200.workspace)
    for part in tape.parts:
        if part.place[0] == "steps":  # building is no part of them
            allocator.peak_allocated = allocator.allocated
        for key, num_bytes in part.events:
            if num_bytes >= 0:
                allocator.allocate(key, num_bytes)
            else:
                allocator.free(key)
    return Whole(allocator.peak_allocated, allocator.peak_reserved)


def _tensors_of(use, device):
    shapes = {"latents": use.latent_shape, "noise": use.latent_shape, "text": (use.text_tokens, use.config["text_dim"])}
    return {name: torch.empty(use.batch_size, *shape) for name, shape in shapes.items()} | {
        "sigma": torch.empty(use.batch_size)
    }
