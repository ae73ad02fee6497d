"""What only a real device shows: streams, page-locked memory, kernels, limits."""

import copy
import gc

import pytest
import torch
from diffusers import AutoencoderKLWan

from wandistiller.api import doctor, sample
from wandistiller.memory import attention
from wandistiller.memory.activations import POLICIES, apply_policy
from wandistiller.memory.allocation_sites import AllocationRecorder
from wandistiller.memory.host import HostBudget, page_locked_bytes
from wandistiller.memory.monitor import Monitor, device_memory
from wandistiller.memory.placement import Subject
from wandistiller.memory.placements import find_placement
from wandistiller.memory.streaming import stream_blocks
from wandistiller.models.sizes import SIZES, WAN21_VAE, WAN22_VAE
from wandistiller.models.stored import TRANSFORMER, build_empty
from wandistiller.models.vae_tiles import decode_tiled, encode_tiled
from wandistiller.train.host_optimisation import HostOptimisation
from wandistiller.train.optimisation import Optimisation, OptimiserOptions

CUDA = torch.device("cuda", 0)
# Large enough that copies and kernels overlap: blocks of 34 MB.
CONFIG = {**SIZES["wan2.1-1.3b"].transformer, "num_attention_heads": 8, "ffn_dim": 4096, "num_layers": 6}


@pytest.fixture
def state():
    torch.manual_seed(0)
    model = build_empty(TRANSFORMER, CONFIG, dtype=torch.bfloat16)
    return {name: (torch.randn(p.shape) * 0.03).to(p.dtype) for name, p in model.state_dict().items()}


def make(state, device="cuda", config=CONFIG):
    from wandistiller.models.load import set_tensor

    model = build_empty(TRANSFORMER, config, dtype=torch.bfloat16)
    for name, value in state.items():
        set_tensor(model, name, value.to(device))
    model.rope.to(device)
    return model


@pytest.fixture
def inputs():
    torch.manual_seed(1)
    options = {"device": CUDA, "dtype": torch.bfloat16}
    return torch.randn(1, 16, 3, 40, 40, **options), torch.tensor([500.0], device=CUDA), torch.randn(1, 64, 4096, **options)


@pytest.mark.parametrize(("num_slots", "compiled"), [(1, False), (2, False), (3, False), (2, True)])
def test_streamed_is_resident(state, inputs, num_slots, compiled):
    with torch.no_grad():
        resident = make(state)
        model = build_empty(TRANSFORMER, CONFIG, dtype=torch.bfloat16)
        if compiled:
            for each in (resident, model):
                for block in each.blocks:
                    block.forward = torch.compile(block.forward)
        expected = resident(*inputs)[0]
        stream_blocks(model, list(model.blocks), CUDA, read=state.__getitem__, num_slots=num_slots)
        for _ in range(5):
            assert torch.equal(model(*inputs)[0], expected)
    torch._dynamo.reset()


def test_8_bit(state, inputs):
    with torch.no_grad():
        expected = make(state)(*inputs)[0].float()
        model = build_empty(TRANSFORMER, CONFIG, dtype=torch.bfloat16)
        stream = stream_blocks(model, list(model.blocks), CUDA, read=state.__getitem__, quantise=True)
        found = [model(*inputs)[0].float() for _ in range(3)]
    assert all(torch.equal(each, found[0]) for each in found)
    assert (found[0] - expected).norm() / expected.norm() < 0.05
    assert stream.store.relative_error < 0.01


def test_page_locked_memory_is_the_weights_and_no_more(state):
    gc.collect()
    before = page_locked_bytes()
    model = build_empty(TRANSFORMER, CONFIG, dtype=torch.bfloat16)
    stream = stream_blocks(model, list(model.blocks), CUDA, read=state.__getitem__)
    weights = sum(value.nbytes for name, value in state.items() if name.startswith("blocks."))
    assert weights <= page_locked_bytes() - before <= 1.03 * weights
    assert all(flat.is_pinned() for flat in stream.store.flats)
    stream.detach()
    del stream, model
    gc.collect()
    assert page_locked_bytes() == before


def test_a_cap_on_page_locked_memory(state, inputs, caplog):
    model = build_empty(TRANSFORMER, CONFIG, dtype=torch.bfloat16)
    stream = stream_blocks(model, list(model.blocks), CUDA, read=state.__getitem__, budget=HostBudget(80_000_000))
    pinned = [flat.is_pinned() for flat in stream.store.flats]
    assert any(pinned)
    assert not all(pinned)
    assert "pageable" in caplog.text
    with torch.no_grad():
        assert torch.equal(model(*inputs)[0], make(state)(*inputs)[0])


def test_the_card_holds_the_ring_and_what_computes(state, inputs):
    """A hard cap on the process far below the model's size."""
    gc.collect()
    torch.cuda.empty_cache()
    model = build_empty(TRANSFORMER, CONFIG, dtype=torch.bfloat16)
    stream = stream_blocks(model, list(model.blocks), CUDA, read=state.__getitem__)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    with torch.no_grad():
        for _ in range(3):
            model(*inputs)
    peak = torch.cuda.max_memory_allocated()
    assert stream.device_bytes <= held
    weights = sum(value.nbytes for value in state.values())
    assert stream.device_bytes < 0.55 * weights
    assert peak - held < 300e6


EAGER = [(policy, to_host, False, streamed) for policy in POLICIES for to_host in (False, True) for streamed in (False, True)]
COMPILED = [("full", False, True, False), ("selective", True, True, True), ("none", False, True, True)]


@pytest.mark.parametrize(("policy", "to_host", "compiled", "streamed"), EAGER + COMPILED)
def test_gradients(state, inputs, policy, to_host, compiled, streamed, monkeypatch):
    """As close to the gradients in float32 as plain bfloat16 comes; kernels that are compiled or fused round otherwise."""
    monkeypatch.setattr(attention, "MIN_KEYS", 512)
    truth = gradients_of(make(state).float(), tuple(tensor.float() for tensor in inputs))
    plain = gradients_of(make(state), inputs)
    model = build_empty(TRANSFORMER, CONFIG, dtype=torch.bfloat16) if streamed else make(state)
    if compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
    apply_policy(list(model.blocks), policy, CUDA, to_host=to_host)
    stream = stream_blocks(model, list(model.blocks), CUDA, read=state.__getitem__, train=True) if streamed else None
    for _ in range(2):
        if stream:
            stream.gradients.clear()
        found = gradients_of(model, inputs)
    if stream:
        found |= {name: stream.gradients.of(p).to(CUDA) for name, p in model.named_parameters() if name.startswith("blocks.")}
    for name, value in truth.items():
        if name.endswith("to_k.bias"):
            continue  # the softmax does not feel a shift of all keys, so this gradient is rounding and nothing else
        usual, ours = (((each[name].float() - value).norm() / value.norm()).item() for each in (plain, found))
        assert ours < 1.5 * usual + 0.005, (name, usual, ours)
    torch._dynamo.reset()


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_updates_on_the_host_are_those_on_the_card(state, inputs, clip_norm, accumulation):
    """Copies, updates and the next forward run beside each other; the weights must not show it."""
    inputs, options = tuple(tensor.float() for tensor in inputs), OptimiserOptions(rate=1e-4, clip_norm=clip_norm)
    streamed = build_empty(TRANSFORMER, CONFIG, dtype=torch.float32)
    stream = stream_blocks(streamed, list(streamed.blocks), CUDA, read=lambda name: state[name].float(), train=True)
    resident = make(state).float()
    ways = [
        (resident, Optimisation(dict(resident.named_parameters()), options, "no", CUDA)),
        (streamed, HostOptimisation(dict(streamed.named_parameters()), stream, options, "no", CUDA)),
    ]
    for model, optimisation in ways:
        for step in range(6):
            for turn in range(accumulation):
                loss = (model(inputs[0] * (1 + step + turn), *inputs[1:])[0] - 1).square().mean()
                optimisation.backward(loss, is_last=turn == accumulation - 1)
            optimisation.step(step)
    found = streamed.state_dict()
    ways[1][1].close()
    for name, expected in resident.state_dict().items():
        if not name.endswith("to_k.bias"):  # see test_gradients
            moved, off = expected.cpu() - state[name].float(), found[name].cpu() - expected.cpu()
            assert off.norm() < 0.02 * moved.norm(), name


def gradients_of(model, inputs, target=0.0):
    model.zero_grad(set_to_none=True)
    (model(*inputs, return_dict=False)[0].float() - target).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_two_streamed_roles_in_one_step(state, inputs):
    """A frozen teacher and a trained student, both streamed, on one card."""
    with torch.no_grad():
        target = make(state)(*inputs)[0]
    expected = gradients_of(make({name: value * 0.9 for name, value in state.items()}), inputs, target)
    teacher, student = (build_empty(TRANSFORMER, CONFIG, dtype=torch.bfloat16) for _ in range(2))
    stream_blocks(teacher.requires_grad_(False), list(teacher.blocks), CUDA, read=state.__getitem__)
    stream = stream_blocks(student, list(student.blocks), CUDA, read=lambda name: state[name] * 0.9, train=True)
    for _ in range(3):
        stream.gradients.clear()
        with torch.no_grad():
            found_target = teacher(*inputs)[0]
        assert torch.equal(found_target, target)
        gradients_of(student, inputs, found_target)
        for name, parameter in student.named_parameters():
            if name.startswith("blocks.") and not name.endswith("to_k.bias"):
                found = stream.gradients.of(parameter).to(CUDA).float()
                assert (found - expected[name].float()).norm() / expected[name].float().norm() < 0.02, name


def test_blocks_of_another_kind():
    """Not a Wan: PyTorch's own layers, float32 and float16 mixed, a buffer, an odd number of blocks, a tied parameter."""

    class Layer(torch.nn.Module):
        def __init__(self, index):
            super().__init__()
            self.inner = torch.nn.TransformerEncoderLayer(520, 8, 1037 + index, batch_first=True, dropout=0.0)
            self.small = torch.nn.Linear(520, 520).half()
            self.register_buffer("offset", torch.randn(520))

        def forward(self, hidden):
            return self.inner(hidden) + self.small(hidden.half()).float() + self.offset

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Layer(index) for index in range(7))).eval()
    model[3].small.weight = model[1].small.weight
    hidden = torch.randn(3, 77, 520, device=CUDA)
    with torch.no_grad():
        expected = copy.deepcopy(model).to(CUDA)(hidden)
        stream = stream_blocks(model, list(model), CUDA, num_slots=3, resident=2)
        for _ in range(3):
            assert torch.equal(model(hidden), expected)
        stream.detach()
        assert torch.equal(model.to(CUDA)(hidden), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampling_offloaded_draws_the_same(tmp_path, dtype):
    options = {"model": "tiny-random", "prompt": "x", "steps": 3, "device": "cuda", "dtype": dtype, "width": 64, "height": 64}
    resident = sample(output=tmp_path / "a.png", **options)[0].latents
    offloaded = sample(output=tmp_path / "b.png", offload_to_cpu=True, **options)[0].latents
    assert torch.equal(resident, offloaded)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_the_line_that_leaks_is_named(tmp_path):
    recorder, kept = AllocationRecorder(), []
    try:
        for step in range(20):
            kept.append(torch.zeros(2**20, device=CUDA))  # the leak
            if step == 9:
                recorder.take_baseline()
        found = recorder.write(tmp_path / "memory.pickle")
    finally:
        recorder.close()
    assert found[0].num_bytes == 10 * 2**22
    assert "test_cuda.py" in found[0].site
    assert "test_the_line_that_leaks_is_named" in found[0].site
    assert (tmp_path / "memory.pickle").stat().st_size > 1000


def test_a_monitor_reads_the_card():
    monitor = Monitor([CUDA])
    with monitor.phase("first"):
        big = torch.zeros(2**28, device=CUDA)
        del big
    with monitor.phase("second"):
        small = torch.zeros(2**20, device=CUDA)
    first, second = (monitor.peaks[name, "cuda:0"].peak for name in ("first", "second"))
    assert first - second > 2**29
    found = monitor.observe()
    assert found["memory/cuda:0/allocated_gb"] == pytest.approx(torch.cuda.memory_allocated() / 1e9)
    assert small.is_cuda
    assert any(line.startswith("cuda:0 has") for line in monitor.describe())


def test_a_limited_process_knows_its_limit():
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.set_per_process_memory_fraction(4 * 2**30 / total, CUDA)
    try:
        memory = device_memory(CUDA)
        assert memory.total == pytest.approx(4 * 2**30, rel=0.01)
        assert memory.free <= memory.total - memory.reserved
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CUDA)


def test_blocks_stay_where_the_bus_is_too_slow(inputs):
    """A short picture and large blocks: a block's copy takes far longer than its computation."""
    config = {**CONFIG, "ffn_dim": 65536}
    model = build_empty(TRANSFORMER, config, dtype=torch.bfloat16).requires_grad_(False)
    state = {name: (torch.randn(p.shape) * 0.03).to(p.dtype) for name, p in model.state_dict().items()}
    short = (inputs[0][..., :8, :8].contiguous(), *inputs[1:])
    with torch.no_grad():
        expected = make(state, config=config)(*short)[0]
        subject = Subject(model=model, blocks=list(model.blocks), read=state.__getitem__)
        placed = find_placement("offload", resident="auto").attach(subject, CUDA)
        before = placed.footprint.device
        for _ in range(2):  # the first pass is slow: kernels are loaded
            assert torch.equal(model(*short)[0], expected)
        assert "blocks stay on cuda:0" in placed.keep_up()
        assert placed.footprint.device > before
        for _ in range(3):
            assert torch.equal(model(*short)[0], expected)
        placed.detach()
        assert torch.equal(model.to(CUDA)(*short)[0], expected)


MAPS = {
    "blocks": '{"": 0, "blocks": {"0": "cpu", "1": "disk"}}',
    "parts of blocks": '{"": 0, "blocks": {"0": {"": 0, "ffn": "cpu"}, "1": {"": "cpu", "attn1": 0, "ffn": "disk"}}}',
}


@pytest.mark.parametrize("placement", ["gpu", "cpu", "offload", "disk", "balanced", "sequential", *MAPS, "auto"])
def test_sampling_by_placement(tmp_path, placement):
    options = {
        "model": "tiny-random",
        "prompt": "x",
        "steps": 3,
        "device": "cuda",
        "dtype": "float32",
        "width": 64,
        "height": 64,
    }
    expected = sample(output=tmp_path / "a.png", placement="gpu", **options)[0].latents
    if placement in MAPS:
        (tmp_path / "map.json").write_text(MAPS[placement])
        options |= {"device_map": tmp_path / "map.json"}
    found = sample(output=tmp_path / "b.png", placement="custom" if placement in MAPS else placement, **options)[0].latents
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("placement", ["balanced", "sequential", "custom"])
def test_a_device_map_puts_blocks_on_the_card(state, inputs, placement):
    half = {"": "cpu", **{f"blocks.{index}": 0 for index in range(3)}}
    options = {"map": half} if placement == "custom" else {"max_memory": {0: 200 * 2**20, "cpu": 2**34}}
    model = build_empty(TRANSFORMER, CONFIG, dtype=torch.bfloat16)
    before, locked_before = torch.cuda.memory_allocated(), page_locked_bytes()
    subject = Subject(model=model, blocks=list(model.blocks), read=state.__getitem__)
    placed = find_placement(placement, **options).attach(subject, CUDA)
    predicted = placed.footprint
    found = torch.cuda.memory_allocated() - before
    assert 3 * 2**25 < predicted.device <= found < predicted.device + 2**20
    assert next(model.blocks[0].parameters()).is_cuda
    assert page_locked_bytes() - locked_before == predicted.page_locked > 2 * 2**25
    with torch.no_grad():
        resident = make(state)
        torch.testing.assert_close(model(*inputs, return_dict=False)[0], resident(*inputs, return_dict=False)[0])
    placed.detach()
    del placed
    gc.collect()
    assert page_locked_bytes() == locked_before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("config", [WAN21_VAE, WAN22_VAE], ids=["wan2.1", "wan2.2"])
def test_the_vae_in_tiles(config, monkeypatch):
    """The released shapes: the same pixels and latents, a fraction of the memory, pixels on the host.

    Without TF32 numbers can be compared. Memory is measured as everybody runs: the kernels without TF32 take tens of gigabytes
    for themselves where they find them.
    """
    torch.manual_seed(0)
    vae = AutoencoderKLWan(**config).to(CUDA).eval().requires_grad_(False)
    factor = config["scale_factor_spatial"]
    pixels, latents = torch.rand(1, 3, 5, 48 * factor, 72 * factor) * 2 - 1, torch.randn(1, config["z_dim"], 2, 48, 72)

    def measure(run):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        num_bytes = torch.cuda.max_memory_allocated() - before
        with monkeypatch.context() as exactly:
            exactly.setattr(torch.backends.cudnn, "allow_tf32", False)
            exactly.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
            return run().cpu(), num_bytes

    whole, whole_bytes = measure(lambda: vae.decode(latents.to(CUDA)).sample)
    tiled, tiled_bytes = measure(lambda: decode_tiled(vae, latents))
    torch.testing.assert_close(tiled, whole, rtol=0, atol=1e-4)
    assert tiled_bytes < 0.4 * whole_bytes
    whole, whole_bytes = measure(lambda: vae.encode(pixels.to(CUDA)).latent_dist.mean)
    tiled, tiled_bytes = measure(lambda: encode_tiled(vae, pixels).mean)
    torch.testing.assert_close(tiled, whole, rtol=0, atol=1e-4)
    assert tiled_bytes < 0.5 * whole_bytes


def test_doctor():
    diagnosis = doctor(device="cuda", disk_megabytes=0, json=True)
    assert diagnosis.exit_code == 0
    assert diagnosis.devices[0].pinned_gb_per_second > diagnosis.devices[0].pageable_gb_per_second > 0


def test_a_model_that_is_dropped_with_a_copy_under_way_spoils_nothing(state, inputs):
    """As when sampling ends: the next pass's first block is on its way into memory that is free from now on."""
    for _ in range(5):
        model = build_empty(TRANSFORMER, CONFIG, dtype=torch.bfloat16)
        stream = stream_blocks(model, list(model.blocks), CUDA, read=state.__getitem__)
        size = stream.slots[0].landing.numel()
        with torch.no_grad():
            model(*inputs)
        del stream, model
        gc.collect()
        blank = [torch.zeros(size, dtype=torch.uint8, device=CUDA) for _ in range(2)]
        torch.cuda.synchronize()
        assert not any(tensor.any() for tensor in blank)
