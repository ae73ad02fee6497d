from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from wandistiller.data.buckets import Bucket, MediaSize
from wandistiller.data.pictures import fit, probe, read_media
from wandistiller.errors import MediaError

# Red at the top left, green top right, blue bottom left, white bottom right.
QUARTERS = np.zeros((48, 64, 3), dtype=np.uint8)
QUARTERS[:24, :32, 0] = QUARTERS[:24, 32:, 1] = QUARTERS[24:, :32, 2] = QUARTERS[24:, 32:] = 255


def corners(frame):
    """Name the colours of the four quarters, in reading order."""
    height, width = frame.shape[:2]
    names = {(1, 0, 0): "r", (0, 1, 0): "g", (0, 0, 1): "b", (1, 1, 1): "w", (0, 0, 0): "."}
    points = [(y * height // 4, x * width // 4) for y in (1, 3) for x in (1, 3)]
    return "".join(names[tuple(int(value > 128) for value in frame[point])] for point in points)


def write(path, *, codec="libx264", count=9, rotation=None, aspect=None, start=QUARTERS):
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=8)
        stream.width, stream.height, stream.pix_fmt = start.shape[1], start.shape[0], "yuv420p"
        if rotation is not None:
            stream.set_display_rotation(rotation)
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        for _ in range(count):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(start, format="rgb24")))
        container.mux(stream.encode())


@pytest.mark.parametrize(
    ("suffix", "codec"), [("mp4", "libx264"), ("mov", "libx264"), ("mkv", "libx264"), ("avi", "mpeg4"), ("webm", "libvpx-vp9")]
)
def test_clips_of_every_kind(tmp_path, suffix, codec):
    path = tmp_path / f"x.{suffix}"
    write(path, codec=codec)
    assert probe(path) == MediaSize(64, 48, 9, 8.0)
    frames = read_media(path, Bucket(5, 48, 64))
    assert frames.shape == (5, 48, 64, 3) and frames.dtype == np.uint8
    assert corners(frames[0]) == corners(frames[4]) == "rgbw"


def test_the_first_frames_are_taken(tmp_path):
    with av.open(str(tmp_path / "x.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=8, options={"crf": "4"})
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for value in range(0, 200, 20):
            frame = np.full((64, 64, 3), value, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    found = read_media(tmp_path / "x.mp4", Bucket(5, 32, 32))
    assert np.abs(found.mean(axis=(1, 2, 3)) - np.arange(0, 100, 20)).max() < 4


@pytest.mark.parametrize("degrees", [90, 180, -90])
def test_a_turned_clip_is_seen_as_players_show_it(tmp_path, degrees):
    write(tmp_path / "x.mp4", rotation=degrees)
    size = probe(tmp_path / "x.mp4")
    assert (size.width, size.height) == ((64, 48) if degrees == 180 else (48, 64))
    with av.open(str(tmp_path / "x.mp4")) as container:
        # The angle is counter-clockwise, as FFmpeg documents av_display_rotation_get.
        turns = round(next(container.decode(video=0)).rotation / 90)
    frame = read_media(tmp_path / "x.mp4", Bucket(1, size.height, size.width))[0]
    assert corners(frame) == {1: "gwrb", 2: "wbgr", -2: "wbgr", -1: "brwg"}[turns]


def test_pixels_that_are_not_square(tmp_path):
    write(tmp_path / "x.mp4", aspect=Fraction(2))
    assert probe(tmp_path / "x.mp4") == MediaSize(128, 48, 9, 8.0)
    assert corners(read_media(tmp_path / "x.mp4", Bucket(1, 48, 128))[0]) == "rgbw"


@pytest.mark.parametrize("suffix", ["png", "jpg", "jpeg", "webp", "PNG"])
def test_pictures_of_every_kind(tmp_path, suffix):
    Image.fromarray(QUARTERS).save(tmp_path / f"x.{suffix}")
    assert probe(tmp_path / f"x.{suffix}") == MediaSize(64, 48, 1, 0.0)
    assert corners(read_media(tmp_path / f"x.{suffix}", Bucket(1, 96, 128))[0]) == "rgbw"


@pytest.mark.parametrize(("orientation", "expected"), [(1, "rgbw"), (3, "wbgr"), (6, "brwg"), (8, "gwrb")])
def test_exif_orientation(tmp_path, orientation, expected):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(QUARTERS).save(tmp_path / "x.jpg", exif=exif)
    size = probe(tmp_path / "x.jpg")
    assert (size.width, size.height) == ((64, 48) if orientation < 5 else (48, 64))
    assert corners(read_media(tmp_path / "x.jpg", Bucket(1, size.height, size.width))[0]) == expected


def test_a_png_that_tells_at_its_end_how_it_is_turned(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(QUARTERS).save(tmp_path / "x.png", exif=exif)
    content = (tmp_path / "x.png").read_bytes()
    start = content.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(content[start : start + 4])
    (tmp_path / "x.png").write_bytes(content[:start] + content[end:-12] + content[start:end] + content[-12:])
    assert probe(tmp_path / "x.png") == MediaSize(48, 64, 1, 0.0)
    assert corners(read_media(tmp_path / "x.png", Bucket(1, 64, 48))[0]) == "brwg"


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_orientation_in_xmp(tmp_path, suffix):
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    info = PngInfo()
    info.add_itxt("XML:com.adobe.xmp", xmp.decode())
    Image.fromarray(QUARTERS).save(tmp_path / f"x.{suffix}", **({"pnginfo": info} if suffix == "png" else {"xmp": xmp}))
    assert probe(tmp_path / f"x.{suffix}") == MediaSize(48, 64, 1, 0.0)
    assert corners(read_media(tmp_path / f"x.{suffix}", Bucket(1, 64, 48))[0]) == "brwg"


def test_what_is_transparent_is_white(tmp_path):
    pixels = np.concatenate([QUARTERS, np.full((48, 64, 1), 255, dtype=np.uint8)], axis=2)
    pixels[:24, :, 3] = 0
    Image.fromarray(pixels).save(tmp_path / "x.png")
    assert corners(read_media(tmp_path / "x.png", Bucket(1, 48, 64))[0]) == "wwbw"


@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "I;16"])
def test_other_kinds_of_pixels(tmp_path, mode):
    grey = np.repeat(np.linspace(0, 255, 64).astype(np.uint8)[None], 48, axis=0)
    if mode == "I;16":
        Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "x.png")
    else:
        Image.fromarray(grey).convert(mode).save(tmp_path / ("x.jpg" if mode == "CMYK" else "x.png"), quality=100)
    path = next(tmp_path.iterdir())
    found = read_media(path, Bucket(1, 48, 64))[0]
    assert np.abs(found.astype(int) - grey[..., None]).max() <= 4


def test_the_same_size_is_not_touched(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "x.png")
    assert np.array_equal(read_media(tmp_path / "x.png", Bucket(1, 48, 64))[0], noise)


def test_what_stands_over_is_cut_off_evenly():
    wide = np.zeros((10, 40, 3), dtype=np.uint8)
    wide[:, 15:25] = 255
    assert (fit(Image.fromarray(wide), 10, 10) == 255).all()
    assert np.array_equal(fit(Image.fromarray(wide.swapaxes(0, 1).copy()), 10, 10), np.full((10, 10, 3), 255))


def test_shrinking_is_antialiased():
    stripes = np.zeros((64, 64, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    assert np.abs(fit(Image.fromarray(stripes), 8, 8).astype(int) - 127).max() < 20


@pytest.mark.parametrize("content", [b"", b"nothing of the kind", b"\x89PNG\r\n\x1a\n" + b"\0" * 40])
@pytest.mark.parametrize("suffix", ["png", "mp4", "webm"])
def test_what_is_no_picture_is_named(tmp_path, suffix, content):
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(content)
    with pytest.raises(MediaError, match=rf"x\.{suffix} is not a readable (picture|clip)"):
        probe(path)


def test_what_is_not_there_is_named(tmp_path):
    for suffix in ("png", "mp4"):
        with pytest.raises(MediaError, match=rf"x\.{suffix} does not exist"):
            read_media(tmp_path / f"x.{suffix}", Bucket(1, 32, 32))


@pytest.mark.parametrize("suffix", ["png", "jpg", "mp4", "mkv"])
def test_truncated_files_are_named(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    if suffix in ("png", "jpg"):
        Image.fromarray(noise).save(path)
    else:
        write(path, start=noise, count=17)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(MediaError, match=rf"x\.{suffix} is "):
        read_media(path, Bucket(17, 128, 128))


def test_a_clip_that_ends_early(tmp_path):
    write(tmp_path / "x.mp4", count=6)
    with pytest.raises(MediaError, match="only 6 frames of 9"):
        read_media(tmp_path / "x.mp4", Bucket(9, 48, 64))


def cut(path, start, first, last):
    """Copy packets as ``ffmpeg -ss FIRST -c copy`` does: from the key frame before, with times below 0 for what is not seen."""
    with av.open(str(start)) as whole, av.open(str(path), "w") as container:
        stream = container.add_stream_from_template(whole.streams.video[0])
        for packet in whole.demux(video=0):
            if packet.size and packet.pts < last * packet.duration:
                packet.pts, packet.dts = packet.pts - first * packet.duration, packet.dts - first * packet.duration
                packet.stream = stream
                container.mux(packet)


@pytest.mark.parametrize("suffix", ["mp4", "mov"])
def test_of_a_cut_clip_what_is_seen_counts(tmp_path, suffix):
    write(tmp_path / f"whole.{suffix}", count=20)
    path = tmp_path / f"x.{suffix}"
    cut(path, tmp_path / f"whole.{suffix}", 6, 14)
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 14
    assert probe(path).frames == 8
    assert read_media(path, Bucket(8, 48, 64)).shape == (8, 48, 64, 3)


def test_a_clip_without_pictures(tmp_path):
    with av.open(str(tmp_path / "x.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(MediaError, match="there are no pictures in it"):
        probe(tmp_path / "x.mp4")
