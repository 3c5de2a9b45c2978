"""Where people already load: the seams of other libraries, with mfload under them.

Its modules are imported when first used, since each imports the library that it is for.
"""

from __future__ import annotations

import importlib
from typing import Any

from mfload.compat.patching import patch

__all__ = ["patch"]
_MODULES = ("dcp", "safetensors", "sglang", "transformers", "vllm")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'mfload.compat' has no attribute {name!r}")
    return importlib.import_module(f"mfload.compat.{name}")
