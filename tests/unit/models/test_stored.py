"""Checkpoints of every dialect, storage and state of damage."""

import json

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from safetensors.torch import load_file, save_file

from wandistiller.errors import CheckpointError
from wandistiller.models.load import load_model, load_transformer, load_vae
from wandistiller.models.sizes import SIZES
from wandistiller.models.stored import CONFIG_METADATA_KEY, TRANSFORMER, VAE, inspect_checkpoint
from wandistiller.models.transformer_keys import to_original

# Wide enough for heads of 128, so that the shapes alone tell everything.
CONFIG = {**SIZES["tiny"].transformer, "num_attention_heads": 1, "attention_head_dim": 128, "num_layers": 2}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return WanTransformer3DModel(**CONFIG)


@pytest.fixture(scope="module")
def original(model):
    return {to_original(key): value for key, value in model.state_dict().items()}


def equal(loaded, model):
    return all(torch.equal(left, right) for left, right in zip(loaded.parameters(), model.parameters(), strict=True))


def test_a_diffusers_folder(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert equal(load_transformer(tmp_path), model)


def test_a_sharded_diffusers_folder(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert equal(load_transformer(tmp_path), model)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
def test_a_single_file_without_any_configuration(model, original, tmp_path, prefix):
    save_file({prefix + key: value for key, value in original.items()}, tmp_path / "wan.safetensors")
    stored = inspect_checkpoint(tmp_path / "wan.safetensors")
    assert (stored.architecture, stored.dialect) == (TRANSFORMER, "original")
    assert equal(load_model(stored), model)


def test_a_single_file_in_diffusers_names(model, tmp_path):
    save_file(model.state_dict(), tmp_path / "wan.safetensors")
    assert equal(load_transformer(tmp_path / "wan.safetensors"), model)


def test_a_whole_comfyui_checkpoint_gives_the_part_that_is_asked_for(model, original, tmp_path):
    vae = AutoencoderKLWan(**SIZES["tiny"].vae)
    tensors = {f"model.diffusion_model.{key}": value for key, value in original.items()}
    tensors |= {f"vae.{key}": value for key, value in vae.state_dict().items()}
    tensors["text_encoders.umt5xxl.shared.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "all.safetensors")
    assert equal(load_transformer(tmp_path / "all.safetensors"), model)


def test_heads_come_from_an_original_config(tmp_path):
    config = {**CONFIG, "num_attention_heads": 4, "attention_head_dim": 24}
    model = WanTransformer3DModel(**config)
    save_file({to_original(key): value for key, value in model.state_dict().items()}, tmp_path / "wan.safetensors")
    described = {"_class_name": "WanModel", "dim": 96, "num_heads": 4, "num_layers": 2, "eps": 1e-6, "model_type": "t2v"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    stored = inspect_checkpoint(tmp_path / "wan.safetensors")
    assert (stored.config["num_attention_heads"], stored.config["attention_head_dim"]) == (4, 24)
    assert equal(load_model(stored), model)


def test_the_configuration_in_the_files_own_metadata(tmp_path):
    model = WanTransformer3DModel(**SIZES["tiny"].transformer)
    tensors = {to_original(key): value for key, value in model.state_dict().items()}
    save_file(tensors, tmp_path / "wan.safetensors", metadata={CONFIG_METADATA_KEY: json.dumps(dict(model.config))})
    assert equal(load_transformer(tmp_path / "wan.safetensors"), model)


def test_a_config_of_something_else_beside_the_file_is_left_alone(model, original, tmp_path):
    save_file(original, tmp_path / "wan.safetensors")
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKLWan", "z_dim": 16}')
    assert equal(load_transformer(tmp_path / "wan.safetensors"), model)


@pytest.mark.parametrize("stored_in", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("asked", [torch.float32, torch.float16, torch.bfloat16])
def test_the_requested_dtype_is_what_the_bytes_show(model, original, tmp_path, stored_in, asked):
    save_file({key: value.to(stored_in) for key, value in original.items()}, tmp_path / "wan.safetensors")
    stored = inspect_checkpoint(tmp_path / "wan.safetensors")
    loaded = load_model(stored, dtype=asked)
    kept = set(stored.kept_in_float32())
    for key, value in loaded.named_parameters():
        assert value.dtype == (torch.float32 if key in kept else asked), key
        expected = model.state_dict()[key].to(stored_in).to(value.dtype)
        assert torch.equal(value, expected), key


def test_the_modules_kept_in_float32_are_those_of_diffusers(model, tmp_path):
    model.save_pretrained(tmp_path)
    theirs = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    ours = load_transformer(tmp_path, dtype=torch.bfloat16)
    assert {key: value.dtype for key, value in ours.named_parameters()} == {
        key: value.dtype for key, value in theirs.named_parameters()
    }
    assert all(torch.equal(left, right) for left, right in zip(ours.parameters(), theirs.parameters(), strict=True))
    kept = inspect_checkpoint(tmp_path).kept_in_float32()
    assert "blocks.0.scale_shift_table" in kept
    assert "blocks.0.attn1.to_q.weight" not in kept


@pytest.mark.parametrize("suffix", ["scale_weight", "weight_scale"])
@pytest.mark.parametrize("per_row", [False, True])
def test_scaled_8_bit_storage(model, original, tmp_path, suffix, per_row):
    tensors, expected = {}, {}
    for key, value in original.items():
        if key.startswith("blocks.") and value.ndim == 2:
            peak = value.abs().amax(dim=1, keepdim=True) if per_row else value.abs().max()
            scale = peak / 448
            tensors[key] = (value / scale).to(torch.float8_e4m3fn)
            tensors[f"{key.removesuffix('.weight')}.{suffix}"] = scale
            expected[key] = tensors[key].float() * scale
        else:
            tensors[key] = expected[key] = value
    tensors["scaled_fp8"] = torch.zeros(2).to(torch.float8_e4m3fn)
    tensors["blocks.0.self_attn.q.comfy_quant"] = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    tensors["blocks.0.self_attn.q.scale_input"] = torch.tensor(1.0)
    save_file(tensors, tmp_path / "fp8.safetensors")
    loaded = load_transformer(tmp_path / "fp8.safetensors", dtype=torch.float32).state_dict()
    for key, value in loaded.items():
        assert torch.equal(value, expected[to_original(key)]), key
    # E4M3 has three bits after the point: a rounding error of at most 1/16.
    weight = loaded["blocks.1.ffn.net.0.proj.weight"]
    truth = model.state_dict()["blocks.1.ffn.net.0.proj.weight"]
    assert (weight - truth).norm() / truth.norm() < 0.04


def test_plain_8_bit_storage(model, original, tmp_path):
    tensors = {key: value.to(torch.float8_e4m3fn) if value.ndim == 2 else value for key, value in original.items()}
    save_file(tensors, tmp_path / "fp8.safetensors")
    loaded = load_transformer(tmp_path / "fp8.safetensors", dtype=torch.bfloat16)
    expected = original["blocks.0.ffn.0.weight"].to(torch.float8_e4m3fn).to(torch.bfloat16)
    assert torch.equal(loaded.blocks[0].ffn.net[0].proj.weight, expected)


def test_missing_keys_are_named(original, tmp_path):
    tensors = {key: value for key, value in original.items() if "blocks.1.ffn.2" not in key}
    save_file(tensors, tmp_path / "wan.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 2 tensors: blocks\.1\.ffn\.2\.bias, blocks\.1\.ffn\.2\.weight"):
        inspect_checkpoint(tmp_path / "wan.safetensors")


def test_unexpected_keys_are_named(original, tmp_path):
    save_file({**original, "blocks.0.novelty.weight": torch.zeros(2)}, tmp_path / "wan.safetensors")
    with pytest.raises(CheckpointError, match=r"tensors that the model does not: blocks\.0\.novelty\.weight"):
        inspect_checkpoint(tmp_path / "wan.safetensors")


def test_an_unused_norm_of_some_checkpoints_is_let_pass(model, original, tmp_path):
    save_file({**original, "blocks.0.cross_attn.norm_added_q.weight": torch.zeros(2)}, tmp_path / "wan.safetensors")
    assert equal(load_transformer(tmp_path / "wan.safetensors"), model)


def test_a_config_of_another_size_is_an_error(model, tmp_path):
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "ffn_dim": 512}))
    with pytest.raises(CheckpointError, match=r"wrong shape: .*ffn"):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("double_blocks.0.img_attn.qkv.weight", "Flux"),
        ("blocks.0.self_attn.q.lora_A.weight", "LoRA"),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", "T5"),
        ("something.weight", "something else"),
    ],
)
def test_another_architecture_is_named(tmp_path, key, what):
    save_file({key: torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"is not a Wan transformer or VAE(.|\n)*{what}"):
        inspect_checkpoint(tmp_path / "model.safetensors")


def test_a_vace_transformer_is_not_taken_for_a_plain_one(original, tmp_path):
    save_file({**original, "vace_blocks.0.after_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="VACE"):
        inspect_checkpoint(tmp_path / "model.safetensors")


def test_a_folder_of_another_class_is_told_by_its_name(model, tmp_path):
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "_class_name": "FluxTransformer2DModel"}))
    with pytest.raises(CheckpointError, match="is a FluxTransformer2DModel, not a Wan transformer"):
        inspect_checkpoint(tmp_path, TRANSFORMER)


def test_a_vae_where_a_transformer_is_wanted(tmp_path):
    AutoencoderKLWan(**SIZES["tiny"].vae).save_pretrained(tmp_path)
    assert inspect_checkpoint(tmp_path).architecture is VAE
    with pytest.raises(CheckpointError, match="is not a Wan transformer"):
        inspect_checkpoint(tmp_path, TRANSFORMER)


def test_a_legacy_vae(tmp_path):
    from wandistiller.models.vae_keys import to_original as vae_original

    vae = AutoencoderKLWan(**{**SIZES["wan2.1-14b"].vae, "base_dim": 8})
    torch.save({vae_original(key, 2, False): value for key, value in vae.state_dict().items()}, tmp_path / "Wan2.1_VAE.pth")
    loaded = load_vae(tmp_path / "Wan2.1_VAE.pth")
    assert equal(loaded, vae)
    assert loaded.config.latents_mean == SIZES["wan2.1-14b"].vae["latents_mean"]


def test_nothing_but_headers_is_read_before_loading(model, tmp_path, monkeypatch):
    model.save_pretrained(tmp_path)
    from wandistiller.models.weight_files import SafetensorsWeights

    monkeypatch.setattr(SafetensorsWeights, "read", lambda *_: pytest.fail("a weight was read"))
    inspect_checkpoint(tmp_path)
    assert load_file(tmp_path / "diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize("index", range(0, 60, 3))
def test_any_missing_tensor_is_an_error_that_says_so(original, tmp_path, index):
    """Also those that the configuration is read from."""
    names = sorted(original)
    missing = names[index % len(names)]
    save_file({key: value for key, value in original.items() if key != missing}, tmp_path / "wan.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks|is not a Wan"):
        inspect_checkpoint(tmp_path / "wan.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": "3"},
        {"patch_size": 2},
        {"num_attention_heads": 0},
        {"attention_head_dim": 23},
        {"eps": "a"},
        {"ffn_dim": None},
    ],
)
def test_a_configuration_that_describes_no_model(model, tmp_path, change):
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize("metadata", ["no json", "[1]"])
def test_damaged_metadata(original, tmp_path, metadata):
    save_file(original, tmp_path / "wan.safetensors", metadata={CONFIG_METADATA_KEY: metadata})
    with pytest.raises(CheckpointError, match="damaged configuration"):
        inspect_checkpoint(tmp_path / "wan.safetensors")


def test_latent_statistics_of_the_wrong_length(tmp_path):
    AutoencoderKLWan(**SIZES["tiny"].vae).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "latents_mean": [0.0] * 3}))
    with pytest.raises(CheckpointError, match="latents_mean has 3 values for 8"):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks.0.ffn.0.weight": torch.int32}, "as int32"),
        ({"blocks.0.ffn.0.weight": torch.int8}, "as int8"),
        ({"blocks.0.ffn.0.scale_weight": (2, 1)}, "factor of 'blocks.0.ffn.0.weight' has shape"),
        ({"blocks.9.ffn.0.scale_weight": ()}, "factors for weights that are not there"),
    ],
)
def test_storage_that_no_weight_has(original, tmp_path, changes, message):
    tensors = dict(original)
    for key, change in changes.items():
        if isinstance(change, torch.dtype):
            tensors[key] = torch.ones_like(original[key]).to(change)
        else:
            tensors[key] = torch.ones(change)
    save_file(tensors, tmp_path / "wan.safetensors")
    with pytest.raises(CheckpointError, match=message):
        inspect_checkpoint(tmp_path / "wan.safetensors")


def test_the_other_kind_of_wan_is_named(tmp_path, original):
    save_file(original, tmp_path / "wan.safetensors")
    with pytest.raises(CheckpointError, match="looks like a Wan transformer"):
        inspect_checkpoint(tmp_path / "wan.safetensors", VAE)


def test_original_files_in_shards(model, original, tmp_path):
    """As the authors release the 14B: shards, their index, and a config.json of few words."""
    names = sorted(original)
    shards = {"diffusion_pytorch_model-00001-of-00002.safetensors": names[::2]}
    shards["diffusion_pytorch_model-00002-of-00002.safetensors"] = names[1::2]
    for file, keys in shards.items():
        save_file({key: original[key] for key in keys}, tmp_path / file)
    weight_map = {key: file for file, keys in shards.items() for key in keys}
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (tmp_path / "config.json").write_text('{"_class_name": "WanModel", "dim": 128, "num_heads": 1, "model_type": "t2v"}')
    torch.save({"unrelated": torch.zeros(1)}, tmp_path / "models_t5_umt5-xxl-enc-bf16.pth")
    for source in (tmp_path, index):
        assert equal(load_transformer(source), model)
