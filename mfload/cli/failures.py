"""Errors as a command shows them, on stderr or as JSON on stdout, and the exit codes.

0    fine
1    a comparison or a verification found a difference, or the doctor trouble
2    wrong usage, a tensor that is not there among it
3    the source or the target can't be had: missing, no permission, I/O error, exists already
4    a malformed file or checkpoint
5    can't be done here: framework, dtype, device, memory
70   a fault in mfload itself
124  `--timeout` ran out
130  interrupted
141  the reader of the output closed it
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Any

from mfload import errors
from mfload.cli import terminal
from mfload.cli.output import print_json
from mfload.cli.terminal import clean

FINE = 0
DIFFERENT = 1
USAGE = 2
INTERRUPTED = 130
CLOSED = 141

# The first that fits counts.
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (errors.LoadTimeoutError, 124),
    (errors.ChecksumError, DIFFERENT),
    (errors.UsageError, USAGE),
    (errors.TensorNotFoundError, USAGE),
    (errors.SliceError, USAGE),
    (errors.CheckpointError, 4),
    (errors.SourceError, 3),
    (errors.TargetError, 3),
    (errors.FormatError, 4),
    (errors.MfloadError, 5),
    (MemoryError, 5),
    (OSError, 3),
    (BaseException, 70),
)
_FIELDS = ("file", "tensor", "expected", "found")
_LONG = 1000
_MOST_PROBLEMS = 50

# How arguments of the library are spelled on a command line: in a sentence, and alone.
_TYPED = (
    ("overwrite=True", "--overwrite"),
    ('checksums="write" or "check"', "--checksums write or check"),
    ("max_shard_size", "--max-shard-size"),
    ("max_host_overhead", "--max-host-overhead"),
    ("max_device_overhead", "--max-device-overhead"),
    ("max_bytes", "--max-bytes"),
)
_ARGUMENTS = ("align", "checksums", "manifest", "rounds", "sha256", "threads", "timeout", "verify")


class AfterResultError(Exception):
    """Its cause came up with the result on stdout already, and is told on stderr in any case."""


def code_of(error: BaseException) -> int:
    """The exit code of an error."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


def show(error: BaseException, *, as_json: bool, trace: bool) -> int:
    """Shows an error, as JSON on stdout or on stderr, and gives the exit code."""
    if isinstance(error, AfterResultError) and error.__cause__ is not None:
        error, as_json = error.__cause__, False
    if trace:
        with contextlib.suppress(OSError):
            traceback.print_exception(error, file=sys.stderr)
    shown = as_json and _printed(_data(error))
    if not shown and not trace:
        terminal.say("\n".join(_lines(error)))
    return code_of(error)


def usage(message: str, *, as_json: bool, hint: str | None = None) -> int:
    """Shows that the arguments are invalid, and gives the exit code."""
    fields = dict.fromkeys(_FIELDS)
    data = {"type": "UsageError", "message": message, **fields, "problems": []}
    if not as_json or not _printed(data):
        lines = [_head(clean(message)), *([f"  {clean(hint)}"] if hint else [])]
        terminal.say("\n".join(lines))
    return USAGE


def _printed(data: dict[str, Any]) -> bool:
    """Prints an error as JSON; gives whether stdout took it."""
    try:
        print_json({"error": data})
        terminal.flush()
    except BrokenPipeError:
        raise
    except OSError:
        terminal.mute(sys.stdout)
        return False
    return True


def _data(error: BaseException) -> dict[str, Any]:
    fields = {key: _field(error, key) for key in _FIELDS}
    plain = {
        key: value if value is None or isinstance(value, str | int | float) else str(value)
        for key, value in fields.items()
    }
    problems = list(getattr(error, "problems", ()))
    return {"type": type(error).__name__, "message": _message(error), **plain, "problems": problems}


def _message(error: BaseException) -> str:
    if isinstance(error, errors.MfloadError):
        said = error.message
        return f"--{said}" if said in _ARGUMENTS else _spelled(said)
    if isinstance(error, OSError) and error.strerror:
        name = "" if error.filename is None else f": {os.fsdecode(error.filename)}"
        return f"{error.strerror}{name}"
    said = str(error)
    if isinstance(error, OSError | MemoryError):
        return said or type(error).__name__
    fault = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return f"a fault in mfload, please report it with the trace (--traceback): {fault}"


def _field(error: BaseException, key: str) -> object:
    value = getattr(error, key, None)
    return _spelled(value) if key == "expected" and isinstance(value, str) else value


def _spelled(said: str) -> str:
    for argument, option in _TYPED:
        said = said.replace(argument, option)
    return said


def _lines(error: BaseException) -> list[str]:
    lines = [_head(_short(_message(error)))]
    for key in _FIELDS:
        value = _field(error, key)
        if value is not None and isinstance(error, errors.MfloadError):
            lines.append(f"  {key}: {_short(value)}")
    problems: tuple[str, ...] = getattr(error, "problems", ())
    lines += [f"  - {_short(line)}" for line in problems[:_MOST_PROBLEMS]]
    if len(problems) > _MOST_PROBLEMS:
        lines.append(f"  … and {len(problems) - _MOST_PROBLEMS} more")
    return lines


def _head(message: str) -> str:
    colour = terminal.fancy(sys.stderr) and not os.environ.get("NO_COLOR")
    word = "\x1b[1;31merror:\x1b[0m" if colour else "error:"
    return f"mfload: {word} {message}"


def _short(value: object) -> str:
    text = clean(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}… ({len(text)} characters)"
