"""CuPy: arrays over buffers on a CUDA device, of CuPy's allocator or mfload's, at any alignment.

Not through DLPack, where CuPy lacks bfloat16 in places and names the 8-bit floats wrongly.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mfload import errors
from mfload.cuda import discovery
from mfload.dlpack import View, Views
from mfload.frameworks import base
from mfload.frameworks.traits import TRAITS

if TYPE_CHECKING:
    from mfload.cuda.device import Device
    from mfload.cuda.memory import DeviceBuffer

OLDEST = "14.2"  # The first whose streams leave those of others alone; bfloat16 came with 14.0.


class CupyAdapter(base.Adapter):
    """Arrays on the CUDA device of number `place` (see `base.Adapter`)."""

    name = "cupy"
    on_host = False
    allocates = unifies = True
    forms = TRAITS["cupy"].forms()

    def __init__(self, cupy: Any, number: int, device: Device) -> None:
        super().__init__(number, device)
        self._cupy = cupy

    def wrap(self, views: Sequence[View]) -> list[Any]:
        if type(views) is Views and not any(type(each) is np.ndarray for each in views.memory):
            return self._in_columns(views)
        return [self._over(view) if base.on_device(view) else self._copy(view) for view in views]

    def _over(self, view: View) -> Any:
        pointer = self._cupy.cuda.MemoryPointer(self._held(view.memory), view.at)
        return self._cupy.ndarray(view.shape, view.dtype.wide.numpy, pointer)

    def _held(self, memory: Any) -> Any:
        given = memory.address, memory.nbytes, memory, self.place
        return self._cupy.cuda.UnownedMemory(*given)

    def _in_columns(self, views: Views) -> list[Any]:
        array, pointer = self._cupy.ndarray, self._cupy.cuda.MemoryPointer
        kinds = [(shape, dtype.wide.numpy) for dtype, shape in views.kinds]
        held = [*map(self._held, views.memory)]
        columns = views.kind, views.buffers.tolist(), views.at.tolist()
        return [
            array(*kinds[kind], pointer(held[buffer], at))
            for kind, buffer, at in zip(*columns, strict=True)
        ]

    def _copy(self, view: View) -> Any:
        with self._current():
            host = base.host_array(view._replace(dtype=view.dtype.wide))
            # Other streams than the current one would not wait for the copy.
            return self._cupy.asarray(host, blocking=True)

    @contextlib.contextmanager
    def _current(self) -> Generator[None]:
        # Not by `cupy.cuda.Device`: at its end it sets the device that was, so that a thread that
        # had none would get one, and memory taken on device 0.
        with self.devices[0].current(), base.full_device("CuPy", MemoryError):
            yield

    def allocator(self, number: int, sizes: Sequence[int]) -> Callable[[int], DeviceBuffer]:
        return self._allocate

    def _allocate(self, nbytes: int) -> DeviceBuffer:
        if self._is_capturing():
            return self.devices[0].allocate(nbytes)
        with self._current():
            held = self._cupy.empty(max(nbytes, 1), "uint8")
        return base.memory_at(held, held.data.ptr, nbytes, self.devices[0])

    @contextlib.contextmanager
    def allocating(self) -> Generator[None]:
        with self._current():
            yield
            # CuPy gives memory that was freed to the next array on the same stream, where kernels
            # that were started before may still use it.
            if not self._is_capturing():
                self._cupy.cuda.get_current_stream().synchronize()

    def _is_capturing(self) -> bool:
        """Whether a graph is captured that would be spoiled if the current stream were waited for.

        It may be captured on another one, if this is the legacy default stream.
        """
        try:
            with self.devices[0].current():
                return self._cupy.cuda.get_current_stream().is_capturing()
        except RuntimeError:
            return True

    def empty(self, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[Any, int]]:
        with self.allocating():
            if self._is_capturing():
                raise base.in_a_graph("CuPy")
            arrays = [self._cupy.empty(shape, kind) for kind, shape in wanted]
        return [(array, array.data.ptr) for array in arrays]

    def follow(self) -> AbstractContextManager[object]:
        with self._current():
            return self._cupy.cuda.get_current_stream()

    def with_first(self, array: Any, dim: int) -> Any:
        return self._cupy.moveaxis(array, dim, 0)

    def pool(self, number: int) -> base.Pool | None:
        with self._current():
            kept = self._cupy.get_default_memory_pool().free_bytes()
        return base.Pool(
            self.devices[number].memory_info().free + kept,
            f"allocator='mfload' can't use the {errors.amount(kept)} that CuPy keeps for itself; "
            "in Python, cupy.get_default_memory_pool().free_all_blocks() gives them back",
        )


def make(device: object) -> CupyAdapter:
    """The adapter for a device."""
    discovery.count()  # Asked first because the import takes seconds and tells less.
    cupy: Any = importlib.import_module("cupy")
    base.check_version("cupy", cupy.__version__, OLDEST)
    if isinstance(device, cupy.cuda.Device):
        device = f"cuda:{cast(Any, device).id}"
    kind, number = base.split_device("cuda:0" if device is None else str(device))
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise base.no_device("CuPy", device, error) from error
    if kind not in ("cuda", "gpu") or number >= count:
        raise base.no_device("CuPy", device, f"{count} CUDA devices")
    return CupyAdapter(cupy, number, discovery.find(number))


def export(array: Any) -> base.Exported:
    """What is to be saved of a CuPy array; it is copied to the host when its turn comes."""
    if not isinstance(array, importlib.import_module("cupy").ndarray):
        base.refuse("cupy", "not a dense array; save x.toarray()", array)
    return base.Exported(base.row_of("cupy", array.dtype.name), array.shape, array.get)
