"""Formats: what a file holds, and the module that makes its index.

A format is a module with the functions of `Format`. Modules are imported when a file asks for them;
`decode.CODECS` has the codecs of encoded pieces.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from mfload.index import TensorInfo
from mfload.sources.base import Source

FORMATS = {
    ".safetensors": "mfload.formats.safetensors",
    ".npz": "mfload.formats.npy",
    ".npy": "mfload.formats.npy",
    ".msgpack": "mfload.formats.msgpack",
}
"""The module of each format by the ends of its files' names. Other files are told by their head."""

_HEAD = 256


class Checksum(NamedTuple):
    """The CRC-32 that a file has of some of its bytes.

    Attributes:
        tensor: The tensor that the bytes belong to.
        inflated: How many bytes they are inflated to first; None if they are not deflated.
        crc32: The checksum, in hexadecimal digits.
    """

    tensor: str
    offset: int
    nbytes: int
    inflated: int | None
    crc32: str


class Format(Protocol):
    """A format: a module with these functions."""

    def recognise(self, head: bytes, name: str) -> bool:
        """Whether a file looks like the format's, by its first bytes and its name."""
        ...

    def read(
        self, file: Source, source: int = 0
    ) -> tuple[Sequence[TensorInfo], dict[str, str] | None]:
        """The tensors of a file, which is number `source` of its index, and its free-form strings.

        Raises:
            HeaderError: The file breaks a rule of the format.
        """
        ...

    def checksums(self, file: Source) -> Sequence[Checksum]:
        """The checksums in a file that `read` took; a format without any lacks the function."""
        ...


def find(file: Source) -> Any:
    """The `Format` of a file: by the end of its name, or else by its first bytes."""
    for suffix, module in FORMATS.items():
        if file.name.endswith(suffix):
            return importlib.import_module(module)
    head = file.read(0, min(file.size, _HEAD))
    modules = map(importlib.import_module, dict.fromkeys(FORMATS.values()))
    found = (each for each in modules if each.recognise(head, file.name))
    return next(found, importlib.import_module(FORMATS[".safetensors"]))
