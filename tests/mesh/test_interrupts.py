"""Ctrl-C in one process at each line of a load of two: all end, none hangs."""

from __future__ import annotations

import itertools
import linecache
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest
import stores
from test_redistribute import shards, tensor

from mfload import errors
from mfload.mesh import agree, link as linking, redistribute
from mfload.mesh.schedule import make_schedule
from mfload.planning.plan import Position
from mfload.runtime import Deadline

FILES = {agree.__file__, linking.__file__, redistribute.__file__}
REQUESTS = shards(tensor("w", "F32", (8, 256)), (1, 2), 2)


class Swapping(linking.Link):
    """One whose swaps are in threads of their own, as those of frameworks are."""

    def __init__(self, rank: int, ranks: Sequence[int], width: int, swaps: stores.Swaps) -> None:
        super().__init__(("a test", swaps, rank), Deadline(5))
        self.ranks, self._rank, self._width, self._shared = ranks, rank, width, swaps

    def buffer(self) -> Any:
        return np.zeros((len(self.ranks), self._width), np.uint8)

    def exchange(self, rows: Any) -> Any:
        return self._shared.swap(self._rank, rows)


def load(rank: int, swaps: stores.Swaps, memory: stores.Memory | None) -> str:
    store = memory and stores.MemoryStore(memory)
    backend: Any = stores.Backend(rank, store, swaps)
    backend.link = lambda ranks, width, _: Swapping(rank, ranks, width, swaps)
    with agree.joined(backend, (0, 1), Deadline(5)) as group:
        group.agree("files")
        schedule = make_schedule(REQUESTS, 4096, rank)
        exchange = Swapping(rank, (0, 1), 4096, swaps)
        made = [np.zeros(request.nbytes, np.uint8) for request in REQUESTS[rank]]
        places = [[Position(request, n, 0)] for n, request in enumerate(REQUESTS[rank])]
        redistribute.run(
            schedule, group, exchange, lambda *_: None, redistribute.Results(made, places)
        )
    return "well"


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Threads are processes; each has a queue of loads of its own."""
    own = threading.local()

    class Queue(list[Any]):
        @property
        def mine(self) -> list[Any]:
            return own.__dict__.setdefault("queue", [])

        def append(self, each: Any) -> None:
            self.mine.append(each)

        def remove(self, each: Any) -> None:
            self.mine.remove(each)

        def __getitem__(self, number: Any) -> Any:
            return self.mine[number]

        def __contains__(self, each: Any) -> bool:
            return each in self.mine

        def __iter__(self) -> Any:
            return iter(self.mine)

    monkeypatch.setattr(agree, "_queue", Queue())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("store", [False, True])
def test_at_each_line_of_a_load(store: bool) -> None:
    ended = list[str]()
    for number in itertools.count(1):
        given = stores.Swaps(2, 5), stores.Memory() if store else None
        came = list[Any]()

        def other(given: Any = given, came: list[Any] = came) -> None:
            try:
                came.append(load(0, *given))
            except BaseException as error:
                came.append(error)

        lines, begun = itertools.count(1), list[bool]()
        at = ["not reached"]

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename not in FILES:
                return None
            here = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            if not (begun or here or [*agree._queue]):  # noqa: B023
                return trace  # It has not come to the load.
            begun.append(True)  # noqa: B023
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            if text == "try:":  # The interpreter handles no signal there.
                return trace
            if event == "line" and next(lines) == number:  # noqa: B023
                at[0] = f"{frame.f_code.co_qualname}:{frame.f_lineno}"  # noqa: B023
                signal.raise_signal(signal.SIGINT)
            return trace

        thread = threading.Thread(target=other)
        thread.start()
        own: Any = None
        sys.settrace(trace)
        try:
            own = load(1, *given)
        except BaseException as error:
            own = error
        finally:
            sys.settrace(None)
        thread.join(20)
        assert not thread.is_alive(), at
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, at
        assert not [*agree._queue], at
        if at[0] == "not reached":
            break
        ended.append(at[0])
        assert isinstance(own, KeyboardInterrupt), (at, own)
        told = isinstance(came[0], errors.ProcessError) and "process 1 failed" in str(came[0])
        # Who has agreed on the end hears of nothing any more.
        assert told or came[0] == "well", (at, came)
        assert not linking._broken & {("a test", given[0], n) for n in (0, 1)}, at
    assert len(ended) > 100
