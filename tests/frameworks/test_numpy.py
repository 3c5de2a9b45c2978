"""NumPy against the suite that all adapters share, and what is its own."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conformance.material import COMMON, FLOATS8
from conformance.suite import ENGINES, WritableConformance

import mfload
from mfload import errors


class TestNumpy(WritableConformance):
    framework = "numpy"
    bfloat16 = ml_dtypes.bfloat16
    own = COMMON | FLOATS8
    refusing = frozenset({"mmap"})
    on_gpu = False
    no_device = ("cuda:0", "cpu:1", "nonsense", "", 3)

    def type_name(self, array: Any) -> str:
        assert type(array) is np.ndarray
        return array.dtype.name

    def raw(self, array: Any) -> bytes:
        return array.tobytes()

    def address(self, array: Any) -> int:
        return array.ctypes.data

    def overwrite(self, array: Any) -> None:
        array[...] = 1

    @pytest.mark.parametrize("engine", ENGINES)
    def test_only_maps_refuse_writing(self, aligned: Any, engine: str) -> None:
        path, rows = aligned
        loaded = mfload.load(path, framework="numpy", engine=engine)
        writable = {name for name, array in loaded.items() if array.flags.writeable}
        assert writable == (set() if engine == "mmap" else {row.name for row in rows})

    def test_arrays_are_contiguous_and_aligned_for_their_type(self, zoo: Any) -> None:
        for engine in ENGINES:
            for array in mfload.load(zoo(13)[0], framework="np", engine=engine).values():
                assert array.flags.c_contiguous
                assert array.flags.aligned

    def test_unknown_framework(self, aligned: Any) -> None:
        with pytest.raises(errors.UsageError, match="unknown framework"):
            mfload.load(aligned[0], framework="nympy")
