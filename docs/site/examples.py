"""Reads a script in percent format (`# %%` cells) as a notebook, for the site to run and show."""

from __future__ import annotations

import jupytext
from nbformat import NotebookNode


def reads(text: str) -> NotebookNode:
    """The script's cells.

    Args:
        text: The script.

    Returns:
        A notebook for the kernel of docs/site/kernels, so that each script has a process of its
        own: TensorFlow and Paddle don't live in one.
    """
    notebook = jupytext.reads(text, fmt="py:percent")
    notebook.metadata["kernelspec"] = {
        "name": "example",
        "display_name": "example",
        "language": "python",
    }
    return notebook
