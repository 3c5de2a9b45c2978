"""New names and dtypes for the tensors that are written anew."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from mfload import errors
from mfload.dtypes import DType
from mfload.formats import structure
from mfload.index import Index, Piece, Table, TensorInfo
from mfload.planning import selection
from mfload.trees import keymap
from mfload.trees.matching import expand

_SHOWN = 20


class Cast(NamedTuple):
    """A tensor that is written in another dtype (see `TensorInfo`).

    Attributes:
        info: As the source has it, but for its name.
        checked: Whether values that do not fit stop the conversion.
    """

    info: TensorInfo
    dtype: DType
    checked: bool

    simple = False  # It is loaded, to be converted.

    @property
    def name(self) -> str:
        """The new name."""
        return self.info.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, which stays."""
        return self.info.shape

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Where the stored bytes lie."""
        return self.info.pieces

    @property
    def nbytes(self) -> int:
        """Bytes in the new dtype."""
        return self.dtype.size_of(self.info.shape) or 0


Row = TensorInfo | Cast


def cast(index: Index, dtype: Any) -> dict[str, tuple[DType, bool]]:
    """The tensors that `dtype=` converts, with their new dtypes and whether values are checked.

    Raises UsageError, LossyCastError or UnsupportedDtypeError as `mfload.load` does.
    """
    wish = selection.read_dtype(dtype)
    if isinstance(wish, selection.Rules):
        wish.warn_of_unmatched(index.names)
    made: dict[str, tuple[DType, bool]] = {}
    for info in index.columns if wish is not None else ():
        with errors.about(file=index.files[info.pieces[0].source]):
            wanted, checked = selection.target(info, wish)
        if wanted is not info.dtype:
            made[info.name] = wanted, checked
    return made


def renamed(index: Index, mapping: Any) -> list[tuple[TensorInfo, str]]:
    """The tensors with the names that they get, those that no rule matches with their own.

    Raises:
        UsageError: The mapping is malformed, or does more than rename.
        MappingError: Two tensors get one name, a rule matches nothing, or several match a name.
    """
    if mapping is None:
        return [(info, info.name) for info in index.columns]
    problems: list[str] = []
    rules = None if callable(mapping) else _Rules(mapping, problems)
    made: list[tuple[TensorInfo, str]] = []
    for info in index.columns:
        names: Iterable[Any] = [mapping(info.name)] if rules is None else rules.names(info.name)
        for name in names:
            if name is not None and not isinstance(name, str):
                expected = "a string, or None to leave the tensor out"
                raise errors.UsageError(
                    "mapping= gives no name", tensor=info.name, expected=expected, found=repr(name)
                )
            if name is not None:
                made.append((info, name))
    if rules is not None:
        problems += rules.unused()
    counts = collections.Counter(name for _, name in made)
    for twice in [name for name, count in counts.items() if count > 1]:
        olds = [info.name for info, name in made if name == twice]
        problems.append(f"{twice}: the name of several tensors, {', '.join(olds)}")
    if problems:
        shown = tuple(problems[:_SHOWN])
        raise errors.MappingError("the new names do not fit", file=index.files[0], problems=shown)
    return made


class _Rules:
    """The names that a key map gives to a tensor; what is wrong goes to `problems`."""

    def __init__(self, mapping: Any, problems: list[str]) -> None:
        self._entries, self._problems = keymap.read(mapping), problems
        self._used: set[int] = set()
        for entry in self._entries:
            for each in entry.rules:
                if each != keymap.Rule(each.names, family=each.family) or None in each.names:
                    expected = "a name, several, or None; dtype= converts, load_into transforms"
                    raise errors.UsageError(
                        f"mapping[{entry}] does more than rename", expected=expected
                    )

    def names(self, name: str) -> Iterator[str]:
        """The new names of a tensor."""
        found = [
            (number, match)
            for number, entry in enumerate(self._entries)
            if (match := entry.pattern.fullmatch(name))
        ]
        self._used.update(number for number, _ in found)
        filling = [pair for pair in found if self._entries[pair[0]].rules]
        if len(filling) > 1:
            rules = ", ".join(str(self._entries[number]) for number, _ in filling)
            self._problems.append(f"{name}: several rules match, {rules}")
        if not found:
            yield name
        for number, match in filling[:1]:
            for rule in self._entries[number].rules:
                yield from (expand(each, match) for each in rule.names if each is not None)

    def unused(self) -> Iterator[str]:
        """What is said of rules that match no name."""
        for number, entry in enumerate(self._entries):
            if number not in self._used:
                yield f"{entry} matches no name; it has to match all of one"


def entries(index: Index, dtype: Any, mapping: Any) -> tuple[list[Row], bool]:
    """What is written, in the index's order, and whether names differ from the source's."""
    casts = cast(index, dtype)
    made: list[Row] = []
    changed = False
    for info, name in renamed(index, mapping):
        changed |= name != info.name
        row = info._replace(name=name)
        made.append(Cast(row, *casts[info.name]) if info.name in casts else row)
    return made, changed or len(made) != len(index)


def without_tree(index: Index) -> Index:
    """The index without the tree that was saved, whose names are others now."""
    kept = {key: text for key, text in (index.metadata or {}).items() if key != structure.KEY}
    note = "the tree that was saved is left out, since tensors have other names"
    notes = (*index.notes, note) if len(kept) < len(index.metadata or ()) else index.notes
    return Index(index.files, Table(index.columns), kept or None, notes)
