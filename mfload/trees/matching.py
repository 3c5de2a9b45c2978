"""Matching: a checkpoint and a target are brought together, or all that keeps them apart is told.

Names alone are looked at, and headers: no data is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mfload import dtypes, errors, runtime
from mfload.index import Index
from mfload.planning import selection
from mfload.trees import advice
from mfload.trees.claims import Claims, find
from mfload.trees.fitting import fit
from mfload.trees.misfits import Misfit
from mfload.trees.recipes import Aim, Recipe

# Names for which close ones are looked for, and names compared for that in all (50 µs each).
_GUESSED = 20
_COMPARED = 20_000
_SHOWN = 5
_EITHER = "; make one narrower, or write one rule with a list of targets"


@dataclass(frozen=True, slots=True)
class Matched:
    """How a target is filled.

    Attributes:
        recipes: How each leaf is made, by its name, in the target's order.
        passed: Names of the leaves that stay as they are.
        notes: What a user should hear of that is no error.
    """

    recipes: dict[str, Recipe]
    passed: tuple[str, ...]
    notes: tuple[str, ...]


def match(
    index: Index,
    aims: Sequence[Aim],
    mapping: Any = None,
    *,
    strict: bool = True,
    dtype: Any = "target",
) -> Matched:
    """Finds out how a target is made of a checkpoint.

    Args:
        index: The checkpoint.
        aims: The leaves of the target.
        mapping: From stored names to the target's: None, a key map, or a function of the name.
        strict: Whether every leaf must be filled and every tensor used.
        dtype: "target" (what each leaf holds), "stored" or None, or as in `mfload.load`.

    Raises:
        MappingError: They do not fit; `problems` has a line for each thing that is wrong.
        UsageError: `mapping` or `dtype` makes no sense.
    """
    _check_dtype(dtype)
    with runtime.gc_paused.gc_paused():
        return _match(index, aims, mapping, strict, dtype)


def _match(index: Index, aims: Sequence[Aim], mapping: Any, strict: bool, dtype: Any) -> Matched:
    leaves = {aim.name: aim for aim in aims}
    claims = find(index.tensors.values(), leaves, mapping)
    problems = _Problems()
    if len(leaves) < len(aims):
        doubled = sorted({aim.name for aim in aims if leaves[aim.name] is not aim})
        problems.add("named alike", [f"{name}: several leaves have this name" for name in doubled])
    for info, entries in claims.twice:
        rules = ", ".join(str(entry) for entry in entries)
        problems.add("matched twice", [f"{info.name}: several rules match, {rules}{_EITHER}"])
    recipes: dict[str, Recipe] = {}
    for name, found in claims.by_target.items():
        try:
            recipes[name] = fit(leaves[name], found, leaves, dtype)
        except Misfit as misfit:
            problems.add(misfit.kind, [f"{name}: {misfit.message}"])
    empty = [aim for aim in aims if aim.name not in claims.by_target]
    if strict:
        lacking = [aim for aim in empty if not aim.optional and aim.name not in claims.disputed]
        _check_names(problems, claims, lacking)
    notes = _check_rules(problems, claims, index.tensors, leaves)
    problems.settle()
    notes += _strays(claims)
    if isinstance(dtype, Mapping):
        notes += [
            f"dtype= has a regex that matches no name of the target: {pattern!r}"
            for pattern in selection.idle(leaves, dtype)
        ]
    ordered = {name: recipes[name] for name in leaves if name in recipes}
    return Matched(ordered, tuple(aim.name for aim in empty), tuple(notes))


class _Problems:
    """All that is wrong, kind by kind in the order in which kinds were first met."""

    def __init__(self) -> None:
        self.kinds: dict[str, list[str]] = {}

    def add(self, kind: str, lines: Sequence[str]) -> None:
        if lines:
            self.kinds.setdefault(kind, []).extend(lines)

    def settle(self) -> None:
        """Raises what has gathered."""
        if not self.kinds:
            return
        counts = ", ".join(f"{len(lines)} {kind}" for kind, lines in self.kinds.items())
        raise errors.MappingError(
            f"the checkpoint does not fit the target: {counts}",
            problems=tuple(
                f"{kind}: {line}" for kind, lines in self.kinds.items() for line in lines
            ),
        )


def _check_dtype(dtype: Any) -> None:
    """A dtype that is none is found here, once, and not at each tensor."""
    if dtype is None or (isinstance(dtype, str) and dtype in ("target", "stored")):
        return
    for spec in dtype.values() if isinstance(dtype, Mapping) else (dtype,):
        dtypes.resolve(spec)
    if isinstance(dtype, Mapping):
        selection.idle((), dtype)


def _check_names(problems: _Problems, claims: Claims, empty: Sequence[Aim]) -> None:
    given = [target or info.name for info, target in claims.stray]
    problems.add(
        "missing",
        [
            f"{aim.name} {list(aim.shape)}: nothing in the checkpoint goes there"
            f"{_meant(aim.name, given, at)}"
            for at, aim in enumerate(empty)
        ],
    )
    wanted = [aim.name for aim in empty]
    lines: list[str] = []
    for at, (info, target) in enumerate(claims.stray):
        if target is not None:
            reason, hint = f"the target has no {target!r}", advice.template(target)
        else:
            reason = "no rule matches"
            hint = advice.front(claims.entries, info.name) if at < _GUESSED else ""
        hint = hint or _meant(target or info.name, wanted, at)
        lines.append(f"{info.name} {list(info.shape)}: {reason}{hint}")
    problems.add("extra", lines)


def _check_rules(
    problems: _Problems, claims: Claims, names: Collection[str], leaves: Collection[str]
) -> list[str]:
    """Rules that match nothing: wrong, except in a map that serves a family of checkpoints.

    Such a map may hold more than one of the family needs. But where names are amiss, what it
    did not use is where to look.
    """
    amiss = "missing" in problems.kinds or "extra" in problems.kinds
    # A rule that leaves tensors out is content with none.
    wrong = [entry for entry in claims.unused if entry.rules and (amiss or not entry.family)]
    problems.add("unused rule", advice.unused(wrong, names, leaves))
    spare = [str(entry) for entry in claims.unused if entry not in wrong]
    return [f"rules that did nothing: {_brief(spare)}"] if spare else []


def _strays(claims: Claims) -> list[str]:
    names = list(dict.fromkeys(info.name for info, _ in claims.stray))
    return [f"tensors that the target has no place for: {_brief(names)}"] if names else []


def _brief(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _meant(name: str, choices: Sequence[str], at: int) -> str:
    most = max(1, min(_GUESSED, _COMPARED // max(1, len(choices))))
    return errors.did_you_mean(name, choices) if at < most else ""
