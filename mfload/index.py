"""The index: the table of tensors that every format's reader makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mfload import errors
from mfload.dtypes import DType

Box = tuple[tuple[int, int], ...]
"""Half-open (start, stop) for each dim of a tensor."""


# Named tuples, since a checkpoint may have hundreds of thousands of rows, and a frozen dataclass
# costs several times as much to make.
class Piece(NamedTuple):
    """Bytes of one source; `offset` counts from the start of the source."""

    source: int
    offset: int
    nbytes: int


class TensorInfo(NamedTuple):
    """What a checkpoint says of one tensor.

    Attributes:
        dtype: A row of the dtype table; `dtype.name` is the format's name, such as "BF16".
        shape: In elements.
        pieces: Where its bytes lie, little-endian and in C order. All formats have one piece yet.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        pieces = self.pieces
        return pieces[0].nbytes if len(pieces) == 1 else sum(piece.nbytes for piece in pieces)


@dataclass(frozen=True, slots=True)
class Index:
    """The table of tensors.

    Attributes:
        files: Path of each source; pieces refer to them by number.
        tensors: Rows by name, in file order, then by offset.
        metadata: Free-form strings of the headers, merged in file order.
        notes: Remarks for the user that are not errors.
    """

    files: tuple[str, ...]
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> TensorInfo:
        """The row of a name; raises TensorNotFoundError with close names if there is none."""
        try:
            return self.tensors[name]
        except (KeyError, TypeError):
            close = errors.close_names(name, self.tensors)
            raise errors.TensorNotFoundError(
                "no such tensor",
                file=self.files[0] if len(self.files) == 1 else None,
                tensor=name,
                expected=f"a name like {', '.join(close)}" if close else None,
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)
