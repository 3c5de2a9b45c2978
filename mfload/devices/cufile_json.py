"""cuFile's configuration, as cuFile reads it: JSON with comments, and variables before it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mfload.devices.system import System

_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
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
    table, trouble = _table(system.text(path.lstrip("/")))
    properties: dict[str, Any] = table.get("properties", {})
    asked = any(value is True for value in _named(table, "use_pci_p2pdma"))
    return Configuration(
        path if table or trouble else None,
        table,
        trouble,
        _flag(variables, "CUFILE_FORCE_COMPAT_MODE", properties.get("force_compat_mode") is True),
        properties.get("allow_compat_mode") is not False,
        _flag(variables, "CUFILE_USE_PCIP2PDMA", asked),
    )


def _table(text: str | None) -> tuple[dict[str, Any], str]:
    if text is None:
        return {}, ""
    try:
        table: Any = json.loads(_COMMENT.sub(lambda match: match[1] or "", text))
    except ValueError as error:
        return {}, str(error)
    if not isinstance(table, dict) or not isinstance(table.get("properties", {}), dict):  # pyright: ignore
        return {}, "not a table of properties"
    return table, ""  # pyright: ignore


def _named(value: Any, name: str) -> Iterator[Any]:
    """All values of a key: P2PDMA is asked for as a whole, or for one kind of storage."""
    if isinstance(value, dict):
        table: dict[str, Any] = value  # pyright: ignore
        for key, each in table.items():
            if key == name:
                yield each
            yield from _named(each, name)


def _flag(variables: Mapping[str, str], name: str, otherwise: bool) -> bool:
    text = variables.get(name)
    return otherwise if not text else text.lower() in _YES
