import pytest

from wandistiller.errors import OutputError
from wandistiller.files import complete_or_absent


def test_a_file_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "sub" / "x.txt"
    with complete_or_absent(target) as partial:
        partial.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_failure_keeps_what_was_there(tmp_path, kind):
    target = tmp_path / "x"
    if kind == "file":
        target.write_text("old")
    else:
        target.mkdir()
        (target / "old").touch()
    with pytest.raises(RuntimeError), complete_or_absent(target) as partial:
        partial.mkdir() if kind == "folder" else partial.write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_text() == "old" if kind == "file" else (target / "old").exists()


def test_a_folder_replaces_a_folder(tmp_path):
    target = tmp_path / "x"
    target.mkdir()
    (target / "old").touch()
    with complete_or_absent(target) as partial:
        partial.mkdir()
        (partial / "new").touch()
    assert [file.name for file in target.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_full_disk_is_said(tmp_path):
    with pytest.raises(OutputError, match="No space left"), complete_or_absent(tmp_path / "x"):
        raise OSError(28, "No space left on device")
