"""The index: the table of tensors that every format's reader makes."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from mfload import errors
from mfload.dtypes import DType

if TYPE_CHECKING:
    from mfload.stored import Stored

Box = tuple[tuple[int, int], ...]
"""Half-open (start, stop) for each dim of a tensor."""


# Named tuples, since a checkpoint may have hundreds of thousands of rows, and a frozen dataclass
# costs several times as much to make.
class Piece(NamedTuple):
    """Bytes of one source; `offset` counts from the start of the source.

    They hold a whole tensor, raw, little-endian and in C order, unless `stored` says otherwise.
    """

    source: int
    offset: int
    nbytes: int
    stored: Stored | None = None


class TensorInfo(NamedTuple):
    """What a checkpoint says of one tensor.

    Attributes:
        dtype: A row of the dtype table; `dtype.name` is the format's name, such as "BF16".
        shape: In elements.
        pieces: Where its bytes lie; at least one, and an empty one if there are no elements.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def simple(self) -> bool:
        """Whether it is one range of a source, raw, little-endian and in C order."""
        pieces = self.pieces
        return len(pieces) == 1 and pieces[0].stored is None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor; of an unknown dtype, what its pieces hold."""
        pieces = self.pieces
        if len(pieces) == 1 and pieces[0].stored is None:
            return pieces[0].nbytes
        if self.dtype.known:
            return self.dtype.size_of(self.shape) or 0
        return sum(
            piece.nbytes if (how := piece.stored) is None else how.held(piece.nbytes)
            for piece in pieces
        )


Kind = tuple[DType, tuple[int, ...]]
"""Dtype and shape."""


class Columns(Sequence[TensorInfo]):
    """Tensors, in columns; a row is made when it is asked for.

    The arrays are those of the standard library: listing a checkpoint does without NumPy, which
    takes them as they are.

    Attributes:
        kinds: Each dtype and shape, once.
        kind: Of each tensor, by its number in `kinds`.
        sources, offsets, nbytes: Of its piece; of a tensor that is not simple, of its first.
        others: Rows of the tensors that are not simple, by their numbers.
    """

    __slots__ = ("_known", "kind", "kinds", "names", "nbytes", "offsets", "others", "sources")

    def __init__(
        self,
        names: list[str] | None = None,
        kinds: list[Kind] | None = None,
        kind: array[int] | None = None,
        sources: array[int] | None = None,
        offsets: array[int] | None = None,
        nbytes: array[int] | None = None,
        others: dict[int, TensorInfo] | None = None,
    ) -> None:
        self.names, self.kinds = names or [], kinds or []
        self.kind, self.sources = kind or array("q"), sources or array("q")
        self.offsets, self.nbytes = offsets or array("q"), nbytes or array("q")
        self.others = others or {}
        # Numbers of kinds, once tensors were added.
        self._known: dict[Any, int] | None = None if self.kinds else {}

    @staticmethod
    def of(rows: Iterable[TensorInfo]) -> Columns:
        """The columns of rows."""
        made = Columns()
        for row in rows:
            name, dtype, shape, pieces = row
            source, offset, nbytes, stored = pieces[0]
            if stored is not None or len(pieces) > 1:
                made.others[len(made.names)] = row
            made.names.append(name)
            made.kind.append(made._number(dtype, shape))
            made.sources.append(source)
            made.offsets.append(offset)
            made.nbytes.append(nbytes)
        return made

    def _number(self, dtype: DType, shape: tuple[int, ...]) -> int:
        """The number of a kind, which is added if it is new."""
        if self._known is None:
            self.kinds = list(self.kinds)  # Others may share it.
            self._known = {(dtype.name, shape): n for n, (dtype, shape) in enumerate(self.kinds)}
        # By name: to hash a dtype takes longer.
        number = self._known.setdefault((dtype.name, shape), len(self.kinds))
        if number == len(self.kinds):
            self.kinds.append((dtype, shape))
        return number

    def take(self, numbers: Sequence[int]) -> Columns:
        """Some of the tensors, in the order of their numbers."""
        kind, sources, offsets, nbytes = (
            array("q", map(column.__getitem__, numbers))
            for column in (self.kind, self.sources, self.offsets, self.nbytes)
        )
        others: dict[int, TensorInfo] = {}
        if self.others:
            others = {n: self.others[at] for n, at in enumerate(numbers) if at in self.others}
        names = list(map(self.names.__getitem__, numbers))
        return Columns(names, self.kinds, kind, sources, offsets, nbytes, others)

    def extend(self, more: Columns) -> None:
        """Adds tensors behind those there."""
        numbers = [self._number(*each) for each in more.kinds]
        for number, row in more.others.items():
            self.others[len(self.names) + number] = row
        self.names += more.names
        self.kind.extend(map(numbers.__getitem__, more.kind))
        self.sources.extend(more.sources)
        self.offsets.extend(more.offsets)
        self.nbytes.extend(more.nbytes)

    def shorten(self, count: int) -> list[TensorInfo]:
        """Takes away all tensors but the first `count`, and returns them."""
        gone = list(self[count:])
        for number in range(count, len(self)):
            self.others.pop(number, None)
        for column in (self.names, self.kind, self.sources, self.offsets, self.nbytes):
            del column[count:]
        return gone

    @overload
    def __getitem__(self, number: int) -> TensorInfo: ...
    @overload
    def __getitem__(self, number: slice) -> Columns: ...
    def __getitem__(self, number: int | slice) -> TensorInfo | Columns:
        if isinstance(number, slice):
            return self.take(range(*number.indices(len(self.names))))
        if self.others:
            number = range(len(self.names))[number]
            if number in self.others:
                return self.others[number]
        dtype, shape = self.kinds[self.kind[number]]
        where = self.sources[number], self.offsets[number], self.nbytes[number], None
        piece = tuple.__new__(Piece, where)
        return tuple.__new__(TensorInfo, (self.names[number], dtype, shape, (piece,)))

    def __iter__(self) -> Iterator[TensorInfo]:
        if self.others:
            yield from map(self.__getitem__, range(len(self.names)))
            return
        kinds, make = self.kinds, tuple.__new__  # The classes' own take twice the time.
        columns = self.names, self.kind, self.sources, self.offsets, self.nbytes
        for name, kind, source, offset, nbytes in zip(*columns, strict=True):
            piece = make(Piece, (source, offset, nbytes, None))
            yield make(TensorInfo, (name, *kinds[kind], (piece,)))

    def __len__(self) -> int:
        return len(self.names)


class Table(Mapping[str, TensorInfo]):
    """Tensors by name, in columns."""

    def __init__(self, columns: Columns | None = None) -> None:
        self.columns = columns or Columns()

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each name."""
        return dict(zip(self.columns.names, range(len(self)), strict=True))

    def add(self, rows: Sequence[TensorInfo]) -> list[TensorInfo]:
        """Adds tensors behind those there; returns those whose name is there already.

        Rows that come in columns have a name each.
        """
        start = len(self.columns.names)
        if not start and isinstance(rows, Columns):
            self.columns = rows
            vars(self).pop("numbers", None)
            return []
        columns = rows if isinstance(rows, Columns) else Columns.of(rows)
        more = dict(zip(columns.names, range(start, start + len(columns)), strict=True))
        if len(more) < len(columns) or not self.numbers.keys().isdisjoint(more):
            first: dict[str, TensorInfo] = {}
            twice: list[TensorInfo] = []
            for row in columns:
                if row.name in self.numbers or first.setdefault(row.name, row) is not row:
                    twice.append(row)
            self.add(list(first.values()))
            return twice
        self.columns.extend(columns)
        self.numbers |= more
        return []

    def __getitem__(self, name: str) -> TensorInfo:
        return self.columns[self.numbers[name]]

    def __contains__(self, name: object) -> bool:
        return name in self.numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns.names)

    def __len__(self) -> int:
        return len(self.columns.names)

    def values(self) -> Any:
        """The tensors, in order."""
        return self.columns


class Index:
    """The table of tensors.

    Attributes:
        files: Path of each source; pieces refer to them by number.
        tensors: Rows by name, in file order, then by offset.
        columns: The tensors, in columns.
        names: Their names.
        metadata: Free-form strings of the headers, merged in file order.
        notes: Remarks for the user that are not errors.
        found: The files (`CheckpointFiles`), if they are not opened again by their sources alone.
        absent: Tensors whose shard is missing, with its path. Their rows are names alone.
    """

    __slots__ = ("absent", "columns", "files", "found", "metadata", "names", "notes", "tensors")

    def __init__(
        self,
        files: tuple[str, ...],
        tensors: Mapping[str, TensorInfo],
        metadata: Mapping[str, str] | None = None,
        notes: tuple[str, ...] = (),
        found: Any = None,
        absent: Mapping[str, str] | None = None,
    ) -> None:
        table = tensors if isinstance(tensors, Table) else Table(Columns.of(tensors.values()))
        self.files, self.tensors, self.columns = files, table, table.columns
        self.names: Collection[str] = table
        self.metadata, self.notes = metadata, notes
        self.found, self.absent = found, absent or {}

    @property
    def searched(self) -> Collection[str]:
        """The names that are searched for a pattern."""
        return self.names

    @property
    def every(self) -> Index:
        """The index of all tensors, also of those that are `absent`."""
        return self

    def require(self, names: Iterable[str]) -> None:
        """Raises ShardNotFoundError if a tensor that is needed is `absent`."""
        if gone := [name for name in names if name in self.absent]:
            raise self.found.without({self.absent[name]: None for name in gone}, gone)

    def part(self, columns: Columns) -> Index:
        """The index of some of the tensors."""
        made = copy(self)
        made.tensors = made.names = Table(columns)
        made.columns = columns
        return made

    def take(self, names: Collection[str]) -> Columns:
        """Some of the tensors, in the index's order."""
        return self.columns.take(sorted(map(self.tensors.numbers.__getitem__, names)))

    def __getitem__(self, name: str) -> TensorInfo:
        """The row of a name; raises TensorNotFoundError with close names if there is none."""
        try:
            return self.tensors[name]
        except (KeyError, TypeError):
            close, some = errors.close_names(name, self.tensors), itertools.islice(self.names, 2)
            like = ", ".join(close or some)
            raise errors.TensorNotFoundError(
                "no such tensor",
                file=self.files[0] if len(self.files) == 1 else None,
                tensor=name,
                expected=f"a name {'like' if close else 'such as'} {like}" if like else None,
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class ChosenIndex(Index):
    """The index of tensors that were chosen of a checkpoint, whose strings and files it has."""

    __slots__ = ("_every",)

    def __init__(self, every: Index, chosen: Columns) -> None:
        self._every, self.files, self.notes = every, every.files, every.notes
        self.found, self.absent = every.found, {}
        self.tensors = self.names = Table(chosen)
        self.columns = chosen

    def __getattr__(self, name: str) -> Any:
        if name != "metadata":  # Of shards, all headers are read for the strings.
            raise AttributeError(name)
        return self._every.metadata
