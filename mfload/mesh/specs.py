"""`shardings=` for any framework: which spec of a user's is for which tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mfload import errors
from mfload.errors import counted
from mfload.mesh.base import MeshArguments
from mfload.options import UNMATCHED
from mfload.planning.request import Request
from mfload.planning.selection import Rules

Shape = tuple[int, ...]
_PLACEMENTS = "Shard(dim), Replicate(), or a list of them, one for each dim of the mesh"
NOTHING = object()
"""Of a tensor that no rule matches."""


class Row(NamedTuple):
    """A tensor that a sharding is wanted of.

    Attributes:
        names: Those that rules may use; a function is given the first.
        info: What a function is given beside it.
        dtype: As it is delivered; None if shardings do not depend on it.
    """

    name: str
    shape: Shape
    names: Sequence[str]
    info: Any
    dtype: Any = None


def rows(requests: Sequence[Request]) -> list[Row]:
    """A row for each whole tensor."""
    return [Row(info.name, info.shape, (info.name,), info, dtype) for info, dtype, *_ in requests]


def resolve(
    rows: Sequence[Row],
    asked: MeshArguments,
    place: Callable[[Row, Any], Any],
    *,
    single: Callable[[Any], bool],
    expected: str,
    own: Callable[[int], Any] | None = None,
) -> list[Any]:
    """One sharding for each tensor.

    `place` makes it of a row and what the user gave for it (None: replicated), and raises
    ShardingError if that does not fit. `single` says whether a value is one for all tensors, and
    `expected` what such a value is. `own` gives the sharding of a tensor, by its number, that no
    rule matches. Rules that match no name are warned of.
    """
    names = [row.name for row in rows]
    aliases, infos = [row.names for row in rows], [row.info for row in rows]
    specs = given(names, asked, infos, single=single, expected=expected, aliases=aliases)
    resolved: list[Any] = []
    missed: list[str] = []
    misfits: list[errors.ShardingError] = []
    for n, (row, said) in enumerate(zip(rows, specs, strict=True)):
        spec = said
        try:
            if own is not None and (asked.shardings is None or spec is NOTHING):
                default = own(n)
                spec = spec if default is None else default
            if spec is NOTHING:
                missed.append(row.name)
                spec = None
                if asked.unmatched == "error":
                    continue
            resolved.append(place(row, spec))
        except errors.ShardingError as error:
            misfits.append(error)
    refuse(missed if asked.unmatched == "error" else [], misfits, len(rows))
    return resolved


def given(
    names: Sequence[str],
    asked: MeshArguments,
    infos: Sequence[Any],
    *,
    single: Callable[[Any], bool],
    expected: str,
    aliases: Sequence[Sequence[str]] | None = None,
) -> list[Any]:
    """What the user gave for each tensor; `NOTHING` if no rule matches (see `resolve`).

    `aliases` are the names that rules may use. Default: those of the tensors.
    """
    _, shardings, unmatched, known = asked
    errors.check_choice("unmatched", unmatched, UNMATCHED)
    if shardings is None or single(shardings):
        return [shardings] * len(names)
    if callable(shardings):
        firsts = names if aliases is None else [each[0] for each in aliases]
        return list(map(shardings, firsts, infos))
    rules = _rules(shardings, expected)
    if names:
        every = names if aliases is None else [name for each in aliases for name in each]
        rules.warn_of_unmatched([*every, *known])
    if aliases is None:
        return [rules.find(name, NOTHING) for name in names]
    found = ((rules.find(alias, NOTHING) for alias in each) for each in aliases)
    return [next((spec for spec in each if spec is not NOTHING), NOTHING) for each in found]


def refuse(missed: Sequence[str], misfits: Sequence[errors.ShardingError], count: int) -> None:
    """Raises ShardingError for tensors, of so many, that no rule matches, or that do not fit."""
    if missed:
        raise errors.ShardingError(
            f"no sharding for {len(missed)} of {counted(count, 'tensor')}",
            tensor=missed[0],
            expected="a rule for each, or unmatched='replicate'",
            problems=tuple(missed) if len(missed) > 1 else (),
        )
    if misfits:
        if len(misfits) > 1:
            misfits[0].problems = tuple(f"{each.tensor}: {each.message}" for each in misfits)
        raise misfits[0]


def is_single(whole: Any, item: Any, spec: Any) -> bool:
    """Whether a spec is of the one class, or a list of the other, and so one for all tensors."""
    if isinstance(spec, list | tuple) and spec:
        return all(isinstance(each, item) for each in spec)
    return isinstance(spec, whole)


class Placed(NamedTuple):
    """A mesh, and a placement for each of its dims."""

    mesh: Any
    placements: tuple[Any, ...]

    def __str__(self) -> str:  # Processes compare it, and some reprs have an address.
        return f"{self.mesh} {list(self.placements)}"


class Placements(NamedTuple):
    """Meshes over which placements spread tensors, as PyTorch and Paddle have them.

    Attributes:
        framework, mesh_name: What errors call the framework and its class of meshes,
        mesh_kind, kind: which that is, and the class of placements.
    """

    framework: str
    mesh_name: str
    mesh_kind: Any
    kind: Any

    def resolve(
        self,
        requests: Sequence[Request],
        asked: MeshArguments,
        place: Callable[[Any, Row, Any], Placed],
    ) -> list[Placed]:
        """One sharding for each whole tensor; `place` makes it on the mesh (see `resolve`)."""
        if not isinstance(asked.mesh, self.mesh_kind):
            raise errors.UsageError(
                f"{self.framework}'s placements need a mesh; dims need shard=(rank, size)",
                expected=f"mesh=, a {self.mesh_name}",
                found=repr(asked.mesh),
            )
        return resolve(
            rows(requests),
            asked,
            functools.partial(place, asked.mesh),
            single=functools.partial(is_single, self.kind, self.kind),
            expected=_PLACEMENTS,
        )


def placements(
    kind: type, row: Row, sizes: Sequence[int], spec: Any
) -> tuple[list[Any], Callable[[str, str], errors.ShardingError]]:
    """The placements that a user gave for a tensor, and what makes the error of one that misfits.

    `kind` is the framework's class of placements, `sizes` are those of the mesh.
    """
    given: Any = [] if spec is None else [spec] if isinstance(spec, kind) else spec
    if not isinstance(given, list | tuple) or not all(isinstance(each, kind) for each in given):
        expected = f"{_PLACEMENTS}, for {row.name!r}"
        raise errors.UsageError("not placements", expected=expected, found=repr(spec))
    given = list(given)

    def misfit(message: str, expected: str) -> errors.ShardingError:
        found = f"{given} for shape {list(row.shape)} on a mesh of {', '.join(map(str, sizes))}"
        return errors.ShardingError(message, tensor=row.name, expected=expected, found=found)

    if len(given) > len(sizes):
        raise misfit(
            f"{counted(len(given), 'placement')} for {counted(len(sizes), 'dim')} of the mesh",
            "one for each",
        )
    return given, misfit


def dim_of(row: Row, dim: int, misfit: Callable[[str, str], errors.ShardingError]) -> int:
    """The dim that a placement cuts, counted from the first."""
    if not -len(row.shape) <= dim < len(row.shape):
        raise misfit(f"the tensor has no dim {dim}", f"a dim of {len(row.shape)}")
    return dim % len(row.shape)


def _rules(shardings: Any, expected: str) -> Rules:
    """Specs by name."""
    if isinstance(shardings, Mapping):
        return Rules("shardings=", dict(_flat(shardings)))
    if not isinstance(shardings, list | tuple):
        expected = f"{expected}, [(regex, spec)], a mapping, or a function"
        raise errors.UsageError("invalid shardings", expected=expected, found=repr(shardings))
    return Rules("shardings=", shardings)


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def chunk(length: int, count: int, number: int) -> tuple[int, int]:
    """Where one of `count` chunks of a dim begins and ends: those of torch.chunk.

    All have ceil(length / count) elements but the last ones, which may be shorter or empty.
    """
    size = -(-length // count)
    return min(number * size, length), min((number + 1) * size, length)
