"""``WanModel`` and ``WanVAE``: diffusers models with the described arguments."""

import copy
import json
import pickle

import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel

from wandistiller import WanModel, WanVAE
from wandistiller.api import export, sample
from wandistiller.errors import UsageError

SMALL = {"num_layers": 2, "dim": 96, "num_heads": 4, "ffn_dim": 64, "text_dim": 32, "freq_dim": 32}


def test_they_are_diffusers_models():
    model, vae = WanModel(**SMALL), WanVAE(z_dim=16, base_dim=8)
    assert isinstance(model, WanTransformer3DModel)
    assert isinstance(vae, AutoencoderKLWan)


def test_the_described_call():
    model = WanModel(model_type="t2v", gradient_checkpointing=True, offload_to_cpu=True, device="cpu", **SMALL)
    assert model.is_gradient_checkpointing
    assert model.is_offloading
    model.disable_gradient_checkpointing()
    model.disable_offloading()
    assert not model.is_gradient_checkpointing
    assert not model.is_offloading
    model.enable_offloading("cpu")
    model.enable_offloading("cpu")
    assert model.is_offloading


def test_the_defaults_are_the_smallest_released_model():
    with torch.device("meta"):
        default, named = WanModel(model_type="t2v"), WanModel.from_size("wan2.1-1.3b")
    assert dict(default.config) == dict(named.config)


@pytest.mark.parametrize(
    ("model_type", "channels", "image_dim"), [("t2v", 16, None), ("i2v", 36, 1280), ("flf2v", 36, 1280), ("ti2v", 48, None)]
)
def test_model_types(model_type, channels, image_dim):
    with torch.device("meta"):
        model = WanModel(model_type=model_type, **SMALL)
    assert (model.config.in_channels, model.config.image_dim) == (channels, image_dim)
    assert model.model_type == model_type


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"model_type": "xyz"}, "no model type 'xyz'"), ({"num_heads": 4, "num_attention_heads": 2}, "two names of one thing")],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(UsageError, match=message):
        WanModel(**{**SMALL, **arguments})


def test_it_can_be_copied_and_pickled():
    model = WanModel(**SMALL, gradient_checkpointing=True)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is WanModel
        assert twin.is_gradient_checkpointing
        assert all(torch.equal(left, right) for left, right in zip(twin.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("gradients_to_cpu", [False, True])
def test_the_described_call_trains(gradients_to_cpu):
    torch.manual_seed(0)
    model = WanModel(model_type="t2v", gradient_checkpointing=True, offload_to_cpu=True, device="cpu", **SMALL)
    if gradients_to_cpu:
        model.disable_offloading()
        model.enable_offloading("cpu", gradients_to_cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    latents, text = torch.randn(1, 16, 1, 8, 8), torch.randn(1, 4, 32)
    losses = []
    for _ in range(5):
        loss = model(latents, torch.tensor([300.0]), text, return_dict=False)[0].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_what_is_loaded_is_frozen_unless_it_is_to_be_trained(tiny_folder):
    assert not any(p.requires_grad for p in WanModel.from_checkpoint("tiny-random").parameters())
    assert all(p.requires_grad for p in WanVAE.from_checkpoint(tiny_folder, trainable=True, device="auto").parameters())


def test_heads_must_divide_the_width():
    with pytest.raises(UsageError, match="does not divide into 5 heads"):
        WanModel(dim=96, num_heads=5)


@pytest.mark.parametrize("kind", ["model", "vae"])
def test_flags_are_not_saved(tmp_path, kind):
    if kind == "model":
        model = WanModel(gradient_checkpointing=True, offload_to_cpu=True, device="cpu", **SMALL)
    else:
        model = WanVAE(z_dim=16, base_dim=8, gradient_checkpointing=True)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"gradient_checkpointing", "offload_to_cpu", "model_type", "device"} & set(config)
    loaded = type(model).from_pretrained(tmp_path)
    assert not loaded.is_gradient_checkpointing
    assert not getattr(loaded, "is_offloading", False)
    base = (WanTransformer3DModel if kind == "model" else AutoencoderKLWan).from_pretrained(tmp_path)
    assert config["_class_name"] == type(base).__name__
    assert all(json.dumps(base.config[key]) == json.dumps(value) for key, value in model.config.items())
    values = zip(base.state_dict().values(), model.state_dict().values(), strict=True)
    assert all(torch.equal(left, right) for left, right in values)


def test_a_pipeline_takes_them_and_others_load_what_it_saves(tiny_folder, tmp_path):
    pipeline = WanPipeline.from_pretrained(
        tiny_folder,
        transformer=WanModel.from_checkpoint(tiny_folder / "transformer"),
        vae=WanVAE.from_checkpoint(tiny_folder / "vae"),
    )
    pipeline.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["transformer"] == ["diffusers", "WanTransformer3DModel"]
    assert index["vae"] == ["diffusers", "AutoencoderKLWan"]
    assert type(WanPipeline.from_pretrained(tmp_path).transformer) is WanTransformer3DModel


@pytest.mark.parametrize("offload", [False, True])
def test_checkpointing_the_transformer_keeps_gradients(offload):
    torch.manual_seed(0)
    model = WanModel(**SMALL)
    inputs = (torch.randn(1, 16, 1, 8, 8), torch.tensor([300.0]), torch.randn(1, 4, 32))

    def gradients():
        model.zero_grad()
        model(*inputs, return_dict=False)[0].square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    model.enable_gradient_checkpointing()
    if offload:
        model.enable_offloading("cpu")
    for found, value in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, value)


def test_from_checkpoint_offloaded(tiny_folder):
    plain = WanModel.from_checkpoint(tiny_folder / "transformer")
    streamed = WanModel.from_checkpoint(tiny_folder / "transformer", device="cpu", offload_to_cpu=True)
    inputs = (torch.randn(1, 8, 1, 8, 8), torch.tensor([300.0]), torch.randn(1, 4, 32))
    with torch.no_grad():
        assert torch.equal(plain(*inputs)[0], streamed(*inputs)[0])


def test_functions_take_a_configuration_or_its_fields(tmp_path):
    from wandistiller.config.sample import SampleConfig

    with pytest.raises(UsageError, match="has no field 'promt'; did you mean 'prompt'"):
        sample(promt=("x",))
    with pytest.raises(UsageError, match="steps = 'many' is not a whole number"):
        sample(model="tiny-random", prompt="x", steps="many")
    made = sample(model="tiny-random", prompt="x", steps=1, width=32, height=32, output=str(tmp_path / "x.png"))
    assert made[0].files == (tmp_path / "x.png",)
    with pytest.raises(UsageError, match="Both"):
        sample(SampleConfig(), prompt=("x",))
    with pytest.raises(UsageError, match="--output is missing"):
        export(model="tiny-random")


def test_other_vae_sizes_get_neutral_statistics():
    vae = WanVAE(z_dim=4, base_dim=8)
    assert vae.config.latents_mean == [0.0] * 4
    assert vae.config.latents_std == [1.0] * 4


def test_the_vaes_own_checkpointing_takes_no_other_function():
    with pytest.raises(UsageError, match="its own"):
        WanVAE(z_dim=4, base_dim=8).enable_gradient_checkpointing(torch.utils.checkpoint.checkpoint)
