"""Paddle on weights that are read on demand."""

from __future__ import annotations

import warnings
from typing import Any

from conformance.ondemand import Ondemand

with warnings.catch_warnings():
    # Paddle looks for a compiler cache when it is imported, and for setuptools' old parts.
    warnings.simplefilter("ignore")
    import paddle


class TestPaddle(Ondemand):
    framework = "paddle"
    same_as_loaded = False  # F4 takes a byte an element when it is loaded; here it stays packed.

    def raw(self, array: Any) -> bytes:
        return array.numpy().tobytes()

    def address(self, array: Any) -> int:
        return array.data_ptr()

    def expert(self, x: Any, arrays: Any) -> Any:
        hidden = paddle.nn.functional.relu(self.product(x, arrays["up_proj"]))
        return self.product(hidden, arrays["down_proj"])
