"""Shares of all processes become the requests of each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mfload import dtypes, errors
from mfload.index import Piece, TensorInfo
from mfload.mesh import load
from mfload.mesh.base import DeviceShare, TensorShares, requests
from mfload.options import LoadOptions
from mfload.planning.slicing import Axis
from mfload.runtime import Deadline
from mfload.sources.base import Costs

ROW = dtypes.TABLE["F32"]
TOP, BOTTOM, ALL = ((0, 2), (0, 6)), ((2, 4), (0, 6)), ((0, 4), (0, 6))


def _tensor(name: str = "w", dtype: str = "F32", source: int = 0) -> TensorInfo:
    row = dtypes.TABLE[dtype]
    return TensorInfo(name, row, (4, 6), (Piece(source, 0, row.size_of((4, 6)) or 0),))


def _wanted(*shares: DeviceShare, name: str = "w", separate: bool = False) -> TensorShares:
    return TensorShares(_tensor(name), ROW, False, shares, separate)


def test_what_several_devices_hold_is_one_request() -> None:
    made = requests(
        [_wanted(DeviceShare(0, 0, TOP), DeviceShare(0, 1, BOTTOM), DeviceShare(0, 2, TOP))]
    )
    assert [(request.devices, request.shape) for request in made[0]] == [
        ((0, 2), (2, 6)),
        ((1,), (2, 6)),
    ]
    assert made[0][0].selection == (Axis(0, 2), Axis(0, 6))
    assert made.keys() == {0}


def test_each_device_has_its_own_where_memory_is_its_own() -> None:
    shares = (DeviceShare(0, 0, TOP), DeviceShare(0, 1, BOTTOM), DeviceShare(0, 2, TOP))
    made = requests([_wanted(*shares, separate=True)])
    assert [request.devices for request in made[0]] == [(0,), (2,), (1,)]


def test_processes_are_kept_apart() -> None:
    made = requests(
        [
            _wanted(
                DeviceShare(3, 0, TOP), DeviceShare(1, 0, TOP), DeviceShare(1, 1, BOTTOM), name="a"
            ),
            _wanted(DeviceShare(1, 0, ALL), DeviceShare(3, 0, ALL), name="b"),
        ]
    )
    assert {rank: [(n.info.name, n.devices) for n in each] for rank, each in made.items()} == {
        3: [("a", (0,)), ("b", (0,))],
        1: [("a", (0,)), ("a", (1,)), ("b", (0,))],
    }
    assert made[1][2].selection is None


def test_the_target_dtype_goes_along() -> None:
    wanted = TensorShares(_tensor(), dtypes.TABLE["BF16"], True, (DeviceShare(0, 0, TOP),))
    (request,) = requests([wanted])[0]
    assert (request.dtype.name, request.checked, request.nbytes) == ("BF16", True, 24)


def test_a_share_through_a_byte_is_refused() -> None:
    box = ((0, 4), (0, 3))
    wanted = TensorShares(_tensor(dtype="F4"), dtypes.TABLE["F4"], False, (DeviceShare(0, 0, box),))
    with pytest.raises(errors.ShardingError, match="share a byte") as info:
        requests([wanted])
    assert info.value.tensor == "w"
    assert "[0, 3]" in str(info.value.found)


class _File:
    name, costs, size = "file", Costs(), 1 << 30

    def __init__(self) -> None:
        self.read_bytes = 0

    def read(self, offset: int, nbytes: int) -> bytes:
        assert offset + nbytes <= self.size
        self.read_bytes += nbytes
        return bytes(nbytes)


@pytest.mark.parametrize(("count", "pages"), [(1, 16), (32, 16), (64, 8), (256, 2), (1000, 2)])
def test_the_sample_of_files_that_processes_compare_is_bounded(count: int, pages: int) -> None:
    files: list[Any] = [_File() for _ in range(count)]
    group: Any = SimpleNamespace(deadline=Deadline(None), agree=lambda *_: None)
    infos = [_tensor(source=number) for number in range(count)]
    load.agree_on_inputs(group, infos, files, LoadOptions(), [])
    assert {file.read_bytes for file in files} == {pages * 4096}
