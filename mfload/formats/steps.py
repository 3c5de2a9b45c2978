"""Steps: which of the checkpoints that a training left in a directory is meant.

Orbax keeps each step in a directory of its own. `flax.training.checkpoints` writes such directories
or msgpack files, `<prefix><step>`, which have their names when they are whole.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mfload import errors, sources
from mfload.options import LoadOptions
from mfload.sources.directories import Directory, LocalDirectory

if TYPE_CHECKING:
    from mfload.formats.orbax_directories import Step

_FLAX = "checkpoint_"
_HEAD = 256


def locate(
    path: Any, options: LoadOptions | None = None, step: Any = None, prefix: Any = None
) -> Any:
    """What to open for a path: the content of a step, the newest by default, or the path itself.

    Args:
        path: As the caller gave it.
        step: The number of a step, an integer or a float.
        prefix: What the names of steps begin with (see `orbax_directories.locate`).

    Raises:
        UsageError: A step or a prefix is asked for, and the path has none; or it is invalid.
        SourceNotFoundError: There is no such step; the error lists those there are.
        CheckpointError: The checkpoint was not finished, or the steps of several trainings lie
            side by side.
        SourceError: The directory can't be listed.
    """
    number = hasattr(step, "__float__") and not getattr(step, "ndim", 0)
    if step is not None and (not number or isinstance(step, bool)):
        raise errors.UsageError("step is invalid", expected="a number", found=repr(step))
    if prefix is not None and not isinstance(prefix, str):
        raise errors.UsageError("prefix is invalid", expected="a string", found=repr(prefix))
    directory: Any = None
    if sources.is_url(path) and not sources.is_checkpoint(path):
        path = sources.place(path, options)
    if isinstance(path, str | os.PathLike) and os.path.isdir(path):
        directory = LocalDirectory(os.fsdecode(path))
    elif sources.is_directory(path):
        directory = path
    if directory is not None:
        from mfload.formats import orbax_directories

        names = directory.names()
        files = [] if orbax_directories.is_checkpoint(names) else _files(directory, names, prefix)
        others = prefix is not None and _files(directory, names, None)
        if files or others or orbax_directories.recognise_directory(directory, names):
            found = orbax_directories.locate(directory, step, prefix, files)
            return found.name if isinstance(found, LocalDirectory) else found
    found = path.name if sources.is_source(path) else path
    for argument, value in (("step", step), ("prefix", prefix)):
        if value is not None:
            message = f"{argument}= is for a directory with the steps of a training"
            raise errors.UsageError(message, expected="such a directory", found=found)
    return path


def _files(directory: Directory, names: Sequence[str], prefix: str | None) -> list[Step]:
    """The steps that Flax wrote as files; another prefix than its own is known by a file's head."""
    from mfload.formats.orbax_directories import Step, numbered

    found: list[Step] = []
    known = {_FLAX: True, prefix: True}
    for name in names:
        made = numbered(name, prefix)
        if made is None or not directory.is_file(name):
            continue
        if made[0] not in known:
            known[made[0]] = _is_msgpack(directory, name)
        if known[made[0]]:
            found.append(Step(*made, name))
    return found


def _is_msgpack(directory: Directory, name: str) -> bool:
    from mfload.formats import msgpack

    with contextlib.suppress(errors.SourceError):
        file = directory.file(name)
        return msgpack.recognise(file.read(0, min(file.size, _HEAD)), name)
    return False
