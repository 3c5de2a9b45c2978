"""Sources of a user's own: what they are and give is checked, and their errors become typed."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Generator
from typing import Any

from mfload import errors, sources
from mfload.sources.base import ClosedAtEnd, Costs, Source, shrunk

_METHODS = ("read", "open", "keep", "check", "beside")
_KINDS: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "file": (str, type(None)),
    "size": int,
    "identity": object,
    "costs": Costs,
    "engine": str,
}


class GivenSource:
    """A user's source. Raises UsageError if it lacks what a `Source` has.

    What it says of itself is asked once. What it raises becomes a SourceError with its name.
    """

    name: str
    file: str | None
    size: int
    identity: object
    costs: Costs
    engine: str

    def __init__(self, source: Any) -> None:
        kind = type(source).__name__
        wrong = [name for name in _METHODS if not callable(getattr(source, name, None))]
        for name, wanted in _KINDS.items():
            with _typed(kind, name):
                found = getattr(source, name, _KINDS)
            if found is _KINDS or not isinstance(found, wanted):
                wrong.append(name)
            setattr(self, name, found)
        if "costs" not in wrong and not _possible(self.costs):
            wrong.append("costs")
        if wrong:
            raise errors.UsageError(
                f"{kind} is not a source",
                expected="the attributes and methods that make a source: "
                f"{', '.join([*_KINDS, *_METHODS])}",
                found=f"missing or of another type: {', '.join(wrong)}",
            )
        self._given = source

    def __reduce__(self) -> tuple[Any, ...]:
        return GivenSource, (self._given,)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Reads exactly that range (see `Source`)."""
        with _typed(self.name, "read()"):
            found = self._given.read(offset, nbytes)
            fits = isinstance(found, bytes | bytearray | memoryview)
            data = bytes(found) if fits else b""
        if not fits or len(data) > nbytes:
            what = "read() of the source gives something else than the bytes of the range"
            raise errors.ReadError(
                what,
                file=self.name,
                expected=errors.amount(nbytes),
                found=errors.amount(len(data)) if fits else type(found).__name__,
            )
        if len(data) < nbytes:
            raise shrunk(self.name, offset + nbytes, offset + len(data))
        return data

    def open(self, flags: int = 0) -> GivenHandle:
        """Opens it for one thread (see `Source`)."""
        with _typed(self.name, "open()"):
            opened = GivenHandle(self.name, self._given.open(flags))
        if self.file is None:
            opened.fd = -1
        elif not (isinstance(opened.fd, int) and opened.fd >= 0):
            opened.close()
            what = "the source has a file, and its handle no descriptor"
            found = errors.shown(repr(opened.fd))
            raise errors.UsageError(
                what, file=self.name, expected="a descriptor, or no file", found=found
            )
        return opened

    def keep(self, keeps: bool) -> None:
        """Says whether what it opens may stay open (see `Source`)."""
        with _typed(self.name, "keep()"):
            self._given.keep(keeps)

    def check(self) -> None:
        """Raises SourceChangedError if it changed (see `Source`)."""
        with _typed(self.name, "check()"):
            self._given.check()

    def beside(self, name: str) -> Source:
        """A neighbour (see `Source`)."""
        with _typed(self.name, "beside()"):
            try:
                return sources.checked(self._given.beside(name))
            except LookupError as error:
                what = f"the source has no neighbour {name!r}"
                raise errors.SourceNotFoundError(what, file=self.name) from error


class GivenHandle(ClosedAtEnd):
    """What a user's source opened."""

    def __init__(self, name: str, handle: Any) -> None:
        self._name, self._given, self.fd = name, handle, getattr(handle, "fd", -1)

    def read(self, vector: list[Any], offset: int, least: int | None = None) -> int:
        """Fills the buffers of a vector (see `Handle`)."""
        wanted = sum(part.nbytes for part in vector) if least is None else least
        with _typed(self._name, "read() of the handle"):
            done = operator.index(self._given.read(vector, offset, least))
            if done < wanted:
                raise shrunk(self._name, offset + wanted, offset + done)
        return done

    def close(self) -> None:
        """Closes it."""
        with _typed(self._name, "close() of the handle"):
            self._given.close()


def _possible(costs: Costs) -> bool:
    """Whether a plan can be made by them."""
    least = {"merge_gap": 0, "row_gap": 0}
    given = {name: n for name, n in costs._asdict().items() if n is not None}
    asked = given.keys() | {"block", "merge_gap", "staged", "span"}
    return all(
        isinstance(given.get(name), int) and given[name] >= least.get(name, 1) for name in asked
    )


@contextlib.contextmanager
def _typed(name: str, what: str) -> Generator[None]:
    try:
        yield
    except (errors.MfloadError, MemoryError):
        raise
    except Exception as error:
        kind, own = type(error).__name__, type(error).__module__ == "builtins"
        if isinstance(error, OSError) and (own or error.errno is not None):
            raise errors.from_os(error, name, "read") from error
        # Its text may hold secrets: that of an OSError of `requests` has the URL.
        raise errors.ReadError(f"{what} of the source raised {kind}", file=name) from error
