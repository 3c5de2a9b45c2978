"""Asks NVIDIA's driver what devices there are. Run by `asking`: a driver may hang or crash.

Prints JSON: {"error": …} or {"driver": …, "devices": [{"name", "memory", "pci"}, …], "pairs": …}.
Pairs are [from, to, direct, atomics]: whether one device reaches the memory of another directly,
and with atomic operations, as over NVLink.
"""

from __future__ import annotations

import ctypes
import itertools
import json
from collections.abc import Iterator
from typing import Any

_LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100  # All is well, but no device is there, or none is visible.
_ACCESS, _ATOMICS = 2, 3  # CU_DEVICE_P2P_ATTRIBUTE_…: ACCESS_SUPPORTED, NATIVE_ATOMIC_SUPPORTED.


def _text(library: Any, code: int) -> str:
    name = ctypes.c_char_p()
    library.cuGetErrorName(code, ctypes.byref(name))
    return f"{(name.value or b'an error without a name').decode()} ({code})"


def look(library: Any) -> dict[str, Any]:
    """Driver and devices.

    Args:
        library: CUDA's driver library.
    """
    version, count = ctypes.c_int(), ctypes.c_int()
    for call, arguments in (("cuInit", (0,)), ("cuDeviceGetCount", (ctypes.byref(count),))):
        code = getattr(library, call)(*arguments)
        if code == _NO_DEVICE:
            break
        if code:
            return {"error": f"{call}: {_text(library, code)}"}
    library.cuDriverGetVersion(ctypes.byref(version))
    devices = [_device(library, number) for number in range(count.value)]
    major, rest = divmod(version.value, 1000)
    return {
        "driver": f"{major}.{rest // 10}",
        "devices": devices,
        "pairs": list(_pairs(library, count.value)),
    }


def _pairs(library: Any, count: int) -> Iterator[tuple[int, int, bool, bool]]:
    for one, other in itertools.permutations(range(count), 2):
        direct, atomics = (_has(library, each, one, other) for each in (_ACCESS, _ATOMICS))
        yield one, other, direct, atomics


def _has(library: Any, attribute: int, one: int, other: int) -> bool:
    value = ctypes.c_int()
    code = library.cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, one, other)
    return not code and bool(value.value)


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
        print(json.dumps({"error": str(error), "missing": True}))
        return
    print(json.dumps(look(library)))


if __name__ == "__main__":
    main()
