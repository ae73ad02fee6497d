"""How long a step takes, from the work on its tape and what a machine can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from wandistiller.memory.hardware import Card, Hardware
from wandistiller.memory.ring_schedule import Ring, ring_seconds
from wandistiller.memory.tape import BACKWARD, Kernel, Part, Tape

_CONVOLUTION_PASSES = 6.2
"""Times that a convolution goes through its input and output, which it lays out for itself; measured on whole VAEs."""
_CONVOLUTION_BACKWARD = 2.45
"""How much slower than a convolution as large backward is; measured so too."""
BACKWARD_LAUNCHES = 0.7
"""A kernel of backward takes the host less time to start than one of forward: no Python between them."""
COMPILED_LAUNCHES = 0.9
"""What a kernel of compiled code takes the host to start, of one of plain code: no modules, but guards and wrappers."""
TRAINED_LAUNCHES = 1.5
"""A kernel of a step with gradients takes the host longer to start: its graph is built, and values are cast."""
POLICY_LAUNCHES = 20
"""What an activation policy does on the host for each block, as kernels that could be launched meanwhile; 10 to 40 where it was
measured, for blocks of every precision, compiled or not."""


@dataclass(frozen=True)
class Seconds:
    """Time of a step in its two halves."""

    forward: float
    backward: float
    to_host: float = 0.0
    """Copies over the bus beside the computation, each way."""
    to_device: float = 0.0

    @property
    def total(self) -> float:
        return max(self.forward + self.backward, self.to_host, self.to_device)


def step_seconds(
    tape: Tape,
    num_blocks: Mapping[str, int],
    hardware: Hardware,
    *,
    is_compiled: bool = False,
    is_recorded: bool = False,
    has_policy: bool = False,
) -> Seconds:
    """Return the time of a step with all weights where they are computed with; a recorded one is launched all at once."""
    trains = any(part.place[0].startswith(BACKWARD) for part in tape.parts)
    launches = (COMPILED_LAUNCHES if is_compiled else 1.0) * (TRAINED_LAUNCHES if trains else 1.0)
    launches = 0.0 if is_recorded else launches
    extra = POLICY_LAUNCHES if has_policy else 0
    times = {id(part): _seconds(part, hardware, launches, extra) for part in tape.parts}
    copies = {id(part): (_copied(part, "to_host"), _copied(part, "to_device")) for part in tape.parts}
    halves, to_host, to_device = [0.0, 0.0], 0, 0
    is_backward = False
    for part, _ in tape.played(num_blocks):
        is_backward = is_backward or part.place[0].startswith(BACKWARD)
        halves[is_backward] += times[id(part)]
        to_host += copies[id(part)][0]
        to_device += copies[id(part)][1]
    return Seconds(halves[0], halves[1], to_host / hardware.bus_rate, to_device / hardware.bus_rate)


def _copied(part: Part, kind: str) -> int:
    """Return the bytes that a part sends over the bus, one way."""
    return sum(kernel.num_bytes * count for kernel, count in part.work.items() if kernel.kind == kind)


def _seconds(part: Part, hardware: Hardware, launches: float, extra: int) -> float:
    """Return the time of a part: the device computes while the host launches, and the slower of the two counts.

    ``extra`` is what the host has to do beside that for each block of backward.
    """
    card = hardware.card
    if card is None:
        return sum(_on_cpu(hardware, kernel) * count for kernel, count in part.work.items())
    on_device = sum(_on(card, kernel) * count for kernel, count in part.work.items())
    from_python = part.work.total() - part.num_by_autograd
    if part.is_backward_of_block:
        from_python += extra
    on_host = (from_python + BACKWARD_LAUNCHES * part.num_by_autograd) * card.launch_seconds * launches
    return max(on_device, on_host)


def _on_cpu(hardware: Hardware, kernel: Kernel) -> float:
    flops = hardware.host_attention if kernel.kind == "attention" else hardware.host_flops
    return max(kernel.flops / flops, kernel.num_bytes / hardware.host_bandwidth)


def _on(card: Card, kernel: Kernel) -> float:
    if kernel.kind in ("to_host", "to_device"):
        return 0.0
    moved = kernel.num_bytes / card.bandwidth
    if kernel.kind == "attention":
        return max(kernel.flops / card.attention, moved)
    if kernel.kind == "matmul":
        return max(kernel.flops / card.matmul.get(kernel.dtype, card.matmul["float32"]), moved)
    if kernel.kind.startswith("convolution"):
        rate = card.matmul["convolution" if kernel.dtype == "float32" else "bfloat16"]
        forward = kernel.flops / rate + _CONVOLUTION_PASSES * moved
        return forward if kernel.kind == "convolution" else _CONVOLUTION_BACKWARD * forward
    return moved


def read_ahead(seconds: Seconds, copy: float) -> Seconds:
    """Return the time of a step whose blocks come from a disk well ahead of their use, all of them in ``copy`` seconds."""
    backward = max(seconds.backward, copy) if seconds.backward else 0.0
    return replace(seconds, forward=max(seconds.forward, copy), backward=backward)


def streamed(seconds: Seconds, ring: Ring, copy: float, unpack: float = 0.0) -> Seconds:
    """Return the time of a step whose blocks come over a bus, all of them in ``copy`` seconds, in each direction of the pass.

    Of trained blocks the gradients leave at the same time, the other way.
    """
    forward, backward = ring_seconds(ring, seconds.forward, seconds.backward, copy, unpack)
    return replace(seconds, forward=forward, backward=backward)


def updated_on_host(seconds: Seconds, update: float, *, clips: bool) -> float:
    """Return the time of a step whose blocks are updated in host memory.

    Where gradients are clipped all have to be there first, so the updates run beside the next forward, in its order; else
    beside backward and the next forward, whose first blocks are the last to wait for an update.
    """
    return replace(seconds, forward=max(seconds.forward, update)).total if clips else max(seconds.total, update)
