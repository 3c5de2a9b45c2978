"""Where `MFLOAD_REQUIRE` is set, as by `make libraries`, a missing package is an error."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest


def _required(name: str, *_: Any, **__: Any) -> Any:
    return importlib.import_module(name)


if os.environ.get("MFLOAD_REQUIRE"):
    pytest.importorskip = _required
