"""Sources: bytes by offset, found by what a user gives: a path, a URL, or the bytes themselves."""

from __future__ import annotations

import importlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeGuard

from mfload import errors
from mfload.options import LoadOptions
from mfload.runtime import Task, start
from mfload.sources.base import Source, redacted
from mfload.sources.local import LocalFile

if TYPE_CHECKING:
    from mfload.sources.directories import Directory

PathOrBytes = str | os.PathLike[str] | bytes | bytearray | memoryview | Source
"""A path, a URL, bytes in memory, or a source."""

_STORES = "mfload.sources.stores"
SCHEMES = {
    "http": "mfload.sources.http",
    "https": "mfload.sources.http",
    "hf": "mfload.sources.hub",
    **dict.fromkeys(("s3", "gs", "az", "abfs", "abfss"), _STORES),
}
"""Modules by the scheme of the URLs that their `open_url(url, options)` makes a source of."""

CHECKPOINTS = {"peer": "mfload.peer.checkpoint"}
"""Modules by the scheme of the URLs that stand for several sources. Their `find(url, options)`
gives what reads these, given the number of the first (see `DirectoryFormat.read_directory`)."""

local_file: Callable[..., Source] = LocalFile
"""The source of a path of this machine."""

_ALIASES = {
    **dict.fromkeys(("s3a", "s3n"), "write s3://"),
    "gcs": "write gs://",
    **dict.fromkeys(("wasb", "wasbs", "adl", "azure"), "write az:// or abfs://"),
    "huggingface": "write hf://",
}
_HEAD = 64 << 10  # Bytes of a file that are fetched at once with the first of the others.
_NEED_FILES = ("mmap", "direct", "gds")


def find(where: PathOrBytes, options: LoadOptions | None = None) -> Source:
    """The source of a path, a URL, or bytes.

    Raises:
        UsageError: A URL is malformed, or the engine asked for reads local files alone.
        SourceError: A file can't be opened, is not a regular file, or the URL's scheme is unknown.
    """
    found = place(where, options)
    if is_directory(found):
        raise errors.SourceError("is a directory", file=found.name, expected="a file")
    return found


def place(where: PathOrBytes | Directory, options: LoadOptions | None = None) -> Any:
    """The source of a path, a URL or bytes as `find`, or the directory that a URL names."""
    if is_directory(where):
        return where
    if isinstance(where, str | os.PathLike):
        if not is_url(where):
            return local_file(os.fspath(where))
        scheme = where.partition("://")[0].lower()
        if scheme not in SCHEMES:
            how = {"file": "give the path alone"} | _ALIASES
            raise errors.SourceNotFoundError(
                f"mfload reads no {scheme}:// URLs: {how.get(scheme, 'download it first')}",
                file=redacted(where),
                expected=f"a path, or a URL of {', '.join(SCHEMES)}",
            )
        opened = importlib.import_module(SCHEMES[scheme]).open_url(where, options or LoadOptions())
        source: Any = opened if is_directory(opened) else checked(opened)
        if options is not None and options.cache is not None:
            from mfload.sources import cache

            source = cache.cached(source, options)
        if is_directory(source):
            return source
    elif isinstance(where, bytes | bytearray | memoryview):
        from mfload.sources.memory import MemorySource

        source = MemorySource(where)
    else:
        source = checked(where)
    if options is not None:
        check_engine(source, options.engine)
    return source


def checked(source: Any) -> Any:
    """A source, which is checked if it is none of mfload's."""
    if type(source).__module__.startswith("mfload."):
        return source
    from mfload.sources.given import GivenSource  # Late: most loads have files.

    return GivenSource(source)


def is_checkpoint(where: str) -> bool:
    """Whether a URL stands for several sources."""
    return where.partition("://")[0].lower() in CHECKPOINTS


def checkpoint(where: object, options: LoadOptions | None = None) -> Any:
    """What reads the checkpoint of a URL that stands for several sources; None for all else."""
    if not is_url(where) or not is_checkpoint(where):
        return None
    module = CHECKPOINTS[where.partition("://")[0].lower()]
    return importlib.import_module(module).find(where, options or LoadOptions())


def is_source(where: object) -> TypeGuard[Source]:
    """Whether it is a source already."""
    return hasattr(where, "costs")


def is_directory(where: object) -> TypeGuard[Directory]:
    """Whether it is a `Directory` already."""
    return hasattr(where, "below")


def is_store(where: object) -> TypeGuard[str]:
    """Whether it is the URL of an object store, to which can be saved."""
    return is_url(where) and SCHEMES.get(where.partition("://")[0].lower()) == _STORES


def is_url(where: object) -> TypeGuard[str]:
    """Whether it is a URL, of any scheme."""
    scheme, mark, _ = where.partition("://") if isinstance(where, str) else ("", "", "")
    return bool(mark) and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]+", scheme) is not None


def check_path(path: str) -> None:
    """Raises UsageError for a URL that was made a path and so lost a slash: `Path("https://…")`."""
    scheme, mark, rest = path.partition(":/")
    url = f"{scheme}://{rest.lstrip('/')}"
    if mark and is_url(url) and not os.path.lexists(path):
        what = "a URL must be given as text, not as a path"
        raise errors.UsageError(what, expected="'https://host/…'", found=redacted(url))


def shown(where: Any) -> str | None:
    """The name of a path or URL for messages, without its secrets; None for everything else."""
    if not isinstance(where, str | os.PathLike):
        return None
    text = os.fspath(where)
    return redacted(text) if is_url(text) else text


def check_engine(source: Source, engine: str) -> None:
    """Raises UsageError for an engine that needs a local file, if the source has none."""
    if source.file is None and engine in _NEED_FILES:
        raise errors.UsageError(
            f"engine={engine!r} reads local files alone",
            file=source.name,
            expected="engine='auto'",
            found=engine,
        )


def check_now(source: Any) -> None:
    """Raises SourceChangedError if a source is another version by now, by asking in any case.

    `check` sends no request for a URL if the answers to reads had the right version.
    """
    getattr(source, "check_now", source.check)()


def together(call: Callable[[Source], object], given: Iterable[Source]) -> None:
    """Calls a function for each source, at once for those whose answers are waited for."""
    waiting: list[Source] = []
    for each in given:
        if each.costs.concurrency is None:
            call(each)
        else:
            waiting.append(each)
    if waiting:
        at_once(call, waiting, waiting[0].costs.concurrency or 1)


def ask_ahead(given: Iterable[Source]) -> None:
    """Sends the first requests to servers and network disks at once.

    A failure is met again where it is handled.
    """

    def ask(source: Any) -> None:
        with suppress(errors.SourceError):
            if source.file is not None:
                source.read(0, min(source.size, _HEAD))  # For the page cache.
            elif hasattr(source, "ask_ahead"):
                source.ask_ahead()
            else:
                source.identity  # noqa: B018

    together(ask, given)


def at_once(call: Callable[[Any], object], given: Iterable[Any], threads: int) -> None:
    """Calls a function for each of several things, in threads; raises the first error."""
    waiting = deque(given)

    def work() -> None:
        while True:
            try:
                each = waiting.popleft()
            except IndexError:
                return
            try:
                call(each)
            except BaseException:
                waiting.clear()
                raise

    if min(len(waiting), threads) < 2:
        return work()
    tasks = list[Task[None]]()
    with suppress(RuntimeError):  # The system gives no more threads.
        for _ in range(min(len(waiting), threads)):
            tasks.append(start(work, "mfload-source"))
    if not tasks:
        return work()
    for task in tasks:
        task.result()
