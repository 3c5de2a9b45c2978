"""`save(..., background=True)`: what the file holds, errors, turns, the exit, forks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as arrays_of

import mfload
from mfload import errors
from mfload.io import buffers
from mfload.runtime import Deadline
from mfload.saving import background, drafts, export, layout
from mfload.saving.background import PendingSave, Snapshot, Work

SECONDS = 60


class Gate:
    """A function for `progress` that stops the thread that saves until the gate is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None

    def __call__(self, done: int, whole: int) -> None:
        self.thread = threading.current_thread()
        self.reached.set()
        assert self.opened.wait(SECONDS)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    for each in list(background._pending.values()):
        each.wait(Deadline(SECONDS))
    assert not background._pending
    background._untold.clear()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(_: drafts.Draft) -> None:
        raise errors.WriteError("full", file="here") from OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(drafts.Draft, "sync", sync)


def _load(path: Path) -> dict[str, Any]:
    return mfload.load(path, "numpy")


class TestWhatIsSaved:
    def test_a_result_with_what_it_took(self, tmp_path: Path) -> None:
        given = {"a": np.arange(1000.0), "b": np.zeros((3, 0)), "c": np.int8(7)}
        pending = mfload.save(given, tmp_path / "a.safetensors", background=True)
        assert isinstance(pending, PendingSave)
        saved = pending.result(SECONDS)
        assert pending.done()
        assert pending.exception() is None
        assert saved.blocked is not None
        assert 0 < saved.blocked < saved.seconds
        assert (saved.copied, saved.held, saved.tensors) == (8001, 0, 3)
        assert "7.813 KiB copied, 0 B held" in str(saved)
        assert saved.as_dict()["blocked"] == saved.blocked
        plain = mfload.save(given, tmp_path / "b.safetensors")
        assert plain.blocked is None
        assert "blocked" not in str(plain)
        assert saved.as_dict().keys() - plain.as_dict().keys() == {"blocked", "copied", "held"}
        assert (tmp_path / "a.safetensors").read_bytes() == Path(plain.files[0]).read_bytes()

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_arrays_that_change_right_after_are_saved_as_they_were(
        self, tmp_path: Path, data: st.DataObject
    ) -> None:
        shapes = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)
        kinds = st.sampled_from(["<f4", ">f4", "<i8", ">i2", "u1", "?", "<f2"])
        given: dict[str, Any] = {}
        for number in range(data.draw(st.integers(1, 5))):
            array = data.draw(arrays_of.arrays(data.draw(kinds), data.draw(shapes)))
            if array.ndim and data.draw(st.booleans()):
                array = array[::2].T
            given[f"t{number}"] = array
        large = np.random.default_rng(0).random(data.draw(st.sampled_from([0, 1, 70_000, 700_000])))
        given["large"] = large
        given["shares"] = large[1:]
        wanted = {name: np.array(array) for name, array in given.items()}
        path, limit = tmp_path / "all.safetensors", data.draw(st.sampled_from([None, 200_000]))
        pending = mfload.save(
            given, path, background=True, overwrite=True, max_shard_size=limit, align=8
        )
        for array in given.values():
            array[...] = 1 if array.dtype == bool else 99
        del given, array, large
        assert pending.result(SECONDS).tensors == len(wanted)
        found = _load(Path(pending.result().files[-1]))
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array)

    def test_large_tensors_lie_as_the_disk_takes_them(self, tmp_path: Path) -> None:
        given = {"odd": np.ones(3, np.uint8), "a": np.ones(1 << 20), "b": np.ones(1 << 19)}
        made = layout.lay_out(export.export(given))
        snapshot = Snapshot()
        (kept,) = snapshot.keep([made], ())
        offset = len(kept.header)
        for row in kept.entries:
            data = row.fetch()
            assert (data.ctypes.data - offset) % buffers.PAGE == 0
            offset += data.nbytes

    def test_arrays_are_let_go(self, tmp_path: Path, gate: Gate) -> None:
        array = np.ones((600, 1000))
        gone, turned = weakref.ref(array), array.T
        pending = mfload.save(
            {"a": array, "b": turned}, tmp_path / "a/", background=True, progress=gate
        )
        assert gate.reached.wait(SECONDS)
        del array, turned
        gc.collect()
        assert gone() is None
        gate.opened.set()
        pending.result(SECONDS)

    def test_what_devices_give_is_not_copied_again(self) -> None:
        row = export.TensorToSave(
            "d", mfload.dtypes.TABLE["U8"], (64 << 20,), 64 << 20, None, lambda: fresh
        )
        fresh = np.zeros(64 << 20, np.uint8)
        snapshot = Snapshot()
        before = mfload.live_bytes()
        (kept,) = snapshot.keep([layout.lay_out([row])], ())
        assert kept.entries[0].fetch() is fresh
        assert (snapshot.copied, snapshot.held) == (64 << 20, 0)
        assert mfload.live_bytes() == before

    def test_checksums_and_trees(self, tmp_path: Path) -> None:
        tree = {"params": [np.ones(3), {"x": np.zeros((2, 2))}], "step": 7}
        pending = mfload.save(tree, tmp_path / "a.safetensors", background=True, checksums="xxh3")
        tree["params"][0][:] = 5
        assert any("checksums written" in note for note in pending.result(SECONDS).notes)
        assert mfload.verify(tmp_path / "a.safetensors", mode="check").ok
        found = mfload.restore(tmp_path / "a.safetensors", framework="numpy")
        assert found["step"] == 7
        assert found["params"][0].tolist() == [1, 1, 1]

    def test_memory_serves_again(self, tmp_path: Path) -> None:
        array = np.arange(5 << 20, dtype=np.float64)
        background._spare.clear()
        seen = []
        for step in range(3):
            array[0] = step
            mfload.save({"a": array}, tmp_path / "a/", background=True, overwrite=True).result()
            assert _load(tmp_path / "a/")["a"][0] == step
            seen.append(background._spare[0].ctypes.data)
        assert len(set(seen)) == 1
        assert len(background._spare) == 1
        small = np.ones(9)
        mfload.save({"a": small}, tmp_path / "b/", background=True).result()
        assert background._spare[0].ctypes.data == seen[0]
        background._spare.clear()
        gc.collect()

    def test_progress_is_told_in_the_named_thread(self, tmp_path: Path, gate: Gate) -> None:
        gate.opened.set()
        path = tmp_path / "named.safetensors"
        mfload.save({"a": np.ones(9)}, path, background=True, progress=gate).result(SECONDS)
        assert gate.thread is not None
        assert gate.thread.name == "mfload save named.safetensors"
        assert not gate.thread.daemon


class TestErrors:
    def test_arguments_at_once(self, tmp_path: Path) -> None:
        mfload.save({"a": np.ones(3)}, tmp_path / "there.safetensors")
        save: Any = partial(mfload.save, background=True)
        good = {"a": np.ones(3)}
        with pytest.raises(errors.TargetExistsError):
            save(good, tmp_path / "there.safetensors")
        with pytest.raises(errors.UsageError, match="align"):
            save(good, tmp_path / "a.safetensors", align=3)
        with pytest.raises(errors.UsageError, match="timeout"):
            save(good, tmp_path / "a.safetensors", timeout=-1)
        with pytest.raises(errors.UnsupportedArrayError):
            save({"a": object()}, tmp_path / "a.safetensors")
        with pytest.raises(errors.UsageError, match="checksums"):
            save(good, tmp_path / "a.safetensors", checksums="md5")
        with pytest.raises(errors.UsageError):
            save(good, tmp_path / "a.pt")
        with pytest.raises(errors.UsageError, match="shards need a name"):
            save({**good, "b": np.ones(3)}, tmp_path / "a", max_shard_size=4)
        assert not background._pending
        save(good, tmp_path / "a.safetensors").result(SECONDS)

    @pytest.mark.usefixtures("full_disk")
    def test_of_the_writing_by_result(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        pending = mfload.save({"a": np.ones(3)}, tmp_path / "a.safetensors", background=True)
        with pytest.raises(errors.WriteError, match="full"):
            pending.result(SECONDS)
        assert isinstance(pending.exception(), errors.WriteError)
        assert not list(tmp_path.iterdir())
        assert "a save in the background failed" in caplog.text
        with pytest.raises(errors.WriteError):  # Its own: the first one's is known.
            mfload.save({"a": np.ones(3)}, tmp_path / "b.safetensors")

    @pytest.mark.parametrize("again", [True, False])
    def test_that_nothing_asked_for_by_the_next_save(
        self, tmp_path: Path, full_disk: None, monkeypatch: pytest.MonkeyPatch, again: bool
    ) -> None:
        pending = mfload.save({"a": np.ones(3)}, tmp_path / "a.safetensors", background=True)
        concurrent.futures.wait([pending], SECONDS)
        monkeypatch.undo()
        with pytest.raises(errors.WriteError) as caught:
            mfload.save({"a": np.ones(3)}, tmp_path / "b.safetensors", background=again)
        assert "a.safetensors" in caught.value.__notes__[0]
        assert not list(tmp_path.iterdir())
        mfload.save({"a": np.ones(3)}, tmp_path / "b.safetensors")

    def test_hold_no_arrays(self, tmp_path: Path, full_disk: None) -> None:
        array = np.ones(5 << 20)
        background._spare.clear()
        gc.collect()
        before = mfload.live_bytes()
        pending = mfload.save({"a": array}, tmp_path / "a.safetensors", background=True)
        assert pending.exception(SECONDS) is not None
        background._spare.clear()
        assert mfload.live_bytes() == before

    def test_before_the_first_write_hold_no_arrays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(drafts, "allocate_file", refuse)
        pending = PendingSave()
        gone: list[weakref.ref[Any]] = []

        class Owner(np.ndarray):
            pass

        def keep(row: export.TensorToSave, place: int | None, copies: Any) -> Any:
            data = np.zeros(row.nbytes, np.uint8).view(Owner)
            gone.append(weakref.ref(data))
            return row._replace(where=None, fetch=[data].pop, cut=None)

        monkeypatch.setattr(Snapshot, "_kept", lambda self, *given: keep(*given))
        pending = mfload.save({"a": np.ones(3)}, tmp_path / "a.safetensors", background=True)
        assert isinstance(pending.exception(SECONDS), errors.WriteError)
        gc.collect()
        assert gone[0]() is None

    def test_of_keeping_leave_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(nbytes: int) -> None:
            raise errors.MemoryLimitError("the system refused memory")

        monkeypatch.setattr(buffers, "allocate", refuse)
        with pytest.raises(errors.MemoryLimitError):
            mfload.save({"a": np.ones(3)}, tmp_path / "a.safetensors", background=True)
        assert not background._pending


class TestTurns:
    @pytest.mark.parametrize("again", [True, False])
    def test_one_a_target(self, tmp_path: Path, gate: Gate, again: bool) -> None:
        path = tmp_path / "model.safetensors"
        first = mfload.save({"a": np.ones(3)}, path, background=True, progress=gate)
        assert gate.reached.wait(SECONDS)
        save: Any = partial(mfload.save, {"a": np.zeros(3)}, tmp_path, background=again)
        with pytest.raises(errors.TargetError, match="background"):
            save(timeout=0.05, overwrite=True)
        threading.Timer(0.2, gate.opened.set).start()
        with pytest.raises(errors.TargetExistsError):
            save()
        assert first.done()
        made = save(overwrite=True, timeout=SECONDS)
        saved = made.result() if again else made
        assert _load(Path(saved.files[0]))["a"].tolist() == [0, 0, 0]

    def test_one_that_does_not_begin_is_not_waited_for(self, tmp_path: Path) -> None:
        path = tmp_path / "a.safetensors"
        first, claimed = Work(), threading.Event()

        def begin(**_: Any) -> Any:
            first.claim(path, None)
            claimed.set()
            time.sleep(0.2)
            raise ValueError("no")

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            started = pool.submit(first.start, begin)
            assert claimed.wait(SECONDS)
            mfload.save({"a": np.ones(3)}, path, timeout=SECONDS)
            assert isinstance(started.exception(), ValueError)
        assert not background._untold

    @pytest.mark.parametrize("begun", [False, True])
    def test_an_interrupt_while_the_thread_begins(
        self, begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, real = tmp_path / "x.safetensors", threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if begun:
                real(thread)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(KeyboardInterrupt):
                mfload.save({"x": np.zeros(3)}, path, background=True)
        mfload.save({"x": np.ones(3)}, path, overwrite=True, timeout=SECONDS)
        assert mfload.load(path, "numpy")["x"].all()
        assert os.listdir(tmp_path) == [path.name]

    def test_other_targets_do_not_wait(self, tmp_path: Path, gate: Gate) -> None:
        first = mfload.save({"a": np.ones(3)}, tmp_path / "a/", background=True, progress=gate)
        mfload.save({"a": np.ones(3)}, tmp_path / "b/", background=True).result(SECONDS)
        mfload.save({"a": np.ones(3)}, tmp_path / "c/")
        assert not first.done()

    def test_loads_see_the_old_checkpoint(self, tmp_path: Path, gate: Gate) -> None:
        path = tmp_path / "a.safetensors"
        mfload.save({"a": np.ones(3)}, path)
        pending = mfload.save(
            {"a": np.zeros(3)}, path, background=True, overwrite=True, progress=gate
        )
        assert gate.reached.wait(SECONDS)
        assert _load(path)["a"].tolist() == [1, 1, 1]
        assert mfload.verify(path).ok
        gate.opened.set()
        pending.result(SECONDS)
        assert _load(path)["a"].tolist() == [0, 0, 0]

    def test_a_save_within_itself(self, tmp_path: Path) -> None:
        path, said = tmp_path / "a.safetensors", list[BaseException]()

        def again(_: int, __: int) -> None:
            try:
                mfload.save({"a": np.ones(3)}, path, overwrite=True)
            except errors.TargetError as error:
                said.append(error)

        mfload.save({"a": np.ones(3)}, path, background=True, progress=again).result(SECONDS)
        assert "this thread" in str(said[0])

    def test_many_threads_and_few_targets(self, tmp_path: Path) -> None:
        def work(number: int) -> None:
            for turn in range(5):
                path = tmp_path / f"{(number + turn) % 2}.safetensors"
                array = np.full(20_000, number)
                pending = mfload.save({"a": array}, path, background=True, overwrite=True)
                array[:] = -1
                if turn % 2:
                    pending.result(SECONDS)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        mfload.save({"a": np.ones(1)}, tmp_path / "0.safetensors", overwrite=True)
        for each in list(background._pending.values()):
            each.wait(Deadline(SECONDS))
        last = _load(tmp_path / "1.safetensors")["a"]
        assert 0 <= last[0] < 4
        assert (last == last[0]).all()
        assert sorted(os.listdir(tmp_path)) == ["0.safetensors", "1.safetensors"]


class TestFuture:
    def test_with_others(self, tmp_path: Path, gate: Gate) -> None:
        both = [
            mfload.save({"a": np.ones(3)}, tmp_path / f"{n}/", background=True, progress=gate)
            for n in range(2)
        ]
        assert not concurrent.futures.wait(both, 0.01).done
        assert not both[0].cancel()
        assert not both[0].wait(0.01)
        with pytest.raises(TimeoutError):
            both[0].result(0.01)
        called: list[object] = []
        both[0].add_done_callback(called.append)
        gate.opened.set()
        assert {each.result().tensors for each in concurrent.futures.as_completed(both)} == {1}
        assert called == [both[0]]

    def test_awaited(self, tmp_path: Path) -> None:
        async def run() -> mfload.Saved:
            pending = mfload.save({"a": np.ones(3)}, tmp_path / "a/", background=True)
            return await asyncio.wrap_future(pending)

        assert asyncio.run(run()).tensors == 1

    def test_a_callback_may_save_there(self, tmp_path: Path, gate: Gate) -> None:
        path, done = tmp_path / "a.safetensors", threading.Event()
        pending = mfload.save({"a": np.ones(3)}, path, background=True, progress=gate)

        def again(_: object) -> None:
            mfload.save({"a": np.zeros(3)}, path, overwrite=True)
            done.set()

        pending.add_done_callback(again)
        gate.opened.set()
        assert done.wait(SECONDS)
        assert not _load(path)["a"].any()

    def test_without_threads_it_is_done_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def start(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)
        pending = mfload.save({"a": np.ones(3)}, tmp_path / "a.safetensors", background=True)
        assert pending.done()
        assert pending.result().tensors == 1


SCRIPT = """
import os, signal, sys, threading, time
import numpy as np
import mfload
path, how = sys.argv[1:]
def progress(done, whole):
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "_exit":
        os._exit(7)
    if how == "fails":
        raise RuntimeError("no more")
    if how == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)
def save():
    how = {"background": True, "overwrite": True, "progress": progress}
    return mfload.save({"a": np.zeros(400_000)}, path, **how)
if how == "atexit":
    import atexit
    atexit.register(save)
    sys.exit(0)
if how == "child":
    import multiprocessing
    child = multiprocessing.get_context("fork").Process(target=save)
    child.start()
    child.join()
    sys.exit(child.exitcode)
pending = save()
if how == "exit":
    sys.exit(3)
if how == "raises":
    raise ValueError("mine")
if how in ("killed", "_exit", "interrupted"):
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "status", "new"),
    [
        ("ends", 0, True),
        ("exit", 3, True),
        ("raises", 1, True),
        ("interrupted", -signal.SIGINT, True),
        ("atexit", 0, True),
        ("child", 0, True),
        ("killed", -signal.SIGKILL, False),
        ("_exit", 7, False),
        ("fails", 0, False),
    ],
)
def test_the_exit(how: str, status: int, new: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    mfload.save({"a": np.ones(400_000)}, path)
    command = [sys.executable, "-c", SCRIPT, str(path), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == status, ended.stderr
    assert (_load(path)["a"] == (0 if new else 1)).all()
    if how == "fails":
        assert "RuntimeError: no more" in ended.stderr
        assert f"{path}: a save in the background failed" in ended.stderr
        assert "Exception ignored in atexit callback" in ended.stderr
    elif how not in ("raises", "interrupted"):
        assert not ended.stderr
    # What a killed one left, the next removes.
    mfload.save({"a": np.ones(1)}, path, overwrite=True)
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_while_it_is_pending(tmp_path: Path, gate: Gate) -> None:
    path = tmp_path / "a.safetensors"
    pending = mfload.save({"a": np.ones(400_000)}, path, background=True, progress=gate)
    assert gate.reached.wait(SECONDS)
    child = os.fork()
    if not child:
        status = 1
        try:
            if isinstance(pending.exception(5), errors.ProcessError):
                other = mfload.save({"a": np.zeros(9)}, tmp_path / "b.safetensors", background=True)
                other.result(SECONDS)
                status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    gate.opened.set()
    assert pending.result(SECONDS).tensors == 1
    assert (_load(path)["a"] == 1).all()
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors"]
