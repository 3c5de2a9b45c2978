"""`mfload ls`: every tensor on a line of its own, totals that add up, filters that filter."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from conftest import Run, process

from mfload.cli import app, ls
from mfload.formats import checkpoint


def _sparse(path: Path, rows: list[tuple[str, str, list[int], int]]) -> None:
    """A file whose data is a hole."""
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape, nbytes in rows:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def test_the_whole_listing(run: Run, shards: Path) -> None:
    assert run("ls", shards) == (
        0,
        "dtype  shape   bytes  file                              name\n"
        "F32    [8, 4]  128 B  model-00001-of-00002.safetensors  a\n"
        "F32    [1]       4 B  model-00002-of-00002.safetensors  c\n"
        "I16    [6]      12 B  model-00002-of-00002.safetensors  b\n"
        "\n"
        "3 tensors, 144 B, in 2 files\n"
        "\n"
        "tensors  bytes  dtype\n"
        "      2  132 B  F32\n"
        "      1   12 B  I16\n"
        "\n"
        "tensors  bytes  file\n"
        "      1  128 B  model-00001-of-00002.safetensors\n"
        "      2   16 B  model-00002-of-00002.safetensors\n",
        "",
    )


def _names(run: Run, *arguments: object) -> list[str]:
    ran = run("ls", *arguments, "--quiet")
    assert (ran.code, ran.err) == (0, "")
    return [line.split()[-1] for line in ran.out.splitlines()]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--names", r"\.q\."], {"layers.0.q.weight", "layers.0.q.bias", "layers.10.q.weight",
                                 "layers.2.q.weight"}),
        (["--names", "^embed"], {"embed.weight"}),
        (["--dtype", "I64"], {"steps"}),
        (["--dtype", "int64", "--dtype", "torch.float16"], {"steps", "embed.weight"}),
        (["--larger-than", "1KiB"], {"embed.weight"}),
        (["--larger-than", "1023"], {"embed.weight", "layers.0.q.weight", "layers.10.q.weight",
                                     "layers.2.q.weight"}),
        (["--smaller-than", "0.064kB"], {"steps"}),
        (["--smaller-than", "65", "--dtype", "F32"], {"layers.0.q.bias"}),
        (["--dtype", "F64"], set()),
    ],
)  # fmt: skip
def test_filters(run: Run, model: Path, options: list[str], names: set[str]) -> None:
    assert set(_names(run, model, *options)) == names


def test_orders(run: Run, model: Path) -> None:
    assert _names(run, model, "--sort", "name") == [
        "embed.weight", "layers.0.q.bias", "layers.0.q.weight", "layers.2.q.weight",
        "layers.10.q.weight", "steps",
    ]  # fmt: skip
    sizes = [row.nbytes for row in checkpoint.read(model)[0].tensors.values()]
    by_size = run("ls", model, "--sort", "size", "--quiet", "--bytes").out.splitlines()
    assert [int(line.split()[-2]) for line in by_size] == sorted(sizes, reverse=True)
    assert _names(run, model) == list(checkpoint.read(model)[0])
    assert run("ls", model, "--sort", "nme").code == 2


def test_a_limit_leaves_rows_out_and_totals_as_they_are(run: Run, model: Path) -> None:
    lines = run("ls", model, "--limit", "2").out.splitlines()
    assert lines[3] == "… and 4 more"
    assert lines[5] == "6 tensors, 5.07 KiB, in 1 file"
    assert len(_names(run, model, "--limit", "2")) == 2
    assert len(_names(run, model, "--limit", "99")) == 6
    data = run("ls", model, "--limit", "1", "--sort", "size", "--json").json
    assert [each["name"] for each in data["tensors"]] == ["embed.weight"]
    assert data["total"]["tensors"] == 6
    assert "… and 2 more" in run("ls", model, "--tree", "--depth", "1", "--limit", "1").out


def test_json_says_all_of_it(run: Run, shards: Path) -> None:
    data = run("ls", shards, "--json").json
    index, sources = checkpoint.read(shards)
    assert data["total"] == {"tensors": 3, "bytes": 144}
    assert data["dtypes"]["F32"] == {"tensors": 2, "bytes": 132}
    assert [each["file"] for each in data["files"]] == list(index.files)
    assert [each["size"] for each in data["files"]] == [source.size for source in sources]
    assert [each["bytes"] for each in data["files"]] == [128, 16]
    for each, row in zip(data["tensors"], index.tensors.values(), strict=True):
        assert each == {
            "name": row.name, "dtype": row.dtype.name, "shape": list(row.shape),
            "bytes": row.nbytes, "file": index.files[row.pieces[0].source],
            "offset": row.pieces[0].offset,
        }  # fmt: skip
    summary = run("ls", shards, "--json", "--summary").json
    del data["tensors"]
    assert summary == data


def test_summary_and_metadata(run: Run, model: Path) -> None:
    assert run("ls", model, "--summary").out.splitlines()[0] == "6 tensors, 5.07 KiB, in 1 file"
    assert "format    pt" in run("ls", model, "--summary", "--metadata").out
    assert run("ls", model, "--json").json["metadata"] == {"format": "pt"}


def test_a_tree_groups_by_dots_and_counts(run: Run, model: Path) -> None:
    ran = run("ls", model, "--tree", "--sort", "name")
    lines = ran.out.split("\n\n")[0].splitlines()
    assert lines == [
        "tensors      bytes  name",
        "      1      2 KiB  embed.weight  F16 [64, 16]",
        "      4  3.062 KiB  layers",
        "      2  1.062 KiB  ├── 0.q",
        "      1       64 B  │   ├── bias  F32 [16]",
        "      1      1 KiB  │   └── weight  F32 [16, 16]",
        "      1      1 KiB  ├── 2.q.weight  F32 [16, 16]",
        "      1      1 KiB  └── 10.q.weight  F32 [16, 16]",
        "      1        8 B  steps  I64 [1]",
    ]


def test_depth_leaves_out_what_lies_below(run: Run, model: Path) -> None:
    lines = run("ls", model, "--depth", "1", "--quiet").out.splitlines()
    assert [line.split("  ")[-2:] for line in lines if "layers" in line] == [["layers", "…"]]
    assert len(lines) == 3
    assert run("ls", model, "--tree", "--depth", "0").code == 2


def test_a_tensor_may_be_a_prefix_of_others(run: Run, tmp_path: Path) -> None:
    path = samples.save(tmp_path / "x.safetensors", {"a": np.zeros(1), "a.b": np.zeros(2)})
    lines = run("ls", path, "--tree", "--quiet").out.splitlines()
    assert [line.split(maxsplit=3)[-1] for line in lines] == ["a  F64 [1]", "└── b  F64 [2]"]


def test_names_made_of_dots_have_a_tree_all_the_same(run: Run, tmp_path: Path) -> None:
    names = [".".join("a" * depth) for depth in range(1, 300)] + ["." * 5000, "." * 5000 + "a"]
    path = samples.save_raw(tmp_path / "x.safetensors", [(name, "U8", (1,), b"") for name in names])
    assert run("ls", path).code == 4
    path = samples.save_raw(tmp_path / "x.safetensors", [(x, "U8", (1,), b"x") for x in names])
    ran = run("ls", path, "--tree", "--quiet")
    assert ran.code == 0
    assert 64 <= max(line.count("    ") for line in ran.out.splitlines()) <= 66


def test_digits_without_end_can_be_sorted() -> None:
    long = ["9" * 9000, "1" + "0" * 9000, "8" * 9000, "007", "7a"]
    assert sorted(long, key=ls.natural)[-3:] == ["8" * 9000, "9" * 9000, "1" + "0" * 9000]


def test_a_dtype_nobody_knows_is_listed(run: Run, tmp_path: Path) -> None:
    path = samples.save_raw(tmp_path / "x.safetensors", [("a", "Q4_0", (32,), b"x" * 18)])
    assert run("ls", path, "--quiet").out.split() == ["Q4_0", "[32]", "18", "B", "a"]
    assert _names(run, path, "--dtype", "Q4_0") == ["a"]


def test_no_tensors_at_all(run: Run, tmp_path: Path) -> None:
    path = samples.save_raw(tmp_path / "x.safetensors", [])
    assert run("ls", path) == (
        0, "dtype  shape  bytes  name\n\n0 tensors, 0 B, in 1 file\n", "",
    )  # fmt: skip
    assert run("ls", path, "--quiet") == (0, "", "")
    assert run("ls", path, "--tree", "--quiet") == (0, "", "")


def test_a_terabyte_lists_at_once(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "tera.safetensors"
    _sparse(path, [(f"layer.{n}", "BF16", [1 << 16, 1 << 16], 1 << 33) for n in range(128)])
    assert path.stat().st_size > 1 << 40
    start = time.perf_counter()
    ran = run("ls", path)
    assert time.perf_counter() - start < 2
    assert "128 tensors, 1 TiB, in 1 file" in ran.out


def test_20000_tensors_are_all_there_and_quick(tmp_path: Path) -> None:
    path = tmp_path / "many.safetensors"
    names = [f"model.layers.{n // 100}.mlp.experts.{n % 100}.weight" for n in range(20_000)]
    _sparse(path, [(name, "BF16", [64, 32], 4096) for name in names])
    start = time.perf_counter()
    ran = process("ls", path, "--quiet")
    # It takes 0.4 s; a table drawn by rich would take minutes.
    assert time.perf_counter() - start < 10
    assert [line.split()[-1] for line in ran.out.splitlines()] == names


def test_1000_shards_are_all_there_and_quick(tmp_path: Path) -> None:
    placed: dict[str, str] = {}
    for n in range(1000):
        file = f"model-{n + 1:05}-of-01000.safetensors"
        rows = [(f"layer.{n}.{k}", "BF16", [1024], 2048) for k in range(20)]
        _sparse(tmp_path / file, rows)
        placed.update({row[0]: file for row in rows})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    start = time.perf_counter()
    ran = process("ls", tmp_path, "--json")
    assert time.perf_counter() - start < 10
    assert len(ran.json["files"]) == 1000
    assert {each["name"] for each in ran.json["tensors"]} == placed.keys()
    assert len(process("ls", tmp_path, "--summary").out.splitlines()) == 1006


@pytest.mark.parametrize(
    "words",
    [
        ["a"],
        ["a", "-q", "--tree", "--summary", "--metadata", "--bytes", "--json"],
        ["--names", "l.*", "a", "--sort", "size", "-b"],
    ],
)
def test_plain_words_mean_what_they_mean_to_typer(
    words: list[str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(model) if word == "a" else word for word in words]
    given = ls.simple_arguments(words)
    assert given is not None
    ls.ls(**given)
    printed = capsys.readouterr().out
    assert printed
    assert app.call(["ls", *words]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    "line",
    [
        "",
        "a b",
        "--help",
        "a --sort",
        "a -qb",
        "a --sort=size",
        "-",
        "a --names -x",
        "a -- b",
        "a --limit 1",
    ],
)
def test_all_other_words_are_left_to_typer(line: str) -> None:
    assert ls.simple_arguments(line.split()) is None


def test_says_how_tensors_of_other_formats_are_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    c = np.arange(6.0).reshape(2, 3)
    np.savez_compressed(tmp_path / "x.npz", c=c, f=np.asfortranarray(c).astype(">f4", order="F"))
    np.savez(tmp_path / "y.npz", c=c, f=np.asfortranarray(c))
    ls.ls(str(tmp_path / "x.npz"))
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[-2:] == ["deflate", "c"]
    assert "deflate, strided, big-endian  f" in out
    ls.ls(str(tmp_path / "y.npz"), as_json=True)
    first, second = json.loads(capsys.readouterr().out)["tensors"]
    assert "stored" not in first
    assert second["stored"] == "strided"


def test_a_missing_shard_is_noted(run: Run, shards: Path) -> None:
    whole = run("ls", shards, "--json").json["tensors"]
    gone = shards / "model-00002-of-00002.safetensors"
    gone.unlink()
    ran = run("ls", shards)
    assert (ran.code, ran.err) == (0, "")
    assert f"note: a shard is missing: '{gone.name}' is named by the index" in ran.out
    found = run("ls", shards, "--json").json
    assert found["tensors"] == [each for each in whole if not each["file"].endswith(gone.name)]
    assert len(found["notes"]) == 1
    assert run("plan", shards).code == 0
