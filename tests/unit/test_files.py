import os
import subprocess
import sys
from pathlib import Path

import pytest

from wandistiller.errors import OutputError, UsageError
from wandistiller.files import check_can_write, complete_or_absent, only_writer


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
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which root can make nothing")
def test_a_folder_that_nobody_can_make_is_found_beforehand():
    with pytest.raises(UsageError, match="cannot be written"):
        check_can_write(Path("/proc/x/y"))


HOLD = """
import os, sys
from pathlib import Path
from wandistiller.files import only_writer
with only_writer(Path(sys.argv[1])):
    if os.fork() == 0:  # a child that lives on has no part in it
        sys.stdin.read()
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs the locks of a Unix")
def test_one_process_at_a_time_writes_to_a_folder(tmp_path):
    run = tmp_path / "run"
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        number = other.stdout.readline().strip()
        with pytest.raises(UsageError, match=f"run is being written to by process {number} on"), only_writer(run):
            pass
        other.kill()
        other.wait()
        with only_writer(run):  # what was killed has left its file, and no lock
            assert (run / ".lock").exists()
    finally:
        other.stdin.close()
    assert list(run.iterdir()) == []
    with only_writer(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists(), "nothing was written to it"


KILLED = """
import os, signal, sys
from pathlib import Path
from wandistiller import files
target, moment = Path(sys.argv[1]), sys.argv[2]
if moment == "renaming":
    Path.replace = lambda *paths: os.kill(os.getpid(), signal.SIGTERM)
with files.only_writer(target.parent, [target.name]), files.complete_or_absent(target) as partial:
    partial.mkdir()
    (partial / "weights").write_text("new")
    if moment == "writing":
        os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs the locks of a Unix")
@pytest.mark.parametrize("moment", ["writing", "renaming"])
def test_what_a_kill_has_left_of_a_result_is_removed_by_the_next_writer(tmp_path, moment):
    """What stood there before stays, also if it had another name when the kill came."""
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "weights").write_text("old")
    assert subprocess.run([sys.executable, "-c", KILLED, str(run / "model"), moment]).returncode == -15
    assert len(list(run.glob(".model.*"))) == (1 if moment == "writing" else 2)
    others = [".report.partial-7.html", "states/.step-00000005.partial", "samples/.model.partial-7"]
    for name in others:  # of other commands, and in other folders, which have their own rules
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).touch()
    with only_writer(run, ["model"]):
        assert not list(run.glob(".model.*"))
        assert (run / "model" / "weights").read_text() == "old"
    assert all((run / name).exists() for name in others)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs the locks of a Unix")
def test_what_another_process_is_writing_is_left_to_it(tmp_path):
    run = tmp_path / "run"
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        other.stdout.readline()
        (run / ".model.partial-7").mkdir()
        with pytest.raises(UsageError, match="is being written to"), only_writer(run, ["model"]):
            pass
        assert (run / ".model.partial-7").exists()
    finally:
        other.kill()
        other.stdin.close()
        other.wait()
