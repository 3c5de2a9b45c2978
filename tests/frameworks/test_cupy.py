"""CuPy: its table, and the errors of a machine without it or without a GPU."""

from __future__ import annotations

import ctypes
import gc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import samples
from conformance import material
from conformance.device_memory import DeviceMemoryConformance, Ground
from conformance.export import kind, read
from conformance.material import COMMON, stored
from conformance.suite import Conformance, assert_documented, no_gpu
from devices.entered import entered
from devices.fake import FakeDevice

import mfload
from mfload import dtypes, errors, frameworks
from mfload.cuda.device import Device
from mfload.cuda.memory import live_bytes
from mfload.dlpack import View
from mfload.frameworks import cupy_adapter
from mfload.frameworks.base import Adapter
from mfload.index import Piece, TensorInfo
from mfload.io import buffers
from mfload.planning.request import Request
from mfload.saving.export import export


class Look(Conformance):
    """What looks into CuPy's arrays; the tests of the host are not for them."""

    framework = "cupy"
    narrow = ()
    own = COMMON

    def type_name(self, array: Any) -> str:
        assert isinstance(array, importlib.import_module("cupy").ndarray)
        return array.dtype.name

    def raw(self, array: Any) -> bytes:
        if not array.nbytes:
            return b""
        if no_gpu() is None:
            return array.get().tobytes()
        # An array on the fake device, which lies in host memory.
        assert array.flags.c_contiguous
        return ctypes.string_at(array.data.ptr, array.nbytes)

    def address(self, array: Any) -> int:
        return array.data.ptr


class WithoutAPool(cupy_adapter.CupyAdapter):
    """For machines without a driver, which would be asked."""

    def pool(self, number: int) -> None:
        return None

    allocator, allocating = Adapter.allocator, Adapter.allocating  # pyright: ignore


class TestLanding(DeviceMemoryConformance):
    look = Look()

    @pytest.fixture(autouse=True)
    def cupy(self) -> Any:
        return pytest.importorskip("cupy")

    def adapter(self, land: Device) -> Adapter:
        return WithoutAPool(importlib.import_module("cupy"), 0, land)

    def test_the_host_alone(self) -> None:
        if not no_gpu():
            with pytest.raises(errors.DeviceError):
                frameworks.get("cupy", "cpu")

    # Memory of its own CuPy has none without a driver.

    def on_a_gpu(self, ground: Ground) -> None:
        if isinstance(ground.device, FakeDevice):
            pytest.skip("CuPy has no memory of its own without a GPU")

    def test_every_dtype_in_memory_of_the_framework(self, ground: Ground) -> None:
        self.on_a_gpu(ground)
        super().test_every_dtype_in_memory_of_the_framework(ground)

    def test_lent_bytes_keep_the_array(self, ground: Ground) -> None:
        self.on_a_gpu(ground)
        super().test_lent_bytes_keep_the_array(ground)

    def test_no_two_arrays_share_bytes(
        self, ground: Ground, zoo: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.on_a_gpu(ground)
        super().test_no_two_arrays_share_bytes(ground, zoo, monkeypatch)

    @pytest.mark.parametrize("allocator", ["auto", "mfload", "framework"])
    @pytest.mark.parametrize("engine", ["auto", "pread", "direct"])
    def test_loading(
        self,
        ground: Ground,
        zoo: Any,
        monkeypatch: pytest.MonkeyPatch,
        engine: str,
        allocator: str,
    ) -> None:
        if allocator == "framework":
            self.on_a_gpu(ground)
        super().test_loading(ground, zoo, monkeypatch, engine, allocator)


class Full(MemoryError):
    """CuPy's OutOfMemoryError derives from it, too."""


class TestItsOwnMemory:
    """With a stand-in that has no `cuda.Device`: the device is current, and nobody sets one."""

    F32 = dtypes.TABLE["F32"]

    @pytest.fixture
    def device(self) -> Iterator[FakeDevice]:
        made = FakeDevice((2, 0), "cuda:0")
        yield made
        made.assert_clean()

    def make(self, device: FakeDevice, **verbs: Any) -> cupy_adapter.CupyAdapter:
        def only_there(verb: Any) -> Any:
            def call(*args: Any, **named: Any) -> Any:
                assert entered()[-1:] == [device]
                return verb(*args, **named)

            return call

        stream = SimpleNamespace(
            synchronize=only_there(lambda: None), is_capturing=only_there(bool)
        )
        cuda = SimpleNamespace(get_current_stream=lambda: stream)
        here = {name: only_there(verb) for name, verb in verbs.items()}
        return cupy_adapter.CupyAdapter(SimpleNamespace(cuda=cuda, **here), 0, device)

    def full(self, *_: Any, **__: Any) -> Any:
        raise Full("Out of memory allocating 512 bytes")

    def test_lent(self, device: FakeDevice) -> None:
        request = Request(TensorInfo("w", self.F32, (4,), (Piece(0, 0, 16),)), self.F32)
        array = SimpleNamespace(data=SimpleNamespace(ptr=4096))
        (lent,) = self.make(device, empty=lambda *_: array).lend([request])
        assert (lent.array, lent.memory.address, lent.memory.nbytes) == (array, 4096, 16)
        with pytest.raises(errors.MemoryLimitError, match=r"CuPy has no room.*512 bytes"):
            self.make(device, empty=self.full).lend([request])

    def test_buffers(self, device: FakeDevice) -> None:
        array = SimpleNamespace(data=SimpleNamespace(ptr=4096))
        given: list[Any] = []
        adapter = self.make(device, empty=lambda *args: given.append(args) or array)
        waited = adapter._cupy.cuda.get_current_stream().synchronize
        adapter._cupy.cuda.get_current_stream().synchronize = lambda: waited() or given.append("")
        with adapter.allocating():
            made = adapter.allocator(0, [16])(16), adapter.allocator(0, [0])(0)
        assert given == [(16, "uint8"), (1, "uint8"), ""]
        assert [(each.owner, each.address) for each in made] == [(array, 4096)] * 2
        assert [each.nbytes for each in made] == [16, 0]
        assert live_bytes() == 0
        adapter = self.make(device, empty=self.full)
        with pytest.raises(errors.MemoryLimitError, match=r"CuPy has no room.*512 bytes"):
            adapter.allocator(0, [512])(512)

    def test_copied_from_the_host(self, device: FakeDevice) -> None:
        view = View("w", self.F32, (2,), np.arange(8, dtype=np.uint8), 0)
        copied = lambda array, blocking=False: array if blocking else None  # noqa: E731
        (made,) = self.make(device, asarray=copied).wrap([view])
        assert made.tobytes() == bytes(range(8))
        with pytest.raises(errors.MemoryLimitError, match=r"CuPy has no room.*512 bytes"):
            self.make(device, asarray=self.full).wrap([view])

    def test_another_thread_takes_its_stream(self, device: FakeDevice) -> None:
        adapter = self.make(device)
        stream = object()
        adapter._cupy.cuda.get_current_stream = lambda: entered() == [device] and stream
        assert adapter.follow() is stream

    def test_the_pool(self, device: FakeDevice) -> None:
        pool = SimpleNamespace(free_bytes=lambda: 5)
        made = self.make(device, get_default_memory_pool=lambda: pool).pool(0)
        assert made is not None
        assert made.free == device.memory_info().free + 5


class TestOnTheHost:
    def test_forms_are_as_stated(self) -> None:
        forms = cupy_adapter.CupyAdapter.forms
        wide = {name: "uint8" if name.startswith("u") else "int8" for name in material.NARROW}
        alias = {name: form.type for name, form in forms.items() if form.how == "alias"}
        assert alias == COMMON | wide
        assert {form.type for form in forms.values() if form.how == "bytes"} == {"uint8"}
        assert not any(form.how == "copy" for form in forms.values())

    def test_the_documented_table(self) -> None:
        assert_documented("cupy")

    def test_no_gpu(self, aligned: Any) -> None:
        if no_gpu() is None:
            pytest.skip("there is a GPU")
        if not importlib.util.find_spec("cupy"):
            pytest.skip("CuPy is not installed")
        for call in (mfload.load, mfload.open, mfload.plan):
            with pytest.raises(errors.DeviceError, match="CUDA") as caught:
                call(aligned[0], framework="cupy")
            assert isinstance(caught.value, RuntimeError)
        with pytest.raises(errors.DeviceError):
            mfload.load(aligned[0], framework="cupy", device="cuda:1")

    def test_a_missing_package(self, aligned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cupy", None)
        with pytest.raises(errors.FrameworkMissingError, match="pip install 'cupy-cuda13x>="):
            mfload.load(aligned[0], framework="cupy")


@pytest.mark.gpu
def test_a_reload_takes_nothing_from_cuda(tmp_path: Path) -> None:
    if reason := no_gpu():
        pytest.skip(reason)
    cupy = pytest.importorskip("cupy")
    numbers = {f"{n}": np.arange(size, dtype=np.float32) for n, size in enumerate([9, 1 << 20, 7])}
    path, pool = samples.save(tmp_path / "m.safetensors", numbers), cupy.get_default_memory_pool()
    held, begun = set[int](), pool.used_bytes()
    for _ in range(3):
        loaded = mfload.load(path, "cupy", device="cuda:0")
        assert pool.used_bytes() - begun == (4 << 20) + 512
        assert live_bytes() == 0
        for name, array in loaded.items():
            assert np.array_equal(array.get(), numbers[name])
        del loaded, array
        gc.collect()
        assert pool.used_bytes() == begun
        held.add(pool.total_bytes())
    assert len(held) == 1


@pytest.mark.gpu
def test_round_trip_on_a_gpu(zoo: Any) -> None:
    """Every dtype bit for bit, and nothing of it left on the host."""
    if reason := no_gpu():
        pytest.skip(reason)
    cupy = pytest.importorskip("cupy")
    path, rows = zoo(40)
    for device in (None, "cuda:0", cupy.cuda.Device(0)):
        loaded = mfload.load(path, framework="cupy", device=device)
        for row in rows:
            array = loaded[row.name]
            assert array.get().tobytes() == row.raw, row.name
            own = row.dtype in COMMON
            assert array.dtype.name == (COMMON[row.dtype] if own else "uint8"), row.name
            assert array.shape == (row.shape if own else row.bytes_shape()), row.name
        assert buffers.live_bytes() == 0  # None of it went by a copy that stayed.
        given = {one.name: one for one in export(loaded)}
        for row in rows:
            assert given[row.name].span is None
            assert given[row.name].fetch().tobytes() == row.raw, row.name
        turned = cupy.arange(15, dtype="float32").reshape(3, 5).T[::-1]
        (one,) = export({"w": turned})
        assert one.fetch().tobytes() == turned.get().tobytes()


class FakeArray:
    """What saving asks of a `cupy.ndarray`, for machines that can't have one."""

    def __init__(self, array: np.ndarray) -> None:
        self.dtype, self.shape = array.dtype, array.shape
        self._array, self.copies = array, 0

    def get(self) -> np.ndarray:
        self.copies += 1
        return self._array


FakeArray.__module__ = "cupy"


class FakeSparse:
    pass


FakeSparse.__module__ = "cupyx.scipy.sparse._csr"


class TestGivingWithoutAGpu:
    """With stand-ins: what is asked for and when, not what CuPy does."""

    @pytest.fixture(autouse=True)
    def fake(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("cupy", None))
        module.ndarray, module.__version__ = FakeArray, "99.0"  # pyright: ignore
        monkeypatch.setitem(sys.modules, "cupy", module)

    def test_every_dtype_is_copied_once_and_late(self) -> None:
        for dtype in COMMON:
            row = stored("w", dtype, (5, 3))
            array = FakeArray(np.frombuffer(row.raw, kind(dtype)).reshape(5, 3))
            (given,) = export({"w": array})
            assert (given.span, array.copies) == (None, 0)
            assert (read(given), array.copies) == (row, 1)

    def test_a_save_in_the_background_brings_it_to_the_host_first(self, tmp_path: Path) -> None:
        array, opened = FakeArray(np.arange(15, dtype=np.float32)), threading.Event()

        def wait(_: int, __: int) -> None:
            assert opened.wait(20)

        pending = mfload.save(
            {"w": array},
            tmp_path / "w.safetensors",
            background=True,
            progress=wait,
        )
        assert array.copies == 1
        opened.set()
        assert (pending.result(20).copied, pending.result().held, array.copies) == (60, 0, 1)
        assert mfload.load(tmp_path / "w.safetensors", "numpy")["w"].tolist() == [*range(15)]

    def test_refusals(self) -> None:
        for array, said in (
            (FakeArray(np.zeros(2, np.complex128)), "no dtype"),
            (FakeSparse(), "toarray"),
        ):
            with pytest.raises(errors.UnsupportedArrayError, match=said) as caught:
                export({"w": array})
            assert caught.value.tensor == "w"
