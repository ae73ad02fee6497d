"""How many blocks of a streamed model can stay on the card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from wandistiller.memory.estimates import Estimate, Phase, most_that_fits
from wandistiller.memory.hardware import Hardware
from wandistiller.memory.stage import Placing
from wandistiller.memory.uses import Use
from wandistiller.memory.works import Passes, Training


@dataclass(frozen=True)
class _Streamed:
    use: Use
    placing: Placing
    phase: Phase


def resident_blocks(estimate: Estimate, hardware: Hardware) -> int:
    """Return how many more blocks fit beside a phase that streams a model from host memory, frozen and as it is stored."""
    found = list(_streamed(estimate))
    if hardware.card is None or not found:
        return 0
    return min(_more(each, hardware) for each in found)


def may_have_residents(use: Use, placing: Placing) -> bool:
    """Say whether blocks may stay on the card: of a model that is streamed from host memory, frozen and as it is stored."""
    return placing.name == "offload" and not placing.eight_bit and use.trains != "everything"


def _more(streamed: _Streamed, hardware: Hardware) -> int:
    held = streamed.phase.reserved
    room = most_that_fits(hardware.room) - held
    blocks = streamed.use.block_bytes
    return max(0, min(room // max(blocks), len(blocks) - 2))


def _streamed(estimate: Estimate) -> Iterator[_Streamed]:
    for phase in estimate.phases:
        work = phase.work
        if isinstance(work, Training):
            roles = [(work.student, work.placing)]
            roles += [(work.teacher, work.teacher_placing)] if work.teacher is not None else []
        else:
            roles = [(work.use, work.placing)] if isinstance(work, Passes) else []
        for use, placing in roles:
            if may_have_residents(use, placing):
                yield _Streamed(use, placing, phase)
