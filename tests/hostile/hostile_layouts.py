"""Directories and indexes that lie, that are damaged, or that are merely unusual."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from reference import Tensor, write

from mfload import errors

INDEX = "model.safetensors.index.json"


class Refused(NamedTuple):
    """A layout that must be refused.

    Attributes:
        build: Lays it in a directory and gives the path to load.
        error: What loading raises.
        says: What the text of the error must say.
    """

    build: Callable[[Path], Path]
    error: type[errors.MfloadError]
    says: tuple[str, ...]


REFUSED: dict[str, Refused] = {}
LOADS: dict[str, Callable[[Path], Path]] = {}
"""Each holds one tensor "a" of [1] and one tensor "b" of [2]."""

Build = Callable[[Path], Path]


def refused(error: type[errors.MfloadError], *says: str) -> Callable[[Build], Build]:
    def note(build: Build) -> Build:
        REFUSED[build.__name__] = Refused(build, error, says)
        return build

    return note


def loads(build: Build) -> Build:
    LOADS[build.__name__] = build
    return build


def shard(path: Path, **values: int) -> Path:
    """A file with a U8 tensor of one element for each name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(write({n: Tensor("U8", (1,), bytes([v])) for n, v in values.items()}))
    return path


def index(root: Path, table: Any, name: str = INDEX) -> Path:
    """An index; what is no dict of names goes in as it stands."""
    text = json.dumps({"metadata": {"total_size": 2}, "weight_map": table})
    (root / name).write_text(text if isinstance(table, dict) else table, errors="surrogateescape")
    return root


# --- files and index disagree ----------------------------------------------------------------


@refused(
    errors.ShardNotFoundError, "'2.safetensors'", "does not exist", "2 tensors, 'b' among them"
)
def shard_missing(root: Path) -> Path:
    shard(root / "1.safetensors", a=1)
    return index(root, {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"})


@refused(errors.ShardNotFoundError, "'2.safetensors'", "'3.safetensors'", "is a broken link")
def shard_link_broken(root: Path) -> Path:
    shard(root / "1.safetensors", a=1)
    (root / "2.safetensors").symlink_to(root / "blobs" / "gone")
    (root / "3.safetensors").symlink_to("gone too")
    return index(root, {"a": "1.safetensors", "b": "2.safetensors", "c": "3.safetensors"})


@refused(errors.CheckpointError, "two files hold the tensor [tensor: 'b'", "1.safetensors and ")
def tensor_twice(root: Path) -> Path:
    shard(root / "1.safetensors", a=1, b=2)
    shard(root / "2.safetensors", b=3)
    return root


@refused(
    errors.CheckpointError, "not where the index says", "tensor: 'b'", "2.safetensors; found: "
)
def tensor_misplaced(root: Path) -> Path:
    shard(root / "1.safetensors", a=1, b=2)
    shard(root / "2.safetensors", c=3)
    return index(root, {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"})


@refused(errors.CheckpointError, "not where the index says", "tensor: 'b'", "found: no file")
def tensor_nowhere(root: Path) -> Path:
    shard(root / "1.safetensors", a=1)
    return index(root, {"a": "1.safetensors", "b": "1.safetensors"})


@refused(errors.CheckpointError, "'gone.safetensors'", "'broken.safetensors'",
         "two files hold the tensor", "tensor: 'nowhere'", "tensor: 'elsewhere'")  # fmt: skip
def everything_at_once(root: Path) -> Path:
    shard(root / "1.safetensors", a=1, twice=2, elsewhere=3)
    shard(root / "2.safetensors", twice=2)
    (root / "broken.safetensors").symlink_to("nowhere")
    return index(root, {"a": "1.safetensors", "x": "gone.safetensors", "y": "broken.safetensors",
                        "nowhere": "1.safetensors", "elsewhere": "2.safetensors"})  # fmt: skip


ASTRAY = ["../out.safetensors", "sub/../../out.safetensors", "/etc/passwd", "..", "sub/..",
          "..\\out.safetensors", "\\\\host\\share", "\\out", "C:\\out", "C:out", "file:///etc/passwd",
          "//host/share", "", "a\0b"]  # fmt: skip


@refused(errors.CheckpointError, "'/etc/passwd'", "'C:out'", "leads out of the directory",
         "is not a file name")  # fmt: skip
def astray(root: Path) -> Path:
    shard(root / "out.safetensors", b=2)
    shard(root / "inner" / "sub" / "1.safetensors", a=1)
    table = {f"t{n}": name for n, name in enumerate(ASTRAY)}
    return index(root / "inner", {"a": "sub/1.safetensors", **table})


# --- indexes that are none -------------------------------------------------------------------


def _no_index(name: str, text: str, error: type[errors.MfloadError], *says: str) -> None:
    def build(root: Path) -> Path:
        shard(root / "1.safetensors", a=1, b=2)
        return index(root, text)

    REFUSED[f"index_{name}"] = Refused(build, error, says)


_no_index("empty", "", errors.HeaderError, "the index is not JSON")
_no_index("list", "[]", errors.HeaderError, "not a checkpoint index")
_no_index("null", "null", errors.HeaderError, "not a checkpoint index")
_no_index("without_map", "{}", errors.HeaderError, "not a checkpoint index")
_no_index("map_null", '{"weight_map":null}', errors.HeaderError, "not a checkpoint index")
_no_index("map_list", '{"weight_map":["a"]}', errors.HeaderError, "not a checkpoint index")
_no_index("map_of_numbers", '{"weight_map":{"a":1}}', errors.HeaderError, "not a checkpoint index")
_no_index(
    "map_of_lists", '{"weight_map":{"a":["1.safetensors"]}}', errors.HeaderError, "not a check"
)
_no_index("map_empty", '{"weight_map":{}}', errors.CheckpointError, "names no file")
_no_index("name_twice", '{"weight_map":{"a":"1.safetensors","a":"2.safetensors"}}',
          errors.HeaderError, "gives a name twice", "'a'")  # fmt: skip
_no_index("map_twice", '{"weight_map":{},"weight_map":{"a":"1.safetensors"}}', errors.HeaderError,
          "name twice", "weight_map")  # fmt: skip
_no_index("deep", '{"weight_map":' + "[" * 100_000, errors.HeaderError, "nested too deep")
_no_index("not_utf8", "\udcff", errors.HeaderError, "the index is not UTF-8")
_no_index("nan", '{"weight_map":{},"x":NaN}', errors.HeaderError, "the index is not JSON")
_no_index(
    "surrogate", '{"weight_map":{"\\ud800":"1.safetensors"}}', errors.HeaderError, "surrogate"
)
_no_index(
    "itself", '{"weight_map":{"a":"' + INDEX + '"}}', errors.HeaderError, "over the format's limit"
)
_no_index("directory", '{"weight_map":{"a":"."}}', errors.SourceError, "not a regular file")
_no_index("long_name", '{"weight_map":{"a":"' + "x" * 5000 + '"}}', errors.ShardNotFoundError,
          "does not exist")  # fmt: skip
_no_index("escape_codes", '{"weight_map":{"a":"\\u001b[2J"}}', errors.ShardNotFoundError, "x1b[2J")


@refused(errors.ShardNotFoundError, "and 19950 more")
def index_of_many_missing(root: Path) -> Path:
    return index(root, {f"t{n}": f"{n}.safetensors" for n in range(20_000)})


@refused(errors.HeaderError, "the index is over the limit")
def index_over_cap(root: Path) -> Path:
    with open(root / INDEX, "wb") as file:
        file.truncate(100_000_001)
    return root


@refused(errors.SourceError, "not a regular file")
def index_fifo(root: Path) -> Path:
    os.mkfifo(root / INDEX)
    return root


# --- directories ------------------------------------------------------------------------------


@refused(errors.CheckpointError, "several checkpoints", "model.safetensors",
         "consolidated.safetensors", "adapter_model.safetensors")  # fmt: skip
def several_families(root: Path) -> Path:
    for name in ("model", "consolidated", "adapter_model"):
        shard(root / f"{name}.safetensors", **{name: 1})
    return root


@refused(errors.CheckpointError, "several checkpoints", "pytorch_lora_weights.safetensors",
         "x.safetensors")  # fmt: skip
def several_with_an_adapter(root: Path) -> Path:
    for name in ("pytorch_lora_weights", "x"):
        shard(root / f"{name}.safetensors", **{name: 1})
    return root


@refused(errors.CheckpointError, "several checkpoints", "consolidated.00.safetensors",
         "model-00001-of-00002.safetensors … (2 files)")  # fmt: skip
def several_families_of_shards(root: Path) -> Path:
    shard(root / "model-00001-of-00002.safetensors", a=1)
    shard(root / "model-00002-of-00002.safetensors", b=2)
    shard(root / "consolidated.00.safetensors", a=1, b=2)
    return root


@refused(errors.CheckpointError, "several checkpoints", "model.safetensors", "(2 files)")
def several_whole_and_shards(root: Path) -> Path:
    shard(root / "model.safetensors", a=1, b=2)
    shard(root / "model-00001-of-00002.safetensors", a=1)
    shard(root / "model-00002-of-00002.safetensors", b=2)
    return root


def _several_numbered(number: int, one: str, *others: str) -> None:
    def build(root: Path) -> Path:
        for value, name in enumerate((one, *others)):
            shard(root / f"{name}.safetensors", **{name: value})
        return root

    more = f" … ({len(others)} files)" if len(others) > 1 else ""
    says = "several checkpoints", f"- {one}.safetensors", f"- {others[0]}.safetensors{more}"
    REFUSED[f"several_numbered_{number}"] = Refused(build, errors.CheckpointError, says)


# Of several models accelerate numbers all but the first.
_several_numbered(1, "model", "model_1")
_several_numbered(2, "model", "model_1", "model_2")
_several_numbered(3, "model", "model2")
_several_numbered(4, "adapter_model", "adapter_model_1")
_several_numbered(5, "consolidated", "consolidated.00", "consolidated.01")
_several_numbered(6, "lora", "lora-000010", "lora-000020")


@refused(errors.CheckpointError, "several checkpoints", "net-1-of-1", "net-1-of-2")
def several_counts_of_shards(root: Path) -> Path:
    shard(root / "net-1-of-1.safetensors", a=1)
    shard(root / "net-1-of-2.safetensors", b=2)
    return root


@refused(
    errors.CheckpointError, "several checkpoints", "model.safetensors", "model.fp16.safetensors"
)
def several_precisions(root: Path) -> Path:
    shard(root / "model.safetensors", a=1)
    shard(root / "model.fp16.safetensors", a=1)
    return root


@refused(errors.CheckpointError, "several checkpoints", INDEX, "other.safetensors.index.json")
def two_indexes(root: Path) -> Path:
    shard(root / "1.safetensors", a=1)
    index(root, {"a": "1.safetensors"})
    return index(root, {"a": "1.safetensors"}, "other.safetensors.index.json")


@refused(errors.ShardNotFoundError, "shards are missing", "shard 2 of 3 is missing")
def shards_incomplete(root: Path) -> Path:
    shard(root / "model-00001-of-00003.safetensors", a=1)
    shard(root / "model-00003-of-00003.safetensors", b=2)
    return root


@refused(errors.SourceNotFoundError, "nothing to load", "an empty directory")
def nothing(root: Path) -> Path:
    return root


@refused(errors.SourceNotFoundError, "nothing to load", "config.json, pytorch_model.bin")
def only_other_files(root: Path) -> Path:
    (root / "config.json").write_text("{}")
    (root / "pytorch_model.bin").write_bytes(b"")
    (root / ".hidden.safetensors").write_bytes(b"")
    return root


# --- something else in a file's place ----------------------------------------------------------


@refused(errors.SourceNotFoundError, "could not open")
def nothing_in_place(root: Path) -> Path:
    return root / "x.safetensors"


@refused(errors.SourceNotFoundError, "could not open")
def broken_link_in_place(root: Path) -> Path:
    (root / "x.safetensors").symlink_to("gone")
    return root / "x.safetensors"


@refused(errors.SourceError, "could not open", "symbolic links")
def loop_in_place(root: Path) -> Path:
    (root / "x.safetensors").symlink_to("y.safetensors")
    (root / "y.safetensors").symlink_to("x.safetensors")
    return root / "x.safetensors"


@refused(errors.SourceError, "could not open", "symbolic links")
def loop_in_index_in_place(root: Path) -> Path:
    (root / "x.safetensors").symlink_to("x.safetensors")
    return index(root, {"a": "x.safetensors"})


@refused(errors.SourceError, "not a regular file", "a FIFO")
def fifo_in_place(root: Path) -> Path:
    os.mkfifo(root / "x.safetensors")
    return root / "x.safetensors"


@refused(errors.SourceError, "not a regular file", "a FIFO")
def fifo_linked_in_place(root: Path) -> Path:
    os.mkfifo(root / "pipe")
    (root / "x.safetensors").symlink_to("pipe")
    return index(root, {"a": "x.safetensors"})


@refused(errors.SourceError, "not a regular file", "a character device")
def device_in_place(root: Path) -> Path:
    (root / "x.safetensors").symlink_to("/dev/zero")
    return root / "x.safetensors"


@refused(errors.SourceError, "not a regular file", "a socket")
def socket_in_place(root: Path) -> Path:
    here = os.getcwd()
    os.chdir(root)  # A socket's path has 107 bytes at most.
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("x.safetensors")
    finally:
        os.chdir(here)
    return root / "x.safetensors"


@refused(errors.SourceError, "not a regular file", "a directory")
def directory_in_place(root: Path) -> Path:
    (root / "x.safetensors").mkdir()
    return index(root, {"a": "x.safetensors"})


@refused(errors.ShardNotFoundError, "shard 1 of 2 is missing")
def directory_in_place_of_a_shard(root: Path) -> Path:
    (root / "model-00001-of-00002.safetensors").mkdir()
    shard(root / "model-00002-of-00002.safetensors", a=1)
    return root


@refused(errors.SourceNotFoundError, "nothing to load in the directory")
def directory_alone(root: Path) -> Path:
    shard(root / "x.safetensors" / "model.safetensors", a=1)
    return root


@refused(errors.SourceNotFoundError, "could not open")
def file_as_directory_in_place(root: Path) -> Path:
    return shard(root / "x.safetensors", a=1) / "y.safetensors"


@refused(errors.HeaderError, "too short")
def proc_file_in_place(root: Path) -> Path:
    (root / "x.safetensors").symlink_to("/proc/self/environ")
    return root / "x.safetensors"


# --- directories that load ----------------------------------------------------------------------


@loads
def plain_directory(root: Path) -> Path:
    shard(root / "anything.safetensors", a=1, b=2)
    (root / "config.json").write_text("{}")
    return root


@loads
def directories_beside(root: Path) -> Path:
    shard(root / "model.safetensors", a=1, b=2)
    shard(root / "old.safetensors" / "model.safetensors", c=3)
    (root / "linked.npz").symlink_to("old.safetensors")
    (root / "old.safetensors.index.json").mkdir()
    return root


@loads
def shards_without_index(root: Path) -> Path:
    shard(root / "model-00001-of-00002.safetensors", a=1)
    shard(root / "model-00002-of-00002.safetensors", b=2)
    return root


@loads
def shards_without_total(root: Path) -> Path:
    shard(root / "consolidated.00.safetensors", a=1)
    shard(root / "consolidated.01.safetensors", b=2)
    return root


@loads
def shards_from_zero(root: Path) -> Path:
    shard(root / "x_0-of-2.safetensors", a=1)
    shard(root / "x_1-of-2.safetensors", b=2)
    return root


@loads
def indexed(root: Path) -> Path:
    shard(root / "1.safetensors", a=1)
    shard(root / "2.safetensors", b=2)
    return index(root, {"a": "1.safetensors", "b": "./2.safetensors"})


@loads
def indexed_spelled_twice(root: Path) -> Path:
    shard(root / "1.safetensors", a=1, b=2)
    return index(root, {"a": "1.safetensors", "b": ".//1.safetensors"})


@loads
def indexed_of_two(root: Path) -> Path:
    """Of a tensor that two shards hold, the index says which is meant."""
    shard(root / "1.safetensors", a=1, b=7)
    shard(root / "2.safetensors", b=2)
    return index(root, {"a": "1.safetensors", "b": "2.safetensors"})


@loads
def indexed_in_part(root: Path) -> Path:
    """What the shards hold beside the index's names is loaded, as by other loaders."""
    shard(root / "1.safetensors", a=1, b=2)
    return index(root, {"a": "1.safetensors"})


@loads
def indexed_subfolders(root: Path) -> Path:
    shard(root / "x" / "y" / "1.safetensors", a=1)
    shard(root / "z" / "1.safetensors", b=2)
    return index(root, {"a": "x/y/1.safetensors", "b": "z/1.safetensors"})


@loads
def index_beside_others(root: Path) -> Path:
    """The index says what the model is; the same weights in another layout lie beside it."""
    indexed(root)
    shard(root / "consolidated.safetensors", a=7, b=7)
    shard(root / "model.safetensors", a=7, b=7)
    return root


@loads
def hidden_files(root: Path) -> Path:
    """macOS leaves ._model.safetensors on disks that are not its own."""
    shard(root / "model.safetensors", a=1, b=2)
    (root / "._model.safetensors").write_bytes(b"\0\5\x16\7" * 20)
    (root / ".model.safetensors.index.json").write_text("{}")
    return root


def _hub(root: Path) -> Path:
    """A snapshot as huggingface_hub lays it: names link to blobs called by their hash."""
    model = root / "models--org--name"
    table = {}
    for number, (name, value) in enumerate({"a": 1, "b": 2}.items(), 1):
        blob = f"{number:064x}"
        shard(model / "blobs" / blob, **{name: value})
        file = f"model-0000{number}-of-00002.safetensors"
        snapshot = model / "snapshots" / ("e" * 40)
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / file).symlink_to(Path("..", "..", "blobs", blob))
        table[name] = file
    index(model / "blobs", table, "f" * 40)
    (snapshot / INDEX).symlink_to(Path("..", "..", "blobs", "f" * 40))
    return snapshot


@loads
def hub_cache(root: Path) -> Path:
    return _hub(root)


@loads
def hub_cache_index(root: Path) -> Path:
    return _hub(root) / INDEX


@loads
def hub_cache_folder_links(root: Path) -> Path:
    """Links to folders, and one through which `..` leads elsewhere than the text of the path."""
    snapshot = _hub(root)
    (root / "current").symlink_to(snapshot, target_is_directory=True)
    (root / "other").mkdir()
    (root / "other" / "deep").symlink_to(root / "models--org--name" / "blobs")
    return root / "other" / "deep" / ".." / "snapshots" / ("e" * 40)
