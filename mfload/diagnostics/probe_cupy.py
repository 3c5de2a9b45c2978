"""Asks whether CuPy works, and compiles. Run by `asking`: it takes seconds, and may crash.

Prints JSON: {"error": …} or {"version": …, "compiling": …}: the latter is what went wrong when a
kernel was compiled and run, null where nothing did.
"""

from __future__ import annotations

import importlib
import json
from typing import Any


def look(cupy: Any) -> dict[str, Any]:
    """Compiles a kernel and runs it.

    Args:
        cupy: The module.
    """
    try:
        kernel = cupy.ElementwiseKernel("float16 x", "float32 y", "y = x + 1", "mfload_probe")
        right = float(kernel(cupy.zeros(3, "float16"))[2]) == 1
        failed = None if right else "a kernel gave a wrong result"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        failed = _short(error)
    return {"version": str(cupy.__version__), "compiling": failed}


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def main() -> None:
    """Prints what it found."""
    try:
        found = look(importlib.import_module("cupy"))
    except Exception as error:  # noqa: BLE001
        found = {"error": _short(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
