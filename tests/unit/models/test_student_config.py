"""Students as people describe them, and what is refused before any weights are read."""

import json

import pytest
from diffusers import WanTransformer3DModel

from wandistiller.errors import UsageError
from wandistiller.models.sizes import SIZES
from wandistiller.models.student_config import read_student_config

TINY = SIZES["tiny"].transformer  # 4 heads of 24, 3 layers, 256 units, 8 channels
WORLD = SIZES["tiny-world"].transformer  # 6 heads of 32, 8 layers
LARGE = SIZES["wan2.1-14b"].transformer
I2V = SIZES["wan2.1-i2v-14b"].transformer


@pytest.fixture
def read(tmp_path):
    def read(values, teacher=TINY, **factors):
        path = tmp_path / "student.json"
        path.write_text(json.dumps(values), encoding="utf-8")
        return read_student_config(path, teacher, **factors)

    return read


def test_without_a_file_half_the_depth_at_the_same_width():
    plan = read_student_config(None, WORLD)
    assert dict(plan.config) == {**WORLD, "num_layers": 4, "patch_size": [1, 2, 2]}
    assert (plan.layers, plan.image_size, plan.num_frames, plan.text_max_length) == (None, None, None, 512)


def test_what_is_not_said_is_the_teachers(read):
    assert dict(read({}).config) == {**TINY, "patch_size": [1, 2, 2]}
    assert dict(read({"num_layers": 2}).config) == {**TINY, "num_layers": 2, "patch_size": [1, 2, 2]}


def test_fields_of_diffusers_and_described_ones_mean_the_same(read):
    ours = read({"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 24, "ffn_dim": 96, "patch_size": [1, 2, 2]})
    theirs = read({"model_type": "Student", "depth": 2, "hidden-size": 48, "num_heads": 2, "mlp_ratio": 2.0, "patch_size": 2})
    assert ours == theirs
    assert ours.width == 48


def test_a_config_that_diffusers_saved_is_a_student(tmp_path):
    WanTransformer3DModel(**{**TINY, "num_layers": 1}).save_config(tmp_path)
    assert read_student_config(tmp_path / "config.json", TINY).config["num_layers"] == 1


def test_toml(tmp_path):
    path = tmp_path / "student.toml"
    path.write_text("depth = 2\nimage_size = [64, 96]\nnum_frames = 9\nlayers = [0, 2]\n")
    plan = read_student_config(path, TINY)
    assert (plan.image_size, plan.num_frames, plan.layers, plan.config["num_layers"]) == ((64, 96), 9, (0, 2), 2)


@pytest.mark.parametrize(("name", "text"), [("student.json", '{"depth": 2}'), ("student.toml", "depth = 2")])
def test_files_that_begin_with_a_byte_order_mark(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_student_config(tmp_path / name, TINY).config["num_layers"] == 2


def test_a_described_student_of_a_large_teacher(read):
    described = {"model_type": "WanLiteStudent", "hidden_size": 1024, "depth": 16, "num_heads": 16, "num_channels": 4}
    described |= {"image_size": 1024, "patch_size": 16, "text_max_length": 77, "text_encoder_output_dim": 4096}
    plan = read({**described, "projection_factor": 1.0}, LARGE)
    assert (plan.config["attention_head_dim"], plan.config["in_channels"], plan.config["out_channels"]) == (64, 4, 4)
    assert (plan.config["patch_size"], plan.image_size, plan.text_max_length) == ([1, 16, 16], (1024, 1024), 77)


@pytest.mark.parametrize(
    ("values", "heads", "size"),
    [
        ({"hidden_size": 48}, 2, 24),
        ({"num_heads": 2}, 2, 24),
        ({"hidden_size": 48, "num_heads": 4}, 4, 12),
        ({"hidden_size": 48, "attention_head_dim": 12}, 4, 12),
        ({"attention_head_dim": 12}, 4, 12),
    ],
)
def test_the_teachers_heads_are_kept_where_possible(read, values, heads, size):
    config = read(values).config
    assert (config["num_attention_heads"], config["attention_head_dim"]) == (heads, size)


def test_image_conditions_follow_the_width(read):
    config = read({"num_heads": 20}, I2V).config
    assert (config["added_kv_proj_dim"], config["in_channels"], config["out_channels"]) == (20 * 128, 36, 16)


def test_parameters_are_counted_as_diffusers_does(read):
    plan = read({"depth": 2, "hidden_size": 48, "mlp_ratio": 2})
    assert plan.num_parameters() == WanTransformer3DModel(**plan.config).num_parameters()


def test_layers_are_filled_in_later(read):
    plan = read({"depth": 2})
    assert plan.with_layers([0, 2]).layers == (0, 2)
    with pytest.raises(ValueError, match="3 layers"):
        plan.with_layers([0, 1, 2])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layer": 2}, "did you mean 'num_layers'"),
        ({"depth": 2, "num_layers": 1}, "also num_layers = 1"),
        ({"hidden_size": 48, "num_heads": 2, "attention_head_dim": 12}, "2 heads of 12, which make 24"),
        ({"hidden_size": 50, "num_heads": 4}, "does not divide into 4 heads"),
        # 48 makes heads of 16, which are even; 51 would make 17. Of 25 heads each would have 2 channels, too few.
        ({"hidden_size": 50, "num_heads": 3}, "such as 48, or another number of heads, such as 1"),
        # 20 heads of 6 would be wider than the teacher, as would 17 heads of 6; 15 of them are not.
        ({"hidden_size": 50, "num_heads": 20}, "Choose another number of heads, such as 5"),
        ({"hidden_size": 94, "num_heads": 15}, "a multiple, such as 90, or another number of heads, such as 1"),
        ({"hidden_size": 96, "num_heads": 7}, "a multiple, such as 84"),
        ({"hidden_size": 95, "attention_head_dim": 64}, "such as 64"),
        ({"hidden_size": 95, "attention_head_dim": 128}, "Choose smaller heads"),
        ({"hidden_size": 1000000007, "num_heads": 12}, "of 1000000007, its teacher of 96"),
        ({"hidden_size": 50}, "does not divide into heads of 24"),
        ({"hidden_size": 12}, "does not divide into heads of 24"),
        ({"hidden_size": 60, "num_heads": 4}, "heads have 15 channels"),
        ({"hidden_size": 16, "num_heads": 4}, "heads have 4 channels"),
        ({"attention_head_dim": 7}, "heads have 7 channels"),
        ({"mlp_ratio": 2, "ffn_dim": 100}, "192 units"),
        ({"mlp_ratio": 2.001}, "192.096 hidden units"),
        ({"mlp_ratio": 1e-9}, "hidden units"),
        ({"depth": 4}, "4 layers, its teacher 3"),
        ({"num_heads": 5}, "of 120, its teacher of 96"),
        ({"ffn_dim": 257}, "of 257, its teacher of 256"),
        ({"freq_dim": 66}, "of 66, its teacher of 64"),
        ({"freq_dim": 33}, "sines and cosines"),
        ({"depth": 0}, "depth is 0"),
        ({"depth": -1}, "depth is -1"),
        ({"depth": 1.5}, "depth is 1.5"),
        ({"depth": True}, "depth is True"),
        ({"depth": None}, "depth is None"),
        ({"mlp_ratio": float("nan")}, "mlp_ratio is nan"),
        ({"mlp_ratio": "2"}, "mlp_ratio is '2'"),
        ({"eps": 0}, "eps is 0"),
        ({"text_max_length": 513}, "at most 512 tokens"),
        ({"text_dim": 64}, "same text and image embeddings"),
        ({"cross_attn_norm": False}, "cross_attn_norm"),
        ({"rope_max_seq_len": 2}, "rope_max_seq_len is 2, the teacher's 1024"),
        ({"added_kv_proj_dim": 96}, "added_kv_proj_dim"),
        ({"latent_channels": 4, "in_channels": 8}, "also in_channels = 8"),
        ({"in_channels": 4, "out_channels": 8}, "also out_channels = 8"),
        ({"image_size": 100}, "Choose 96 pixels"),
        ({"image_size": 96, "patch_size": 8}, "Choose 128 pixels"),
        ({"image_size": [64, 64, 64]}, "image_size is"),
        ({"image_size": 0}, "image_size is 0"),
        ({"num_frames": 8}, "Choose 5 or 9"),
        ({"num_frames": 9, "patch_size": [2, 2, 2]}, "3 in the latents"),
        ({"patch_size": 0}, "patch_size is 0"),
        ({"patch_size": [2, 2]}, "patch_size is"),
        ({"patch_size": [1, 2, "2"]}, "patch_size is"),
        ({"layers": [0, 3]}, "from 0 to 2"),
        ({"layers": []}, "from 0 to 2"),
        ({"layers": 2}, "from 0 to 2"),
        ({"layers": [2, 0]}, "ascending"),
        ({"layers": [0, 0]}, "ascending"),
        ({"layers": [0, 2], "depth": 3}, "also 2 layers"),
    ],
)
def test_what_makes_no_sense_is_refused(read, values, message):
    with pytest.raises(UsageError) as raised:
        read(values)
    assert message in str(raised.value)
    assert raised.value.fix


def test_a_teacher_with_conditions_keeps_its_channels(read):
    assert read({"latent_channels": 16}, I2V).config["in_channels"] == 36
    with pytest.raises(UsageError, match="condition beside the latents"):
        read({"latent_channels": 4}, I2V)


def test_how_much_the_vae_compresses_counts(read):
    with pytest.raises(UsageError, match="covers 32 pixels"):
        read({"image_size": 48}, spatial_factor=16)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("student.json", b"{", "cannot be read"),
        ("student.json", b'{"depth": "\xff"}', "cannot be read"),
        ("student.json", b"[]", "named values"),
        ("student.json", b'{"depth": 2, "depth": 3}', "'depth' stands there more than once"),
        ("student.toml", b"depth", "cannot be read"),
        ("student.yaml", b"", "neither"),
    ],
)
def test_files_that_are_none(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_student_config(tmp_path / name, TINY)


def test_no_file(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_student_config(tmp_path / "student.json", TINY)
