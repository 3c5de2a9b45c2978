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
import re
import sys
import traceback
from typing import Any

from mfload import errors
from mfload.cli import terminal
from mfload.cli.output import print_json

FINE, DIFFERENT, USAGE = 0, 1, 2
TRACEBACK = "MFLOAD_TRACEBACK"
"""The environment variable that asks for traces; `--traceback` sets it."""

# The first that fits counts.
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (KeyboardInterrupt, 130),
    (BrokenPipeError, 141),
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
_LONG = 1000
_MOST_PROBLEMS = 50
# Arguments as the library's errors name them: overwrite=True, checksums="write", max_shard_size.
_ARGUMENT = re.compile(
    r"\b((?:overwrite|only_weights)(?==True)|checksums(?==)|max_shard_size|max_(?:host|device)_overhead)(=True)?"
)


def code_of(error: BaseException) -> int:
    """The exit code of an error."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


def show(error: BaseException, *, as_json: bool) -> int:
    """Shows an error, as JSON on stdout or on stderr, and gives the exit code."""
    code = code_of(error)
    if isinstance(error, KeyboardInterrupt | BrokenPipeError):
        return code
    traced = os.environ.get(TRACEBACK, "0") not in ("", "0")
    if traced:
        with contextlib.suppress(OSError):
            traceback.print_exception(error, file=sys.stderr)
    said: dict[str, Any] = {"type": type(error).__name__, "message": _message(error)}
    for key in ("file", "tensor", "expected", "found"):
        value = getattr(error, key, None)
        said[key] = value if isinstance(value, int | float | None) else str(value)
    for key in ("message", "expected"):
        if isinstance(error, errors.MfloadError) and isinstance(said[key], str):
            said[key] = _ARGUMENT.sub(lambda match: "--" + match[1].replace("_", "-"), said[key])
    said["problems"] = list(getattr(error, "problems", ()))
    if as_json:
        try:
            print_json({"error": said})
            return code
        except OSError:
            terminal.mute(sys.stdout)
    if not traced:
        terminal.say("\n".join(_lines(**said)))
    return code


def _message(error: BaseException) -> str:
    if isinstance(error, errors.MfloadError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        name = "" if error.filename is None else f": {os.fsdecode(error.filename)}"
        return f"{error.strerror}{name}"
    if isinstance(error, OSError | MemoryError):
        return str(error) or type(error).__name__
    fault = f"{type(error).__name__}: {error}"
    return f"a fault in mfload, please report it with the trace (--traceback): {fault}"


def _lines(message: str, problems: list[str], **fields: object) -> list[str]:
    colour = terminal.fancy(sys.stderr) and not os.environ.get("NO_COLOR")
    word = "\x1b[1;31merror:\x1b[0m" if colour else "error:"
    fields.pop("type")
    said = {key: value for key, value in fields.items() if value is not None}
    lines = [f"mfload: {word} {errors.shown(message, _LONG)}"]
    lines += [f"  {key}: {errors.shown(value, _LONG)}" for key, value in said.items()]
    lines += [f"  - {errors.shown(line, _LONG)}" for line in problems[:_MOST_PROBLEMS]]
    if len(problems) > _MOST_PROBLEMS:
        lines.append(f"  … and {len(problems) - _MOST_PROBLEMS} more")
    return lines
