"""The errors mfload raises.

    MfloadError
    ├── UsageError (ValueError)                an argument makes no sense
    ├── SourceError (OSError)                  bytes could not be had
    │   ├── SourceNotFoundError (FileNotFoundError)
    │   │   └── ShardNotFoundError (CheckpointError)  files of a checkpoint are missing
    │   ├── SourcePermissionError (PermissionError)
    │   ├── SourceChangedError                 shrank or was replaced under the read
    │   ├── ReadError                          the device failed
    │   └── LoadTimeoutError (TimeoutError)    the timeout ran out
    ├── TargetError (OSError)                  bytes could not be written
    │   ├── TargetExistsError (FileExistsError) something is there, `overwrite=` is not set
    │   └── WriteError                         the disk is full, or failed
    ├── FormatError (ValueError)               bytes are not what the format says
    │   ├── HeaderError                        one file's header is malformed
    │   ├── CheckpointError                    files disagree with each other or with an index
    │   └── ChecksumError                      bytes are not those that a manifest knows
    ├── TensorNotFoundError (KeyError)
    ├── SliceError (IndexError)
    ├── ShardingError (ValueError)             a sharding that does not fit the tensor
    ├── MappingError (ValueError)              checkpoint and target do not fit each other
    ├── ProcessError (RuntimeError)            another process of the load failed, or is gone
    ├── UnsupportedDtypeError (TypeError)      this tensor's dtype can't be handed out
    ├── UnsupportedShapeError (ValueError)     no array can have this tensor's shape
    ├── UnsupportedArrayError (TypeError)      this array can't be saved
    ├── LossyCastError (TypeError)             `dtype=` would lose values
    ├── MemoryLimitError (MemoryError)         the arrays or the work do not fit
    ├── FrameworkMissingError (ImportError)    not installed; the message says how to
    ├── FrameworkVersionError (ImportError)    installed, but outside what mfload works with
    └── DeviceError (RuntimeError)             no such device here, or it failed

Each also derives from the built-in that callers already catch, and carries `file`,
`tensor`, `expected`, `found` (None where they mean nothing) and `problems` as attributes.
"""

from __future__ import annotations

import difflib
import errno
import inspect
import itertools
import os
import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LISTED = 50  # Offenders that are shown.


class MfloadError(Exception):
    """Base of every error mfload raises on purpose.

    Args:
        message: What is wrong, without the fields below.
        file: Path of the file concerned.
        tensor: Name of the tensor concerned.
        expected: What should have been there.
        found: What was there.
        problems: Every offender where there may be several, one line each.
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
        fields = (
            ("file", self.file),
            ("tensor", None if self.tensor is None else repr(self.tensor)),
            ("expected", self.expected),
            ("found", self.found),
        )
        parts = [f"{key}: {_shown(value)}" for key, value in fields if value is not None]
        head = self.message if not parts else f"{self.message} [{'; '.join(parts)}]"
        lines = [f"\n  - {_shown(line)}" for line in self.problems[:_LISTED]]
        if len(self.problems) > len(lines):
            lines.append(f"\n  … and {len(self.problems) - len(lines)} more")
        return head + "".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # The built-in bases rebuild from args alone and would lose the fields.
        fields: dict[str, Any] = {
            k: _plain(getattr(self, k)) for k in ("file", "tensor", "expected", "found")
        }
        if self.problems:
            fields["problems"] = self.problems
        system = {k: getattr(self, k, None) for k in ("errno", "strerror")}
        state = {k: v for k, v in system.items() if v is not None}
        return _rebuild, (type(self), self.message, fields), state or None


def _rebuild(cls: type[MfloadError], message: str, fields: dict[str, Any]) -> MfloadError:
    return cls(message, **fields)


def _plain(value: object) -> object:
    """A field that any process can unpickle; what a user passed by mistake may not be one."""
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _shown(value: object, limit: int = 400) -> str:
    """Text that a hostile header may have made megabytes long, or full of escape codes."""
    text = str(value)
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text)} characters)"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@contextmanager
def about(*, file: str) -> Generator[None]:
    """Names the file in errors raised inside by those who know the tensor alone."""
    try:
        yield
    except MfloadError as error:
        if error.tensor is not None:
            error.file = error.file or file
        raise


class UsageError(MfloadError, ValueError):
    """An argument, or a combination of arguments, that makes no sense."""


class SourceError(MfloadError, OSError):
    """The bytes of a source could not be had."""


class SourceNotFoundError(SourceError, FileNotFoundError):
    """There is nothing at the path, or nothing that mfload loads."""


class SourcePermissionError(SourceError, PermissionError):
    """The path may not be read."""


class SourceChangedError(SourceError):
    """The file shrank, grew, or was replaced between its header and its last byte."""


class ReadError(SourceError):
    """The operating system failed the read."""


class LoadTimeoutError(SourceError, TimeoutError):
    """`timeout=` ran out before the bytes had come."""


class TargetError(MfloadError, OSError):
    """Nothing can be written where it was asked for."""


class TargetExistsError(TargetError, FileExistsError):
    """Something is there already, and overwriting was not asked for."""


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
    """The bytes are not those that a manifest knows."""


class TensorNotFoundError(MfloadError, KeyError):
    """No tensor of that name."""


class SliceError(MfloadError, IndexError):
    """An index that does not fit the tensor."""


class ShardingError(MfloadError, ValueError):
    """A sharding that does not fit the tensor, or no sharding at all."""


class MappingError(MfloadError, ValueError):
    """What the checkpoint holds and what the target wants do not fit each other."""


class ProcessError(MfloadError, RuntimeError):
    """Another process of the same load failed, is gone, or sees other files."""


class UnsupportedDtypeError(MfloadError, TypeError):
    """A dtype that mfload does not know or that can't be handed out as asked."""


class UnsupportedShapeError(MfloadError, ValueError):
    """A shape that is legal in the file and that no array can have."""


class UnsupportedArrayError(MfloadError, TypeError):
    """An array that has no bytes to save here, or whose dtype the format has no word for."""


class LossyCastError(MfloadError, TypeError):
    """A conversion that would lose values and was not asked for by name."""


class MemoryLimitError(MfloadError, MemoryError):
    """The result, or the memory needed beside it, does not fit."""


class FrameworkMissingError(MfloadError, ImportError):
    """The framework, or a package that what was asked for takes, is not installed."""


class FrameworkVersionError(MfloadError, ImportError):
    """The framework is installed in a version that mfload can't work with."""


class DeviceError(MfloadError, RuntimeError):
    """The device asked for is not there, or it failed: lost, or used after a fork."""


def from_os(error: OSError, file: str | os.PathLike[str], action: str) -> SourceError:
    """Maps an operating-system error to ours: the one seam between the two.

    Args:
        error: What the system call raised.
        file: The path concerned.
        action: What was being done, for the message ("open", "read").

    Returns:
        The error to raise; `errno` is carried over.
    """
    if isinstance(error, SourceError):
        return error
    kinds: dict[int | None, type[SourceError]] = {
        errno.ENOENT: SourceNotFoundError,
        errno.ENOTDIR: SourceNotFoundError,
        errno.EACCES: SourcePermissionError,
        errno.EPERM: SourcePermissionError,
    }
    if error.errno == errno.EIO or action == "read":
        kind = kinds.get(error.errno, ReadError)
    else:
        kind = kinds.get(error.errno, SourceError)
    reason = error.strerror or str(error) or type(error).__name__
    mapped = kind(f"could not {action}: {reason}", file=file)
    mapped.errno = error.errno
    mapped.strerror = error.strerror
    return mapped


def from_target(
    error: OSError,
    file: str | os.PathLike[str],
    action: str,
    *,
    expected: object = None,
    found: object = None,
) -> TargetError:
    """Maps an operating-system error of the writing side to ours, as `from_os` does.

    Args:
        error: What the system call raised.
        file: The path concerned, under its final name.
        action: What was being done, for the message ("write", "rename").
        expected: What should have been there, such as the bytes that were to be written.
        found: What was there.

    Returns:
        The error to raise; `errno` is carried over.
    """
    if isinstance(error, TargetError):
        return error
    kinds: dict[int | None, type[TargetError]] = {errno.EEXIST: TargetExistsError}
    for number in _FAILED:
        kinds[number] = WriteError
    reason = error.strerror or str(error) or type(error).__name__
    kind = kinds.get(error.errno, WriteError if action.startswith("write") else TargetError)
    mapped = kind(f"could not {action}: {reason}", file=file, expected=expected, found=found)
    mapped.errno = error.errno
    mapped.strerror = error.strerror
    return mapped


# The disk, a quota or a limit of the process has no room, or the device failed.
_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


_SOUGHT = 5000
_LONG = 300


def close_names(
    word: object, choices: Iterable[str], most: int = 3, cutoff: float = 0.6
) -> list[str]:
    """The choices most like a word, the likest first.

    Likeness takes about 50 µs a choice: the first 5000 are looked at, and the first 300
    characters of each, so that a mistyped name costs no wait.

    Args:
        word: What was typed; anything, by its text.
        choices: What could have been meant.
        most: How many to give.
        cutoff: How like the word they must be, 0 to 1.
    """
    wanted = str(word)[:_LONG]
    among = {
        choice[:_LONG].lower(): choice[:_LONG] for choice in itertools.islice(choices, _SOUGHT)
    }
    found = difflib.get_close_matches(wanted.lower(), among, n=most, cutoff=cutoff)
    return [among[each] for each in found]


def did_you_mean(word: object, choices: Iterable[str] | Mapping[str, str]) -> str:
    """`, did you mean 'x'?`, to be put after a message; empty if nothing is close.

    Args:
        word: What was typed.
        choices: What could have been meant; where it is a mapping, its value is named.
    """
    found = close_names(word, choices, 1)
    if not found:
        return ""
    named = choices[found[0]] if isinstance(choices, Mapping) else found[0]
    return f", did you mean {named!r}?"


_PACKAGE = str(Path(__file__).parent) + os.sep


def warn(message: str) -> None:
    """Issues a UserWarning that points at the caller's line outside mfload."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
