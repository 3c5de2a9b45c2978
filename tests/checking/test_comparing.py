"""`diff`: what differs, by value, against NumPy; however the two are stored."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import samples
from hypothesis import given, settings, strategies as st

import mfload
from mfload import dtypes, errors
from mfload.io import buffers

MODEL = samples.model()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mfload.checking.scan.BLOCK", 10_000)


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "one.safetensors", MODEL)


def test_the_same_stored_otherwise(one: Path, tmp_path: Path) -> None:
    directory = tmp_path / "shards"
    directory.mkdir()
    names = list(reversed(MODEL))
    for n in range(3):
        some = {name: MODEL[name] for name in names[n::3]}
        samples.save(directory / f"x{n}.safetensors", some)
    for threads in (1, 5):
        found = mfload.diff(one, directory, options=mfload.Options(threads=threads))
        assert found.equal
        assert found.changed == ()
        assert {each.name for each in found.tensors} == set(MODEL)
        assert all(each.equal for each in found.tensors)
        assert found.read_bytes == 2 * sum(array.nbytes for array in MODEL.values())


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("wanted", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_against_numpy(wanted: Any, threads: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    ours = rng.normal(size=(57, 301)).astype(np.float32)
    theirs = (ours.astype(np.float64) + rng.normal(size=ours.shape) * 1e-3).astype(wanted)
    theirs[3:5] = ours[3:5].astype(wanted)
    a = samples.save(tmp_path / "a.safetensors", {"x": np.zeros(3), "w": ours})
    b = samples.save(tmp_path / "b.safetensors", {"w": theirs, "x": np.zeros(3)})
    (change, same) = mfload.diff(a, b, options=mfload.Options(threads=threads)).tensors
    gap = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
    size = np.maximum(np.abs(ours.astype(np.float64)), np.abs(theirs.astype(np.float64)))
    assert change.name == "w"
    assert not change.equal
    assert change.max_abs == gap.max()
    assert change.max_rel == (gap / size).max()
    assert change.differing == np.count_nonzero(gap)
    assert change.at == np.unravel_index(gap.argmax(), gap.shape)
    assert change.dtype_b == next(k for k, v in samples.NUMPY.items() if np.dtype(v) == wanted)
    assert (same.name, same.equal, same.max_abs) == ("x", True, 0)


@pytest.mark.parametrize(
    "kind",
    [np.float64, np.float32, np.float16, np.int8, np.int64, np.uint64, np.bool_, np.complex64,
     ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2],
)  # fmt: skip
@given(st.data())
@settings(max_examples=20)
def test_tolerances_are_those_of_isclose(kind: Any, data: Any) -> None:
    real = [0.0, -0.0, 1.0, 1.125, -1.125, 100.0, 2.0**62, np.nan, np.inf, -np.inf]
    values = st.sampled_from([v for v in real if np.dtype(kind).kind not in "iub" or abs(v) < 120])
    sides = [data.draw(st.lists(values, min_size=5, max_size=5)) for _ in "ab"]
    with np.errstate(all="ignore"):
        a, b = (np.asarray(side).astype(kind) for side in sides)
    rtol, atol = data.draw(st.tuples(*[st.sampled_from([0, 0.02, 0.2, 10.0])] * 2))
    found = mfload.diff({"x": a}, {"x": b}, rtol=rtol, atol=atol)
    wide = [x if x.dtype.kind in "fcbiu" else x.astype(np.float64) for x in (a, b)]
    if np.dtype(kind).kind in "biu":
        wide = [x.astype(np.float64) for x in wide]
    with np.errstate(all="ignore"):
        close = np.isclose(*[x.astype(complex) for x in wide], rtol, atol, equal_nan=True)
    assert found.tensors[0].differing == np.count_nonzero(~close)
    assert bool(found) is found.equal is found.tensors[0].equal is bool(close.all())


def test_tolerances_look_past_dtypes_and_not_past_shapes() -> None:
    a = {"w": np.linspace(0, 1, 1000, dtype=np.float32), "n": np.arange(5, dtype=np.int64)}
    b = {"w": a["w"].astype(ml_dtypes.bfloat16), "n": a["n"].astype(np.uint8)}
    assert not mfload.diff(a, b)
    assert not mfload.diff(a, b, rtol=0)
    assert mfload.diff(a, b, rtol=0.01)
    assert mfload.diff(a, b, atol=0.01).rows()[0][1] == "no difference by more than 0.01 + 0 * |b|"
    assert not mfload.diff(a, b | {"n": b["n"].reshape(5, 1)}, atol=9, rtol=9)
    assert not mfload.diff({"w": np.float32([-0.0])}, {"w": np.float32([0.0])})
    assert mfload.diff({"w": np.float32([-0.0])}, {"w": np.float32([0.0])}, atol=0)
    big = {"x": np.array([2**53, 2**63 - 1])}
    assert not mfload.diff(big, {"x": np.array([2**53 + 1, 2**63 - 1])}, atol=0)
    for wrong in (-1, float("nan"), float("inf"), "1", True):
        with pytest.raises(errors.UsageError, match=r"invalid [ra]tol"):
            mfload.diff(a, b, rtol=wrong)  # type: ignore[arg-type]


class TestArrays:
    def test_a_file_and_what_was_loaded_of_it(self, one: Path) -> None:
        loaded = mfload.load(one, "numpy")
        for sides in ((one, loaded), (loaded, one), (loaded, dict(reversed(loaded.items())))):
            for threads in (1, 4):
                found = mfload.diff(*sides, options=mfload.Options(threads=threads))
                assert found
                assert len(found.tensors) == len(MODEL)
        loaded["embed"] = loaded["embed"].copy()
        loaded["embed"].reshape(-1)[-1] += 1
        found = mfload.diff(one, loaded)
        assert [each.name for each in found.changed] == ["embed"]
        assert found.changed[0].at == tuple(n - 1 for n in MODEL["embed"].shape)

    def test_trees_are_named_as_save_names_them(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        tree = {"a": [rng.random((30, 40)), {"b": rng.random((3, 5)).T}], "step": 3}
        mfload.save(tree, tmp_path / "tree.safetensors")
        assert mfload.diff(tree, tmp_path / "tree.safetensors")
        assert mfload.diff(tree, tree).tensors[0].name == "a.0"
        assert mfload.diff([tree["a"][0]], (tree["a"][0],)).tensors[0].name == "0"
        assert not mfload.diff([np.ones(2)], [np.zeros(2)])
        assert mfload.diff(tree, {"a.0": tree["a"][0], "a.1.b": tree["a"][1]["b"]})

    def test_modules_are_named_as_save_names_them(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        module = torch.nn.Linear(3, 2)
        mfload.save(module, tmp_path / "module.safetensors")
        assert mfload.diff(module, tmp_path / "module.safetensors")
        assert not mfload.diff(module, torch.nn.Linear(3, 2))

    def test_copies_go_once_they_were_read(self) -> None:
        from mfload.checking import held

        arrays = {f"{n}": np.ones((300, 40), np.float32).T for n in range(5)}
        index, (source,) = held.read(arrays)
        for row in index.tensors.values():
            (piece,) = row.pieces
            for at in range(0, piece.nbytes, 8000):
                source.read(piece.offset + at, min(8000, piece.nbytes - at))
                assert len(source._copies) <= 1
        assert source._copies == {}

    def test_what_is_no_array_is_refused(self, one: Path) -> None:
        for wrong in ({"x": 1.0}, {"x": "text"}):
            with pytest.raises(errors.UnsupportedArrayError):
                mfload.diff(one, wrong)
        with pytest.raises(errors.UsageError, match="not a path"):
            mfload.diff(one, 3)


def test_names_dtypes_and_shapes(one: Path, tmp_path: Path) -> None:
    other = dict(MODEL)
    del other["odd"]
    other["more"] = np.zeros(3)
    other["wide"] = MODEL["wide"].reshape(-1)
    other["steps"] = MODEL["steps"].astype(np.float64)
    found = mfload.diff(one, samples.save(tmp_path / "two.safetensors", other))
    assert (found.only_a, found.only_b) == (("odd",), ("more",))
    assert not found.equal
    told = {each.name: each for each in found.changed}
    assert told.keys() == {"wide", "steps"}
    # What can't be compared comes first.
    assert found.tensors[0].name == "wide"
    assert told["wide"].shape_b == (300_002,)
    assert told["wide"].differing is told["wide"].max_abs is told["wide"].max_rel is None
    assert (told["steps"].dtype_a, told["steps"].dtype_b) == ("I64", "F64")


def test_the_largest_change_comes_first(tmp_path: Path) -> None:
    base = {name: np.zeros(4, np.float32) for name in "abcde"}
    other = {name: array.copy() for name, array in base.items()}
    other["b"][1] = 3
    other["c"][2] = np.nan
    other["d"][0] = -5
    other["e"][3] = -0.0
    a = samples.save(tmp_path / "a.safetensors", base)
    b = samples.save(tmp_path / "b.safetensors", other)
    found = mfload.diff(a, b)
    assert [each.name for each in found.tensors] == ["c", "d", "b", "e", "a"]
    nan, five, three, zero, same = found.tensors
    assert (nan.nans, nan.differing, nan.max_abs, nan.at) == (1, 1, 0, (2,))
    assert (five.max_abs, five.max_rel, five.at) == (5, 1, (0,))
    assert (three.max_abs, three.at) == (3, (1,))
    # Of another sign, and yet the same number.
    assert (zero.equal, zero.differing, zero.max_abs) == (False, 0, 0)
    assert same.equal
    assert [each.name for each in found.changed] == ["c", "d", "b", "e"]


@given(data=st.data())
@settings(max_examples=40)
def test_small_tensors_in_any_order(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("any")
    sizes = data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=25))
    ours = {f"t{n}": np.arange(size, dtype=np.int16) for n, size in enumerate(sizes)}
    theirs = {name: array.copy() for name, array in ours.items()}
    filled = sorted(name for name in ours if ours[name].size)
    for name in data.draw(st.lists(st.sampled_from(filled), unique=True)) if filled else ():
        theirs[name][data.draw(st.integers(0, theirs[name].size - 1))] += 7
    files = [ours, theirs]
    for n, side in enumerate(files):
        order = data.draw(st.permutations(list(side)))
        rows = [(name, "I16", side[name].shape, side[name].tobytes()) for name in order]
        samples.save_raw(directory / f"{n}.safetensors", rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mfload.checking.scan.BLOCK", data.draw(st.integers(16, 4000)))
        options = mfload.Options(threads=data.draw(st.integers(1, 3)))
        names = data.draw(st.lists(st.sampled_from(sorted(ours)), min_size=1, unique=True))
        paths = [directory / f"{n}.safetensors" for n in range(2)]
        found = mfload.diff(*paths, names=names, options=options)
    told = {each.name: (each.max_abs, each.differing, each.equal) for each in found.tensors}
    wanted = {}
    for name in names:
        changed = int(np.count_nonzero(ours[name] != theirs[name]))
        wanted[name] = (7 if changed else 0, changed, not changed)
    assert told == wanted


@pytest.mark.parametrize("shuffled", [False, True])
def test_files_are_opened_once_a_block(
    shuffled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not for each tensor."""
    names = [f"t{n}" for n in range(1000)]
    orders = [names, random.Random(0).sample(names, 1000) if shuffled else names]
    paths = [
        samples.save_raw(
            tmp_path / f"{n}.safetensors", [(name, "U8", (8,), b"8" * 8) for name in o]
        )
        for n, o in enumerate(orders)
    ]
    monkeypatch.setattr("mfload.checking.scan.BLOCK", 4000)
    opened: list[Any] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda *args: opened.append(args) or real(*args))
    assert mfload.diff(*paths, options=mfload.Options(threads=2)).equal
    # Headers, a reader a thread, and the other side for each of two blocks.
    assert len(opened) < 20


def test_packed_and_unknown_dtypes(tmp_path: Path) -> None:
    rows = [("f4", "F4", (3, 2), b"\x21\x43\x65"), ("new", "F5", (3,), b"xyz"),
            ("f8", "F8_E4M3", (2,), b"\x38\x40"), ("to", "F4", (2,), b"\x24")]  # fmt: skip
    others = [("f4", "F4", (3, 2), b"\x21\x73\x65"), ("new", "F5", (3,), b"xYz"),
              ("f8", "F8_E4M3", (2,), b"\x38\x44"),
              ("to", "F8_E4M3", (2,), b"\x40\x38")]  # fmt: skip
    a = samples.save_raw(tmp_path / "a.safetensors", rows)
    b = samples.save_raw(tmp_path / "b.safetensors", others)
    told = {each.name: each for each in mfload.diff(a, b).tensors}
    assert (told["f4"].max_abs, told["f4"].at, told["f4"].differing) == (4.0, (1, 1), 1)
    assert (told["f8"].max_abs, told["f8"].at) == (1.0, (1,))
    assert (told["to"].max_abs, told["to"].equal) == (0.0, False)
    new = told["new"]
    assert (new.differing, new.at, new.max_abs, new.nans) == (1, (1,), None, None)
    # Of an unknown dtype that became a known one, nothing can be said.
    c = samples.save_raw(tmp_path / "c.safetensors", [("new", "U8", (3,), b"xyz")])
    (change,) = mfload.diff(a, c, names=["new"]).tensors
    assert (change.equal, change.differing) == (False, None)


@pytest.mark.parametrize("dtype", ["F4", "F6_E3M2"])
def test_packed_elements_over_many_parts(dtype: str, tmp_path: Path) -> None:
    count = 40_000
    size = dtypes.TABLE[dtype].size_of((count,))
    ours = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    theirs = np.random.default_rng(2).integers(0, 256, size, np.uint8)
    a = samples.save_raw(tmp_path / "a.safetensors", [("w", dtype, (count,), ours.tobytes())])
    wide = mfload.unpack(theirs, dtype, (count,)).astype(np.float32)
    b = samples.save(tmp_path / "b.safetensors", {"w": wide})
    c = samples.save_raw(tmp_path / "c.safetensors", [("w", dtype, (count,), theirs.tobytes())])
    gap = np.abs(mfload.unpack(ours, dtype, (count,)).astype(np.float32) - wide)
    for other in (b, c):
        (change,) = mfload.diff(a, other).tensors
        assert change.differing == np.count_nonzero(gap)
        assert change.max_abs == gap.max()
        assert change.at == (gap.argmax(),)


def test_a_file_that_changes_meanwhile(one: Path, tmp_path: Path) -> None:
    two = samples.save(tmp_path / "two.safetensors", MODEL)
    for changed in (one, two):

        def change(done: int, total: int, path: Path = changed) -> None:
            # When all was read: nobody opens it any more.
            if done == total:
                os.utime(path, (1, 1))

        with pytest.raises(errors.SourceChangedError) as info:
            mfload.diff(one, two, progress=change)
        assert info.value.file == os.fspath(changed)


def test_which_tensors(one: Path, tmp_path: Path) -> None:
    two = samples.save(tmp_path / "two.safetensors", {"embed": MODEL["embed"], "b.x": np.zeros(1)})

    def names(given: Any) -> set[str]:
        found = mfload.diff(one, two, names=given)
        return {*found.only_a, *found.only_b, *(each.name for each in found.tensors)}

    assert names(r"layer\.0") == {"layer.0.q", "layer.0.norm"}
    assert names(re.compile("^(embed|b)")) == {"embed", "b.x"}
    assert names(["embed", "b.x", "odd"]) == {"embed", "b.x", "odd"}
    assert names(lambda name: name == "b.x") == {"b.x"}
    assert mfload.diff(one, two, names=["embed"]).equal
    for missing in ("zzz", ["embed", "zzz"]):
        with pytest.raises(errors.TensorNotFoundError):
            mfload.diff(one, two, names=missing)


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = np.zeros(4 << 20, np.uint8)
    a = samples.save(tmp_path / "a.safetensors", {"w": ours.view(ml_dtypes.float8_e4m3fn)})
    b = samples.save(tmp_path / "b.safetensors", {"w": ours.astype(np.float32)})
    monkeypatch.setattr("mfload.checking.scan.BLOCK", 1 << 20)
    buffers.peak_bytes(reset=True)
    assert mfload.diff(a, b, options=mfload.Options(threads=2)).tensors[0].max_abs == 0
    # Two slots a reader: a block of each, and pages for what is not aligned.
    assert buffers.peak_bytes() <= 2 * 2 * ((1 << 20) + 2 * 4096)


def test_what_can_t_be_read_is_an_error(one: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.SourceNotFoundError):
        mfload.diff(one, tmp_path / "none.safetensors")
    os.truncate(samples.save(tmp_path / "b.safetensors", MODEL), 1000)
    with pytest.raises(errors.HeaderError):
        mfload.diff(one, tmp_path / "b.safetensors")
    with pytest.raises(errors.UsageError):
        mfload.diff(one, one, options=mfload.Options(threads=0))


def test_a_file_that_fails_is_named(one: Path, tmp_path: Path,
                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    two = samples.save(tmp_path / "two.safetensors", MODEL)
    real = os.preadv

    def preadv(fd: int, *args: Any) -> int:
        try:
            if os.path.samestat(os.fstat(fd), os.stat(two)):
                raise OSError(5, "Input/output error")
            return real(fd, *args)
        finally:
            del args

    monkeypatch.setattr(os, "preadv", preadv)
    for left, right in ((one, two), (two, one)):
        with pytest.raises(errors.ReadError) as info:
            mfload.diff(left, right)
        assert info.value.file == os.fspath(two)


def test_it_shows_itself(one: Path, tmp_path: Path) -> None:
    other = {**MODEL, "odd": MODEL["odd"] + 1, "new<b>": np.zeros(1)}
    found = mfload.diff(one, samples.save(tmp_path / "two.safetensors", other))
    text, page = str(found), found._repr_html_()
    for part in ("they differ", "10 in both, 1 of them changed", "[3, 5, 7]", "max rel"):
        assert part in text
        assert part in page
    assert "only in b  1: new<b>" in text
    assert "<b>" not in page
    plain = found.as_dict()
    assert plain["equal"] is False
    assert json.loads(json.dumps(plain))["tensors"][0]["name"] == "odd"
    same = mfload.diff(one, one)
    assert "no difference" in str(same)
    assert "max rel" not in str(same)


@pytest.mark.parametrize("kind", ["deflated", "fortran", "both"])
def test_what_is_stored_otherwise_is_compared_within_the_limit(tmp_path: Path, kind: str) -> None:
    limit, array = 12 << 20, samples.numbers((3000, 4000), np.float32)
    a = samples.save(tmp_path / "a.safetensors", {"w": array})
    other = array.copy()
    other[2900, 3] += 1
    other = np.asfortranarray(other) if kind == "fortran" else other
    if kind == "fortran":
        np.save(tmp_path / "b.npy", other)
        b, name = tmp_path / "b.npy", "b"
        a = samples.save(tmp_path / "c.safetensors", {"b": array})
    else:
        np.savez_compressed(tmp_path / "b.npz", w=other)
        b, name = tmp_path / "b.npz", "w"
    if kind == "both":
        a = tmp_path / "a.npz"
        np.savez_compressed(a, w=array)
    options = mfload.Options(max_host_overhead=limit, threads=2)
    buffers.peak_bytes(reset=True)
    (change,) = mfload.diff(a, b, options=options).changed
    assert (change.name, change.differing, change.at) == (name, 1, (2900, 3))
    found = mfload.verify(a, against=b, checksums=False, options=options)
    assert buffers.peak_bytes() <= limit + (4 << 20)  # What decoders hold comes on top.
    assert "[2900, 3]" in str(found)
    assert not found.ok


@pytest.mark.parametrize("limit", [256 << 10, 1 << 20])
def test_a_small_limit_holds_for_what_is_stored_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    array, held = samples.numbers((100, 20_000), np.float32), dict[int, int]()
    np.save(tmp_path / "a.npy", array)
    (tmp_path / "other").mkdir()
    np.save(tmp_path / "other/a.npy", np.asfortranarray(array))
    give = buffers.WorkerSlot.bytes

    def given(slot: buffers.WorkerSlot, nbytes: int) -> Any:
        held[id(slot)] = max(nbytes, held.get(id(slot), 0))
        return give(slot, nbytes)

    monkeypatch.setattr(buffers.WorkerSlot, "bytes", given)
    options = mfload.Options(max_host_overhead=limit, threads=1)
    assert mfload.diff(tmp_path / "a.npy", tmp_path / "other/a.npy", options=options)
    assert 0 < sum(held.values()) <= limit + (16 << 10)  # The pages at the ends of slots.
