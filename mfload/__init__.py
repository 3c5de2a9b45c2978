"""mfload: stored weights into arrays of your framework, on your devices.

The names below are resolved when first used, so importing mfload imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mfload import errors
    from mfload.api import abstract, load, open, plan, save
    from mfload.checking.align import Aligned, align
    from mfload.checking.diff import Difference, diff
    from mfload.checking.manifest import Manifest
    from mfload.checking.verify import Verification, verify
    from mfload.cuda.memory import live_bytes
    from mfload.diagnostics.doctor import doctor
    from mfload.diagnostics.findings import Diagnosis
    from mfload.errors import MfloadError
    from mfload.options import Options
    from mfload.packed import unpack
    from mfload.report import Report
    from mfload.saving.save import Saved
    from mfload.trees.keymap import rule
    from mfload.trees.load_into import load_into

__version__ = "0.1.0"

_WHERE = {
    "Aligned": "mfload.checking.align",
    "Diagnosis": "mfload.diagnostics.findings",
    "Difference": "mfload.checking.diff",
    "Manifest": "mfload.checking.manifest",
    "MfloadError": "mfload.errors",
    "Options": "mfload.options",
    "Report": "mfload.report",
    "Saved": "mfload.saving.save",
    "Verification": "mfload.checking.verify",
    "abstract": "mfload.api",
    "align": "mfload.checking.align",
    "diff": "mfload.checking.diff",
    "doctor": "mfload.diagnostics.doctor",
    "errors": "mfload.errors",
    "live_bytes": "mfload.cuda.memory",
    "load": "mfload.api",
    "load_into": "mfload.trees.load_into",
    "open": "mfload.api",
    "plan": "mfload.api",
    "rule": "mfload.trees.keymap",
    "save": "mfload.api",
    "unpack": "mfload.packed",
    "verify": "mfload.checking.verify",
}

__all__ = [
    "Aligned", "Diagnosis", "Difference", "Manifest", "MfloadError", "Options", "Report", "Saved",
    "Verification", "abstract", "align", "diff", "doctor", "errors", "live_bytes", "load",
    "load_into", "open", "plan", "rule", "save", "unpack", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'mfload' has no attribute {name!r}")
    if name == "errors":
        return importlib.import_module("mfload.errors")
    from mfload.runtime import gc_paused

    # While modules are made, the collector would walk all that a framework holds.
    with gc_paused():
        value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*__all__, "__version__"))
