"""One process among several in a test (see `launching`): what it reads, damages and says."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import gc
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import samples

import mfload
from mfload import errors
from mfload.dtypes import TABLE
from mfload.io import buffers, pread
from mfload.mesh import link

NO_MAPS = mock.patch.object(pread, "_ROWS_A_MAP", 1 << 60)  # What is mapped is not read.


class World:
    """One process among several.

    Args:
        rank: Its number.
        count: How many there are.
        directory: With `model/`, which all see.
    """

    def __init__(self, rank: int, count: int, directory: Path) -> None:
        self.rank, self.count, self.directory = rank, count, directory
        self.model = directory / "model"
        self.read = 0

    def own(self) -> Path:
        """A copy of the model that this process may damage."""
        path = self.directory / f"own.{self.rank}"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.model, path)
        return path

    def meet(self, name: str, text: str = "") -> list[str]:
        """Waits for all processes; gives what each has said."""
        paths = [self.directory / f"{name}.{rank}" for rank in range(self.count)]
        draft = paths[self.rank].with_suffix(".draft" + str(self.rank))
        draft.write_text(text)
        draft.rename(paths[self.rank])
        until = time.monotonic() + 60
        while not all(path.exists() for path in paths):
            assert time.monotonic() < until, f"{name}: another process is not there"
            time.sleep(0.01)
        return [path.read_text() for path in paths]

    def peers(self, first: Any, second: Any, name: str) -> dict[str, Any]:
        """Publishes what was loaded with one spec, and loads that with another and checks it."""
        here: Any = self
        arrays = here.load(first)
        with mfload.publish(arrays, model="m", part=(self.rank, self.count), run=name) as seed:
            addresses = self.meet(f"{name}-begin", seed.address)
            here.check(here.load(second, f"peer://{','.join(addresses)}/m"), second)
            self.meet(f"{name}-end")
            return {"copied": seed.copied_bytes}

    @contextlib.contextmanager
    def counted(self) -> Generator[None]:
        """Counts the bytes that come from files of the model."""
        true, lock = os.preadv, threading.Lock()
        self.read = 0

        def preadv(fd: int, vector: Any, offset: int, *flags: int) -> int:
            got = true(fd, vector, offset, *flags)
            with lock:
                self.read += got
            return got

        with mock.patch.object(os, "preadv", preadv), NO_MAPS:
            yield

    @contextlib.contextmanager
    def failing(self, after: int, act: Callable[[], Any]) -> Generator[None]:
        """Does something in place of the reads of rank 1 that begin after so many bytes."""
        true, begun, counting = os.preadv, [0], threading.Lock()

        def preadv(fd: int, vector: Any, offset: int, *flags: int) -> int:
            # Before they are read: several threads may read at once, and all that there is.
            with counting:
                before = begun[0]
                begun[0] += sum(memoryview(part).nbytes for part in vector)
            if before >= after:
                act()
            return true(fd, vector, offset, *flags)

        with mock.patch.object(os, "preadv", preadv if self.rank == 1 else true), NO_MAPS:
            yield


def model(directory: Path) -> int:
    """Two files; their bytes of tensors."""
    directory.mkdir()
    files = [
        {
            "t.a": samples.numbers((1024, 1024), ml_dtypes.bfloat16, 1),
            "t.b": samples.numbers((512, 2048), np.float32, 2),
            "t.c": samples.numbers((64, 16), np.int64, 3),
            "norm": samples.numbers((333,), np.float32, 4),
        },
        {
            "t.d": samples.numbers((2048, 512), np.float16, 5),
            "t.e": samples.numbers((16, 32), np.uint8, 6),
            "scalar": np.array(3.5, np.float32),
            "empty": np.zeros((0, 8), np.float32),
            "odd": samples.numbers((8, 7, 5), np.int8, 8),
        },
    ]
    names = [f"model-0000{n + 1}-of-00002.safetensors" for n in range(2)]
    for name, arrays in zip(names, files, strict=True):
        samples.save(directory / name, arrays)
    weights = {key: name for name, arrays in zip(names, files, strict=True) for key in arrays}
    index = {"metadata": {}, "weight_map": weights}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(array.nbytes for arrays in files for array in arrays.values())


def every_dtype() -> dict[str, tuple[str, tuple[int, ...], Any]]:
    """By name, a dtype that files hold, a shape and its bytes; the same in every process."""
    made: dict[str, tuple[str, tuple[int, ...], Any]] = {}
    for n, (name, row) in enumerate(TABLE.items()):
        for shape in ((8, 96), (256, 768)):  # Parts that travel in a row, and by themselves.
            raw = samples.numbers(row.storage_shape(shape), np.uint8, n)
            made[f"t.{name}.{shape[0]}"] = name, shape, raw & 1 if name == "BOOL" else raw
    return made


def io_error() -> None:
    raise OSError(errno.EIO, "Input/output error")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def press() -> None:
    raise KeyboardInterrupt


def signalled(world: World, load: Callable[[], Any], good: Callable[[], Any], times: str) -> None:
    """Ctrl-C in process 1 at moments of an exchange, as a signal; a load follows each that works.

    Args:
        world: This process.
        load: Loads with an exchange of several rounds.
        good: Loads, and checks what it gets.
        times: How often.
    """
    start, begun, lags = link.Link.start, threading.Event(), [0.0]
    expected: Any = KeyboardInterrupt if world.rank == 1 else errors.ProcessError
    between = threading.Event()

    def late(swap: Callable[..., Any], *given: Any) -> Any:
        begun.set()
        time.sleep(lags[0])
        return swap(*given)

    def slow(self: Any, *given: Any) -> None:
        if "swap" not in vars(self):
            self.swap = functools.partial(late, self.swap)
        if between.is_set():
            between.clear()
            signal.raise_signal(signal.SIGINT)
        start(self, *given)

    def interrupt(after: float) -> None:
        begun.wait(20)
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGINT)

    good()
    with mock.patch.object(link.Link, "start", slow):
        for number in range(int(times)):
            begun.clear()
            other = threading.Thread(target=interrupt, args=[0.02 + 0.06 * number])
            lags[0] = 0.12
            if world.rank == 1:
                other.start()
            with pytest.raises(expected, match=r"^(?!.*broke off)"):
                load()
            lags[0] = 0.0
            if world.rank == 1:
                other.join()
            good()
        if world.rank == 1:  # Before a swap that the others begin.
            between.set()
        with pytest.raises(expected, match=r"^(?!.*broke off)"):
            load()
        good()


@contextlib.contextmanager
def at_swap(world: World, number: int, act: Callable[[], Any]) -> Generator[None]:
    """Does something on process 1 while a swap is under way, or before it if that raises."""
    wait, start, done = link.Link._wait, link.Link.start, [0]
    acted = threading.Event()

    def late(true: Callable[..., Any]) -> Callable[..., Any]:
        def swap(*given: Any) -> Any:
            acted.wait(10)
            return true(*given)

        return swap

    def counted(self: Any, *given: Any) -> None:
        done[0] += 1
        if world.rank == 1 and done[0] == number:  # Over too early it would not be waited for.
            self.exchange, self.swap = late(self.exchange), late(self.swap)
        start(self, *given)

    def acting(self: Any, *given: Any) -> None:
        if world.rank == 1 and done[0] == number:
            done[0] += 1000
            acted.set()
            act()
        wait(self, *given)

    with mock.patch.multiple(link.Link, _wait=acting, start=counted):
        yield


def said(world: World, cases: list[str], run: Callable[[str], dict[str, Any] | None]) -> bool:
    """Runs cases, and writes a line of JSON for each to `said.RANK`; whether one failed."""
    faulthandler.enable()
    failed = False
    with (world.directory / f"said.{world.rank}").open("w") as out:
        for case in cases:
            start = time.monotonic()
            line: dict[str, Any] = {"case": case, "error": None}
            try:
                line |= run(case) or {}
            except BaseException as error:
                line |= {"error": type(error).__name__, "text": str(error)}
                line["typed"] = isinstance(error, errors.MfloadError)
            line["seconds"] = time.monotonic() - start
            failed = failed or line["error"] is not None
            gc.collect()
            for thread in threading.enumerate():  # A stream that was dropped does not wait.
                if thread.name == "mfload-reader":
                    thread.join(5)
            if (kept := sys.modules.get("mfload.cuda.staging")) is not None:
                kept.KITS.give_back()  # Slots that the next load would have.
            line["live"] = buffers.live_bytes()
            out.write(json.dumps(line) + "\n")
            out.flush()
    return failed


def play(world: World, functions: dict[str, Any]) -> None:
    """Runs the cases of the command line, `function:argument:…`, and ends the process."""

    def run(case: str) -> Any:
        name, *rest = case.split(":")
        return functions[name](world, *rest)

    said(world, sys.argv[5:], run)
    leave(world)


def leave(world: World) -> None:
    """Ends the process; the first keeps the store of the others, so it leaves last."""
    (world.directory / f"done.{world.rank}").touch()
    end = time.monotonic() + 15
    gone = any("killed" in case for case in sys.argv[5:])
    while world.rank == 0 and time.monotonic() < end:
        if len([*world.directory.glob("done.*")]) >= world.count - gone:
            break
        time.sleep(0.02)
    time.sleep(0.3 if world.rank == 0 else 0)
    os._exit(0)
