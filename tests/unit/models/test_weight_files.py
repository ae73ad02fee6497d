import json
import pickle
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from wandistiller.errors import CheckpointError, OutputError
from wandistiller.models.weight_files import Planned, open_weights, write_safetensors

TENSORS = {
    "a": torch.randn(3, 5),
    "b": torch.randn(7, dtype=torch.bfloat16),
    "c": torch.arange(4),
    "d": torch.randn(2, 2).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
}


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and left.float().equal(right.float())


def planned(tensors):
    return [Planned(name, value.dtype, tuple(value.shape), lambda value=value: value) for name, value in tensors.items()]


def test_what_the_library_writes_is_read(tmp_path):
    save_file(TENSORS, tmp_path / "w.safetensors", metadata={"format": "pt", "note": "x"})
    weights = open_weights(tmp_path / "w.safetensors")
    assert weights.metadata["note"] == "x"
    assert set(weights.entries) == set(TENSORS)
    assert all(same(weights.read(name), value) for name, value in TENSORS.items())


def test_what_is_written_the_library_reads(tmp_path):
    write_safetensors(tmp_path / "w.safetensors", planned(TENSORS), {"note": "x"})
    loaded = load_file(tmp_path / "w.safetensors")
    assert all(same(loaded[name], value) for name, value in TENSORS.items())
    assert [file.name for file in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_failed_write_leaves_nothing_and_keeps_what_was_there(tmp_path):
    target = tmp_path / "w.safetensors"
    write_safetensors(target, planned({"a": torch.ones(2)}))

    def fail():
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match="No space left"):
        write_safetensors(target, [Planned("a", torch.float32, (2,), fail)])
    assert [file.name for file in tmp_path.iterdir()] == ["w.safetensors"]
    assert load_file(target)["a"].equal(torch.ones(2))


def test_a_wrong_shape_is_not_written(tmp_path):
    with pytest.raises(OutputError, match="planned was"):
        write_safetensors(tmp_path / "w.safetensors", [Planned("a", torch.float32, (2,), lambda: torch.ones(3))])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_truncated_file_is_found_from_its_header(tmp_path, keep):
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.randn(100)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"w\.safetensors is damaged"):
        open_weights(path)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1, 2]",
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [4]}}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}',
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": ["0", "16"]}}',
        b'{"a": {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}}',
    ],
)
def test_a_corrupt_header_is_an_error(tmp_path, header):
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(CheckpointError, match="damaged"):
        open_weights(path)


def test_an_unknown_dtype_is_named(tmp_path):
    path = tmp_path / "w.safetensors"
    header = b'{"layer.weight": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}'
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(2))
    with pytest.raises(CheckpointError, match=r"'layer\.weight' as F4"):
        open_weights(path)


class Evil:
    def __reduce__(self):
        return (print, ("code has run",))


def test_a_pickle_that_runs_code_is_refused(tmp_path, capsys):
    path = tmp_path / "model.pth"
    torch.save({"a": Evil()}, path)
    with pytest.raises(CheckpointError, match="would run code"):
        open_weights(path)
    assert "code has run" not in capsys.readouterr().out


def test_a_pickle_under_another_name_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps({"a": 1}, protocol=2))
    with pytest.raises(CheckpointError, match="pickle with the name"):
        open_weights(path)


def test_a_header_whose_length_begins_like_a_pickle_is_read(tmp_path):
    path = tmp_path / "w.safetensors"
    header = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'.ljust(0x0280)
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 2.5))
    assert open_weights(path).read("a").item() == 2.5


@pytest.mark.parametrize("wrapper", [None, "state_dict"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_legacy_file_of_tensors_is_read(tmp_path, wrapper, is_zip):
    path = tmp_path / "model.pth"
    content = {"a": torch.randn(3, 4).T}
    torch.save({wrapper: content} if wrapper else content, path, _use_new_zipfile_serialization=is_zip)
    weights = open_weights(path)
    assert weights.read("a").equal(content["a"])
    assert weights.read("a").is_contiguous()


def test_a_legacy_file_without_tensors_is_an_error(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match="no dictionary of tensors"):
        open_weights(tmp_path / "model.pth")


def write_shards(folder, weight_map=None):
    save_file({"a": torch.ones(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.ones(3)}, folder / "model-2.safetensors")
    weight_map = weight_map or {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


def test_shards_by_index_and_by_folder(tmp_path):
    index = write_shards(tmp_path)
    assert set(open_weights(index).entries) == {"a", "b"}
    assert set(open_weights(tmp_path).entries) == {"a", "b"}
    index.unlink()
    assert set(open_weights(tmp_path).entries) == {"a", "b"}


@pytest.mark.parametrize("outside", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "a\\b"])
def test_an_index_that_points_outside_its_folder_is_refused(tmp_path, outside):
    index = write_shards(tmp_path, {"a": "model-1.safetensors", "b": outside})
    with pytest.raises(CheckpointError, match="points outside its folder"):
        open_weights(index)


def test_a_missing_shard_is_named(tmp_path):
    index = write_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors"):
        open_weights(index)


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path):
    index = write_shards(tmp_path, {"a": "model-2.safetensors", "b": "model-2.safetensors", "x": "model-1.safetensors"})
    with pytest.raises(CheckpointError, match="disagree about 2 tensors: a, x"):
        open_weights(index)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    write_shards(tmp_path).unlink()
    save_file({"a": torch.ones(2)}, tmp_path / "model-3.safetensors")
    with pytest.raises(CheckpointError, match="repeats tensors of another shard: a"):
        open_weights(tmp_path)


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_weights(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_weights(tmp_path)


@pytest.mark.parametrize("content", [b"", b"some text", bytes(range(256)), pickle.dumps({"a": 1}, protocol=4)])
def test_a_damaged_legacy_file_is_not_called_malicious(tmp_path, content):
    (tmp_path / "model.pth").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not a readable PyTorch file|no dictionary of tensors"):
        open_weights(tmp_path / "model.pth")


def test_an_index_that_is_a_list(tmp_path):
    (tmp_path / "m.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not a shard index"):
        open_weights(tmp_path)


def test_a_transformers_files_are_told_from_a_vae_beside_them(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "diffusion_pytorch_model.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "Wan2.1_VAE.safetensors")
    assert set(open_weights(tmp_path).entries) == {"a"}
