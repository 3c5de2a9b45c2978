"""Whether cuFile really goes from a file's disk to a device, past host memory.

cuFile copies through host memory wherever it has no direct way, and says nothing of it; so does
kvikio. So nothing is taken for real that was not seen: first come facts that cost nothing and
rule it out, then a read in a process of its own in which neither may fall back, with a look at
the counters of cuFile and of nvidia-fs.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mfload.cuda import cufile, cufile_json
from mfload.cuda.device import CUDA
from mfload.cuda.mounts import Mount, mount
from mfload.cuda.system import System
from mfload.io.subprocess_probe import Answer, ask

TIMEOUT = 20.0
"""Seconds that the probe may take: it starts CUDA and imports CuPy and kvikio."""

_WORTH = 4 << 30
_LEAST = 0.5  # No machine answers sooner.
_LONGER = 1.5
_ON = ("on", "true", "yes", "1")
_KINDS = ("ext4", "xfs", "nfs", "nfs4", "lustre", "wekafs", "beegfs", "gpfs", "scatefs", "panfs",
          "virtiofs")  # fmt: skip
_WHY_NOT = {
    "overlay": "overlayfs can't be registered with cuFile (5027, 5030): mount a volume",
    "tmpfs": "tmpfs is memory, no storage",
    "ramfs": "ramfs is memory, no storage",
}


class Place(Protocol):
    """What is asked of a device: nothing that would wake its driver (see `device.Device`)."""

    @property
    def name(self) -> str:
        """As people type it."""
        ...

    @property
    def place(self) -> tuple[int, int]:
        """DLPack's (device type, number)."""
        ...


class Verdict(NamedTuple):
    """Whether reads go past host memory.

    Attributes:
        real: They do, and it was seen.
        why: The reason, for people.
    """

    real: bool
    why: str


class _Kept(NamedTuple):
    """A verdict, and for which looks it holds: those of up to so many seconds."""

    verdict: Verdict
    seconds: float


_known: dict[tuple[Any, ...], _Kept] = {}
_asking = threading.Lock()


def verdict(
    path: str | os.PathLike[str],
    device: Place,
    *,
    timeout: float | None = TIMEOUT,
    cold: int | None = None,
    root: Path = Path("/"),
) -> Verdict:
    """Says whether cuFile goes from a file's disk to a device past host memory.

    A no for a plain reason costs microseconds. Else it reads a few MiB of the file in a process
    of its own, which costs seconds; the answer is kept for the device and the file system as
    long as this process lives. That none came in time is kept as well, until somebody gives the
    probe half as much time again.

    Args:
        path: The file.
        device: The device.
        timeout: Seconds for the probe; then it is killed, and the answer is no. So it is where
            they are too few for any probe. None for ever.
        cold: Bytes that are to be read; where they are too few to pay for the probe, the answer
            is no. None where that does not matter.
        root: Where `proc`, `sys`, `etc` and `run` are; tests lay made-up trees.
    """
    system = System(root)
    real = os.path.realpath(path)
    no = next(_against(system, real, device), None)
    if no is not None:
        return Verdict(False, no)
    try:
        status = os.stat(real)
    except OSError as error:
        return Verdict(False, f"the file can't be looked at: {error.strerror}")
    key = (device.place, status.st_dev, root)
    end = float("inf") if timeout is None else time.monotonic() + timeout
    known = _kept(key, timeout)
    if known is not None:
        return known
    if cold is not None and cold < _WORTH:
        return Verdict(False, "too few bytes to pay for a look whether cuFile is real here")
    if status.st_size < cufile.UNIT:
        return Verdict(False, "the file is too small to tell whether cuFile is real here")
    # Another thread's look may take all the time that this one has.
    if not _asking.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
        return Verdict(False, "another thread is still at it to see whether cuFile is real here")
    try:
        left = end - time.monotonic()
        known = _kept(key, timeout)
        if known is not None:
            return known
        if left < _LEAST:
            return Verdict(False, "too little time is left to see whether cuFile is real here")
        answer = _probe(system, real, device, None if timeout is None else left)
        found = judge(answer)
        # With more time it may have answered.
        _known[key] = _Kept(found, left * _LONGER if answer.late else float("inf"))
        return found
    except OSError as error:
        return Verdict(False, f"a probe of cuFile can't be prepared: {error.strerror}")
    finally:
        _asking.release()


def _kept(key: tuple[Any, ...], timeout: float | None) -> Verdict | None:
    """What an earlier look found, if this one would be no longer."""
    kept = _known.get(key)
    seconds = threading.TIMEOUT_MAX if timeout is None else timeout
    return None if kept is None or seconds >= kept.seconds else kept.verdict


def forget() -> None:
    """Drops what earlier probes found, as after a driver was loaded."""
    with _asking:
        _known.clear()


def _against(system: System, path: str, device: Place) -> Iterator[str]:
    """Reasons why it can't be, the plainest first."""
    if device.place[0] != CUDA:
        yield f"{device.name} is no CUDA device"
    if not cufile.installed():
        yield "kvikio is not installed"
    yield from without(system)
    where = mount(system, path)
    if where is not None:
        yield from file_system(where)


def without(system: System) -> Iterator[str]:
    """Reasons why no file of this machine can go past host memory.

    Args:
        system: The machine.
    """
    if "microsoft" in (system.text("proc/version") or platform.release()).lower():
        yield "WSL has no cuFile"
    if not system.exists("run/udev"):
        yield "cuFile looks disks up in /run/udev, which is not there"
    if os.environ.get("KVIKIO_COMPAT_MODE", "").lower() in _ON:
        yield "KVIKIO_COMPAT_MODE is on"
    configuration = cufile_json.read(system)
    if configuration.trouble:
        yield f"{configuration.path} is malformed: {configuration.trouble}"
    if configuration.forced:
        yield "cuFile is told to copy through host memory (force_compat_mode)"
    if not (system.exists("proc/driver/nvidia-fs/version") or configuration.p2pdma):
        yield "neither nvidia-fs is loaded nor use_pci_p2pdma set in cufile.json"


def file_system(where: Mount) -> Iterator[str]:
    """Reasons why no file of a mount can go past host memory.

    Args:
        where: The mount.
    """
    kind = where.kind
    if kind not in _KINDS:
        yield _WHY_NOT.get(kind, f"cuFile has no direct way into {kind}")
    if kind == "ext4" and where.options & {"data=journal", "data=writeback"}:
        yield "cuFile reads ext4 with data=ordered alone"
    if kind.startswith("nfs") and "proto=rdma" not in where.options:
        yield "cuFile needs NFS over RDMA"


def _probe(system: System, path: str, device: Place, timeout: float | None) -> Answer:
    table = cufile_json.read(system).table
    table = {
        **table,
        "properties": {**table.get("properties", {}), "allow_compat_mode": False},
        "profile": {"cufile_stats": 3},
    }
    with tempfile.TemporaryDirectory(prefix="mfload-", ignore_cleanup_errors=True) as folder:
        options = Path(folder, "cufile.json")
        options.write_text(json.dumps(table))
        # Neither library may fall back, and cuFile keeps its log out of the user's folder.
        environment = {
            "KVIKIO_COMPAT_MODE": "OFF",
            "CUFILE_ENV_PATH_JSON": str(options),
            "CUFILE_LOGFILE_PATH": str(Path(folder, "cufile.log")),
        }
        return ask(
            "mfload.cuda.probe_cufile", path, str(device.place[1]), str(system.root),
            timeout=timeout, environment=environment,
        )  # fmt: skip


def judge(answer: Answer) -> Verdict:
    """What a probe's answer means.

    Args:
        answer: What `probe_cufile` said.
    """
    count = int | None
    answer = answer.of(same=bool, direct=count, posix=count, nvidia_fs=bool | None)
    if answer.trouble:
        return Verdict(False, f"a probe of cuFile: {answer.trouble}")
    found: dict[str, Any] = answer.data
    if "error" in found:
        return Verdict(False, f"a probe of cuFile failed: {found['error']}")
    if not found["same"]:
        return Verdict(False, "a probe of cuFile brought other bytes than the file has")
    direct, posix, driver = found["direct"], found["posix"], found["nvidia_fs"]
    if posix:
        return Verdict(False, "cuFile's counters show reads through host memory")
    if direct:
        return Verdict(True, f"cuFile's counters show {direct} direct reads")
    if direct is None and driver:
        return Verdict(True, "nvidia-fs counted the reads of a probe")
    return Verdict(False, "not verified: no counter shows whether cuFile went past host memory")
