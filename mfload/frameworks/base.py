"""What every adapter is: a few verbs, and a table of what becomes of each dtype."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mfload import dtypes, errors
from mfload.cuda.device import Device
from mfload.cuda.memory import DeviceBuffer
from mfload.dlpack import View
from mfload.planning.requests import Request


class Form(NamedTuple):
    """What a stored dtype becomes in a framework.

    Attributes:
        how: "alias", the framework's own dtype over mfload's memory; "copy", its own dtype
            after one copy; "bytes", uint8 with the last dim in bytes (`mfload.unpack`).
        type: The framework's name for it.
    """

    how: Literal["alias", "copy", "bytes"]
    type: str


Forms = Mapping[str, Form]
Whose = Literal["mfload", "framework"]


class Lent(NamedTuple):
    """An array of the framework's own allocator, to be filled in place.

    Attributes:
        array: The array.
        memory: Its bytes: a writable uint8 array, or a `DeviceBuffer` for a need that lands on
            a device. It keeps the array alive.
    """

    array: Any
    memory: Any


class Pool(NamedTuple):
    """What a framework's allocator has of a device.

    Attributes:
        free: Bytes that it can still give; None where it does not say.
        advice: What to do where a load does not fit, as the end of a sentence.
    """

    free: int | None
    advice: str


class Adapter(Protocol):
    """Turns views into arrays of one framework on one device.

    Attributes:
        name: The framework.
        forms: What each dtype becomes.
        lendable: The dtypes that `lend` has memory for.
        alignment: Bytes on which a tensor must lie to be taken without a copy; None where
            the size of its element will do.
        readonly_maps: Whether arrays over maps of files are to refuse writing.
        on_host: Whether the arrays stay in host memory; elsewhere each is copied once, unless
            it lands there.
        devices: Those whose memory arrays land in at once, by their numbers.
        landings: Whose memory arrays can lie in there.
        notes: What a user should hear, such as why nothing lands on the device.
    """

    name: str
    forms: Forms
    lendable: frozenset[str]
    alignment: int | None
    readonly_maps: bool
    on_host: bool
    devices: Sequence[Device]
    landings: frozenset[Whose]
    notes: tuple[str, ...]

    @property
    def allocator(self) -> Whose:
        """Whose memory is the better one on such a device."""
        ...

    def assign(self, requests: Sequence[Request]) -> Sequence[Request]:
        """What is to be loaded where such tensors are wanted: each on its device or devices."""
        ...

    def results(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """What a user gets for each tensor, of the arrays for what `assign` gave, in order."""
        ...

    def wrap(self, views: Sequence[View]) -> list[Any]:
        """An array for each view, in order; `View.memory` may be a `DeviceBuffer`."""
        ...

    def lend(self, requests: Sequence[Request]) -> list[Lent]:
        """Uninitialised arrays of the framework's own allocator, one for each need.

        What the framework still runs in memory on a device is over before this returns.
        """
        ...

    def lands(self, request: Request) -> int | None:
        """The number of the device that a need lands on, None where it lands on the host."""
        ...

    def pool(self, number: int) -> Pool | None:
        """What the framework's allocator has of a device, None where there is nothing to say."""
        ...


@runtime_checkable
class Placing(Protocol):
    """What an adapter of several devices knows of each need, besides what `Adapter` says of all."""

    def copies(self, request: Request) -> bool:
        """Whether the need is copied out of mfload's memory, if that is on the host."""
        ...

    def lends(self, request: Request) -> bool:
        """Whether the need must land in the framework's memory, whatever `allocator=` says."""
        ...


def forms(
    aliases: Mapping[str, str], copies: Mapping[str, str] | None = None, byte: str = "uint8"
) -> Forms:
    """The table of a framework: what it aliases, what it copies; the rest arrives as bytes."""
    table: dict[str, Form] = {}
    for name in dtypes.TABLE:
        if name in aliases:
            table[name] = Form("alias", aliases[name])
        elif copies and name in copies:
            table[name] = Form("copy", copies[name])
        else:
            table[name] = Form("bytes", byte)
    return table


COMMON = {
    name: row.aliases[0]
    for name, row in dtypes.TABLE.items()
    if row.numpy is not None and row.numpy.isbuiltin == 1  # Those of ml_dtypes say 2.
}
"""The dtypes that NumPy itself has, by the name that all frameworks share."""


class _Owner:
    """Memory at an address, as NumPy sees it, with whoever owns it."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, False),
        }


def lendable(forms: Forms, unless: Collection[str] = ()) -> frozenset[str]:
    """The dtypes that land in their final form, so that it may be made beforehand."""
    return frozenset(k for k, form in forms.items() if form.how != "copy" and k not in unless)


def lent_as(form: Form, request: Request) -> tuple[str, tuple[int, ...]]:
    """Type and shape of the array to be lent for a need."""
    if form.how == "bytes" or request.dtype.elements > 1:
        return form.type, request.dtype.storage_shape(request.shape)
    return form.type, request.shape


def memory_at(owner: Any, address: int, nbytes: int, device: Device | None = None) -> Any:
    """The bytes of an array to be lent, which keep it alive (see `Lent.memory`).

    Args:
        owner: The array.
        address: Its first byte; no matter what where there is none.
        nbytes: Bytes.
        device: Where they lie, None for the host.
    """
    if device is not None:
        return DeviceBuffer(device, address, nbytes, owner, own=False)
    if nbytes == 0:
        return np.empty(0, np.uint8)
    return np.asarray(_Owner(owner, address, nbytes))


def check_version(name: str, found: str, oldest: str) -> None:
    """Refuses a framework older than the oldest that mfload works with.

    Raises:
        FrameworkVersionError: It is older.
    """
    if _numbers(found) < _numbers(oldest):
        raise errors.FrameworkVersionError(
            f"{name} is too old", expected=f"{name} {oldest} or newer", found=found
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def split_device(device: str) -> tuple[str, int | None]:
    """Takes "cuda:1" apart.

    Raises:
        DeviceError: It is no device name.
    """
    match = re.fullmatch(r"([A-Za-z_]+)(?::(\d+))?", device)
    if match is None:
        raise errors.DeviceError("not a device name", expected="cpu, cuda:0, …", found=device)
    return match[1].lower(), None if match[2] is None else int(match[2])


_SAID = 300  # Characters of what a framework lists, which may be all that it knows.


def no_device(framework: str, device: object, there: object) -> errors.DeviceError:
    """The error for a device that is not there."""
    found = str(there)
    found = "none" if found in ("", "[]") else found
    return errors.DeviceError(
        f"{framework} has no such device here; `mfload doctor` says what there is",
        expected=str(device),
        found=found if len(found) <= _SAID else f"{found[:_SAID]}…",
    )
