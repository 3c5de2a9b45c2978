"""Whose array it is, and what is refused before any framework is asked."""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tracemalloc
import weakref
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays

import mfload
from mfload import dtypes, errors, packed
from mfload.dlpack import array_at
from mfload.frameworks import base
from mfload.saving.export import TensorToSave, export

ROOT = Path(__file__).parents[1]


def give(array: Any) -> TensorToSave:
    (one,) = export({"w": array})
    return one


def refused(array: Any) -> errors.UnsupportedArrayError:
    with pytest.raises(errors.UnsupportedArrayError) as caught:
        export({"ok": np.ones(2), "bad": array})
    assert caught.value.tensor == "bad"
    assert isinstance(caught.value, TypeError)
    return caught.value


class TestMapping:
    def test_order_and_names(self) -> None:
        names = ["z", "a", "", "m.0"]
        many = {name: np.full(n, n, np.uint8) for n, name in enumerate(names)}
        assert [one.name for one in export(many)] == names
        assert [one.name for one in export(MappingProxyType(many))] == names
        assert export({}) == []

    @pytest.mark.parametrize("arrays", [None, [np.ones(2)], np.ones(2), [("w", np.ones(2))]])
    def test_no_mapping(self, arrays: Any) -> None:
        with pytest.raises(errors.UsageError, match="by name"):
            export(arrays)

    @pytest.mark.parametrize("name", [0, None, ("layer", "w"), b"w"])
    def test_names_that_are_no_strings(self, name: Any) -> None:
        with pytest.raises(errors.UsageError, match="names are strings") as caught:
            export({name: np.ones(2)})
        assert repr(name) in str(caught.value)

    @pytest.mark.parametrize("inner", [{"w": np.ones(2)}, {}, MappingProxyType({"w": 1})])
    def test_nested(self, inner: Any) -> None:
        error = refused(inner)
        assert "flatten" in str(error)
        assert f"with {errors.counted(len(inner), 'entry', 'entries')}" in str(error)


class TestNoArrays:
    @pytest.mark.parametrize("thing", [1, 1.5, 2j, True, [1.0, 2.0], (1, 2), [[np.float32(1)]]])
    def test_numbers_without_a_dtype(self, thing: Any) -> None:
        assert "asarray" in str(refused(thing))
        assert refused(thing).found == type(thing).__name__

    @pytest.mark.parametrize("thing", [None, "w", b"w", object(), np, float, range(3), {1, 2}])
    def test_others(self, thing: Any) -> None:
        assert "not an array" in str(refused(thing))

    @pytest.mark.parametrize("thing", [np.ndarray, np.float32, ml_dtypes.bfloat16])
    def test_types(self, thing: Any) -> None:
        assert "not an array" in str(refused(thing))


class TestForeign:
    """Arrays of libraries that mfload has never heard of."""

    def test_dlpack(self) -> None:
        class Array:
            def __dlpack__(self, **options: Any) -> Any:
                return numbers.__dlpack__(**options)

            def __dlpack_device__(self) -> tuple[int, int]:
                return numbers.__dlpack_device__()

        numbers = np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2]
        one = give(Array())
        assert (one.dtype.name, one.shape) == ("I16", (3, 2))
        assert one.fetch().tobytes() == numbers.tobytes()
        assert one.span == np.lib.array_utils.byte_bounds(numbers)

    def test_dlpack_of_a_device(self) -> None:
        class Array:
            def __dlpack__(self, **_: Any) -> Any:
                raise AssertionError("must not be asked")

            def __dlpack_device__(self) -> tuple[int, int]:
                return 2, 0

        error = refused(Array())
        assert "copy it to the host" in str(error)
        assert "(2, 0)" in str(error)

    def test_array(self) -> None:
        class Array:
            def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
                return np.arange(3, dtype=np.float32)

        assert give(Array()).fetch().tobytes() == np.arange(3, dtype=np.float32).tobytes()

    def test_what_gives_no_numbers(self) -> None:
        class Array:
            def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
                return np.array([None, "x"], object)

        assert "no dtype" in str(refused(Array()))

    def test_what_raises(self) -> None:
        class Array:
            def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
                raise RuntimeError("not today\nnor tomorrow")

        error = refused(Array())
        assert error.found == "RuntimeError: not today"
        assert isinstance(error.__cause__, RuntimeError)


class TestRecognition:
    def test_a_class_that_names_a_framework_which_is_not_there(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kind = type("Tensor", (), {"__module__": "paddle.base"})
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda x: None if x == "paddle" else find(x)
        )
        with pytest.raises(errors.FrameworkMissingError):
            export({"w": kind()})

    def test_only_whole_names_of_packages_count(self) -> None:
        kind = type("Tensor", (), {"__module__": "torchvision.models"})
        assert "not an array" in str(refused(kind()))

    def test_a_subclass_is_what_it_derives_from(self) -> None:
        class Own(np.ndarray):
            pass

        assert give(np.ones(2, np.int8).view(Own)).dtype.name == "I8"

    def test_a_box_in_a_box(self) -> None:
        inner = type("Variable", (), {"__module__": "keras.src", "value": np.ones(2, np.int8)})()
        outer = type("Param", (), {"__module__": "flax.nnx", "raw_value": inner, "value": 1 / 2})()
        assert give(outer).dtype.name == "I8"

    def test_a_box_that_is_empty(self) -> None:
        kind = type("Variable", (), {"__module__": "keras.src", "value": property(lambda s: 1 / 0)})
        assert "ZeroDivisionError" in str(refused(kind()))

    def test_a_box_that_holds_itself(self) -> None:
        kind = type("Variable", (), {"__module__": "keras.src", "value": property(lambda s: s)})
        assert "not an array" in str(refused(kind()))

    def test_no_framework_is_imported(self) -> None:
        code = """
            import sys
            import numpy as np
            from mfload.saving.export import TensorToSave, export
            export({"a": np.ones(2), "b": np.float32(1)})
            for thing in ([1], {}, None):
                try:
                    export({"bad": thing})
                except TypeError:
                    pass
            frameworks = ("jax", "torch", "tensorflow", "paddle", "cupy", "flax", "keras")
            print([name for name in frameworks if name in sys.modules])
        """
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(line[12:] for line in code.splitlines())],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert done.stdout.strip() == "[]"


class FakeArray:
    """An array on a device, as CuPy has them, whose copy fails as it is told."""

    dtype, shape = np.dtype(np.float32), (2,)

    def __init__(self, error: Exception) -> None:
        self.error = error

    def get(self) -> Any:
        raise self.error


FakeArray.__module__ = "cupy"


class TestFetching:
    @pytest.fixture
    def cupy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("cupy", None))
        module.ndarray, module.__version__ = FakeArray, "99.0"  # pyright: ignore
        monkeypatch.setitem(sys.modules, "cupy", module)

    @pytest.mark.usefixtures("cupy")
    def test_errors_of_the_framework_have_the_name_of_the_tensor(self) -> None:
        for error, kind, found in (
            (RuntimeError("cudaErrorIllegalAddress"), errors.UnsupportedArrayError, "cudaError"),
            (MemoryError("out of it"), errors.MemoryLimitError, "out of it"),
            (errors.DeviceError("gone", tensor="w"), errors.DeviceError, "gone"),
        ):
            one = give(FakeArray(error))
            with pytest.raises(kind, match=found) as caught:
                one.fetch()
            assert caught.value.tensor == "w"

    @pytest.mark.usefixtures("cupy")
    def test_an_interrupt_is_one(self) -> None:
        one = give(FakeArray(KeyboardInterrupt()))  # pyright: ignore
        with pytest.raises(KeyboardInterrupt):
            one.fetch()

    def test_nothing_is_kept(self) -> None:
        class Own(np.ndarray):
            pass

        array = np.ones((3, 4)).T.view(Own)
        gone = weakref.ref(array)
        given = export({"w": array})
        raw = given[0].fetch()
        del array, given
        assert gone() is None
        assert raw.tobytes() == np.ones((4, 3)).tobytes()

    def test_an_array_of_no_dims_and_one_of_no_size(self) -> None:
        for shape in ((), (0,), (3, 0, 2)):
            array = np.zeros(shape, np.float64)
            one = give(array)
            assert (one.shape, one.nbytes) == (shape, array.nbytes)
            raw = one.fetch()
            assert (raw.shape, raw.dtype) == ((array.nbytes,), np.uint8)

    def test_an_array_that_refuses_writing(self) -> None:
        array = np.arange(4, dtype=np.int32)
        array.flags.writeable = False
        raw = give(array).fetch()
        assert raw.ctypes.data == array.ctypes.data
        assert not raw.flags.writeable


class TestStrided:
    @given(data=st.data())
    def test_memory_of_others(self, data: st.DataObject) -> None:
        shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
        kind = data.draw(st.sampled_from(["u1", "u2", "u4", "u8"]))
        whole = np.arange(np.prod(shape), dtype=kind).reshape(shape)
        part = whole[data.draw(arrays.basic_indices(shape, allow_ellipsis=True))]
        part = np.asarray(part)
        seen = array_at(whole, part.ctypes.data, part.shape, f"<{kind}", part.strides)
        assert seen.tolist() == part.tolist()
        assert seen.dtype == part.dtype

    def test_the_owner_lives_as_long(self) -> None:
        class Owner:
            pass

        owner, memory = Owner(), np.arange(4, dtype=np.uint8)
        gone = weakref.ref(owner)
        seen = array_at(owner, memory.ctypes.data, (4,))
        del owner
        gc.collect()
        part = seen[1:]
        del seen
        assert gone() is not None
        assert part.tolist() == [1, 2, 3]
        del part
        assert gone() is None


@pytest.mark.parametrize("tile", [1 << 10, 1 << 14])
@pytest.mark.parametrize("dtype", ["u1", "<f2", ">f4", "<i4", "<f8", "<c8"])
def test_transposed_arrays_of_any_shape_and_steps(
    dtype: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copied in tiles, and the bytes are those of a plain copy in C order."""
    monkeypatch.setattr("mfload.saving.export._TILE", tile)
    monkeypatch.setattr("mfload.saving.export._CACHE", 0)
    chance = np.random.default_rng(0)
    for shape in ((64, 64), (65, 64), (1, 5000, 3), (128, 257), (3, 3, 40, 50), (2, 70, 31, 5)):
        plain = chance.integers(0, 200, shape).astype(dtype)
        for order in ((), tuple(chance.permutation(len(shape)))):
            turned = plain.transpose(order or None)
            for array in (turned, turned[::-1], turned[..., ::2], turned[1:, ::-1]):
                (row,) = export({"w": array})
                wanted = array.astype(array.dtype.newbyteorder("="), order="C")
                assert row.fetch().tobytes() == wanted.tobytes()
    spread = np.broadcast_to(np.arange(100, dtype=dtype)[:, None], (100, 90)).T
    wanted = spread.astype(spread.dtype.newbyteorder("="))
    assert export({"w": spread})[0].fetch().tobytes() == wanted.tobytes()


def test_a_column_is_written_from_where_it_lies() -> None:
    """The stride of a dim of one element says nothing about how an array lies."""

    class Array:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __array__(self, *_: Any, **__: Any) -> Any:
            return self.array

    column = np.arange(200_000, dtype=np.float32).reshape(1, -1).T
    assert column.strides[-1] > column.strides[0]
    assert np.shares_memory(give(Array(column)).fetch(), column)


def test_a_row_for_every_dtype() -> None:
    assert set(base.ROWS.values()) == set(dtypes.TABLE.values())
    for name, row in base.ROWS.items():
        assert row.aliases[0] == name


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
@given(data=st.data())
def test_packing_and_unpacking(dtype: str, data: st.DataObject) -> None:
    row = dtypes.TABLE[dtype]
    count = row.elements * data.draw(st.integers(0, 9))
    codes = data.draw(arrays.arrays(np.uint8, count, elements=st.integers(0, 2**row.bits - 1)))
    raw = packed.pack(codes, row)
    assert (raw.dtype, raw.shape) == (np.uint8, (count * row.bits // 8,))
    assert packed.unpack(raw, row, (count,)).view(np.uint8).tolist() == codes.tolist()
    stream = sum(int(code) << n * row.bits for n, code in enumerate(codes))
    assert raw.tobytes() == stream.to_bytes(raw.size, "little")


@given(arrays.arrays(np.int16, arrays.array_shapes(min_dims=1, max_dims=4, max_side=9)), st.data())
@settings(max_examples=200)
def test_slices_of_what_lies_in_another_order(array: Any, data: Any) -> None:
    lying = array.transpose(data.draw(st.permutations(range(array.ndim))))
    lying = lying[tuple(slice(None, None, data.draw(st.sampled_from([1, 2, -1])))
                        for _ in lying.shape)]  # fmt: skip
    lying = lying.astype(data.draw(st.sampled_from(["<i2", ">i2"])), order="K")
    wanted = lying.astype("<i2").tobytes()
    step = data.draw(st.integers(1, 40))
    with mock.patch("mfload.saving.export._PART", data.draw(st.integers(1, 60)) - 1):
        one = give(lying)
        cut = (one.cut or one.fetch)()
        parts = [cut[at : at + step].tobytes() for at in range(0, cut.nbytes, step)]
    assert b"".join(parts) == wanted


def test_a_transposed_array_is_saved_in_parts(tmp_path: Path) -> None:
    array = np.arange(24 << 20, dtype=np.float32).reshape(6144, 4096).T
    tracemalloc.start()
    mfload.save({"a": array}, tmp_path / "a.safetensors")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < array.nbytes * 3 // 4  # A part that is written, and the next.
    assert np.array_equal(mfload.load(tmp_path / "a.safetensors", "numpy")["a"], array)
    assert mfload.diff({"a": array}, tmp_path / "a.safetensors")
