"""Bytes in memory, and sources that a user writes, in place of a path."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples

import mfload
from mfload import errors
from mfload.sources.base import Costs

MODEL = {"w": np.arange(300_000, dtype=np.float32).reshape(300, 1000), "b": np.arange(5)}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return samples.save(tmp_path_factory.mktemp("m") / "m", MODEL).read_bytes()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview,
                                  lambda raw: memoryview(np.frombuffer(raw, np.int8))])  # fmt: skip
def test_load(raw: bytes, kind: Any) -> None:
    report = mfload.Report()
    found = mfload.load(kind(raw), "numpy", report=report)
    samples.assert_same(found, MODEL)
    name = f"<{len(raw)} bytes in memory>"
    assert report.route == ((name, "memory", "not a local file"),)


def test_no_array_aliases_them(raw: bytes) -> None:
    data = bytearray(raw)
    found = mfload.load(data, "numpy")
    found["w"][:] = 0
    assert data == raw
    data[-8:] = bytes(8)
    assert found["b"][-1] == 4


def test_every_call(raw: bytes, tmp_path: Path) -> None:
    with mfload.open(raw) as opened:
        assert np.array_equal(opened.get_slice("w")[3:9, ::7], MODEL["w"][3:9, ::7])
        samples.assert_same(pickle.loads(pickle.dumps(opened)).get_tensors(), MODEL)
        assert "bytes in memory" in repr(opened)
    assert mfload.plan(raw).route[0].engine == "memory"
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    assert mfload.verify(raw, against=path).ok
    assert mfload.verify(raw).notes[-1].startswith("there is no manifest: ")
    assert mfload.diff(raw, path).equal
    written = mfload.verify(raw, mode="write", manifest=tmp_path / "sums.json").manifest
    assert written is not None
    samples.assert_same(mfload.load(raw, "numpy", verify=written), MODEL)
    with pytest.raises(errors.UsageError, match="manifest"):
        mfload.verify(raw, mode="check")


def test_a_list(raw: bytes, tmp_path: Path) -> None:
    other = samples.save(tmp_path / "m", {"c": np.arange(3)})
    assert set(
        mfload.load(
            [
                raw,
                other.read_bytes(),
            ],
            "numpy",
        )
    ) == {"w", "b", "c"}
    assert set(mfload.load([raw, other], "numpy")) == {"w", "b", "c"}


@pytest.mark.parametrize("at", [0, 4, 100, 1000, -1])
def test_bytes_that_end_early(raw: bytes, at: int) -> None:
    with pytest.raises(errors.HeaderError, match="bytes in memory"):
        mfload.load(raw[:at], "numpy")


def test_what_is_refused(raw: bytes) -> None:
    with pytest.raises(errors.UsageError, match="contiguous"):
        mfload.load(memoryview(raw)[::2], "numpy")
    for engine in ("mmap", "direct", "gds"):
        with pytest.raises(errors.UsageError, match="reads local files alone"):
            mfload.load(raw, "numpy", options=mfload.Options(engine=engine))  # pyright: ignore
    for other in (5, object(), {"w": 1}, np.dtype(float)):
        with pytest.raises(errors.UsageError):
            mfload.load(other, "numpy")  # pyright: ignore


class Reversed:
    """Bytes that are kept backwards: a source as a user may write it."""

    name, file, engine, identity, fd = "backwards", None, "backwards", "one", -1
    costs = Costs(block=1000, concurrency=3)

    def __init__(self, raw: bytes) -> None:
        self._raw, self.size, self.checks = raw[::-1], len(raw), 0

    def read(self, where: Any, offset: int, least: int | None = None) -> Any:
        if isinstance(where, int):  # The bytes of a header: offset and length.
            return self._raw[::-1][where : where + offset]
        for part in where:
            memoryview(part)[:] = self._raw[::-1][offset : offset + part.nbytes]
            offset += part.nbytes
        return sum(part.nbytes for part in where)

    def open(self, flags: int = 0) -> Reversed:
        return self

    def check(self) -> None:
        self.checks += 1

    def beside(self, name: str) -> Reversed:
        raise errors.UsageError("has no neighbours")

    def keep(self, keeps: bool) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Reversed:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_a_source_of_the_users(raw: bytes) -> None:
    source = Reversed(raw)
    report = mfload.Report()
    samples.assert_same(mfload.load(source, "numpy", report=report), MODEL)
    assert source.checks == 1
    assert report.threads == 3
    with mfload.open(source) as opened:
        assert np.array_equal(opened.get_slice("w")[:, 3], MODEL["w"][:, 3])
