"""Errors as a command shows them: lines on stderr, or JSON on stdout."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Any

from mfload import errors
from mfload.cli import exits, streams
from mfload.cli.output import fancy, print_json
from mfload.cli.text import clean

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


def show(error: BaseException, *, as_json: bool, trace: bool) -> int:
    """Shows an error.

    Args:
        error: What was raised.
        as_json: Whether stdout is to hold JSON.
        trace: Whether to show the full trace on stderr.

    Returns:
        The exit code.
    """
    if isinstance(error, AfterResultError) and error.__cause__ is not None:
        error, as_json = error.__cause__, False
    if trace:
        with contextlib.suppress(OSError):
            traceback.print_exception(error, file=sys.stderr)
    shown = as_json and _shown(_data(error))
    if not shown and not trace:
        streams.say("\n".join(_lines(error)))
    return exits.code_of(error)


def usage(message: str, *, as_json: bool, hint: str | None = None) -> int:
    """Shows that the arguments make no sense."""
    fields = dict.fromkeys(_FIELDS)
    data = {"type": "UsageError", "message": message, **fields, "problems": []}
    if not as_json or not _shown(data):
        lines = [_head(clean(message)), *([f"  {clean(hint)}"] if hint else [])]
        streams.say("\n".join(lines))
    return exits.USAGE


def _shown(data: dict[str, Any]) -> bool:
    """Prints an error as JSON; gives whether stdout took it.

    Raises:
        BrokenPipeError: Nobody reads it.
    """
    try:
        print_json({"error": data})
        streams.flush()
    except BrokenPipeError:
        raise
    except OSError:
        streams.mute(sys.stdout)
        return False
    return True


def _data(error: BaseException) -> dict[str, Any]:
    fields = {key: _field(_typed(error, key)) for key in _FIELDS}
    return {
        "type": type(error).__name__,
        "message": _message(error),
        **fields,
        "problems": list(getattr(error, "problems", ())),
    }


def _field(value: object) -> object:
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _message(error: BaseException) -> str:
    if isinstance(error, errors.MfloadError):
        said = error.message
        return f"--{said}" if said in _ARGUMENTS else _spelled(said)
    if isinstance(error, OSError) and error.strerror:
        name = "" if error.filename is None else f": {os.fsdecode(error.filename)}"
        return f"{error.strerror}{name}"
    said = str(error)
    if exits.expected(error):
        return said or type(error).__name__
    fault = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return f"a fault in mfload, please report it with the trace (--traceback): {fault}"


def _typed(error: BaseException, key: str) -> object:
    value = getattr(error, key, None)
    return _spelled(value) if key == "expected" and isinstance(value, str) else value


def _spelled(said: str) -> str:
    for argument, option in _TYPED:
        said = said.replace(argument, option)
    return said


def _lines(error: BaseException) -> list[str]:
    lines = [_head(_short(_message(error)))]
    for key in _FIELDS:
        value = _typed(error, key)
        if value is not None and isinstance(error, errors.MfloadError):
            lines.append(f"  {key}: {_short(value)}")
    problems: tuple[str, ...] = getattr(error, "problems", ())
    lines += [f"  - {_short(line)}" for line in problems[:_MOST_PROBLEMS]]
    if len(problems) > _MOST_PROBLEMS:
        lines.append(f"  … and {len(problems) - _MOST_PROBLEMS} more")
    return lines


def _head(message: str) -> str:
    colour = fancy(sys.stderr) and not os.environ.get("NO_COLOR")
    word = "\x1b[1;31merror:\x1b[0m" if colour else "error:"
    return f"mfload: {word} {message}"


def _short(value: object) -> str:
    text = clean(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}… ({len(text)} characters)"
