"""How a file holds what is not one range of raw bytes in C order.

Apart from the index, since most checkpoints do without it.
"""

from __future__ import annotations

from typing import NamedTuple


class Encoding(NamedTuple):
    """One step from the bytes of a source to the bytes of a tensor.

    Attributes:
        codec: Name of a decoder.
        nbytes: Bytes that it makes. More or fewer are an error.
        start: The first of them that is the piece's, or that the next step decodes.
        stop: The end of these. Default: all.
    """

    codec: str
    nbytes: int
    start: int = 0
    stop: int | None = None


class Stored(NamedTuple):
    """Which part of its tensor a piece holds, and how, if not all of it in C order.

    Elements of a dtype that packs several into a block (`DType.elements`) count in such blocks in
    the last dim: its blocks are the elements here.

    Attributes:
        box: The part, if it is a box.
        flat: The part, if it is a range (start, stop) of the tensor's elements in C order.
            Default: the part is the whole tensor.
        chunk: Shape of the stored array, if it is larger than the box, which is its first corner.
        strides: Elements of the stored bytes between neighbours in each dim; 0 and negative ones
            are allowed. Default: those of the stored array in C order.
        start: Elements before the first of the part.
        big_endian: Whether the bytes of an element come most significant first.
        encodings: From the bytes of the source to the elements, step by step.
        inline: The bytes, if the header holds them; the piece's range is not read then.
    """

    box: tuple[tuple[int, int], ...] | None = None
    flat: tuple[int, int] | None = None
    chunk: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    start: int = 0
    big_endian: bool = False
    encodings: tuple[Encoding, ...] = ()
    inline: bytes | None = None

    def held(self, nbytes: int) -> int:
        """The bytes that a piece of so many stored ones holds, decoded."""
        if self.inline is not None:
            nbytes = len(self.inline)
        for encoding in self.encodings[-1:]:
            nbytes = (encoding.stop or encoding.nbytes) - encoding.start
        return nbytes
