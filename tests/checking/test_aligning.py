"""`align`: the same tensors where they suit, whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - lets the reference reader give bfloat16
import numpy as np
import pytest
import safetensors
import samples
from calls import as_options
from hypothesis import given, strategies as st

import mfload
from mfload import errors
from mfload.checking import copying, rewriting as aligning
from mfload.checking.manifest import Manifest
from mfload.io import buffers
from mfload.saving.drafts import Draft

MODEL = samples.model()


@pytest.fixture(autouse=True, scope="module")
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mfload.checking.copying.BLOCK", 64 << 10)
        yield


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return samples.save(tmp_path / "in" / "model.safetensors", MODEL, {"format": "np", "b": "ü"})


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    directory = tmp_path / "shards"
    directory.mkdir()
    names = list(MODEL)
    placed: dict[str, str] = {}
    for n in range(3):
        file = f"model-0000{n + 1}-of-00003.safetensors"
        some = {name: MODEL[name] for name in names[n::3]}
        samples.save(directory / file, some, {"part": str(n)})
        placed.update(dict.fromkeys(some, file))
    text = json.dumps({"weight_map": placed})
    (directory / "model.safetensors.index.json").write_text(text)
    return directory


def _read(path: Path) -> dict[str, Any]:
    """By the reference reader."""
    with safetensors.safe_open(path, framework="numpy") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _offsets(path: Path) -> dict[str, tuple[int, int]]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: (8 + length + a, b - a) for name, (a, b) in found.items()}


def _assert_aligned(path: Path, align: int = 4096) -> None:
    places = _offsets(path)
    assert min(start for start, _ in places.values()) % align == 0
    for name, (start, size) in places.items():
        if size % 64 == 0:
            assert start % 64 == 0, name


def _names(directory: Path) -> set[str]:
    return set(os.listdir(directory))


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("align", [64, 4096])
def test_one_file(threads: int, align: int, source: Path, target: Path) -> None:
    before = source.read_bytes()
    done = mfload.align(source, target, align=align, options=mfload.Options(threads=threads))
    path = target / "model.safetensors"
    assert done.files == (os.fspath(path),)
    assert (done.tensors, done.bytes) == (len(MODEL), path.stat().st_size)
    samples.assert_same(_read(path), MODEL)
    _assert_aligned(path, align)
    assert _names(target) == {"model.safetensors"}
    assert source.read_bytes() == before
    with safetensors.safe_open(path, framework="numpy") as opened:
        assert opened.metadata() == {"format": "np", "b": "ü"}
    assert mfload.verify(path, against=source).ok
    # Once more gives the same bytes.
    again = target / "again.safetensors"
    mfload.align(path, again, align=align)
    assert again.read_bytes() == path.read_bytes()


def test_in_place(source: Path) -> None:
    before = source.read_bytes()
    with pytest.raises(errors.TargetExistsError):
        mfload.align(source)
    assert source.read_bytes() == before
    mfload.align(source, overwrite=True)
    samples.assert_same(_read(source), MODEL)
    _assert_aligned(source)
    assert _names(source.parent) == {source.name}


def test_shards_stay_as_they_are(shards: Path, target: Path) -> None:
    done = mfload.align(shards, target)
    files = sorted(shards.glob("*.safetensors"))
    index = "model.safetensors.index.json"
    assert [os.path.basename(file) for file in done.files] == [file.name for file in files] + [
        index
    ]
    for n, file in enumerate(files):
        samples.assert_same(_read(target / file.name), _read(file))
        _assert_aligned(target / file.name)
        with safetensors.safe_open(target / file.name, framework="numpy") as opened:
            assert opened.metadata() == {"part": str(n)}
    found = mfload.verify(target, against=shards)
    assert found.ok
    assert found.checked == ("headers", "index", "against")


def test_shards_in_place(shards: Path) -> None:
    before = _names(shards)
    mfload.align(shards, overwrite=True)
    assert _names(shards) == before
    samples.assert_same(mfload.load(shards, framework="numpy"), MODEL)
    for file in shards.glob("*.safetensors"):
        _assert_aligned(file)
    # Into other shards, and into one file: nothing of the old ones stays.
    mfload.align(shards / "model.safetensors.index.json", max_shard_size="300kB", overwrite=True)
    assert len(_names(shards)) > 4
    samples.assert_same(mfload.load(shards, framework="numpy"), MODEL)
    mfload.align(shards, max_shard_size="1GB", overwrite=True)
    assert _names(shards) == {"model.safetensors"}
    samples.assert_same(mfload.load(shards, framework="numpy"), MODEL)
    assert mfload.open(shards).metadata() == {"part": "2"}


def test_shards_without_an_index_in_place(shards: Path) -> None:
    (shards / "model.safetensors.index.json").unlink()
    mfload.align(shards, overwrite=True)
    assert len(_names(shards)) == 4
    samples.assert_same(mfload.load(shards, framework="numpy"), MODEL)


def test_files_that_are_no_shards_are_not_replaced_as_a_whole(tmp_path: Path) -> None:
    files = [samples.save(tmp_path / f"{x}.safetensors", {x: np.zeros(3)}) for x in "ab"]
    for source in (tmp_path, files):
        with pytest.raises(errors.UsageError, match="name a target"):
            mfload.align(source, overwrite=True)
    assert _names(tmp_path) == {"a.safetensors", "b.safetensors"}
    (tmp_path / "out").mkdir()
    mfload.align(files, tmp_path / "out")
    assert list(mfload.load(tmp_path / "out", framework="numpy")) == ["a", "b"]


def test_a_hubs_cache_is_not_written_to(tmp_path: Path, source: Path, target: Path) -> None:
    blob = tmp_path / hashlib.sha256(source.read_bytes()).hexdigest()
    source.rename(blob)
    source.symlink_to(blob)
    before = blob.read_bytes()
    mfload.align(source, target)
    assert source.is_symlink()
    aligned = mfload.align(source, overwrite=True)
    assert aligned.files == (os.fspath(source),)
    assert any("the blobs stay" in note for note in aligned.notes)
    assert not source.is_symlink()
    assert blob.read_bytes() == before
    samples.assert_same(_read(source), MODEL)
    samples.assert_same(_read(target / "model.safetensors"), MODEL)


def test_dtypes_of_few_bits_and_of_none(tmp_path: Path, target: Path) -> None:
    rows = [("f4", "F4", (3, 2), b"\x21\x43\x65"), ("new", "F5", (3, 7), b"xyz"),
            ("f6", "F6_E2M3", (4,), b"abc"), ("none", "F5", (0,), b""),
            ("u8", "U8", (64,), bytes(range(64)))]  # fmt: skip
    source = samples.save_raw(tmp_path / "a.safetensors", rows, start=3)
    mfload.align(source, target)
    path = target / "model.safetensors"
    _assert_aligned(path)
    assert mfload.verify(path, against=source).ok
    raw = path.read_bytes()
    for name, _, _, data in rows:
        start, size = _offsets(path)[name]
        assert raw[start : start + size] == data


@given(
    sizes=st.lists(st.integers(0, 3000), max_size=12),
    limit=st.none() | st.integers(1, 4000),
    start=st.integers(0, 63),
)
def test_any_layout(
    sizes: list[int], limit: int | None, start: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("any")
    rows = [
        (f"t{n}", "U8", (size,), np.random.default_rng(n).bytes(size))
        for n, size in enumerate(sizes)
    ]
    source = samples.save_raw(directory / "a.safetensors", rows, start=start)
    (directory / "out").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "BLOCK", 512)
        done = mfload.align(source, directory / "out", max_shard_size=limit)
    files = [Path(file) for file in done.files if file.endswith(".safetensors")]
    found = {name: array.tobytes() for file in files for name, array in _read(file).items()}
    assert found == {name: data for name, _, _, data in rows}
    if rows:
        assert mfload.verify(directory / "out", against=source).ok


def test_a_manifest_goes_along(source: Path, target: Path) -> None:
    mfload.verify(source, mode="write")
    old = Manifest.read(source.with_name("model.safetensors.checksums.json"))
    done = mfload.align(source, target)
    assert "checksums written" in done.notes[-1]
    made = Manifest.read(target / "model.safetensors.checksums.json")
    assert made.tensors == old.tensors
    assert made.files.keys() == old.files.keys()
    assert made.files != old.files
    assert mfload.verify(target, mode="check").checked[-1] == "sha256"
    mfload.align(source, overwrite=True)
    assert mfload.verify(source, mode="check").ok
    assert Manifest.read(source.with_name("model.safetensors.checksums.json")) == made


@pytest.mark.parametrize("algorithm", ["xxh3", "sha256"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_manifest_of_one_algorithm(
    algorithm: Any, in_place: bool, source: Path, target: Path
) -> None:
    mfload.verify(source, mode="write", checksums=algorithm)
    raw = bytearray(source.read_bytes())
    options: dict[str, Any] = {"overwrite": True} if in_place else {"target": target}
    source.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(errors.ChecksumError) as info:
        mfload.align(source, **options)
    assert info.value.file == os.fspath(source)
    source.write_bytes(raw)
    (path, *_) = mfload.align(source, **options).files
    made = Manifest.read(Path(path).with_name("model.safetensors.checksums.json"))
    assert (made.hashed, bool(made.files)) == (algorithm == "xxh3", algorithm == "sha256")
    assert mfload.verify(path, mode="check").data_checked


def test_small_tensors_are_written_together(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "BLOCK", 1 << 20)
    rows = [(f"t{n}", "U8", (64 - n % 2,), bytes([n % 251]) * (64 - n % 2)) for n in range(2000)]
    source = samples.save_raw(tmp_path / "a.safetensors", rows)
    writes: list[int] = []
    real = Draft.write

    def count(draft: Draft, offset: int, pieces: Any) -> int:
        writes.append(offset)
        return real(draft, offset, pieces)

    monkeypatch.setattr(Draft, "write", count)
    mfload.align(source, target)
    # The header, and all tensors.
    assert len(writes) == 2
    found = mfload.load(target, "numpy")
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: raw for name, _, _, raw in rows
    }


def test_shards_with_a_manifest(shards: Path) -> None:
    mfload.verify(shards, mode="write")
    for options in ({}, {"max_shard_size": "300kB"}, {"max_shard_size": "1GB"}):
        mfload.align(shards, overwrite=True, **as_options(options))  # type: ignore[arg-type]
        found = mfload.verify(shards, mode="check")
        assert found.ok, str(found)
        assert "other files" not in str(found)


def test_a_source_that_is_damaged_is_not_copied(source: Path, target: Path) -> None:
    mfload.verify(source, mode="write")
    raw = bytearray(source.read_bytes())
    raw[-1] ^= 1
    source.write_bytes(raw)
    for options in ({"target": target}, {"overwrite": True}):
        with pytest.raises(errors.ChecksumError) as info:
            mfload.align(source, **as_options(options))  # type: ignore[arg-type]
        assert info.value.tensor in MODEL
        assert source.read_bytes() == raw
        assert _names(target) == set()


@pytest.mark.parametrize("sums", [False, True])
def test_what_the_disk_gives_back_is_compared(
    sums: bool, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sums:
        mfload.verify(source, mode="write")
    real = Draft.write
    before = source.read_bytes()

    def flip(draft: Draft, offset: int, pieces: Any) -> int:
        copy = np.concatenate(pieces)
        if offset > 100_000:
            copy[0] ^= 1
        return real(draft, offset, [copy])

    monkeypatch.setattr(Draft, "write", flip)
    for options in ({"target": target}, {"overwrite": True}):
        with pytest.raises(errors.WriteError, match="other bytes") as info:
            mfload.align(source, **as_options(options))  # type: ignore[arg-type]
        assert info.value.tensor in MODEL
        assert _names(target) == set()
        assert source.read_bytes() == before


def test_a_header_that_was_not_written(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Draft.write

    def swap(draft: Draft, offset: int, pieces: Any) -> int:
        raw = np.concatenate(pieces).tobytes()
        raw = raw.replace(b'"embed"', b'"embad"') if offset == 0 else raw
        return real(draft, offset, [np.frombuffer(raw, np.uint8)])

    monkeypatch.setattr(Draft, "write", swap)
    with pytest.raises(errors.WriteError, match="header"):
        mfload.align(source, target)
    assert _names(target) == set()


def test_all_is_on_disk_before_it_has_its_name(
    shards: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Draft] = []
    real, publish = Draft.sync, aligning.SaveTarget.publish

    def sync(draft: Draft) -> None:
        synced.append(draft)
        real(draft)

    def check(self: Any, drafts: Any, *args: Any) -> Any:
        assert synced == list(drafts)
        return publish(self, drafts, *args)

    monkeypatch.setattr(Draft, "sync", sync)
    monkeypatch.setattr(aligning.SaveTarget, "publish", check)
    mfload.align(shards, target)
    assert len(synced) >= 3


@pytest.mark.parametrize("when", ["reading", "publishing"])
def test_failures_leave_what_was_there(
    when: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, names = source.read_bytes(), _names(source.parent)
    if when == "reading":
        real, count = os.preadv, iter(range(1000))

        def preadv(*args: Any) -> int:
            try:
                if next(count) == 7:
                    raise OSError(5, "Input/output error")
                return real(*args)
            finally:
                del args

        monkeypatch.setattr(os, "preadv", preadv)
    else:
        monkeypatch.setattr(aligning.SaveTarget, "publish", lambda *_: 1 / 0)
    with pytest.raises((errors.ReadError, ZeroDivisionError)):
        mfload.align(source, overwrite=True, options=mfload.Options(threads=3))
    assert source.read_bytes() == before
    assert _names(source.parent) == names
    assert not [t for t in threading.enumerate() if t.name == "mfload-reader"]


def test_a_source_that_changes_meanwhile(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "scan", _touching(copying.scan, source))
    with pytest.raises(errors.SourceChangedError):
        mfload.align(source, target)
    assert _names(target) == set()


def _touching(real: Any, path: Path) -> Any:
    def look(*args: Any, **options: Any) -> Any:
        os.utime(path, (1, 1))
        return real(*args, **options)

    return look


def test_the_time_runs_out(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = threading.Event()
    real = os.preadv

    def preadv(*args: Any) -> int:
        try:
            hung.wait(20)
            return real(*args)
        finally:
            del args

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(errors.LoadTimeoutError):
        mfload.align(source, target, options=mfload.Options(timeout=0.3))
    assert _names(target) == set()
    hung.set()
    for thread in threading.enumerate():
        if thread.name == "mfload-reader":
            thread.join(10)


def test_memory_is_bounded(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BLOCK", 1 << 20)
    source = samples.save(tmp_path / "a.safetensors", {"w": np.zeros(24 << 20, np.uint8)})
    buffers.peak_bytes(reset=True)
    mfload.align(source, target, options=mfload.Options(threads=2))
    # A slot a reader, and one a write that has to be moved to suit the disk.
    assert buffers.peak_bytes() <= 2 * ((1 << 20) + 8192 + (4 << 20) + 4096) + 2 * (4 << 20)


def test_arguments_that_make_no_sense(source: Path, target: Path) -> None:
    bad: list[dict[str, Any]] = [
        {"align": 3}, {"align": 0}, {"max_shard_size": "x"}, {"threads": 0}, {"timeout": 0},
    ]  # fmt: skip
    for options in bad:
        with pytest.raises(errors.UsageError):
            mfload.align(source, target, **as_options(options))
    with pytest.raises(errors.SourceNotFoundError):
        mfload.align(target / "none.safetensors", target)
    with pytest.raises(errors.TargetError):
        mfload.align(source, source / "x.safetensors")


def test_progress_and_what_it_says(source: Path, target: Path) -> None:
    seen: list[tuple[int, int]] = []
    done = mfload.align(source, target, progress=lambda *now: seen.append(now))
    total = sum(array.nbytes for array in MODEL.values()) + done.bytes
    assert seen[-1] == (total, total)
    text = str(done)
    assert f"{len(MODEL)} tensors" in text
    assert "read back" in text
    assert json.loads(json.dumps(done.as_dict()))["files"] == list(done.files)
    assert done._repr_html_().startswith("<table>")


ALIGNING = """
    import sys, mfload
    while True:
        for limit in (None, 300_000, 1 << 30, 100_000):
            mfload.align(sys.argv[1], overwrite=True, max_shard_size=limit)
            print("once", flush=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is promised, on Linux")
def test_a_kill_in_place_leaves_the_whole_of_it(shards: Path) -> None:
    mfload.verify(shards, mode="write")
    known = Manifest(Manifest.read(shards / "model.safetensors.checksums.json").tensors)
    (shards / "model.safetensors.checksums.json").unlink()
    chance = random.Random()
    for _ in range(40 if os.environ.get("MFLOAD_SLOW") else 5):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(ALIGNING), os.fspath(shards)],
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"once\n"
        time.sleep(chance.uniform(0, 0.2))
        child.kill()
        child.communicate()
        found = mfload.verify(shards, mode="check", manifest=known)
        assert found.ok, str(found)
    mfload.align(shards, overwrite=True, max_shard_size="1GB")
    assert _names(shards) == {"model.safetensors"}


def test_names_that_a_killed_writer_gave_go_with_its_files(shards: Path) -> None:
    """Killed when shards have their own names, and the index leads to their hidden ones yet."""
    mfload.align(shards, overwrite=True, max_shard_size="1GB")
    code = """
        import os, sys, mfload
        from mfload.saving import publishing
        publishing._remove = lambda paths: os._exit(9)
        mfload.align(sys.argv[1], overwrite=True, max_shard_size=300_000)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), os.fspath(shards)]
    assert subprocess.run(command, check=False).returncode == 9
    assert len(_names(shards)) > 2
    mfload.align(shards, overwrite=True, max_shard_size="1GB")
    assert _names(shards) == {"model.safetensors"}


def _bytes(directory: Path) -> dict[str, bytes]:
    return {os.fspath(p): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("limit", [None, 300_000])
def test_an_index_into_directories_is_not_replaced(
    limit: int | None, shards: Path, target: Path
) -> None:
    index = shards / "model.safetensors.index.json"
    (shards / "sub").mkdir()
    for file in shards.glob("*.safetensors"):
        file.rename(shards / "sub" / file.name)
    placed = json.loads(index.read_text())["weight_map"]
    moved = {name: f"sub/{file}" for name, file in placed.items()}
    index.write_text(json.dumps({"weight_map": moved}))
    before = _bytes(shards)
    for source in (shards, index):
        with pytest.raises(errors.UsageError, match="name a target"):
            mfload.align(source, overwrite=True, max_shard_size=limit)
    assert _bytes(shards) == before
    mfload.align(shards, target, max_shard_size=limit)
    assert mfload.verify(target, against=shards).ok


@pytest.mark.parametrize("limit", [None, 300_000])
def test_an_index_with_one_shard_in_place(limit: int | None, tmp_path: Path) -> None:
    name = "model-00001-of-00001.safetensors"
    samples.save(tmp_path / name, MODEL)
    text = json.dumps({"weight_map": dict.fromkeys(MODEL, name)})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    mfload.align(tmp_path, overwrite=True, max_shard_size=limit)
    assert name not in _names(tmp_path)
    samples.assert_same(mfload.load(tmp_path, framework="numpy"), MODEL)


def test_one_shard_of_a_model_is_not_cut_under_its_index(shards: Path) -> None:
    before = _bytes(shards)
    shard = shards / "model-00001-of-00003.safetensors"
    with pytest.raises(errors.TargetError, match="index of another name"):
        mfload.align(shard, overwrite=True, max_shard_size=100_000)
    with pytest.raises(errors.TargetError, match="index of another name"):
        mfload.save(MODEL, shard, overwrite=True, max_shard_size=100_000)
    assert _bytes(shards) == before
    mfload.align(shard, overwrite=True)
    samples.assert_same(mfload.load(shards, framework="numpy"), MODEL)


def test_a_hubs_download_that_is_replaced_is_not_called_damaged(source: Path) -> None:
    records = source.parent / ".cache" / "huggingface" / "download"
    records.mkdir(parents=True)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    text = f"{'c' * 40}\n{digest}\n{time.time()}\n"
    for target in (None, source):
        (records / f"{source.name}.metadata").write_text(text)
        assert mfload.verify(source, sha256="auto").ok == (target is None)
        mfload.align(source, target, overwrite=True)
        assert mfload.verify(source, mode="write", overwrite=True).ok
        found = mfload.verify(source, sha256="auto")
        assert [each.what for each in found.problems] == ["no SHA-256 is known of the file"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_stop_at_the_stroke_leaves_no_stale_manifest(
    when: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mfload.verify(source, mode="write")
    real = aligning.SaveTarget.publish

    def publish(*args: Any) -> Any:
        if when == "after":
            real(*args)
        raise ZeroDivisionError

    monkeypatch.setattr(aligning.SaveTarget, "publish", publish)
    with pytest.raises(ZeroDivisionError):
        mfload.align(source, overwrite=True)
    assert mfload.verify(source, mode="check").ok


@pytest.mark.parametrize("algorithm", ["xxh3", "sha256", "both"])
def test_a_manifest_stays_if_nothing_is_published(
    algorithm: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mfload.verify(source, mode="write", checksums=algorithm)
    before = _bytes(source.parent)
    monkeypatch.setattr(aligning.SaveTarget, "publish", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mfload.align(source, overwrite=True)
    assert _bytes(source.parent) == before


def test_a_manifest_that_can_t_be_written_at_the_end(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mfload.verify(source, mode="write")

    real = Draft.publish

    def publish(draft: Draft, path: str, *, replace: bool) -> None:
        if path.endswith(".checksums.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(draft, path, replace=replace)

    monkeypatch.setattr(Draft, "publish", publish)
    with pytest.raises(errors.TargetError, match="checkpoint itself is whole") as info:
        mfload.align(source, target)
    assert info.value.file == os.fspath(target / "model.safetensors.checksums.json")
    samples.assert_same(mfload.load(target, framework="numpy"), MODEL)


def test_another_file_by_the_manifest_s_name_is_not_replaced(source: Path, target: Path) -> None:
    mfload.verify(source, mode="write")
    (target / "model.safetensors.checksums.json").write_text("{}")
    for overwrite in (False, True):
        with pytest.raises(errors.TargetExistsError):
            mfload.align(source, target, overwrite=overwrite)
        assert _bytes(target) == {os.fspath(target / "model.safetensors.checksums.json"): b"{}"}
