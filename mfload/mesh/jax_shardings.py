"""`shardings=` for JAX: from what a user wrote to one sharding a tensor, checked against its shape.

JAX refuses what does not fit as well, mostly by a ValueError that knows no tensor. The errors here
say which tensor, which dim, and which axes of which sizes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from mfload import errors
from mfload.index import Box
from mfload.options import UNMATCHED, check_choice
from mfload.planning.selection import compiled, hint

Shape = tuple[int, ...]
_NOTHING = object()
_EXPECTED = "a Sharding, a PartitionSpec, or None"


def resolve(
    rows: Sequence[tuple[str, Shape]],
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
    """One sharding a tensor, on devices.

    Args:
        mesh: As for `mfload.load`, with `shardings` and `unmatched`.
        shardings: A nested mapping is joined by dots.
        infos: What a function is given beside each name. Default: the shape.
        own: The sharding of a tensor, by its number, that no rule matches; it may return None.
        notes: Receives a note for each rule that no tensor came to.
        aliases: All names of each tensor that rules may use.
        known: Further names that rules may be meant for, of tensors that are not loaded.
        others: Names that rules may have been written for by mistake.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise errors.UsageError("not a mesh", expected="a jax.sharding.Mesh", found=repr(mesh))
    check_choice("unmatched", unmatched, UNMATCHED)
    rules = _Rules(shardings)
    bound = _Bound(mesh, shardings)
    made: list[Any] = []
    missed: list[str] = []
    misfits: list[errors.ShardingError] = []
    for n, (name, shape) in enumerate(rows):
        spec = rules.spec([name] if aliases is None else aliases[n], infos[n] if infos else shape)
        try:
            if own is not None and (shardings is None or spec is _NOTHING):
                said = own(n)
                spec = spec if said is None else said
            if spec is _NOTHING:
                missed.append(name)
                spec = None
                if unmatched == "error":
                    continue
            made.append(bound.sharding(name, shape, spec))
        except errors.ShardingError as error:
            misfits.append(error)
    if missed and unmatched == "error":
        raise errors.ShardingError(
            f"no sharding for {len(missed)} of {len(rows)} tensors",
            tensor=missed[0],
            expected="a rule for each, or unmatched='replicate'",
            problems=tuple(missed) if len(missed) > 1 else (),
        )
    if misfits:
        if len(misfits) > 1:
            misfits[0].problems = tuple(f"{each.tensor}: {each.message}" for each in misfits)
        raise misfits[0]
    if notes is not None:
        notes += rules.notes()
    if rows:
        names = [name for each in aliases for name in each] if aliases else [n for n, _ in rows]
        _warn(rules, [*names, *known], others)
    return made


def given(shardings: Any) -> Iterator[Any]:
    """The Sharding objects inside `shardings=`."""
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
    """`shardings=` as a function from names to a spec, which knows the rules that were used."""

    def __init__(self, shardings: Any) -> None:
        self._function: Any = None
        self._names: dict[str, Any] = {}
        self._patterns: list[tuple[re.Pattern[str], Any]] = []
        self._used: set[str] = set()
        # A PartitionSpec is a tuple in the versions of JAX before 0.7.
        if shardings is None or isinstance(shardings, Sharding | PartitionSpec):
            self._function = lambda _name, _info: shardings
        elif isinstance(shardings, Mapping):
            self._names = dict(_flat(shardings))
        elif isinstance(shardings, list | tuple):
            self._patterns = [_pair(each) for each in shardings]
        elif callable(shardings):
            self._function = shardings
        else:
            raise errors.UsageError(
                "invalid shardings: these are no shardings",
                expected=f"{_EXPECTED}, [(regex, spec)], a mapping, or a function",
                found=repr(shardings),
            )

    def spec(self, names: Iterable[str], info: Any) -> Any:
        """What was asked for the first of a tensor's names that anything was asked for."""
        for name in names:
            if self._function is not None:
                return self._function(name, info)
            if name in self._names:
                self._used.add(name)
                return self._names[name]
            for pattern, spec in self._patterns:
                if pattern.search(name):
                    self._used.add(pattern.pattern)
                    return spec
        return _NOTHING

    @property
    def exact(self) -> bool:
        """Whether rules are names, not regexes."""
        return bool(self._names)

    def _unused(self) -> list[str]:
        keys = dict.fromkeys((*self._names, *(pattern.pattern for pattern, _ in self._patterns)))
        return [key for key in keys if key not in self._used]

    def notes(self) -> list[str]:
        """A note for each rule that no tensor came to."""
        after = " that an earlier rule has not taken" if len(self._patterns) > 1 else ""
        return [f"shardings: {key!r} matches no tensor{after}" for key in self._unused()]

    def matching(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Unused rules that match none of some names, and those that match one."""
        found: tuple[list[str], list[str]] = [], []
        patterns = {pattern.pattern: pattern for pattern, _ in self._patterns}
        for key in self._unused():
            hit = any(map(patterns[key].search, names)) if key in patterns else key in names
            found[hit].append(key)
        return found


def _warn(rules: _Rules, names: Sequence[str], others: Sequence[str]) -> None:
    """Warns of rules that match none of the names."""
    missed, _ = rules.matching(names)
    if not missed:
        return
    exact = rules.exact
    text = "; ".join(
        f"{key!r} matches no tensor{hint(key, names) if exact else errors.did_you_mean(key, names)}"
        for key in missed[:8]
    )
    if len(missed) > 8:
        text += f"; and {len(missed) - 8} more"
    if rules.matching(others)[1]:
        text += f"; rules go by names of the target, such as {names[0]!r}, not by stored ones"
    else:
        text += f"; names are such as {names[0]!r}"
    errors.warn(f"shardings: {text}")


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
    return compiled(each[0]), each[1]


class _Bound:
    """Binds specs to the user's mesh, or to the one mesh that all rules share."""

    def __init__(self, mesh: Any, shardings: Any) -> None:
        self._mesh = mesh
        meshes = {each.mesh for each in given(shardings) if isinstance(each, NamedSharding)}
        meshes = {each for each in meshes if isinstance(each, Mesh)}
        self._one = mesh if mesh is not None else next(iter(meshes)) if len(meshes) == 1 else None
        self._made: dict[Any, Any] = {}

    def sharding(self, name: str, shape: Shape, spec: Any) -> Any:
        """The sharding of one tensor."""
        if isinstance(spec, Sharding) and not is_abstract(spec):
            check(name, shape, spec)
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
        _check_spec(name, shape, mesh, spec)
        if (spec, kind) not in self._made:
            self._made[spec, kind] = NamedSharding(mesh, spec, memory_kind=kind)
        return self._made[spec, kind]


def check(name: str, shape: Shape, sharding: Any) -> None:
    """Raises ShardingError if a sharding on devices does not fit a tensor."""
    if isinstance(sharding, NamedSharding):
        _check_spec(name, shape, sharding.mesh, sharding.spec)
        return
    try:
        sharding.devices_indices_map(shape)
    except Exception as error:
        raise errors.ShardingError(
            "the sharding does not fit the tensor",
            tensor=name,
            expected=f"one for shape {list(shape)}",
            found=f"{sharding}: {str(error).splitlines()[0] if str(error) else type(error)}",
        ) from error


def _check_spec(name: str, shape: Shape, mesh: Any, spec: Any) -> None:
    def refuse(message: str, expected: object) -> errors.ShardingError:
        found = f"{spec} for shape {list(shape)} on a mesh of {_sizes(sizes)}"
        return errors.ShardingError(message, tensor=name, expected=expected, found=found)

    sizes: dict[str, int] = dict(mesh.shape)
    # Axis types and unreduced axes came with later versions of JAX than the oldest.
    types = dict(zip(mesh.axis_names, getattr(mesh, "axis_types", None) or (), strict=False))
    manual = [str(axis) for axis, kind in types.items() if str(kind).endswith("Manual")]
    if manual:
        raise refuse(
            f"no array can live on a mesh with manual axes ({', '.join(manual)})",
            "the mesh as it is outside shard_map",
        )
    if getattr(spec, "unreduced", None):
        raise refuse("stored numbers are sums already", "a spec without unreduced axes")
    parts: tuple[Any, ...] = tuple(spec)
    if len(parts) > len(shape):
        raise refuse(
            f"the spec has {len(parts)} entries and the tensor {len(shape)} dims",
            f"at most {len(shape)} entries",
        )
    used: set[Any] = set()
    for dim, part in enumerate(parts):
        if part is PartitionSpec.UNCONSTRAINED:
            raise refuse(f"dim {dim} is left unconstrained", "axes, or None")
        axes = () if part is None else part if isinstance(part, tuple) else (part,)
        for axis in axes:
            if axis not in sizes:
                raise refuse(f"the mesh has no axis {axis!r}", f"one of {', '.join(sizes)}")
            if axis in used:
                raise refuse(f"axis {axis!r} is used twice", "an axis once in a spec")
            used.add(axis)
        count = math.prod(sizes[axis] for axis in axes)
        if shape[dim] % count:
            raise refuse(
                f"{_sizes({axis: sizes[axis] for axis in axes})} does not divide dim {dim} "
                f"of {shape[dim]}",
                f"a multiple of {count} in dim {dim}",
            )


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis!r} ({size})" for axis, size in sizes.items()) or "no axes"


def boxes(sharding: Any, shape: Shape) -> dict[Any, Box]:
    """The part of a tensor that each device holds, also those of other processes."""
    found: dict[Any, Box] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        assert index is not None
        found[device] = tuple(
            (part.start or 0, length if part.stop is None else part.stop)
            for part, length in zip(index, shape, strict=True)
        )
    return found


def is_abstract(sharding: Any) -> bool:
    """Whether a sharding is over a mesh that has no devices."""
    return isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh)


def mesh_of(mesh: Any, shardings: Any) -> Any:
    """The user's mesh, else that of `jax.set_mesh` if no sharding brings devices of its own."""
    if mesh is not None or any(not is_abstract(each) for each in given(shardings)):
        return mesh
    find = getattr(jax.sharding, "get_mesh", None)
    try:
        found: Any = None if find is None else find()
    except ValueError:  # Inside jit, where nothing can be loaded either.
        return None
    return found if isinstance(found, Mesh) and not found.empty else None


def processes(mesh: Any, shardings: Any) -> tuple[int, ...]:
    """The processes whose devices the arguments name; all of them if none are named.

    Looks at nothing but the arguments and never raises: what is wrong with them is found later,
    where the error reaches the other processes.
    """
    devices: set[Any] = set(mesh.devices.flat) if isinstance(mesh, Mesh) else set()
    for sharding in given(shardings):
        if not is_abstract(sharding):
            devices |= sharding.device_set
    # Without a mesh a function may name any devices.
    if not devices or (callable(shardings) and mesh is None):
        return tuple(range(jax.process_count()))
    return tuple(sorted({device.process_index for device in devices}))
