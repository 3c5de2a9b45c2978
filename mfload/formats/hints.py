"""What a file or path that is not a checkpoint may be: magic bytes, and the nearest names.

Asked only when an error is about to be raised. A file's first bytes are looked at and never
believed: nothing is unpickled, unpacked or followed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Sequence

from mfload import errors
from mfload.sources.base import Source
from mfload.sources.directories import Directory, LocalDirectory

_HEAD = 512
_LISTED = 2000  # Names of a directory that are looked at.
_SHOWN = 3

_TORCH = "in Python, torch.load(path, weights_only=True) reads it and mfload.save writes it"
_PADDLE = "in Python, paddle.load(path) reads it and mfload.save writes it"
_KERAS = "in Python, keras.saving or h5py reads them and mfload.save writes them"
_PICKLE = f"a pickle: if torch.save wrote it, {_TORCH}; if paddle.save, {_PADDLE}"
_UNPACK = "unpack it first"
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"PK\x03\x04", f"a zip archive, as PyTorch and Keras write: if PyTorch's, {_TORCH}"),
    (0, b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", f"a PyTorch file of the old kind: {_TORCH}"),
    (0, b"\x93NUMPY", "a NumPy array: name it .npy"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file: load it with Keras or h5py"),
    (0, b"GGUF", "a GGUF file of llama.cpp: look for the model's safetensors"),
    (0, b"\x0c\xdb\x3a\x2a", "a part of an Orbax checkpoint: give its directory"),
    (0, b"version https://git-lfs", "a Git LFS pointer, not the file: run `git lfs pull`"),
    (0, b"# xet version", "a Xet pointer, not the file: download it with `hf download`"),
    (0, b"<!DOCTYPE html", "a web page saved in place of the file: download it again"),
    (0, b"<html", "a web page saved in place of the file: download it again"),
    (0, b"<?xml", "XML, maybe an error of a server saved in place of the file"),
    (0, b'{"error"', "an error of a server saved in place of the file: download it again"),
    (0, b'{"tree_metadata"', "a part of an Orbax checkpoint: give its directory"),
    (0, b"{", "JSON: give the directory, or a .safetensors file"),
    (0, b"\x1f\x8b", f"a gzip file: {_UNPACK}"),
    (0, b"\x28\xb5\x2f\xfd", f"a zstd file: {_UNPACK}"),
    (0, b"\xfd7zXZ\0", f"an xz file: {_UNPACK}"),
    (0, b"BZh", f"a bzip2 file: {_UNPACK}"),
    (257, b"ustar", f"a tar archive: {_UNPACK}"),
    (0, bytes(64), "all zeros: was a download interrupted?"),
    *((0, bytes((0x80, n)), _PICKLE) for n in range(2, 6)),
)
_NAMES = (
    (re.compile(r"saved_model\.pb"), "a SavedModel: in Python, tf.saved_model.load reads it"),
    (re.compile(r".*\.data-\d{5}-of-\d{5}"), "a TensorFlow checkpoint: tf.train reads it"),
    (re.compile(r".*\.distcp"), "a checkpoint of torch.distributed.checkpoint"),
    (re.compile(r".*\.(bin|pt|pth|ckpt)"), f"PyTorch files: {_TORCH}"),
    (re.compile(r".*\.pdparams"), f"Paddle files: {_PADDLE}"),
    (re.compile(r".*\.(incomplete|part|crdownload)"), "an unfinished download: download it again"),
    (re.compile(r".*\.gguf"), "GGUF files: look for the model's safetensors"),
)
# Others, which may lie beside weights that mfload loads.
_BESIDE = (
    (re.compile(r".*\.(h5|hdf5|keras)"), f"files of Keras or HDF5: {_KERAS}"),
    (re.compile(r".*\.onnx"), "an ONNX model: look for the model's safetensors"),
    (re.compile(r"config\.json"), "a model's configuration and no weights: download them, too"),
)
_SUFFIX, _INDEX = ".safetensors", ".safetensors.index.json"
_WEIGHTS = (".safetensors", ".index.json", ".npz")
# Also one without an owner, as gpt2 and bert-base-uncased; a file's name has an ending.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*|(?=[a-z]+[\d-])[a-z0-9-]+")


def explain_file(error: errors.HeaderError, file: Source) -> errors.HeaderError:
    """Adds to an error what its file seems to be, by its first bytes."""
    # A file that goes away meanwhile has had its error already.
    with contextlib.suppress(errors.MfloadError):
        found = seems(file.read(0, min(file.size, _HEAD)), file.size)
        _add(error, "" if found is None else f"; it seems to be {found}")
    return error


def seems(head: bytes, size: int) -> str | None:
    """What a file of `size` bytes that begins with `head` seems to be; None if unknown."""
    if not size:
        return "an empty file: was a download interrupted?"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return None  # A safetensors header.
    text = head.lstrip(b"\xef\xbb\xbf\r\n\t ").lower()
    for offset, magic, what in _MAGIC:
        if head.startswith(magic, offset) or (magic[0] in b"<{" and text.startswith(magic.lower())):
            return what
    return None


def of_directory(directory: Directory, names: Sequence[str]) -> str:
    """What a directory without a checkpoint holds instead, to be put after a message."""
    if known := _holds(names, _NAMES):
        return known
    inside = {name: listed(directory.below(name)) for name in names}
    below = [name for name in names if any(each.endswith(_WEIGHTS) for each in inside[name])]
    if "snapshots" in names:  # A repository of the Hugging Face cache.
        snapshots = listed(directory.below("snapshots"))
        below += [os.path.join("snapshots", name) for name in snapshots]
    if not below:
        return ""
    paths = [errors.printable(f"{directory.name}/{name}") for name in below[:_SHOWN]]
    return f"; look in {', '.join(paths)}{' …' if len(below) > _SHOWN else ''}"


def beside(names: Sequence[str]) -> str:
    """The same, for a directory without any weights."""
    return _holds(names, _BESIDE)


def _holds(names: Sequence[str], kinds: Sequence[tuple[re.Pattern[str], str]]) -> str:
    found = (what for pattern, what in kinds if any(map(pattern.fullmatch, names)))
    return next((f"; it holds {what}" for what in found), "")


def explain_path(error: errors.SourceNotFoundError, asked: object) -> errors.SourceNotFoundError:
    """Adds to the error of a path that does not exist the names that are nearest to it.

    `asked` is the path as the caller gave it.
    """
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and error.file is not None:
        with contextlib.suppress(OSError, ValueError):
            _add(error, _near(error.file, asked if isinstance(asked, str) else error.file))
    return error


def _near(path: str, asked: str) -> str:
    if not path:
        return "; the path is empty"
    if any(each in path for each in "*?["):
        return "; a pattern is not expanded: give the directory, or sorted(glob.glob(pattern))"
    if asked.startswith("~"):
        return "; only a shell expands ~: use os.path.expanduser"
    if os.path.islink(path):
        return f"; it is a link to {errors.printable(os.readlink(path))}, which does not exist"
    if path.endswith(_SUFFIX):
        sharded = path.removesuffix(_SUFFIX) + _INDEX
        if os.path.exists(sharded):
            return f"; it lies there in shards: load {errors.printable(sharded)}"
    parent, name = os.path.split(path.rstrip("/" + os.sep))
    while parent and not os.path.isdir(parent) and os.path.dirname(parent) != parent:
        parent, name = os.path.split(parent)
    close = errors.close_names(name, listed(LocalDirectory(parent or ".")))
    if close:
        return f"; close names: {', '.join(map(errors.printable, close))}"
    if _HUB_ID.fullmatch(asked) and not os.path.isdir(os.path.dirname(asked)):
        return f"; a model of the Hugging Face Hub is loaded by 'hf://{asked}'"
    return ""


def listed(directory: Directory) -> list[str]:
    """The first names in a directory, hidden ones left out; none if it can't be listed."""
    try:
        if not isinstance(directory, LocalDirectory):
            return [name for name in directory.names() if name[0] != "."][:_LISTED]
        with os.scandir(directory.name) as entries:  # There may be millions.
            first = itertools.islice((e.name for e in entries if e.name[0] != "."), _LISTED)
            return sorted(first)
    except (OSError, ValueError):
        return []


def _add(error: errors.MfloadError, text: str) -> None:
    error.message += text
    error.args = (error.message,)
