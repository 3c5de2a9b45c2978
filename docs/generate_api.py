"""Writes docs/reference/api.md from the docstrings: `python docs/generate_api.py`.

The page reads well in the repository and is a page of the site. With `--check` nothing is written,
and the exit status says whether the page is up to date. Needs no framework.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "api.md"

# The order of what is used most; other public names follow by the alphabet.
FIRST = (
    "load", "load_into", "restore", "rule", "stream", "open", "plan", "abstract", "save", "verify",
    "diff", "align", "convert", "publish", "seeds", "doctor", "unpack", "live_bytes",
    "Options", "PeerOptions", "Report",
)  # fmt: skip
MADE = ("Options", "PeerOptions", "Report", "Manifest")
"""Classes of the top level that users make; of the others the signature is not shown."""
GIVEN = (
    "mfload.ondemand.experts.Experts",
    "mfload.ondemand.neurons.Neurons",
)
"""Classes of what public functions give, which are found there alone."""
TYPES = {
    "mfload.Framework": "mfload.frameworks.Framework",
    "PathOrBytes": "mfload.sources.PathOrBytes",
    "Regex": "mfload.planning.selection.Regex",
    "DTypeLike": "mfload.dtypes.DTypeLike",
    "Group": "mfload.trees.keymap.Group",
}
"""What signatures name beside classes, and where it is."""
COMPAT = {
    "dcp": "HuggingFaceReader",
    "transformers": "from_pretrained",
    "safetensors": "",
    "sglang": "",
    "vllm": "",
}
"""Modules of `mfload.compat`, and what users call in them. They import what they are for, so they
are read and not imported."""
HEAD = """# API reference

Every public name, from its docstring; this page is made by `python docs/generate_api.py`.
`import mfload` imports no framework.
"""
_SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")


def found(dotted: str) -> Any:
    """The object of a dotted name."""
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def text(doc: str) -> Iterator[str]:
    """A Google docstring as Markdown."""
    for part in re.split(rf"\n\n?(?=(?:{'|'.join(_SECTIONS)}):\n)", inspect.cleandoc(doc)):
        name, _, body = part.partition(":\n")
        if name not in _SECTIONS:
            yield part
            continue
        yield f"**{name}**"
        body = textwrap.dedent(body)
        if name in ("Returns", "Yields"):
            yield body.rstrip()
            continue
        items = re.split(r"\n(?=\S)", body.rstrip())
        yield "\n".join(re.sub(r"^([\w.*]+):\s", r"- `\1`: ", " ".join(i.split())) for i in items)


def signature(name: str, value: Any) -> str:
    """The signature, an argument a line where it is long."""
    try:
        shown = inspect.signature(value)
    except ValueError:
        return name
    drop = {"self"} if "." in name else set()
    parameters = [p for p in shown.parameters.values() if p.name not in drop]
    flat = _plain(f"{name}{shown.replace(parameters=parameters)}")
    if len(flat) <= 96:
        return flat
    lines: list[str] = []
    keyword = False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not keyword:
            lines.append("    *,")
            keyword = True
        lines.append(_plain(f"    {each},"))
    back = "" if shown.return_annotation is shown.empty else f" -> {shown.return_annotation}"
    return "\n".join([f"{name}(", *lines, _plain(f"){back}")])


def _plain(text: str) -> str:
    """Annotations without the quotes of postponed evaluation; defaults that Python can read."""
    return re.sub(r"""(: |-> )(['"])(.*?)\2(?=,? ?=|,|\)|$)""", r"\1\3", text).replace(
        "<factory>", "..."
    )


def entry(title: str, name: str, value: Any, level: int = 3) -> Iterator[str]:
    """Heading, signature and docstring."""
    yield f"{'#' * level} `{title}`"
    if not isinstance(value, property):
        yield f"```text\n{signature(name, value)}\n```"
    yield from text(value.__doc__ or "")


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class, or one of mfload's above it, documents."""
    ours = [
        each
        for each in reversed(kind.__mro__)
        if each.__module__.startswith("mfload.") and not each.__name__.startswith("_")
    ]
    for name, value in {name: each for own in ours for name, each in vars(own).items()}.items():
        value = getattr(value, "__func__", value)
        public = not name.startswith("_") or name == "__getitem__"
        if public and (inspect.isfunction(value) or isinstance(value, property)) and value.__doc__:
            yield name, value


def described(title: str, kind: type, made: bool = True) -> Iterator[str]:
    """A class and its members; `made`: users make it, so its signature is shown."""
    yield f"### `{title}`"
    if made:
        yield f"```text\n{signature(kind.__name__, kind)}\n```"
    yield from text(kind.__doc__ or "")
    for name, value in members(kind):
        yield from entry(f"{kind.__name__}.{name}", name, value, 4)


def types() -> Iterator[str]:
    """What signatures name beside classes, by the text below its assignment."""
    for title, dotted in TYPES.items():
        module, _, name = dotted.rpartition(".")
        body = ast.parse(inspect.getsource(importlib.import_module(module))).body
        (said,) = (
            ast.literal_eval(ast.unparse(after))
            for node, after in itertools.pairwise(body)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
        )
        value = re.sub(r"\b(typing|mfload(\.\w+)+)\.", "", str(found(dotted)))
        yield f"- `{title}`: {' '.join(said.split())} `{value}`"


def unimported(module: str, name: str) -> Iterator[str]:
    """A module that is not imported, by its docstring, and what users call in it."""
    path = ROOT / "mfload" / "compat" / module
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text("utf-8"))
    yield f"### `mfload.compat.{module}`"
    yield from text(ast.get_docstring(tree) or "")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            made = [each for each in node.body if getattr(each, "name", "") == "__init__"]
            call = made[0] if made else node
            assert isinstance(call, ast.FunctionDef)
            said, defined = ast.get_docstring(node) or "", dict[str, Any]()
            call.body, call.decorator_list = [ast.Pass()], []
            exec(f"from __future__ import annotations\n{ast.unparse(call)}", defined)
            yield f"#### `mfload.compat.{module}.{name}`"
            shown = signature(f"{name}.__init__" if made else name, defined[call.name])
            yield f"```text\n{shown.replace('.__init__', '')}\n```"
            yield from text(said)


def errors_of(kind: type, depth: int = 0) -> Iterator[str]:
    """An error's subclasses, each below its first base, as lines of a list."""
    import mfload

    for each in vars(mfload.errors).values():
        if isinstance(each, type) and each.__bases__[0] is kind:
            others = ", ".join(base.__name__ for base in each.__bases__[1:])
            first = " ".join(inspect.cleandoc(each.__doc__ or "").partition("\n\n")[0].split())
            beside = f" ({others})" if others else ""
            yield f"{'  ' * depth}- `mfload.errors.{each.__name__}`{beside}: {first}"
            yield from errors_of(each, depth + 1)


def page() -> str:
    """All of it."""
    import mfload

    order = {name: number for number, name in enumerate(FIRST)}
    public = sorted(mfload.__all__, key=lambda name: (order.get(name, len(FIRST)), name))
    every = {name: getattr(mfload, name) for name in public if name != "MfloadError"}
    parts = [HEAD.rstrip(), "## Functions"]
    for name, value in every.items():
        if inspect.isfunction(value):
            parts += entry(f"mfload.{name}", name, value)
    parts += ["## Types of arguments", "\n".join(types()), "## Classes"]
    for name, value in every.items():
        if inspect.isclass(value):
            parts += described(f"mfload.{name}", value, name in MADE)
    for dotted in GIVEN:
        parts += described(dotted.rpartition(".")[2], found(dotted), made=False)
    parts += ["## `mfload.ondemand`", *text(mfload.ondemand.__doc__ or "")]
    for name in mfload.ondemand.__all__:
        value, title = getattr(mfload.ondemand, name), f"mfload.ondemand.{name}"
        parts += described(title, value) if inspect.isclass(value) else entry(title, name, value)
    compat = importlib.import_module("mfload.compat")
    parts += ["## `mfload.compat`", *text(compat.__doc__ or "")]
    parts += described("mfload.compat.patch", compat.patch)
    for module, name in COMPAT.items():
        parts += unimported(module, name)
    parts += ["## `mfload.errors`", "[Errors](../errors.md) has cause and remedy of each."]
    parts += described("mfload.MfloadError", mfload.MfloadError, made=False)
    parts += ["The tree below it, with the built-in errors that each is too:"]
    return "\n\n".join([*parts, "\n".join(errors_of(mfload.MfloadError))]) + "\n"


def main() -> int:
    """Writes the page, or says whether it is up to date."""
    made = page()
    if "--check" in sys.argv[1:]:
        same = PAGE.exists() and PAGE.read_text("utf-8") == made
        if not same:
            print("docs/reference/api.md is out of date: run python docs/generate_api.py")
        return 0 if same else 1
    PAGE.write_text(made, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
