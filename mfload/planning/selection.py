"""Selecting: which tensors are wanted, by name, and as which dtype."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn

from mfload import dtypes, errors
from mfload.dtypes import DType
from mfload.index import Columns, Index, TensorInfo

Regex = str | re.Pattern[str]
"""A regular expression. To choose tensors it is searched for in their names, so that a part of a
name is enough; `^` and `$` bind it to the ends. To rename them, in a key map, it must match the
whole name, which is replaced. Of pairs that choose, the first whose regex is found counts."""

Names = Regex | Iterable[str] | Callable[[str], bool] | None
_UNCONVERTED = {"scale", "packed", "unknown"}  # Kinds of dtypes.
_GLOB = "; what a shell writes * is .* here"

Dtypes = Any  # A dtype of any framework, [(regex, dtype)], or {exact name: dtype}.
_LISTED = 8  # Rules that a warning names.
_PATTERN = re.compile(r"[\\^$*+?|()\[\]{}]")  # What a name hardly holds, and a regex does.


def select(index: Index, names: Names) -> Columns:
    """The tensors that `names=` asks for, in the index's order.

    None for all; a regex that is searched for; a list of exact names; or a function from a name to
    a bool. Raises TensorNotFoundError if a name is missing or nothing is chosen, or UsageError.
    """
    if names is None:
        return index.columns
    if callable(names):
        found = list(filter(names, index.searched))
        return index.take(found or _nothing(index, "a name for which the function is true"))
    if isinstance(names, str | re.Pattern):
        pattern = compiled(names)
        found = list(filter(pattern.search, index.searched))
        if not found:
            _nothing(index, f"a name with {pattern.pattern!r}{_hint(pattern, index)}")
        return index.take(found)
    try:
        wanted = list(dict.fromkeys(names))
    except TypeError:
        expected = "a regular expression, a list of names, or a function"
        raise errors.UsageError("invalid names", expected=expected, found=repr(names)) from None
    for name in wanted:
        if name not in index.names and name not in index.searched:
            if _PATTERN.search(str(name)):
                text = "no such tensor; names=[…] takes exact names, names='…' a regular expression"
                raise errors.TensorNotFoundError(text, tensor=name, expected="exact names")
            index[name]
    return index.take(wanted or _nothing(index, "a name in names=[…]; None is for all tensors"))


def _nothing(index: Index, expected: str) -> NoReturn:
    there = ", ".join(itertools.islice(index.names, 5)) or "no tensors at all"
    raise errors.TensorNotFoundError("no tensor matches", expected=expected, found=there)


def _hint(pattern: re.Pattern[str], index: Index) -> str:
    """What a regex that matches nothing may have been meant to be."""
    if not pattern.flags & re.IGNORECASE:
        loose = re.compile(pattern.pattern, pattern.flags | re.IGNORECASE)
        found = next((name for name in index if loose.search(name)), None)
        if found is not None:
            return f"; without regard to case, '(?i){pattern.pattern}', there is {found}"
    close = errors.close_names(pattern.pattern.replace("\\", ""), index)
    return f"; close to it are {', '.join(close)}" if close else ""


class Rules:
    """What an argument says for names: exact names in a mapping, or regexes in a list of pairs.

    Of pairs the first regex that is found in a name counts. `read` turns a rule's value into what
    `find` returns. Raises UsageError if a rule is malformed.
    """

    def __init__(
        self, argument: str, given: Any, read: Callable[[Any], Any] = lambda value: value
    ) -> None:
        self._argument = argument
        self._exact: dict[Any, Any] = {}
        self._searched: list[tuple[re.Pattern[str], Any]] = []
        if isinstance(given, Mapping):
            self._exact = {name: read(value) for name, value in given.items()}
            return
        for pair in given:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise errors.UsageError(
                    f"{argument} takes a list of pairs",
                    expected="[(regex, …), …], or {exact name: …}",
                    found=repr(pair),
                )
            self._searched.append((compiled(pair[0]), read(pair[1])))

    def find(self, name: str, default: Any = None) -> Any:
        """The value for a name."""
        if not self._searched:
            return self._exact.get(name, default)
        return next((value for regex, value in self._searched if regex.search(name)), default)

    def warn_of_unmatched(self, names: Collection[str]) -> None:
        """Warns of rules that match none of the names.

        Raises TensorNotFoundError if there are rules and none matches any.
        """
        if not names:
            return
        every = list(names)
        known = set(every)
        missed = [name for name in self._exact if name not in known]
        missed += [each.pattern for each, _ in self._searched if not any(map(each.search, every))]
        shown: list[str] = []
        for rule in missed[:_LISTED]:
            regex = self._exact and isinstance(rule, str) and _PATTERN.search(rule)
            form = "; regexes go in a list of pairs: [(regex, …)]" if regex else ""
            shown.append(f"{rule!r}{errors.did_you_mean(rule, every)}{form}")
        if missed:
            more = f", and {len(missed) - _LISTED} more" if len(missed) > _LISTED else ""
            text = f"{self._argument} has rules that match no tensor: {', '.join(shown)}{more}"
            text = f"{text}; names are such as {every[0]!r}"
            if len(missed) == len(self._exact) + len(self._searched):
                raise errors.TensorNotFoundError(text)
            errors.warn(text)


def read_dtype(dtype: Any) -> DType | Rules | None:
    """The argument `dtype=`: one dtype for all, rules for names, or None for the stored ones."""
    if dtype is None:
        return None
    if isinstance(dtype, Mapping | list | tuple):
        return Rules("dtype=", dtype, dtypes.resolve)
    return dtypes.resolve(dtype)


def target(info: TensorInfo, dtype: DType | Rules | None) -> tuple[DType, bool]:
    """The dtype a tensor is delivered in, and whether values are to be checked.

    One dtype for all converts what it can without harm: a float dtype takes floats (other kinds
    stay as they are), any other dtype must hold every value of what it is given. Rules ask by
    name: see `asked`.

    Raises LossyCastError if it would lose values and was not asked for by name, or
    UnsupportedDtypeError if there is no conversion.
    """
    if isinstance(dtype, Rules):
        return asked(info, dtype.find(info.name, info.dtype))
    kind = info.dtype.kind
    if dtype is None or dtype is info.dtype:
        return info.dtype, False
    if kind in _UNCONVERTED or (dtype.kind == "float" and kind != "float"):
        return info.dtype, False
    _convertible(info, dtype)
    if dtype.kind != "float" and not holds(dtype, info.dtype):
        raise errors.LossyCastError(
            "the conversion would lose values; ask for it by name: dtype={name: dtype}",
            tensor=info.name,
            expected=f"a dtype that {dtype} holds",
            found=info.dtype.name,
        )
    return dtype, dtype.name in dtypes.NO_INFINITY


def asked(info: TensorInfo, wanted: DType) -> tuple[DType, bool]:
    """The same for a tensor whose dtype is asked for by name.

    The conversion may lose precision, but a value outside the target's range stops the load
    (a float outside a narrower float's becomes infinity, if that has one).
    """
    if wanted is info.dtype:
        return wanted, False
    _convertible(info, wanted)
    return wanted, wanted.kind in ("int", "uint", "bool") or wanted.name in dtypes.NO_INFINITY


def _convertible(info: TensorInfo, wanted: DType) -> None:
    kinds = {info.dtype.kind, wanted.kind}
    if kinds & _UNCONVERTED or info.dtype.kind == "complex" != wanted.kind:
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
    if wanted.name in dtypes.NARROW:
        return wanted is given
    if given.name in dtypes.NARROW:
        return True
    return wanted.bits > given.bits or (wanted.kind == given.kind and wanted.bits == given.bits)


def compiled(pattern: Regex, argument: str = "") -> re.Pattern[str]:
    """A user's regular expression; raises UsageError if it is malformed, or one of bytes.

    `argument`: what an error names.
    """
    try:
        compiled = re.compile(pattern)
        compiled.search("")  # One of bytes matches no name.
        return compiled
    except (re.error, TypeError) as error:
        hint = _GLOB if str(pattern).startswith("*") else ""
        if isinstance(error, TypeError):
            hint = "; give a string, in rules as (regex, value)"
        raise errors.UsageError(
            f"malformed regular expression{argument and f' in {argument}'}: {error}{hint}",
            found=str(pattern),
        ) from None
