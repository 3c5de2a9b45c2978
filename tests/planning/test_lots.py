"""Lots: ranges of elements, however they are stored, come together in the memory of a reader."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

import mfload
from mfload.checking.scan import scan
from mfload.dtypes import TABLE
from mfload.index import Piece, TensorInfo
from mfload.options import started
from mfload.planning import lots
from mfload.planning.blocks import Lot
from mfload.sources.base import Costs
from mfload.sources.local import LocalFile
from mfload.stored import Encoding, Stored


class _Taken(dict[Any, bytes]):
    def take(self, lot: Lot, number: int, data: Any, stopped: Any) -> None:
        assert number == len(lot.blocks) - 1
        self[lot.key] = data.tobytes()


@given(
    st.lists(st.integers(1, 7), max_size=4),
    st.sampled_from(["C", "F"]),
    st.sampled_from(["<f4", ">f4"]),
    st.booleans(),
    st.integers(1, 900),
    st.integers(0, 70),
)
@settings(max_examples=60)
def test_ranges_follow_each_other(
    tmp_path_factory: Any, shape: list[int], order: Any, dtype: str, packs: bool, most: int, at: int
) -> None:
    path: Path = tmp_path_factory.mktemp("lots") / "a.npz"
    array = np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape, order=order)
    (np.savez_compressed if packs else np.savez)(path, x=array)
    info = mfload.open(path)._index.tensors["x"]  # pyright: ignore
    cuts = list(lots.ranges([info], most, 2 * most))
    edges = [first for first, _ in cuts] + [cuts[-1][1]]
    assert edges[0] == 0
    assert edges[-1] == array.size
    assert all(stop == first for (_, stop), (first, _) in itertools.pairwise(cuts))
    assert all((stop - first) * 4 <= max(4, 2 * most) for first, stop in cuts)
    made: list[Lot] = []
    for first, stop in cuts:
        requests = lots.parts(info, info.dtype, first, stop)
        made.append(lots.landed(requests, 4 * (stop - first), Costs(), at=at, key=(first, stop)))
    taken, told = _Taken(), list[int]()
    scan([LocalFile(path)], made, taken, started(mfload.Options(threads=2)), told.append)
    flat = array.astype("<f4").ravel()
    assert taken.keys() == set(cuts)
    for (first, stop), data in taken.items():
        assert data[at:] == flat[first:stop].tobytes()
    assert sum(told) == 4 * array.size


def test_a_part_has_the_pieces_that_it_lies_in(tmp_path: Path) -> None:
    """Or planning all parts of a tensor of many chunks would take the square of them."""
    row = Encoding("zlib", 1)
    pieces = tuple(
        Piece(0, 100 * n, 100, Stored(box=((4 * n, 4 * n + 4), (0, 8)), encodings=(row,)))
        for n in range(50)
    )
    info = TensorInfo("w", TABLE["U8"], (200, 8), pieces)
    for first, stop in lots.ranges([info], 96, 96):
        (request, *more) = lots.parts(info, info.dtype, first, stop)
        assert all(each.info is request.info for each in more)
        boxes = [piece.stored.box[0] for piece in request.info.pieces if piece.stored is not None]
        rows = range(first // 8, -(-stop // 8))
        assert boxes == [(4 * n, 4 * n + 4) for n in range(rows[0] // 4, rows[-1] // 4 + 1)]
