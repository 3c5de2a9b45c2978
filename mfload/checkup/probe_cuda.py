"""Asks NVIDIA's driver what devices there are. Run by `asking`: a driver may hang or crash.

Prints JSON: {"error": …} or {"driver": …, "devices": [{"name", "memory", "pci"}, …]}.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

_LIBRARY = "libcuda.so.1"


def _text(library: Any, code: int) -> str:
    name = ctypes.c_char_p()
    library.cuGetErrorName(code, ctypes.byref(name))
    return f"{(name.value or b'an error without a name').decode()} ({code})"


def look(library: Any) -> dict[str, Any]:
    """Driver and devices.

    Args:
        library: CUDA's driver library.
    """
    code = library.cuInit(0)
    if code:
        return {"error": f"cuInit: {_text(library, code)}"}
    version, count = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    code = library.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return {"error": f"cuDeviceGetCount: {_text(library, code)}"}
    devices = [_device(library, number) for number in range(count.value)]
    major, rest = divmod(version.value, 1000)
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


def main() -> None:
    """Prints what there is."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        print(json.dumps({"error": f"{_LIBRARY}: {error}", "missing": True}))
        return
    print(json.dumps(look(library)))


if __name__ == "__main__":
    main()
