"""``sample --lora`` draws what diffusers draws with the same LoRA, from either dialect and wherever the weights live."""

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file, save_file

from wandistiller.api import sample
from wandistiller.checkpoint.trained import write_lora
from wandistiller.errors import CheckpointError, UsageError

SIZE = {"width": 64, "height": 48}
COMMON = {**SIZE, "dtype": "float32", "device": "cpu", "seed": 11, "steps": 3, "cfg_scale": 1.0, "prompt": ("a red ball",)}
LAYERS = ("attn1.to_q", "attn1.to_out.0", "attn2.to_v", "ffn.net.0.proj", "ffn.net.2")


@pytest.fixture(scope="module")
def lora(tiny_folder, tmp_path_factory):
    """A LoRA of rank 2 that changes much, as a folder that a training writes."""
    model = WanPipeline.from_pretrained(tiny_folder).transformer
    random, adapters = torch.Generator().manual_seed(5), {}
    for name in (f"blocks.{index}.{layer}" for index in range(2) for layer in LAYERS):
        outputs, inputs = model.get_submodule(name).weight.shape
        adapters[f"{name}.lora_A.weight"] = torch.randn(2, inputs, generator=random) / inputs**0.5
        adapters[f"{name}.lora_B.weight"] = torch.randn(outputs, 2, generator=random) / 2
    folder = tmp_path_factory.mktemp("lora") / "lora"
    write_lora(folder, adapters, alpha=4, rank=2)
    return folder


def latents(tiny_folder, tmp_path, **options):
    return sample(model=str(tiny_folder), frames=1, output=tmp_path / "x.safetensors", **COMMON, **options)[0].latents


@pytest.fixture(scope="module")
def expected(tiny_folder, lora):
    """What diffusers draws with all of the LoRA, and with half of it."""
    drawn = {}
    for scale in (1.0, 0.5):
        pipeline = WanPipeline.from_pretrained(tiny_folder)
        pipeline.set_progress_bar_config(disable=True)
        pipeline.load_lora_weights(lora, weight_name="pytorch_lora_weights.safetensors", adapter_name="x")
        pipeline.set_adapters(["x"], [scale])
        drawn[scale] = pipeline(
            "a red ball",
            **SIZE,
            num_frames=1,
            num_inference_steps=3,
            guidance_scale=1.0,
            generator=torch.Generator().manual_seed(11),
            output_type="latent",
        ).frames[0]
    return drawn


@pytest.mark.parametrize("name", ["", "pytorch_lora_weights.safetensors", "comfyui_lora.safetensors"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_it_draws_what_diffusers_draws(tiny_folder, lora, expected, tmp_path, name, scale):
    found = latents(tiny_folder, tmp_path, lora=lora / name, lora_scale=scale)
    torch.testing.assert_close(found, expected[scale], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, latents(tiny_folder, tmp_path), atol=1e-2), "it changes what is drawn"


@pytest.mark.parametrize("placement", ["offload", "disk", "cpu"])
def test_wherever_the_weights_live(tiny_folder, lora, expected, tmp_path, placement):
    found = latents(tiny_folder, tmp_path, lora=lora, placement=placement)
    torch.testing.assert_close(found, expected[1.0], rtol=1e-4, atol=1e-4)


def test_factors_with_an_alpha(tiny_folder, lora, expected, tmp_path):
    """As ComfyUI's trainers write them: alpha / rank is not in the factors."""
    named = {}
    for name, value in load_file(lora / "comfyui_lora.safetensors").items():
        module, _, half = name.partition(".lora_")
        named[f"{module}.lora_{'down' if half.startswith('A') else 'up'}.weight"] = value if half.startswith("A") else value / 2
        named[f"{module}.alpha"] = torch.tensor(4.0)
    save_file(named, tmp_path / "kohya.safetensors")
    found = latents(tiny_folder, tmp_path, lora=tmp_path / "kohya.safetensors")
    torch.testing.assert_close(found, expected[1.0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda named: {f"{name}x": value for name, value in named.items()}, "which are no factors"),
        (lambda named: {name: value for name, value in named.items() if ".lora_A." in name}, "which are no factors"),
        (lambda named: {}, "no LoRA factors"),
        (lambda named: {name: torch.zeros(2, 2) for name in named}, "is for another model"),
        (lambda named: {name.replace("blocks.1", "blocks.99"): value for name, value in named.items()}, "which are no factors"),
    ],
    ids=["unknown", "half", "empty", "shapes", "deeper"],
)
def test_what_does_not_fit_is_refused(tiny_folder, lora, tmp_path, change, message):
    save_file(change(load_file(lora / "pytorch_lora_weights.safetensors")), tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=message):
        latents(tiny_folder, tmp_path, lora=tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("options", "message"), [({"lora_scale": 0.5}, "changes nothing without"), ({"lora_2": "x"}, "two experts")]
)
def test_flags_that_do_not_go_together(tiny_folder, tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        latents(tiny_folder, tmp_path, **options)
