"""Sources of a user's own: what they are and give is checked, and their errors become typed."""

from __future__ import annotations

import contextlib
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

    What it raises becomes a SourceError with its name.
    """

    def __init__(self, source: Any) -> None:
        wrong = [name for name in _METHODS if not callable(getattr(source, name, None))]
        for name, kind in _KINDS.items():
            if not isinstance(getattr(source, name, _KINDS), kind) or not hasattr(source, name):
                wrong.append(name)
        if wrong:
            raise errors.UsageError(
                f"{type(source).__name__} is not a source",
                expected="the attributes and methods that make a source: "
                f"{', '.join([*_KINDS, *_METHODS])}",
                found=f"missing or of another type: {', '.join(wrong)}",
            )
        self._given = source

    def __getattr__(self, name: str) -> Any:
        if name == "_given":
            raise AttributeError(name)
        return getattr(self._given, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return GivenSource, (self._given,)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Reads exactly that range (see `Source`)."""
        with _typed(self.name, "read()"):
            found = self._given.read(offset, nbytes)
        given = len(found) if isinstance(found, bytes | bytearray | memoryview) else None
        if given is None or given > nbytes:
            what = "read() of the source gives something else than the bytes of the range"
            expected = errors.amount(nbytes)
            it = type(found).__name__ if given is None else errors.amount(given)
            raise errors.ReadError(what, file=self.name, expected=expected, found=it)
        if len(found) < nbytes:
            raise shrunk(self.name, offset + nbytes, offset + len(found))
        return bytes(found)

    def open(self, flags: int = 0) -> GivenHandle:
        """Opens it for one thread (see `Source`)."""
        with _typed(self.name, "open()"):
            return GivenHandle(self.name, self._given.open(flags))

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
            done = self._given.read(vector, offset, least)
            if done < wanted:
                raise shrunk(self._name, offset + wanted, offset + done)
        return done

    def close(self) -> None:
        """Closes it."""
        with _typed(self._name, "close() of the handle"):
            self._given.close()


@contextlib.contextmanager
def _typed(name: str, what: str) -> Generator[None]:
    try:
        yield
    except (errors.MfloadError, MemoryError):
        raise
    except OSError as error:
        raise errors.from_os(error, name, "read") from error
    except Exception as error:
        kind = type(error).__name__  # Its text may hold secrets.
        raise errors.ReadError(f"{what} of the source raised {kind}", file=name) from error
