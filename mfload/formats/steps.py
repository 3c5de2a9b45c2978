"""Steps: which of the checkpoints that a training left in a directory is meant.

Orbax keeps each step in a directory of its own; Flax's older `save_checkpoint` wrote a msgpack file
for each, `checkpoint_<step>`, which has its name when it is whole.
"""

from __future__ import annotations

import operator
import os
import re
from typing import Any

from mfload import errors

_FILE = re.compile(r"checkpoint_(\d{1,18})")
_SHOWN = 20


def locate(path: Any, step: int | None = None) -> Any:
    """What to open for a path: the item of a step, the newest by default, or the path itself.

    Raises:
        UsageError: A step is asked for, and the path has none.
        SourceNotFoundError: There is no such step; the error lists those there are.
        CheckpointError: The checkpoint of Orbax was not finished, or has several items.
        SourceError: The directory can't be listed.
    """
    try:
        step = None if step is None else operator.index(step)
    except TypeError:
        raise errors.UsageError("step is invalid", expected="a number", found=repr(step)) from None
    if isinstance(path, str | os.PathLike) and os.path.isdir(path):
        from mfload.formats import orbax

        directory = os.fsdecode(path)
        names = orbax.listed(directory)
        named = {int(found[1]): found[0] for found in map(_FILE.fullmatch, names) if found}
        places = {number: os.path.join(directory, name) for number, name in named.items()}
        files = {number: place for number, place in places.items() if os.path.isfile(place)}
        newest = max(files, default=-1) if step is None else step
        if orbax.recognise_directory(directory, names):  # Flax may write both, one after the other.
            beside = orbax.steps(directory, names) if files else None
            later = step is None and beside and max(beside[0], default=-1) > newest
            if newest not in files or later:
                return orbax.locate(directory, step)
        if newest in files:
            return files[newest]
        if files:
            what, there = f"there is no step {step}", ", ".join(map(str, sorted(files)[-_SHOWN:]))
            raise errors.SourceNotFoundError(what, file=directory, expected=there)
    if step is not None:
        message = "step= is for a directory with the steps of a training"
        raise errors.UsageError(message, expected="such a directory", found=path)
    return path
