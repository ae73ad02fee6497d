"""How the ranks of one attempt find each other in a store that outlives attempts.

When a rank dies, torchrun starts all of them again, with the same store: addresses of ranks that are gone must not be taken for
those of the living. torchrun's own count of attempts does not serve, because machines count differently: where a rank failed it
is a restart, on the others a change of membership. So the first rank makes a new name for the attempt, the others tell it who
they are under that name, and whoever finds itself in its answer goes on.
"""

from __future__ import annotations

import json
import time
import uuid

import torch.distributed as dist

from wandistiller.errors import RankError

_POLL_SECONDS = 0.05


def meet(store: dist.Store, rank: int, world_size: int, timeout_seconds: float) -> dist.Store:
    """Return the part of a store that this attempt's ranks have to themselves, once all of them are there."""
    while isinstance(store, dist.PrefixStore):  # torchrun's part for what it takes for the attempt
        store = store.underlying_store
    me = uuid.uuid4().hex
    deadline = time.monotonic() + timeout_seconds
    name = _gather(store, me, world_size, deadline) if rank == 0 else _report(store, me, rank, deadline)
    return dist.PrefixStore(f"wandistiller/{name}", store)


def _gather(store: dist.Store, me: str, world_size: int, deadline: float) -> str:
    """Be the first rank: name the attempt after it, and answer when all have told who they are."""
    store.set("wandistiller/attempt", me)
    missing = set(range(1, world_size))
    while missing:
        missing = {other for other in missing if not store.check([_key(me, other)])}
        if missing and time.monotonic() > deadline:
            names = ", ".join(map(str, sorted(missing)))
            raise RankError(
                f"Of {world_size} ranks, {len(missing)} did not come: {names}.",
                why="a machine that is missing, or a rank that hangs before it begins.",
                fix="Look at that machine's log. If starting takes so long rightly, give a longer --rank-timeout.",
            )
        time.sleep(_POLL_SECONDS if missing else 0)
    store.set(_key(me, "all"), json.dumps([me, *(store.get(_key(me, other)).decode() for other in range(1, world_size))]))
    return me


def _report(store: dist.Store, me: str, rank: int, deadline: float) -> str:
    """Be another rank: tell every first rank that appears, until one has this process in its answer."""
    told = ""
    while time.monotonic() < deadline:
        name = store.get("wandistiller/attempt").decode() if store.check(["wandistiller/attempt"]) else ""
        if name and name != told:
            store.set(_key(name, rank), me)
            told = name
        if told and store.check([_key(told, "all")]) and json.loads(store.get(_key(told, "all")))[rank] == me:
            return told
        time.sleep(_POLL_SECONDS)
    raise RankError(
        f"Rank {rank} has waited for the others for too long.",
        why="not every rank has come: the first one says which.",
        fix="Look at the other machines' logs. If starting takes so long rightly, give a longer --rank-timeout.",
    )


def _key(name: str, what: object) -> str:
    return f"wandistiller/{name}/rank-{what}"
