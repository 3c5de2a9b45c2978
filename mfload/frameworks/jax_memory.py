"""JAX's devices and its memory: what is filled in place, and a program can take over afterwards.

Only a compiled program is certain to give memory that XLA has allocated. On a GPU one program,
which is compiled while headers are read, makes slabs of one size; the buffers of a plan lie in
these, where they follow each other, and arrays are views of the buffers.

On a CPU, XLA takes over whole arrays of its own only, no views. There a program makes one array of
every kind that is still wanted, and there are as many programs as kinds differ in their counts, a
few for most models. No program makes two of a kind: XLA computes once what is equal and copies it.
The first time in a process, 291 arrays of an 8B Llama take 0.27 s on a CPU of two cores, and 18,723
of a mixture of experts 0.5 s.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import experimental
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mfload import dtypes, errors, runtime
from mfload.dlpack import View, Views, capsule, capsules
from mfload.frameworks import base, private_api
from mfload.io import buffers
from mfload.planning.layout import DEVICE_ALIGNMENT

if TYPE_CHECKING:
    from mfload.cuda.device import Device
    from mfload.cuda.memory import DeviceBuffer
    from mfload.dtypes import DType

log = logging.getLogger("mfload")

_KINDS = 4096  # Of arrays, of which an open checkpoint keeps what describes them.
_NO_MESH = Mesh(np.empty((), object), ())


@contextlib.contextmanager
def undisturbed() -> Generator[None]:
    """A context in which JAX ignores what users set for their own code.

    64-bit types keep their width, the mesh of `jax.set_mesh`, which refuses jitted functions on
    any other devices, is unset, programs are compiled also within `jax.disable_jit`, and no
    transfer guard refuses a copy that a load or a save is.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.transfer_guard("allow"))
        stack.enter_context(jax.disable_jit(disable=False))
        enable_x64: Any = (jax if hasattr(jax, "enable_x64") else experimental).enable_x64
        stack.enter_context(enable_x64(True))
        stack.enter_context(jax.ensure_compile_time_eval())
        if hasattr(jax, "set_mesh"):
            with contextlib.suppress(ValueError):  # While a function is traced, none can be unset.
                stack.enter_context(jax.set_mesh(_NO_MESH))
        yield


class Uncommitter:
    """Makes arrays of one device that are not committed to it, over the memory of given ones.

    As JAX makes them where nothing names a device: in a computation they follow those that are.
    """

    def __init__(self) -> None:
        self._wrapper = private_api.jax_wrapper() or (lambda _: _uncommitted)
        self._known: dict[Any, Callable[[tuple[Any]], Any]] = {}

    def __call__(self, array: Any, dtype: DType, shape: tuple[int, ...]) -> Any:
        """The array for one of a tensor; those of one dtype and shape are on one device."""
        return self._wrap_of((id(dtype), shape), array)((array,))

    def each(self, arrays: Iterable[Any], views: Sequence[View]) -> list[Any]:
        """The same for the arrays of many views, each of which is let go at once."""
        known, wrap_of = self._known.get, self._wrap_of
        kinds: Iterable[Any] = ((id(view.dtype), view.shape) for view in views)
        if type(views) is Views:
            each = [(id(dtype), shape) for dtype, shape in views.kinds]
            kinds = map(each.__getitem__, views.kind)
        made: list[Any] = []
        for kind, array in zip(kinds, arrays, strict=True):
            made.append((known(kind) or wrap_of(kind, array))((array,)))
            del array
        return made

    def _wrap_of(self, kind: tuple[int, tuple[int, ...]], array: Any) -> Any:
        wrap = self._known.get(kind)  # Of rows of the table, which stay.
        if wrap is None:
            if len(self._known) >= _KINDS:
                self._known.clear()
            wrap = self._known[kind] = self._wrapper(array)
        return wrap


def _uncommitted(arrays: tuple[Any]) -> Any:
    (array,) = arrays
    with undisturbed(), jax.default_device(array.device):
        return jax.block_until_ready(jax.device_put(np.asarray(array)))


def layout_of(form: Any) -> Any:
    """The layout in one of JAX's Formats, None if it has none; until 0.7 they were Layouts."""
    found = getattr(form, "layout", getattr(form, "device_local_layout", None))
    return found if hasattr(found, "major_to_minor") else None


def laid_out(array: Any, form: Any) -> Any:
    """An array with its elements in the order that a Format names; new memory if they are not."""
    form = type(form)(layout_of(form), array.sharding)
    with full_device(), undisturbed():
        return jax.block_until_ready(jax.device_put(array, form))


class OnDevice:
    """A view as JAX's public import wants it: an object that names its device."""

    def __init__(self, view: View, device: Any) -> None:
        self._view = view
        # JAX looks for the number among this process's devices; `id` counts those of all.
        there = base.on_device(view)
        self._place = view.memory.device.place if there else (1, device.local_hardware_id)

    def __dlpack__(self, **_: object) -> Any:
        # Whatever stream is named: all that was written is there when a view is made.
        return capsule(self._view, device_id=self._place[1])

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._place


def importer(device: Any, there: Device | None = None) -> Callable[[View], Any]:
    """What makes arrays on a `jax.Device` over views of its memory; `there` is it, if not a CPU."""

    def publicly(view: View) -> Any:
        with undisturbed():
            return jax.dlpack.from_dlpack(OnDevice(view, device))

    take = _raw_importer(device, there)
    return publicly if take is None else lambda view: take(capsule(view), device, None)


def _raw_importer(device: Any, there: Device | None) -> Callable[..., Any] | None:
    with jax.transfer_guard("allow"):
        return private_api.jax_capsule_importer(device, there)


def imported(views: Views, device: Any, there: Device | None = None) -> Iterator[Any]:
    """The arrays that `importer` makes of many views."""
    take = _raw_importer(device, there)
    if take is None:
        return map(importer(device, there), views)
    return (take(each, device, None) for each in capsules(views))


def find_device(device: Any) -> tuple[Device | None, tuple[str, ...]]:
    """What `base.find_device` says of a `jax.Device`; None if it is not NVIDIA's."""
    # An AMD card calls itself "gpu" too; Apple's is "METAL".
    if device.platform != "gpu" or "rocm" in device.client.platform_version.lower():
        return None, ()
    return base.find_device(device.local_hardware_id)


def pool(device: Any, there: Device) -> base.Pool:
    """What XLA's allocator has of a `jax.Device`, which is the device `there`."""
    # If XLA does not know a number, it says -1.
    stats = {name: n for name, n in (device.memory_stats() or {}).items() if n >= 0}
    free = None
    if "bytes_limit" in stats and "bytes_in_use" in stats:
        free = stats["bytes_limit"] - stats["bytes_in_use"]
        if "pool_bytes" in stats:
            # What it has not set aside yet, others may have taken.
            free = min(free, stats["pool_bytes"] - stats["bytes_in_use"] + there.memory_info().free)
    return base.Pool(
        free,
        "allocator='framework' lands in what JAX has set aside for itself; before JAX starts, "
        "XLA_PYTHON_CLIENT_PREALLOCATE=false has it set nothing aside, and "
        "XLA_PYTHON_CLIENT_MEM_FRACTION says how much of the device it may have",
    )


class NewArray(NamedTuple):
    """An array to be made on a `jax.Device`, in one of its memories (None for the default)."""

    device: Any
    memory: str | None
    dtype: str
    shape: tuple[int, ...]


_Kind = tuple[str | None, str, tuple[int, ...]]


def allocate(wanted: Sequence[NewArray]) -> list[Any]:
    """New arrays, in order, whose memory nothing that ran before still uses.

    XLA hands out memory in the order of its own stream. An array is ready when that stream has
    come to where it was made, whether or not something was written there.
    """
    # The n-th array of a kind on each device is made by the n-th run of a program.
    seen: Counter[NewArray] = Counter()
    places: dict[tuple[int, _Kind], dict[Any, int]] = {}
    for number, each in enumerate(wanted):
        places.setdefault((seen[each], each[1:]), {})[each.device] = number
        seen[each] += 1
    runs: dict[tuple[int, tuple[Any, ...]], list[_Kind]] = {}
    for (run, kind), numbers in places.items():
        devices = tuple(sorted(numbers, key=lambda device: device.id))
        runs.setdefault((run, devices), []).append(kind)
    made: dict[int, Any] = {}
    for (run, devices), kinds in runs.items():
        kinds.sort(key=repr)  # The same order in every run: then it is the same program.
        with full_device(), undisturbed():
            arrays = jax.block_until_ready(_program(devices, tuple(kinds))())
        for kind, array in zip(kinds, arrays, strict=True):
            for shard in array.addressable_shards:
                made[places[run, kind][shard.device]] = shard.data
    return [made[number] for number in range(len(wanted))]


full_device = functools.partial(
    base.full_device, "JAX", jax.errors.JaxRuntimeError, "RESOURCE_EXHAUSTED"
)
"""A context in which JAX's own error of a full device becomes MemoryLimitError."""


@functools.lru_cache(maxsize=256)
def _program(devices: tuple[Any, ...], kinds: tuple[_Kind, ...]) -> Callable[[], tuple[Any, ...]]:
    # A mesh for this alone, of which nothing is seen outside: replicas have memory of their own,
    # and one program makes them all.
    mesh = Mesh(np.array(devices, object), ("device",))
    there = [NamedSharding(mesh, PartitionSpec(), memory_kind=kind[0]) for kind in kinds]
    if len(devices) == 1:  # Such an array is the one shard of itself.
        there = [SingleDeviceSharding(devices[0], memory_kind=kind[0]) for kind in kinds]

    def make() -> tuple[Any, ...]:
        return tuple(_new(shape, dtype) for _, dtype, shape in kinds)

    return jax.jit(make, out_shardings=tuple(there))


# Public since 0.8; until then it took no shape. For an H100, XLA of JAX 0.11.2 compiles it to
# memory without a kernel; on the CPU it is zeros.
_new: Callable[..., Any] = getattr(jax.lax, "empty", jnp.zeros)

SLAB = 128 << 20
"""Bytes of most slabs: XLA makes one in 0.03 ms (an H100). While one tensor lives, all slabs
that its buffer lies in stay, which is less than two slabs more than the buffer."""

_STEP = 2 << 20
_MANY = 16  # Of so many slabs on, the last is as large as the others; one more program costs more.


def slab_bytes(nbytes: int) -> int:
    """The size of a slab for so many bytes: up to an eighth larger, and by less than 2 MiB.

    So a few programs serve all small ones.
    """
    step = min(_STEP, 1 << max(8, nbytes.bit_length() - 4))
    return max(step, -(-nbytes // step) * step)


def begin_slab(device: Any, nbytes: int = SLAB) -> Future[Callable[[], Any]]:
    """Begins to compile what makes slabs of at least so many bytes on a `jax.Device`."""
    program = _slab_program(device, slab_bytes(nbytes))
    if program.done() and program.exception():
        _slab_program.cache_clear()
        program = _slab_program(device, slab_bytes(nbytes))
    return program


def slabs(device: Any, sizes: Sequence[int]) -> list[Any]:
    """New arrays of at least so many bytes each, ready as those of `allocate`."""
    with full_device(), undisturbed():
        made = [begin_slab(device, nbytes).result()() for nbytes in sizes]
        return jax.block_until_ready(made)


@functools.lru_cache(maxsize=256)
def _slab_program(device: Any, nbytes: int) -> Future[Callable[[], Any]]:
    def compiled() -> Any:
        there = SingleDeviceSharding(device)
        with undisturbed():
            program = jax.jit(lambda: _new((nbytes,), "uint8"), out_shardings=there)
            return program.lower().compile()

    return _started(compiled)


class Slabs:
    """Makes the buffers of one load, of sizes that are known, in this order.

    They lie in slabs that follow each other in memory, each buffer in one or more of these. A
    buffer that finds no place, since XLA gives memory here and there, has a slab of its own.
    """

    def __init__(self, device: Any, there: Device, sizes: Sequence[int]) -> None:
        self._device, self._there = device, there
        self._sizes = [-(-nbytes // DEVICE_ALIGNMENT) * DEVICE_ALIGNMENT for nbytes in sizes]
        self._fills: bool | None = None
        self._places: Iterator[_Place] | None = None
        begin_trial(device, there)
        count, rest = divmod(sum(self._sizes), SLAB)
        if rest and count >= _MANY:
            count, rest = count + 1, 0
        self._wanted = [SLAB] * count + [rest] * (rest > 0)
        for nbytes in dict.fromkeys(self._wanted):
            begin_slab(device, nbytes)

    def __call__(self, nbytes: int) -> DeviceBuffer:
        """The next buffer."""
        if self._fills is None:
            self._fills = fillable(self._device, self._there)
        if not (nbytes and self._fills):
            return self._there.allocate(nbytes)
        if self._places is None:
            # Slabs that no buffer lies in go at once.
            self._places = iter(_placed(self._sizes, slabs(self._device, self._wanted)))
        place = next(self._places)
        if place is None:
            alone = slabs(self._device, [nbytes])
            place = alone, private_api.jax_address(alone[0])
        return base.memory_at(*place, nbytes, self._there)


_Place = tuple[list[Any], int] | None
"""The slabs that a buffer lies in, and its address; None if there is no place for it."""


def _placed(sizes: Iterable[int], made: Iterable[Any]) -> list[_Place]:
    """Where each buffer lies that is not empty."""
    ordered = sorted(((private_api.jax_address(x), x) for x in made), key=itemgetter(0))
    starts = [start for start, _ in ordered]
    runs: list[list[int]] = []  # What is free of slabs without a gap: its first byte, and its end.
    for start, each in ordered:
        if not (runs and runs[-1][1] == start):
            runs.append([start, start])
        runs[-1][1] += each.nbytes
    places: list[_Place] = []
    for nbytes in filter(None, sizes):
        run = next((run for run in runs if run[1] - run[0] >= nbytes), None)
        if run is None:
            places.append(None)
            continue
        at, run[0] = run[0], run[0] + nbytes
        within = slice(bisect_right(starts, at) - 1, bisect_left(starts, at + nbytes))
        places.append(([each for _, each in ordered[within]], at))
    return places


def _started(act: Callable[[], Any]) -> Future[Any]:
    """What a function will return, in a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is wanted.
            future.set_exception(error)

    # At its end, the interpreter waits for it: XLA must not compile while it goes.
    runtime.start(run, "mfload-xla", daemon=False)
    return future


def fillable(device: Any, there: Device) -> bool:
    """Whether slabs of XLA's on a device can be filled in place, past XLA.

    Tried until there is an answer (see `begin_trial`).
    """
    try:
        problem = begin_trial(device, there).result()
    except errors.MemoryLimitError as error:
        begin_trial.cache_clear()  # There may be room the next time.
        problem = f"there was no room to try: {error}"
    if problem:
        log.info("%s: tensors land in mfload's memory, since in XLA's own %s", device, problem)
    return not problem


@functools.lru_cache(maxsize=64)
def begin_trial(device: Any, there: Device) -> Future[str]:
    """Begins to try, in a thread, whether slabs can be filled; the answer says why not.

    Two new ones are written to from a stream of our own, and JAX must find in a view of each what
    was written there. `there` is the same device, which writes.
    """
    return _started(functools.partial(_problem, device, there))


_TRIAL = 4096  # int32 elements: some pages.


def _problem(device: Any, there: Device) -> str:
    try:
        made = slabs(device, [4 * _TRIAL] * 2)
        wanted = [np.arange(_TRIAL, dtype=np.int32) * -977 + first for first in (5, 1 << 30)]
        take, views = importer(device, there), []
        for each, numbers in zip(made, wanted, strict=True):
            address = private_api.jax_address(each)
            memory = base.memory_at(each, address, numbers.nbytes, there)
            _write(there, memory, numbers)
            views.append(take(View("trial", dtypes.TABLE["I32"], numbers.shape, memory, 0)))
        # What was written to the second must not be seen in the first.
        with jax.transfer_guard("allow"):
            found = list(map(np.asarray, views))
        if all(map(np.array_equal, found, wanted)):
            return ""
    except errors.MemoryLimitError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever goes wrong, there is another way.
        return str(error) or type(error).__name__
    return "JAX does not see what was written to a slab, or sees it in another"


def _write(there: Device, target: DeviceBuffer, numbers: Any) -> None:
    from mfload.cuda.device import DeviceRows

    source = buffers.allocate(numbers.nbytes)
    source.view(numbers.dtype)[:] = numbers
    locked = contextlib.ExitStack()
    with contextlib.suppress(errors.MemoryLimitError):  # Pageable memory will do, too.
        there.pin(source)
        locked.callback(there.unpin, source)
    # Once the stream is closed, nothing reads the source any more.
    with locked, contextlib.closing(there.stream()) as stream:
        stream.copy_in(target, 0, source, DeviceRows.one(source.size))
        stream.synchronize()
