"""Asks NVIDIA's driver or CuPy. Run by `io.subprocess_probe`, since they may hang or crash.

Prints JSON, {"error": …} if there is no answer. "cuda": {"driver", "devices": [{"name", "memory",
"pci"}, …]}. "cupy": {"version"}.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from typing import Any

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE: none is there, or none is visible.


def cuda(library: Any) -> dict[str, Any]:
    """Driver and devices, asked through CUDA's driver library."""
    version, count = ctypes.c_int(), ctypes.c_int()
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
    major, rest = divmod(version.value, 1000)
    devices = [_device(library, number) for number in range(count.value)]
    return {"driver": f"{major}.{rest // 10}", "devices": devices}


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


def main(what: str) -> None:
    """Prints the answer."""
    try:
        if what == "cuda":
            found = cuda(ctypes.CDLL("libcuda.so.1"))
        else:
            found = {"version": str(importlib.import_module("cupy").__version__)}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        found = {"error": said, "missing": what == "cuda" and isinstance(error, OSError)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
