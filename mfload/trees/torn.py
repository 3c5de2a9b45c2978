"""Modules that a failed load left with old and new values; `mfload_torn` of them has the names."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def mark(module: Any, names: Collection[str]) -> None:
    """Marks a module, of which these names may hold old values or new ones; no names, no mark."""
    if names:
        vars(module)["mfload_torn"] = tuple(sorted(names))  # Keras tracks what it is assigned.
    else:
        vars(module).pop("mfload_torn", None)


def of(framework: str, module: Any) -> list[tuple[Any, dict[str, str]]]:
    """The parts of a module that are marked, with their names by those in the module."""
    if framework == "keras":
        from mfload.frameworks.private_api import keras_layers

        parts = [("", part) for part in keras_layers(module)]  # Paths are the same in all parts.
    elif framework == "torch":
        parts = module.named_modules()
    else:
        parts = module.named_sublayers(include_self=True)
    marked = ((at and f"{at}.", part, vars(part).get("mfload_torn", ())) for at, part in parts)
    return [(part, {at + name: name for name in names}) for at, part, names in marked if names]
