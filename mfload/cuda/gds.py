"""Whether cuFile reads a file into a device without passing host memory.

If there is no direct way, cuFile and kvikio both copy through host memory without a word, and
opening cuFile's driver hangs in some virtual machines. So cuFile first reads a little of the file
in a process of its own, in which neither may fall back. engine="gds" takes it if the bytes are
right, "auto" if it bypassed the page cache as well.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mfload import sources
from mfload.cuda import cufile, discovery
from mfload.cuda.device import CUDA, Device
from mfload.io import probes
from mfload.io.subprocess_probe import ask
from mfload.planning.blocks import Block
from mfload.runtime import Deadline

TIMEOUT, LEAST = 20.0, 5.0
"""Seconds that the probe may take, at most and at least: it starts CUDA and imports kvikio."""

_SAMPLE = 4 << 20
_WORTH = 4 << 30  # Bytes to read from disk that pay for a probe.
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


_known: dict[tuple[int, int], Verdict] = {}  # By device and disk.


def check(
    devices: Sequence[Device], deadline: Deadline, against: str | None, path: str, cold: int | None
) -> tuple[bool, str]:
    """Says whether cuFile is to read a file onto devices, and why (see `io.route.PastHost`).

    `against` is what speaks against cuFile from the start.
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

    A no for a plain reason costs microseconds, a probe seconds. What it told, also that it did not
    answer, is kept for the device and the file system as long as this process lives. `cold` bytes
    to be read may be too few to pay for a probe. None: always probe. `root` is where `proc`, `etc`
    and `run` are.
    """
    if not cufile.installed():
        return Verdict(False, "kvikio is not installed")
    if no := next(ruled_out(root), None):
        return Verdict(False, no)
    try:
        status = os.stat(path)
    except OSError as error:
        return Verdict(False, f"the file can't be looked at: {error.strerror}")
    key = number, status.st_dev
    if key in _known:
        return _known[key]
    if cold is not None and cold < _WORTH:
        return Verdict(False, "too few bytes to pay for a probe of cuFile")
    if status.st_size < cufile.UNIT:
        return Verdict(False, "the file is too small for a probe of cuFile")
    if timeout is not None and timeout < LEAST:
        return Verdict(False, "too little time is left for a probe of cuFile")
    try:
        with tempfile.TemporaryDirectory(prefix="mfload-") as folder:
            # cuFile would put its log in the user's folder.
            log = {"CUFILE_LOGFILE_PATH": os.path.join(folder, "cufile.log")}
            arguments = "mfload.cuda.gds", path, str(number)
            data, trouble = ask(*arguments, timeout=timeout, environment=_NO_FALL_BACK | log)
    except OSError as error:
        return Verdict(False, f"a probe of cuFile can't be prepared: {error.strerror}")
    found = Verdict(False, f"a probe of cuFile: {trouble or 'an answer that makes no sense'}")
    if not trouble and data.keys() == set(Verdict._fields):
        found = Verdict(**data)
    # Of two threads that probe at once, both take the answer of the first.
    return _known.setdefault(key, found)


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
    try:
        file = root / os.path.abspath(cufile.configuration()).lstrip("/")
        # The open of a FIFO would wait for a writer.
        text = file.read_text(errors="replace") if file.is_file() else ""
    except (OSError, ValueError):
        return False
    return re.search(rf'^[^/\n]*"{name}"\s*:\s*true\b', text, re.MULTILINE) is not None


def probe(path: str, device: Device) -> Verdict:
    """Reads a little of a file through cuFile, and looks at the bytes and at the page cache."""
    source = sources.find(path)
    # Whole units: the unaligned end of a file goes through host memory in any case.
    nbytes = min(_SAMPLE, source.size // cufile.UNIT * cufile.UNIT)
    found = np.empty(nbytes, np.uint8)
    with (
        source.open() as opened,
        closing(cufile.CufileSlot(device, nbytes)) as slot,
        closing(cufile.CufileReader(source, device)) as reader,
        closing(device.stream()) as stream,
    ):
        os.posix_fadvise(opened.fd, 0, nbytes, os.POSIX_FADV_DONTNEED)
        before = probes.cached_share(opened.fd, nbytes)
        start = reader.land(Block(0, 0, nbytes, ()), slot.buffer)
        cached = probes.cached_share(opened.fd, nbytes)
        stream.copy_out(found, slot.buffer, start)
        stream.synchronize()
    if found.tobytes() != source.read(0, nbytes):
        return Verdict(False, "a probe of cuFile brought other bytes than the file has")
    if before != 0 or cached is None:
        return Verdict(False, "not verified: the kernel does not say what it caches", works=True)
    if cached:
        return Verdict(False, "a probe of cuFile went through the page cache", works=True)
    return Verdict(True, "a probe of cuFile bypassed the page cache", works=True)


def main(path: str, number: str) -> None:
    """Prints the verdict of `probe`, as JSON."""
    try:
        # Nothing of cuFile before a driver and a device are known: without them it spins.
        found = probe(path, discovery.find(int(number)))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        found = Verdict(False, f"a probe of cuFile failed: {str(error) or type(error).__name__}")
    print(json.dumps(found._asdict()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
