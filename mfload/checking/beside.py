"""What lies beside the weights of a model, such as its config and tokenizer, and goes with them.

These are the files in the directory of a model as Hugging Face lays it out, one with a config,
whose names are not those of weights. Code of the model (`*.py`) is copied, and never run.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import secrets
from collections.abc import Generator

from mfload import errors
from mfload.formats import discovery
from mfload.formats.discovery import CheckpointFiles
from mfload.report import human
from mfload.saving import manifests
from mfload.saving.attributes import Attributes
from mfload.saving.drafts import Draft, written
from mfload.saving.publishing import SaveTarget
from mfload.sources.base import Source
from mfload.sources.directories import Directory, LocalDirectory

_CONFIG = "config.json"  # Ends a name in the directory of a model, such as adapter_config.json.
_BROUGHT = re.compile(
    r"[^.].*\.(json|jsonl|txt|model|jinja|py|md|tiktoken|bpe|ya?ml)|vocab\..+|(LICEN[CS]E|NOTICE).*"
)
_LEFT = (".index.json", manifests.SUFFIX)
_LARGEST = 64 << 20
_MOST = 256  # Files.


def find(source: CheckpointFiles, target: str) -> tuple[list[Source], list[str]]:
    """The files beside a checkpoint that go with it to a directory, and notes.

    Raises SourceError if the directory can't be listed.
    """
    directory = _directory(source)
    if source.directory is not None or directory is None:
        return [], []
    names = directory.names()
    same = isinstance(directory, LocalDirectory) and _same(directory.name, target)
    if same or not any(name.endswith(_CONFIG) for name in names):
        return [], []
    names = [n for n in names if _BROUGHT.fullmatch(n) and not n.endswith(_LEFT)]
    # Links are followed: the cache of the Hugging Face client is made of them. One that leads
    # nowhere is no file.
    files = [directory.file(name) for name in names if directory.is_file(name)]
    fitting = [file for file in files if file.size <= _LARGEST][:_MOST]
    left = [posixpath.basename(file.name) for file in files if file not in fitting]
    note = f"not copied, for more than {human(_LARGEST)} or {_MOST} files: {', '.join(left[:8])}"
    return fitting, [note] if left else []


def _directory(source: CheckpointFiles) -> Directory | None:
    """The directory of a checkpoint; None if there is none, or if the files are a part of it."""
    if source.folder is not None:
        return source.folder
    name = source.name or ""
    if os.path.isdir(name):
        return LocalDirectory(name)
    # An index, or a file, which may be one shard of several.
    one = posixpath.basename(name)
    if source.index_file is None and f"{discovery.stem(one)}{discovery.SUFFIX}" != one:
        return None
    first = source.index or next(iter(source.files), "")
    if not isinstance(first, str) and first.file is None:
        return getattr(first, "directory", None)
    directory = os.path.dirname(os.path.abspath(name))
    return LocalDirectory(directory) if os.path.isdir(directory) else None


def _same(directory: str, target: str) -> bool:
    return os.path.realpath(directory) == os.path.realpath(target)


class Beside:
    """Copies of files beside the weights, on their way to a directory.

    Args:
        files: Sources of the files.
        target: Where the weights go.

    Attributes:
        names: Their names.

    Raises:
        TargetExistsError: Another file has one of the names, and may not be replaced.
    """

    def __init__(self, files: list[Source], target: SaveTarget) -> None:
        self.names = [posixpath.basename(file.name) for file in files]
        self._target, self._drafts = target, dict[str, Draft]()
        self._place = place = target.place
        self._files = {place.at(name): file for name, file in zip(self.names, files, strict=True)}
        place.check_names(self.names)
        for path, file in self._files.items():
            there = not target.overwrite and os.path.lexists(path)
            if there and _holds(path, _read(file)) is False:
                raise _exists(path)

    @contextlib.contextmanager
    def written(self) -> Generator[None]:
        """Writes all of them under no names; those that are not published in here are gone."""
        with contextlib.ExitStack() as stack:
            hidden = self._place.at(self._place.hidden + secrets.token_hex(8))
            for number, (path, file) in enumerate(self._files.items()):
                raw = _read(file)
                if _holds(path, raw):
                    continue
                given = raw, f"{hidden}-beside-{number}", path, Attributes.of([path])
                self._drafts[path] = stack.enter_context(written(*given))
            yield

    @contextlib.contextmanager
    def published(self) -> Generator[None]:
        """Gives them their names, which new ones lose again if the weights don't get theirs."""
        new: list[str] = []
        try:
            for path, draft in self._drafts.items():
                there = os.path.lexists(path)
                draft.publish(path, replace=self._target.overwrite)
                if not there:
                    new.append(path)
            yield
        except BaseException as error:
            for path in () if self._target.placed() else new:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            if isinstance(error, FileExistsError) and not isinstance(error, errors.MfloadError):
                raise _exists(str(error.filename2 or error.filename)) from None
            if isinstance(error, OSError) and not isinstance(error, errors.MfloadError):
                raise errors.from_target(error, self._place.directory, "name a copy") from error
            raise


def _read(file: Source) -> bytes:
    return file.read(0, file.size)


def _holds(path: str, raw: bytes) -> bool | None:
    """Whether a file of the target has these bytes; None if there is no file."""
    about = errors.AsTarget(path, "read the file that is there")
    with about, contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        return file.read(len(raw) + 1) == raw
    return None


def _exists(path: str) -> errors.TargetExistsError:
    return errors.TargetExistsError(
        "another file has the name of one that lies beside the weights; overwrite=True replaces "
        "it, only_weights=True leaves it",
        file=path,
    )
