"""The machine and the versions that figures belong to."""

from __future__ import annotations

import os
import platform
import time
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from mfload.bench.pagecache import file_system

_PACKAGES = (
    "mfload",
    "numpy",
    "ml_dtypes",
    "jax",
    "torch",
    "tensorflow",
    "tensorflow-cpu",
    "paddlepaddle",
    "safetensors",
    "fastsafetensors",
    "runai-model-streamer",
    "xxhash",
    "typer",
    "rich",
)


def _cpuinfo(field: str) -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.split(":")[0].strip() == field:
            return line.split(":", 1)[1].strip()
    return ""


def _huge_pages() -> str:
    """The chosen one of `always [madvise] never`."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    words = path.read_text().split() if path.exists() else []
    return next((word.strip("[]") for word in words if word.startswith("[")), "unknown")


def busy_share(seconds: float = 1.0) -> float:
    """The share of the machine's CPU time that others use now, from 0 to 1; takes `seconds`."""

    def read() -> tuple[int, int]:
        ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4]  # all; idle and waiting for the disk

    total, idle = read()
    time.sleep(seconds)
    total_after, idle_after = read()
    return 1 - (idle_after - idle) / max(1, total_after - total)


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            # Run from its source tree, it is not installed; its import costs next to nothing.
            if package == "mfload" and find_spec(package):
                versions[package] = import_module(package).__version__
    return versions


def describe(folder: str | os.PathLike[str], seconds: float = 1.0) -> dict[str, object]:
    """Describe this machine.

    Args:
        folder: Where the checkpoints are, for its file system.
        seconds: How long to look how busy it is.

    Returns:
        Names and figures, none of which identifies a person or a host.
    """
    return {
        "cpu": _cpuinfo("model name") or platform.machine(),
        "cores": os.cpu_count(),
        "virtual": "hypervisor" in _cpuinfo("flags").split(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release().split("-")[0],
        "file_system": file_system(folder),
        "huge_pages": _huge_pages(),
        "python": platform.python_version(),
        "versions": _versions(),
        "busy_share_before": round(busy_share(seconds), 3),
        "load_average": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }


def sentence(found: dict[str, object]) -> str:
    """The machine in a sentence without its end: processor, cores, memory, kernel, disk, date."""
    kind = "virtual machine" if found["virtual"] else "machine"
    return (
        f"{found['cpu']} {kind}, {found['cores']} cores, {found['memory_gib']} GiB, "
        f"Linux {found['kernel']}, {found['file_system']}, {found['date']}"
    )


def versions_sentence(found: dict[str, object]) -> str:
    """Python and the packages with their versions, with commas."""
    versions = found["versions"]
    listed = versions.items() if isinstance(versions, dict) else ()
    packages = [f"{name} {number}" for name, number in listed]
    return ", ".join([f"Python {found['python']}", *packages])
