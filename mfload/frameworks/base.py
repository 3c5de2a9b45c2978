"""The adapter contract: views into arrays, arrays into exports, and what becomes of each dtype."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from mfload import dtypes, errors
from mfload.dlpack import View, array_at
from mfload.dtypes import DType
from mfload.options import LoadOptions
from mfload.planning.request import HOST, Allocation, Owner, Request

if TYPE_CHECKING:
    from mfload.cuda.device import Device
    from mfload.cuda.memory import DeviceBuffer


class Form(NamedTuple):
    """What a stored dtype becomes in a framework, and the framework's name for that.

    "alias": the framework's own dtype over mfload's memory; "copy": its own dtype after one copy;
    "bytes": uint8 with the last dim in bytes (`mfload.unpack`).
    """

    how: Literal["alias", "copy", "bytes"]
    type: str


NAMES = {name: row.aliases[0] for name, row in dtypes.TABLE.items()}
"""What NumPy, ml_dtypes and most frameworks call each dtype of safetensors."""

COMMON = {
    name: NAMES[name]
    for name, row in dtypes.TABLE.items()
    if row.numpy is not None and row.numpy.isbuiltin == 1  # Those of ml_dtypes say 2.
}
"""The dtypes that NumPy itself has."""


def forms(own: Mapping[str, str], copied: Collection[str] = ()) -> Mapping[str, Form]:
    """The table of a framework: its own types by dtype, some of them copied; else bytes.

    For `dtypes.NARROW` that it lacks, it is the 8-bit integer that their bytes are as well.
    """
    made = {name: Form("bytes", "uint8") for name in dtypes.TABLE}
    made |= {name: Form("alias", NAMES[row.wide.name]) for name, row in dtypes.NARROW.items()}
    return made | {
        name: Form("copy" if name in copied else "alias", kind) for name, kind in own.items()
    }


class Lent(NamedTuple):
    """An array of the framework's own allocator, to be filled in place.

    `memory` is its bytes, which keep it alive: a writable uint8 array or a `DeviceBuffer`.
    """

    array: Any
    memory: Any


class Pool(NamedTuple):
    """What a framework's allocator holds of a device.

    Attributes:
        free: Bytes that it can still give; None if it does not say.
        advice: What to do if a load does not fit, as the end of a sentence.
    """

    free: int | None
    advice: str


class Adapter:
    """Turns views into arrays of one framework on one device; each framework has a subclass.

    Without a `device` to land on, results land on the host, and are copied if the arrays are to lie
    elsewhere. `place` is the framework's own name or object for where they lie.

    Attributes:
        alignment: Bytes on which a tensor must lie to be taken without a copy. Default: the size
            of its element.
        readonly_maps: Whether arrays over maps of files refuse writing.
        counts_items: Whether strides count items, not bytes, so that empty arrays may be longer.
        slices_are_views: Whether `array[:, n]` is known to lie in the memory of the array.
        on_host: Whether the arrays stay in host memory.
        lends_held: Whether what it lends is held already, so that a load needs no more for it.
        allocates: Whether `allocator` takes the framework's memory, as `pool` counts.
        alone: Bytes from which on a tensor has a buffer of its own from there. Default: all tensors
            share buffers.
        devices: Those in whose memory results land; an `Allocation` names them by number.
        unified: Whether the one device is, so that what lands in buffers of the host is there.
        unifies: Whether arrays lie there, and not in memory of the framework, by default.
        notes: Remarks for the user, such as why nothing lands on the device.
    """

    name: str
    forms: Mapping[str, Form]
    alignment: int | None = None
    readonly_maps = False
    slices_are_views = counts_items = False
    on_host = True
    lends_held = allocates = unified = unifies = False
    alone: int | None = None

    def __init__(
        self, place: Any = None, device: Device | None = None, notes: tuple[str, ...] = ()
    ) -> None:
        self.place = place
        self.devices: Sequence[Device] = () if device is None else (device,)
        self.unified = device is not None and device.unified
        self.notes = notes

    def take_traits(self, other: Adapter) -> None:
        """Takes over what does not depend on the device, for an adapter made of others."""
        self.name, self.forms, self.alignment = other.name, other.forms, other.alignment
        self.readonly_maps, self.on_host = other.readonly_maps, other.on_host
        self.slices_are_views, self.counts_items = other.slices_are_views, other.counts_items
        self.allocates, self.alone = other.allocates, other.alone

    def uncommitted(self) -> Adapter:
        """Makes it give arrays that computations may move, as none asked for the device; itself.

        Default: as it is, since other frameworks make no such difference.
        """
        return self

    def allocation(self, request: Request, options: LoadOptions) -> Allocation:
        """Where a request lands; it depends on its dtype and its devices alone."""
        copied = self.forms[request.dtype.name].how == "copy"
        if self.unified and not copied and self._shares(options):
            return HOST
        if self.devices and not options.by_host and options.engine != "mmap":
            return Allocation(0, "mfload" if copied else self.owner(options.allocator), copied)
        copied = copied or not self.on_host
        lent = options.allocator == "framework" and not copied
        return Allocation(None, "framework" if lent else "mfload", copied)

    def _shares(self, options: LoadOptions) -> bool:
        """Whether results land in buffers of the host, which a unified device uses as well."""
        unasked = options.allocator == "auto" and self.unifies
        ours = (unasked or options.allocator == "mfload") and self.owner("mfload") == "mfload"
        return ours and options.engine in ("auto", "pread", "direct")

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
        """Uninitialised arrays of the framework's own allocator, one for each request."""
        device = self.devices[0] if self.devices else None
        made = self.empty([arrives(self.forms, each.dtype, each.shape) for each in requests])
        return [
            Lent(array, memory_at(array, address, request.nbytes, device))
            for request, (array, address) in zip(requests, made, strict=True)
        ]

    def allocator(self, number: int, sizes: Sequence[int]) -> Callable[[int], DeviceBuffer]:
        """What allocates buffers of these sizes, in this order, on the device of that number.

        It is called inside `allocating`, and raises MemoryLimitError if memory is refused. Returns
        at once. Default: mfload's own.
        """
        del sizes
        return self.devices[number].allocate

    def allocating(self) -> AbstractContextManager[object]:
        """What buffers are allocated in; at its end, nothing that ran before uses the memory.

        Allocators of frameworks give memory that was freed to the next array on the same stream,
        where kernels that were started before may still use it.
        """
        return contextlib.nullcontext()

    def empty(self, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[Any, int]]:
        """An uninitialised array and its address for each type of the framework and shape.

        When this returns, nothing that ran before still uses the memory.
        """
        raise NotImplementedError

    def follow(self) -> AbstractContextManager[object]:
        """What another thread enters to get arrays from `lend` as this thread would.

        Frameworks whose allocators go by streams give memory that was freed to the next array of
        the same stream, after what still uses it there: so it has to be this thread's stream.
        """
        return contextlib.nullcontext()

    def with_first(self, array: Any, dim: int) -> Any:
        """An array with the dim of a list first, where the framework's own indexing puts it.

        NumPy does so if an integer is apart from the list. Default: it stays in its place.
        """
        del dim
        return array

    def lazy(self) -> Callable[[Any], Any]:
        """Makes what a user gets of a lazy tensor (`loading.lazy_tensor`). Default: the same."""
        return lambda tensor: tensor

    def pool(self, number: int) -> Pool | None:
        """What the framework's allocator has of a device; None if there is nothing to say."""
        return None


def arrives(
    forms: Mapping[str, Form], dtype: DType, shape: tuple[int, ...]
) -> tuple[str, tuple[int, ...]]:
    """Type and shape of the array that a tensor becomes."""
    how, kind = forms[dtype.name]
    if how == "bytes" or dtype.elements > 1:
        return kind, dtype.storage_shape(shape)
    return kind, shape


def memory_at(owner: Any, address: int, nbytes: int, device: Device | None = None) -> Any:
    """The bytes of an array to be lent, which keep it alive (see `Lent.memory`)."""
    if device is not None:
        from mfload.cuda.memory import DeviceBuffer

        return DeviceBuffer(device, address, nbytes, owner, own=False)
    return array_at(owner, address, (nbytes,))


def in_a_graph(framework: str) -> errors.UsageError:
    """The error for arrays of a framework's own that a CUDA graph would write to when it runs."""
    return errors.UsageError(
        f"a CUDA graph is being captured, and would have {framework}'s memory for itself",
        expected="allocator='auto', or a load outside the capture",
        found="allocator='framework'",
    )


def on_device(view: View) -> bool:
    """Whether a view lies in the memory of a device."""
    return not isinstance(view.memory, np.ndarray)


def host_array(view: View) -> Any:
    """A NumPy array over a view in host memory; of `dtypes.NARROW` a copy, as NumPy keeps them."""
    made = np.ndarray(view.shape, view.dtype.wide.numpy, view.memory, view.at)
    return made.astype(view.dtype.numpy, copy=False)


@contextlib.contextmanager
def full_device(framework: str, kind: type[Exception], says: str = "") -> Generator[None]:
    """A context in which a framework's own error of a full device becomes MemoryLimitError."""
    try:
        yield
    except kind as error:
        if says not in str(error):
            raise
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
    numbers = [
        tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
        for version in (found, oldest)
    ]
    if numbers[0] < numbers[1]:
        raise errors.FrameworkVersionError(
            f"{name} is too old", expected=f"{name} {oldest} or newer", found=found
        )


def split_device(device: str) -> tuple[str, int]:
    """Takes "cuda:1" apart; without a number it is 0."""
    match = re.fullmatch(r"([A-Za-z_]+)(?::(\d+))?", device)
    if match is None:
        raise errors.DeviceError("not a device name", expected="cpu, cuda:0, …", found=device)
    return match[1].lower(), int(match[2] or 0)


def no_device(framework: str, device: object, there: object) -> errors.DeviceError:
    """The error for a device that does not exist; `there` is what the framework lists instead."""
    found = "none" if str(there) in ("", "[]") else str(there)
    return errors.DeviceError(
        f"{framework} has no device {str(device)!r} here; `mfload doctor` says what there is",
        found=found if len(found) <= 300 else f"{found[:300]}…",
    )


Span = tuple[int, int]


class Exported(NamedTuple):
    """What an adapter says of an array that is to be saved; its bytes are read later.

    Attributes:
        read: Gives a NumPy array with one item an element, or the bytes of packed elements, over
            the array's own memory where possible. Items may be integers of the same width.
        span: Host addresses [first, past last) of its elements, gaps between them included; None
            if they lie on a device or in several pieces.
        lies: The same as `read` as it lies, with any strides, for an array in host memory.
        frozen: Whether `read` returns the array's own memory, which can't change while it is held.
    """

    dtype: DType
    shape: tuple[int, ...]
    read: Callable[[], Any]
    span: Span | None = None
    lies: Callable[[], Any] | None = None
    frozen: bool = False


def refuse(framework: str, why: str | None, array: Any) -> None:
    """Raises UnsupportedArrayError if there is a reason why an array can't be saved."""
    if why is not None:
        dtype, kind = getattr(array, "dtype", None), type(array).__name__
        found = kind if dtype is None else f"{kind} of {dtype}"
        raise errors.UnsupportedArrayError(f"{framework}: {why}", found=found)


ROWS = {NAMES[name]: row for name, row in dtypes.TABLE.items()}
"""Rows by the name of `NAMES`."""


def row_of(framework: str, name: str) -> DType:
    """The row of the dtype with that name."""
    row = ROWS.get(name) or dtypes.NARROW.get(name)
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
    return Exported(row, array.shape, lambda: array, span_of(array), lambda: array)


def span_of(array: Any) -> Span:
    """Host addresses [first, past last) of the items of a NumPy array."""
    if not array.size:
        return array.ctypes.data, array.ctypes.data
    return np.lib.array_utils.byte_bounds(array)


def host_units(array: Any, strides: Sequence[int], width: int, owner: Any = None) -> Any:
    """A tensor of torch or Paddle as a NumPy array of integers over its memory on the host.

    It keeps `owner` alive. Default: the tensor.
    """
    steps, held = tuple(width * step for step in strides), array if owner is None else owner
    return array_at(held, array.data_ptr(), tuple(array.shape), f"<u{width}", steps)
