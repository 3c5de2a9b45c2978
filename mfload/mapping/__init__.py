"""Names: which tensors are wanted, as what, and under which names of a target they go."""

from mfload.mapping.matching import Matched, match
from mfload.mapping.programs import Program, evaluate
from mfload.mapping.recipes import Aim, Pull, Recipe, Source
from mfload.mapping.rules import Rule, rule
from mfload.mapping.selecting import Dtypes, Names, select, target

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
