"""What is known of each framework without importing it: its dtypes, and what its imports ask for.

Adapters take from here what their version has. Where a framework is not installed, that is enough
to plan a load into host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from mfload.dtypes import NARROW
from mfload.frameworks.base import COMMON, NAMES, Adapter, Form, forms

_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_WIDE = {name: kind for name, kind in NAMES.items() if not name.startswith("F6_")}
_NARROW = {name: name for name in NARROW}
_BRAIN = {"BF16": "bfloat16"}


class Traits(NamedTuple):
    """The newest version's dtypes by stored dtype, and those of them that it must copy."""

    own: Mapping[str, str]
    copied: tuple[str, ...]
    alignment: int | None
    on_host: bool

    def forms(self, has: Callable[[str], bool] = bool) -> Mapping[str, Form]:
        """The table of the framework (see `base.forms`), of the types that a version `has`."""
        return forms({name: kind for name, kind in self.own.items() if has(kind)}, self.copied)


_TENSORFLOW = (*_FLOAT8, "F8_E4M3FNUZ", "F8_E5M2FNUZ")
# Paddle takes uint16 for bfloat16.
_PADDLE = {name: kind for name, kind in COMMON.items() if name != "U16"} | _BRAIN

TRAITS = {
    "jax": Traits(_WIDE | _NARROW, ("F4", *_NARROW), 64, True),
    # Its own integers of 2 and 4 bits are names alone: no operation takes them, not even a copy.
    "torch": Traits(_WIDE | {"F4": "float4_e2m1fn_x2"}, (), None, True),
    "tensorflow": Traits(
        COMMON | _BRAIN | {name: NAMES[name] for name in _TENSORFLOW} | _NARROW,
        (*_TENSORFLOW, *_NARROW),
        64,
        True,
    ),
    "paddle": Traits(_PADDLE | {name: NAMES[name] for name in _FLOAT8}, (), 64, True),
    "cupy": Traits(COMMON | _BRAIN, (), None, False),
}


class Absent(Adapter):
    """An adapter that plans, in place of that of a framework that is not installed."""

    def __init__(self, name: str) -> None:
        found = TRAITS[name]
        what = "planned for arrays in host memory" if found.on_host else "planned as by the host"
        note = f"{name} is not installed: {what}, with the dtypes of its newest version"
        super().__init__("cpu", None, (note,))
        self.name, self.forms = name, found.forms()
        self.alignment, self.on_host = found.alignment, found.on_host
