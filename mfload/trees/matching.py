"""Matching: which stored tensors fill which leaves, or everything that keeps them apart.

Only names and headers are looked at; no data is read.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mfload import dtypes, errors
from mfload.index import Index, TensorInfo
from mfload.planning import selection
from mfload.trees import keymap
from mfload.trees.keymap import Entry, Rule
from mfload.trees.recipe import Claim, Leaf, MisfitError, Recipe, make

_GUESSED, _COMPARED = 20, 20_000  # Names with close ones, and names compared for that in all.
_MATCHED = 1_000_000  # Regexes tried for hints in all, at less than 1 µs each.
_SHOWN = 5
_TAIL = 16  # Characters at the end of a name by which rules are sorted out.
_UNCHANGED = Rule(("",))
_WHOLE = "a key map matches whole names"

_Problems = defaultdict[str, list[str]]
"""What is wrong, by kind, in the order in which kinds were first met."""


class Matched(NamedTuple):
    """How a target is filled."""

    recipes: dict[int, Recipe]  # By number of the leaf; leaves without one stay as they are.
    notes: tuple[str, ...]


def match(
    index: Index,
    leaves: Sequence[Leaf],
    mapping: Any = None,
    *,
    strict: bool = True,
    dtype: Any = "target",
    arrays: Callable[[str], bool] = lambda _name: True,
) -> Matched:
    """Finds out how a target is made of a checkpoint; arguments as for `mfload.load_into`.

    `arrays` tells whether the framework has arrays of a dtype, by its name.
    """
    if selection.has_rules(dtype):
        selection.check_rules((), dtype)
    elif dtype is not None and not (isinstance(dtype, str) and dtype in ("target", "stored")):
        dtypes.resolve(dtype)
    held = {name: leaf for leaf in leaves if leaf.held for name in leaf.names}
    unheld = {name: leaf for leaf in leaves if not leaf.held for name in leaf.names}
    claims = _find(index.tensors.values(), held, mapping)
    problems: _Problems = defaultdict(list)
    for info, entries in claims.twice:
        rules = ", ".join(map(str, entries))
        either = "make one narrower, or write one rule with a list of targets"
        problems["matched twice"].append(f"{info.name}: several rules match, {rules}; {either}")
    made: dict[str, Recipe] = {}
    for name, found in claims.by_target.items():
        try:
            made[name] = make(name, held[name], found, held, dtype)
            if not arrays((row := made[name].dtype).name):
                raise MisfitError("misfit", f"the framework has no arrays of {row}")
        except MisfitError as misfit:
            problems[misfit.kind].append(f"{name}: {misfit}")
    if strict:
        problems["misfit"] += [
            f"{leaf.name}: no stored tensor becomes {leaf.value.dtype}"
            for leaf in unheld.values()
            if not leaf.optional
        ]
        _check_names(problems, claims, leaves, unheld)
    notes = _check_rules(problems, claims, index.tensors)
    counts = ", ".join(f"{len(lines)} {kind}" for kind, lines in problems.items() if lines)
    if counts:
        every = tuple(f"{kind}: {line}" for kind, lines in problems.items() for line in lines)
        raise errors.MappingError(
            f"the checkpoint does not fit the target: {counts}", problems=every
        )
    if not strict and not made and index.tensors:
        raise errors.MappingError(
            "nothing in the checkpoint goes into the target; mapping= says which name becomes what",
            expected=f"names like {next(iter(held), 'nothing')!r}",
            found=f"names like {next(iter(index.tensors))!r}",
        )
    notes += _strays(claims, unheld)
    recipes: dict[int, Recipe] = {}
    for number, leaf in enumerate(leaves):
        names = [name for name in leaf.names if name in made]
        if names:
            recipes[number] = made[names[0]]
        notes += [
            f"{other} was not loaded: it is the same variable as {names[0]}" for other in names[1:]
        ]
    if selection.has_rules(dtype):
        for line in selection.check_rules(held, dtype):
            errors.warn(line)
    return Matched(recipes, tuple(notes))


# -- claims ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Claims:
    """What a key map makes of a checkpoint's names."""

    entries: tuple[Entry, ...] = ()
    used: set[int] = field(default_factory=set[int])  # Numbers of entries that a tensor went by.
    by_target: dict[str, list[Claim]] = field(default_factory=dict[str, list[Claim]])
    # Stored tensors that go nowhere, with the name that they were given, if any.
    stray: list[tuple[TensorInfo, str | None]] = field(default_factory=list[Any])
    # Stored tensors that several rules match, with these, and targets they may be meant for.
    twice: list[tuple[TensorInfo, list[Entry]]] = field(default_factory=list[Any])
    disputed: set[str] = field(default_factory=set[str])

    def add(self, target: str, claim: Claim, targets: Collection[str]) -> None:
        if target in targets:
            self.by_target.setdefault(target, []).append(claim)
        else:
            self.stray.append((claim.info, target))


def _find(tensors: Iterable[TensorInfo], targets: Collection[str], mapping: Any) -> _Claims:
    """Asks a key map, a function or nothing about every stored tensor."""
    if mapping is None or callable(mapping):
        claims = _Claims()
        for info in tensors:
            name = info.name if mapping is None else _called(mapping, info.name, targets)
            if name is not None:
                claims.add(name, Claim(info, _UNCHANGED, (name,)), targets)
        return claims
    entries = keymap.read(mapping)
    claims = _Claims(entries)
    lookup = Lookup(entries)
    expanders = [
        [
            (rule, [name if name is None else expander(name) for name in rule.names])
            for rule in rules
        ]
        for _, rules in entries
    ]
    for info in tensors:
        found = lookup.matching(info.name)
        claims.used.update(number for number, _ in found)
        if not found:
            claims.stray.append((info, None))
        elif len(found) > 1:
            claims.twice.append((info, [entries[number] for number, _ in found]))
        for number, groups in found:
            for rule, expand in expanders[number]:
                names = tuple(None if each is None else each(groups) for each in expand)
                if len(found) > 1:
                    claims.disputed.update(filter(None, names))
                    continue
                for part, name in enumerate(names):
                    if name is not None:
                        claims.add(name, Claim(info, rule, names, part, groups), targets)
    return claims


def _called(function: Callable[[str], Any], name: str, targets: Collection[str]) -> str | None:
    expected = "the name of a target, or None to leave the tensor out"
    try:
        given = function(name)
    except Exception as error:
        message = f"the function in mapping= raised {type(error).__name__}: {error}"
        raise errors.UsageError(message, tensor=name, expected=expected) from error
    # A target that is one leaf and no tree has an empty name.
    if given is None or (isinstance(given, str) and (given or given in targets)):
        return given
    message = "the function in mapping= gives no name"
    raise errors.UsageError(message, tensor=name, expected=expected, found=repr(given))


class Lookup:
    """The rules of a key map, ready to be asked for up to 100,000 names."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._patterns = [entry.pattern for entry in entries]
        self._fills = [bool(entry.rules) for entry in entries]
        self._family = [at for at, entry in enumerate(entries) if entry.family]
        self._endings = [ending(pattern)[-_TAIL:] for pattern in self._patterns]
        self._candidates: dict[str, list[int]] = {}

    def matching(self, name: str) -> list[tuple[int, re.Match[str]]]:
        r"""The lines that match all of a name, by number, with what they matched.

        If there are none, lines in the forms of Tunix and Bonsai may match its front: these
        replace what matched, and the rest of the name stays. So `head\.weight` is not a second
        match for `head.weight_scale` if there is a line for that. What leaves tensors out comes
        last, and so may leave out all the rest.
        """
        patterns = self._patterns
        tail = name[-_TAIL:]
        likely = self._candidates.get(tail)
        if likely is None:
            likely = [at for at, end in enumerate(self._endings) if tail.endswith(end)]
            self._candidates[tail] = likely
        whole = ((at, patterns[at].fullmatch(name)) for at in likely)
        found = [(at, match) for at, match in whole if match]
        filling = [(at, match) for at, match in found if self._fills[at]]
        if filling:
            return filling
        fronts = ((at, patterns[at].match(name)) for at in self._family)
        return [(at, match) for at, match in fronts if match and match.end()] or found[:1]


def ending(pattern: re.Pattern[str]) -> str:
    r"""What every whole match ends with, as far as that is plain to see.

    `layers\.(\d+)\.mlp\.weight` ends with `.mlp.weight`. Alternatives, flags that change what
    letters mean, and a letter that belongs to an escape before it are left to the regex itself.
    """
    text = pattern.pattern
    if pattern.flags & (re.IGNORECASE | re.VERBOSE) or "|" in text:
        return ""
    if text.endswith("$") and not text.endswith("\\$"):
        text = text[:-1]
    literal = re.search(r"(?:[A-Za-z0-9_]|\\\.)*\Z", text)
    start = len(text) if literal is None else literal.start()
    return "" if start and text[start - 1] == "\\" else text[start:].replace("\\.", ".")


def expander(template: str) -> Callable[[re.Match[str]], str]:
    """`Match.expand` of one template, parsed once; what does not match stays behind it."""
    pieces = re.split(r"\\g<(\w+)>|\\([1-9][0-9]?)(?![0-9])", template)
    texts = pieces[::3]
    if any("\\" in text for text in texts):
        return lambda match: match.expand(template) + match.string[match.end() :]
    groups = [name or number for name, number in zip(pieces[1::3], pieces[2::3], strict=True)]
    keys = [int(group) if group.isdigit() else group for group in groups]

    def expand(match: re.Match[str]) -> str:
        made = texts[0]
        for key, text in zip(keys, texts[1:], strict=True):
            made += (match[key] or "") + text
        return made + match.string[match.end() :]

    return expand


# -- what is wrong ---------------------------------------------------------------------------


def _check_names(
    problems: _Problems, claims: _Claims, leaves: Sequence[Leaf], unheld: Mapping[str, Leaf]
) -> None:
    """Leaves that nothing fills, and tensors that go nowhere."""
    known = claims.disputed.union(claims.by_target)
    lacking = [leaf for leaf in leaves if leaf.held and known.isdisjoint(leaf.names)]
    # The state of an optimizer may be missing as a whole.
    some = sum(leaf.optimizer for leaf in lacking) < sum(leaf.optimizer for leaf in leaves)
    empty = [leaf for leaf in lacking if not leaf.optional and (some or not leaf.optimizer)]
    given = [target or info.name for info, target in claims.stray]
    for at, leaf in enumerate(empty):
        text = f"{', which is also '.join(leaf.names)} {list(leaf.shape)}"
        hint = _meant(leaf.name, given, at)
        problems["missing"].append(f"{text}: nothing in the checkpoint goes there{hint}")
    wanted = [name for leaf in empty for name in leaf.names]
    for at, (info, target) in enumerate(claims.stray):
        hint = ""
        if target is None:
            reason = "no rule matches"
            entries = claims.entries if at < _GUESSED else ()
            entry = next((entry for entry in entries if _matches_part(entry, info.name)), None)
            if entry:
                hint = f"; {entry} matches only part of it, and {_WHOLE}"
        elif target in unheld:
            reason, hint = f"{target!r} can't hold a tensor", _unheld_hint(unheld[target])
        else:
            reason = f"the target has no {target!r}"
        hint = hint or _meant(target or info.name, wanted, at)
        problems["extra"].append(f"{info.name} {list(info.shape)}: {reason}{hint}")


def _check_rules(problems: _Problems, claims: _Claims, names: Collection[str]) -> list[str]:
    """Rules that match nothing are wrong if they fill something, and else a warning.

    In a map of Tunix's or Bonsai's form they are only noted, as their maps serve several
    checkpoints, unless names are amiss: then it is where to look.
    """
    unused = [entry for at, entry in enumerate(claims.entries) if at not in claims.used]
    amiss = bool(problems["missing"] or problems["extra"])
    family = any(entry.family for entry in claims.entries)
    most = _MATCHED // max(1, len(unused))
    spare: list[str] = []
    for entry in unused:
        line = _unused(entry, itertools.islice(names, most))
        if entry.rules and (amiss or not entry.family):
            problems["unused rule"].append(line)
        elif line:
            spare.append(str(entry))
            if not family and not any(problems.values()):
                errors.warn(f"mapping=: {line}")
    return [f"rules that matched nothing: {_brief(spare)}"] if spare else []


def _unused(entry: Entry, names: Iterable[str]) -> str:
    """What to say of a rule that nothing went by; nothing if others took all that it matches."""
    part = ""
    for name in names:
        if entry.pattern.fullmatch(name):
            return f"{entry} matches no tensor" if entry.rules else ""
        if not part and _matches_part(entry, name):
            part = f"{entry} matches only part of {name}, and {_WHOLE}"
    return part or f"{entry} matches no tensor"


def _matches_part(entry: Entry, name: str) -> bool:
    found = entry.pattern.search(name)
    return found is not None and found[0] != ""


def _unheld_hint(leaf: Leaf) -> str:
    dtype = getattr(leaf.value, "dtype", None)
    if str(dtype).startswith("key<"):
        return (
            "; it is a typed PRNG key: put jax.random.key_data(key) into the target, and wrap what "
            "is loaded with jax.random.wrap_key_data"
        )
    return f"; it is {dtype or type(leaf.value).__name__}"


def _strays(claims: _Claims, unheld: Mapping[str, Leaf]) -> list[str]:
    names = list(dict.fromkeys(info.name for info, _ in claims.stray))
    notes = [f"tensors that the target has no place for: {_brief(names)}"] if names else []
    blocked = [target for _, target in claims.stray if target and target in unheld]
    return notes + [f"{name} was not loaded{_unheld_hint(unheld[name])}" for name in blocked]


def _brief(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _meant(name: str, choices: Sequence[str], at: int) -> str:
    most = max(1, min(_GUESSED, _COMPARED // max(1, len(choices))))
    return errors.did_you_mean(name, choices) if at < most else ""
