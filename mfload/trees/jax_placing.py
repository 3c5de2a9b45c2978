"""Placing: a sharding for each leaf of a target, from all who have a say in it.

What `shardings=` says goes first, then the sharding that a leaf has, then the axes that Flax's
variables and boxes name, then the mesh, on which the leaf is replicated. Without a mesh a leaf
lies on the default device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec, Sharding, SingleDeviceSharding

from mfload import errors
from mfload.mesh import jax_boxes, jax_sharding
from mfload.trees import flax_axes, flax_trees, jax_trees
from mfload.trees.flax_axes import Rules
from mfload.trees.jax_trees import Leaf


def shardings(
    leaves: Sequence[Leaf],
    mesh: Any,
    asked: Any,
    unmatched: str,
    rules: Any,
    notes: list[str],
    known: Sequence[str] = (),
    stored: Sequence[str] = (),
) -> list[Any]:
    """A sharding for each leaf, checked against its shape.

    Args:
        leaves: The leaves; of several names the first that a rule matches counts.
        mesh: The user's mesh, None for that of `jax.set_mesh`.
        asked: What `shardings=` was given.
        unmatched: What becomes of leaves for which nobody says anything.
        rules: What `logical_axis_rules=` was given.
        notes: Takes what a user should hear of that is no error.
        known: All names of the target, which rules may be for.
        stored: Names in the checkpoint, which `shardings=` does not go by.

    Returns:
        Shardings on devices.

    Raises:
        ShardingError: Some do not fit their leaves, or nobody says where a leaf lies.
        UsageError: An argument makes no sense.
    """
    pairs = flax_axes.check_rules(rules)
    asked = _rules(asked)
    mesh = _mesh(mesh, asked, leaves)
    alone = SingleDeviceSharding(default_device()) if mesh is None and asked is None else None

    def own(number: int) -> Any:
        said = _own(leaves[number], mesh, pairs)
        return alone if said is None else said

    return jax_sharding.resolve(
        [(leaf.name, leaf.shape) for leaf in leaves],
        mesh,
        asked,
        unmatched,
        infos=leaves,
        aliases=[leaf.names for leaf in leaves],
        own=own,
        notes=notes,
        known=known,
        others=stored,
    )


def _mesh(mesh: Any, asked: Any, leaves: Sequence[Leaf] | None) -> Any:
    """The user's mesh, else that of `jax.set_mesh` where some leaf has no devices of its own."""
    if mesh is None and leaves and all(_has_devices(leaf) for leaf in leaves if leaf.held):
        return None
    return jax_sharding.mesh_of(mesh, asked)


def _has_devices(leaf: Leaf) -> bool:
    return isinstance(leaf.sharding, Sharding) and not jax_boxes.is_abstract(leaf.sharding)


def default_device() -> Any:
    """The device on which arrays lie where nobody says otherwise."""
    default = jax.config.jax_default_device  # pyright: ignore
    return default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]


def processes(mesh: Any, asked: Any, leaves: Sequence[Leaf] | None) -> tuple[int, ...]:
    """The processes that take part in a load, by their numbers; this one where nobody says.

    Args:
        mesh: As for `shardings`.
        asked: As for `shardings`.
        leaves: The target's; None for a target that makes no sense, which can't tell.
    """
    silent = asked is None
    try:
        asked = _rules(asked)
    except errors.MfloadError:
        asked = None
    mesh = _mesh(mesh, asked, leaves)
    own = [leaf.sharding for leaf in leaves or () if _has_devices(leaf)]
    if mesh is None and silent and not own:
        return () if leaves is None else (jax.process_index(),)
    if callable(asked) and mesh is None:
        return jax_sharding.processes(None, asked)
    found = [*jax_sharding.given(asked), *own]
    return jax_sharding.processes(mesh, [("", each) for each in found])


def _own(leaf: Leaf, mesh: Any, rules: Rules) -> Any:
    """What a leaf says of itself, None where it says nothing."""
    axes, own = leaf.role.axes, leaf.sharding
    abstract = jax_boxes.is_abstract(own)
    if own is not None and not (abstract and axes is not None and _splits_nothing(own)):
        if abstract and mesh is None:
            raise errors.ShardingError(
                "the leaf names axes of a mesh, and no mesh has devices for them",
                tensor=leaf.name,
                expected="mesh=, or a load inside jax.set_mesh(mesh)",
                found=str(own.spec),
            )
        return own
    # An abstract sharding that splits nothing is what tracing leaves behind on Auto axes.
    found = None if axes is None else flax_axes.sharding(leaf.name, axes, mesh, rules)
    return own if found is None and not abstract else found


def _splits_nothing(sharding: Any) -> bool:
    return all(part is None for part in tuple(sharding.spec))


def _rules(asked: Any) -> Any:
    """A tree of shardings, as a mapping from names; anything else as it is."""
    if asked is None or isinstance(asked, Sharding | PartitionSpec | list | tuple):
        return asked
    if type(asked) is dict or (callable(asked) and not flax_trees.is_node(asked)):
        return asked
    if isinstance(asked, Mapping) or flax_trees.is_node(asked) or _is_tree(asked):
        return {leaf.name: leaf.value for leaf in jax_trees.take_apart(asked).leaves}
    return asked


def _is_tree(value: Any) -> bool:
    return not jax.tree_util.all_leaves([value])
