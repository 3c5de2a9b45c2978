"""A target has one writer at a time: the second is refused, or waits; a dead one's lock is free."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import faults
import pytest
import scenarios
from test_saving_kill import memory

import mfload
from mfload import errors
from mfload.saving import drafts, locks
from mfload.saving.drafts import Draft
from mfload.saving.publishing import SaveTarget

__all__ = ["memory"]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone")
OLD, NEW = scenarios.arrays(1), scenarios.arrays(2)
BUSY = "another process is writing the target"


@pytest.fixture(autouse=True)
def no_descriptors_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def lock_of(target: Path) -> Path:
    return Path(locks.lock_of(SaveTarget(target, True).place))


def in_thread(call: Callable[[], object]) -> Any:
    """What a call in another thread returns or raises."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    return outcome[0]


@contextmanager
def writer(target: Path, *, forks: bool = False) -> Generator[tuple[int, int]]:
    """A process in the midst of a save: its number, and that of a child that it forked."""
    code = (
        "import os, sys, time, numpy, mfload\n"
        "def progress(done, total):\n"
        f"    child = os.fork() if {forks} else 0\n"
        f"    if child or not {forks}: print(os.getpid(), child, flush=True)\n"
        "    time.sleep(120)\n"
        "mfload.save({'w': numpy.ones(9)}, sys.argv[1], overwrite=True, progress=progress)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    _, child = numbers = tuple(map(int, process.stdout.readline().split()))
    try:
        yield (numbers[0], child)
    finally:
        process.kill()
        process.wait()
        if child:
            os.kill(child, signal.SIGKILL)
        process.stdout.close()


def beside_a_conversion(
    folder: Path, monkeypatch: pytest.MonkeyPatch, other: Callable[[Path], object]
) -> Any:
    """Converts, and makes another call when the bytes are written; what became of that."""
    mfload.save(OLD, folder / "source.safetensors")
    real, outcome = Draft.sync, list[Any]()

    def sync(draft: Draft) -> None:
        if not outcome:
            outcome.append(None)
            outcome[:] = [in_thread(lambda: other(folder / "model.safetensors"))]
        real(draft)

    monkeypatch.setattr(Draft, "sync", sync)
    mfload.convert(folder / "source.safetensors", folder / "model.safetensors")
    return outcome[0]


@pytest.mark.parametrize("call", ["save", "save at a link", "convert", "align"])
def test_a_second_writer_is_refused(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, Callable[[Path], object]] = {
        "save": lambda target: mfload.save(NEW, target, overwrite=True),
        "save at a link": lambda target: mfload.save(NEW, tmp_path / "link", overwrite=True),
        "convert": lambda target: mfload.convert(tmp_path / "source.safetensors", target),
        "align": lambda target: mfload.align(tmp_path / "source.safetensors", target),
    }
    (tmp_path / "link").symlink_to("model.safetensors")
    error = beside_a_conversion(tmp_path, monkeypatch, calls[call])
    assert isinstance(error, errors.TargetError)
    assert BUSY in error.message
    assert error.file == str(tmp_path / "model.safetensors")
    assert scenarios.found(tmp_path / "model.safetensors", {"old": OLD}) == "old"
    assert scenarios.hidden(tmp_path) == []


def test_other_targets_in_the_directory_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = beside_a_conversion(tmp_path, monkeypatch, lambda _: mfload.save(NEW, tmp_path / "x/"))
    assert isinstance(save, mfload.Saved)
    other = tmp_path / "other.safetensors"
    assert mfload.save(NEW, other).files == (str(other),)


@pytest.mark.parametrize("way", ["save", "convert"])
def test_a_second_writer_waits(way: str, target: Path) -> None:
    mfload.save(NEW, target.with_name("source.safetensors"))
    first, written = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        first.set()
        written.wait(20)

    saving = threading.Thread(target=mfload.save, args=(OLD, target), kwargs={"progress": progress})
    saving.start()
    assert first.wait(20)
    start = time.monotonic()

    def second(timeout: float | None) -> object:
        if way == "save":
            return mfload.save(NEW, target, overwrite=True, timeout=timeout)
        source, options = target.with_name("source.safetensors"), mfload.Options(timeout=timeout)
        return mfload.convert(source, target, overwrite=True, options=options)

    for timeout in (None, 0.2):
        with pytest.raises(errors.TargetError, match=BUSY) as caught:
            second(timeout)
    assert caught.value.expected == "its end within 0.2 s"
    assert 0.2 <= time.monotonic() - start < 10
    threading.Timer(0.3, written.set).start()
    second(float("inf"))
    saving.join()
    assert scenarios.found(target, {"new": NEW}) == "new"
    assert scenarios.hidden(target.parent) == []


def test_who_waited_looks_again(target: Path) -> None:
    first, written = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        first.set()
        written.wait(20)

    saving = threading.Thread(target=mfload.save, args=(OLD, target), kwargs={"progress": progress})
    saving.start()
    assert first.wait(20)
    threading.Timer(0.1, written.set).start()
    with pytest.raises(errors.TargetExistsError):
        mfload.save(NEW, target, timeout=20)
    saving.join()


def test_many_take_turns(target: Path) -> None:
    results: list[Any] = []

    def save() -> None:
        results.append(in_thread(lambda: mfload.save(NEW, target, overwrite=True, timeout=60)))

    threads = [threading.Thread(target=save) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(each) for each in results] == [mfload.Saved] * 12
    assert os.listdir(target.parent) == [target.name]


@pytest.mark.parametrize("timeout", [0, -1, True, "soon"])
def test_timeouts_are_checked(timeout: Any, target: Path) -> None:
    with pytest.raises(errors.UsageError, match="timeout must be positive"):
        mfload.save(NEW, target, timeout=timeout)


def test_a_dead_writer_s_lock_is_free(target: Path) -> None:
    with writer(target) as (number, _):
        with pytest.raises(errors.TargetError, match=BUSY):
            mfload.save(NEW, target)
        os.kill(number, signal.SIGKILL)
        mfload.save(NEW, target, timeout=20)
    assert os.listdir(target.parent) == [target.name]


def test_a_forked_child_of_a_dead_writer_holds_nothing(target: Path) -> None:
    """Though its descriptors are the same open files."""
    with faults.no_tmpfile(), writer(target, forks=True) as (number, child):
        with pytest.raises(errors.TargetError, match=BUSY):
            mfload.save(NEW, target)
        os.kill(number, signal.SIGKILL)
        mfload.save(NEW, target, timeout=20)
        os.kill(child, 0)  # It is still there.
    assert os.listdir(target.parent) == [target.name]


@pytest.mark.parametrize("way", [faults.no_tmpfile, faults.no_links])
def test_a_forked_child_ends_nothing_of_its_parent_s(way: Callable[[], Any], target: Path) -> None:
    """One that comes out of the save by an exception, as after `sys.exit`."""
    done: list[int] = []

    def progress(_: int, total: int) -> None:
        if done:
            return
        done.append(total)
        if (child := os.fork()) == 0:
            raise SystemExit
        os.waitpid(child, 0)
        assert len(scenarios.hidden(target.parent)) == 2
        assert isinstance(in_thread(lambda: mfload.save(OLD, target)), errors.TargetError)

    with way():
        try:
            mfload.save(NEW, target, progress=progress)
        except SystemExit:
            os._exit(0)
    assert done
    assert scenarios.found(target, {"new": NEW}) == "new"
    assert scenarios.hidden(target.parent) == []


@pytest.mark.parametrize("what", ["text", "fifo", "read-only"])
def test_a_file_of_that_name_is_no_lock(what: str, target: Path) -> None:
    path = lock_of(target)
    if what == "fifo":
        os.mkfifo(path)
    else:
        path.write_text("1\n")  # Of a process that has that number in another container, say.
        path.chmod(0o400 if what == "read-only" else 0o644)
    assert isinstance(in_thread(lambda: mfload.save(NEW, target)), mfload.Saved)
    assert os.listdir(target.parent) == [target.name]


@pytest.mark.parametrize("what", ["directory", "link"])
def test_something_else_of_that_name_is_told(what: str, target: Path) -> None:
    path, elsewhere = lock_of(target), target.with_name("elsewhere")
    path.mkdir() if what == "directory" else path.symlink_to(elsewhere)
    with pytest.raises(errors.TargetError, match=f"could not lock the target with {path.name}"):
        mfload.save(NEW, target)
    assert not elsewhere.exists()
    assert sorted(os.listdir(target.parent)) == [path.name]


def test_another_user(memory: Path) -> None:
    """A directory that can't be written, and the lock that another user left."""
    if os.geteuid():
        pytest.skip("needs root")
    code = (
        "import os, sys, numpy, mfload\n"
        "mfload.save({}, sys.argv[2])\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: print(len(mfload.save({'w': numpy.ones(9)}, sys.argv[1]).files))\n"
        "except mfload.errors.TargetError as error: print(error.errno, error.message)\n"
    )
    target = memory / "model.safetensors"
    for mode, told in ((0o755, "13 could not make room"), (0o777, "1\n")):
        lock_of(target).touch(0o644)
        target.parent.chmod(mode)
        found = subprocess.run(
            [sys.executable, "-c", code, str(target), str(target.with_name(f"{mode}.safetensors"))],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert found.stdout.startswith(told)
    assert not lock_of(target).exists()


def test_a_directory_that_stays_locked(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another program, say, which may read it and no more."""
    monkeypatch.setattr(locks, "_PATIENCE", 0.05)
    with drafts.open_directory(str(target.parent)) as held:
        assert drafts.lock(held)
        with pytest.raises(errors.TargetError, match="keeps the directory locked"):
            mfload.save(NEW, target)
    assert os.listdir(target.parent) == []
    mfload.save(NEW, target)


def test_a_lock_that_may_not_be_made_anew(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux refuses O_CREAT for another's file in a sticky directory, where it may be read."""
    real = locks.opened

    def refusing(path: str, flags: int, *mode: int) -> Any:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "sticky")
        return real(path, flags, *mode)

    monkeypatch.setattr(locks, "opened", refusing)
    with pytest.raises(errors.TargetError, match="could not make files") as caught:
        mfload.save(NEW, target)
    assert caught.value.errno == errno.EACCES
    lock_of(target).touch()
    mfload.save(NEW, target)
    assert scenarios.found(target, {"new": NEW}) == "new"


def test_without_locks_there_are_none(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", faults.no_locks)
    saved = list[Any]()

    def progress(done: int, total: int) -> None:
        if not saved:
            saved.append(in_thread(lambda: mfload.save(OLD, target)))

    mfload.save(NEW, target, overwrite=True, progress=progress)
    assert isinstance(saved[0], mfload.Saved)
    assert scenarios.found(target, {"new": NEW}) == "new"
    assert os.listdir(target.parent) == [target.name]


def test_file_systems_that_number_files_anew(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "is_at", lambda file, path: False)
    mfload.save(NEW, target)
    assert scenarios.found(target, {"new": NEW}) == "new"


class TestSignals:
    @pytest.fixture(autouse=True)
    def handler(self) -> Iterator[None]:
        before = signal.getsignal(signal.SIGALRM)
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    def test_ctrl_c_ends_the_waiting(self, target: Path) -> None:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        with writer(target):
            start = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                mfload.save(NEW, target, timeout=float("inf"))
            assert time.monotonic() - start < 10

    def test_a_handler_is_not_waited_for(self, target: Path) -> None:
        """A save from a handler of the thread that saves there: that can't go on meanwhile."""
        raised: list[errors.TargetError] = []

        def save(*_: object) -> None:
            with pytest.raises(errors.TargetError) as caught:
                mfload.save(OLD, target, timeout=float("inf"))
            raised.append(caught.value)

        def progress(done: int, total: int) -> None:
            if not raised:
                os.kill(os.getpid(), signal.SIGALRM)

        signal.signal(signal.SIGALRM, save)
        mfload.save(NEW, target, progress=progress)
        assert raised[0].message == "this thread is already saving to this target"
        assert raised[0].file == str(target)
        assert scenarios.found(target, {"new": NEW}) == "new"
        assert stat.S_ISREG(target.stat().st_mode)


@pytest.mark.parametrize("interrupted", [False, True])
def test_drafts_are_in_no_cycle(interrupted: bool, tmp_path: Path) -> None:
    """What an interrupt keeps from being closed is closed with the last reference to it."""

    def progress(done: int, total: int) -> None:
        if interrupted:
            raise KeyboardInterrupt

    mfload.save(OLD, tmp_path / "in.safetensors")
    given: dict[str, Any] = {"overwrite": True, "progress": progress}
    calls = [
        lambda: mfload.save(NEW, tmp_path / "a.safetensors", **given),
        lambda: mfload.save(NEW, f"{tmp_path}/b/", max_shard_size=9000, **given),
        lambda: mfload.save(NEW, f"{tmp_path}/b/", max_shard_size=6000, **given),
        lambda: mfload.convert(tmp_path / "in.safetensors", tmp_path / "c.safetensors", **given),
        lambda: mfload.align(tmp_path / "in.safetensors", tmp_path / "d.safetensors", **given),
    ]
    gc.collect()
    gc.disable()
    try:
        for call in calls:
            with suppress(KeyboardInterrupt):
                call()
            # By its type alone: to ask others for their class has them warn.
            assert not any(issubclass(type(each), Draft | SaveTarget) for each in gc.get_objects())
    finally:
        gc.enable()


def test_an_interrupt_leaves_no_draft_open(tmp_path: Path) -> None:
    """Nor a lock: real signals, at random moments of saves and conversions."""
    code = """
import os, random, signal, sys
import numpy as np
import mfload

def raises(*_):
    raise KeyboardInterrupt

def opened():
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            pass
    return [n for n in names if "#" in n or ".mfload-" in n or n == folder]

folder, random = os.path.realpath(sys.argv[1]), random.Random(7)
arrays = {f"w{n}": np.full(20000, n, np.uint8) for n in range(8)}
mfload.save(arrays, f"{folder}/in.safetensors")
calls = [
    lambda: mfload.save(arrays, f"{folder}/a.safetensors", overwrite=True),
    lambda: mfload.save(arrays, f"{folder}/b/", overwrite=True, max_shard_size=60000),
    lambda: mfload.convert(f"{folder}/in.safetensors", f"{folder}/c.safetensors", overwrite=True),
    lambda: mfload.align(f"{folder}/in.safetensors", f"{folder}/d.safetensors", overwrite=True),
]
signal.signal(signal.SIGALRM, raises)
interrupted = 0
for number in range(int(sys.argv[2])):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 5e-3))
        calls[number % 4]()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
    assert not opened(), opened()
for number, call in enumerate(calls):
    call()
    assert not opened(), opened()
assert interrupted > int(sys.argv[2]) / 10, interrupted
left = {os.path.basename(n) for n in os.listdir(folder)}
assert left == {"in.safetensors", "a.safetensors", "b", "c.safetensors", "d.safetensors"}, left
"""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path), "1200"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
