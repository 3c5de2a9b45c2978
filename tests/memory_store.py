"""A store for tests, `mem://bucket/path`: a folder of this machine as a store would show it.

Nothing above the sources sees a local file: objects are read by ranges, prefixes are listed, and
each request is counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from mfload import errors, sources
from mfload.sources.base import ClosedAtEnd, Costs

COSTS = Costs(block=8 << 20, merge_gap=1 << 20, concurrency=8, row_gap=64 << 10)


class Asked(NamedTuple):
    """One request: what for, of which object, and the range of bytes."""

    kind: str
    key: str
    offset: int = 0
    nbytes: int = 0


class MemoryStore:
    """Buckets below a folder, the requests that came, and how many handles are open."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked, self.opened = folder, list[Asked](), 0
        self.lock = threading.Lock()

    def ask(self, kind: str, key: str, offset: int = 0, nbytes: int = 0) -> None:
        with self.lock:
            self.asked.append(Asked(kind, key, offset, nbytes))

    @property
    def data(self) -> list[Asked]:
        """Requests for bytes of objects."""
        return [each for each in self.asked if each.kind == "get"]

    @property
    def nbytes(self) -> int:
        """Bytes that were sent."""
        return sum(each.nbytes for each in self.data)

    def open_url(self, url: str, options: Any) -> Any:
        del options
        key = url.partition("://")[2].rstrip("/")
        if (self.folder / key).is_dir():
            return MemoryDirectory(self, key)
        if not (self.folder / key).is_file():
            raise errors.SourceNotFoundError("the store has no such object", file=f"mem://{key}")
        return ObjectSource(self, key)


class ObjectSource:
    """An object as a `Source`."""

    __module__ = "mfload.memory_store"  # Known to keep to the protocol, as those of mfload.
    file, engine, costs = None, "mem", COSTS

    def __init__(self, store: MemoryStore, key: str) -> None:
        self.store, self.key, self.name = store, key, f"mem://{key}"
        self._seen: tuple[int, int] | None = None

    def _status(self) -> tuple[int, int]:
        try:
            status = (self.store.folder / self.key).stat()
        except FileNotFoundError:
            what = "the store has no such object"
            raise errors.SourceNotFoundError(what, file=self.name) from None
        return status.st_size, status.st_mtime_ns

    @property
    def identity(self) -> tuple[int, int]:
        """Its size and time, as they were seen first."""
        if self._seen is None:
            self._seen = self._status()
        return self._seen

    @property
    def size(self) -> int:
        return self.identity[0]

    def read(self, offset: int, nbytes: int) -> bytes:
        with self.open() as handle:
            data = np.empty(nbytes, np.uint8)
            if nbytes:
                handle.read([data], offset)
            return data.tobytes()

    def open(self, flags: int = 0) -> ObjectHandle:
        assert flags == 0
        return ObjectHandle(self)

    def keep(self, keeps: bool) -> None:
        pass

    def check(self) -> None:
        if self._status() != self.identity:
            raise errors.SourceChangedError("the object was replaced", file=self.name)

    @property
    def directory(self) -> MemoryDirectory:
        return MemoryDirectory(self.store, self.key.rpartition("/")[0])

    def beside(self, name: str) -> ObjectSource:
        return ObjectSource(self.store, f"{self.key.rpartition('/')[0]}/{name}")


class ObjectHandle(ClosedAtEnd):
    """An open object (see `Handle`)."""

    fd = -1

    def __init__(self, source: ObjectSource) -> None:
        self._source, self._open = source, True
        with source.store.lock:
            source.store.opened += 1

    def read(self, vector: list[Any], offset: int, least: int | None = None) -> int:
        nbytes = sum(part.nbytes for part in vector)
        if least is not None:
            nbytes = min(nbytes, max(least, self._source.size - offset))
        source, count = self._source, nbytes
        source.check()
        source.store.ask("get", source.key, offset, nbytes)
        with (source.store.folder / source.key).open("rb") as file:
            file.seek(offset)
            for part in vector:
                wanted = memoryview(part).cast("B")[:nbytes]
                if file.readinto(wanted) != wanted.nbytes:
                    raise errors.SourceChangedError("the object ended", file=source.name)
                nbytes -= wanted.nbytes
        return count

    def close(self) -> None:
        if self._open:
            self._open = False
            with self._source.store.lock:
                self._source.store.opened -= 1


class MemoryDirectory:
    """A prefix as a `Directory`, listed whole by the first question."""

    def __init__(self, store: MemoryStore, key: str, listed: dict[str, int] | None = None) -> None:
        self.store, self.key, self.name, self._listed = store, key, f"mem://{key}", listed

    @property
    def listed(self) -> dict[str, int]:
        """The bytes of all objects below it by name."""
        if self._listed is None:
            self.store.ask("list", self.key)
            folder = self.store.folder / self.key
            files = sorted(each for each in folder.rglob("*") if each.is_file())
            self._listed = {str(each.relative_to(folder)): each.stat().st_size for each in files}
        return self._listed

    def names(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.listed})

    def is_directory(self, name: str) -> bool:
        return any(each.startswith(f"{name.strip('/')}/") for each in self.listed)

    def is_file(self, name: str) -> bool:
        return name in self.listed

    def at(self, name: str) -> Any:
        return self.below(name) if self.is_directory(name) else self.file(name)

    def file(self, name: str) -> ObjectSource:
        if name not in self.listed:
            missing = f"{self.name}/{name}"
            raise errors.SourceNotFoundError("the store has no such object", file=missing)
        return ObjectSource(self.store, f"{self.key}/{name}")

    def below(self, name: str) -> MemoryDirectory:
        front = f"{name.strip('/')}/"
        inner = {n[len(front) :]: size for n, size in self.listed.items() if n.startswith(front)}
        return MemoryDirectory(self.store, f"{self.key}/{name.strip('/')}", inner)

    @property
    def above(self) -> tuple[MemoryDirectory, str] | None:
        directory, _, name = self.key.rpartition("/")
        return (MemoryDirectory(self.store, directory), name) if directory else None

    def walk(self) -> Iterator[tuple[str, int]]:
        yield from self.listed.items()


@pytest.fixture
def mem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    """A store whose bucket `mem://b` is empty; afterwards no handle is open."""
    import sys
    import types

    store = MemoryStore(tmp_path / "store")
    (store.folder / "b").mkdir(parents=True)
    module = types.ModuleType("mfload_store_of_tests")
    module.open_url = store.open_url  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sources.SCHEMES, "mem", module.__name__)
    yield store
    assert store.opened == 0
