"""docs/generate_api.py: the page of all public names."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import importlib
import importlib.util
import re
import typing
from pathlib import Path
from types import ModuleType

import mfload

ROOT = Path(__file__).resolve().parents[1]
_ENTRY = re.compile(r"^ *(?:#+|-) `([\w.]+)`", re.M)
_SIGNATURE = re.compile(r"^#+ `[\w.]+`\n\n```text\n(.*?)\n```$", re.M | re.S)
MODULES = ("compat", "errors", "ondemand")
# Of other packages; "Array" is the framework's.
ELSEWHERE = {"Array", "ArrayLike", "ModuleType", "NDArray", "ShapeDtypeStruct", "np", "os", "re"}
# What is only handed on, or a part of a result, which its attributes describe.
PARTS = {"FileEntry", "FileIdentity", "Lru", "Planner", "Rule", "Source", "Span", "TensorEntry",
         "TimelineFigure"}  # fmt: skip


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_api", ROOT / "docs/generate_api.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


PAGE: str = _generator().page()
ENTRIES = _ENTRY.findall(PAGE)


def _public() -> set[str]:
    names = {f"mfload.{name}" for name in mfload.__all__} | {f"mfload.{name}" for name in MODULES}
    for module in ("ondemand", "compat"):
        every = importlib.import_module(f"mfload.{module}").__all__
        names |= {f"mfload.{module}.{name}" for name in every}
    for kind in vars(mfload.errors).values():
        if isinstance(kind, type) and issubclass(kind, mfload.MfloadError):
            names.add(f"mfload.errors.{kind.__name__}")
    return names - {"mfload.errors.MfloadError"}  # It is mfload.MfloadError.


def test_every_public_name_is_there_once() -> None:
    public = _public()
    assert {name: ENTRIES.count(name) for name in public} == dict.fromkeys(public, 1)


def test_what_the_docs_name_of_compat_is_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]
    text = "".join(page.read_text("utf-8") for page in pages if page.name != "api.md")
    named = set(re.findall(r"mfload\.(compat(?:\.[a-z]+)+)(?:\.\w+)?\b", text))
    modules = {name for name in named if importlib.util.find_spec(f"mfload.{name}")}
    assert modules
    shown = {name.removeprefix("mfload.") for name in ENTRIES}
    assert {".".join(name.split(".")[:2]) for name in modules} <= shown


def test_nothing_else_is_there() -> None:
    public = _public()
    others = [name for name in ENTRIES if name.startswith("mfload.") and name not in public]
    assert others
    assert all(name.startswith("mfload.compat.") for name in others)
    assert not [name for name in ENTRIES if re.search(r"(^|\.)_(?!_getitem__)", name)]
    members = {name.partition(".")[2] for name in ENTRIES if name.startswith("LazyCheckpoint.")}
    assert {"keys", "get_tensor", "get_slice", "close"} <= members
    assert not members & {"fill", "load", "read", "read_part", "reads_pieces", "file_of"}


def test_signatures_name_what_a_reader_can_look_up() -> None:
    known = {name.rpartition(".")[2] for name in ENTRIES} | ELSEWHERE | PARTS
    for module in (builtins, typing, collections.abc):
        known |= vars(module).keys()
    unknown: dict[str, str] = {}
    for signature in _SIGNATURE.findall(PAGE):
        code = signature if "->" in signature else f"{signature} -> None"
        node = ast.parse(re.sub(r"^[\w.]+\(", "def f(", code) + ": ...").body[0]
        assert isinstance(node, ast.FunctionDef)
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        for annotation in (*(each.annotation for each in arguments), node.returns):
            for each in ast.walk(annotation) if annotation else ():
                if isinstance(each, ast.Name) and each.id not in known:
                    unknown[each.id] = signature.partition("(")[0]
    assert unknown == {}
