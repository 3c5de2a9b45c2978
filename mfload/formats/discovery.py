"""Which files make up a checkpoint: a file, a directory, an index, a list."""

from __future__ import annotations

import collections
import contextlib
import operator
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mfload import errors, sources
from mfload.formats.safetensors import INDEX_SUFFIX, SUFFIX, read_index
from mfload.formats.strict_json import brief
from mfload.options import LoadOptions
from mfload.sources import PathOrBytes
from mfload.sources.base import Source

if TYPE_CHECKING:
    from mfload.index import Index
    from mfload.sources.directories import Directory

State = tuple[bool, list[str], list[Any]]
"""What changes when the files of a checkpoint are replaced: whether the path is a directory, the
names in the directory if a load looks at them, and the versions of files that it looks at first."""


_BYTES = (bytes, bytearray, memoryview)
_SINGLE = (str, os.PathLike, *_BYTES)

# Names that stand for a whole checkpoint. Two of them side by side hold two versions of a model,
# or a model and its adapter, and loading both is never what was meant.
_WHOLE = frozenset({"model", "consolidated", "adapter_model", "pytorch_model",
                    "diffusion_pytorch_model", "pytorch_lora_weights", "optimizer"})  # fmt: skip

_VERSION = operator.attrgetter("st_dev", "st_ino", "st_mtime_ns")
_HIDDEN = ".mfload-"  # Of saves: see `unfinished`.
_ONE_ARRAY = ".npy"
_TREE = ".msgpack"
MARKED = re.compile(r"(.+)-[0-9a-f]{8}-\d{5,}-of-\d{5,}" + re.escape(SUFFIX))
"""Names of shards in a store (see `saving.uploads`), which an index alone makes a checkpoint."""
_FILES = (SUFFIX, INDEX_SUFFIX, ".npz", _ONE_ARRAY, _TREE)
_SHARD = r"(?P<stem>.*?)[-_.]?(?P<number>\d+)(-of-(?P<total>\d+))?"


class CheckpointFiles:
    """The files of a checkpoint.

    Attributes:
        files: Paths of local files, and other sources, in the order in which they are read.
        placed: The file of each tensor, if an index says so.
        missing: A line for each file that belongs to it by its number and does not exist. Of those
            that an index names, reading the headers tells.
        name: What stands for all of them in an error; None for a list.
        index: The index file, if there is one.
        directory: What reads a checkpoint that is a directory, `name`, or stands for several
            sources, given the number of the first (see `DirectoryFormat.read_directory`). It knows
            the files, and they are here once it was read.
        folder: The directory that was given, where files of weights were found in it.
        notes: What a user should know of them.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self,
        files: Sequence[str | Source],
        placed: dict[str, str] | None = None,
        missing: tuple[str, ...] = (),
        name: str | None = None,
        index: Source | None = None,
        total: Any = None,
        directory: Callable[[int], Any] | None = None,
        folder: Directory | None = None,
    ) -> None:
        self.files, self.placed, self.missing = files, placed, missing
        self.name, self.index, self.total = name, index, total
        self.directory, self.folder = directory, folder

    @property
    def names(self) -> list[str]:
        """Names of the files."""
        return [each if isinstance(each, str) else each.name for each in self.files]

    @property
    def index_file(self) -> str | None:
        """Path of the index; None if there is none."""
        return None if self.placed is None else self.name

    def lines(self, absent: Collection[str], names: Iterable[str] | None = None) -> tuple[str, ...]:
        """A line for each file that the index names and that does not exist, with tensors in it.

        `names`: those that were asked for. Default: all.
        """
        held: dict[str, list[str]] = {file: [] for file in absent}
        placed = self.placed or {}
        for name in placed if names is None else names:
            if placed.get(name) in held:
                held[placed[name]].append(name)
        directory = os.path.join(os.path.dirname(self.name or ""), "")
        lines: list[str] = []
        for file, mine in held.items():
            problem = "is a broken link" if os.path.islink(file) else "does not exist"
            lines.append(named_by_index(file.removeprefix(directory), problem, len(mine), mine[0]))
        return tuple(lines)

    def without(self, absent: Collection[str], wanted: Sequence[str]) -> errors.ShardNotFoundError:
        """The error of files that do not exist; `wanted`: the names that were asked for."""
        return missing(self.name, self.lines(absent, wanted), wanted)

    @property
    def whole(self) -> bool:
        """Whether a directory was named, and neither files nor an index."""
        return self.placed is None and self.name is not None and self.names != [self.name]


class Opening(os.PathLike[str]):
    """A path that is found when the headers are read, where all processes hear of an error.

    Attributes:
        locate: Gives the path to open, for the one that the caller gave and the options.
        accept: Is told the index before anything else is asked of it, and may raise.
        opened: The index and the sources, once the headers were read.
    """

    opened: tuple[Index, list[Source]]

    def __init__(
        self,
        path: PathOrBytes | Sequence[PathOrBytes],
        locate: Callable[[Any, LoadOptions | None], Any],
        accept: Callable[[Index], object] | None = None,
    ) -> None:
        self._path, self._locate, self.accept = path, locate, accept

    def located(self, options: LoadOptions | None) -> Any:
        """The path to open; raises as `locate` does, and UsageError for what is not a path."""
        check_path(self._path)
        return self._locate(self._path, options)

    def __fspath__(self) -> str:
        return sources.shown(self._path) or "the files"


def find(
    path: PathOrBytes | Sequence[PathOrBytes],
    options: LoadOptions | None = None,
    seen: State | None = None,
) -> CheckpointFiles:
    """Names the files of a checkpoint without reading their headers.

    `seen`: the state just before, whose listing is used. Shards that an index names are not looked
    at until they are needed.

    Raises:
        UsageError: `path` is not a path.
        SourceError: There is nothing to load there, or it can't be listed.
        HeaderError: The index is malformed.
        CheckpointError: Several checkpoints lie side by side, or the index leads out of its
            directory.
    """
    if isinstance(path, CheckpointFiles):
        return path
    if isinstance(path, _SINGLE) or sources.is_source(path) or sources.is_directory(path):
        if isinstance(path, str) and "://" in path:
            reader = sources.checkpoint(path, options)
            if reader is not None:
                return CheckpointFiles([], name=sources.shown(path), directory=reader)
        place: Any = _located(path, options)
        if sources.is_directory(place):
            names = (n for n in place.names() if not (n.endswith(_FILES) and place.is_directory(n)))
            found = _of_names(place, [*names])
            found.notes += getattr(place, "notes", ())  # Of a store: where it lies.
            return found
        if not isinstance(place, str):
            name = place.name
            if name.partition("?")[0].endswith(".json"):
                return from_index(place)
            return CheckpointFiles([place], name=name)
        if os.path.isdir(place) if seen is None else seen[0]:
            return _in_directory(place, seen)
        if place.endswith(".json"):
            return from_index(sources.local_file(place))
        return CheckpointFiles([place], name=place)
    check_path(path)
    given: Any = path
    files: list[Any] = [_located(each, options) for each in given]
    if folder := next(filter(sources.is_directory, files), None):
        what = "a list has files alone, and this is a directory"
        raise errors.UsageError(what, file=folder.name)
    if not files:
        raise errors.UsageError("an empty list of files", expected="at least one path")
    ((most, count),) = collections.Counter(files).most_common(1)
    if count > 1:
        name = most if isinstance(most, str) else most.name
        raise errors.UsageError("a file is listed twice", file=name)
    return CheckpointFiles(files)


def state(path: PathOrBytes | Sequence[PathOrBytes]) -> State | None:
    """The state of a checkpoint now, to compare with what a later call gives; None if unknown."""
    if not isinstance(path, str | os.PathLike):
        return None
    try:
        name = os.fsdecode(path)
        found = os.stat(name)
        if not stat.S_ISDIR(found.st_mode):
            listed = os.listdir(os.path.dirname(name) or ".") if name.endswith(".json") else []
            return False, listed, [_VERSION(found)]
        listed = _listed(name)
        indexes, files = _names(_local(name), listed)
        looked = indexes or (files if len(files) == 1 else [])
        return True, listed, [_VERSION(os.stat(os.path.join(name, each))) for each in looked]
    except (OSError, ValueError):
        return None


def check_state(path: PathOrBytes | Sequence[PathOrBytes], before: State | None) -> None:
    """Raises SourceChangedError if the files are not those of an earlier `state`."""
    if state(path) != before:
        raise errors.SourceChangedError(
            "the files were replaced while their headers were read",
            file=sources.shown(path),
            expected="no writer meanwhile; load again",
        )


def _listed(directory: str) -> list[str]:
    """The names in a directory, without directories that are called like files of weights."""

    def is_directory(entry: os.DirEntry[str]) -> bool:
        linked = entry.is_symlink() and os.path.isdir(entry.path)
        return entry.is_dir(follow_symlinks=False) or linked

    with os.scandir(directory) as entries:
        return [e.name for e in entries if not (e.name.endswith(_FILES) and is_directory(e))]


def _names(directory: Directory, listed: list[str]) -> tuple[list[str], list[str]]:
    """Of the names in a directory, those of indexes that a load looks at, or else of files."""
    # Copies by other systems leave hidden files that are not part of a checkpoint.
    indexes = sorted(n for n in listed if n.endswith(INDEX_SUFFIX) and n[0] != ".")
    if indexes:
        return indexes, []
    names = sorted(name for name in listed if name[0] != ".")
    files = [name for name in names if name.endswith(SUFFIX)]
    if not files:
        from mfload.formats import base, hints

        # What lies beside weights that mfload doesn't load is not taken for them.
        if not hints.of_directory(directory, names):
            files = [name for name in names if name.endswith(tuple(base.FORMATS))]
    return indexes, files


def _located(path: Any, options: LoadOptions | None) -> str | Source | Directory:
    """A source or a directory of a store, or a path as absolute text.

    The process may change its directory before it reads.

    Opens nothing.
    """
    if (type(path) is not str or "://" in path) and (
        isinstance(path, _BYTES)
        or sources.is_url(path)
        or sources.is_source(path)
        or sources.is_directory(path)
    ):
        return sources.place(path, options)
    try:
        name = os.fsdecode(path)
    except TypeError:
        _refuse_open_file(path)
        raise errors.UsageError("not a path", expected="a path", found=repr(path)) from None
    if ":/" in name:
        sources.check_path(name)
    # Joined, not normalised: what `..` means depends on the links before it. An empty path stays
    # empty, and in a deleted directory a path stays as it is.
    with contextlib.suppress(OSError):
        return os.path.join(os.getcwd(), name) if name else name
    return name


def check_path(path: Any) -> None:
    """Raises UsageError for what is neither a path nor a list, such as a tree of arrays."""
    if isinstance(path, _SINGLE) or sources.is_source(path) or sources.is_directory(path):
        return
    _refuse_open_file(path)
    if isinstance(path, Mapping) or not isinstance(path, Iterable) or hasattr(path, "__array__"):
        raise errors.UsageError(
            "not a path: load(path, framework) takes a path; load_into(target, path) fills a tree",
            expected="a path or a list of paths",
            found=type(path).__name__,  # pyright: ignore[reportUnknownArgumentType]
        )


def _refuse_open_file(path: Any) -> None:
    if hasattr(path, "read"):
        what, expected = "an open file is not a path", "its path, or the bytes in it: file.read()"
        raise errors.UsageError(what, expected=expected, found=repr(path))


def _in_directory(directory: str, seen: State | None) -> CheckpointFiles:
    try:
        names = seen[1] if seen else _listed(directory)
    except OSError as error:
        raise errors.from_os(error, directory, "list") from error
    place = _local(directory)
    if _HIDDEN not in "\0".join(names):  # Half the time of a loop.
        return _of_names(place, names)
    from mfload.formats import unfinished

    left = unfinished.shards(directory, names)
    told = f"{unfinished.told(left)} (killed, or still writing)" if left else ""
    found = _of_names(place, [name for name in names if name not in left], told)
    if told:
        found.notes = (f"left out: {told}",)
    return found


def _local(directory: str) -> Directory:
    from mfload.sources.directories import LocalDirectory  # Late: most loads have a file.

    return LocalDirectory(directory)


def _of_names(directory: Directory, names: list[str], unfinished: str = "") -> CheckpointFiles:
    """The checkpoint that files of these names make up; `unfinished` tells what was left out."""
    if not any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names):
        from mfload.formats import base

        found = base.find_directory(directory, names)
        if found is not None:
            module, place = found
            read = partial(base.read_directory, module, place)
            return CheckpointFiles([], name=place.name, directory=read)
    indexes, files = _names(directory, names)
    if len(indexes) == 1:
        found = from_index(directory.file(indexes[0]))
        found.folder = directory
        return found
    if not indexes and not files:
        from mfload.formats import hints

        names = hints.listed(directory)
        instead = hints.of_directory(directory, names) or hints.beside(names)
        if unfinished:
            instead = f"; it holds {unfinished}: saving there again removes them"
        raise errors.SourceNotFoundError(
            f"nothing to load in the directory{instead}",
            file=directory.name,
            expected=f"*{INDEX_SUFFIX}, *{SUFFIX}, *.npz, *.npy, *.msgpack, or an Orbax checkpoint",
            found=", ".join(names[:8]) or "an empty directory",
        )
    # What a save to a store left that was killed; a later one made the single file.
    left = {n for n in files if (made := MARKED.fullmatch(n)) and made[1] + SUFFIX in files}
    files = [name for name in files if name not in left]
    # Files that are numbered alike; a file without a number is a family of its own, such as the
    # first of several models, `model` beside `model_1`.
    families: dict[tuple[str, bool, int | None], dict[str, int | None]] = {}
    for name in files:
        stem, number, total = _shard(name)
        if name.endswith(_ONE_ARRAY):
            stem, number, total = name, None, None  # Its name is that of a tensor.
        families.setdefault((stem, number is None, total), {})[name] = number
    stems = [stem for stem, *_ in families]
    choices = indexes
    whole = not _WHOLE.isdisjoint(stems) or any(name.endswith(_TREE) for name in files)
    if not indexes and (whole or len({*stems}) < len(stems)):
        choices = [_choice(total, shards) for (*_, total), shards in families.items()]
    if len(choices) > 1:
        raise errors.CheckpointError(
            "several checkpoints side by side; name one of them, or list the files",
            file=directory.name,
            problems=tuple(choices),
        )
    missing: list[str] = []
    for (*_, total), shards in families.items():
        numbers = {*shards.values()}
        first = 0 if 0 in numbers else 1
        missing += [
            f"shard {number} of {total} is missing, {next(iter(shards))!r} exists"
            for number in range(first, first + min(total or 0, 1000))
            if number not in numbers
        ]
    places = [directory.at(name) for name in files]
    return CheckpointFiles(places, missing=tuple(missing), name=directory.name, folder=directory)


def _choice(total: int | None, names: Collection[str]) -> str:
    """What an error says of files that are numbered alike."""
    name, n = next(iter(names)), len(names)
    if n < (total or 0):
        return f"{name} … ({n} of {total}; if a killed save left them, remove them)"
    return f"{name} … ({n} files)" if n > 1 else name


def stem(name: str, *, alone: bool = False) -> str:
    """The checkpoint's part of a file name: model-00001-of-00002.safetensors → model.

    With `alone`, the name of a single file keeps a number that has no total: model_1 → model_1.
    """
    stem, number, total = _shard(name)
    return name.removesuffix(SUFFIX) if alone and number is not None and total is None else stem


def _shard(name: str) -> tuple[str, int | None, int | None]:
    """Takes a file name apart: model-00001-of-00002 → model, 1, 2; model → model, None, None."""
    stem = name.removesuffix(SUFFIX).removesuffix(".npz").removesuffix(_TREE)
    shard = re.fullmatch(_SHARD, stem)
    if shard is None:
        return stem, None, None
    return shard["stem"], int(shard["number"]), int(shard["total"]) if shard["total"] else None


def from_index(index: Source) -> CheckpointFiles:
    """The files that an index names, none of which is looked at."""
    table, path = read_index(index), index.name
    weights: dict[str, str] = table["weight_map"]
    if not weights:
        raise errors.CheckpointError("the index names no file", file=path)
    directory = os.path.join(os.path.dirname(path), "")
    held = collections.Counter(weights.values())
    places: dict[str, str] = {}
    files: dict[str, Source] = {}
    problems: list[str] = []
    for shard in sorted(held):
        problem = outside(shard)
        if problem is None:
            try:
                # One shard may be spelled in several ways (x, ./x) and is still one file.
                place = directory + os.path.normpath(shard)
                file = sources.local_file(place, now=False) if index.file else index.beside(shard)
                places[shard], files[file.name] = file.name, file
                continue
            except errors.UsageError as error:
                problem = error.message
        one = next(name for name, file in weights.items() if file == shard)
        problems.append(named_by_index(shard, problem, held[shard], one))
    if problems:
        raise errors.CheckpointError(
            "the index names files outside its directory", file=path, problems=tuple(problems)
        )
    metadata = table.get("metadata")
    return CheckpointFiles(
        [files[place] for place in sorted(files)],
        {name: places[shard] for name, shard in weights.items()},
        (),
        path,
        index,
        metadata.get("total_size") if isinstance(metadata, dict) else None,
    )


def missing(
    name: str | None, problems: tuple[str, ...], wanted: Sequence[str] = ()
) -> errors.ShardNotFoundError:
    """The error of missing shards, a line for each; `wanted`: the names that were asked for."""
    tensor = wanted[0] if wanted else None
    what = "shards are missing"
    return errors.ShardNotFoundError(what, file=name, tensor=tensor, problems=problems)


def named_by_index(shard: str, problem: str, count: int, one: str) -> str:
    """A line about a file that an index names, and the tensors in it."""
    more = f"{errors.counted(count, 'tensor')}, {brief(one)} among them"
    held = more if count > 1 else f"tensor {brief(one)}"
    return f"{brief(shard)} is named by the index and {problem} ({held})"


def outside(name: str) -> str | None:
    """Why a name in an index is not one below its directory; None if it is."""
    # Only the name is judged: the links with which the Hugging Face cache lays its snapshots do
    # lead elsewhere, and were made by the owner of the directory.
    parts = re.split(r"[/\\]", name)
    if not name or "\0" in name:
        return "is not a file name"
    # Absolute paths begin with a separator or a drive, whatever the system is.
    if ".." in parts or not parts[0] or ":" in parts[0]:
        return "leads out of the directory"
    return None
