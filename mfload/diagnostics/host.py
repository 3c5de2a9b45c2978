"""The host: cores, memory and its limits, the disk of a checkpoint, and the frameworks."""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from mfload.diagnostics.findings import Finding, number, text
from mfload.io import probes
from mfload.report import human
from mfload.runtime import cores

_PINNED = 256 << 20  # What a ring of pinned slots may take.
_FEW_CORES = 4
_SMALL_AHEAD = 128
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "9p", "virtiofs")
_SHELL = {"RLIMIT_AS": "ulimit -v", "RLIMIT_DATA": "ulimit -d"}


def look(root: Path) -> Iterator[Finding]:
    """Findings about kernel, cores, memory, NUMA nodes and containers; `root` has proc and sys."""
    release = platform.release()
    numbers = tuple(int(n) for n in release.split("-")[0].split(".")[:2] if n.isdigit())
    advice = ""
    if numbers < (6, 5):
        advice = "cachestat(2) came with Linux 6.5: without it mfload can't see what is cached"
    model = re.search(r"^model name\s*: (.+)$", text(root, "proc/cpuinfo"), re.MULTILINE)
    where = " in a virtual machine" if virtual(root) else ""
    yield Finding("processor", (model[1] if model else platform.machine()) + where)
    yield Finding("kernel", f"{platform.system()} {release}, {platform.machine()}", advice)
    count = cores()
    few = "reads from the page cache are bound by cores: each copies a few GB/s"
    found = f"{count} that this process may use"
    yield Finding("cores", found, few if count < _FEW_CORES else "", count)
    room = probes.memory_room(root)
    if room is None:
        yield Finding("memory", "unknown")
    else:
        yield Finding("memory", f"{human(room[0])} left ({room[1]})", data=room[0])
    yield from _limits(root)
    huge = re.search(r"\[(\w+)\]", text(root, "sys/kernel/mm/transparent_hugepage/enabled"))
    chosen = huge[1] if huge else "none"
    advice = "slow fresh memory: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    yield Finding("huge pages", chosen, "" if chosen in ("always", "madvise") else advice)
    cpus = {
        node.name: text(node, "cpulist") or "none"
        for node in sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    }
    if len(cpus) < 2:
        yield Finding("NUMA nodes", str(len(cpus) or 1))
    else:
        found = "; ".join(f"{name}: cores {each}" for name, each in cpus.items())
        yield Finding("NUMA nodes", f"{len(cpus)} ({found})", data=cpus)
    if "microsoft" in text(root, "proc/version").lower():
        advice = "no cuFile here, and opening its driver hangs; files under /mnt are slow"
        yield Finding("inside", "WSL", advice)
    for name, path in (("Docker", ".dockerenv"), ("Podman", "run/.containerenv")):
        if (root / path).exists():
            yield Finding("inside", f"a container ({name})")


def virtual(root: Path) -> bool:
    """Whether this is a virtual machine, as far as the processor says."""
    flags = re.search(r"^flags\s*:.*\bhypervisor\b", text(root, "proc/cpuinfo"), re.MULTILINE)
    return flags is not None


def _limits(root: Path) -> Iterator[Finding]:
    """Limits of this process: a load beyond them is refused before a byte is read."""
    for name, limit, used, _ in probes.process_limits(root):
        found = f"{human(limit)}, {human(used)} of it in use"
        advice = f"a load has the rest: raise it with {_SHELL[name]}"
        yield Finding(name, found, advice, {"limit": limit, "used": used})
    for name, limit, used, _ in probes.cgroups(root):
        found = f"memory at most {human(limit)}, {human(used)} in use, page cache included"
        yield Finding(name, found, data={"limit": limit, "used": used})
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield Finding("locked memory", "unlimited")
    else:
        advice = "it bounds io_uring and RDMA, not pinned memory of CUDA: ulimit -l unlimited"
        found = f"at most {human(locked)}"
        yield Finding("locked memory", found, advice if locked < _PINNED else "", locked)


class Mount(NamedTuple):
    """The mount that holds a path: its file system, its options, and its device "major:minor"."""

    kind: str
    options: frozenset[str]
    device: str


def mount(root: Path, path: str) -> Mount | None:
    """The mount that holds an absolute path without links."""
    best, longest = None, 0
    for line in text(root, "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        head, tail = left.split(" "), right.split(" ")
        if len(head) < 6 or len(tail) < 3:
            continue
        # The kernel writes blanks and backslashes as octal numbers.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), head[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # `>=`: of two mounts on one point the later lies on top.
        if inside and len(point) >= longest:
            options = frozenset((*head[5].split(","), *tail[2].split(",")))
            best, longest = Mount(tail[0], options, head[2]), len(point)
    return best


def disk(root: Path, where: Mount | None) -> Iterator[Finding]:
    """Findings about the disk that a mount lies on."""
    if where is None:
        yield Finding("file system", "unknown")
        return
    if where.kind in _NETWORK or where.kind.startswith("fuse"):
        advice = "do not use engine='mmap' here: each page is a request; more threads= help reads"
        yield Finding("file system", f"{where.kind}, on the network", advice)
    else:
        yield Finding("file system", where.kind, data=where.kind)
    base = root / "sys/dev/block" / where.device
    if not base.exists():
        return
    if not (base / "queue").exists():  # A partition: its disk has the queue.
        base /= ".."
    kinds = {"0": "flash, or a disk that says so", "1": "rotating, or a disk that says so"}
    kind = kinds.get(text(base, "queue/rotational"), "of unknown kind")
    yield Finding("device", ", ".join(filter(None, (text(base, "device/model"), kind))))
    ahead = number(base, "queue/read_ahead_kb")
    if ahead is not None:
        little = "little for cold reads through the cache; engine='auto' reads past it there"
        advice = little if ahead <= _SMALL_AHEAD else ""
        yield Finding("read-ahead", f"{ahead} KiB", advice, ahead)


def files(paths: Sequence[str]) -> Iterator[Finding]:
    """Findings about the files of a checkpoint: O_DIRECT, and how much of them is cached."""
    total, cached, known = 0, 0.0, True
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
        cached += (share or 0) * nbytes
    if None in alignments:
        advice = "cold reads go through the page cache, which costs a copy"
        yield Finding("O_DIRECT", "not taken", advice)
    else:
        pairs = sorted(pair for pair in alignments if pair is not None)
        texts = [f"memory {memory}, offsets {offset}" for memory, offset in pairs]
        yield Finding("O_DIRECT", "; ".join(texts) + " bytes")
    share = f"{cached / total:.0%}" if known and total else "unknown share"
    where = f"{len(paths)} file{'s' * (len(paths) != 1)}"
    yield Finding("in the page cache", f"{share} of {human(total)} in {where}")


# Distributions of each framework, the oldest version accepted, and the newest tested.
TESTED = {
    "numpy": (("numpy",), "2.0", "2.5"),
    "jax": (("jax",), "0.5.3", "0.11"),
    "torch": (("torch",), "2.4", "2.13"),
    "tensorflow": (("tensorflow", "tensorflow-cpu"), "2.19", "2.21"),
    "paddle": (("paddlepaddle", "paddlepaddle-gpu"), "3.0", "3.3"),
    "cupy": (("cupy-cuda13x", "cupy-cuda12x", "cupy"), "14.2", "14.2"),
}


def frameworks() -> Iterator[Finding]:
    """Findings about installed frameworks; imports none."""
    for name, (packages, oldest, newest) in TESTED.items():
        found = installed(packages)
        old = found is not None and _numbers(found) < _numbers(oldest)
        advice = ""
        if old:
            advice = f"mfload needs {oldest} or newer"
        elif found is not None and _numbers(found)[:2] > _numbers(newest):
            advice = f"newer than what is tested, up to {newest}"
        yield Finding(name, found or "not installed", advice, found, trouble=old)


def installed(packages: Sequence[str]) -> str | None:
    """The version of the first package that is installed."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
