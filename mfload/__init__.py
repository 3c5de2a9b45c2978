"""mfload: stored weights into arrays of your framework, on your devices.

The names below are resolved when first used, so importing mfload imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mfload import errors
    from mfload.aligning.align import Aligned, align
    from mfload.api import abstract, load, open, plan, save
    from mfload.checks.comparing import diff
    from mfload.checks.difference import Difference
    from mfload.checks.manifest import Manifest
    from mfload.checks.verification import Verification
    from mfload.checks.verifying import verify
    from mfload.checkup.diagnose import doctor
    from mfload.checkup.diagnosis import Diagnosis
    from mfload.devices.live import live_bytes
    from mfload.errors import MfloadError
    from mfload.into.load_into import load_into
    from mfload.mapping import rule
    from mfload.packed import unpack
    from mfload.report import Report
    from mfload.saving.save import Saved

__version__ = "0.1.0"

_WHERE = {
    "Aligned": "mfload.aligning.align",
    "Diagnosis": "mfload.checkup.diagnosis",
    "Difference": "mfload.checks.difference",
    "Manifest": "mfload.checks.manifest",
    "MfloadError": "mfload.errors",
    "Report": "mfload.report",
    "Saved": "mfload.saving.save",
    "Verification": "mfload.checks.verification",
    "abstract": "mfload.api",
    "align": "mfload.aligning.align",
    "diff": "mfload.checks.comparing",
    "doctor": "mfload.checkup.diagnose",
    "errors": "mfload.errors",
    "live_bytes": "mfload.devices.live",
    "load": "mfload.api",
    "load_into": "mfload.into.load_into",
    "open": "mfload.api",
    "plan": "mfload.api",
    "rule": "mfload.mapping",
    "save": "mfload.api",
    "unpack": "mfload.packed",
    "verify": "mfload.checks.verifying",
}

__all__ = [
    "Aligned",
    "Diagnosis",
    "Difference",
    "Manifest",
    "MfloadError",
    "Report",
    "Saved",
    "Verification",
    "abstract",
    "align",
    "diff",
    "doctor",
    "errors",
    "live_bytes",
    "load",
    "load_into",
    "open",
    "plan",
    "rule",
    "save",
    "unpack",
    "verify",
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
