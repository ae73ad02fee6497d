"""What a compiled block takes of a card, found out without compiling it for one.

The block is traced, differentiated and cut into a forward and a backward graph by the same PyTorch code that ``torch.compile``
uses, on fake tensors. Of such a graph only some results ever exist in memory: those of matrix products and attention, what
these read, reductions, and what the graph returns. All others live in the registers of a fused kernel. The graphs are then
"run" by making just the tensors that would exist, in order, each until its last use.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from wandistiller.memory import attention
from wandistiller.memory.cuda_autocast import CudaAutocast
from wandistiller.memory.tape import Kernel
from wandistiller.memory.tracing import CONVOLUTIONS, Recorder, attention_kernel, attention_scratch, kernels

_EXTERN = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::convolution_backward")
_VIEWS = ("aten::_unsafe_view", "aten::alias", "aten::detach", "aten::reshape")
_REDUCTIONS = ("aten::var_mean", "aten::sum", "aten::mean", "aten::amax", "aten::amin")


def stand_in_for_compiled(recorder: Recorder, blocks: Sequence[nn.Module]) -> None:
    """Let blocks of one kind do what they would do compiled."""
    shared: dict[Any, Callable[..., Any]] = {}
    for block in blocks:
        block.forward = partial(_forward, recorder, shared, block, block.forward)


def _forward(
    recorder: Recorder,
    shared: dict[Any, Callable[..., Any]],
    block: nn.Module,
    plain: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    names, values = zip(*block.named_parameters(), strict=True)
    buffers = dict(block.named_buffers())

    def run(parameters: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        replaced = {**dict(zip(names, parameters, strict=True)), **buffers}
        with nn.utils.stateless._reparametrize_module(block, replaced):
            return plain(*args, **kwargs)

    leaves = [leaf for leaf in tree_leaves((values, args, kwargs)) if isinstance(leaf, Tensor)]
    key = (torch.is_grad_enabled(), *((leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in leaves))
    if key not in shared:
        with recorder.elsewhere():
            # Copies, because the graphs hold on to what they were traced with.
            examples = tree_map_only(Tensor, _like, (args, kwargs))
        shared[key] = _compile(recorder, run, (list(values), *examples))
    return shared[key](list(values), args, kwargs)


def _compile(recorder: Recorder, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    from torch._inductor.decomposition import select_decomp_table

    compiled = aot_function(
        run,
        fw_compiler=partial(_Playback, recorder),
        bw_compiler=partial(_Playback, recorder),
        inference_compiler=partial(_Playback, recorder),
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    # The first call traces; nothing of it belongs on the tape.
    with (
        recorder.elsewhere(),
        _disable_current_modes(),
        recorder.fake,
        kernels(),
        attention.ledger_set_aside(),
        CudaAutocast.not_caching(),
        # What sends kept tensors to the host is not to see those of the tracing.
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ):
        compiled(*arguments)
    return compiled


_MOST_READS = 4
"""Tensors that a value may be computed from in each place where it is wanted; PyTorch's ``realize_reads_threshold``."""


@dataclass
class _Step:
    """One kernel: what it makes, what it reads, and what is gone after it."""

    node: fx.Node
    reads: list[fx.Node]
    is_extern: bool
    dying: list[fx.Node] = field(default_factory=list)


class _Playback:
    """A graph as compiled code: makes the tensors that it would make."""

    _boxed_call = True  # arguments come in a list that may be emptied, so that they can die early

    def __init__(self, recorder: Recorder, graph: fx.GraphModule, examples: Sequence[Any]) -> None:
        self._recorder = recorder
        nodes = list(graph.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        output = next(node for node in nodes if node.op == "output")
        self._outputs = list(output.args[0])
        self._owners = {node: _owner(node) for node in nodes}
        needed = {self._owners[node] for node in self._outputs if isinstance(node, fx.Node)}
        for node in nodes:
            if _is_extern(node):
                needed |= {self._owners[each] for each in node.all_input_nodes}
        self._is_real = {node for node in nodes if node.op == "placeholder" or _is_extern(node) or _is_reduction(node)}
        self._is_real |= {node for node in needed if node.op == "call_function"}
        self._steps = self._plan(nodes)

    def _plan(self, nodes: Sequence[fx.Node]) -> list[_Step]:
        sources: dict[fx.Node, set[fx.Node]] = {}
        steps = []
        for node in nodes:
            if node.op != "call_function":
                continue
            reads: set[fx.Node] = set()
            for each in node.all_input_nodes:
                owner = self._owners[each]
                reads |= {owner} if owner in self._is_real else sources.get(owner, set())
            if self._owners[node] is node and node in self._is_real:
                steps.append(_Step(node, sorted(reads), _is_extern(node)))
            elif len(node.users) > 1 and len(reads) > _MOST_READS and self._owners[node] is node:
                # Wanted in several places and dear to compute again: it is written out, as the narrower of it and its source.
                made = _before_widening(node)
                self._is_real.add(made)
                steps.append(_Step(made, sorted(reads), is_extern=False))
                sources[node] = {made}
            else:
                sources[node] = reads
        kept = {self._owners[node] for node in self._outputs if isinstance(node, fx.Node)}
        # As PyTorch does it: of several orders, the one that holds least.
        orders = [steps, _least_first(steps, kept)]
        best = min(orders, key=lambda order: _peak(order, kept))
        for step, dying in zip(best, _deaths(best, kept), strict=True):
            step.dying = dying
        return best

    def __call__(self, arguments: list[Any]) -> list[Any]:
        made: dict[fx.Node, Any] = dict(zip(self._inputs, arguments, strict=True))
        arguments.clear()
        for step in self._steps:
            if not step.is_extern:  # written over what dies with it, where that has the same size
                self._drop(made, [node for node in step.dying if _num_bytes(node) == _num_bytes(step.node)][:1])
            made[step.node] = self._make(step, made)
            self._recorder.work(self._kernel(step), self._passing(step))
            self._drop(made, step.dying)
        return [self._value(made, node) for node in self._outputs]

    @staticmethod
    def _drop(made: dict[fx.Node, Any], nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            made.pop(node, None)

    def _make(self, step: _Step, made: dict[fx.Node, Any]) -> Any:
        if str(step.node.target) == "wandistiller.attention.default":
            return attention.attend(
                *[self._value(made, each) if isinstance(each, fx.Node) else each for each in step.node.args]
            )
        return tree_map_only(Tensor, _like, step.node.meta["val"])

    def _value(self, made: dict[fx.Node, Any], node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        owner = self._owners[node]
        value, val = made[owner], node.meta["val"]
        if isinstance(value, (tuple, list)):
            value = value[_item(node)]
        if not isinstance(val, Tensor) or owner is node:
            return value
        return torch.as_strided(value, val.size(), val.stride(), val.storage_offset())

    @staticmethod
    def _passing(step: _Step) -> int:
        return attention_scratch(_name(step.node), [each.meta["val"] for each in step.node.all_input_nodes])

    def _kernel(self, step: _Step) -> Kernel:
        node, val = step.node, step.node.meta["val"]
        tensors = [leaf for leaf in tree_leaves(val) if isinstance(leaf, Tensor)]
        num_bytes = sum(map(_num_bytes, (node, *step.reads)))
        name, dtype = _name(node), str(tensors[0].dtype).removeprefix("torch.")
        if "attention" in name:
            if name == "wandistiller::attention":
                return Kernel("other", 0.0, 0)  # counted where it is computed
            return attention_kernel(name, [each.meta["val"] for each in node.all_input_nodes], num_bytes, dtype)
        if step.is_extern:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            target: Any = node.target
            kind = CONVOLUTIONS.get(name, "matmul")
            return Kernel(kind, float(flop_registry[target.overloadpacket](*args, **kwargs, out_val=val)), num_bytes, dtype)
        return Kernel("other", 0.0, num_bytes, dtype)


def _deaths(steps: Sequence[_Step], kept: set[fx.Node]) -> list[list[fx.Node]]:
    """Return what is read for the last time in each step; what nobody reads dies where it is made."""
    last = {read: step for step in steps for read in (step.node, *step.reads)}
    found: dict[int, list[fx.Node]] = {id(step): [] for step in steps}
    for node, step in last.items():
        if node not in kept:
            found[id(step)].append(node)
    return [found[id(step)] for step in steps]


def _peak(steps: Sequence[_Step], kept: set[fx.Node]) -> int:
    held = most = 0
    for step, dying in zip(steps, _deaths(steps, kept), strict=True):
        held += _num_bytes(step.node)
        most = max(most, held)
        held -= sum(map(_num_bytes, dying))
    return most


def _least_first(steps: Sequence[_Step], kept: set[fx.Node]) -> list[_Step]:
    """Return the steps in an order in which each next one, of those that can be next, adds least."""
    made = {step.node for step in steps}
    readers: dict[fx.Node, int] = {}
    for step in steps:
        for read in step.reads:
            readers[read] = readers.get(read, 0) + 1
    waiting, ready_nodes, order = list(steps), set(), []

    def adds(step: _Step) -> int:
        freed = sum(_num_bytes(read) for read in step.reads if readers[read] == 1 and read not in kept)
        return _num_bytes(step.node) - freed

    while waiting:
        ready = [step for step in waiting if all(read in ready_nodes or read not in made for read in step.reads)]
        chosen = min(ready, key=adds)
        waiting.remove(chosen)
        order.append(chosen)
        ready_nodes.add(chosen.node)
        for read in chosen.reads:
            readers[read] -= 1
    return order


def _name(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _is_extern(node: fx.Node) -> bool:
    return _name(node) in _EXTERN or "attention" in _name(node)


def _is_reduction(node: fx.Node) -> bool:
    return _name(node) in _REDUCTIONS


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and (node.target.is_view or _name(node) in _VIEWS)


def _owner(node: fx.Node) -> fx.Node:
    """Return the node whose memory a node's value lies in."""
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _before_widening(node: fx.Node) -> fx.Node:
    """Return the node, or what it only converts to a wider dtype."""
    source = node.all_input_nodes[0]
    is_conversion = _name(node) == "prims::convert_element_type" and source.op == "call_function" and not _is_view(source)
    return source if is_conversion and _num_bytes(source) < _num_bytes(node) else node


def _item(node: fx.Node) -> int:
    """Return which of several results a view is of."""
    while not (node.target is operator.getitem and not _is_view(node.all_input_nodes[0])):
        node = node.all_input_nodes[0]
    index: Any = node.args[1]
    return int(index)


def _num_bytes(node: fx.Node) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, Tensor))


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, requires_grad=tensor.requires_grad)
