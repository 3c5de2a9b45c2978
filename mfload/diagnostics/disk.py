"""The disk: file system, device and cache state of a path."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mfload.cuda.mounts import Mount, mount
from mfload.cuda.system import System
from mfload.diagnostics.findings import Finding
from mfload.io import probes
from mfload.report import human

_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "9p", "virtiofs")
_SMALL_AHEAD = 128


def look(system: System, path: str) -> Iterator[Finding]:
    """Findings about what holds a path.

    Args:
        system: The machine.
        path: A file or directory that is there.
    """
    where = mount(system, os.path.realpath(path))
    if where is None:
        yield Finding("disk", "file system", "unknown")
        return
    yield _file_system(where)
    yield from _device(system, where.device)


def _file_system(where: Mount) -> Finding:
    kind = where.kind
    if kind in _NETWORK or kind.startswith("fuse"):
        advice = "do not use engine='mmap' here: each page is a request; more threads= help reads"
        return Finding("disk", "file system", f"{kind}, on the network", "note", advice)
    if kind == "ext4" and where.options & {"data=journal", "data=writeback"}:
        mode = next(each for each in where.options if each.startswith("data="))
        advice = "cuFile reads ext4 with data=ordered alone"
        return Finding("disk", "file system", f"ext4, {mode}", "note", advice)
    return Finding("disk", "file system", kind, data=kind)


def _device(system: System, number: str) -> Iterator[Finding]:
    base = f"sys/dev/block/{number}"
    if not system.exists(base):
        return
    if not system.exists(f"{base}/queue"):  # A partition: its disk has the queue.
        base = f"{base}/.."
    name = (system.text(f"{base}/device/model") or "").strip()
    turning = system.number(f"{base}/queue/rotational")
    kind = {0: "flash, or a disk that says so", 1: "rotating, or a disk that says so"}.get(
        -1 if turning is None else turning, "of unknown kind"
    )
    yield Finding("disk", "device", ", ".join(part for part in (name, kind) if part))
    ahead = system.number(f"{base}/queue/read_ahead_kb")
    if ahead is not None:
        advice = ""
        if ahead <= _SMALL_AHEAD:
            advice = "little for cold reads through the cache; engine='auto' reads past it there"
        yield Finding("disk", "read-ahead", f"{ahead} KiB", "ok", advice, ahead)


def files(paths: list[str]) -> Iterator[Finding]:
    """Findings about the files of a checkpoint: O_DIRECT, and what of them is cached.

    Args:
        paths: The files.
    """
    total = cached = 0
    known = True
    alignments: set[tuple[int, int] | None] = set()
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            nbytes = os.fstat(fd).st_size
            share = probes.cached_share(fd, nbytes)
            alignments.add(probes.direct_alignment(fd))
        finally:
            os.close(fd)
        total += nbytes
        known &= share is not None or not nbytes
        cached += int((share or 0) * nbytes)
    if None in alignments:
        advice = "cold reads go through the page cache, which costs a copy"
        yield Finding("disk", "O_DIRECT", "not taken", "note", advice)
    else:
        pairs = sorted(pair for pair in alignments if pair is not None)
        texts = [f"memory {memory}, offsets {offset}" for memory, offset in pairs]
        yield Finding("disk", "O_DIRECT", "; ".join(texts) + " bytes")
    share = f"{cached / total:.0%}" if known and total else "unknown share"
    where = f"{len(paths)} file{'s' * (len(paths) != 1)}"
    yield Finding("disk", "in the page cache", f"{share} of {human(total)} in {where}")
