"""``state_dict`` and ``load_state_dict`` of modules whose weights are stored elsewhere than where they seem to be."""

from __future__ import annotations

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
    """Let a module's state be what is stored; return the hooks to remove.

    ``changed`` is told of new values; None where what ``stored`` gives is a copy, which nothing can be written to. ``members``
    are the identities that it has. Names are looked up when they are needed: adapters that came in between have changed them.
    """

    def values(prefix: str, state: dict[str, Any]) -> dict[str, Tensor]:
        found = stored()
        everything = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        names = {prefix + name: id(tensor) for name, tensor in everything}
        return {name: found[key] for name, key in names.items() if name in state and key in found}

    def after_save(_: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if changed is None and _leaves_copies_out.get():
            mine = members()
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if id(parameter) in mine:
                    state.pop(prefix + name, None)
            if not any(id(buffer) in mine for buffer in module.buffers()):
                return
        state.update(values(prefix, state))

    def before_load(_: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        to_write = values(prefix, state)
        if to_write and changed is None:
            raise UsageError(
                "A state cannot be loaded into weights that are streamed from disk or in 8 bits.",
                why="the files are the user's, and what is rounded is not written to.",
                fix="Detach first, load, and stream the model again.",
            )
        for name, value in to_write.items():
            if value.shape == state[name].shape:  # else PyTorch says what is wrong
                value.copy_(state[name])
        if changed is not None:
            changed()

    return [module.register_state_dict_post_hook(after_save), module.register_load_state_dict_pre_hook(before_load)]
