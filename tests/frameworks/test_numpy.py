"""NumPy against the suite that all adapters share, and what is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import samples
from conformance.export import ExportConformance, give, read
from conformance.material import BITS, COMMON, FLOATS8, Stored
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
        loaded = mfload.load(path, framework="numpy", options=mfload.Options(engine=engine))
        writable = {name for name, array in loaded.items() if array.flags.writeable}
        assert writable == (set() if engine == "mmap" else {row.name for row in rows})

    def test_arrays_are_contiguous_and_aligned_for_their_type(self, zoo: Any) -> None:
        for engine in ENGINES:
            for array in mfload.load(
                zoo(13)[0], framework="np", options=mfload.Options(engine=engine)
            ).values():
                assert array.flags.c_contiguous
                assert array.flags.aligned

    def test_many_empty_arrays_of_huge_dims(self, tmp_path: Path) -> None:
        """All of them together would be more than NumPy can count."""
        rows: list[Any] = []
        for number in range(300):
            shape, raw = ((8,), bytes(8)) if number % 2 else ((0, 2**62), b"")
            rows.append((str(number), "U8", shape, raw))
        loaded = mfload.load(samples.save_raw(tmp_path / "a.safetensors", rows), "numpy")
        assert [loaded[row[0]].shape for row in rows] == [row[2] for row in rows]

    def test_unknown_framework(self, aligned: Any) -> None:
        with pytest.raises(errors.UsageError, match="unknown framework"):
            mfload.load(aligned[0], framework="nympy")


class TestNumpyGives(ExportConformance):
    framework = "numpy"
    gives = tuple(BITS)
    unpacked = ("F4", "F6_E2M3", "F6_E3M2")
    loaded_as_bytes = unpacked
    steps = True
    refused: ClassVar = {
        "complex128": "no dtype",
        "longdouble": "no dtype",
        "object": "no dtype",
        "str": "no dtype",
        "bytes": "no dtype",
        "StringDType": "no dtype",
        "datetime64[s]": "no dtype",
        "timedelta64[s]": "no dtype",
        "V2": "no dtype",
        "structured": "no dtype",
        "float8_e3m4": "no dtype",
        "masked": "filled",
        "dtype": "not an array",
    }

    def made(self, array: np.ndarray) -> Any:
        return array.copy()

    def address(self, array: Any) -> int:
        return array.ctypes.data

    def reference_save(self, arrays: dict[str, Any]) -> bytes:
        return safetensors.numpy.save(arrays)

    def refusal(self, word: str) -> Any:
        own = {
            "str": np.array(["a"]),
            "bytes": np.array([b"a"]),
            "StringDType": np.array(["a"], np.dtypes.StringDType()),
            "structured": np.zeros(2, [("a", "f4"), ("b", "i4")]),
            "masked": np.ma.masked_array([1.0, 2.0], [True, False]),
            "dtype": np.dtype("f4"),
        }
        return own[word] if word in own else np.zeros(2, getattr(ml_dtypes, word, word))

    def test_the_other_byte_order(self) -> None:
        for dtype in COMMON:
            row, array = self.numbers(dtype, (5, 3))
            other = array.astype(array.dtype.newbyteorder(">"))
            if array.itemsize > 1:
                assert other.tobytes() != row.raw
            for swapped, wanted in ((other, array), (other.T[::-1], array.T[::-1])):
                given = give(swapped)
                assert read(given) == Stored("w", dtype, wanted.shape, wanted.tobytes())

    def test_numbers_repeated(self) -> None:
        few = np.arange(3, dtype=np.int16)
        many = np.broadcast_to(few, (4, 3))
        given = give(many)
        assert read(given).raw == few.tobytes() * 4
        assert given.span == (few.ctypes.data, few.ctypes.data + 6)

    def test_single_numbers(self) -> None:
        for dtype, name in COMMON.items():
            row, array = self.numbers(dtype, ())
            single = array[()]
            assert isinstance(single, np.generic | ml_dtypes.bfloat16), name
            assert read(give(single)) == row

    def test_maps_and_other_subclasses(self, tmp_path: Path) -> None:
        numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
        np.save(tmp_path / "a.npy", numbers)
        mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
        assert type(mapped) is np.memmap
        given = give(mapped)
        assert given.fetch().ctypes.data == mapped.ctypes.data
        assert type(given.fetch()) is np.ndarray
        assert read(give(numbers.view(np.matrix))).shape == (3, 4)
        alike = np.arange(3, dtype=np.longlong)
        assert read(give(alike)).dtype == "I64"
