"""Snapshots in PyTorch's own format; on a real device, tests/gpu does the same with a real leak."""

from pathlib import Path

import torch

from wandistiller.memory.allocation_sites import grown, live_bytes_by_site

INSIDE_TORCH = str(Path(torch.__file__).parent / "nn" / "modules" / "linear.py")


def block(size, *frames, state="active_allocated"):
    named = [{"filename": file, "line": line, "name": name} for file, line, name in frames]
    return {"size": -(-size // 512) * 512, "requested_size": size, "state": state, "frames": named}


def snapshot(*blocks):
    return {"segments": [{"blocks": list(blocks[:1])}, {"blocks": list(blocks[1:])}]}


LEAK = ((INSIDE_TORCH, 134, "forward"), ("/home/me/train.py", 12, "step"), ("/home/me/train.py", 40, "main"))
STEADY = (("/home/me/model.py", 7, "build"),)


def test_live_memory_by_the_users_own_line():
    found = live_bytes_by_site(
        snapshot(block(100, *LEAK), block(1000, *STEADY), block(50, *LEAK), block(7, *LEAK, state="inactive"))
    )
    assert found == {"/home/me/train.py:12 (step)": 150, "/home/me/model.py:7 (build)": 1000}


def test_what_grew_is_named_the_worst_first():
    before = live_bytes_by_site(snapshot(block(100, *LEAK), block(1000, *STEADY)))
    after = live_bytes_by_site(snapshot(block(5000, *LEAK), block(1000, *STEADY), block(9, ("/x.py", 1, "f"))))
    assert [str(growth) for growth in grown(before, after)] == [
        "/home/me/train.py:12 (step) holds 4.8 KiB more",
        "/x.py:1 (f) holds 9 B more",
    ]


def test_allocations_from_before():
    assert live_bytes_by_site(snapshot(block(10))) == {"somewhere before recording began": 10}
