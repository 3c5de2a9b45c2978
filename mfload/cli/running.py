"""Running a command: errors, interrupts and a closed pipe, the same for all commands."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence

from mfload import errors
from mfload.cli import failures, terminal


def run(arguments: Sequence[str]) -> int:
    """Runs the command with the arguments after its own name, and gives the exit code."""
    if "--traceback" in arguments:
        os.environ[failures.TRACEBACK] = "1"
    streams = (sys.stdout, sys.stderr)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            # A locale without the characters of a name is no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: terminal.say(
                f"mfload: warning: {errors.printable(message)}"
            )
            code = _dispatch([each for each in arguments if each != "--traceback"])
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  The one place where errors end.
        code = failures.show(error, as_json="--json" in arguments)
    for stream in streams:
        try:
            stream.flush()
        except OSError:
            terminal.mute(stream)
    return code


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["ls"] and "_MFLOAD_COMPLETE" not in os.environ:
        from mfload.cli import ls

        given = ls.simple_arguments(arguments[1:])
        if given is not None:
            ls.ls(**given)
            return failures.FINE
    from mfload.cli import app

    return app.call(arguments)
