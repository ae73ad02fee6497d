"""``sample`` draws what ``diffusers.WanPipeline`` draws, from the same weights, seed, steps, shift and guidance."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image

from wandistiller.api import sample

COMMON = {"width": 64, "height": 48, "dtype": "float32", "device": "cpu", "seed": 11}


def draw(folder, prompt, frames, steps, **options):
    """Return the latents that diffusers arrives at."""
    pipeline = WanPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompt=prompt,
        height=COMMON["height"],
        width=COMMON["width"],
        num_frames=frames,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(COMMON["seed"]),
        output_type="latent",
        **options,
    ).frames[0]


@pytest.mark.parametrize("frames", [1, 9])
def test_one_transformer_with_the_pipelines_own_unipc(tiny_folder, tmp_path, frames):
    ours = sample(
        model=str(tiny_folder),
        prompt=("a red ball",),
        frames=frames,
        steps=6,
        cfg_scale=4.0,
        output=tmp_path / "latents.safetensors",
        **COMMON,
    )
    expected = draw(tiny_folder, "a red ball", frames, 6, guidance_scale=4.0)
    torch.testing.assert_close(ours[0].latents, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shift", [1.0, 8.0])
def test_another_shift_and_no_guidance(tiny_folder, tmp_path, shift):
    pipeline = WanPipeline.from_pretrained(tiny_folder)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = UniPCMultistepScheduler.from_config(pipeline.scheduler.config, flow_shift=shift)
    expected = pipeline(
        prompt="blue",
        height=48,
        width=64,
        num_frames=5,
        num_inference_steps=4,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(11),
        output_type="latent",
    ).frames[0]
    ours = sample(
        model=str(tiny_folder),
        prompt=("blue",),
        frames=5,
        steps=4,
        cfg_scale=1.0,
        sigma_shift=shift,
        output=tmp_path / "latents.safetensors",
        **COMMON,
    )
    torch.testing.assert_close(ours[0].latents, expected, rtol=1e-5, atol=1e-5)


def test_a_model_that_can_take_a_first_frame_draws_without_one_in_the_memory_of_any_other(tiny_folder, tmp_path, monkeypatch):
    """diffusers gives each token a timestep of its own there, and so gigabytes to what blocks are modulated with."""
    folder = tmp_path / "pipeline"
    pipeline = WanPipeline.from_pretrained(tiny_folder)
    pipeline.register_to_config(expand_timesteps=True)
    pipeline.save_pretrained(folder)
    expected = draw(folder, "a red ball", 9, 4, guidance_scale=4.0)
    shapes, forward = [], WanTransformer3DModel.forward

    def look(model, *args, **options):
        shapes.append(tuple(options["timestep"].shape))
        return forward(model, *args, **options)

    monkeypatch.setattr(WanTransformer3DModel, "forward", look)
    output = tmp_path / "latents.safetensors"
    ours = sample(model=str(folder), prompt=("a red ball",), frames=9, steps=4, cfg_scale=4.0, output=output, **COMMON)
    torch.testing.assert_close(ours[0].latents, expected, rtol=1e-5, atol=1e-5)
    assert set(shapes) == {(1,)}


def test_two_experts_with_euler_and_two_guidance_scales(two_expert_folder, tmp_path):
    ours = sample(
        model=str(two_expert_folder),
        prompt=("two",),
        frames=5,
        steps=8,
        cfg_scale=4.0,
        cfg_scale_2=2.5,
        output=tmp_path / "latents.safetensors",
        **COMMON,
    )
    expected = draw(two_expert_folder, "two", 5, 8, guidance_scale=4.0, guidance_scale_2=2.5)
    torch.testing.assert_close(ours[0].latents, expected, rtol=1e-5, atol=1e-5)


def test_the_boundary_decides_which_expert_draws(two_expert_folder, tmp_path):
    """With the boundary of another model the same experts draw something else, and so does diffusers."""
    options = {"model": str(two_expert_folder), "prompt": ("two",), "frames": 1, "steps": 8, "cfg_scale": 1.0, **COMMON}
    usual = sample(output=tmp_path / "a.safetensors", **options)[0].latents
    other = sample(output=tmp_path / "b.safetensors", boundary=0.5, **options)[0].latents
    assert not torch.allclose(usual, other, atol=1e-3)
    pipeline = WanPipeline.from_pretrained(two_expert_folder)
    pipeline.register_to_config(boundary_ratio=0.5)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        prompt="two",
        height=48,
        width=64,
        num_frames=1,
        num_inference_steps=8,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(11),
        output_type="latent",
    ).frames[0]
    torch.testing.assert_close(other, expected, rtol=1e-5, atol=1e-5)


def test_the_picture_is_that_of_diffusers(tiny_folder, tmp_path):
    """Pixels too: latents are denormalised with the VAE's statistics before they are decoded."""
    statistics = {"latents_mean": [0.3 * i for i in range(8)], "latents_std": [0.5 + 0.2 * i for i in range(8)]}
    pipeline = WanPipeline.from_pretrained(tiny_folder)
    vae = AutoencoderKLWan(**{**pipeline.vae.config, **statistics})
    vae.load_state_dict(pipeline.vae.state_dict())
    pipeline.register_modules(vae=vae)
    pipeline.save_pretrained(tmp_path / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        prompt="c",
        height=48,
        width=64,
        num_frames=1,
        num_inference_steps=3,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(11),
        output_type="pil",
    ).frames[0][0]
    sample(model=str(tmp_path / "pipeline"), prompt=("c",), steps=3, cfg_scale=1.0, output=tmp_path / "c.png", **COMMON)
    ours = np.asarray(Image.open(tmp_path / "c.png"), dtype=int)
    assert np.abs(ours - np.asarray(expected, dtype=int)).max() <= 1


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("picture") / "first.png"
    pixels = np.random.default_rng(0).integers(0, 255, (96, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((200, 150)).save(path)
    return path


def image_pipeline(tiny_folder, folder, *, transformer, vae=None, expand=False, clip=False, experts=1):
    """Save an image-to-video pipeline with the tiny pipeline's text encoder."""
    base = WanPipeline.from_pretrained(tiny_folder)
    torch.manual_seed(5)
    parts = {}
    if clip:
        from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

        vision = CLIPVisionConfig(
            hidden_size=24, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=224, patch_size=56
        )
        parts = {"image_encoder": CLIPVisionModel(vision).eval(), "image_processor": CLIPImageProcessor()}
    models = [WanTransformer3DModel(**{**base.transformer.config, **transformer}) for _ in range(experts)]
    pipeline = WanImageToVideoPipeline(
        tokenizer=base.tokenizer,
        text_encoder=base.text_encoder,
        vae=vae or base.vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=models[0],
        transformer_2=models[1] if experts == 2 else None,
        boundary_ratio=0.9 if experts == 2 else None,
        expand_timesteps=expand,
        **parts,
    )
    pipeline.save_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("kind", ["wan2.1", "wan2.2-a14b", "wan2.2-5b"])
def test_image_to_video(tiny_folder, tmp_path, picture, kind):
    options = {
        "wan2.1": {"transformer": {"in_channels": 20, "image_dim": 24, "added_kv_proj_dim": 96}, "clip": True},
        "wan2.2-a14b": {"transformer": {"in_channels": 20}, "experts": 2},
        "wan2.2-5b": {"transformer": {}, "expand": True},
    }[kind]
    pipeline = image_pipeline(tiny_folder, tmp_path / "pipeline", **options)
    expected = pipeline(
        image=Image.open(picture),
        prompt="it moves",
        height=48,
        width=64,
        num_frames=9,
        num_inference_steps=4,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(11),
        output_type="latent",
    ).frames[0]
    ours = sample(
        model=str(tmp_path / "pipeline"),
        image=picture,
        prompt=("it moves",),
        frames=9,
        steps=4,
        cfg_scale=3.0,
        output=tmp_path / "latents.safetensors",
        **COMMON,
    )
    torch.testing.assert_close(ours[0].latents, expected, rtol=1e-5, atol=1e-5)


def test_tiles_draw_the_same_picture(tiny_folder, tmp_path):
    drawn = {}
    for tiled in (False, True):
        path, size = tmp_path / f"{tiled}.png", {"width": 224, "height": 48}
        sample(model=str(tiny_folder), prompt=("c",), steps=1, output=path, vae_tiling=tiled, **{**COMMON, **size})
        drawn[tiled] = np.asarray(Image.open(path), dtype=int)
    assert np.abs(drawn[True] - drawn[False]).max() <= 1  # of 255: where rounding tips


@pytest.mark.parametrize("expand", [True, False])
def test_tiles_read_the_same_first_frame(tiny_folder, tmp_path, picture, monkeypatch, expand):
    image_pipeline(tiny_folder, tmp_path / "pipeline", transformer={} if expand else {"in_channels": 20}, expand=expand)
    options = {"image": picture, "prompt": ("it moves",), "frames": 5, "steps": 1, "output": tmp_path / "latents.safetensors"}
    options |= {**COMMON, "width": 224}
    plain = sample(model=str(tmp_path / "pipeline"), **options)[0].latents
    monkeypatch.setattr(AutoencoderKLWan, "encode", lambda *args, **kwargs: pytest.fail("the frame was not cut"))
    tiled = sample(model=str(tmp_path / "pipeline"), vae_tiling=True, **options)[0].latents
    torch.testing.assert_close(tiled, plain, rtol=1e-5, atol=1e-5)


def test_samples_do_not_depend_on_what_is_drawn_beside_them(tiny_folder, tmp_path):
    options = {"model": str(tiny_folder), "steps": 3, "cfg_scale": 2.0, **COMMON}
    both = sample(prompt=("one", "two"), batch_size=2, output=tmp_path / "both.safetensors", **options)
    alone = sample(prompt=("two",), output=tmp_path / "alone.safetensors", **{**options, "seed": 12})
    assert [(item.prompt, item.seed) for item in both] == [("one", 11), ("one", 12), ("two", 11), ("two", 12)]
    torch.testing.assert_close(both[3].latents, alone[0].latents, rtol=1e-5, atol=1e-5)


def test_single_files_draw_what_their_pipeline_draws(tiny_folder, tmp_path):
    from safetensors.torch import save_file

    from wandistiller.api import export
    from wandistiller.models.text import encode_prompts

    export(model=str(tiny_folder), output=tmp_path / "files", format="comfyui")
    text = encode_prompts(
        tiny_folder / "text_encoder", tiny_folder / "tokenizer", ["hi", ""], device="cpu", dtype=torch.float32
    )
    save_file({"embeddings": text[0, :3].clone()}, tmp_path / "cond.safetensors")  # "hi" and its end; the rest is padding
    save_file({"embeddings": text[1:, :1].clone()}, tmp_path / "uncond.safetensors")
    options = {"steps": 3, "cfg_scale": 2.0, "sigma_shift": 3.0, **COMMON}
    whole = sample(model=str(tiny_folder), prompt=("hi",), output=tmp_path / "a.png", **options)
    files = sample(
        checkpoint=tmp_path / "files" / "transformer.safetensors",
        vae_checkpoint=tmp_path / "files" / "vae.safetensors",
        cond=tmp_path / "cond.safetensors",
        uncond=tmp_path / "uncond.safetensors",
        output=tmp_path / "b.png",
        **options,
    )
    torch.testing.assert_close(files[0].latents, whole[0].latents, rtol=1e-5, atol=1e-5)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), np.asarray(Image.open(tmp_path / "b.png")))


@pytest.mark.parametrize("placement", ["auto", "cpu", "offload", "disk", "balanced", "sequential", "custom"])
def test_every_placement_draws_the_same(tiny_folder, tmp_path, monkeypatch, placement):
    """Here the device is a CPU, which is asked to stream all the same.

    Weights that are mapped from files lie at odd addresses, where the products of some CPUs round otherwise, so what copies its
    weights is compared with a model whose weights are copied.
    """
    from wandistiller.sample import sampler

    options = {"model": str(tiny_folder), "prompt": ("x",), "steps": 3, "cfg_scale": 2.0, **COMMON}
    with monkeypatch.context() as context:
        if placement not in ("auto", "cpu"):
            context.setattr("wandistiller.memory.placement._mapped", lambda entry, maps: None)
        resident = sample(output=tmp_path / "a.safetensors", **options)[0].latents
    monkeypatch.setattr(sampler, "placement_name", lambda job: placement)
    if placement == "custom":
        (tmp_path / "map.json").write_text('{"": "cpu", "blocks": {"0": "disk"}}')
        options |= {"device_map": tmp_path / "map.json"}
    placed = sample(output=tmp_path / "b.safetensors", placement=placement, **options)[0].latents
    assert torch.equal(resident, placed)


def test_two_experts_with_unipc(two_expert_folder, tmp_path):
    """The solver's memory of earlier steps spans the change of experts."""
    pipeline = WanPipeline.from_pretrained(two_expert_folder)
    pipeline.scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
    )
    pipeline.save_pretrained(tmp_path / "pipeline")
    expected = draw(tmp_path / "pipeline", "two", 5, 8, guidance_scale=4.0)
    options = {"prompt": "two", "frames": 5, "steps": 8, "cfg_scale": 4.0, **COMMON}
    ours = sample(model=str(tmp_path / "pipeline"), output=tmp_path / "a.safetensors", **options)
    torch.testing.assert_close(ours[0].latents, expected, rtol=1e-5, atol=1e-5)
    # The first expert given once more by hand is the same model.
    again = sample(
        model=str(tmp_path / "pipeline"),
        checkpoint=tmp_path / "pipeline" / "transformer",
        output=tmp_path / "b.safetensors",
        **options,
    )
    assert torch.equal(again[0].latents, ours[0].latents)


def test_numbers_that_are_not_finite_are_not_written(tiny_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    from wandistiller.errors import OutputError

    shutil.copytree(tiny_folder, tmp_path / "pipeline")
    file = tmp_path / "pipeline" / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["proj_out.bias"][0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(OutputError, match="not finite"):
        sample(model=str(tmp_path / "pipeline"), prompt="x", steps=1, output=tmp_path / "x.png", **COMMON)
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_channels": 16}, "8 extra channels"),
        ({"in_channels": 20, "image_dim": 24, "added_kv_proj_dim": 96, "pos_embed_seq_len": 514}, "first and last frame"),
        ({"in_channels": 20}, "no picture was given"),
    ],
)
def test_checkpoints_that_take_more_than_text_say_so(tiny_folder, tmp_path, change, message):
    from wandistiller.errors import UsageError

    config = WanTransformer3DModel.load_config(tiny_folder / "transformer")
    WanTransformer3DModel.from_config({**config, **change}).save_pretrained(tmp_path / "transformer")
    with pytest.raises(UsageError, match=message):
        sample(model="tiny-random", checkpoint=tmp_path / "transformer", prompt="x", output=tmp_path / "x.png", **COMMON)


def test_the_same_seed_gives_the_same_clip(tiny_folder, tmp_path):
    for name in ("a.mp4", "b.mp4"):
        sample(model=str(tiny_folder), prompt="x", steps=2, frames=5, output=tmp_path / name, **COMMON)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
