"""Adapters, one a framework: the only place that imports one."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import cast

from mfload import errors
from mfload.frameworks import several
from mfload.frameworks.base import Adapter

_ALIASES = {
    "np": "numpy",
    "flax": "jax",
    "pt": "torch",
    "pytorch": "torch",
    "tf": "tensorflow",
    "keras": "tensorflow",
    "paddlepaddle": "paddle",
}

# The module to import, and what installs it.
_EXTRAS = {
    "numpy": ("numpy", "pip install numpy"),
    "jax": ("jax", "pip install 'mfload[jax]'"),
    "torch": ("torch", "pip install 'mfload[torch]'"),
    "tensorflow": ("tensorflow", "pip install 'mfload[tensorflow]'"),
    "paddle": ("paddle", "pip install 'mfload[paddle]'"),
    "cupy": ("cupy", "pip install 'mfload[cuda13]'"),
}

_FOLDERS = {
    "store": "mesh",
    "mesh": "mesh",
    "placing": "trees",
    "processes": "mesh",
    "sharding": "mesh",
    "transforms": "trees",
    "trees": "trees",
}

NAMES = tuple(_EXTRAS)


def resolve(name: str) -> str:
    """The framework's own name for a name or an alias.

    Raises:
        UsageError: There is no such framework.
    """
    found = _ALIASES.get(str(name).lower(), str(name).lower())
    if found not in _EXTRAS:
        spelled = {each: each for each in NAMES} | _ALIASES
        raise errors.UsageError(
            f"unknown framework{errors.did_you_mean(name, spelled)}",
            expected=" | ".join(NAMES),
            found=name,
        )
    return found


def get(name: str, device: object = None) -> Adapter:
    """The adapter of a framework for a device, or for several.

    Args:
        name: The framework's name or an alias.
        device: A string, the framework's own device, or None for its default; a list of such, for
            each tensor on all of them; or {regex: device}, for each on the one for its name.

    Raises:
        UsageError: There is no such framework, or a regex is malformed.
        FrameworkMissingError: It is not installed, or not whole.
        FrameworkVersionError: It is installed in a version mfload can't work with.
        DeviceError: There is no such device, or none is named.
    """
    make: Callable[[object], Adapter] = module(resolve(name)).make
    if isinstance(device, Mapping):
        # One for each device, however many rules name it.
        apart = {repr(each): each for each in device.values()}
        numbers = {text: n for n, text in enumerate(apart)}
        named = [numbers[repr(each)] for each in device.values()]
        rules = list(zip(several.rules_of(device), named, strict=True))
        return several.SeveralAdapter(_each(make, list(apart.values())), rules)
    if type(device) in (list, tuple):  # TensorFlow's own devices are tuples of a kind.
        return several.SeveralAdapter(_each(make, cast(Sequence[object], device)))
    return make(device)


def _each(make: Callable[[object], Adapter], devices: Sequence[object]) -> list[Adapter]:
    if not devices:
        raise errors.DeviceError("no device", expected="at least one", found=repr(devices))
    return [make(device) for device in devices]


def module(name: str, part: str = "adapter") -> ModuleType:
    """A module of a framework, which imports it.

    Args:
        name: The framework's own name.
        part: Which: the adapter, or what else there is for that framework.

    Raises:
        FrameworkMissingError: It is not installed, or not whole.
    """
    package, command = _EXTRAS[name]
    if importlib.util.find_spec(package) is None:
        raise errors.FrameworkMissingError(
            f"{name} is not installed; {command}", expected=package, found="no such module"
        )
    try:
        folder = _FOLDERS.get(part, "frameworks")
        return importlib.import_module(f"mfload.{folder}.{name}_{part}")
    except ImportError as error:
        raise errors.FrameworkMissingError(
            f"{name} is there and can't be imported; {command}", expected=package, found=str(error)
        ) from error
