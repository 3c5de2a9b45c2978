"""PyTorch against the suite that all adapters share, and what is its own."""

from __future__ import annotations

import gc
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conformance import material
from conformance.material import COMMON, FLOATS8, save
from conformance.suite import ENGINES, WritableConformance

import mfload


class TestTorch(WritableConformance):
    framework = "torch"
    bfloat16 = torch.bfloat16
    # What a version has no name for arrives as bytes.
    own: ClassVar = {
        key: name
        for key, name in (COMMON | FLOATS8 | {"F4": "float4_e2m1fn_x2"}).items()
        if hasattr(torch, name)
    }

    def type_name(self, array: Any) -> str:
        assert type(array) is torch.Tensor
        return str(array.dtype).removeprefix("torch.")

    def raw(self, array: Any) -> bytes:
        return array.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()

    def address(self, array: Any) -> int:
        return array.data_ptr()

    def overwrite(self, array: Any) -> None:
        array.fill_(1)

    @pytest.mark.parametrize("engine", ENGINES)
    def test_training_changes_no_file(self, tmp_path: Any, engine: str) -> None:
        row = material.Stored("w", "F32", (8, 8), np.ones(64, np.float32).tobytes())
        path = save(tmp_path / "w.safetensors", [row])
        before = path.read_bytes()
        weight = mfload.load(path, framework="pt", engine=engine)["w"].requires_grad_()
        (weight * 3).sum().backward()
        with torch.no_grad():
            weight -= weight.grad
        assert weight.detach().unique().tolist() == [-2.0]
        assert path.read_bytes() == before

    def test_views_of_views(self, aligned: Any) -> None:
        path, rows = aligned
        row = next(row for row in rows if row.dtype == "I32")
        part = mfload.load(path, framework="torch", engine="pread")["I32"].T[3:, 1:][-1, -1]
        gc.collect()
        assert mfload.live_bytes() > 0
        assert part.item() == int(np.frombuffer(row.raw, np.int32).reshape(row.shape)[-1, -1])

    def test_devices(self, aligned: Any) -> None:
        path, rows = aligned
        self.assert_loaded(mfload.load(path, framework="torch", device=torch.device("cpu")), rows)
        nowhere = mfload.load(path, framework="torch", device="meta", names=["F32"])["F32"]
        assert nowhere.is_meta
        with torch.device("meta"):
            assert mfload.load(path, framework="torch", names=["F32"])["F32"].is_meta
