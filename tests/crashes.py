"""The states in which a loss of power may leave a directory, made of what a call did to it.

For each prefix of the changes that `recorder.Recorder` noted, states are those that a file system
may show after the crash:

- Names that no sync of their directory covers are lost from some change on, as journals have it
  ("ordered"); or any of them are, whatever came before or after ("weak").
- What was written to a file since its last sync is there, is not there, reads as zeros, or half of
  it is there.
- Files without a name are gone.

A kill alone is the state in which nothing is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

from recorder import Change, Content, Node, Recorder, Tree, applied

DATA = ("kept", "lost", "zeros", "torn")
"""What may be found of the bytes that were written to a file since its last sync."""

_MOST = 5  # Changes of names of which every subset is tried.


def states(seen: Recorder, *, thorough: bool) -> Iterator[tuple[str, bool, Tree]]:
    """All states that differ, each with words that say how it came about, and whether the call had
    returned by then.

    Args:
        thorough: Whether files have other fates than one another, and names all that are possible.
    """
    known: set[object] = set()
    for number in range(len(seen.changes) + 1):
        made, returned = seen.changes[:number], number == len(seen.changes)
        for lost in _lost_names(made, thorough=thorough):
            names = _names(seen.start, made, lost)
            together = bool(lost) and not thorough
            for fates in _fates(made, {*names.values()}, together=together, thorough=thorough):
                state = _state(seen.start, made, names, fates)
                if (key := (returned, state.key())) not in known:
                    known.add(key)
                    yield _words(made, lost, names, fates), returned, state


def killed(seen: Recorder, part: float) -> Tree:
    """What a kill leaves after this part of the changes."""
    made = seen.changes[: round(len(seen.changes) * part)]
    return _state(seen.start, made, _names(seen.start, made, ()), {})


def _state(
    start: Tree, made: Sequence[Change], names: dict[str, Node], fates: dict[Node, str]
) -> Tree:
    nodes = {*names.values()}
    return Tree(names, {n: _content(start, made, n, fates.get(n, "kept")) for n in nodes})


def _lost_names(made: Sequence[Change], *, thorough: bool) -> list[frozenset[int]]:
    """Numbers of the changes of names that are lost."""
    synced: dict[str, int] = {}
    for number, change in enumerate(made):
        if change.what == "names synced":
            synced[change.directory] = number
    numbers = [n for n, change in enumerate(made) if change.what == "names"]
    pending = [n for n in numbers if n > synced.get(made[n].directory, -1)]
    # A journal that has one change has all before it.
    last = max((n for n in numbers if n not in pending), default=-1)
    ordered = [n for n in pending if n > last]
    found = [frozenset(ordered[at:]) for at in range(len(ordered), -1, -1)]
    if len(pending) <= (_MOST if thorough else 2):
        sizes = range(len(pending) + 1)
        found += [frozenset(c) for size in sizes for c in itertools.combinations(pending, size)]
    else:
        alone = [frozenset([n]) for n in pending]
        found += [*alone, *(frozenset(pending) - each for each in alone)]
    return list(dict.fromkeys(found))


def _names(start: Tree, made: Sequence[Change], lost: Collection[int]) -> dict[str, Node]:
    names = dict(start.names)
    for number, change in enumerate(made):
        for name, node in change.names if number not in lost else ():
            names.pop(name, None)
            if node is not None:
                names[name] = node
    # What lies in a directory that is lost is lost with it.
    return {
        name: node
        for name, node in names.items()
        if all(up in names for up in itertools.accumulate(name.split("/")[:-1], "{}/{}".format))
    }


def _fates(
    made: Sequence[Change], nodes: Collection[Node], *, together: bool, thorough: bool
) -> Iterator[dict[Node, str]]:
    """What becomes of each file that has unsynced bytes."""
    dirty: dict[Node, None] = {}
    for change in made:
        if change.node in nodes and change.what in ("write", "size", "time"):
            dirty[change.node] = None
        elif change.what == "sync" and change.node is not None:
            dirty.pop(change.node, None)
    if together:
        yield {}
        yield dict.fromkeys(dirty, "lost")
        return
    if len(dirty) <= (2 if thorough else 1):
        for fates in itertools.product(DATA, repeat=len(dirty)):
            yield dict(zip(dirty, fates, strict=True))
        return
    for fate in DATA:
        yield dict.fromkeys(dirty, fate)
    for node in dirty if thorough else ():
        yield {node: "lost"}
        yield dict.fromkeys(dirty, "lost") | {node: "kept"}


def _content(start: Tree, made: Sequence[Change], node: Node, fate: str) -> Content:
    content = start.contents.get(node, Content(node.start))
    own = [change for change in made if change.node is node]
    synced = max((n for n, change in enumerate(own) if change.what == "sync"), default=-1)
    for change in own[: synced + 1]:
        content = applied(content, change)
    whole, rest = content, own[synced + 1 :]
    for change in rest:
        whole = applied(whole, change)
    if fate == "lost":
        return content
    if fate == "kept" or not rest:
        return whole
    writes = [change for change in rest if change.what == "write"]
    if fate == "torn" and writes:
        *stays, half = writes[: len(writes) // 2 + 1]
        for change in (*stays, half._replace(data=half.data[: len(half.data) // 2])):
            content = applied(content, change)
    size = len(whole.data)
    return Content(content.data[:size].ljust(size, b"\0"))


def _words(
    made: Sequence[Change],
    lost: Collection[int],
    names: dict[str, Node],
    fates: dict[Node, str],
) -> str:
    def told(change: Change) -> str:
        return ", ".join(f"{name} {'made' if node else 'gone'}" for name, node in change.names)

    words = [f"after {len(made)} changes"]
    words += [f"the last: {made[-1].what} {told(made[-1])}"] if made else []
    words += [f"lost: {told(made[number])}" for number in sorted(lost)]
    words += [
        f"{name}: {fates[node]}"
        for name, node in sorted(names.items())
        if fates.get(node, "kept") != "kept"
    ]
    return "; ".join(words)
