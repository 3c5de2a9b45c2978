"""The typer application: the commands, and how their arguments are read."""

from __future__ import annotations

import functools
import os
from typing import Annotated, Any

import typer

import mfload
from mfload import errors
from mfload.cli import bench, commands, failures, terminal

COMMANDS = {
    "ls": (commands.ls, "model/ --names 'q_proj' --larger-than 64MiB --sort size"),
    "plan": (commands.plan, "model/ --framework torch --names 'layers\\.0\\.'"),
    "load": (commands.load, "model/ --framework jax --dtype bfloat16 --repeat 3"),
    "verify": (commands.verify, "model/ --mode check"),
    "diff": (commands.diff, "base/ finetuned/ --names 'layers\\.0\\.'"),
    "align": (commands.align, "model/ aligned/ --max-shard-size 5GB"),
    "convert": (commands.convert, "checkpoints/100/ model/ --max-shard-size 5GB"),
    "bundle": (
        commands.bundle,
        "model/ bundled.safetensors --up 'layers\\.(\\d+)\\.fc1\\.weight' "
        "--down 'layers\\.(\\d+)\\.fc2\\.weight'",
    ),
    "unbundle": (commands.unbundle, "bundled.safetensors model.safetensors"),
    "serve": (commands.serve, "model/ --model org/name --address 127.0.0.1:7000"),
    "planner": (commands.planner, "--address 127.0.0.1:7100"),
    "bench": (bench.bench, "model/ --frameworks jax,torch --plot bench.png"),
    "cache": (commands.cache, "ls ~/.cache/mfload"),
    "doctor": (commands.doctor, "model/"),
}
"""Each command's function, and arguments of an example."""

_UNBROKEN = "\u2011"
"""A hyphen that no line is broken at."""

# Typer takes its errors from Click, in each generation from another place.
_ClickException: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mfload {mfload.__version__}")
        raise typer.Exit


def _mfload(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the full trace of an error.")
    ] = False,
) -> None:
    """Looks into stored model weights, loads, verifies, compares and rewrites them."""


def group(name: str = "") -> Any:
    """The commands as Click knows them; given the name of one, that one, since all take longer."""
    app = typer.Typer(
        name="mfload",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_mfload)
    for each in [name] if name in COMMANDS else COMMANDS:
        function, example = COMMANDS[each]
        app.command(each, epilog=f"Example: mfload {each} {example}")(function)
    made: Any = typer.main.get_command(app)
    for each in (made, *made.commands.values()):
        each.context_class = _whole_words(each.context_class)
    return made


@functools.cache
def _whole_words(context: Any) -> Any:
    """A class of contexts whose help breaks no line within `--max-shard-size`."""

    class Formatter(context.formatter_class):
        def write_text(self, text: str) -> None:
            super().write_text(text.replace("-", _UNBROKEN))

        def write_dl(self, rows: Any, *more: Any, **how: Any) -> None:
            rows = [tuple(each.replace("-", _UNBROKEN) for each in row) for row in rows]
            super().write_dl(rows, *more, **how)

        def getvalue(self) -> str:
            return super().getvalue().replace(_UNBROKEN, "-")

    return type("Context", (context,), {"formatter_class": Formatter})


def call(arguments: list[str]) -> int:
    """Runs a command by typer, and gives the exit code."""
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    if "_MFLOAD_COMPLETE" in os.environ:  # A shell asks what the tab key may complete.
        group().main(args=arguments, prog_name="mfload")
    command = group(*arguments[:1])
    try:
        # main() would turn a closed pipe into exit code 1, which says "different" here.
        with command.make_context("mfload", [*arguments]) as context:
            code = command.invoke(context)
        return code if isinstance(code, int) else failures.FINE
    except typer.Exit as end:
        return end.exit_code
    except _ClickException as error:
        message = error.format_message()
        if type(error).__name__ == "NoArgsIsHelpError":
            terminal.say(message)
            return failures.USAGE
        raise _wrong(message, arguments) from None


def _wrong(message: str, arguments: list[str]) -> errors.UsageError:
    """The error for arguments that no command takes."""
    first, stop = arguments[0], "" if message.endswith((".", "?")) else "."
    if first in COMMANDS:
        return errors.UsageError(f"{message}{stop} See mfload {first} --help")
    expected = None
    if arguments[1:2] and arguments[1] in COMMANDS:
        expected = f"the command first: mfload {arguments[1]} {errors.shown(first, 80)} …"
    elif not first.startswith("-"):
        expected = " | ".join(COMMANDS)
    return errors.UsageError(f"{message}{stop} See mfload --help", expected=expected)
