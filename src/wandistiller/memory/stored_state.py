"""``state_dict`` and ``load_state_dict`` of modules whose weights are stored elsewhere than where they seem to be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from wandistiller.errors import UsageError

Stored = Callable[[], dict[int, Tensor]]
"""Gives the stored values of a module's tensors, by the identity of each."""
_leaves_copies_out: ContextVar[bool] = ContextVar("leaves_copies_out", default=False)


def changing_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state without weights that nothing changes and that would have to be read or multiplied out for it."""
    token = _leaves_copies_out.set(True)
    try:
        return model.state_dict()
    finally:
        _leaves_copies_out.reset(token)


def keep_state_readable(
    module: nn.Module, stored: Stored, changed: Callable[[], None] | None, members: Callable[[], Collection[int]]
) -> list[Any]:
    """Let the state of a module, and of each part of it, be what is stored; return the hooks to remove.

    ``changed`` is told of new values; None where what ``stored`` gives is a copy, which nothing can be written to. ``members``
    are the identities that it has. Names are looked up when they are needed: adapters that came in between have changed them.
    """
    state = _StoredState(stored, changed, members)
    return [hook for part in module.modules() for hook in state.hooks(part)]


class _StoredState:
    """What is stored of a module; whichever part of it is asked, that part alone answers for all within."""

    def __init__(self, stored: Stored, changed: Callable[[], None] | None, members: Callable[[], Collection[int]]) -> None:
        self._stored, self._changed, self._members = stored, changed, members
        self._depth = 0

    def hooks(self, part: nn.Module) -> list[Any]:
        return [
            part.register_state_dict_pre_hook(self._before_save),
            part.register_state_dict_post_hook(functools.partial(self._after_save)),  # PyTorch marks it, which no method allows
            part.register_load_state_dict_pre_hook(self._before_load),
            part.register_load_state_dict_post_hook(self._after_load),
        ]

    def _values(self, module: nn.Module, prefix: str, state: dict[str, Any]) -> dict[str, Tensor]:
        found = self._stored()
        everything = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        names = {prefix + name: id(tensor) for name, tensor in everything}
        return {name: found[key] for name, key in names.items() if name in state and key in found}

    def _before_save(self, *_: Any) -> None:
        self._depth += 1

    def _after_save(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._changed is None and _leaves_copies_out.get():
            mine = self._members()
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if id(parameter) in mine:
                    state.pop(prefix + name, None)
            if not any(id(buffer) in mine for buffer in module.buffers()):
                return
        state.update(self._values(module, prefix, state))

    def _before_load(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        to_write = {} if self._depth else self._values(module, prefix, state)
        if to_write and self._changed is None:
            raise UsageError(
                "A state cannot be loaded into weights that are streamed from disk or in 8 bits.",
                why="the files are the user's, and what is rounded is not written to.",
                fix="Detach first, load, and stream the model again.",
            )
        self._depth += 1
        for name, value in to_write.items():
            if value.shape == state[name].shape:  # else PyTorch says what is wrong
                value.copy_(state[name])

    def _after_load(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth and self._changed is not None:
            self._changed()
