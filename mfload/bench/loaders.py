"""The loaders that are measured: mfload and its peers, each as its own documentation calls it.

No framework is imported before a loader is called, since no process may hold TensorFlow and Paddle
both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from ctypes import c_ubyte
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from mfload import dlpack, frameworks
from mfload.report import Report

PAGE = 4096
Arrays = Mapping[str, Any]
Span = tuple[int, int]
"""Address and bytes of an array."""


class LoaderCall(NamedTuple):
    """What to load; peers load all of the files."""

    path: str | list[str]
    files: list[str]
    names: list[str] | None = None
    threads: int | None = None
    report: Report | None = None


@dataclass(frozen=True, slots=True)
class BenchLoader:
    """One way to load a checkpoint; `needs` are modules that must be installed."""

    name: str
    label: str
    framework: str
    load: Callable[[LoaderCall], Arrays]
    needs: tuple[str, ...]

    @property
    def ours(self) -> bool:
        """Whether it is mfload."""
        return self.name.startswith("mfload-")

    def missing(self) -> list[str]:
        """The modules it needs that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]


def _mfload(call: LoaderCall, *, framework: str, engine: Any) -> Arrays:
    from mfload import api
    from mfload.options import Options

    how = Options(engine=engine, threads=call.threads)
    names, report = call.names, call.report
    return api.load(call.path, framework, names=names, report=report, options=how)


def _safetensors(call: LoaderCall, *, module: str, **options: Any) -> Arrays:
    # Its NumPy loader asks NumPy for bfloat16, which NumPy knows only after this.
    import_module("ml_dtypes")
    load_file = import_module(f"safetensors.{module}").load_file
    arrays: dict[str, Any] = {}
    for path in call.files:
        arrays.update(load_file(path, **options))
    return arrays


def _clone(call: LoaderCall) -> Arrays:
    load_file = import_module("safetensors.torch").load_file
    return {name: t.clone() for path in call.files for name, t in load_file(path).items()}


def _fastsafetensors(call: LoaderCall, *, buffered: bool = False) -> Arrays:
    if buffered:
        os.environ["FASTSAFETENSORS_ODIRECT"] = "0"
    # `nogds` is its path for machines without a GPU. Its tensors share their buffers, so they stay
    # valid after both are closed.
    loader = import_module("fastsafetensors").SafeTensorsFileLoader(None, device="cpu", nogds=True)
    loader.add_filenames({0: call.files})
    buffers = loader.copy_files_to_device()
    arrays = {name: buffers.get_tensor(name) for name in loader.get_keys()}
    buffers.close()
    loader.close()
    return arrays


def _runai(call: LoaderCall) -> Arrays:
    with import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
        streamer.stream_files(call.files)
        # It hands out views of a buffer that it fills again: keeping a tensor means cloning it.
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


def ours(framework: str, engine: str = "auto") -> BenchLoader:
    """mfload, into a framework by an engine."""
    name, label = f"mfload-{framework}", f"mfload → {framework}"
    if engine != "auto":
        name, label = f"{name}-{engine}", f"{label}, engine {engine}"
    load = partial(_mfload, framework=framework, engine=engine)
    return BenchLoader(name, label, framework, load, (framework,))


def _theirs(module: str, framework: str, note: str = "") -> BenchLoader:
    label = f"safetensors.{module}{note}"
    load = partial(_safetensors, module=module)
    return BenchLoader(f"safetensors-{module}", label, framework, load, (framework, "safetensors"))


_TORCH = ("torch", "safetensors")
_FAST = ("torch", "fastsafetensors")
_ALL = (
    *map(ours, ("jax", "torch", "numpy", "tensorflow", "paddle")),
    ours("torch", "mmap"),
    _theirs("torch", "torch", " (maps)"),
    BenchLoader("safetensors-torch-clone", "safetensors.torch + clone", "torch", _clone, _TORCH),
    BenchLoader(
        "safetensors-torch-pread", "safetensors.torch, pread", "torch",
        partial(_safetensors, module="torch", backend="pread"), _TORCH,
    ),
    _theirs("flax", "jax"),
    _theirs("numpy", "numpy"),
    _theirs("tensorflow", "tensorflow"),
    _theirs("paddle", "paddle", " (maps)"),
    BenchLoader("fastsafetensors", "fastsafetensors", "torch", _fastsafetensors, _FAST),
    BenchLoader(
        "fastsafetensors-buffered", "fastsafetensors, buffered", "torch",
        partial(_fastsafetensors, buffered=True), _FAST,
    ),
    BenchLoader(
        "runai-model-streamer", "runai-model-streamer + clone", "torch", _runai,
        ("torch", "runai_model_streamer"),
    ),
)  # fmt: skip
LOADERS: dict[str, BenchLoader] = {loader.name: loader for loader in _ALL}
"""The loaders that are compared, in the order of the tables."""


def find(name: str) -> BenchLoader:
    """The loader of a name, mfload's with any engine among them."""
    who, _, what = name.partition("-")
    framework, _, engine = what.partition("-")
    if who == "mfload" and framework in frameworks.NAMES:
        return ours(framework, engine or "auto")
    return LOADERS[name]


def _numpy(array: Any) -> Span:
    if not array.flags.c_contiguous:
        raise ValueError("the array is not contiguous")
    return array.__array_interface__["data"][0], array.nbytes


def _paddle(array: Any) -> Span:
    nbytes = int(array.size) * array.element_size()
    return array.data_ptr() if nbytes else 0, nbytes


def _tensorflow(array: Any) -> Span:
    nbytes = int(array.shape.num_elements()) * array.dtype.size
    to_dlpack = sys.modules["tensorflow"].experimental.dlpack.to_dlpack
    return dlpack.data_address(to_dlpack(array)) if nbytes else 0, nbytes


SPAN: dict[str, Callable[[Any], Span]] = {
    "numpy": _numpy,
    "torch": lambda array: (array.data_ptr(), array.nbytes),
    "jax": lambda array: (array.unsafe_buffer_pointer(), array.nbytes),
    "tensorflow": _tensorflow,
    "paddle": _paddle,
}
"""How to find an array's memory, by framework."""


def touch(spans: Iterable[Span]) -> int:
    """Reads and sums bytes 0, 4096, 8192, … of every span.

    A map is not loaded before its pages are read, and a copy may end late. By address, no
    framework pays for a conversion, and none can copy.
    """
    total = 0
    for address, nbytes in spans:
        if not nbytes:
            continue
        memory: Any = (c_ubyte * nbytes).from_address(address)
        total += int(np.frombuffer(memory, np.uint8)[::PAGE].sum(dtype=np.uint64))
    return total
