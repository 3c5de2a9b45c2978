"""Selecting: which tensors are wanted, by name, and as which dtype."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from mfload import dtypes, errors
from mfload.dtypes import DType
from mfload.index import Index, TensorInfo

Names = str | re.Pattern[str] | Iterable[str] | Callable[[str], bool] | None
_GLOB = "; what a shell writes * is .* here"

Dtypes = Any  # A dtype of any framework, [(regex, dtype)], or {exact name: dtype}.
_PATTERN = re.compile(r"[\\^$*+?|()\[\]{}]")  # What a name hardly holds, and a regex does.


def select(index: Index, names: Names) -> list[TensorInfo]:
    """The rows that `names=` asks for, in the index's order.

    Args:
        names: None for all; a regex that is searched for; a list of exact names; or a
            function from a name to whether it is wanted.

    Raises:
        TensorNotFoundError: A listed name, or every match of a regex, is missing.
        UsageError: The regex is malformed, or these are no names.
    """
    if names is None:
        return list(index.tensors.values())
    if callable(names):
        return [row for name, row in index.tensors.items() if names(name)]
    if isinstance(names, str | re.Pattern):
        pattern = compiled(names)
        found = [row for name, row in index.tensors.items() if pattern.search(name)]
        if not found:
            raise errors.TensorNotFoundError(
                "no tensor matches",
                expected=f"a name with {pattern.pattern!r}{_hint(pattern, index)}",
                found=", ".join(list(index.tensors)[:5]) or "no tensors at all",
            )
        return found
    try:
        wanted = list(dict.fromkeys(names))
    except TypeError as error:
        expected = "a regular expression, names, or a function"
        raise errors.UsageError(str(error), expected=expected, found=repr(names)) from None
    for name in wanted:
        if name not in index.tensors and _PATTERN.search(str(name)):
            raise errors.TensorNotFoundError(
                "no such tensor; names=[…] takes exact names, names='…' a regular expression",
                tensor=name,
                expected="exact names",
            )
        index[name]
    chosen = set(wanted)
    return [row for name, row in index.tensors.items() if name in chosen]


def _hint(pattern: re.Pattern[str], index: Index) -> str:
    """What a regex that matches nothing may have been meant to be."""
    if not pattern.flags & re.IGNORECASE:
        loose = re.compile(pattern.pattern, pattern.flags | re.IGNORECASE)
        found = next((name for name in index if loose.search(name)), None)
        if found is not None:
            return f"; without regard to case, '(?i){pattern.pattern}', there is {found}"
    close = errors.close_names(pattern.pattern.replace("\\", ""), index)
    return f"; close to it are {', '.join(close)}" if close else ""


def target(info: TensorInfo, dtype: Dtypes) -> tuple[DType, bool]:
    """The dtype a tensor is delivered in.

    One dtype for all converts what it can without harm: a float dtype takes floats (other kinds
    stay as they are), any other dtype must hold every value of what it is given. Rules ask by
    name: in a list of (regex, dtype) pairs the first regex found in the name counts, a mapping
    holds exact names. Then a conversion may lose precision, but a value outside an integer
    target's range still stops the load (a float outside a narrower float's becomes infinity or
    NaN, as it does in every framework).

    Returns:
        The row, and whether values are to be checked.

    Raises:
        LossyCastError: It would lose values and was not asked for by name.
        UnsupportedDtypeError: There is no conversion between the two.
    """
    if dtype is None:
        return info.dtype, False
    if has_rules(dtype):
        wanted = named(info.name, dtype)
        if wanted is None or wanted is info.dtype:
            return info.dtype, False
        _convertible(info, wanted)
        return wanted, wanted.kind in ("int", "uint", "bool")
    wanted = dtypes.resolve(dtype)
    if wanted is info.dtype or (wanted.kind == "float" and info.dtype.kind != "float"):
        return info.dtype, False
    if info.dtype.kind in ("scale", "packed", "unknown"):
        return info.dtype, False
    _convertible(info, wanted)
    if wanted.kind != "float" and not holds(wanted, info.dtype):
        raise errors.LossyCastError(
            "the conversion would lose values; ask for it by name: dtype={name: dtype}",
            tensor=info.name,
            expected=f"a dtype that {wanted} holds",
            found=info.dtype.name,
        )
    return wanted, False


def has_rules(dtype: Dtypes) -> bool:
    """Whether `dtype=` holds rules for names: a mapping, or a list of pairs."""
    return isinstance(dtype, Mapping) or (isinstance(dtype, list | tuple) and bool(dtype))


def named(name: str, rules: Dtypes) -> DType | None:
    """The dtype that rules give a name. Default: None.

    Raises:
        UsageError: A regex is malformed, or a dtype unknown.
    """
    if isinstance(rules, Mapping):
        found: Any = rules.get(name)
        return None if found is None else dtypes.resolve(found)
    for pattern, spec in _pairs(rules):
        if compiled(pattern).search(name):
            return dtypes.resolve(spec)
    return None


def check_rules(names: Collection[str], rules: Dtypes) -> list[str]:
    """What is odd about rules for dtypes: each one that no name matches.

    Raises:
        UsageError: A regex is malformed, or a dtype unknown.
    """
    notes: list[str] = []
    if isinstance(rules, Mapping):
        for name, spec in rules.items():
            dtypes.resolve(spec)
            if name not in names:
                notes.append(f"dtype= names {name!r}, which is not there{hint(name, names)}")
        return notes
    for pattern, spec in _pairs(rules):
        dtypes.resolve(spec)
        regex = compiled(pattern)
        if not any(map(regex.search, names)):
            notes.append(f"dtype= has a regex that matches no name: {regex.pattern!r}")
    return notes


def hint(name: object, names: Iterable[str]) -> str:
    """What an exact name in a mapping that is not there may have been meant to be."""
    if not isinstance(name, str):
        return ""
    form = "; regexes go in a list of pairs: [(regex, …)]" if _PATTERN.search(name) else ""
    return errors.did_you_mean(name, list(names)) + form


def _pairs(rules: Dtypes) -> list[tuple[Any, Any]]:
    pairs: list[Any] = list(rules)
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise errors.UsageError(
                "dtype= takes a list of pairs",
                expected="[(regex, dtype), …], or {exact name: dtype}",
                found=repr(pair),
            )
    return pairs


def _convertible(info: TensorInfo, wanted: DType) -> None:
    kinds = {info.dtype.kind, wanted.kind}
    if kinds & {"scale", "packed", "unknown"} or info.dtype.kind == "complex" != wanted.kind:
        raise errors.UnsupportedDtypeError(
            "no conversion between these dtypes",
            tensor=info.name,
            expected=wanted.name,
            found=info.dtype.name,
        )


def holds(wanted: DType, given: DType) -> bool:
    """Whether every value of one integer-like dtype is a value of another."""
    if given.kind == "float":
        return wanted.kind == "complex" and given.bits <= 32
    if wanted.kind == "complex":
        return given.kind == "bool" or given.bits < 24
    if given.kind == "bool":
        return True
    if wanted.kind == "bool" or (given.kind == "int" and wanted.kind == "uint"):
        return False
    return wanted.bits > given.bits or (wanted.kind == given.kind and wanted.bits == given.bits)


def compiled(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    """A user's regular expression.

    Raises:
        UsageError: It is malformed, or one of bytes.
    """
    try:
        compiled = re.compile(pattern)
        compiled.search("")  # One of bytes matches no name.
        return compiled
    except (re.error, TypeError) as error:
        raise errors.UsageError(
            "malformed regular expression",
            expected=f"{error}{_GLOB if str(pattern).startswith('*') else ''}",
            found=str(pattern),
        ) from None
