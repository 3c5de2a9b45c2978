"""Steps: which of the checkpoints that a training left in a directory is meant.

Orbax keeps each step in a directory of its own; Flax's older `save_checkpoint` wrote a msgpack file
for each, `checkpoint_<step>`, which has its name when it is whole.
"""

from __future__ import annotations

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
    if step is not None and (type(step) is not int or step < 0):
        raise errors.UsageError("step is invalid", expected="its number", found=repr(step))
    if isinstance(path, str | os.PathLike) and os.path.isdir(path):
        from mfload.formats import orbax

        directory = os.fsdecode(path)
        try:
            names = os.listdir(directory)
        except OSError as error:
            raise errors.from_os(error, directory, "list") from error
        if orbax.recognise_directory(directory, names):
            return orbax.locate(directory, step)
        files = {int(found[1]): found[0] for found in map(_FILE.fullmatch, names) if found}
        if files:
            newest = max(files) if step is None else step
            if newest in files:
                return os.path.join(directory, files[newest])
            what, there = f"there is no step {step}", ", ".join(map(str, sorted(files)[-_SHOWN:]))
            raise errors.SourceNotFoundError(what, file=directory, expected=there)
    if step is not None:
        message = "step= is for a directory with the steps of a training"
        raise errors.UsageError(message, expected="such a directory", found=path)
    return path
