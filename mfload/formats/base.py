"""Formats: what a file holds, and the module that makes its index.

A format is a module with the functions of `Format`. Modules are imported when a file asks for them;
`codecs.CODECS` has the codecs of encoded pieces.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from mfload.index import TensorInfo
from mfload.sources.base import Source
from mfload.sources.directories import Directory

FORMATS = {
    ".safetensors": "mfload.formats.safetensors",
    ".npz": "mfload.formats.npy",
    ".npy": "mfload.formats.npy",
    ".msgpack": "mfload.formats.msgpack",
}
"""The module of each format by the ends of its files' names. Other files are told by their head."""

DIRECTORIES = ("mfload.formats.orbax",)
"""Modules of the formats whose checkpoint is a directory."""

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


Contents = tuple[Sequence[Source], Sequence[TensorInfo], dict[str, str] | None]
"""Sources, the tensors in them, and free-form strings."""


class DirectoryFormat(Protocol):
    """A format whose checkpoint is a directory: a module with these functions."""

    def recognise_directory(self, directory: Directory, names: Sequence[str]) -> bool:
        """Whether a directory that has such names is a checkpoint; it looks at few files."""
        ...

    def locate(self, directory: Directory) -> Directory:
        """The directory that is read: this one, or one below.

        Raises:
            SourceError: A directory can't be listed.
            CheckpointError: It is not clear which one is meant, or it was not finished.
        """
        ...

    def read_directory(self, directory: Directory, source: int = 0) -> Contents:
        """The files of a directory that `locate` gave, its tensors, and its free-form strings.

        `source` is the number of the first file in the index; there is at least one.

        Raises:
            SourceError: A file is missing or can't be read.
            FormatError: The checkpoint breaks a rule of the format.
        """
        ...


def find_directory(directory: Directory, names: Sequence[str]) -> tuple[str, Directory] | None:
    """The module of the format of a directory that has such names, and the directory to read.

    None if it is of no format. Raises as `DirectoryFormat.locate` does.
    """
    for name in DIRECTORIES:
        module: Any = importlib.import_module(name)
        if module.recognise_directory(directory, names):
            return name, module.locate(directory)
    return None


def read_directory(module: str, directory: Directory, source: int = 0) -> Contents:
    """What the `DirectoryFormat` of a module reads of a directory."""
    reader: Any = importlib.import_module(module)
    return reader.read_directory(directory, source)


def find(file: Source) -> Any:
    """The `Format` of a file: by the end of its name, or else by its first bytes."""
    for suffix, module in FORMATS.items():
        if file.name.endswith(suffix):
            return importlib.import_module(module)
    head = file.read(0, min(file.size, _HEAD))
    modules = map(importlib.import_module, dict.fromkeys(FORMATS.values()))
    found = (each for each in modules if each.recognise(head, file.name))
    return next(found, importlib.import_module(FORMATS[".safetensors"]))
