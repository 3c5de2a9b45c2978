"""CuPy: its table, and the errors of a machine without it or without a GPU."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
from conformance.material import COMMON
from conformance.suite import assert_documented, no_gpu

import mfload
from mfload import errors
from mfload.frameworks import cupy_adapter


class TestOnTheHost:
    def test_forms_are_as_stated(self) -> None:
        forms = cupy_adapter.CupyAdapter.forms
        assert {name: form.type for name, form in forms.items() if form.how == "copy"} == COMMON
        assert {form.type for form in forms.values() if form.how == "bytes"} == {"uint8"}
        assert not any(form.how == "alias" for form in forms.values())

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
        with pytest.raises(errors.FrameworkMissingError, match=r"pip install 'mfload\[cuda13\]'"):
            mfload.load(aligned[0], framework="cupy")


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
        assert mfload.live_bytes() == 0
