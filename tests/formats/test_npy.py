"""NumPy's files: what numpy.load gives, or an error that names what is wrong."""

from __future__ import annotations

import io
import re
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import serving
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

import mfload
from mfload import errors
from mfload.io import buffers
from mfload.io.pread import PreadReader
from mfload.planning.plan import make_plan
from mfload.planning.request import Request
from mfload.sources.local import LocalFile
from mfload.stored import Encoding

_KINDS = ["?", "i1", "u1", "<i2", ">i2", "<u4", ">u8", "<f2", ">f4", "<f8", ">c8", "<c8", ">i8"]


@st.composite
def arrays(draw: Any) -> Any:
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    kind = np.dtype(draw(st.sampled_from(_KINDS)))
    count = int(np.prod(shape)) * kind.itemsize
    raw = np.random.default_rng(draw(st.integers(0, 99))).bytes(count)
    if kind.kind == "b":
        raw = bytes(byte & 1 for byte in raw)
    array = np.frombuffer(raw, kind).reshape(shape)
    return np.asfortranarray(array) if draw(st.booleans()) else array


def member(array: Any, version: tuple[int, int] | None = None) -> bytes:
    """An array as a `.npy` file."""
    made = io.BytesIO()
    np.lib.format.write_array(made, array, version=version)
    return made.getvalue()


def archive(
    members: dict[str, bytes], method: int = zipfile.ZIP_STORED, *, wide: bool = False
) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as packed:
        for name, raw in members.items():
            with packed.open(name, "w", force_zip64=wide) as opened:
                opened.write(raw)
    return made.getvalue()


class _Stream(io.RawIOBase):
    """A file that can't seek: sizes then follow the data."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, raw: Any) -> int:
        self.data += raw
        return len(raw)


def same(got: Any, wanted: Any) -> None:
    wanted = np.asarray(wanted)
    assert got.dtype == wanted.dtype.newbyteorder("=")
    assert got.shape == wanted.shape
    assert got.tobytes() == wanted.astype(wanted.dtype.newbyteorder("<")).tobytes()


@given(data=st.data())
def test_loads_what_numpy_loads(data: Any, tmp_path_factory: Any) -> None:
    draw = data.draw
    held = draw(st.dictionaries(st.text("abc.é/", min_size=1, max_size=6), arrays(), max_size=4))
    version = draw(st.sampled_from([None, (1, 0), (2, 0), (3, 0)]))
    method = draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
    raw = archive(
        {f"{name}.npy": member(each, version) for name, each in held.items()},
        method,
        wide=draw(st.booleans()),
    )
    path = tmp_path_factory.mktemp("npz") / "x.npz"
    path.write_bytes(draw(st.sampled_from([b"", b"#!/bin/sh\n"])) + raw)
    loaded = mfload.load(path, "numpy")
    assert loaded.keys() == held.keys()
    with zipfile.ZipFile(path) as packed:
        for name in held:
            wanted = np.load(io.BytesIO(packed.read(f"{name}.npy")))
            same(loaded[name], wanted)
    with mfload.open(path, framework="numpy") as opened:
        for name, each in held.items():
            index = draw(hnp.basic_indices(each.shape, allow_ellipsis=True))
            same(opened.get_slice(name)[index], each[index])


@pytest.mark.parametrize("length", range(372, 392, 5))
def test_long_names_of_deflated_members(length: int, tmp_path: Path) -> None:
    # The header of the array reaches out of what is read with the header of the member.
    array = np.random.default_rng(0).normal(size=400)
    np.savez_compressed(tmp_path / "x.npz", **{"n" * length: array})
    same(mfload.load(tmp_path / "x.npz", "numpy")["n" * length], array)


def test_a_header_that_grew_when_it_was_deflated(tmp_path: Path) -> None:
    squeeze = zlib.compressobj(6, zlib.DEFLATED, -15)
    raw = member(_ARRAY)
    packed = [
        squeeze.compress(raw[n : n + 1]) + squeeze.flush(zlib.Z_SYNC_FLUSH) for n in range(200)
    ]
    rest = squeeze.compress(raw[200:]) + squeeze.flush()
    (tmp_path / "x.npz").write_bytes(_deflated(_ARRAY, lambda _: b"".join(packed) + rest))
    same(mfload.load(tmp_path / "x.npz", "numpy")["w"], _ARRAY)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", ["<f4", ">f8", "|i1"])
def test_a_file_of_one_array_is_named_by_its_stem(kind: str, order: Any, tmp_path: Path) -> None:
    array = np.arange(35).reshape(5, 7).astype(kind, order=order)
    np.save(tmp_path / "layer.0.weight.npy", array)
    loaded = mfload.load(tmp_path / "layer.0.weight.npy", "numpy")
    assert list(loaded) == ["layer.0.weight"]
    same(loaded["layer.0.weight"], array)


def test_large_members_are_decoded_and_turned_in_bounded_memory(tmp_path: Path) -> None:
    array = np.arange(3_000_000, dtype=np.float32).reshape(1500, 2000)
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", c=array, f=np.asfortranarray(array), b=array.astype(">f4"))
        for threads in (1, 3):
            report = mfload.Report()
            options = mfload.Options(threads=threads, max_host_overhead="4MiB")
            loaded = mfload.load(tmp_path / "x.npz", "numpy", options=options, report=report)
            for each in loaded.values():
                same(each, array)
            loaded.clear()
            assert report.peak_bytes <= 3 * array.nbytes + (4 << 20) + (64 << 10)


def test_readers_stop_within_a_member_when_another_fails(tmp_path: Path, monkeypatch: Any) -> None:
    array = np.random.default_rng(0).integers(0, 2**31, 600_000)
    np.savez_compressed(tmp_path / "x.npz", w=array, x=array)
    with mfload.open(tmp_path / "x.npz", framework="numpy") as opened:
        broken = opened.info("x").pieces[0].offset
    count = 0

    def land(self: Any, block: Any, slot: Any, real: Any = PreadReader.land) -> Any:
        nonlocal count
        if block.offset > broken:
            raise OSError(5, "Input/output error")
        count += 1
        time.sleep(0.02)
        return real(self, block, slot)

    monkeypatch.setattr(PreadReader, "land", land)
    options = mfload.Options(engine="pread", threads=2, max_host_overhead="1MiB")
    with pytest.raises(errors.SourceError, match="Input/output"):
        mfload.load(tmp_path / "x.npz", "numpy", options=options)
    assert count < 10
    assert not buffers.live_bytes()


def test_headers_of_members_are_asked_of_a_server_at_once(tmp_path: Path) -> None:
    held = {f"t{n}": np.arange(20_000.0) + n for n in range(24)}
    np.savez(tmp_path / "x.npz", **held)
    files = {"/x.npz": (tmp_path / "x.npz").read_bytes()}
    with serving.serving(files) as server:
        loaded = mfload.load(server.url("/x.npz"), "numpy")
        for name, each in held.items():
            same(loaded[name], each)
        server.asked.clear()
        server.always = lambda _: time.sleep(0.05)
        start = time.monotonic()
        mfload.plan(server.url("/x.npz"), framework="numpy")
        # The head of the file, its end, and a header for each member.
        assert len(server.asked) <= 26
        assert time.monotonic() - start < 26 * 0.05 / 2


def _asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read of a header."""
    asked: list[int] = []
    real = LocalFile.read

    def read(self: LocalFile, offset: int, nbytes: int) -> bytes:
        asked.append(nbytes)
        return real(self, offset, nbytes)

    monkeypatch.setattr(LocalFile, "read", read)
    return asked


def test_headers_of_members_that_lie_together_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {f"t{n}": np.arange(40.0) + n for n in range(1200)}
    held["large"] = np.arange(100_000.0)
    np.savez(tmp_path / "x.npz", **held)
    asked = _asked(monkeypatch)
    loaded = mfload.load(tmp_path / "x.npz", "numpy")
    for name, each in held.items():
        same(loaded[name], each)
    assert len(asked) < 30
    assert sum(asked) < 2 * 1200 * 640 + (1 << 16)


def test_data_between_headers_is_not_read_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "x.npz", **{f"t{n}": np.zeros(8 << 10, np.uint8) for n in range(50)})
    asked = _asked(monkeypatch)
    with mfload.open(tmp_path / "x.npz") as opened:
        assert len(opened.keys()) == 50
    assert sum(asked) < 150 << 10


def test_an_entry_that_comes_twice_is_refused_over_a_connection_too() -> None:
    entry = _PLAIN[_D : _entry(_PLAIN, 1)]
    raw = (
        _PLAIN[:_D]
        + entry * 2
        + _PLAIN[_LAST : _LAST + 12]
        + _u4(2 * len(entry))
        + _u4(_D)
        + _u2(0)
    )
    with serving.serving({"/x.npz": raw}) as server, pytest.raises(errors.HeaderError) as caught:
        mfload.load(server.url("/x.npz"), "numpy")
    assert "two members of one name" in caught.value.message


def test_values_are_converted_on_the_way(tmp_path: Path) -> None:
    array = np.random.default_rng(0).normal(size=(64, 48))
    np.savez_compressed(tmp_path / "x.npz", w=array.astype(">f4"), n=np.arange(9))
    loaded = mfload.load(tmp_path / "x.npz", "numpy", dtype="bfloat16")
    assert (loaded["w"] == array.astype(">f4").astype(ml_dtypes.bfloat16)).all()
    assert loaded["n"].dtype == np.int64
    with pytest.raises(errors.LossyCastError) as caught:
        mfload.load(tmp_path / "x.npz", "numpy", dtype={"n": "bool"})
    assert caught.value.tensor == "n"


def test_directories_of_them_alone_are_checkpoints(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    np.savez(tmp_path / "more.npz", b=np.arange(4))
    assert mfload.load(tmp_path, "numpy").keys() == {"a", "b"}
    assert mfload.load([tmp_path / "a.npy", tmp_path / "more.npz"], "numpy").keys() == {"a", "b"}
    mfload.save({"w": np.arange(5)}, tmp_path / "model.safetensors")
    assert mfload.load(tmp_path, "numpy").keys() == {"w"}
    (tmp_path / "model.safetensors").rename(tmp_path / "model.bin")
    with pytest.raises(errors.SourceNotFoundError, match="PyTorch"):
        mfload.load(tmp_path, "numpy")


def test_files_without_the_ending_are_known_by_their_head(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(member(np.arange(3)))
    (tmp_path / "y").write_bytes(archive({"w.npy": member(np.arange(4))}))
    assert mfload.load(tmp_path / "x", "numpy").keys() == {"x"}
    assert mfload.load(tmp_path / "y", "numpy").keys() == {"w"}


def test_members_that_are_not_arrays_are_passed_over(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", w=np.arange(4))
    with zipfile.ZipFile(tmp_path / "x.npz", "a", zipfile.ZIP_LZMA) as packed:
        packed.writestr("README", "of another compression")
    assert mfload.load(tmp_path / "x.npz", "numpy").keys() == {"w"}
    assert mfload.verify(tmp_path / "x.npz").ok


def test_bytes_in_memory(tmp_path: Path) -> None:
    array = np.arange(5000.0).reshape(50, 100)
    assert list(mfload.load(member(array), "numpy")) == ["array"]
    np.savez_compressed(tmp_path / "x.npz", w=np.asfortranarray(array))
    same(mfload.load((tmp_path / "x.npz").read_bytes(), "numpy")["w"], array)


def test_urls(tmp_path: Path) -> None:
    array = np.arange(500_000.0).reshape(500, 1000)
    np.savez(tmp_path / "x.npz", c=array, f=np.asfortranarray(array), b=array.astype(">f8"))
    np.savez_compressed(tmp_path / "y.npz", c=array, f=np.asfortranarray(array))
    files = {f"/{name}": (tmp_path / name).read_bytes() for name in ("x.npz", "y.npz")}
    with serving.serving({**files, "/w.npy": member(array)}) as server:
        for name in files:
            for each in mfload.load(server.url(name), "numpy").values():
                same(each, array)
            with mfload.open(server.url(name), framework="numpy") as opened:
                same(opened.get_slice("f")[3:400:7, 900:20:-3], array[3:400:7, 900:20:-3])
            assert mfload.verify(server.url(name)).ok
        assert list(mfload.load(server.url("/w.npy"), "numpy")) == ["w"]


def test_sizes_may_follow_the_data(tmp_path: Path) -> None:
    stream = _Stream()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:  # type: ignore[call-overload]
        packed.writestr("w.npy", member(np.arange(99)))
        packed.comment = b"a comment"
    (tmp_path / "x.npz").write_bytes(stream.data)
    same(mfload.load(tmp_path / "x.npz", "numpy")["w"], np.arange(99))


def test_what_is_not_an_array_is_passed_over(tmp_path: Path) -> None:
    raw = archive({"notes.txt": b"hello", "w.npy": member(np.arange(3))})
    (tmp_path / "x.npz").write_bytes(raw)
    assert list(mfload.load(tmp_path / "x.npz", "numpy")) == ["w"]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_arrays_are_found_by_their_magic_as_numpy_finds_them(method: int, tmp_path: Path) -> None:
    array = np.arange(300, dtype=np.int16).reshape(3, 100)
    members = {"plain": array, "a/b.bin": array.T, "w.npy": array[0]}
    others = {"notes.txt": b"hello", "empty": b"", "dir/": b"", "short": b"\x93NUM"}
    raw = archive({**{name: member(each) for name, each in members.items()}, **others}, method)
    (tmp_path / "x.npz").write_bytes(raw)
    held = np.load(tmp_path / "x.npz")
    wanted = {n: held[n] for n in held.files if isinstance(held[n], np.ndarray)}
    loaded = mfload.load(tmp_path / "x.npz", "numpy")
    assert loaded.keys() == wanted.keys() == {"plain", "a/b.bin", "w"}
    for name, each in wanted.items():
        same(loaded[name], each)
    assert mfload.verify(tmp_path / "x.npz").ok
    if method == zipfile.ZIP_STORED:
        assert mfload.load(raw, "numpy").keys() == wanted.keys()  # Known by its first bytes.


def test_a_far_header_is_read_to_find_an_array(tmp_path: Path) -> None:
    raw = archive({"x" * 3000: member(np.arange(5)), "w.npy": member(np.arange(3))})
    (tmp_path / "x.npz").write_bytes(raw)
    assert mfload.load(tmp_path / "x.npz", "numpy").keys() == {"x" * 3000, "w"}


_FOREIGN: dict[str, Any] = {
    "object": np.array([None, 3], object),
    "structured": np.zeros(3, [("a", "<f4"), ("b", "<i2", (2,))]),
    "datetime64": np.zeros(3, "M8[s]"),
    "timedelta64": np.zeros(3, "m8[D]"),
    "str": np.array(["ab", "c"]),
    "bytes": np.array([b"ab", b"c"]),
    "V2": np.zeros(3, ml_dtypes.bfloat16),
    "c16": np.zeros(3, np.complex128),
    "f16": np.zeros(3, np.longdouble),
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", _FOREIGN)
def test_other_dtypes_fail_by_name_and_alone(kind: str, compressed: bool, tmp_path: Path) -> None:
    save = np.savez_compressed if compressed else np.savez
    save(tmp_path / "x.npz", odd=_FOREIGN[kind], w=np.arange(3))
    with pytest.raises(errors.UnsupportedDtypeError) as caught:
        mfload.load(tmp_path / "x.npz", "numpy")
    assert (caught.value.tensor, caught.value.found) == ("odd", kind)
    same(mfload.load(tmp_path / "x.npz", "numpy", names=["w"])["w"], np.arange(3))


def test_a_bomb_costs_no_time_to_plan() -> None:
    raw = _deflated(np.zeros(1 << 20, np.uint8), lambda packed: packed)
    with mfload.open(raw, framework="numpy") as opened:
        info = opened.info("w")
    # As many bytes as a member of 4 GB can make.
    piece = info.pieces[0]
    assert piece.stored is not None
    stored = piece.stored._replace(encodings=(Encoding("deflate", 1 << 42),))
    info = info._replace(shape=(1 << 42,), pieces=(piece._replace(stored=stored),))
    (block,) = make_plan([Request(info, info.dtype)]).blocks
    assert len(block.segments) == 1


def test_other_dtypes_have_the_bytes_that_the_file_has(tmp_path: Path) -> None:
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / f"{save.__name__}.npz", w=_FOREIGN["V2"], t=_FOREIGN["str"])
        with mfload.open(tmp_path / f"{save.__name__}.npz", framework="numpy") as opened:
            for name, each in {"w": _FOREIGN["V2"], "t": _FOREIGN["str"]}.items():
                assert opened.info(name).nbytes == each.nbytes
    packed = tmp_path / "savez_compressed.npz"
    problems = mfload.verify(packed, against=tmp_path / "savez.npz").problems
    assert all("can't be compared" in each.what for each in problems)
    assert len(problems) == 2


def _header(text: str) -> bytes:
    raw = text.encode("latin-1")
    return b"\x93NUMPY\1\0" + len(raw).to_bytes(2, "little") + raw


_TEXTS = {
    "code": "{'descr': '<f4', 'fortran_order': False, 'shape': (__import__('os').getpid(),)}",
    "call": "{'descr': open('/etc/passwd'), 'fortran_order': False, 'shape': (1,)}",
    "deep": "{'descr': '<f4', 'fortran_order': False, 'shape': " + "(" * 5000 + "1",
    "signs": "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "-" * 9000 + "1,)}",
    "negative": "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
    "float": "{'descr': '<f4', 'fortran_order': False, 'shape': (1.5,)}",
    "bool": "{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}",
    "number": "{'descr': '<f4', 'fortran_order': False, 'shape': (1)}",
    "huge": "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",)}",
    "many": "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9999999," * 1200 + ")}",
    "twice": "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}",
    "twice at the end": "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'shape': (2,)}",
    "more": "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': '1'}",
    "fewer": "{'descr': '<f4', 'shape': (1,)}",
    "order": "{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}",
    "after": "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} + x",
    "ours": "{'descr': 'BF16', 'fortran_order': False, 'shape': (1,)}",
    "empty": "{'descr': '', 'fortran_order': False, 'shape': (1,)}",
    "nothing": "",
    "list": "[]",
    "commas": "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "," * 5000 + ")}",
    "spaces": "{'descr': '<f4'," + " " * 9000 + "x",
    "spaces in the shape": "{'descr': '<f4', 'fortran_order': False, 'shape': (1"
    + " " * 9900
    + "L)}",
    "brackets": "{'descr': " + "[" * 5000,
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", _TEXTS)
def test_hostile_headers(case: str, packed: bool, tmp_path: Path) -> None:
    raw = _header(_TEXTS[case]) + bytes(4)
    path = tmp_path / ("x.npz" if packed else "x.npy")
    path.write_bytes(archive({"x.npy": raw}, zipfile.ZIP_DEFLATED) if packed else raw)
    start = time.process_time()
    with pytest.raises(errors.HeaderError) as caught:
        mfload.load(path, "numpy")
    assert (caught.value.file, caught.value.tensor) == (str(path), "x")
    assert time.process_time() - start < 1


def _edited(raw: bytes, edits: dict[int, Any]) -> bytes:
    """Numbers of 16, 32 bits or bytes put at offsets."""
    data = bytearray(raw)
    for at, value in edits.items():
        data[at : at + len(value)] = value
    return bytes(data)


def _entry(raw: bytes, n: int = 0) -> int:
    """Where an entry of the directory begins."""
    return [each.start() for each in re.finditer(b"PK\1\2", raw)][n]


def _u2(value: int) -> bytes:
    return value.to_bytes(2, "little")


def _u4(value: int) -> bytes:
    return value.to_bytes(4, "little")


_PLAIN = archive({"a.npy": member(np.arange(9)), "b.npy": member(np.arange(8))})
_PACKED = archive({"a.npy": member(np.zeros(9999))}, zipfile.ZIP_DEFLATED)
_D, _E = _entry(_PLAIN), _entry(_PACKED)
_LAST = len(_PLAIN) - 22


_HOSTILE: dict[str, Callable[[], bytes]] = {
    "not an archive": lambda: b"PK\3\4" + bytes(200),
    "empty": lambda: b"",
    "trailing bytes": lambda: _PLAIN + b"x",
    "truncated": lambda: _PLAIN[:-30],
    "no directory": lambda: _PLAIN[:_D],
    "encrypted": lambda: _edited(_PLAIN, {6: _u2(1), _D + 8: _u2(1)}),
    "encrypted, says the member alone": lambda: _edited(_PLAIN, {6: _u2(1)}),
    "bzip2": lambda: archive({"a.npy": member(np.arange(9))}, zipfile.ZIP_BZIP2),
    "lzma": lambda: archive({"a.npy": member(np.arange(9))}, zipfile.ZIP_LZMA),
    "one name twice": lambda: _PLAIN.replace(b"b.npy", b"a.npy"),
    "names differ": lambda: _edited(_PLAIN, {30: b"c"}),
    "methods differ": lambda: _edited(_PLAIN, {8: _u2(8)}),
    "sizes differ": lambda: _edited(_PLAIN, {22: _u4(8)}),
    "CRCs differ": lambda: _edited(_PLAIN, {14: _u4(8)}),
    "members overlap": lambda: _edited(_PLAIN, {_entry(_PLAIN, 1) + 42: _u4(0)}),
    "offset outside": lambda: _edited(_PLAIN, {_D + 42: _u4(1 << 31)}),
    "offset at the end": lambda: _edited(_PLAIN, {_D + 42: _u4(_D - 4)}),
    "offset in the data": lambda: _edited(_PLAIN, {_D + 42: _u4(60)}),
    "size over the end": lambda: _edited(
        _PLAIN, {18: _u4(9999), 22: _u4(9999), _D + 20: _u4(9999), _D + 24: _u4(9999)}
    ),
    "stored in other bytes than it has": lambda: _edited(_PLAIN, {_D + 24: _u4(9999)}),
    "a bomb": lambda: _edited(_PACKED, {22: _u4(1 << 31), _E + 24: _u4(1 << 31)}),
    "more entries": lambda: _edited(_PLAIN, {_LAST + 8: _u2(3), _LAST + 10: _u2(3)}),
    "fewer entries": lambda: _edited(_PLAIN, {_LAST + 8: _u2(1), _LAST + 10: _u2(1)}),
    "a million entries": lambda: _edited(_PLAIN, {_LAST + 8: b"\xff\xff\xff\xff"}),
    "directory outside": lambda: _edited(_PLAIN, {_LAST + 16: _u4(1 << 31)}),
    "several parts": lambda: _edited(_PLAIN, {_LAST + 4: _u2(1)}),
    "a name beyond the directory": lambda: _edited(_PLAIN, {_entry(_PLAIN, 1) + 28: _u2(999)}),
    "a name that is not UTF-8": lambda: _edited(
        _PLAIN, {6: _u2(1 << 11), _D + 8: _u2(1 << 11), 30: b"\xff", _D + 46: b"\xff"}
    ),
    "no arrays": lambda: archive({"data.pkl": b"\x80\2."}),
    "no array in a member": lambda: archive({"a.npy": b"hello"}),
    "an empty member": lambda: archive({"a.npy": b""}),
    "an array cut short": lambda: archive({"a.npy": member(np.arange(9))[:-1]}),
    "an array with more": lambda: archive({"a.npy": member(np.arange(9)) + b"x"}),
    "a deflated array cut short": lambda: archive(
        {"a.npy": member(np.arange(9))[:-1]}, zipfile.ZIP_DEFLATED
    ),
    "a header cut short": lambda: archive({"a.npy": member(np.arange(9))[:40]}),
    "a long header": lambda: archive({"a.npy": b"\x93NUMPY\2\0" + _u4(1 << 31)}),
    "another version": lambda: archive({"a.npy": b"\x93NUMPY\4\0" + bytes(99)}),
    "a minor version": lambda: archive({"a.npy": b"\x93NUMPY\1\1" + member(np.arange(9))[8:]}),
    "two arrays of one name": lambda: archive(
        {"a": member(np.arange(9)), "a.npy": member(np.arange(9))}
    ),
    "deflate data that is none": lambda: _edited(_PACKED, {35: b"\xff" * 8}),
}


def _extra(size: int) -> bytes:
    """An archive of members with fields of no bytes, as many as fit, before the zip64 field."""
    raw, fields = member(np.float32(1)), bytes(65500)
    field = struct.pack("<2H2Q", 1, 16, len(raw), len(raw))
    data = directory = b""
    for n in range(size):
        name = b"%d.npy" % n
        lengths = zlib.crc32(raw), 2**32 - 1, 2**32 - 1, len(name), len(fields + field)
        entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 0, 0, 0, *lengths,
                            0, 0, 0, 0, len(data))  # fmt: skip
        data += struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 0, *lengths)
        data += name + fields + field + raw
        directory += entry + name + fields + field
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, size, size, len(directory), len(data), 0)
    return data + directory + end


def test_fields_of_a_member_are_read_in_linear_time(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(_extra(40))
    start = time.process_time()
    assert len(mfload.load(tmp_path / "x.npz", "numpy")) == 40
    assert time.process_time() - start < 1.5


@pytest.mark.parametrize("case", _HOSTILE)
def test_hostile_archives(case: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(_HOSTILE[case]())
    with pytest.raises(errors.HeaderError) as caught:
        mfload.load(path, "numpy")
    assert caught.value.file == str(path)


def _deflated(array: Any, edit: Callable[[bytes], bytes]) -> bytes:
    """An archive of one member whose deflate stream was edited; sizes declared stay."""
    raw = member(array)
    squeeze = zlib.compressobj(6, zlib.DEFLATED, -15)
    packed = edit(squeeze.compress(raw) + squeeze.flush())
    crc = zlib.crc32(raw)
    head = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 8, 0, 0, crc, len(packed), len(raw), 5, 0)
    entry = struct.pack(
        "<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 8, 0, 0, crc, len(packed), len(raw),
        5, 0, 0, 0, 0, 0, 0,
    )  # fmt: skip
    data = head + b"w.npy" + packed
    directory = entry + b"w.npy"
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(directory), len(data), 0)
    return data + directory + end


_ARRAY = np.random.default_rng(0).normal(size=40_000)
_SHORT = zlib.compressobj(6, zlib.DEFLATED, -15)
_STREAMS: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda packed: packed[: len(packed) // 2],
    "no end": lambda packed: packed[:-1],
    "bytes after its end": lambda packed: packed + b"more",
    "damaged": lambda packed: packed[:100_000] + bytes(50) + packed[100_050:],
    "ends early": lambda packed: _end(member(_ARRAY)[:-8]),
    "makes more": lambda packed: _end(member(_ARRAY) + bytes(1 << 22)),
}


def _end(raw: bytes) -> bytes:
    squeeze = zlib.compressobj(6, zlib.DEFLATED, -15)
    return squeeze.compress(raw) + squeeze.flush()


@pytest.mark.parametrize("case", _STREAMS)
def test_streams_that_lie(case: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(_deflated(_ARRAY, lambda packed: packed))
    same(mfload.load(path, "numpy")["w"], _ARRAY)
    path.write_bytes(_deflated(_ARRAY, _STREAMS[case]))
    with pytest.raises(errors.FormatError) as caught:
        mfload.load(path, "numpy")
    assert (caught.value.file, caught.value.tensor) == (str(path), "w")


@pytest.mark.parametrize("case", _STREAMS)
def test_verify_finds_what_a_load_refuses(case: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(_deflated(_ARRAY, lambda packed: packed))
    assert mfload.verify(path).ok
    raw = _deflated(_ARRAY, _STREAMS[case])
    path.write_bytes(raw)
    (problem,) = mfload.verify(path).problems
    assert problem.tensor == "w"
    # The archive may well have the CRC of what the stream makes.
    packed = raw[35 : _entry(raw)]
    try:
        crc = _u4(zlib.crc32(zlib.decompress(packed, -15)))
    except zlib.error:
        return
    path.write_bytes(_edited(raw, {14: crc, _entry(raw) + 16: crc}))
    (problem,) = mfload.verify(path).problems
    assert problem.tensor == "w"


@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
def test_damaged_files_are_not_called_another_kind(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(_PLAIN[:-30] if name == "x.npz" else member(np.arange(9))[:-1])
    with pytest.raises(errors.HeaderError) as caught:
        mfload.load(path, "numpy")
    assert "seems to be" not in caught.value.message
    path.write_bytes(archive({"data.pkl": b"\x80\2."}) if name == "x.npz" else b"<html>" * 20)
    with pytest.raises(errors.HeaderError, match="seems to be"):
        mfload.load(path, "numpy")


@given(raw=st.data())
def test_any_damage_is_an_error_or_other_numbers(raw: Any, tmp_path_factory: Any) -> None:
    data = bytearray(raw.draw(st.sampled_from([_PLAIN, _PACKED, member(np.arange(9))])))
    for _ in range(raw.draw(st.integers(1, 3))):
        data[raw.draw(st.integers(0, len(data) - 1))] = raw.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "x.npz"
    path.write_bytes(data)
    found = None
    try:
        mfload.load(path, "numpy")
    except errors.MfloadError as error:
        found = error
    assert found is None or found.file == str(path)
