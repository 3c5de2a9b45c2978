"""The header alone: what `parse` and `read` give, and what they cost."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import reference

from mfload import dtypes, errors
from mfload.formats import safetensors
from mfload.index import Piece
from mfload.sources.local import LocalFile


def parse(header: dict[str, Any], data: int, **options: Any) -> Any:
    raw = json.dumps(header).encode()
    return safetensors.parse(raw, size=8 + len(raw) + data, **options), 8 + len(raw)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_rows_are_in_order_of_offset_and_count_from_the_file_s_start() -> None:
    header = {"z": entry("F16", [2], 3, 7), "a": entry("U8", [3], 0, 3), "__metadata__": {"k": "v"}}
    ((a, z), metadata), start = parse(header, 7, source=5)
    assert (a.name, a.dtype, a.shape) == ("a", dtypes.TABLE["U8"], (3,))
    assert a.pieces == (Piece(5, start, 3),)
    assert (z.name, z.dtype, z.shape) == ("z", dtypes.TABLE["F16"], (2,))
    assert z.pieces == (Piece(5, start + 3, 4),)
    assert metadata == {"k": "v"}


@pytest.mark.parametrize("dtype", dtypes.TABLE)
def test_sizes_of_every_dtype(dtype: str) -> None:
    row = dtypes.TABLE[dtype]
    shape = [3, 4]
    nbytes = row.size_of(shape)
    assert nbytes is not None
    ((found,), _), _ = parse({"w": entry(dtype, shape, 0, nbytes)}, nbytes)
    assert found.nbytes == nbytes
    for wrong in (nbytes - 1, nbytes + 1):
        with pytest.raises(errors.HeaderError) as caught:
            parse({"w": entry(dtype, shape, 0, wrong)}, wrong)
        assert caught.value.expected == f"{nbytes} bytes for {dtype}"
        assert caught.value.found == f"[3, 4] in {wrong} bytes"


def test_errors_say_where_the_next_tensor_had_to_begin() -> None:
    with pytest.raises(errors.HeaderError) as caught:
        parse({"a": entry("U8", [4], 0, 4), "b": entry("U8", [1], 6, 7)}, 7, path="some/file")
    error = caught.value
    assert (error.file, error.tensor) == ("some/file", "b")
    assert (error.expected, error.found) == ("data_offsets beginning at 4", 6)


@pytest.mark.parametrize(
    ("begin", "end", "wanted"),
    [
        (-4, 0, "data_offsets that are whole numbers"),
        (False, 4, "data_offsets that are whole numbers"),
        (0, True, "data_offsets that are whole numbers"),
        (0, 4.0, "data_offsets that are whole numbers"),
        (4, 0, "data_offsets that end after they begin"),
    ],
)
def test_errors_say_what_is_wrong_with_offsets(begin: Any, end: Any, wanted: str) -> None:
    with pytest.raises(errors.HeaderError) as caught:
        parse({"a": entry("F32", [1], begin, end)}, 4)
    assert caught.value.expected == wanted
    assert caught.value.found == str([begin, end])


def test_reads_the_header_and_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.safetensors"
    raw = reference.write({"w": reference.Tensor("U8", (1 << 20,), bytes(1 << 20))})
    path.write_bytes(raw)
    read: list[tuple[int, int]] = []
    pread = os.pread

    def note(fd: int, nbytes: int, offset: int) -> bytes:
        read.append((offset, nbytes))
        return pread(fd, nbytes, offset)

    monkeypatch.setattr(os, "pread", note)
    rows, _ = safetensors.read(LocalFile(path))
    assert [row.name for row in rows] == ["w"]
    assert read == [(0, 4096)]


def test_file_that_shrinks_under_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(reference.write({"w": reference.Tensor("U8", (9,), bytes(9))}))
    file = LocalFile(path)
    pread = os.pread

    def cut(fd: int, nbytes: int, offset: int) -> bytes:
        found = pread(fd, nbytes, offset)
        os.truncate(path, 20)
        return found[:8]

    monkeypatch.setattr(os, "pread", cut)
    with pytest.raises(errors.SourceChangedError) as caught:
        safetensors.read(file)
    assert caught.value.file == str(path)


def test_short_reads_of_the_header_are_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(reference.write({"w": reference.Tensor("U8", (9,), bytes(9))}))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: pread(fd, min(n, 3), at))
    assert [row.name for row in safetensors.read(LocalFile(path))[0]] == ["w"]


def test_a_large_header_takes_microseconds_a_tensor() -> None:
    """An alarm for something quadratic, not a benchmark: 10 times what it should take."""
    count = 20_000
    header = {
        f"model.layers.{n // 9}.weight.{n}": entry("BF16", [16, 32], n << 10, n + 1 << 10)
        for n in range(count)
    }
    raw = json.dumps(header).encode()
    start = time.process_time()
    rows, _ = safetensors.parse(raw, size=8 + len(raw) + (count << 10))
    assert len(rows) == count
    assert time.process_time() - start < count * 60e-6


def test_offsets_beyond_64_bits_are_a_truncated_file() -> None:
    far = 2**64 + 5
    header = {"x": entry("NEW", [3], 0, far), "y": entry("F32", [1], far, far + 4)}
    with pytest.raises(errors.HeaderError, match="is truncated"):
        parse(header, 8)
