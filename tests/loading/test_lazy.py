"""Opened checkpoints: the shape of safetensors.safe_open, in threads, forks and pickles."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import samples
import watch
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as hnp

import mfload
from mfload import dtypes, errors
from mfload.index import Piece, TensorInfo
from mfload.io import buffers
from mfload.loading.session import Loader
from mfload.planning.slicing import runs
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
        with pytest.raises(errors.TensorNotFoundError, match="no such tensor"):
            getattr(opened, take)(["embed"])
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
    assert again._asked == opened._asked
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
    assert 0 < read <= 2 * 4096  # A short header is one read.


@pytest.mark.parametrize("engine", ["pread", "direct"])
@pytest.mark.parametrize(
    "index",
    [
        (slice(None), slice(None, 2500)), (slice(3, 500, 50), slice(None)), (5, 7), (-1,),
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
    monkeypatch.setattr("mfload.io.pread._ROWS_A_MAP", 1 << 60)
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


def _no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a session was made")

    monkeypatch.setattr(Loader, "load", refuse)


@pytest.mark.parametrize("engine", ["auto", "pread", "mmap"])
def test_a_small_part_takes_one_read_or_one_view(
    path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    _no_session(monkeypatch)
    with watch.nothing_left(), monkeypatch.context() as patch:
        opened = mfload.open(path, options=mfload.Options(engine=engine))
        reads = watch.spy(patch)
        parts = opened.get_slice("embed")
        for index in (5, -1, np.int64(699), (3, slice(4, 100)), slice(7, 9), (2, 128), (4, ...)):
            reads.clear()
            found = parts[index]
            assert samples.same(found, np.asarray(MODEL["embed"][index]))
            assert [read.nbytes for read in reads] == ([] if engine == "mmap" else [found.nbytes])
            assert found.flags.writeable == (engine != "mmap")
        for name in ("scalar", "layer.0.q", "mask"):
            assert samples.same(opened.get_tensor(name), MODEL[name])
        del found
        assert mfload.live_bytes() == 0
        opened.close()
        del opened, parts


def test_small_parts_share_one_map_and_larger_ones_have_their_own(tmp_path: Path) -> None:
    arrays = {"small": np.zeros(9, np.int32), "large": np.zeros((2, 1 << 20), np.uint8)}
    path = samples.save(tmp_path / "m", arrays)

    def maps() -> int:
        return Path("/proc/self/maps").read_text().count(os.fspath(path))

    with mfload.open(path, options=mfload.Options(engine="mmap")) as opened:
        parts = [opened.get_tensor("small"), opened.get_tensor("small")]
        parts += [opened.get_slice("large")[0], opened.get_slice("small")[2:]]
        assert maps() == 1
        assert np.shares_memory(parts[0], parts[1])
        both = opened.get_tensor("large"), opened.get_tensor("large")
        assert maps() == 3
        assert not np.shares_memory(*both)
        assert not any(part.flags.writeable for part in (*parts, *both))


@pytest.mark.parametrize(
    ("width", "index", "count"),
    [
        (64, np.s_[:, :16], 1),  # Columns that lie closer than 64 KiB: with what is between.
        (64, np.s_[::2, ::3], 1),
        (20_000, np.s_[:50, :16], 50),  # Farther apart.
        (50_000, np.s_[:4, :40_000], 1),  # Long ones.
        (64, np.s_[::2], 250),  # Rows of which there are up to 256.
        (64, [5, 0, 7], 3),
        (64, np.s_[100:300], 1),
    ],
)
def test_parts_take_so_many_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, index: Any, count: int
) -> None:
    array = samples.numbers((500, width), np.float32)
    path = samples.save(tmp_path / "m", {"a": array})
    with mfload.open(path) as opened, monkeypatch.context() as patch:
        reads = watch.spy(patch)
        assert samples.same(opened.get_slice("a")[index], np.asarray(array[index]))
        assert len(reads) == count


def test_what_is_not_aligned_in_the_file_is_not_mapped(tmp_path: Path) -> None:
    """A framework may crash on a float at an odd address."""
    data = np.arange(67, dtype=np.uint8).tobytes()
    rows = [("a", "U8", (3,), data[:3]), ("b", "F32", (4, 4), data[3:])]
    path = samples.save_raw(tmp_path / "odd.safetensors", rows)
    expected = np.frombuffer(data[3:], np.float32).reshape(4, 4)
    with mfload.open(path, options=mfload.Options(engine="mmap")) as opened:
        for found in (opened.get_tensor("b"), opened.get_slice("b")[2], opened.get_slice("b")[1:3]):
            assert found.flags.aligned
        assert samples.same(opened.get_tensor("b"), expected)
        assert samples.same(opened.get_slice("b")[1:3], expected[1:3])
        assert not opened.get_tensor("a").flags.writeable


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_lies_in_runs_is_found(data: Any) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    index = data.draw(hnp.basic_indices(shape, allow_ellipsis=True))
    if shape and shape[0] and data.draw(st.integers(0, 3)) == 0:
        numbers = data.draw(st.lists(st.integers(-shape[0], shape[0] - 1), max_size=4))
        rest = data.draw(hnp.basic_indices(shape[1:], allow_ellipsis=True))
        index = (numbers, *(rest if isinstance(rest, tuple) else (rest,)))
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    dtype = dtypes.TABLE["F32"]
    info = TensorInfo("a", dtype, shape, (Piece(0, 0, array.nbytes),))
    found = runs(info, index)
    items = index if isinstance(index, tuple) else (index,)
    taken = np.asarray(array[tuple(np.array(n, int) if type(n) is list else n for n in items)])
    flat = taken.reshape(-1)
    if found is None:
        # Nothing, or no range; or an Ellipsis before others, which `select` is to read.
        steps = any(isinstance(each, slice) and each.step not in (None, 1) for each in items)
        listed = any(isinstance(each, list) for each in items)
        ahead = ... in [each for each in items[:-1] if each is ...]
        assert steps or listed or ahead or not taken.size or np.any(np.diff(flat) != 1)
    else:
        starts, nbytes, result = found
        assert result == taken.shape
        held = b"".join(array.tobytes()[start:][:nbytes] for start in starts)
        assert held == taken.tobytes()


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_apart_are_read_one_by_one(path: Path, data: Any) -> None:
    """Of long rows and of short ones, by lists and by steps, in any order and more than once."""
    name = data.draw(st.sampled_from(["embed", "layer.0.q", "odd", "wide", "mask"]))
    array = MODEL[name]
    length = array.shape[0]
    numbers = data.draw(st.lists(st.integers(-length, length - 1), min_size=1, max_size=20))
    index = data.draw(
        st.one_of(
            st.sampled_from([numbers, np.array(numbers, np.int64), (numbers, ...)]),
            hnp.basic_indices(array.shape, max_dims=1, allow_ellipsis=False),
        )
    )
    with mfload.open(path) as opened:
        found = opened.get_slice(name)[index]
    assert samples.same(found, np.asarray(array[index]))


def test_a_small_part_needs_no_session(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_session(monkeypatch)
    with mfload.open(path) as opened:
        part, array = opened.get_slice("embed"), MODEL["embed"]
        lists: list[Any] = [[5, 0, -1, 5], np.array([699, 3]), ([7, 2, 2], slice(1, 3))]
        for index in (*lists, np.s_[600:20:-200], np.s_[::2], np.s_[:, 1:2], np.s_[::-1, 1]):
            assert samples.same(part[index], np.asarray(array[index]))


def test_what_is_asked_for_otherwise_takes_the_long_way(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = samples.save(tmp_path / "large", {"a": np.zeros((3, 1 << 19), np.float32)})
    _no_session(monkeypatch)
    for options in (
        mfload.Options(engine="direct"),
        mfload.Options(timeout=60, engine="mmap"),
        mfload.Options(allocator="framework"),
        mfload.Options(page_cache="bypass"),
    ):
        with (
            mfload.open(path, options=options) as opened,
            pytest.raises(AssertionError, match="session"),
        ):
            opened.get_slice("embed")[0]
    with (
        mfload.open(path, device=["cpu", "cpu"]) as opened,
        pytest.raises(AssertionError, match="session"),
    ):
        opened.get_tensor("odd")
    with mfload.open(large) as opened, pytest.raises(AssertionError, match="session"):
        opened.get_slice("a")[1]


@pytest.mark.parametrize("engine", ["auto", "mmap"])
@pytest.mark.parametrize("error", [0, errno.EAGAIN, errno.EOPNOTSUPP])
def test_with_a_timeout_what_is_cached_is_read_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: int, engine: Any
) -> None:
    real = os.preadv

    def preadv(fd: int, vector: Any, offset: int, *flags: int) -> int:
        if flags and error:
            raise OSError(error, os.strerror(error))
        return real(fd, vector, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    options = mfload.Options(timeout=60, engine=engine)
    with mfload.open(path, options=options) as opened:
        assert samples.same(opened.get_slice("embed")[3], MODEL["embed"][3])  # Opens the file.
        columns = opened.get_slice("embed")[:, 1:2]
        if not error:
            _no_session(monkeypatch)
        assert samples.same(opened.get_slice("embed")[3], MODEL["embed"][3])
        assert samples.same(opened.get_tensor("odd"), MODEL["odd"])
        if engine == "auto":
            assert samples.same(opened.get_slice("embed")[:, 1:2], columns)


def test_files_stay_open_until_it_is_closed(path: Path) -> None:
    real = os.path.realpath(path)
    with watch.nothing_left():
        opened = mfload.open(path)
        assert real not in watch.open_files()
        opened.get_slice("embed")[3]
        opened.get_tensors()
        opened.get_slice("wide")[:, 5]
        assert watch.open_files().count(real) == 1
        again = pickle.loads(pickle.dumps(opened))
        again.get_tensor("odd")
        assert watch.open_files().count(real) == 2
        del again
        assert watch.open_files().count(real) == 1
        opened.close()
        opened.close()


def _rewritten(path: Path) -> None:
    path.write_bytes(path.read_bytes())


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _replaced(path: Path) -> None:
    os.replace(samples.save(path.with_name("other"), MODEL), path)


def _linked_elsewhere(path: Path) -> None:
    other = samples.save(path.with_name("other"), MODEL)
    path.unlink()
    path.symlink_to(other)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "change", [_rewritten, _cut, _replaced, _linked_elsewhere, _fifo, os.remove]
)
@pytest.mark.parametrize("engine", ["pread", "mmap", "direct"])
def test_each_request_sees_that_a_kept_file_changed(path: Path, engine: Any, change: Any) -> None:
    with watch.nothing_left(), mfload.open(path, options=mfload.Options(engine=engine)) as opened:
        part = opened.get_slice("wide")
        kept = part[0].copy()
        time.sleep(0.02)  # Longer than the system's clock stands still.
        change(path)
        for take in (lambda: part[0], lambda: part[-1], lambda: opened.get_tensor("scalar"),
                     lambda: part[:, 3], lambda: part[[1, 0]]):  # fmt: skip
            with pytest.raises((errors.SourceChangedError, errors.SourceNotFoundError)) as info:
                take()
            assert info.value.file == os.fspath(path)
            del info
        assert samples.same(kept, MODEL["wide"][0])


def test_a_small_read_that_fails_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with watch.nothing_left():
        opened = mfload.open(path)
        opened.get_tensor("odd")

        def fail(*_: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            with pytest.raises(errors.ReadError) as info:
                opened.get_tensor("odd")
        assert (info.value.file, info.value.tensor) == (os.fspath(path), "odd")
        assert info.value.errno == errno.EIO

        def full(*_: Any) -> Any:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(buffers, "small", full)
            with pytest.raises(errors.MemoryLimitError) as refused:
                opened.get_slice("wide")[0]
        assert (refused.value.file, refused.value.tensor) == (os.fspath(path), "wide")
        # An error that is kept keeps no file open.
        opened.close()


def test_a_request_that_is_under_way_when_it_is_closed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptor stays until the read has ended, whatever is opened meanwhile."""
    others: list[int] = []
    with watch.nothing_left():
        opened = mfload.open(path)
        opened.get_tensor("odd")
        decoy = tmp_path / "decoy"
        decoy.write_bytes(bytes(path.stat().st_size))

        def close(_: int) -> None:
            if not others:
                opened.close()
                others.extend(os.open(decoy, os.O_RDONLY) for _ in range(3))

        with monkeypatch.context() as patch:
            watch.before_read(patch, close)
            assert samples.same(opened.get_tensor("embed"), MODEL["embed"])
        assert others
        with pytest.raises(errors.UsageError, match="closed"):
            opened.get_tensor("embed")
        for each in others:
            os.close(each)


@pytest.mark.parametrize("engine", ["auto", "mmap"])
def test_threads_that_read_while_it_is_closed_read_nothing_else(
    path: Path, tmp_path: Path, engine: Any
) -> None:
    decoy = tmp_path / "decoy"
    decoy.write_bytes(bytes(path.stat().st_size))
    expected = MODEL["wide"]
    with watch.nothing_left():
        for _ in range(20):
            opened = mfload.open(path, options=mfload.Options(engine=engine))
            part = opened.get_slice("wide")
            outcomes: list[str] = []
            barrier = threading.Barrier(5)

            def read(part: Any = part, outcomes: Any = outcomes, barrier: Any = barrier) -> None:
                barrier.wait(10)
                try:
                    for n in range(100_000):
                        if not samples.same(part[n % 2, :999], expected[n % 2, :999]):
                            outcomes.append("wrong")
                            return
                except errors.UsageError as error:
                    outcomes.append(error.message)

            threads = [threading.Thread(target=read) for _ in range(4)]
            for thread in threads:
                thread.start()
            barrier.wait(10)
            time.sleep(0.005)
            opened.close()
            others = [os.open(decoy, os.O_RDONLY) for _ in range(5)]
            for thread in threads:
                thread.join()
            for each in others:
                os.close(each)
            assert outcomes == ["the checkpoint was closed"] * 4
        del opened, part, read


def test_more_shards_than_may_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        samples.save(tmp_path / f"{n}.safetensors", {f"w{n}": np.full((4, 8), n, np.float32)})
        for n in range(30)
    ]
    monkeypatch.setattr(local, "_most_kept", lambda: 5)
    with watch.nothing_left():
        before = len(watch.open_files())
        opened = mfload.open(files)
        for n in [*range(30), *range(30)]:
            assert opened.get_slice(f"w{n}")[2].tolist() == [n] * 8
            assert len(watch.open_files()) <= before + 5
        assert len(opened.get_tensors()) == 30
        assert len(watch.open_files()) <= before + 5
        opened.close()


FOUR = """
    import os, sys
    import mfload

    def kept():
        links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return [os.readlink(link) for link in links if os.path.exists(link)].count(sys.argv[1])

    opened = mfload.open(sys.argv[1])
    part = opened.get_slice("embed")
    rows = [part[n].tobytes() for n in range(700)]
    assert kept() == 1
    children = []
    for worker in range(4):
        child = os.fork()
        if child == 0:
            code = 0 if kept() == 0 else 2
            for n in range(worker, 700, 4):
                if part[n].tobytes() != rows[n]:
                    code = 3
            code = code or (0 if kept() == 1 else 4)
            if worker % 2:
                opened.close()
                code = code or (0 if kept() == 0 else 5)
            os._exit(code)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] >> 8 for child in children]
    assert part[3].tobytes() == rows[3] and kept() == 1
    opened.close()
    print(codes, kept())
"""


def test_four_forked_workers_open_their_own(path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FOUR), os.path.realpath(path)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (found.returncode, found.stdout.strip()) == (0, "[0, 0, 0, 0] 0"), found.stderr
