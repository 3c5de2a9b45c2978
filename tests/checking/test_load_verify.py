"""`load(verify=)`: a bit that flipped is found wherever it is and however it is read."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import samples
import watch
from calls import as_options

import mfload
from mfload import dtypes, errors, frameworks
from mfload.checking.manifest import Manifest, TensorEntry
from mfload.frameworks.base import Form
from mfload.frameworks.numpy_adapter import NumpyAdapter
from mfload.planning import blocks

MODEL = samples.model()
BLOCK = 64 << 10  # So that "wide" takes 19 blocks, and "embed" 6.

WAYS: dict[str, dict[str, Any]] = {
    "pread by one": {"engine": "pread", "threads": 1},
    "pread by eight": {"engine": "pread", "threads": 8},
    "direct by one": {"engine": "direct", "threads": 1},
    "direct by eight": {"engine": "direct", "threads": 8},
    "a map": {"engine": "mmap", "threads": 1},
    "a map by eight": {"engine": "mmap", "threads": 8},
    "converted": {"dtype": "float64", "threads": 8},
    "converted by one": {"dtype": "bfloat16", "threads": 1},
    "converted past the cache": {"dtype": "float64", "engine": "direct", "threads": 3},
    "into the framework's memory": {"allocator": "framework", "threads": 3},
    "with a deadline": {"timeout": 60.0, "threads": 3},
    "in one thread, and watched": {"threads": 1, "progress": lambda done, total: None},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    small = blocks.Costs(block=BLOCK)
    monkeypatch.setattr("mfload.sources.local.LocalFile.costs", small)
    monkeypatch.setattr("mfload.loading.execute._MAPPED_BLOCK", BLOCK)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Manifest]:
    path = samples.save(tmp_path_factory.mktemp("checking") / "m.safetensors", MODEL)
    mfload.verify(path, mode="write")
    return path.read_bytes(), Manifest.read(path.with_name("m.safetensors.checksums.json"))


def _spans(raw: bytes) -> dict[str, tuple[int, int]]:
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    return {
        name: (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
        for name, entry in header.items()
    }


def _places(raw: bytes) -> Iterator[tuple[str, int]]:
    """Positions that a mistake in cutting would leave out."""
    spans = _spans(raw)
    for name in ("embed", "wide", "layer.0.q", "odd", "mask", "scalar"):
        start, stop = spans[name]
        yield name, start
        yield name, stop - 1
    start, stop = spans["wide"]
    for border in range(start // BLOCK * BLOCK + BLOCK, stop, 5 * BLOCK):
        yield "wide", border - 1
        yield "wide", border


@pytest.mark.parametrize("way", WAYS)
def test_a_flipped_bit_is_found(way: str, made: tuple[bytes, Manifest], tmp_path: Path) -> None:
    raw, known = made
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    report = mfload.Report()
    loaded = mfload.load(
        path, framework="numpy", verify=known, report=report, **as_options(WAYS[way])
    )
    assert len(loaded) == len(MODEL)
    assert report.notes[-1] == f"{len(MODEL)} tensors verified against the manifest"
    if "dtype" not in WAYS[way]:
        samples.assert_same(loaded, MODEL)
    del loaded
    for name, at in _places(raw):
        damaged = bytearray(raw)
        # Of a mask, the lowest bit alone leaves a bool.
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(errors.ChecksumError) as info:
            mfload.load(
                path, framework="numpy", verify=known, report=report, **as_options(WAYS[way])
            )
        # Held by the error or not: no memory is, nor figures of a load that was none.
        assert mfload.live_bytes() == 0, (name, at)
        assert info.value.tensor == name, at
        assert info.value.file == os.fspath(path)
        assert info.value.expected == known.tensors[name].digest
        assert info.value.found not in (None, info.value.expected)
        assert len(info.value.problems) == 1
        assert str(report) == "an empty report"


def test_all_offenders_are_named_at_once(made: tuple[bytes, Manifest], tmp_path: Path) -> None:
    raw, known = made
    damaged = bytearray(raw)
    for name in ("embed", "odd"):
        damaged[_spans(raw)[name][0]] ^= 4
    (tmp_path / "m.safetensors").write_bytes(damaged)
    with pytest.raises(errors.ChecksumError, match="2 of 10 tensors") as info:
        mfload.load(tmp_path / "m.safetensors", framework="numpy", verify=known)
    assert sorted(line.split()[0] for line in info.value.problems) == ["'embed'", "'odd'"]
    # Whoever does not ask for the damaged ones gets the others.
    some = mfload.load(tmp_path, framework="numpy", verify=known, names=["wide"])
    assert samples.same(some["wide"], MODEL["wide"])


def test_what_the_manifest_says_otherwise_is_told_before_anything_is_read(
    made: tuple[bytes, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, known = made
    (tmp_path / "m.safetensors").write_bytes(raw)
    tensors = dict(known.tensors)
    tensors["embed"] = tensors["embed"]._replace(dtype="I32")
    tensors["wide"] = tensors["wide"]._replace(shape=(150_001, 2))
    del tensors["odd"]
    monkeypatch.setattr(os, "preadv", None)
    with pytest.raises(errors.ChecksumError, match="3 of 10") as info:
        mfload.load(tmp_path, framework="numpy", verify=Manifest(tensors))
    text = str(info.value)
    for part in ("I32 [700, 129]", "F32 [700, 129]", "[150001, 2]", "'odd'", "none"):
        assert part in text
    # What it knows beyond what is loaded does not matter.
    monkeypatch.undo()
    more = {**known.tensors, "else": TensorEntry("F32", (), "0" * 32)}
    assert len(mfload.load(tmp_path, framework="numpy", verify=Manifest(more))) == 10


def test_a_manifest_by_its_path(made: tuple[bytes, Manifest], tmp_path: Path) -> None:
    raw, known = made
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    known.write(tmp_path / "known.json")
    for given in (tmp_path / "known.json", os.fspath(tmp_path / "known.json")):
        samples.assert_same(mfload.load(path, framework="numpy", verify=given), MODEL)
    with pytest.raises(errors.SourceNotFoundError):
        mfload.load(path, framework="numpy", verify=tmp_path / "none.json")
    with pytest.raises(errors.HeaderError):
        mfload.load(path, framework="numpy", verify=path)
    given: Any = 5
    with pytest.raises(errors.UsageError, match="not a manifest"):
        mfload.load(path, framework="numpy", verify=given)


class _Copying(NumpyAdapter):
    name = "copying"
    forms = {name: Form("copy", "") for name in dtypes.TABLE}  # noqa: RUF012

    def wrap(self, views: Any) -> list[Any]:
        return [array.copy() for array in super().wrap(views)]


def test_all_waves_are_looked_at(
    made: tuple[bytes, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, known = made
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    monkeypatch.setattr(frameworks, "get", lambda *_: _Copying())
    options: dict[str, Any] = {"max_host_overhead": MODEL["wide"].nbytes + 1000, "verify": known}
    samples.assert_same(mfload.load(path, framework="numpy", **as_options(options)), MODEL)
    for name, (start, _) in _spans(raw).items():
        if MODEL[name].nbytes:
            damaged = bytearray(raw)
            damaged[start] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(errors.ChecksumError) as info:
                mfload.load(path, framework="numpy", **as_options(options))
            assert info.value.tensor == name


def test_readers_that_overtake_each_other(
    made: tuple[bytes, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, known = made
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    real = os.preadv
    count = 0
    lock = threading.Lock()

    def slow(*args: Any) -> int:
        nonlocal count
        with lock:
            count += 1
            mine = count
        try:
            # The first of every four comes last.
            time.sleep(0.02 if mine % 4 == 1 else 0)
            return real(*args)
        finally:
            del args

    monkeypatch.setattr(os, "preadv", slow)
    for options in ({}, {"dtype": "float64"}):
        mfload.load(
            path,
            framework="numpy",
            verify=known,
            **as_options({"engine": "pread", "threads": 8, **options}),
        )
    assert count > 40


@pytest.mark.parametrize("fails", [False, True])
def test_nobody_waits_for_a_reader_that_hangs_or_fails(
    fails: bool, made: tuple[bytes, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, known = made
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    real = os.preadv
    hung = threading.Event()
    lock = threading.Lock()
    count = 0

    def preadv(*args: Any) -> int:
        nonlocal count
        try:
            with lock:
                count += 1
                mine = count
            if mine == 4:
                # The others are in later blocks of the same tensor by then.
                hung.wait(0.3 if fails else 20)
                if fails:
                    raise OSError(5, "Input/output error")
            return real(*args)
        finally:
            del args

    monkeypatch.setattr(os, "preadv", preadv)
    wanted = errors.ReadError if fails else errors.LoadTimeoutError
    options: dict[str, Any] = {} if fails else {"timeout": 1.0}
    start = time.monotonic()
    with pytest.raises(wanted):
        mfload.load(
            path, framework="numpy", names=["wide"], verify=known,
            **as_options({"engine": "pread", "threads": 4, **options}))  # fmt: skip
    assert time.monotonic() - start < 8
    hung.set()
    for thread in threading.enumerate():
        if thread.name == "mfload-reader":
            thread.join(10)
            assert not thread.is_alive()


INTERRUPTED = """
    import os, sys, threading, time
    import mfload, mfload.sources.local
    from mfload.planning import blocks

    path = sys.argv[1]
    mfload.sources.local.LocalFile.costs = blocks.Costs(block=64 << 10)
    real, lock, reads = os.preadv, threading.Lock(), 0

    def slow(*args):
        global reads
        try:
            with lock:
                reads += 1
                mine = reads
            if mine == 4:
                print("reading", flush=True)
            # The first of the tensor's blocks is the last to come: the others wait for it.
            time.sleep(1 if mine == 1 else 0.01)
            return real(*args)
        finally:
            del args

    os.preadv = slow
    start = time.monotonic()
    try:
        mfload.load(path, framework="numpy", names=["wide"], verify=path + ".json",
                    options=mfload.Options(threads=4, engine="pread"))
    except KeyboardInterrupt:
        assert mfload.live_bytes() == 0, mfload.live_bytes()
        assert threading.active_count() == 1, threading.enumerate()
        assert time.monotonic() - start < 4
    else:
        sys.exit("not interrupted")
    os.preadv = real
    assert len(mfload.load(path, framework="numpy", verify=path + ".json")) == 10
    print("done", flush=True)
"""


def test_ctrl_c_while_readers_wait_for_their_turn(
    made: tuple[bytes, Manifest], tmp_path: Path
) -> None:
    raw, known = made
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    known.write(f"{path}.json")
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED), os.fspath(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "reading\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
        child.communicate()
    assert (child.returncode, out, err) == (0, "done\n", "")


@pytest.mark.parametrize("engine", ["pread", "direct"])
def test_the_file_is_read_once(
    made: tuple[bytes, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    raw, _ = made
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    mfload.verify(path, mode="write")
    manifest = path.with_name("m.safetensors.checksums.json")
    options, counts = mfload.Options(engine=engine), []
    for given in (None, manifest):
        report = mfload.Report()
        with monkeypatch.context() as patch:
            reads = watch.spy(patch)
            mfload.load(path, "numpy", verify=given, options=options, report=report)
        counts.append((report.read_bytes, sum(read.got for read in reads)))
    assert counts[0] == counts[1]
    assert counts[0][0] < len(raw)


@pytest.mark.parametrize("call", ["load", "verify", "check"])
def test_the_time_runs_out_while_the_manifest_is_read(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may hang, and is waited for longer than that."""
    path = samples.save(tmp_path / "m.safetensors", MODEL)
    beside = mfload.verify(path, mode="write").manifest
    release = threading.Event()

    def read(_: Any) -> Manifest:
        release.wait(20)
        raise errors.ReadError("too late")

    monkeypatch.setattr(Manifest, "read", staticmethod(read))
    options, start = mfload.Options(timeout=0.1), time.monotonic()
    given: dict[str, Any] = {"mode": "check"} if call == "check" else {"manifest": beside}
    done: Any = partial(mfload.verify, path, **given, options=options)
    if call == "load":
        done = partial(mfload.load, path, "numpy", verify=beside, options=options)
    try:
        with pytest.raises(errors.LoadTimeoutError, match="while reading the manifest"):
            done()
        assert time.monotonic() - start < 10
    finally:
        release.set()
