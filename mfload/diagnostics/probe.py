"""Asks NVIDIA's driver or CuPy. Run by `io.subprocess_probe`, since they may hang or crash.

Prints JSON, {"error": …} if there is no answer. "cuda": {"driver", "devices": [{"name", "memory",
"pci"}, …], "pairs": [[from, to, direct, atomics], …]}, where a pair says whether one device reaches
the memory of another directly, and with atomics as over NVLink. "cupy": {"version", "compiling"},
the latter what went wrong when a kernel was compiled and run.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import sys
from typing import Any

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE: none is there, or none is visible.
_ACCESS, _ATOMICS = 2, 3  # CU_DEVICE_P2P_ATTRIBUTE_…: ACCESS_SUPPORTED, NATIVE_ATOMIC_SUPPORTED.


def cuda(library: Any) -> dict[str, Any]:
    """Driver and devices, asked through CUDA's driver library."""
    version, count, has = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    for call, arguments in (("cuInit", (0,)), ("cuDeviceGetCount", (ctypes.byref(count),))):
        code = getattr(library, call)(*arguments)
        if code == _NO_DEVICE:
            break
        if code:
            name = ctypes.c_char_p()
            library.cuGetErrorName(code, ctypes.byref(name))
            text = (name.value or b"an error without a name").decode()
            return {"error": f"{call}: {text} ({code})"}
    library.cuDriverGetVersion(ctypes.byref(version))
    pairs: list[list[Any]] = []
    for one, other in itertools.permutations(range(count.value), 2):
        pairs.append([one, other])
        for attribute in (_ACCESS, _ATOMICS):
            code = library.cuDeviceGetP2PAttribute(ctypes.byref(has), attribute, one, other)
            pairs[-1].append(not code and bool(has.value))
    major, rest = divmod(version.value, 1000)
    devices = [_device(library, number) for number in range(count.value)]
    return {"driver": f"{major}.{rest // 10}", "devices": devices, "pairs": pairs}


def _device(library: Any, number: int) -> dict[str, Any]:
    device, nbytes = ctypes.c_int(), ctypes.c_size_t()
    name, pci = ctypes.create_string_buffer(128), ctypes.create_string_buffer(32)
    library.cuDeviceGet(ctypes.byref(device), number)
    library.cuDeviceGetName(name, len(name), device)
    library.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device)
    library.cuDeviceGetPCIBusId(pci, len(pci), device)
    return {
        "name": name.value.decode(errors="replace"),
        "memory": nbytes.value,
        "pci": pci.value.decode(errors="replace").lower(),
    }


def cupy(module: Any) -> dict[str, Any]:
    """CuPy's version, and whether it compiles a kernel."""
    try:
        kernel = module.ElementwiseKernel("float16 x", "float32 y", "y = x + 1", "mfload_probe")
        right = float(kernel(module.zeros(3, "float16"))[2]) == 1
        failed = None if right else "a kernel gave a wrong result"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        failed = _short(error)
    return {"version": str(module.__version__), "compiling": failed}


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def main(what: str) -> None:
    """Prints the answer."""
    try:
        if what == "cuda":
            found = cuda(ctypes.CDLL("libcuda.so.1"))
        else:
            found = cupy(importlib.import_module("cupy"))
    except Exception as error:  # noqa: BLE001
        found = {"error": _short(error), "missing": what == "cuda" and isinstance(error, OSError)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
