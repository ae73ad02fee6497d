"""Embeddings of prompts on disk: diffusers' own, encoded once, whoever works on them and whatever stops them."""

import multiprocessing
import os
import pickle
import shutil
import signal
from collections import namedtuple
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file, save_file

from wandistiller.data import prompt_texts as module
from wandistiller.data.claims import Claims
from wandistiller.data.prompt_texts import EMPTY, PromptTexts
from wandistiller.data.prompts import open_prompts
from wandistiller.data.text_shards import TextShards, key_of, make_keys
from wandistiller.errors import CheckpointError, OutputError, UsageError
from wandistiller.models import text as text_module
from wandistiller.models.text_padding import trim_padding

CPU = torch.device("cpu")
PROMPTS = ["a red ball", "zwei Bälle &amp; mehr", "a  clip", "一只红色的气球", "long " * 600, "a red ball"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS), encoding="utf-8")
    return path


@pytest.fixture
def numbered(tmp_path):
    path = tmp_path / "numbered.txt"
    path.write_text("".join(f"prompt {number}\n" for number in range(60)))
    return path


@pytest.fixture
def encoded_texts(monkeypatch):
    """Every text that reaches an encoder, in the order of their coming."""
    seen, real = [], module.open_text_encoder

    @contextmanager
    def watched(*parts, **options):
        with real(*parts, **options) as encode:
            yield lambda texts: [seen.extend(texts), encode(texts)][1]

    monkeypatch.setattr(module, "open_text_encoder", watched)
    return seen


@pytest.fixture
def no_encoder(monkeypatch):
    def forbid():
        monkeypatch.setattr(text_module, "load_whole", lambda *args, **kwargs: pytest.fail("the text encoder was loaded"))

    return forbid


def open_texts(file, pipeline, **options):
    given = {"dtype": torch.float32, **options}
    parts = {"text_encoder": pipeline / "text_encoder", "tokenizer": pipeline / "tokenizer"}
    return PromptTexts(open_prompts(file), file.parent / "cache", **parts, **given)


def diffusers_embeddings(pipeline, prompt, dtype=torch.float32):
    whole = WanPipeline.from_pretrained(pipeline, vae=None, transformer=None, text_encoder=None)
    whole.text_encoder = text_module.load_whole(text_encoder_class(), pipeline / "text_encoder", dtype)
    with torch.no_grad():
        return whole.encode_prompt(prompt, do_classifier_free_guidance=False, max_sequence_length=512)[0][0]


def text_encoder_class():
    from transformers import UMT5EncoderModel

    return UMT5EncoderModel


def shards_of(texts):
    return sorted(texts.folder.glob("*.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_numbers_are_those_of_diffusers(tiny_folder, file, dtype):
    texts = open_texts(file, tiny_folder, dtype=dtype)
    texts.ensure(range(len(PROMPTS)), device=CPU, batch_size=1)
    trimmed = open_texts(file, tiny_folder, dtype=dtype, trims_text=True)
    for index, prompt in enumerate(PROMPTS):
        expected = diffusers_embeddings(tiny_folder, prompt, dtype).float()
        assert torch.equal(texts.read(index), expected)
        assert torch.equal(trimmed.read(index), trim_padding(expected))
    empty = diffusers_embeddings(tiny_folder, "", dtype).float()
    assert torch.equal(texts.empty_text, empty)
    assert torch.equal(trimmed.empty_text, trim_padding(empty))
    assert texts.read(0).dtype == torch.float32
    [shard] = shards_of(texts)
    assert load_file(shard)["embeddings"].dtype == dtype


def test_only_what_is_asked_for_is_encoded_and_only_once(tiny_folder, file, encoded_texts, no_encoder):
    texts = open_texts(file, tiny_folder)
    plan = texts.ensure([1, 0, 5, 1], device=CPU)
    assert sorted(encoded_texts) == sorted(["", PROMPTS[0], PROMPTS[1]])
    assert (plan.num_prompts, plan.num_missing, plan.is_exact) == (3, 3, True)
    with pytest.raises(CheckpointError, match=r"prompts\.txt, line 3 has no text embeddings"):
        texts.read(2)
    encoded_texts.clear()
    texts.ensure([0, 2], device=CPU)
    assert encoded_texts == [PROMPTS[2]]
    no_encoder()
    again = open_texts(file, tiny_folder)
    assert again.ensure([0, 1, 2, 5], device=CPU).num_missing == 0
    assert torch.equal(again.read(5), texts.read(0))


def test_the_size_is_known_before(tiny_folder, file, no_encoder, monkeypatch):
    texts = open_texts(file, tiny_folder)
    plan = texts.plan(range(len(PROMPTS)))
    assert not texts.folder.exists()
    Usage = namedtuple("Usage", "total used free")
    with monkeypatch.context() as full:
        full.setattr(module.shutil, "disk_usage", lambda path: Usage(0, 0, plan.num_bytes - 1))
        full.setattr(text_module, "load_whole", lambda *args, **kwargs: pytest.fail("the text encoder was loaded"))
        with pytest.raises(UsageError, match=rf"need {plan.num_bytes}; the disk has") as caught:
            texts.ensure(range(len(PROMPTS)), device=CPU)
        assert "5 prompts" not in caught.value.what and "6 prompts" in caught.value.what
    texts.ensure(range(len(PROMPTS)), device=CPU)
    stored = [tensor.nbytes for shard in shards_of(texts) for tensor in load_file(shard).values()]
    assert plan.num_bytes == sum(stored)


def test_very_many_prompts_are_looked_at_part_by_part(tiny_folder, numbered, monkeypatch, encoded_texts, no_encoder):
    """The first are encoded before the last are read; each prompt once, whichever parts it is in."""
    monkeypatch.setattr(module, "_PART_PROMPTS", 16)
    texts, seen = open_texts(numbered, tiny_folder), []
    monkeypatch.setattr(module, "_COUNTED_PROMPTS", 8)
    want = PromptTexts._want
    monkeypatch.setattr(PromptTexts, "_want", lambda self, part: seen.append(len(encoded_texts)) or want(self, part))
    numbers = [*range(60), 1, 2, 3]
    plan = texts.ensure(numbers, device=CPU)
    assert (plan.num_missing, plan.is_exact) == (63, False)
    assert len(encoded_texts) == len(set(encoded_texts)) == 61
    assert 17 in seen, "the second part is looked at when the first is encoded"
    no_encoder()
    open_texts(numbered, tiny_folder).ensure(numbers, device=CPU)


def test_of_very_many_prompts_repeats_are_foreseen(tiny_folder, tmp_path, monkeypatch):
    """A disk that has room for what is different is not refused for what is said again and again."""
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"thing number {number}\n" for number in np.random.default_rng(0).integers(50, size=4000)))
    monkeypatch.setattr(module, "_PART_PROMPTS", 2048)
    assert open_texts(file, tiny_folder).plan(range(4000)).num_prompts == pytest.approx(50, rel=0.2)


def test_the_size_of_many_prompts_follows_from_some(tiny_folder, numbered, monkeypatch):
    texts = open_texts(numbered, tiny_folder)
    exact = texts.plan(range(60))
    monkeypatch.setattr(module, "_COUNTED_PROMPTS", 20)
    sampled = texts.plan(range(60))
    assert (exact.is_exact, sampled.is_exact) == (True, False)
    assert sampled.num_bytes == pytest.approx(exact.num_bytes, rel=0.05)


def test_changed_prompts_cost_what_has_changed(tiny_folder, file, encoded_texts):
    before = open_texts(file, tiny_folder)
    before.ensure(range(6), device=CPU)
    encoded_texts.clear()
    file.write_text("\n".join(["new", *PROMPTS[1:5], "other"]), encoding="utf-8")
    after = open_texts(file, tiny_folder)
    with pytest.raises(CheckpointError, match="line 1 has no text embeddings"):
        after.read(0)
    after.ensure(range(6), device=CPU, batch_size=1)
    assert sorted(encoded_texts) == ["new", "other"]
    assert torch.equal(after.read(0), diffusers_embeddings(tiny_folder, "new"))
    assert torch.equal(after.read(1), diffusers_embeddings(tiny_folder, PROMPTS[1]))


def test_two_encoders_have_their_own(tiny_folder, file, tmp_path, encoded_texts):
    other_folder = shutil.copytree(tiny_folder, tmp_path / "other")
    weights_file = other_folder / "text_encoder" / "model.safetensors"
    weights = load_file(weights_file)
    weights["encoder.final_layer_norm.weight"] *= 1.5
    save_file(weights, weights_file, metadata={"format": "pt"})
    one, other = open_texts(file, tiny_folder), open_texts(file, other_folder)
    one.ensure([0], device=CPU)
    assert other.ensure([0], device=CPU).num_missing == 2
    assert torch.allclose(other.read(0), 1.5 * one.read(0), rtol=1e-6)
    assert open_texts(file, tiny_folder, dtype=torch.bfloat16).ensure([0], device=CPU).num_missing == 2
    # A shard of one in the place of the other is not taken for it.
    for shard in shards_of(other):
        shard.unlink()
    shutil.copy(shards_of(one)[0], other.folder)
    again = open_texts(file, other_folder)
    assert again.ensure([0], device=CPU).num_missing == 2
    assert torch.allclose(again.read(0), 1.5 * one.read(0), rtol=1e-6)


def _ensure_until_killed(file, pipeline, num_before):
    module._SHARD_PROMPTS = 8
    num_encoded, real = 0, module.open_text_encoder

    @contextmanager
    def killed(*parts, **options):
        with real(*parts, **options) as encode:

            def some(texts):
                nonlocal num_encoded
                num_encoded += len(texts)
                if num_encoded > num_before:
                    os.kill(os.getpid(), signal.SIGKILL)
                return encode(texts)

            yield some

    module.open_text_encoder = killed
    open_texts(file, pipeline).ensure(range(60), device=CPU, batch_size=4)


def test_a_kill_in_the_middle_leaves_a_usable_cache(tiny_folder, numbered, encoded_texts):
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_ensure_until_killed, args=(numbered, tiny_folder, 30))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    encoded_texts.clear()
    texts = open_texts(numbered, tiny_folder)
    assert len(shards_of(texts)) == 3
    assert list((texts.folder / ".claims").iterdir())
    known = [index for index in range(60) if texts._shards.has(make_keys([key_of(f"prompt {index}")]))[0]]
    assert torch.equal(texts.read(known[0]), diffusers_embeddings(tiny_folder, f"prompt {known[0]}"))
    assert texts.ensure(range(60), device=CPU).num_missing == 61 - 24
    assert len(encoded_texts) == 61 - 24
    assert all(texts.read(index).any() for index in range(EMPTY, 60))
    assert not list((texts.folder / ".claims").iterdir())


def test_a_damaged_shard_is_made_again(tiny_folder, numbered, encoded_texts, monkeypatch):
    monkeypatch.setattr(module, "_SHARD_PROMPTS", 16)
    texts = open_texts(numbered, tiny_folder)
    texts.ensure(range(60), device=CPU)
    first, second, *others = shards_of(texts)
    assert len(others) == 2
    first.write_bytes(first.read_bytes()[:-1])
    num_rows = len(load_file(second)["ends"])
    save_file({**load_file(second), "ends": torch.arange(num_rows)}, second, metadata=texts._shards._required)
    encoded_texts.clear()
    again = open_texts(numbered, tiny_folder)
    again.ensure(range(60), device=CPU)
    assert 16 < len(encoded_texts) <= 32
    assert all(again.read(index).any() for index in range(60))
    assert TextShards(again.folder, **shard_options(again)).refresh() == []


def shard_options(texts):
    return {"encoder": texts._shards._required["encoder"], "dtype": texts._dtype}


def _ensure_in_process(queue, start, file, pipeline):
    module._CLAIMED_PROMPTS = 4
    num_encoded, real = 0, module.open_text_encoder

    @contextmanager
    def counted(*parts, **options):
        nonlocal num_encoded
        with real(*parts, **options) as encode:
            start.wait()

            def count(texts):
                nonlocal num_encoded
                num_encoded += len(texts)
                return encode(texts)

            yield count

    module.open_text_encoder = counted
    texts = open_texts(file, pipeline)
    texts.ensure(range(60), device=CPU, batch_size=2)
    queue.put((num_encoded, all(bool(texts.read(index).any()) for index in range(EMPTY, 60))))


def test_two_processes_share_the_work(tiny_folder, numbered, no_encoder):
    context = multiprocessing.get_context("fork")
    queue, start = context.Queue(), context.Barrier(2)
    workers = [context.Process(target=_ensure_in_process, args=(queue, start, numbered, tiny_folder)) for _ in range(2)]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert sum(num_encoded for num_encoded, _ in results) == 61
    assert all(is_complete for _, is_complete in results)
    no_encoder()
    assert open_texts(numbered, tiny_folder).ensure(range(60), device=CPU).num_missing == 0


def test_what_others_encode_meanwhile_is_not_encoded_again(tiny_folder, numbered, encoded_texts, monkeypatch):
    monkeypatch.setattr(module, "_CLAIMED_PROMPTS", 10)
    alone = open_texts(numbered, tiny_folder)
    alone.ensure(range(60), device=CPU)
    theirs = alone.folder.parent / "theirs"
    alone.folder.rename(theirs)
    texts = open_texts(numbered, tiny_folder)
    wanted = texts._want(range(60))
    encoded_texts.clear()
    real = Claims.take

    def take(self, name):
        if name.endswith(wanted.keys[:10].tobytes().hex()):  # they finish all of it just before the first claim
            shutil.copytree(theirs, texts.folder, dirs_exist_ok=True)
        return real(self, name)

    monkeypatch.setattr(Claims, "take", take)
    texts.ensure(range(60), device=CPU)
    assert encoded_texts == []


def test_a_slow_encoder_saves_often(tiny_folder, numbered, monkeypatch):
    monkeypatch.setattr(module, "_SHARD_SECONDS", 0.0)
    texts = open_texts(numbered, tiny_folder)
    texts.ensure(range(60), device=CPU, batch_size=16)
    assert len(shards_of(texts)) == 4


def test_numbers_that_are_not_finite_are_not_kept(tiny_folder, file, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "other")
    weights = load_file(folder / "text_encoder" / "model.safetensors")
    weights["encoder.final_layer_norm.weight"][0] = float("nan")
    save_file(weights, folder / "text_encoder" / "model.safetensors", metadata={"format": "pt"})
    texts = open_texts(file, folder)
    with pytest.raises(OutputError, match="not finite"):
        texts.ensure([0], device=CPU)
    assert shards_of(texts) == []


def test_other_processes_read_the_same(tiny_folder, file):
    texts = open_texts(file, tiny_folder)
    texts.ensure(range(6), device=CPU)
    copy = pickle.loads(pickle.dumps(texts))
    assert torch.equal(copy.read(3), texts.read(3))
    assert torch.equal(copy.empty_text, texts.empty_text)


def test_keys_of_any_bytes_are_found(tmp_path):
    """Also those that end in zeros, which numpy's strings leave away."""
    shards = TextShards(tmp_path, encoder="e", dtype=torch.float32)
    random = np.random.default_rng(0)
    keys = [random.bytes(15) + b"\0" for _ in range(50)] + [bytes(16), b"\xff" * 16, b"\0" * 15 + b"\1"]
    values = [torch.full((1 + number % 3, 4), float(number)) for number in range(len(keys))]
    shards.write(keys[:20], values[:20])
    shards.write(keys[20:], values[20:])
    other = TextShards(tmp_path, encoder="e", dtype=torch.float32)
    assert other.refresh() == []
    for shard in (shards, other):
        assert all(torch.equal(shard.read(key), value) for key, value in zip(keys, values, strict=True))
        assert shard.read(b"\1" * 16) is None
        assert shard.has(make_keys([keys[0], b"\1" * 16])).tolist() == [True, False]
