"""cuFile: whether GPUDirect Storage could be real here. Calls nothing of it."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mfload.checkup.findings import Finding
from mfload.checkup.system import System

_DIRECT = ("ext4", "xfs")
"""Local file systems that nvidia-fs has a way into; others bring modules of their own."""
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)


def look(system: System, devices: int, file_system: str | None) -> Iterator[Finding]:
    """Findings about cuFile.

    Args:
        system: The machine.
        devices: How many GPUs there are.
        file_system: Type of the file system in question, None for none.
    """
    found = _packages()
    if not devices:
        yield Finding("cufile", "GPUDirect Storage", "not asked about: there is no GPU")
        return
    if "kvikio" not in found:
        advice = "pip install kvikio-cu13 to read past the page cache into device memory"
        yield Finding("cufile", "kvikio", "not installed", "note", advice)
    else:
        yield Finding("cufile", "kvikio", found["kvikio"])
    driver = system.text("proc/driver/nvidia-fs/version")
    peer = system.exists("sys/module/nvidia/parameters/NVreg_EnableP2PDMA") or None
    if driver:
        yield Finding("cufile", "nvidia-fs", driver.splitlines()[0])
    else:
        advice = (
            "without it cuFile copies through host memory (its compatibility mode, or error 5008): "
            "install nvidia-fs, or a driver of 570 or newer with P2PDMA"
        )
        yield Finding("cufile", "nvidia-fs", "not loaded", "note", advice, {"p2pdma": peer})
    yield from _disk(file_system)
    yield from _configuration(system)


def _packages() -> dict[str, str]:
    if importlib.util.find_spec("kvikio") is None:
        return {}
    for name in ("kvikio-cu13", "kvikio-cu12", "kvikio"):
        try:
            return {"kvikio": version(name)}
        except PackageNotFoundError:
            continue
    return {"kvikio": "a version that says nothing of itself"}


def _disk(file_system: str | None) -> Iterator[Finding]:
    if file_system is None or file_system in _DIRECT:
        return
    advice = {
        "overlay": "files of a container's own layers can't be registered (5027, 5030): mount a "
        "volume for the weights",
        "tmpfs": "files in memory are no storage: plain reads are faster in any case",
    }.get(file_system, "local ext4 and xfs are what nvidia-fs knows; see the vendor's own module")
    yield Finding("cufile", "file system", file_system, "note", advice)


def _configuration(system: System) -> Iterator[Finding]:
    text = system.text("etc/cufile.json")
    if text is None:
        return
    try:
        table: Any = json.loads(_COMMENT.sub(lambda match: match[1] or "", text))
        allowed = table.get("properties", {}).get("allow_compat_mode")
    except (ValueError, AttributeError) as error:
        advice = "cuFile takes its defaults, or none of it"
        yield Finding("cufile", "/etc/cufile.json", f"malformed: {error}", "trouble", advice)
        return
    yield Finding("cufile", "/etc/cufile.json", f"allow_compat_mode: {allowed}", data=table)
