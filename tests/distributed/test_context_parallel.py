"""Ranks that compute one clip together, each with a share of its tokens, against one process."""

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional
from diffusers import WanTransformer3DModel
from helpers.ranks import run_ranks
from safetensors.torch import load_file

from wandistiller.api import sample
from wandistiller.distributed.context import ClipGroup
from wandistiller.distributed.ranks import joined
from wandistiller.errors import UsageError

CPU = torch.device("cpu")
SHAPES = {"picture": (1, 8, 8), "clip": (5, 8, 8), "uneven": (3, 6, 10), "fewer tokens than ranks": (1, 2, 6)}
PROMPTS = ("a red circle", "a blue square", "a green circle")
DRAWN = {"model": "tiny-random", "width": 48, "height": 80, "frames": 5, "steps": 2, "cfg_scale": 3.0, "solver": "euler"}


def make_model(heads):
    torch.manual_seed(0)
    sizes = {"num_attention_heads": heads, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
    return WanTransformer3DModel(**sizes, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2).eval().requires_grad_(False)


def make_inputs(shape, per_token):
    generator = torch.Generator().manual_seed(1)
    frames, height, width = shape
    tokens = frames * height * width // 4
    return {
        "hidden_states": torch.randn(2, 4, *shape, generator=generator),
        "timestep": 1000 * torch.rand(2, tokens, generator=generator) if per_token else torch.tensor([900.0, 100.0]),
        "encoder_hidden_states": torch.randn(2, 512, 16, generator=generator),
    }


class Seen:
    """What a model's blocks are given, and what its self-attention computes on: (heads, queries, keys)."""

    def __init__(self, model, monkeypatch):
        self.tokens, self.attention = set(), set()
        plain = functional.scaled_dot_product_attention

        def note(*args, **kwargs):
            query, key = kwargs["query"], kwargs["key"]
            if key.shape[2] != 512:  # not the text
                self.attention.add((query.shape[1], query.shape[2], key.shape[2]))
            return plain(*args, **kwargs)

        monkeypatch.setattr(functional, "scaled_dot_product_attention", note)
        for block in model.blocks:
            block.ffn.register_forward_pre_hook(lambda module, args: self.tokens.add(args[0].shape[1]))


def compute_together(all_heads):
    with joined(CPU, needs_group=True) as ranks:
        group = ClipGroup(ranks.world_size, ranks, CPU)
        for heads, (name, shape), per_token in product(all_heads, SHAPES.items(), (False, True)):
            expect_the_same(group, heads, shape, per_token, f"{heads} heads, {name}, {per_token=}")
        del group


def expect_the_same(group, heads, shape, per_token, name):
    alone, shared, inputs = make_model(heads), make_model(heads), make_inputs(shape, per_token)
    group.spread(shared)
    expected = alone(**inputs, return_dict=False)[0]
    with pytest.MonkeyPatch.context() as patch:
        seen = Seen(shared, patch)
        found = shared(**inputs, return_dict=False)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)
    tokens = inputs["hidden_states"][0, 0].numel() // 4
    length = -(-tokens // group.size)
    by_heads, by_tokens = (heads // group.size, length * group.size, tokens), (heads, length, tokens)
    assert seen.tokens == {length}, name
    assert seen.attention == {by_tokens if heads % group.size else by_heads}, name


@pytest.mark.parametrize(("ranks", "heads"), [(2, (4, 3)), (4, (4, 6))])
def test_a_model_in_shares_is_the_model(tmp_path, ranks, heads):
    run_ranks(ranks, compute_together, heads, folder=tmp_path)


def draw(folder, options):
    found = sample(**DRAWN, **options, output=folder / "drawn.mp4", output_latent=folder / "drawn.safetensors")
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in threads if "gloo" in name], threads
    print(f"wrote {len(found)}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    draw(folder, {"prompt": PROMPTS})
    return folder


@pytest.mark.parametrize(
    ("ranks", "together", "writes"), [(2, 2, [3, 0]), (4, 2, [2, 0, 1, 0]), (2, 1, [2, 1])], ids=["all", "groups", "prompts"]
)
def test_ranks_draw_what_one_draws(alone, tmp_path, ranks, together, writes):
    run_ranks(ranks, draw, tmp_path, {"prompt": PROMPTS, "context_parallel": together}, folder=tmp_path)
    for number in range(len(PROMPTS)):
        found, expected = (load_file(folder / f"drawn-{number}.safetensors")["latent"] for folder in (tmp_path, alone))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert (tmp_path / f"drawn-{number}.mp4").stat().st_size > 0
    printed = [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(ranks)]
    assert [int(text.rpartition("wrote ")[2]) for text in printed] == writes
    assert ["Sampling" in text for text in printed] == [True] + [False] * (ranks - 1), "one speaks for all"


def test_ranks_are_asked_for_without_torchrun():
    with pytest.raises(UsageError, match="torchrun did not start this") as caught:
        sample(**DRAWN, prompt=PROMPTS, context_parallel=2, output="drawn.mp4")
    assert caught.value.exit_code == 2 and "torchrun --nproc-per-node 2" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": PROMPTS, "context_parallel": 4}, r"6 ranks cannot be split into groups of 4(.|\n)*1 or 2 or 3 or 6"),
        ({"prompt": PROMPTS[:1]}, r"6 ranks, and 1 prompt to draw(.|\n)*--context-parallel 6"),
        ({"prompt": PROMPTS[:2], "context_parallel": 2}, r"3 groups of 2 ranks, and 2 prompts(.|\n)*--context-parallel 3"),
        ({"prompt": PROMPTS, "placement": "balanced"}, "--placement balanced spreads a model over several GPUs"),
        ({"prompt": PROMPTS, "context_parallel": 0}, "--context-parallel 0 is too small"),
    ],
)
def test_what_ranks_cannot_draw_is_said_before_weights_are_read(monkeypatch, options, message):
    for name, value in {"RANK": "0", "WORLD_SIZE": "6", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("wandistiller.sample.sampler.joined", None)
    with pytest.raises(UsageError, match=message):
        sample(**DRAWN, **options, output="drawn.mp4")
