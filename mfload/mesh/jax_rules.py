"""`shardings=` for JAX: from what a user wrote to one sharding a tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from mfload import errors
from mfload.frameworks import warnings
from mfload.mesh import jax_boxes

UNMATCHED = ("replicate", "error")
_NOTHING = object()
_EXPECTED = "a Sharding, a PartitionSpec, or None"


def resolve(
    rows: Sequence[tuple[str, tuple[int, ...]]],
    mesh: Any,
    shardings: Any,
    unmatched: str = "replicate",
    *,
    infos: Sequence[Any] | None = None,
    own: Callable[[int], Any] | None = None,
    notes: list[str] | None = None,
    aliases: Sequence[Sequence[str]] | None = None,
    known: Iterable[str] = (),
    others: Sequence[str] = (),
) -> list[Any]:
    """One sharding a tensor, each checked against its shape.

    Args:
        rows: Name and shape of each tensor.
        mesh: The user's mesh, or None where all shardings bring theirs.
        shardings: A Sharding or PartitionSpec for all; `[(regex, spec)]`, of which the first that
            is found in the name counts; a function of name and info; or a mapping from names to
            specs, also nested, joined by dots. A spec is a Sharding, a PartitionSpec, or None for
            replicated.
        unmatched: What becomes of tensors that no rule matches: "replicate" or "error".
        infos: What the function is given beside each name; the shape where None.
        own: What a tensor gets, by its number, where no rule matches it; None for what
            `unmatched` says. Not asked where a rule matches.
        notes: Takes what a user should hear of that is no error.
        aliases: For each tensor all names that rules may call it by; None for its name alone.
        known: Names that rules may be for besides, of tensors that are not asked for.
        others: Names that rules may have been written for by mistake.

    Returns:
        Shardings on devices, in the order of the rows.

    Raises:
        UsageError: These are no shardings, or a mesh is missing.
        ShardingError: Some do not fit their tensors, or match none where all must.
        UserWarning: No rule matches any tensor, and the user made errors of warnings.
    """
    _check_arguments(mesh, unmatched)
    rules = _Rules(shardings)
    home = _Home(mesh, rules)
    made: list[Any] = []
    missed: list[str] = []
    misfits: list[errors.ShardingError] = []
    for n, (name, shape) in enumerate(rows):
        info = shape if infos is None else infos[n]
        spec = rules.first([name] if aliases is None else aliases[n], info)
        try:
            if own is not None and (shardings is None or spec is _NOTHING):
                said = own(n)
                spec = spec if said is None else said
            if spec is _NOTHING:
                missed.append(name)
                spec = None
                if unmatched == "error":
                    continue
            made.append(home.sharding(name, shape, spec))
        except errors.ShardingError as error:
            misfits.append(error)
    if missed and unmatched == "error":
        raise _unmatched(missed, len(rows))
    if misfits:
        raise _together(misfits)
    if notes is not None:
        notes += rules.unused()
    if rows and rules.idle and rules.first(known, None) is _NOTHING:
        warnings.warn(_idle(rules, [name for name, _ in rows], len(missed), others))
    return made


def given(shardings: Any) -> Iterator[Any]:
    """The shardings that can be seen in `shardings=` without asking for any tensor."""
    if isinstance(shardings, Sharding):
        yield shardings
    elif isinstance(shardings, Mapping):
        for value in shardings.values():
            yield from given(value)
    elif isinstance(shardings, list | tuple) and not isinstance(shardings, PartitionSpec):
        for pair in shardings:
            if isinstance(pair, list | tuple) and len(pair) == 2:
                yield from given(pair[1])


class _Rules:
    """`shardings=` as a function from a tensor to its spec."""

    def __init__(self, shardings: Any) -> None:
        self.given = tuple(given(shardings))
        self._used: set[Any] = set()
        self._keys: list[Any] = []
        self._find: Callable[[str, Any], Any]
        # A PartitionSpec is a tuple in the versions of JAX before 0.7.
        if shardings is None or isinstance(shardings, Sharding | PartitionSpec):
            self._find = lambda _name, _info: shardings
        elif isinstance(shardings, Mapping):
            tree = dict(_flat(shardings))
            self._keys = list(tree)
            self._find = lambda name, _info: self._take(tree, name)
        elif isinstance(shardings, list | tuple):
            pairs = [_pair(each) for each in shardings]
            self._keys = [pattern.pattern for pattern, _ in pairs]
            self._find = lambda name, _info: self._search(pairs, name)
        elif callable(shardings):
            self._find = shardings
        else:
            raise errors.UsageError(
                "these are no shardings",
                expected=f"{_EXPECTED}, [(regex, spec)], a mapping, or a function",
                found=repr(shardings),
            )

    def spec(self, name: str, info: Any) -> Any:
        """What was asked for a tensor, `_NOTHING` where nothing was."""
        return self._find(name, info)

    def first(self, names: Iterable[str], info: Any) -> Any:
        """What was asked for the first of several names that anything was asked for."""
        found = (self.spec(name, info) for name in names)
        return next((spec for spec in found if spec is not _NOTHING), _NOTHING)

    def _take(self, tree: dict[str, Any], name: str) -> Any:
        self._used.add(name)
        return tree.get(name, _NOTHING)

    def _search(self, pairs: list[tuple[re.Pattern[str], Any]], name: str) -> Any:
        for pattern, spec in pairs:
            if pattern.search(name):
                self._used.add(pattern.pattern)
                return spec
        return _NOTHING

    @property
    def idle(self) -> bool:
        """Whether there are rules, and no tensor came to any."""
        return bool(self._keys) and self._used.isdisjoint(self._keys)

    def unused(self) -> list[str]:
        """A note for each rule that no tensor came to."""
        return [
            f"shardings: {key!r} matches no tensor that an earlier rule has not taken"
            if len(self._keys) > 1
            else f"shardings: {key!r} matches no tensor"
            for key in dict.fromkeys(self._keys)
            if key not in self._used
        ]


def _idle(rules: _Rules, names: Sequence[str], missed: int, others: Sequence[str]) -> str:
    """What to say where rules match nothing."""
    text = f"no rule of shardings= matches any of the {len(names)} tensors"
    if missed:
        some = "all" if missed == len(names) else f"{missed}"
        text += f": {some} of them are replicated"
    if rules.first(others, None) is not _NOTHING:
        return f"{text}; rules go by names of the target, such as {names[0]!r}, not by stored ones"
    return f"{text}; names are such as {names[0]!r}"


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _pair(each: Any) -> tuple[re.Pattern[str], Any]:
    if not isinstance(each, list | tuple) or len(each) != 2:
        raise errors.UsageError("not a rule", expected="(regex, spec)", found=repr(each))
    try:
        pattern = re.compile(each[0])
        pattern.search("")  # One of bytes matches no name.
    except (re.error, TypeError) as error:
        raise errors.UsageError(
            "malformed regular expression", expected=str(error), found=repr(each[0])
        ) from None
    return pattern, each[1]


class _Home:
    """Where specs without a mesh of their own go."""

    def __init__(self, mesh: Any, rules: _Rules) -> None:
        self._mesh = mesh
        meshes = {each.mesh for each in rules.given if isinstance(each, NamedSharding)}
        meshes = {each for each in meshes if isinstance(each, Mesh)}
        self._one = mesh if mesh is not None else next(iter(meshes)) if len(meshes) == 1 else None
        self._made: dict[Any, Any] = {}

    def sharding(self, name: str, shape: tuple[int, ...], spec: Any) -> Any:
        """The sharding of one tensor."""
        if isinstance(spec, Sharding) and not jax_boxes.is_abstract(spec):
            jax_boxes.check(name, shape, spec)
            return spec
        kind = None
        mesh = self._mesh
        if spec is None:
            spec, mesh = PartitionSpec(), self._one
        elif isinstance(spec, NamedSharding):
            kind, spec = spec.memory_kind, spec.spec
        elif not isinstance(spec, PartitionSpec):
            raise errors.UsageError(
                "not a sharding", expected=f"{_EXPECTED} for {name!r}", found=repr(spec)
            )
        if mesh is None:
            raise errors.UsageError(
                "nothing says on which devices the tensor is to lie",
                expected="mesh=, or a Sharding for each tensor",
                found=f"{spec} for {name!r}",
            )
        jax_boxes.check_spec(name, shape, mesh, spec)
        if (spec, kind) not in self._made:
            self._made[spec, kind] = NamedSharding(mesh, spec, memory_kind=kind)
        return self._made[spec, kind]


def _check_arguments(mesh: Any, unmatched: str) -> None:
    if mesh is not None and not isinstance(mesh, Mesh):
        raise errors.UsageError("not a mesh", expected="a jax.sharding.Mesh", found=repr(mesh))
    if unmatched not in UNMATCHED:
        raise errors.UsageError(
            f"unknown unmatched{errors.did_you_mean(unmatched, UNMATCHED)}",
            expected=" | ".join(UNMATCHED),
            found=repr(unmatched),
        )


def _unmatched(names: list[str], count: int) -> errors.ShardingError:
    return errors.ShardingError(
        f"no sharding for {len(names)} of {count} tensors",
        tensor=names[0],
        expected="a rule for each, or unmatched='replicate'",
        problems=tuple(names) if len(names) > 1 else (),
    )


def _together(misfits: list[errors.ShardingError]) -> errors.ShardingError:
    first = misfits[0]
    if len(misfits) > 1:
        first.problems = tuple(f"{each.tensor}: {each.message}" for each in misfits)
    return first
