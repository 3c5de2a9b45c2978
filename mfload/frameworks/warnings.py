"""Telling: warnings that point at the line of the user's own that called mfload."""

from __future__ import annotations

import inspect
import os
import warnings
from pathlib import Path

_HOME = str(Path(__file__).parents[1]) + os.sep


def warn(message: str) -> None:
    """Warns of what is no error and is hardly meant.

    Args:
        message: What is amiss, and what to do.

    Raises:
        UserWarning: Where the user made errors of warnings.
    """
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_HOME):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
