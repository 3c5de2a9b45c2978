"""Names: which tensors are wanted, as what, and under which names of a target they go."""

from mfload.mapping.selecting import Dtypes, Names, select, target

__all__ = ["Dtypes", "Names", "select", "target"]
