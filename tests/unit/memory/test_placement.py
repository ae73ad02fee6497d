"""One contract for every placement: the same output as on the device, bytes as predicted, and detaching restores."""

from types import SimpleNamespace

import accelerate.hooks
import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

from wandistiller.errors import UsageError
from wandistiller.memory import auto, spread
from wandistiller.memory.device_map import check_device_map, read_device_map, reads_files, shares, without_overlaps
from wandistiller.memory.estimates import HOST_SHARE, margin
from wandistiller.memory.layout import named_tensors
from wandistiller.memory.placement import Subject
from wandistiller.memory.placements import PLACEMENTS, find_placement
from wandistiller.memory.spread import with_the_rest
from wandistiller.models.load import load_model
from wandistiller.models.sizes import SIZES
from wandistiller.models.stored import build_empty, inspect_checkpoint
from wandistiller.units import Bytes

CPU = torch.device("cpu")
OPTIONS = {
    "gpu": [{}],
    "cpu": [{}],
    "offload": [{}, {"num_slots": 3}, {"resident": 2}],
    "disk": [{}, {"resident": 1}],
    "balanced": [{}],
    "sequential": [{}],
    "auto": [{}],
    "custom": [
        {"map": {"": "cpu"}},
        {"map": {"": "disk"}},
        {"map": {"": "cpu", "blocks": {"1": "disk", "3": "disk"}}},
        {"map": {"": "cpu", "scale_shift_table": "disk", "blocks": {"1": {"": "disk", "attn1": "cpu"}, "2.ffn": "disk"}}},
    ],
}
CASES = [(name, options) for name, variants in OPTIONS.items() for options in variants]


def test_every_placement_is_under_the_contract():
    assert set(OPTIONS) == set(PLACEMENTS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("wan")
    WanTransformer3DModel(**{**SIZES["tiny"].transformer, "num_layers": 5}).to(torch.bfloat16).save_pretrained(folder)
    return inspect_checkpoint(folder)


def empty(stored):
    model = build_empty(stored.architecture, stored.config, dtype=torch.bfloat16)
    return Subject(
        model=model,
        blocks=list(model.blocks),
        read=lambda name: stored.read_for(name, torch.bfloat16) if name in stored.names else None,
        locate=lambda name: stored.locate(name, torch.bfloat16) if name in stored.names else None,
    )


def inputs():
    torch.manual_seed(1)
    options = {"dtype": torch.bfloat16}
    return torch.randn(1, 8, 1, 8, 8, **options), torch.tensor([300.0]), torch.randn(1, 4, 32, **options)


@torch.no_grad()
def run(model):
    return model(*inputs(), return_dict=False)[0]


@pytest.mark.parametrize(
    ("name", "options", "is_loaded"),
    [(*case, False) for case in CASES] + [(*case, True) for case in CASES if "disk" not in str(case)],
)
def test_the_contract(checkpoint, name, options, is_loaded):
    expected_model = load_model(checkpoint, dtype=torch.bfloat16)
    expected, state = run(expected_model), expected_model.state_dict()
    subject = empty(checkpoint)
    if is_loaded:
        model = load_model(checkpoint, dtype=torch.bfloat16)
        subject = Subject(model=model, blocks=list(model.blocks))
    attributes = {name: sorted(module.__dict__) for name, module in subject.model.named_modules()}
    placement = find_placement(name, **options)
    predicted = placement.predict(subject, CPU)
    placed = placement.attach(subject, CPU)
    assert placed.footprint == predicted
    for _ in range(2):
        assert torch.equal(run(subject.model), expected)
    placed.detach()
    assert torch.equal(run(subject.model), expected)
    assert all(torch.equal(value, state[key]) for key, value in subject.model.state_dict().items())
    hooks = [module for module in subject.model.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert not hooks
    assert {name: sorted(module.__dict__) for name, module in subject.model.named_modules()} == attributes


def test_a_role_of_several_dtypes_computes_on_the_cpu_as_it_is():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 64).to(torch.bfloat16)

        def forward(self, x):
            return self.second(self.first(x).to(torch.bfloat16))

    model, x = Mixed().requires_grad_(False), torch.randn(2, 8)
    expected = model(x)
    find_placement("cpu").attach(Subject(model=model, blocks=[]), CPU)
    assert torch.equal(model(x), expected)
    # An input in a dtype that it has no weights in is meant for another device, and is cast to that of most weights.
    assert run_on_host(nn.Linear(8, 8).to(torch.bfloat16), x.half()).dtype == torch.bfloat16


def run_on_host(model, x):
    find_placement("cpu").attach(Subject(model=model, blocks=[]), CPU)
    return model(x)


def test_what_modules_have_in_common_is_not_on_disk():
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)})
    model["second"].weight = model["first"].weight
    with pytest.raises(UsageError, match=r"on disk that first\.weight and second\.weight"):
        check_device_map({"first": "cpu", "second": "disk"}, model)
    check_device_map({"": "cpu"}, model)
    with pytest.raises(UsageError, match=r"on cpu that first\.weight and second\.weight"):
        check_device_map({"first": 0, "second": "cpu"}, model, num_cards=1)


def test_a_map_to_disk_of_weights_that_have_to_be_converted(checkpoint):
    """They are read once and kept in host memory, as a file in another precision is no use as it is."""
    model = build_empty(checkpoint.architecture, checkpoint.config, dtype=torch.float32)
    subject = Subject(
        model=model,
        blocks=list(model.blocks),
        read=lambda name: checkpoint.read_for(name, torch.float32),
        locate=lambda name: checkpoint.locate(name, torch.float32),
    )
    placed = find_placement("custom", map={"": "cpu", "blocks": {"0": "disk"}}).attach(subject, CPU)
    given = tuple(each.float() for each in inputs())
    with torch.no_grad():
        expected = load_model(checkpoint, dtype=torch.float32)(*given, return_dict=False)[0]
        assert torch.equal(subject.model(*given, return_dict=False)[0], expected)
    placed.detach()


@pytest.mark.parametrize("quantise", [False, True])
def test_the_predicted_bytes_are_those_that_are_taken(checkpoint, quantise):
    from wandistiller.memory.streaming import stream_blocks

    subject = empty(checkpoint)
    predicted = find_placement("offload", quantise=quantise).predict(subject, CPU)
    stream = stream_blocks(subject.model, subject.blocks, CPU, read=subject.read, quantise=quantise)
    assert stream.device_bytes == predicted.device
    # Rounded up to whole pages, block by block.
    assert stream.store.host_bytes <= predicted.host + predicted.page_locked < stream.store.host_bytes + 5 * 4096


def test_predictions_by_hand(checkpoint):
    """From the shapes: all tensors, two blocks and what is in none, four blocks of buffers."""
    subject = empty(checkpoint)
    total = sum(t.numel() * t.element_size() for t in (*subject.model.parameters(), *subject.model.buffers()))
    assert find_placement("gpu").predict(subject, CPU).device == total
    block = sum(-(-p.numel() * p.element_size() // 256) * 256 for p in subject.blocks[0].parameters())
    inside = sum(p.numel() * p.element_size() for p in nn.ModuleList(subject.blocks).parameters())
    assert find_placement("offload").predict(subject, CPU).device == 2 * block + total - inside
    on_disk = find_placement("disk").predict(subject, torch.device("cuda"))
    assert on_disk.page_locked == 4 * -(-block // 4096) * 4096
    assert on_disk.disk == 5 * block
    locked = find_placement("offload").predict(subject, torch.device("cuda")).page_locked
    assert locked <= 1.03 * 5 * block + 5 * 4096


def test_weights_on_the_cpu_are_pieces_of_the_users_file(checkpoint):
    subject = empty(checkpoint)
    placed = find_placement("cpu").attach(subject, CPU)
    weight = subject.blocks[0].ffn.net[0].proj.weight
    file = checkpoint.weights.entries[checkpoint.names["blocks.0.ffn.net.0.proj.weight"]].file
    assert weight.untyped_storage().nbytes() == file.stat().st_size
    assert placed.footprint.disk > 0


def test_a_loaded_model_is_not_on_disk(checkpoint):
    model = load_model(checkpoint)
    with pytest.raises(UsageError, match="not loaded yet"):
        find_placement("disk").attach(Subject(model=model, blocks=list(model.blocks)), CPU)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"": "cpu", "blocks.9": "cpu"}, "names 'blocks.9', which this model has not"),
        ({"blocks": "cpu"}, "leaves out"),
        ({"": 7}, "on 7, which is not there"),
        ({"": "cuda:9"}, "'cuda:9', which is not there"),
        ({"": "cuda:x"}, "'cuda:x', which is not there"),
        ({"": "cuda:-1"}, "'cuda:-1', which is not there"),
        ({"": "cudaq"}, "'cudaq', which is not there"),
        ({"": -1}, "on -1, which is not there"),
        ({"": True}, "on True, which is not there"),
        ({"": ["cpu"]}, r"on \['cpu'\], which is not there"),
        ({"": "tape"}, "'tape', which is not there"),
        ({}, "leaves out"),
        ({"": "cpu", "blocks.1": "cpu", "blocks": {"1": "disk"}}, "puts 'blocks.1' on 'cpu' and 'disk'"),
    ],
)
def test_a_wrong_device_map_is_found_before_anything_is_loaded(checkpoint, content, message):
    subject = empty(checkpoint)
    with pytest.raises(UsageError, match=message):
        find_placement("custom", map=content).attach(subject, CPU)
    assert all(parameter.is_meta for parameter in subject.model.parameters())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("flat.json", '{"": "cpu", "blocks.1": "disk"}'),
        ("nested.json", '{"": "cpu", "blocks": {"1": "disk"}}'),
        ("nested.toml", '"" = "cpu"\n[blocks]\n1 = "disk"'),
        ("flat.TOML", '"" = "cpu"\n"blocks.1" = "disk"'),
        ("rest.json", '{"": "cpu", "blocks": {"1": {"": "disk"}}}'),
        ("marked.toml", '\ufeff"" = "cpu"\n"blocks.1" = "disk"'),
    ],
)
def test_device_maps_from_files(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert read_device_map(tmp_path / name) == {"": "cpu", "blocks.1": "disk"}


def test_limits_of_some_leave_the_others_what_is_free(monkeypatch):
    monkeypatch.setattr("wandistiller.memory.spread.get_max_memory", lambda: {0: 20, 1: 30, "cpu": 40})
    assert with_the_rest({1: 5}) == {0: 20, 1: 5, "cpu": 40}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("disk", None, True),
        ("offload", None, False),
        ("custom", '{"": 0, "blocks.1": "disk"}', True),
        ("custom", '{"": 0}', False),
    ],
)
def test_which_weights_are_read_in_every_step(tmp_path, name, text, expected):
    file = tmp_path / "map.json"
    file.write_text(text or "{}")
    assert reads_files(name, file if text else None) is expected


def test_an_unreadable_device_map(tmp_path):
    (tmp_path / "map.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        read_device_map(tmp_path / "map.json")


def test_a_device_map_that_says_something_twice(tmp_path):
    (tmp_path / "map.json").write_text('{"": "cpu", "blocks.1": "cpu", "blocks.1": "disk"}')
    with pytest.raises(UsageError, match=r"'blocks\.1' stands there more than once"):
        read_device_map(tmp_path / "map.json")


def test_a_block_computes_on_one_device(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    model = empty(checkpoint).model
    check_device_map({"": 0, "blocks.1": 1, "blocks.2": "cpu", "blocks.3.ffn": "disk"}, model)
    with pytest.raises(UsageError, match=r"lets 'blocks\.1' compute on 0 and 1"):
        check_device_map({"": "cpu", "blocks.0": 0, "blocks.1.ffn": 1}, model)


def test_parts_of_a_map_are_where_it_says_the_first_card_included(checkpoint):
    found = without_overlaps(empty(checkpoint).model, {"": 0, "blocks.1": "cpu", "blocks.1.ffn": 1})
    assert (found["blocks.0"], found["blocks.1.attn1"], found["blocks.1.ffn"]) == (0, "cpu", 1)
    assert found["blocks.1.scale_shift_table"] == 0  # where the parts on the host compute
    assert {place for name, place in found.items() if not name.startswith("blocks.1.")} == {0}


def test_the_bytes_of_a_device_map(checkpoint):
    subject = empty(checkpoint)
    found = find_placement("custom", map={"": "cpu", "blocks.1": "disk"}).predict(subject, CPU)
    # What Wan keeps in float32 is stored in bfloat16 here, so it is converted once and kept in host memory.
    as_stored = [p for p in subject.blocks[1].parameters() if p.dtype == torch.bfloat16]
    assert found.disk == sum(p.numel() * p.element_size() for p in as_stored)
    assert found.host + found.disk == find_placement("gpu").predict(subject, CPU).device


def test_what_visits_a_card_is_page_locked_block_by_block(checkpoint, monkeypatch):
    """As nothing can be page-locked without a card, memory that is not stands for it; where it goes is what counts."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    subject, content = empty(checkpoint), {"": "cpu", "blocks.0": 0}
    predicted = find_placement("custom", map=content).predict(subject, torch.device("cuda", 0))
    on_host = [(name, each) for name, each in named_tensors(subject.model) if isinstance(each, nn.Parameter)]
    on_host = [(name, each) for name, each in on_host if "." in name and not name.startswith("blocks.0.")]
    sizes = {name: each.numel() * each.dtype.itemsize for name, each in on_host}
    assert predicted.host == 0 and 0 <= predicted.page_locked - sum(sizes.values()) < len(on_host) * 256 + 5 * 4096
    flats = []
    monkeypatch.setattr(
        spread, "allocate_host", lambda size, *_: flats.append(torch.empty(size, dtype=torch.uint8)) or flats[-1]
    )
    found = spread._kept_on_host(subject, on_host, torch.device("cuda", 0), locked := set())
    assert len(flats) == len(subject.blocks)  # all but one, and what is in none
    assert predicted.page_locked == sum(-(-flat.numel() // 4096) * 4096 for flat in flats)
    storages = {flat.untyped_storage().data_ptr() for flat in flats}
    state = load_model(checkpoint, dtype=torch.bfloat16).state_dict()
    assert found.keys() == sizes.keys()
    for name, value in found.items():
        assert torch.equal(value, state[name]) and value.untyped_storage().data_ptr() in storages
        assert torch.equal(subject.model.get_parameter(name), state[name])
    assert locked == storages
    spread._undo(subject, locked)
    ours = {subject.model.get_parameter(name).untyped_storage().data_ptr() for name in found}
    assert not ours & storages


@pytest.fixture
def pretended_card(monkeypatch):
    """A card that takes nothing, and memory that is page-locked for it by name alone; gives what was."""
    flats = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(
        spread, "allocate_host", lambda size, *_: flats.append(torch.empty(size, dtype=torch.uint8)) or flats[-1]
    )
    return flats


def test_a_map_that_cannot_be_followed_leaves_a_model_as_it_was(checkpoint, pretended_card, monkeypatch):
    def dispatch(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(spread, "dispatch_model", dispatch)
    model = load_model(checkpoint)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    subject = Subject(model=model, blocks=list(model.blocks))
    with pytest.raises(torch.OutOfMemoryError):
        find_placement("custom", map={"": "cpu", "blocks.0": 0}).attach(subject, torch.device("cuda", 0))
    addresses = {flat.untyped_storage().data_ptr() for flat in pretended_card}
    assert addresses and addresses.isdisjoint(each.untyped_storage().data_ptr() for each in model.parameters())
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    empty_one = empty(checkpoint)
    with pytest.raises(torch.OutOfMemoryError):
        find_placement("custom", map={"": "cpu"}).attach(empty_one, CPU)
    assert all(each.is_meta for each in empty_one.model.parameters()), "nobody has waited for its weights yet"
    monkeypatch.undo()
    placed = find_placement("custom", map={"": "cpu", "blocks.1": "disk"}).attach(empty_one, CPU)
    placed.detach()
    kept = {name: value.to(torch.bfloat16) for name, value in expected.items()}
    assert all(torch.equal(value, kept[name]) for name, value in empty_one.model.state_dict().items())


def test_a_map_that_fails_half_way_leaves_a_loaded_model_as_it_was(checkpoint, pretended_card, monkeypatch):
    """Wherever that is: what accelerate has just put away for a visit to the card is not on a hook of its yet."""
    card, dispatch, move = torch.device("cpu"), spread.dispatch_model, accelerate.hooks.set_module_tensor_to_device
    moves, last = 0, None

    def move_or_fail(*args, **kwargs):
        nonlocal moves
        moves += 1
        if moves == last:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return move(*args, **kwargs)

    def dispatch_here(model, found, main, state, **kwargs):
        return dispatch(model, {name: card if place == 0 else place for name, place in found.items()}, card, state, **kwargs)

    monkeypatch.setattr(accelerate.hooks, "set_module_tensor_to_device", move_or_fail)
    monkeypatch.setattr(spread, "dispatch_model", dispatch_here)
    monkeypatch.setattr(spread, "AlignDevicesHook", lambda device: accelerate.hooks.AlignDevicesHook(card))
    model = load_model(checkpoint)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    subject = Subject(model=model, blocks=list(model.blocks))
    placement = find_placement("custom", map={"": "cpu", "blocks.0": 0})
    placed, total = placement.attach(subject, torch.device("cuda", 0)), moves
    placed.detach()
    for last in range(1, total + 1):
        moves = 0
        with pytest.raises(torch.OutOfMemoryError):
            placement.attach(subject, torch.device("cuda", 0))
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items()), last
        assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_what_is_placed_while_nothing_is_learnt_can_learn_later(checkpoint, pretended_card, monkeypatch):
    monkeypatch.setattr(spread, "dispatch_model", lambda model, *args, **kwargs: model)
    model = load_model(checkpoint)
    subject = Subject(model=model, blocks=list(model.blocks))
    with torch.inference_mode():
        placed = find_placement("custom", map={"": "cpu", "blocks.0": 0}).attach(subject, torch.device("cuda", 0))
    assert pretended_card and not any(each.is_inference() for each in model.parameters())
    with torch.inference_mode():
        placed.detach()
    assert not any(each.is_inference() for each in model.parameters())


def test_buffers_are_where_their_module_computes(checkpoint):
    """Accelerate brings weights from the host when they are needed; buffers it puts on the card for good."""
    subject = empty(checkpoint)
    buffers = [buffer.nbytes for buffer in subject.model.buffers()]
    assert buffers
    found = shares(subject, without_overlaps(subject.model, {"": "cpu", "blocks.0": 0, "blocks.1": "disk"}))
    rest = [subject.model.scale_shift_table, *subject.blocks[0].parameters()]  # the whole model's own is there too
    assert sorted(found["cuda:0"]) == sorted([*buffers, *(each.nbytes for each in rest)])


@pytest.mark.parametrize(
    ("device_blocks", "host_blocks", "expected"),
    [
        (100, 100, ("gpu", None)),
        (2.5, 100, ("offload", 0)),
        (4.5, 100, ("offload", 2)),
        (2.5, 1, ("disk", None)),
    ],
)
def test_auto_takes_the_fastest_that_fits(checkpoint, monkeypatch, device_blocks, host_blocks, expected):
    subject = empty(checkpoint)
    footprint = find_placement("offload").predict(subject, CPU)
    block = max(sum(-(-p.numel() * p.element_size() // 256) * 256 for p in b.parameters()) for b in subject.blocks)
    outside = footprint.device - 2 * block
    free = Bytes(int(outside + device_blocks * block))
    # A block's worth of disk buffers is four blocks.
    host = Bytes(int(host_blocks * 5 * block if host_blocks > 1 else 4.5 * block / HOST_SHARE))
    monkeypatch.setattr(auto, "device_memory", lambda device: SimpleNamespace(free=free))
    monkeypatch.setattr(auto, "available_host_memory", lambda: host)
    choice = find_placement("auto").choose(subject, CPU)
    assert choice.name == expected[0]
    if expected[1] is not None:
        assert choice.placement.resident == expected[1]
    assert choice.reasons[-1].startswith(f"{expected[0]} takes")
    assert all("needs" in reason for reason in choice.reasons[:-1])


def test_auto_leaves_what_is_needed_beside_the_weights_and_a_margin(checkpoint, monkeypatch):
    subject = empty(checkpoint)
    weights, beside = find_placement("gpu").predict(subject, CPU).device, Bytes(2**34)
    needed = weights + beside + margin(weights + beside)
    names = []
    for free in (needed + 10, needed - 10):
        monkeypatch.setattr(auto, "device_memory", lambda device, free=free: SimpleNamespace(free=Bytes(free)))
        names.append(find_placement("auto", headroom=beside).choose(subject, CPU).name)
    assert names == ["gpu", "offload"]


def test_auto_counts_the_host_memory_of_all_ranks(checkpoint, monkeypatch):
    subject = empty(checkpoint)
    subject.model.requires_grad_(True)  # adapters beside the weights: each rank has its own copy
    streamed = find_placement("offload").predict(subject, CPU)
    monkeypatch.setattr(auto, "device_memory", lambda device: SimpleNamespace(free=streamed.device))
    monkeypatch.setattr(auto, "available_host_memory", lambda: Bytes(int(1.8 * streamed.host / HOST_SHARE)))
    names = []
    for ranks in (1, 2):
        monkeypatch.setattr(auto, "ranks_here", lambda ranks=ranks: ranks)
        names.append(find_placement("auto").choose(subject, CPU).name)
    assert names == ["offload", "disk"]


def test_auto_says_why_nothing_fits(checkpoint, monkeypatch):
    monkeypatch.setattr(auto, "device_memory", lambda device: SimpleNamespace(free=Bytes(10)))
    monkeypatch.setattr(auto, "available_host_memory", lambda: Bytes(10))
    with pytest.raises(UsageError, match=r"fits nowhere(.|\n)*gpu needs(.|\n)*offload needs(.|\n)*cpu needs"):
        find_placement("auto").attach(empty(checkpoint), CPU)


def test_an_unknown_placement():
    with pytest.raises(UsageError, match="did you mean 'offload'"):
        find_placement("offlaod")
