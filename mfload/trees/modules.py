"""Modules: models that hold their own weights, as `filling` sees those of each framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mfload import errors
from mfload.dtypes import DType
from mfload.frameworks.base import Adapter
from mfload.index import TensorInfo
from mfload.mesh import base
from mfload.mesh.base import MeshArguments, MeshBackend, Whole
from mfload.planning.request import Request
from mfload.planning.slicing import shape_of
from mfload.trees.landing import Target
from mfload.trees.recipe import Leaf


class New(NamedTuple):
    """A new array of what this process holds of a leaf, and what it is of the whole."""

    array: Any
    dtype: DType
    sharding: Any


class Unfit(NamedTuple):
    """What stands for a variable that can't be filled: `dtype` says why (see `Module.leaves`)."""

    dtype: str


class Module:
    """A model of a framework, taken apart. Leaves go by their numbers.

    Attributes:
        framework: Its name, as that of its mesh backend.
        leaves: What a checkpoint may have tensors for. A variable with several names is one leaf.
            `abstract`: it has no memory; not `held`: it can't be filled, `value.dtype` says why.
        tensors: The framework's own, those of leaves first.
        sharded_by: What a user does instead of giving `mesh=` and `shardings=`.
        own_code: What names begin with whose tensors `take` gets, as they are stored.
        own_names: Names of what it fills with them.
        judged: These, and beginnings of names of which `finish` tells what is wrong with them.
        replaces: Whether leaves that have no `memory` get new arrays from the adapter, installed
            batch by batch, where they are stored as they are wanted.
    """

    framework: str
    leaves: Sequence[Leaf]
    tensors: Sequence[Any]
    sharded_by: str
    own_code: tuple[str, ...] = ()
    own_names: Sequence[str] = ()
    judged: tuple[str, ...] = ()
    replaces = False

    def placed(self, tensor: Any) -> tuple[Any, Sequence[Any]] | None:
        """The mesh and the placements of a tensor; None if this process holds all of it."""

    def local(self, tensor: Any) -> Any:
        """What this process holds of a tensor, over the same memory."""
        return tensor

    def mesh(self, *, once: bool) -> tuple[MeshBackend | None, tuple[int, ...]]:
        """A backend, and the processes that load together; None if this one loads alone.

        With `once`, all processes of the framework do if no tensor says which.
        """
        found = {placed[0] for each in self.tensors if (placed := self.placed(each)) is not None}
        if not found and not once:
            return None, ()
        backend: Any = base.backend(self.framework)
        if not found:
            backend.arrival = base.ARRIVAL
        meshes = map(MeshArguments, found or (None,))
        ranks = {rank for each in meshes for rank in backend.processes(each)}
        if not found and len(ranks) < 2:
            raise errors.UsageError(
                "exchange='once' needs other processes to exchange with, and there are none",
                expected=f"processes that {self.framework} has joined, or exchange='never'",
                found="one process",
            )
        return backend, tuple(sorted(ranks))

    def sharding(
        self, name: str, shape: tuple[int, ...], tensor: Any, dtype: DType, backend: MeshBackend
    ) -> Any:
        """The sharding of a tensor that becomes a dtype; None if this process holds all of it.

        Raises ShardingError if what this process holds is not a box.
        """
        if (placed := self.placed(tensor)) is None:
            return None
        request = Request(TensorInfo(name, dtype, shape, ()), dtype)
        asked = MeshArguments(placed[0], list(placed[1]), "error")
        (made,) = backend.resolve([request], asked)
        shares = backend.shares(made, shape)
        box = next((share.box for share in shares if share.process == backend.rank), None)
        held = tuple(self.local(tensor).shape)
        if box is None or stored(dtype, shape_of(box)) != held:
            raise errors.ShardingError(
                "this process holds another part than the placements say",
                tensor=name,
                expected=f"{box} by {placed[1]}",
                found=f"a local tensor of shape {list(held)}",
            )
        return made

    def memory(self, number: int) -> Any:
        """The memory of what this process holds of a leaf, in C order (see `base.Lent`).

        None if it has gaps, can't be written to directly, or lies where mfload does not land.
        """
        raise NotImplementedError

    def target(self, number: int) -> Target | None:
        """The memory on the host of what this process holds of a leaf, whatever its strides.

        That of `empty`, if that was called. None if it lies elsewhere, or can't be written to
        directly.
        """

    def adapter(self) -> Adapter:
        """Makes the new arrays of leaves without memory."""
        raise NotImplementedError

    def empty(self, number: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """A new array for what this process holds of a leaf without memory; `put` fills it."""
        raise NotImplementedError

    def put(self, number: int, start: tuple[int, ...], array: Any) -> None:
        """Copies a NumPy array into what this process holds of a leaf, from `start` on."""
        raise NotImplementedError

    def install(self, made: Mapping[int, New], written: Iterable[int]) -> None:
        """Puts new arrays in the place of leaves, under all names; `memory` of others was written.

        Called once everything has arrived on all processes; and after each batch that `replaces`.
        """
        raise NotImplementedError

    def own_adapter(self) -> Adapter:
        """Makes the arrays for `take`."""
        raise NotImplementedError

    def take(self, prefix: str, state: dict[str, Any], wish: Any, *, strict: bool) -> None:
        """Loads one of `own_code` from what is stored; `wish` is `matching.read_dtype`'s."""
        raise NotImplementedError

    def finish(
        self, missing: Iterable[str], unexpected: Iterable[str]
    ) -> tuple[list[str], list[str], list[str]]:
        """Ends a load by what the module itself does then, if any names are `judged`.

        Args:
            missing: Names of leaves that were not filled.
            unexpected: Names that the module has no place for.

        Returns:
            Those that are still wrong, with those of `own_code`, and other errors.
        """
        raise NotImplementedError

    def assembled(self, shape: tuple[int, ...], new: New) -> Any:
        """The new tensor of a leaf of a shape, sharded if the leaf is."""
        if new.sharding is None:
            return new.array
        whole = Whole(shape, new.dtype, new.sharding, {0: new.array})
        return base.backend(self.framework).assemble([whole])[0]

    def bare(self) -> list[str]:
        """Names of all its variables that have no memory, also of those that no file holds."""
        return []


def stored(dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor of a framework, in which packed elements count as bytes."""
    return dtype.storage_shape(shape) if dtype.elements > 1 else shape


def overlapping(shape: Sequence[int], strides: Sequence[int]) -> str | None:
    """Why a strided tensor can't be filled: its items may share their memory; else None.

    As in PyTorch, a stride must lead past all that the smaller ones reach.
    """
    reach = 0
    for step, size in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if step <= reach:
            why = "an expanded tensor, or another of which several items share their memory"
            return f"{why} (strides {list(strides)})"
        reach += step * (size - 1)
    return None


def unfit(names: Sequence[str], why: str, optional: bool = False) -> Leaf:
    """A leaf that no stored tensor becomes."""
    return Leaf(tuple(names), (), None, Unfit(why), optional=optional, held=False)


def tied(state: Mapping[str, Any], key: Callable[[Any], Any]) -> dict[Any, tuple[list[str], Any]]:
    """Each variable once, by its key, with all of its names."""
    found: dict[Any, tuple[list[str], Any]] = {}
    for name, variable in state.items():
        found.setdefault(key(variable), ([], variable))[0].append(name)
    return found
