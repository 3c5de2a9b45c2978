"""Reads a little of a file through cuFile and tells how it went. Run by `asking`: it may hang.

Prints JSON: {"error": …} or {"same": …, "direct": …, "posix": …, "nvidia_fs": …}: whether the
bytes were right, reads past and through host memory by cuFile's own count (null where it keeps
none), and whether nvidia-fs counted any (null where it is not there).
"""

from __future__ import annotations

import ctypes
import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mfload.cuda import cufile, finding
from mfload.cuda.device import Device
from mfload.cuda.system import System
from mfload.planning.blocks import Block
from mfload.sources.local import LocalFile

_SAMPLE = 4 << 20

# struct CUfileStatsLevel3 of cufile.h 1.20. Its last part, a table of GPUs, comes behind counters
# of which newer versions have more, so it is searched for: see `_gpus`.
_READ_BYTES = 96  # Bytes read by all GPUs, from the start of the whole.
_BASICS = 1024  # The table begins behind them in every version that has one.
_ROOM = 1 << 16
_GPUS = 16
_ROW = 248  # Bytes a GPU: a UUID of 16 bytes, then counters of 8.
_ROW_BYTES, _ROW_P2P, _ROW_NVFS, _ROW_POSIX = 16, 56, 64, 72


def look(path: str, device: Device, system: System) -> dict[str, Any]:
    """Reads and compares.

    Args:
        path: The file.
        device: Where to.
        system: The machine, for nvidia-fs's counters.
    """
    source = LocalFile(path)
    # Whole units: the ragged end of a file goes through host memory in any case.
    nbytes = min(_SAMPLE, source.size // cufile.UNIT * cufile.UNIT)
    if not nbytes:
        return {"error": "the file is too small to tell"}
    slot = cufile.CufileSlot(device, nbytes)
    try:
        reader = cufile.CufileReader(source, device)
        try:
            count = _begin()
            before = nvidia_fs(system)
            at = reader.land(Block(0, 0, nbytes, ()), slot.buffer)
            direct, posix = _read_counters() if count else (None, None)
            after = nvidia_fs(system)
        finally:
            reader.close()
        found = np.empty(nbytes, np.uint8)
        stream = device.stream()
        stream.copy_out(found, slot.buffer, at)
        stream.synchronize()
        stream.close()
    finally:
        slot.close()
    return {
        "same": found.tobytes() == source.read(0, nbytes),
        "direct": direct,
        "posix": posix,
        "nvidia_fs": None if before is None or after is None else after > before,
    }


def nvidia_fs(system: System) -> int | None:
    """Reads that nvidia-fs has counted on all GPUs since it was loaded, None where it is not.

    It counts them where `rw_stats_enabled` is set, which is not the default, and always, by
    distance on the bus, where `peer_stats_enabled` is, which is.

    Args:
        system: The machine.
    """
    stats = system.text("proc/driver/nvidia-fs/stats")
    if stats is None:
        return None
    reads = sum(int(n) for n in re.findall(r"^Reads\s*:\s*n=(\d+)", stats, re.MULTILINE))
    table = system.text("proc/driver/nvidia-fs/peer_affinity") or ""
    for row in re.findall(r"^GPU\s*:\S+\s*:([\d ]+)$", table, re.MULTILINE):
        reads += sum(int(n) for n in row.split())
    return reads


class _Status(ctypes.Structure):
    _fields_ = (("error", ctypes.c_int), ("cuda", ctypes.c_int))


def _library() -> Any:
    return ctypes.CDLL("libcufile.so.0")  # kvikio has loaded it.


def _ask(call: str, *arguments: Any) -> bool:
    """Calls a function of cuFile; whether there is one, and it worked."""
    try:
        function = getattr(_library(), call)
    except (OSError, AttributeError):
        return False
    function.restype = _Status
    return function(*arguments).error == 0


def _begin() -> bool:
    """Has cuFile count; it can from 1.15 on."""
    return _ask("cuFileSetStatsLevel", 3) and _ask("cuFileStatsStart")


def _read_counters() -> tuple[int | None, int | None]:
    """Reads past and through host memory."""
    answer = ctypes.create_string_buffer(_ROOM)
    if not _ask("cuFileGetStatsL3", answer):
        return None, None
    return gpus(answer.raw)


def gpus(answer: bytes) -> tuple[int | None, int | None]:
    """Reads past and through host memory, out of cuFile's counters.

    Args:
        answer: `CUfileStatsLevel3`, with zeros behind it.

    Returns:
        (None, None) where no part of it looks like the table of GPUs: their number, and rows
        whose bytes add up to those of the whole.
    """
    (total,) = struct.unpack_from("=Q", answer, _READ_BYTES)
    for start in range(_BASICS, len(answer) - _GPUS * _ROW - 8, 8):
        (count,) = struct.unpack_from("=I", answer, start)
        if not 1 <= count <= _GPUS:
            continue
        rows = [start + 8 + _ROW * n for n in range(count)]

        def summed(field: int, rows: list[int] = rows) -> int:
            return sum(struct.unpack_from("=Q", answer, row + field)[0] for row in rows)

        if total and summed(_ROW_BYTES) == total:
            return summed(_ROW_P2P) + summed(_ROW_NVFS), summed(_ROW_POSIX)
    return None, None


def main(path: str, number: str, root: str) -> None:
    """Prints what a read told.

    Args:
        path: The file.
        number: The device's ordinal.
        root: Where `proc` is.
    """
    try:
        # Nothing of cuFile before a driver and a device are known: without them it spins.
        device = finding.find(int(number))
        found = look(path, device, System(Path(root)))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        found = {"error": str(error) or type(error).__name__}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
