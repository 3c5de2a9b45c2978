"""Memory of the device that is measured, by address: whichever framework's arrays lie there.

`cpu` stands for host memory, so that the same tasks run where there is no GPU.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from benchmarks.memory import SPAN, fresh_pages
from mfload.bench import loaders
from mfload.bench.loaders import PAGE, Span

HOST = "cpu"
MIB = 1 << 20
_CHUNK = 64 * MIB


def cupy() -> Any:
    """CuPy, through which all of CUDA is reached here."""
    return import_module("cupy")


def spans(framework: str, arrays: Mapping[str, Any]) -> list[Span]:
    """Where arrays lie."""
    return list(map(SPAN[framework], arrays.values()))


def page_sum(places: Iterable[Span], device: str) -> int:
    """The sum of bytes 0, 4096, 8192, … of every span."""
    if device == HOST:
        return loaders.touch(places)
    # Summed up on the host: CuPy compiles no kernel where it finds no headers of CUDA's.
    runtime = cupy().cuda.runtime
    block = host_array(_CHUNK, device)
    total = 0
    try:
        for address, nbytes in places:
            for at in range(0, nbytes, _CHUNK):
                part = block[: min(_CHUNK, nbytes - at)]
                runtime.memcpy(part.ctypes.data, address + at, part.nbytes, 2)
                total += int(part[::PAGE].sum(dtype=np.uint64))
    finally:
        runtime.hostUnregister(block.ctypes.data)
    return total


def begin(framework: str, device: str) -> None:
    """Has a framework make its context on the device."""
    module: Any = import_module(framework)
    if framework == "jax":
        on = module.devices("cpu" if device == HOST else "cuda")[0]
        module.block_until_ready(module.device_put(np.zeros(1, np.uint8), on))
    elif framework == "torch":
        module.zeros(1, device=device)
    else:
        module.zeros(1)


def synchronize(framework: str, arrays: Mapping[str, Any], device: str) -> None:
    """Returns when arrays can be used: the framework's work and the device's are done."""
    if framework == "jax":
        sys.modules["jax"].block_until_ready(list(arrays.values()))
    elif device == HOST:
        return
    elif framework == "torch":
        sys.modules["torch"].cuda.synchronize()
    else:
        cupy().cuda.Device(0).synchronize()


def read(address: int, nbytes: int, device: str) -> bytes:
    """The bytes at an address, as they are now."""
    if device == HOST:
        return ctypes.string_at(address, nbytes)
    into = np.empty(nbytes, np.uint8)
    # On the null stream, which waits for no other one that says so: what is not there yet is seen.
    cupy().cuda.runtime.memcpy(into.ctypes.data, address, nbytes, 2)
    return into.tobytes()


def write(address: int, data: np.ndarray, device: str) -> None:
    """Writes an array's bytes to an address."""
    if device == HOST:
        ctypes.memmove(address, data.ctypes.data, data.nbytes)
    else:
        cupy().cuda.runtime.memcpy(address, data.ctypes.data, data.nbytes, 1)
        cupy().cuda.Device(0).synchronize()


def free(device: str) -> int:
    """Bytes that the device can still give; on the host a figure that never moves."""
    return 0 if device == HOST else int(cupy().cuda.runtime.memGetInfo()[0])


def host_array(nbytes: int, device: str) -> np.ndarray:
    """Host memory on 2 MiB pages, touched, and page-locked where there is a device."""
    held, first = fresh_pages(nbytes)
    array = np.frombuffer(held, np.uint8)[first : first + nbytes]
    array[::PAGE] = 1
    if device != HOST:
        cupy().cuda.runtime.hostRegister(array.ctypes.data, nbytes, 0)
    return array
