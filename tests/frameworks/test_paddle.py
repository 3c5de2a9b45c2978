"""Paddle against the suite that all adapters share, and what is its own."""

from __future__ import annotations

import gc
import warnings
from typing import Any, ClassVar

import numpy as np
import pytest
from conformance import material
from conformance.material import COMMON, save
from conformance.suite import ENGINES, WritableConformance

import mfload

with warnings.catch_warnings():
    # Paddle looks for a compiler cache when it is imported, and for setuptools' old parts.
    warnings.simplefilter("ignore")
    import paddle

# Paddle has them since 3.3.
UNSIGNED = ("U32", "U64") if hasattr(paddle, "uint32") else ()


class TestPaddle(WritableConformance):
    framework = "paddle"
    bfloat16 = paddle.bfloat16
    own: ClassVar = {
        key: name
        for key, name in COMMON.items()
        # U16 would be taken for bfloat16.
        if key not in ("U16", "U32", "U64") or key in UNSIGNED
    } | {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
    parts_alias = False

    def type_name(self, array: Any) -> str:
        assert isinstance(array, paddle.Tensor)
        return str(array.dtype).removeprefix("paddle.")

    def raw(self, array: Any) -> bytes:
        return array.numpy().tobytes()

    def address(self, array: Any) -> int:
        return array.data_ptr()

    def overwrite(self, array: Any) -> None:
        array.fill_(1)

    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("landing", ["mfload", "framework"])
    def test_u16_is_never_taken_for_bfloat16(
        self, tmp_path: Any, engine: str, landing: str
    ) -> None:
        numbers = np.array([[0x3F80, 0x4000], [1, 65535]], np.uint16)
        row = material.Stored("n", "U16", (2, 2), numbers.tobytes())
        path = save(tmp_path / "n.safetensors", [row], 8)
        tensor = mfload.load(path, framework="paddle", engine=engine, landing=landing)["n"]
        assert tensor.dtype == paddle.uint8
        assert mfload.unpack(tensor, "U16", (2, 2)).tolist() == numbers.tolist()
        with mfload.open(path, framework="paddle", engine=engine) as opened:
            column = opened.get_slice("n")[:, 1]
        assert column.dtype == paddle.uint8
        assert mfload.unpack(column, "uint16", (2,)).tolist() == [0x4000, 65535]

    @pytest.mark.parametrize("engine", ENGINES)
    def test_tensors_of_no_size_keep_nothing(self, tmp_path: Any, engine: str) -> None:
        rows = [
            material.stored("a", "F32", (0, 3)),
            material.stored("b", "U8", (6,)),
            material.stored("c", "U8", (0,)),
            material.stored("d", "BF16", (64,)),
        ]
        path = save(tmp_path / "empty.safetensors", rows)
        for order in ("abcd", "dcba", "cabd"):
            loaded = mfload.load(path, framework="paddle", engine=engine)
            self.assert_loaded(loaded, rows)
            for name in order:
                del loaded[name]
            gc.collect()
            assert mfload.live_bytes() == 0

    def test_training_changes_no_file(self, tmp_path: Any) -> None:
        row = material.Stored("w", "F32", (8, 8), np.ones(64, np.float32).tobytes())
        path = save(tmp_path / "w.safetensors", [row])
        before = path.read_bytes()
        for engine in ENGINES:
            weight = mfload.load(path, framework="paddle", engine=engine)["w"]
            weight.stop_gradient = False
            (weight * 3).sum().backward()
            with paddle.no_grad():
                weight.subtract_(weight.grad)
            assert float(weight.sum()) == -128.0
            assert path.read_bytes() == before

    def test_computing(self, tmp_path: Any) -> None:
        numbers = np.random.default_rng(5).normal(size=(70, 33)).astype(np.float32)
        rows = [
            material.stored("odd", "U8", (3,)),
            material.Stored("w", "F32", numbers.shape, numbers.tobytes()),
        ]
        path = save(tmp_path / "w.safetensors", rows, 8)
        for landing in ("mfload", "framework"):
            tensor = mfload.load(path, framework="paddle", landing=landing)["w"]
            product = paddle.matmul(tensor, tensor, transpose_y=True).numpy()
            np.testing.assert_allclose(product, numbers @ numbers.T, 1e-3, 1e-4)

    def test_devices(self, aligned: Any) -> None:
        path, rows = aligned
        loaded = mfload.load(path, framework="paddlepaddle", device=paddle.CPUPlace())
        self.assert_loaded(loaded, rows)


def test_the_public_way_gives_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        material.stored("w", "F32", (3, 5), 1),
        material.stored("b", "BF16", (7,), 2),
        material.stored("e", "F8_E4M3", (4,), 3),
        material.stored("u", "U64", (2,), 4),
    ]
    path = save(tmp_path / "w.safetensors", rows)
    monkeypatch.setattr("mfload.frameworks.seams.paddle_constructor", lambda _: None)
    loaded = mfload.load(path, framework="paddle")
    assert mfload.live_bytes() == 0  # Copies: nothing of ours is held.
    TestPaddle().assert_loaded(loaded, rows)
