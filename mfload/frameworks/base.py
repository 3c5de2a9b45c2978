"""What every adapter is: a few verbs, and a table of what becomes of each dtype."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from mfload import dtypes, errors
from mfload.cuda.device import Device
from mfload.cuda.memory import DeviceBuffer
from mfload.dlpack import View
from mfload.dtypes import DType
from mfload.options import LoadOptions
from mfload.planning.requests import Allocation, Owner, Request


class Form(NamedTuple):
    """What a stored dtype becomes in a framework, and the framework's name for that.

    "alias": the framework's own dtype over mfload's memory; "copy": its own dtype after one copy;
    "bytes": uint8 with the last dim in bytes (`mfload.unpack`).
    """

    how: Literal["alias", "copy", "bytes"]
    type: str


Forms = Mapping[str, Form]

COMMON = {
    name: row.aliases[0]
    for name, row in dtypes.TABLE.items()
    if row.numpy is not None and row.numpy.isbuiltin == 1  # Those of ml_dtypes say 2.
}
"""The dtypes that NumPy itself has, by the name that all frameworks share."""


def forms(aliases: Mapping[str, str], copies: Mapping[str, str] | None = None) -> Forms:
    """The table of a framework: what it aliases, what it copies; the rest arrives as bytes."""
    made = {name: Form("bytes", "uint8") for name in dtypes.TABLE}
    made |= {name: Form("copy", kind) for name, kind in (copies or {}).items()}
    return made | {name: Form("alias", kind) for name, kind in aliases.items()}


class Lent(NamedTuple):
    """An array of the framework's own allocator, to be filled in place.

    `memory` is its bytes, which keep it alive: a writable uint8 array or a `DeviceBuffer`.
    """

    array: Any
    memory: Any


class Pool(NamedTuple):
    """What a framework's allocator has of a device."""

    free: int | None
    """Bytes that it can still give; None if it does not say."""
    advice: str
    """What to do if a load does not fit, as the end of a sentence."""


class Adapter:
    """Turns views into arrays of one framework on one device; each framework has a subclass.

    Without a `device` results land on the host, and are copied if the arrays are to lie elsewhere.

    Attributes:
        alignment: Bytes on which a tensor must lie to be taken without a copy; None if the size
            of its element will do.
        readonly_maps: Whether arrays over maps of files are to refuse writing.
        on_host: Whether the arrays stay in host memory; elsewhere each is copied once, unless
            it lands there.
        devices: Those in whose memory results land; an `Allocation` names them by number.
        notes: What a user should hear, such as why nothing lands on the device.
    """

    name: str
    forms: Forms
    alignment: int | None = None
    readonly_maps = False
    on_host = True

    def __init__(self, device: Device | None = None, notes: tuple[str, ...] = ()) -> None:
        self.devices: Sequence[Device] = () if device is None else (device,)
        self.notes = notes

    def allocation(self, request: Request, options: LoadOptions) -> Allocation:
        """Where a request lands; it depends on its dtype and its devices alone."""
        copied = self.forms[request.dtype.name].how == "copy"
        if self.devices and options.lands_on_devices:
            return Allocation(0, "mfload" if copied else self.owner(options.allocator), copied)
        copied = copied or not self.on_host
        lent = options.allocator == "framework" and not copied
        return Allocation(None, "framework" if lent else "mfload", copied)

    def owner(self, allocator: str) -> Owner:
        """Whose memory arrays lie in on the device, for a value of `Options.allocator`."""
        return "framework" if allocator == "framework" else "mfload"

    def assign(self, requests: Sequence[Request]) -> Sequence[Request]:
        """The requests to load for the tensors that are asked for: each for its devices."""
        return requests

    def results(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """What a user gets for each tensor, of the arrays for what `assign` gave, in order."""
        return arrays

    def wrap(self, views: Sequence[View]) -> list[Any]:
        """An array for each view, in order; `View.memory` may be a `DeviceBuffer`."""
        raise NotImplementedError

    def lend(self, requests: Sequence[Request]) -> list[Lent]:
        """Uninitialised arrays of the framework's own allocator, one for each request.

        What the framework still runs in memory on a device is over before this returns.
        """
        device = self.devices[0] if self.devices else None
        lent: list[Lent] = []
        with self.allocating():
            for request in requests:
                kind, shape = lent_as(self.forms[request.dtype.name], request)
                array, address = self.empty(request.dtype, kind, shape)
                lent.append(Lent(array, memory_at(array, address, request.nbytes, device)))
        return lent

    def empty(self, dtype: DType, kind: str, shape: tuple[int, ...]) -> tuple[Any, int]:
        """An uninitialised array for a dtype, of the framework's type `kind`, and its address."""
        raise NotImplementedError

    def allocating(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which `empty` is called; at its end the memory is no longer in use."""
        return contextlib.nullcontext()

    def pool(self, number: int) -> Pool | None:
        """What the framework's allocator has of a device; None if there is nothing to say."""
        return None


def lent_as(form: Form, request: Request) -> tuple[str, tuple[int, ...]]:
    """Type and shape of the array to be lent for a request."""
    if form.how == "bytes" or request.dtype.elements > 1:
        return form.type, request.dtype.storage_shape(request.shape)
    return form.type, request.shape


class _ForeignMemory:
    """Memory at an address in NumPy's array interface, kept alive by its owner."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, owner: Any, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__array_interface__ = {"version": 3, **interface}


def memory_at(owner: Any, address: int, nbytes: int, device: Device | None = None) -> Any:
    """The bytes of an array to be lent, which keep it alive (see `Lent.memory`)."""
    if device is not None:
        return DeviceBuffer(device, address, nbytes, owner, own=False)
    if nbytes == 0:
        return np.empty(0, np.uint8)
    interface = {"typestr": "|u1", "shape": (nbytes,), "data": (address, False)}
    return np.asarray(_ForeignMemory(owner, interface))


def on_device(memory: Any) -> bool:
    """Whether a view's memory is that of a device."""
    return isinstance(memory, DeviceBuffer)


@contextlib.contextmanager
def full_device(framework: str, *kinds: type[Exception]) -> Generator[None]:
    """A context in which a framework's own errors of a full device become MemoryLimitError."""
    try:
        yield
    except kinds as error:
        raise errors.MemoryLimitError(
            f"{framework} has no room on the device", found=str(error).partition("\n")[0]
        ) from error


def find_device(number: int) -> tuple[Device | None, tuple[str, ...]]:
    """The CUDA device of that number; or None, and a note that says why there is none."""
    from mfload.cuda import discovery

    try:
        return discovery.find(number), ()
    except (errors.FrameworkMissingError, errors.DeviceError) as error:
        return None, (f"tensors are copied from the host, one after the other: {error}",)


@functools.cache
def check_version(name: str, found: str, oldest: str) -> None:
    """Refuses a framework older than the oldest that mfload works with."""
    if _numbers(found) < _numbers(oldest):
        raise errors.FrameworkVersionError(
            f"{name} is too old", expected=f"{name} {oldest} or newer", found=found
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def split_device(device: str) -> tuple[str, int]:
    """Takes "cuda:1" apart; without a number it is 0."""
    match = re.fullmatch(r"([A-Za-z_]+)(?::(\d+))?", device)
    if match is None:
        raise errors.DeviceError("not a device name", expected="cpu, cuda:0, …", found=device)
    return match[1].lower(), int(match[2] or 0)


_SHOWN = 300  # Characters of what a framework lists, which may be all that it knows.


def no_device(framework: str, device: object, there: object) -> errors.DeviceError:
    """The error for a device that is not there."""
    found = str(there)
    found = "none" if found in ("", "[]") else found
    return errors.DeviceError(
        f"{framework} has no such device here; `mfload doctor` says what there is",
        expected=str(device),
        found=found if len(found) <= _SHOWN else f"{found[:_SHOWN]}…",
    )


Span = tuple[int, int]


class Exported(NamedTuple):
    """What an adapter says of an array that is to be saved; its bytes are read later.

    Attributes:
        read: Gives a NumPy array with one item an element, over the array's own memory where
            possible. The items may be integers of the same width.
        span: Host addresses [first, past last) of its elements, gaps between them included; None
            if they lie on a device or in several pieces.
        packed: Whether an item of `read` holds several elements, as the file does.
    """

    dtype: DType
    shape: tuple[int, ...]
    read: Callable[[], Any]
    span: Span | None = None
    packed: bool = False


def refuse(framework: str, cases: Iterable[tuple[bool, str, object]]) -> None:
    """Raises UnsupportedArrayError for an array that can't be saved.

    The first case that is true says why, what to save instead, and what was found. Later cases may
    rely on earlier ones: they come from a generator.
    """
    for is_so, why, found in cases:
        if is_so:
            raise errors.UnsupportedArrayError(f"{framework}: {why}", found=found)


ROWS = {row.aliases[0]: row for row in dtypes.TABLE.values()}
"""Rows by the name that NumPy, ml_dtypes and most frameworks have for a dtype."""


def row_of(framework: str, name: str) -> DType:
    """The row of the dtype with that name."""
    row = ROWS.get(name)
    if row is None:
        raise errors.UnsupportedArrayError(
            f"{framework}: safetensors has no dtype for this one; convert it, or view its bytes",
            expected=f"one of {', '.join(dtypes.TABLE)}",
            found=name,
        )
    return row


def export_numpy(framework: str, array: Any) -> Exported:
    """A NumPy array with one item an element, in either byte order and with any strides."""
    row = row_of(framework, array.dtype.name)
    return Exported(row, array.shape, lambda: array, span_of(array))


def span_of(array: Any) -> Span:
    """Host addresses [first, past last) of the items of a NumPy array."""
    if not array.size:
        return array.ctypes.data, array.ctypes.data
    return np.lib.array_utils.byte_bounds(array)


def array_at(
    owner: Any, address: int, shape: tuple[int, ...], strides: tuple[int, ...], width: int
) -> Any:
    """A read-only NumPy array of integers, of `width` bytes each, over memory of `owner`."""
    kind = f"<u{width}"
    if 0 in shape:
        return np.empty(shape, kind)
    steps = tuple(width * step for step in strides)
    interface = {"typestr": kind, "shape": shape, "strides": steps, "data": (address, True)}
    return np.asarray(_ForeignMemory(owner, interface))
