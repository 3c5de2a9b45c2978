"""Writes docs/reference/commands.md from the commands: `python docs/generate_commands.py`.

With `--check` nothing is written, and the exit status says whether the page is up to date.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import mfload
from mfload.cli import app, failures

PAGE = Path(__file__).resolve().parent / "reference" / "commands.md"
HEAD = """# Command reference

What each command takes, written from the commands by `python docs/generate_commands.py`.
"""


def page() -> str:
    """The page, made anew."""
    group = app.group()
    context = group.make_context("mfload", [], resilient_parsing=True)
    parts = [HEAD, "## All commands\n", _options(group)]
    for name in group.list_commands(context):  # pyright: ignore
        command = group.get_command(context, name)  # pyright: ignore
        parts += [f"## `mfload {name}`\n", *_about(command, name), _options(command)]
    parts += ["## Exit codes\n", _codes(), "## Exit codes of errors\n", _errors()]
    return "\n".join(parts).rstrip("\n") + "\n"


def _about(command: Any, name: str) -> list[str]:
    text = inspect.cleandoc(command.help or "")
    arguments = [_metavar(each) for each in _params(command) if _is_argument(each)]
    usage = " ".join(["mfload", name, *arguments, "[OPTIONS]"])
    example = re.sub(r"^Examples?:\s*", "", command.epilog or "")
    parts = [f"{_prose(text)}\n", f"```text\n{usage}\n```\n"]
    return [*parts, f"For example:\n\n```sh\n{example}\n```\n"] if example else parts


def _prose(text: str) -> str:
    """A help text as Markdown, options set as code; what is code already stays."""
    parts = re.split(r"(`[^`]*`)", text)
    for at, part in list(enumerate(parts))[::2]:
        escaped = re.sub(r"([*_<>|])", r"\\\1", part)
        parts[at] = re.sub(r"(?<!\S)--[a-z][a-z-]*", r"`\g<0>`", escaped)
    return "".join(parts)


def _params(command: Any) -> list[Any]:
    return [each for each in command.params if not getattr(each, "hidden", False)]


def _is_argument(param: Any) -> bool:
    return param.param_type_name == "argument"


def _metavar(param: Any) -> str:
    name = (param.metavar or param.name.upper()).strip("{}")
    return name if param.required else f"[{name}]"


def _options(command: Any) -> str:
    rows = [("argument or option", "what", "default")]
    for param in _params(command):
        if _is_argument(param):
            name = f"`{_metavar(param)}`"
        else:
            value = "" if param.is_flag else f" {param.metavar or param.type.name.upper()}"
            name = f"`{', '.join([*param.opts, *param.secondary_opts])}{value}`"
        default = param.default
        told = default not in (None, False, ()) and not callable(default) and not param.required
        shown = f"`{default}`" if told else ""
        rows.append((name.replace("|", "\\|"), _prose(param.help or ""), shown))
    return _table(rows)


def _codes() -> str:
    """The codes as the docstring of mfload.cli.failures lists them."""
    found = re.findall(r"^(\d+) +(.+)$", failures.__doc__ or "", re.M)
    return _table([("code", "meaning"), *found])


def _errors() -> str:
    """Each class of the tree and the code that the command line ends with."""
    kinds = [
        kind
        for kind in vars(mfload.errors).values()
        if isinstance(kind, type) and issubclass(kind, mfload.MfloadError)
    ]
    rows = [("error", "also a", "code")]
    for kind in kinds:
        builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins").__name__
        link = f"[`{kind.__name__}`](../errors.md#{kind.__name__.lower()})"
        name = link if kind is not mfload.MfloadError else f"`{kind.__name__}`"
        rows.append((name, f"`{builtin}`", str(failures.code_of(kind("")))))
    return _table(rows)


def _table(rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n"


def main(arguments: list[str]) -> int:
    """Writes the page, or says whether it is up to date."""
    new = page()
    if "--check" in arguments:
        return int(not PAGE.exists() or PAGE.read_text("utf-8") != new)
    PAGE.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
