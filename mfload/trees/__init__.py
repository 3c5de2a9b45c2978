"""Names: which tensors are wanted, as what, and under which names of a target they go."""

from mfload.planning.selection import Dtypes, Names, select, target
from mfload.trees.matching import Matched, match
from mfload.trees.programs import Program, evaluate
from mfload.trees.recipes import Aim, Pull, Recipe, Source
from mfload.trees.rules import Rule, rule

__all__ = [
    "Aim",
    "Dtypes",
    "Matched",
    "Names",
    "Program",
    "Pull",
    "Recipe",
    "Rule",
    "Source",
    "evaluate",
    "match",
    "rule",
    "select",
    "target",
]
