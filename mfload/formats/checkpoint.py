"""The headers of the files of a checkpoint, as one index.

If an index file says which shard holds each tensor, a shard's header is read when it is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from mfload import dtypes, errors, sources
from mfload.formats import discovery, safetensors
from mfload.formats.discovery import CheckpointFiles, Opening
from mfload.formats.strict_json import brief
from mfload.index import Columns, Index, Piece, Table, TensorInfo
from mfload.options import LoadOptions
from mfload.runtime import Deadline, gc_paused
from mfload.sources import PathOrBytes
from mfload.sources.base import Source

T = TypeVar("T")

_NAME = attrgetter("name")
_HEAD = 64 << 10  # Bytes of a file that are fetched at once with the first of the others.
_NO_DTYPE, _NO_PIECE = dtypes.TABLE["U8"], Piece(-1, 0, 0)  # Of what is known by name alone.


class Problem(NamedTuple):
    """Something that is wrong with a checkpoint."""

    what: str
    file: str | None = None
    tensor: str | None = None
    expected: object = None
    found: object = None

    @staticmethod
    def of(error: errors.MfloadError) -> Problem:
        """An error as a problem."""
        values = [
            value if isinstance(value, int | None) else str(value)
            for value in (error.expected, error.found)
        ]
        return Problem(error.message, error.file, error.tensor, *values)

    def __str__(self) -> str:
        what, fields = self.what, self._asdict()
        del fields["what"]
        return str(errors.MfloadError(what, **fields))


class Headers:
    """What the headers of a checkpoint say, and what is wrong with them.

    Attributes:
        sources: Files whose header was read; pieces of tensors refer to them by number.
        tensors: The tensors by name, in file order; of two with one name, the first.
        unnamed: Tensors that the index does not name.
        copies: Other files that hold a tensor than the one of the index, by its name.
        absent: Files that the index names and that do not exist; they have no header.
    """

    def __init__(self, found: CheckpointFiles) -> None:
        self.found = found
        self.sources: list[Source] = []
        self.tensors = Table()
        self.metadata: dict[str, str] | None = None
        self.unnamed: set[str] = set()
        self.copies: dict[str, list[str]] = {}
        self.absent: list[str] = []
        self.problems: list[Problem] = []
        self.notes: list[str] = [*found.notes]

    @property
    def missing(self) -> tuple[str, ...]:
        """A line for each file that belongs to the checkpoint and does not exist."""
        return (*self.found.missing, *self.found.lines(self.absent))

    def file_of(self, info: TensorInfo) -> str:
        """The file that holds a tensor."""
        return self.sources[info.pieces[0].source].name

    def chosen(self, rows: Sequence[TensorInfo], file: str) -> Sequence[TensorInfo]:
        """The rows of a file without copies: tensors that the index has in another file."""
        placed = self.found.placed or {}
        names = rows.names if isinstance(rows, Columns) else [row.name for row in rows]
        if [*map(placed.get, names)].count(file) == len(names):  # Fast, for it is nearly always so.
            return rows
        for name in names:
            if placed.get(name, file) != file:
                self.copies.setdefault(name, []).append(file)
        return [row for row in rows if placed.get(row.name, file) == file]

    def add(
        self, what: str, info: TensorInfo, expected: object = None, found: object = None
    ) -> None:
        """Adds a problem of a tensor."""
        self.problems.append(Problem(what, self.file_of(info), info.name, expected, found))


class ShardedIndex(Index):
    """The index of shards of which an index file says what they hold.

    Only the headers of shards that are asked for are read. Tensors, columns and metadata are those
    of all headers, which are read when one of the three is needed first.
    `found` has the files as sources.
    """

    __slots__ = ("_left", "_numbers", "_searched", "_seen", "_timeout")

    def __init__(self, found: CheckpointFiles, timeout: float | None) -> None:
        self.found, self.absent = found, {}
        self._timeout, self._searched = timeout, False
        self.files, self.notes = tuple(found.names), found.notes
        self._left = found.placed or {}  # Files of the tensors; empty once all headers were read.
        self.names = self._left.keys()
        self._numbers = dict(zip(self.files, range(len(self.files)), strict=True))
        self._seen: dict[int, Table] = {}  # The headers that were read, by number of the file.

    def __getattr__(self, name: str) -> Any:
        if name not in Index.__slots__:
            raise AttributeError(name)
        # The field is not set yet.
        whole = self._bounded(partial(_whole, self.found, before=self._before))
        self.tensors, self.columns, self.names = whole.tensors, whole.columns, whole.names
        self.metadata, self.notes, self._left = whole.metadata, whole.notes, {}
        return getattr(whole, name)

    @property
    def _before(self) -> list[Source]:
        """Files whose headers were read earlier: their data may be in use."""
        files: Sequence[Any] = self.found.files
        return [*map(files.__getitem__, self._seen)]

    @property
    def every(self) -> Index:
        """The index of all tensors, also of those in missing shards."""
        with suppress(errors.ShardNotFoundError):
            _ = self.tensors
            return self
        whole = partial(_whole, copy(self.found), missing_ok=True, before=self._before)
        return self._bounded(lambda: whole().every)

    @property
    def searched(self) -> Collection[str]:
        """The names that are searched: of the index file, and what shards hold beside them.

        A shard is believed to hold what the index says, if its header has as many tensors.
        """
        if self._left and not self._searched:
            self._bounded(self._search)
        return self.names

    def _search(self) -> None:
        listed = Counter(self._left.values())
        files: list[Any] = list(self.found.files)
        _ask_ahead(files)
        more: list[int] = []
        absent: list[str] = []
        for number, source in enumerate(files):
            try:
                if number not in self._seen and safetensors.count(source) != listed[source.name]:
                    more.append(number)
            except errors.SourceNotFoundError:
                absent.append(source.name)
        absent += self._read_new(more) if more else ()
        self.notes = _absent_notes(self.found.lines(absent))
        beside: dict[str, list[str]] = {}
        for number in sorted(self._seen):
            for name in self._seen[number]:
                if name not in self._left:
                    beside.setdefault(name, []).append(self.files[number])
        if beside:
            self.notes += (_beside(beside),)
            self.names = {**self._left, **beside}.keys()
            # All headers are needed to refuse one that two files hold.
            alone = {name: files[0] for name, files in beside.items() if len(files) == 1}
            self._left = {**self._left, **alone}
        self._searched = True

    def __contains__(self, name: object) -> bool:
        return name in self.names or name in self.searched

    def __iter__(self) -> Iterator[str]:
        return iter(self.searched)

    def __len__(self) -> int:
        return len(self.searched)

    def __getitem__(self, name: str) -> TensorInfo:
        """The row of a name; reads the header of its shard."""
        file = self._left.get(name) if type(name) is str else None
        if file is not None:
            number = self._numbers[file]
            self._read({number: [name]})
            if name in self._seen[number]:
                return self._seen[number][name]
        return super().__getitem__(name)  # All headers tell what is wrong.

    def take(self, names: Collection[str]) -> Columns:
        """Some of the tensors, in the index's order; reads the headers of their shards."""
        shards: dict[int, list[str]] = {}
        for name in names:
            file = self._left.get(name)
            if file is None:
                return super().take(names)
            shards.setdefault(self._numbers[file], []).append(name)
        self._read(shards)
        taken = Columns()
        for number in sorted(shards):
            there = self._seen[number].numbers
            if not there.keys() >= set(shards[number]):
                return super().take(names)
            places = sorted(map(there.__getitem__, shards[number]))
            taken.extend(self._seen[number].columns.take(places))
        return taken

    def _read(self, wanted: Mapping[int, Collection[str]]) -> None:
        """Reads the headers of files that hold the tensors wanted, unless they were read."""
        new = [number for number in wanted if number not in self._seen]
        if not new:
            return
        absent = self._bounded(partial(self._read_new, new))
        if absent:
            gone = {self._numbers[file] for file in absent}
            names = [name for number in wanted if number in gone for name in wanted[number]]
            raise self.found.without(absent, names)

    def _read_new(self, numbers: Sequence[int]) -> list[str]:
        """Reads headers; returns the files that do not exist."""
        files: list[Any] = [self.found.files[number] for number in numbers]
        if len(files) > 1:
            _ask_ahead(files)
        new: dict[int, Table] = {}  # They count only once `check_unchanged` has passed.
        for number, source in zip(numbers, files, strict=True):
            with suppress(errors.SourceNotFoundError):
                new[number] = read_headers(CheckpointFiles([source]), number).tensors
                source.keep(True)  # Behind a URL: forgets the bytes of the header.
        there = [source for number, source in zip(numbers, files, strict=True) if number in new]
        check_unchanged(self.found, there, self._before)
        self._seen |= new
        return [self.files[number] for number in numbers if number not in new]

    def _bounded(self, call: Callable[[], T]) -> T:
        name = self.found.name
        with gc_paused():
            try:
                return Deadline(self._timeout).bound(call, "reading headers", name)
            except MemoryError as error:
                raise _no_memory(error, name) from None


class PartialIndex(Index):
    """The index of the shards that exist, of a checkpoint that misses some.

    A tensor that may lie in a missing shard is not taken for one that does not exist. Unless
    `missing_ok`, all tensors, and searches in their names, are refused too.
    `found` has the files as sources.
    """

    __slots__ = ("_lines", "_missing_ok", "_there")

    def __init__(
        self, found: CheckpointFiles, there: Index, lines: tuple[str, ...], *, missing_ok: bool
    ) -> None:
        self.found, self._there, self._lines, self._missing_ok = found, there, lines, missing_ok
        self.absent = {}
        self.files, self.names, self.metadata = there.files, there.names, there.metadata
        self.notes = (*there.notes, *_absent_notes(lines))

    def __getattr__(self, name: str) -> Any:
        if name in ("columns", "tensors"):
            return getattr(self._every(), name)
        raise AttributeError(name)

    def _every(self) -> Index:
        if not self._missing_ok:
            raise discovery.missing(self.found.name, self._lines)
        return self._there

    @property
    def searched(self) -> Collection[str]:
        """The names that are searched for a pattern; raises if some are not known."""
        return self._every().names

    def take(self, names: Collection[str]) -> Columns:
        """Some of the tensors, in the index's order."""
        return self._there.take(names)

    def __getitem__(self, name: str) -> TensorInfo:
        """The row of a name; raises ShardNotFoundError if it may be in a missing shard."""
        if name in self._there.names:
            return self._there[name]
        placed = self.found.placed
        if placed is not None and name not in placed:
            return self._there[name]  # No file has it.
        raise discovery.missing(self.found.name, self._lines, [name])

    @property
    def every(self) -> Index:
        """The index of all tensors, also those that an index file lists in missing shards."""
        if self.found.placed is None:
            raise discovery.missing(self.found.name, self._lines)
        gone = {*self.found.placed.values()} - {*self.files}
        absent = {name: file for name, file in self.found.placed.items() if file in gone}
        table = Table(self._there.columns[:])
        table.add([TensorInfo(name, _NO_DTYPE, (), (_NO_PIECE,)) for name in absent])
        return Index(self.files, table, self.metadata, self.notes, self.found, absent)


def read(
    path: PathOrBytes | Sequence[PathOrBytes],
    options: LoadOptions | None = None,
    *,
    missing_ok: bool = False,
) -> tuple[Index, list[Source]]:
    """Reads the headers of a checkpoint; returns the index, and the source of each of its files.

    See `choose`.
    """
    _, index, files = choose(path, options, attrgetter("tensors"), missing_ok=missing_ok)
    return index, files


def read_every(
    path: PathOrBytes | Sequence[PathOrBytes], options: LoadOptions | None = None
) -> tuple[Index, list[Source]]:
    """The same for a call that needs some of the tensors, by what it makes of their names.

    Shards may be missing if an index file lists what they hold; `Index.require` says which of the
    tensors that turn out to be needed lie in them.
    """
    index, _, files = choose(path, options, attrgetter("every"), missing_ok=True)
    return index, files


def choose(
    path: PathOrBytes | Sequence[PathOrBytes],
    options: LoadOptions | None,
    ask: Callable[[Index], T],
    *,
    missing_ok: bool = False,
) -> tuple[T, Index, list[Source]]:
    """Opens a checkpoint, and asks its index for something, for which it may read headers.

    Returns the answer, the index, and the source of each file. The index may read more headers
    when it is asked again. Without an index file, all headers are read first.

    If a writer replaces the checkpoint meanwhile, half of the shards may be looked at before and
    half after. Sources notice that, and so do names that do not fit the index. What tells it from
    damage is that the index changed too.

    Tensors whose shards exist can be had though other shards are missing. To ask for all of them,
    or for one whose shard is missing, raises ShardNotFoundError. With `missing_ok`, all tensors are
    those of the shards that exist, and the notes of the index tell what is missing.

    Raises:
        UsageError: `path` is not a path.
        SourceError: A file is missing or can't be read.
        SourceChangedError: Files were replaced while their headers were read.
        HeaderError: A header is malformed.
        CheckpointError: The files disagree; one error names all offenders.
        MemoryLimitError: The headers do not fit in memory.
        LoadTimeoutError: The timeout of the options passed.
    """
    if options is not None and options.deadline.seconds is not None:
        rest = options.replace(deadline=Deadline(None))
        call = partial(choose, path, rest, ask, missing_ok=missing_ok)
        return options.deadline.bound(call, "reading headers", sources.shown(path))
    if isinstance(path, Opening):
        accept = path.accept

        def accepted(index: Index) -> T:
            if accept is not None:
                accept(index)
            return ask(index)

        found = choose(path.located(options), options, accepted, missing_ok=missing_ok)
        path.opened = found[1:]
        return found
    before = discovery.state(path)
    try:
        found = discovery.find(path, options, before)
        if missing_ok or found.placed is None or len(found.files) == 1:
            index = _whole(found, missing_ok=missing_ok)
        else:
            index = ShardedIndex(found, options and options.timeout)
        files: Any = found.files
        return ask(index), index, files
    except (errors.SourceError, errors.FormatError) as error:
        discovery.check_state(path, before)
        if isinstance(error, errors.SourceNotFoundError):
            from mfload.formats import hints

            hints.explain_path(error, path)
        raise
    except MemoryError as error:
        raise _no_memory(error, sources.shown(path)) from None


def _no_memory(error: MemoryError, name: str | None) -> MemoryError:
    if isinstance(error, errors.MfloadError):
        return error
    return errors.MemoryLimitError("the headers do not fit in memory", file=name)


def _whole(
    found: CheckpointFiles, *, missing_ok: bool = False, before: Sequence[Source] = ()
) -> Index:
    """The index of all headers; the files become sources. For `before` see `check_unchanged`."""
    seen = read_headers(found)
    if len(seen.sources) > 1 or found.index is not None:
        check_unchanged(found, seen.sources, before)
    missing = seen.missing if found.missing or seen.absent else ()
    if seen.problems:
        what = "the files of the checkpoint disagree"
        problems = (*missing, *map(str, seen.problems))
        raise errors.CheckpointError(what, file=found.name, problems=problems)
    if missing and not (seen.tensors if missing_ok else found.placed is None):
        raise discovery.missing(found.name, missing)
    found.files = seen.sources
    if seen.unnamed:
        seen.notes.append(_beside(seen.unnamed))
    if seen.copies:
        count, name = errors.counted(len(seen.copies), "tensor"), next(iter(seen.copies))
        which = f"{brief(name)} in {', '.join(seen.copies[name])}"
        seen.notes.append(f"copies that the index does not choose, not loaded: {count}, {which}")
    files, again = tuple(map(_NAME, seen.sources)), None if found.directory is None else found
    made = Index(files, seen.tensors, seen.metadata, tuple(seen.notes), again)
    return PartialIndex(found, made, missing, missing_ok=missing_ok) if missing else made


def _beside(names: Collection[str]) -> str:
    return f"in the shards but not in the index: {errors.counted(len(names), 'tensor')}"


def _absent_notes(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"a shard is missing: {line}" for line in lines)


def check_unchanged(
    found: CheckpointFiles, read: Sequence[Source], before: Sequence[Any] = ()
) -> None:
    """Raises SourceChangedError if headers may be of several versions of a checkpoint.

    The first file may have been replaced while the header of the last was `read`, and so may the
    index. Indexes of two versions may have the same bytes and ETag, so a server is also asked for
    files whose headers were read `before`, since their data may be in use. The versions of other
    files are compared when their data is read.
    """
    index = [] if found.index is None else [found.index]
    local = [each for each in read[:-1] if each.file is not None]
    remote = [each for each in before if each.file is None]
    try:
        sources.together(sources.check_now, [*local, *index, *remote])
    except errors.SourceChangedError:
        for each in index:  # If the index changed too, the error names it.
            sources.check_now(each)
        raise


def read_headers(found: CheckpointFiles, first: int = 0, *, every: bool = False) -> Headers:
    """Reads the header of each file and compares them with the index.

    `first` is the number of the first file in its index.

    `every`: a file that can't be read is a problem, and the others are read; by default it raises.
    One that changed meanwhile raises in any case.
    """
    seen = Headers(found)
    tensors, problems = seen.tensors, seen.problems
    if found.directory is not None and found.name is not None:
        from mfload.formats import structure

        before: Any = found.files  # Those of an opened checkpoint that another process has now.
        for each in before:
            each.check()
        found.files, rows, seen.metadata = found.directory(first)
        items = structure.items(seen.metadata or {}, found.name)
        if other := [name for name, held in items.items() if not held]:
            seen.notes.append(f"items that are not read: {', '.join(other)}")
        seen.sources += found.files
        seen.tensors.add(rows)
        return seen
    files: Sequence[str | Source] = found.files
    if len(files) > 1:
        files = _ask_ahead(files)
    for file in files:
        try:
            source = sources.local_file(file) if isinstance(file, str) else file
            if source is not file and len(found.files) > 1:
                source.keep(True)  # To open it once more takes as long as to read a header.
            reader = safetensors
            if not source.name.endswith(discovery.SUFFIX):
                from mfload.formats import base

                reader = base.find(source)
            rows, strings = reader.read(source, first + len(seen.sources))
        except (errors.SourceError, errors.FormatError) as error:
            gone = isinstance(error, errors.SourceNotFoundError)
            if gone and found.placed is not None:
                seen.absent.append(file if isinstance(file, str) else file.name)
                continue
            changed = isinstance(error, errors.SourceChangedError)
            if not every or changed or (gone and len(found.files) == 1):
                raise
            problems.append(Problem.of(error))
            continue
        seen.sources.append(source)
        if strings is not None:
            seen.metadata = {**(seen.metadata or {}), **strings}
        if found.placed is not None:
            rows = seen.chosen(rows, source.name)
        for row in tensors.add(rows):
            holders = f"{seen.file_of(tensors[row.name])} and {source.name}"
            what, expected = "two files hold the tensor", "one file"
            if found.placed is not None:
                expected += ", or an index that lists the tensor"
            problems.append(Problem(what, None, row.name, expected, holders))
    if found.placed is not None:
        _compare_index(seen, found.placed)
    return seen


def _ask_ahead(files: Sequence[str | Source]) -> Sequence[str | Source]:
    """Sends the first requests to servers and network disks at once.

    A failure is met again where it is handled. Returns the files; those of a network disk are
    sources, which stay open.
    """

    def ask(source: Any) -> None:
        with suppress(errors.SourceError):
            source.ask_ahead() if hasattr(source, "ask_ahead") else source.identity
            if source.file is not None:
                source.read(0, min(source.size, _HEAD))  # For the page cache.

    if isinstance(files[0], str) and sources.local_file(files[0], now=False).costs.concurrency:
        made = (sources.local_file(e, now=False) if isinstance(e, str) else e for e in files)
        files = list(made)
    sources.together(ask, (each for each in files if not isinstance(each, str)))
    return files


def _compare_index(seen: Headers, placed: dict[str, str]) -> None:
    files, held = {source.name for source in seen.sources}, seen.tensors.numbers.keys()
    for name in () if placed.keys() <= held else placed:
        if name not in held and (file := placed[name]) in files:
            what, holders = "the tensor is not where the index says", seen.copies.pop(name, None)
            where = " and ".join(holders or ["no file"])
            seen.problems.append(Problem(what, seen.found.name, name, file, where))
    seen.unnamed = held - placed.keys()
    complete = not seen.unnamed and len(files) == len(seen.found.files)
    columns = seen.tensors.columns  # The column has bytes of the first piece.
    total = sum(columns.nbytes)
    total += sum(row.nbytes - row.pieces[0].nbytes for row in columns.others.values())
    if complete and seen.found.total not in (None, total):
        # Off in many published checkpoints, and no loader uses it.
        given = brief(seen.found.total)
        seen.notes.append(f"the index gives a total_size of {given}, its tensors take {total}")
