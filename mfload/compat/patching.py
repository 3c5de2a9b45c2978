"""mfload in the place of the package `safetensors`, in the modules that have imported it too."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_OURS = "mfload.compat.safetensors"
_SUBMODULES = ("_safetensors_rust", "torch", "numpy", "flax", "tensorflow", "paddle")
_REPLACED = {"safetensors": _OURS} | {f"safetensors.{n}": f"{_OURS}.{n}" for n in _SUBMODULES}
_lock = threading.RLock()
_active: list[patch] = []
# While a patch holds: the original's modules, all modules from before it, and what it changed.
_originals: dict[str, ModuleType] = {}
_before: dict[str, ModuleType] = {}
_changed: list[tuple[dict[str, Any], str, Any, Any]] = []
_names: dict[str, frozenset[str]] = {}  # That each of these modules had.


class patch:
    """Puts mfload in the place of the package `safetensors`, for the whole process.

    It holds for imports from now on, and for functions, classes and modules that other modules
    have imported by name; not for what they keep elsewhere, such as default arguments. Used as a
    context manager it is undone at the end; patches may be nested and made in several threads, and
    the original comes back with the end of the last.
    """

    def __init__(self) -> None:
        with _lock:
            if not _active:
                _install()
            _active.append(self)

    def undo(self) -> None:
        """Ends this patch; more than once does nothing."""
        with _lock:
            if self in _active:
                _active.remove(self)
                if not _active:
                    _remove()

    def __enter__(self) -> patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


class _Finder:
    """Finds mfload's modules under the names of the original; also their loader."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, cls) if name in _REPLACED else None  # pyright: ignore

    @classmethod
    def create_module(cls, spec: ModuleSpec) -> ModuleType:
        made = importlib.import_module(_REPLACED[spec.name])
        spec.loader_state = made.__spec__
        return made

    @classmethod
    def exec_module(cls, module: ModuleType) -> None:
        module.__spec__ = module.__spec__.loader_state  # pyright: ignore


def _install() -> None:
    importlib.import_module(_OURS)  # Imports the original, if that is installed.
    _originals.update(_imported())
    _before.update(sys.modules)
    _names.update({name: frozenset(_namespace(module)) for name, module in _before.items()})
    ours = {name: importlib.import_module(_REPLACED[name]) for name in _originals}
    sys.modules.update(ours)
    _changed.extend(_change(_before, _originals, ours))
    sys.meta_path.insert(0, _Finder)  # pyright: ignore[reportArgumentType]


def _remove() -> None:
    sys.meta_path.remove(_Finder)  # pyright: ignore[reportArgumentType]
    ours = _imported()
    for name in ours:
        del sys.modules[name]
    sys.modules.update(_originals)
    for namespace, key, former, value in _changed:
        if namespace.get(key) is value:
            namespace[key] = former
    for name in ours:
        with suppress(ImportError):
            _originals[name] = importlib.import_module(name)
    # In what was imported meanwhile. A copy: other threads import, too.
    _change(sys.modules.copy(), ours, _originals, _names)
    for state in (_originals, _before, _changed, _names):
        state.clear()


def _imported() -> dict[str, ModuleType]:
    return {name: sys.modules[name] for name in _REPLACED if name in sys.modules}


def _namespace(module: Any) -> dict[str, Any]:
    return getattr(module, "__dict__", {})  # Anything may be among the modules.


def _change(
    where: Mapping[str, ModuleType],
    old: dict[str, ModuleType],
    new: dict[str, ModuleType],
    but: Mapping[str, frozenset[str]] | None = None,
) -> list[tuple[dict[str, Any], str, Any, Any]]:
    """In some modules, puts modules and what they define in the place of others.

    `but`: names of modules that stay as they are. Returns the namespaces and names that it changed,
    with the former value and the new one.
    """
    changes: dict[int, Any] = {}
    for name in old.keys() & new.keys():
        changes[id(old[name])] = new[name]
        for key, value in vars(new[name]).items():
            former = vars(old[name]).get(key)
            # The original's error catches mfload's too.
            if callable(value) and former not in (None, value) and key != "SafetensorError":
                changes[id(former)] = value
    changed: list[tuple[dict[str, Any], str, Any, Any]] = []
    for name, module in where.items():
        own = f"{name}.".startswith(("safetensors.", f"{_OURS}."))
        kept = (but or {}).get(name, frozenset())
        for key, value in [] if own else list(_namespace(module).items()):
            if id(value) in changes and key not in kept:
                vars(module)[key] = changes[id(value)]
                changed.append((vars(module), key, value, changes[id(value)]))
    return changed
