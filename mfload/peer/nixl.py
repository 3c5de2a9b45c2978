"""Transport "nixl": a reader pulls from registered memory of a seed, by the NIXL package.

On one machine through shared memory or the kernel's copies, between machines by RDMA: UCX takes
what is there, but never TCP, by which any process with a seed's metadata could read and write the
whole process. With RDMA it can read and write the registered memory: so a seed must ask for it.
What lies on devices of the seed gets to devices of the reader without the host. Host memory on one
machine has been run; device memory on a stub of NIXL alone; RDMA and NVLink have not yet.
"""

from __future__ import annotations

import base64
import importlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np

from mfload import errors
from mfload.peer.data import Data, Spans, spread
from mfload.peer.transports import Offer, Remote, malformed
from mfload.runtime import start
from mfload.sources.base import Costs

PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
"""The package's names, the first that is installed is taken."""

PUMPED = 2.0
"""Seconds that a seed helps with transfers, since a reader asked for it last."""

_ASKED = 0.5  # Seconds after which a reader asks again.
_PAUSE = 1e-3
_SOON = 2e-5  # The first of a reader's pauses; each is twice as long as the one before.
_SLOT = 4 << 20
_kept: list[Any] = []  # What NIXL may still write to, until the process ends.


def _agent() -> Any:
    """A NIXL agent without threads of its own; raises ImportError or RuntimeError."""
    raises, api = logging.raiseExceptions, None
    for package in PACKAGES:
        with suppress(ModuleNotFoundError):
            api = importlib.import_module(f"{package}._api")
            break
    logging.raiseExceptions = raises  # NIXL changes it, and greets on standard output.
    if api is None:
        raise ModuleNotFoundError("the package nixl-cu13 is not installed")
    if "NIXL_LOG_LEVEL" not in os.environ:
        api.logger.setLevel("WARNING")
    how = api.nixl_agent_config(
        enable_prog_thread=False,
        backends=[],
        sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    made = api.nixl_agent(f"mfload-{secrets.token_hex(16)}", how)
    # Shared memory has no errors of a peer that dies, and is left out where they are asked for.
    errors_of_peers = "peer" if _has_rdma() else "none"
    given = {"ucx_error_handling_mode": errors_of_peers, "engine_config": "TLS=^tcp"}
    with _typed():
        made.create_backend("UCX", given)
    return made


def _kind(device: int) -> str:
    return "DRAM" if device < 0 else "VRAM"


def _has_rdma() -> bool:
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False


@contextmanager
def _typed() -> Generator[None]:
    """A context in which NIXL's errors, which have no common class, are RuntimeErrors."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def offer(data: Data, generation: int) -> Offer:
    """Registers the data.

    Raises:
        FrameworkMissingError: The package is not installed.
        UsageError: NIXL can't start, or register the memory.
    """
    del generation
    try:
        served = _Registered(data)
    except ImportError as error:
        what, expected = "the transport nixl needs a package", "pip install --no-deps nixl-cu13"
        raise errors.FrameworkMissingError(what, expected=expected, found=str(error)) from error
    except RuntimeError as error:
        raise errors.UsageError("NIXL can't serve here", found=str(error)) from error
    return Offer(served.given, served.close, served.asked)


class _Registered:
    """The registered memory of a seed. It is pumped while readers ask for it, and sleeps else."""

    def __init__(self, data: Data) -> None:
        self._agent, self._data = _agent(), data
        spans, devices = data.spans(), data.devices()
        rows: dict[str, list[Any]] = {}
        for span, number in zip(spans, devices, strict=True):
            rows.setdefault(_kind(number), []).append((*span, max(number, 0), ""))
        with _typed(), ExitStack() as stack:
            there = {
                n: memory.device for n, memory in zip(devices, data.arrays, strict=True) if n >= 0
            }
            for device in there.values():
                stack.enter_context(device.current())
            self._rows = [self._agent.register_memory(some, kind) for kind, some in rows.items()]
            told = self._agent.get_agent_metadata()
        self.given = {
            "metadata": base64.b64encode(told).decode(),
            "spans": Spans.told(spans),
            "devices": devices if "VRAM" in rows else None,
        }
        self._lock = threading.Lock()
        self._until, self._runs = 0.0, False

    def asked(self, given: Any) -> bool:
        """Pumps for a while; what a connection needs to come about, and some transfers."""
        del given
        with self._lock:
            if self._agent is not None:
                self._until = time.monotonic() + PUMPED
                if not self._runs:
                    self._runs = True
                    start(self._pump, "mfload-nixl", service=True)
        return True

    def _pump(self) -> None:
        while True:
            with self._lock:
                if self._agent is None or time.monotonic() > self._until:
                    self._runs = False
                    return
                with suppress(RuntimeError), _typed():
                    self._agent.get_new_notifs()
            time.sleep(_PAUSE)

    def close(self) -> None:
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is not None:
                with suppress(RuntimeError), _typed():
                    for each in self._rows:
                        agent.deregister_memory(each)


def connect(given: Any, remote: Remote) -> NixlWay | str:
    """Makes an agent, and tells it of the seed's, whose metadata NIXL itself has to parse."""
    try:
        metadata = base64.b64decode(given["metadata"], validate=True)
        spans = Spans.of(given["spans"], remote.manifest.size)
        devices = given.get("devices") or [-1] * len(spans.rows)
        fine = {*map(type, devices)} <= {int} and {*devices} <= {*range(-1, 64)}
        if len(devices) != len(spans.rows) or not fine:
            raise ValueError("no such devices")
    except (KeyError, TypeError, ValueError):
        raise malformed(remote.name, "NIXL") from None
    try:
        agent = _agent()
        with _typed():
            peer = agent.add_remote_agent(metadata)
    except (ImportError, RuntimeError) as error:
        return str(error)
    return NixlWay(agent, peer, spans, devices, remote)


class NixlWay:
    """Pulls from one seed (see `Way`).

    Transfers go into registered slots and are copied on. A slot of a transfer that has not ended
    well is kept as long as the process lives: NIXL may write to it later.
    """

    costs = Costs(block=_SLOT, concurrency=2)
    why = "NIXL: pulled from registered memory, the seed only answers"

    def __init__(
        self, agent: Any, peer: Any, spans: Spans, devices: Sequence[int], remote: Remote
    ) -> None:
        self._agent, self._peer, self._spans, self._remote = agent, peer, spans, remote
        self.check = remote.check
        self._devices = devices
        if max(devices, default=-1) >= 0:
            self.costs = Costs(concurrency=4)
        self._lock = threading.Lock()
        self._free: list[Any] = []
        self._asked, self._broken = -_ASKED, ""

    def read(self, vector: Sequence[Any], offset: int) -> None:
        """Fills buffers (see `Way`)."""
        size = sum(each.nbytes for each in vector)
        for at in range(0, size, _SLOT):
            count = min(_SLOT, size - at)
            slot = self._slot()
            try:
                self.pull((slot.ctypes.data, "DRAM", 0), offset + at, count)
            except BaseException as error:
                _kept.append(slot)
                if isinstance(error, errors.ReadError) and not self.check():
                    what = "the seed has other weights than when the load began"
                    raise errors.SourceChangedError(what, file=self._remote.name) from error
                raise
            spread(slot, vector, at, at + count)
            self._free.append(slot)

    def close(self) -> None:
        """Ends the connection, unless a transfer may still be under way."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is not None and self._broken:
                _kept.append(agent)
            elif agent is not None:
                with suppress(RuntimeError), _typed():
                    agent.remove_remote_agent(self._peer)

    def lands(self, devices: Sequence[Any]) -> str:
        """Whether the seed holds something on devices (see `Way`)."""
        del devices
        return "" if max(self._devices, default=-1) >= 0 else "the seed holds its arrays there"

    def on_devices(self, offset: int, nbytes: int) -> bool:
        """Whether the seed has a range on devices (see `Way`)."""
        spans = self._spans.within(offset, offset + nbytes)
        return all(self._devices[n] >= 0 for n, _, _ in spans)

    def onto(self, device: Any) -> NixlDeviceReader:
        """What pulls into memory of a device (see `Way`)."""
        return NixlDeviceReader(self, device)

    def register(self, address: int, nbytes: int, kind: str, device: int) -> Any:
        """Tells NIXL of memory that is pulled into."""
        with self._lock, self._blamed() as agent:
            return agent.register_memory([(address, nbytes, device, "")], kind)

    def deregister(self, rows: Any) -> None:
        """Ends that."""
        with self._lock, suppress(RuntimeError), _typed():
            if self._agent is not None:
                self._agent.deregister_memory(rows)

    def _slot(self) -> Any:
        with suppress(IndexError):
            return self._free.pop()
        made = np.empty(_SLOT, np.uint8)
        self.register(made.ctypes.data, _SLOT, "DRAM", 0)
        return made

    def pull(self, into: tuple[int, str, int], offset: int, count: int) -> None:
        """Fills memory at (address, kind, device), by a transfer for each kind that it is from."""
        kinds: dict[str, tuple[list[Any], list[Any]]] = {}
        at, kind_here, device_here = into
        for n, address, nbytes in self._spans.within(offset, offset + count).tolist():
            device = self._devices[n]
            mine, theirs = kinds.setdefault(_kind(device), ([], []))
            mine.append((at, nbytes, device_here))
            theirs.append((address, nbytes, max(device, 0)))
            at += nbytes
        for kind, (mine, theirs) in kinds.items():
            self._ask()
            self._transfer(mine, kind_here, theirs, kind)

    def _transfer(
        self, mine: Sequence[Any], kind_here: str, theirs: Sequence[Any], kind: str
    ) -> None:
        with self._lock, self._blamed() as agent:
            targets = agent.get_xfer_descs(mine, kind_here)
            stored = agent.get_xfer_descs(theirs, kind)
            handle = agent.initialize_xfer("READ", targets, stored, self._peer)
            state = agent.transfer(handle)
        until, pause = time.monotonic() + self._remote.stalled, _SOON
        try:
            while state == "PROC":
                if time.monotonic() > until:
                    what, found = "the seed stalls", f"nothing for {self._remote.stalled:g} s"
                    raise errors.ReadError(what, file=self._remote.name, found=found)
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE)
                self._ask()
                with self._lock, self._blamed() as agent:
                    state = agent.check_xfer_state(handle)
        except BaseException as error:  # The transfer may go on.
            _kept.append(handle)
            self._broken = self._broken or str(error) or type(error).__name__
            raise
        with self._lock, self._blamed():
            handle.release()
            if state != "DONE":
                raise RuntimeError(f"the transfer ended as {state}")

    def _ask(self) -> None:
        """Asks the seed to pump for this transfer."""
        now = time.monotonic()
        if now > self._asked + _ASKED:
            self._asked = now
            self._remote.ask("nixl", {})

    @contextmanager
    def _blamed(self) -> Generator[Any]:
        """The agent, in a context in which NIXL's errors end what comes after."""
        if self._broken or self._agent is None:
            what, found = "the connection to the seed has ended", self._broken or "it was closed"
            raise errors.ReadError(what, file=self._remote.name, found=found)
        try:
            with _typed():
                yield self._agent
        except RuntimeError as error:
            self._broken = str(error)
            what = "the seed broke off"
            if "Disconnect" in self._broken:
                what = "the seed's process is gone"
            raise errors.ReadError(what, file=self._remote.name, found=self._broken) from error


class NixlDeviceReader:
    """Pulls into memory of one device (see `DeviceReader`), which is registered at first sight."""

    def __init__(self, way: NixlWay, device: Any) -> None:
        self._way, self._device = way, device
        self._slots: dict[int, tuple[Any, Any]] = {}

    def read(self, buffer: Any, offset: int, nbytes: int) -> None:
        """Fills the first bytes of a buffer; kept for good if that fails, as NIXL may go on."""
        address, number = buffer.address, self._device.place[1]
        with self._device.current():
            if address not in self._slots:
                rows = self._way.register(address, buffer.nbytes, "VRAM", number)
                self._slots[address] = buffer, rows
            try:
                self._way.pull((address, "VRAM", number), offset, nbytes)
            except BaseException:
                _kept.append(self._slots.pop(address))
                raise

    def close(self) -> None:
        """Ends the registrations, and then lets go of the buffers."""
        while self._slots:
            _, (buffer, rows) = self._slots.popitem()
            with self._device.current():
                self._way.deregister(rows)
            del buffer
