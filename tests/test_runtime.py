"""What calls share: the collector waits while many objects are made; the cores."""

from __future__ import annotations

import gc
import os
import signal
import threading

import pytest

from mfload.runtime import cores, gc_paused


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
    if hasattr(os, "sched_getaffinity"):
        assert cores() == len(os.sched_getaffinity(0))
        monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == (os.cpu_count() or 1)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores() == 1
