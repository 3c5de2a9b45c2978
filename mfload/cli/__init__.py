"""The command `mfload`: errors, interrupts and a closed pipe, the same for all commands.

Its libraries are an extra, so this module needs none of them.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import warnings
from collections.abc import Sequence

from mfload.cli import terminal


def main() -> int:
    """Runs the command with the arguments of the process, and gives the exit code."""
    try:
        terminal.open_streams()
        if os.getpid() == 1:
            _hear_signals()
        for module in ("typer", "tqdm"):
            if importlib.util.find_spec(module) is None:
                from mfload import extras

                install = extras.install("cli")
                terminal.say(f"mfload: error: the command needs {module}; {install}")
                return 5
        return run(sys.argv[1:])
    except KeyboardInterrupt:  # While it starts; `run` handles a later one.
        return 130


def _hear_signals() -> None:
    """Ends the first process of a container as Ctrl-C does when its runtime asks it to.

    The kernel drops a signal to that process that it has no handler for, even SIGTERM.
    """
    import signal

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def run(arguments: Sequence[str]) -> int:
    """Runs the command with the arguments after its own name, and gives the exit code."""
    from mfload import errors
    from mfload.cli import failures, spelling

    if "--traceback" in arguments:
        os.environ[failures.TRACEBACK] = "1"
    streams = (sys.stdout, sys.stderr)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            # A locale without the characters of a name is no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("default", "mfload", DeprecationWarning)
            warnings.showwarning = lambda message, *_: terminal.say(
                f"mfload: warning: {errors.printable(spelling.spoken(str(message)))}"
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
            return 0
    from mfload.cli import app

    return app.call(arguments)
