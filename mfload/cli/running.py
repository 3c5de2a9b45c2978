"""Running a command: errors, interrupts and a closed pipe, the same for all commands."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence

from mfload.cli import failures, terminal


def run(arguments: Sequence[str]) -> int:
    """Runs the command with the arguments after its own name, and gives the exit code."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    trace = "--traceback" in options or os.environ.get("MFLOAD_TRACEBACK", "0") not in ("", "0")
    rest = [each for each in options if each != "--traceback"] + list(arguments[len(options) :])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A locale without the characters of a name is no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    code = failures.FINE
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            code = _run(rest, as_json="--json" in options, trace=trace)
        terminal.flush()
    except BrokenPipeError:
        code = failures.CLOSED
    except OSError as error:
        # Otherwise an error was told already, of the same stream maybe.
        if code in (failures.FINE, failures.DIFFERENT):
            code = failures.show(error, as_json=False, trace=trace)
    if code == failures.CLOSED:
        terminal.mute(sys.stdout)
    try:
        sys.stderr.flush()
    except OSError:
        terminal.mute(sys.stderr)
    return code


def _warn(message: object, *_: object) -> None:
    terminal.say(f"mfload: warning: {terminal.clean(message)}")


def _run(arguments: list[str], *, as_json: bool, trace: bool) -> int:
    try:
        # A shell that asks for completions sets the variable, and typer answers.
        if arguments[:1] == ["ls"] and "_MFLOAD_COMPLETE" not in os.environ:
            from mfload.cli import ls

            given = ls.simple_arguments(arguments[1:])
            if given is not None:
                ls.ls(**given)
                return failures.FINE
        from mfload.cli import app

        return app.call(arguments, as_json=as_json)
    except KeyboardInterrupt:
        return failures.INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001  The one place where errors end.
        if _interrupted(error):
            return failures.INTERRUPTED
        return failures.show(error, as_json=as_json, trace=trace)


def _interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error; NumPy makes an ImportError of it while it starts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
