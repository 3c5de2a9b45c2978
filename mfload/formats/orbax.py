"""Orbax's checkpoints: directories, found, checked and read without JAX or TensorStore.

    root/[prefix_]<step>/<item>/    of a CheckpointManager or a v1 Checkpointer
    <checkpoint>/<item>/            of v1's `save`; the item is `state` unless named
    <checkpoint>/                   of a v0 Checkpointer: the item itself

An item has `_METADATA`, the tree; its arrays are Zarr's, in an OCDBT store or a directory each.
While a checkpoint is written, its name has `.orbax-checkpoint-tmp` behind it, or its
`_CHECKPOINT_METADATA` no time of a commit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from mfload import errors, sources
from mfload.formats import ocdbt, strict_json, structure, zarr
from mfload.formats.ocdbt import Value
from mfload.formats.strict_json import brief
from mfload.index import TensorInfo
from mfload.sources.base import Source

TREE = "_METADATA"
"""The file of an item that has its tree."""

CUSTOM_KEY = "orbax.custom_metadata"
"""The metadata string with the JSON that the writer gave for the checkpoint, and for the item."""

KEYS_KEY = "orbax.random_keys"
"""The metadata string with the implementation of each array that is JAX's random keys, as JSON."""

MAX_METADATA = 100_000_000
"""Bytes of a file of JSON: as many as a safetensors header may have."""

_TEMPORARY = ".orbax-checkpoint-tmp"
_STEP, _V1 = "_CHECKPOINT_METADATA", "orbax.checkpoint"
_COMMITTED = "commit_success.txt"
_STRINGS, _ARRAYS = "_strings.json", "array_metadatas"
_MARKS = frozenset({TREE, _STEP, _V1, _ARRAYS, ocdbt.MANIFEST})
_NUMBERED = re.compile(r"(?:(?P<prefix>.+)_)?(?P<step>\d{1,18})")
_MAIN = ("default", "state")  # What v0's manager and v1 call an item that was given no name.
_EMPTY: dict[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": ()}
_KEY_IMPL = "random_key_impl"
_ALL_STORED = "store_array_data_equal_to_fill_value"
_SEQUENCE, _DICT = 1, 2
_MAX_DEPTH = 100
_SHOWN = 20


def recognise_directory(directory: str, names: Iterable[str]) -> bool:
    """Whether a directory with such names looks like a checkpoint of Orbax, a step or a root."""
    names = [*names]
    if not _MARKS.isdisjoint(names) or _TEMPORARY in os.path.basename(directory):
        return True
    numbered = [name for name in names if _NUMBERED.fullmatch(name)]
    if any(_TEMPORARY in name for name in names):
        return True
    some = numbered[-_SHOWN:] or names[:_SHOWN]
    return any(
        os.path.isfile(os.path.join(directory, name, mark)) for name in some for mark in _MARKS
    ) or any(_items(os.path.join(directory, name)) for name in numbered[-_SHOWN:])


def locate(path: str | os.PathLike[str], step: int | None = None) -> str:
    """The directory of an item: that of a checkpoint, a step, or the newest complete step.

    Of several items, `default` or `state` is the one that is meant.

    Args:
        path: An item, a step with items in it, or the root of a manager with steps.
        step: Which step of a root. Default: the newest that is complete.

    Raises:
        SourceNotFoundError: There is no such step; the error lists those there are.
        CheckpointError: The checkpoint was not finished, or there are several items.
        UsageError: A step is asked for, and the path is not that of a root.
        SourceError: A directory can't be listed.
    """
    directory = os.fspath(path)
    _check_finished(directory)
    names = listed(directory)
    if not _MARKS.isdisjoint(names) or (found := steps(directory, names)) is None:
        if step is not None:
            what = "the directory has no steps: it is a checkpoint itself"
            raise errors.UsageError(what, file=directory, expected="step=None", found=step)
        return _item(directory, names)
    complete, unfinished = found
    if step is None and complete:
        step = max(complete)
    if step is None or step not in complete:
        if step in unfinished or (step is None and unfinished):
            name = unfinished[max(unfinished) if step is None else step]
            raise _unfinished(os.path.join(directory, name))
        what, there = f"there is no step {step}", ", ".join(map(str, sorted(complete)[-_SHOWN:]))
        raise errors.SourceNotFoundError(what, file=directory, expected=there or "a step")
    places = [os.path.join(directory, name) for name in complete[step]]
    if len(places) > 1:
        what = f"several checkpoints of step {step}; name one of them"
        raise errors.CheckpointError(what, file=directory, problems=tuple(complete[step]))
    return _item(places[0], listed(places[0]))


def steps(
    directory: str, names: Sequence[str]
) -> tuple[dict[int, list[str]], dict[int, str]] | None:
    """The complete steps of a root, and those that were not finished; None if it is not a root."""
    complete: dict[int, list[str]] = {}
    unfinished: dict[int, str] = {}
    for name in names:
        number = _NUMBERED.fullmatch(name.partition(_TEMPORARY)[0])
        place = os.path.join(directory, name)
        if number is None or not os.path.isdir(place) or os.path.isfile(f"{place}/.zarray"):
            continue
        step = int(number["step"])
        if _TEMPORARY in name:
            unfinished[step] = name
        elif (os.path.isfile(os.path.join(place, TREE)) or _items(place)) and _committed(place):
            complete.setdefault(step, []).append(name)
        else:
            unfinished[step] = name
    return (complete, unfinished) if complete or unfinished else None


def read_directory(
    directory: str, source: int = 0
) -> tuple[list[Source], list[TensorInfo], dict[str, str]]:
    """The files of a checkpoint, its tensors, and its strings with the tree.

    Tensors have the keys on their path, joined by dots. The first file is that of the tree.

    Args:
        directory: An item, as `locate` gives it.
        source: Number of the first file in the index.

    Raises:
        HeaderError: A file of the checkpoint is malformed.
        CheckpointError: Its tree and its store disagree; one error names all arrays.
        SourceError: A file is missing or can't be read; others as `ocdbt.read` does.
    """
    tree_file = sources.local_file(os.path.join(directory, TREE))
    tree_file.keep(True)
    metadata = _json(tree_file)
    strings = _optional(os.path.join(directory, _STRINGS))
    tree, paths = _tree(tree_file, metadata, strings)
    values, files = _values(directory)
    store = zarr.Store(values, [tree_file, *files], source)
    held, problems = {*store.arrays()}, list[str]()
    missing = [name for name in paths if name not in held]
    if missing:
        problems = [f"{brief(name)} is in {TREE} and not in the store" for name in missing]
        what = "the tree and the arrays of the checkpoint disagree"
        raise errors.CheckpointError(what, file=directory, problems=tuple(problems))
    if metadata.get(_ALL_STORED) is True:
        store.missing = []
    rows = [zarr.read(store, name) for name in paths]
    if store.missing:
        what = "chunks of the checkpoint are missing"
        raise errors.CheckpointError(what, file=directory, problems=tuple(store.missing))
    found = {structure.KEY: structure.dumps(tree)}
    for key, value in (
        (CUSTOM_KEY, _custom(directory, metadata)),
        (KEYS_KEY, _random_keys(directory, paths)),
    ):
        if value:
            found[key] = json.dumps(value)
    return store.sources, rows, found


def _check_finished(directory: str) -> None:
    """Raises CheckpointError for a directory that is still being written, or is in one."""
    absolute = os.path.abspath(directory)
    for each in (absolute, os.path.dirname(absolute)):
        if _TEMPORARY in os.path.basename(each) or not _committed(each):
            raise _unfinished(each)


def _committed(directory: str) -> bool:
    """Whether its writer came to an end.

    Where directories can't be renamed, as in buckets, a checkpoint has its name from the start, and
    the time of its commit at the end.
    """
    if os.path.exists(os.path.join(directory, _COMMITTED)):
        return True
    try:
        written = _optional(os.path.join(directory, _STEP))
    except errors.FormatError:
        return False  # Its writer is at work.
    return written.get("commit_timestamp_nsecs", 0) is not None


def _unfinished(directory: str) -> errors.CheckpointError:
    return errors.CheckpointError(
        "the checkpoint was not finished: its writer was stopped, or is at work",
        file=directory,
        expected=f"no {_TEMPORARY} in its name, the time of its commit, and {TREE}",
    )


def listed(directory: str) -> list[str]:
    """Names in a directory, in order; raises SourceError if it can't be listed."""
    try:
        return sorted(os.listdir(directory))
    except OSError as error:
        raise errors.from_os(error, directory, "list") from error


def _items(directory: str) -> list[str]:
    """Names of the items of a step, complete or not."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    return [
        name
        for name in names
        if os.path.isfile(os.path.join(directory, name, TREE)) and _TEMPORARY not in name
    ]


def _item(directory: str, names: Sequence[str]) -> str:
    """The item of a step, or the directory itself."""
    if TREE in names:
        return directory
    items = _items(directory)
    chosen = items if len(items) == 1 else [name for name in items if name in _MAIN]
    if len(chosen) == 1:
        return os.path.join(directory, chosen[0])
    if items:
        what = "several items in the checkpoint; name the directory of one of them"
        raise errors.CheckpointError(what, file=directory, problems=tuple(items))
    for name in names:
        if _TEMPORARY in name:
            raise _unfinished(os.path.join(directory, name))
    what = f"the checkpoint has no {TREE}: it was not finished, or holds no arrays"
    raise errors.CheckpointError(
        what, file=directory, expected=TREE, found=", ".join(names[:8]) or "an empty directory"
    )


def _values(item: str) -> tuple[Mapping[str, Value], list[Source]]:
    """Keys and values of an item's arrays, in a store or in directories; files of the store."""
    if os.path.exists(os.path.join(item, ocdbt.MANIFEST)):
        return ocdbt.read(item)
    found: dict[str, Value] = {}
    front = len(os.path.join(item, ""))
    for place, directories, files in os.walk(item):
        if place == item and _ARRAYS in directories:
            directories.remove(_ARRAYS)
        for name in files:
            path = os.path.join(place, name)
            try:
                size = os.stat(path).st_size
            except OSError as error:
                raise errors.from_os(error, path, "open") from error
            found[path[front:].replace(os.sep, "/")] = Value(path, 0, size)
    return found, []


def _json(file: Source) -> dict[str, Any]:
    if file.size > MAX_METADATA:
        what, limit = "the metadata is over the limit", f"at most {errors.amount(MAX_METADATA)}"
        raise _bad(file, what, None, limit, errors.amount(file.size))
    found: Any = strict_json.loads(file.read(0, file.size), file.name, "metadata")
    if not isinstance(found, dict):
        raise _bad(file, "malformed metadata", None, "an object", brief(found))
    strict_json.check(found, file.name)
    return found  # pyright: ignore[reportUnknownVariableType]


def _optional(path: str) -> dict[str, Any]:
    return _json(sources.local_file(path)) if os.path.exists(path) else {}


def _tree(
    file: Source, metadata: dict[str, Any], strings: dict[str, Any]
) -> tuple[Any, dict[str, tuple[str, ...]]]:
    """The tree of an item, and the path of each of its arrays by name."""
    entries = metadata.get("tree_metadata")
    if not isinstance(entries, dict):
        raise _bad(file, "malformed tree", None, "tree_metadata", brief(entries))
    paths: dict[str, tuple[str, ...]] = {}
    top = _Node()
    for label, entry in entries.items():
        try:
            keys = [(each["key"], each["key_type"]) for each in entry["key_metadata"]]
            value = entry["value_metadata"]
            kind, skipped = value["value_type"], value["skip_deserialize"]
        except (TypeError, KeyError, IndexError):
            raise _bad(file, "malformed entry of the tree", label, None, brief(entry)) from None
        good = all(type(key) is str and kind in (_SEQUENCE, _DICT) for key, kind in keys)
        if not good or not isinstance(kind, str) or len(keys) > _MAX_DEPTH:
            raise _bad(file, "malformed entry of the tree", label, None, brief(entry))
        path = tuple(key for key, _ in keys)
        name = ".".join(path)
        if kind == "string":
            leaf: Any = strings.get(name)
            if not isinstance(leaf, str):
                raise _bad(file, f"a string of the tree is not in {_STRINGS}", name)
        elif skipped and kind in _EMPTY:
            leaf = _EMPTY[kind]
        elif skipped:
            leaf = None  # Its writer had no handler for the type.
        else:
            leaf = structure.TensorName(name)
            if name in paths:
                what = "two arrays have the same name: their keys, joined by dots"
                raise _bad(file, what, name, None, f"{list(paths[name])} and {list(path)}")
            paths[name] = path
        if not keys and len(entries) == 1:
            return leaf, paths
        node: Any = top
        for key in keys[:-1]:
            node = node.setdefault(key, _Node())
            if not isinstance(node, _Node):
                raise _bad(file, "a leaf of the tree has leaves below it", name)
        if not keys or keys[-1] in node:
            raise _bad(file, "a leaf of the tree has leaves below it, or is given twice", name)
        node[keys[-1]] = leaf
    return _plain(file, top, ()), paths


class _Node(dict[tuple[str, int], Any]):
    """A node of a tree, by the keys of what is below and their kinds."""


def _plain(file: Source, node: Any, path: tuple[str, ...]) -> Any:
    """The list or dict of a node."""
    if not isinstance(node, _Node):
        return node
    made = {key: _plain(file, each, (*path, key)) for (key, _), each in node.items()}
    kinds = {kind for _, kind in node}
    if kinds == {_SEQUENCE}:
        numbers = [str(number) for number in range(len(node))]
        if made.keys() == {*numbers}:
            return [made[number] for number in numbers]
    if len(made) < len(node) or _SEQUENCE in kinds:
        raise _bad(file, "malformed list in the tree", ".".join(path), "0, 1, …", brief([*made]))
    return made


def _custom(item: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """What the writer gave for the checkpoint, and for the item."""
    found: dict[str, Any] = {}
    for each in (os.path.join(os.path.dirname(item), _STEP), os.path.join(item, _STEP)):
        table = _optional(each).get("custom_metadata")
        found |= table if isinstance(table, dict) else {}
    own = metadata.get("custom_metadata")
    return found | own if isinstance(own, dict) else found


def _random_keys(item: str, names: Collection[str]) -> dict[str, str]:
    """The implementations of arrays that are JAX's random keys."""
    found: dict[str, str] = {}
    directory = os.path.join(item, _ARRAYS)
    for name in listed(directory) if os.path.isdir(directory) else ():
        file = sources.local_file(os.path.join(directory, name))
        entries = _json(file).get("array_metadatas")
        for entry in entries if isinstance(entries, list) else ():
            try:
                array = entry["array_metadata"]
                key, more = array["param_name"], array["ext_metadata"] or {}
                kind = more.get(_KEY_IMPL)
            except (TypeError, KeyError, AttributeError):
                raise _bad(file, "malformed metadata of arrays", None, None, brief(entry)) from None
            if isinstance(kind, str) and key in names:
                found[key] = kind
    return found


def _bad(
    file: Source, what: str, name: str | None = None, expected: object = None, found: object = None
) -> errors.HeaderError:
    return errors.HeaderError(what, file=file.name, tensor=name, expected=expected, found=found)
