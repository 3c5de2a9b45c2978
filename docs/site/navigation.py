"""Sphinx extension: the lists of docs/index.md are the site's navigation.

Each heading with a list of links to pages becomes a part of the menu, in the order of the page.
So the start page is plain Markdown, and there is one place to enter a new page.
"""

from __future__ import annotations

import posixpath
import re

from sphinx.application import Sphinx

_PAGES = (".md", ".py")


def menus(text: str) -> list[tuple[str, list[str]]]:
    """Sections and the pages that their lists link to.

    Args:
        text: Markdown; a section begins with `## ` or `### `.

    Returns:
        Title and targets of each section that has any, targets as written.
    """
    found: list[tuple[str, list[str]]] = []
    for section in re.split(r"^###? ", text, flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        items = re.findall(r"^- .*(?:\n  .*)*", body, re.M)
        links = [link for item in items for link in re.findall(r"\]\(([^)#]+)\)", item)]
        pages = [link for link in links if link.endswith(_PAGES)]
        if pages:
            found.append((title.strip(), pages))
    return found


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname != app.config.root_doc:
        return
    here = posixpath.dirname(docname)
    for title, pages in menus(source[0]):
        names = [posixpath.normpath(posixpath.join("/", here, page)) for page in pages]
        entries = "\n".join(posixpath.splitext(name)[0] for name in names)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{entries}\n```\n"


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
