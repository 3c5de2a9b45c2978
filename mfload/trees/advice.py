"""Advice: what a line of a key map that went wrong was probably meant to be."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Sequence

from mfload.trees.keymaps import Entry

_MATCHED = 1_000_000  # Matches tried in all, at less than 1 µs each.
# What "\1" to "\7" are in a Python text that is not raw.
_CONTROL = re.compile(r"[\x01-\x07]")
_DOLLAR = re.compile(r"\$\{?(\d)\}?")


def template(target: str) -> str:
    """What is amiss with a replacement that made a name which no target has, or nothing."""
    if _CONTROL.search(target):
        meant = _CONTROL.sub(lambda found: f"\\{ord(found[0])}", target)
        return f"; write r'{meant}': without the r, a backslash and a digit are one character"
    dollar = _DOLLAR.search(target)
    return f"; a group is \\{dollar[1]}, not {dollar[0]}" if dollar else ""


def front(entries: Iterable[Entry], name: str) -> str:
    """Which regex matches the front of a name that none matches, or nothing."""
    for entry in entries:
        end = _end(entry, name)
        if end:
            return f"; {entry} matches only its front, not {name[end:]!r}"
    return ""


def unused(entries: Sequence[Entry], names: Collection[str], targets: Collection[str]) -> list[str]:
    """What to say of lines that match no tensor.

    Args:
        entries: The lines.
        names: Those of the checkpoint.
        targets: Those of the target.

    Returns:
        A text for each.
    """
    most = _MATCHED // max(1, len(entries))
    lines = [_unused(entry, itertools.islice(names, most)) for entry in entries]
    for at, entry in enumerate(entries):
        among = itertools.islice(targets, most)
        turned = next((name for name in among if entry.pattern.fullmatch(name)), None)
        if turned is not None:
            lines[at] += f", but {turned} of the target: a map goes from stored names to those"
            break
    return lines


def _unused(entry: Entry, names: Iterable[str]) -> str:
    for name in names:
        end = _end(entry, name)
        if end:
            tail = re.escape(name[end:])
            return f"{entry} matches only the front of {name}; add {tail} or .*"
    return f"{entry} matches no tensor"


def _end(entry: Entry, name: str) -> int:
    found = entry.pattern.match(name)
    return found.end() if found and found.end() < len(name) else 0
