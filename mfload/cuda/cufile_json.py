"""cuFile's configuration, as cuFile reads it: JSON with comments, and variables before it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mfload.cuda.system import System

# What is not closed goes on to the end: with no match there, each start would be tried so far.
_COMMENT = re.compile(r'("[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z))|//[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_DEEPEST = 100
_YES = ("1", "true", "yes", "on")


class Configuration(NamedTuple):
    """What is set.

    Attributes:
        path: The file; None where there is none.
        table: What it holds.
        trouble: Why it can't be read; empty where it can.
        forced: Whether cuFile always copies through host memory.
        allowed: Whether it may, where it has no other way.
        p2pdma: Whether the kernel's own PCI P2PDMA is asked for, which needs no nvidia-fs.
    """

    path: str | None
    table: dict[str, Any]
    trouble: str
    forced: bool
    allowed: bool
    p2pdma: bool


def read(system: System, environment: Mapping[str, str] | None = None) -> Configuration:
    """Reads it.

    Args:
        system: The machine.
        environment: Variables; None for those of this process.
    """
    variables = os.environ if environment is None else environment
    path = variables.get("CUFILE_ENV_PATH_JSON") or "/etc/cufile.json"
    table, trouble = _table(system.text(os.path.abspath(path).lstrip("/")))
    properties: dict[str, Any] = table.get("properties", {})
    # P2PDMA is asked for as a whole, or for one kind of storage.
    asked = any(key == "use_pci_p2pdma" and each is True for _, key, each in _inside(table))
    return Configuration(
        path if table or trouble else None,
        table,
        trouble,
        _flag(variables, "CUFILE_FORCE_COMPAT_MODE", properties.get("force_compat_mode") is True),
        properties.get("allow_compat_mode") is not False,
        _flag(variables, "CUFILE_USE_PCIP2PDMA", asked),
    )


def plain(text: str) -> str:
    """The text without its comments.

    Args:
        text: JSON with comments in the ways of C and C++.
    """
    return _COMMENT.sub(lambda match: match[1] or "", text)


def _table(text: str | None) -> tuple[dict[str, Any], str]:
    if text is None:
        return {}, ""
    try:
        table: Any = json.loads(plain(text))
    except ValueError as error:
        return {}, str(error)
    except RecursionError:
        return {}, "nested too deeply"
    if not isinstance(table, dict) or not isinstance(table.get("properties", {}), dict):  # pyright: ignore
        return {}, "not a table of properties"
    # Others that walk through it have less of the stack left than the parser had.
    if any(depth > _DEEPEST for depth, _, _ in _inside(table)):
        return {}, "nested too deeply"
    return table, ""  # pyright: ignore


def _inside(value: Any) -> Iterator[tuple[int, Any, Any]]:
    """All that tables and lists hold, at any depth: depth, key and value."""
    left = [(1, value)]
    while left:
        depth, value = left.pop()
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in pairs:
            yield depth, key, each
            if isinstance(each, dict | list):
                left.append((depth + 1, each))


def _flag(variables: Mapping[str, str], name: str, otherwise: bool) -> bool:
    text = variables.get(name)
    return otherwise if not text else text.lower() in _YES
