"""``encode`` from a folder to caches: the numbers of diffusers, once, whoever else works on it."""

import gc
import json
import multiprocessing
import os
import shutil
import threading
import time
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from diffusers.video_processor import VideoProcessor
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import UMT5EncoderModel

from wandistiller.cli.main import main
from wandistiller.config.encode import EncodeConfig
from wandistiller.data import encode as encode_module
from wandistiller.data.claims import Claims
from wandistiller.data.encode import run_encode
from wandistiller.data.encode_job import default_cache_dir, plan_buckets, prepare_encoding
from wandistiller.data.latent_cache import LatentCache
from wandistiller.data.media import write_clip
from wandistiller.data.sources import assign_buckets, open_source
from wandistiller.data.text_cache import EMPTY_NAME, TextCache
from wandistiller.errors import CheckpointError, MediaError, UsageError
from wandistiller.models import text as text_module

CAPTIONS = {"a": "a red ball", "b": "zwei Bälle &amp; mehr ", "c": "a clip", "sub/d": "another clip\nof two lines"}


@pytest.fixture(scope="module", autouse=True)
def quick_collection():
    """Spare the garbage collector the libraries' own objects: each encoding collects twice, a third of a second each."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def pipeline(tiny_folder, tmp_path_factory):
    """The tiny pipeline with statistics that change something."""
    folder = tmp_path_factory.mktemp("pipeline") / "tiny"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "vae" / "config.json").read_text())
    config["latents_mean"] = [0.1 * index for index in range(8)]
    config["latents_std"] = [0.5 + 0.1 * index for index in range(8)]
    (folder / "vae" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Two pictures and two clips of 64 x 64, so that nothing is resized."""
    folder, random = tmp_path_factory.mktemp("raw") / "data", np.random.default_rng(0)
    (folder / "sub").mkdir(parents=True)
    for name in ("a", "b"):
        Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    for name in ("c", "sub/d"):
        write_clip(folder / f"{name}.mp4", random.integers(0, 256, (7, 64, 64, 3), dtype=np.uint8), 8, {})
    for name, caption in CAPTIONS.items():
        (folder / f"{name}.txt").write_text(caption, encoding="utf-8")
    return folder


@pytest.fixture
def data(raw, tmp_path):
    return shutil.copytree(raw, tmp_path / "data")


@pytest.fixture(scope="module")
def encoded_once(raw, pipeline, tmp_path_factory):
    folder = shutil.copytree(raw, tmp_path_factory.mktemp("encoded") / "data")
    run_encode(configure(pipeline, folder))
    return folder


@pytest.fixture
def encoded(encoded_once, tmp_path):
    """The same with caches that are up to date: copies keep their times."""
    return shutil.copytree(encoded_once, tmp_path / "encoded")


def configure(pipeline, data, **fields):
    given = {"width": 64, "height": 64, "frames": (5,), "device": "cpu", **fields}
    return EncodeConfig(model=str(pipeline), dataset_path=str(data), **given)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


EXPECTED = {f"{name}{suffix}" for name in CAPTIONS for suffix in (".safetensors", ".latent.safetensors")} | {
    ".empty.safetensors"
}


def test_the_numbers_are_those_of_diffusers(pipeline, data):
    found = run_encode(configure(pipeline, data, batch_size=1))
    assert (found.num_text, found.num_latents, found.reused, found.skipped) == (5, 4, 0, ())
    assert found.cache_dir == data / ".cache"
    assert contents(data / ".cache").keys() == EXPECTED
    whole = WanPipeline.from_pretrained(pipeline)
    vae = AutoencoderKLWan.from_pretrained(pipeline / "vae")
    mean, std = (torch.tensor(vae.config[name]).view(1, 8, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    source = open_source(data).source
    texts, latents = TextCache(found.cache_dir, encoder=None), LatentCache(found.cache_dir, vae=None)
    with torch.no_grad():
        for name, caption in [*CAPTIONS.items(), (EMPTY_NAME, "")]:
            expected, _ = whole.encode_prompt(caption, do_classifier_free_guidance=False, max_sequence_length=512)
            assert torch.equal(texts.read(name, 32), expected[0])
        for index in range(4):
            if source.media_size(index).is_picture:
                frames = [Image.open(source.path(index))]
            else:
                with av.open(str(source.path(index))) as container:
                    frames = [frame.to_image() for frame in container.decode(video=0)][:5]
            pixels = VideoProcessor(vae_scale_factor=8).preprocess_video(frames, height=64, width=64)
            expected = (vae.encode(pixels).latent_dist.mode() - mean) / std
            assert torch.equal(latents.read(source.name(index)), expected[0])


def test_what_is_up_to_date_is_not_encoded_again(pipeline, encoded, monkeypatch):
    before = contents(encoded / ".cache")
    monkeypatch.setattr(encode_module, "load_model", lambda *args, **kwargs: pytest.fail("the VAE was loaded"))
    monkeypatch.setattr(text_module, "load_whole", lambda *args, **kwargs: pytest.fail("the text encoder was loaded"))
    found = run_encode(configure(pipeline, encoded))
    assert (found.num_text, found.num_latents, found.reused) == (0, 0, 9)
    assert contents(encoded / ".cache") == before


def change_caption(pipeline, data):
    (data / "a.txt").write_text("a blue ball")


def change_picture(pipeline, data):
    Image.new("RGB", (64, 64), "red").save(data / "a.png")


def change_vae(pipeline, data):
    file = pipeline / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["encoder.conv_in.bias"] += 0.1
    save_file(weights, file)


def change_text_encoder(pipeline, data):
    file = pipeline / "text_encoder" / "model.safetensors"
    weights = load_file(file)
    weights["encoder.final_layer_norm.weight"] *= 1.5
    save_file(weights, file, metadata={"format": "pt"})


def change_time(pipeline, data):
    os.utime(data / "a.png", (1, 1))


@pytest.mark.parametrize(
    ("change", "fields", "expected"),
    [
        (change_caption, {}, (1, 0)),
        (change_picture, {}, (0, 1)),
        (change_vae, {}, (0, 4)),
        (change_text_encoder, {}, (5, 0)),
        (change_time, {}, (0, 0)),
        (None, {"width": 32, "height": 32}, (0, 4)),
        (None, {"frames": (1,)}, (0, 2)),
        (None, {"dtype": "bfloat16"}, (5, 0)),
        (None, {"vae_dtype": "bfloat16"}, (0, 4)),
        (None, {"vae_tiling": True, "batch_size": 3}, (0, 0)),
    ],
)
def test_what_has_changed_is_encoded_again(pipeline, encoded, tmp_path, change, fields, expected):
    own = shutil.copytree(pipeline, tmp_path / "pipeline")
    before = contents(encoded / ".cache")
    if change is not None:
        change(own, encoded)
    found = run_encode(configure(own, encoded, **fields))
    assert (found.num_text, found.num_latents) == expected
    after = contents(encoded / ".cache")
    assert after.keys() == before.keys()
    num_changed = sum(after[name] != before[name] for name in after)
    assert num_changed == (1 if change is change_time else sum(expected))  # whose new time is remembered


def test_a_batch_gives_the_same_numbers(pipeline, data):
    one = run_encode(configure(pipeline, data, batch_size=1, cache_dir=data.parent / "one")).cache_dir
    many = run_encode(configure(pipeline, data, batch_size=4, cache_dir=data.parent / "many")).cache_dir
    for name in CAPTIONS:
        first, second = (LatentCache(folder, vae=None).read(name) for folder in (one, many))
        assert torch.allclose(first, second, atol=1e-5)


def test_tiles_give_the_same_numbers(pipeline, data):
    size = {"width": 224, "height": 224, "frames": (1,)}
    whole = run_encode(configure(pipeline, data, cache_dir=data.parent / "whole", **size)).cache_dir
    tiled = run_encode(configure(pipeline, data, vae_tiling=True, cache_dir=data.parent / "tiled", **size)).cache_dir
    for name in CAPTIONS:
        first, second = (LatentCache(folder, vae=None).read(name) for folder in (whole, tiled))
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def test_the_encoders_are_gone_when_they_are_not_needed(pipeline, data, monkeypatch):
    def alive(kind):
        gc.collect()
        return sum(isinstance(each, kind) for each in gc.get_objects())

    texts, vaes = alive(UMT5EncoderModel), alive(AutoencoderKLWan)
    load_model = encode_module.load_model

    def load(*args, **kwargs):
        assert alive(UMT5EncoderModel) == texts
        return load_model(*args, **kwargs)

    monkeypatch.setattr(encode_module, "load_model", load)
    run_encode(configure(pipeline, data))
    assert (alive(UMT5EncoderModel), alive(AutoencoderKLWan)) == (texts, vaes)


@pytest.mark.parametrize("where", ["text", "latents"])
def test_it_goes_on_where_it_was_stopped(pipeline, data, monkeypatch, where):
    cache, name = {"text": (TextCache, "write"), "latents": (LatentCache, "write")}[where]
    original, calls = getattr(cache, name), []

    def stop(*args, **kwargs):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(args)
        return original(*args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(cache, name, stop)
        run_encode(configure(pipeline, data, batch_size=1))
    left = contents(data / ".cache")
    assert left.keys() <= EXPECTED  # no claim, nothing half-written
    assert len(left) == (2 if where == "text" else 7)
    found = run_encode(configure(pipeline, data, batch_size=1))
    assert (found.num_text, found.num_latents) == ((3, 4) if where == "text" else (0, 2))
    after = contents(data / ".cache")
    assert after.keys() == EXPECTED
    assert {name: after[name] for name in left} == left


def test_what_killed_processes_left_is_no_obstacle(pipeline, data):
    cache = data / ".cache"
    (cache / ".claims").mkdir(parents=True)
    dead = multiprocessing.get_context("fork").Process(target=lambda: None)
    dead.start()
    dead.join()
    claims = Claims(cache / ".claims")
    for name in ("text a", "latent a"):
        claims.take(name)
        claims._path(name).write_text(f"{os.uname().nodename} {dead.pid}")
    claims.take("latent b")
    claims._path("latent b").write_text("elsewhere 7")
    os.utime(claims._path("latent b"), (1, 1))
    partial = cache / ".a.latent.partial-7.safetensors"
    partial.write_text("half")
    os.utime(partial, (1, 1))
    run_encode(configure(pipeline, data))
    assert contents(cache).keys() == EXPECTED


def test_a_live_claim_is_waited_for(pipeline, data):
    """What another process is encoding is not encoded twice; when it is given back undone, it is."""
    claims = Claims(data / ".cache" / ".claims")
    claims.take("latent a")
    claims._path("latent a").write_text("elsewhere 7")
    done = []
    worker = threading.Thread(target=lambda: done.append(run_encode(configure(pipeline, data))))
    worker.start()
    deadline = time.monotonic() + 30
    while not (data / ".cache" / "sub" / "d.latent.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    worker.join(0.3)
    assert not done and "a.latent.safetensors" not in contents(data / ".cache")
    claims.release("latent a")
    worker.join(20)
    assert done[0].num_latents == 4
    assert contents(data / ".cache").keys() == EXPECTED


@pytest.fixture(scope="module")
def alone(pipeline, tmp_path_factory):
    """What one process makes of a small world."""
    return run_encode(configure(pipeline, "world:12", width=32, height=32, cache_dir=tmp_path_factory.mktemp("a"))).cache_dir


def _encode_in_process(queue, start, config, rank, world):
    if world:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    start.wait()
    queue.put(run_encode(config))


@pytest.mark.parametrize("world", [0, 2])
def test_two_processes_at_once(pipeline, alone, tmp_path, world):
    """Started together, by torchrun or by hand, they share the work and both return when all of it is there."""
    context = multiprocessing.get_context("fork")
    queue, start = context.Queue(), context.Barrier(2)
    config = EncodeConfig(model=str(pipeline), dataset_path="world:12", cache_dir=tmp_path / "cache", device="cpu",
                          width=32, height=32, frames=(1,), batch_size=2)  # fmt: skip
    workers = [context.Process(target=_encode_in_process, args=(queue, start, config, rank, world)) for rank in range(2)]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert sum(result.num_text for result in results) == 13
    assert sum(result.num_latents for result in results) == 12
    assert all(result.num_text + result.num_latents + result.reused == 25 for result in results)
    assert len(contents(tmp_path / "cache")) == 25
    source = open_source("world:12").source
    for index in range(12):
        both = (LatentCache(folder, vae=None).read(source.name(index)) for folder in (tmp_path / "cache", alone))
        assert torch.allclose(*both, atol=1e-5)
        both = (TextCache(folder, encoder=None).read(source.name(index), 32) for folder in (tmp_path / "cache", alone))
        assert torch.equal(*both)


def _encode_or_say_why(queue, refused, config):
    """Encode once the other process has been refused, so that both are there at the same time."""
    torch.set_num_threads(1)
    fill = encode_module.fill_caches
    encode_module.fill_caches = lambda job: refused.wait(30) and fill(job)
    try:
        queue.put((config.width, run_encode(config)))
    except UsageError as error:
        queue.put((config.width, error.what))
        refused.set()


def test_two_sizes_at_once(pipeline, tmp_path):
    """One of them is refused, and what the other has made is all of its size; then the other size is made in its place."""
    context = multiprocessing.get_context("fork")
    queue, is_refused = context.Queue(), context.Event()
    configs = {
        width: configure(pipeline, "world:12", width=width, height=width, frames=(1,), max_aspect=1.0, cache_dir=tmp_path)
        for width in (32, 48)
    }
    workers = [context.Process(target=_encode_or_say_why, args=(queue, is_refused, config)) for config in configs.values()]
    for worker in workers:
        worker.start()
    results = dict(queue.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join()
    refused, made = sorted(results, key=lambda width: not isinstance(results[width], str))
    assert f"The cache {tmp_path} is in use by process " in results[refused] and "with other sizes" in results[refused]
    assert results[made].num_latents == 12
    source = open_source("world:12").source
    for width, num_latents in ((made, 0), (refused, 12)):
        done = run_encode(configs[width])
        assert (done.num_text, done.num_latents) == (0, num_latents)
        sides = {LatentCache(tmp_path, vae=None).read(source.name(index)).shape[-1] for index in range(12)}
        assert sides == {width // 8}
    assert len(contents(tmp_path)) == 25


def test_another_size_is_refused_before_anything_is_loaded(pipeline, encoded, monkeypatch):
    monkeypatch.setattr(text_module, "load_whole", lambda *args, **kwargs: pytest.fail("the text encoder was loaded"))
    monkeypatch.setattr(encode_module, "load_model", lambda *args, **kwargs: pytest.fail("the VAE was loaded"))
    before = contents(encoded / ".cache")
    with prepare_encoding(configure(pipeline, encoded)).using_caches():
        assert (
            main(["encode", "--model", str(pipeline), "--dataset-path", str(encoded), "--width", "32", "--height", "32"]) == 2
        )
        assert run_encode(configure(pipeline, encoded)).num_latents == 0
    assert contents(encoded / ".cache") == before


def test_bad_media_stop_it_before_anything_is_loaded(pipeline, data, monkeypatch):
    monkeypatch.setattr(text_module, "load_whole", lambda *args, **kwargs: pytest.fail("the text encoder was loaded"))
    (data / "b.txt").write_text("")
    with pytest.raises(UsageError, match="1 of 4 items") as caught:
        run_encode(configure(pipeline, data))
    assert "b.png: has an empty caption" in caught.value.why
    (data / "b.txt").write_text("x")
    with pytest.raises(UsageError, match="2 of 4 items") as caught:
        run_encode(configure(pipeline, data, frames=(9,)))
    assert "c: has 7 frames; the smallest of --frames is 9" in caught.value.why
    assert not (data / ".cache").exists()


def test_bad_media_can_be_left_out(pipeline, data):
    (data / "b.txt").write_text("")
    picture = data / "a.png"
    picture.write_bytes(picture.read_bytes()[:2000])  # whose header is whole
    write_clip(data / "short.mp4", np.zeros((3, 64, 64, 3), dtype=np.uint8), 8, {})
    (data / "short.txt").write_text("x")
    found = run_encode(configure(pipeline, data, skip_bad=True))
    assert [Path(item.name).stem for item in found.skipped] == ["b", "short", "a"]
    assert (found.num_text, found.num_latents) == (5, 2)
    (data / "b.txt").write_text("x")
    (data / "short.mp4").unlink()
    with pytest.raises(MediaError, match=r"a\.png is not a readable picture") as caught:
        run_encode(configure(pipeline, data))
    assert "--skip-bad" in caught.value.fix
    assert not any(".claims" in name for name in contents(data / ".cache"))


def test_long_names_have_caches_too(pipeline, tmp_path):
    names = ["ä" * 112 + letter for letter in "ab"] + ["x" * 251]
    (tmp_path / "data").mkdir()
    for name in names:
        Image.new("RGB", (64, 64)).save(tmp_path / "data" / f"{name}.png")
        (tmp_path / "data" / f"{name}.txt").write_text("a caption")
    assert run_encode(configure(pipeline, tmp_path / "data")).num_latents == 3
    found = run_encode(configure(pipeline, tmp_path / "data"))
    assert (found.num_text, found.num_latents, found.reused) == (0, 0, 7)


def test_what_training_checks_before_its_first_step(pipeline, encoded):
    from wandistiller.data.cache_files import fingerprint_model
    from wandistiller.models.stored import VAE, inspect_checkpoint

    folder = encoded / ".cache"
    vae = inspect_checkpoint(pipeline / "vae", VAE)
    source = open_source(encoded).source
    assigned = assign_buckets(source, plan_buckets(vae.config, 64, 64, (5,), 2.0))
    cache = LatentCache(folder, vae=fingerprint_model(vae))
    cache.check(source, assigned.buckets)
    for index, bucket in enumerate(assigned.buckets):
        latents = cache.read(source.name(index), bucket)
        assert latents.shape == (8, (bucket.frames - 1) // 4 + 1, bucket.height // 8, bucket.width // 8)
    with pytest.raises(CheckpointError, match=r"4 of 4 latents .* missing or stale"):
        LatentCache(folder, vae="another").check(source, assigned.buckets)


def test_sizes_that_are_not_given_are_the_models_own(pipeline, tmp_path):
    found = run_encode(EncodeConfig(model=str(pipeline), dataset_path="world:2", cache_dir=tmp_path, device="cpu"))
    with safe_open(found.cache_dir / "world-000001.latent.safetensors", "pt") as file:
        assert file.metadata()["bucket"] == "1x64x64"


def test_where_caches_are_by_default(data, own_cache):
    assert default_cache_dir(str(data)) == data / ".cache"
    lists = [default_cache_dir(str(data / name)) for name in ("list.jsonl", "other.jsonl")]
    assert lists == [data / ".cache" / ".list.jsonl", data / ".cache" / ".other.jsonl"], "other captions of the same media"
    assert default_cache_dir("world:5:1x32x32") == own_cache / "wandistiller" / "data" / "world-5-1x32x32"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": None}, "--model is missing"),
        ({"dataset_path": None}, "--dataset-path is missing"),
        ({"height": None}, "--width and --height go together"),
        ({"width": 0}, "--width 0 is too small"),
        ({"frames": (5, -3)}, "--frames -3 is too small"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"max_aspect": 0.5}, "--max-aspect 0.5"),
        ({"frames": (6,)}, "--frames 6 does not divide"),
        ({"width": 70}, "--width 70 does not divide"),
        ({"dataset_path": "nowhere"}, "nowhere does not exist"),
        ({"model": "nowhere"}, "no pipeline 'nowhere'"),
    ],
)
def test_wrong_flags(pipeline, data, fields, message):
    usual = {"model": str(pipeline), "dataset_path": str(data), "width": 64, "height": 64, "frames": (5,), "device": "cpu"}
    with pytest.raises(UsageError, match=message):
        run_encode(EncodeConfig(**{**usual, **fields}))
    assert not (data / ".cache").exists()
