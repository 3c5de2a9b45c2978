"""Writes docs/reference/api.md from the docstrings: `python docs/generate_api.py`.

The page reads well in the repository and is a page of the site. With `--check` nothing is written,
and the exit status says whether the page is up to date. Needs no framework.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "api.md"

FUNCTIONS = [
    "load",
    "load_into",
    "restore",
    "rule",
    "abstract",
    "open",
    "plan",
    "save",
    "verify",
    "diff",
    "align",
    "convert",
    "publish",
    "seeds",
    "doctor",
    "unpack",
    "live_bytes",
]
CLASSES = (
    "mfload.Options",
    "mfload.PeerOptions",
    "mfload.Report",
    "mfload.loading.lazy.LazyCheckpoint",
    "mfload.loading.lazy.TensorSlice",
    "mfload.index.TensorInfo",
    "mfload.loading.preview.Preview",
    "mfload.Saved",
    "mfload.Verification",
    "mfload.Difference",
    "mfload.Aligned",
    "mfload.Converted",
    "mfload.Seed",
    "mfload.Manifest",
    "mfload.Diagnosis",
)
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
    """Annotations without the quotes that postponed evaluation leaves."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)


def entry(title: str, name: str, value: Any, level: int = 3) -> Iterator[str]:
    """Heading, signature and docstring."""
    yield f"{'#' * level} `{title}`"
    if not isinstance(value, property):
        yield f"```text\n{signature(name, value)}\n```"
    yield from text(value.__doc__ or "")


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class, or one of mfload's above it, documents."""
    ours = [each for each in reversed(kind.__mro__) if each.__module__.startswith("mfload.")]
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


def page() -> str:
    """All of it."""
    import mfload

    parts = [HEAD.rstrip(), "## Functions"]
    for name in FUNCTIONS:
        parts += entry(f"mfload.{name}", name, getattr(mfload, name))
    parts.append("## Classes")
    for dotted in CLASSES:
        public = dotted.count(".") == 1
        made = public and name_of(dotted) in ("Options", "Report", "Manifest")
        parts += described(dotted if public else name_of(dotted), found(dotted), made)
    parts += ["## On demand", *text(mfload.ondemand.__doc__ or "")]
    for name in mfload.ondemand.__all__:
        value, title = getattr(mfload.ondemand, name), f"mfload.ondemand.{name}"
        parts += described(title, value) if inspect.isclass(value) else entry(title, name, value)
    parts += ["## Errors", "[Errors](../errors.md) has cause and remedy of each."]
    kinds = [
        kind
        for kind in vars(mfload.errors).values()
        if isinstance(kind, type) and issubclass(kind, mfload.MfloadError)
    ]
    for kind in kinds:
        bases = ", ".join(base.__name__ for base in kind.__bases__)
        first = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
        parts.append(f"- `mfload.errors.{kind.__name__}` ({bases}): {' '.join(first.split())}")
    return (
        re.sub(r"\n\n(?=- `mfload\.errors\.)", "\n", "\n\n".join(parts)).replace(
            "of each.\n-", "of each.\n\n-"
        )
        + "\n"
    )


def name_of(dotted: str) -> str:
    """The last part of a dotted name."""
    return dotted.rpartition(".")[2]


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
