"""Rules: what a key map says of the tensors that one of its regexes matches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mfload import dtypes
from mfload.dtypes import DType
from mfload.trees import arguments
from mfload.trees.arguments import ConcatBy, Group, SplitBy


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to a stored tensor on its way into a target; `mfload.rule` makes one.

    Attributes:
        names: Templates of the targets' names. Each of them is given the tensor whole, or its
            part of a split; there None stands for a part that nobody wants.
        transpose: Order of the dims.
        reshape: The shape after that; one -1 stands for what is left.
        stack: Pairs of a group and the dim that its numbers make.
        concat: How tensors are joined.
        split: How the stored tensor is taken apart.
        cast: The dtype of the result.
        scale: A factor.
        reshape_first: Whether the reshape comes before the transpose.
        family: Whether it has the form of a project whose maps serve a whole family of
            checkpoints: one of them need not use every rule, and a regex may match the front of
            a name, whose tail stays.
    """

    names: tuple[str | None, ...]
    transpose: tuple[int, ...] | None = None
    reshape: tuple[int, ...] | None = None
    stack: tuple[tuple[Group, int], ...] = ()
    concat: ConcatBy | None = None
    split: SplitBy | None = None
    cast: DType | None = None
    scale: float | None = None
    reshape_first: bool = False
    family: bool = False

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that tell the tensors of one target apart."""
        joined = () if self.concat is None else (self.concat.group,)
        return (*(group for group, _ in self.stack), *joined)


def rule(
    replacement: str | Sequence[str | None],
    *,
    transpose: Sequence[int] | None = None,
    reshape: Sequence[int] | None = None,
    stack: Group | Sequence[Group] | Mapping[Group, int] | None = None,
    concat: tuple[int, Group] | tuple[int, Group, Sequence[str]] | None = None,
    split: int | tuple[int, Sequence[int]] | None = None,
    cast: Any = None,
    scale: float | None = None,
) -> Rule:
    r"""A rule of a key map, for what a name alone does not say.

    The steps are taken in this order, whatever the order of the arguments: split, transpose,
    reshape, concat, stack, scale, cast.

    Args:
        replacement: Name of the target, with `\1` or `\g<name>` for groups of the regex. Of
            several, in a list, each is given the tensor whole, as weights are that the checkpoint
            ties; for a split they are the parts, with None for one that is not wanted.
        transpose: Order of the stored tensor's dims, as in `numpy.transpose`.
        reshape: The shape after that; one -1 stands for what is left.
        stack: Stacks the tensors whose names differ in a group, in the order of its numbers: one
            group (dim 0), several (dims 0, 1, …: layers, experts), or `{group: dim}`.
        concat: Joins tensors: (dim, group) in the order of the group's numbers, or
            (dim, group, ("q", "k", "v")) in the order of its texts.
        split: Takes the stored tensor apart along a dim: the dim (the targets' shapes give the
            sizes) or (dim, sizes).
        cast: The dtype of the result, whatever that of the target. It may lose precision.
        scale: A factor; 8-bit and 16-bit floats are multiplied as float32 and rounded once. The
            product is XLA's arithmetic: subnormal numbers count as zero there. A factor that is
            no normal number of the dtype it is computed in is refused by `mfload.load_into`.

    Returns:
        The rule, to be the value of a regex in `mapping=`.

    Raises:
        UsageError: An argument makes no sense.
    """
    names = arguments.names(replacement, split is not None)
    return Rule(
        names,
        transpose=None if transpose is None else arguments.permutation(transpose),
        reshape=None if reshape is None else arguments.shape(reshape),
        stack=() if stack is None else arguments.stack(stack),
        concat=None if concat is None else arguments.concat(concat),
        split=None if split is None else arguments.split(split, len(names)),
        cast=None if cast is None else dtypes.resolve(cast),
        scale=None if scale is None else arguments.scale(scale),
    )
