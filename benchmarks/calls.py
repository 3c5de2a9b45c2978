"""How benchmarks call mfload with arguments and options in one mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mfload

_FIELDS = mfload.Options.__dataclass_fields__


def as_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments, with those that are fields of `Options` in one."""
    fields = {name: value for name, value in given.items() if name in _FIELDS}
    rest = {name: value for name, value in given.items() if name not in _FIELDS}
    return rest | {"options": mfload.Options(**fields)} if fields else rest
