"""Weights that stay on flash: each step reads what it needs into memory that is not moved about.

The names below are resolved when first used; frameworks are imported when arrays are made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mfload.ondemand.bundles import Bundled, Unbundled, bundle, unbundle
    from mfload.ondemand.experts import ExpertCache
    from mfload.ondemand.layers import LayerStream
    from mfload.ondemand.neurons import NeuronCache
    from mfload.ondemand.predictor import Predictor, load_predictors, save_predictors
    from mfload.ondemand.report import OndemandReport

_NAMES = {
    "bundles": "Bundled Unbundled bundle unbundle",
    "experts": "ExpertCache",
    "layers": "LayerStream",
    "neurons": "NeuronCache",
    "predictor": "Predictor load_predictors save_predictors",
    "report": "OndemandReport",
}
_WHERE = {
    name: f"mfload.ondemand.{where}" for where, names in _NAMES.items() for name in names.split()
}

__all__ = [
    "Bundled", "ExpertCache", "LayerStream", "NeuronCache", "OndemandReport", "Predictor",
    "Unbundled", "bundle", "load_predictors", "save_predictors", "unbundle",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "policies":  # The module, whose classes a cache takes.
        return importlib.import_module("mfload.ondemand.policies")
    if name not in _WHERE:
        raise AttributeError(f"module 'mfload.ondemand' has no attribute {name!r}")
    from mfload.runtime import explained

    found = getattr(importlib.import_module(_WHERE[name]), name)
    value = globals()[name] = explained(found, f"mfload.ondemand.{name}")
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
