"""What a result has in common with the model that it was made of."""

import json

import pytest

from wandistiller.checkpoint.trained import write_pipeline
from wandistiller.models.pipeline import Pipeline

LARGE = bytes(3 << 20)


@pytest.fixture
def base(tmp_path):
    """A pipeline with a part that is kept, with weights, configurations, and a vocabulary as large as weights."""
    folder = tmp_path / "base"
    for name in ("transformer", "text_encoder"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text('{"width": 1}')
    (folder / "model_index.json").write_text("{}")
    (folder / "text_encoder" / "model.safetensors").write_bytes(LARGE)
    (folder / "text_encoder" / "small.safetensors").write_bytes(b"1")
    (folder / "text_encoder" / "tokenizer.json").write_bytes(LARGE)
    return Pipeline(source=str(folder), folder=folder, parts={each.name: each for each in folder.iterdir() if each.is_dir()})


def write(target, pipeline):
    write_pipeline(target, pipeline, {"transformer": lambda folder: folder.mkdir()})


def test_a_configuration_that_is_edited_in_place_leaves_the_base_model_as_it_is(base, tmp_path):
    write(tmp_path / "model", base)
    for path in (tmp_path / "model").rglob("*.json"):
        with path.open("r+") as file:  # the same file with other content, as editors and scripts write it
            file.write(json.dumps({"width": 2}))
    with (tmp_path / "model" / "text_encoder" / "small.safetensors").open("r+b") as file:
        file.write(b"2")
    kept = base.folder / "text_encoder"
    assert (kept / "config.json").read_text() == '{"width": 1}'
    assert (base.folder / "model_index.json").read_text() == "{}"
    assert (kept / "tokenizer.json").read_bytes() == LARGE
    assert (kept / "small.safetensors").read_bytes() == b"1"


def test_large_weights_take_no_room_again(base, tmp_path):
    write(tmp_path / "model", base)
    names = {path.name for path in (tmp_path / "model").rglob("*") if path.is_file() and path.stat().st_nlink > 1}
    assert names == {"model.safetensors"}


def test_weights_are_copied_where_they_cannot_be_linked(base, tmp_path, monkeypatch):
    def refuse(*paths):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    write(tmp_path / "model", base)
    copy = tmp_path / "model" / "text_encoder" / "model.safetensors"
    assert copy.read_bytes() == LARGE and copy.stat().st_nlink == 1


def test_the_links_of_a_hub_are_followed(base, tmp_path):
    """Its snapshots are links to blobs, whose names say nothing of what they are."""
    for number, path in enumerate((base.folder / "text_encoder").iterdir()):
        blob = path.rename(tmp_path / f"blob-{number}")
        path.symlink_to(blob)
    write(tmp_path / "model", base)
    found = tmp_path / "model" / "text_encoder"
    assert not any(path.is_symlink() for path in found.iterdir())
    assert (found / "model.safetensors").stat().st_nlink == 2 and (found / "config.json").stat().st_nlink == 1
