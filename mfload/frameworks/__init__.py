"""Adapters: one module a framework, and the only place that imports it."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Literal, get_args

from mfload import dtypes, errors
from mfload.frameworks.base import Adapter

# Each framework by its name and its aliases. `arrays` has the type of its arrays.
Numpy = Literal["numpy", "np"]
Jax = Literal["jax", "flax"]
Torch = Literal["torch", "pytorch", "pt"]
Tensorflow = Literal["tensorflow", "tf", "keras"]
Paddle = Literal["paddle", "paddlepaddle"]
Cupy = Literal["cupy"]
Framework = Literal[Numpy, Jax, Torch, Tensorflow, Paddle, Cupy]
"""The name of a framework, or an alias: for annotations of what becomes `framework=`."""

_EVERY = tuple(map(get_args, (Numpy, Jax, Torch, Tensorflow, Paddle, Cupy)))
_ALIASES = {alias: name for name, *aliases in _EVERY for alias in aliases}

_DEVICE = re.compile(r"(cpu|cuda|gpu|tpu|xla|mps)(:\d+)?")

NAMES = ("numpy", "jax", "torch", "tensorflow", "paddle", "cupy")
"""Frameworks by the names of their packages."""
ON_MESHES = ("jax", "torch", "paddle", "tensorflow")
"""Frameworks that arrays can be sharded in: `mfload.mesh` has a backend for each."""


def resolve(framework: str | ModuleType) -> Framework:
    """The name of a framework, from a name, an alias or a module such as `torch` or `jax.numpy`."""
    if isinstance(framework, ModuleType):
        name = framework.__name__.partition(".")[0]
    elif isinstance(framework, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        name = framework.lower()
    else:
        raise errors.UsageError(
            "unknown framework; load(path, framework) makes arrays by name, "
            "load_into(target, path) fills a tree",
            expected=" | ".join(NAMES),
            found=type(framework).__name__,
        )
    found = _ALIASES.get(name, name)
    if found not in NAMES:
        hint = errors.did_you_mean(name, {each: each for each in NAMES} | _ALIASES)
        if "/" in name or "\\" in name or ".safetensors" in name:
            hint += "; a path comes first: load(path, framework)"
        elif _DEVICE.fullmatch(name) or dtypes.is_name(name):
            argument = "device" if _DEVICE.fullmatch(name) else "dtype"
            hint = f"; that is a {argument}: {argument}={name!r}, beside framework="
        raise errors.UsageError(f"unknown framework{hint}", expected=" | ".join(NAMES), found=name)
    return found


def get(framework: str | ModuleType, device: object = None, names: Collection[str] = ()) -> Adapter:
    """The adapter of a framework for one device or several.

    `names` are those of the checkpoint: a rule or name in `device` that matches none warns.
    """
    name = resolve(framework)
    make = require(name, f"mfload.frameworks.{name}_adapter").make
    if isinstance(device, Mapping) or type(device) in (list, tuple):
        from mfload.frameworks import several  # Late: most loads do without it.

        return several.make(make, device, names)
    return make(device)


def planned(framework: str | ModuleType, device: object, names: Collection[str]) -> Adapter:
    """The adapter to plan with: that of `get`, or what stands in for one that is not installed.

    What stands in knows the host alone: of other devices FrameworkMissingError is raised.
    """
    name = resolve(framework)
    host = device is None or str(device).lower().partition(":")[0] == "cpu"
    if not host or importlib.util.find_spec(name) is not None:
        return get(framework, device, names)
    from mfload.frameworks.traits import Absent

    return Absent(name)


def require(framework: str, module: str | None = None) -> ModuleType:
    """Imports a framework, or a module of mfload that needs it, or says how to install it."""
    extra = "cuda13" if framework == "cupy" else framework
    fields = {"expected": framework, "found": "no such module"}
    if importlib.util.find_spec(framework) is None:
        raise errors.missing(f"{framework} is not installed", extra, **fields)
    try:
        return importlib.import_module(module or framework)
    except (ImportError, OSError, SystemError) as error:
        # A library of its own that is missing, or memory that ran out in the middle of it.
        fields["found"] = str(error)
        what = f"{framework} is installed but its import fails"
        raise errors.missing(what, extra, **fields) from error
