"""Seeds of files: what `mfload serve` publishes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
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
    """A context in which it is said how often a seed was read, as that changes, and at its end."""
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
    try:
        yield
    finally:
        ended.set()
        teller.join()
        say(f"read {counted(seed.reads, 'time')} in all")


def wait() -> None:
    """Waits until the process is interrupted or asked to end."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
