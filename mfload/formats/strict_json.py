"""Untrusted JSON, read as strictly as the reference reader of safetensors reads it.

Python's own parser takes more than that reader does (NaN, numbers beyond 64-bit floats, half
of a surrogate pair) and keeps the last of two equal names. All of it is refused here. What
costs time to look for is looked for only where a cheap sign says that it may be there.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import math
import re
import reprlib
from collections.abc import Iterator
from typing import Any, NoReturn

from mfload import errors

# Bytes of a list or an object, and of an item with its place: a number, a short string.
_HELD = ((b"[", 88), (b"{", 232), (b",", 72))
_Pairs = list[tuple[str, Any]]

MAX_DEPTH = 127
"""Objects and lists within each other that the reference reader takes."""


def loads(
    raw: bytes,
    path: str,
    what: str = "header",
    loose: str | None = None,
    *,
    most: int | None = None,
) -> Any:
    """Parses; minus zero is a float.

    In the object of the name `loose`, the last of two equal names counts. With `most`, what could
    take more bytes of memory and also more than four times its own is not parsed.

    Raises:
        HeaderError: Not UTF-8, not JSON, nested too deep, a name given twice in one object,
            a number that JSON does not have or that no 64-bit float holds.
    """
    import json  # Most headers are read without.

    if most is not None:
        # The text is there twice. What each sign begins takes at most so much, as CPython keeps it.
        size = 2 * len(raw) + sum(raw.count(sign) * nbytes for sign, nbytes in _HELD)
        if size > max(most, 4 * len(raw)):
            limit = f"at most {errors.amount(max(most, 4 * len(raw)))}"
            what = f"the {what} would take too much memory"
            raise bad(path, what, None, limit, errors.amount(size))

    parse = functools.partial(json.loads, parse_constant=_reject, parse_float=_float)
    if b"-0" in raw and re.search(rb"-0(?<![^\s:,[]-0)(?![.eE\d])", raw):
        # Minus zero is an integer to Python, and not to readers of unsigned numbers. Names such as
        # "layer-0" have the signs too, and the hook would be called for each number.
        parse.keywords["parse_int"] = lambda text: -0.0 if text == "-0" else int(text)
    try:
        text = raw.decode("utf-8")
        value = parse(text)
        # A hook for each object would double the time of parsing. Every name has a colon behind
        # it, so as many names as colons means that none was given twice.
        names, inside = 0, value.values() if type(value) is dict else ()
        for each in (value, *inside):
            if type(each) is dict:
                names += len(each)
        if names != raw.count(b":"):
            value = None  # Freed before it is made once more.
            twice: list[tuple[dict[str, Any], _Pairs]] = []
            value = parse(text, object_pairs_hook=functools.partial(_table, twice))
            spared = value.get(loose) if type(value) is dict else None
            for table, pairs in twice:  # Strings alone are spared, also of those that don't count.
                if table is not spared or {type(each) for _, each in pairs} != {str}:
                    raise _repeated(pairs)
        # A lone surrogate can only come from an escape: UTF-8 itself has none.
        if b"\\u" in raw and re.search(rb"\\u[dD][89a-fA-F]", raw):
            check(value, path)
    except RecursionError:
        raise _nested(path) from None
    except errors.HeaderError as error:
        error.file = path
        raise
    except ValueError as error:
        reason = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
        raise bad(path, f"the {what} is not {reason}", None, None, _said(raw, error)) from None
    return value


def check(value: Any, path: str, outer: int = 0) -> None:
    """Looks at everything inside a value that `loads` gave, for what only a full look can find.

    Raises:
        HeaderError: It is nested too deep, an integer is beyond 64-bit floats, or a string has
            half of a surrogate pair.
    """
    levels: list[Iterator[Any]] = [iter((value,))]
    while levels:
        for item in levels[-1]:
            if isinstance(item, str):
                if not encodable(item):
                    reason = "the JSON has half of a surrogate pair in a string"
                    raise bad(path, reason, None, None, brief(item))
            elif isinstance(item, int):
                try:
                    float(item)
                except OverflowError:
                    raise _too_large(item, path) from None
            elif isinstance(item, list | dict):
                if outer + len(levels) > MAX_DEPTH:
                    raise _nested(path)
                within = itertools.chain(item, item.values()) if type(item) is dict else iter(item)
                levels.append(within)
                break
        else:
            levels.pop()


_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 100
_brief.maxdict = _brief.maxlist = 8
brief = _brief.repr
"""A value for an error message, however long or deep it is."""


def bad(
    file: Any, what: str, name: str | None = None, expected: object = None, found: object = None
) -> errors.HeaderError:
    """The error of a malformed file, a source or its path, or of one of its tensors."""
    path = getattr(file, "name", file)
    return errors.HeaderError(what, file=path, tensor=name, expected=expected, found=found)


def _table(twice: list[tuple[dict[str, Any], _Pairs]], pairs: _Pairs) -> dict[str, Any]:
    """An object of the JSON; those that give a name twice are noted."""
    table = dict(pairs)
    if len(table) != len(pairs):
        twice.append((table, pairs))
    return table


def _repeated(pairs: _Pairs) -> errors.HeaderError:
    seen: set[str] = set()
    name, value = next(pair for pair in pairs if pair[0] in seen or seen.add(pair[0]))
    tensor, what = name if isinstance(value, dict) else None, "the JSON gives a name twice"
    return bad(None, f"{what} in one object", tensor, None, brief(name))


def _said(raw: bytes, error: ValueError) -> str:
    """What is wrong with JSON, where other tools take it or Python's words don't say it."""
    if raw.startswith(codecs.BOM_UTF8):
        return "a byte order mark before the JSON; save it as UTF-8 without one"
    at = getattr(error, "pos", None)
    if at is not None:
        text = raw.decode("utf-8")
        match = re.search(r",\s*$", text[:at]) or re.match(r",\s*", text[at:])
        rest = text[at:].lstrip(", \t\r\n")
        if match and rest[:1] in ("}", "]"):
            return f"a comma before the closing {rest[0]!r}: {str(error).partition(': ')[2]}"
    return str(error)


def _reject(constant: str) -> NoReturn:
    raise ValueError(constant)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _too_large(text)
    return value


def _too_large(number: str | int, path: str | None = None) -> errors.HeaderError:
    return bad(path, "the JSON has a number out of range", None, None, brief(number))


def _nested(path: str) -> errors.HeaderError:
    return bad(path, "the JSON is nested too deep")


def encodable(text: object) -> bool:
    """Whether something is a string that UTF-8 can encode."""
    if not isinstance(text, str):
        return False
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False
