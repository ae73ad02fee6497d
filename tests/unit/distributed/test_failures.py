"""What a rank leaves for torchrun when it ends itself and others."""

import multiprocessing
import os
import subprocess

from torch.distributed.elastic.multiprocessing.api import ProcessFailure
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from wandistiller.distributed.failures import end_rank
from wandistiller.errors import TrainingError


def end(file, others):
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(file)
    end_rank(TrainingError("Rank 1 has been silent."), 3, with_processes=others)


def test_torchrun_shows_the_one_that_knows_and_not_those_that_were_killed(tmp_path):
    """Also where it sees first that they are gone."""
    silent = subprocess.Popen(["sleep", "60"])
    knows = multiprocessing.get_context("fork").Process(target=end, args=(tmp_path / "error.json", [silent.pid]))
    knows.start()
    silent.wait()
    killed = ProcessFailure(local_rank=1, pid=silent.pid, exitcode=silent.returncode, error_file="nothing")
    knows.join()
    told = ProcessFailure(local_rank=0, pid=knows.pid, exitcode=knows.exitcode, error_file=str(tmp_path / "error.json"))
    assert (killed.exitcode, told.exitcode) == (-9, 3)
    rank, first = ChildFailedError("job", {1: killed, 0: told}).get_first_failure()
    assert rank == 0 and first.message["message"] == "Rank 1 has been silent."
