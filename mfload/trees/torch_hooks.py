"""Modules of PyTorch that have a say in how they are loaded: hooks, and methods of their own.

`load_state_dict` itself loads them, and what is in them, from a dict of what is stored under their
names. Other modules are filled without it, so only their hooks for afterwards are called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from mfload.frameworks import private_api

_ERRORS = "Error(s) in loading state_dict for "
_BASE = torch.nn.Module
# What the normalisations of PyTorch add is for counts of batches and files of before version 0.4.
_PLAIN = {
    kind._load_from_state_dict for kind in (_BASE, torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d)
}

Meet = Callable[[Any, dict[str, Any], str], None]
"""Takes a module, the dict that it is about to copy from, and what its names begin with there."""


class HookedModule(NamedTuple):
    """A module that is loaded by `load_state_dict`, and what its names begin with."""

    prefix: str
    module: Any


class Wrong(NamedTuple):
    """What `load_state_dict` found wrong."""

    missing: list[str]
    unexpected: list[str]
    errors: list[str]


def says(module: Any) -> bool:
    """Whether a module has hooks or methods of its own: a quick look, not at what is in it."""
    before, after = private_api.torch_load_hooks(module)
    return bool(before or after or _overrides(module))


def whole(module: Any) -> bool:
    """Whether a module has a `load_state_dict` of its own, which is for all of it."""
    return getattr(module.load_state_dict, "__func__", None) is not _BASE.load_state_dict


def parts(module: Any, also: Iterable[int] = ()) -> list[HookedModule]:
    """The outermost modules with a say before or while they are filled, and others by their `id`.

    Hooks of `torch.distributed` have none: FSDP2's load nothing, and those of wrappers change names
    that `state_dict` has changed before. So wrappers are loaded by hooks if what they wrap is.
    """
    if whole(module):
        return [HookedModule("", module)]
    every = _prefixes(module)
    forced = set(also)
    own = {
        prefix
        for prefix, each in every
        if id(each) in forced
        or _overrides(each)
        or not all(name.startswith("torch.distributed.") for name in _pre_hooks(each))
    }
    found: list[HookedModule] = []
    for part in every:
        if found and part.prefix.startswith(found[-1].prefix):
            continue
        if part.prefix in own or (
            any(not _is_fsdp(name) for name in _pre_hooks(part.module))
            and any(prefix.startswith(part.prefix) for prefix in own)
        ):
            found.append(part)
    return found


def listening(module: Any) -> list[str]:
    """What names of the modules begin with that have a hook for afterwards."""
    return [part.prefix for part in _prefixes(module) if any(_post_hooks(part.module))]


def load(
    part: HookedModule, state: Mapping[str, Any], meet: Meet, strict: bool, outermost: bool
) -> Wrong:
    """Loads a part from tensors by their names; `meet` is called before each module is filled.

    `outermost`: by the part's own `load_state_dict`, which may have another one's signature.
    """
    module = part.module
    try:
        with _met(module, meet):
            if outermost and strict:
                found = module.load_state_dict(state)
            elif outermost:
                found = module.load_state_dict(state, strict=False)
            else:
                for name in reversed(part.prefix.split(".")[:-1]):  # So names stay what they are.
                    outer = _BASE()
                    outer.add_module(name, module)
                    module = outer
                found = _BASE.load_state_dict(module, state, strict=False)
    except RuntimeError as error:
        if not str(error).startswith(_ERRORS):
            raise
        return Wrong([], [], [line.strip() for line in str(error).split("\n\t")[1:]])
    missing, unexpected = getattr(found, "missing_keys", ()), getattr(found, "unexpected_keys", ())
    return Wrong(list(missing), list(unexpected), [])


def finish(
    module: Any, loaded: Mapping[str, Wrong], missing: Iterable[str], unexpected: Iterable[str]
) -> Wrong:
    """Calls the hooks for afterwards, in the order of `load_state_dict`; what is still wrong then.

    `loaded` is what was wrong with parts. Names of others are passed on with the modules that they
    belong to, since a hook may take away what came before it.
    """
    lacking, spare = dict.fromkeys(missing), dict.fromkeys(unexpected)
    found = Wrong([], [], [])
    keys = incompatible_keys(found.missing, found.unexpected)

    def visit(module: Any, prefix: str) -> None:
        if prefix in loaded:
            for held, more in zip(found, loaded[prefix], strict=True):
                held += more
            return
        inner = dict(module.named_children())
        for names, held in (lacking, found.missing), (spare, found.unexpected):
            here = (name for name in names if name.startswith(prefix))
            mine = [name for name in here if name[len(prefix) :].split(".")[0] not in inner]
            for name in mine:
                del names[name]
            held += mine
        for name, child in inner.items():
            visit(child, f"{prefix}{name}.")
        for hook in _post_hooks(module):
            hook(module, keys)

    visit(module, "")
    return Wrong([*found.missing, *lacking], [*found.unexpected, *spare], found.errors)


def tell_fsdp(modules: Iterable[Any]) -> None:
    """Calls the hooks by which FSDP2 learns of new parameters, and no others."""
    for module in modules:
        for hook in private_api.torch_load_hooks(module)[1]:
            if _is_fsdp(_module_of(hook)):
                hook(module, incompatible_keys([], []))


def incompatible_keys(missing: list[str], unexpected: list[str]) -> Any:
    """What hooks for afterwards are given."""
    return type(_BASE().load_state_dict({}))(missing, unexpected)


@contextlib.contextmanager
def _met(module: Any, meet: Meet) -> Generator[None]:
    """Calls a function before each module in one is filled, and after its own hooks for that."""

    def hook(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        meet(module, state, prefix)

    with contextlib.ExitStack() as handles:
        for each in module.modules():
            handles.enter_context(private_api.torch_before_loading(each, hook))
        yield


def _prefixes(module: Any) -> list[HookedModule]:
    every = module.named_modules(remove_duplicate=False)
    return [HookedModule(f"{path}." if path else "", each) for path, each in every]


def _overrides(module: Any) -> bool:
    kind = type(module)  # Not remembered: one made by a parametrization holds its module.
    return (
        "_load_from_state_dict" in vars(module)
        or kind._load_from_state_dict not in _PLAIN
        or kind.set_extra_state is not _BASE.set_extra_state
        or kind.get_extra_state is not _BASE.get_extra_state
    )


def _pre_hooks(module: Any) -> list[str]:
    """Where the hooks of a module are from that are called before it is filled."""
    return [_module_of(hook) for hook in private_api.torch_load_hooks(module)[0]]


def _post_hooks(module: Any) -> list[Any]:
    hooks = private_api.torch_load_hooks(module)[1]
    return [hook for hook in hooks if not _module_of(hook).startswith("torch.distributed.")]


def _is_fsdp(module: str) -> bool:
    return module.startswith("torch.distributed.") and "fsdp" in module


def _module_of(hook: Any) -> str:
    return getattr(hook, "__module__", None) or ""
