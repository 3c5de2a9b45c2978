"""What an argument means is the same in every public call that takes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import mfload
from mfload.cli import app

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


# What each call that is given a checkpoint, or makes one, takes; else why it does not.
HEADERS = "it reads headers only"
RESULT = "its result tells what happened"
ONE_PLACE = "it judges or rewrites the files of one place; others would hide what is wrong there"
ITSELF = "it is mfload.verify itself, or compares every bit"
REWRITES = "mfload.verify says the same before, and its checksums= after"
EVERY = "it takes all tensors, since what it makes or checks are whole files"
GIVEN = "arrays are given, not read"
LISTS = "it shows what is in the files of one place"
OF_A_LOAD = ("names", "verify", "fallback", "prefer", "progress", "report")
WITHOUT: dict[str, dict[str, str]] = {
    "abstract": {"verify": HEADERS, "progress": HEADERS, "report": HEADERS},
    "align": {
        "names": EVERY, "verify": REWRITES, "fallback": ONE_PLACE, "prefer": ONE_PLACE,
        "report": RESULT,
    },
    "convert": {
        "verify": REWRITES, "fallback": ONE_PLACE, "prefer": ONE_PLACE, "report": RESULT,
    },
    "diff": {"verify": ITSELF, "fallback": ONE_PLACE, "prefer": ONE_PLACE, "report": RESULT},
    "load": {},
    "load_into": {},
    "open": {"progress": "what will be taken of it is not known"},
    "plan": {"verify": HEADERS, "progress": HEADERS, "report": RESULT},
    "publish": {
        "names": GIVEN, "verify": GIVEN, "fallback": GIVEN, "prefer": GIVEN, "progress": GIVEN,
        "report": GIVEN,
    },
    "restore": {},
    "save": {
        "names": GIVEN, "verify": GIVEN, "fallback": GIVEN, "prefer": GIVEN, "report": RESULT,
    },
    "stream": {},
    "verify": {
        "names": EVERY, "verify": ITSELF, "fallback": ONE_PLACE, "prefer": ONE_PLACE,
        "report": RESULT,
    },
}  # fmt: skip
ABOUT_OTHERS = {"doctor", "live_bytes", "rule", "seeds", "unpack"}

# The commands; theirs show progress and a report by themselves.
COMMANDS: dict[str, dict[str, str]] = {
    "align": {"names": EVERY, "verify": REWRITES, "fallback": ONE_PLACE, "prefer": ONE_PLACE},
    "convert": {"verify": REWRITES, "fallback": ONE_PLACE, "prefer": ONE_PLACE},
    "diff": {"verify": ITSELF, "fallback": ONE_PLACE, "prefer": ONE_PLACE},
    "load": {},
    "ls": {"verify": HEADERS, "fallback": LISTS, "prefer": LISTS},
    "plan": {"verify": HEADERS},
    "verify": {"names": EVERY, "verify": ITSELF, "fallback": ONE_PLACE, "prefer": ONE_PLACE},
}


def test_a_call_takes_what_load_takes_or_says_why_not() -> None:
    assert set(CALLS) == set(WITHOUT) | ABOUT_OTHERS
    for call, without in WITHOUT.items():
        parameters = inspect.signature(CALLS[call]).parameters
        assert [name for name in OF_A_LOAD if name not in parameters] == list(without), call


def test_a_command_takes_what_load_takes_or_says_why_not() -> None:
    commands = app.group().commands
    for call, without in COMMANDS.items():
        options = {each.name for each in commands[call].params}
        missing = [name for name in OF_A_LOAD[:4] if name not in options]
        assert missing == list(without), call


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
