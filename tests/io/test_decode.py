"""Pieces that are decoded in several plans, each of which goes on where the last one ended."""

from __future__ import annotations

import gzip
import itertools
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings, strategies as st

from mfload.dtypes import TABLE
from mfload.formats.crc32c import crc32c
from mfload.index import Piece, TensorInfo
from mfload.io.decode import Unfinished
from mfload.loading import execute
from mfload.options import LoadOptions
from mfload.planning.layout import BufferSpec
from mfload.planning.plan import make_plan
from mfload.planning.request import Request
from mfload.planning.slicing import boxed
from mfload.sources.local import LocalFile
from mfload.stored import Encoding, Stored

SHAPE = (64, 3000)
PACKED: dict[str, Any] = {
    "zlib": zlib.compress,
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor().compress,
    "crc32c": lambda data: data + crc32c(data).to_bytes(4, "little"),
}


@pytest.fixture(scope="module")
def held() -> Any:
    return (np.random.default_rng(5).integers(0, 5000, SHAPE) / 8).astype(np.float32)


def tensor(path: Path, held: Any, codec: str, columns: int) -> TensorInfo:
    """A tensor in chunks of so many columns each, which is written to a file."""
    pieces, data = list[Piece](), b""
    for start in range(0, SHAPE[1], columns):
        part = np.ascontiguousarray(held[:, start : start + columns])
        packed = PACKED[codec](part.tobytes())
        box = (0, SHAPE[0]), (start, start + part.shape[1])
        stored = Stored(box=box, encodings=(Encoding(codec, part.nbytes),))
        pieces.append(Piece(0, len(data), len(packed), stored))
        data += packed
    path.write_bytes(data)
    return TensorInfo("w", TABLE["F32"], SHAPE, tuple(pieces))


def load(
    info: TensorInfo, path: Path, rows: list[tuple[int, int]], most: int
) -> tuple[int, list[Any]]:
    """Rows of a tensor, plan by plan; and the bytes that were to be read."""
    sources, unfinished, nbytes = [LocalFile(path)], Unfinished(most), 0
    found: list[Any] = []
    for start, stop in rows:
        # As two processes would have them.
        boxes = [((start, stop), (0, 1000)), ((start, stop), (1000, SHAPE[1]))]
        requests = [Request(info, info.dtype, boxed(info, box)) for box in boxes]
        parts = [np.zeros(request.nbytes, np.uint8) for request in requests]
        given = [(0, 0), (1, 0)]
        plan = make_plan(requests, given=given, specs=[BufferSpec(part.nbytes) for part in parts])
        plan = plan._replace(blocks=unfinished.resume(plan.blocks))
        deadline = LoadOptions().deadline
        execute.Transfer(
            plan, parts, sources, {}, threads=2, deadline=deadline, unfinished=unfinished
        ).run()
        nbytes += plan.read_bytes
        shapes = [[stop - first for first, stop in box] for box in boxes]
        every = zip(parts, shapes, strict=True)
        found.append(np.hstack([part.view(np.float32).reshape(shape) for part, shape in every]))
    return nbytes, found


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([*PACKED]),
    st.sampled_from((3000, 1000, 700)),
    st.sets(st.integers(1, SHAPE[0] - 1), max_size=6),
    st.sampled_from((1, 1 << 20)),
)
def test_each_byte_is_read_once(
    tmp_path: Path, held: Any, codec: str, columns: int, cuts: set[int], most: int
) -> None:
    info = tensor(tmp_path / "w", held, codec, columns)
    ends = [0, *sorted(cuts), SHAPE[0]]
    rows = list(itertools.pairwise(ends))
    nbytes, found = load(info, tmp_path / "w", rows, most)
    assert nbytes == (tmp_path / "w").stat().st_size
    assert np.array_equal(np.vstack(found), held)


def test_what_lies_before_is_decoded_anew(tmp_path: Path, held: Any) -> None:
    info = tensor(tmp_path / "w", held, "zstd", 3000)
    rows = [(0, 20), (30, 40), (10, 20), (20, 64)]
    nbytes, found = load(info, tmp_path / "w", rows, 1 << 20)
    assert nbytes == 2 * (tmp_path / "w").stat().st_size
    for (start, stop), part in zip(rows, found, strict=True):
        assert np.array_equal(part, held[start:stop])


def test_pieces_that_a_header_holds_are_told_apart(tmp_path: Path, held: Any) -> None:
    """They are all at the same place of the file."""
    info, data = tensor(tmp_path / "w", held, "zlib", 1000), (tmp_path / "w").read_bytes()
    pieces = [
        Piece(0, 0, 0, stored._replace(inline=data[offset : offset + nbytes]))
        for _, offset, nbytes, stored in info.pieces
        if stored is not None
    ]
    rows = [(0, 20), (20, 21), (30, 64)]
    _, found = load(info._replace(pieces=tuple(pieces)), tmp_path / "w", rows, 1 << 20)
    for (start, stop), part in zip(rows, found, strict=True):
        assert np.array_equal(part, held[start:stop])
