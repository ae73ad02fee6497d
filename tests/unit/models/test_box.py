"""What the package ships with: a small trained pipeline, and how it was made; or a clear word that it is not there."""

import json
import re

import pytest

from wandistiller.errors import UsageError
from wandistiller.models import box
from wandistiller.models.pipeline import find_part, find_pipeline
from wandistiller.models.sizes import find_size

MOST_BYTES = 12_000_000


def test_tiny_is_what_lies_in_the_box(some_box):
    assert find_pipeline("tiny").folder == some_box / "pipeline"
    assert find_part("tiny", "vae") == some_box / "pipeline" / "vae"


def test_without_a_box_the_message_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setattr(box, "BOX", tmp_path)
    with pytest.raises(UsageError, match=r"make tiny.*tiny-random") as error:
        find_pipeline("tiny")
    assert error.value.exit_code == 2


@pytest.mark.skipif(not box.BOX.is_dir(), reason="the box is not trained yet")
def test_the_box_is_small_complete_and_says_how_it_was_made():
    files = [file for file in box.BOX.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES
    assert {"transformer", "vae", "text_encoder", "tokenizer", "scheduler"} <= set(find_pipeline("tiny").parts)
    config = json.loads((box.BOX / "pipeline" / "transformer" / "config.json").read_text())
    size = find_size("tiny-world").transformer
    assert all(config[name] == size[name] for name in ("num_layers", "num_attention_heads", "ffn_dim", "in_channels"))
    commands = (box.BOX / "commands.txt").read_text()
    for command in ("train-vae", "encode", "train"):
        assert re.search(rf"^wandistiller {command} .*", commands, re.MULTILINE), command
    assert all("--seed" in line for line in commands.splitlines() if line.startswith("wandistiller train"))
    assert (box.BOX / "train.jsonl").is_file()
