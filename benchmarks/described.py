"""The machine that figures belong to, in plain data and in sentences."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

from mfload.bench.machine import file_system
from mfload.diagnostics import host

_PACKAGES = (
    "numpy", "ml-dtypes", "jax", "torch", "tensorflow", "tensorflow-cpu", "paddlepaddle",
    "cupy-cuda13x", "cupy-cuda12x", "safetensors", "fastsafetensors", "instanttensor",
    "runai-model-streamer", "transformers", "orbax-checkpoint", "xxhash", "typer", "tqdm",
)  # fmt: skip


def describe(folder: str | os.PathLike[str], seconds: float = 1.0) -> dict[str, Any]:
    """Names and figures of this machine, none of which identifies a person or a host."""
    cpu = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.+)$", cpu, re.MULTILINE)
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    pages = re.findall(r"\[(\w+)\]", huge.read_text()) if huge.exists() else []
    installed = {name: host.installed([name]) for name in _PACKAGES}
    versions = {name: version for name, version in installed.items() if version}
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "virtual": re.search(r"^flags.* hypervisor\b", cpu, re.MULTILINE) is not None,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release().split("-")[0],
        "file_system": file_system(folder),
        "huge_pages": pages[0] if pages else "unknown",
        "python": platform.python_version(),
        "versions": {"mfload": sys.modules["mfload"].__version__} | versions,
        "busy_share_before": round(busy_share(seconds), 3),
        "load_average": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }


def sentence(found: dict[str, Any]) -> str:
    """The machine in a sentence without its end: processor, cores, memory, kernel, disk, date."""
    kind = "virtual machine" if found["virtual"] else "machine"
    return (
        f"{found['cpu']} {kind}, {found['cores']} cores, {found['memory_gib']} GiB, "
        f"Linux {found['kernel']}, {found['file_system']}, {found['date']}"
    )


def versions_sentence(found: dict[str, Any]) -> str:
    """Python and the packages with their versions, with commas."""
    packages = [f"{name} {number}" for name, number in found["versions"].items()]
    return ", ".join([f"Python {found['python']}", *packages])


def busy_share(seconds: float = 1.0) -> float:
    """The share of the machine's CPU time that is in use now, 0 to 1; takes `seconds`."""

    def ticks() -> tuple[int, int]:
        spent = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(spent), spent[3] + spent[4]  # All; idle and waiting for the disk.

    total, idle = ticks()
    time.sleep(seconds)
    total_after, idle_after = ticks()
    return 1 - (idle_after - idle) / max(1, total_after - total)
