"""`mfload.doctor`: looks at all that matters to a load, and waits for nothing for long."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mfload.cuda import gds
from mfload.diagnostics import gpu, host
from mfload.diagnostics.findings import Diagnosis, Finding, Machine
from mfload.diagnostics.host import Mount
from mfload.errors import MfloadError
from mfload.formats import checkpoint
from mfload.io import route
from mfload.io.route import Leg
from mfload.io.subprocess_probe import ask
from mfload.runtime import Deadline
from mfload.sources.local import LocalFile

Path = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_PROBE = "mfload.diagnostics.probe"


class _Files(NamedTuple):
    """A checkpoint's files, the route of a load, what is known of their disk, and their mount."""

    sources: tuple[LocalFile, ...] = ()
    legs: tuple[Leg, ...] = ()
    findings: tuple[Finding, ...] = ()
    where: Mount | None = None


def doctor(path: Path | None = None, *, timeout: float | None = 20.0) -> Diagnosis:
    """Says what this machine can do for a load, and what stands in the way.

    Calls no driver in this process: NVIDIA's libraries are asked in processes of their own, which
    are killed if they do not answer. Reads no weights; if there is a GPU that cuFile might reach,
    it reads a few MiB to see whether it does.

    Args:
        path: A checkpoint, as for `mfload.load`: its disk and its files are looked at, and the
            route that a load would take. Default: the machine alone.
        timeout: Seconds for each question that could hang: the driver, CuPy, cuFile, the files.
            None: forever.

    Returns:
        What was found. It prints well, and has `as_dict()`, `well` and `findings`.

    Raises:
        MfloadError: The checkpoint can't be read, as for `mfload.load`.
        LoadTimeoutError: The files do not answer in time.
    """
    deadline = Deadline(timeout)
    timeout = deadline.seconds
    machine = Machine()
    files = _Files()
    if path is not None:
        files = deadline.bound(lambda: _look_at(machine, path), "looking at the files")
    driver = gpu.checked(ask(_PROBE, "cuda", timeout=timeout))
    count = 0 if driver.data is None else len(driver.data.get("devices", ()))
    onto: list[Leg] = []
    found = [
        *_whole("host", host.look(machine)),
        *_whole("gpu", gpu.look(machine, driver)),
        *_whole("gpu", _packages(timeout) if count else ()),
        *_whole("cufile", gpu.cufile(machine, count, files.where)),
        *_whole("cufile", _onto(files, timeout, onto) if count and files.sources else ()),
        *_whole("frameworks", host.frameworks()),
    ]
    return Diagnosis((*found, *files.findings), files.legs, tuple(onto))


def _look_at(machine: Machine, path: Path) -> _Files:
    _, sources = checkpoint.read(path)
    paths = [source.path for source in sources]
    if not paths:
        return _Files()
    legs = route.choose([(source, source.size) for source in sources], "auto")
    where = host.mount(machine, os.path.realpath(paths[0]))
    found = [*_whole("disk", host.disk(machine, where)), *_whole("disk", host.files(paths))]
    return _Files(tuple(sources), legs, tuple(found), where)


def _whole(topic: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """All findings of a look; if it fails that is a finding too, since a doctor must not crash."""
    try:
        yield from findings
    except MfloadError:
        raise
    except Exception as error:  # noqa: BLE001
        what = f"could not be looked at: {type(error).__name__}: {error}"
        yield Finding(topic, "the rest", what, "note", "please report this")


def _packages(timeout: float | None) -> Iterator[Finding]:
    installed = importlib.util.find_spec("cupy") is not None
    yield gpu.cupy(ask(_PROBE, "cupy", timeout=timeout) if installed else None)
    yield from gpu.xla(os.environ)


def _onto(files: _Files, timeout: float | None, legs: list[Leg]) -> Iterator[Finding]:
    """Whether cuFile reaches the first device; fills in the route onto it."""
    # Files of one file system are asked about once, whatever came of it.
    verdicts = {each.path: gds.verdict(each.path, 0, timeout=timeout) for each in files.sources}
    yield gpu.verdict(verdicts[files.sources[0].path], "cuda:0")
    yield from gpu.warm(files.legs)
    wanted = [(source, source.size) for source in files.sources]

    def past(path: str, cold: int | None) -> tuple[bool, str]:
        return verdicts[path].real, verdicts[path].why

    legs += Deadline(timeout).bound(
        lambda: route.choose_onto_device(wanted, "auto", past), "looking at the files"
    )
