"""The library's spelling of arguments and functions, turned into that of a command line.

Errors and notes of the library name an argument as `name=`, `name='value'`, or, for a placeholder,
`name=…`, those of options inside `Options(…)`. Here that becomes `--name`, `--name value` and
`--name METAVAR`, and `mfload.verify(path)` becomes `mfload verify PATH`.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

_VALUE = r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\{[^}]*\}|\d[\w.]*|True\b|False\b|None\b|…|\.{3}"
_OPTIONS = re.compile(
    r"\b(?:options=)?(?:mfload\.)?Options\((?:peer=(?:mfload\.)?PeerOptions\(([^()]*)\)|([^()]*))\)"
)
_CALL = re.compile(r"\bmfload\.(?:ondemand\.)?([a-z]+)\b(?:\(([^()]*)\))?")
# Not in a path or a query: those are the user's.
_ARGUMENT = re.compile(rf"(?<![\w.?&/-])([a-z][a-z0-9_]*)(=(?:({_VALUE}))?)?(?!=)")
_POSITIONAL = re.compile(r"(?<![\w'\"-])([a-z]\w*)(?=,|$)")
_MAYBE = re.compile(r"mfload\.|Options\(|=|_")


def spoken(text: str) -> str:
    """A text of the library with arguments as options, and functions as commands."""
    if not _MAYBE.search(text):
        return text
    text = _OPTIONS.sub(lambda match: match[1] or match[2] or "", text)
    return _ARGUMENT.sub(_option, _CALL.sub(_command, text))


def _app() -> Any:
    return importlib.import_module("mfload.cli.app")  # It imports this module.


def _command(match: re.Match[str]) -> str:
    if match[1] not in _app().COMMANDS:
        return match[0]
    given = _POSITIONAL.sub(lambda name: name[1].upper(), match[2] or "")
    return f"mfload {match[1]} {given.replace(',', '')}".rstrip()


def _option(match: re.Match[str]) -> str:
    name, equals, value = match.groups()
    if not equals and "_" not in name:  # A plain word.
        return match[0]
    option, metavar = _known().get(name, (None, None))
    if option is None:
        return match[0]
    if value == "False":
        return f"--no-{option[2:]}"
    if value is None or value == "True":
        return option
    plain = value[1:-1] if value[0] in "'\"" else value
    shown = metavar if value[0] in "[{…." or "…" in plain else plain
    return f"{option} {shown}" if shown else option


@functools.cache
def _known() -> dict[str, tuple[str, str | None]]:
    """Options and their metavars by the name of the library's argument."""
    group = _app().group()
    found: dict[str, tuple[str, str | None]] = {}
    options = [
        (next(each for each in param.opts if each.startswith("--")), param)
        for command in group.commands.values()
        for param in command.params
        if param.param_type_name == "option"
    ]
    # Where commands differ in what an option takes, the one that takes most is named.
    for option, param in sorted(options, key=lambda each: len(each[1].metavar or "")):
        found |= dict.fromkeys((option[2:].replace("-", "_"), param.name), (option, param.metavar))
    return found
