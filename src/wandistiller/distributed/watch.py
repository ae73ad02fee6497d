"""Ranks that keep an eye on each other.

A collective waits for every rank and does not say for whom. So each rank writes into the job's store, again and again, that it
lives and what it is doing, and reads the same of the others. One that falls silent, or a store that cannot be reached, ends
this rank with a message that names them; torchrun ends the rest, and starts all again where it may.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from wandistiller import doing
from wandistiller.distributed.failures import end_rank, end_torchrun_later
from wandistiller.errors import RankError

LONGEST_SILENCE = 60.0
"""Seconds after which a rank that says nothing is given up, where half of ``--rank-timeout`` is not shorter."""
_RANKS_A_SECOND = 64
"""So many write and read in a second, so that the store keeps up with any number."""


@dataclass
class _Rank:
    """What another one has said."""

    number: int
    count: int = -1
    doing: str = "starting"
    seconds: float = 0.0
    host: str = ""
    process: int = 0
    starter: str = ""
    heard: float = 0.0

    def hear(self, text: bytes, now: float) -> None:
        count, *said = json.loads(text)
        if count != self.count:
            self.doing, self.seconds, self.host, self.process, self.starter = said
            self.count, self.heard = count, now


def _starter() -> str:
    """Return what only processes have in common that one torchrun has started: machines may share a name."""
    boot, numbers = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    machine = f"{boot.read_text()} {numbers.readlink()}" if boot.exists() and numbers.exists() else socket.gethostname()
    return f"{machine} {os.getppid()}"


class Watch:
    """Tells of this rank and listens to the others, in two threads."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: float,
        end: Callable[[RankError], None] | None = None,
        *,
        ends_waiting: bool = False,
    ) -> None:
        """``timeout`` is how long a collective may take, in seconds; ``end`` is what happens to a job that is lost.

        With ``ends_waiting`` a rank that waits for longer is ended from here: NCCL would abort it without a word.
        """
        self._store = dist.PrefixStore("watch", store.clone())  # a connection of its own
        self._rank = rank
        self._longest_wait = timeout if ends_waiting else float("inf")
        self._patience = min(timeout / 2, LONGEST_SILENCE)  # before the collective that waits for it gives up
        self._end = end or self._end_all
        self._interval = max(min(1.0, self._patience / 5), world_size / _RANKS_A_SECOND)
        self._host, self._starter = socket.gethostname(), _starter()
        self._others = [_Rank(other) for other in range(world_size) if other != rank]
        self._count = 0
        self._contact = time.monotonic()
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True, name="watch") for each in (self._exchange, self._judge)]
        self._tell()

    def start(self) -> None:
        """Begin, once every rank has a watch."""
        self._contact = now = time.monotonic()
        for other in self._others:
            other.heard = now
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Look away; what others do is no longer this rank's business."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=2 * self._interval)

    def describe(self) -> str:
        """Say what every rank is doing, as far as it is known."""
        now = time.monotonic()
        mine = doing.now()
        lines = {self._rank: f"rank {self._rank} (this one): {mine.what}, for {mine.seconds:.0f} s"}
        for other in self._others:
            number, silence = other.number, now - other.heard
            if silence > max(2 * self._interval, self._patience / 2):
                where = f"process {other.process} on {other.host}"
                lines[number] = f"rank {number} ({where}): silent for {silence:.0f} s; before that {other.doing}"
            else:
                lines[number] = f"rank {number}: {other.doing}, for {other.seconds:.0f} s"
        return "; ".join(lines[number] for number in sorted(lines))

    def waited_in_vain(self, seconds: float) -> RankError:
        """Return what to say of ranks that do not come together."""
        return RankError(
            f"Ranks have waited for each other for more than {seconds:.0f} s.",
            why=f"a collective waits for every rank. {self.describe()}.",
            fix="Look at the rank that does something else; if that takes so long rightly, give a longer --rank-timeout.",
        )

    def _tell(self) -> None:
        self._count += 1
        mine = doing.now()
        said = [self._count, mine.what, round(mine.seconds, 1), self._host, os.getpid(), self._starter]
        self._store.set(str(self._rank), json.dumps(said))

    def _exchange(self) -> None:
        names = [str(other.number) for other in self._others]
        while not self._stopped.wait(self._interval):
            try:
                self._tell()
                said = self._store.multi_get(names)
            except (RuntimeError, ValueError):  # the other thread sees for how long
                continue
            self._contact = now = time.monotonic()
            for other, text in zip(self._others, said, strict=True):
                other.hear(text, now)

    def _judge(self) -> None:
        while not self._stopped.wait(self._interval):
            error = self._find_error()
            if error is not None and not self._stopped.is_set():
                self._end(error)
                return

    def _end_all(self, error: RankError) -> None:
        """End this rank, and with it those silent ones that have the same torchrun; without contact, that too."""
        if self._is_cut_off:
            end_torchrun_later()
        own = [each.process for each in self._silent() if each.starter == self._starter]
        end_rank(error, error.exit_code, with_processes=own)

    @property
    def _is_cut_off(self) -> bool:
        return time.monotonic() - self._contact > self._patience

    def _silent(self) -> list[_Rank]:
        """Return those who could be heard and were not; who has no contact hears nobody."""
        return [other for other in self._others if self._contact - other.heard > self._patience]

    def _find_error(self) -> RankError | None:
        if self._is_cut_off:
            return RankError(
                f"Rank {self._rank} has had no contact with the job for {time.monotonic() - self._contact:.0f} s.",
                why=f"the machine of the job's store or the network between is gone; this rank was {doing.now().what}.",
                fix="Look at the other machines and the network, then start all again with --resume auto.",
            )
        silent = [str(other.number) for other in self._silent()]
        mine = doing.now()
        if not silent and mine.waits_for_ranks and mine.seconds > self._longest_wait:
            return self.waited_in_vain(mine.seconds)
        if not silent:
            return None
        ranks = f"Rank {silent[0]} has" if len(silent) == 1 else f"Ranks {', '.join(silent)} have"
        return RankError(
            f"{ranks} been silent for {self._patience:.0f} s.",
            why=f"stopped, swapping, or cut off. {self.describe()}.",
            fix="Look at that machine, then start all again with --resume auto.",
        )
