"""mfload: stored weights into arrays of your framework, on your devices.

The names below, and the modules of the package, are resolved when first used, so importing mfload
imports no framework.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mfload import compat, errors, ondemand
    from mfload.api import abstract, load, load_into, open, plan, restore, save, stream
    from mfload.checking.convert import Aligned, Converted, align, convert
    from mfload.checking.diff import Difference, diff
    from mfload.checking.manifest import Manifest
    from mfload.checking.verify import Verification, verify
    from mfload.cuda.memory import live_bytes
    from mfload.diagnostics.doctor import doctor
    from mfload.diagnostics.findings import Diagnosis
    from mfload.errors import MfloadError
    from mfload.frameworks import Framework
    from mfload.index import TensorInfo
    from mfload.loading.lazy import LazyCheckpoint, TensorSlice
    from mfload.loading.preview import Preview
    from mfload.loading.stream import Stream
    from mfload.options import Options
    from mfload.packed import unpack
    from mfload.peer.seed import Seed, publish, seeds
    from mfload.peer_options import PeerOptions
    from mfload.report import Report
    from mfload.saving.background import PendingSave
    from mfload.saving.save import Saved
    from mfload.trees.keymap import rule

__version__ = "0.1.0"

_NAMES = {
    "api": "abstract load load_into open plan restore save stream",
    "checking.convert": "Aligned Converted align convert",
    "checking.diff": "Difference diff",
    "checking.manifest": "Manifest",
    "checking.verify": "Verification verify",
    "cuda.memory": "live_bytes",
    "diagnostics.doctor": "doctor",
    "diagnostics.findings": "Diagnosis",
    "errors": "MfloadError",
    "frameworks": "Framework",
    "index": "TensorInfo",
    "loading.lazy": "LazyCheckpoint TensorSlice",
    "loading.preview": "Preview",
    "loading.stream": "Stream",
    "options": "Options",
    "peer_options": "PeerOptions",
    "packed": "unpack",
    "peer.seed": "Seed publish seeds",
    "report": "Report",
    "saving.background": "PendingSave",
    "saving.save": "Saved",
    "trees.keymap": "rule",
}
_WHERE = {name: f"mfload.{where}" for where, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Aligned", "Converted", "Diagnosis", "Difference", "Framework", "LazyCheckpoint",
    "Manifest", "MfloadError", "Options", "PeerOptions", "PendingSave", "Preview", "Report",
    "Saved", "Seed", "Stream", "TensorInfo", "TensorSlice", "Verification", "abstract", "align",
    "compat", "convert", "diff", "doctor", "errors", "live_bytes", "load", "load_into",
    "ondemand", "open", "plan", "publish", "restore", "rule", "save", "seeds", "stream",
    "unpack", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        return _module(name)
    from mfload.runtime import explained, gc_paused

    # While modules are made, the collector would walk all that a framework holds.
    with gc_paused():
        value = explained(getattr(importlib.import_module(_WHERE[name]), name), f"mfload.{name}")
    globals()[name] = value
    return value


def _module(name: str) -> Any:
    whole = f"mfload.{name}"
    try:
        if not name.startswith("_"):
            return importlib.import_module(whole)
    except ModuleNotFoundError as error:
        if error.name != whole:
            raise
    text = f"module 'mfload' has no attribute {name!r}"
    raise AttributeError(text, name=name, obj=sys.modules[__name__])  # Python suggests names.


def __dir__() -> list[str]:
    return sorted((*__all__, "__version__"))
