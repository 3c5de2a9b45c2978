"""Matching: which stored tensors fill which leaves, or everything that keeps them apart.

Only names and headers are looked at; no data is read.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mfload import dtypes, errors
from mfload.index import Index, TensorInfo
from mfload.planning import selection
from mfload.planning.request import Request
from mfload.planning.selection import Names
from mfload.progress import Progress
from mfload.report import Report
from mfload.trees import keymap
from mfload.trees.keymap import KeyMapEntry, Rule
from mfload.trees.recipe import Claim, Leaf, MisfitError, Recipe, Recipes, brief, new_row

_GUESSED, _AMONG = 20, 500  # Names with close ones, and names that these are sought among.
_TRIED = 1_000_000  # How often rules are tried on names for hints, all together.
# A run of characters in a regex that stand for themselves, `.` and the like behind a backslash.
_LITERAL = r"(?:[^\\.^$*+?{}\[\]|()]|\\[^A-Za-z0-9])"
_UNCHANGED = Rule(("",))
_WHOLE = "a key map matches whole names"
_PLURAL = ("shape", "dtype", "rule", "misfit")


class Matched(NamedTuple):
    """How a target is filled."""

    recipes: dict[int, Recipe]  # By number of the leaf; leaves without one stay as they are.
    notes: tuple[str, ...]
    ties: tuple[tuple[Recipe, Recipe], ...] = ()  # What `ties.warn` compares.
    stray: tuple[str, ...] = ()  # Names of the target's that it has no place for.

    def requests(self) -> list[Request]:
        """The tensors that the leaves are made of, each once."""
        each = itertools.chain.from_iterable(recipe.tensors for recipe in self.recipes.values())
        return [Request(info, info.dtype) for info in {info.name: info for info in each}.values()]


class Wishes(NamedTuple):
    """What is asked of `load_into` or `restore` with a target; fields as their arguments."""

    mapping: Any
    mesh: Any
    shardings: Any
    unmatched: Any
    logical_axis_rules: Any
    dtype: Any
    strict: bool
    progress: Progress
    report: Report | None
    names: Names = None
    atomic: bool = False
    verify: Any = None

    def check_bools(self) -> None:
        """Raises UsageError if `strict` or `atomic` is not a bool."""
        for name in ("strict", "atomic"):
            if not isinstance(given := getattr(self, name), bool):
                what = f"{name} is invalid"
                raise errors.UsageError(what, expected="a bool", found=repr(given))


_REMEDY = "the same names; or mapping=, which gives others, or strict=False, which loads what fits"


def match(
    index: Index,
    leaves: Sequence[Leaf],
    mapping: Any = None,
    *,
    strict: bool = True,
    dtype: Any = "target",
    arrays: Collection[str] = dtypes.TABLE,
    fits: Callable[[Leaf, Recipe], None] | None = None,
    resolve: Callable[[str], str] | None = None,
    picked: Collection[str] | None = None,
    remedy: str = _REMEDY,
    judged: tuple[str, ...] = (),
    file: str | None = None,
) -> Matched:
    """Finds out how a target is made of a checkpoint; arguments as for `mfload.load_into`.

    `arrays` are the names of the dtypes that the framework has arrays of. `fits` raises MisfitError
    if a leaf can't take what a recipe makes. `resolve` gives the leaf's name for one that files may
    have for it. `picked` are the tensors that are loaded; leaves of others stay as they are.
    `judged` are the beginnings of names that the caller judges itself, if leaves or tensors lack
    the other. `remedy` is what errors of names expect, `file` what errors name.
    """
    wish = read_dtype(dtype)
    held = {name: leaf for leaf in leaves if leaf.held for name in leaf.names}
    unheld = {name: leaf for leaf in leaves if not leaf.held for name in leaf.names}
    claims = Claims(index.tensors.values(), held, mapping, resolve, picked)
    if index.absent:
        index.require(claim.info.name for found in claims.by_target.values() for claim in found)
        index.require(info.name for info, _ in claims.stray if strict)
    problems = defaultdict[str, list[str]](list)  # By kind, in the order of the first of each.
    if claims.twice:
        problems["matched twice"] += claims.twice
    made: dict[str, Recipe] = {}
    recipe = Recipes(held, wish, arrays)
    for name, found in claims.by_target.items():
        try:
            made[name] = recipe.make(name, found)
            if fits is not None:
                fits(held[name], made[name])
        except MisfitError as misfit:
            problems[misfit.kind].append(f"{name}: {misfit}")
    if strict:
        for leaf in leaves:
            if not leaf.held and not leaf.optional and not leaf.name.startswith(judged):
                line = f"{leaf.name}: no stored tensor becomes {leaf.value.dtype}"
                problems["misfit"].append(line)
        _check_names(problems, claims, leaves, unheld, judged)
    notes = _check_rules(problems, claims, index.tensors)
    _refuse(problems, remedy, file)
    if not strict and not made and index.tensors:
        raise _nothing_fits(index, claims, held, file)
    if claims.stray:
        names = list(dict.fromkeys(info.name for info, _ in claims.stray))
        notes.append(f"tensors that the target has no place for: {brief(names)}")
    for _, target in claims.stray:
        if target in unheld:
            notes.append(f"{target} was not loaded{_unheld_hint(unheld[target])}")
    recipes, ties = _chosen(leaves, made)
    for kept, other in ties:
        notes.append(f"{other.name} was not loaded: it is the same variable as {kept.name}")
    if isinstance(wish, selection.Rules):
        wish.warn_of_unmatched(held)
    plain = ((a, b) for a, b in ties if a.transform.plain and b.transform.plain)
    stray = tuple(target for _, target in claims.stray if target is not None)
    return Matched(recipes, tuple(notes), tuple(plain), stray)


def _chosen(
    leaves: Sequence[Leaf], made: Mapping[str, Recipe]
) -> tuple[dict[int, Recipe], list[tuple[Recipe, Recipe]]]:
    """The recipe of each leaf that has one; and those with the ones that others of its names have.

    The last name counts.
    """
    recipes: dict[int, Recipe] = {}
    ties: list[tuple[Recipe, Recipe]] = []
    for number, leaf in enumerate(leaves):
        names = list(filter(made.__contains__, leaf.names))
        if names:
            kept = recipes[number] = made[names.pop()]
            if names:  # A generator for each leaf would take a hundredth of the load.
                ties += ((kept, made[other]) for other in names)
    return recipes, ties


def picked(index: Index, names: Names) -> frozenset[str] | None:
    """Names of the tensors that `names=` asks for; None for all."""
    return None if names is None else frozenset(selection.select(index, names).names)


def read_dtype(dtype: Any) -> selection.Rules | dtypes.DType | None:
    """What `dtype=` asks for: no rules for "target", None for "stored"."""
    if isinstance(dtype, str) and dtype in ("target", "stored"):
        dtype = {} if dtype == "target" else None
    return selection.read_dtype(dtype)


# -- claims ----------------------------------------------------------------------------------


class Claims:
    """What a key map, a function or nothing makes of a checkpoint's names.

    `targets`: the names of the target. Default: any name is one.
    """

    def __init__(
        self,
        tensors: Iterable[TensorInfo],
        targets: Collection[str] | None,
        mapping: Any,
        resolve: Callable[[str], str] | None = None,
        picked: Collection[str] | None = None,
    ) -> None:
        self.by_target: dict[str, list[Claim]] = {}
        # Stored tensors that go nowhere, with the name that they were given, if any.
        self.stray: list[tuple[TensorInfo, str | None]] = []
        self.twice: list[str] = []  # What is said of tensors that several rules match.
        self.entries: tuple[KeyMapEntry, ...] = ()
        self.used: set[int] = set()  # Numbers of entries that a tensor went by.
        self.passed: set[str] = set()  # Targets of tensors that were not picked.
        self._targets, self._resolve, self._picked = targets, resolve, picked
        if mapping is None or callable(mapping):
            for info in tensors:
                name = info.name if mapping is None else _called(mapping, info.name, targets or ())
                if name is not None:
                    self._add(name, new_row(Claim, (info, _UNCHANGED, (name,), 0, None)))
            return
        self.entries = keymap.read(mapping)
        self._likely = likely([entry.pattern for entry in self.entries])
        self._family = [number for number, entry in enumerate(self.entries) if entry.family]
        self._fronts = likely([self.entries[n].pattern for n in self._family], whole=False)
        for info in tensors:
            found = self._matching(info.name)
            if not found:
                if self._picked is None or info.name in self._picked:
                    self.stray.append((info, None))
            elif len(found) > 1:
                rules = ", ".join(str(self.entries[number]) for number, _ in found)
                either = "make one narrower, or write one rule with a list of targets"
                self.twice.append(f"{info.name}: several rules match, {rules}; {either}")
            for number, groups in found:
                self.used.add(number)
                for rule in self.entries[number].rules:
                    names = tuple(None if n is None else expand(n, groups) for n in rule.names)
                    for part, name in enumerate(names):
                        if name is not None:
                            self._add(name, new_row(Claim, (info, rule, names, part, groups)))

    def _matching(self, name: str) -> list[tuple[int, re.Match[str]]]:
        r"""The entries that match all of a name, by number, with what they matched.

        If there are none, those in the forms of Tunix and Bonsai may match its front: these
        replace what matched, and the rest of the name stays. So `head\.weight` is not a second
        match for `head.weight_scale` if there is a line for that. What leaves tensors out comes
        last, and so may leave out all the rest.
        """
        every = self.entries
        whole = ((number, every[number].pattern.fullmatch(name)) for number in self._likely(name))
        found = [(number, match) for number, match in whole if match]
        filling = [(number, match) for number, match in found if every[number].rules]
        if filling:
            return filling
        family = map(self._family.__getitem__, self._fronts(name))
        fronts = ((number, every[number].pattern.match(name)) for number in family)
        return [(number, match) for number, match in fronts if match and match.end()] or found[:1]

    def _add(self, target: str, claim: Claim) -> None:
        if self._resolve is not None:
            target = self._resolve(target)
        if self._picked is not None and claim.info.name not in self._picked:
            self.passed.add(target)
        elif self._targets is None or target in self._targets:
            self.by_target.setdefault(target, []).append(claim)
        else:
            self.stray.append((claim.info, target))


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


def likely(
    patterns: Sequence[re.Pattern[str]], *, whole: bool = True
) -> Callable[[str], list[int]]:
    """Which patterns may match all of a name, or its front, by number: a function of the name.

    Each is found by the text that its matches begin with, or by the one that whole matches end
    with, whichever fewer patterns share. So of thousands of exact names one is tried.
    """
    texts = [literals(pattern) for pattern in patterns]
    shared = Counter(front for front, _ in texts), Counter(end for _, end in texts)
    # By length and text.
    fronts: dict[int, dict[str, list[int]]] = {}
    ends: dict[int, dict[str, list[int]]] = {}
    for number, (front, end) in enumerate(texts):
        by_end = whole and shared[1][end] < shared[0][front]
        text, table = (end, ends) if by_end else (front, fronts)
        table.setdefault(len(text), {}).setdefault(text, []).append(number)

    def find(name: str) -> list[int]:
        found: list[int] = []
        for length, table in fronts.items():
            found += table.get(name[:length], ())
        for length, table in ends.items():
            found += table.get(name[max(0, len(name) - length) :], ())
        return sorted(found)

    return find


def literals(pattern: re.Pattern[str]) -> tuple[str, str]:
    r"""What every whole match begins and ends with, as far as that is plain to see.

    `layers\.(\d+)\.mlp\.weight` begins with `layers.` and ends with `.mlp.weight`. Alternatives,
    flags that change what letters mean, and a letter that belongs to an escape before it are left
    to the regex itself.
    """
    text = pattern.pattern.removeprefix("^").removesuffix("$")
    if pattern.flags & (re.IGNORECASE | re.VERBOSE) or "|" in text or "(?#" in text:
        return "", ""  # A quantifier behind a comment is for what comes before that.
    front = re.match(f"(?:{_LITERAL}(?![*+?{{]))*", text)
    end = re.search(f"{_LITERAL}*\\Z", text)
    assert front
    assert end
    texts = front[0], "" if text[: end.start()].endswith("\\") else end[0]
    first, last = (re.sub(r"(?s)\\(.)", r"\1", each) for each in texts)
    return first, last


def expand(template: str, match: re.Match[str]) -> str:
    """The name that a template gives; what the regex does not match stays behind it."""
    text = _format(template)
    if "\\" in text:
        made = match.expand(template)
    else:
        made = text.format(match[0], *match.groups(""), **match.groupdict(""))
    return made + match.string[match.end() :]


@functools.lru_cache
def _format(template: str) -> str:
    """A template as one of `str.format`, which is twenty times as fast with Python 3.11."""
    text = template.replace("{", "{{").replace("}", "}}")
    return re.sub(r"\\g<(\w+)>|\\([1-9][0-9]?)(?![0-9])", r"{\1\2}", text)


# -- what is wrong ---------------------------------------------------------------------------


def _check_names(
    problems: dict[str, list[str]],
    claims: Claims,
    leaves: Sequence[Leaf],
    unheld: Mapping[str, Leaf],
    judged: tuple[str, ...],
) -> None:
    """Leaves that nothing fills, and tensors that go nowhere."""
    filled = claims.by_target.keys() | claims.passed
    lacking = [leaf for leaf in leaves if leaf.held and filled.isdisjoint(leaf.names)]
    # The state of an optimizer may be missing as a whole.
    some = sum(leaf.optimizer for leaf in lacking) < sum(leaf.optimizer for leaf in leaves)
    empty: list[Leaf] = []
    spare: list[str] = []  # Names of others, such as the step of a train state.
    for leaf in lacking:
        if leaf.optional or (leaf.optimizer and not some):
            spare += leaf.names
        elif leaf.name.startswith(judged):
            continue
        else:
            empty.append(leaf)
    given = [target or info.name for info, target in claims.stray]
    for at, leaf in enumerate(empty):
        text = f"{', which is also '.join(leaf.names)} {list(leaf.shape)}"
        hint = _meant(leaf.name, given, at)
        problems["missing"].append(f"{text}: nothing in the checkpoint goes there{hint}")
    wanted = [name for leaf in empty for name in leaf.names]
    wanted += spare if len(wanted) + len(spare) <= _AMONG else []
    for at, (info, target) in enumerate(claims.stray):
        leaf = unheld.get(target or "")
        if leaf is not None and leaf.value is ...:  # Orbax's mark for what stays out.
            continue
        if target is not None and target.startswith(judged):
            continue
        if target is None:
            reason, hint = "no rule matches", _meant(info.name, wanted, at)
            entries = claims.entries if at < _GUESSED else ()
            entry = next((entry for entry in entries if _matches_part(entry, info.name)), None)
            if entry:
                hint = f"; {entry} matches only part of it, and {_WHOLE}"
        elif target in unheld:
            reason, hint = f"{target!r} can't hold a tensor", _unheld_hint(unheld[target])
        else:
            reason, hint = f"the target has no {target!r}", _meant(target, wanted, at)
        problems["extra"].append(f"{info.name} {list(info.shape)}: {reason}{hint}")


def _check_rules(problems: dict[str, list[str]], claims: Claims, names: Iterable[str]) -> list[str]:
    """Rules that match nothing are wrong if they fill something, and else a warning.

    In a map of Tunix's or Bonsai's form they are only noted, as their maps serve several
    checkpoints, unless names are amiss: then it is where to look.
    """
    amiss = "missing" in problems or "extra" in problems
    family = any(entry.family for entry in claims.entries)
    spare: list[str] = []
    unused = [entry for at, entry in enumerate(claims.entries) if at not in claims.used]
    some = list(itertools.islice(names, _TRIED // max(1, len(unused))))
    for entry in unused:
        line = f"{entry} matches no tensor"
        part = next((name for name in some if _matches_part(entry, name)), None)
        if part is not None and not any(map(entry.pattern.fullmatch, some)):
            line = f"{entry} matches only part of {part}, and {_WHOLE}"
        elif part is not None and not entry.rules:
            continue  # Other rules took all that it would leave out.
        if entry.rules and (amiss or not entry.family):
            problems["unused rule"].append(line)
            continue
        spare.append(str(entry))
        if not family and not problems:
            errors.warn(f"mapping=: {line}")
    return [f"rules that matched nothing: {brief(spare)}"] if spare else []


def _refuse(problems: Mapping[str, Sequence[str]], remedy: str, file: str | None) -> None:
    """Raises MappingError if anything is wrong: lines by kind."""
    counts = ", ".join(
        f"{len(lines)} {kind}{'s' if len(lines) > 1 and kind.endswith(_PLURAL) else ''}"
        for kind, lines in problems.items()
    )
    if counts:
        every = tuple(f"{kind}: {line}" for kind, lines in problems.items() for line in lines)
        names = "missing" in problems or "extra" in problems
        raise errors.MappingError(
            f"the checkpoint does not fit the target: {counts}",
            file=file,
            expected=remedy if names else None,
            problems=every,
        )


def _nothing_fits(
    index: Index, claims: Claims, held: Mapping[str, Leaf], file: str | None
) -> errors.MappingError:
    given = next((to for _, to in claims.stray if to), next(iter(index.tensors)))
    close = errors.close_names(given, held) or [*held, "nothing"]
    return errors.MappingError(
        "nothing in the checkpoint goes into the target; mapping= says which name becomes what",
        file=file,
        expected=f"names like {close[0]!r}",
        found=f"names like {given!r}",
    )


def _matches_part(entry: KeyMapEntry, name: str) -> bool:
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


def _meant(name: str, choices: Sequence[str], at: int) -> str:
    if at >= _GUESSED or len(choices) > _AMONG or name in choices:
        return ""  # A name that is there is amiss for another reason: a rule, or its lack.
    return errors.did_you_mean(name, choices)
