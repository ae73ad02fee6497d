"""The allocator on paper against sums written out, by the rules that PyTorch documents."""

import pytest

from wandistiller.memory.allocator_model import MIB, AllocatorModel, expandable_segments


@pytest.mark.parametrize(
    ("num_bytes", "reserved", "allocated"),
    [
        (1, 2 * MIB, 512),
        (513, 2 * MIB, 1024),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        # From here on a segment of its own in steps of 2 MiB; what is left over is too little to be cut off.
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (100 * MIB + 1, 102 * MIB, 100 * MIB + 512),
    ],
)
def test_one_allocation(num_bytes, reserved, allocated):
    model = AllocatorModel()
    model.allocate(0, num_bytes)
    assert (model.reserved, model.allocated) == (reserved, allocated)


def test_what_was_freed_is_used_again():
    model = AllocatorModel()
    for step in range(3):
        model.allocate(step, 64 * MIB)
        model.free(step)
    assert model.reserved == 64 * MIB and model.allocated == 0 and model.peak_allocated == 64 * MIB


def test_a_large_block_is_cut_and_joined_again():
    model = AllocatorModel()
    model.allocate(0, 64 * MIB)
    model.free(0)
    model.allocate(1, 40 * MIB)
    model.allocate(2, 24 * MIB)
    assert model.reserved == 64 * MIB
    model.free(1)
    model.free(2)
    model.allocate(3, 64 * MIB)
    assert model.reserved == 64 * MIB


def test_fragments_make_it_hold_more_than_is_in_use():
    """Two halves that are free but not neighbours cannot serve one whole."""
    model = AllocatorModel()
    for key in range(3):
        model.allocate(key, 32 * MIB)
    model.free(0)
    model.free(2)
    model.allocate(3, 64 * MIB)
    assert model.allocated == 96 * MIB and model.reserved == 160 * MIB


def test_the_smallest_block_that_fits_is_taken():
    model = AllocatorModel()
    for key, size in enumerate((64, 12, 32)):
        model.allocate(key, size * MIB)
    model.free(0)
    model.free(2)
    model.allocate(3, 30 * MIB)
    model.allocate(4, 64 * MIB)  # still whole
    assert model.reserved == 108 * MIB


def test_small_and_large_do_not_share_segments():
    model = AllocatorModel()
    model.allocate(0, 64 * MIB)
    model.free(0)
    model.allocate(1, 4096)
    assert model.reserved == 66 * MIB


def test_an_empty_tensor_takes_nothing():
    model = AllocatorModel()
    model.allocate(0, 0)
    model.free(0)
    assert model.reserved == 0


@pytest.mark.parametrize(
    ("num_bytes", "reserved", "allocated"),
    [
        (1, 2 * MIB, 512),
        (MIB + 1, 20 * MIB, MIB + 512),
        (20 * MIB, 20 * MIB, 20 * MIB),
        (100 * MIB + 1, 120 * MIB, 100 * MIB + 512),
    ],
)
def test_one_allocation_in_an_expandable_segment(num_bytes, reserved, allocated):
    model = AllocatorModel(is_expandable=True)
    model.allocate(0, num_bytes)
    assert (model.reserved, model.allocated) == (reserved, allocated)


def test_an_expandable_segment_grows_by_what_its_end_lacks():
    model = AllocatorModel(is_expandable=True)
    for key in range(3):
        model.allocate(key, 40 * MIB)
    model.free(0)
    model.free(2)
    model.allocate(3, 60 * MIB)  # the hole of 40 is too small; the end has 40 and grows by 20
    assert model.allocated == 100 * MIB and model.reserved == 140 * MIB
    model.allocate(4, 40 * MIB)  # the hole
    assert model.allocated == model.reserved == 140 * MIB


def test_the_end_of_an_expandable_segment_is_cut_last():
    model = AllocatorModel(is_expandable=True)
    for key, size in enumerate((60, 20, 40)):
        model.allocate(key, size * MIB)
    model.free(0)
    model.free(2)
    model.allocate(3, 30 * MIB)  # the end of 40 would fit better than the hole of 60
    model.allocate(4, 80 * MIB)  # so the end is whole and grows by 40
    assert model.reserved == 160 * MIB


def test_an_expandable_segment_is_one_block_again_when_everything_is_free():
    model = AllocatorModel(is_expandable=True)
    for key in range(7):
        model.allocate(key, (3 + 5 * key) * MIB)
    for key in (3, 0, 6, 1, 5, 2, 4):
        model.free(key)
    before = model.reserved
    model.allocate("all", before)
    assert model.reserved == model.allocated == before


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:true"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, False),
    ],
)
def test_the_environment_says_which_segments_there_are(variables, expected, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert expandable_segments() == expected
