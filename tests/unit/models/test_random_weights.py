"""Random weights in files are those in memory."""

from safetensors.torch import load_file
from torch import nn

from wandistiller.models import random_weights
from wandistiller.models.random_weights import RandomWeights, write_weights
from wandistiller.models.weight_files import open_weights


def test_shards_hold_every_tensor_once_in_order(tmp_path, monkeypatch):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    weights = RandomWeights(model)
    monkeypatch.setattr(random_weights, "_SHARD_BYTES", 2 * (64 + 16))
    files = write_weights(weights, model.state_dict(), tmp_path)
    assert [file.name for file in files] == [f"diffusion_pytorch_model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    found = [load_file(file) for file in files]
    assert [len(each) for each in found] == [4, 4, 2]
    for name, value in {**found[0], **found[1], **found[2]}.items():
        assert value.equal(weights(name)) and weights.num_bytes(name) == value.nbytes
    assert open_weights(tmp_path).entries.keys() == model.state_dict().keys()
