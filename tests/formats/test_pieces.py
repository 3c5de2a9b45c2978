"""Tensors of several pieces, in every form that the model has, give what NumPy gives."""

from __future__ import annotations

import collections
import contextlib
import math
from pathlib import Path
from typing import Any

import made_up
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

import mfload
from mfload import dtypes, errors
from mfload.index import TensorInfo
from mfload.io import engine
from mfload.io.pread import PreadReader
from mfload.planning.blocks import Costs
from mfload.planning.extents import c_strides
from mfload.planning.plan import make_plan
from mfload.planning.request import Request
from mfload.planning.slicing import Selection, composed, laid, select, shape_of, strided, within
from mfload.sources.local import LocalFile

_DTYPES = ["U8", "I16", "F32", "BF16", "C64", "BOOL", "F64", "F4", "F6_E2M3"]
_TARGETS = {"I16": "F32", "F32": "BF16", "BF16": "F32", "BOOL": "U8", "F64": "I16"}


class Seen:
    """An observer that counts how often it is shown each byte of a piece."""

    def __init__(self) -> None:
        self.bytes: collections.Counter[int] = collections.Counter()

    def saw(self, source: int, offset: int, data: Any, stopped: Any) -> None:
        self.bytes.update(range(offset, offset + data.size))


@st.composite
def tensors(draw: Any, writer: made_up.Writer) -> tuple[TensorInfo, Any]:
    """A tensor in a file of the made-up format, and what it holds, packed elements in blocks."""
    dtype = dtypes.TABLE[draw(st.sampled_from(_DTYPES))]
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6))
    kind: Any = dtype.numpy or np.dtype(f"V{dtype.nbytes}")
    if dtype.elements > 1:
        shape = shape or (2,)
        kind = np.dtype(f"V{dtype.nbytes}") if dtype.nbytes > 1 else np.dtype(np.uint8)
    seed, even = draw(st.integers(0, 9)), draw(st.booleans())
    raw = np.random.default_rng(seed).integers(0, 2, math.prod(shape) * kind.itemsize, np.uint8)
    raw = raw if dtype.name == "BOOL" else raw * np.uint8(37)
    if even:
        raw[:] = raw[:1].sum()
    array = np.frombuffer(raw.tobytes(), kind).reshape(shape)
    whole = (*shape[:-1], shape[-1] * dtype.elements) if dtype.elements > 1 else shape
    name = f"w{len(writer.tensors)}"
    swaps = dtype.elements == 1 and dtype.bits > 8 and dtype.name != "C64"
    writer.add(name, dtype.name, whole, draw(made_up.pieces(writer, array, swaps=swaps)))
    return TensorInfo(name, dtype, whole, ()), array


@st.composite
def indices(draw: Any, info: TensorInfo, array: Any) -> tuple[Any, Any]:
    """An index of a tensor, and what it gives."""
    if info.dtype.elements > 1:
        low = draw(st.integers(0, array.shape[-1]))
        high = draw(st.integers(low, array.shape[-1]))
        block = info.dtype.elements
        index = (Ellipsis, slice(low * block, high * block))
        return index, array[..., low:high]
    index = draw(hnp.basic_indices(info.shape, allow_ellipsis=True))
    if info.shape and draw(st.integers(0, 3)) == 0:
        picks = draw(st.lists(st.integers(0, max(0, info.shape[0] - 1)), max_size=4))
        index = picks if info.shape[0] else index
    return index, array[index]


def _cut(array: Any, index: Any) -> Any:
    """A view of an array, also where NumPy's would be a number."""
    found = array[index]
    return found if isinstance(found, np.ndarray) else array[*np.atleast_1d(index).tolist(), ...]


@st.composite
def turned(draw: Any, array: Any) -> Any:
    """A view of an array after any chain of indices, transposes, splits and reshapes."""
    for _ in range(draw(st.integers(0, 4))):
        act = draw(st.sampled_from(["index", "transpose", "split", "reshape", "again"]))
        if act == "index":
            index = draw(hnp.basic_indices(array.shape, allow_newaxis=True, max_dims=6))
            array = _cut(array, index)
        elif act == "transpose":
            array = array.transpose(draw(st.permutations(range(array.ndim))))
        elif act == "split" and array.ndim:
            dim = draw(st.integers(0, array.ndim - 1))
            parts = np.array_split(array, draw(st.integers(1, 3)), dim)
            array = draw(st.sampled_from(parts))
        elif act == "reshape":
            sizes = array.shape
            at = draw(st.integers(0, max(0, len(sizes) - 1)))
            count = math.prod(sizes[at : at + 2])
            first = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0] or [0]))
            middle = draw(st.sampled_from([(count,), (first, count // first if first else 0)]))
            made = array.reshape((*sizes[:at], *middle, *sizes[at + 2 :]))
            # Where no strides say it, it is a copy.
            array = made if np.may_share_memory(made, array) else array
        elif act == "again" and array.ndim < 5 and draw(st.integers(0, 3)) == 0:
            array = np.broadcast_to(array, (2, *array.shape))
    return array


def _laid(row: TensorInfo, outer: Selection | None, part: Any, view: Any) -> Selection | None:
    """The selection of a view of an array, which is a part of a tensor."""
    unit = part.itemsize
    first = (view.ctypes.data - part.ctypes.data) // unit if view.size else 0
    inner = laid(part.shape, view.shape, tuple(step // unit for step in view.strides), first)
    return None if inner is None else composed(row, outer, inner)


@st.composite
def views(draw: Any, row: TensorInfo, array: Any) -> tuple[Selection | None, Any]:
    """A selection of what a chain takes of an index of a tensor, and what that is."""
    outer = None
    if draw(st.booleans()):
        index = draw(hnp.basic_indices(array.shape, allow_ellipsis=True))
        outer, array = select(row, index), _cut(array, index)
        index = draw(hnp.basic_indices(array.shape, allow_ellipsis=True))
        outer, array = within(row, outer, index), _cut(array, index)
    part = np.ascontiguousarray(array).reshape(array.shape)
    view = draw(turned(part))
    made = _laid(row, outer, part, view)
    return (outer, part) if made is None else (made, view)


@given(data=st.data())
def test_plans_fill_what_numpy_gives(data: Any, tmp_path_factory: Any) -> None:
    draw = data.draw
    writer = made_up.Writer()
    made = [draw(tensors(writer)) for _ in range(draw(st.integers(1, 3)))]
    path = writer.write(tmp_path_factory.mktemp("made") / f"x{made_up.SUFFIX}")
    source = LocalFile(path)
    rows = {row.name: row for row in made_up.read(source)[0]}
    requests: list[Request] = []
    expected: list[bytes] = []
    for info, array in draw(st.lists(st.sampled_from(made), min_size=1, max_size=4)):
        row = rows[info.name]
        index, taken = draw(indices(row, array))
        dtype = row.dtype
        if draw(st.booleans()):
            dtype = dtypes.TABLE[_TARGETS.get(row.dtype.name, row.dtype.name)]
        if dtype is not row.dtype:
            with np.errstate(all="ignore"):
                taken = np.asarray(taken).astype(dtype.numpy)
        selection = select(row, index)
        form = draw(st.sampled_from(["index", "box", "view"]))
        if dtype.elements == 1 and form == "view":
            selection, taken = draw(views(row, array))
            if dtype is not row.dtype:
                with np.errstate(all="ignore"):
                    taken = np.asarray(taken).astype(dtype.numpy)
        elif dtype.elements == 1 and row.shape and form == "box":
            low = [draw(st.integers(0, n)) for n in row.shape]
            box = tuple((a, draw(st.integers(a, n))) for a, n in zip(low, row.shape, strict=True))
            order = draw(st.permutations(range(len(box))))
            steps = c_strides([shape_of(box)[dim] for dim in order], 1)
            selection = strided(box, [steps[order.index(dim)] for dim in range(len(box))])
            taken = array[tuple(slice(*pair) for pair in box)].transpose(order)
            if dtype is not row.dtype:
                with np.errstate(all="ignore"):
                    taken = taken.astype(dtype.numpy)
        requests.append(Request(row, dtype, selection))
        expected.append(np.asarray(taken).tobytes())
    costs = Costs(
        block=draw(st.integers(16, 300)),
        merge_gap=draw(st.integers(0, 64)),
        staged=draw(st.integers(16, 100)),
    )
    plan = make_plan(requests, costs=costs)
    memory = [np.full(spec.nbytes, 0xAA, np.uint8) for spec in plan.buffers]
    seen = Seen()
    share = engine.Share(collections.deque(plan.blocks), bool)
    engine.fill(lambda _: PreadReader(source), memory, seen, contextlib.nullcontext(), share)
    for place, wanted in zip(plan.places, expected, strict=True):
        got = memory[place.buffer][place.at : place.at + len(wanted)].tobytes()
        assert got == wanted, place.request
    asked = collections.Counter(request.info.name for request in requests)
    for request in requests:
        row, axes = request.info, request.selection or ()
        if row.simple or asked[row.name] > 1 or any(axis.picks for axis in axes):
            continue
        for _, offset, nbytes, stored in row.pieces:
            if nbytes and (stored is None or stored.inline is None):
                shown = [seen.bytes[at] for at in range(offset, offset + nbytes)]
                assert max(shown) <= 1, "bytes were read twice"
    for block in plan.blocks:
        if block.decode is None:
            rows = block.rows
            at_once = rows.reach(rows.together) if rows and rows.together else block.nbytes
            assert at_once <= costs.block or len(block.segments) == 1
            assert not block.staged or at_once <= max(costs.slot, plan.staged)
        else:
            assert block.decode.held <= plan.decoding


def _filled(path: Any, row: TensorInfo, index: Any, costs: Costs) -> Any:
    """What a plan of one request makes of a file."""
    plan = make_plan([Request(row, row.dtype, select(row, index))], costs=costs)
    memory = [np.zeros(spec.nbytes, np.uint8) for spec in plan.buffers]
    share = engine.Share(collections.deque(plan.blocks), bool)
    source = LocalFile(path)
    engine.fill(lambda _: PreadReader(source), memory, None, contextlib.nullcontext(), share)
    request, buffer, at = plan.places[0]
    part = memory[buffer][at : at + request.nbytes]
    return np.frombuffer(part, row.dtype.numpy).reshape(request.shape)


@pytest.mark.parametrize("encodings", [0, 1, 2])
@pytest.mark.parametrize("index", [..., (slice(None, None, -3), slice(5, 30)), ([7, 7, 3],)])
def test_elements_that_overlap(encodings: int, index: Any, tmp_path: Path) -> None:
    """Each row begins one element behind the row before it, as in a view of torch."""
    line = np.arange(90, dtype=np.int16)
    raw, steps = line.tobytes(), []
    for _ in range(encodings):
        raw, step = made_up.encoded(raw)
        steps.insert(0, step)
    writer = made_up.Writer()
    writer.add("w", "I16", (50, 40), [writer.piece(raw, strides=[1, 1], encodings=steps)])
    path = writer.write(tmp_path / f"x{made_up.SUFFIX}")
    (row,), _ = made_up.read(LocalFile(path))
    view = np.lib.stride_tricks.as_strided(line, (50, 40), (2, 2))
    got = _filled(path, row, index, Costs(block=256, staged=100))
    assert np.array_equal(got, view[index])


def _zoo() -> tuple[made_up.Writer, dict[str, Any]]:
    """A file with each case once, and what it holds."""
    writer, held = made_up.Writer(), dict[str, Any]()
    array = np.arange(600_000, dtype=np.float32).reshape(1000, 600)

    def add(name: str, pieces: list[Any], value: Any = array) -> None:
        writer.add(name, "F32", value.shape, pieces)
        held[name] = value

    add("inline", [writer.piece(array[:4, :4].tobytes(), inline=True)], array[:4, :4])
    one = np.float32(7).tobytes()
    add("filled", [writer.piece(one, inline=True, strides=[0, 0])], np.full((900, 800), 7, "f4"))
    flat = array.reshape(-1)
    cuts = [(0, 123_457), (123_457, 400_000), (400_000, 600_000)]
    add("flat", [writer.piece(flat[a:b].tobytes(), flat=[a, b]) for a, b in cuts])
    chunks: list[Any] = []
    for a in range(0, 1000, 300):
        for b in range(0, 600, 256):
            part = array[a : a + 300, b : b + 256]
            chunk = np.zeros((300, 256), "f4")
            chunk[: part.shape[0], : part.shape[1]] = part
            box = [[a, a + part.shape[0]], [b, b + part.shape[1]]]
            raw, step = made_up.encoded(chunk.tobytes())
            how: dict[str, Any] = {"box": box, "chunk": [300, 256], "encodings": [step]}
            chunks.append(writer.piece(raw, **how))
    add("chunks", chunks)
    storage = writer.piece(array.tobytes())[0]
    writer.tensors += [
        ["turned", "F32", [600, 1000], [[storage, array.nbytes, {"strides": [1, 600]}]]],
        ["tied", "F32", [600_000], [[storage, array.nbytes, None]]],
    ]
    held |= {"turned": array.T, "tied": flat}
    add("swapped", [writer.piece(array.byteswap().tobytes(), big_endian=True)])
    raw, inner = made_up.encoded(array.tobytes(), b"before", b"after")
    raw, outer = made_up.encoded(raw, b"a header", b"a directory")
    add("nested", [writer.piece(raw, encodings=[outer, inner])])
    return writer, held


@pytest.mark.parametrize("engine_name", ["pread", "direct", "mmap"])
def test_loads_of_every_case(engine_name: Any, tmp_path: Path) -> None:
    writer, held = _zoo()
    path = writer.write(tmp_path / f"x{made_up.SUFFIX}")
    options = mfload.Options(engine=engine_name, threads=3, max_host_overhead="4MiB")
    report = mfload.Report()
    loaded = mfload.load(path, "numpy", options=options, report=report)
    for name, value in held.items():
        assert np.array_equal(loaded[name], value), name
    with mfload.open(path, framework="numpy", options=options) as opened:
        for name, value in held.items():
            index = (slice(3, None, 7), slice(1, -2))[: value.ndim]
            assert np.array_equal(opened.get_slice(name)[index], value[index]), name
    assert report.peak_bytes <= sum(each.nbytes + (1 << 20) for each in held.values()) + (4 << 20)


def test_checks_of_every_case(tmp_path: Path) -> None:
    writer, held = _zoo()
    path = writer.write(tmp_path / f"x{made_up.SUFFIX}")
    mfload.save(
        {name: np.ascontiguousarray(each) for name, each in held.items()},
        tmp_path / "x.safetensors",
    )
    assert mfload.diff(path, tmp_path / "x.safetensors").equal
    with pytest.raises(errors.UsageError, match="share bytes"):
        mfload.verify(path, mode="write")
    writer.tensors = [each for each in writer.tensors if each[0] != "tied"]
    writer.write(path)
    assert mfload.verify(path, mode="write").ok
    manifest = tmp_path / f"x{made_up.SUFFIX}.checksums.json"
    mfload.load(path, "numpy", verify=manifest)


@pytest.mark.parametrize("promised", [-1, 1])
def test_a_codec_keeps_what_the_format_promised(promised: int, tmp_path: Path) -> None:
    raw, (codec, nbytes, *rest) = made_up.encoded(bytes(range(32)))
    writer = made_up.Writer()
    how: dict[str, Any] = {"encodings": [[codec, nbytes + promised, *rest]]}
    writer.add("w", "U8", (nbytes + promised,), [writer.piece(raw, **how)])
    path = writer.write(tmp_path / f"x{made_up.SUFFIX}")
    with pytest.raises(errors.FormatError, match=r"fewer|more") as caught:
        mfload.load(path, "numpy")
    assert (caught.value.file, caught.value.tensor) == (str(path), "w")


def test_an_unknown_codec_is_named(tmp_path: Path) -> None:
    writer = made_up.Writer()
    how: dict[str, Any] = {"encodings": [["lzjb", 4]]}
    writer.add("w", "F32", (1,), [writer.piece(b"abc", **how)])
    path = writer.write(tmp_path / f"x{made_up.SUFFIX}")
    with pytest.raises(errors.FormatError, match="unknown encoding") as caught:
        mfload.load(path, "numpy")
    assert caught.value.found == "lzjb"
