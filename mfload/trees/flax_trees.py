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
        optimizer: Whether it is an optimizer's state, which checkpoints have as a whole or not
            at all.
    """

    axes: Axes | None
    optional: bool
    optimizer: bool = False


PLAIN = Role(None, False)
_STATISTICS = "batch_stats"  # Linen's collection of them.
_OPTIMIZER = ("opt_state", "step")  # Fields of a TrainState.


def is_node(value: Any) -> bool:
    """Whether a value is a module, a variable, a box or a train state of Flax."""
    return isinstance(value, kinds())


def kinds() -> tuple[type, ...]:
    """The classes of modules, variables, boxes, train states; none where Flax is not there."""
    meta = sys.modules.get("flax.core.meta")
    nnx = _nnx()
    found = (*(() if meta is None else (meta.AxisMetadata,)), *_states())
    return found if nnx is None else (*found, nnx.Variable, *_modules())


def hides_its_key(node: Any) -> bool:
    """Whether what lies in a node goes by the node's own name."""
    return not isinstance(node, (*_modules(), *_states()))


def role(node: Any, before: Role) -> Role:
    """What a node of Flax says of the leaves in it.

    Args:
        node: A module, a variable or a box.
        before: What was said by those around it.
    """
    nnx, meta = _nnx(), sys.modules.get("flax.core.meta")
    if nnx is not None and isinstance(node, nnx.Variable):
        state = isinstance(node, nnx.RngState | nnx.BatchStat)
        optimizer = before.optimizer or isinstance(node, nnx.OptState)
        return Role(_of_variable(node) or before.axes, before.optional or state, optimizer)
    if meta is not None and isinstance(node, meta.Partitioned):
        logical = sys.modules.get("flax.linen.spmd")
        is_logical = logical is not None and isinstance(node, logical.LogicallyPartitioned)
        rules = getattr(node, "rules", None)
        return before._replace(axes=Axes(node.names, node.mesh, rules, is_logical))
    return before


def role_of_field(node: Any, field: str, before: Role) -> Role:
    """What a node says of one of its fields.

    Args:
        node: Any node of a tree.
        field: The field's name.
        before: What was said of all of the node.
    """
    if isinstance(node, _states()) and field in _OPTIMIZER:
        return before._replace(optimizer=True)
    return before


def is_split(value: Any) -> bool:
    """Whether it is what `nnx.split` gives: how a module is built, and its state."""
    nnx = _nnx()
    if nnx is None or not isinstance(value, tuple):
        return False
    return any(isinstance(each, nnx.GraphDef) for each in value[:1])


def is_statistics(path: Iterable[str]) -> bool:
    """Whether a path leads through Linen's statistics of batches."""
    return _STATISTICS in path


def _modules() -> tuple[type, ...]:
    nnx = _nnx()
    return () if nnx is None else (nnx.Pytree,)


def _states() -> tuple[type, ...]:
    training = sys.modules.get("flax.training.train_state")
    kind = getattr(training, "TrainState", None)
    return () if kind is None else (kind,)


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
