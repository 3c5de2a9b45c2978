"""The headers of all files of a checkpoint, as one index."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from mfload import errors, sources
from mfload.formats import discovery, safetensors, strict_json
from mfload.formats.discovery import CheckpointFiles, Path
from mfload.index import Index, Table, TensorInfo
from mfload.load_options import LoadOptions
from mfload.sources.base import Source

if TYPE_CHECKING:
    from mfload.formats.problems import Problem

_TRIES = 5
_NAME = attrgetter("name")


class Headers:
    """What the headers of a checkpoint say, and what is wrong with them.

    Attributes:
        sources: Files whose header was read; pieces of tensors refer to them by number.
        tensors: The tensors by name, in file order; of two with one name, the first.
        unnamed: Tensors that the index does not name.
    """

    def __init__(self, found: CheckpointFiles) -> None:
        self.found = found
        self.sources: list[Source] = []
        self.tensors = Table()
        self.metadata: dict[str, str] | None = None
        self.unnamed: set[str] = set()
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def file_of(self, info: TensorInfo) -> str:
        """The file that holds a tensor."""
        return self.sources[info.pieces[0].source].name

    def add(
        self, what: str, info: TensorInfo, expected: object = None, found: object = None
    ) -> None:
        """Adds a problem of a tensor."""
        self.problem(what, self.file_of(info), info.name, expected, found)

    def problem(self, *fields: Any) -> None:
        """Adds a problem, by its fields."""
        from mfload.formats.problems import Problem

        self.problems.append(Problem(*fields))


def read(
    path: Path | Sequence[Path], options: LoadOptions | None = None
) -> tuple[Index, list[Source]]:
    """Reads the headers of a checkpoint; returns the index, and the source of each of its files.

    They are read again if a writer replaced the checkpoint meanwhile: half of the shards may have
    been looked at before and half after. Sources notice that, and so do names that do not fit the
    index. What tells it from damage is that the index changed too.

    Raises:
        UsageError: `path` is not a path.
        SourceError: A file is missing or can't be read.
        HeaderError: A header is malformed.
        CheckpointError: The files disagree; one error names all offenders.
        MemoryLimitError: The headers do not fit in memory.
        LoadTimeoutError: The timeout of the options passed.
    """
    if options is None or options.deadline.seconds is None:
        return _read(path, options)
    call, name = partial(_read, path, options), sources.shown(path)
    return options.deadline.bound(call, "reading headers", name)


def _read(path: Path | Sequence[Path], options: LoadOptions | None) -> tuple[Index, list[Source]]:
    for left in reversed(range(_TRIES)):
        before = discovery.state(path)
        try:
            seen = read_headers(discovery.find(path, options))
            # The first may have been replaced while the last was read.
            for source in seen.sources[:-1]:
                if source.file is not None:  # Other sources compare versions with each answer.
                    source.check()
            missing = seen.found.missing
            if seen.problems:
                what = "the files of the checkpoint disagree"
                problems = (*missing, *map(str, seen.problems))
                raise errors.CheckpointError(what, file=seen.found.name, problems=problems)
            if missing:
                what = "shards are missing"
                raise errors.ShardNotFoundError(what, file=seen.found.name, problems=missing)
            if seen.unnamed:
                count = len(seen.unnamed)
                seen.notes.append(f"{count} tensors are in the shards but not in the index")
            index = Index(
                tuple(map(_NAME, seen.sources)), seen.tensors, seen.metadata, tuple(seen.notes)
            )
            return index, seen.sources
        except (errors.SourceError, errors.FormatError) as error:
            if left and discovery.state(path) != before:
                continue
            if isinstance(error, errors.SourceNotFoundError):
                from mfload.formats import hints

                hints.explain_path(error, path)
            raise
        except MemoryError as error:
            if isinstance(error, errors.MfloadError):
                raise
            what, name = "the headers do not fit in memory", sources.shown(path)
            raise errors.MemoryLimitError(what, file=name) from None
    raise AssertionError("unreachable")


def read_headers(found: CheckpointFiles, *, every: bool = False) -> Headers:
    """Reads the header of each file and compares them with the index.

    `every`: a file that can't be read is a problem, and the others are read; by default it raises.
    """
    seen = Headers(found)
    tensors, problems = seen.tensors, seen.problems
    if len(found.files) > 1:
        _ask_ahead(found)
    for file in found.files:
        try:
            source = sources.local_file(file) if isinstance(file, str) else file
            reader = safetensors
            if not source.name.endswith(discovery.SUFFIX):
                from mfload.formats import base

                reader = base.find(source)
            rows, strings = reader.read(source, len(seen.sources))
        except (errors.SourceError, errors.FormatError) as error:
            alone = len(found.files) == 1 and isinstance(error, errors.SourceNotFoundError)
            if alone or not every:
                raise
            from mfload.formats.problems import Problem

            problems.append(Problem.of(error))
            continue
        seen.sources.append(source)
        if strings is not None:
            seen.metadata = {**(seen.metadata or {}), **strings}
        for row in tensors.add(rows):
            holders = f"{seen.file_of(tensors[row.name])} and {source.name}"
            seen.problem("two files hold the tensor", None, row.name, "one file", holders)
    if found.placed is not None:
        _compare_index(seen, found.placed)
    return seen


def _ask_ahead(found: CheckpointFiles) -> None:
    """Sends the first requests to servers at once; a failure is met again where it is handled."""

    def ask(source: Source) -> None:
        with suppress(errors.SourceError):
            source.identity  # noqa: B018

    sources.together(ask, (each for each in found.files if not isinstance(each, str)))


def _compare_index(seen: Headers, placed: dict[str, str]) -> None:
    paths = [source.name for source in seen.sources]
    files = set(paths)
    numbers, holders = seen.tensors.numbers, seen.tensors.columns.sources
    for name, file in placed.items():
        number = numbers.get(name)
        holder = None if number is None else paths[holders[number]]
        if holder != file and file in files:
            what = "the tensor is not where the index says"
            seen.problem(what, seen.found.name, name, file, holder or "no file")
    seen.unnamed = seen.tensors.keys() - placed.keys()
    complete = not (seen.unnamed or seen.found.missing) and len(files) == len(seen.found.files)
    total = sum(row.nbytes for row in seen.tensors.values())
    if complete and seen.found.total not in (None, total):
        # Off in many published checkpoints, and no loader uses it.
        given = strict_json.brief(seen.found.total)
        seen.notes.append(f"the index gives a total_size of {given}, its tensors take {total}")
