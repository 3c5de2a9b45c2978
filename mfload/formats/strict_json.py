"""Untrusted JSON, read as strictly as the reference reader of safetensors reads it.

Python's own parser takes more than that reader does (NaN, numbers beyond 64-bit floats, half
of a surrogate pair) and keeps the last of two equal names. All of it is refused here. What
costs time to look for is looked for only where a cheap sign says that it may be there.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import reprlib
from collections.abc import Iterator
from typing import Any, NoReturn

from mfload import errors

MAX_DEPTH = 127
"""Objects and lists within each other that the reference reader takes."""

# A lone surrogate can only come from an escape: UTF-8 itself has none.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def loads(raw: bytes, path: str, what: str = "header") -> Any:
    """Parses.

    Returns:
        Dicts, lists, strings, numbers, booleans and None. Minus zero is a float.

    Raises:
        HeaderError: Not UTF-8, not JSON, nested too deep, a name given twice in one object,
            a number JSON has no word for or no 64-bit float can hold.
    """
    parse = functools.partial(json.loads, parse_constant=_reject, parse_float=_float)
    if b"-0" in raw:
        parse.keywords["parse_int"] = _integer
    try:
        text = raw.decode("utf-8")
        value = parse(text)
        # A hook for each object would double the time of parsing. Every name has a colon behind
        # it, so as many names as colons means that none was given twice.
        if _names(value) != raw.count(b":"):
            value = None  # Freed before it is made once more.
            value = parse(text, object_pairs_hook=_unique)
        if _SURROGATE.search(raw):
            check(value)
    except UnicodeDecodeError as error:
        raise errors.HeaderError(f"the {what} is not UTF-8", file=path, found=str(error)) from None
    except RecursionError:
        raise errors.HeaderError(f"the {what} is nested too deep", file=path) from None
    except Refused as error:
        raise error.named(path, what) from None
    except ValueError as error:
        raise errors.HeaderError(f"the {what} is not JSON", file=path, found=str(error)) from None
    return value


def check(value: Any, outer: int = 0) -> None:
    """Looks at everything inside a value, for what only a full look can find.

    Args:
        value: What `loads` gave, or a part of it.

    Raises:
        Refused: It is nested too deep, an integer is beyond 64-bit floats, or a string has
            half of a surrogate pair.
    """
    levels: list[Iterator[Any]] = [iter((value,))]
    while levels:
        for item in levels[-1]:
            if isinstance(item, str):
                if not encodable(item):
                    reason = "has half of a surrogate pair in a string"
                    raise Refused(reason, found=brief(item))
            elif isinstance(item, int):
                _finite(item)
            elif isinstance(item, list | dict):
                if outer + len(levels) > MAX_DEPTH:
                    raise Refused("is nested too deep")
                within = itertools.chain(item, item.values()) if type(item) is dict else iter(item)
                levels.append(within)
                break
        else:
            levels.pop()


def brief(value: object) -> str:
    """A value for an error message, however long or deep it is."""
    return _brief.repr(value)


_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 100
_brief.maxdict = _brief.maxlist = 8


class Refused(Exception):
    """The text breaks a rule; the caller knows its file."""

    def __init__(self, reason: str, tensor: str | None = None, found: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.tensor = tensor
        self.found = found

    def named(self, path: str, what: str = "header") -> errors.HeaderError:
        """The error to raise, once the file is known."""
        return errors.HeaderError(
            f"the {what} {self.reason}", file=path, tensor=self.tensor, found=self.found
        )


def _names(value: Any) -> int:
    """Names in an object and in the objects that it holds."""
    if type(value) is not dict:
        return 0
    return len(value) + sum([len(each) for each in value.values() if type(each) is dict])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for name, value in pairs:
            if name in seen:
                tensor = name if isinstance(value, dict) else None
                raise Refused("gives a name twice in one object", tensor, found=brief(name))
            seen.add(name)
    return table


def _reject(constant: str) -> NoReturn:
    raise Refused("is not JSON", found=constant)


def _integer(text: str) -> int | float:
    # Minus zero is an integer to Python, and not to readers of unsigned numbers.
    return -0.0 if text == "-0" else int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Refused("has a number out of range", found=brief(text))
    return value


def _finite(number: int) -> None:
    try:
        float(number)
    except OverflowError:
        raise Refused("has a number out of range", found=brief(number)) from None


def encodable(text: object) -> bool:
    """Whether something is a string that UTF-8 can encode."""
    if not isinstance(text, str):
        return False
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False
