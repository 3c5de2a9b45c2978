"""The headers with all that is wrong in them: every file is looked at, whatever the others are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples

from mfload import errors
from mfload.checking import headers
from mfload.formats.checkpoint import Headers, Problem

NAMES = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
TOTAL = 3 * 8 * 4


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for n, name in enumerate(NAMES):
        samples.save(tmp_path / name, {f"t{n}": np.full(8, n, np.float32)})
    _index(tmp_path)
    return tmp_path


def _index(directory: Path, total: Any = TOTAL, **changes: str) -> None:
    placed = {"t0": NAMES[0], "t1": NAMES[1], "t2": NAMES[2], **changes}
    placed = {name: file for name, file in placed.items() if file}
    table = {"metadata": {"total_size": total}, "weight_map": placed}
    (directory / "model.safetensors.index.json").write_text(json.dumps(table))


def _whats(seen: Headers) -> list[str]:
    return [each.what for each in seen.problems]


def test_a_sound_checkpoint(shards: Path) -> None:
    for path in (shards, shards / "model.safetensors.index.json"):
        seen = headers.inspect(path)
        assert seen.problems == []
        assert list(seen.tensors) == ["t0", "t1", "t2"]
        assert seen.found.index_file
        assert [os.path.basename(seen.file_of(row)) for row in seen.tensors.values()] == NAMES
    seen = headers.inspect([shards / NAMES[2], shards / NAMES[0]])
    assert list(seen.tensors) == ["t2", "t0"]
    assert not seen.found.index_file


def test_every_file_is_looked_at(shards: Path) -> None:
    os.truncate(shards / NAMES[0], 60)
    (shards / NAMES[1]).unlink()
    raw = bytearray((shards / NAMES[2]).read_bytes())
    raw[8] = ord("x")
    (shards / NAMES[2]).write_bytes(raw)
    seen = headers.inspect(shards)
    files = [os.path.basename(each.file or "") for each in seen.problems]
    # One for each: what follows from them is not told again.
    assert len(seen.problems) == 3
    assert files == ["model.safetensors.index.json", NAMES[0], NAMES[2]]
    assert "does not exist" in str(seen.problems[0])
    assert NAMES[1] in str(seen.problems[0])
    assert not seen.tensors


def test_a_missing_shard_is_one_finding(shards: Path) -> None:
    (shards / NAMES[1]).unlink()
    seen = headers.inspect(shards)
    assert len(seen.problems) == 1, _whats(seen)
    assert list(seen.tensors) == ["t0", "t2"]


def test_a_file_that_may_not_be_read(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if os.fspath(path).endswith(NAMES[1]):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    seen = headers.inspect(shards)
    assert [each.file for each in seen.problems] == [os.fspath(shards / NAMES[1])]
    assert "Permission denied" in seen.problems[0].what
    assert list(seen.tensors) == ["t0", "t2"]


def test_shards_missing_without_an_index(shards: Path) -> None:
    (shards / "model.safetensors.index.json").unlink()
    assert headers.inspect(shards).problems == []
    (shards / NAMES[1]).unlink()
    seen = headers.inspect(shards)
    assert len(seen.problems) == 1
    assert "shard 2 of 3" in seen.problems[0].what
    assert list(seen.tensors) == ["t0", "t2"]


@pytest.mark.parametrize(
    ("changes", "what", "tensor"),
    [
        ({"gone": NAMES[0]}, "not where the index says", "gone"),
        ({"t0": NAMES[1]}, "not where the index says", "t0"),
        ({"t1": ""}, "does not name the tensor", "t1"),
    ],
)
def test_index_against_shards(
    changes: dict[str, Any], what: str, tensor: str | None, shards: Path
) -> None:
    for n, name in enumerate(NAMES[:2]):
        # Named by another tensor too, or the shard would be unknown altogether.
        samples.save(shards / name, {f"t{n}": np.ones(8, np.float32), f"x{n}": np.ones(0)})
    changes = {**changes, "x0": NAMES[0], "x1": NAMES[1]}
    _index(shards, **changes)
    seen = headers.inspect(shards)
    assert len(seen.problems) == 1, _whats(seen)
    assert what in seen.problems[0].what
    assert seen.problems[0].tensor == tensor


@pytest.mark.parametrize("total", [TOTAL, float(TOTAL), None])
def test_sizes_that_are_right(total: Any, shards: Path) -> None:
    _index(shards, total=total)
    assert headers.inspect(shards).problems == []


@pytest.mark.parametrize("total", [TOTAL + 1, "12", [], 2**70])
def test_a_total_size_that_is_off_is_a_note(total: Any, shards: Path) -> None:
    """As in many published checkpoints."""
    _index(shards, total=total)
    seen = headers.inspect(shards)
    assert seen.problems == []
    assert "total_size" in seen.notes[0]
    assert str(TOTAL) in seen.notes[0]


def test_a_tensor_in_two_files(shards: Path) -> None:
    samples.save(shards / NAMES[1], {"t1": np.ones(8, np.float32), "t0": np.ones(0, np.float32)})
    seen = headers.inspect(shards)
    assert _whats(seen) == ["two files hold the tensor"]
    assert seen.problems[0].tensor == "t0"
    assert NAMES[0] in str(seen.problems[0].found)
    assert NAMES[1] in str(seen.problems[0].found)
    assert seen.tensors["t0"].shape == (8,)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"weight_map": {}}', '{"weight_map": {"t0": "../x.safetensors"}}']
)
def test_a_broken_index_is_a_finding(text: str, shards: Path) -> None:
    (shards / "model.safetensors.index.json").write_text(text)
    seen = headers.inspect(shards)
    assert seen.problems
    assert seen.problems[0].file == os.fspath(shards / "model.safetensors.index.json")
    assert not seen.tensors


def test_what_is_an_error_and_no_finding(tmp_path: Path) -> None:
    with pytest.raises(errors.SourceNotFoundError):
        headers.inspect(tmp_path / "none.safetensors")
    with pytest.raises(errors.SourceNotFoundError):
        headers.inspect(tmp_path)
    with pytest.raises(errors.UsageError):
        headers.inspect([])
    for name in ("model", "adapter_model"):
        samples.save(tmp_path / f"{name}.safetensors", {"a": np.zeros(1)})
    with pytest.raises(errors.CheckpointError, match="side by side"):
        headers.inspect(tmp_path)


def test_what_is_worth_a_note(shards: Path) -> None:
    samples.save(shards / "other.safetensors", {"a": np.zeros(3)})
    samples.save_raw(
        shards / NAMES[0], [("t0", "F32", (8,), bytes(32)), ("new", "F5", (3,), b"abc")], start=1
    )
    _index(shards, total=TOTAL + 3, new=NAMES[0])
    seen = headers.inspect(shards)
    assert seen.problems == []
    others, unknown, alignment = seen.notes
    assert "other.safetensors" in others
    assert "'F5'" in unknown
    assert " of 4 tensors; data on one of 4096: 0 of 3 files" in alignment
    assert "mfload align" in alignment


def test_a_file_that_suits_needs_no_hint(tmp_path: Path) -> None:
    # The last is too short for anything after it to be aligned.
    rows = [("a", "U8", (64,), bytes(64)), ("b", "U8", (3,), bytes(3)), ("c", "U8", (1,), b"x")]
    path = samples.save_raw(tmp_path / "a.safetensors", rows)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].ljust(4088)
    path.write_bytes((4088).to_bytes(8, "little") + header + raw[8 + length :])
    (note,) = headers.inspect(path).notes
    assert note == ("on a multiple of 64 bytes: 2 of 3 tensors; data on one of 4096: 1 of 1 file")


def test_a_problem_reads_like_an_error() -> None:
    problem = Problem("bad", "f", "a\x1b[2J", 1, None)
    assert str(problem) == "bad [file: f; tensor: 'a\\x1b[2J'; expected: 1]"
