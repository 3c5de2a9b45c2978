"""mfload: stored weights into arrays of your framework, on your devices.

The names below are resolved when first used, so importing mfload imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mfload import errors
    from mfload.api import load, open, plan
    from mfload.errors import MfloadError
    from mfload.io.buffers import live_bytes
    from mfload.packed import unpack
    from mfload.report import Report

__version__ = "0.1.0"

_WHERE = {
    "MfloadError": "mfload.errors",
    "Report": "mfload.report",
    "errors": "mfload.errors",
    "live_bytes": "mfload.io.buffers",
    "load": "mfload.api",
    "open": "mfload.api",
    "plan": "mfload.api",
    "unpack": "mfload.packed",
}

__all__ = [
    "MfloadError",
    "Report",
    "errors",
    "live_bytes",
    "load",
    "open",
    "plan",
    "unpack",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'mfload' has no attribute {name!r}")
    module = importlib.import_module(_WHERE[name])
    value = module if name == "errors" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
