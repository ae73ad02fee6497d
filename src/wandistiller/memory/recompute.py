"""A module that keeps its inputs alone, or what is dear to recompute as well, and runs again when its gradient is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from wandistiller.errors import UsageError
from wandistiller.memory import attention
from wandistiller.memory.inspection import tensors_in, version_of
from wandistiller.memory.kept import Keeper, Kept

Forward = Callable[..., Any]


def recomputing(module: nn.Module, forward: Forward, keeper: Keeper, *, keep_attention: bool) -> Forward:
    """Return a module's forward that computes again in backward what it does not keep."""
    has_dropout = any(isinstance(part, _DropoutNd) and part.p > 0 for part in module.modules())
    is_checked = False

    def check(outputs: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        nonlocal is_checked
        if not is_checked:
            _check_all_known(outputs, known)
        is_checked = True

    @torch.compiler.disable  # compiled code may be within, not around
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        wants_gradient = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves) or parameters
        if not torch.is_grad_enabled() or not wants_gradient:
            return forward(*args, **kwargs)
        if has_dropout and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise UsageError("Blocks with dropout cannot be recomputed in a CUDA graph.", fix="Use the policy 'none'.")
        _check_seen(leaf for leaf in leaves if any(tensor.requires_grad for tensor in tensors_in(leaf)))
        plan = _Plan(forward, structure, leaves, keeper, keep_attention, check)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return plan.whole(_Recompute.apply(plan, len(tensors), *tensors, *parameters))

    return run


def used_twice() -> UsageError:
    """Return the error for a second backward."""
    return UsageError(
        "Backward went through a block with an activation policy twice.",
        why="what the policy keeps is let go of as it is used.",
        fix="Add the losses up and go backward once, or train without an activation policy.",
    )


_HOLE = object()
"""Where a tensor was in an output."""


def _tensors(leaves: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def _check_seen(leaves: Iterable[Any]) -> None:
    """Raise for an object whose tensors autograd is not told of."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise UsageError(
                f"A block that is recomputed takes or returns a {type(leaf).__name__} with tensors in it.",
                why="only tensors in tuples, lists, dicts and registered classes have gradients then.",
                fix="Register the class with torch.export.register_dataclass, or use the policy 'none'.",
            )


def _check_all_known(outputs: Iterable[Tensor], known: Iterable[Tensor]) -> None:
    """Raise where outputs depend on something trained that would get no gradient: neither given to a module nor its own."""
    ids = {id(tensor) for tensor in known}
    todo, seen = [out.grad_fn for out in outputs], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in ids:
            raise UsageError(
                f"A block that is recomputed uses a trained tensor {tuple(leaf.shape)} that it is not given and does not own.",
                why="it would get no gradient.",
                fix="Hand it over as an argument or register it as the block's own, or use the policy 'none'.",
            )
        todo += [following for following, _ in node.next_functions]


class _Plan:
    """One call of a recomputed module: what to run, on what, and what was kept of it."""

    def __init__(
        self,
        forward: Forward,
        structure: Any,
        leaves: list[Any],
        keeper: Keeper,
        keep_attention: bool,
        check: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
    ) -> None:
        """``check`` is given the outputs of the second time, and all that gradients are computed for."""
        self.forward = forward
        self.check = check
        self.structure = structure
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.needs_gradient = [leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor)]
        self.keeper = keeper
        self.keep_attention = keep_attention
        self.random_states = _random_states(leaves)
        self.autocasts = _autocasts()
        self.versions: list[int] = []
        self.kept: list[Kept] | None = None
        self.kept_attention: list[tuple[Kept, Kept]] = []

    def first(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run without a graph, put away what backward will need, and return the tensors of the output."""
        self.keeper.begin()
        self.versions = [version_of(tensor) for tensor in tensors]
        ledger = attention.Ledger() if self.keep_attention else None
        with torch.no_grad(), attention.ledger_in_use(ledger) if ledger else nullcontext():
            output = self._call(tensors)
        self._check_unchanged(tensors)
        # The first input is this block's own; the others (text, time, positions) are shared by all blocks.
        self.kept = [self.keeper.put(tensor) if index == 0 else Kept(tensor) for index, tensor in enumerate(tensors)]
        if ledger:
            self.kept_attention = [(self.keeper.put(result), self.keeper.put(sums)) for result, sums in ledger.results]
        self.output, self.output_structure = tree_flatten(output)
        given = {id(leaf) for leaf in self.leaves}
        made = [leaf for leaf in self.output if id(leaf) not in given]
        _check_seen(leaf for leaf in made if any(map(torch.is_floating_point, tensors_in(leaf))))
        tensors = _tensors(self.output)
        self.output = [_HOLE if isinstance(leaf, Tensor) else leaf for leaf in self.output]
        return tensors

    def whole(self, tensors: Sequence[Tensor]) -> Any:
        """Return the output again that ``first`` gave the tensors of."""
        found = iter(tensors)
        return tree_unflatten([next(found) if leaf is _HOLE else leaf for leaf in self.output], self.output_structure)

    def again(self) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Run with a graph; return the inputs that it starts from and the tensors of its output."""
        if self.kept is None:
            raise used_twice()
        self._check_unchanged([kept.tensor if not kept.is_away else None for kept in self.kept])
        inputs = []
        for index, kept in enumerate(self.kept):
            tensor = self.keeper.get(kept) if index == 0 else kept.tensor
            assert tensor is not None
            inputs.append(tensor.detach().requires_grad_(self.needs_gradient[index]))
        ledger = None
        if self.keep_attention:
            ledger = attention.Ledger()
            ledger.results = [(self.keeper.get(result), self.keeper.get(sums)) for result, sums in self.kept_attention]
            ledger.is_replaying = True
        self.kept, self.kept_attention = None, []
        with torch.enable_grad(), attention.ledger_in_use(ledger) if ledger else nullcontext(), self._as_before():
            return inputs, _tensors(tree_leaves(self._call(inputs)))

    def _check_unchanged(self, tensors: Sequence[Tensor | None]) -> None:
        for tensor, version in zip(tensors, self.versions, strict=True):
            if tensor is not None and version_of(tensor) != version:
                raise UsageError(
                    "What a recomputed block was given is changed in place, by itself or afterwards.",
                    why="it would be recomputed from the changed values.",
                    fix="Train it without an activation policy, or let the change make a new tensor.",
                )

    def _call(self, tensors: Sequence[Tensor]) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.structure)
        return self.forward(*args, **kwargs)

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Recompute with the random numbers and the precision of the first time."""
        with _random_numbers(self.random_states), ExitStack() as precision:
            for autocast in self.autocasts:
                precision.enter_context(autocast)
            yield


class _Recompute(torch.autograd.Function):
    """Runs a plan without a graph, and again with one when its gradient is asked for.

    Parameters are inputs too, so that their gradients take the ordinary way, past whatever hooks they have.
    """

    @staticmethod
    def forward(ctx: Any, plan: _Plan, num_inputs: int, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)  # a result that nobody uses asks for no gradients
        ctx.plan, ctx.num_inputs = plan, num_inputs
        ctx.parameters = tensors[num_inputs:]
        return plan.first(tensors[:num_inputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                "Second derivatives do not go through a block that is recomputed.",
                why="what it recomputes has a graph of its own, which ends with backward.",
                fix="Compute them without an activation policy, or leave create_graph=True away.",
            )
        inputs, outputs = ctx.plan.again()
        pairs = [
            (out, gradient)
            for out, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and out.requires_grad
        ]
        wanted = [tensor for tensor in inputs if tensor.requires_grad] + list(ctx.parameters)
        ctx.plan.check(outputs, wanted)
        # What a checkpoint within recomputes now is to save the same as when it ran.
        with attention.ledger_in_use(None) if ctx.plan.keep_attention else nullcontext():
            ends, arriving = [out for out, _ in pairs], [gradient for _, gradient in pairs]
            found = iter(torch.autograd.grad(ends, wanted, arriving, allow_unused=True))
        for_inputs = [next(found) if tensor.requires_grad else None for tensor in inputs]
        return None, None, *for_inputs, *found


def _random_states(leaves: Sequence[Any]) -> dict[str, Any] | None:
    """Return where the generators of random numbers stand; None while a CUDA graph is recorded, which does not allow it."""
    has_cuda = torch.cuda.is_initialized()
    if has_cuda and torch.cuda.is_current_stream_capturing():
        return None
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda} if has_cuda else ()
    return {"cpu": torch.get_rng_state(), **{str(device): torch.cuda.get_rng_state(device) for device in devices}}


@contextmanager
def _random_numbers(states: dict[str, Any] | None) -> Iterator[None]:
    if states is None:
        yield
        return
    devices = [name for name in states if name != "cpu"]
    with torch.random.fork_rng(devices=devices):
        torch.set_rng_state(states["cpu"])
        for name in devices:
            torch.cuda.set_rng_state(states[name], name)
        yield


def _autocasts() -> list[torch.autocast]:
    """Return autocast as it is now, on or off, for every kind of device there is."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    caches = torch.is_autocast_cache_enabled()
    return [
        torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), caches)
        for kind, is_there in there.items()
        if is_there
    ]
