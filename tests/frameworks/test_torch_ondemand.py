"""PyTorch on weights that are read on demand."""

from __future__ import annotations

from typing import Any

import torch
from conformance.ondemand import Ondemand


class TestTorch(Ondemand):
    framework = "torch"

    def raw(self, array: Any) -> bytes:
        return array.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    def address(self, array: Any) -> int:
        return array.data_ptr()
