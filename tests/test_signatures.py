"""What an argument means is the same in every public call that takes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import mfload

CALLS: dict[str, Callable[..., Any]] = {
    name: each for name in mfload.__all__ if inspect.isfunction(each := getattr(mfload, name))
}
# Where a call without it is deprecated, and "numpy" from the next version on.
UNTIL_THE_NEXT_VERSION = {"plan", "restore"}
# What a call with its own default says, as its docstring does.
OWN = {
    ("doctor", "timeout"), ("load_into", "dtype"), ("restore", "dtype"), ("save", "checksums"),
    ("unpack", "dtype"),
}  # fmt: skip


def _taking(name: str) -> dict[str, inspect.Parameter]:
    found = {call: inspect.signature(each).parameters for call, each in CALLS.items()}
    return {call: each[name] for call, each in found.items() if name in each}


def test_the_framework_is_numpy_by_default() -> None:
    defaults = {call: each.default for call, each in _taking("framework").items()}
    assert {call for call, each in defaults.items() if each is None} == UNTIL_THE_NEXT_VERSION
    assert {each for call, each in defaults.items() if each is not None} == {"numpy"}


def test_calls_that_could_take_an_argument_take_it() -> None:
    loads = {"load", "load_into", "restore"}
    assert set(_taking("fallback")) == set(_taking("prefer")) == loads
    assert set(_taking("report")) == loads | {"stream"}
    assert set(_taking("names")) == loads | {"abstract", "convert", "diff", "plan", "stream"}
    moves = loads | {"align", "convert", "diff", "save", "stream", "verify"}
    assert set(_taking("progress")) == moves


@pytest.mark.parametrize(
    "name", sorted({name for each in CALLS.values() for name in inspect.signature(each).parameters})
)
def test_an_argument_has_one_default_and_one_type(name: str) -> None:
    if name in ("framework", "path", "target", "shape"):
        return  # Above; or what the call is about.
    taking = {call: each for call, each in _taking(name).items() if (call, name) not in OWN}
    assert len({repr(each.default) for each in taking.values()}) <= 1
    types = {each.annotation.removesuffix(" | None") for each in taking.values()}
    assert len(types) <= 1
