"""What a file that is no safetensors file seems to be: made by what makes such files."""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import io
import json
import lzma
import os
import pickle
import struct
import subprocess
import sys
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
from mfload.formats.hints import Look
from mfload.sources.local import LocalFile


def _said(path: Path) -> str:
    """The message of the error that loading gives."""
    with pytest.raises(errors.HeaderError) as caught:
        mfload.open(path)
    error = caught.value
    assert error.file == str(path)
    assert str(error).startswith(error.message)
    assert error.args == (error.message,)
    assert error.message.isprintable()
    return error.message


def _look(raw: bytes, name: str = "f.safetensors", size: int | None = None) -> Look:
    return Look(raw[:4096], raw[-65536:], len(raw) if size is None else size, name)


_MADE_BY_TORCH = """
import torch
torch.save({"a": torch.zeros(30)}, "new.pt")
torch.save({f"layer.{n}": torch.zeros(300) for n in range(300)}, "large.pt")
torch.save({"a": torch.zeros(30)}, "old.pt", _use_new_zipfile_serialization=False)
torch.jit.script(torch.nn.Linear(2, 2)).save("script.pt")
"""
_MADE_BY_TENSORFLOW = """
import tensorflow as tf, keras
module = tf.Module()
module.v = tf.Variable([1.0, 2.0])
tf.saved_model.save(module, "saved")
tf.train.Checkpoint(m=module).save("checkpoint/c")
model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
model.save("k.keras")
model.save("k.h5")
"""
_MADE_BY_PADDLE = "import paddle; paddle.save({'a': paddle.zeros([3])}, 'a.pdparams')"


def _made(by: str, module: str, directory: Path) -> None:
    """Runs a program in a process of its own: frameworks don't live together."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    subprocess.run(
        [sys.executable, "-c", by], cwd=directory, check=True, capture_output=True,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}, timeout=250,
    )  # fmt: skip


def _hdf5(path: Path) -> None:
    with pytest.importorskip("h5py").File(path, "w") as file:
        file["a"] = np.zeros(3)


def _hdf5_later(path: Path) -> None:
    with pytest.importorskip("h5py").File(path, "w", userblock_size=1024) as file:
        file["a"] = np.zeros(3)


def _zip(*names: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file:
            for name in names:
                file.writestr(name, b"x" * 100)

    return make


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as file:
        file.addfile(tarfile.TarInfo("a"), io.BytesIO())


def _bytes(raw: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(raw)


POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4965799096\n"
)
HTML = b"\n<!DOCTYPE html>\n<html><head><title>404:\n Not Found</title>"
XML = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Denied</Message></Error>"
ONNX = b"\x08\x08\x12\x07pytorch\x1a\x052.1.0:\x81\x20"
FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickle": (lambda path: path.write_bytes(pickle.dumps({"a": [1] * 100})), "a Python pickle"),
    "torch_pickle": (_bytes(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n."), "a PyTorch file"),
    "npy": (lambda path: path.write_bytes(_saved(np.save, np.zeros(9))), "a NumPy array (.npy)"),
    "npz": (lambda path: path.write_bytes(_saved(np.savez, np.zeros(9))), "NumPy arrays (.npz)"),
    "npz_small": (
        lambda path: path.write_bytes(_saved(np.savez_compressed, np.zeros(9))), "arrays (.npz)"
    ),
    "gguf": (_bytes(b"GGUF\x03\0\0\0" + bytes(40)), "a GGUF file"),
    "ggml": (_bytes(struct.pack("<I", 0x67676D6C) + b"\x01" * 40), "a GGML file"),
    "ggmf": (_bytes(struct.pack("<I", 0x67676D66) + b"\x01" * 40), "a GGML file"),
    "ggjt": (_bytes(struct.pack("<I", 0x67676A74) + b"\x01" * 40), "a GGML file"),
    "hdf5": (_hdf5, "an HDF5 file"),
    "hdf5_later": (_hdf5_later, "an HDF5 file"),
    "keras": (_zip("metadata.json", "config.json", "model.weights.h5"), "a Keras model"),
    "zip": (_zip("a", "b"), "a zip archive"),
    "zip_empty": (_zip(), "a zip archive"),
    "onnx": (_bytes(ONNX), "an ONNX model"),
    "tflite": (_bytes(b"\x1c\0\0\0TFL3" + b"\x01" * 40), "a TensorFlow Lite model"),
    "saved_model": (_bytes(b"\x08\x01\x12\x9c\x3a\n\xf8\x0b\x12\xc8"), "a TensorFlow SavedModel"),
    "leveldb": (_bytes(b"\xff" * 50 + b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"), "TensorFlow check"),
    "ocdbt": (_bytes(b"\x0c\xdb\x3a\x2a" + bytes(20)), "Orbax"),
    "flax": (_bytes(b"\x82\xa6params\x81\xa5Dense\xc0"), "msgpack, as Flax writes it"),
    "flax_large": (_bytes(b"\xde\x00\x82\xa6params" + b"\x80" * 20), "msgpack"),
    "flax_long": (_bytes(b"\x81\xd9\x26" + b"k" * 38 + b"\xc0"), "msgpack"),
    "gzip": (lambda path: path.write_bytes(gzip.compress(b"x" * 90)), "a gzip file: unpack"),
    "bzip2": (lambda path: path.write_bytes(bz2.compress(b"x" * 90)), "a bzip2 file"),
    "xz": (lambda path: path.write_bytes(lzma.compress(b"x" * 90)), "an xz file"),
    "zstd": (_bytes(b"\x28\xb5\x2f\xfd\x24\x05\x29\0\0hello\xe4\x90\x91\x84"), "a zstd file"),
    "lz4": (_bytes(b"\x04\x22\x4d\x18" + b"\x01" * 20), "an lz4 file"),
    "7z": (_bytes(b"7z\xbc\xaf\x27\x1c" + b"\x01" * 20), "a 7z archive"),
    "tar": (_tar, "a tar archive"),
    "appledouble": (_bytes(b"\0\x05\x16\x07\0\x02\0\0Mac OS X" + bytes(40)), "AppleDouble"),
    "lfs": (_bytes(POINTER), "pointer that stands for a file of 4965799096 bytes: run `git lfs"),
    "xet": (_bytes(b"# xet version 0\nfilesize = 1\n"), "a Xet pointer"),
    "html": (_bytes(HTML), "a web page titled '404: Not Found', saved in place of the file"),
    "html_bare": (_bytes(b"<html><body>Sorry</body></html>"), "a web page, saved"),
    "xml": (_bytes(XML), "XML saying 'AccessDenied', maybe an error"),
    "json_error": (_bytes(b'{"error": "Repository not found"}'), "an error of a server"),
    "json": (_bytes(b"  [1, 2, 3, 4, 5]"), "JSON that begins with '[1, 2"),
    "config": (_bytes(b'{"architectures": ["X"], "model_type": "x"}'), "a model's configuration"),
    "index": (_bytes(b'{"metadata": {}, "weight_map": {"a": "b"}}'), "index under another name"),
    "text": (_bytes("Voilà, un texte.\n".encode() * 9), "text that begins with 'Voilà, un texte."),
    "text_bom": (_bytes(b"\xef\xbb\xbfhello, hello"), "text that begins with 'hello, hello'"),
    "empty": (_bytes(b""), "an empty file: was a download interrupted?"),
    "zeros": (_bytes(bytes(100_000)), "all zeros: an interrupted download"),
    "header_short": (_bytes(struct.pack("<Q", 1000) + b'{"a": '), "cut short: 994 bytes of its"),
}  # fmt: skip


def _saved(save: Callable[..., None], array: Any) -> bytes:
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("kind", FILES)
def test_what_it_seems_to_be(kind: str, tmp_path: Path) -> None:
    make, what = FILES[kind]
    path = tmp_path / "model.safetensors"
    make(path)
    assert what in _said(path).split("it seems to be ")[1]


def test_what_torch_writes(tmp_path: Path) -> None:
    _made(_MADE_BY_TORCH, "torch", tmp_path)
    for file in ("new.pt", "large.pt", "script.pt"):
        assert "a PyTorch file: load it with torch.load(" in _said(tmp_path / file)
    assert "a PyTorch file of the old kind: load it with" in _said(tmp_path / "old.pt")
    with pytest.raises(errors.SourceNotFoundError) as caught:
        mfload.open(tmp_path)
    assert "large.pt seems to be a PyTorch file" in caught.value.message


@pytest.mark.slow
def test_what_tensorflow_and_keras_write(tmp_path: Path) -> None:
    _made(_MADE_BY_TENSORFLOW, "keras", tmp_path)
    for file, what in {
        "saved/saved_model.pb": "SavedModel",
        "checkpoint/c-1.index": "TensorFlow checkpoint",
        "checkpoint/c-1.data-00000-of-00001": "TensorFlow checkpoint",
        "checkpoint/checkpoint": "TensorFlow checkpoint",
        "k.keras": "Keras model",
        "k.h5": "HDF5 file (Keras weights",
    }.items():
        assert what in _said(tmp_path / file)
    for directory, what in {
        "saved": "it is a TensorFlow SavedModel",
        "checkpoint": "it has a TensorFlow checkpoint",
    }.items():
        with pytest.raises(errors.SourceNotFoundError, match=what):
            mfload.open(tmp_path / directory)


def test_what_paddle_writes(tmp_path: Path) -> None:
    _made(_MADE_BY_PADDLE, "paddle", tmp_path)
    assert "paddle.save writes such files" in _said(tmp_path / "a.pdparams")


def test_names_tell_where_bytes_do_not(tmp_path: Path) -> None:
    for name, what in {
        "x.safetensors.incomplete": "an unfinished download",
        "x.crdownload": "an unfinished download",
        "x.data-00000-of-00001": "TensorFlow checkpoint",
        "x.onnx": "ONNX",
    }.items():
        path = tmp_path / name
        path.write_bytes(b"\xff" * 100)
        assert what in _said(path)


def test_a_truncated_file_says_how_much_is_missing(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "x.safetensors", {"a": np.zeros(1000)})
    size = path.stat().st_size
    os.truncate(path, size - 300)
    assert _said(path) == f"the file is truncated: 300 bytes of {size} are missing"


def test_a_bad_header_is_not_called_another_format(tmp_path: Path) -> None:
    path = samples.save_raw(tmp_path / "x.safetensors", [("a", "F32", (3,), b"xx")])
    assert _said(path) == "malformed tensor entry"
    path.write_bytes(b"\xff" * 100)
    assert _said(path) == "header over the cap; is this a safetensors file?"


def test_an_index_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    for raw, what in (
        (POINTER, "run `git lfs pull`"),
        (b"", "an empty file"),
        (json.dumps({"model_type": "x"}).encode(), "a model's configuration"),
        (HTML, "a web page"),
    ):
        path.write_bytes(raw)
        assert what in _said(path)
    # It has the name of an index already.
    path.write_text('{"weight_map": 3}')
    assert _said(path) == "no checkpoint index"
    path.write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    (tmp_path / "pytorch_model.bin").write_bytes(gzip.compress(b"x"))
    with pytest.raises(errors.HeaderError, match="a gzip file"):
        mfload.open(path)


def test_a_file_is_only_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is; and nothing in it is run."""
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write(
            b"\x80\x04" + b"cos\nsystem\n(S'touch " + os.fsencode(tmp_path / "run") + b"'\ntR."
        )
        file.truncate(1 << 40)
    read = 0
    real = LocalFile.read

    def counted(self: LocalFile, offset: int, nbytes: int) -> bytes:
        nonlocal read
        read += nbytes
        return real(self, offset, nbytes)

    monkeypatch.setattr(LocalFile, "read", counted)
    _said(path)
    assert read < 100_000
    assert not (tmp_path / "run").exists()


def test_a_file_that_goes_away_keeps_its_first_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"x" * 20)
    file = LocalFile(path)
    path.unlink()
    error = hints.explain(errors.HeaderError("first", file=path), file)
    assert error.message == "first"


@given(st.binary(max_size=300), st.sampled_from([*FILES]))
def test_any_bytes(raw: bytes, kind: str) -> None:
    starts = [
        b"",
        b"PK\x03\x04",
        b"\x81",
        b"\xd9",
        b"\x80\x04",
        b"\x08\x01\x12",
        b"<",
        b"{",
        b"\xde",
    ]
    for start in starts:
        said = hints.seems(_look(start + raw, kind))
        assert said is None or (said.isprintable() and len(said) < 300)


def test_a_valid_file_is_called_nothing(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "x.safetensors", samples.model())
    assert hints.of(LocalFile(path)) is None


def test_a_character_cut_in_two_at_the_end_of_the_look() -> None:
    raw = b"x" * 4095 + "é".encode() + b"y" * 100
    assert "text that begins" in (hints.seems(_look(raw)) or "")
    assert hints.seems(_look(b"x" * 100 + b"\xc3")) is None
