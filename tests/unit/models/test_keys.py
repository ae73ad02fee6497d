"""Key names: both ways, for every size, against diffusers' own converters and the names in the public Wan code."""

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers, convert_wan_vae_to_diffusers

from wandistiller.errors import CheckpointError
from wandistiller.models import transformer_keys, vae_keys
from wandistiller.models.sizes import SIZES

I2V = {**SIZES["wan2.1-14b"].transformer, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
TRANSFORMERS = {
    **{name: dict(size.transformer) for name, size in SIZES.items()},
    "wan2.1-i2v-14b": I2V,
    "wan2.1-flf2v-14b": {**I2V, "pos_embed_seq_len": 514},
    "wan2.2-i2v-a14b": {**SIZES["wan2.2-a14b"].transformer, "in_channels": 36},
}
VAES = {name: dict(SIZES[name].vae) for name in ("wan2.1-14b", "wan2.2-5b", "tiny")}

# As `wan/modules/model.py` of the public Wan code names its parameters (first block of an image-to-video model).
PUBLIC_TRANSFORMER_KEYS = """
patch_embedding.weight patch_embedding.bias text_embedding.0.weight text_embedding.0.bias text_embedding.2.weight
text_embedding.2.bias time_embedding.0.weight time_embedding.0.bias time_embedding.2.weight time_embedding.2.bias
time_projection.1.weight time_projection.1.bias blocks.0.modulation blocks.0.self_attn.q.weight blocks.0.self_attn.q.bias
blocks.0.self_attn.k.weight blocks.0.self_attn.k.bias blocks.0.self_attn.v.weight blocks.0.self_attn.v.bias
blocks.0.self_attn.o.weight blocks.0.self_attn.o.bias blocks.0.self_attn.norm_q.weight blocks.0.self_attn.norm_k.weight
blocks.0.norm3.weight blocks.0.norm3.bias blocks.0.cross_attn.q.weight blocks.0.cross_attn.q.bias
blocks.0.cross_attn.k.weight blocks.0.cross_attn.k.bias blocks.0.cross_attn.v.weight blocks.0.cross_attn.v.bias
blocks.0.cross_attn.o.weight blocks.0.cross_attn.o.bias blocks.0.cross_attn.norm_q.weight
blocks.0.cross_attn.norm_k.weight blocks.0.cross_attn.k_img.weight blocks.0.cross_attn.k_img.bias
blocks.0.cross_attn.v_img.weight blocks.0.cross_attn.v_img.bias blocks.0.cross_attn.norm_k_img.weight
blocks.0.ffn.0.weight blocks.0.ffn.0.bias blocks.0.ffn.2.weight blocks.0.ffn.2.bias head.modulation head.head.weight
head.head.bias img_emb.proj.0.weight img_emb.proj.0.bias img_emb.proj.1.weight img_emb.proj.1.bias img_emb.proj.3.weight
img_emb.proj.3.bias img_emb.proj.4.weight img_emb.proj.4.bias img_emb.emb_pos
""".split()
# As `wan/modules/vae2_2.py` names a few of its parameters, one of each kind.
PUBLIC_VAE22_KEYS = """
conv1.weight conv2.bias encoder.conv1.weight encoder.downsamples.0.downsamples.0.residual.0.gamma
encoder.downsamples.1.downsamples.0.shortcut.weight encoder.downsamples.1.downsamples.2.time_conv.weight
encoder.downsamples.0.downsamples.2.resample.1.bias encoder.middle.0.residual.2.weight encoder.middle.1.to_qkv.weight
encoder.middle.2.residual.6.bias encoder.head.0.gamma encoder.head.2.weight decoder.conv1.weight
decoder.middle.1.proj.bias decoder.upsamples.0.upsamples.2.residual.3.gamma
decoder.upsamples.0.upsamples.3.resample.1.weight decoder.upsamples.1.upsamples.3.time_conv.bias
decoder.upsamples.3.upsamples.2.residual.6.weight decoder.head.2.bias
""".split()


def shapes_of(model_class, config):
    with torch.device("meta"):
        return {key: tuple(value.shape) for key, value in model_class(**config).state_dict().items()}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformer_keys_go_to_original_and_back(name):
    shapes = shapes_of(WanTransformer3DModel, TRANSFORMERS[name])
    original = {key: transformer_keys.to_original(key) for key in shapes}
    assert None not in original.values()
    assert len(set(original.values())) == len(shapes)
    assert all(transformer_keys.to_diffusers(public) == key for key, public in original.items())


@pytest.mark.parametrize("name", [name for name in TRANSFORMERS if "flf2v" not in name])
def test_transformer_keys_are_those_that_diffusers_converts(name):
    shapes = shapes_of(WanTransformer3DModel, TRANSFORMERS[name])
    original = {transformer_keys.to_original(key): shape for key, shape in shapes.items()}
    assert convert_wan_transformer_to_diffusers(original) == shapes


def test_transformer_keys_are_those_of_the_public_code():
    shapes = shapes_of(WanTransformer3DModel, {**TRANSFORMERS["wan2.1-flf2v-14b"], "num_layers": 1})
    assert {transformer_keys.to_original(key) for key in shapes} == set(PUBLIC_TRANSFORMER_KEYS)


@pytest.mark.parametrize("name", [name for name in TRANSFORMERS if not name.startswith("tiny")])
def test_the_configuration_is_read_from_the_shapes(name):
    config = TRANSFORMERS[name]
    found = transformer_keys.infer_config(shapes_of(WanTransformer3DModel, config), "x")
    assert {**found, "patch_size": tuple(found["patch_size"])} == config


def test_heads_that_shapes_do_not_tell_are_asked_for():
    shapes = shapes_of(WanTransformer3DModel, TRANSFORMERS["tiny"])
    with pytest.raises(CheckpointError, match=r"config\.json"):
        transformer_keys.infer_config(shapes, "x")


@pytest.mark.parametrize("key", ["blocks.0.mystery.weight", "vace_blocks.0.after_proj.weight", "blocks.0.attn1.extra.weight"])
def test_a_strange_key_has_no_translation(key):
    assert transformer_keys.to_original(key) is None
    assert transformer_keys.to_diffusers(key) is None


@pytest.mark.parametrize("name", VAES)
def test_vae_keys_have_one_original_name_each(name):
    config = VAES[name]
    shapes = shapes_of(AutoencoderKLWan, config)
    original = {vae_keys.to_original(key, config["num_res_blocks"], config["is_residual"]) for key in shapes}
    assert None not in original
    assert len(original) == len(shapes)


def test_vae_keys_are_those_that_diffusers_converts():
    shapes = shapes_of(AutoencoderKLWan, VAES["wan2.1-14b"])
    original = {vae_keys.to_original(key, 2, False): shape for key, shape in shapes.items()}
    assert convert_wan_vae_to_diffusers(original) == shapes


def test_vae_keys_of_the_48_channel_vae_are_those_of_the_public_code():
    original = {vae_keys.to_original(key, 2, True) for key in shapes_of(AutoencoderKLWan, VAES["wan2.2-5b"])}
    assert set(PUBLIC_VAE22_KEYS) <= original


@pytest.mark.parametrize("dialect", ["diffusers", "original"])
@pytest.mark.parametrize("name", ["wan2.1-14b", "wan2.2-5b"])
def test_the_vae_configuration_is_read_from_the_shapes(name, dialect):
    config = VAES[name]
    shapes = shapes_of(AutoencoderKLWan, config)
    if dialect == "original":
        shapes = {vae_keys.to_original(key, 2, config["is_residual"]): shape for key, shape in shapes.items()}
    assert vae_keys.infer_config(shapes, "x") == config


def test_unknown_latent_statistics_are_asked_for():
    with pytest.raises(CheckpointError, match="latents_mean"):
        vae_keys.infer_config(shapes_of(AutoencoderKLWan, VAES["tiny"]), "x")
