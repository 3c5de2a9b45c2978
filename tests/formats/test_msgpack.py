"""Flax's msgpack files: what was written, or an error that names what is wrong.

The files are written as Flax writes them, by the msgpack package; tests/meshes/test_msgpack_flax.py
compares with Flax itself.
"""

from __future__ import annotations

import math
import random
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

import mfload
from mfload import errors
from mfload.formats import msgpack as reader, structure
from mfload.index import Columns
from mfload.sources.memory import MemorySource

_DTYPES = [
    *("bool", "uint8", "int16", "int32", "int64", "uint32", "float16", "float32", "float64"),
    *("complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
]


def inner(array: Any) -> bytes:
    return msgpack.packb((array.shape, array.dtype.name, array.tobytes("C")), use_bin_type=True)


def _extension(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(1, inner(value))
    if isinstance(value, np.generic):
        return msgpack.ExtType(3, inner(np.asarray(value)))
    if isinstance(value, complex):
        return msgpack.ExtType(2, msgpack.packb((value.real, value.imag)))
    raise TypeError(type(value))


def pack(tree: Any) -> bytes:
    return msgpack.packb(tree, default=_extension, strict_types=True)


def chunked(array: Any, elements: int) -> dict[str, Any]:
    flat = array.reshape(-1)
    parts = [flat[at : at + elements] for at in range(0, flat.size, elements)]
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(dim): size for dim, size in enumerate(array.shape)},
        "chunks": {str(number): part for number, part in enumerate(parts)},
    }


def random_array(seed: int, name: str, shape: tuple[int, ...]) -> Any:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    raw = np.random.default_rng(seed).bytes(math.prod(shape) * dtype.itemsize)
    if name == "bool":
        raw = bytes(byte & 1 for byte in raw)
    return np.frombuffer(raw, dtype).reshape(shape)


def tree_of(raw: bytes) -> tuple[dict[str, Any], Any]:
    """The arrays of a file by name, and its tree with the arrays in it."""
    arrays = mfload.load(raw, "numpy")
    with mfload.open(raw) as opened:
        text = (opened.metadata() or {})[structure.KEY]
    return arrays, structure.loads(text, "it", arrays.__getitem__)


def same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted) or isinstance(wanted, np.generic)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            same(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    elif isinstance(wanted, np.ndarray | np.generic):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == wanted.tobytes()
    else:
        assert found == wanted or found != found


_shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
_arrays = st.builds(random_array, st.integers(0, 99), st.sampled_from(_DTYPES), _shapes)
_leaves = st.one_of(
    *(_arrays, st.integers(-(1 << 63), (1 << 64) - 1), st.floats(), st.booleans(), st.none()),
    *(st.text(max_size=40), st.binary(max_size=300), st.complex_numbers(allow_nan=False)),
    st.builds(lambda seed: random_array(seed, "float32", ())[()], st.integers(0, 9)),
)
_trees = st.recursive(
    _leaves,
    lambda each: (
        st.dictionaries(st.text("abé$/", min_size=1, max_size=40), each, max_size=20)
        | st.lists(each, max_size=20)
    ),
    max_leaves=12,
)


@given(_trees)
@example({"a": b"{"})  # The ninth byte is that of a safetensors header.
def test_what_was_packed_comes_back(tree: Any) -> None:
    arrays, found = tree_of(pack({"x": tree}))
    same(found, {"x": tree})
    assert all(name == "x" or name.startswith("x.") for name in arrays)


@given(st.sampled_from(_DTYPES), _shapes, st.integers(1, 7))
def test_chunked_arrays_are_one(name: str, shape: tuple[int, ...], elements: int) -> None:
    array = random_array(0, name, shape)
    if array.size == 0 or not shape:
        return
    raw = pack({"a": {"w": chunked(array, elements)}})
    arrays, tree = tree_of(raw)
    same(tree, {"a": {"w": array}})
    with mfload.open(raw) as opened:
        for row in range(shape[0]):
            same(opened.get_slice("a.w")[row], arrays["a.w"][row])


def test_ranges_are_exact(tmp_path: Path) -> None:
    big, small = random_array(1, "float32", (300, 1000)), random_array(2, "bfloat16", (7,))
    arrays = {"a": big, "b": small, "c.d": big[:2]}
    raw = pack({"a": big, "b": small, "c": {"d": big[:2]}})
    rows, _ = reader.read(MemorySource(raw))
    for row in rows:
        (piece,) = row.pieces
        assert piece.stored is None
        assert raw[piece.offset : piece.offset + piece.nbytes] == arrays[row.name].tobytes()
    path = tmp_path / "x.msgpack"
    path.write_bytes(raw)
    report = mfload.Report()
    mfload.load(path, "numpy", names="^b$", report=report)
    assert report.read_bytes < 10_000


def test_arrays_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x.msgpack"
    path.write_bytes(pack({str(n): np.zeros(1 << 20, "u1") for n in range(16)}))
    source, taken = MemorySource(path.read_bytes()), 0

    class Counting:
        name, size, costs = str(path), source.size, source.costs

        def read(self, offset: int, nbytes: int) -> bytes:
            nonlocal taken
            taken += nbytes
            return source.read(offset, nbytes)

    reader.read(Counting())  # type: ignore[arg-type]
    assert taken <= 17 * (64 << 10)


@pytest.mark.parametrize("name", ["x.msgpack", "checkpoint_100"])
def test_is_recognised(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    array = random_array(1, "float32", (300, 3))
    path.write_bytes(pack({"params": {"w": array}, "step": 7}))
    same(mfload.load(path, "numpy")["params.w"], array)
    assert mfload.verify(path).ok
    assert mfload.diff(path, path).equal


@pytest.mark.parametrize(
    "head", [b"\x80\x04\x95", b"\x81\x01", b"\x89HDF\r\n\x1a\n", b"", b"\x81\xa3ab", b"\xff" * 99]
)
def test_other_bytes_are_not(head: bytes) -> None:
    assert not reader.recognise(head, "x")


def test_a_lone_array_has_the_name_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "w.msgpack"
    path.write_bytes(pack(np.arange(3)))
    assert list(mfload.load(path, "numpy")) == ["w"]


def test_of_a_directory_the_file_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "flax_model.msgpack").write_bytes(pack({"w": np.arange(3)}))
    assert list(mfload.load(tmp_path, "numpy")) == ["w"]
    (tmp_path / "other.msgpack").write_bytes(pack({"v": np.arange(3)}))
    with pytest.raises(errors.CheckpointError, match="several checkpoints"):
        mfload.load(tmp_path, "numpy")


def test_an_unknown_dtype_fails_its_tensor_alone() -> None:
    raw = pack({"a": random_array(1, "float8_e3m4", (4,)), "b": np.arange(3)})
    assert list(mfload.load(raw, "numpy", names=["b"])) == ["b"]
    with pytest.raises(errors.UnsupportedDtypeError, match="float8_e3m4"):
        mfload.load(raw, "numpy")


def test_big_endian_arrays_are_read_as_flax_reads_them() -> None:
    array = np.arange(3, dtype=">f4")
    found = mfload.load(pack({"a": array}), "numpy")["a"]
    assert found.tobytes() == array.tobytes()
    assert found.dtype == "<f4"


# -- what is refused -------------------------------------------------------------------------


def _array(shape: Any, name: Any, data: Any) -> Any:
    return msgpack.ExtType(1, msgpack.packb((shape, name, data), use_bin_type=True))


_F4 = np.zeros(4, "f4")
_GOOD = chunked(_F4, 3)
_REFUSED: list[tuple[Any, str, str | None]] = [
    ({"a": {"b": _array([2], "float32", b"1234567")}}, "do not fit its shape", "a.b"),
    ({"a": _array([-1], "float32", b"")}, "not the shape", "a"),
    ({"a": _array([True], "float32", b"1234")}, "not the shape", "a"),
    ({"a": _array([1 << 40, 1 << 40, 0], "float32", b"")}, "not the shape", "a"),
    ({"a": _array([1] * 300, "float32", b"1234")}, "not the shape", "a"),
    ({"a": _array(4, "float32", b"1234")}, "not the shape", "a"),
    ({"a": _array([1], "F32", b"1234")}, "name of a dtype", "a"),
    ({"a": _array([1], 4, b"1234")}, "name of a dtype", "a"),
    ({"a": _array([1], "float32", 1234)}, "not an array", "a"),
    ({"a": msgpack.ExtType(1, msgpack.packb([1, 2]))}, "not an array", "a"),
    ({"a": msgpack.ExtType(1, inner(_F4) + b"\0")}, "bytes follow the value in its", "a"),
    ({"a": msgpack.ExtType(1, inner(_F4)[:-1])}, "reaches out of its extension", "a"),
    ({"a": msgpack.ExtType(1, b"")}, "reaches out of its extension", "a"),
    ({"a": msgpack.ExtType(3, inner(_F4))}, "do not fit its shape", "a"),
    ({"a": msgpack.ExtType(2, msgpack.packb([1.0]))}, "complex", "a"),
    ({"a": msgpack.ExtType(2, msgpack.packb([1.0, "x"]))}, "complex", "a"),
    ({"a": msgpack.ExtType(9, b"1")}, "does not write", "a"),
    ({"a": msgpack.ExtType(2, msgpack.packb([msgpack.ExtType(2, b"")]))}, "lies in another", "a.0"),
    ({"a": {**_GOOD, "more": 1}}, "malformed chunked", "a"),
    ({"a": {**_GOOD, "shape": {"0": 5}}}, "malformed chunked", "a"),
    ({"a": {**_GOOD, "shape": {"1": 4}}}, "malformed chunked", "a"),
    ({"a": {**_GOOD, "shape": 4}}, "malformed chunked", "a"),
    ({"a": {**_GOOD, "chunks": {}}}, "malformed chunked", "a"),
    ({"a": {**_GOOD, "chunks": {"0": _F4, "2": _F4}}}, "malformed chunked", "a"),
    ({"a": {**_GOOD, "chunks": {"0": 1}}}, "malformed chunked", "a"),
    ({"a": {**_GOOD, "chunks": {"0": _F4[:3], "1": _F4[3:].astype("i4")}}}, "malformed", "a"),
    ({"a": {**_GOOD, "chunks": {"0": _F4.reshape(2, 2)}}}, "malformed chunked", "a"),
    ({"__msgpack_chunked_array__": True}, "malformed chunked", None),
    ({"a.b": _F4, "a": {"b": _F4}}, "two arrays have the same name", "a.b"),
    ({"a": {1: _F4, "1": _F4}}, "two arrays have the same name", "a.1"),
    ({"a": {b"k": 1}}, "neither a string nor an integer", "a"),
    ({"a": {True: 1}}, "neither a string nor an integer", "a"),
]


@pytest.mark.parametrize(("tree", "match", "tensor"), _REFUSED)
def test_is_refused(tmp_path: Path, tree: Any, match: str, tensor: str | None) -> None:
    path = tmp_path / "x.msgpack"
    path.write_bytes(pack(tree))
    with pytest.raises(errors.HeaderError, match=match) as caught:
        mfload.load(path, "numpy")
    assert (caught.value.file, caught.value.tensor) == (str(path), tensor)


_BYTES: list[tuple[bytes, str]] = [
    (b"\x82\xa1a\x01\xa1a\x02", "given twice"),
    (b"\x81\xa1a\xa1\xff", "not UTF-8"),
    (b"\x81\xa1a\xc1", "not msgpack"),
    (pack({"a": _F4}) + b"\0", "bytes follow"),
    (b"\x81\xa1a" * 100 + b"\x01", "nested too deep"),
    (b"\x91" * 10_000, "nested too deep"),
    (b"\x81\xa1a" + b"\xc7\xff\x01\x93" * 5000, "lies in another|not the shape|not an array"),
    (b"\x81\xa1a\xc9\xff\xff\xff\xff\x01", "truncated"),
    (b"\x81\xa1a\xdd\xff\xff\xff\xff\x01", "truncated"),
    (b"\xdf\xff\xff\xff\xff", "truncated"),
    (b"\x81\xa1a\xdb\xff\xff\xff\xff1", "limit"),
    (b"", "truncated"),
]


@pytest.mark.parametrize(("raw", "match"), _BYTES)
def test_bytes_are_refused(tmp_path: Path, raw: bytes, match: str) -> None:
    path = tmp_path / "x.msgpack"
    path.write_bytes(raw)
    with pytest.raises(errors.HeaderError, match=match) as caught:
        mfload.load(path, "numpy")
    assert caught.value.file == str(path)


def test_counts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_VALUES", 100)
    monkeypatch.setattr(reader, "MAX_BYTES", 100)
    for tree in ({"a": [0] * 100}, {str(n): n for n in range(60)}):
        with pytest.raises(errors.HeaderError, match="too many values"):
            reader.read(MemorySource(pack(tree)))
    with pytest.raises(errors.HeaderError, match="over the limit"):
        reader.read(MemorySource(pack({"a": b"x" * 60, "b": "y" * 60})))
    reader.read(MemorySource(pack({"a": np.zeros(1000)})))


@pytest.mark.parametrize("leaf", ["alike", "other", "chunked"])
def test_names_that_repeat_a_long_key_are_bounded(
    monkeypatch: pytest.MonkeyPatch, leaf: str
) -> None:
    """A megabyte of a key and a thousand arrays below it would make a gigabyte of names."""
    monkeypatch.setattr(reader, "MAX_BYTES", 10_000)
    made = {str(n): np.zeros(n if leaf == "other" else 3, np.float32) for n in range(30)}
    if leaf == "chunked":
        made = chunked(np.zeros(90, np.float32), 3)
    tree_of(pack({"x" * 100: made}))
    with pytest.raises(errors.HeaderError, match="names beside the arrays are over the limit"):
        reader.read(MemorySource(pack({"x" * 1000: made})))


def test_the_work_grows_with_the_chunked_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, take = [0], Columns.take

    def counted(columns: Columns, numbers: Any) -> Columns:
        copied[0] += len(numbers)
        return take(columns, numbers)

    monkeypatch.setattr(Columns, "take", counted)
    one = chunked(np.arange(3), 3)
    columns, _ = reader.read(MemorySource(pack({str(n): one for n in range(100)})))
    assert [*columns.names] == [str(n) for n in range(100)]
    assert copied[0] <= 100


def test_every_truncation_is_told(tmp_path: Path) -> None:
    raw = pack({"a": _F4, "b": {"c": [1, 2.5, "text", 1j, np.float32(1)], "d": _GOOD}, "e": None})
    for length in range(len(raw)):
        with pytest.raises(errors.HeaderError) as caught:
            reader.read(MemorySource(raw[:length]))
        assert caught.type is errors.HeaderError


def _alike(names: list[str]) -> bytes:
    """A map of arrays whose heads are the same; names may come twice."""
    entry = pack({"_": np.arange(16, dtype=np.float32)})[2:]
    named = (bytes([0xA0 + len(name)]) + name.encode() + entry[1:] for name in names)
    return b"\xde" + len(names).to_bytes(2, "big") + b"".join(named)


def test_arrays_with_the_same_head_are_told_apart() -> None:
    names = [f"layer.{n}" for n in range(2000)]  # More than a window.
    tree = {name: random_array(n, "float32", (16,)) for n, name in enumerate(names)}
    tree["other"] = random_array(0, "float32", (4, 4))  # As many bytes, another shape.
    tree |= {f"é{n}": random_array(n, "float32", (16,)) for n in range(3)}
    tree |= {"x" * 40 + str(n): random_array(n, "int32", (16,)) for n in range(3)}
    tree["nested"] = {name: tree[name] for name in names[:5]}
    same(tree_of(pack(tree))[1], tree)


def test_arrays_with_the_same_head_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(raw: bytes, match: str) -> None:
        with pytest.raises(errors.HeaderError, match=match):
            reader.read(MemorySource(raw))

    refused(_alike(["a", "b", "c", "b"]), "a key is given twice")
    raw = _alike(["a", "b", "c"])
    assert [*reader.read(MemorySource(raw))[0].names] == ["a", "b", "c"]
    for length in range(len(raw)):
        refused(raw[:length], "truncated")
    refused(raw + b"\0", "bytes follow the value")
    twice = {"a.b": _F4, "a": {"b": _F4, "c": _F4}}
    refused(pack(twice), "two arrays have the same name")
    with monkeypatch.context() as patch:
        patch.setattr(reader, "MAX_DEPTH", 2)  # Their shapes are one level further.
        refused(pack({"c": _F4, "d": _F4, "a": {"b": _F4}}), "nested too deep")
    monkeypatch.setattr(reader, "MAX_VALUES", 40)
    refused(_alike([str(n) for n in range(50)]), "too many values")
    monkeypatch.setattr(reader, "MAX_VALUES", 4000)
    monkeypatch.setattr(reader, "MAX_BYTES", 100)
    refused(_alike([str(n) for n in range(50)]), "over the limit")


# -- fuzzing ---------------------------------------------------------------------------------

_INTERESTING = [0xC1, 0xC4, 0xC6, 0xC7, 0xC9, 0xD4, 0xD8, 0xDB, 0xDD, 0xDF, 0, 0xFF, 0x7F, 0x80]


def damaged(rng: random.Random, raw: bytes) -> bytes:
    made = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made))
        match rng.randrange(5):
            case 0:
                made[at] = rng.choice(_INTERESTING)
            case 1:
                made[at] = rng.randrange(256)
            case 2:
                del made[at : at + rng.randint(1, 9)]
            case 3:
                made[at:at] = rng.randbytes(rng.randint(1, 9))
            case _:
                made[at : at + 4] = struct.pack(">L", rng.choice([0, 1, 1 << 31, (1 << 32) - 1]))
        made = made or bytearray(b"\0")
    return bytes(made)


def _fuzz(rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    trees = [
        {
            "a": _F4,
            "b": {"c": [1, 2.5, "text", 1j, np.float32(1)], "d": chunked(_F4, 2)},
            "e": None,
        },
        {"params": {"0": {"w": random_array(1, "bfloat16", (2, 3))}, "1": {}}, "step": 3},
        [np.zeros((2, 0)), {"x": b"bytes", "y": [[], {}]}],
    ]
    refused = 0
    for _ in range(rounds):
        raw = damaged(rng, pack(rng.choice(trees)))
        reader.recognise(raw[:256], "x")
        source = MemorySource(raw)
        try:
            rows, strings = reader.read(source)
        except errors.HeaderError:
            refused += 1
            continue
        assert strings
        names = {row.name for row in rows}
        assert len(names) == len(rows)
        structure.loads(strings[structure.KEY], "it", {name: name for name in names}.__getitem__)
        for row in rows:
            for piece in row.pieces:
                assert 0 <= piece.offset <= piece.offset + piece.nbytes <= len(raw)
            if row.dtype.known:
                assert sum(piece.nbytes for piece in row.pieces) == row.dtype.size_of(row.shape)
    assert refused > rounds // 5


def test_damaged_files() -> None:
    _fuzz(4000, 0)


@pytest.mark.slow
def test_many_damaged_files() -> None:
    for seed in range(1, 30):
        _fuzz(10_000, seed)


def test_memory_is_bounded_by_the_file() -> None:
    raw = b"\x81\xa1a\xdd\xff\xff\xff\xff" + b"\xc0" * 100_000
    tracemalloc.start()
    with pytest.raises(errors.HeaderError, match="truncated"):
        reader.read(MemorySource(raw))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30 * len(raw)


def test_works_without_flax_and_msgpack(tmp_path: Path) -> None:
    path = tmp_path / "x.msgpack"
    path.write_bytes(pack({"a": {"b": _F4}, "n": 3}))
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('msgpack', 'flax', 'jax')))\n"
        "import mfload; print(mfload.load(sys.argv[1], 'numpy')['a.b'].sum())\n"
        "print(mfload.plan(sys.argv[1], 'numpy'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0.0\n")
