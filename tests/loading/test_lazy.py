"""Opened checkpoints: the shape of safetensors.safe_open, in threads, forks and pickles."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import samples
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as hnp

import mfload
from mfload import errors
from mfload.sources import local

MODEL = samples.model()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", MODEL, {"format": "pt", "ünï": "cödé"})


def test_it_answers_like_safe_open(path: Path) -> None:
    with safetensors.safe_open(path, "np") as theirs, mfload.open(path, "np") as ours:
        assert ours.keys() == theirs.keys()
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata()
        for name in theirs.keys():  # noqa: SIM118
            assert ours.get_slice(name).get_shape() == theirs.get_slice(name).get_shape()
            assert ours.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype()
            if name != "layer.0.q":  # Its bfloat16 is beyond their NumPy loader.
                assert samples.same(ours.get_tensor(name), theirs.get_tensor(name))
        # The signature differs (theirs takes no names); what it gives without any does not.
        everything = ours.get_tensors()
        assert list(everything) == theirs.offset_keys()
        samples.assert_same(everything, MODEL)
        for method in (name for name in dir(theirs) if not name.startswith("_")):
            assert callable(getattr(ours, method)), method


def test_no_metadata_is_none(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "a.safetensors", {"a": np.zeros(2)})
    with safetensors.safe_open(path, "np") as theirs, mfload.open(path) as ours:
        assert ours.metadata() is theirs.metadata() is None


def test_what_it_hands_out_is_its_own_no_more(path: Path) -> None:
    with mfload.open(path) as opened:
        opened.keys().clear()
        (opened.metadata() or {}).clear()
        opened.get_slice("embed").get_shape().clear()
        assert len(opened.keys()) == len(MODEL)
        assert opened.metadata()
        assert opened.get_slice("embed").get_shape() == [700, 129]


def test_it_is_a_collection(path: Path) -> None:
    opened = mfload.open(path)
    assert len(opened) == len(MODEL)
    assert list(opened) == opened.keys() == sorted(MODEL)
    assert "embed" in opened
    assert "nope" not in opened
    assert 5 not in opened
    assert opened.info("embed").shape == (700, 129)
    assert "10 tensors" in repr(opened)
    assert repr(opened.get_slice("embed")) == "<embed: F32 [700, 129], not read>"


def test_several_tensors_come_together(path: Path) -> None:
    with mfload.open(path) as opened:
        taken = opened.get_tensors(["odd", "embed", "odd"])
        assert list(taken) == ["odd", "embed"]
        samples.assert_same(taken, {name: MODEL[name] for name in taken})
        assert opened.get_tensors([]) == {}
        assert list(opened.get_tensors(iter(["scalar"]))) == ["scalar"]


@pytest.mark.parametrize("take", ["get_tensor", "get_slice", "info"])
def test_a_missing_name_is_an_error(path: Path, take: str) -> None:
    with mfload.open(path) as opened:
        with pytest.raises(errors.TensorNotFoundError, match="embed") as info:
            getattr(opened, take)("embde")
        assert info.value.tensor == "embde"
        with pytest.raises(KeyError):
            opened.get_tensors(["odd", "embde"])


def test_a_checkpoint_of_many_files_is_one(tmp_path: Path) -> None:
    names = list(MODEL)
    weights: dict[str, str] = {}
    for n in range(2):
        file = f"model-0000{n + 1}-of-00002.safetensors"
        samples.save(tmp_path / file, {x: MODEL[x] for x in names[n::2]}, {f"k{n}": "v"})
        weights |= dict.fromkeys(names[n::2], file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with mfload.open(tmp_path) as opened:
        assert opened.keys() == sorted(MODEL)
        assert opened.metadata() == {"k0": "v", "k1": "v"}
        samples.assert_same(opened.get_tensors(), MODEL)
        assert "2 files" in repr(opened)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("engine", ["pread", "direct", "mmap"])
def test_slices_are_numpys(path: Path, engine: Any, data: Any) -> None:
    name = data.draw(st.sampled_from(["embed", "layer.0.q", "odd", "mask", "wide", "scalar"]))
    array = MODEL[name]
    index = data.draw(hnp.basic_indices(array.shape, allow_ellipsis=True))
    with mfload.open(path, options=mfload.Options(engine=engine)) as opened:
        assert samples.same(opened.get_slice(name)[index], np.asarray(array[index]))


def test_a_closed_checkpoint_gives_no_more(path: Path) -> None:
    with mfload.open(path) as opened:
        kept = opened.get_tensor("embed")
        part = opened.get_slice("wide")
    for take in (
        lambda: opened.get_tensor("embed"),
        lambda: opened.get_tensors(["odd"]),
        lambda: part[0],
        lambda: pickle.loads(pickle.dumps(opened)).get_tensor("odd"),
    ):
        with pytest.raises(errors.UsageError, match="closed") as info:
            take()
        assert info.value.file == os.fspath(path)
    opened.close()
    # What was taken before lives on, also without the file.
    path.unlink()
    assert samples.same(kept, MODEL["embed"])


def test_a_file_that_was_replaced_is_noticed(path: Path) -> None:
    opened = mfload.open(path)
    part = opened.get_slice("wide")
    assert samples.same(part[0], MODEL["wide"][0])
    other = samples.save(path.with_name("other"), {**MODEL, "wide": np.zeros_like(MODEL["wide"])})
    os.replace(other, path)
    for take in (lambda: part[0], lambda: opened.get_tensor("odd"), opened.get_tensors):
        with pytest.raises(errors.SourceChangedError) as info:
            take()
        assert info.value.file == os.fspath(path)
    with pytest.raises(errors.SourceChangedError):
        pickle.loads(pickle.dumps(opened))
    assert mfload.live_bytes() == 0


def test_several_threads_share_one(path: Path) -> None:
    opened = mfload.open(path)
    names = list(MODEL)
    wrong: list[str] = []
    barrier = threading.Barrier(6)

    def work(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(names) * 3)
        barrier.wait(10)
        for n in order:
            name = names[n % len(names)]
            part = opened.get_slice(name)[...] if seed % 2 else opened.get_tensor(name)
            if not samples.same(part, MODEL[name]):
                wrong.append(name)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert wrong == []


def test_it_survives_a_pickle(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = mfload.open(path, options=mfload.Options(engine="direct", threads=2, timeout=60))
    again = pickle.loads(pickle.dumps(opened))
    assert again.keys() == opened.keys()
    assert again.metadata() == opened.metadata()
    samples.assert_same(again.get_tensors(), MODEL)
    assert again._arguments == opened._arguments
    assert repr(again) == repr(opened)


@pytest.mark.parametrize("field", ["st_dev", "st_ino", "st_mtime_ns"])
def test_a_pickle_is_opened_where_devices_have_other_numbers(
    field: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another mount numbers its device differently; any other difference is another file."""
    sent = pickle.dumps(mfload.open(path))

    def seen(status: os.stat_result) -> list[int]:
        fields = ("st_ino", "st_size", "st_mtime_ns", "st_dev")
        return [getattr(status, each) + (each == field) for each in fields]

    monkeypatch.setattr(local, "_IDENTITY", seen)
    if field == "st_dev":
        samples.assert_same(pickle.loads(sent).get_tensors(), MODEL)
    else:
        with pytest.raises(errors.SourceChangedError) as caught:
            pickle.loads(sent)
        assert caught.value.file == os.fspath(path)


def test_a_pickle_is_small_and_holds_no_data(path: Path) -> None:
    assert len(pickle.dumps(mfload.open(path))) < 1000


FORKED = """
    import os, sys, threading
    import mfload

    opened = mfload.open(sys.argv[1], options=mfload.Options(engine=sys.argv[2]))
    part = opened.get_slice("wide")
    expected = opened.get_tensor("embed").tobytes(), part[1, 5:9].tobytes()

    # Another thread is in the middle of loads when the process forks.
    stop = threading.Event()
    def work():
        while not stop.is_set():
            opened.get_tensors()
    worker = threading.Thread(target=work)
    worker.start()

    children = []
    for _ in range(8):
        child = os.fork()
        if child == 0:
            found = opened.get_tensor("embed").tobytes(), part[1, 5:9].tobytes()
            os._exit(0 if found == expected else 1)
        children.append(child)
    found = opened.get_tensor("embed").tobytes(), part[1, 5:9].tobytes()
    assert found == expected
    codes = [os.waitpid(child, 0)[1] for child in children]
    stop.set()
    worker.join()
    print(codes)
"""


@pytest.mark.parametrize("engine", ["pread", "direct", "mmap"])
def test_parent_and_children_of_a_fork_use_it(path: Path, engine: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORKED), path, engine],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (found.returncode, found.stdout.strip()) == (0, str([0] * 8)), found.stderr


_held: Any = None


def _hold(opened: Any) -> None:
    global _held
    _held = opened


def _take(name: str) -> bytes:
    return _held.get_tensor(name).tobytes() + _held.get_slice(name)[...].tobytes()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_workers_of_a_pool_use_it(path: Path, method: str) -> None:
    names = list(MODEL)
    opened = mfload.open(path)
    context = multiprocessing.get_context(method)
    with context.Pool(2, initializer=_hold, initargs=(opened,)) as pool:
        for name, found in zip(names, pool.map(_take, names), strict=True):
            assert found == MODEL[name].tobytes() * 2


def test_arrays_live_on_after_exit_of_all(path: Path) -> None:
    code = """
        import atexit, sys, mfload
        with mfload.open(sys.argv[1]) as opened:
            kept = opened.get_tensor("embed"), opened.get_slice("wide")[0, 7:9000]
        atexit.register(lambda: print(kept[1].size, kept[0].tobytes()[:4].hex()))
        del opened, mfload
    """
    found = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(code), path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == f"8993 {MODEL['embed'].tobytes()[:4].hex()}"


def test_a_load_at_exit_works(path: Path) -> None:
    code = """
        import atexit, sys, mfload
        opened = mfload.open(sys.argv[1], options=mfload.Options(threads=2))
        atexit.register(lambda: print(len(opened.get_tensors())))
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (found.returncode, found.stdout.strip()) == (0, "10"), found.stderr


def test_opening_reads_headers_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    real = os.pread

    def pread(fd: int, nbytes: int, offset: int) -> bytes:
        nonlocal read
        data = real(fd, nbytes, offset)
        read += len(data)
        return data

    def refuse(*_: Any) -> int:
        raise AssertionError("data was read")

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(os, "preadv", refuse)
    opened = mfload.open(path)
    part = opened.get_slice("embed")
    assert part.get_shape() == [700, 129]
    mfload.plan(path)
    assert 0 < read <= 2 * (path.stat().st_size - sum(a.nbytes for a in MODEL.values()))


@pytest.mark.parametrize("engine", ["pread", "direct"])
@pytest.mark.parametrize(
    "index",
    [
        (slice(None), slice(8, 16)), (slice(3, 500, 50), slice(None)), (5, 7), (-1,),
        (slice(None, None, -100), slice(100, 2, -9)), (slice(10, 20), slice(1000, 3000)),
    ],
    ids=str,
)  # fmt: skip
def test_a_slice_reads_no_page_that_it_does_not_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any, index: Any
) -> None:
    array = samples.numbers((600, 3000), np.float32)
    path = samples.save(tmp_path / "a.safetensors", {"a": array})
    start = path.stat().st_size - array.nbytes
    positions = np.arange(array.size).reshape(array.shape)[index].reshape(-1) * 4 + start
    pages = set((positions // 4096).tolist()) | set(((positions + 3) // 4096).tolist())
    seen: set[int] = set()
    real = os.preadv

    def preadv(fd: int, vector: list[Any], offset: int) -> int:
        got = real(fd, vector, offset)
        seen.update(range(offset // 4096, -(-(offset + got) // 4096)))
        return got

    monkeypatch.setattr(os, "preadv", preadv)
    with mfload.open(path, options=mfload.Options(engine=engine)) as opened:
        assert samples.same(opened.get_slice("a")[index], np.asarray(array[index]))
    assert seen == pages


def test_a_closed_checkpoint_raises_whatever_is_asked(path: Path) -> None:
    with mfload.open(path) as opened:
        part = opened.get_slice("embed")
        info = opened.info("embed")
        assert opened.keys()
    for ask in (
        opened.keys,
        opened.offset_keys,
        opened.metadata,
        opened.get_tensors,
        lambda: opened.get_tensor("embed"),
        lambda: opened.get_slice("embed"),
        lambda: opened.info("embed"),
        lambda: part[0],
        lambda: len(opened),
        lambda: list(opened),
        lambda: "embed" in opened,
        lambda: opened.file_of(info),
        opened.__enter__,
    ):
        with pytest.raises(errors.UsageError, match="closed"):
            ask()
    assert "mfload checkpoint" in repr(opened)
