"""The GPU that figures belong to, asked from outside: no CUDA is loaded into this process."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from mfload.io.subprocess_probe import Probed, ask

_SMI = {
    "driver_version": "driver",
    "pcie.link.gen.max": "pcie_generation",
    "pcie.link.width.max": "pcie_width",
    "pcie.link.gen.current": "pcie_generation_now",
    "pcie.link.width.current": "pcie_width_now",
}
"""What nvidia-smi is asked, and what we call it."""
_TIMEOUT = 30.0


def look() -> dict[str, Any] | str:
    """The first device and what is known of it, or why there is none.

    Returns:
        `name`, `memory` (bytes), `pci`, `cuda` (what the driver speaks), `count`, and the fields of
        nvidia-smi where it is there.
    """
    return _judged(ask("mfload.diagnostics.probe", "cuda", timeout=_TIMEOUT))


def _judged(answer: Probed) -> dict[str, Any] | str:
    if answer.trouble:
        return f"the driver does not answer: {answer.trouble}"
    if "error" in answer.data:
        return str(answer.data["error"])
    devices = answer.data["devices"]
    if not devices:
        return "the driver shows no device"
    found = {**devices[0], "cuda": answer.data["driver"], "count": len(devices)}
    return {**found, **_smi(devices[0]["pci"])}


def _smi(pci: str) -> dict[str, str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader", f"--id={pci}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = list(csv.reader(done.stdout.splitlines(), skipinitialspace=True))
    if done.returncode or not rows:
        return {}
    return dict(zip(_SMI.values(), rows[0], strict=False))


def environment(count: int) -> dict[str, str]:
    """What measuring processes are run with, so that they see the devices that this one would.

    Args:
        count: How many devices there are; with 0 they see none.
    """
    if not count:
        return {}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return {"CUDA_VISIBLE_DEVICES": seen, "JAX_PLATFORMS": "cuda,cpu"}


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def kernel_pins() -> dict[str, int]:
    """What the kernel counts as locked or pinned in this process, in KiB."""
    text = Path("/proc/self/status").read_text()
    return {name: int(kib) for name, kib in re.findall(r"^(VmLck|VmPin):\s+(\d+)", text, re.M)}


def slug(name: str) -> str:
    """A name as a part of a file's name: `NVIDIA H100 80GB HBM3` is `h100-80gb-hbm3`."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join(word for word in words if word != "nvidia") or "gpu"


def sentence(found: dict[str, Any]) -> str:
    """The device in a sentence without its end."""
    if "memory" not in found:
        return "no GPU: host arrays, whose figures mean nothing"
    parts = [f"{found['name']}, {found['memory'] / 2**30:.0f} GiB"]
    if found["count"] > 1:
        parts.append(f"the first of {found['count']}")
    if "pcie_width" in found:
        now = f"{found['pcie_generation_now']} x{found['pcie_width_now']} when asked"
        parts.append(f"PCIe {found['pcie_generation']} x{found['pcie_width']} ({now})")
    if "driver" in found:
        parts.append(f"driver {found['driver']}")
    parts.append(f"CUDA {found['cuda']}")
    return ", ".join(parts)
