"""Sphinx extension: each example is offered as a notebook, by a link below its title."""

from __future__ import annotations

import posixpath
from pathlib import Path

import jupytext
from docutils import nodes
from sphinx.application import Sphinx

import examples

_KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def _link(app: Sphinx, doctree: nodes.document) -> None:
    """Puts the link below the title of a page that was made of a script."""
    docname = app.env.docname
    if Path(app.env.doc2path(docname)).suffix != ".py":
        return
    name = f"{posixpath.basename(docname)}.ipynb"
    link = f'<a class="notebook" href="{name}" download>Notebook: {name}</a>'
    title = next(iter(doctree.findall(nodes.title)))
    below = nodes.paragraph("", "", nodes.raw("", link, format="html"))
    title.parent.insert(title.parent.index(title) + 1, below)


def _write(app: Sphinx, error: Exception | None) -> None:
    """Writes the notebooks beside the pages."""
    for docname in () if error else app.env.found_docs:
        script = Path(app.env.doc2path(docname))
        if script.suffix == ".py":
            notebook = examples.reads(script.read_text("utf-8"))
            notebook.metadata["kernelspec"] = _KERNEL
            jupytext.write(notebook, Path(app.outdir) / f"{docname}.ipynb")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("doctree-read", _link)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True}
