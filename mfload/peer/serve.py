"""Seeds of files: what `mfload serve` publishes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

from mfload.errors import counted
from mfload.formats import checkpoint
from mfload.frameworks import numpy_adapter
from mfload.load_options import started
from mfload.loading.session import Loader
from mfload.loading.stream import Unwrapped
from mfload.options import Options
from mfload.peer.fragments import Held
from mfload.peer.seed import Seed
from mfload.planning import request as requesting
from mfload.progress import Progress, shown

_FIRST, _PERIOD = 0.5, 5.0  # Seconds until it is first looked whether someone reads, and then.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stored(
    path: Any, options: Options | None = None, progress: Progress = False
) -> tuple[list[Held], dict[str, str]]:
    """The tensors of a checkpoint in host memory, of any dtype that it has, and its strings.

    Raises as `mfload.load` does.
    """
    how = started(options)
    index, sources = checkpoint.read(path, how)
    adapter: Any = Unwrapped(numpy_adapter.make(None))
    requests = requesting.whole(index.columns)
    with shown(progress, sum(each.nbytes for each in index.columns)) as advance:
        views = Loader(index, sources, adapter, how).load(requests, advance=advance)
    found = [
        Held(
            view.name,
            info.dtype,
            info.shape,
            tuple((0, length) for length in info.shape),
            view.memory[view.at : view.at + info.nbytes],
        )
        for info, view in zip(index.columns, views, strict=True)
    ]
    return found, dict(index.metadata or {})


@contextlib.contextmanager
def told(seed: Seed, say: Callable[[str], object]) -> Generator[None]:
    """A context that says how often a seed is read, and closes it in the end."""
    ended = threading.Event()

    def tell() -> None:
        said = 0
        while not ended.wait(_PERIOD if said else _FIRST):
            if seed.reads != said:
                said = seed.reads
                now = counted(seed.connections, "connection")
                say(f"read {counted(said, 'time')} so far, {now} open now")

    teller = threading.Thread(target=tell, name="mfload-told", daemon=True)
    teller.start()
    with seed:
        try:
            yield
        finally:
            ended.set()
            teller.join()
            say(f"read {counted(seed.reads, 'time')} in all")


def run(server: AbstractContextManager[object], started: Callable[[], None]) -> None:
    """Calls `started`, waits for a signal that asks the process to end, and closes the server.

    SIGINT, SIGTERM and SIGHUP ask so, each unless the process was started with it ignored, as
    under nohup. All are heard before `started` is called, and none ends the process while the
    server closes, but a further SIGINT is a KeyboardInterrupt.
    """
    # Python runs handlers in the main thread alone, and the kernel may wake another for a signal:
    # only the pipe tells the main thread for certain.
    heard, told = os.pipe()
    os.set_blocking(told, False)
    awake = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    before = {
        number: signal.signal(number, lambda *_: None)
        for number in _ENDING
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        with server:
            started()
            while os.read(heard, 1)[0] not in before:
                pass
            if signal.SIGINT in before:
                signal.signal(signal.SIGINT, signal.default_int_handler)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(awake)
        os.close(heard)
        os.close(told)
