"""What Flax puts into trees: modules and variables that are shared, boxes that name axes.

A target can only have things of Flax where somebody imported it, so nothing here does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple


class Axes(NamedTuple):
    """The axes that a variable or a box names for the dims of its array.

    Attributes:
        names: One for each dim, as their owner wrote them; or a sharding.
        mesh: Their owner's mesh, None where it has none.
        rules: Their owner's rules from logical axes to those of a mesh, None where it has none.
        logical: Whether they are names of a logical kind in any case.
    """

    names: Any
    mesh: Any
    rules: Any
    logical: bool


class Role(NamedTuple):
    """What Flax says of a leaf.

    Attributes:
        axes: The axes it was given.
        optional: Whether it is state that checkpoints need not have: of random numbers, and
            statistics of batches.
    """

    axes: Axes | None
    optional: bool


PLAIN = Role(None, False)
_STATISTICS = "batch_stats"  # Linen's collection of them.


def is_node(value: Any) -> bool:
    """Whether a value is a module, a variable or a box of Flax."""
    return isinstance(value, kinds())


def kinds() -> tuple[type, ...]:
    """The classes of modules, variables and boxes; none where Flax is not there."""
    meta = sys.modules.get("flax.core.meta")
    nnx = _nnx()
    boxes = () if meta is None else (meta.AxisMetadata,)
    return boxes if nnx is None else (*boxes, nnx.Variable, *_modules())


def hides_its_key(node: Any) -> bool:
    """Whether what lies in a node goes by the node's own name."""
    return not isinstance(node, _modules())


def role(node: Any, before: Role) -> Role:
    """What a node of Flax says of the leaves in it.

    Args:
        node: A module, a variable or a box.
        before: What was said by those around it.
    """
    nnx, meta = _nnx(), sys.modules.get("flax.core.meta")
    if nnx is not None and isinstance(node, nnx.Variable):
        state = isinstance(node, nnx.RngState | nnx.BatchStat)
        return Role(_of_variable(node) or before.axes, before.optional or state)
    if meta is not None and isinstance(node, meta.Partitioned):
        logical = sys.modules.get("flax.linen.spmd")
        is_logical = logical is not None and isinstance(node, logical.LogicallyPartitioned)
        rules = getattr(node, "rules", None)
        return Role(Axes(node.names, node.mesh, rules, is_logical), before.optional)
    return before


def is_statistics(path: Iterable[str]) -> bool:
    """Whether a path leads through Linen's statistics of batches."""
    return _STATISTICS in path


def _modules() -> tuple[type, ...]:
    nnx = _nnx()
    return () if nnx is None else (nnx.Pytree,)


def _nnx() -> Any:
    """`flax.nnx`, None where it is not there as a whole (imported meanwhile by another thread)."""
    nnx = sys.modules.get("flax.nnx")
    return nnx if hasattr(nnx, "Pytree") else None


def _of_variable(variable: Any) -> Axes | None:
    """The axes in a variable's metadata: Flax renamed the key twice."""
    known = variable.get_metadata()
    for key in ("out_sharding", "sharding", "sharding_names"):
        if known.get(key):
            return Axes(known[key], known.get("mesh"), known.get("sharding_rules"), False)
    return None
