"""`mfload.doctor`: asks all that can be asked of this machine, and waits for nothing for long."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from mfload.checkup import cufile, disk, gpus, host, versions
from mfload.checkup.asking import Answer, ask
from mfload.checkup.diagnosis import Diagnosis
from mfload.checkup.findings import Finding
from mfload.checkup.system import System
from mfload.formats import checkpoint
from mfload.io import route
from mfload.io.deadline import Deadline
from mfload.io.route import Leg

Path = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def doctor(path: Path | None = None, *, timeout: float | None = 10.0) -> Diagnosis:
    """Says what this machine can do for a load, and what stands in the way.

    Reads no weights, and calls no driver in this process: NVIDIA's is asked in one of its own,
    which is killed if it does not answer.

    Args:
        path: A checkpoint, as for `mfload.load`; its file system and its files are looked at, and
            the route that a load would take. None for the machine alone.
        timeout: Seconds for each question that could hang: the driver, the files. None for ever.

    Returns:
        What was found. It prints well, and has `as_dict()`, `well` and `findings`.

    Raises:
        MfloadError: The checkpoint can't be read, as for `mfload.load`.
        LoadTimeoutError: The files do not answer in time.
    """
    deadline = Deadline(timeout)
    system = System()
    legs: tuple[Leg, ...] = ()
    on_disk: list[Finding] = []
    where: disk.Mount | None = None
    if path is not None:
        legs, on_disk, where = deadline.bound(lambda: _files(system, path), "looking at the files")
    findings = _machine(system, lambda: ask("mfload.checkup.probe_cuda", timeout=timeout), where)
    return Diagnosis((*findings, *on_disk), legs)


def _files(system: System, path: Path) -> tuple[tuple[Leg, ...], list[Finding], disk.Mount | None]:
    _, sources = checkpoint.read(path)
    paths = [source.path for source in sources]
    legs = route.choose([(source, source.size) for source in sources], "auto")
    found = [*disk.look(system, paths[0]), *disk.files(paths)] if paths else []
    where = disk.mount(system, os.path.realpath(paths[0])) if paths else None
    return legs, found, where


def _machine(
    system: System, driver: Callable[[], Answer], where: disk.Mount | None
) -> Iterator[Finding]:
    yield from host.look(system)
    answer = driver()
    yield from gpus.look(system, answer)
    count = len((answer.data or {}).get("devices", ()))
    yield from cufile.look(system, count, None if where is None else where.kind)
    yield from versions.look()
