"""What an error says of a file or path that is not a checkpoint."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from hypothesis import given, strategies as st

import mfload
from mfload import errors
from mfload.formats import hints
from mfload.sources.local import LocalFile


def _said(path: Path) -> str:
    """The message of the error that loading gives."""
    with pytest.raises(errors.HeaderError) as caught:
        mfload.open(path)
    error = caught.value
    assert error.file == str(path)
    assert error.args == (error.message,)
    assert error.message.isprintable()
    return error.message


def _missing(path: object) -> str:
    with pytest.raises(errors.SourceNotFoundError) as caught:
        mfload.open(path)  # pyright: ignore
    assert isinstance(caught.value, FileNotFoundError)
    assert caught.value.message.isprintable()
    return caught.value.message


def _saved(save: Callable[..., None], array: Any) -> bytes:
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)
    return file.getvalue()


def _tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a"), io.BytesIO())
    return file.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
FILES = {
    "a zip archive, as PyTorch": _zip(),
    "a pickle": pickle.dumps({"a": [1] * 100}),
    "a NumPy array": _saved(np.save, np.zeros(9)),
    "a GGUF file": b"GGUF\x03\0\0\0" + bytes(40),
    "an HDF5 file": b"\x89HDF\r\n\x1a\n" + bytes(90),
    "a part of an Orbax checkpoint": b"\x0c\xdb\x3a\x2a" + bytes(20),
    "a Git LFS pointer": POINTER,
    "a web page": b"\n <!doctype HTML>\n<html><head><title>404</title>",
    "an error of a server": b'{"error": "Repository not found"}',
    "JSON": b'  {"architectures": ["X"]}',
    "XML": b"<?xml version='1.0'?><Error>",
    "a gzip file": gzip.compress(b"x" * 90),
    "a bzip2 file": bz2.compress(b"x" * 90),
    "an xz file": lzma.compress(b"x" * 90),
    "a zstd file": b"\x28\xb5\x2f\xfd\x24\x05\x29\0\0hello\xe4\x90\x91\x84",
    "a tar archive": _tar(),
    "an empty file": b"",
    "all zeros": bytes(100_000),
}


@pytest.mark.parametrize("kind", FILES)
def test_what_a_file_seems_to_be(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(FILES[kind])
    assert f"; it seems to be {kind}" in _said(path)


def test_a_truncated_file_says_how_much_is_missing(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "x.safetensors", {"a": np.zeros(1000)})
    size = path.stat().st_size
    os.truncate(path, size - 300)
    assert _said(path) == f"the file is truncated: 300 bytes of {size} are missing"


def test_a_bad_header_is_not_called_another_format(tmp_path: Path) -> None:
    path = samples.save_raw(tmp_path / "x.safetensors", [("a", "F32", (3,), b"xx")])
    assert _said(path) == "malformed tensor entry"
    path.write_bytes(b"\xff" * 100)
    assert _said(path) == "the header's length is over the format's limit; not a safetensors file"


def test_an_index_that_is_another_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    for raw, what in ((POINTER, "run `git lfs pull`"), (b"", "an empty file")):
        path.write_bytes(raw)
        assert what in _said(path)
    for text in ('{"weight_map": 3}', '{"model_type": "x"}'):
        path.write_text(text)
        assert _said(path) == "not a checkpoint index"
    path.write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    (tmp_path / "pytorch_model.bin").write_bytes(gzip.compress(b"x"))
    with pytest.raises(errors.HeaderError, match="a gzip file"):
        mfload.open(path)


def test_a_file_is_only_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is; and nothing in it is run."""
    path = tmp_path / "x"
    with path.open("wb") as file:
        touch = os.fsencode(tmp_path / "run")
        file.write(b"\x80\x04cos\nsystem\n(S'touch " + touch + b"'\ntR.")
        file.truncate(1 << 40)
    read: list[int] = []
    real = LocalFile.read

    def counted(self: LocalFile, offset: int, nbytes: int) -> bytes:
        read.append(nbytes)
        return real(self, offset, nbytes)

    monkeypatch.setattr(LocalFile, "read", counted)
    _said(path)
    assert sum(read) < 10_000
    assert not (tmp_path / "run").exists()


def test_a_file_that_goes_away_keeps_its_first_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"x" * 20)
    file = LocalFile(path)
    path.unlink()
    error = hints.explain_file(errors.HeaderError("first", file=path), file)
    assert error.message == "first"


@given(st.binary(max_size=300), st.sampled_from([*FILES]))
def test_any_bytes(raw: bytes, kind: str) -> None:
    for start in (b"", b"PK\x03\x04", b"\x80\x04", b"<", b"{", FILES[kind][:20]):
        said = hints.seems(start + raw, len(start + raw))
        assert said is None or (said.isprintable() and len(said) < 300)


def test_a_valid_file_is_called_nothing(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "x.safetensors", samples.model())
    assert hints.seems(path.read_bytes()[:512], path.stat().st_size) is None


def _model(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return samples.save(directory / "model.safetensors", {"a": np.zeros(2)})


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("saved_model.pb", "; it holds a SavedModel"),
        ("c.data-00000-of-00002", "; it holds a TensorFlow checkpoint"),
        ("__0_0.distcp", "torch.distributed"),
        ("pytorch_model.bin", "; it holds PyTorch files"),
        ("model.gguf", "; it holds GGUF files"),
        ("model.weights.h5", "; it holds files of Keras or HDF5"),
        ("model.onnx", "; it holds an ONNX model"),
        ("config.json", "; it holds a model's configuration and no weights"),
        ("README.md", ""),
    ],
)
def test_directories_of_other_formats(tmp_path: Path, name: str, what: str) -> None:
    assert _missing(tmp_path) == "nothing to load in the directory"
    (tmp_path / name).write_bytes(b"x")
    assert what in _missing(tmp_path)


def test_a_checkpoint_further_down_is_named(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d\n"):
        _model(tmp_path / name)
    places = ", ".join(str(tmp_path / name) for name in "abc")
    assert _missing(tmp_path) == f"nothing to load in the directory; look in {places} …"
    cache = tmp_path / "models--x--y"
    _model(cache / "snapshots" / "0123")
    assert _missing(cache).endswith(f"; look in {cache / 'snapshots' / '0123'}")


def test_close_names_are_suggested(tmp_path: Path) -> None:
    path = _model(tmp_path)
    assert _missing(tmp_path / "modle.safetensors").endswith("; close names: model.safetensors")
    assert _missing([path, tmp_path / "modl.safetensors"]).endswith("names: model.safetensors")
    assert _missing(tmp_path / "else.bin") == "could not open: No such file or directory"
    assert f"close names: {tmp_path.name}" in _missing(f"{tmp_path}x/model.safetensors")
    assert _missing(path / "x")


def test_paths_that_are_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "URLs: download it first" in _missing("ftp://host/x")
    assert _missing("").endswith("; the path is empty")
    for path in ("*.safetensors", "model-0000?-of-00002.safetensors", "[ab]/"):
        assert _missing(path).endswith("give the directory, or sorted(glob.glob(pattern))")
    assert "os.path.expanduser" in _missing("~/model.safetensors")
    assert "is loaded by 'hf://org/model'" in _missing("org/model")
    for path in ("a/b/c", "org", "./org/model.safetensors", "org/"):
        assert "hf://" not in _missing(path)
    link = tmp_path / "model.safetensors"
    link.symlink_to("blobs/\x1b[31mgone")
    assert _missing(link).endswith(r"it is a link to blobs/\x1b[31mgone, which does not exist")


@pytest.mark.parametrize("indexed", [True, False])
def test_missing_shards_are_missing_files(tmp_path: Path, indexed: bool) -> None:
    """A missing file is a FileNotFoundError, wherever the checkpoint names it."""
    if indexed:
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    else:
        _model(tmp_path).rename(tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(FileNotFoundError) as caught:
        mfload.load(tmp_path, "numpy")
    assert isinstance(caught.value, errors.ShardNotFoundError | errors.CheckpointError)
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


def test_a_total_size_that_is_off_is_a_note(tmp_path: Path) -> None:
    _model(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for total, notes in ((16, 0), (16.0, 0), (None, 0), (17, 1), ("16", 1), ({"a": "b" * 900}, 1)):
        metadata = {} if total is None else {"total_size": total}
        weights = {"a": "model.safetensors"}
        index.write_text(json.dumps({"metadata": metadata, "weight_map": weights}))
        opened = mfload.open(tmp_path)
        assert len(opened._index.notes) == notes
        assert all("total_size" in each and len(each) < 300 for each in opened._index.notes)
