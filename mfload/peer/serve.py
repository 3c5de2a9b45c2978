"""Seeds of files: what `mfload serve` publishes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from mfload import errors
from mfload.dlpack import View
from mfload.errors import counted
from mfload.formats import checkpoint
from mfload.frameworks import base, numpy_adapter
from mfload.index import TensorInfo
from mfload.loading.session import Loader
from mfload.loading.stream import Unwrapped
from mfload.mesh import specs
from mfload.options import Options, started
from mfload.peer.fragments import Held
from mfload.peer.seed import Seed
from mfload.planning import request as requesting, slicing
from mfload.progress import Progress, shown
from mfload.runtime import start

_FIRST, _PERIOD = 0.5, 5.0  # Seconds until it is first looked whether someone reads, and then.
_PAUSE = 0.1  # Until it is looked again whether readers still have memory open.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stored(
    path: Any,
    options: Options | None = None,
    progress: Progress = False,
    devices: Sequence[str] = (),
) -> tuple[list[Held], dict[str, str]]:
    """The tensors of a checkpoint, of any dtype that it has, and its strings.

    They are in host memory, or on CUDA devices: with several, each has a chunk of the first dim of
    every tensor, as torch.chunk cuts it. What the host has to put together stays there.

    Raises as `mfload.load` does.
    """
    how = started(options)
    there = [_device(each) for each in devices]
    index, sources = checkpoint.read(path, how)
    found: list[Held] = []
    with shown(progress, sum(each.nbytes for each in index.columns)) as advance:
        for n in range(max(1, len(there))):
            adapter: Any = numpy_adapter.make(None)
            adapter.devices = there[n : n + 1]
            requests = requesting.whole(index.columns)
            if len(there) > 1:
                requests = [each for row in index.columns for each in _rows(row, n, len(there))]
            loader = Loader(index, sources, Unwrapped(adapter), how)  # pyright: ignore
            views = loader.load(requests, advance=advance)
            found += map(_held, requests, views)
    return found, dict(index.metadata or {})


def _device(name: str) -> Any:
    from mfload.cuda import discovery

    kind, number = base.split_device(name)
    if kind not in ("cuda", "gpu"):
        raise errors.DeviceError("weights are served from a GPU", expected="cuda:0", found=name)
    return discovery.find(number)


def _rows(info: TensorInfo, number: int, count: int) -> Iterator[requesting.Request]:
    """What one of so many devices holds of a tensor."""
    length = next(iter(info.shape), 0)
    if info.nbytes and length and (len(info.shape) > 1 or info.dtype.elements == 1):
        low, high = specs.chunk(length, count, number)
        if low < high:
            yield requesting.Request(info, info.dtype, slicing.select(info, slice(low, high)))
    elif not number:
        yield requesting.Request(info, info.dtype)


def _held(request: requesting.Request, view: View) -> Held:
    info, memory, nbytes = request.info, view.memory, request.nbytes
    if isinstance(memory, np.ndarray):
        memory = memory[view.at : view.at + nbytes]
    else:
        from mfload.peer.cuda_ipc import DeviceMemory

        memory = DeviceMemory(memory.device, memory.address + view.at, nbytes, memory)
    return Held(view.name, info.dtype, info.shape, requesting.box_of(request), memory)


@contextlib.contextmanager
def told(
    seed: Seed, say: Callable[[str], object], leases: Callable[[], int] = int
) -> Generator[None]:
    """A context that says how often a seed is read, and closes it in the end.

    It waits for those that then still have its memory open, as many as `leases` says.
    """
    ended = threading.Event()

    def tell() -> None:
        said = 0
        while not ended.wait(_PERIOD if said else _FIRST):
            if seed.reads != said:
                said = seed.reads
                now = counted(seed.connections, "connection")
                say(f"read {counted(said, 'time')} so far, {now} open now")

    teller = start(tell, "mfload-told", service=True)
    with seed:
        try:
            yield
        finally:
            ended.set()
            teller.join()
            say(f"read {counted(seed.reads, 'time')} in all")
    if left := leases():
        say(f"waits for {counted(left, 'reader')}, whose arrays lie here; Ctrl-C ends it now")
    while leases():
        time.sleep(_PAUSE)


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
