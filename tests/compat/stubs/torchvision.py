"""Stands in for torchvision, whose wheels want a PyTorch of their own build.

SGLang imports it with its loader, for images; the loading of weights uses none of it. Every name
of it is an empty class here.
"""

import sys
from types import ModuleType

__version__ = "0.28.0"
__path__: list[str] = []  # It has submodules.
_FILTERS = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {each: each.lower() for each in _FILTERS})


for _name in (
    "io",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
):
    _parent, _, _last = f"{__name__}.{_name}".rpartition(".")
    sys.modules[f"{__name__}.{_name}"] = _Module(f"{__name__}.{_name}")
    setattr(sys.modules[_parent], _last, sys.modules[f"{__name__}.{_name}"])
