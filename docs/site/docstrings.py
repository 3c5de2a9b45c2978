"""Sphinx extension: docstrings are read as they are written, with single backticks.

`mfload.save` becomes a link, and must lead somewhere; anything else in backticks is code. Bars
outside of them are bars: |a - b|.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

_MARKED = re.compile(r"(?<![`:\w])`([^`\n]+(?:\n[^`\n]+)?)`(?![`_])|\|")
_PUBLIC = re.compile(r"mfload(?:\.[A-Za-z]\w*)+")


def _written(found: re.Match[str]) -> str:
    if found[1] is None:
        return r"\|"
    text = " ".join(found[1].split())
    return f":py:obj:`{text}`" if _PUBLIC.fullmatch(text) else f"``{text}``"


def _process(
    _app: Sphinx, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]
) -> None:
    lines[:] = _MARKED.sub(_written, "\n".join(lines)).split("\n")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    # Before napoleon, which runs at 500, splits the text into fields.
    app.connect("autodoc-process-docstring", _process, priority=400)
    return {"parallel_read_safe": True}
