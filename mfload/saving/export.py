"""From arrays of any framework to bytes: whose array is it, and what does its adapter make of it.

The framework is told from the modules in which an array's classes are defined. So none is
imported that is not there already, and a subclass of a tensor is that framework's tensor.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mfload import errors, frameworks
from mfload.frameworks import base, giving
from mfload.frameworks.giving import Outgoing

__all__ = ["Outgoing", "outgoing"]

# Whose classes are whose, by the first part of the module's name.
_ROOTS = {
    "numpy": "numpy",
    "ml_dtypes": "numpy",
    "jax": "jax",
    "jaxlib": "jax",
    "torch": "torch",
    "tensorflow": "tensorflow",
    "paddle": "paddle",
    "cupy": "cupy",
    "cupyx": "cupy",
}
# Classes of these hold an array of a framework.
_BOXES = frozenset({"flax", "keras"})
# DLPack's device types that are host memory: kDLCPU, kDLCUDAHost, kDLROCMHost.
_HOST = (1, 3, 11)

_Give = Callable[[str, Any], Outgoing]


def outgoing(arrays: Mapping[str, Any]) -> list[Outgoing]:
    """What is to be written of each array, in the order of the mapping.

    Args:
        arrays: Arrays by name, of any of the frameworks, also of several at once.

    Returns:
        One `Outgoing` for each. It keeps its array alive; let go of it once it is written.

    Raises:
        UsageError: It is no mapping from names to arrays.
        UnsupportedArrayError: One of them can't be saved.
        FrameworkVersionError: The framework is too old.
    """
    if not isinstance(arrays, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.UsageError(
            "arrays are saved by name", expected="a dict of arrays", found=type(arrays).__name__
        )
    givers: dict[type, _Give] = {}
    found: list[Outgoing] = []
    for name, array in arrays.items():
        quick = None
        # Once the first has been looked at in full: most are alike, and there may be many.
        if np.ndarray in givers and type(array) is np.ndarray and type(name) is str:
            quick = giving.plain(name, array)
        found.append(quick or _one(name, array, givers))
    return found


def _one(name: Any, array: Any, givers: dict[type, _Give]) -> Outgoing:
    if not isinstance(name, str):
        raise errors.UsageError(
            "names are strings; join the parts of a path: {'.'.join(path): array}",
            expected="str",
            found=repr(name),
        )
    for _ in range(4):  # A box in a box is enough; one that holds itself is not unpacked for ever.
        inner = _by_name(name, functools.partial(_unboxed, array))
        if inner is array:
            break
        array = inner
    kind = type(array)
    if kind not in givers:
        givers[kind] = _giver(array)
        quick = giving.plain(name, array) if kind is np.ndarray else None
        if quick is not None:
            return quick
    give = givers[kind]
    given: Outgoing = _by_name(name, lambda: give(name, array))
    return given._replace(fetch=lambda: _by_name(name, given.fetch))


def _by_name(name: str, act: Callable[[], Any]) -> Any:
    """Lets a framework's own errors out under the name of the tensor."""
    try:
        return act()
    except errors.MfloadError:
        raise
    except MemoryError as error:
        raise errors.MemoryLimitError(
            "no memory for the bytes of an array that can't be written from where it lies",
            tensor=name,
            found=str(error) or "MemoryError",
        ) from error
    except Exception as error:  # Whatever a framework raises, the array can't be had.
        said = str(error).strip().splitlines()
        raise errors.UnsupportedArrayError(
            "the array could not be read",
            tensor=name,
            found=f"{type(error).__name__}: {said[0] if said else ''}",
        ) from error


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _unboxed(array: Any) -> Any:
    """What a flax or Keras variable holds."""
    roots = [_root(kind) for kind in type(array).__mro__]
    if not _BOXES.intersection(roots):
        return array
    # What nnx calls it differs by version, and it warns of the older names.
    kind = type(array)
    if hasattr(kind, "get_raw_value"):
        return array.get_raw_value()
    return getattr(array, "raw_value" if hasattr(kind, "raw_value") else "value", array)


def _giver(array: Any) -> _Give:
    for kind in type(array).__mro__:
        framework = _ROOTS.get(_root(kind))
        if framework is not None:
            module = frameworks.module(framework)
            whole = importlib.import_module(framework)
            base.check_version(framework, whole.__version__, module.OLDEST)
            return module.give
    return _foreign


def _foreign(name: str, array: Any) -> Outgoing:
    """An object of nobody we know, where it says exactly which numbers it holds."""
    if isinstance(array, Mapping):
        raise errors.UnsupportedArrayError(
            "the mapping is nested; flatten it: {f'{outer}.{inner}': array, …}",
            tensor=name,
            expected="an array",
            found=f"{type(array).__name__} with {len(array)} entries",
        )
    a_class = isinstance(array, type)  # It has the methods and no array.
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__") and not a_class:
        device = array.__dlpack_device__()
        if device[0] not in _HOST:
            raise giving.refused(
                type(array).__name__,
                name,
                "the array lies on a device; copy it to the host",
                f"DLPack device {tuple(device)}",
            )
        return giving.host(type(array).__name__, name, np.from_dlpack(array))
    if hasattr(array, "__array__") and not a_class:
        return giving.host(type(array).__name__, name, np.asarray(array))
    hint = "not an array"
    if isinstance(array, bool | int | float | complex | list | tuple):
        hint = "no dtype: say which is meant, as in numpy.asarray(x, dtype='float32')"
    raise errors.UnsupportedArrayError(
        hint, tensor=name, expected="an array", found=type(array).__name__
    )
