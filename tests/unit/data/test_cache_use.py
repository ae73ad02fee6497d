"""Who may use a cache folder at the same time."""

import errno
import fcntl
import multiprocessing
import os
import subprocess
import sys

import pytest

from wandistiller.data.cache_use import using_cache
from wandistiller.errors import UsageError

SMALL, LARGE = {"sizes": "1x32x32", "precision": None}, {"sizes": "1x64x64", "precision": None}

HOLD = """
import sys
from pathlib import Path
from wandistiller.data.cache_use import using_cache
with using_cache(Path(sys.argv[1]), {"sizes": "1x32x32", "precision": None}):
    print(flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that uses the cache for small pictures."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "cache")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_another_size_is_kept_out_until_the_job_has_ended(tmp_path, other):
    cache = tmp_path / "cache"
    with (
        pytest.raises(UsageError, match=f"in use by process {other.pid} on .*, with other sizes") as refusal,
        using_cache(cache, LARGE),
    ):
        pass
    assert "--cache-dir" in str(refusal.value)
    with using_cache(cache, SMALL), using_cache(tmp_path / "elsewhere", LARGE):
        pass
    other.communicate()  # it ends by itself
    with using_cache(cache, LARGE):
        pass
    assert files(cache) == []


def test_a_killed_process_keeps_nobody_out(tmp_path, other):
    other.kill()
    other.wait()
    assert files(tmp_path / "cache")
    with using_cache(tmp_path / "cache", LARGE):
        pass
    assert files(tmp_path / "cache") == []


def test_the_last_one_of_a_size_leaves_the_folder_to_others(tmp_path):
    with using_cache(tmp_path, SMALL):
        with using_cache(tmp_path, SMALL):
            pass
        with pytest.raises(UsageError, match="other sizes"), using_cache(tmp_path, LARGE):
            pass
    with using_cache(tmp_path, LARGE), pytest.raises(UsageError, match="other sizes"), using_cache(tmp_path, SMALL):
        pass


def test_what_takes_any_goes_with_all_and_others_do_not_go_together(tmp_path):
    """The third is seen to differ from the second, though both go with the first."""
    longer, shorter = {**SMALL, "precision": "float32"}, {**SMALL, "precision": "bfloat16"}
    refused = pytest.raises(UsageError, match="other precision")
    with using_cache(tmp_path, SMALL), using_cache(tmp_path, longer), refused, using_cache(tmp_path, shorter):
        pass


def test_a_job_that_fails_leaves_the_folder_to_others(tmp_path):
    with pytest.raises(RuntimeError), using_cache(tmp_path, SMALL):
        raise RuntimeError
    with using_cache(tmp_path, LARGE):
        pass


def test_a_worker_that_is_still_there_does_not_hold_what_its_job_has_given_back(tmp_path):
    context = multiprocessing.get_context("fork")
    go_on = context.Event()
    with using_cache(tmp_path, SMALL):
        worker = context.Process(target=go_on.wait)
        worker.start()
    with using_cache(tmp_path, LARGE):
        go_on.set()
    worker.join()


def _take_turns(folder, making, counters, queue):
    """Count who is inside; nobody of another kind may be."""
    entered, mixed = 0, 0
    mine, theirs = counters
    for _ in range(150):
        try:
            with using_cache(folder, making):
                with mine.get_lock():
                    mine.value += 1
                entered += 1
                mixed += theirs.value > 0
                with mine.get_lock():
                    mine.value -= 1
        except UsageError:
            continue
    queue.put((entered, mixed))


def test_whoever_comes_at_the_same_moment(tmp_path):
    context = multiprocessing.get_context("fork")
    queue, counts = context.Queue(), [context.Value("i", 0), context.Value("i", 0)]
    jobs = [(SMALL, counts), (LARGE, counts[::-1])] * 2
    workers = [context.Process(target=_take_turns, args=(tmp_path, *job, queue)) for job in jobs]
    for worker in workers:
        worker.start()
    found = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert sum(entered for entered, _ in found) >= 150
    assert all(mixed == 0 for _, mixed in found)
    assert files(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with using_cache(tmp_path, SMALL), using_cache(tmp_path, LARGE):
        pass


def test_no_unix(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with using_cache(tmp_path, SMALL), using_cache(tmp_path, LARGE):
        pass


def test_a_folder_that_cannot_be_written(tmp_path):
    """Where a file stands nobody can make a folder, root neither."""
    (tmp_path / "cache").write_text("")
    with using_cache(tmp_path / "cache", SMALL), using_cache(tmp_path / "cache", LARGE):
        pass
    with using_cache(tmp_path / "cache" / "in-there", SMALL):
        pass
