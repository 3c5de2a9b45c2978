"""The index: the table in which all formats meet.

Rows are named tuples because a checkpoint may have hundreds of thousands of them and a
frozen dataclass costs several times as much to make.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mfload import errors
from mfload.dtypes import DType

Box = tuple[tuple[int, int], ...]
"""Half-open (start, stop) for each dim of a tensor."""


class Piece(NamedTuple):
    """Bytes of one source that hold one box of a tensor.

    Attributes:
        offset: First byte, counted from the start of the source.
        box: The part of the tensor it holds, None for all of it.
        order: Element order of the box; "C" is row-major.
        encoding: "raw" is little-endian bytes that the plan may slice; anything else is
            fetched whole and decoded.
    """

    source: int
    offset: int
    nbytes: int
    box: Box | None = None
    order: str = "C"
    encoding: str = "raw"


class TensorInfo(NamedTuple):
    """What a checkpoint says of one tensor.

    Attributes:
        name: Its name.
        dtype: A row of the dtype table; `dtype.name` is the format's name, such as "BF16".
        shape: In elements.
        pieces: Where its bytes lie: file, offset and length of each stretch.
        nbytes: Stored bytes.
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
        notes: What a user should hear of that is no error.
    """

    files: tuple[str, ...]
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str] | None = None
    notes: tuple[str, ...] = field(default=())

    def __getitem__(self, name: str) -> TensorInfo:
        """The row of a name.

        Raises:
            TensorNotFoundError: There is none; close names are suggested.
        """
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
