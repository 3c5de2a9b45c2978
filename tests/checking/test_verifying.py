"""`verify`: damage is found wherever it is, in one read, and is a finding and no error."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from calls import as_options
from hypothesis import given, settings, strategies as st

import mfload
from mfload import errors
from mfload.checking import scan as scanning
from mfload.checking.manifest import Manifest

MODEL = samples.model()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", MODEL, {"format": "pt"})


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """The same tensors in three files, with an index."""
    directory = tmp_path / "shards"
    directory.mkdir()
    names = list(MODEL)
    placed: dict[str, str] = {}
    for n in range(3):
        file = f"model-0000{n + 1}-of-00003.safetensors"
        some = {name: MODEL[name] for name in names[n::3]}
        samples.save(directory / file, some)
        placed.update(dict.fromkeys(some, file))
    text = json.dumps({"weight_map": placed})
    (directory / "model.safetensors.index.json").write_text(text)
    return directory


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mfload.checking.scan.BLOCK", 64 << 10)
        yield


def _flip(path: Path, at: int, bit: int = 1) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= bit
    path.write_bytes(raw)


def test_headers_alone_read_no_data(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", None)
    found = mfload.verify(path)
    assert found.ok
    assert found
    assert (found.files, found.tensors, found.read_bytes) == (1, len(MODEL), 0)
    assert found.bytes == sum(array.nbytes for array in MODEL.values())
    assert found.checked == ("headers",)


@pytest.mark.parametrize("threads", [1, 8])
def test_a_manifest_written_and_checked(threads: int, shards: Path) -> None:
    written = mfload.verify(shards, mode="write", options=mfload.Options(threads=threads))
    assert written.ok
    assert written.checked == ("headers", "index", "checksums")
    at = shards / "model.safetensors.checksums.json"
    assert written.manifest == os.fspath(at)
    made = Manifest.read(at)
    files = sorted(shards.glob("*.safetensors"))
    assert sorted(made.files) == [file.name for file in files]
    for file in files:
        entry = made.files[file.name]
        assert entry.size == file.stat().st_size
        assert entry.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert written.read_bytes == sum(file.stat().st_size for file in files)
    checked = mfload.verify(shards, mode="check", options=mfload.Options(threads=threads))
    assert checked.ok
    assert checked.checked == ("headers", "index", "checksums", "sha256")
    assert checked.read_bytes == written.read_bytes
    # The same tensors in one file have the same digests.
    one = samples.save(shards.parent / "one.safetensors", MODEL)
    found = mfload.verify(one, mode="check", manifest=at)
    assert found.ok
    assert found.checked == ("headers", "checksums")
    assert "other files" in found.notes[-1]
    assert list(mfload.load(one, framework="numpy", verify=at)) != []


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("algorithm", ["xxh3", "sha256"])
def test_one_algorithm(algorithm: Any, threads: int, shards: Path) -> None:
    options = mfload.Options(threads=threads)
    written = mfload.verify(shards, mode="write", checksums=algorithm, options=options)
    both = mfload.verify(shards, mode="write", manifest=shards / "both.json", options=options)
    made, whole = Manifest.read(written.manifest or ""), Manifest.read(both.manifest or "")
    hashed = algorithm == "xxh3"
    assert made.tensors == {
        name: entry if hashed else entry._replace(digest=None)
        for name, entry in whole.tensors.items()
    }
    assert made.files == ({} if hashed else whole.files)
    what = "checksums" if hashed else "sha256"
    # Whichever is asked for, what the manifest has is compared.
    for asked in ("both", algorithm):
        for known in ({}, {"manifest": shards / "both.json"}):
            found = mfload.verify(shards, checksums=asked, options=options, **known)
            assert found.ok
            if asked == algorithm or not known:
                assert found.checked == ("headers", "index", what)
    data = sum(array.nbytes for array in MODEL.values())
    sizes = sum(file.stat().st_size for file in shards.glob("*.safetensors"))
    assert found.read_bytes == (data if hashed else sizes)
    file = shards / "model-00002-of-00003.safetensors"
    _flip(file, file.stat().st_size - 1)
    for asked in ("both", algorithm):
        (problem,) = mfload.verify(shards, checksums=asked, options=options).problems
        assert problem.file == os.fspath(file)
        assert (problem.tensor is not None) == hashed
    other: Any = "sha256" if hashed else "xxh3"
    for checksums in ("auto", "check"):
        with pytest.raises(errors.UsageError, match="no checksums of this algorithm"):
            mfload.verify(shards, mode=checksums, checksums=other)


def test_sums_of_files_alone_know_every_file(path: Path, shards: Path) -> None:
    mfload.verify(path, mode="write", checksums="sha256")
    at = path.with_name("model.safetensors.checksums.json")
    found = mfload.verify(shards, mode="check", manifest=at)
    files = {each.file for each in found.problems}
    assert len(files) == 4
    assert "not in both" in found.problems[0].what
    samples.save(path, {**MODEL, "new": np.zeros(2)})
    told = [(each.tensor, each.what) for each in mfload.verify(path).problems]
    assert told == [(None, "the manifest is of other data")]
    # A load compares tensors, and finds none to compare with.
    with pytest.raises(errors.UsageError, match="no checksums of tensors"):
        mfload.load(path, "numpy", verify=at)
    # What is published counts, whatever is compared beside it.
    for algorithm in ("xxh3", "sha256"):
        manifest = path.with_name(f"{algorithm}.json")
        again = mfload.verify(
            path, mode="write", checksums=algorithm, manifest=manifest, sha256="0" * 64
        )
        assert ["SHA-256" in each.what for each in again.problems] == [True]


def test_tensors_are_hashed_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ranges of whole tensors, of which readers take turns."""
    monkeypatch.setattr("mfload.checking.scan.BLOCK", 4096)
    arrays = {f"t{n}": np.full(10_000, n, np.uint8) for n in range(10)}
    path = samples.save(tmp_path / "many.safetensors", arrays)
    seen: list[Any] = []
    real = scanning.scan
    monkeypatch.setattr(
        scanning,
        "scan",
        lambda *args: seen.extend(each.blocks[0] for each in args[1]) or real(*args),
    )
    options = mfload.Options(threads=2)
    assert mfload.verify(path, mode="write", checksums="xxh3", options=options).ok
    gaps = [b.offset - a.offset for a, b in itertools.pairwise(seen)]
    assert max(gaps) >= 50_000 - 4096
    assert sum(block.nbytes for block in seen) == 100_000


def test_every_byte_is_read_once(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, lock = os.preadv, threading.Lock()
    read: dict[tuple[int, int], int] = {}

    def preadv(fd: int, vector: Any, offset: int, *flags: int) -> int:
        got = real(fd, vector, offset, *flags)
        with lock:
            key = os.fstat(fd).st_ino, offset
            read[key] = read.get(key, 0) + got
        return got

    monkeypatch.setattr(os, "preadv", preadv)
    mfload.verify(shards, mode="write", sha256=None)
    assert sum(read.values()) == sum(f.stat().st_size for f in shards.glob("*.safetensors"))


@given(data=st.data())
@settings(max_examples=30)
def test_any_flipped_bit_is_found(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = samples.save(tmp_path_factory.mktemp("flip") / "m.safetensors", MODEL)
    mfload.verify(path, mode="write")
    size = path.stat().st_size
    _flip(path, data.draw(st.integers(0, size - 1)), 1 << data.draw(st.integers(0, 7)))
    threads = data.draw(st.sampled_from([None, 1, 5]))
    found = mfload.verify(path, mode="check", options=mfload.Options(threads=threads))
    assert not found.ok
    assert not found


def test_any_flipped_byte_of_a_cached_file_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on the borders of what is shown at once, of tensors, and of members of an archive."""
    monkeypatch.setattr(scanning, "SHOWN", 5 << 20)
    arrays = {f"t{n}": np.random.default_rng(n).bytes(size) for n, size in enumerate((9 << 20, 5))}
    rows = {name: np.frombuffer(raw, np.uint8) for name, raw in arrays.items()}
    path = samples.save(tmp_path / "large.safetensors", rows)
    np.savez(tmp_path / "large.npz", **rows)
    begin = path.stat().st_size - sum(map(len, arrays.values()))
    for algorithm in ("xxh3", "sha256", "both"):
        made = {}
        for engine in ("auto", "pread"):
            options, at = mfload.Options(engine=engine), tmp_path / f"{engine}.checksums.json"
            mfload.verify(
                path, mode="write", checksums=algorithm, manifest=at, overwrite=True,
                options=options,
            )  # fmt: skip
            made[engine] = Manifest.read(at)
        assert made["auto"] == made["pread"]
    raw = path.read_bytes()
    ends = [begin + (5 << 20), begin + (9 << 20), len(raw)]
    for at in [begin, *(end - 1 for end in ends), *ends[:2]]:
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        for algorithm in ("xxh3", "sha256"):
            found = mfload.verify(path, manifest=made["auto"], checksums=algorithm)
            assert len(found.problems) == 1
            if algorithm == "xxh3":
                assert found.problems[0].tensor == f"t{int(at >= ends[1])}"
    archive = (tmp_path / "large.npz").read_bytes()
    assert mfload.verify(tmp_path / "large.npz").checked == ("headers", "crc32")
    middle = archive.index(arrays["t0"]) + (5 << 20)
    (tmp_path / "large.npz").write_bytes(
        archive[:middle] + bytes([archive[middle] ^ 1]) + archive[middle + 1 :]
    )
    assert [each.tensor for each in mfload.verify(tmp_path / "large.npz").problems] == ["t0"]


def test_a_manifest_that_lies_there_is_compared_unasked(path: Path) -> None:
    mfload.verify(path, mode="write")
    found = mfload.verify(path)
    assert found.checked == ("headers", "checksums", "sha256")
    assert found.manifest == os.fspath(path.with_name("model.safetensors.checksums.json"))
    assert "all is well" in str(found)
    _flip(path, -1)
    found = mfload.verify(path)
    assert not found.ok
    assert "the tensor's bytes have changed" in str(found)
    ignored = mfload.verify(path, checksums=False)
    assert ignored.ok
    assert ignored.checked == ("headers",)


def test_headers_alone_are_not_called_well(path: Path) -> None:
    for checksums in (True, False):
        found = mfload.verify(path, checksums=checksums)
        assert found.ok
        assert not found.data_checked
        assert found.as_dict()["data_checked"] is False
        assert "all is well" not in str(found)
        assert "headers only" in str(found)
    assert "mode='write'" in str(mfload.verify(path))
    assert mfload.verify(path, against=path).data_checked


@pytest.mark.parametrize("text", ["", '{"mfload_checksums": 1, ', '{"mfload_checksums": 3}'])
def test_a_damaged_manifest_is_a_problem_unasked(text: str, path: Path) -> None:
    at = path.with_name("model.safetensors.checksums.json")
    at.write_text(text)
    found = mfload.verify(path)
    assert [each.file for each in found.problems] == [os.fspath(at)]
    assert found.manifest is None
    assert not found.data_checked


def test_what_a_flipped_bit_is_said_to_be(path: Path) -> None:
    mfload.verify(path, mode="write")
    known = Manifest.read(path.with_name("model.safetensors.checksums.json"))
    with mfload.open(path) as opened:
        start = opened.info("wide").pieces[0].offset
    _flip(path, start + 70_000)
    found = mfload.verify(path, mode="check")
    tensor, file = found.problems
    assert (tensor.tensor, tensor.file) == ("wide", os.fspath(path))
    assert tensor.expected == known.tensors["wide"].digest
    assert (file.tensor, file.file) == (None, os.fspath(path))
    assert "the manifest" in str(file.expected)
    assert file.found == hashlib.sha256(path.read_bytes()).hexdigest()
    # In the metadata, only the file's own sum can tell.
    _flip(path, start + 70_000)
    _flip(path, path.read_bytes().index(b'"pt"') + 1)
    (only,) = mfload.verify(path, mode="check").problems
    assert "SHA-256" in only.what


def test_what_the_manifest_knows_and_the_headers_do_not(path: Path) -> None:
    mfload.verify(path, mode="write")
    samples.save(
        path,
        {**{k: v for k, v in MODEL.items() if k != "odd"},
         "embed": MODEL["embed"].view(np.int32), "new": np.zeros(2)},
    )  # fmt: skip
    (only,) = mfload.verify(path, mode="check").problems
    assert (only.what, only.file) == ("the manifest is of other data", os.fspath(path))
    # One of an earlier version does not say what it was made of.
    known = Manifest.read(path.with_name("model.safetensors.checksums.json"))
    found = mfload.verify(path, manifest=Manifest(known.tensors, known.files))
    told = {each.tensor: each.what for each in found.problems}
    assert told["odd"] == "a tensor of the manifest is missing"
    assert told["new"] == told["embed"]
    assert told["embed"] == "the tensor is not as in the manifest"
    assert "SHA-256" in told[None]
    assert len(told) == 4


def test_a_manifest_is_not_replaced_by_accident(path: Path) -> None:
    mfload.verify(path, mode="write")
    before = path.with_name("model.safetensors.checksums.json").read_bytes()
    _flip(path, path.stat().st_size - 1)
    with pytest.MonkeyPatch.context() as patch:
        # Nobody is to read a terabyte first.
        patch.setattr(os, "preadv", None)
        with pytest.raises(errors.TargetExistsError):
            mfload.verify(path, mode="write")
    assert path.with_name("model.safetensors.checksums.json").read_bytes() == before
    assert mfload.verify(path, mode="write", overwrite=True).ok
    assert mfload.verify(path, mode="check").ok


def test_no_manifest_is_made_of_what_is_damaged(shards: Path) -> None:
    os.truncate(shards / "model-00002-of-00003.safetensors", 1000)
    found = mfload.verify(shards, mode="write")
    assert not found.ok
    assert found.manifest is None
    assert "no manifest was written" in found.notes[-1]
    assert not (shards / "model.safetensors.checksums.json").exists()


def test_a_file_that_can_t_be_read_is_a_finding(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mfload.verify(shards, mode="write")
    bad = shards / "model-00001-of-00003.safetensors"
    real = os.preadv

    def preadv(fd: int, *args: Any) -> int:
        try:
            if os.path.samestat(os.fstat(fd), os.stat(bad)):
                raise OSError(5, "Input/output error")
            return real(fd, *args)
        finally:
            del args

    _flip(shards / "model-00003-of-00003.safetensors", -1)
    monkeypatch.setattr(os, "preadv", preadv)
    for options in ({"threads": 1}, {"threads": 4}):
        found = mfload.verify(shards, mode="check", **as_options(options))
        files = [each.file for each in found.problems]
        assert os.fspath(bad) in files
        assert "Input/output error" in str(found.problems)
        # The others were looked at all the same.
        assert os.fspath(shards / "model-00003-of-00003.safetensors") in files
        assert len(files) == 3


def test_files_that_change_meanwhile_are_findings(shards: Path) -> None:
    files = sorted(shards.glob("*.safetensors"))

    def change(*_: Any) -> None:
        for file in files[:2]:
            os.utime(file, (1, 1))

    # Each is opened before the first word of progress.
    found = mfload.verify(shards, mode="write", progress=change, options=mfload.Options(threads=3))
    assert {each.file for each in found.problems} == {os.fspath(file) for file in files[:2]}
    assert found.manifest is None


def test_files_by_their_published_sums(path: Path, shards: Path) -> None:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    found = mfload.verify(path, sha256=digest)
    assert found.ok
    assert found.checked == ("headers", "sha256")
    assert found.read_bytes == path.stat().st_size
    _flip(path, 100)
    _flip(path, 100)
    wrong = mfload.verify(path, sha256="0" * 64)
    (problem,) = wrong.problems
    assert problem.expected == f"{'0' * 64} (given)"
    assert problem.found == digest
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}"
        for file in sorted(shards.glob("*.safetensors"))
    ]
    (shards / "SHA256SUMS").write_text("\n".join(lines[:2]))
    (problem,) = mfload.verify(shards, sha256=shards / "SHA256SUMS").problems
    assert problem.what == "no SHA-256 is known of the file"
    assert str(problem.file).endswith("00003-of-00003.safetensors")
    (shards / "SHA256SUMS").write_text("\n".join(lines))
    assert mfload.verify(shards, sha256=shards / "SHA256SUMS").ok


def test_a_snapshot_of_the_hubs_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    whole = samples.save(tmp_path / "x.safetensors", MODEL)
    blob = blobs / hashlib.sha256(whole.read_bytes()).hexdigest()
    whole.rename(blob)
    (snapshot / "model.safetensors").symlink_to(blob)
    found = mfload.verify(snapshot, sha256="auto")
    assert found.ok
    assert found.checked == ("headers", "sha256")
    assert mfload.verify(snapshot, mode="write").checked[-1] == "sha256"
    assert (snapshot / "model.safetensors.checksums.json").exists()
    _flip(blob, -1)
    for options in ({"sha256": "auto"}, {"mode": "write", "overwrite": True}):
        found = mfload.verify(snapshot, **as_options(options))  # type: ignore[arg-type]
        assert not found.ok
        assert any("the name of its blob" in str(each) for each in found.problems)
    # Who asks for what nobody published is told so.
    samples.save(tmp_path / "y.safetensors", MODEL)
    assert not mfload.verify(tmp_path / "y.safetensors", sha256="auto").ok


def test_against_another_that_is_sharded_otherwise(path: Path, shards: Path) -> None:
    for left, right in ((path, shards), (shards, path)):
        for threads in (1, 4):
            found = mfload.verify(left, against=right, options=mfload.Options(threads=threads))
            assert found.ok
            assert found.checked[-1] == "against"
            assert found.read_bytes == 2 * sum(array.nbytes for array in MODEL.values())


@pytest.mark.parametrize("name", ["embed", "layer.0.q", "layer.1.q", "odd", "mask", "scalar"])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_against_one_that_differs(name: str, where: str, path: Path, tmp_path: Path) -> None:
    other = {key: array.copy() for key, array in MODEL.items()}
    flat = other[name].reshape(-1).view(np.uint8)
    width = other[name].itemsize
    element = {"first": 0, "middle": other[name].size // 2, "last": other[name].size - 1}[where]
    flat[element * width + width - 1] ^= 1
    # Whatever differs later is not told.
    flat[-1] ^= 2 if where == "first" and flat.size > width else 0
    second = samples.save(tmp_path / "other.safetensors", other)
    (problem,) = mfload.verify(path, against=second).problems
    place = [int(n) for n in np.unravel_index(element, MODEL[name].shape)]
    assert problem.what == f"the tensors differ from {place} on"
    assert problem.tensor == name
    assert problem.file == os.fspath(second)
    assert str(problem.expected).startswith(str(MODEL[name].reshape(-1)[element]))
    assert problem.expected != problem.found


def test_against_names_dtypes_and_shapes(path: Path, tmp_path: Path) -> None:
    other = dict(MODEL)
    del other["odd"]
    other["more"] = np.zeros(3)
    other["embed"] = MODEL["embed"].view(np.int32)
    other["wide"] = MODEL["wide"].reshape(150_001, 2)
    second = samples.save(tmp_path / "other.safetensors", other)
    told = {each.tensor: each for each in mfload.verify(path, against=second).problems}
    assert told.keys() == {"odd", "more", "embed", "wide"}
    assert "only here" in told["odd"].what
    assert "only there" in told["more"].what
    assert (told["embed"].expected, told["embed"].found) == ("F32 [700, 129]", "I32 [700, 129]")
    assert "[150001, 2]" in str(told["wide"].found)


def test_against_dtypes_of_few_bits_and_of_none(tmp_path: Path) -> None:
    rows = [("f4", "F4", (6,), b"\x21\x43\x65"), ("f6", "F6_E2M3", (4,), b"abc"),
            ("new", "F5", (3,), b"xyz")]  # fmt: skip
    a = samples.save_raw(tmp_path / "a.safetensors", rows)
    assert mfload.verify(a, against=a).ok
    changed = [("f4", "F4", (6,), b"\x21\x53\x65"), ("f6", "F6_E2M3", (4,), b"abd"),
               ("new", "F5", (3,), b"xYz")]  # fmt: skip
    b = samples.save_raw(tmp_path / "b.safetensors", changed)
    told = {each.tensor: each for each in mfload.verify(a, against=b).problems}
    assert "[2]" in told["f4"].what
    assert (told["f4"].expected, told["f4"].found) == ("1.5 2 (0x43)", "1.5 3 (0x53)")
    assert "[0]" in told["f6"].what
    assert "byte 1" in told["new"].what
    assert (told["new"].expected, told["new"].found) == ("0x79", "0x59")


def test_against_what_is_damaged(path: Path, shards: Path) -> None:
    os.truncate(shards / "model-00002-of-00003.safetensors", 5)
    found = mfload.verify(path, against=shards)
    assert any(each.what.startswith("the other one: ") for each in found.problems)
    assert any("only here" in each.what for each in found.problems)


def test_progress_ends_at_the_total(shards: Path, path: Path) -> None:
    seen: list[tuple[int, int]] = []
    mfload.verify(shards, mode="write", against=path, progress=lambda *now: seen.append(now))
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_arguments_that_make_no_sense(path: Path, tmp_path: Path) -> None:
    bad: list[dict[str, Any]] = [
        {"mode": "read"}, {"mode": True}, {"threads": 0},
        {"checksums": "md5"}, {"mode": "write", "checksums": False},
        {"checksums": False, "manifest": "x"}, {"checksums": None},
        {"timeout": -1}, {"mode": "write", "manifest": Manifest({})},
        {"mode": "check", "manifest": 5}, {"sha256": 5}, {"sha256": {"x": "y"}},
    ]  # fmt: skip
    for options in bad:
        with pytest.raises(errors.UsageError):
            mfload.verify(path, **as_options(options))
    for options in ({"mode": "check"}, {"manifest": "x"}):
        with pytest.raises(errors.SourceNotFoundError):
            mfload.verify(path, **as_options(options))
    with pytest.raises(errors.SourceNotFoundError):
        mfload.verify(path, against=tmp_path / "none.safetensors")
    with pytest.raises(errors.SourceNotFoundError):
        mfload.verify(tmp_path / "none.safetensors")


def test_it_shows_itself(path: Path) -> None:
    found = mfload.verify(path, mode="write")
    text, page = str(found), found._repr_html_()
    for part in ("all is well", f"{len(MODEL)} tensors in 1 file", "headers, checksums", "GiB/s"):
        assert part in text
        assert part in page
    plain = found.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["ok"] is True
    _flip(path, -1)
    found = mfload.verify(path, mode="check")
    assert "2 problems" in str(found)
    plain = found.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["problems"][0]["tensor"] is not None


def test_the_time_runs_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = threading.Event()
    real = os.preadv

    def preadv(*args: Any) -> int:
        try:
            hung.wait(20)
            return real(*args)
        finally:
            del args

    monkeypatch.setattr(os, "preadv", preadv)
    for options in ({"mode": "write"}, {"against": path}):
        with pytest.raises(errors.LoadTimeoutError):
            mfload.verify(path, **as_options({"timeout": 0.3, **options}))  # type: ignore[arg-type]
    hung.set()
    for thread in threading.enumerate():
        if thread.name == "mfload-reader":
            thread.join(10)


def test_a_manifest_takes_no_other_file_s_place(path: Path, shards: Path, tmp_path: Path) -> None:
    other = samples.save(tmp_path / "other.bin", {"a": np.zeros(3)})
    (tmp_path / "notes.json").write_text('{"mine": 1}')
    (tmp_path / "link.json").symlink_to(path)
    os.link(path, tmp_path / "hard.json")
    index = shards / "model.safetensors.index.json"
    kept = {each: each.read_bytes() for each in (path, other, index, tmp_path / "notes.json")}
    cases = [(path, path), (path, tmp_path / "link.json"), (path, tmp_path / "hard.json"),
             (path, other), (path, tmp_path / "notes.json"), (shards, index),
             (path, tmp_path / "new.safetensors")]  # fmt: skip
    for source, manifest in cases:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "preadv", None)
            with pytest.raises((errors.UsageError, errors.TargetExistsError)):
                mfload.verify(source, mode="write", manifest=manifest, overwrite=True)
    assert {each: each.read_bytes() for each in kept} == kept
    assert (tmp_path / "link.json").is_symlink()
    assert not (tmp_path / "new.safetensors").exists()


def test_a_broken_index_does_not_hide_behind_a_missing_manifest(shards: Path) -> None:
    index = shards / "model.safetensors.index.json"
    index.write_text('{"weight_map": 3}')
    for source in (shards, index):
        found = mfload.verify(source, mode="check")
        assert found.problems[0].file == os.fspath(index)
        assert str(found.problems[-1].file).endswith("model.safetensors.checksums.json")
        assert "checksums" not in found.checked


def test_a_directory_and_its_index_mean_one_manifest(shards: Path) -> None:
    index = shards / "model.safetensors.index.json"
    index.rename(shards / "other.safetensors.index.json")
    index = shards / "other.safetensors.index.json"
    written = mfload.verify(shards, mode="write")
    assert written.manifest == os.fspath(shards / "other.safetensors.checksums.json")
    assert mfload.verify(index, mode="check").ok


def test_close_names_are_told(path: Path) -> None:
    for options in ({}, {"against": path.with_name("model.safetensor")}):
        source = path if options else path.with_name("model.safetensor")
        with pytest.raises(errors.SourceNotFoundError, match=r"close names: model\.safetensors"):
            mfload.verify(source, **as_options(options))  # type: ignore[arg-type]


def test_a_file_whose_name_is_no_text(tmp_path: Path) -> None:
    name = os.path.join(os.fsencode(tmp_path), b"x\xff.safetensors")
    samples.save(tmp_path / "x.safetensors", MODEL)
    os.rename(tmp_path / "x.safetensors", name)
    at = tmp_path / "x.json"
    written = mfload.verify(os.fsdecode(name), mode="write", manifest=at)
    assert written.ok
    assert [*Manifest.read(at).files] == ["x\\xff.safetensors"]
    assert mfload.verify(os.fsdecode(name), mode="check", manifest=at).ok
