"""Export: every format, bit for bit there and back, and nothing left behind when it fails."""

import json
import shutil

import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file

from wandistiller.api import export
from wandistiller.checkpoint import formats, proof
from wandistiller.errors import OutputError, UsageError
from wandistiller.models.channel_adapter import ChannelAdapter, random_adapter
from wandistiller.models.load import load_transformer, load_vae
from wandistiller.models.pipeline import find_pipeline
from wandistiller.models.sizes import SIZES
from wandistiller.models.stored import inspect_checkpoint
from wandistiller.models.student_facts import read_text_limit, write_text_limit

TINY = SIZES["tiny"]
# One of each kind: every module that some released Wan has is in one of these.
TRANSFORMERS = {
    "text": dict(TINY.transformer),
    "48 channels": {**TINY.transformer, "in_channels": 48, "out_channels": 48},
    "picture": {**TINY.transformer, "in_channels": 20, "image_dim": 24, "added_kv_proj_dim": 96},
    "two pictures": {**TINY.transformer, "in_channels": 20, "image_dim": 24, "added_kv_proj_dim": 96, "pos_embed_seq_len": 514},
}
VAES = {
    "16 channels": {**SIZES["wan2.1-14b"].vae, "base_dim": 4},
    "48 channels": {**SIZES["wan2.2-5b"].vae, "base_dim": 8, "decoder_base_dim": 8},
    "tiny": dict(TINY.vae),
}


def save(model, folder):
    model.save_pretrained(folder)
    return folder


def same_weights(folder, other):
    left, right = (load_file(path / "diffusion_pytorch_model.safetensors") for path in (folder, other))
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]) for key in left
    )


@pytest.mark.parametrize("form", ["comfyui", "original"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_transformer_there_and_back(tmp_path, name, form):
    torch.manual_seed(0)
    source = save(WanTransformer3DModel(**TRANSFORMERS[name]).to(torch.bfloat16), tmp_path / "source")
    export(model=str(source), output=tmp_path / "single.safetensors", format=form)
    export(model=str(tmp_path / "single.safetensors"), output=tmp_path / "back")
    assert same_weights(source, tmp_path / "back")
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back")]
    assert all(configs[0][key] == configs[1][key] for key in configs[0] if key[0] != "_")
    assert WanTransformer3DModel.from_pretrained(tmp_path / "back")
    prefix = "model.diffusion_model." if form == "comfyui" else ""
    assert f"{prefix}head.modulation" in load_file(tmp_path / "single.safetensors")


@pytest.mark.parametrize("name", VAES)
def test_a_vae_there_and_back(tmp_path, name):
    torch.manual_seed(0)
    source = save(AutoencoderKLWan(**VAES[name]), tmp_path / "source")
    export(model=str(source), output=tmp_path / "single.safetensors", format="comfyui")
    export(model=str(tmp_path / "single.safetensors"), output=tmp_path / "back")
    assert same_weights(source, tmp_path / "back")
    assert AutoencoderKLWan.from_pretrained(tmp_path / "back")


def test_a_pipeline_loads_in_diffusers(tiny_folder, tmp_path):
    written = export(model="tiny-random", output=tmp_path / "pipeline")
    assert [item.architecture for item in written] == ["transformer", "vae"]
    pipeline = WanPipeline.from_pretrained(tmp_path / "pipeline")
    original = WanPipeline.from_pretrained(tiny_folder)
    for part in ("transformer", "vae", "text_encoder"):
        pairs = zip(getattr(pipeline, part).parameters(), getattr(original, part).parameters(), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)


def test_two_experts(two_expert_folder, tmp_path):
    export(model=str(two_expert_folder), output=tmp_path / "files", format="comfyui")
    assert {file.name for file in (tmp_path / "files").iterdir()} == {
        "transformer.safetensors",
        "transformer_2.safetensors",
        "vae.safetensors",
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_another_precision(tiny_folder, tmp_path, dtype):
    export(model=str(tiny_folder / "transformer"), output=tmp_path / "out", dtype=dtype)
    stored = inspect_checkpoint(tmp_path / "out")
    kept = set(stored.kept_in_float32())
    for key in stored.names:
        assert stored.stored_dtype(key) == (torch.float32 if key in kept else getattr(torch, dtype))
    theirs = WanTransformer3DModel.from_pretrained(tmp_path / "out", torch_dtype=getattr(torch, dtype))
    expected = WanTransformer3DModel.from_pretrained(tiny_folder / "transformer", torch_dtype=getattr(torch, dtype))
    assert all(torch.equal(left, right) for left, right in zip(theirs.parameters(), expected.parameters(), strict=True))


def test_8_bit_weights_are_multiplied_out(tmp_path):
    from wandistiller.models.transformer_keys import to_original

    config = {**TINY.transformer, "num_attention_heads": 1, "attention_head_dim": 128}
    tensors = {to_original(key): value for key, value in WanTransformer3DModel(**config).state_dict().items()}
    weight = tensors["blocks.0.ffn.0.weight"]
    scale = weight.abs().max() / 448
    tensors["blocks.0.ffn.0.weight"] = (weight / scale).to(torch.float8_e4m3fn)
    tensors["blocks.0.ffn.0.scale_weight"] = scale
    save_file(tensors, tmp_path / "fp8.safetensors")
    export(model=str(tmp_path / "fp8.safetensors"), output=tmp_path / "out")
    found = load_transformer(tmp_path / "out").blocks[0].ffn.net[0].proj.weight
    assert torch.equal(found, (tensors["blocks.0.ffn.0.weight"].float() * scale).to(torch.bfloat16))


def test_large_models_are_written_in_shards(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_SHARD_BYTES", 300_000)
    export(model=str(tiny_folder / "transformer"), output=tmp_path / "out")
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3
    assert all(shard.stat().st_size < 320_000 for shard in shards)
    assert WanTransformer3DModel.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("kind", ["transformer", "vae"])
@pytest.mark.parametrize("what", ["values", "outputs"])
def test_a_difference_is_found_and_nothing_is_left(tiny_folder, tmp_path, monkeypatch, kind, what):
    source = inspect_checkpoint(tiny_folder / kind)
    key = next(iter(source.names))
    if what == "values":
        read = type(source).read
        monkeypatch.setattr(
            type(source), "read", lambda self, k, dtype=None: read(self, k, dtype) + (self.dialect == "original" and k == key)
        )
    else:
        results = iter([torch.zeros(1), torch.ones(1)])
        monkeypatch.setattr(proof, "run_once", lambda *_: next(results))
    with pytest.raises(OutputError, match=key if what == "values" else "computes something else"):
        export(model=str(tiny_folder / kind), output=tmp_path / "out.safetensors", format="original")
    assert not list(tmp_path.iterdir())


def test_the_proof_computes_what_the_model_computes(tiny_folder):
    """One block at a time gives the output of the whole model."""
    stored = inspect_checkpoint(tiny_folder / "transformer")
    found = proof.run_once(stored, dict.fromkeys(stored.names, torch.float32))
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 8, 2, 4, 6, generator=generator)
    text = torch.randn(1, 16, 32, generator=generator)
    with torch.no_grad():
        expected = load_transformer(tiny_folder / "transformer")(latents, torch.tensor([500.0]), text)[0]
    assert torch.equal(found, expected)


def test_what_exists_is_kept_unless_told_otherwise(tiny_folder, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "precious").touch()
    with pytest.raises(UsageError, match="exists"):
        export(model=str(tiny_folder / "vae"), output=output)
    assert (output / "precious").exists()
    export(model=str(tiny_folder / "vae"), output=output, overwrite=True)
    assert load_vae(output)
    assert not (output / "precious").exists()


@pytest.mark.parametrize(
    ("form", "name", "message"),
    [("comfyui", "folder", "End it with .safetensors"), ("diffusers", "x.safetensors", "Leave .safetensors away")],
)
def test_the_output_fits_the_format(tiny_folder, tmp_path, form, name, message):
    with pytest.raises(UsageError, match=message):
        export(model=str(tiny_folder / "vae"), output=tmp_path / name, format=form)


def test_a_folder_of_original_files(tiny_folder, tmp_path):
    source = tmp_path / "wan"
    export(model="tiny-random", output=tmp_path / "files", format="original")
    for expert in ("high_noise_model", "low_noise_model"):
        (source / expert).mkdir(parents=True)
        shutil.copy(tmp_path / "files" / "transformer.safetensors", source / expert)
    torch.save(load_file(tmp_path / "files" / "vae.safetensors"), source / "Wan2.1_VAE.pth")
    shutil.copy(tiny_folder / "vae" / "config.json", source / "config.json")
    written = export(model=str(source), output=tmp_path / "out")
    assert [item.path.name for item in written] == ["transformer", "transformer_2", "vae"]
    assert WanTransformer3DModel.from_pretrained(tmp_path / "out" / "transformer_2")
    found = find_pipeline(str(tmp_path / "out"))
    assert set(found.parts) == {"transformer", "transformer_2", "vae"}
    assert found.boundary == 0.875


def test_values_beyond_the_range_of_a_precision_are_not_written_as_infinite(tiny_folder, tmp_path):
    shutil.copytree(tiny_folder / "transformer", tmp_path / "source")
    file = tmp_path / "source" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["proj_out.weight"][0, 0] = 1e6
    save_file(tensors, file)
    with pytest.raises(OutputError, match=r"'proj_out\.weight' has values beyond the range of float16"):
        export(model=str(tmp_path / "source"), output=tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_a_source_is_never_overwritten_by_its_own_export(tmp_path):
    export(model="tiny-random", output=tmp_path / "pipeline")
    for output in (tmp_path / "pipeline", tmp_path):
        with pytest.raises(UsageError, match="holds what is to be exported"):
            export(model=str(tmp_path / "pipeline" / "vae"), output=output, overwrite=True)
    assert WanPipeline.from_pretrained(tmp_path / "pipeline")


def test_what_belongs_to_a_student_goes_with_it(tiny_folder, tmp_path):
    source = tmp_path / "student"
    shutil.copytree(tiny_folder, source)
    write_text_limit(source, 7)
    random_adapter(8, 4).save(source)
    export(model=str(source), output=tmp_path / "out")
    assert read_text_limit(tmp_path / "out") == 7
    assert torch.equal(ChannelAdapter.load(tmp_path / "out").matrix, ChannelAdapter.load(source).matrix)
