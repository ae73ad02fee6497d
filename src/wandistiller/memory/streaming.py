"""Block streaming from its beginning: what of a model travels, where its bytes are stored, and what stays on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from wandistiller.errors import UsageError
from wandistiller.memory.block_store import HostStore, QuantisedStore
from wandistiller.memory.block_stream import BlockStream, Slot
from wandistiller.memory.disk_store import DiskStore
from wandistiller.memory.gradients import GradientTaker, HostGradients
from wandistiller.memory.host import HostBudget
from wandistiller.memory.lanes import Lane, lane_for
from wandistiller.memory.layout import BlockLayout, Member, bind, lay_out, named_tensors, travelling
from wandistiller.memory.optimiser_steps import let_optimisers_step
from wandistiller.memory.residents import spread_evenly
from wandistiller.models.weight_files import Entry

ReadTensor = Callable[[str], Tensor]
"""Gives a tensor of the model by its full name, in host memory."""


class _Handover:
    """Weights on their way from a model in memory to a store, which never has more than a block of them twice."""

    def __init__(self, layouts: Sequence[BlockLayout]) -> None:
        self._layouts = layouts
        self._num_released = 0

    def take(self, index: int, member: Member) -> Tensor:
        """Return a member's values; the blocks before its own have arrived, and the model lets go of them."""
        for done in range(self._num_released, index):
            for each in self._layouts[done].members:
                each.tensor.data = torch.empty(0, dtype=each.dtype)
        self._num_released = index
        return member.tensor.data

    def give_back(self, index: int, values: dict[str, Tensor]) -> None:
        """Let the model have a block again, as one after it has found no room."""
        for member in self._layouts[index].members:
            member.tensor.data = values[member.name]


@torch.inference_mode(False)
def stream_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    device: torch.device | str,
    *,
    num_slots: int = 2,
    resident: int = 0,
    read: ReadTensor | None = None,
    locate: Callable[[str], Entry | None] | None = None,
    quantise: bool = False,
    budget: HostBudget | None = None,
    shared_as: str | None = None,
    train: bool = False,
    on_gradient: GradientTaker | None = None,
    lane: Lane | None = None,
) -> BlockStream:
    """Stream the blocks of a model in host memory, or on the meta device with ``read`` to give its tensors by name.

    ``resident`` of the blocks, spread evenly, stay on the device, and so do the trained adapters of frozen blocks. With
    ``train`` whole blocks are trained: their gradients leave for the host as soon as they are complete, into ``gradients`` or
    to ``on_gradient``; what an optimiser's ``zero_grad`` would drop, ``gradients.clear()`` drops. With ``locate``, which says
    where a tensor lies in the user's files as it is used, blocks are read from there when they are needed, and ``read`` is
    asked for those tensors only that have to be converted. ``shared_as`` is a name under which the ranks of a machine have
    frozen blocks in common.
    """
    if num_slots < 1 or resident < 0:
        raise UsageError(f"{num_slots} slots and {resident} resident blocks are not possible.", fix="Take a slot or more.")
    device = torch.device(device)
    names = {id(tensor): name for name, tensor in reversed(named_tensors(model))}
    kept = spread_evenly(len(blocks), resident)
    streamed = [block for index, block in enumerate(blocks) if index not in kept]
    stream = BlockStream(model, device, lane or lane_for(device), min(num_slots, max(len(streamed), 1)))
    stream.blocks = streamed
    visiting = {id(block) for block in streamed}  # a block that is used twice may be among them, too
    stream.residents = [
        (blocks[index], index - before) for before, index in enumerate(sorted(kept)) if id(blocks[index]) not in visiting
    ]
    taken: set[int] = set()
    for tensors in travelling(model, streamed, train=train):
        taken |= {id(tensor) for _, tensor in tensors}
        layout = lay_out(tensors)
        if quantise:  # what is packed comes first
            is_packed = {member.name: QuantisedStore.is_packed(member) for member in layout.members}
            layout = lay_out(sorted(tensors, key=lambda item: (not is_packed[item[0]], str(item[1].dtype))))
        stream.layouts.append(layout)

    # Remembered by the members' own identity, which stays when a tensor on the meta device becomes a real one.
    full_names = {id(member): names[id(member.tensor)] for layout in stream.layouts for member in layout.members}

    def member_name(member: Member) -> str:
        return full_names[id(member)]

    handover = _Handover(stream.layouts)

    def read_member(index: int, member: Member) -> Tensor:
        return handover.take(index, member) if read is None else read(member_name(member))

    if locate is not None:
        if train or read is None:
            raise UsageError("Blocks on disk are read, not trained.", fix="Keep trained weights in host memory.")
        find = lambda index, member: locate(member_name(member))  # noqa: E731
        stream.store = DiskStore(stream.layouts, read_member, device, find, lane=lane)
    else:
        make = QuantisedStore if quantise else HostStore
        give_back = handover.give_back if read is None else None
        stream.store = make(stream.layouts, read_member, device, budget, shared_as, give_back)
    try:
        _make_ring(stream)
        _keep_the_rest_on_device(stream, taken, names, read)
        let_optimisers_step(stream)
        if train:
            stream.gradients = HostGradients(stream.layouts, device, on_gradient, budget=budget)
        stream.hook_in()
    except BaseException:  # the device has no room; a model that was in memory is there again
        if read is None:
            stream.detach()
        stream.close()
        raise
    return stream


def _make_ring(stream: BlockStream) -> None:
    largest = max((layout.num_bytes for layout in stream.layouts), default=0)
    for _ in range(stream.num_slots):
        landing = torch.empty(stream.store.staging_bytes or largest, dtype=torch.uint8, device=stream.device)
        # A model is often dropped with the next pass's first block on its way here.
        stream.lane.guard(landing)
        stream.slots.append(Slot(landing))
    if stream.store.staging_bytes:
        stream.unpacked = torch.empty(largest, dtype=torch.uint8, device=stream.device)
    stream.make_places(list(range(len(stream.blocks))))


def _keep_the_rest_on_device(stream: BlockStream, taken: set[int], names: dict[int, str], read: ReadTensor | None) -> None:
    for name, tensor in named_tensors(stream.model):
        if id(tensor) in taken:
            continue
        home = torch.device("cpu") if tensor.is_meta else tensor.device
        value = read(name) if tensor.is_meta and read is not None else tensor.data
        bind(tensor, value.to(stream.device))
        stream.outside.append((tensor, home))
