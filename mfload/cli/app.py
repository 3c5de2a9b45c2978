"""The commands, and what is the same for all: errors, interrupts, a closed pipe.

A command's module is imported when it is needed, so that each starts with what it needs alone.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import mfload
from mfload import errors
from mfload.cli import exits, failures, streams

COMMANDS = ("ls", "plan", "load", "verify", "diff", "align", "bench", "doctor")
"""Each is the function `command` of the module mfload.cli.<name>."""

# Click's errors lie elsewhere in each generation of typer; all derive from this.
_ClickException: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


class _Group(TyperGroup):  # pyright: ignore[reportUntypedBaseClass]
    """Finds commands by name, and imports none before."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = _command(cmd_name)
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no such command: {args[0]}{errors.did_you_mean(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    # Where nobody reads, typer would end with 1, which says "different" here.

    def make_context(self, *given: Any, **more: Any) -> Any:
        try:
            return super().make_context(*given, **more)
        except BrokenPipeError:
            raise typer.Exit(exits.CLOSED) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise typer.Exit(exits.CLOSED) from None


def _command(name: str) -> Any:
    module = importlib.import_module(f"mfload.cli.{name}")
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    # One line for the list of commands, an example after the options.
    alone.command(name, epilog=module.EPILOG)(module.command)
    return typer.main.get_command(alone)


app = typer.Typer(
    name="mfload",
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mfload {mfload.__version__}")
        raise typer.Exit


@app.callback()  # pyright: ignore[reportUntypedFunctionDecorator]
def _mfload(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the full trace of an error.")
    ] = False,
) -> None:
    """Looks into stored model weights, loads, verifies, compares and rewrites them."""


def run(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: Those after the command's own name.

    Returns:
        The exit code.
    """
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    trace = "--traceback" in options or os.environ.get("MFLOAD_TRACEBACK", "0") not in ("", "0")
    rest = [each for each in options if each != "--traceback"] + list(arguments[len(options) :])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A locale without the characters of a name is no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    code = exits.FINE
    try:
        code = _run(rest, as_json="--json" in options, trace=trace)
        streams.flush()
    except BrokenPipeError:
        code = exits.CLOSED
    except OSError as error:
        # Otherwise an error was told already, of the same stream maybe.
        if code in (exits.FINE, exits.DIFFERENT):
            code = failures.show(error, as_json=False, trace=trace)
    if code == exits.CLOSED:
        streams.mute(sys.stdout)
    try:
        sys.stderr.flush()
    except OSError:
        streams.mute(sys.stderr)
    return code


def _run(arguments: list[str], *, as_json: bool, trace: bool) -> int:
    try:
        # A command gives its exit code; typer gives that of --help and the like.
        code = typer.main.get_command(app).main(
            args=arguments, prog_name="mfload", standalone_mode=False
        )
        return code if isinstance(code, int) else exits.FINE
    except _ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            # Help that was not asked for is no result.
            streams.say(error.ctx.get_help())
            return exits.USAGE
        return failures.usage(error.format_message(), as_json=as_json, hint=_hint(error))
    except (KeyboardInterrupt, typer.Abort):
        return exits.INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001  The one place where errors end.
        if _interrupted(error):
            return exits.INTERRUPTED
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


def _hint(error: Any) -> str | None:
    context = getattr(error, "ctx", None)
    return None if context is None else f"help: {context.command_path} --help"
