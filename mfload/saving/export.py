"""Arrays of any framework as bytes to save.

The framework is told from the modules in which an array's classes are defined. So none is
imported that is not there already, and a subclass of a tensor is that framework's tensor.

Bytes are read late. An array that lies in host memory as the file wants it is written from where
it lies; anything else is copied when its turn comes, so that at most one copy is held.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mfload import dtypes, errors, frameworks, packed
from mfload.dtypes import DType
from mfload.frameworks import base
from mfload.frameworks.base import Exported, Span
from mfload.planning.slicing import boxes_between


class TensorToSave(NamedTuple):
    """A tensor on its way to a file.

    Attributes:
        where: Host addresses [first, past last) between which its elements lie, gaps between
            them counted, or a function that gives them; None if they lie on a device or in
            several pieces.
        fetch: Gives its bytes, one dim of uint8, in C order and little-endian: a view if they
            lie like that, else a copy. To be called once, right before writing.
        owner: A number that no other array has, if only views of this one share its memory;
            None if it may be such a view.
        given: The dtype of the array, if it is one that safetensors lacks.
        cut: The same as `fetch`, but what lies in another order is copied in parts, when slices of
            them are taken, one after the other.
        frozen: Whether `fetch` returns the array's own memory, which can't change while it is held.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    where: Span | Callable[[], Span] | None
    fetch: Callable[[], Any]
    owner: int | None = None
    given: DType | None = None
    cut: Callable[[], Any] | None = None
    frozen: bool = False

    @property
    def span(self) -> Span | None:
        """Host addresses [first, past last) of its elements."""
        return self.where() if callable(self.where) else self.where


# Whose classes are whose, by the first part of the module's name.
_ROOTS = {
    **{name: name for name in ("numpy", "jax", "torch", "tensorflow", "paddle", "cupy")},
    **{"ml_dtypes": "numpy", "jaxlib": "jax", "cupyx": "cupy"},
}
# Classes of these hold an array of a framework.
_BOXES = frozenset({"flax", "keras"})
# DLPack's device types that are host memory: kDLCPU, kDLCUDAHost, kDLROCMHost.
_HOST = (1, 3, 11)
_U8 = np.dtype(np.uint8)
# Elements of a tile, and of its last dim if the others are long: elements that lie a power of two
# apart share few places in the cache. Within so many bytes NumPy is faster.
_TILE, _LAST = 1 << 14, 64
_CACHE = 512 << 10
_PART = 32 << 20  # Bytes that are copied at once of an array that lies in another order.
NATIVE = {
    row.numpy: row for row in dtypes.TABLE.values() if row.numpy is not None and row.elements == 1
}
"""Dtypes of arrays that lie as the file wants them, if they are in C order."""

_Exporter = Callable[[Any], Exported]


def export(arrays: Mapping[str, Any]) -> list[TensorToSave]:
    """What is to be written of each array, in the order of the mapping."""
    if not isinstance(arrays, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.UsageError(
            "arrays are saved by name",
            expected="{name: array}, a tree of arrays, or a module",
            found=type(arrays).__name__,
        )
    exporters: dict[type, _Exporter] = {np.ndarray: _exporter(np.empty(0))}
    return [_native(name, array) or _any(name, array, exporters) for name, array in arrays.items()]


def _native(name: str, array: NDArray[Any]) -> TensorToSave | None:
    """A NumPy array that lies as the file wants it, in a fifth of the time; None for any other."""
    if type(array) is not np.ndarray or type(name) is not str or not array.flags.c_contiguous:
        return None
    row = NATIVE.get(array.dtype)
    if row is None:
        return None
    fetch = functools.partial(as_bytes, array)
    where = functools.partial(base.span_of, array)
    owner = id(array) if array.base is None else None
    return TensorToSave(name, row, array.shape, array.nbytes, where, fetch, owner)


def as_bytes(array: NDArray[Any]) -> Any:
    """The bytes of an array in C order, in place."""
    return (array if array.ndim == 1 else array.reshape(-1)).view(_U8)


def _any(name: Any, array: Any, exporters: dict[type, _Exporter]) -> TensorToSave:
    if not isinstance(name, str):
        raise errors.UsageError(
            "names are strings; join the parts of a path: {'.'.join(path): array}",
            expected="str",
            found=repr(name),
        )
    with _naming(name):
        if type(array) not in exporters:
            array = unboxed(array)
            exporters.setdefault(type(array), _exporter(array))
        exported = exporters[type(array)](array)
    row, shape = exported.dtype.wide, exported.shape
    nbytes = row.size_of(shape)
    if nbytes is None:
        raise errors.UnsupportedArrayError(
            "the elements fill no whole number of bytes; pad the array",
            tensor=name,
            expected=f"a multiple of {row.elements} elements of {row}",
            found=f"shape {list(shape)}",
        )
    fetch = functools.partial(_fetch, name, exported)
    given = None if row is exported.dtype else exported.dtype
    cut = functools.partial(_cut, name, exported, fetch)
    more: dict[str, Any] = {"given": given, "cut": cut, "frozen": exported.frozen}
    return TensorToSave(name, row, shape, nbytes, exported.span, fetch, **more)


def _cut(name: str, exported: Exported, fetch: Callable[[], Any]) -> Any:
    row = exported.dtype
    if exported.lies is None or row.elements > 1 or row.wide is not row:
        return fetch()
    with _naming(name):
        array = exported.lies()
        native = array.dtype.newbyteorder("=")
        if array.flags.c_contiguous and array.dtype == native:
            return as_bytes(array)
        return _InOrder(array, native) if array.nbytes > _PART else fetch()


class _InOrder:
    """The bytes of an array in C order, of which a window is copied when a slice begins there."""

    def __init__(self, array: NDArray[Any], dtype: np.dtype[Any]) -> None:
        self._array, self._dtype = array, dtype
        self.nbytes = self.size = array.nbytes
        self._first, self._window = 0, np.empty(0, _U8)

    def __getitem__(self, part: slice) -> Any:
        start, stop, _ = part.indices(self.nbytes)
        if not self._first <= start <= stop <= self._first + self._window.size:
            self._window = np.empty(0, _U8)
            width = self._dtype.itemsize
            first, end = start // width, -(-max(stop, start + _PART) // width)
            made = np.empty(min(end, self._array.size) - first, self._dtype)
            _copy_in_order(made, self._array, first)
            self._first, self._window = first * width, made.view(_U8)
        return self._window[start - self._first : stop - self._first]


def _copy_in_order(made: NDArray[Any], array: NDArray[Any], first: int) -> None:
    """Fills one dim with the elements of an array from number `first` on, in C order."""
    for box in boxes_between(first, first + made.size, array.shape):
        part = array[tuple(slice(*each) for each in box)]
        _copy_in_tiles(made[: part.size].reshape(part.shape), part)
        made = made[part.size :]


def _fetch(name: str, exported: Exported) -> Any:
    with _naming(name):
        array = exported.read()
        if exported.dtype.name in dtypes.NARROW:
            array = array.view(exported.dtype.numpy).astype(exported.dtype.wide.numpy)
        if exported.dtype.elements > 1 and array.size != exported.dtype.size_of(exported.shape):
            return packed.pack(array, exported.dtype)
        native = array.dtype.newbyteorder("=")
        if array.flags.c_contiguous and array.dtype == native:
            return as_bytes(array.view(np.ndarray))
        made = np.empty(array.shape, native)
        _copy_in_tiles(made, array)
        return as_bytes(made)


def _copy_in_tiles(made: NDArray[Any], array: NDArray[Any]) -> None:
    """Copies an array to one in C order.

    If its rows lie far apart, as those of a transposed one do, it is copied in tiles that stay in
    the processor's cache: their lines are used whole, however the tile is read. NumPy would fetch a
    line for each element.
    """
    steps = [abs(step) for step, size in zip(array.strides, array.shape, strict=True) if size > 1]
    far = array.size > _TILE and min(steps) < steps[-1]
    if not (far and steps[-1] * array.shape[-1] > _CACHE):
        made[...] = array
        return
    *tile, last = array.shape
    last = min(last, _LAST)
    while math.prod(tile) * last > _TILE:
        longest = tile.index(max(tile))
        tile[longest] = -(-tile[longest] // 2)
    tile.append(max(last, _TILE // math.prod(tile)))
    starts = [range(0, size, step) for size, step in zip(array.shape, tile, strict=True)]
    for corner in itertools.product(*starts):
        part = tuple(slice(start, start + n) for start, n in zip(corner, tile, strict=True))
        made[part] = array[part]


@contextmanager
def _naming(name: str) -> Generator[None]:
    """Raises a framework's own errors as mfload's, under the name of the tensor."""
    try:
        yield
    except errors.MfloadError as error:
        error.tensor = error.tensor or name
        raise
    except MemoryError as error:
        raise errors.MemoryLimitError(
            "no memory for a copy of an array that can't be written from where it lies",
            tensor=name,
            found=str(error) or "MemoryError",
        ) from error
    except Exception as error:  # Whatever a framework raises, the array can't be had.
        said = str(error).strip().partition("\n")[0]
        raise errors.UnsupportedArrayError(
            "the array could not be read", tensor=name, found=f"{type(error).__name__}: {said}"
        ) from error


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def unboxed(array: Any) -> Any:
    """What a flax or Keras variable holds."""
    for _ in range(4):  # A box in a box is enough; one that holds itself is not unpacked for ever.
        kind = type(array)
        if _BOXES.isdisjoint(map(_root, kind.__mro__)):
            break
        # What nnx calls it differs by version, and it warns of the older names.
        if hasattr(kind, "get_raw_value"):
            array = array.get_raw_value()
        else:
            array = getattr(array, "raw_value" if hasattr(kind, "raw_value") else "value", array)
    return array


def _exporter(array: Any) -> _Exporter:
    for root in map(_root, type(array).__mro__):
        if root in _ROOTS:
            framework = _ROOTS[root]
            adapter = frameworks.require(framework, f"mfload.frameworks.{framework}_adapter")
            base.check_version(framework, sys.modules[framework].__version__, adapter.OLDEST)
            return adapter.export
    return _export_unknown


def _export_unknown(array: Any) -> Exported:
    """An array of an unknown library, which has to say exactly which numbers it holds."""
    kind = type(array).__name__
    if isinstance(array, Mapping):
        raise errors.UnsupportedArrayError(
            "the mapping is nested; flatten it: {f'{outer}.{inner}': array, …}",
            expected="an array",
            found=f"{kind} with {errors.counted(len(array), 'entry', 'entries')}",
        )
    if not isinstance(array, type):  # A class has the methods and no array.
        if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
            device = array.__dlpack_device__()
            if device[0] not in _HOST:
                raise errors.UnsupportedArrayError(
                    f"{kind}: the array lies on a device; copy it to the host",
                    found=f"DLPack device {tuple(device)}",
                )
            return base.export_numpy(kind, np.from_dlpack(array))
        if hasattr(array, "__array__"):
            return base.export_numpy(kind, np.asarray(array))
    hint = "not an array"
    if isinstance(array, bool | int | float | complex | list | tuple):
        hint = "no dtype: say which is meant, as in numpy.asarray(x, dtype='float32')"
    raise errors.UnsupportedArrayError(hint, expected="an array", found=kind)
