"""What type checkers see: `make lint` has them read tests/typing; here is what they do not tell."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest

import mfload
from mfload import frameworks

ROOT = Path(__file__).resolve().parents[1]
API = "mfload/api.py"


def _keys(name: str) -> set[str]:
    """The keys of a TypedDict, with those of its base."""
    for node in ast.walk(ast.parse((ROOT / API).read_text("utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == name:
            own = {
                ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)
            }
            base = ast.unparse(node.bases[0])
            return own if base == "TypedDict" else own | _keys(base)
    raise LookupError(name)


@pytest.mark.parametrize(
    ("call", "first", "rest"),
    [
        (mfload.load, "path framework device", "Arguments"),
        (mfload.open, "path framework device", "OpenArguments"),
        (mfload.stream, "path framework device", "StreamArguments"),
        (mfload.stream, "path framework device", "EagerArguments"),
        (mfload.restore, "path target", "RestoreArguments"),
        (mfload.save, "arrays path background", "SaveArguments"),
        (mfload.load_into, "target path", "IntoArguments"),
    ],
)
def test_the_overloads_know_every_argument(call: Any, first: str, rest: str) -> None:
    """That each is accepted by the function is checked by pyright."""
    assert {*first.split(), *_keys(rest)} == {*inspect.signature(call).parameters}


def test_every_framework_has_its_names() -> None:
    names = get_args(mfload.Framework)
    assert {frameworks.resolve(name) for name in names} == {*frameworks.NAMES}
    assert frameworks.resolve("Keras") == "tensorflow"


def test_what_the_readme_calls_is_read_by_type_checkers() -> None:
    uses = (ROOT / "tests/typing/uses.py").read_text("utf-8")
    called = set(
        re.findall(r"\bmfload\.(\w+)(?:\.\w+)*\(", (ROOT / "README.md").read_text("utf-8"))
    )
    assert {"load", "open", "restore"} <= called
    assert not [name for name in called if f"mfload.{name}" not in uses]
