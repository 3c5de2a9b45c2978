"""Manifests as files, which change together with the data of their checkpoint.

Two checkpoints of one model have equal headers and sizes, so an old manifest beside new data would
look like damage. A kill must not leave that. So the new manifest is written under a hidden name
first, the old one is taken away before the data changes, and the new one gets its name last.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager

from mfload import errors
from mfload.formats import discovery
from mfload.saving.attributes import Attributes
from mfload.saving.drafts import Draft, fsync, written
from mfload.saving.manifests import SUFFIX
from mfload.saving.targets import Location, mode_at
from mfload.sources.local import is_cached

_MARK = re.compile(rb'\s*\{\s*"mfload_checksums"\s*:')
HEAD = 4096
_WHOLE = "; the checkpoint itself is whole and in its place, without a manifest"


def check_target(path: str, *, overwrite: bool) -> None:
    """Raises if a manifest may not be written to a path: only a manifest can be replaced."""
    if path.endswith((discovery.SUFFIX, discovery.INDEX_SUFFIX)):
        raise errors.UsageError(
            "a manifest can't take the place of a checkpoint's file",
            file=path,
            expected="another name, such as model.checksums.json",
        )
    if (mode := mode_at(path, "the manifest")) is None:
        return
    replaced = overwrite and (stat.S_ISREG(mode) or is_cached(path)) and is_manifest(path)
    # It may have been removed meanwhile, by another writer.
    if not replaced and os.path.lexists(path):
        what = "the file exists already; overwrite=True replaces it if it is a manifest"
        raise errors.TargetExistsError(what, file=path)


def is_manifest(path: str) -> bool:
    """Whether a file is a manifest, also a damaged one. Raises TargetError if it can't be read."""
    head = None
    with errors.AsTarget(path, "read the manifest"), contextlib.suppress(FileNotFoundError):
        if stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "rb", opener=_opened) as file:
                head = file.read(HEAD)
    if head is None:
        return False
    # A loss of power may leave a name without its bytes.
    return (path.endswith(SUFFIX) and not head.strip(b"\0")) or is_manifest_text(head)


def is_manifest_text(head: bytes) -> bool:
    """Whether a file that begins with `HEAD` such bytes is a manifest, also a damaged one."""
    return _MARK.match(head) is not None


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # It may be a FIFO by now.


def drafted(
    place: Location, name: str, text: bytes | None, like: Attributes | None
) -> AbstractContextManager[Draft | None]:
    """Writes a manifest, if given, to a synced draft; removes the draft if it is not published.

    A draft that needs a hidden name gets one of `place`.
    """
    if text is None:
        return contextlib.nullcontext()
    return written(text, place.at(place.hidden + secrets.token_hex(8)), place.at(name), like)


def publish(made: Draft | None, directory: int, *, replace: bool) -> None:
    """Gives a drafted manifest, if there is one, its name, and syncs the open directory."""
    if made is None:
        return
    with errors.AsTarget(made.shown, "put the manifest in its place"):
        made.publish(made.shown, replace=replace)
        fsync(directory)


@contextlib.contextmanager
def replaced(
    place: Location,
    old: Sequence[str],
    new: Draft | None,
    directory: int,
    landed: Callable[[], bool],
) -> Generator[None]:
    """Renames old manifests to hidden names, runs the body, then publishes the new manifest.

    The body puts the new data in place. If it fails and the data has not `landed`, the old
    manifests get their names back. The directory is locked and open.
    """
    away = {place.at(name): place.at(place.hidden + secrets.token_hex(8)) for name in old}
    try:
        with errors.AsTarget(place.path, "remove its old manifest"):
            for path, hidden in away.items():
                with contextlib.suppress(FileNotFoundError):  # It has gone by itself.
                    os.rename(path, hidden)
            if away:
                fsync(directory)
        yield
    except BaseException:
        if not landed():
            for path, hidden in away.items():
                with contextlib.suppress(OSError):
                    os.rename(hidden, path)
        raise
    finally:
        for hidden in away.values():
            with contextlib.suppress(OSError):
                os.unlink(hidden)
    try:
        publish(new, directory, replace=False)
    except errors.TargetError as error:
        error.message += _WHOLE
        raise
