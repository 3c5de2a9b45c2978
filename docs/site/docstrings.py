"""Sphinx extension: docstrings are read as they are written, with single backticks.

`mfload.save` becomes a link, and must lead somewhere; anything else in backticks is code.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

_ONCE = re.compile(r"(?<![`:\w])`([^`\n]+(?:\n[^`\n]+)?)`(?![`_])")
_PUBLIC = re.compile(r"(mfload(?:\.[A-Za-z]\w*)+)(\(\))?")


def _written(found: re.Match[str]) -> str:
    text = " ".join(found[1].split())
    name = _PUBLIC.fullmatch(text)
    return f":py:obj:`~{name[1]}`".replace("~mfload", "mfload") if name else f"``{text}``"


def _process(
    _app: Sphinx, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]
) -> None:
    lines[:] = _ONCE.sub(_written, "\n".join(lines)).split("\n")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    # Before napoleon, which runs at 500, splits the text into fields.
    app.connect("autodoc-process-docstring", _process, priority=400)
    return {"parallel_read_safe": True}
