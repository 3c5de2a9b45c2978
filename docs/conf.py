"""How the site is built: `make docs` runs `sphinx-build -c docs . build/site`.

The source is the repository's root, so that a link between two pages is the same relative link
here and where the repository is browsed. Nothing is fetched while building, and the pages ask
no other host for anything.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "site")]
# Where the kernel that runs the examples is described, and what it imports mfload from.
os.environ |= {"JUPYTER_PATH": str(ROOT / "docs" / "site"), "PYTHONPATH": str(ROOT)}

project = "mfload"
author = "the mfload developers"
version = release = re.findall(
    r'^__version__ = "(.+)"$', (ROOT / "mfload/__init__.py").read_text("utf-8"), re.M
)[0]
html_title = f"mfload {release}"
copyright = author

extensions = [
    "myst_nb",
    "sphinx_copybutton",
    "navigation",
    "notebooks",
    "sources",
]

root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "examples/README.md",
    "examples/*.py",
    "benchmarks/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
exclude_patterns = [".*", "build", "dist", "mfload", "tests", "requirements", "docs/site"]

# Strict: with -W every one of these warnings ends the build.
nitpicky = True
nitpick_ignore_regex = [
    # What other libraries and Python itself document.
    (r"py:(class|exc|obj|data)", r"(?!mfload\b)(\w+\.)*\w+"),
    # Insides: what of them is of use is said where they appear.
    (r"py:class", r"mfload\.(planning\.Plan|dtypes\.DType|index\.Piece)"),
]
show_warning_types = True

# Quotes stay what they are; two hyphens become a dash, since Sphinx writes its own so.
smartquotes_action = "D"

# Pages
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4
nb_custom_formats = {".py": "examples.reads"}
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_show_tb = True
nb_merge_streams = True
# What a framework says of the machine it runs on is no result of the example.
nb_output_stderr = "remove"

# Looks
templates_path = ["site/templates"]
html_theme = "furo"
html_static_path = ["site/static"]
html_css_files = ["mfload.css"]
html_logo = "site/static/logo.svg"
html_favicon = "site/static/logo.svg"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_show_sphinx = False
html_additional_pages = {"index": "start.html"}
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0a6b5e",
        "color-brand-content": "#0a6b5e",
    },
    "dark_css_variables": {
        "color-brand-primary": "#5ed3bf",
        "color-brand-content": "#5ed3bf",
    },
}
# The theme's own styles would switch on everybody's log.
pygments_style = "xcode"
pygments_dark_style = "github-dark"
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .go"
