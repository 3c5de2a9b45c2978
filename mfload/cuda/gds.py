"""Whether cuFile reads a file into a device without passing host memory.

Where there is no direct way, cuFile and kvikio both copy through host memory without a word. So
before cuFile is used, it reads a little of the file in a process of its own, in which neither may
fall back: opening cuFile's driver hangs in some virtual machines. engine="gds" takes cuFile if the
bytes are right, "auto" if it bypassed the page cache as well.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mfload.cuda import cufile, discovery
from mfload.cuda.device import CUDA, Device
from mfload.io import probes
from mfload.io.subprocess_probe import Answer, ask
from mfload.planning.blocks import Block
from mfload.runtime import Deadline
from mfload.sources.local import LocalFile, OpenFile

TIMEOUT = 20.0
"""Seconds that the probe may take: it starts CUDA and imports CuPy and kvikio."""

_SAMPLE = 4 << 20
_WORTH = 4 << 30  # Bytes to read from disk that pay for a probe.
_LEAST = 0.5  # Seconds; no machine answers sooner.
_LONGER = 1.5
# A probe that hangs must leave time for the load, which then goes through the host.
_SHARE = 0.25
_ON = ("on", "true", "yes", "1")
# cuFile reads these before its configuration.
_NO_FALL_BACK = {"KVIKIO_COMPAT_MODE": "OFF", "CUFILE_ALLOW_COMPAT_MODE": "false"}


class Verdict(NamedTuple):
    """What a probe told."""

    real: bool  # Whether a read bypassed the page cache.
    why: str
    works: bool = False  # Whether cuFile brought the right bytes.


# Verdicts by device and disk, each with the seconds up to which it holds for other probes.
_known: dict[tuple[int, int], tuple[Verdict, float]] = {}
_probing = threading.Lock()


def check(
    devices: Sequence[Device], deadline: Deadline, against: str | None, path: str, cold: int | None
) -> tuple[bool, str]:
    """Says whether cuFile is to read a file onto devices, and why (see `io.route.PastHost`).

    `against` is what speaks against cuFile from the start, `cold` the bytes that the load reads
    from disk; None if the user asked for cuFile.
    """
    if against:
        return False, against
    why = ""
    for device in devices:
        kind, number = device.place
        if kind != CUDA:
            return False, f"{device.name} is not a CUDA device"
        seconds = min(TIMEOUT, deadline.left() * _SHARE)
        real, why, works = verdict(path, number, timeout=seconds, cold=cold)
        if not (works if cold is None else real):
            return False, why
    return True, why


def verdict(
    path: str,
    number: int,
    *,
    timeout: float | None = TIMEOUT,
    cold: int | None = None,
    root: Path = Path("/"),
) -> Verdict:
    """Says whether cuFile goes from a file's disk to a CUDA device past host memory.

    A no for a plain reason costs microseconds, a probe seconds. Its answer is kept for the device
    and the file system as long as this process lives. That none came in time is kept as well,
    until half as much time again is allowed. `cold` bytes to be read may be too few to pay for a
    probe. None: always probe. `root` is where `proc`, `etc` and `run` are.
    """
    if not cufile.installed():
        return Verdict(False, "kvikio is not installed")
    if no := next(ruled_out(root), None):
        return Verdict(False, no)
    real = os.path.realpath(path)
    try:
        status = os.stat(real)
    except OSError as error:
        return Verdict(False, f"the file can't be looked at: {error.strerror}")
    seconds = threading.TIMEOUT_MAX if timeout is None else max(0.0, timeout)
    key, end = (number, status.st_dev), time.monotonic() + seconds
    if (kept := _known.get(key)) and seconds < kept[1]:
        return kept[0]
    if cold is not None and cold < _WORTH:
        return Verdict(False, "too few bytes to pay for a probe of cuFile")
    if status.st_size < cufile.UNIT:
        return Verdict(False, "the file is too small for a probe of cuFile")
    # Another thread's probe may take all the time that this one has.
    if not _probing.acquire(timeout=seconds):
        return Verdict(False, "another thread still probes cuFile")
    try:
        if (kept := _known.get(key)) and seconds < kept[1]:
            return kept[0]
        left = end - time.monotonic()
        if left < _LEAST:
            return Verdict(False, "too little time is left for a probe of cuFile")
        with tempfile.TemporaryDirectory(prefix="mfload-", ignore_cleanup_errors=True) as folder:
            # cuFile would put its log in the user's folder.
            log = {"CUFILE_LOGFILE_PATH": os.path.join(folder, "cufile.log")}
            answer = ask(
                "mfload.cuda.gds", real, str(number),
                timeout=None if timeout is None else left, environment=_NO_FALL_BACK | log,
            )  # fmt: skip
        found = judge(answer)
        # With more time it may have answered.
        _known[key] = found, left * _LONGER if answer.late else float("inf")
        return found
    except OSError as error:
        return Verdict(False, f"a probe of cuFile can't be prepared: {error.strerror}")
    finally:
        _probing.release()


def ruled_out(root: Path) -> Iterator[str]:
    """Reasons why cuFile reads no file of this machine past host memory."""
    if os.environ.get("KVIKIO_COMPAT_MODE", "").lower() in _ON:
        yield "KVIKIO_COMPAT_MODE is on"
    if not (root / "run/udev").exists():
        yield "cuFile looks disks up in /run/udev, which is not there"
    if _is_set(root, "force_compat_mode", "CUFILE_FORCE_COMPAT_MODE"):
        yield "cuFile is told to copy through host memory (force_compat_mode)"
    if not (root / "proc/driver/nvidia-fs/version").exists() and not _is_set(
        root, "use_pci_p2pdma", "CUFILE_USE_PCIP2PDMA"
    ):
        yield "neither nvidia-fs is loaded nor use_pci_p2pdma set in cufile.json"


def _is_set(root: Path, name: str, variable: str) -> bool:
    """Whether a flag of cuFile is on: in a variable, or in its configuration with comments."""
    if given := os.environ.get(variable):
        return given.lower() in _ON
    path = os.environ.get("CUFILE_ENV_PATH_JSON") or "/etc/cufile.json"
    try:
        text = (root / os.path.abspath(path).lstrip("/")).read_text(errors="replace")
    except (OSError, ValueError):
        return False
    return re.search(rf'^[^/\n]*"{name}"\s*:\s*true\b', text, re.MULTILINE) is not None


def judge(answer: Answer) -> Verdict:
    """What a probe's answer means."""
    answer = answer.of(same=bool, cached=float | None)
    if answer.trouble:
        return Verdict(False, f"a probe of cuFile: {answer.trouble}")
    found: dict[str, Any] = answer.data
    if "error" in found:
        return Verdict(False, f"a probe of cuFile failed: {found['error']}")
    if not found["same"]:
        return Verdict(False, "a probe of cuFile brought other bytes than the file has")
    if found["cached"] is None:
        return Verdict(False, "not verified: the kernel does not say what it caches", works=True)
    if found["cached"]:
        return Verdict(False, "a probe of cuFile went through the page cache", works=True)
    return Verdict(True, "a probe of cuFile bypassed the page cache", works=True)


def probe(path: str, device: Device) -> dict[str, Any]:
    """Reads a little of a file through cuFile; tells whether the bytes were right and are cached.

    "cached" is None if the kernel does not tell, or had some of them before.
    """
    source = LocalFile(path)
    # Whole units: the ragged end of a file goes through host memory in any case.
    nbytes = min(_SAMPLE, source.size // cufile.UNIT * cufile.UNIT)
    with OpenFile(source) as opened:
        os.posix_fadvise(opened.fd, 0, nbytes, os.POSIX_FADV_DONTNEED)
        before = probes.cached_share(opened.fd, nbytes)
        slot = cufile.CufileSlot(device, nbytes)
        try:
            reader = cufile.CufileReader(source, device)
            try:
                start = reader.land(Block(0, 0, nbytes, ()), slot.buffer)
            finally:
                reader.close()
            cached = probes.cached_share(opened.fd, nbytes)
            found = np.empty(nbytes, np.uint8)
            stream = device.stream()
            stream.copy_out(found, slot.buffer, start)
            stream.synchronize()
            stream.close()
        finally:
            slot.close()
    same = found.tobytes() == source.read(0, nbytes)
    return {"same": same, "cached": cached if before == 0 else None}


def main(path: str, number: str) -> None:
    """Prints what `probe` found, as JSON."""
    try:
        # Nothing of cuFile before a driver and a device are known: without them it spins.
        found = probe(path, discovery.find(int(number)))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        found = {"error": str(error) or type(error).__name__}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
