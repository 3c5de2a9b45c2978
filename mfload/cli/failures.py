"""Errors as a command shows them: lines on stderr, or JSON on stdout."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

from mfload import errors
from mfload.cli import exits
from mfload.cli.output import fancy, print_json
from mfload.cli.text import clean

_FIELDS = ("file", "tensor", "expected", "found")
_LONG = 1000
_MOST_PROBLEMS = 50


def show(error: BaseException, *, as_json: bool, trace: bool) -> int:
    """Shows an error.

    Args:
        error: What was raised.
        as_json: Whether stdout is to hold JSON.
        trace: Whether to show the full trace on stderr.

    Returns:
        The exit code.
    """
    if trace:
        traceback.print_exception(error, file=sys.stderr)
    if as_json:
        print_json({"error": _data(error)})
    elif not trace:
        print("\n".join(_lines(error)), file=sys.stderr)
    return exits.code_of(error)


def usage(message: str, *, as_json: bool, hint: str | None = None) -> int:
    """Shows that the arguments make no sense."""
    if as_json:
        fields = dict.fromkeys(_FIELDS)
        print_json({"error": {"type": "UsageError", "message": message, **fields, "problems": []}})
    else:
        lines = [_head(clean(message)), *([f"  {clean(hint)}"] if hint else [])]
        print("\n".join(lines), file=sys.stderr)
    return exits.USAGE


def _data(error: BaseException) -> dict[str, Any]:
    fields = {key: _field(getattr(error, key, None)) for key in _FIELDS}
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
        return error.message
    if isinstance(error, OSError) and error.strerror:
        name = "" if error.filename is None else f": {os.fsdecode(error.filename)}"
        return f"{error.strerror}{name}"
    said = str(error)
    if exits.expected(error):
        return said or type(error).__name__
    fault = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return f"a fault in mfload, please report it with the trace (--traceback): {fault}"


def _lines(error: BaseException) -> list[str]:
    lines = [_head(_short(_message(error)))]
    for key in _FIELDS:
        value = getattr(error, key, None)
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
