"""Streamed blocks compute what resident ones do, in any order of copies that the tickets allow."""

import copy

import pytest
import torch
from helpers.streaming import LateLane, gradients, run
from peft import LoraConfig

from wandistiller.errors import UsageError
from wandistiller.memory.lanes import ImmediateLane
from wandistiller.memory.streaming import stream_blocks
from wandistiller.models.stored import build_empty


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("lane", [ImmediateLane, LateLane])
def test_streamed_is_resident(model, inputs, num_slots, lane):
    expected = run(model, inputs)
    stream_blocks(model, list(model.blocks), "cpu", num_slots=num_slots, lane=lane())
    for _ in range(3):
        assert torch.equal(run(model, inputs), expected)


def test_a_missing_wait_gives_wrong_numbers(model, inputs, monkeypatch):
    """The stand-in above is strict: without waiting the result is wrong, so the tests that pass prove the waits."""
    expected = run(model, inputs)
    monkeypatch.setattr(LateLane, "wait", lambda self, ticket: None)
    stream_blocks(model, list(model.blocks), "cpu", lane=LateLane())
    assert not torch.allclose(run(model, inputs), expected, equal_nan=True)


def test_the_device_holds_the_ring_and_no_more(model):
    stream = stream_blocks(model, list(model.blocks), "cpu", num_slots=2)
    largest = max(sum(-(-tensor.nbytes // 256) * 256 for tensor in block.parameters()) for block in model.blocks)
    outside = sum(tensor.nbytes for name, tensor in model.named_parameters() if not name.startswith("blocks."))
    outside += sum(tensor.nbytes for tensor in model.buffers())
    assert stream.device_bytes == 2 * largest + outside


@pytest.mark.parametrize(("resident", "copies"), [(1, (5, 9)), (0, (5, 10))])
def test_each_block_is_copied_once_a_pass(model, inputs, resident, copies):
    """Of four streamed blocks the first comes again behind the last; of five it shares the last one's slot and comes later."""
    lane = LateLane()
    stream_blocks(model, list(model.blocks), "cpu", num_slots=2, resident=resident, lane=lane)
    for expected in copies:
        run(model, inputs)
        assert lane.count == expected


def test_every_slot_is_guarded_against_a_copy_that_outlives_the_model(model):
    """Sampling ends with the next pass's first block under way; its slot must not be given to the VAE meanwhile."""
    lane = LateLane()
    stream = stream_blocks(model, list(model.blocks), "cpu", num_slots=3, lane=lane)
    assert [tensor.data_ptr() for tensor in lane.guarded] == [slot.landing.data_ptr() for slot in stream.slots]


def test_detaching_leaves_no_trace(model, inputs):
    before = copy.deepcopy(model.state_dict())
    expected = run(model, inputs)
    stream = stream_blocks(model, list(model.blocks), "cpu")
    run(model, inputs)
    stream.detach()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for module in model.modules():
        assert not (module._forward_hooks or module._forward_pre_hooks)
        assert not (module._state_dict_hooks or module._load_state_dict_pre_hooks)
    # Each with memory of its own, so that the store's can go.
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in model.parameters())
    assert torch.equal(run(model, inputs), expected)


def test_an_exception_in_the_middle_leaves_it_usable(model, inputs):
    expected = run(model, inputs)
    stream_blocks(model, list(model.blocks), "cpu", lane=LateLane())
    forward = model.blocks[2].ffn.forward
    model.blocks[2].ffn.forward = lambda *_: (_ for _ in ()).throw(RuntimeError("boom"))
    with pytest.raises(RuntimeError, match="boom"):
        run(model, inputs)
    model.blocks[2].ffn.forward = forward
    assert torch.equal(run(model, inputs), expected)


def test_the_state_is_whole_while_streaming(model, inputs):
    before = {key: value.clone() for key, value in model.state_dict().items()}
    stream_blocks(model, list(model.blocks), "cpu")
    run(model, inputs)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("options", [{"num_slots": 0}, {"resident": -1}])
def test_no_slot_is_refused(model, options):
    with pytest.raises(UsageError, match="not possible"):
        stream_blocks(model, list(model.blocks), "cpu", **options)


def test_two_streamed_models_at_once(model, inputs):
    twin = copy.deepcopy(model)
    torch.nn.init.normal_(twin.proj_out.weight)
    expected = [run(model, inputs), run(twin, inputs)]
    for each in (model, twin):
        stream_blocks(each, list(each.blocks), "cpu", lane=LateLane())
    for _ in range(2):
        assert torch.equal(run(model, inputs), expected[0])
        assert torch.equal(run(twin, inputs), expected[1])


def test_a_model_on_the_meta_device_never_passes_through_the_device(model, inputs, tiny_folder):
    from wandistiller.models.stored import TRANSFORMER

    expected = run(model, inputs)
    state = model.state_dict()
    empty = build_empty(TRANSFORMER, dict(model.config))
    asked = []

    def read(name):
        asked.append(name)
        return state[name]

    stream = stream_blocks(empty, list(empty.blocks), "cpu", read=read, lane=LateLane())
    assert sorted(asked) == sorted(state)
    assert torch.equal(run(empty, inputs), expected)
    empty(*inputs, return_dict=False)[0].square().sum().backward()
    for (name, parameter), value in zip(empty.named_parameters(), gradients(model, inputs).values(), strict=True):
        assert torch.equal(parameter.grad, value), name
    assert all(torch.equal(value, state[name]) for name, value in empty.state_dict().items())
    stream.detach()
    assert torch.equal(run(empty, inputs), expected)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("lane", [ImmediateLane, LateLane])
def test_loading_a_state_while_streaming(model, inputs, num_slots, lane):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    expected = run(other, inputs)
    stream_blocks(model, list(model.blocks), "cpu", num_slots=num_slots, lane=lane())
    run(model, inputs)
    model.load_state_dict(other.state_dict())
    assert torch.equal(run(model, inputs), expected)


def test_the_state_of_a_part_and_under_adapters_that_came_later(model, inputs):
    state = copy.deepcopy(model.state_dict())
    stream_blocks(model, list(model.blocks), "cpu", lane=LateLane())
    run(model, inputs)
    assert all(torch.equal(value, state[f"blocks.{name}"]) for name, value in model.blocks.state_dict().items())
    halved = {name: value / 2 for name, value in model.blocks[1].state_dict().items()}
    model.blocks[1].load_state_dict(halved)
    state.update({f"blocks.1.{name}": value for name, value in halved.items()})
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    run(model, inputs)
    found = {name.replace("base_layer.", ""): value for name, value in model.state_dict().items() if "lora" not in name}
    assert found.keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in found.items())


def test_a_state_of_other_shapes_changes_nothing(model):
    state = copy.deepcopy(model.state_dict())
    stream_blocks(model, list(model.blocks), "cpu", lane=LateLane())
    name = "blocks.1.attn1.to_q.bias"
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**state, name: torch.zeros(1)})
    assert torch.equal(model.state_dict()[name], state[name])


@pytest.mark.parametrize("change", [lambda model: model.double(), lambda model: model.to(torch.bfloat16)])
def test_a_streamed_model_is_not_converted_by_mistake(model, inputs, change):
    stream_blocks(model, list(model.blocks), "cpu")
    change(model)
    with pytest.raises(UsageError, match="moved or converted"):
        run(model, [each.to(model.dtype) for each in inputs])


def test_what_is_attached_in_inference_mode_is_trained_afterwards(model, inputs):
    expected = gradients(model, inputs)
    with torch.inference_mode():
        stream = stream_blocks(model, list(model.blocks), "cpu", lane=LateLane())
        model(*inputs)
    found = gradients(model, inputs)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    with torch.inference_mode():
        stream.detach()
    found = gradients(model, inputs)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_compiled_blocks_stream_too(model, inputs):
    expected = run(model, inputs)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="eager")
    stream_blocks(model, list(model.blocks), "cpu", lane=LateLane())
    for _ in range(2):
        assert torch.equal(run(model, inputs), expected)
    torch._dynamo.reset()


def test_a_streamed_model_is_not_copied_by_mistake(model):
    stream = stream_blocks(model, list(model.blocks), "cpu")
    with pytest.raises(UsageError, match="cannot be copied"):
        copy.deepcopy(model)
    stream.detach()
    copy.deepcopy(model)
