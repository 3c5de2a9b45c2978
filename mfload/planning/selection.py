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

Dtypes = Any  # A dtype of any framework, or {regex: dtype}.


def select(index: Index, names: Names) -> list[TensorInfo]:
    """The rows that `names=` asks for, in the index's order.

    Args:
        index: The checkpoint.
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
        pattern = _compile(names)
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

    One dtype for all converts what it can without harm: a float dtype takes floats (other
    kinds stay as they are), any other dtype must hold every value of what it is given. A
    mapping of regexes asks by name, first match first: then a conversion may lose precision,
    but a value outside an integer target's range still stops the load (a float outside a
    narrower float's becomes infinity or NaN, as it does in every framework).

    Args:
        info: The tensor.
        dtype: What `dtype=` was given.

    Returns:
        The row, and whether values are to be checked.

    Raises:
        LossyCastError: It would lose values and was not asked for by name.
        UnsupportedDtypeError: There is no conversion between the two.
    """
    if dtype is None:
        return info.dtype, False
    if isinstance(dtype, Mapping):
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
            "the conversion would lose values; ask for it by name: dtype={regex: dtype}",
            tensor=info.name,
            expected=f"a dtype that {wanted} holds",
            found=info.dtype.name,
        )
    return wanted, False


def named(name: str, table: Mapping[Any, Any]) -> DType | None:
    """The dtype that the first matching regex has, None where none matches.

    Raises:
        UsageError: A regex is malformed, or a dtype unknown.
    """
    for pattern, spec in table.items():
        if _compile(pattern).search(name):
            return dtypes.resolve(spec)
    return None


def idle(names: Collection[str], table: Mapping[Any, Any]) -> list[str]:
    """The regexes that match none of the names.

    Raises:
        UsageError: A regex is malformed.
    """
    patterns = [_compile(pattern) for pattern in table]
    return [each.pattern for each in patterns if not any(map(each.search, names))]


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


def _compile(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
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
