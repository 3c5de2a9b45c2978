"""SHA-256 as others publish it: where it is looked for, and what is no such thing."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mfload import errors
from mfload.checking import published
from mfload.checking.published import PublishedSum

A = hashlib.sha256(b"a").hexdigest()
B = hashlib.sha256(b"b").hexdigest()


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(name[:1].encode())
    return [os.fspath(tmp_path / name) for name in ("a.safetensors", "b.safetensors")]


def test_digits_for_one_file(files: list[str]) -> None:
    assert published.expected(A.upper(), files[:1]) == {files[0]: PublishedSum(A, "given")}
    with pytest.raises(errors.UsageError, match="one sha256 for several files"):
        published.expected(A, files)
    assert published.expected(None, files) == {}


def test_digits_by_name(files: list[str]) -> None:
    for name in ("b.safetensors", files[1], "./b.safetensors"):
        assert published.expected({name: B}, files) == {files[1]: PublishedSum(B, "given")}
    bad: list[dict[Any, Any]] = [{"x": B}, {"b.safetensors": "x"}, {"b.safetensors": 5}, {5: B}]
    for given in bad:
        with pytest.raises(errors.UsageError):
            published.expected(given, files)


@pytest.mark.parametrize(
    "text",
    [
        "{A}  a.safetensors\n{B}  b.safetensors\n",
        "{A} *a.safetensors\n\n# more\n{C}  tokenizer.json\n{B} *./b.safetensors\n",
        "SHA256 (a.safetensors) = {A}\nSHA256 (b.safetensors) = {B}\n",
    ],
)
def test_lists_as_programs_write_them(text: str, files: list[str], tmp_path: Path) -> None:
    path = tmp_path / "SHA256SUMS"
    path.write_text(text.format(A=A, B=B, C="0" * 64))
    for given in (path, os.fspath(path)):
        found = published.expected(given, files)
        assert found == {
            files[0]: PublishedSum(A, os.fspath(path)),
            files[1]: PublishedSum(B, os.fspath(path)),
        }


def test_a_list_in_another_directory_means_other_files(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "SHA256SUMS"
    path.write_text(f"{A}  a.safetensors\n{B}  ../b.safetensors\n")
    assert list(published.expected(path, files)) == [files[1]]


def test_digits_alone_in_a_file(files: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.sha256"
    path.write_text(f"{A}\n")
    assert published.expected(path, files[:1]) == {files[0]: PublishedSum(A, os.fspath(path))}
    with pytest.raises(errors.HeaderError, match="not a list of sums"):
        published.expected(path, files)


def test_what_is_no_list(files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "SHA256SUMS"
    path.write_bytes(b"\xff\xfe hello")
    with pytest.raises(errors.HeaderError) as info:
        published.expected(path, files)
    assert info.value.file == os.fspath(path)
    path.write_text(f"{A}  a.safetensors\n")
    assert published.expected(path, files)
    monkeypatch.setattr(published, "_MAX_LIST", 3)
    with pytest.raises(errors.HeaderError, match="not a list"):
        published.expected(path, files)
    with pytest.raises(errors.SourceNotFoundError):
        published.expected(tmp_path / "none", files)
    given: Any = 5
    with pytest.raises(errors.UsageError):
        published.expected(given, files)


def test_the_cache_of_the_hub(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / A).write_bytes(b"a")
    link = snapshot / "model.safetensors"
    link.symlink_to(os.path.join("..", "..", "blobs", A))
    # Small files are named by 40 digits, which are no SHA-256.
    (blobs / A[:40]).write_bytes(b"{}")
    other = snapshot / "config.safetensors"
    other.symlink_to(blobs / A[:40])
    found = published.expected("auto", [os.fspath(link), os.fspath(other)])
    assert found == {os.fspath(link): PublishedSum(A, "the name of its blob")}
    assert published.expected("auto", [os.fspath(other)]) == {}


def test_what_a_download_into_a_directory_leaves(tmp_path: Path) -> None:
    records = tmp_path / ".cache" / "huggingface" / "download"
    (records / "sub").mkdir(parents=True)
    (tmp_path / "sub").mkdir()
    for name in ("a.safetensors", "sub/b.safetensors", "c.safetensors"):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (1700000000, 1700000000))
    (records / "a.safetensors.metadata").write_text(f"{'c' * 40}\n{A}\n1700000000.5\n")
    (records / "sub" / "b.safetensors.metadata").write_text(f"{'c' * 40}\n{B}\n1700000000.5\n")
    (records / "c.safetensors.metadata").write_text(f"{'c' * 40}\n{'d' * 40}\n1700000000.5\n")
    names = ("a.safetensors", "sub/b.safetensors", "c.safetensors")
    found = published.expected("auto", [os.fspath(tmp_path / name) for name in names])
    assert [each.digest for each in found.values()] == [A, B]
    assert "metadata" in found[os.fspath(tmp_path / "a.safetensors")].origin
    link = tmp_path / "sub" / "sub" / "link.safetensors"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "a.safetensors")
    assert published.expected("auto", [os.fspath(link)])[os.fspath(link)].digest == A


def test_a_record_of_a_download_is_of_a_file_that_was_not_written_since(tmp_path: Path) -> None:
    records = tmp_path / ".cache" / "huggingface" / "download"
    records.mkdir(parents=True)
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"")
    os.utime(file, (1700000000, 1700000000))
    for text, known in {
        f"{'c' * 40}\n{A}\n1700000000.0\n": True,
        f"{'c' * 40}\n{A}\n1699999999.9\n": False,
        f"{'c' * 40}\n{A}\nnan\n": False,
        f"{'c' * 40}\n{A}\nsoon\n": False,
        f"{'c' * 40}\n{A}\n": False,
        "": False,
    }.items():
        (records / "a.safetensors.metadata").write_text(text)
        assert bool(published.expected("auto", [os.fspath(file)])) == known


def test_a_record_that_is_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    records = tmp_path / ".cache" / "huggingface" / "download"
    records.mkdir(parents=True)
    (tmp_path / "a.safetensors").write_bytes(b"")
    os.mkfifo(records / "a.safetensors.metadata")
    code = (
        "import sys; from mfload.checking.published import expected; expected('auto', sys.argv[1:])"
    )
    given = [sys.executable, "-c", code, str(tmp_path / "a.safetensors")]
    subprocess.run(given, check=True, timeout=30)


def test_digits_that_are_too_few_are_told_what_was_wanted(files: list[str]) -> None:
    with pytest.raises(errors.SourceNotFoundError, match="64 hexadecimal digits"):
        published.expected("abcd", files[:1])
