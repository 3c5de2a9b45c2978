"""Orbax's checkpoints on disk: which directory is meant, and what damage is called.

The checkpoints are written by Orbax in a process apart; tests/meshes/test_orbax.py compares values.
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
import random
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax_writer
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import mfload
from mfload import errors
from mfload.formats import ocdbt, orbax, orbax_directories, structure
from mfload.formats.crc32c import crc32c
from mfload.sources.directories import LocalDirectory

KINDS = ["v0-ocdbt-zarr2-zstd", "v0-ocdbt-zarr3-raw", "v1-files-zarr2-raw", "v1-files-zarr3-zstd"]


def located(path: object, *args: Any, **more: Any) -> str:
    """The path of what is read of a directory."""
    return orbax.locate(LocalDirectory(str(path)), *args, **more).name


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("orbax")
    command = [sys.executable, "-W", "ignore", orbax_writer.__file__, "2", str(place), *KINDS]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    return place


@pytest.fixture(params=KINDS)
def copied(written: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The item of a checkpoint that a test may damage."""
    return Path(located(shutil.copytree(written / request.param, tmp_path / "x")))


@pytest.fixture
def store(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / KINDS[0], tmp_path / "store"))


def failure(path: Path, kind: type[errors.MfloadError] = errors.MfloadError) -> Any:
    with pytest.raises(kind) as caught:
        mfload.load(path, "numpy")
    assert caught.value.file is not None
    return caught.value


# Which directory is meant.


def _step(root: Path, name: str, source: Path, *items: str) -> None:
    for item in items:
        shutil.copytree(located(source), root / name / item)
    if not items:
        shutil.copytree(located(source), root / name)


def test_the_newest_complete_step_is_read(written: Path, tmp_path: Path) -> None:
    source = written / KINDS[0]
    for name in ("9", "10", "2"):
        _step(tmp_path, name, source, "default")
    (tmp_path / "11").mkdir()  # Its writer was stopped.
    _step(tmp_path, "12.orbax-checkpoint-tmp", source, "default")
    assert located(tmp_path) == str(tmp_path / "10" / "default")
    assert located(tmp_path, step=2) == str(tmp_path / "2" / "default")
    assert located(tmp_path / "9") == str(tmp_path / "9" / "default")
    assert mfload.load(tmp_path, "numpy")["step"] == 7
    with pytest.raises(errors.SourceNotFoundError, match="no step 3") as caught:
        located(tmp_path, step=3)
    assert caught.value.expected == "2, 9, 10"
    for step in (11, 12):
        with pytest.raises(errors.CheckpointError, match="not finished") as unfinished:
            located(tmp_path, step=step)
        assert str(step) in str(unfinished.value.file)


def test_steps_with_a_prefix(written: Path, tmp_path: Path) -> None:
    source = written / KINDS[2]
    _step(tmp_path, "ckpt_00000005", source, "state", "extra")
    _step(tmp_path, "ckpt_00000040", source)  # As v0's Checkpointer writes: no item below.
    assert located(tmp_path) == str(tmp_path / "ckpt_00000040")
    assert located(tmp_path, 5) == str(tmp_path / "ckpt_00000005")  # It has two items.
    assert located(tmp_path, prefix="ckpt_") == str(tmp_path / "ckpt_00000040")
    assert len(mfload.load(tmp_path, "numpy")) == 17
    with pytest.raises(errors.SourceNotFoundError, match="no step with the prefix 'run_'"):
        located(tmp_path, prefix="run_")


def test_the_numbers_of_steps() -> None:
    for name, wanted in {
        "5": ("", 5), "model_0002": ("model_", 2), "checkpoint_0.5": ("checkpoint_", 0.5),
        "a_1e-05": ("a_", 1e-5), "a_-1.5": ("a_", -1.5), "run-5": ("run-", 5), "v1.2": ("v", 1.2),
        "-3": ("", -3), "a" + "1" * 18: ("a", int("1" * 18)),
    }.items():  # fmt: skip
        assert orbax_directories.numbered(name) == wanted
    for name in ("checkpoint_tmp", "checkpoint_5_gda", "a" + "1" * 19, "", "a_", "inf"):
        assert orbax_directories.numbered(name) is None
    assert orbax_directories.numbered("v15", "v1") == ("v1", 5)
    assert orbax_directories.numbered("run-5", "run") == ("run", -5)


def test_one_step_twice_is_refused(written: Path, tmp_path: Path) -> None:
    for name in ("a_5", "b_5"):
        _step(tmp_path, name, written / KINDS[0], "default")
    assert failure(tmp_path, errors.CheckpointError).problems == ("a_5", "b_5")


def _items(place: Path, source: Path) -> Path:
    """A step with two items that hold arrays, one of JSON, and one of another library's."""
    _step(place, "x", source, "params", "model")
    (place / "x" / "_CHECKPOINT_METADATA").write_text("{}")
    for name, file in (("config", "metadata"), ("iter", "process_0-of-1.json")):
        (place / "x" / name).mkdir()
        (place / "x" / name / file).write_text('{"rate": 0.5, "loss": NaN, "$": [null, "a"]}')
    return place / "x"


def test_every_call_takes_all_items(written: Path, tmp_path: Path) -> None:
    step = _items(tmp_path, written / KINDS[0])
    alone = mfload.load(step / "model", "numpy")
    wanted = [f"{item}.{name}" for item in ("model", "params") for name in alone]
    assert [*mfload.load(step, "numpy")] == wanted
    assert [name for name, _ in mfload.stream(step, "numpy")] == wanted
    assert mfload.plan(step).tensors == len(wanted)
    with mfload.open(step, "numpy") as opened:
        assert [*opened.keys()] == wanted
        assert opened.get_slice("params.params.w")[1:3].shape == (2, 48)
        assert json.loads(opened.metadata()[structure.ITEMS]) == {
            **dict.fromkeys(("config", "model", "params"), True), "iter": False,
        }  # fmt: skip
    report = mfload.Report()
    mfload.load(step, "numpy", report=report)
    assert "items that are not read: iter" in report.notes
    assert mfload.diff(step, step).equal
    mfload.convert(step, tmp_path / "x.safetensors")
    for path in (step, tmp_path / "x.safetensors"):
        tree = mfload.restore(path, framework="numpy")
        assert tree.keys() == {"config", "model", "params"}
        assert tree["model"]["step"] == 7
        assert type(tree["model"]["step"]) is int
        config = tree["config"]
        assert (config["rate"], config["$"]) == (0.5, [None, "a"])
        assert math.isnan(config["loss"])
    assert len(mfload.restore(step / "model", framework="numpy")) == len(tree["model"])


def test_items_beside_the_only_one_with_arrays(written: Path, tmp_path: Path) -> None:
    step = _items(tmp_path, written / KINDS[0])
    shutil.rmtree(step / "params")
    alone = mfload.load(step / "model", "numpy")
    assert [*mfload.load(step, "numpy")] == [*alone]  # Their names stay as they are.
    tree = mfload.restore(step, framework="numpy")
    assert tree.keys() == {"config", "model"}
    assert tree["model"].keys() == mfload.restore(step / "model", framework="numpy").keys()
    shutil.rmtree(step / "config")
    assert mfload.restore(step, framework="numpy").keys() == tree["model"].keys()
    assert located(step) == str(step)
    shutil.rmtree(step / "iter")
    assert located(step) == str(step / "model")


def test_metrics_are_no_item_beside_one(written: Path, tmp_path: Path) -> None:
    _step(tmp_path, "5", written / KINDS[0], "default")
    (tmp_path / "5" / "metrics").mkdir()
    (tmp_path / "5" / "metrics" / "metrics").write_text('{"loss": NaN}')
    assert located(tmp_path) == str(tmp_path / "5" / "default")
    assert mfload.restore(tmp_path, framework="numpy")["step"] == 7


@pytest.mark.parametrize(
    ("text", "what"), [("{", "not JSON"), ("[" * 200 + "]" * 200, "too deep"), ("\xff", "not JSON")]
)
def test_an_item_of_json_that_is_none(written: Path, tmp_path: Path, text: str, what: str) -> None:
    step = _items(tmp_path, written / KINDS[0])
    (step / "config" / "metadata").write_bytes(text.encode("latin-1"))
    error = failure(step, errors.HeaderError)
    assert what in error.message
    assert error.file == str(step / "config" / "metadata")


def test_an_unfinished_item(written: Path, tmp_path: Path) -> None:
    step = _items(tmp_path, written / KINDS[0])
    (step / "params").rename(step / "params.orbax-checkpoint-tmp-5")
    assert "not finished" in failure(step, errors.CheckpointError).message


def test_a_step_of_what_has_no_steps(written: Path) -> None:
    with pytest.raises(errors.UsageError, match="no steps"):
        located(written / KINDS[0], step=3)


@pytest.mark.parametrize("name", ["x.orbax-checkpoint-tmp", "x.orbax-checkpoint-tmp-17"])
def test_names_of_unfinished_checkpoints(written: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(written / KINDS[0], tmp_path / name)
    assert "not finished" in failure(tmp_path / name, errors.CheckpointError).message
    assert "not finished" in failure(tmp_path, errors.CheckpointError).message
    (tmp_path / name).rename(tmp_path / name.replace("x", "5", 1))
    assert "not finished" in failure(tmp_path, errors.CheckpointError).message


@pytest.mark.parametrize("text", ['{"commit_timestamp_nsecs": null}', '{"commit_timest'])
def test_a_step_without_its_commit(written: Path, tmp_path: Path, text: str) -> None:
    for name in ("0", "1"):
        _step(tmp_path, name, written / KINDS[0], "default")
    (tmp_path / "1" / "_CHECKPOINT_METADATA").write_text(text)
    assert located(tmp_path) == str(tmp_path / "0" / "default")
    (tmp_path / "0" / "_CHECKPOINT_METADATA").write_text(text)
    for path in (tmp_path, tmp_path / "1", tmp_path / "1" / "default"):
        assert "not finished" in failure(path, errors.CheckpointError).message
    with pytest.raises(errors.CheckpointError) as caught:
        located(tmp_path, 0)
    assert caught.value.file == str(tmp_path / "0")
    (tmp_path / "1" / "commit_success.txt").write_text("done")
    assert located(tmp_path) == str(tmp_path / "1" / "default")


def test_a_step_without_the_file_that_others_have_was_not_finished(
    written: Path, tmp_path: Path
) -> None:
    """Of old versions, in a bucket; a copy of local steps has it in none."""
    for name in ("0", "1"):
        _step(tmp_path, name, written / KINDS[0], "default")
        (tmp_path / name / "_CHECKPOINT_METADATA").unlink(missing_ok=True)
    assert located(tmp_path) == str(tmp_path / "1" / "default")
    (tmp_path / "0" / "commit_success.txt").write_text("done")
    assert located(tmp_path) == str(tmp_path / "0" / "default")


def test_without_its_tree_it_was_not_finished(copied: Path) -> None:
    (copied / orbax.TREE).unlink()
    assert orbax.TREE in failure(copied, errors.CheckpointError).message


def test_the_strings_of_the_writer(written: Path) -> None:
    metadata = mfload.open(written / KINDS[3], "numpy").metadata()
    assert json.loads(metadata[orbax.CUSTOM_KEY]) == {"run": "seven"}
    assert structure.KEY in metadata


def test_an_opened_checkpoint_in_another_process(written: Path, tmp_path: Path) -> None:
    for step in ("1", "2"):
        _step(tmp_path, step, written / KINDS[0], "default")
    with mfload.open(tmp_path, "numpy") as opened:
        there = pickle.dumps(opened)
        wanted = opened.get_tensor("params.w")
    _step(tmp_path, "3", written / KINDS[1], "default")  # Not the one that is open.
    with pickle.loads(there) as again:
        assert (again.get_tensor("params.w") == wanted).all()
        assert again.metadata() == mfload.open(tmp_path / "2", "numpy").metadata()
    tree = tmp_path / "2" / "default" / orbax.TREE
    tree.write_bytes(tree.read_bytes() + b" ")
    with pytest.raises(errors.SourceChangedError):
        pickle.loads(there)


@pytest.mark.parametrize("name", [orbax.TREE, ocdbt.MANIFEST])
def test_a_file_of_it_says_what_to_give(store: Path, name: str) -> None:
    assert "a part of an Orbax checkpoint: give its directory" in failure(store / name).message


# Damage.


def test_files_that_are_gone(store: Path) -> None:
    largest = max((f for f in store.rglob("d/*")), key=lambda f: f.stat().st_size)
    largest.unlink()
    error = failure(store, errors.SourceNotFoundError)
    assert error.file == str(largest)
    assert error.tensor
    shutil.rmtree(store / "d")
    assert failure(store, errors.SourceNotFoundError).file.startswith(str(store / "d"))


def test_files_that_are_truncated(copied: Path) -> None:
    for file in sorted(each for each in copied.rglob("*") if each.is_file()):
        whole = file.read_bytes()
        if not whole or file.name == "commit_success.txt" or file.name.startswith("_sharding"):
            continue
        if file.name == ocdbt.MANIFEST and file.parent != copied:
            continue  # Of one process's store, which the joint one does not read.
        file.write_bytes(whole[:-1])
        found = _loads_or_fails(copied)
        # What follows the last node of a file is not read, and not all JSON is needed.
        assert found is None or found.keys() == orbax_names()
        if file.name in (orbax.TREE, ocdbt.MANIFEST, ".zarray", "zarr.json"):
            assert found is None
            assert failure(copied).file == str(file)
        file.write_bytes(whole)
    assert len(mfload.load(copied, "numpy")) == 17


def orbax_names() -> set[str]:
    return {
        "params.w", "params.bf16", "params.fp8", "params.layers.0.k", "params.layers.1.k",
        "params.mlp/~/w", "params.zeros", "opt.0", "opt.1.nu", "flags", "step", "rate", "scalar",
        "double", "fortran", "big", "numbered.3",
    }  # fmt: skip


def test_an_array_that_the_store_lacks(copied: Path) -> None:
    tree = json.loads((copied / orbax.TREE).read_text())
    for name in ("ghost", "other"):
        tree["tree_metadata"][f"('{name}',)"] = entry(name)
    (copied / orbax.TREE).write_text(json.dumps(tree))
    error = failure(copied, errors.CheckpointError)
    first, second = error.problems
    assert "'ghost'" in first
    assert "'other'" in second


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ([["a.b"], ["a", "b"]], "same name"),
        ([["a"], ["a", "b"]], "leaves below"),
        ([["a", "b"], ["a"]], "leaves below"),
        ([["a", 0], ["a", 2]], "malformed list"),
        ([["a", 0], ["a", "b"]], "malformed list"),
        ([["a", None]], "malformed entry"),
    ],
)
def test_trees_that_are_none(store: Path, entries: list[list[Any]], what: str) -> None:
    table = {
        str(number): entry(
            *(key if key is None else str(key) for key in path),
            kinds=tuple(1 if isinstance(key, int) else 2 for key in path),
        )
        for number, path in enumerate(entries)
    }
    (store / orbax.TREE).write_text(json.dumps({"tree_metadata": table}))
    error = failure(store, errors.HeaderError)
    assert what in error.message
    if what == "same name":
        assert error.tensor == "a.b"
        assert error.found == "['a.b'] and ['a', 'b']"


def test_a_chunk_file_that_is_gone(written: Path, tmp_path: Path) -> None:
    item = Path(located(shutil.copytree(written / KINDS[2], tmp_path / "x")))
    before = mfload.load(item, "numpy")["params.w"]
    (item / "params.w" / "0.1").unlink()
    (problem,) = failure(item, errors.CheckpointError).problems
    assert "'params.w'" in problem
    tree = json.loads((item / orbax.TREE).read_text())
    assert tree.pop("store_array_data_equal_to_fill_value") is True
    (item / orbax.TREE).write_text(json.dumps(tree))
    after = mfload.load(item, "numpy")["params.w"]
    assert not after[:, 24:].any()
    assert (after[:, :24] == before[:, :24]).all()


# Stores that no writer makes.


def entry(*keys: Any, kinds: tuple[int, ...] = ()) -> dict[str, Any]:
    """What `_METADATA` says of an array."""
    pairs = zip(keys, kinds or [2] * len(keys), strict=True)
    return {
        "key_metadata": [{"key": key, "key_type": kind} for key, kind in pairs],
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
    }


def varint(value: int) -> bytes:
    made = b""
    while value > 0x7F:
        made, value = made + bytes([value & 0x7F | 0x80]), value >> 7
    return made + bytes([value])


def column(*values: int) -> bytes:
    return b"".join(map(varint, values))


def framed(magic: int, body: bytes, packed: bool = False) -> bytes:
    if packed:
        import zstandard

        body = zstandard.ZstdCompressor(19).compress(body)
    head = magic.to_bytes(4, "big") + struct.pack("<QBB", len(body) + 18, 0, packed)
    return head + body + crc32c(head + body).to_bytes(4, "little")


def files(*paths: bytes, bases: tuple[int, ...] | None = None) -> bytes:
    count = len(paths)
    made = column(count, *[0] * (count - 1), *map(len, paths), *(bases or [0] * count))
    return made + b"".join(paths)


def manifest(path: bytes, offset: int, nbytes: int, height: int, keys: int = 1) -> bytes:
    body = bytes(16) + column(0, 100, 1 << 27) + b"\4" + column(0) + files(path)
    body += column(1, 1) + bytes([height]) + column(0, offset, nbytes, keys, 9, 9) + bytes(8)
    return framed(0x0CDB3A2A, body)


def leaf(*pairs: tuple[bytes, bytes]) -> bytes:
    count = len(pairs)
    body = b"\0" + files() + column(count, *[0] * (count - 1), *(len(k) for k, _ in pairs))
    body += b"".join(k for k, _ in pairs) + column(*(len(v) for _, v in pairs)) + bytes(count)
    return framed(0x0CDB20DE, body + b"".join(v for _, v in pairs))


def inner(height: int, path: bytes, *children: tuple[bytes, int, int]) -> bytes:
    count, keys, offsets, sizes = len(children), *zip(*children, strict=True)
    body = bytes([height]) + files(path) + column(count, *[0] * (count - 1), *map(len, keys))
    body += column(*[0] * count) + b"".join(keys)
    body += column(*[0] * count, *offsets, *sizes, *[1] * count, *[9] * count, *[9] * count)
    return framed(0x0CDB20DE, body)


def laid(place: Path, data: bytes, height: int, path: bytes = b"d/0") -> Path:
    """A store whose root is at the end of a data file; `_METADATA` names one array."""
    (place / "d").mkdir()
    (place / "d" / "0").write_bytes(data)
    length = int.from_bytes(data[-1:] and data[data.rfind(b"\x0c\xdb\x20\xde") :][4:12], "little")
    root = manifest(path, len(data) - length, length, height)
    (place / ocdbt.MANIFEST).write_bytes(root)
    (place / orbax.TREE).write_text(json.dumps({"tree_metadata": {"('w',)": entry("w")}}))
    return place


def array(**changes: Any) -> bytes:
    found = {"zarr_format": 2, "shape": [2], "chunks": [2], "dtype": "<f4", "compressor": None,
             "filters": None, "order": "C", "fill_value": None}  # fmt: skip
    return json.dumps({**found, **changes}).encode()


def test_a_store_by_hand(tmp_path: Path) -> None:
    value = np.array([1, 2], "<f4")
    laid(tmp_path, leaf((b"w/.zarray", array()), (b"w/0", value.tobytes())), 0)
    assert (mfload.load(tmp_path, "numpy")["w"] == value).all()


def test_items_whose_names_meet(tmp_path: Path) -> None:
    for item, name in (("a.b", "w"), ("a", "b.w")):
        (tmp_path / item).mkdir()
        data = leaf((f"{name}/.zarray".encode(), array()), (f"{name}/0".encode(), bytes(8)))
        laid(tmp_path / item, data, 0)
        (tmp_path / item / orbax.TREE).write_text(json.dumps({"tree_metadata": {"": entry(name)}}))
    error = failure(tmp_path, errors.CheckpointError)
    assert "the same name" in error.message
    assert error.problems == ("a", "a.b")


LEAF = leaf((b"w/.zarray", array()), (b"w/0", bytes(8)))


def test_nodes_that_lead_in_circles_or_astray(tmp_path: Path) -> None:
    length = len(inner(1, b"d/0", (b"", 0, 100)))
    cases: list[tuple[str, Callable[[Path], Path]]] = [
        ("same child", lambda p: laid(p, inner(1, b"d/0", (b"", 0, length)), 1)),
        ("at another height", lambda p: laid(p, LEAF + inner(2, b"d/0", (b"", 0, len(LEAF))), 2)),
        ("same child", lambda p: laid(
            p, LEAF + inner(1, b"d/0", (b"", 0, len(LEAF)), (b"z", 0, len(LEAF))), 1)),
        ("out of the file", lambda p: laid(p, inner(1, b"d/0", (b"", 5, 999)), 1)),
        ("outside it", lambda p: laid(p, inner(1, b"../x", (b"", 0, 9)), 1)),
        ("outside it", lambda p: laid(p, inner(1, b"/etc/passwd", (b"", 0, 9)), 1)),
        ("outside it", lambda p: laid(p, LEAF, 0, b"d/../../x")),
        ("not in order", lambda p: laid(p, leaf((b"b", b"1"), (b"a", b"2")), 0)),
        ("not in order", lambda p: laid(p, leaf((b"b", b"1"), (b"b", b"2")), 0)),
        ("not UTF-8", lambda p: laid(p, leaf((b"\xff", b"1")), 0)),
        ("fewer entries", lambda p: laid(p, framed(0x0CDB20DE, b"\0\0" + varint(1 << 40)), 0)),
        ("malformed number", lambda p: laid(p, framed(0x0CDB20DE, b"\0" + b"\xff" * 12), 0)),
        ("end within", lambda p: laid(p, framed(0x0CDB20DE, b""), 0)),
        ("bytes follow", lambda p: laid(p, framed(0x0CDB20DE, LEAF[14:-4] + b"x"), 0)),
    ]  # fmt: skip
    for number, (what, make) in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        assert what in failure(make(tmp_path / str(number)), errors.HeaderError).message, number


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"shape": [1 << 62], "chunks": [1 << 62]}, "too large"),
        ({"shape": [1 << 70]}, "malformed shape"),
        ({"shape": [-2]}, "malformed shape"),
        ({"shape": [True]}, "malformed shape"),
        ({"shape": [2, 2]}, "malformed chunks"),
        ({"chunks": [0]}, "malformed chunks"),
        ({"chunks": [3]}, "another size"),
        ({"dtype": 4}, "malformed dtype"),
        ({"order": "K"}, "malformed order"),
        ({"filters": [{"id": "delta"}]}, "malformed filters"),
        ({"compressor": {"id": "lz4"}}, "can't decompress"),
        ({"dimension_separator": "-"}, "malformed dimension_separator"),
        ({"shape": [4], "fill_value": "x"}, "not a fill value"),
    ],
)
def test_metadata_of_arrays(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    data = leaf((b"w/.zarray", array(**changes)), (b"w/0", bytes(8)))
    error = failure(laid(tmp_path, data, 0), errors.HeaderError)
    assert what in error.message
    assert error.tensor == "w"


def test_a_dtype_that_is_not_known_fails_its_tensor_alone(tmp_path: Path) -> None:
    laid(tmp_path, leaf((b"w/.zarray", array(dtype="int3")), (b"w/0", bytes(2))), 0)
    assert mfload.open(tmp_path, "numpy").keys() == ["w"]
    with pytest.raises(errors.UnsupportedDtypeError) as caught:
        mfload.load(tmp_path, "numpy")
    assert (caught.value.tensor, caught.value.found) == ("w", "int3")


@pytest.mark.parametrize("dtype", ["int2", "int4", "uint2", "uint4"])
def test_narrow_integers_with_a_fill_value(tmp_path: Path, dtype: str) -> None:
    """tensorstore writes no unsigned ones; whoever does may set the bits above the number."""
    codes = np.array([0x0E, 0xFE, 0x71, 0x02], np.uint8)
    fill = 3 if dtype.startswith("u") else -2
    metadata = array(dtype=dtype, shape=[6], chunks=[4], fill_value=fill)
    laid(tmp_path, leaf((b"w/.zarray", metadata), (b"w/0", codes.tobytes())), 0)
    kind = np.dtype(getattr(ml_dtypes, dtype))
    wanted = [*codes.view(kind).astype(np.int8).tolist(), fill, fill]
    found = mfload.load(tmp_path, "numpy")["w"]
    assert found.dtype == kind
    assert found.astype(np.int8).tolist() == wanted
    assert mfload.load(tmp_path, "numpy", dtype=[("", "int32")])["w"].tolist() == wanted
    metadata = array(dtype=dtype, shape=[6], chunks=[4], fill_value=16)
    (tmp_path / "bad").mkdir()
    laid(tmp_path / "bad", leaf((b"w/.zarray", metadata), (b"w/0", codes.tobytes())), 0)
    assert failure(tmp_path / "bad", errors.HeaderError).message == "not a fill value"


def test_many_absent_chunks_take_no_memory(tmp_path: Path) -> None:
    """10**15 chunks of one element, of which one is there."""
    changes = {"shape": [10**5] * 3, "chunks": [1, 1, 1], "dimension_separator": "."}
    place = laid(tmp_path, leaf((b"w/.zarray", array(**changes)), (b"w/7.8.9", b"\0\0\x80?")), 0)
    with mfload.open(place, "numpy") as opened:
        part = opened.get_slice("w")[6:9, 8, 9]
        assert part.tolist() == [0, 1, 0]
    _, rows, _ = orbax.read_directory(LocalDirectory(str(place)))
    assert len(rows[0].pieces) == 7


def test_a_small_node_has_few_entries(tmp_path: Path) -> None:
    """A few kilobytes of zstd can't become gigabytes of keys."""
    count = 2_000_000
    entries = varint(count) + bytes(count - 1) + bytes([1]) * count + b"a" * count
    tails = b"".join(bytes([97 + a, b]) for a in range(5) for b in range(1, 101))
    keys = column(500, *[60000] * 499, 60002, *[2] * 499) + b"a" * 60000 + tails + bytes(1000)
    for number, (body, what) in enumerate([
        (entries + bytes(2 * count), "too many entries"),
        (keys, "keys of a node are over the limit"),
    ]):  # fmt: skip
        place = tmp_path / str(number)
        place.mkdir()
        node = framed(0x0CDB20DE, b"\0" + files() + body, packed=True)
        assert len(node) < 8000
        tracemalloc.start()
        with pytest.raises(errors.HeaderError, match=what):
            mfload.load(laid(place, node, 0), "numpy")
        assert tracemalloc.get_traced_memory()[1] < 5 * len(body) + 10e6
        tracemalloc.stop()


def test_many_arrays_that_are_alike(tmp_path: Path) -> None:
    """Such a node is small, and has as many entries as a writer may give it."""
    names = [f"layer_{number:05d}" for number in range(5000)]
    pairs = itertools.pairwise(names)
    shared = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in pairs]
    tails = [name[n:] for n, name in zip([0, *shared], names, strict=True)]
    value = array()
    body = column(5000, *shared, *(len(tail) + 8 for tail in tails))
    body += b"".join(f"{tail}/.zarray".encode() for tail in tails)
    body += column(*[len(value)] * 5000) + bytes(5000) + value * 5000
    node = framed(0x0CDB20DE, b"\0" + files() + body, packed=True)
    assert 5000 / len(node) > 3
    laid(tmp_path, node, 0)
    tree = {"tree_metadata": {f"('{name}',)": entry(name) for name in names}}
    (tmp_path / orbax.TREE).write_text(json.dumps(tree))
    assert len(mfload.open(tmp_path, "numpy").keys()) == 5000


def test_the_keys_of_a_store_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ocdbt, "MAX_KEYS", 1)
    with pytest.raises(errors.HeaderError, match="too many keys"):
        mfload.load(laid(tmp_path, LEAF, 0), "numpy")


def test_without_zstandard(written: Path) -> None:
    for kind in (KINDS[0], KINDS[3]):
        code = (
            "import sys, mfload\nsys.modules['zstandard'] = None\n"
            "try: mfload.load(sys.argv[1], 'numpy')\n"
            "except mfload.errors.FrameworkMissingError as error: print(error)\n"
        )
        command = [sys.executable, "-c", code, str(written / kind)]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "pip install 'zstandard>=" in found.stdout


def test_reading_imports_neither_jax_nor_tensorstore(written: Path) -> None:
    code = (
        "import sys, mfload\n"
        "for path in sys.argv[1:]: mfload.load(path, 'numpy')\n"
        "print({'jax', 'tensorstore', 'orbax', 'numcodecs', 'zarr'} & {*sys.modules})\n"
    )
    command = [sys.executable, "-c", code, *(str(written / kind) for kind in KINDS)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_one_row_reads_its_pages(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / ".zarray").write_bytes(array(shape=[1000, 1024], chunks=[1000, 1024]))
    rows = np.arange(1000 * 1024, dtype="<f4").reshape(1000, 1024)
    (tmp_path / "w" / "0.0").write_bytes(rows.tobytes())
    (tmp_path / orbax.TREE).write_text(json.dumps({"tree_metadata": {"('w',)": entry("w")}}))
    _, (info,), _ = orbax.read_directory(LocalDirectory(str(tmp_path)))
    assert info.simple
    plan = mfload.plan(tmp_path, "numpy", shardings=[("w", 0)], shard=(3, 1000))
    assert plan.read_bytes == 4096
    with mfload.open(tmp_path, "numpy") as opened:
        assert (opened.get_slice("w")[77] == rows[77]).all()


# Random damage.


def _loads_or_fails(path: Path) -> dict[str, Any] | None:
    try:
        return mfload.load(path, "numpy")
    except errors.MfloadError:
        return None


damages = st.tuples(
    st.sampled_from(["flip", "cut", "drop", "zero"]), st.floats(0, 1), st.integers(0, 7)
)


def damaged(raw: bytes, damage: tuple[str, float, int]) -> bytes:
    kind, where, bit = damage
    at = min(int(where * len(raw)), len(raw) - 1)
    if kind == "flip":
        return raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]
    if kind == "cut":
        return raw[:at]
    if kind == "drop":
        return raw[:at] + raw[at + 1 + bit :]
    return raw[:at] + bytes(bit + 1) + raw[at + bit + 1 :]


@pytest.mark.parametrize("kind", KINDS)
def test_damage_raises_or_does_nothing(written: Path, tmp_path: Path, kind: str) -> None:
    item = Path(located(shutil.copytree(written / kind, tmp_path / "x")))
    whole = mfload.load(item, "numpy")
    candidates = sorted(f for f in item.rglob("*") if f.is_file() and f.stat().st_size)

    @settings(suppress_health_check=[*HealthCheck], deadline=None)
    @given(st.sampled_from(candidates), damages)
    def one(file: Path, damage: Any) -> None:
        raw = file.read_bytes()
        try:
            file.write_bytes(damaged(raw, damage))
            found = _loads_or_fails(item)
            checked = file.name == ocdbt.MANIFEST or file.parent == item / "d"
            if checked and found is not None:  # All of it has a CRC.
                assert {name: each.tobytes() for name, each in found.items()} == {
                    name: each.tobytes() for name, each in whole.items()
                }
        finally:
            file.write_bytes(raw)

    one()


_VALUES: list[Any] = [
    *(None, True, 0, 1, -1, 3, 1 << 40, 1 << 64, 0.5, 1e300, "", "x", "0", "<f4", "zstd", "bytes"),
    *("NaN", "0x00", "../x", [], [0], [-1], [1 << 40], [[1]], {}, {"name": "x"}),
]


def changed(text: bytes, rng: random.Random) -> bytes:
    """JSON with another value, without one, or with one twice, at any depth."""
    tree = json.loads(text)
    places: list[tuple[Any, Any]] = []
    nodes: list[Any] = [tree]
    while nodes:
        node = nodes.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        places += [(node, key) for key in keys]
        nodes += [node[key] for key in keys if isinstance(node[key], dict | list)]
    node, key = rng.choice(places)
    how = rng.random()
    if how < 0.7:
        node[key] = rng.choice(_VALUES)
    elif how < 0.85:
        del node[key]
    elif isinstance(node, dict):
        node[rng.choice(["name", "shape", "x"])] = node[key]
    else:
        node.insert(key, node[key])
    return json.dumps(tree).encode()


@pytest.mark.parametrize("kind", KINDS[2:])
def test_json_with_other_values(written: Path, tmp_path: Path, kind: str) -> None:
    item = Path(located(shutil.copytree(written / kind, tmp_path / "x")))
    names = (orbax.TREE, "_strings.json", ".zarray", "zarr.json", "process_0")
    candidates = sorted(f for f in item.rglob("*") if f.name in names and f.is_file())
    rng, outcomes = random.Random(16), [0, 0]
    for _ in range(800):
        file = rng.choice(candidates)
        raw = file.read_bytes()
        file.write_bytes(changed(raw, rng))
        outcomes[_loads_or_fails(item) is None] += 1
        file.write_bytes(raw)
    assert min(outcomes) > 100, outcomes


@pytest.mark.parametrize("kind", KINDS[:2])
def test_damage_behind_a_right_checksum(written: Path, tmp_path: Path, kind: str) -> None:
    """A malformed node raises one of mfload's errors, also with a right checksum."""
    import zstandard

    item = Path(located(shutil.copytree(written / kind, tmp_path / "x")))
    (node,) = (item / "d").iterdir()
    raw = node.read_bytes()
    body = raw[14:-4]
    if raw[13]:
        body = zstandard.ZstdDecompressor().stream_reader(body).read(1 << 24)

    @settings(suppress_health_check=[*HealthCheck], deadline=None)
    @given(st.lists(damages, min_size=1, max_size=2))
    def one(several: Any) -> None:
        changed = body
        for each in several:
            changed = damaged(changed or b"x", each)
        made = framed(0x0CDB20DE, changed)
        node.write_bytes(made)
        (item / ocdbt.MANIFEST).write_bytes(manifest(f"d/{node.name}".encode(), 0, len(made), 0))
        _loads_or_fails(item)

    one()
