"""Calls that do not fit a public function: what is wrong with the arguments, and what is right.

Public functions have typed signatures without `**kwargs`, so Python itself refuses such a call with
a bare TypeError. `runtime.explained` lets that happen, and only then asks what was meant.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from mfload import errors

# What other libraries call an argument.
_RENAMED = {
    "backend": "framework",
    "checksums": "verify",
    "ckpt_dir": "path",
    "device_map": "device",
    "file": "path",
    "filename": "path",
    "files": "path",
    "include": "names",
    "item": "target",
    "key_map": "mapping",
    "keys": "names",
    "map_location": "device",
    "model": "target",
    "obj": "arrays",
    "partition_specs": "shardings",
    "prefix": "names",
    "rename": "mapping",
    "state_dict": "arrays",
    "tensors": "names",
    "tqdm": "progress",
    "verbose": "report",
}
_SHARDED = "use mesh= and shardings=, or shardings=[(regex, dim)] with shard=(rank, size)"
_OF_HUB = "a model of the Hugging Face Hub is loaded by its URL: 'hf://org/name@revision'"
_INSTEAD = {
    "cache_dir": "set HF_HUB_CACHE in the environment",
    "mmap": "use options=mfload.Options(engine='mmap')",
    "num_workers": "use options=mfload.Options(threads=…)",
    "repo_id": _OF_HUB,
    "revision": _OF_HUB,
    "tensor_parallel": _SHARDED,
    "tensor_parallel_size": _SHARDED,
    "token": "use options=mfload.Options(headers={'Authorization': 'Bearer …'})",
    "tp": _SHARDED,
    "use_safetensors": "leave it out",
    "weights_only": "leave it out, mfload unpickles nothing",
    "world_size": _SHARDED,
}
_SECRET = re.compile(r"(token|key|secret|pass|auth|cred|cookie|header)(?!.*_file$)", re.IGNORECASE)
"""Names of arguments whose values are not shown."""
_SIGNED = re.compile("://.*[?@]")
_LONGEST = 40
_REQUIRED = inspect.Parameter.empty


def error(
    function: Callable[..., Any], label: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> errors.ArgumentError | None:
    """What is wrong with a call of a public function; None if the call fits its signature."""
    parameters = inspect.signature(function).parameters
    if function.__name__ == "__init__":  # `self` is not given by the caller.
        parameters, args = dict(itertools.islice(parameters.items(), 1, None)), args[1:]
    faults: list[str] = []
    meant: set[str] = set()
    for name in [name for name in kwargs if name not in parameters]:
        free = [each for each in parameters if each not in kwargs]
        value = "…" if _SECRET.search(name) else _brief(kwargs[name])
        own, hint = _hint(name, value, free)
        meant.add(own)
        faults.append(f"{label}() has no argument {name}={value}{hint}")
    faults = [*_by_position(label, parameters, args, kwargs, meant), *faults]
    if not faults:
        return None
    names = [each.name for each in parameters.values()]
    first = sum(each.kind != each.KEYWORD_ONLY for each in parameters.values())
    if first < len(names):
        names.insert(first, "*")
    what = faults[0] if len(faults) == 1 else f"the arguments of {label}() are wrong"
    problems = () if len(faults) == 1 else tuple(faults)
    expected = f"{label}({', '.join(names)})"
    return errors.ArgumentError(what, expected=expected, problems=problems)


def _by_position(
    label: str,
    parameters: Mapping[str, inspect.Parameter],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    meant: Collection[str],
) -> Iterator[str]:
    """What is wrong with arguments that may be given by position; `meant` are misspelt ones."""
    first = [each.name for each in parameters.values() if each.kind != each.KEYWORD_ONLY]
    named = [name for name in parameters if name not in first and name not in kwargs]
    if more := args[len(first) :]:
        texts = [f"{name}={_brief(value)}" for name, value in zip(named, more, strict=False)]
        such = f", such as {', '.join(texts)}" if texts else ""
        by_name = f", and the rest by name{such}" if named else ""
        places = " and ".join(first) or "nothing"
        yield f"{label}() takes {places} by position{by_name}"
    for name in first[: len(args)]:
        if name in kwargs:
            yield f"{label}() is given {name} twice, by position and by name"
    for name in [*first[len(args) :], *named]:
        if name not in kwargs and name not in meant and parameters[name].default is _REQUIRED:
            yield f"{label}() needs {name}"


def _hint(name: str, value: str, free: Collection[str]) -> tuple[str, str]:
    """The argument that an unknown one stands for, if it is one, and how to say what it says.

    `free`: the arguments that are not given.
    """
    if _RENAMED.get(name) in free:
        return _RENAMED[name], f", did you mean {_RENAMED[name]}=?"
    if name in _INSTEAD:
        return "", f": {_INSTEAD[name]}"
    public = importlib.import_module("mfload")
    options, peer = public.Options.__dataclass_fields__, public.PeerOptions.__dataclass_fields__
    for_peer = f"peer=mfload.PeerOptions({name}={value})"
    if "options" in free and name in options:
        return "", f": use options=mfload.Options({name}={value})"
    if "options" in free and name in peer:
        return "", f": use options=mfload.Options({for_peer})"
    if "peer" in free and name in peer:
        return "", f": use {for_peer}"
    for own in errors.close_names(name, free, 1):
        return own, f", did you mean {own}=?"
    for field in errors.close_names(name, options, 1) if "options" in free else ():
        return "", f", did you mean options=mfload.Options({field}={value})?"
    calls = {each: getattr(getattr(public, each), "__wrapped__", None) for each in public.__all__}
    takers = [each for each, call in calls.items() if call and name in call.__annotations__]
    listed = ", ".join(f"mfload.{each}()" for each in takers)
    return "", f": it is an argument of {listed}" if takers else ""


def _brief(value: object) -> str:
    """A value as it may be typed again; … for a long one, and a URL with a query or a user."""
    if value is None or isinstance(value, bool | int | float | str):
        with suppress(Exception):  # Python refuses to print integers of thousands of digits.
            text = repr(value)
            return "…" if len(text) > _LONGEST or _SIGNED.search(text) else text
    return "…"
