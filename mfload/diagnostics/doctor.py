"""`mfload.doctor`: asks all that can be asked of this machine, and waits for nothing for long."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mfload.cuda import gds
from mfload.cuda.device import CUDA
from mfload.cuda.mounts import Mount, mount
from mfload.cuda.system import System
from mfload.diagnostics import cufile, disk, gpus, host, packages, versions
from mfload.diagnostics.diagnosis import Diagnosis
from mfload.diagnostics.findings import Finding
from mfload.errors import MfloadError
from mfload.formats import checkpoint
from mfload.io import route
from mfload.io.route import Leg
from mfload.io.subprocess_probe import Answer, ask
from mfload.runtime import Deadline
from mfload.sources.local import LocalFile

Path = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class _Files(NamedTuple):
    """What a path leads to: its files, the route of a load, and what holds them."""

    sources: tuple[LocalFile, ...] = ()
    legs: tuple[Leg, ...] = ()
    findings: tuple[Finding, ...] = ()
    where: Mount | None = None


class _First(NamedTuple):
    """The first CUDA device, for questions that do not wake its driver."""

    name: str = "cuda:0"
    place: tuple[int, int] = (CUDA, 0)


def doctor(path: Path | None = None, *, timeout: float | None = 20.0) -> Diagnosis:
    """Says what this machine can do for a load, and what stands in the way.

    Calls no driver in this process: NVIDIA's libraries are asked in processes of their own, which
    are killed if they do not answer. Of the weights it reads nothing, or, where there is a GPU
    that cuFile might reach, a few MiB to see whether it does.

    Args:
        path: A checkpoint, as for `mfload.load`; its file system and its files are looked at, and
            the route that a load would take. None for the machine alone.
        timeout: Seconds for each question that could hang: the driver, CuPy, cuFile, the files.
            None for ever.

    Returns:
        What was found. It prints well, and has `as_dict()`, `well` and `findings`.

    Raises:
        MfloadError: The checkpoint can't be read, as for `mfload.load`.
        LoadTimeoutError: The files do not answer in time.
    """
    deadline = Deadline(timeout)
    timeout = deadline.seconds
    system = System()
    files = _Files()
    if path is not None:
        files = deadline.bound(lambda: _look_at(system, path), "looking at the files")
    found = [*_whole("host", host.look(system))]
    driver = gpus.checked(ask("mfload.diagnostics.probe_cuda", timeout=timeout))
    found += _whole("gpu", gpus.look(system, driver))
    count = _count(driver)
    if count:
        found += _whole("gpu", _packages(timeout))
    found += _whole("cufile", cufile.look(system, count, files.where))
    onto: tuple[Leg, ...] = ()
    if count and files.sources:
        try:
            past, onto = _onto(files, timeout)
            found += past
        except MfloadError:
            raise
        except Exception as error:  # noqa: BLE001
            found.append(_failed("cufile", error))
    found += _whole("frameworks", versions.look())
    return Diagnosis((*found, *files.findings), files.legs, onto)


def _look_at(system: System, path: Path) -> _Files:
    _, sources = checkpoint.read(path)
    paths = [source.path for source in sources]
    legs = route.choose([(source, source.size) for source in sources], "auto")
    if not paths:
        return _Files()
    found = [*_whole("disk", disk.look(system, paths[0])), *_whole("disk", disk.files(paths))]
    return _Files(tuple(sources), legs, tuple(found), mount(system, os.path.realpath(paths[0])))


def _whole(topic: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """All findings of a look; one that fails is a finding too, since a doctor must not crash."""
    try:
        yield from findings
    except Exception as error:  # noqa: BLE001
        yield _failed(topic, error)


def _failed(topic: str, error: Exception) -> Finding:
    what = f"could not be looked at: {type(error).__name__}: {error}"
    return Finding(topic, "the rest", what, "note", "please report this")


def _count(driver: Answer) -> int:
    return 0 if driver.data is None else len(driver.data.get("devices", ()))


def _packages(timeout: float | None) -> Iterator[Finding]:
    installed = importlib.util.find_spec("cupy") is not None
    yield packages.cupy(
        ask("mfload.diagnostics.probe_cupy", timeout=timeout) if installed else None
    )
    yield from packages.xla(os.environ)


def _onto(files: _Files, timeout: float | None) -> tuple[list[Finding], tuple[Leg, ...]]:
    """Whether cuFile is real for the first device, and the route onto it."""
    first = _First()

    def judge(path: str) -> gds.Verdict:
        return gds.verdict(path, first, timeout=timeout)

    # Files of one file system are asked about once, whatever came of it.
    verdicts = {source.path: judge(source.path) for source in files.sources}
    found = [cufile.verdict(verdicts[files.sources[0].path], first.name), *cufile.warm(files.legs)]
    wanted = [(source, source.size) for source in files.sources]

    def past(path: str, cold: int | None) -> tuple[bool, str]:
        return verdicts[path]

    def choose() -> tuple[Leg, ...]:
        return route.choose_onto_device(wanted, "auto", past)

    return found, Deadline(timeout).bound(choose, "looking at the files")
