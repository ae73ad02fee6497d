import pytest

from wandistiller.errors import UsageError
from wandistiller.units import Bytes


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GB", 24 * 10**9),
        ("512mib", 512 * 2**20),
        ("1.5KiB", 1536),
        ("0", 0),
        ("2097152", 2**21),
        ("80b", 80),
    ],
)
def test_sizes_are_read(text, value):
    assert Bytes.parse(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "12 parsecs", "-3GiB", "1e3"])
def test_what_is_no_size_is_an_error(text):
    with pytest.raises(UsageError, match="is not a size"):
        Bytes.parse(text)


def test_nobody_means_a_card_of_24_bytes():
    with pytest.raises(UsageError, match="'24' has no unit") as caught:
        Bytes.parse("24")
    assert "24GiB" in caught.value.fix


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (1023, "1023 B"), (2**30 * 23.5, "23.5 GiB"), (2**41, "2.0 TiB")])
def test_sizes_are_printed(value, text):
    assert str(Bytes(value)) == text


def test_they_add_up_and_align():
    assert str(sum([Bytes(2**20), Bytes(2**20)], Bytes(0))) == "2.0 MiB"
    assert f"{Bytes(2**20):>10}" == "   1.0 MiB"
    assert f"{Bytes(2**20):,}" == "1,048,576"
