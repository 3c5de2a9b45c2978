"""Orbax's checkpoints, read without JAX or TensorStore and checked as hostile input.

An item has `_METADATA`, the tree; its arrays are Zarr's, in an OCDBT store or a directory each.
Which directory is meant says `orbax_directories`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from mfload import errors
from mfload.formats import ocdbt, orbax_directories, strict_json, structure, zarr
from mfload.formats.ocdbt import Value
from mfload.formats.orbax_directories import (
    ARRAYS,
    CHECKPOINT,
    LONG,
    MAX_METADATA,
    TREE,
    read_json,
    read_table,
)
from mfload.formats.strict_json import bad, brief
from mfload.index import TensorInfo
from mfload.sources.base import Source, read_whole
from mfload.sources.directories import Directory

locate = orbax_directories.locate
recognise_directory = orbax_directories.recognise_directory

CUSTOM_KEY = "orbax.custom_metadata"
"""The metadata string with the JSON that the writer gave for the checkpoint, and for the item."""

KEYS_KEY = "orbax.random_keys"
"""The metadata string with the implementation of each array that is JAX's random keys, as JSON."""

_STRINGS = "_strings.json"
_EMPTY: dict[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": ()}
_KEY_IMPL = "random_key_impl"
_ALL_STORED = "store_array_data_equal_to_fill_value"
_ARRAY_HANDLER = "ArrayCheckpointHandler"
_ALONE = "checkpoint"  # The key under which handlers keep what is one array and no tree.
_SEQUENCE, _DICT = 1, 2
_MAX_DEPTH = 100


class _Item(NamedTuple):
    """What an item holds: its files, tensors and tree, and what its writer said of them."""

    files: list[Source]
    rows: list[TensorInfo]
    tree: Any
    custom: dict[str, Any]
    keys: dict[str, str]


def read_directory(
    directory: Directory, source: int = 0
) -> tuple[list[Source], list[TensorInfo], dict[str, str]]:
    """The files of a checkpoint, its tensors, and its strings with the tree.

    Tensors have the keys on their path, joined by dots. The first file is that of the tree. The
    tree of several items is a dict by item, in which an item of JSON is plain values; if more than
    one has tensors, these have the name of their item in front.

    Args:
        directory: An item or a checkpoint of several, as `locate` gives it.
        source: Number of the first file in the index.

    Raises:
        HeaderError: A file of the checkpoint is malformed.
        CheckpointError: Its tree and its store disagree; one error names all arrays.
        SourceError: A file is missing or can't be read; others as `ocdbt.read` does.
    """
    if directory.is_file(TREE):
        above, name = directory.above or (None, "")
        handlers = {} if above is None else _handlers(above)
        single = handlers.get(name, "").endswith(_ARRAY_HANDLER)
        files, rows, tree, custom, keys = _item(directory, source, single=single)
        outer = {} if above is None else _custom(above)
        strings = _metadata(tree, outer | custom, keys)
        if name in handlers:
            strings[structure.ITEMS] = json.dumps({name: True})
        return files, rows, strings
    found, handlers = orbax_directories.items(directory), _handlers(directory)
    made: dict[str, Any] = {
        name: _json_item(directory.file(file)) for name, file in found.plain.items()
    }
    items = dict.fromkeys(found.other, False)
    files, rows, custom, keys = list[Source](), list[TensorInfo](), _custom(directory), {}
    for name, place in found.trees.items():
        # Orbax's items of one array, and of random keys, are no trees.
        single = handlers.get(name, "").endswith(_ARRAY_HANDLER) or not place.name.endswith(
            f"/{name}"
        )
        item = _item(place, source + len(files), name if len(found.trees) > 1 else "", single)
        made[name], files, rows = item.tree, files + item.files, rows + item.rows
        custom |= {name: item.custom} if item.custom else {}
        keys |= item.keys
    if len({row.name for row in rows}) < len(rows):
        what = "arrays of two items have the same name: that of the item and the keys, with dots"
        raise errors.CheckpointError(what, file=directory.name, problems=tuple(found.trees))
    items |= dict.fromkeys(made, True)
    tree = made if len(made) > 1 else next(iter(made.values()))
    return files, rows, {**_metadata(tree, custom, keys), structure.ITEMS: json.dumps(items)}


def _metadata(tree: Any, custom: dict[str, Any], keys: dict[str, str]) -> dict[str, str]:
    found = {structure.KEY: structure.dumps(tree)}
    for key, value in ((CUSTOM_KEY, custom), (KEYS_KEY, keys)):
        if value:
            found[key] = json.dumps(value)
    return found


def _item(directory: Directory, source: int, front: str = "", single: bool = False) -> _Item:
    """Reads an item; `front` stands before the names of its tensors.

    `single`: whether it is one array if its tree is a dict with nothing but `checkpoint`.
    """
    tree_file = directory.file(TREE)
    tree_file.keep(True)
    metadata = read_json(tree_file)
    strings = read_table(directory, _STRINGS)
    tree, paths = _tree(tree_file, metadata, strings, front)
    values, files = _values(directory)
    store = zarr.ZarrStore(directory, values, {TREE: tree_file, **files}, source)
    held, problems = {*store.arrays()}, list[str]()
    missing = [name for name in paths if name not in held]
    if missing:
        problems = [f"{brief(name)} is in {TREE} and not in the store" for name in missing]
        what = "the tree and the arrays of the checkpoint disagree"
        raise errors.CheckpointError(what, file=directory.name, problems=tuple(problems))
    if metadata.get(_ALL_STORED) is True:
        store.missing = []
    store.ask_ahead(paths)
    rows = zarr.read(store, paths)
    rows = [row._replace(name=_joined(front, row.name)) for row in rows] if front else rows
    if store.missing:
        what = "chunks of the checkpoint are missing"
        raise errors.CheckpointError(what, file=directory.name, problems=tuple(store.missing))
    if single and isinstance(tree, dict) and [*tree] == [_ALONE]:
        tree = tree[_ALONE]
    own = metadata.get("custom_metadata")
    custom = _custom(directory) | (own if isinstance(own, dict) else {})
    keys = {_joined(front, name): kind for name, kind in _random_keys(directory, paths).items()}
    return _Item(store.sources, rows, tree, custom, keys)


def _joined(front: str, name: str) -> str:
    return f"{front}.{name}" if front and name else front or name


def _json_item(file: Source) -> Any:
    """An item of JSON, as Python reads it: its writer may have written NaN."""
    text = read_whole(file, MAX_METADATA, LONG)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad(file, "the item is not JSON", None, None, str(error)) from None
    strict_json.check(found, file.name)
    return found


def _values(item: Directory) -> tuple[Mapping[str, Value], dict[str, Source]]:
    """Keys and values of an item's arrays, in a store or in directories; files of the store."""
    if item.is_file(ocdbt.MANIFEST):
        return ocdbt.read(item)
    return {
        name: Value(name, 0, size)
        for name, size in item.walk()
        if not name.startswith(f"{ARRAYS}/")
    }, {}


def _tree(
    file: Source, metadata: dict[str, Any], strings: dict[str, Any], front: str
) -> tuple[Any, dict[str, tuple[str, ...]]]:
    """The tree of an item, and the path of each of its arrays by name."""
    entries = metadata.get("tree_metadata")
    if not isinstance(entries, dict):
        raise bad(file, "malformed tree", None, "tree_metadata", brief(entries))
    paths: dict[str, tuple[str, ...]] = {}
    top = _TreeNode()
    for label, entry in entries.items():
        try:
            keys = [(each["key"], each["key_type"]) for each in entry["key_metadata"]]
            value = entry["value_metadata"]
            kind, skipped = value["value_type"], value["skip_deserialize"]
        except (TypeError, KeyError, IndexError):
            raise bad(file, "malformed entry of the tree", label, None, brief(entry)) from None
        good = all(type(key) is str and kind in (_SEQUENCE, _DICT) for key, kind in keys)
        if not good or not isinstance(kind, str) or len(keys) > _MAX_DEPTH:
            raise bad(file, "malformed entry of the tree", label, None, brief(entry))
        path = tuple(key for key, _ in keys)
        name = ".".join(path)
        if kind == "string":
            leaf: Any = strings.get(name)
            if not isinstance(leaf, str):
                raise bad(file, f"a string of the tree is not in {_STRINGS}", name)
        elif skipped and kind in _EMPTY:
            leaf = _EMPTY[kind]
        elif skipped:
            leaf = None  # Its writer had no handler for the type.
        else:
            made = structure.ScalarName if kind == "scalar" else structure.TensorName
            leaf = made(_joined(front, name))
            if name in paths:
                what = "two arrays have the same name: their keys, joined by dots"
                raise bad(file, what, name, None, f"{list(paths[name])} and {list(path)}")
            paths[name] = path
        if not keys and len(entries) == 1:
            return leaf, paths
        node: Any = top
        for key in keys[:-1]:
            node = node.setdefault(key, _TreeNode())
            if not isinstance(node, _TreeNode):
                raise bad(file, "a leaf of the tree has leaves below it", name)
        if not keys or keys[-1] in node:
            raise bad(file, "a leaf of the tree has leaves below it, or is given twice", name)
        node[keys[-1]] = leaf
    return _plain(file, top, ()), paths


class _TreeNode(dict[tuple[str, int], Any]):
    """A node of a tree, by the keys of what is below and their kinds."""


def _plain(file: Source, node: Any, path: tuple[str, ...]) -> Any:
    """The list or dict of a node."""
    if not isinstance(node, _TreeNode):
        return node
    made = {key: _plain(file, each, (*path, key)) for (key, _), each in node.items()}
    kinds = {kind for _, kind in node}
    if kinds == {_SEQUENCE}:
        numbers = [str(number) for number in range(len(node))]
        if made.keys() == {*numbers}:
            return [made[number] for number in numbers]
    if len(made) < len(node) or _SEQUENCE in kinds:
        raise bad(file, "malformed list in the tree", ".".join(path), "0, 1, …", brief([*made]))
    return made


def _handlers(directory: Directory) -> dict[str, str]:
    """What wrote each of the items of a checkpoint; nothing if it does not say."""
    found = read_table(directory, CHECKPOINT).get("item_handlers")
    return {name: str(each) for name, each in found.items()} if isinstance(found, dict) else {}


def _custom(directory: Directory) -> dict[str, Any]:
    """What the writer gave for a checkpoint or an item."""
    table = read_table(directory, CHECKPOINT).get("custom_metadata")
    return table if isinstance(table, dict) else {}


def _random_keys(item: Directory, names: Collection[str]) -> dict[str, str]:
    """The implementations of arrays that are JAX's random keys."""
    found: dict[str, str] = {}
    for name in item.below(ARRAYS).names() if item.is_directory(ARRAYS) else ():
        file = item.file(f"{ARRAYS}/{name}")
        entries = read_json(file).get("array_metadatas")
        for entry in entries if isinstance(entries, list) else ():
            try:
                array = entry["array_metadata"]
                key, more = array["param_name"], array["ext_metadata"] or {}
                kind = more.get(_KEY_IMPL)
            except (TypeError, KeyError, AttributeError):
                raise bad(file, "malformed metadata of arrays", None, None, brief(entry)) from None
            if isinstance(kind, str) and key in names:
                found[key] = kind
    return found
