"""A format that uses every case of the piece model; tests write it, and mfload reads it by name.

A file is the length of a JSON list of tensors, the list, and bytes. Pieces count from its start.
"""

from __future__ import annotations

import itertools
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from mfload import dtypes
from mfload.formats import base
from mfload.index import Piece, TensorInfo
from mfload.sources.base import Source
from mfload.stored import Encoding, Stored

SUFFIX = ".made-up"
base.FORMATS[SUFFIX] = __name__


def recognise(head: bytes, name: str) -> bool:
    return head[8:10] == b"[["


def read(file: Source, source: int = 0) -> tuple[list[TensorInfo], dict[str, str] | None]:
    length = int.from_bytes(file.read(0, 8), "little")
    rows: list[TensorInfo] = []
    for name, dtype, shape, pieces in json.loads(file.read(8, length)):
        made = [
            Piece(source, 8 + length + offset, nbytes, None if how is None else _stored(how))
            for offset, nbytes, how in pieces
        ]
        rows.append(TensorInfo(name, dtypes.lookup(dtype), tuple(shape), tuple(made)))
    return rows, None


def _stored(how: dict[str, Any]) -> Stored:
    inline = how.pop("inline", None)
    encodings = tuple(Encoding(*each) for each in how.pop("encodings", ()))
    box = how.pop("box", None)
    flat = how.pop("flat", None)
    for key in ("chunk", "strides"):
        if key in how:
            how[key] = tuple(how[key])
    return Stored(
        box=None if box is None else tuple(map(tuple, box)),
        flat=None if flat is None else tuple(flat),
        inline=None if inline is None else bytes.fromhex(inline),
        encodings=encodings,
        **how,
    )


@dataclass
class Writer:
    """Collects tensors and the bytes behind them."""

    data: bytearray = field(default_factory=bytearray)
    tensors: list[Any] = field(default_factory=list)

    def put(self, raw: bytes) -> int:
        """Where bytes went; a few lie between."""
        self.data += b"\xee" * (len(self.data) % 7)
        self.data += raw
        return len(self.data) - len(raw)

    def add(self, name: str, dtype: str, shape: Any, pieces: list[Any]) -> None:
        self.tensors.append([name, dtype, list(shape), pieces])

    def piece(self, raw: bytes, *, inline: bool = False, **how: Any) -> list[Any]:
        """A piece of bytes that `how` says the storage of."""
        if inline:
            return [0, len(raw), {**how, "inline": raw.hex()}]
        return [self.put(raw), len(raw), how]

    def content(self) -> bytes:
        header = json.dumps(self.tensors).encode()
        return len(header).to_bytes(8, "little") + header + bytes(self.data)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.content())
        return path


def deflated(raw: bytes) -> bytes:
    squeeze = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    return squeeze.compress(raw) + squeeze.flush()


def encoded(raw: bytes, before: bytes = b"", after: bytes = b"") -> tuple[bytes, list[Any]]:
    """Bytes deflated within others, as in a container in a container, and the step back."""
    inner = before + raw + after
    stop = len(before) + len(raw) if after else None
    return deflated(inner), ["deflate", len(inner), len(before), stop]


@st.composite
def pieces(draw: Any, writer: Writer, array: Any, *, swaps: bool) -> list[Any]:
    """Stores an array of elements (of opaque bytes, if packed) in one of many ways."""
    way = draw(st.sampled_from(["whole", "boxes", "flat"]))
    parts: list[tuple[Any, dict[str, Any]]] = []
    if way == "whole" or not array.size:
        parts = [(array, {})]
    elif way == "flat":
        count = array.size
        edges = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=3))})
        line = array.reshape(-1)
        parts = [(line[a:b], {"flat": [a, b]}) for a, b in itertools.pairwise(edges)]
    else:
        boxes: list[Any] = [[]]
        for length in array.shape:
            size = draw(st.integers(1, length))
            spans = [(a, min(a + size, length)) for a in range(0, length, size)]
            boxes = [[*box, span] for box in boxes for span in spans]
        for box in draw(st.permutations(boxes)):
            part = array[tuple(slice(a, b) for a, b in box)]
            parts.append((part, {"box": box}))
    made: list[Any] = []
    for part, how in parts:
        if swaps and draw(st.booleans()):
            part, how["big_endian"] = part.byteswap(), True
        raw = draw(_laid_out(part, how))
        how["encodings"] = []
        for _ in range(draw(st.integers(0, 2))):
            raw, step = encoded(raw, *draw(st.tuples(*[st.sampled_from([b"", b"abc"])] * 2)))
            how["encodings"].insert(0, step)
        made.append(writer.piece(raw, inline=draw(st.integers(0, 4)) == 0, **how))
    return made


@st.composite
def _laid_out(draw: Any, part: Any, how: dict[str, Any]) -> bytes:
    """The bytes of an array in memory of some other shape; `how` is told of it."""
    if "flat" in how or not part.ndim:
        ahead = draw(st.integers(0, 2))
        how["start"] = ahead
        return bytes(ahead * part.itemsize) + part.tobytes()
    way = draw(st.sampled_from(["plain", "chunk", "strides", "one"]))
    if way == "one" and part.size and (part == part.reshape(-1)[0]).all():
        how["strides"] = [0] * part.ndim
        return part.reshape(-1)[:1].tobytes()
    if way == "plain":
        return part.tobytes()
    more = [draw(st.integers(0, 2)) for _ in part.shape]
    if way == "chunk":
        chunk = np.zeros([n + m for n, m in zip(part.shape, more, strict=True)], part.dtype)
        chunk[tuple(map(slice, part.shape))] = part
        how["chunk"] = list(chunk.shape)
        return chunk.tobytes()
    # A view with other orders of dims, steps and directions.
    order = draw(st.permutations(range(part.ndim)))
    steps = [draw(st.sampled_from([1, 1, 2, 3, -1, -2])) for _ in part.shape]
    room = [n * abs(s) + m for n, s, m in zip(part.shape, steps, more, strict=True)]
    storage = np.zeros([room[dim] for dim in order], part.dtype)
    turned = storage.transpose(np.argsort(order))
    view = turned[
        tuple(
            slice(0, n * s, s) if s > 0 else slice(n * -s - 1, None, s)
            for n, s in zip(part.shape, steps, strict=True)
        )
    ]
    view = view[tuple(slice(0, n) for n in part.shape)]
    view[...] = part
    how["strides"] = [s // part.itemsize for s in view.strides]
    offset = view.__array_interface__["data"][0] - storage.__array_interface__["data"][0]
    how["start"] = offset // part.itemsize
    return storage.tobytes()
