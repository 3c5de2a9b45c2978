"""The errors mfload raises; docs/errors.md draws their tree.

Each also derives from the built-in error that callers already catch.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from types import FrameType

_LISTED = 50  # Problems that are shown.


class MfloadError(Exception):
    """Base of every error mfload raises on purpose.

    Args:
        message: What is wrong, without the fields below.
        file: Path of the file concerned.
        tensor: Name of the tensor concerned.
        expected: What should have been there.
        found: What was there.
        problems: All faults if there may be several, one line each.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
        problems: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.file = None if file is None else os.fspath(file)
        self.tensor = tensor
        self.expected = expected
        self.found = found
        self.problems = problems

    def __str__(self) -> str:
        tensor = None if self.tensor is None else repr(self.tensor)
        fields = {"file": self.file, "tensor": tensor}
        fields |= {"expected": self.expected, "found": self.found}
        parts = [f"{key}: {shown(value)}" for key, value in fields.items() if value is not None]
        text = f"{self.message} [{'; '.join(parts)}]" if parts else self.message
        text += "".join(f"\n  - {shown(line)}" for line in self.problems[:_LISTED])
        if len(self.problems) > _LISTED:
            text += f"\n  … and {len(self.problems) - _LISTED} more"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        # The built-in bases rebuild from args alone and would lose the fields.
        names = ("file", "tensor", "expected", "found")
        fields = {name: _plain(getattr(self, name)) for name in names}
        make = functools.partial(type(self), problems=self.problems, **fields)
        names = ("errno", "strerror", "filename", "__notes__")
        more = {name: getattr(self, name, None) for name in names}
        return make, (self.message,), {k: v for k, v in more.items() if v is not None} or None


def _plain(value: object) -> object:
    """A field that any process can unpickle."""
    return value if value is None or isinstance(value, str | int | float) else str(value)


def shown(value: object, limit: int = 400) -> str:
    """Text that a hostile header may have made megabytes long, or full of escape codes."""
    text = str(value)
    return printable(text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)")


def printable(value: object) -> str:
    """One line that moves no cursor and colours nothing: what can't be printed is escaped."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@contextmanager
def about(*, file: str) -> Generator[None]:
    """Adds the file to errors that name only a tensor."""
    try:
        yield
    except MfloadError as error:
        if error.tensor is not None:
            error.file = error.file or file
        raise


@contextmanager
def after(why: str) -> Generator[None]:
    """Adds a note to errors of a second place: what was wrong with the first."""
    try:
        yield
    except MfloadError as error:
        error.add_note(f"the first place failed before: {why}")
        raise


def let_go(error: BaseException) -> None:
    """Takes the buffers out of an error's traceback, so that a kept error keeps no memory."""
    import traceback

    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        for frame, _ in traceback.walk_tb(each.__traceback__):
            # An error that was carried over knows its callers too, by no traceback.
            caller: FrameType | None = frame
            with suppress(RuntimeError):  # It is running, and so are its callers.
                while caller and caller.f_globals.get("__name__", "").startswith("mfload."):
                    caller.clear()
                    caller = caller.f_back
        each = each.__cause__ or each.__context__


class UsageError(MfloadError, ValueError):
    """An argument, or a combination of arguments, that makes no sense."""


class ArgumentError(UsageError, TypeError):
    """A call that does not fit the function: an unknown argument, one too many, one too few."""


class SourceError(MfloadError, OSError):
    """The bytes of a source could not be read."""


class SourceNotFoundError(SourceError, FileNotFoundError):
    """Nothing exists at the path, or nothing that mfload loads."""


class SourcePermissionError(SourceError, PermissionError):
    """The path may not be read."""


class SourceChangedError(SourceError):
    """The file shrank, grew, or was replaced between its header and its last byte."""


class ReadError(SourceError):
    """The operating system failed the read."""


class LoadTimeoutError(SourceError, TimeoutError):
    """`timeout` ran out before the bytes had arrived."""


class TargetError(MfloadError, OSError):
    """Nothing can be written to the path."""


class TargetExistsError(TargetError, FileExistsError):
    """Something exists at the path, and `overwrite` is not set."""


class WriteError(TargetError):
    """The system failed a write: the disk is full, a quota is used up, a device failed."""


class FormatError(MfloadError, ValueError):
    """The bytes do not follow the format."""


class HeaderError(FormatError):
    """The header of one file is malformed."""


class CheckpointError(FormatError):
    """The files of a checkpoint disagree with each other or with their index."""


class ShardNotFoundError(SourceNotFoundError, CheckpointError):
    """Files that belong to the checkpoint do not exist."""


class ChecksumError(FormatError):
    """The bytes differ from those that a manifest records."""


class TensorNotFoundError(MfloadError, KeyError):
    """No tensor of that name."""


class SliceError(MfloadError, IndexError):
    """An index that does not fit the tensor."""


class ShardingError(MfloadError, ValueError):
    """A sharding that does not fit the tensor, or a tensor without one."""


class MappingError(MfloadError, ValueError):
    """The checkpoint and the target do not fit each other."""


class ProcessError(MfloadError, RuntimeError):
    """Another process of the same load failed, is gone, or sees other files."""


OF_A_PLACE = (SourceError, FormatError, ProcessError)
"""Errors that another place of the same checkpoint may not have. Those of arguments, names and
memory are the same elsewhere."""


class UnsupportedDtypeError(MfloadError, TypeError):
    """A dtype that mfload does not know, or a conversion that does not exist."""


class UnsupportedShapeError(MfloadError, ValueError):
    """A shape that is legal in a file, but not for an array."""


class UnsupportedArrayError(MfloadError, TypeError):
    """An array without bytes to save in this process, or of a dtype that the format lacks."""


class LossyCastError(MfloadError, TypeError):
    """A conversion that would lose values and was not asked for by name."""


class MemoryLimitError(MfloadError, MemoryError):
    """The result, or the memory needed beside it, does not fit."""


class FrameworkMissingError(MfloadError, ImportError):
    """The framework, or another package that the call needs, is not installed."""


class FrameworkVersionError(MfloadError, ImportError):
    """The installed version of the framework is too old for mfload."""


class DeviceError(MfloadError, RuntimeError):
    """The device does not exist, or it failed: it was lost, or used after a fork."""


def missing(message: str, extra: str, **fields: Any) -> FrameworkMissingError:
    """The error for a package that an extra of mfload brings; it says how to install it."""
    from mfload import extras  # Late: only errors need it.

    return FrameworkMissingError(f"{message}; {extras.install(extra)}", **fields)


_E = TypeVar("_E", SourceError, TargetError)
_SOURCE_KINDS: dict[int | None, type[SourceError]] = {
    errno.ENOENT: SourceNotFoundError,
    errno.ENOTDIR: SourceNotFoundError,
    errno.ENAMETOOLONG: SourceNotFoundError,
    errno.EACCES: SourcePermissionError,
    errno.EPERM: SourcePermissionError,
    errno.EIO: ReadError,
}
_TARGET_KINDS: dict[int | None, type[TargetError]] = {
    errno.EEXIST: TargetExistsError,
    errno.ENOSPC: WriteError,
    errno.EDQUOT: WriteError,
    errno.EFBIG: WriteError,
    errno.EIO: WriteError,
}


def from_os(error: OSError, file: str | os.PathLike[str], action: str) -> SourceError:
    """The SourceError for an error of the system; `action` is a verb such as "open" or "read"."""
    if isinstance(error, SourceError):
        return error
    kind = _SOURCE_KINDS.get(error.errno, ReadError if action == "read" else SourceError)
    return _translated(error, kind, action, file=file)


def from_target(
    error: OSError, file: str | os.PathLike[str], action: str, **fields: object
) -> TargetError:
    """The TargetError for an error of the system; `fields` may be `expected` and `found`."""
    if isinstance(error, TargetError):
        return error
    other = WriteError if action.startswith("write") else TargetError
    return _translated(error, _TARGET_KINDS.get(error.errno, other), action, file=file, **fields)


class AsTarget:
    """A context that raises errors of the system as TargetErrors (see `from_target`).

    Not a generator, of which the dozen of a small save would take 3 % of its time.
    """

    __slots__ = ("_about",)

    def __init__(self, file: str, action: str) -> None:
        self._about = file, action

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: object, __: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, TargetError):
            raise from_target(error, *self._about) from error


def _translated(error: OSError, kind: type[_E], action: str, **fields: Any) -> _E:
    reason = error.strerror or str(error) or type(error).__name__
    made = kind(f"could not {action}: {reason}", **fields)
    made.errno, made.strerror, made.filename = error.errno, error.strerror, made.file
    return made


def counted(number: int | None, noun: str, plural: str | None = None) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


class Size(int):
    """Bytes that were given in a unit, such as "MiB"; messages about them use it too."""

    unit: str
    scale: int

    def __new__(cls, nbytes: int, unit: str, scale: int) -> Size:
        """Takes the bytes, the unit and its bytes."""
        made = super().__new__(cls, nbytes)
        made.unit, made.scale = unit, scale
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return int(self), self.unit, self.scale


def amount(nbytes: int | None, like: int | None = None) -> str:
    """Bytes, in the unit that another size was given in; rounded up, so that it is enough."""
    if not isinstance(like, Size) or nbytes is None:
        return counted(nbytes, "byte")
    whole, part = divmod(-(-nbytes * 100 // like.scale), 100)
    return f"{whole}{f'.{part:02d}'.rstrip('0').rstrip('.')} {like.unit}"


def close_names(word: object, choices: Iterable[str], most: int = 3) -> list[str]:
    """The choices that are near to a word, the nearest first (see `mfload.suggestions`)."""
    from mfload import suggestions  # Late: only errors need it.

    return suggestions.close(word, choices, most)


def did_you_mean(word: object, choices: Iterable[str] | Mapping[str, str]) -> str:
    """`, did you mean 'x'?` for the end of a message, empty if no choice is near.

    Of a mapping, keys are compared and the value is shown.
    """
    found = close_names(word, choices, 1)
    if not found:
        return ""
    named = choices[found[0]] if isinstance(choices, Mapping) else found[0]
    return f", did you mean {named!r}?"


def check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raises UsageError, with a close name, for a value that is not among the known ones."""
    if value not in known:
        meant = did_you_mean(value, known) if isinstance(value, str) else ""
        raise UsageError(f"unknown {name}{meant}", expected=" | ".join(known), found=value)


def number(name: str, value: Any, expected: str, fits: Callable[[float], bool]) -> float:
    """A number, also one of a framework; UsageError if it is none, or does not fit (NaN never)."""
    try:
        made = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # PyTorch raises the last.
        made = math.nan
    if not fits(made):
        raise UsageError(name, expected=expected, found=repr(value))
    return made


_PACKAGE = os.path.dirname(__file__) + os.sep


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning that points at the caller's line outside mfload."""
    frame, level = sys._getframe(), 1  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
