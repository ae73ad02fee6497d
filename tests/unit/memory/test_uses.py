"""What is predicted without a card, against what was measured on one, and against whole models written down."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from wandistiller.memory import cuda_autocast, tape, tracing, uses
from wandistiller.memory.cuda_autocast import LONG, SHORT
from wandistiller.memory.scene import Scene
from wandistiller.memory.uses import Adapters, Use
from wandistiller.models.sizes import SIZES
from wandistiller.models.stored import TRANSFORMER, build_empty

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
GIB = 2**30
VIDEO, IMAGE = (31, 44, 80, 1), (1, 44, 80, 1)
TINY = {**SIZES["tiny"].transformer, "num_layers": 10}


def measured(file, what, way, monkeypatch):
    """Return a row, and let the allocator be foreseen as it was then."""
    found = json.loads((RESULTS / f"{file}.json").read_text())
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"expandable_segments:{found.get('expandable_segments', False)}")
    return next(row for row in found["rows"] if row["what"] == what and row["way"] == way)


def use_of(size, latents, **changes):
    config = SIZES[size].transformer if isinstance(size, str) else size
    *shape, batch = latents
    return Use(name="student", config=config, latent_shape=(config["in_channels"], *shape), batch_size=batch, **changes)


def played(use):
    scene = Scene()
    if use.is_streamed:
        scene.hold("student", "slots", [max(use.block_bytes)] * 2)
        blocks = {id(each) for each in use.model.get_submodule("blocks").parameters()}
        scene.hold("student", "weights", [each.nbytes for each in use.model.parameters() if id(each) not in blocks])
    else:
        scene.hold("student", "weights", [each.nbytes for each in use.model.parameters()])
    for _ in range(2):
        step = scene.play(use.placed_tape, use.repeats)
        scene.drop(step)
    return step, scene


@pytest.mark.parametrize(
    ("file", "what", "way", "use"),
    [
        ("streaming-5b", "wan2.2-5b video, 27,280 tokens", "resident", use_of("wan2.2-5b", VIDEO)),
        ("streaming-5b", "wan2.2-5b video, 27,280 tokens", "resident, compiled", use_of("wan2.2-5b", VIDEO, is_compiled=True)),
        ("streaming-5b", "wan2.2-5b one image", "wandistiller, 2 slots", use_of("wan2.2-5b", IMAGE, is_streamed=True)),
        (
            "streaming-14b",
            "wan2.1-14b video, 32,760 tokens",
            "wandistiller, 2 slots",
            use_of("wan2.1-14b", (21, 60, 104, 1), is_streamed=True),
        ),
        (
            "activations",
            "wan2.2-5b video, 27,280 tokens",
            "diffusers checkpointing, eager",
            use_of("wan2.2-5b", VIDEO, trains="everything", policy="full"),
        ),
        (
            "activations",
            "wan2.2-5b video, 27,280 tokens",
            "nothing recomputed, compiled",
            use_of("wan2.2-5b", VIDEO, trains="everything", is_compiled=True),
        ),
        (
            "activations",
            "wan2.2-5b video, 27,280 tokens",
            "selective, compiled",
            use_of("wan2.2-5b", VIDEO, trains="everything", policy="selective", is_compiled=True),
        ),
        (
            "activations",
            "wan2.2-5b video, 27,280 tokens",
            "full, compiled",
            use_of("wan2.2-5b", VIDEO, trains="everything", policy="full", is_compiled=True),
        ),
        (
            "activations-segments",
            "wan2.2-5b video, 27,280 tokens",
            "selective, to host",
            use_of("wan2.2-5b", VIDEO, trains="everything", policy="selective", to_host=True),
        ),
        (
            "activations-other-ways",
            "wan2.2-5b video, 27,280 tokens",
            "full, to host, compiled",
            use_of("wan2.2-5b", VIDEO, trains="everything", policy="full", to_host=True, is_compiled=True),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_step_takes_what_was_measured(file, what, way, use, monkeypatch):
    row = measured(file, what, way, monkeypatch)
    step, scene = played(use)
    assert step.peak / GIB == pytest.approx(row["peak_gib"], rel=0.02, abs=0.1)
    assert scene.reserved / GIB == pytest.approx(row["reserved_gib"], rel=0.03, abs=0.3)


@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("adapters", [None, Adapters(2, ("to_q", "ffn.net.2"))], ids=["everything", "adapters"])
def test_seven_blocks_tell_of_ten(adapters, policy, is_compiled, to_host):
    options = {"policy": policy, "to_host": to_host, "is_compiled": is_compiled, "adapters": adapters}
    options["trains"] = "everything" if adapters is None else "adapters"
    use = use_of(TINY, (5, 32, 32, 2), **options)
    step, scene = played(use)
    with mock.patch.object(uses, "NUM_BLOCKS", 10), mock.patch.object(tape, "NUM_BLOCKS", 10):
        whole, whole_scene = played(use_of(TINY, (5, 32, 32, 2), **options))
    assert (step.peak, step.kept, sum(step.left.values())) == (whole.peak, whole.kept, sum(whole.left.values()))
    assert scene.reserved == whole_scene.reserved
    assert sum(step.left.values()) == pytest.approx(sum(each.nbytes for each in use.trained), abs=4096), "gradients and no more"


def test_seven_blocks_do_the_work_of_ten():
    use = use_of(TINY, (5, 32, 32, 2), trains="everything")
    work = use.tape.work(use.repeats)
    with mock.patch.object(uses, "NUM_BLOCKS", 10), mock.patch.object(tape, "NUM_BLOCKS", 10):
        whole = use_of(TINY, (5, 32, 32, 2), trains="everything")
        assert whole.tape.work(whole.repeats) == work


def test_the_work_is_what_a_sum_by_hand_gives():
    """Two operations for each weight of a block's matrices and token; four a pair of tokens and channel in attention."""
    use = use_of("wan2.2-5b", VIDEO)
    work = use.tape.work(use.repeats)
    tokens, width, ffn, layers = 31 * 22 * 40, 24 * 128, 14336, 30
    in_blocks = 2 * layers * ((6 * width**2 + 2 * width * ffn) * tokens + 2 * width**2 * 512)
    by_matmul = sum(kernel.flops * count for kernel, count in work.items() if kernel.kind == "matmul")
    assert by_matmul == pytest.approx(in_blocks, rel=0.002)
    pairs = 4 * layers * width * (tokens * tokens + tokens * 512)
    assert sum(kernel.flops * count for kernel, count in work.items() if kernel.kind == "attention") == pytest.approx(pairs)


def test_gradients_are_left_to_the_byte():
    use = use_of(TINY, (1, 8, 8, 1), trains="everything")
    step, _ = played(use)
    assert sum(step.left.values()) == sum(each.nbytes for each in use.model.parameters())


def test_streamed_gradients_do_not_stay():
    left = {
        streamed: sum(played(use_of(TINY, (1, 8, 8, 1), trains="everything", is_streamed=streamed))[0].left.values())
        for streamed in (False, True)
    }
    blocks = sum(
        each.nbytes for each in build_empty(TRANSFORMER, TINY, dtype=torch.bfloat16).get_submodule("blocks").parameters()
    )
    assert left[False] - left[True] == pytest.approx(blocks, rel=2 / 9)


def test_autocasting_keeps_short_copies_of_weights():
    """As on a card: float32 weights are cast once in a forward pass, and the copies live until its end."""
    options = {"trains": "everything", "dtype": torch.float32}
    plain, _ = played(use_of(TINY, (1, 8, 8, 1), **options))
    cast, _ = played(use_of(TINY, (1, 8, 8, 1), **options, precision="bf16"))
    matrices = sum(each.nbytes for each in build_empty(TRANSFORMER, TINY).parameters() if each.ndim > 1)
    assert cast.kept > matrices / 2 * 0.9
    assert cast.left.values() and sum(cast.left.values()) == sum(plain.left.values())


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_machine_with_a_card_foresees_the_same(policy, monkeypatch):
    """Recomputation asks for the autocast of every kind of device there is."""
    options = {"trains": "everything", "dtype": torch.float32, "precision": "bf16", "policy": policy}
    tapes = []
    for has_card in (False, True):
        monkeypatch.setattr(uses, "_tapes", {})
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_card=has_card: has_card)
        tapes.append(use_of(TINY, (1, 8, 8, 1), **options).tape)
    repeats = use_of(TINY, (1, 8, 8, 1), **options).repeats
    assert tapes[0] is not tapes[1] and tapes[0].work(repeats) == tapes[1].work(repeats)


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_norm_of_short_values_with_long_weights(monkeypatch, is_listed):
    """Versions of PyTorch differ in whether autocasting makes its input float32; without that it takes several steps."""
    for module in (tracing, cuda_autocast):
        monkeypatch.setattr(module, "LONG", LONG | {"rms_norm"} if is_listed else LONG - {"rms_norm"})
    kept = []
    noting = torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor)
    with noting, tracing.recording(), torch.autocast("cpu", torch.bfloat16):
        values, weight = torch.empty(3, 64, dtype=torch.bfloat16, requires_grad=True), torch.empty(64, requires_grad=True)
        result = torch.nn.functional.rms_norm(values, (64,), weight, 1e-6)
    assert result.dtype == (torch.float32 if is_listed else torch.bfloat16)
    large = {tensor.untyped_storage()._cdata: tensor for tensor in kept if tensor.numel() == values.numel()}
    # The input as float32; of the several steps, the input scaled too.
    assert [tensor.dtype for tensor in large.values()] == [torch.float32] * (1 if is_listed else 2)


def test_lists_are_those_of_the_installed_version():
    assert {"linear", "conv3d", "scaled_dot_product_attention"} <= SHORT and {"layer_norm", "pow", "mse_loss"} <= LONG
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::rms_norm")}
    is_cast = any(torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA") for name in names)
    assert ("rms_norm" in LONG) == is_cast


def test_nothing_is_left_behind():
    norm, autocast, attend = torch.nn.functional.rms_norm, torch.autocast, torch.nn.functional.scaled_dot_product_attention
    played(use_of(TINY, (1, 8, 8, 1), trains="everything", policy="selective", is_compiled=True, precision="bf16"))
    assert torch.nn.functional.rms_norm is norm and torch.autocast is autocast
    assert torch.nn.functional.scaled_dot_product_attention is attend
    assert torch.nn.functional.rms_norm(torch.ones(2, 4), (4,)).tolist() == [[1.0] * 4] * 2
