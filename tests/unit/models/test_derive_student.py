"""Students that begin as their teachers, as far as they can."""

import json

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.embeddings import Timesteps
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

from wandistiller.errors import CheckpointError, UsageError
from wandistiller.models.channel_adapter import random_adapter
from wandistiller.models.derive_student import derive_student, measure_coverage
from wandistiller.models.sizes import SIZES
from wandistiller.models.stored import TRANSFORMER, inspect_checkpoint
from wandistiller.models.student_config import read_student_config
from wandistiller.models.student_slices import CHOICES, choose_indices, head_channels

TINY = SIZES["tiny"].transformer
WORLD = SIZES["tiny-world"].transformer
I2V = {**TINY, "in_channels": 20, "image_dim": 40, "added_kv_proj_dim": 96, "pos_embed_seq_len": 6}


def make_teacher(config):
    """A teacher in which no tensor is constant, so that one in a wrong place shows."""
    torch.manual_seed(0)
    teacher = WanTransformer3DModel(**config).eval().requires_grad_(False)
    for parameter in teacher.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return teacher


@pytest.fixture(scope="module")
def tiny():
    return make_teacher(TINY)


@pytest.fixture(scope="module")
def world():
    return make_teacher(WORLD)


@pytest.fixture
def plan_of(tmp_path):
    def plan_of(teacher, **values):
        path = tmp_path / "student.json"
        path.write_text(json.dumps(values))
        return read_student_config(path, teacher.config)

    return plan_of


def derive(teacher, plan, **options):
    return derive_student(teacher.state_dict().__getitem__, teacher.config, plan, **options)


def velocity(model, **more):
    generator = torch.Generator().manual_seed(3)
    config = model.config
    latents = torch.randn(2, config["in_channels"], 2, 8, 8, generator=generator)
    text = torch.randn(2, 512, config["text_dim"], generator=generator)
    with torch.no_grad():
        return model(latents, torch.tensor([900.0, 300.0]), text, **more).sample


@pytest.mark.parametrize("config", [TINY, WORLD, I2V], ids=["tiny", "tiny-world", "image-to-video"])
def test_a_student_of_the_teachers_size_is_the_teacher(config, plan_of):
    teacher = make_teacher(config)
    derived = derive(teacher, plan_of(teacher))
    ours, theirs = derived.model.state_dict(), teacher.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert all(ours[key].data_ptr() != theirs[key].data_ptr() for key in theirs)
    assert derived.coverage.fraction == 1
    assert all(parameter.requires_grad for parameter in derived.model.parameters())


@pytest.mark.parametrize("layers", [[0, 7], [0, 2, 5, 7], [3], [1, 2, 3]])
def test_fewer_layers_are_the_teacher_with_blocks_left_out(world, plan_of, layers):
    derived = derive(world, plan_of(world, layers=layers))
    cut = make_teacher(WORLD)
    cut.blocks = torch.nn.ModuleList(cut.blocks[layer] for layer in layers)
    assert torch.equal(velocity(derived.model), velocity(cut))
    assert derived.plan.layers == tuple(layers)


def test_layers_are_spread_or_of_the_highest_scores(world, plan_of):
    plan = plan_of(world, depth=3)
    assert derive(world, plan).plan.layers == (0, 4, 7)
    scored = derive(world, plan, layer_scores=[0, 1, 5, 2, 3, 1, 4, 0])
    assert scored.plan.layers == (0, 2, 7)
    assert torch.equal(scored.model.blocks[1].attn1.to_q.weight, world.blocks[2].attn1.to_q.weight)
    with pytest.raises(ValueError, match="2 scores for 8"):
        derive(world, plan, layer_scores=[1, 2])


def widen(student, *, heads, ffn_dim):
    """Return a teacher of twice the width that computes what ``student`` does, and what of it the student is.

    Every channel and every head comes twice, in a random order, so that norms see the same statistics; nothing reads the
    copies. Feed-forward units are made more by some that do nothing.
    """
    config = dict(student.config)
    width, size, layers = student.config["num_attention_heads"] * 24, 24, config["num_layers"]
    generator = torch.Generator().manual_seed(4)

    def places(count, total):
        return torch.randperm(total, generator=generator)[:count].sort().values

    def copies(kept, total):
        """For each place of the teacher the student's place it is, or is a copy of."""
        source = torch.empty(total, dtype=torch.long)
        rest = torch.tensor(sorted(set(range(total)) - set(kept.tolist())))
        source[kept], source[rest] = torch.arange(len(kept)), torch.arange(len(kept))
        return source

    def only(weight, source, kept):
        """Columns of ``weight`` for the kept places, zeros for their copies."""
        wide = torch.zeros(*weight.shape[:1], len(source), *weight.shape[2:])
        wide[:, kept] = weight
        return wide

    residual = places(width, 2 * width)
    text, time_units, text_units = (places(width, 2 * width) for _ in range(3))
    copy = copies(residual, 2 * width)
    texts, times, units_of_text = (copies(kept, 2 * width) for kept in (text, time_units, text_units))
    old = student.state_dict()
    new = {}
    embedder = "condition_embedder"
    for key in ("patch_embedding.weight", "patch_embedding.bias"):
        new[key] = old[key][copy]
    for name, out, into, kept in (
        (f"{embedder}.time_embedder.linear_1", times, None, None),
        (f"{embedder}.time_embedder.linear_2", copy, times, time_units),
        (f"{embedder}.text_embedder.linear_1", units_of_text, None, None),
        (f"{embedder}.text_embedder.linear_2", texts, units_of_text, text_units),
    ):
        weight = old[f"{name}.weight"]
        new[f"{name}.weight"] = (weight if into is None else only(weight, into, kept))[out]
        new[f"{name}.bias"] = old[f"{name}.bias"][out]
    chunks = torch.cat([copy + part * width for part in range(6)])
    new[f"{embedder}.time_proj.weight"] = only(old[f"{embedder}.time_proj.weight"], copy, residual)[chunks]
    new[f"{embedder}.time_proj.bias"] = old[f"{embedder}.time_proj.bias"][chunks]
    new["scale_shift_table"] = old["scale_shift_table"][..., copy]
    new["proj_out.weight"], new["proj_out.bias"] = only(old["proj_out.weight"], copy, residual), old["proj_out.bias"]
    for layer in range(layers):
        prefix = f"blocks.{layer}"
        new[f"{prefix}.scale_shift_table"] = old[f"{prefix}.scale_shift_table"][..., copy]
        for name in ("weight", "bias"):
            new[f"{prefix}.norm2.{name}"] = old[f"{prefix}.norm2.{name}"][copy]
        for attention, context, of_context in (("attn1", residual, copy), ("attn2", text, texts)):
            head = places(heads, 2 * heads)
            channels = (copies(head, 2 * heads)[:, None] * size + torch.arange(size)).flatten()
            own = (head[:, None] * size + torch.arange(size)).flatten()
            for name in ("to_q", "to_k", "to_v"):
                key, kept, source = f"{prefix}.{attention}.{name}", context, of_context
                if name == "to_q":
                    kept, source = residual, copy
                new[f"{key}.weight"] = only(old[f"{key}.weight"], source, kept)[channels]
                new[f"{key}.bias"] = old[f"{key}.bias"][channels]
            for name in ("norm_q", "norm_k"):
                new[f"{prefix}.{attention}.{name}.weight"] = old[f"{prefix}.{attention}.{name}.weight"][channels]
            key = f"{prefix}.{attention}.to_out.0"
            new[f"{key}.weight"] = only(old[f"{key}.weight"], channels, own)[copy]
            new[f"{key}.bias"] = old[f"{key}.bias"][copy]
        units = places(config["ffn_dim"], ffn_dim)
        into, out = f"{prefix}.ffn.net.0.proj", f"{prefix}.ffn.net.2"
        weight, bias = torch.zeros(ffn_dim, 2 * width), torch.zeros(ffn_dim)
        weight[units], bias[units] = only(old[f"{into}.weight"], copy, residual), old[f"{into}.bias"]
        new[f"{into}.weight"], new[f"{into}.bias"] = weight, bias
        weight = torch.zeros(2 * width, ffn_dim)
        weight[:, units] = old[f"{out}.weight"][copy]
        new[f"{out}.weight"], new[f"{out}.bias"] = weight, old[f"{out}.bias"][copy]
    teacher = WanTransformer3DModel(**{**config, "num_attention_heads": 2 * heads, "ffn_dim": ffn_dim}).eval()
    teacher.load_state_dict(new)
    return teacher.requires_grad_(False)


def test_a_student_is_found_again_in_a_teacher_made_of_it(tiny, plan_of):
    teacher = widen(tiny, heads=4, ffn_dim=300)
    # The wide one computes the same, so what is taken out of it should do so too.
    torch.testing.assert_close(velocity(teacher), velocity(tiny), atol=1e-5, rtol=1e-4)
    derived = derive(teacher, plan_of(teacher, hidden_size=96, ffn_dim=256))
    assert derived.coverage.fraction == 1
    ours, theirs = derived.model.state_dict(), tiny.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert torch.equal(velocity(derived.model), velocity(tiny))


def test_the_first_channels_by_hand(tiny, plan_of):
    derived = derive(tiny, plan_of(tiny, num_heads=2, ffn_dim=100, layers=[0, 2]), choice="first")
    ours, theirs, block = derived.model, tiny, derived.model.blocks[1]
    assert torch.equal(ours.patch_embedding.weight, theirs.patch_embedding.weight[:48])
    chunks = theirs.condition_embedder.time_proj.weight.unflatten(0, (6, 96))[:, :48, :48].flatten(0, 1)
    assert torch.equal(ours.condition_embedder.time_proj.weight, chunks)
    ours_text, theirs_text = (model.condition_embedder.text_embedder.linear_2 for model in (ours, theirs))
    assert torch.equal(ours_text.bias, theirs_text.bias[:48])
    assert torch.equal(block.scale_shift_table, theirs.blocks[2].scale_shift_table[:, :, :48])
    assert torch.equal(block.attn2.to_out[0].weight, theirs.blocks[2].attn2.to_out[0].weight[:48, :48])
    assert torch.equal(block.attn1.norm_k.weight, theirs.blocks[2].attn1.norm_k.weight[:48])
    assert torch.equal(block.ffn.net[2].weight, theirs.blocks[2].ffn.net[2].weight[:48, :100])
    assert torch.equal(ours.proj_out.weight, theirs.proj_out.weight[:, :48])
    assert torch.equal(ours.proj_out.bias, theirs.proj_out.bias)


def test_heads_and_units_are_chosen_by_what_they_do(plan_of):
    teacher = make_teacher(TINY)
    teacher.blocks[1].attn1.to_out[0].weight[:, 24:48] *= 3
    teacher.blocks[1].attn1.to_out[0].weight[:, 72:] *= 3
    teacher.blocks[1].ffn.net[0].proj.weight[7:9] *= 9
    teacher.blocks[1].ffn.net[2].weight[:, 8] *= 0.01
    plan = plan_of(teacher, num_heads=2, ffn_dim=64)
    read = teacher.state_dict().__getitem__
    indices = choose_indices(read, teacher.state_dict(), teacher.config, plan.config, "importance")
    assert indices["blocks.1.self heads"].tolist() == [*range(24, 48), *range(72, 96)]
    assert 7 in indices["blocks.1.units"]
    assert 8 not in indices["blocks.1.units"], "what goes in counts for little where little comes out"
    even = choose_indices(read, teacher.state_dict(), teacher.config, plan.config, "even")
    assert even["blocks.1.self heads"].tolist() == [*range(24), *range(48, 72)]
    assert even["residual"].tolist() == list(range(0, 96, 2))


@pytest.mark.parametrize("choice", list(CHOICES))
@pytest.mark.parametrize("config", [TINY, I2V], ids=["tiny", "image-to-video"])
def test_narrow_students_run_whatever_the_choice(config, choice, plan_of):
    teacher = make_teacher(config)
    plan = plan_of(teacher, depth=2, num_heads=2, attention_head_dim=12, ffn_dim=50, freq_dim=32)
    derived = derive(teacher, plan, choice=choice)
    assert derived.coverage.fraction == 1
    # Two images for each of two clips, three tokens each.
    more = {"encoder_hidden_states_image": torch.randn(4, 3, 40)} if config is I2V else {}
    assert velocity(derived.model, **more).isfinite().all()


def test_an_unknown_choice(tiny, plan_of):
    with pytest.raises(UsageError, match="did you mean 'importance'"):
        derive(tiny, plan_of(tiny), choice="importence")


@pytest.mark.parametrize(("teacher", "student"), [(24, 12), (128, 64), (32, 16), (48, 24), (24, 24)])
def test_smaller_heads_keep_frequencies(teacher, student):
    channels = head_channels(teacher, student)
    wide, narrow = (WanRotaryPosEmbed(size, (1, 2, 2), 64).freqs_cos for size in (teacher, student))
    if teacher in (24, 48):  # every axis of theirs has exactly as many pairs as ours, or twice as many
        torch.testing.assert_close(wide[:, channels], narrow)
    assert len(set(channels.tolist())) == student
    assert torch.equal(channels[1::2], channels[::2] + 1)
    # No other pair of the same axis has a nearer frequency, in octaves.
    start, ours = 0, 0
    for axis in range(3):
        theirs_size, ours_size = ([size - 4 * (size // 6), *[2 * (size // 6)] * 2][axis] for size in (teacher, student))
        wanted, there = (10000.0 ** (-2 * torch.arange(size // 2) / size) for size in (ours_size, theirs_size))
        distances = (wanted[:, None].log2() - there.log2()).abs()
        chosen = (channels[ours : ours + ours_size : 2] - start) // 2
        torch.testing.assert_close(distances.gather(1, chosen[:, None])[:, 0], distances.min(1).values)
        start, ours = start + theirs_size, ours + ours_size


def test_heads_that_cannot_be_cut_out():
    assert head_channels(12, 24) is None
    assert head_channels(12, 10) is None  # its axis of time has more pairs than the teacher's


def test_fewer_time_frequencies_are_those_that_the_student_has(tiny, plan_of):
    derived = derive(tiny, plan_of(tiny, freq_dim=32))
    wide, narrow = (Timesteps(size, True, 0)(torch.tensor([1.0, 321.0])) for size in (64, 32))
    kept = [next(place for place in range(64) if torch.allclose(wide[:, place], narrow[:, i], atol=1e-5)) for i in range(32)]
    ours, theirs = (model.condition_embedder.time_embedder.linear_1.weight for model in (derived.model, tiny))
    assert torch.equal(ours, theirs[:, kept])


def test_another_patch_makes_new_ends_and_nothing_else(tiny, plan_of):
    plan = plan_of(tiny, patch_size=4)
    derived = derive(tiny, plan)
    new = {key for key, value in derived.model.state_dict().items() if value.shape != tiny.state_dict()[key].shape}
    assert new == {"patch_embedding.weight", "proj_out.weight", "proj_out.bias"}
    ours, total = derived.coverage, plan.num_parameters()
    ends = [*derived.model.patch_embedding.parameters(), *derived.model.proj_out.parameters()]
    assert sum(ours.carried.values()) == total - sum(parameter.numel() for parameter in ends)
    assert ours.new_groups() == ["embeddings", "head"]
    assert torch.equal(derived.model.blocks[0].ffn.net[2].weight, tiny.blocks[0].ffn.net[2].weight)
    assert velocity(derived.model).isfinite().all()
    # As PyTorch would begin: uniform, to the bound of its inputs.
    weight = derived.model.patch_embedding.weight
    assert 0.9 / (8 * 16) ** 0.5 < weight.abs().max() <= 1 / (8 * 16) ** 0.5
    assert torch.equal(weight, derive(tiny, plan).model.patch_embedding.weight)
    assert not torch.equal(weight, derive(tiny, plan, seed=1).model.patch_embedding.weight)


@pytest.mark.parametrize("channels", [8, 12])
def test_through_an_adapter_that_loses_nothing_the_student_is_the_teacher(tiny, plan_of, channels):
    adapter = random_adapter(8, channels, seed=2)
    derived = derive(tiny, plan_of(tiny, latent_channels=channels), adapter=adapter)
    assert derived.coverage.fraction == 1
    latents, text = torch.randn(1, 8, 2, 8, 8), torch.randn(1, 512, 32)
    with torch.no_grad():
        theirs = tiny(latents, torch.tensor([500.0]), text).sample
        ours = derived.model(adapter.down(latents), torch.tensor([500.0]), text).sample
    torch.testing.assert_close(ours, adapter.down(theirs), atol=1e-5, rtol=1e-4)


def test_other_channels_without_an_adapter_make_new_ends(tiny, plan_of):
    plan = plan_of(tiny, latent_channels=4)
    assert derive(tiny, plan).coverage.new_groups() == ["embeddings", "head"]
    with pytest.raises(UsageError, match="maps 16 channels to 4"):
        derive(tiny, plan, adapter=random_adapter(16, 4))


def test_low_coverage_is_refused_before_anything_is_read(tiny, plan_of):
    plan = plan_of(tiny, num_heads=8, hidden_size=96, patch_size=16)

    def read(key):
        raise AssertionError(f"{key} was read")

    with pytest.raises(UsageError, match=r"embeddings \(.* %\), attention \(100.0 %\), head"):
        derive_student(read, tiny.config, plan)
    derived = derive(tiny, plan, allow_low_coverage=True)
    assert derived.coverage == measure_coverage(tiny.config, plan)
    assert derived.coverage.carried["attention"] == 0
    assert torch.equal(derived.model.blocks[1].norm2.weight, tiny.blocks[1].norm2.weight)
    assert not any(parameter.is_meta for parameter in derived.model.parameters())
    assert derived.coverage.as_json()["attention"]["carried"] == 0
    assert "attention (100.0 %)" in derived.coverage.new_parts()


def test_the_rest_of_the_teacher_is_not_read(world, plan_of):
    weights, reads = world.state_dict(), []

    def read(key):
        reads.append(key)
        return weights[key]

    derive_student(read, world.config, plan_of(world, layers=[0, 7]))
    assert len(reads) == len(set(reads)) == len(derive(world, plan_of(world, layers=[0, 7])).model.state_dict())
    assert {key.split(".")[1] for key in reads if key.startswith("blocks.")} == {"0", "7"}


def test_precision(tiny, plan_of):
    model = derive(tiny, plan_of(tiny, depth=2, patch_size=4), dtype=torch.bfloat16).model
    assert model.patch_embedding.weight.dtype == model.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    assert model.scale_shift_table.dtype == model.blocks[0].norm2.weight.dtype == torch.float32


def test_weights_of_another_configuration(tiny, world, plan_of):
    with pytest.raises(CheckpointError, match="do not belong to its configuration"):
        derive_student(world.state_dict().__getitem__, tiny.config, plan_of(tiny))


def test_from_a_checkpoint_to_one_that_diffusers_loads(tiny, plan_of, tmp_path):
    tiny.save_pretrained(tmp_path / "teacher")
    stored = inspect_checkpoint(tmp_path / "teacher", TRANSFORMER)
    derived = derive_student(stored.read, stored.config, plan_of(tiny, depth=2, num_heads=2))
    derived.model.save_pretrained(tmp_path / "student")
    loaded = WanTransformer3DModel.from_pretrained(tmp_path / "student")
    assert torch.equal(velocity(loaded), velocity(derived.model))
