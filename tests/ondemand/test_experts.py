"""Experts on demand: NumPy against the suite that frameworks share, arguments, faults, memory."""

from __future__ import annotations

from typing import Any

from conformance.ondemand import Ondemand


class TestNumpy(Ondemand):
    framework = "numpy"

    def raw(self, array: Any) -> bytes:
        return array.tobytes()

    def address(self, array: Any) -> int:
        return array.ctypes.data

    def capsule(self, array: Any) -> Any:
        return array.__dlpack__(max_version=(1, 0))
