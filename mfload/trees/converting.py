"""Converting: the dtype of a target, from what is stored, what is wanted, and what a rule says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mfload import dtypes, errors
from mfload.dtypes import DType
from mfload.index import TensorInfo
from mfload.planning import selection
from mfload.trees.misfits import Misfit
from mfload.trees.recipes import Aim, Conversion
from mfload.trees.rules import Rule

_OPAQUE = ("scale", "packed", "unknown")
_INTEGERS = ("int", "uint", "bool")


class Converted(NamedTuple):
    """How numbers become those of a target.

    Attributes:
        dtype: Of the result.
        cast: Dtype that each stored tensor is converted to at once, as they differ.
        conversion: What happens last, None for nothing.
        checked: Whether values may lie outside what the result holds.
        landed: Dtype that each stored tensor is converted to while it lands, None for its own.
    """

    dtype: DType
    cast: DType | None
    conversion: Conversion | None
    checked: bool
    landed: DType | None = None


def convert(aim: Aim, rule: Rule, tensors: Iterable[TensorInfo], dtype: Any) -> Converted:
    """Decides on the dtype of a target.

    Args:
        aim: The target.
        rule: Its rule.
        tensors: The stored tensors that make it.
        dtype: What `dtype=` was given: "target", "stored" or None, a dtype, or `{regex: dtype}`,
            which goes by the name of the target.

    Raises:
        Misfit: What is stored can't become that.
    """
    # One tensor of each dtype speaks for the others.
    given = {info.dtype: info for info in tensors}
    wanted = {_wanted(aim, rule, info, dtype) for info in given.values()}
    stored = set(given)
    if len(wanted) > 1:
        names = " and ".join(sorted(each.name for each in wanted))
        raise Misfit("wrong dtype", f"its parts are {names}; rule(cast=) says what all shall be")
    (result,) = wanted
    between = None if rule.scale is None else _between(stored, result, rule.scale)
    if _is_for_the_host({*stored, result if between is None else between}):
        landed = result if between is None else between
        last = None if between is None else Conversion(rule.scale, between, result)
        return Converted(result, None, last, False, landed)
    mixed = len(stored) > 1
    if between is not None:
        last = Conversion(rule.scale, between, result)
        return Converted(result, between if mixed else None, last, False)
    if mixed:
        return Converted(result, result, None, _risky(stored, result))
    last = None if stored == {result} else Conversion(None, result, result)
    return Converted(result, None, last, _risky(stored, result))


def _wanted(aim: Aim, rule: Rule, info: TensorInfo, dtype: Any) -> DType:
    stored = info.dtype
    named = selection.named(aim.name, dtype) if isinstance(dtype, Mapping) else None
    asked = named if rule.cast is None else rule.cast
    if asked is not None:
        _check_cast(stored, asked)
        return asked
    if dtype is None or (isinstance(dtype, str) and dtype == "stored"):
        return stored
    if isinstance(dtype, Mapping) or (isinstance(dtype, str) and dtype == "target"):
        if aim.dtype is None or aim.dtype is stored:
            return stored
        scaled = rule.scale is not None and stored.kind in _INTEGERS and aim.dtype.kind == "float"
        if not scaled and not _harmless(stored, aim.dtype):
            advice = _advice(stored, aim.dtype)
            raise Misfit("wrong dtype", f"wants {aim.dtype}, stored is {stored}{advice}")
        return aim.dtype
    try:
        return selection.target(info, dtype)[0]
    except (errors.LossyCastError, errors.UnsupportedDtypeError) as error:
        raise Misfit("wrong dtype", f"stored is {stored}: {error.message}") from None


def _harmless(stored: DType, wanted: DType) -> bool:
    if stored.kind == wanted.kind == "float":
        return True
    if stored.kind in _INTEGERS and wanted.kind in ("int", "uint"):
        return selection.holds(wanted, stored)
    return False


def _advice(stored: DType, wanted: DType) -> str:
    try:
        _check_cast(stored, wanted)
    except Misfit:
        return ""
    return f"; rule(cast={wanted.aliases[0]!r}) converts it"


def _check_cast(stored: DType, wanted: DType) -> None:
    if stored is wanted:
        return
    opaque = stored.kind in _OPAQUE or wanted.kind in _OPAQUE
    if opaque or (stored.kind == "complex" != wanted.kind):
        raise Misfit("wrong dtype", f"there is no conversion from {stored} to {wanted}")


def _risky(stored: set[DType], wanted: DType) -> bool:
    return wanted.kind in _INTEGERS and not all(
        each is wanted or _harmless(each, wanted) for each in stored
    )


def _is_for_the_host(found: set[DType]) -> bool:
    """Whether XLA does not convert among these as it must be done.

    On CPUs it takes float64 to the 16-bit and 8-bit floats by way of float32, which rounds twice,
    and takes what is subnormal in float32 for zero, on either side of float64. Among the other
    floats, and from integers, all is as `ml_dtypes` has it. Measured with JAX 0.10.
    """
    wide = dtypes.TABLE["F64"] in found
    return wide and len(found) > 1 and all(each.kind == "float" for each in found)


def _between(stored: set[DType], result: DType, scale: float) -> DType:
    """The dtype a product is computed in: wide enough for both sides, float32 at the least."""
    between = _wide(stored, result)
    real = np.dtype(between.numpy).type(0).real.dtype
    limits = np.finfo(real)
    with np.errstate(all="ignore"):
        size = abs(real.type(scale))
    if not limits.tiny <= size <= limits.max:
        raise Misfit(
            "bad rule",
            f"scale={scale!r} is no normal number of {between}, in which the product is computed: "
            f"{limits.tiny:.4g} to {limits.max:.4g}",
        )
    return between


def _wide(stored: set[DType], result: DType) -> DType:
    kinds = {each.kind for each in stored}
    wide = any(each.kind in _INTEGERS and each.bits > 16 for each in stored)
    opaque = not kinds <= {"float", "complex", *_INTEGERS}
    if wide or opaque or result.kind not in ("float", "complex"):
        names = ", ".join(sorted(each.name for each in stored))
        raise Misfit(
            "wrong dtype",
            f"{names} to {result}: scale= makes floats of floats, or of integers up to 16 bits",
        )
    if "complex" in {*kinds, result.kind}:
        return dtypes.TABLE["C64"]
    if any(each.bits > 32 for each in (*stored, result)):
        return dtypes.TABLE["F64"]
    return dtypes.TABLE["F32"]
