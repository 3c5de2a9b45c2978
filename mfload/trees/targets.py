"""Goals: the leaves of a target that a checkpoint fills, each with its recipe and its sharding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mfload import errors, frameworks, trees
from mfload.dtypes import DType
from mfload.index import Index
from mfload.trees import Aim, Matched, Recipe


class Leaf(Protocol):
    """A leaf of a target, as `frameworks.jax_trees` has it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its names, more than one where variables are shared."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """In elements."""
        ...

    @property
    def dtype(self) -> DType | None:
        """What it holds, None where any will do."""
        ...

    @property
    def value(self) -> Any:
        """The leaf itself."""
        ...

    @property
    def optional(self) -> bool:
        """Whether it may stay as it is."""
        ...

    @property
    def optimizer(self) -> bool:
        """Whether it is an optimizer's state."""
        ...

    @property
    def held(self) -> bool:
        """Whether it can hold a tensor."""
        ...

    @property
    def counts(self) -> bool:
        """Whether it is a number or an array of any kind."""
        ...

    @property
    def abstract(self) -> bool:
        """Whether it is a shape without any numbers."""
        ...


class Goal(NamedTuple):
    """A leaf that is to be filled.

    Attributes:
        number: Which leaf of the target.
        name: The name by which the checkpoint fills it.
        recipe: What fills it.
        sharding: A `jax.sharding.Sharding` that fits it.
    """

    number: int
    name: str
    recipe: Recipe
    sharding: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """In elements."""
        return self.recipe.aim.shape


class Filled(NamedTuple):
    """How a target is filled, before it is known onto which devices.

    Attributes:
        recipes: By number of the leaf; the leaves that are not there stay as they are.
        notes: What a user should hear of that is no error.
    """

    recipes: dict[int, Recipe]
    notes: tuple[str, ...]


def match(
    index: Index, leaves: Sequence[Leaf], key_map: Any, *, strict: bool, dtype: Any
) -> Filled:
    """Brings a checkpoint and a target's leaves together.

    Args:
        index: The checkpoint.
        leaves: The target's.
        key_map: What `mapping=` was given.
        strict: Whether every leaf must be filled and every tensor used.
        dtype: What `dtype=` was given.

    Raises:
        MappingError: They do not fit; `problems` has a line for each thing that is wrong.
        UsageError: An argument makes no sense.
    """
    aims = list(_aims(leaves))
    failed: errors.MappingError | None = None
    found = Matched({}, (), ())
    try:
        found = trees.match(index, aims, key_map, strict=strict, dtype=dtype)
    except errors.MappingError as error:
        failed = error
    # What `match` refused it has told of; which leaves got nothing is not known then.
    lines = [*_unfit(leaves, strict=strict), *_no_array(found.recipes.values())]
    if failed is None and strict:
        lines += _missing(leaves, found.recipes)
    if failed is None and not strict and not found.recipes and index.tensors:
        raise _nothing_fits(index, leaves)
    if failed is None and not lines:
        return _by_leaf(leaves, found)
    if failed is None:
        raise errors.MappingError(_head(len(lines)), problems=tuple(lines))
    if lines:
        failed.problems = (*failed.problems, *lines)
        failed.message = f"{failed.message}, {len(lines)} more"
    raise failed


def _head(count: int) -> str:
    return f"the checkpoint does not fit the target: {count} problem{'s' * (count != 1)}"


def _aims(leaves: Iterable[Leaf]) -> Iterable[Aim]:
    for leaf in leaves:
        if not leaf.held:
            continue
        # A variable that is shared goes by any of its names, and an optimizer's state may be
        # lacking as a whole; `_missing` asks for one name, and for the rest of a state.
        optional = leaf.optional or leaf.optimizer or len(leaf.names) > 1
        for name in leaf.names:
            yield Aim(name, leaf.shape, leaf.dtype, optional)


def _missing(leaves: Iterable[Leaf], recipes: Mapping[str, Recipe]) -> Iterable[str]:
    lacking = [leaf for leaf in leaves if not any(name in recipes for name in leaf.names)]
    states = sum(leaf.optimizer for leaf in leaves)
    stateless = sum(leaf.optimizer for leaf in lacking) == states
    for leaf in lacking:
        optional = leaf.optional or (leaf.optimizer and stateless)
        if leaf.held and not optional:
            names = ", which is also ".join(leaf.names)
            yield f"missing: {names} {list(leaf.shape)}: nothing in the checkpoint goes there"


def _nothing_fits(index: Index, leaves: Iterable[Leaf]) -> errors.MappingError:
    wanted = next((leaf.names[0] for leaf in leaves if leaf.held), "nothing")
    return errors.MappingError(
        "nothing in the checkpoint goes into the target; mapping= says which name becomes which",
        expected=f"names like {wanted!r}",
        found=f"names like {next(iter(index.tensors))!r}",
    )


def _unfit(leaves: Iterable[Leaf], *, strict: bool) -> Iterable[str]:
    for leaf in leaves:
        if strict and not leaf.held and not leaf.optional:
            dtype = getattr(leaf.value, "dtype", type(leaf.value).__name__)
            yield f"misfit: {leaf.names[0]}: no stored tensor becomes {dtype}"


def _no_array(recipes: Iterable[Recipe]) -> Iterable[str]:
    """Dtypes that JAX has no arrays of: their bytes would be no such leaf."""
    forms = frameworks.module("jax", "mesh").JaxMeshAdapter.forms
    for recipe in recipes:
        dtype = recipe.dtype.name
        if dtype not in forms or forms[dtype].how == "bytes":
            yield f"misfit: {recipe.aim.name}: JAX has no arrays of {dtype}"


def _by_leaf(leaves: Sequence[Leaf], found: Matched) -> Filled:
    recipes: dict[int, Recipe] = {}
    notes = list(found.notes)
    for number, leaf in enumerate(leaves):
        names = [name for name in leaf.names if name in found.recipes]
        if names:
            recipes[number] = found.recipes[names[0]]
        for other in names[1:]:
            notes.append(f"{other} was not loaded: it is the same variable as {names[0]}")
    return Filled(recipes, tuple(notes))
