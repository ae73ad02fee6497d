from pathlib import Path

import pytest

from wandistiller.errors import OutputError, UsageError
from wandistiller.files import check_can_write, complete_or_absent


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


def test_a_folder_is_never_replaced_by_a_file(tmp_path):
    target = tmp_path / "x.png"
    target.mkdir()
    (target / "precious").touch()
    with pytest.raises(OutputError, match="in the way"), complete_or_absent(target) as partial:
        partial.write_text("new")
    assert (target / "precious").exists()


def test_a_place_that_cannot_be_written_is_found_beforehand(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not a folder"):
        check_can_write(tmp_path / "file" / "x.png")
    check_can_write(tmp_path / "new" / "folders" / "x.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"], "nothing is left"
    if Path("/proc").is_dir():  # where nobody can write, whatever the permissions say
        with pytest.raises(UsageError, match="cannot be written"):
            check_can_write(Path("/proc/x.html"))
    assert not (tmp_path / "new").exists()
