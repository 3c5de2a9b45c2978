"""The host: cores, memory, limits, NUMA nodes, and what it runs in."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Iterator

from mfload.cuda.system import System
from mfload.diagnostics.findings import Finding
from mfload.io import probes
from mfload.report import human

_PINNED = 256 << 20  # What a ring of pinned slots may take.
_UNLIMITED = resource.RLIM_INFINITY
_FEW_CORES = 4


def look(system: System) -> Iterator[Finding]:
    """Findings about the host.

    Args:
        system: The machine.
    """
    yield _kernel(system)
    yield _cores()
    yield from _memory(system)
    yield _huge_pages(system)
    yield _locked()
    yield _nodes(system)
    yield from _surroundings(system)


def _kernel(system: System) -> Finding:
    name = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if not sys.platform.startswith("linux"):
        return Finding("host", "kernel", name, "note", "not tested here: plain reads, no O_DIRECT")
    version = tuple(int(n) for n in platform.release().split("-")[0].split(".")[:2] if n.isdigit())
    if version < (6, 5):
        advice = "cachestat(2) came with Linux 6.5: without it mfload can't see what is cached"
        return Finding("host", "kernel", name, "note", advice)
    return Finding("host", "kernel", name)


def _cores() -> Finding:
    count = probes.cores()
    found = f"{count} that this process may use"
    advice = ""
    if count < _FEW_CORES:
        advice = "reads from the page cache are bound by cores: each copies a few GB/s"
    return Finding("host", "cores", found, "note" if advice else "ok", advice, count)


def _memory(system: System) -> Iterator[Finding]:
    room = probes.memory_room(system.root)
    if room is None:
        yield Finding("host", "memory", "unknown")
        return
    nbytes, who = room
    yield Finding("host", "memory", f"{human(nbytes)} left ({who})", data=nbytes)


def _huge_pages(system: System) -> Finding:
    chosen = system.choice("sys/kernel/mm/transparent_hugepage/enabled")
    if chosen in ("always", "madvise"):
        return Finding("host", "huge pages", chosen)
    return Finding(
        "host",
        "huge pages",
        chosen or "none",
        "note",
        "fresh memory comes in 4 KiB pages, which costs several times the copy; as root: "
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _locked() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == _UNLIMITED:
        return Finding("host", "locked memory", "unlimited")
    level = "note" if limit < _PINNED else "ok"
    advice = (
        "CUDA's own pinned memory is not bound by it; io_uring and RDMA are: ulimit -l unlimited"
        if level == "note"
        else ""
    )
    return Finding("host", "locked memory", f"at most {human(limit)}", level, advice, limit)


def _nodes(system: System) -> Finding:
    base = "sys/devices/system/node"
    nodes = [name for name in system.names(base) if name[:4] == "node" and name[4:].isdigit()]
    if len(nodes) < 2:
        return Finding("host", "NUMA nodes", str(len(nodes) or 1))
    cpus = {name: system.text(f"{base}/{name}/cpulist") or "none" for name in nodes}
    found = "; ".join(f"{name}: cores {each}" for name, each in cpus.items())
    return Finding("host", "NUMA nodes", f"{len(nodes)} ({found})", data=cpus)


def _surroundings(system: System) -> Iterator[Finding]:
    version = (system.text("proc/version") or "").lower()
    if "microsoft" in version:
        yield Finding(
            "host", "inside", "WSL", "note",
            "no cuFile here, and opening its driver hangs; files under /mnt are slow",
        )  # fmt: skip
    inside = [
        name
        for name, path in (("Docker", ".dockerenv"), ("Podman", "run/.containerenv"))
        if system.exists(path)
    ]
    if inside:
        yield Finding("host", "inside", f"a container ({inside[0]})")
