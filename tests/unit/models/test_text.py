import shutil

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file, save_file

from wandistiller.errors import CheckpointError, UsageError
from wandistiller.models.text import count_tokens, encode_prompts, open_text_encoder, read_embeddings


def test_embeddings_are_those_of_diffusers(tiny_folder):
    prompts = ["a red ball", "", "  two\n words &amp; an entity "]
    ours = encode_prompts(tiny_folder / "text_encoder", tiny_folder / "tokenizer", prompts, device="cpu", dtype=torch.float32)
    pipeline = WanPipeline.from_pretrained(tiny_folder)
    with torch.no_grad():
        for prompt, embedding in zip(prompts, ours, strict=True):
            expected, _ = pipeline.encode_prompt(prompt, do_classifier_free_guidance=False, max_sequence_length=512)
            assert torch.equal(embedding, expected[0])


@pytest.mark.parametrize("num_words", [1, 30, 31, 32, 33, 600])
def test_a_batch_of_any_length_is_that_of_diffusers(tiny_folder, num_words):
    parts = tiny_folder / "text_encoder", tiny_folder / "tokenizer"
    prompts = ["red " * num_words, "a blue ball", ""]
    pipeline = WanPipeline.from_pretrained(tiny_folder)
    with torch.no_grad(), open_text_encoder(*parts, device="cpu", dtype=torch.float32) as encode:
        expected, _ = pipeline.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=512)
        ours = encode(prompts)
    assert ours.shape == expected.shape
    assert torch.allclose(ours, expected, atol=1e-6)
    assert count_tokens(parts[1], prompts) == expected.any(dim=-1).sum(dim=1).tolist()


def test_a_damaged_text_encoder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="tokenizer"):
        encode_prompts(tmp_path / "text_encoder", tmp_path / "tokenizer", ["x"], device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("key", ["embeddings", "prompt_embeds", "anything"])
@pytest.mark.parametrize("shape", [(5, 32), (1, 5, 32), (2, 5, 32)])
def test_embeddings_from_a_file_are_padded_with_zeros(tmp_path, key, shape):
    values = torch.randn(shape, dtype=torch.bfloat16)
    save_file({key: values}, tmp_path / "e.safetensors")
    found = read_embeddings(tmp_path / "e.safetensors", 32)
    assert found.shape == (shape[0] if len(shape) == 3 else 1, 512, 32)
    assert torch.equal(found[:, :5].reshape(values.shape), values.float())
    assert not found[:, 5:].any()


@pytest.mark.parametrize("shape", [(5, 16), (600, 32), (32,), (1, 1, 5, 32), (0, 32)])
def test_embeddings_of_another_model_are_refused(tmp_path, shape):
    save_file({"embeddings": torch.zeros(shape)}, tmp_path / "e.safetensors")
    with pytest.raises(CheckpointError, match="tokens of width 32"):
        read_embeddings(tmp_path / "e.safetensors", 32)


def test_an_ambiguous_file_is_refused(tmp_path):
    save_file({"x": torch.zeros(1, 32), "y": torch.zeros(1, 32)}, tmp_path / "e.safetensors")
    with pytest.raises(CheckpointError, match="it holds x, y"):
        read_embeddings(tmp_path / "e.safetensors", 32)


def test_a_missing_file(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        read_embeddings(tmp_path / "none.safetensors", 32)


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_text_encoder_that_is_not_whole_is_refused(tiny_folder, tmp_path, damage):
    """The library would fill what is missing with random numbers and say nothing."""
    shutil.copytree(tiny_folder / "text_encoder", tmp_path / "text_encoder")
    weights = tmp_path / "text_encoder" / "model.safetensors"
    if damage == "missing":
        tensors = load_file(weights)
        del tensors["encoder.block.0.layer.1.DenseReluDense.wo.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    else:
        weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="wo.weight" if damage == "missing" else "cannot be loaded"):
        encode_prompts(tmp_path / "text_encoder", tiny_folder / "tokenizer", ["x"], device="cpu", dtype=torch.float32)
