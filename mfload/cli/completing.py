"""What a shell offers when the tab key is pressed; never slow, never an error."""

from __future__ import annotations

import os
import re
import shlex
from typing import Any

_MOST_BYTES = 4 << 20
"""Largest headers that are read while somebody waits for the tab key."""
_MOST_NAMES = 200


def frameworks(incomplete: str) -> list[str]:
    """Names of frameworks."""
    return _starting(incomplete, ("numpy", "jax", "torch", "tensorflow", "paddle", "cupy"))


def engines(incomplete: str) -> list[str]:
    """Names of engines."""
    from mfload.io.route import ENGINES

    return _starting(incomplete, ENGINES)


def landings(incomplete: str) -> list[str]:
    """Whose memory arrays can land in."""
    from mfload.options import ALLOCATORS

    return _starting(incomplete, ALLOCATORS)


def dtypes(incomplete: str) -> list[str]:
    """Names of dtypes, after a regex too."""
    from mfload.dtypes import TABLE

    before, equals, begun = incomplete.rpartition("=")
    names = sorted({alias for row in TABLE.values() for alias in row.aliases[:1]})
    return [before + equals + name for name in _starting(begun, names)]


def names(incomplete: str) -> list[str]:
    """Names of the tensors of the checkpoint on the same line, where its headers are small."""
    try:
        found = _names()
    except Exception:  # noqa: BLE001  A shell that waits for the tab key wants no error.
        return []
    return [re.escape(name) for name in found if name.startswith(incomplete)][:_MOST_NAMES]


def _names() -> list[str]:
    from mfload.formats import checkpoint, discovery
    from mfload.sources.local import LocalFile

    # The parser gives up on an option without its value, so it knows no path by now. These are
    # the variables in which shells hand over the line.
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    path = next(word for word in shlex.split(line)[2:] if os.path.exists(word))
    size = 0
    for file in discovery.find(path).files:
        # Not by `open`, which waits at a FIFO for somebody to write.
        size += int.from_bytes(LocalFile(file).read(0, 8), "little")
    if size > _MOST_BYTES:
        return []
    index, _ = checkpoint.read(path)
    return [name for name in index if name.isprintable()]


def _starting(incomplete: str, choices: Any) -> list[str]:
    return [choice for choice in choices if choice.startswith(incomplete)]
