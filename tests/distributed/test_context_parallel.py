"""Ranks that compute one clip together, each with a share of its tokens, against one process."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional
from diffusers import WanTransformer3DModel
from helpers.ranks import run_ranks
from safetensors.torch import load_file

from wandistiller.api import distill, sample
from wandistiller.distributed.context import ClipGroup
from wandistiller.distributed.ranks import joined
from wandistiller.errors import UsageError

CPU = torch.device("cpu")
SHAPES = {"picture": (1, 8, 8), "clip": (5, 8, 8), "uneven": (3, 6, 10), "fewer tokens than ranks": (1, 2, 6)}
PROMPTS = ("a red circle", "a blue square", "a green circle")
DRAWN = {"model": "tiny-random", "width": 48, "height": 80, "frames": 5, "steps": 2, "cfg_scale": 3.0, "solver": "euler"}
SIZE = {"width": 48, "height": 48, "max_aspect": 1.0, "workers": 0}
TAUGHT = {"teacher_path": "tiny-random", **SIZE, "learning_rate": 1e-3, "num_steps": 3, "log_every": 1}


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


def teach(folder, options):
    distill(**TAUGHT, **options, output_dir=folder)


def teach_together(folder, options, expected):
    shares = set()
    plain = ClipGroup.share

    def note(self, whole):
        found = plain(self, whole)
        shares.add((whole.shape[1], found.shape[1]))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClipGroup, "share", note)
        teach(folder, options)
    assert shares == expected


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("data", "strategy", "shares"),
    [
        # Some ask about pictures, of 9 tokens, while others ask about clips, of 18.
        ({"dataset_path": "world:8:1+5x48x48", "frames": (5,), "feature_weight": 0.5}, "sharded", {(9, 5), (18, 9)}),
        ({"data_path": "world:6:1x48x48", "rollout_steps": 2, "rollout_batch": 2, "guidance_scale": 3.0}, "gpu", {(9, 5)}),
    ],
    ids=["while training", "before training"],
)
def test_ranks_ask_a_teacher_together(tmp_path, data, strategy, shares):
    how = {"batch_size": 2, "teacher_context_parallel": 2, "teacher_device_strategy": strategy}
    run_ranks(2, teach_together, tmp_path / "two", {**data, **how}, shares, folder=tmp_path)
    teach(tmp_path / "one", {**data, "batch_size": 2, "gradient_accumulation": 2})
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--teacher-context-parallel 2 was given, but torchrun did not start this"),
        ({"teacher_device_strategy": "gpu0"}, "does not go with --teacher-device-strategy gpu0"),
    ],
)
def test_teachers_that_cannot_be_asked_together(tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        teach(tmp_path, {"data_path": "world:6:1x48x48", "teacher_context_parallel": 2, **options})
