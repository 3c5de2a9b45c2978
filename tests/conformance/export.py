"""What every adapter must make of arrays that are saved. Each framework's test subclasses it."""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
import tracemalloc
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
import reference
import samples
from conformance import material
from conformance.material import BITS, Stored
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as arrays

import mfload
from mfload import errors
from mfload.saving.background import Snapshot
from mfload.saving.export import TensorToSave, export
from mfload.saving.layout import lay_out

NAMES = {**material.COMMON, **material.FLOATS8, "F4": "float4_e2m1fn",
         "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn"}  # fmt: skip
"""What NumPy and ml_dtypes call each dtype."""

LARGE = (1024, 2048)
"""F32 of 8 MiB: more than all that tests allocate by the way."""


def kind(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype of one element, a byte for each packed one."""
    return np.dtype(getattr(ml_dtypes, NAMES[dtype], NAMES[dtype]))


def bits(dtype: str, codes: bytes) -> bytes:
    """Elements of a byte each as the stream of bits that a file holds."""
    if BITS[dtype] >= 8:
        return codes
    stream = sum(
        (code & ((1 << BITS[dtype]) - 1)) << (n * BITS[dtype]) for n, code in enumerate(codes)
    )
    return stream.to_bytes(len(codes) * BITS[dtype] // 8, "little")


def read(given: TensorToSave) -> Stored:
    """What would be written, as a tensor of a file."""
    raw = given.fetch()
    assert (raw.dtype, raw.ndim, raw.flags.c_contiguous) == (np.uint8, 1, True)
    assert raw.size == given.nbytes
    return Stored(given.name, given.dtype.name, given.shape, raw.tobytes())


def give(array: Any, name: str = "w") -> TensorToSave:
    (given,) = export({name: array})
    assert given.name == name
    return given


class ExportConformance:
    """The suite.

    Attributes:
        framework: Its name.
        gives: The dtypes that its arrays have.
        unpacked: The packed ones of them that take a byte an element.
        loaded_as_bytes: Those that a load hands out as bytes all the same.
        reference_lacks: Those that safetensors' own writer does not take from this framework.
        reference_lacks_scalars: Whether it takes none of no dims.
        steps: Whether its arrays can be views with steps, also negative ones.
        turned: Whether transposing one makes a view.
        frozen: Whether arrays can't change, so that a save in the background holds them.
        refused: What can't be saved: a word for each, and one that the message has.
    """

    framework: ClassVar[str]
    gives: ClassVar[tuple[str, ...]]
    unpacked: ClassVar[tuple[str, ...]] = ()
    loaded_as_bytes: ClassVar[tuple[str, ...]] = ()
    reference_lacks: ClassVar[tuple[str, ...]] = ()
    reference_lacks_scalars: ClassVar[bool] = False
    steps: ClassVar[bool] = False
    turned: ClassVar[bool] = True
    refused: ClassVar[Mapping[str, str]]
    frozen: ClassVar[bool] = False

    # What a subclass tells of its framework.

    def made(self, array: np.ndarray) -> Any:
        """The framework's array of a NumPy array, in memory of the framework's."""
        raise NotImplementedError

    def packs(self, dtype: str, array: np.ndarray) -> Any:
        """The same for a packed dtype, where several elements are one of the framework's."""
        raise NotImplementedError

    def address(self, array: Any) -> int:
        """Where its first element lies."""
        raise NotImplementedError

    def turn(self, array: Any, axes: tuple[int, ...]) -> Any:
        """The array with its dims in another order."""
        return array.transpose(axes)

    def reference_save(self, arrays: dict[str, Any]) -> bytes:
        """The file that safetensors itself makes of such arrays."""
        raise NotImplementedError

    def let_go(self, array: Any) -> None:
        """Frees an array that can't change, as far as its framework can."""

    def refusal(self, word: str) -> Any:
        """An array that can't be saved."""
        raise NotImplementedError

    # Every dtype.

    def numbers(self, dtype: str, shape: tuple[int, ...]) -> tuple[Stored, np.ndarray]:
        """A tensor and the NumPy array of it, one item an element."""
        if BITS[dtype] >= 8:
            row = material.stored("w", dtype, shape)
            return row, np.frombuffer(row.raw, kind(dtype)).reshape(shape)
        codes = np.random.default_rng(list(shape)).integers(0, 1 << BITS[dtype], shape, np.uint8)
        row = Stored("w", dtype, shape, bits(dtype, codes.tobytes()))
        return row, codes.view(kind(dtype))

    def test_every_dtype_in_every_shape(self) -> None:
        for dtype in self.gives:
            for shape in material.shapes(dtype):
                row, array = self.numbers(dtype, shape)
                if BITS[dtype] < 8 and dtype not in self.unpacked:
                    if shape[-1] % 2 == 0:
                        raw = np.frombuffer(row.raw, np.uint8).reshape(row.bytes_shape())
                        assert read(give(self.packs(dtype, raw))) == row
                    continue
                assert read(give(self.made(array))) == row, (dtype, shape)

    def test_what_was_loaded_from_a_file_of_the_reference(self, folder: Path) -> None:
        rows = [
            row
            for row in material.zoo(material.WRITER)
            if row.dtype != "F4" or row.shape[-1] % 2 == 0
        ]
        path = material.save_reference(folder / "given.safetensors", rows)
        for engine in ("pread", "mmap"):
            loaded = mfload.load(
                path, framework=self.framework, options=mfload.Options(engine=engine)
            )
            given = {one.name: read(one) for one in export(loaded)}
            assert list(given) == list(loaded)
            for row in rows:
                as_bytes = Stored(row.name, "U8", row.bytes_shape(), row.raw)
                whole = row.dtype in self.gives and row.dtype not in self.loaded_as_bytes
                assert given[row.name] == (row if whole else as_bytes)
            del loaded

    def test_the_same_as_safetensors_makes_of_them(self) -> None:
        made: dict[str, Any] = {}
        for dtype in self.gives:
            if dtype in material.COMMON and dtype not in self.reference_lacks:
                shapes = ((7,), (5, 3), (0, 2), ())
                for shape in shapes[:-1] if self.reference_lacks_scalars else shapes:
                    made[f"{dtype}{list(shape)}"] = self.made(self.numbers(dtype, shape)[1])
        theirs = reference.read(self.reference_save(made))
        ours = {one.name: read(one) for one in export(made)}
        assert {name: (row.dtype, row.shape, row.raw) for name, row in ours.items()} == theirs

    def test_elements_that_fill_no_byte(self) -> None:
        for dtype in self.unpacked:
            count = {4: 2, 6: 4}[BITS[dtype]]
            for shape in ((), (1,), (count + 1,), (3, count - 1)):
                array = self.made(np.zeros(shape, np.uint8).view(kind(dtype)))
                with pytest.raises(errors.UnsupportedArrayError, match="whole number") as caught:
                    export({"ok": self.made(np.zeros(2, np.float32)), "odd": array})
                assert caught.value.tensor == "odd"

    def test_only_the_low_bits_of_unpacked_elements_count(self) -> None:
        for dtype in self.unpacked:
            codes = np.arange(256, dtype=np.uint8)
            given = give(self.made(codes.view(kind(dtype))))
            assert read(given).raw == bits(dtype, codes.tobytes())

    # Every way to lie in memory.

    @given(data=st.data())
    @settings(suppress_health_check=[HealthCheck.differing_executors])
    def test_strides(self, data: st.DataObject) -> None:
        dtype = data.draw(st.sampled_from([d for d in self.gives if BITS[d] >= 8]))
        shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6))
        _, array = self.numbers(dtype, shape)
        made = self.made(array)
        if self.steps and shape:
            index = data.draw(arrays.basic_indices(shape, allow_ellipsis=False))
            array, made = np.asarray(array[index]), made[index]
        if data.draw(st.booleans()):
            axes = tuple(data.draw(st.permutations(range(array.ndim))))
            array, made = array.transpose(axes), self.turn(made, axes)
        whole = np.ascontiguousarray(array).reshape(array.shape)
        assert read(give(made)) == Stored("w", dtype, array.shape, whole.tobytes())

    def test_contiguous_arrays_are_written_from_where_they_lie(self) -> None:
        for dtype in self.gives:
            if BITS[dtype] < 8:
                continue
            made = self.made(self.numbers(dtype, (5, 3))[1])
            given = give(made)
            start = self.address(made)
            assert given.span == (start, start + given.nbytes)
            assert given.fetch().ctypes.data == start

    def test_the_span_of_a_part(self) -> None:
        made = self.made(np.arange(60, dtype=np.float32).reshape(10, 6))
        part = self.turn(made, (1, 0))
        start = self.address(part)
        assert give(part).span == (start, start + 240)
        if self.turned:
            assert start == self.address(made)
        if self.steps:
            part = made[2:9:3, 1:6:2]
            assert give(part).span == (start + 4 * 13, start + 4 * (8 * 6 + 5 + 1))
        empty = give(made[:0]).span
        assert empty is not None
        assert empty[0] == empty[1]

    def test_copies_are_made_when_they_are_asked_for_and_let_go(self) -> None:
        made = self.turn(self.made(np.ones(LARGE, np.float32)), (1, 0))
        gc.collect()
        tracemalloc.start()
        try:
            given = [give(made) for _ in range(3)]
            assert tracemalloc.get_traced_memory()[0] < 1 << 20
            for one in given:
                assert one.fetch().size == 8 << 20
                assert tracemalloc.get_traced_memory()[0] < 1 << 20
            assert tracemalloc.get_traced_memory()[1] < 9 << 20
        finally:
            tracemalloc.stop()

    def test_nothing_is_kept(self, folder: Path) -> None:
        rows = material.aligned()
        path = material.save(folder / "kept.safetensors", rows)
        loaded = mfload.load(path, framework=self.framework, options=mfload.Options(engine="pread"))
        given = export(loaded)
        held = [one.fetch() for one in given]
        del loaded, given
        gc.collect()
        assert held  # The bytes keep what they need alive.
        for raw, row in zip(held, rows, strict=True):
            assert raw.tobytes() == row.raw
        del raw, held
        gc.collect()
        assert mfload.live_bytes() == 0

    def test_what_is_kept_for_the_background_stands(self) -> None:
        for dtype, shape in itertools.product(self.gives, ((5, 3), (700, 800))):
            if BITS[dtype] < 8:
                continue
            _, array = self.numbers(dtype, shape)
            made = self.made(array)
            row, snapshot = give(made), Snapshot()
            (kept,) = snapshot.keep([lay_out([row])], ())
            assert (snapshot.held, snapshot.copied)[self.frozen] == 0
            assert snapshot.held + snapshot.copied == row.nbytes
            if self.frozen:
                self.let_go(made)
            else:
                ctypes.memset(self.address(made), 0xA5, row.nbytes)
            del made, row
            gc.collect()
            # Memory that came free would be taken by these.
            others = [self.made(np.zeros_like(array)) for _ in range(4)]
            assert kept.entries[0].fetch().tobytes() == array.tobytes()
            del others

    # What can't be saved.

    def test_refusals(self) -> None:
        for word, said in self.refused.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Some of these are experiments, some deprecated.
                array = self.refusal(word)
            with pytest.raises(errors.UnsupportedArrayError, match=said) as caught:
                export({"fine": self.made(np.zeros(2, np.float32)), "bad": array})
            assert caught.value.tensor == "bad", word
            assert str(caught.value).startswith(f"{self.framework}: "), word
            assert caught.value.found, word

    def test_frameworks_mix(self) -> None:
        first, second = export(
            {"n": samples.numbers((3,)), "m": self.made(samples.numbers((2, 2)))}
        )
        assert (read(first).raw, read(second).raw) == (
            samples.numbers((3,)).tobytes(),
            samples.numbers((2, 2)).tobytes(),
        )

    def test_a_package_too_old(self, monkeypatch: pytest.MonkeyPatch) -> None:
        array = self.made(np.zeros(2, np.float32))
        export({"w": array})
        module = sys.modules[f"mfload.frameworks.{self.framework}_adapter"]
        monkeypatch.setattr(module, "OLDEST", "999.1")
        with pytest.raises(errors.FrameworkVersionError):
            export({"w": array})
