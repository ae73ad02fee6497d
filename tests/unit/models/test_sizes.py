import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel

from wandistiller.errors import UsageError
from wandistiller.models.sizes import SIZES, find_size

# Parameters of the released transformers, in billions, as their model cards say.
BILLIONS = {"wan2.1-1.3b": 1.42, "wan2.1-14b": 14.29, "wan2.2-5b": 5.00, "wan2.2-a14b": 14.29}


@pytest.mark.parametrize("name", BILLIONS)
def test_a_named_size_has_the_parameters_of_the_released_model(name):
    with torch.device("meta"):
        model = WanTransformer3DModel(**SIZES[name].transformer)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e9 == pytest.approx(BILLIONS[name], abs=0.01)


@pytest.mark.parametrize("name", SIZES)
def test_transformer_and_vae_of_a_size_fit_together(name):
    size = SIZES[name]
    with torch.device("meta"):
        vae = AutoencoderKLWan(**size.vae)
    assert vae.config.z_dim == size.transformer["out_channels"]
    assert len(vae.config.latents_mean) == len(vae.config.latents_std) == vae.config.z_dim
    assert size.width % (2 * size.vae["scale_factor_spatial"]) == 0
    assert size.height % (2 * size.vae["scale_factor_spatial"]) == 0
    assert (size.frames - 1) % size.vae["scale_factor_temporal"] == 0


def test_both_released_vaes():
    small, large = SIZES["wan2.1-14b"].vae, SIZES["wan2.2-5b"].vae
    assert (small["z_dim"], small["scale_factor_spatial"]) == (16, 8)
    assert (large["z_dim"], large["scale_factor_spatial"]) == (48, 16)
    # diffusers' class defaults are those of the 16-channel VAE.
    default = AutoencoderKLWan.__init__.__wrapped__.__defaults__ if hasattr(AutoencoderKLWan.__init__, "__wrapped__") else ()
    assert small["latents_mean"] in list(default)
    assert small["latents_std"] in list(default)


def test_the_two_expert_models():
    assert {name: size.boundary for name, size in SIZES.items() if size.boundary} == {
        "wan2.2-a14b": 0.875,
        "wan2.2-i2v-a14b": 0.9,
    }


def test_an_unknown_size_names_the_nearest():
    with pytest.raises(UsageError, match=r"did you mean 'wan2\.1-14b'"):
        find_size("wan2.1-14")
