"""The tree of a checkpoint: how its tensors were nested, as JSON among the metadata strings.

Most checkpoints are tables of names. Those of Flax and Orbax are trees, with lists, empty nodes and
plain values in them; their formats keep the tree in `Index.metadata` under `KEY`, and so does
`mfload.save` of a tree. A tensor is `{"$tensor": name}`, or `{"$scalar": name}` if it was a number
of Python's. Dicts, lists, strings, booleans, None, integers and finite floats are JSON's own;
whatever else is a dict with one key:

    $dict     [[key, value], …]: keys that are not all strings, or that begin with "$"
    $tuple    [value, …]
    $float    "nan", "inf" or "-inf"
    $complex  [real, imaginary]
    $bytes    in base64
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from mfload import errors
from mfload.formats import strict_json
from mfload.formats.strict_json import bad, brief

KEY = "mfload.tree"
"""The name of the metadata string that holds a tree."""

ITEMS = "orbax.items"
"""The metadata string with the names of several items, and whether each is in the tree, as JSON."""


class TensorName(str):
    """A leaf: the name of a tensor of the checkpoint."""

    __slots__ = ()


class ScalarName(TensorName):
    """The name of one without dims that is a number of Python's."""

    __slots__ = ()


def dumps(tree: Any) -> str:
    """The text of a tree of dicts, lists, tuples and plain values, with `TensorName`s as leaves.

    Named tuples become dicts of their fields.

    Raises:
        UsageError: A value is of another type, or the tree is nested too deep to be read again.
    """
    try:
        text = json.dumps(_encoded(tree), separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise errors.UsageError("the tree is nested too deep") from None
    return text


def loads(text: str, file: str, tensor: Callable[[TensorName], Any]) -> Any:
    """The tree of a text; `tensor` gives the leaf of a name, and raises KeyError if there is none.

    Raises:
        HeaderError: The text is not one that `dumps` makes, or names a tensor that is not there.
    """
    tree = strict_json.loads(text.encode("utf-8", "surrogatepass"), file, "tree")
    strict_json.check(tree, file)
    try:
        return _decoded(tree, tensor)
    except KeyError as error:
        what = "the tree names a tensor that the checkpoint lacks"
        raise bad(file, what, str(error.args[0])) from None
    except (TypeError, ValueError) as error:
        raise bad(file, "malformed tree", None, None, str(error)) from None


def items(metadata: Mapping[str, str], file: str) -> dict[str, bool]:
    """The items of a checkpoint that has several, and whether they are in its tree."""
    text = metadata.get(ITEMS, "{}").encode("utf-8", "surrogatepass")
    found = strict_json.loads(text, file, ITEMS)
    if not isinstance(found, dict) or not {*map(type, found.values())} <= {bool}:
        raise bad(file, f"malformed {ITEMS}", None, "{name: true or false}", brief(found))
    return found


def _encoded(value: Any) -> Any:
    if isinstance(value, TensorName):
        return {"$scalar" if isinstance(value, ScalarName) else "$tensor": str(value)}
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, complex):
        return {"$complex": [_encoded(value.real), _encoded(value.imag)]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _encoded(each) for key, each in value.items()}
        return {"$dict": [[_encoded(key), _encoded(each)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        made = list(map(_encoded, value))
        return made if isinstance(value, list) else {"$tuple": made}
    raise errors.UsageError(
        "a value of the tree can't be kept in a checkpoint",
        expected="arrays, dicts, lists, tuples, strings, numbers, bytes, None",
        found=type(value).__name__,
    )


def _decoded(value: Any, tensor: Callable[[TensorName], Any]) -> Any:
    if isinstance(value, list):
        return [_decoded(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    key = next(iter(value), "")
    if not key.startswith("$"):
        return {key: _decoded(each, tensor) for key, each in value.items()}
    (inner,) = value.values()
    if key in ("$tensor", "$scalar") and isinstance(inner, str):
        return tensor(ScalarName(inner) if key == "$scalar" else TensorName(inner))
    if key == "$dict":
        pairs = [(_decoded(name, tensor), _decoded(each, tensor)) for name, each in inner]
        made = dict(pairs)
        if len(made) < len(pairs):
            raise ValueError("a key is given twice")
        return made
    if key == "$tuple" and isinstance(inner, list):
        return tuple(_decoded(each, tensor) for each in inner)
    if key == "$float" and inner in ("nan", "inf", "-inf"):
        return float(inner)
    if key == "$complex":
        real, imaginary = (_decoded(each, tensor) for each in inner)
        return complex(real, imaginary)
    if key == "$bytes" and isinstance(inner, str):
        return base64.b64decode(inner, validate=True)
    raise ValueError(brief(value))
