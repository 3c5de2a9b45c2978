"""Paddle against the suite that all adapters share, and what is its own."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import paddle
import pytest
from conformance import material
from conformance.material import COMMON, save
from conformance.suite import ENGINES, Conformance

import mfload
from mfload.frameworks import adapter

_NEWEST = adapter.split_version(paddle.__version__) >= (3, 3)


class TestPaddle(Conformance):
    framework = "paddle"
    # U16 would be taken for bfloat16.
    own = {key: name for key, name in COMMON.items() if key != "U16"} | {
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
    }
    not_lent = frozenset({"U32", "U64"})
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
