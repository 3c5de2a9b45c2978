"""Sphinx extension: files of the repository that pages link to become pages of the site.

A link such as `[api.py](../mfload/api.py)` leads to the file where the repository is browsed. In
the site it leads to a page with the file's text; names of the API reference link to their
line there. Links to data (JSON, NPZ) stay downloads.
"""

from __future__ import annotations

import importlib
import inspect
import posixpath
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

_TEXT = {".py", ".toml", ".txt", ".sh", ""}


def _noted(env: BuildEnvironment) -> dict[str, set[str]]:
    """Files that are linked to, by the page that does so."""
    if not hasattr(env, "mfload_sources"):
        env.mfload_sources = {}  # type: ignore[attr-defined]
    return env.mfload_sources  # type: ignore[attr-defined]


def _page(file: str) -> str:
    return f"source/{file}"


def _file_of(app: Sphinx, node: nodes.Element) -> str | None:
    """The repository's file that a link leads to and that is no page by itself."""
    root, target = Path(app.srcdir), node["reftarget"]
    if isinstance(node, addnodes.download_reference):
        here = posixpath.dirname(app.env.docname)
        file = posixpath.normpath(posixpath.join(here, target))
        return file if Path(file).suffix in _TEXT and (root / file).is_file() else None
    if node.get("refdomain") == "doc" and target not in app.env.found_docs:
        # The parser has cut off what it takes for the ending of a page.
        files = [f"{target}{ending}" for ending in (".py", ".md")]
        return next((file for file in files if (root / file).is_file()), None)
    return None


def _link(app: Sphinx, file: str, line: int | None = None) -> nodes.reference:
    docname = app.env.docname
    _noted(app.env).setdefault(docname, set()).add(file)
    where = app.builder.get_relative_uri(docname, _page(file))
    anchor = f"#L-{line}" if line else ""
    return nodes.reference("", "", internal=True, refuri=where + anchor)


def _read(app: Sphinx, doctree: nodes.document) -> None:
    """Turns the links of a page that was just read."""
    for node in list(doctree.findall(lambda n: isinstance(n, nodes.Element) and "reftarget" in n)):
        file = _file_of(app, node)
        if file is not None:
            link = _link(app, file)
            link += node.children
            node.replace_self(link)
    for signature in doctree.findall(addnodes.desc_signature):
        found = _defined(app, signature)
        if found is not None:
            link = _link(app, *found)
            link["classes"].append("source-link")
            link += nodes.Text("source")
            signature += addnodes.desc_inline("py", "", "", link)


def _defined(app: Sphinx, signature: nodes.Element) -> tuple[str, int] | None:
    """File and line of a documented class or function."""
    try:
        thing: Any = importlib.import_module(signature["module"])
        for part in signature["fullname"].split("."):
            thing = getattr(thing, part)
        thing = thing.fget if isinstance(thing, property) else thing
        file = Path(inspect.getsourcefile(thing) or "").resolve()
        line = inspect.getsourcelines(thing)[1]
    except (KeyError, AttributeError, TypeError, OSError):
        return None  # A data member, or built in.
    root = Path(app.srcdir).resolve()
    return (file.relative_to(root).as_posix(), line) if root in file.parents else None


def _purge(_app: Sphinx, env: BuildEnvironment, docname: str) -> None:
    _noted(env).pop(docname, None)


def _pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The pages to make, as Sphinx's `html-collect-pages` wants them."""
    for file in sorted(set().union(*_noted(app.env).values())):
        text = (Path(app.srcdir) / file).read_text("utf-8")
        try:
            lexer = get_lexer_for_filename(file)
        except ClassNotFound:
            lexer = TextLexer()
        shown = highlight(text, lexer, HtmlFormatter(lineanchors="L"))
        body = f"<h1><code>{escape(file)}</code></h1>\n{shown}"
        yield _page(file), {"title": file, "body": body, "parents": []}, "page.html"


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("doctree-read", _read)
    app.connect("env-purge-doc", _purge)
    app.connect("html-collect-pages", _pages)
    return {"parallel_read_safe": False}
