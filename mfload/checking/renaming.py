"""New names and dtypes for the tensors that are written anew."""

from __future__ import annotations

from typing import Any, NamedTuple

from mfload import errors
from mfload.dtypes import NARROW, DType
from mfload.formats import structure
from mfload.index import Index, Piece, Table, TensorInfo
from mfload.planning import selection
from mfload.trees.keymap import Rule
from mfload.trees.matching import Claims

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
    narrow = any(kind.name in NARROW for kind, _ in index.columns.kinds)
    for info in index.columns if wish is not None or narrow else ():
        with errors.about(file=index.files[info.pieces[0].source]):
            wanted, checked = selection.target(info, wish)
        wanted = wanted.wide  # Of what safetensors lacks.
        if wanted is not info.dtype:
            made[info.name] = wanted, checked
    return made


def renamed(index: Index, mapping: Any) -> list[tuple[TensorInfo, str]]:
    """The tensors with the names that they get, those that no rule matches with their own.

    Raises:
        UsageError: The mapping is malformed, or does more than rename.
        MappingError: Two tensors get one name, a rule matches nothing, or several match a name.
    """
    claims = Claims(index.columns, None, mapping)
    for entry in claims.entries:
        for each in entry.rules:
            if each != Rule(each.names, family=each.family) or None in each.names:
                expected = "a name, several, or None; dtype= converts, load_into transforms"
                raise errors.UsageError(
                    f"mapping[{entry}] does more than rename", expected=expected
                )
    names = {info.name: [info.name] for info, _ in claims.stray}
    problems = claims.twice
    for number, entry in enumerate(claims.entries):
        if number not in claims.used:
            problems.append(f"{entry} matches no name; it has to match all of one")
    for name, found in claims.by_target.items():
        for claim in found:
            names.setdefault(claim.info.name, []).append(name)
    made = [(info, name) for info in index.columns for name in names.get(info.name, ())]
    index.require(info.name for info, _ in made)
    olds: dict[str, list[str]] = {}
    for info, name in made:
        olds.setdefault(name, []).append(info.name)
    for name, several in olds.items():
        if len(several) > 1:
            problems.append(f"{name}: the name of several tensors, {', '.join(several)}")
    if problems:
        shown = tuple(problems[:_SHOWN])
        raise errors.MappingError("the new names do not fit", file=index.files[0], problems=shown)
    return made


def entries(index: Index, dtype: Any, mapping: Any) -> tuple[list[Row], bool]:
    """What is written, in the index's order, and whether names differ from the source's."""
    casts = cast(index, dtype)
    made: list[Row] = []
    changed = False
    for info, name in renamed(index, mapping):
        changed |= name != info.name
        row = info._replace(name=name)
        made.append(Cast(row, *casts[info.name]) if info.name in casts else row)
    if len(index) and not made:
        raise errors.MappingError("the mapping leaves no tensor", file=index.files[0])
    return made, changed or len(made) != len(index)


def without_tree(index: Index) -> Index:
    """The index without the tree that was saved, whose names are others now."""
    kept = {key: text for key, text in (index.metadata or {}).items() if key != structure.KEY}
    note = "the tree that was saved is left out, since tensors have other names"
    notes = (*index.notes, note) if len(kept) < len(index.metadata or ()) else index.notes
    return Index(index.files, Table(index.columns), kept or None, notes)
