"""Which blocks of a streamed model stay on the device, and how many."""

from __future__ import annotations


def spread_evenly(total: int, chosen: int) -> set[int]:
    """Choose indices so that the gaps between them differ by at most one."""
    chosen = min(chosen, total)
    return {(2 * index + 1) * total // (2 * chosen) for index in range(chosen)}


def blocks_to_keep(num_blocks: int, copy_seconds: float, compute_seconds: float, room: int, block_bytes: int) -> int:
    """Return how many blocks to keep resident so that the bus just keeps up, as far as there is room for them."""
    if copy_seconds <= 0:
        return 0
    # The copies of all streamed blocks have to fit into the computation of all blocks.
    streamable = int(num_blocks * compute_seconds / copy_seconds)
    return max(0, min(num_blocks - streamable, room // max(block_bytes, 1)))
