"""The interface of the package `safetensors` 0.8; docs/how-to/compat.md says what differs."""

from __future__ import annotations

import importlib
import itertools
import operator
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple

from numpy.lib.array_utils import byte_bounds

from mfload import errors, frameworks
from mfload.dlpack import View, array_at
from mfload.dtypes import TABLE
from mfload.formats import checkpoint, safetensors
from mfload.frameworks.base import ROWS
from mfload.io import route
from mfload.io.mapped import bring_in, map_file
from mfload.loading.lazy import Asked, LazyCheckpoint, TensorSlice
from mfload.loading.session import MAX_RANK
from mfload.options import Options, started
from mfload.sources.memory import MemorySource

_Base: Any = Exception
__version__ = "0.8.0"
with suppress(ImportError):
    from safetensors import SafetensorError as _Base, __version__ as __version__
_FRAMEWORKS = {
    **{name: name for name in ("torch", "numpy", "tensorflow", "jax", "paddle")},
    **{"pt": "torch", "pytorch": "torch", "np": "numpy", "tf": "tensorflow", "flax": "jax"},
}
_PLACED = ("torch", "paddle")  # These take a device, and index tensors themselves.
_DEVICES = frozenset({"cpu", "cuda", "musa", "mps", "npu", "xpu", "xla", "mlu", "hpu"})
_ENGINES: dict[str, Any] = {"mmap": "auto", "pread": "pread"}
_MODULES = ("_safetensors_rust", "flax", "numpy", "paddle", "tensorflow", "torch")
_BYTES = bytes  # A parameter has the name.
_NEAR = 256 << 10
_SMALL = 32 << 20  # Up to here a tensor is read at once, without threads and buffers of its own.
# The order in which the original writes.
_ORDER = (
    "U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E5M2FNUZ",
    "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F6_E3M2", "F6_E2M3", "F4", "BOOL",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'mfload.compat.safetensors' has no attribute {name!r}")
    return importlib.import_module(f"mfload.compat.safetensors.{name}")


class SafetensorError(errors.MfloadError, _Base):
    """An invalid file, argument or tensor; a subclass of the original's error, if there is one."""


class _Translated:
    """Raises mfload's errors as SafetensorError, but for those that the original knows too."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, errors.MfloadError) or isinstance(error, _KNOWN):
            return
        if isinstance(error, errors.SourcePermissionError):  # The original does not tell it apart.
            raise errors.SourceNotFoundError(error.message, file=error.file) from error
        fields = {key: getattr(error, key) for key in ("file", "tensor", "expected", "found")}
        raise SafetensorError(error.message, **fields, problems=error.problems) from error


_KNOWN = (SafetensorError, FileNotFoundError, ImportError, MemoryError, errors.DeviceError)
_translated = _Translated()


class _OpenedFile(NamedTuple):
    """A file; with `source` and `memory`, a private map of it for PyTorch and NumPy."""

    adapter: Any
    checkpoint: LazyCheckpoint[Any]
    source: Any = None
    memory: Any = None

    def known(self, info: Any) -> Any:
        """The row of a tensor, if it would not arrive as bytes: its framework has its dtype."""
        form = self.adapter.forms.get(info.dtype.name)
        if form is None or form.how == "bytes":
            what = f"{self.adapter.name} has no such dtype; mfload.load loads the bytes"
            raise SafetensorError(what, tensor=info.name, found=info.dtype.name)
        return info

    def tensor(self, name: str) -> Any:
        """One tensor."""
        info = self.known(self.checkpoint.info(_is("name", name, str)))
        if self.adapter.name == "torch" and (tensor := self.mapped(info)) is not None:
            return tensor
        return self.settled(self.checkpoint.read(info))

    def tensors(self) -> dict[str, Any]:
        """All tensors: PyTorch's in the map if the page cache holds most of it, else read."""
        with _translated:
            names = self.checkpoint.offset_keys()
            if self.memory is not None and self.adapter.name == "torch":
                (leg,) = route.choose([(self.source, self.source.size)], "auto")
                if not (leg.direct or leg.cold):
                    return {name: self.tensor(name) for name in names}
            for name in names:
                self.known(self.checkpoint.info(name))
            found = self.checkpoint.get_tensors()
        return {name: self.settled(array) for name, array in found.items()}

    def mapped(self, info: Any) -> Any:
        """A tensor over the map; None if it does not lie there as it is."""
        if self.memory is None or not info.simple or len(info.shape) > MAX_RANK:
            return None
        view = View(info.name, info.dtype, info.shape, self.memory, info.pieces[0].offset)
        return self.adapter.wrap([view])[0]

    def part(self, info: Any, index: Any) -> Any:
        """A part of a tensor, other than PyTorch's in the map.

        NumPy takes columns out of all of a small tensor, and copies others, with gaps of a few
        bytes, out of the map: to plan how they are read takes longer.
        """
        if self.adapter.name == "numpy" and len(index) > 1:
            if info.nbytes <= _NEAR:
                return self.checkpoint.read(info)[(*index, ...)].copy()
            array = self.mapped(info)
            if array is not None and not (found := array[index]).flags.c_contiguous:
                start, end = byte_bounds(found)
                if end - start <= 2 * found.nbytes + _NEAR:
                    first = self.memory.ctypes.data
                    bring_in(first, start - first, end - start, self.source)
                    made = found.copy()
                    self.source.check()
                    return made
        return self.settled(self.checkpoint.read_part(info, index))

    def own(self, array: Any) -> Any:
        """A part of an array in memory of its own, in C order."""
        if self.adapter.name == "torch":
            return array.clone(memory_format=frameworks.require("torch").contiguous_format)
        return array.contiguous()

    def settled(self, array: Any) -> Any:
        """An array as the original gives it: JAX's with 64 bits only if `jax_enable_x64` is on."""
        if self.adapter.name == "jax" and array.dtype.itemsize == 8:
            return array.astype(frameworks.require("jax").dtypes.canonicalize_dtype(array.dtype))
        return array


def open_file(path: str | bytes, framework: str, device: Any, backend: str) -> _OpenedFile:
    """Opens a file, or the bytes of one, after a check of all arguments."""
    if (name := _FRAMEWORKS.get(_is("framework", framework, str))) is None:
        expected = " | ".join(_FRAMEWORKS)
        raise SafetensorError("invalid framework", expected=expected, found=framework)
    if _is("backend", backend, str) not in _ENGINES:
        raise SafetensorError("invalid backend", expected=" | ".join(_ENGINES), found=backend)
    place = _place(name, device)
    # What PyTorch has set aside of a device is free for it alone.
    allocator = "framework" if name == "torch" and place != "cpu" else "auto"
    options = Options(engine=_ENGINES[backend], allocator=allocator)
    with _translated:
        _, index, sources = checkpoint.choose(path, started(options), attrgetter("names"))
        adapter = frameworks.get(name, place)
        lazy = LazyCheckpoint(index, sources, adapter, Asked(place, options), small=_SMALL)
        maps = backend == "mmap" and len(sources) == 1 and sources[0].file is not None
        if maps and (name == "numpy" or (name == "torch" and place == "cpu")):
            return _OpenedFile(adapter, lazy, sources[0], map_file(sources[0], []))
        return _OpenedFile(adapter, lazy)


def _place(framework: str, device: Any) -> Any:
    """The device for mfload; None is the framework's default."""
    given = "cpu" if device is None else device
    if isinstance(given, str):
        kind, colon, number = given.partition(":")
        valid = kind in _DEVICES and (not colon or kind != "cpu")
        valid = valid and (not colon or int(number) >= 0)  # ValueError, as in the original.
        given = "cuda:0" if given == "cuda" else given
    else:
        valid = isinstance(given, int) and given >= 0
    if not valid or (given != "cpu" and framework not in _PLACED):
        what = f"invalid device for {framework}"
        raise SafetensorError(what, expected="cpu, cuda:0, …", found=repr(device))
    if framework == "paddle":
        return f"gpu:{given}" if isinstance(given, int) else given.replace("cuda", "gpu")
    return given if framework in _PLACED else None


def _path(filename: Any) -> str:
    """A path as text; TypeError for what is none."""
    return _is("filename", os.fspath(filename), str)


def _is(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {kind.__name__}, got {type(value).__name__}")
    return value


class safe_open:
    """Opens a file to take tensors and slices from; reads its header only.

    Several threads may use it. Slices stay usable when it is closed, as tensors do.

    Args:
        filename: A `.safetensors` file; also what else `mfload.open` takes by its path.
        framework: "pt", "np", "tf", "flax", "paddle", or a longer name of these.
        device: For PyTorch and Paddle, a name such as "cuda:0", or a number. Default: the CPU.
        backend: With "mmap" PyTorch's tensors on the CPU lie in a private map of the file, and
            others are read as mfload sees fit; with "pread" all are read.

    Raises:
        FileNotFoundError: The file can't be opened.
        SafetensorError: The file or an argument is invalid.
    """

    def __init__(
        self, filename: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap"
    ) -> None:
        path = _path(filename)
        self._file: _OpenedFile | None = open_file(path, framework, device, backend)

    def _opened(self) -> _OpenedFile:
        if (opened := self._file) is None:
            raise SafetensorError("the file is closed")
        return opened

    def keys(self) -> list[str]:
        """Names of the tensors, sorted."""
        return self._opened().checkpoint.keys()

    def offset_keys(self) -> list[str]:
        """Names of the tensors in the order in which the file holds them."""
        return self._opened().checkpoint.offset_keys()

    def metadata(self) -> dict[str, str] | None:
        """The strings in the header; None if there are none."""
        return self._opened().checkpoint.metadata()

    def get_tensor(self, name: str) -> Any:
        """One tensor."""
        with _translated:
            return self._opened().tensor(name)

    def get_tensors(self) -> dict[str, Any]:
        """All tensors by name, in the order of the file."""
        return self._opened().tensors()

    def get_slice(self, name: str) -> _Slice:
        """A tensor to be indexed."""
        opened: Any = self._opened()
        with _translated:
            return _Slice(opened, opened.checkpoint.info(_is("name", name, str)))

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *_: object) -> None:
        self._file = None  # Not closed: slices that were taken keep it open.

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle safe_open: open the file in each process")


class _safe_open_handle(safe_open):  # pyright: ignore[reportUnusedClass]
    """`safe_open` of a Python file."""

    def __init__(self, f: Any, framework: str, device: Any = "cpu", *, backend: str = "mmap"):
        super().__init__(f.fileno and f.name, framework, device, backend=backend)


class _Slice(TensorSlice[Any]):
    """A tensor that has not been read; made by `safe_open.get_slice`."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a slice of safe_open: open the file in each process")

    def __getitem__(self, index: Any) -> Any:
        """Reads a part.

        PyTorch's and Paddle's tensors take what their framework takes as an index, others integers
        and slices within the shape.
        """
        opened: Any = self._opened
        with _translated:
            info = opened.known(self._info)
            if opened.adapter.name not in _PLACED:
                return opened.part(info, _checked(index, info.shape))
            small = type(index) is tuple and info.nbytes <= _NEAR
            if opened.memory is not None:
                return opened.tensor(info.name)[index]
            if not small and _is_basic(index):
                return opened.part(info, index)
            return opened.own(opened.tensor(info.name)[index])


def _is_basic(index: Any) -> bool:
    """Whether PyTorch, Paddle and NumPy agree on an index."""
    items: tuple[Any, ...] = index if type(index) is tuple else (index,)
    if sum(item is Ellipsis for item in items) > 1:  # NumPy takes one.
        return False
    rest = (item for item in items if type(item) is not int and item is not Ellipsis)
    return all(isinstance(item, slice) and item.step in (None, 1) for item in rest)


def _checked(index: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """An index that the original takes: other than NumPy's, it must lie within the shape."""
    empty = isinstance(index, list) and not index
    items: Any = index if isinstance(index, tuple) else (slice(0, 0) if empty else index,)
    dots = [n for n, item in enumerate(items) if item is Ellipsis]
    if len(dots) == 1:
        at, missing = dots[0], len(shape) - len(items) + 1
        items = (*items[:at], *[slice(None)] * missing, *items[at + 1 :])
    valid, made = len(items) <= len(shape), list[Any]()
    for item, size in zip(items, shape, strict=False):
        if isinstance(item, slice):
            start, stop = item.start or 0, size if item.stop is None else item.stop
            valid &= 0 <= start <= stop <= size and (start < size or size == 0)
            made.append(item)
            continue
        try:
            made.append(operator.index(item))
        except TypeError:
            valid = False
            break
        valid &= -size <= made[-1] < size
    if not valid:
        expected = f"integers, slices from the start of a dim and one Ellipsis, in {list(shape)}"
        raise SafetensorError("invalid index", expected=expected, found=repr(index))
    return tuple(made)


def deserialize(bytes: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Takes the bytes of a file apart: (name, {"shape", "dtype", "data"}), data a bytearray."""
    with _translated:
        rows, _ = safetensors.read(MemorySource(_is("bytes", bytes, _BYTES)))
    made: list[tuple[str, dict[str, Any]]] = []
    for name, dtype, shape, ((_, start, nbytes, *_), *_) in rows:
        data = bytearray(memoryview(bytes)[start : start + nbytes])
        made.append((name, {"shape": list(shape), "dtype": dtype.name, "data": data}))
    return made


class TensorSpec:
    """A tensor to be written, by the address of its bytes, which must stay valid.

    Args:
        dtype: Its name, such as "float32" or "float4_e2m1fn_x2".
        shape: In items of that dtype; the attribute counts elements.
        data_ptr: The address.
        data_len: Bytes there.

    Raises:
        SafetensorError: There is no such dtype.
    """

    def __init__(self, *, dtype: str, shape: Iterable[int], data_ptr: int, data_len: int) -> None:
        row = ROWS.get(_is("dtype", dtype, str).removesuffix("_x2"))
        if row is None or row.elements > 2 or (row.elements == 2) != dtype.endswith("_x2"):
            raise SafetensorError("unknown dtype", expected=", ".join(ROWS), found=dtype)
        dims = [operator.index(dim) for dim in shape]
        dims[-1:] = [row.elements * dim for dim in dims[-1:]]
        self.dtype, self.shape = row.name, dims
        self.data_ptr, self.data_len = operator.index(data_ptr), operator.index(data_len)

    def __repr__(self) -> str:
        fields = ", ".join(f"{key}={value!r}" for key, value in vars(self).items())
        return f"TensorSpec({fields})"


def serialize(
    tensor_dict: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The bytes of a file with these tensors, equal to what the original writes."""
    return save(_exported(tensor_dict), metadata)


def serialize_file(
    tensor_dict: Mapping[str, TensorSpec], filename: Any, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes such a file; one of that name is replaced once the new one is whole."""
    save_file(_exported(tensor_dict), filename, metadata)


def save(tensors: Any, metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a file with arrays by name, or with what `_exported` gives."""
    with _translated:
        return b"".join(_pieces(tensors, metadata))


def save_file(tensors: Any, filename: Any, metadata: Mapping[str, str] | None = None) -> None:
    """Writes such a file beside its place and renames it, without waiting for the disk."""
    path = _path(filename)
    hidden = os.path.join(os.path.dirname(path), f".mfload-{secrets.token_hex(8)}")
    with _translated:
        pieces = _pieces(tensors, metadata)
        try:
            with open(hidden, "xb") as file:
                for piece in pieces:
                    file.write(piece)
            os.replace(hidden, path)
        except errors.MfloadError:
            raise
        except (OSError, ValueError) as error:
            raise SafetensorError(f"could not write the file: {error}", file=path) from error
        finally:
            with suppress(OSError, ValueError):  # It has its name, or there is none.
                os.unlink(hidden)


def loaders(module: str) -> tuple[Any, Any]:
    """`load_file` and `load` of a module, whose framework must be installed."""
    framework = _FRAMEWORKS[module.rpartition(".")[2]]
    frameworks.require(framework)

    def load_file(filename: Any, device: Any = "cpu", *, backend: str = "mmap") -> dict[str, Any]:
        """All tensors of a file by name (see `safe_open.get_tensors`)."""
        return open_file(_path(filename), framework, device, backend).tensors()

    def load(data: bytes, device: Any = "cpu") -> dict[str, Any]:
        """All tensors of the bytes of a file by name."""
        return open_file(_is("data", data, bytes), framework, device, "mmap").tensors()

    for each in (load_file, load):  # For pickles: pools of processes call them.
        each.__module__, each.__qualname__ = module, each.__name__
    return load_file, load


def _exported(specs: Mapping[str, Any]) -> list[Any]:
    from mfload.saving.export import TensorToSave

    given: list[Any] = []
    for name, spec in specs.items():
        size = _is("a tensor", spec, TensorSpec).data_len
        held = array_at(spec, spec.data_ptr, (size,))
        dtype, shape = TABLE[spec.dtype], tuple(spec.shape)
        given.append(TensorToSave(name, dtype, shape, size, None, held.view))
    return given


def _pieces(given: Any, metadata: Any) -> Iterator[Any]:
    """What a file consists of, checked now, and made when it is asked for."""
    from mfload.saving import export, layout

    names = [row.name for row in given] if isinstance(given, list) else given
    strings = {} if metadata is None else _is("metadata", metadata, dict)
    for text in (*names, *strings, *strings.values()):
        _is("a name, and what metadata holds,", text, str)
    rows = given if isinstance(given, list) else export.export(given)
    rows.sort(key=lambda row: (_ORDER.index(row.dtype.name), row.name.encode()))
    made = layout.lay_out(rows, metadata, 8, ranked=False)
    return itertools.chain([made.header], (row.fetch().data for row in made.entries))
