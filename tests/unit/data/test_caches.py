import os
import shutil

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from wandistiller.data.buckets import Bucket
from wandistiller.data.cache_files import fingerprint_model
from wandistiller.data.latent_cache import LatentCache
from wandistiller.data.sources import open_source
from wandistiller.data.text_cache import EMPTY_NAME, TextCache, fingerprint_text_encoder
from wandistiller.errors import CheckpointError
from wandistiller.models.stored import VAE, inspect_checkpoint
from wandistiller.models.text import read_embeddings

BUCKET = Bucket(1, 32, 32)


@pytest.fixture
def source(tmp_path):
    for name in ("a", "sub/b"):
        path = tmp_path / "data" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32)).save(path)
        path.with_suffix(".txt").write_text(f"caption of {name}")
    return open_source(tmp_path / "data").source


def padded(length, dtype=torch.float32, width=32):
    embeddings = torch.zeros(512, width, dtype=dtype)
    embeddings[:length] = torch.randn(length, width)
    return embeddings


def write_latents(cache, source, index, latents, bucket=BUCKET):
    cache.write(
        source.name(index),
        bucket,
        latents,
        stamp=source.stamp(index),
        media=source.fingerprint(index),
        vae_path="somewhere",
        vae_dtype=torch.float32,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 7, 512])
def test_embeddings_come_back_padded(tmp_path, dtype, length):
    cache, embeddings = TextCache(tmp_path, encoder="e"), padded(length, dtype)
    cache.write("sub/a", "a red ball", embeddings, encoder_path="somewhere")
    path = tmp_path / "sub" / "a.safetensors"
    assert torch.equal(cache.read("sub/a", 32, "a red ball"), embeddings.float())
    assert torch.equal(read_embeddings(path, 32)[0], embeddings.float())
    with safe_open(path, "pt") as file:
        assert file.get_tensor("embeddings").shape == (length, 32)
        assert file.get_tensor("embeddings").dtype == dtype


def test_embeddings_of_another_caption_or_encoder_are_refused(tmp_path):
    cache = TextCache(tmp_path, encoder="e")
    cache.write("a", "a red ball", padded(4), encoder_path="somewhere")
    with pytest.raises(CheckpointError, match=r"a\.safetensors is of another caption") as caught:
        cache.read("a", 32, "a blue ball")
    assert "wandistiller encode" in caught.value.fix
    with pytest.raises(CheckpointError, match=r"a\.safetensors was made with another text encoder"):
        TextCache(tmp_path, encoder="f").read("a", 32, "a red ball")
    with pytest.raises(CheckpointError, match=r"b\.safetensors does not exist"):
        cache.read("b", 32)
    with pytest.raises(CheckpointError, match="width 16"):
        cache.read("a", 16)
    assert cache.problem("a", "a red ball") is None
    assert "another precision" in TextCache(tmp_path, encoder="e", dtype="bfloat16").problem("a", "a red ball")
    assert TextCache(tmp_path, encoder=None).read("a", 32).shape == (512, 32)


def test_missing_text_is_listed(tmp_path, source):
    cache = TextCache(tmp_path / "cache", encoder="e")
    assert [index for index, _ in cache.missing(source)] == [-1, 0, 1]
    cache.write("sub/b", "caption of sub/b", padded(3), encoder_path="")
    cache.write(EMPTY_NAME, "", padded(1), encoder_path="")
    assert [index for index, _ in cache.missing(source)] == [0]
    with pytest.raises(CheckpointError, match=r"1 of 3 text embeddings") as caught:
        cache.check(source)
    assert "a.safetensors does not exist" in caught.value.why
    cache.write("a", "another", padded(3), encoder_path="")
    assert "is of another caption" in dict(cache.missing(source))[0]
    cache.write("a", "caption of a", padded(3), encoder_path="")
    cache.check(source)


def test_latents_come_back(tmp_path, source):
    cache, latents = LatentCache(tmp_path / "cache", vae="v"), torch.randn(8, 1, 4, 4)
    write_latents(cache, source, 1, latents)
    assert torch.equal(cache.read("sub/b", BUCKET), latents)
    with safe_open(tmp_path / "cache" / "sub" / "b.latent.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("latent"), latents)
        assert file.metadata()["normalised"] == "true"
        assert file.metadata()["bucket"] == "1x32x32"
    assert [index for index, _ in cache.missing(source, [BUCKET, BUCKET])] == [0]
    assert [index for index, _ in cache.missing(source, [None, BUCKET])] == []


def test_latents_of_another_vae_or_bucket_are_refused(tmp_path, source):
    cache = LatentCache(tmp_path / "cache", vae="v")
    write_latents(cache, source, 0, torch.randn(8, 1, 4, 4))
    with pytest.raises(CheckpointError, match=r"a\.latent\.safetensors was made with another VAE"):
        LatentCache(tmp_path / "cache", vae="w").read("a", BUCKET)
    with pytest.raises(CheckpointError, match=r"a\.latent\.safetensors is not of the size 1x64x64"):
        cache.read("a", Bucket(1, 64, 64))
    with pytest.raises(CheckpointError, match=r"b\.latent\.safetensors does not exist"):
        cache.read("sub/b", BUCKET)
    with pytest.raises(CheckpointError, match="1 of 2 latents"):
        cache.check(source, [BUCKET, BUCKET])


def test_changed_media_are_found_and_touched_ones_are_not_hashed_for_ever(tmp_path, source):
    cache = LatentCache(tmp_path / "cache", vae="v")
    write_latents(cache, source, 0, torch.randn(8, 1, 4, 4))
    before = cache.read("a")
    os.utime(source.path(0), (1, 1))
    assert cache.problem(source, 0, BUCKET) is None
    assert cache.file("a").metadata()["stamp"] != source.stamp(0)
    cache.remember_stamp(source, 0)
    assert cache.file("a").metadata()["stamp"] == source.stamp(0)
    assert torch.equal(cache.read("a", BUCKET), before)
    Image.new("RGB", (32, 32), "red").save(source.path(0))
    assert "other media" in cache.problem(source, 0, BUCKET)


def test_latents_that_somebody_else_wrote(tmp_path):
    latents = torch.randn(2, 1, 4, 4)
    save_file({"latent": latents}, tmp_path / "a.latent.safetensors", metadata={"normalised": "false"})
    save_file({"latent": latents}, tmp_path / "b.latent.safetensors")
    save_file({"latent": latents[0]}, tmp_path / "c.latent.safetensors", metadata={"normalised": "true"})
    save_file({"x": latents}, tmp_path / "d.latent.safetensors")
    config = {"latents_mean": [1.0, 2.0], "latents_std": [2.0, 4.0]}
    cache = LatentCache(tmp_path, vae=None, vae_config=config)
    expected = torch.stack([(latents[0] - 1) / 2, (latents[1] - 2) / 4])
    assert torch.allclose(cache.read("a"), expected)
    for name, message in (("b", "does not say"), ("c", "has latents of shape"), ("d", "no tensor 'latent'")):
        with pytest.raises(CheckpointError, match=message):
            cache.read(name)
    with pytest.raises(CheckpointError, match="does not say"):
        LatentCache(tmp_path, vae=None).read("a")


def test_a_damaged_file_is_encoded_again(tmp_path, source):
    cache = LatentCache(tmp_path / "cache", vae="v")
    write_latents(cache, source, 0, torch.randn(8, 1, 4, 4))
    path = cache.file("a").path
    path.write_bytes(path.read_bytes()[:-10])
    assert "damaged" in cache.problem(source, 0, BUCKET)
    with pytest.raises(CheckpointError, match="truncated"):
        cache.read("a", BUCKET)


def test_a_vae_is_the_same_in_every_dialect(tiny_folder, tmp_path):
    from wandistiller.checkpoint.export import run_export
    from wandistiller.config.export import ExportConfig

    run_export(ExportConfig(model=str(tiny_folder / "vae"), output=tmp_path / "vae.safetensors", format="comfyui"))
    first, second = (inspect_checkpoint(path, VAE) for path in (tiny_folder / "vae", tmp_path / "vae.safetensors"))
    assert fingerprint_model(first) == fingerprint_model(second)


@pytest.mark.parametrize("key", ["encoder.conv_in.weight", "encoder.mid_block.resnets.0.conv1.weight", "quant_conv.bias"])
def test_another_vae_has_another_fingerprint(tiny_folder, tmp_path, key):
    shutil.copytree(tiny_folder / "vae", tmp_path / "vae")
    before = fingerprint_model(inspect_checkpoint(tmp_path / "vae", VAE))
    assert before == fingerprint_model(inspect_checkpoint(tiny_folder / "vae", VAE))
    weights = load_file(tmp_path / "vae" / "diffusion_pytorch_model.safetensors")
    weights[key] += 0.01
    save_file(weights, tmp_path / "vae" / "diffusion_pytorch_model.safetensors")
    assert fingerprint_model(inspect_checkpoint(tmp_path / "vae", VAE)) != before


def test_statistics_are_part_of_a_vae(tiny_folder, tmp_path):
    shutil.copytree(tiny_folder / "vae", tmp_path / "vae")
    config = tmp_path / "vae" / "config.json"
    before = fingerprint_model(inspect_checkpoint(tmp_path / "vae", VAE))
    config.write_text(config.read_text().replace("1.0", "2.0"))
    assert fingerprint_model(inspect_checkpoint(tmp_path / "vae", VAE)) != before


@pytest.mark.parametrize("change", ["nothing", "weights", "config", "tokenizer"])
def test_another_text_encoder_has_another_fingerprint(tiny_folder, tmp_path, change):
    for part in ("text_encoder", "tokenizer"):
        shutil.copytree(tiny_folder / part, tmp_path / part)
    if change == "weights":
        file = tmp_path / "text_encoder" / "model.safetensors"
        weights = load_file(file)
        weights["encoder.block.0.layer.1.DenseReluDense.wo.weight"] += 0.01
        save_file(weights, file, metadata={"format": "pt"})
    elif change == "config":
        file = tmp_path / "text_encoder" / "config.json"
        file.write_text(file.read_text().replace('"layer_norm_epsilon": 1e-06', '"layer_norm_epsilon": 1e-05'))
    elif change == "tokenizer":
        (tmp_path / "tokenizer" / "special.json").write_text("{}")
    same = fingerprint_text_encoder(tmp_path / "text_encoder", tmp_path / "tokenizer") == fingerprint_text_encoder(
        tiny_folder / "text_encoder", tiny_folder / "tokenizer"
    )
    assert same == (change == "nothing")
