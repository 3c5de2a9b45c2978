"""`mfload.doctor`: looks at all that matters to a load, and waits for nothing for long."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mfload.cuda import gds
from mfload.diagnostics import gpu, host
from mfload.diagnostics.findings import Diagnosis, Finding
from mfload.errors import MfloadError
from mfload.formats import checkpoint
from mfload.io import route
from mfload.io.route import Leg
from mfload.io.subprocess_probe import ask
from mfload.runtime import Deadline
from mfload.sources.base import Source

_PROBE = "mfload.diagnostics.probe"
_ROOT = Path("/")


def doctor(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    *,
    timeout: float | None = 20.0,
) -> Diagnosis:
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
    sources, legs, where, disk = deadline.bound(lambda: _files(path), "looking at the files")
    onto: list[Leg] = []
    driver = ask(_PROBE, "cuda", timeout=timeout)
    count = 0 if driver.data is None else len(driver.data.get("devices", ()))
    found = [
        *_all("host", host.look(_ROOT)),
        *_all("gpu", gpu.look(_ROOT, driver)),
        *_all("gpu", _packages(timeout) if count else ()),
        *_all("cufile", gpu.cufile(_ROOT, count, where)),
        *_all("cufile", _onto_device(sources, legs, timeout, onto) if count and sources else ()),
        *_all("frameworks", host.frameworks()),
    ]
    return Diagnosis((*found, *disk), legs, tuple(onto))


def _files(path: Any) -> tuple[list[Source], tuple[Leg, ...], host.Mount | None, list[Finding]]:
    """The files of a checkpoint, the route of a load, their mount, and what is found of both."""
    sources = [] if path is None else checkpoint.read(path)[1]
    paths = [source.file for source in sources if source.file is not None]
    legs = route.choose([(source, source.size) for source in sources], "auto")
    if not paths:  # Other sources lie on no disk of this machine.
        return [], legs, None, []
    where = host.mount(_ROOT, os.path.realpath(paths[0]))
    disk = [*_all("disk", host.disk(_ROOT, where)), *_all("disk", host.files(paths))]
    return sources, legs, where, disk


def _all(topic: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """All findings of a look; if it fails that is a finding too, since a doctor must not crash."""
    try:
        for each in findings:
            yield each._replace(topic=topic)
    except MfloadError:
        raise
    except Exception as error:  # noqa: BLE001
        what = f"could not be looked at: {type(error).__name__}: {error}"
        yield Finding("the rest", what, "please report this", topic=topic)


def _packages(timeout: float | None) -> Iterator[Finding]:
    there = importlib.util.find_spec("cupy") is not None
    yield gpu.cupy(ask(_PROBE, "cupy", timeout=timeout) if there else None)
    yield from gpu.xla(os.environ)


def _onto_device(
    sources: Sequence[Source], legs: Sequence[Leg], timeout: float | None, onto: list[Leg]
) -> Iterator[Finding]:
    """Whether cuFile reaches the first device; adds the route onto it."""
    # Files of one file system are asked about once, whatever came of it.
    verdicts = {each.name: gds.verdict(each.name, 0, timeout=timeout) for each in sources}
    yield gpu.verdict(verdicts[sources[0].name], "cuda:0")
    yield from gpu.warm(legs)
    wanted = [(source, source.size) for source in sources]

    def past(path: str, cold: int | None) -> tuple[bool, str]:
        return verdicts[path].real, verdicts[path].why

    onto += Deadline(timeout).bound(
        lambda: route.choose(wanted, "auto", "auto", past), "looking at the files"
    )
