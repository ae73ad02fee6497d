import pytest

from wandistiller.errors import UsageError
from wandistiller.sample.geometry import check_geometry

CONFIG = {"patch_size": (1, 2, 2), "rope_max_seq_len": 1024}


def test_latents_of_a_clip():
    # 81 frames are 21 latent frames, as every Wan paper says.
    assert check_geometry(832, 480, 81, 8, 4, CONFIG).latent_shape == (21, 60, 104)
    assert check_geometry(1280, 704, 121, 16, 4, CONFIG).latent_shape == (31, 44, 80)
    assert check_geometry(832, 480, 1, 8, 4, CONFIG).latent_shape == (1, 60, 104)


@pytest.mark.parametrize(
    ("width", "height", "frames", "message"),
    [
        (830, 480, 81, "--width 832 or 816"),
        (832, 490, 81, "--height 496 or 480"),
        (8, 480, 81, r"--width 16\."),
        (832, 480, 80, "--frames 77 or 81"),
        (832, 480, 2, "--frames 1 or 5"),
        (16 * 1025, 480, 1, "more than this model has positions for"),
    ],
)
def test_what_does_not_divide_names_the_nearest(width, height, frames, message):
    with pytest.raises(UsageError, match=message):
        check_geometry(width, height, frames, 8, 4, CONFIG)
