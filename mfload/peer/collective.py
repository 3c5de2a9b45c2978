"""Transport "collective": the seed sends to the reader by `torch.distributed`.

For processes of one process group, if both sides name it: the seed runs a thread for each reader,
and with NCCL kernels too, which compete with its work. Each pair has a group of its own, so that a
load does not get between the collectives of its users. With NCCL, bytes go from the seed's device
to the reader's without a host, unless they are wanted there. gloo has been run; NCCL has not yet.
"""

from __future__ import annotations

import datetime
import queue
import re
import secrets
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mfload import errors
from mfload.cuda.memory import DeviceBuffer
from mfload.dlpack import View, capsule
from mfload.dtypes import TABLE
from mfload.frameworks import private_api
from mfload.peer.data import Data, cut, spread
from mfload.peer.transports import Offer, Remote, malformed
from mfload.runtime import start
from mfload.sources.base import Costs

_SLOT = 4 << 20
_LONGEST = 16 << 20  # Bytes of a message between devices.
_NAME = re.compile(r"[0-9a-f]{32}")
_JOINED = datetime.timedelta(seconds=10)  # For both sides to make their group.
_IDLE = 600.0  # Seconds without a request after which a seed lets go of a reader.
_MOST = 64  # Readers at once.
_kept: list[Any] = []  # What may still be written to, until the process ends.


def _group() -> tuple[Any, int, str, Any, Any]:
    """PyTorch, this process's rank, the group's backend, where tensors lie for it, and its store.

    Raises RuntimeError if there is no process group.
    """
    torch: Any = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)
    if dist is None or not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed has no process group here")
    store = private_api.torch_store()
    if store is None:
        raise RuntimeError("this version of torch.distributed has no store to meet in")
    if str(dist.get_backend()) == "nccl":
        place = torch.device("cuda", torch.cuda.current_device())
        return torch, dist.get_rank(), "nccl", place, store
    return torch, dist.get_rank(), "gloo", "cpu", store


class _Pair:
    """A group of two processes: this one, and another."""

    def __init__(self, torch: Any, place: Any, ranks: tuple[int, int], name: str) -> None:
        self._torch, self._place = torch, place
        pair = tuple(sorted(ranks))
        self._other = pair.index(ranks[1])
        if place == "cpu":
            self._group = private_api.torch_group(pair, _JOINED, f"/{name}")
        else:
            self._group = private_api.torch_device_group(place, pair, name, _JOINED)

    def send(self, tensor: Any, seconds: datetime.timedelta) -> None:
        """Sends a flat tensor of uint8."""
        self._group.send([tensor], self._other, 0).wait(seconds)

    def receive(self, tensor: Any) -> Any:
        """Begins to receive into a tensor; what is to be waited for."""
        return self._group.recv([tensor], self._other, 0)

    def abandon(self) -> None:
        """Has NCCL's kernels end, in a thread: until then, CUDA frees no memory."""
        if self._place != "cpu":
            start(self._group.abort, "mfload-abort", service=True)


def _beside(torch: Any, place: Any) -> Any:
    """A context in which a device works on a stream beside the user's."""
    there = getattr(place, "type", "cpu") == "cuda"
    return torch.cuda.stream(torch.cuda.Stream(place)) if there else nullcontext()


def _over(torch: Any, buffer: DeviceBuffer) -> Any:
    """A tensor of PyTorch's over device memory."""
    view = View("", TABLE["U8"], (buffer.nbytes,), buffer, 0)
    return torch.utils.dlpack.from_dlpack(capsule(view))


def offer(data: Data, generation: int) -> Offer:
    """Leaves a secret in the group's store; raises UsageError if there is no process group."""
    del generation
    try:
        served = _Served(data)
    except RuntimeError as error:
        what, expected = "the transport collective can't serve", "torch.distributed in both"
        raise errors.UsageError(what, expected=expected, found=str(error)) from error
    return Offer(served.given, served.close, served.asked)


class _Served:
    """The sending side: a thread for each reader that has joined."""

    def __init__(self, data: Data) -> None:
        self._torch, self._rank, backend, self._place, self._store = _group()
        key = f"mfload/seed/{secrets.token_hex(16)}"
        self._store.set(key, "here")
        self._data = data
        self.given: dict[str, Any] = {"rank": self._rank, "key": key, "backend": backend}
        self._joined: dict[str, queue.Queue[tuple[int, int] | None]] = {}
        self._lock = threading.Lock()

    def asked(self, given: Any) -> bool:
        """Has a reader join, or sends it a range, or lets it go."""
        name = given["name"]
        if "rank" in given:
            rank, size = given["rank"], self._torch.distributed.get_world_size()
            if type(rank) is not int or not 0 <= rank < size or rank == self._rank:
                raise ValueError("no such rank")
            with self._lock:
                if not _NAME.fullmatch(name) or name in self._joined or len(self._joined) >= _MOST:
                    raise ValueError("no such name")
                self._joined[name] = queue.Queue()
            start(partial(self._serve, rank, name), "mfload-collective", service=True)
        elif "offset" in given:
            offset, nbytes = given["offset"], given["nbytes"]
            fine = {type(offset), type(nbytes)} == {int} and offset >= 0 and 0 < nbytes <= _LONGEST
            if not fine or offset + nbytes > self._data.size:
                raise ValueError("no such range")
            self._joined[name].put((offset, offset + nbytes))
        else:
            self._joined[name].put(None)
        return True

    def _serve(self, rank: int, name: str) -> None:
        pair = None
        try:
            pair = _Pair(self._torch, self._place, (self._rank, rank), name)
            while (span := self._joined[name].get(timeout=_IDLE)) is not None:
                with _beside(self._torch, self._place):
                    pair.send(self._tensor(*span), _JOINED)
        except (RuntimeError, MemoryError, queue.Empty):  # The reader is gone, or will see it.
            if pair is not None:
                pair.abandon()
        finally:
            self._joined.pop(name, None)

    def _tensor(self, start: int, stop: int) -> Any:
        """A range of the data, where the group takes tensors."""
        data, torch, made = self._data, self._torch, list[Any]()
        if self._place == "cpu":
            return torch.from_numpy(np.concatenate([*data.parts(start, stop)]))
        for n, low, high in cut(data.starts, data.size, start, stop):
            memory = data.arrays[n]
            if getattr(memory, "number", None) == self._place.index:
                made.append(_over(torch, memory.buffer.part(low, high - low)))
            else:
                made.append(torch.from_numpy(memory[low:high].copy()).to(self._place))
        return made[0] if len(made) == 1 else torch.cat(made)

    def close(self) -> None:
        """Lets all go; readers find that the generation has ended."""
        with suppress(RuntimeError):
            self._store.delete_key(self.given["key"])
        for each in list(self._joined.values()):
            each.put(None)


def connect(given: Any, remote: Remote) -> CollectiveWay | str:
    """Joins the seed, if it is in the same process group."""
    given = given if isinstance(given, dict) else {}
    theirs, key, backend = given.get("rank"), given.get("key"), given.get("backend")
    fine = type(theirs) is int and type(key) is str and backend in ("nccl", "gloo")
    if not fine or not key.startswith("mfload/seed/"):
        raise malformed(remote.name, "its process group")
    try:
        torch, rank, mine, place, store = _group()
        if not store.check([key]):
            return "the seed is in another process group"
        if rank == theirs or not 0 <= theirs < torch.distributed.get_world_size():
            return "the seed is no other process of the group"
        if mine != backend:
            return f"the group's backend is {mine} here, {backend} in the seed"
        name = secrets.token_hex(16)
        remote.ask("collective", {"name": name, "rank": rank})
        pair = _Pair(torch, place, (rank, theirs), name)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return CollectiveWay(torch, pair, place, name, remote)


class CollectiveWay:
    """Receives from one seed, a message after the other (see `Way`)."""

    def __init__(self, torch: Any, pair: _Pair, place: Any, name: str, remote: Remote) -> None:
        self._torch, self._pair, self._place = torch, pair, place
        self._name, self._remote = name, remote
        self.check = remote.check
        backend = "gloo" if place == "cpu" else "nccl"
        self.costs = Costs(block=_SLOT if place == "cpu" else _LONGEST, concurrency=1)
        self.why = f"torch.distributed ({backend}): the seed is disturbed, since it has to send"
        self._stalled = datetime.timedelta(seconds=remote.stalled)
        self._lock = threading.Lock()
        self._broken = ""

    def read(self, vector: Sequence[Any], offset: int) -> None:
        """Fills buffers (see `Way`)."""
        size = sum(each.nbytes for each in vector)
        with self._lock:
            for at in range(0, size, _SLOT):
                count = min(_SLOT, size - at)
                tensor = self._torch.empty(count, dtype=self._torch.uint8, device=self._place)
                self._receive(tensor, offset + at)
                spread(tensor.cpu().numpy(), vector, at, at + count)

    def close(self) -> None:
        """Lets the seed's thread end."""
        name, self._name = self._name, ""
        if name:
            self._broken = self._broken or "it was closed"
            with suppress(errors.MfloadError):
                self._remote.ask("collective", {"name": name})

    def lands(self, devices: Sequence[Any]) -> str:
        """Whether the group is of these devices (see `Way`)."""
        if self._place == "cpu":
            return "gloo moves host memory"
        others = [each.name for each in devices if each.place[1] != self._place.index]
        return f"the group is of {self._place}, not of {others[0]}" if others else ""

    def on_devices(self, offset: int, nbytes: int) -> bool:
        """The seed puts on its device what does not lie there (see `Way`)."""
        return True

    def onto(self, device: Any) -> CollectiveDeviceReader:
        """What receives into memory of the device (see `Way`)."""
        del device  # It is the group's.
        return CollectiveDeviceReader(self.receive)

    def receive(self, buffer: DeviceBuffer, offset: int, nbytes: int) -> None:
        """Fills the first bytes of a buffer on the device."""
        with self._lock:
            whole = _over(self._torch, buffer)
            for at in range(0, nbytes, _LONGEST):
                self._receive(whole[at : min(at + _LONGEST, nbytes)], offset + at)

    def _receive(self, tensor: Any, offset: int) -> None:
        with self._blamed(), _beside(self._torch, self._place):
            work = self._pair.receive(tensor)
            try:
                asked = {"name": self._name, "offset": offset, "nbytes": len(tensor)}
                self._remote.ask("collective", asked)
                work.wait(self._stalled)
            except BaseException:
                _kept.append((tensor, work, self._pair))
                self._broken = "a message did not come"
                self._pair.abandon()
                raise

    @contextmanager
    def _blamed(self) -> Generator[None]:
        """A context in which PyTorch's errors are the seed's."""
        name = self._remote.name
        if self._broken:
            what = "the connection to the seed has ended"
            raise errors.ReadError(what, file=name, found=self._broken)
        try:
            yield
        except RuntimeError as error:
            found = str(error).partition("\n")[0]
            raise errors.ReadError("the seed stalls", file=name, found=found) from error


class CollectiveDeviceReader(NamedTuple):
    """Receives into memory of the group's device (see `DeviceReader`)."""

    read: Callable[[DeviceBuffer, int, int], None]

    def close(self) -> None:
        """Nothing is held."""
