"""What calls share: the collector waits while many objects are made; threads and forks; cores."""

from __future__ import annotations

import gc
import itertools
import linecache
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mfload import runtime
from mfload.runtime import cores, gc_paused, share_of_cores


def test_the_collector_waits_and_goes_on() -> None:
    before = gc.get_threshold()
    assert before[0] > 0
    with gc_paused():
        assert gc.get_threshold()[0] == 0
        with gc_paused():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold() == before
    with pytest.raises(ValueError, match="out"), gc_paused():
        raise ValueError("out")
    assert gc.get_threshold() == before


@pytest.mark.parametrize("inside", [False, True])
def test_one_that_is_switched_off_stays_off(inside: bool) -> None:
    before = gc.get_threshold()
    try:
        if not inside:
            gc.disable()
        with gc_paused():
            if inside:
                worker = threading.Thread(target=gc.disable)
                worker.start()
                worker.join()
        assert not gc.isenabled()
        assert gc.get_threshold() == before
    finally:
        gc.enable()


def test_a_threshold_set_inside_is_kept() -> None:
    before = gc.get_threshold()
    try:
        with gc_paused():
            gc.set_threshold(500)
        assert gc.get_threshold()[0] == 500
    finally:
        gc.set_threshold(*before)


def test_threads_that_are_inside_at_once() -> None:
    before = gc.get_threshold()
    first, second = gc_paused(), gc_paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_while_another_thread_is_inside_leaves_the_child_whole() -> None:
    inside, release = threading.Event(), threading.Event()

    def work() -> None:
        with gc_paused():
            inside.set()
            release.wait(30)

    worker = threading.Thread(target=work)
    worker.start()
    inside.wait(10)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        before = gc.get_threshold()[0]
        with gc_paused():
            pass
        os._exit(0 if before and gc.get_threshold()[0] == before else 1)
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        release.set()
        worker.join()
    assert gc.get_threshold()[0]


def test_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 8})
    assert cores() == 3


@pytest.mark.parametrize(
    ("beside", "share"), [(None, 8), ("2", 4), ("3", 2), ("16", 1), ("0", 8), ("two", 8)]
)
def test_processes_of_one_program_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, beside: str | None, share: int
) -> None:
    monkeypatch.setattr("mfload.runtime.cores", lambda: 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if beside is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", beside)
    assert share_of_cores() == share


def test_what_is_said_of_processes_counts_where_no_launcher_says_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "_beside", 1)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    runtime.set_local_processes(4)
    assert runtime.local_processes() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert runtime.local_processes() == 2


def test_threads_are_started_in_one_file() -> None:
    begun = re.compile(r"Thread\(|Timer\(|ThreadPoolExecutor\(|ThreadingMixIn|register_at_fork\(")
    root = Path(runtime.__file__).parent
    found = [path for path in root.rglob("*.py") if begun.search(path.read_text())]
    assert found == [Path(runtime.__file__)]


def test_an_interrupted_wait_leaves_a_task_as_it_is() -> None:
    """`Thread.join` of Python 3.12 and before would take it for one that has ended."""
    go = threading.Event()

    def interrupt() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    task = runtime.start(lambda: go.wait(30), "mfload-test")
    other = runtime.start(interrupt, "mfload-other")
    with pytest.raises(KeyboardInterrupt):
        task.join(30)
    assert not task.join(0)
    assert not task.ended
    go.set()
    assert task.result() is True
    assert other.join(30)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_waits_for_no_task_of_its_parent() -> None:
    go, forked = threading.Event(), runtime.Forked()
    task = runtime.start(lambda: go.wait(30), "mfload-test")
    child = os.fork()
    if not child:
        os._exit(0 if forked and not task.join() else 1)
    go.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not forked
    assert task.result() is True


@pytest.mark.parametrize("again", [None, 1, 4])
def test_a_crew_that_is_interrupted_at_any_line_ends_and_loses_no_thread(again: int | None) -> None:
    """`again`: so many lines later it is interrupted once more."""
    crew, returned, late = runtime.Crew(), [False], list[int]()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def work(number: int) -> None:
        time.sleep(0.001)
        late.extend([number] if returned[0] else [])

    def interrupted(line: int) -> str | None:
        """Where a call was; None if it has fewer lines."""
        lines, at = itertools.count(1), list[str]()

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename != runtime.__file__:
                return None
            text = linecache.getline(runtime.__file__, frame.f_lineno).strip()
            # At a `try` the interpreter handles no signal.
            if event == "line" and text != "try:" and next(lines) in (line, line + (again or 0)):
                at.append(f"{frame.f_code.co_qualname}: {text}")
                signal.raise_signal(signal.SIGINT)
            return trace

        returned[0] = False
        sys.settrace(trace)
        try:
            crew.share(work, 5, 3)
        except KeyboardInterrupt:
            assert at
        finally:
            sys.settrace(None)
            returned[0] = True
        return at[0] if at else None

    try:
        for line in itertools.count(1):
            if (at := interrupted(line)) is None:
                break
            end = time.monotonic() + 10
            while (waiting := len(crew._queues.idle)) != _of_crews() and time.monotonic() < end:
                time.sleep(0.001)
            assert waiting == _of_crews(), at
        assert line > 50
    finally:
        signal.signal(signal.SIGINT, before)
        crew.close()
    assert not late


def _of_crews() -> int:
    """Threads of crews that live."""
    return sum(thread.name == "mfload-reader" for thread in threading.enumerate())


def test_an_error_of_a_service_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda given: told.append(given.exc_type))
    for service in (False, True):
        assert runtime.start(lambda: 1 // 0, "mfload-test", service=service).join(30)
    assert told == [ZeroDivisionError]


def test_a_task_may_be_forgotten_by_another_that_waits() -> None:
    class Forgotten(runtime.Task[None]):
        left = 3  # After so many looks, another thread has seen its end.

        @property
        def thread(self) -> threading.Thread | None:
            self.left -= 1
            return self.made if self.left >= 0 else None

        @thread.setter
        def thread(self, made: threading.Thread | None) -> None:
            self.made = made

    task = Forgotten(lambda: None).start("forgotten")
    while not task.ended:
        time.sleep(0.001)
    assert task.join()
