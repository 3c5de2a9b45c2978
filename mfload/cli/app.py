"""The typer application. A command's module is imported when the command is called."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import mfload
from mfload import errors
from mfload.cli import failures, terminal

COMMANDS = {
    "ls": ("commands", "mfload ls model/ --names 'q_proj' --larger-than 64MiB --sort size"),
    "plan": ("commands", "mfload plan model/ --framework torch --names 'layers\\.0\\.'"),
    "load": ("commands", "mfload load model/ --framework jax --dtype bfloat16 --repeat 3"),
    "verify": ("commands", "mfload verify model/ --checksums check"),
    "diff": ("commands", "mfload diff base/ finetuned/ --names 'layers\\.0\\.'"),
    "align": ("commands", "mfload align model/ aligned/ --max-shard-size 5GB"),
    "bench": ("bench", "mfload bench model/ --frameworks jax,torch --plot bench.png"),
    "doctor": ("commands", "mfload doctor model/"),
}
"""By name: the module of this package with a function of that name, and an example."""

# Click's errors lie elsewhere in each generation of typer; all derive from this.
_ClickException: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


class _Group(TyperGroup):  # pyright: ignore[reportUntypedBaseClass]
    """Finds commands by name, and imports none before."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            self.commands[cmd_name] = _command(cmd_name)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no such command: {args[0]}{errors.did_you_mean(args[0], list(COMMANDS))}")
        return super().resolve_command(ctx, args)

    # Where the reader is gone, typer would end with 1, which says "different" here.

    def make_context(self, *given: Any, **more: Any) -> Any:
        try:
            return super().make_context(*given, **more)
        except BrokenPipeError:
            raise typer.Exit(failures.CLOSED) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise typer.Exit(failures.CLOSED) from None


def _command(name: str) -> Any:
    module, example = COMMANDS[name]
    function = getattr(importlib.import_module(f"mfload.cli.{module}"), name)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    # One line for the list of commands, an example after the options.
    alone.command(name, epilog=f"Example: {example}")(function)
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


def call(arguments: list[str], *, as_json: bool) -> int:
    """Runs a command by typer, and gives the exit code."""
    try:
        # A command gives its exit code; typer gives that of --help and the like.
        code = typer.main.get_command(app).main(
            args=arguments, prog_name="mfload", standalone_mode=False
        )
        return code if isinstance(code, int) else failures.FINE
    except _ClickException as error:
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            # Help that was not asked for is no result.
            terminal.say(error.ctx.get_help())
            return failures.USAGE
        hint = None if context is None else f"help: {context.command_path} --help"
        return failures.usage(error.format_message(), as_json=as_json, hint=hint)
    except typer.Abort:
        return failures.INTERRUPTED
