"""Staying: the leaves of a target that a load leaves as they are, and what is told of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mfload.frameworks import warnings
from mfload.trees.targets import Leaf

_SHOWN = 3


def tell(leaves: Sequence[Leaf], filled: Collection[int], notes: list[str]) -> None:
    """Tells of the leaves that nothing fills.

    Args:
        leaves: The target's.
        filled: Numbers of those that the checkpoint fills.
        notes: Takes a line where there are others.

    Raises:
        UserWarning: Where the user made errors of warnings, and a leaf that stays has no value.
    """
    stay = [leaf for n, leaf in enumerate(leaves) if n not in filled and leaf.counts]
    if not stay:
        return
    notes.append(f"the checkpoint has nothing for {_brief(stay)}: they stay as they are")
    bare = [leaf for leaf in stay if leaf.abstract]
    if bare:
        warnings.warn(
            f"the checkpoint has nothing for {_brief(bare)}, and the target has only shapes for "
            "them (jax.ShapeDtypeStruct): what was loaded can't be called before they are set; "
            "or build the target with values, not by nnx.eval_shape or jax.eval_shape"
        )


def _brief(leaves: Sequence[Leaf]) -> str:
    names = ", ".join(leaf.names[0] or "the target" for leaf in leaves[:_SHOWN])
    more = f" and {len(leaves) - _SHOWN} more" if len(leaves) > _SHOWN else ""
    return f"{len(leaves)} {'leaf' if len(leaves) == 1 else 'leaves'} ({names}{more})"
