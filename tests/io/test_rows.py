"""Rows of a tensor: what each way of reading them gives is what NumPy gives."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import samples
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

import mfload
from mfload import dtypes, errors
from mfload.index import Piece, TensorInfo
from mfload.io import buffers, mapped, pread, probes, route
from mfload.loading import execute
from mfload.planning.blocks import Costs
from mfload.planning.plan import make_plan
from mfload.planning.request import Request
from mfload.planning.slicing import select
from mfload.runtime import Deadline
from mfload.sources.local import LocalFile

COLUMNS = np.s_[:, 8:16]


@contextmanager
def _way(name: str) -> Generator[str]:
    """One way of reading rows, for tensors of any size; the engine that it belongs to."""
    few = 0 if name == "map" else 1 << 60
    with mock.patch.multiple(pread, _APART=1 << 60, _ROWS_A_MAP=few):
        yield "direct" if name == "direct" else "pread"


@st.composite
def parts(draw: Any) -> tuple[Any, Any, Costs]:
    """An array, an index of it, and costs that cut what it takes in many ways."""
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=30))
    dtype = draw(st.sampled_from([np.uint8, np.int16, np.float32, np.complex64]))
    index = draw(hnp.basic_indices(shape, allow_ellipsis=False))
    index = index if isinstance(index, tuple) else (index,)
    if draw(st.booleans()):
        dim = draw(st.integers(0, len(index) - 1)) if index else 0
        numbers = draw(st.lists(st.integers(-shape[dim], shape[dim] - 1), min_size=1, max_size=40))
        # NumPy moves the dims of a list that lies apart from integers.
        rest = [slice(None) if isinstance(each, int) else each for each in index]
        index = (*rest[:dim], numbers, *rest[dim + 1 :])
    costs = Costs(
        block=draw(st.integers(16, 400)),
        merge_gap=draw(st.sampled_from([0, 5, 17, 60, 10_000])),
        staged=draw(st.integers(16, 400)),
        span=draw(st.integers(16, 5000)),
        row_gap=draw(st.sampled_from([None, 0, 10])),
    )
    return samples.numbers(shape, dtype), index, costs


@pytest.mark.parametrize("way", ["map", "pread", "direct"])
@given(parts(), st.integers(1, 3))
@settings(max_examples=150)
def test_parts_are_what_numpy_gives(way: str, case: tuple[Any, Any, Costs], threads: int) -> None:
    array, index, costs = case
    names = {np.uint8: "U8", np.int16: "I16", np.float32: "F32", np.complex64: "C64"}
    dtype = dtypes.TABLE[names[array.dtype.type]]
    info = TensorInfo("w", dtype, array.shape, (Piece(0, 13, array.nbytes),))
    with tempfile.TemporaryDirectory() as folder, _way(way) as engine:
        path = Path(folder) / "file"
        path.write_bytes(b"x" * 13 + array.tobytes() + b"end")
        source = LocalFile(path)
        plan = make_plan([Request(info, dtype, select(info, index))], costs=costs)
        legs = dict(enumerate(route.choose([(source, source.size)], engine)))
        memory = [buffers.allocate(spec.nbytes) for spec in plan.buffers]
        execute.Transfer(
            plan, memory, [source], legs, threads=threads, deadline=Deadline(None)
        ).run()
        (place,) = plan.places
        taken = np.ascontiguousarray(array[index])
        assert memory[place.buffer][place.at :][: taken.nbytes].tobytes() == taken.tobytes()
        assert plan.wanted_bytes <= plan.read_bytes
        if not any(isinstance(each, list) for each in index):  # It may name an element twice.
            assert plan.wanted_bytes == taken.nbytes
        del memory


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, Any]:
    """A file whose columns are worth a map."""
    array = samples.numbers((512, 2048), np.float32)
    return samples.save(tmp_path / "a.safetensors", {"a": array}), array


def _maps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each block was copied out of a map, from now on."""
    seen: list[bool] = []
    real = mapped.take_rows

    def take_rows(*given: Any) -> bool:
        seen.append(real(*given))
        return seen[-1]

    monkeypatch.setattr(mapped, "take_rows", take_rows)
    return seen


def test_columns_are_copied_out_of_a_map(
    large: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path, array), seen = large, _maps(monkeypatch)
    with mfload.open(path) as opened:
        assert samples.same(opened.get_slice("a")[COLUMNS], array[COLUMNS])
        assert samples.same(opened.get_slice("a")[::-3, ::2], array[::-3, ::2])
    assert seen == [True, True]


@pytest.mark.parametrize("refused", ["call", "map"])
def test_what_the_kernel_refuses_to_copy_is_read(
    large: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    (path, array), seen = large, _maps(monkeypatch)
    if refused == "map":
        refuse = mock.Mock(side_effect=errors.MemoryLimitError("no room"))
        monkeypatch.setattr(mapped, "map_range", refuse)
    else:
        monkeypatch.setattr(buffers, "copier", lambda: lambda *_: False)
    with mfload.open(path) as opened:
        assert samples.same(opened.get_slice("a")[COLUMNS], array[COLUMNS])
    assert seen == [False]


_CUT = """
import fcntl, os, sys
from mfload import errors, options
import mfload
from mfload.io import mapped

path, call = sys.argv[1:]
real = mapped.map_file

def map_file(*given, **more):
    made = real(*given, **more)
    os.truncate(path, 5000)
    return made

mapped.map_file = map_file
fcntl.fcntl = lambda *_: 0  # A file system that grants leases, and does not hold to them.
try:
    if call == "rows":
        mfload.open(path).get_slice("a")[:, 8:16]
    elif call == "convert":
        mfload.load(path, "numpy", dtype={"a": "float16"})
    else:
        mfload.verify(path, mode="write")
except errors.SourceChangedError:
    pass
"""


@pytest.mark.parametrize("call", ["rows", "convert", "verify"])
def test_a_file_that_is_cut_short_kills_no_reader(call: str, tmp_path: Path) -> None:
    array = samples.numbers((4096, 2048), np.float32)
    path = samples.save(tmp_path / "a.safetensors", {"a": array})
    done = subprocess.run([sys.executable, "-c", _CUT, str(path), call], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_many_small_blocks_have_one_reader(tmp_path: Path) -> None:
    arrays = {f"t{n}": samples.numbers((2, 600, 60), np.float32) for n in range(40)}
    path = samples.save(tmp_path / "a.safetensors", arrays)
    seen = set[int]()
    real = pread.PreadReader.fill

    def fill(reader: Any, *given: Any) -> Any:
        seen.add(threading.get_ident())
        return real(reader, *given)

    with mfload.open(path) as opened, mock.patch.object(pread.PreadReader, "fill", fill):
        infos = [opened.info(name) for name in opened.offset_keys()]
        requests = [Request(i, i.dtype, select(i, (0, slice(200)))) for i in infos]
        plan = make_plan(requests, costs=Costs(merge_gap=0))
        assert plan.read_bytes > execute.INLINE
        memory = [buffers.allocate(spec.nbytes) for spec in plan.buffers]
        execute.Transfer(
            plan, memory, [LocalFile(path)], {}, threads=4, deadline=Deadline(None)
        ).run()
    assert len(seen) == 1


def test_maps_of_rows_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = samples.numbers((9000, 2500), np.float32)
    path, lengths = samples.save(tmp_path / "a.safetensors", {"a": array}), list[int]()
    real = mapped.map_range

    def map_range(source: Any, offset: int, nbytes: int, **more: Any) -> Any:
        lengths.append(nbytes)
        return real(source, offset, nbytes, **more)

    monkeypatch.setattr(mapped, "map_range", map_range)
    for limit, most in ((None, Costs().span), (16 << 20, 16 << 20)):
        options = mfload.Options(max_host_overhead=limit)
        with mfload.open(path, options=options) as opened:
            assert samples.same(opened.get_slice("a")[::-1, 8:16], array[::-1, 8:16])
        assert 0 < max(lengths) <= most
        lengths.clear()


@pytest.mark.parametrize("cold", [False, True])
def test_what_lies_between_rows_is_read_over_by_one_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: bool
) -> None:
    """4 KiB in the page cache, 64 KiB on a disk; plan and report say so."""
    leg = route.Leg("a", "pread", "", cold=cold)
    monkeypatch.setattr(route, "choose", lambda wanted, *_, **__: (leg,) * len(wanted))
    for gap in (4095, 4096, 65535, 65536):
        array, report = samples.numbers((40, 64 + gap), np.uint8), mfload.Report()
        path = samples.save(tmp_path / f"{gap}.safetensors", {"a": array})
        with mfload.open(path) as opened:
            info = opened.info("a")
            request = Request(info, info.dtype, select(info, np.s_[:, :64]))
            assert samples.same(opened.load([request], report)[0], array[:, :64])
        assert (report.over_read_bytes > 0) == (gap < ((64 << 10) if cold else (4 << 10)))


def test_rows_past_the_page_cache_leave_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_SAMPLES", sys.maxsize)  # All pages are looked at.
    array = samples.numbers((300, 50_000), np.float32)
    path = samples.save(tmp_path / "a.safetensors", {"a": array})
    fd = os.open(path, os.O_RDONLY)
    if probes.direct_alignment(fd) is None or probes.cached_share(fd, path.stat().st_size) is None:
        pytest.skip("needs O_DIRECT and cachestat")
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    with mfload.open(path, options=mfload.Options(page_cache="bypass")) as opened:
        assert samples.same(opened.get_slice("a")[:, 5000:5100], array[:, 5000:5100])
    cached = probes.cached_share(fd, path.stat().st_size)
    os.close(fd)
    assert cached is not None
    assert cached * path.stat().st_size <= 16 << 10  # The header.


def test_rows_of_a_list_are_checked_when_they_are_converted(large: tuple[Path, Any]) -> None:
    path, array = large
    rows = [*range(511, -1, -3), 7, 7]
    with mfload.open(path) as opened:
        info = opened.info("a")
        request = Request(info, dtypes.TABLE["F16"], select(info, rows))
        with np.errstate(all="ignore"):
            wanted = array[rows].astype(np.float16)
        assert samples.same(opened.load([request])[0], wanted)
        with pytest.raises(errors.LossyCastError, match="does not fit"):
            opened.load([request._replace(dtype=dtypes.TABLE["I8"], checked=True)])
