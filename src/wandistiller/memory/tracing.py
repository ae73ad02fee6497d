"""Steps written down without a card and without weights.

The program's own code runs on fake tensors, which have shapes and no numbers. Every tensor that is made or dies on the way, and
every piece of work, is written onto a tape (see ``tape``).

On fake tensors of the CPU attention takes a flash kernel, as it does on a card; an RMS norm, which the CPU computes in several
steps, is put in as the one kernel that it is on a card.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from wandistiller.memory import attention
from wandistiller.memory.cuda_autocast import LONG, standing_in
from wandistiller.memory.tape import BACKWARD, Kernel, Key, Place, Tape

START: Place = ("start", -1)
_WHICH_DEVICE = torch.ops.prim.device.default
CONVOLUTIONS = {"aten::convolution": "convolution", "aten::convolution_backward": "convolution backward"}
_NO_WORK = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}


class Recorder(TorchDispatchMode):
    """Writes down what happens inside of the ``with`` block."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.tape = Tape()
        self.tape.begin(START)
        self._keys: dict[int, Key | None] = {}
        """Tensors alive by their storage; None for those that are not the device's, or not the step's."""
        self._is_counting = True
        self.fake = fake
        self.is_open = True
        """Whether what happens is still part of the step."""
        self._sum: tuple[Key, Key] | None = None
        """What autograd has just added up, and what it has added to."""
        self._in_place_of: dict[Key, Key] = {}
        """Sums by the tensors whose memory they have."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _WHICH_DEVICE and isinstance(args[0], FakeTensor):  # two in three calls, and no work
            return args[0].fake_device
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.device.type != "meta"]
        is_new = [self._note(tensor) for tensor in outputs]
        if func is torch.ops.aten.add.Tensor and any(is_new) and self._is_of_autograd():
            self._note_sum(args[0], outputs[0])
        if (any(is_new) or (outputs and func._schema.is_mutable)) and func._schema.name not in _NO_WORK:
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            passing = attention_scratch(func._schema.name, inputs)
            if func._schema.name == "aten::convolution" and _lays_out_anew(inputs[0], inputs[1], args[3]):
                passing = inputs[0].nbytes + outputs[0].nbytes
            self.work(self._kernel(func, args, kwargs, inputs, out), passing)
        return out

    def work(self, kernel: Kernel, passing: int = 0) -> None:
        """Write down a piece of work, and how many bytes are there only while it is done."""
        if self._is_counting:
            part = self.tape.parts[-1]
            part.work[kernel] += 1
            part.num_by_autograd += self._is_of_autograd()
            if passing:
                self.tape.end(part.make(passing))

    def _is_of_autograd(self) -> bool:
        # What is computed again has a graph.
        return self.tape.parts[-1].place[0].startswith(BACKWARD) and not torch.is_grad_enabled()

    def begin(self, place: Place) -> None:
        """Start another part of the step."""
        self._sum = None
        self.tape.begin(place)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Leave out what is made inside: it is in host memory, or counted apart."""
        before, self._is_counting = self._is_counting, False
        try:
            yield
        finally:
            self._is_counting = before

    def allocate_host(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return host memory, in place of ``host.allocate_host``."""
        with self.elsewhere():
            return torch.empty(num_bytes, dtype=torch.uint8)

    def key(self, tensor: Tensor) -> Key | None:
        """Return a tensor's name on the tape, if it is the step's."""
        return self._keys.get(tensor.untyped_storage()._cdata)

    def keys(self, tensors: Iterable[Tensor | None]) -> frozenset[Key]:
        """Return the names of those that there are, sums by the name of the tensor whose memory they have."""
        found = (self.key(tensor) for tensor in tensors if tensor is not None)
        return frozenset(self._in_place_of.get(key, key) for key in found if key is not None)

    def _note(self, tensor: Tensor) -> bool:
        """Write down a tensor, once for all that share its memory; say whether it is new."""
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._keys:
            return False
        key = self.tape.parts[-1].make(storage.nbytes()) if self._is_counting else None
        self._sum = None
        self._keys[place] = key
        weakref.finalize(storage, self._end, place, key)
        return True

    def _end(self, place: int, key: Key | None) -> None:
        if self._keys.get(place) == key:
            self._keys.pop(place, None)
        if key is None or not self.is_open:
            return
        if self._sum is not None and key == self._sum[1]:
            self._add_in_place(*self._sum)
            return
        if self._sum is not None and key == self._sum[0]:
            self._sum = None
        self.tape.end(self._in_place_of.pop(key, key))

    def _note_sum(self, addend: Tensor, total: Tensor) -> None:
        if addend._is_view():  # autograd leaves it alone, as the tensor that it is a view of is still there
            return
        old, new = self.key(addend), self.key(total)
        if old is not None and new is not None and addend.untyped_storage().nbytes() == total.untyped_storage().nbytes():
            self._sum = new, old

    def _add_in_place(self, total: Key, addend: Key) -> None:
        """Let a sum have the memory of what it was added to, of which nothing else was left: so autograd adds up gradients,
        but for fake ones."""
        self._sum = None
        events = self.tape.parts[-1].events
        del events[max(index for index, (key, num_bytes) in enumerate(events) if key == total and num_bytes >= 0)]
        self._in_place_of[total] = self._in_place_of.pop(addend, addend)

    def _kernel(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], out: Any) -> Kernel:
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        num_bytes = sum(tensor.nbytes for tensor in (*inputs, *outputs))
        name, dtype = func._schema.name, str(outputs[0].dtype).removeprefix("torch.") if outputs else ""
        if name == "aten::copy_":
            target, source = (self._keys.get(each.untyped_storage()._cdata, START) for each in inputs[:2])
            if (target is None) != (source is None):
                return Kernel("to_device" if source is None else "to_host", 0.0, inputs[0].nbytes, dtype)
        if "attention" in name:
            return attention_kernel(name, inputs, num_bytes, dtype)
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            kind = CONVOLUTIONS.get(name, "matmul")
            return Kernel(kind, float(count(*args, **kwargs, out_val=out)), num_bytes, dtype)
        return Kernel("other", 0.0, num_bytes, dtype)


def _lays_out_anew(values: Tensor, weight: Tensor, stride: Sequence[int]) -> bool:
    """Say whether a card's convolution lays input and output out channels last for itself: one whose windows overlap; others
    are products of matrices."""
    size = weight.shape[2:]
    return values.is_contiguous() and math.prod(size) > 1 and list(size) != list(stride)


def attention_kernel(name: str, inputs: Sequence[Tensor], num_bytes: int, dtype: str) -> Kernel:
    """Return the work of attention, forward or backward by its operator's name."""
    is_backward = "backward" in name
    query, key, *_ = [each for each in inputs if each.ndim == 4][1 if is_backward else 0 :]
    return Kernel("attention", float((10 if is_backward else 4) * math.prod(query.shape) * key.shape[-2]), num_bytes, dtype)


def attention_scratch(name: str, inputs: Sequence[Tensor]) -> int:
    """Return the bytes that backward of attention needs for a moment: its query's gradient in float32, and a number a row."""
    if "attention" not in name or "backward" not in name:
        return 0
    query = [each for each in inputs if each.ndim == 4][1]
    return 4 * (query.numel() + query.numel() // query.shape[-1])


@contextmanager
def recording() -> Iterator[Recorder]:
    """Let everything inside run on fake tensors, and write it down."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with standing_in(), fake, Recorder(fake) as recorder, kernels(_rms_norm, _KeptAttention.apply):
        yield recorder
        recorder.is_open = False


@contextmanager
def kernels(
    norm: Callable[..., Tensor] = functional.rms_norm, attend: Callable[..., Any] = attention.operator
) -> Iterator[None]:
    """Let an RMS norm and attention that can be kept be computed by these; by default, as they are without any of this."""
    before = functional.rms_norm, attention.operator
    functional.rms_norm, attention.operator = norm, attend
    try:
        yield
    finally:
        functional.rms_norm, attention.operator = before


def mark_blocks(recorder: Recorder, name: str, blocks: list[nn.Module]) -> None:
    """Let each block begin a part of the tape, in forward and in backward; what follows the last one is a part too."""

    def hook(index: int, block: nn.Module) -> None:
        def before(module: nn.Module, args: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # else it is computed again, in its backward
                recorder.begin((name, index))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return
            found = output if isinstance(output, Tensor) else output[0]
            recorder.tape.parts[-1].result = recorder.key(found)
            if found.requires_grad:
                mark_backward(recorder, found, (BACKWARD + name, index))
            if index == len(blocks) - 1:
                recorder.begin((f"end of {name}", -1))

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)

    for index, block in enumerate(blocks):
        hook(index, block)


def mark_backward(recorder: Recorder, result: Tensor, place: Place) -> None:
    """Let a part of the tape begin where the gradient of a result is there."""
    result.register_hook(lambda gradient: recorder.begin(place))


def materialise(recorder: Recorder, model: nn.Module) -> nn.Module:
    """Give a model on the meta device fake weights, which are not the step's own."""
    made: dict[int, nn.Parameter] = {}
    with recorder.elsewhere():
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    if id(parameter) not in made:
                        values = torch.empty(parameter.shape, dtype=parameter.dtype)
                        made[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                    module._parameters[name] = made[id(parameter)]
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return model


class _RmsNorm(torch.autograd.Function):
    """What one kernel of a card makes and keeps: the result, and for backward the input and a number a row."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor | None) -> Tensor:
        rows = torch.empty((*values.shape[:-1], 1), dtype=torch.float32)
        ctx.has_weight = weight is not None
        ctx.save_for_backward(values, *([weight] if weight is not None else []), rows)
        return torch.neg(values)  # any kernel that reads and writes once

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        values, *rest = ctx.saved_tensors
        weight = torch.empty_like(rest[0]) if ctx.has_weight and ctx.needs_input_grad[1] else None
        return torch.mul(values, gradients[0]), weight


class _KeptAttention(torch.autograd.Function):
    """Attention that can be kept, in Python all the way: an operator would hide what it notes and replays."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        result, sums = attention.attend(query, key, value, scale)
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.mark_non_differentiable(sums)
        ctx.scale = scale
        return result, sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, result, sums = ctx.saved_tensors
        return (*attention.attend_backward(gradients[0], query, key, value, result, sums, ctx.scale), None)


def _rms_norm(values: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    apply: Callable[..., Tensor] = _RmsNorm.apply
    if torch.is_autocast_enabled("cpu") and "rms_norm" in LONG:
        values, weight = values.float(), None if weight is None else weight.float()
    if weight is not None and weight.dtype != values.dtype:  # a card, too, then takes several steps
        return torch.rms_norm(values, normalized_shape, weight, eps)
    return apply(values, weight)
