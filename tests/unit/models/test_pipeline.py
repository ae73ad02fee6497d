import json
import shutil
from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch
from safetensors.torch import save_file

from wandistiller.errors import CheckpointError, UsageError
from wandistiller.models.pipeline import find_part, find_pipeline
from wandistiller.models.shapes import find_shapes
from wandistiller.models.sizes import HUB_IDS, SIZES


def test_a_diffusers_folder(tiny_folder):
    found = find_pipeline(str(tiny_folder))
    assert found.part("transformer") == tiny_folder / "transformer"
    assert (found.solver, found.shift, found.boundary, found.expand_timesteps) == ("unipc", 3.0, None, False)


def test_two_experts(two_expert_folder):
    found = find_pipeline(str(two_expert_folder))
    assert found.part("transformer_2") == two_expert_folder / "transformer_2"
    assert (found.solver, found.boundary) == ("euler", 0.875)


def test_the_one_of_random_weights_is_the_same_every_time(tiny_folder, tmp_path, tiny_size):
    from wandistiller.models.tiny import write_random_pipeline

    assert find_pipeline("tiny-random").part("vae") == tiny_folder / "vae"
    write_random_pipeline(tmp_path / "again", tiny_size)
    name = "transformer/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (tiny_folder / name).read_bytes()


def test_a_folder_of_original_files(tmp_path):
    (tmp_path / "config.json").write_text('{"_class_name": "WanModel", "model_type": "ti2v", "dim": 3072, "num_heads": 24}')
    (tmp_path / "Wan2.2_VAE.pth").write_bytes(b"")
    found = find_pipeline(str(tmp_path))
    assert found.part("transformer") == tmp_path
    assert found.part("vae") == tmp_path / "Wan2.2_VAE.pth"
    assert found.expand_timesteps


def test_original_experts(tmp_path):
    for name in ("high_noise_model", "low_noise_model"):
        (tmp_path / name).mkdir()
    found = find_pipeline(str(tmp_path))
    assert found.part("transformer_2") == tmp_path / "low_noise_model"


def test_a_part_that_is_not_there_is_named(tmp_path):
    (tmp_path / "high_noise_model").mkdir()
    (tmp_path / "low_noise_model").mkdir()
    with pytest.raises(CheckpointError, match="has no text encoder"):
        find_pipeline(str(tmp_path)).part("text_encoder")


def test_a_pipeline_of_another_family(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(CheckpointError, match="is a FluxPipeline, not a Wan pipeline"):
        find_pipeline(str(tmp_path))


@pytest.mark.parametrize("content", ["not json", "[]"])
def test_a_damaged_index(tmp_path, content):
    (tmp_path / "model_index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model_index\.json"):
        find_pipeline(str(tmp_path))


def test_a_folder_that_is_no_pipeline(tmp_path):
    with pytest.raises(CheckpointError, match="is not a Wan pipeline"):
        find_pipeline(str(tmp_path))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("tyni", "did you mean 'tiny'"),
        ("wan2.1-14b", "is the name of a size"),
        ("no/such-model", "could it be fetched"),
        ("./nowhere/at/all", "neither a folder here"),
    ],
)
def test_a_source_that_is_not_there(source, message):
    with pytest.raises(UsageError, match=message):
        find_pipeline(source)


def test_a_file_is_not_a_pipeline(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(UsageError, match="--checkpoint"):
        find_pipeline(str(tmp_path / "x.safetensors"))


@pytest.fixture
def hub(tiny_folder, tmp_path, monkeypatch):
    """A hub whose every repository is the tiny pipeline; gives the names that were asked for."""
    asked = []

    def snapshot_download(repo, allow_patterns):
        asked.append(repo)
        for file in tiny_folder.rglob("*"):
            name = str(file.relative_to(tiny_folder))
            if file.is_file() and any(fnmatch(name, pattern) for pattern in allow_patterns):
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, tmp_path / name)
        return str(tmp_path)

    def try_to_load_from_cache(repo, name):
        return str(tmp_path / name) if (tmp_path / name).exists() else None

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", try_to_load_from_cache)
    return asked


def test_shapes_of_a_model_of_the_hub_are_those_of_its_configurations(hub, tiny_folder, tmp_path):
    for _ in range(2):  # what is fetched does not make it look as if its weights were here
        assert find_shapes("someone/tiny-wan") == replace(find_shapes(str(tiny_folder)), stored_dtype=None)
    assert hub == ["someone/tiny-wan"] * 2 and not list(tmp_path.rglob("*.safetensors"))
    find_pipeline("someone/tiny-wan", {"transformer", "vae", "text_encoder"})
    assert find_shapes("someone/tiny-wan").stored_dtype is not None, "weights that are here are looked at"


def test_only_the_parts_that_a_job_needs_are_fetched_from_a_hub(hub, tmp_path):
    found = find_pipeline("someone/tiny-wan", {"transformer", "transformer_2"})
    assert hub == ["someone/tiny-wan"]
    assert set(found.parts) == {"transformer", "scheduler"}
    assert not (tmp_path / "vae").exists()
    assert not (tmp_path / "text_encoder").exists()


def test_hub_names_are_complete():
    released = [name for name in SIZES if not name.startswith("tiny")]
    assert set(HUB_IDS) == set(released) and all(hub.startswith("Wan-AI/Wan2.") for hub in HUB_IDS.values())


def test_the_index_of_the_tiny_pipeline_names_diffusers_classes(tiny_folder):
    index = json.loads((tiny_folder / "model_index.json").read_text())
    assert index["transformer"] == ["diffusers", "WanTransformer3DModel"]
    assert index["vae"] == ["diffusers", "AutoencoderKLWan"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"solver_order": 3}, "solver_order = 3"),
        ({"disable_corrector": [0, 1]}, "disable_corrector"),
        ({"final_sigmas_type": "sigma_min"}, "final_sigmas_type"),
        ({"use_flow_sigmas": False}, "use_flow_sigmas = False"),
        ({"num_train_timesteps": 500}, "num_train_timesteps = 500"),
        ({"use_karras_sigmas": True}, "use_karras_sigmas"),
        ({"_class_name": "DPMSolverMultistepScheduler"}, "DPMSolverMultistepScheduler"),
        ({"flow_shift": "x"}, "shift is 'x'"),
    ],
)
def test_a_scheduler_that_draws_something_else_is_named(tiny_folder, tmp_path, change, message):
    shutil.copytree(tiny_folder, tmp_path / "pipeline")
    file = tmp_path / "pipeline" / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    found = find_pipeline(str(tmp_path / "pipeline"))
    with pytest.raises(CheckpointError, match=message):
        print(found.solver, found.shift)


def test_one_part_of_whatever_a_user_points_at(tiny_folder):
    assert find_part("tiny-random", "vae") == tiny_folder / "vae"
    assert find_part(str(tiny_folder), "transformer") == tiny_folder / "transformer"
    assert find_part(str(tiny_folder / "vae"), "vae") == tiny_folder / "vae"
