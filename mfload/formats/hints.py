"""What a file that is no safetensors file seems to be: magic bytes and cheap looks.

Asked only when an error is about to be raised. A file is looked at in its first and last bytes
and never believed: nothing is unpickled, unpacked or followed.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
from typing import NamedTuple

from mfload import errors
from mfload.sources.local import LocalFile

_HEAD = 4096
_TAIL = 64 << 10
_LARGEST_HEADER = 100_000_000


class Look(NamedTuple):
    """What was read of a file.

    Attributes:
        head: Its first 4 KiB.
        tail: Its last 64 KiB, which have the names of the members of a zip.
        size: Bytes of the whole file.
        name: Its name without directories.
    """

    head: bytes
    tail: bytes
    size: int
    name: str


_TORCH = "load it with torch.load(path, weights_only=True) and write it with mfload.save"
_MAGIC = (
    (0, b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", f"a PyTorch file of the old kind: {_TORCH}"),
    (0, b"\x93NUMPY", "a NumPy array (.npy): load it with numpy.load, write it with mfload.save"),
    (0, b"GGUF", "a GGUF file, the format of llama.cpp: look for the model's safetensors"),
    (0, b"lmgg", "a GGML file, an old format of llama.cpp: look for the model's safetensors"),
    (0, b"fmgg", "a GGML file, an old format of llama.cpp: look for the model's safetensors"),
    (0, b"tjgg", "a GGML file, an old format of llama.cpp: look for the model's safetensors"),
    (4, b"TFL3", "a TensorFlow Lite model: look for the weights that it was made of"),
    (0, b"\x0c\xdb\x3a\x2a", "a part of an Orbax checkpoint (OCDBT): restore it with Orbax"),
    (0, b"\x1f\x8b", "a gzip file: unpack it first"),
    (0, b"\x28\xb5\x2f\xfd", "a zstd file: unpack it first"),
    (0, b"\xfd7zXZ\0", "an xz file: unpack it first"),
    (0, b"BZh", "a bzip2 file: unpack it first"),
    (0, b"\x04\x22\x4d\x18", "an lz4 file: unpack it first"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it first"),
    (0, b"\x00\x05\x16\x07", "what macOS stores beside a file (AppleDouble): delete it"),
    (257, b"ustar", "a tar archive: unpack it first"),
)  # fmt: skip
_HDF5 = b"\x89HDF\r\n\x1a\n"
_TABLE_END = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"  # LevelDB's magic, in its byte order.
_UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".aria2", ".download", ".tmp")


def explain(error: errors.HeaderError, file: LocalFile) -> errors.HeaderError:
    """Adds to an error what its file seems to be, where that can be told."""
    found: str | None = None
    # A file that goes away meanwhile has had its error already.
    with contextlib.suppress(errors.MfloadError, OSError):
        found = of(file)
    if found is not None:
        said = error.message.removesuffix("; is this a safetensors file?")
        error.message = f"{said}; it seems to be {found}"
        error.args = (error.message,)
    return error


def of(file: LocalFile) -> str | None:
    """What a file seems to be, and what to do about it; None where nobody can tell.

    Raises:
        SourceError: It can't be read.
    """
    size = file.size
    head = file.read(0, min(size, _HEAD))
    tail = file.read(max(0, size - _TAIL), min(size, _TAIL))
    return seems(Look(head, tail, size, os.path.basename(file.path)))


def seems(look: Look) -> str | None:
    """The same of what was read; pure."""
    for tell in (_empty, _cut_short, _magic, _zip, _pickle, _protobuf, _msgpack, _by_end, _text):
        found = tell(look)
        if found is not None:
            return found or None
    if look.name.endswith(_UNFINISHED):
        return "an unfinished download, by its name"
    return None


def _empty(look: Look) -> str | None:
    if not look.size:
        return "an empty file: was a download interrupted?"
    if not look.head.strip(b"\0") and not look.tail.strip(b"\0"):
        return "all zeros: an interrupted download, or space that was set aside and never written"
    return None


def _cut_short(look: Look) -> str | None:
    length = int.from_bytes(look.head[:8], "little")
    if look.head[8:9] == b"{" and length <= _LARGEST_HEADER:
        missing = 8 + length - look.size
        if missing > 0:
            return f"a safetensors file cut short: {missing} bytes of its header are missing"
        # A safetensors file indeed; what is wrong with it has been said.
        return ""
    return None


def _magic(look: Look) -> str | None:
    for offset, magic, what in _MAGIC:
        if look.head.startswith(magic, offset):
            return what
    if any(look.head.startswith(_HDF5, at) for at in (0, 512, 1024, 2048)):
        whose = "Keras weights, " if look.name.endswith((".h5", ".keras")) else ""
        return f"an HDF5 file ({whose}h5py reads it): load it with Keras or h5py"
    return None


def _zip(look: Look) -> str | None:
    if not look.head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return None
    members = look.head[:512] + look.tail
    if b"/data.pkl" in members or b"/.format_version" in members:
        return f"a PyTorch file: {_TORCH}"
    if b"model.weights.h5" in members:
        return "a Keras model: load it with keras.saving.load_model"
    if b".npy" in members:
        return "NumPy arrays (.npz): load them with numpy.load, write them with mfload.save"
    return "a zip archive: unpack it first"


def _pickle(look: Look) -> str | None:
    if not re.match(rb"\x80[\x02-\x05]", look.head) or not look.tail.endswith(b"."):
        return None
    if b"torch" in look.head:
        return f"a PyTorch file: {_TORCH}"
    return (
        "a Python pickle (paddle.save writes such files): load it with what wrote it, "
        "if you trust it, and write it with mfload.save"
    )


def _protobuf(look: Look) -> str | None:
    if look.name == "saved_model.pb":
        return "a TensorFlow SavedModel: load it with tf.saved_model.load"
    # Field 1 is a small version, field 2 the short name of what wrote it.
    match = re.match(rb"\x08[\x01-\x20]\x12([\x01-\x40])", look.head, re.DOTALL)
    if match is not None:
        name = look.head[4 : 4 + match[1][0]]
        if re.fullmatch(rb"[\x20-\x7e]+", name):
            return "an ONNX model: read its initializers with onnx, write them with mfload.save"
    if look.head.startswith(b"\x08\x01\x12"):
        return "a TensorFlow SavedModel: load it with tf.saved_model.load"
    if look.name.endswith(".onnx"):
        return "an ONNX model, by its name"
    return None


def _msgpack(look: Look) -> str | None:
    first = look.head[0]
    start = 1 if 0x81 <= first <= 0x8F else {0xDE: 3, 0xDF: 5}.get(first)
    if start is None:
        return None
    length, rest = look.head[start : start + 1], look.head[start + 1 :]
    if length == b"\xd9":
        length, rest = rest[:1], rest[1:]
        count = length[0] if length else 0
    else:
        count = length[0] & 31 if length and 0xA1 <= length[0] <= 0xBF else 0
    if count and re.fullmatch(rb"[\x20-\x7e]+", rest[:count]):
        return (
            "msgpack, as Flax writes it: load it with flax.serialization, write it with mfload.save"
        )
    return None


def _by_end(look: Look) -> str | None:
    if look.tail.endswith(_TABLE_END) or re.search(r"\.data-\d{5}-of-\d{5}$", look.name):
        return "a part of a TensorFlow checkpoint: load it with tf.train.load_checkpoint"
    return None


def _text(look: Look) -> str | None:
    try:
        # A character may be cut in two at the end of what was read.
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        text = decoder.decode(look.head, look.size <= _HEAD)
    except UnicodeDecodeError:
        return None
    if not text.replace("\n", "").replace("\r", "").replace("\t", "").isprintable():
        return None
    text = text.strip()
    if text.startswith("version https://git-lfs.github.com/spec/"):
        size = re.search(r"^size (\d{1,20})$", text, re.MULTILINE)
        promised = f" of {int(size[1])} bytes" if size else ""
        return f"a Git LFS pointer that stands for a file{promised}: run `git lfs pull`"
    if text.startswith("# xet version"):
        return "a Xet pointer, not the file that it stands for: download that with `hf download`"
    if re.match(r"<(!doctype\s+)?html\b", text, re.IGNORECASE):
        title = re.search(r"<title>([^<]*)", text, re.IGNORECASE)
        said = f" titled {_quoted(title[1])}" if title else ""
        return f"a web page{said}, saved in place of the file: download it again"
    if text.startswith(("<?xml", "<Error")):
        said = re.search(r"<(?:Message|Code)>([^<]*)", text)
        what = f" saying {_quoted(said[1])}" if said else ""
        return f"XML{what}, maybe an error of a server saved in place of the file"
    if text.startswith(("{", "[")):
        return _json(text, look.name)
    if look.name == "checkpoint" and text.startswith("model_checkpoint_path"):
        return "a part of a TensorFlow checkpoint: load it with tf.train.load_checkpoint"
    return f"text that begins with {_quoted(text)}"


def _json(text: str, name: str) -> str:
    if '"weight_map"' in text:
        if name.endswith(".json"):
            # It was taken for an index; what is wrong with it has been said.
            return ""
        return "a safetensors index under another name: mfload takes it for one if it ends in .json"
    if '"error"' in text[:200]:
        return f"an error of a server saved in place of the file: {_quoted(text)}"
    if '"model_type"' in text or '"architectures"' in text:
        return "a model's configuration: give the directory, or a .safetensors file"
    return f"JSON that begins with {_quoted(text)}"


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else f"{line[:60]}…")
