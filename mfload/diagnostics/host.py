"""The host: cores, memory and its limits, the disk of a checkpoint, and the frameworks."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from mfload.diagnostics.findings import Finding, Machine
from mfload.io import probes
from mfload.report import human

_PINNED = 256 << 20  # What a ring of pinned slots may take.
_FEW_CORES = 4
_SMALL_AHEAD = 128
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "9p", "virtiofs")
# Limits of a process, the field of /proc/self/statm that they bound, and how a shell sets them.
_LIMITS = (
    ("RLIMIT_AS", resource.RLIMIT_AS, 0, "ulimit -v"),
    ("RLIMIT_DATA", resource.RLIMIT_DATA, 5, "ulimit -d"),
)


def look(machine: Machine) -> Iterator[Finding]:
    """Findings about kernel, cores, memory, NUMA nodes and containers."""
    yield _kernel()
    count = probes.cores()
    few = "reads from the page cache are bound by cores: each copies a few GB/s"
    yield _noted("cores", f"{count} that this process may use", few * (count < _FEW_CORES), count)
    room = probes.memory_room(machine.root)
    if room is None:
        yield Finding("host", "memory", "unknown")
    else:
        yield Finding("host", "memory", f"{human(room[0])} left ({room[1]})", data=room[0])
    yield from _limits(machine)
    words = re.findall(
        r"\[(\w+)\]", machine.text("sys/kernel/mm/transparent_hugepage/enabled") or ""
    )
    huge = words[0] if words else "none"
    advice = (
        "fresh memory comes in 4 KiB pages, which costs several times the copy; as root: "
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    )
    yield _noted("huge pages", huge, advice * (huge not in ("always", "madvise")))
    yield _nodes(machine)
    if "microsoft" in (machine.text("proc/version") or "").lower():
        advice = "no cuFile here, and opening its driver hangs; files under /mnt are slow"
        yield _noted("inside", "WSL", advice)
    for name, path in (("Docker", ".dockerenv"), ("Podman", "run/.containerenv")):
        if machine.exists(path):
            yield Finding("host", "inside", f"a container ({name})")


def _noted(what: str, found: str, advice: str, data: object = None) -> Finding:
    return Finding("host", what, found, "note" if advice else "ok", advice, data)


def _kernel() -> Finding:
    name = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if not sys.platform.startswith("linux"):
        return _noted("kernel", name, "not tested here: plain reads, no O_DIRECT")
    numbers = tuple(int(n) for n in platform.release().split("-")[0].split(".")[:2] if n.isdigit())
    advice = "cachestat(2) came with Linux 6.5: without it mfload can't see what is cached"
    return _noted("kernel", name, advice * (numbers < (6, 5)))


def _limits(machine: Machine) -> Iterator[Finding]:
    """Limits of this process: a load beyond them is refused before a byte is read."""
    used = [
        int(n) * resource.getpagesize() for n in (machine.text("proc/self/statm") or "").split()
    ]
    for name, kind, field, command in _LIMITS:
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            now = used[field] if field < len(used) else 0
            found = f"{human(limit)}, {human(now)} of it in use"
            data = {"limit": limit, "used": now}
            yield _noted(name, found, f"a load has the rest: raise it with {command}", data)
    for place in _groups(machine):
        limit, now = (machine.number(f"{place}/memory.{name}") for name in ("max", "current"))
        if limit is not None and now is not None:
            found = f"memory at most {human(limit)}, {human(now)} in use, page cache included"
            group = place.removeprefix("sys/fs/cgroup") or "/"
            data = {"limit": limit, "used": now}
            yield Finding("host", f"control group {group}", found, data=data)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield Finding("host", "locked memory", "unlimited")
    else:
        advice = "it bounds io_uring and RDMA, not pinned memory of CUDA: ulimit -l unlimited"
        most = f"at most {human(locked)}"
        yield _noted("locked memory", most, advice * (locked < _PINNED), locked)


def _groups(machine: Machine) -> Iterator[str]:
    """Directories of the control groups of this process, the innermost first."""
    lines = (machine.text("proc/self/cgroup") or "").splitlines()
    group = next((line[3:] for line in lines if line.startswith("0::")), None)
    while group:
        yield f"sys/fs/cgroup{group}".rstrip("/")
        group = "" if group == "/" else os.path.dirname(group)


def _nodes(machine: Machine) -> Finding:
    base = "sys/devices/system/node"
    nodes = [name for name in machine.names(base) if re.fullmatch(r"node\d+", name)]
    if len(nodes) < 2:
        return Finding("host", "NUMA nodes", str(len(nodes) or 1))
    cpus = {name: machine.text(f"{base}/{name}/cpulist") or "none" for name in nodes}
    found = "; ".join(f"{name}: cores {each}" for name, each in cpus.items())
    return Finding("host", "NUMA nodes", f"{len(nodes)} ({found})", data=cpus)


class Mount(NamedTuple):
    """The mount that holds a path: its file system, its options, and its device "major:minor"."""

    kind: str
    options: frozenset[str]
    device: str


def mount(machine: Machine, path: str) -> Mount | None:
    """The mount that holds an absolute path without links."""
    best: tuple[int, Mount] | None = None
    for line in (machine.text("proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        head, tail = left.split(" "), right.split(" ")
        if len(head) < 6 or len(tail) < 3:
            continue
        # The kernel writes blanks and backslashes as octal numbers.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), head[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # `>=`: of two mounts on one point the later lies on top.
        if inside and (best is None or len(point) >= best[0]):
            options = frozenset((*head[5].split(","), *tail[2].split(",")))
            best = len(point), Mount(tail[0], options, head[2])
    return None if best is None else best[1]


def disk(machine: Machine, where: Mount | None) -> Iterator[Finding]:
    """Findings about the disk that a mount lies on."""
    if where is None:
        yield Finding("disk", "file system", "unknown")
        return
    kind = where.kind
    if kind in _NETWORK or kind.startswith("fuse"):
        advice = "do not use engine='mmap' here: each page is a request; more threads= help reads"
        yield Finding("disk", "file system", f"{kind}, on the network", "note", advice)
    else:
        yield Finding("disk", "file system", kind, data=kind)
    base = f"sys/dev/block/{where.device}"
    if not machine.exists(base):
        return
    if not machine.exists(f"{base}/queue"):  # A partition: its disk has the queue.
        base = f"{base}/.."
    kinds = {0: "flash, or a disk that says so", 1: "rotating, or a disk that says so"}
    turning = machine.number(f"{base}/queue/rotational")
    kind = "of unknown kind" if turning is None else kinds.get(turning, "of unknown kind")
    name = machine.text(f"{base}/device/model")
    yield Finding("disk", "device", ", ".join(part for part in (name, kind) if part))
    ahead = machine.number(f"{base}/queue/read_ahead_kb")
    if ahead is not None:
        little = "little for cold reads through the cache; engine='auto' reads past it there"
        advice = little if ahead <= _SMALL_AHEAD else ""
        yield Finding("disk", "read-ahead", f"{ahead} KiB", "ok", advice, ahead)


def files(paths: Sequence[str]) -> Iterator[Finding]:
    """Findings about the files of a checkpoint: O_DIRECT, and how much of them is cached."""
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


class Tested(NamedTuple):
    """Distributions of a framework, the oldest version accepted, and the newest tested."""

    packages: tuple[str, ...]
    oldest: str
    newest: str


TESTED = {
    "numpy": Tested(("numpy",), "2.0", "2.5"),
    "jax": Tested(("jax",), "0.5.3", "0.11"),
    "torch": Tested(("torch",), "2.4", "2.13"),
    "tensorflow": Tested(("tensorflow", "tensorflow-cpu"), "2.19", "2.21"),
    "paddle": Tested(("paddlepaddle", "paddlepaddle-gpu"), "3.0", "3.3"),
    "cupy": Tested(("cupy-cuda13x", "cupy-cuda12x", "cupy"), "14.2", "14.2"),
}
"""As docs/dtypes.md has them, which is checked."""


def frameworks() -> Iterator[Finding]:
    """Findings about installed frameworks; imports none."""
    for name, tested in TESTED.items():
        found = installed(tested.packages)
        level, advice = "ok", ""
        if found is not None and _numbers(found) < _numbers(tested.oldest):
            level, advice = "trouble", f"mfload needs {tested.oldest} or newer"
        elif found is not None and _numbers(found)[:2] > _numbers(tested.newest):
            level, advice = "note", f"newer than what is tested, up to {tested.newest}"
        yield Finding("frameworks", name, found or "not installed", level, advice, found)


def installed(packages: Sequence[str]) -> str | None:
    """The version of the first package that is installed."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
