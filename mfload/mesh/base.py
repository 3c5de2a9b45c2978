"""The protocol of mesh backends, and what loads on a mesh want of each tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mfload import errors, frameworks
from mfload.dtypes import DType
from mfload.frameworks.base import Adapter
from mfload.index import Box, TensorInfo
from mfload.options import LoadOptions
from mfload.planning.request import Request, box_of
from mfload.planning.slicing import Selection, boxed
from mfload.runtime import Deadline, gc_paused

if TYPE_CHECKING:  # Only loads of several processes import it.
    from mfload.mesh.link import Link

Shape = tuple[int, ...]
Requests = Mapping[int, Sequence[Request]]
"""The requests of each process, by its number."""

ARRIVAL = 60.0
"""Seconds until a rank must be there of which nothing but `exchange="once"` says that it comes."""
SMALL = "max_host_overhead is too small for an exchange"


class ProcessTransport(NamedTuple):
    """What it takes to move bytes between processes.

    Attributes:
        price: What a byte that comes through hosts costs, in bytes read from the page cache.
        width: Bytes of a row at most. Rows that are copied should fit the processor's cache.
        by_devices: Whether bytes for accelerators travel between these, if they can be connected.
        held: Times the rows of a round that an exchange holds: those to send and those that came,
            and the framework's copies of both, of the round that travels and of the next.
    """

    price: float
    width: int
    by_devices: bool = True
    held: int = 8


GLOO = ProcessTransport(20.0, 2 << 20)
"""An all-to-all of XLA on CPUs: 17 to 23 measured (docs/design/decisions.md)."""


class DeviceShare(NamedTuple):
    """The part of a tensor that one device of one process holds.

    Attributes:
        device: The device, by its number in the table of its own process's devices.
        box: Half-open (start, stop) for each dim of the tensor.
    """

    process: int
    device: int
    box: Box


class TensorShares(NamedTuple):
    """A tensor, the dtype it is delivered in, and which part each device of each process holds.

    Devices that hold the same part get memory of their own if `separate`.
    """

    info: TensorInfo
    dtype: DType
    checked: bool
    shares: tuple[DeviceShare, ...]
    separate: bool = False


class MeshArguments(NamedTuple):
    """Where a user wants tensors to lie: arguments that only a backend looks into.

    Attributes:
        mesh: The value of `mesh=`.
        shardings: The value of `shardings=`.
        unmatched: What becomes of tensors that no rule matches: "replicate", or "error".
        known: Names that rules may be meant for, beside those of the tensors.
    """

    mesh: Any = None
    shardings: Any = None
    unmatched: str = "replicate"
    known: Iterable[str] = ()


class Whole(NamedTuple):
    """A tensor, and the arrays of this process that it is made of, by number of the device."""

    shape: Shape
    dtype: DType
    sharding: Any
    parts: Mapping[int, Any]


class MeshBackend(Protocol):
    """A framework's meshes, for one load; docs/design/mesh-backends.md says how to write one.

    The devices of a process have numbers, by which requests name them. Only the backend looks into
    the shardings that `resolve` makes.

    A backend may have an attribute `transport`, a `ProcessTransport`. Default: `GLOO`. For
    `arrival` seconds, others are waited for that have not begun the load, then an error has the
    advice `absent`. Default: until the timeout. JAX's also has `abstract(requests, shardings)`:
    what the arrays of whole tensors will be, without data; a sharding may be None.

    Attributes:
        rank: The number of this process.
    """

    rank: int

    def group(self) -> tuple[int, int]:
        """The rank of this process in the program, and how many there are."""
        ...

    def processes(self, asked: MeshArguments) -> tuple[int, ...]:
        """The processes that take part in a load; never raises, whatever the arguments are."""
        ...

    def resolve(self, requests: Sequence[Request], asked: MeshArguments) -> list[Any]:
        """A sharding for each whole tensor; what does not fit raises ShardingError."""
        ...

    def shares(self, sharding: Any, shape: Shape) -> tuple[DeviceShare, ...]:
        """The boxes of all devices, also those of other processes; the same on every process."""
        ...

    def separate(self, sharding: Any, dtype: DType, options: LoadOptions) -> bool:
        """Whether devices that hold the same part get memory of their own."""
        ...

    def adapter(self, *, late: bool = False) -> Adapter:
        """Makes arrays on the devices of this process: a tuple for each request, one a device.

        With `late`, all of them go to `assemble`, and may be unfinished until then.
        """
        ...

    def assemble(self, wholes: Iterable[Whole]) -> list[Any]:
        """A sharded array for each tensor."""
        ...

    def platform(self) -> str:
        """The kind of this process's devices, such as "cpu"."""
        ...

    def store(self) -> KeyValueStore | None:
        """What processes agree through; None if they do so by the link."""
        ...

    def link(self, ranks: Sequence[int], width: int, deadline: Deadline) -> Link:
        """What redistributes bytes between processes, in rows of `width` bytes."""
        ...


class KeyValueStore(Protocol):
    """Short texts by key that all processes of a program read and write.

    One a program. Each method raises ProcessError if the store can't be reached. `counts` holds the
    number of loads of each group of processes that this process took part in, and `wrote` the keys
    that it wrote for the last one.
    """

    counts: dict[str, int]
    wrote: dict[str, list[str]]

    def put(self, key: str, text: str) -> None:
        """Writes a text, in place of an older one."""
        ...

    def first(self, key: str, text: str) -> str:
        """Writes a text if there is none; returns the one that is there, on every process."""
        ...

    def texts(self, prefix: str, names: Sequence[str]) -> dict[str, str]:
        """The texts that are there of keys `prefix + name`, by name; the prefix ends with a slash.

        Keys that others put into the store cost nothing.
        """
        ...

    def drop(self, keys: Sequence[str]) -> None:
        """Removes texts."""
        ...


class Backend:
    """What the backends of frameworks have in common (see `MeshBackend`): one device a process.

    Another one has its own `separate`. Its `divided` is asked once for a sharding and a shape.
    """

    transport = GLOO
    arrival = math.inf

    def __init__(self) -> None:
        self.rank, _ = self.group()
        self._shares: dict[Any, tuple[DeviceShare, ...]] = {}

    @staticmethod
    def group() -> tuple[int, int]:
        """The rank of this process, and how many there are."""
        raise NotImplementedError

    def divided(self, sharding: Any, shape: Shape) -> Iterable[DeviceShare]:
        """The part of a tensor that each device holds, on all processes."""
        raise NotImplementedError

    def shares(self, sharding: Any, shape: Shape) -> tuple[DeviceShare, ...]:
        """The same, kept for the next tensor that is alike."""
        key = sharding, shape
        if key not in self._shares:
            self._shares[key] = tuple(self.divided(sharding, shape))
        return self._shares[key]

    def separate(self, sharding: Any, dtype: DType, options: LoadOptions) -> bool:
        """A process has one device, so nothing is shared."""
        return False

    def store(self) -> KeyValueStore | None:
        """Nothing: processes agree by the link."""


class ReachedStore:
    """A store that process 0 keeps; what a framework says of its loss is a ProcessError."""

    framework = ""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.counts: dict[str, int] = {}
        self.wrote: dict[str, list[str]] = {}

    def _reach(self, act: Callable[..., Any], *given: Any, **named: Any) -> Any:
        try:
            return act(*given, **named)
        except RuntimeError as error:  # Also PyTorch's DistNetworkError and DistStoreError.
            raise errors.ProcessError(
                f"the store of {self.framework}.distributed can't be reached: process 0 keeps it",
                found=str(error).splitlines()[0][:300],
            ) from error


_new: Any = tuple.__new__  # Named tuples' own constructors take twice the time.
_Part = tuple[int, Selection | None, tuple[int, ...]]  # Process, selection, devices.


def backend(framework: str) -> MeshBackend:
    """A new backend; raises FrameworkMissingError if the framework can't be imported."""
    return frameworks.require(framework, f"mfload.mesh.{framework}_backend").make()


def requests(wanted: Iterable[TensorShares]) -> dict[int, list[Request]]:
    """What each process requests, by its number; the same on every process.

    A part that several devices of a process hold is one request, unless they get separate memory.
    """
    made: dict[int, list[Request]] = {}
    # Layers of a model are alike, and share what is made of their shares.
    known: dict[Any, tuple[Any, list[_Part]]] = {}
    cuts: dict[Any, Selection | None] = {}
    with gc_paused():
        for each in wanted:
            info, dtype, checked, shares, separate = each
            key = id(shares), info.shape, info.dtype.name, separate
            if key not in known:
                known[key] = (
                    shares,
                    _parts(each, cuts),
                )  # With its shares kept, the id stays theirs.
            for process, selection, devices in known[key][1]:
                row = _new(Request, (info, dtype, selection, checked, devices))
                made.setdefault(process, []).append(row)
    return made


def _parts(wanted: TensorShares, cuts: dict[Any, Selection | None]) -> list[_Part]:
    info, _, _, shares, separate = wanted
    held: dict[tuple[int, Box], list[int]] = {}
    for process, device, box in shares:
        held.setdefault((process, box), []).append(device)
    made: list[_Part] = []
    for (process, box), devices in held.items():
        key = info.dtype.name, info.shape, box
        if key not in cuts:
            cuts[key] = selected(info, box)
        each = [(n,) for n in devices] if separate else [tuple(devices)]
        made += [(process, cuts[key], numbers) for numbers in each]
    return made


def selected(info: TensorInfo, box: Box) -> Selection | None:
    """The selection of a shard; None if it is the whole tensor. Raises ShardingError."""
    try:
        return boxed(info, box)
    except errors.SliceError as error:
        raise errors.ShardingError(
            f"a shard would cut through elements of {info.dtype} that share a byte",
            tensor=info.name,
            expected=error.expected,
            found=f"shard {[list(pair) for pair in box]} of shape {list(info.shape)}",
        ) from None


class TargetBox(NamedTuple):
    """A box of a tensor that a process wants, for one or several of its requests."""

    rank: int
    request: Request
    box: Box
    numbers: list[int]


class WantedTensor(NamedTuple):
    """What all processes want of a tensor.

    Attributes:
        parts: A target for each process and part. Tensors that are alike have the same list: its
            requests may be those of another, and its numbers are places in `numbers`.
        numbers: The number of each request in the list of its process.
    """

    info: TensorInfo
    parts: list[TargetBox]
    numbers: list[int]

    def target(self, part: int) -> TargetBox:
        """A part as this tensor's own target."""
        rank, request, box, at = self.parts[part]
        numbers = self.numbers
        request = _new(Request, (self.info, *request[1:]))
        return _new(TargetBox, (rank, request, box, [numbers[n] for n in at]))


def targets(requests: Requests) -> list[WantedTensor]:
    """What all processes want of each tensor, in file order; requests of the same part are one."""
    known: dict[tuple[object, ...], int] = {}  # Numbers of what a process wants of tensors.
    rows: dict[str, tuple[TensorInfo, list[int], list[int]]] = {}
    for rank in sorted(requests):
        for number, (info, dtype, selection, checked, _) in enumerate(requests[rank]):
            row = rows.get(info.name)
            if row is None:
                row = rows[info.name] = info, [], []
            row[1].append(known.setdefault((rank, id(selection), id(dtype), checked), len(known)))
            row[2].append(number)
    ranks: list[Any] = [rank for rank, *_ in known]
    made: dict[object, list[TargetBox]] = {}
    tensors: list[WantedTensor] = []
    for info, wanted, numbers in rows.values():
        boxes = tuple(box for box, _ in encoded(info))
        own = info.name if boxes and backwards(info) else ""
        kind = info.shape, info.dtype.name, boxes, own, *wanted
        if (parts := made.get(kind)) is None:
            parts = made[kind] = _targets(requests, [ranks[n] for n in wanted], numbers)
        if parts:
            tensors.append(WantedTensor(info, parts, numbers))
    return sorted(tensors, key=lambda each: each.info.pieces[0][:2])


def _targets(requests: Requests, ranks: Sequence[int], numbers: Sequence[int]) -> list[TargetBox]:
    held: dict[object, TargetBox] = {}
    for n, (rank, number) in enumerate(zip(ranks, numbers, strict=True)):
        request = requests[rank][number]
        if request.nbytes:
            key = rank, request.dtype.name, request.checked, box_of(request)
            held.setdefault(key, TargetBox(rank, request, key[-1], [])).numbers.append(n)
    return [*held.values()]


def encoded(info: TensorInfo) -> list[tuple[Box, int]]:
    """The boxes and stored bytes of a tensor's pieces, if some must be decoded as a whole."""
    if info.simple or not any(each.stored and each.stored.encodings for each in info.pieces):
        return []
    found: list[tuple[Box, int]] = []
    for _, _, nbytes, stored in info.pieces:
        box = tuple((0, length) for length in info.shape)
        if stored is not None and info.dtype.elements == 1:
            if stored.flat is not None and box:
                row, (start, stop) = math.prod(info.shape[1:]), stored.flat
                box = ((start // row, -(-stop // row)), *box[1:])
            box = stored.box or box
        if stored is None or stored.inline is None:
            found.append((box, nbytes))
    return found


def backwards(info: TensorInfo) -> bool:
    """Whether encoded pieces have their elements in another order than C: rows are all over them.

    In an exchange, each process reads what it wants of these, as they can't be sent row by row.
    """
    for piece in info.pieces:
        if (stored := piece.stored) is not None and stored.encodings and stored.strides:
            box = stored.box or tuple((0, length) for length in info.shape)
            steps = [s for s, (a, b) in zip(stored.strides, box, strict=False) if b - a > 1]
            if steps != sorted(steps, reverse=True) or steps[-1:] < [0]:
                return True
    return False
