"""``wandistiller doctor``: what this machine can do, found by doing it.

For every device and precision a small Wan runs forward, backward and backward with checkpointing, and is saved and loaded
again; buses and disk are measured; memory limits are read, also a container's. What is broken is said with its own error
message, and the exit code tells programs.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from wandistiller.config.doctor import DoctorConfig
from wandistiller.memory.host_limits import available_host_memory, total_host_memory
from wandistiller.memory.monitor import device_memory
from wandistiller.memory.rates import copy_rate
from wandistiller.models.devices import DTYPES, available_devices, find_device
from wandistiller.models.load import load_transformer
from wandistiller.models.sizes import find_size
from wandistiller.models.stored import stays_in_float32
from wandistiller.terminal import say
from wandistiller.units import Bytes

_LIBRARIES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "safetensors",
    "av",
    "triton",
    "torchao",
    "bitsandbytes",
)
_COPY_BYTES = 256 * 2**20


@dataclass
class Check:
    """One thing that was tried: how long it took, or why it failed."""

    name: str
    seconds: float | None = None
    error: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None


@dataclass
class DeviceReport:
    """One device: its memory, its buses, and the checks in each precision."""

    device: str
    name: str
    total_bytes: int
    free_bytes: int
    attention: dict[str, str] = field(default_factory=dict)
    """Kernel that attention takes, by precision."""
    pinned_gb_per_second: float | None = None
    pageable_gb_per_second: float | None = None
    checks: dict[str, list[Check]] = field(default_factory=dict)
    """Checks by precision."""
    general: list[Check] = field(default_factory=list)
    """Checks of the device as a whole."""


@dataclass
class Diagnosis:
    """All that was found."""

    versions: dict[str, str]
    python: str
    system: str
    cpu_cores: int
    host_total_bytes: int
    host_available_bytes: int
    disk_folder: str
    disk_free_bytes: int
    disk_write_gb_per_second: float | None
    disk_read_gb_per_second: float | None
    disk_read_is_cold: bool
    """Whether the file was really out of the system's cache when it was read."""
    disk_error: str | None
    devices: list[DeviceReport]

    @property
    def broken(self) -> list[str]:
        """What failed, each in a line."""
        checks = [
            (f"{report.device} {dtype}".strip(), check)
            for report in self.devices
            for dtype, found in {"": report.general, **report.checks}.items()
            for check in found
        ]
        broken = [f"{where} {check.name}: {check.error}" for where, check in checks if not check.is_ok]
        return broken + ([f"disk {self.disk_folder}: {self.disk_error}"] if self.disk_error else [])

    @property
    def exit_code(self) -> int:
        return 1 if self.broken else 0


def run_doctor(config: DoctorConfig) -> Diagnosis:
    """Check everything, print it, and return it."""
    config.check()
    devices = available_devices() if config.device == "all" else [find_device(config.device)]
    speeds: list[tuple[float | None, float | None, bool]] = []
    num_bytes = config.disk_megabytes * 10**6
    disk = _try("disk", lambda: speeds.append(_measure_disk(config.disk, num_bytes)), torch.device("cpu"))
    write_speed, read_speed, is_cold = speeds[0] if speeds else (None, None, False)
    diagnosis = Diagnosis(
        versions=_versions(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        host_total_bytes=total_host_memory(),
        host_available_bytes=available_host_memory(),
        disk_folder=str(config.disk.resolve()),
        disk_free_bytes=shutil.disk_usage(config.disk).free,
        disk_write_gb_per_second=write_speed,
        disk_read_gb_per_second=read_speed,
        disk_read_is_cold=is_cold,
        disk_error=disk.error,
        devices=[_examine(device) for device in devices],
    )
    if config.json:
        print(json.dumps({**asdict(diagnosis), "broken": diagnosis.broken}, indent=2))
    else:
        _print_tables(diagnosis)
    return diagnosis


def _examine(device: torch.device) -> DeviceReport:
    report = DeviceReport(str(device), str(device), 0, 0)

    def describe() -> None:
        memory = device_memory(device)
        report.total_bytes, report.free_bytes = memory.total, memory.free
        report.name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()

    def measure_bus() -> None:
        report.pinned_gb_per_second = copy_rate(device, num_bytes=_COPY_BYTES) / 1e9
        report.pageable_gb_per_second = copy_rate(device, page_locked=False, num_bytes=_COPY_BYTES) / 1e9

    report.general.append(_try("memory", describe, device))
    if device.type == "cuda":
        report.general.append(_try("bus", measure_bus, device))
    for name, dtype in DTYPES.items():
        report.attention[name] = "broken"

        def find_kernel(name: str = name, dtype: torch.dtype = dtype) -> None:
            report.attention[name] = _attention_kernel(device, dtype)

        report.checks[name] = [_try("attention", find_kernel, device), *_check_precision(device, dtype)]
    return report


def _check_precision(device: torch.device, dtype: torch.dtype) -> list[Check]:
    """Run a small Wan in one precision, in everything that a user will ask of it."""
    size = find_size("tiny")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = WanTransformer3DModel(**size.transformer)
    inputs = {
        "hidden_states": torch.randn(1, size.transformer["in_channels"], 3, 16, 16),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 64, size.transformer["text_dim"]),
    }
    gradients: dict[str, torch.Tensor] = {}

    def place() -> None:
        for name, parameter in model.named_parameters():
            kept = stays_in_float32(type(model), name)
            parameter.data = parameter.data.to(device, torch.float32 if kept else dtype)
        model.rope.to(device)
        for name in inputs:
            inputs[name] = inputs[name].to(device, dtype)

    def forward() -> None:
        with torch.no_grad():
            _require_finite(model(**inputs, return_dict=False)[0])

    def backward() -> None:
        gradients["plain"] = _gradient(model, inputs)

    def checkpointed() -> None:
        model.enable_gradient_checkpointing()
        try:
            gradient = _gradient(model, inputs)
        finally:
            model.disable_gradient_checkpointing()
        # The same kernels run again on the same values; only their order of summation may differ.
        if "plain" in gradients and not torch.allclose(gradient, gradients["plain"], rtol=0.05, atol=1e-3):
            raise RuntimeError("gradients differ from those without checkpointing")

    def save_and_load() -> None:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = load_transformer(Path(folder), device=device)
        for (name, saved), read in zip(model.named_parameters(), loaded.parameters(), strict=True):
            if not torch.equal(saved.to(read.dtype), read):
                raise RuntimeError(f"{name} came back changed")

    steps: tuple[tuple[str, Callable[[], None]], ...] = (
        ("move", place),
        ("forward", forward),
        ("backward", backward),
        ("checkpointed", checkpointed),
        ("save/load", save_and_load),
    )
    return [_try(name, step, device) for name, step in steps]


def _gradient(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    model(**inputs, return_dict=False)[0].float().square().mean().backward()
    gradient = torch.cat([parameter.grad.float().flatten() for parameter in model.parameters() if parameter.grad is not None])
    _require_finite(gradient)
    return gradient


def _require_finite(tensor: torch.Tensor) -> None:
    if not torch.isfinite(tensor).all():
        raise RuntimeError("not all numbers are finite")


def _try(name: str, step: Callable[[], None], device: torch.device) -> Check:
    start = time.perf_counter()
    try:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001 - whatever breaks is the finding
        return Check(name, error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    return Check(name, seconds=time.perf_counter() - start)


class _KernelName(TorchDispatchMode):
    """Records which attention operator PyTorch chooses; the plain one has none of its own."""

    name = "math"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        match = re.search(r"scaled_dot_product_(\w+?)_attention", str(func))
        if match:
            self.name = match.group(1)
        return func(*args, **(kwargs or {}))


def _attention_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """Return the kernel that PyTorch takes for attention of Wan's shape."""
    query = torch.randn(1, 2, 64, 128, device=device, dtype=dtype)
    with _KernelName() as used:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    return used.name


def _measure_disk(folder: Path, num_bytes: int) -> tuple[float | None, float | None, bool]:
    """Return write and read speed in GB/s, and whether the read really came from the disk."""
    if num_bytes == 0:
        return None, None, False
    if shutil.disk_usage(folder).free < 2 * num_bytes:
        raise RuntimeError("too little room to measure it; free some, or give --disk-megabytes 0")
    block = os.urandom(2**22)
    count = -(-num_bytes // len(block))
    is_cold = False
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".wandistiller-doctor-") as file:
        start = time.perf_counter()
        for _ in range(count):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        write_seconds = time.perf_counter() - start
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            is_cold = not _is_cached(file.fileno(), len(block))
        buffer = bytearray(len(block))
        start = time.perf_counter()
        with Path(file.name).open("rb", buffering=0) as reader:
            while reader.readinto(buffer):
                pass
        read_seconds = time.perf_counter() - start
    size = count * len(block) / 1e9
    return size / write_seconds, size / read_seconds, is_cold


def _is_cached(descriptor: int, num_bytes: int) -> bool:
    """Say whether the start of a file is in the system's cache: it can then be read without waiting."""
    try:
        return os.preadv(descriptor, [bytearray(num_bytes)], 0, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError:  # a file system that cannot say
        return True


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        match = re.search(r"^model name\s*:\s*(.+)$", information.read_text(), re.MULTILINE)
        if match:
            return match.group(1)
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _print_tables(diagnosis: Diagnosis) -> None:
    console = Console(emoji=False)
    machine = Table(title="This machine", show_header=False)
    for name, value in _machine_rows(diagnosis):
        machine.add_row(name, value)
    console.print(machine)
    for report in diagnosis.devices:
        memory = f"{Bytes(report.free_bytes)} free of {Bytes(report.total_bytes)}"
        table = Table(title=f"{report.device}: {report.name}, {memory}")
        table.add_column("precision")
        table.add_column("attention")
        for check in next(iter(report.checks.values()))[1:]:
            table.add_column(check.name)
        for dtype, checks in report.checks.items():
            cells = [
                f"{check.seconds * 1000:.0f} ms" if check.seconds is not None else "[red]BROKEN[/red]" for check in checks[1:]
            ]
            table.add_row(dtype, report.attention[dtype], *cells)
        console.print(table)
        if report.pinned_gb_per_second is not None:
            console.print(
                f"host to {report.device}: {report.pinned_gb_per_second:.1f} GB/s page-locked, "
                f"{report.pageable_gb_per_second:.1f} GB/s pageable"
            )
    for line in diagnosis.broken:
        console.print(f"[red]broken[/red] {line}", highlight=False)
    if not diagnosis.broken:
        say("Everything works.")


def _machine_rows(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    rows: list[tuple[str, Any]] = [
        ("system", f"{diagnosis.system}, {diagnosis.cpu_cores} cores"),
        ("python", diagnosis.python),
        ("libraries", ", ".join(f"{name} {number}" for name, number in diagnosis.versions.items())),
        ("host memory", f"{Bytes(diagnosis.host_available_bytes)} available of {Bytes(diagnosis.host_total_bytes)}"),
        ("disk", f"{Bytes(diagnosis.disk_free_bytes)} free in {diagnosis.disk_folder}"),
    ]
    if diagnosis.disk_write_gb_per_second is not None and diagnosis.disk_read_gb_per_second is not None:
        kind = "cold" if diagnosis.disk_read_is_cold else "possibly from the system's cache"
        rows.append(
            (
                "disk speed",
                f"read {diagnosis.disk_read_gb_per_second:.1f} GB/s ({kind}), "
                f"write {diagnosis.disk_write_gb_per_second:.1f} GB/s",
            )
        )
    return rows
