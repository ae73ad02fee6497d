"""Processes of their own that start at once: forked from a server that has imported what they need and done nothing else.

A process that has computed has threads, of autograd and of CUDA's libraries, which a fork of it would lack.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch

_IMPORTED = ["wandistiller.api", "wandistiller.train.loop", "diffusers.models", "torch._dynamo"]


def start(function: Callable[..., Any], *arguments: Any, output: Path, errors: Path, folder: Path | None = None) -> BaseProcess:
    """Call a function in a process of its own, in a folder, with this one's environment and what it prints in files."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    place = Path.cwd() if folder is None else folder
    found = (inspect.getfile(function), function.__name__)
    process = context.Process(target=_be, args=(found, arguments, output, errors, place, dict(os.environ)))
    process.start()
    return process


def run_command(arguments: Sequence[object], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``wandistiller`` with arguments in a folder, as a shell would, without the time that importing takes."""
    return call(_command, [str(each) for each in arguments], folder=folder)


def call(function: Callable[..., Any], *arguments: Any, folder: Path) -> subprocess.CompletedProcess[str]:
    """Call a function in a process of its own, in a folder, and wait for its end."""
    output, errors = folder / ".stdout", folder / ".stderr"
    process = start(function, *arguments, output=output, errors=errors, folder=folder)
    process.join()
    texts = [path.read_text() for path in (output, errors)]
    for path in (output, errors):
        path.unlink()
    return subprocess.CompletedProcess([function.__name__], process.exitcode or 0, *texts)


def load(file: str, name: str) -> Callable[..., Any]:
    """Return a function by its file: what pytest calls a test's module is not to be imported elsewhere."""
    spec = importlib.util.spec_from_file_location("loaded", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., Any] = getattr(module, name)
    return found


def _command(arguments: list[str]) -> NoReturn:
    from wandistiller.cli.main import main

    sys.exit(main(arguments))


def _be(
    function: tuple[str, str],
    arguments: tuple[Any, ...],
    output: Path,
    errors: Path,
    folder: Path,
    environment: Mapping[str, str],
) -> None:
    for number, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ |= environment
    os.chdir(folder)
    torch.set_num_threads(1)  # several of them run on two cores
    gc.freeze()  # what was imported is not looked through again and again
    try:
        load(*function)(*arguments)
    except SystemExit as done:
        _end(done.code if isinstance(done.code, int) else int(done.code is not None))
    except BaseException:  # noqa: BLE001 - printed where the test looks
        traceback.print_exc()
        _end(1)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
