"""The manifest: checksums of a checkpoint, as JSON beside it.

    {
      "mfload_checksums": 1,
      "algorithm": "xxh3_128",
      "tensors": {"w": {"dtype": "F32", "shape": [2, 3], "digest": "…32 digits…"}},
      "files": {"model.safetensors": {"size": 1234, "sha256": "…64 digits…"}}
    }

The digest of a tensor is of its stored bytes alone: it holds wherever the tensor lies, after other
shards are cut or the file is aligned. The SHA-256 of a file holds for this very file. Names are
sorted and each has a line, so that two manifests can be compared as text.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mfload import errors
from mfload.formats import discovery, strict_json
from mfload.formats.strict_json import brief, encodable
from mfload.index import TensorInfo
from mfload.saving.drafts import Draft
from mfload.sources.local import LocalFile

VERSION = 1
ALGORITHM = "xxh3_128"
"""The hash of a tensor's bytes: XXH3 with 128 bits, as 32 hexadecimal digits."""
SUFFIX = ".checksums.json"
MAX_SIZE = 256 << 20
"""Bytes of the longest manifest that is read: some two million tensors."""

_MARK = re.compile(rb'\s*\{\s*"mfload_checksums"\s*:')
_KEYS = {"mfload_checksums", "algorithm", "tensors", "files"}


class TensorEntry(NamedTuple):
    """What a manifest knows of a tensor; the digest is of its stored bytes, in hexadecimal."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


class FileEntry(NamedTuple):
    """What a manifest knows of a file: its bytes, and their SHA-256 in hexadecimal digits."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Checksums of a checkpoint.

    Attributes:
        tensors: Dtype, shape and digest of each tensor, by name.
        files: Size and SHA-256 of each file, by path relative to the checkpoint's directory.
        path: Where it was read from; None if it was made here.
    """

    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry] = field(default_factory=dict[str, FileEntry])
    path: str | None = field(default=None, compare=False)

    @staticmethod
    def of(
        tensors: Mapping[str, TensorInfo],
        digests: Mapping[str, str],
        files: Mapping[str, FileEntry] | None = None,
    ) -> Manifest:
        """A manifest of tensors and files; files whose names are not text are left out."""
        return Manifest(
            {name: TensorEntry(info.dtype.name, info.shape, digests[name])
             for name, info in tensors.items()},
            {name: entry for name, entry in (files or {}).items() if encodable(name)},
        )  # fmt: skip

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Manifest:
        """Reads a manifest, as strictly as a header.

        Raises:
            SourceError: It can't be read.
            HeaderError: It is malformed, or the file is something else.
        """
        source = LocalFile(path)
        if source.size > MAX_SIZE:
            most, found = f"at most {MAX_SIZE} bytes", f"{source.size} bytes"
            what = "the manifest is over the cap"
            raise errors.HeaderError(what, file=source.path, expected=most, found=found)
        return _parse(
            strict_json.loads(source.read(0, source.size), source.path, "manifest"), source.path
        )

    def differences(
        self, tensors: Iterable[TensorInfo], digests: Mapping[str, str] | None = None
    ) -> Iterator[tuple[TensorInfo, str, str]]:
        """Tensors that differ from the manifest, with what it has and what was found.

        Without digests, dtype and shape alone are compared.
        """
        for info in tensors:
            entry = self.tensors.get(info.name)
            if entry is None:
                yield info, "a tensor that the manifest knows", "none in the manifest"
            elif (entry.dtype, entry.shape) != (info.dtype.name, info.shape):
                yield info, f"{entry.dtype} {list(entry.shape)}", f"{info.dtype} {list(info.shape)}"
            elif digests is not None and entry.digest != digests[info.name]:
                yield info, entry.digest, digests[info.name]

    def text(self) -> str:
        """The JSON as it is written."""
        return (
            f'{{\n "mfload_checksums": {VERSION},\n "algorithm": "{ALGORITHM}",\n'
            f' "tensors": {_lines(self.tensors)},\n "files": {_lines(self.files)}\n}}\n'
        )

    def write(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes it, all or nothing.

        Raises:
            UsageError: The name is one of a checkpoint.
            TargetExistsError: Something is there, and `overwrite` is not set or it is not a
                manifest.
            TargetError: It can't be written.
        """
        name = os.path.abspath(os.fsdecode(path))
        check_target(name, overwrite=overwrite)
        directory, base = os.path.split(name)
        raw = np.frombuffer(self.text().encode(), np.uint8)
        draft = Draft(os.path.join(directory, f".{base}.{os.getpid()}"), raw.size, name)
        try:
            draft.write(0, raw)
            draft.sync()
            try:
                if overwrite:
                    check_target(name, overwrite=True)  # Another file may have come meanwhile.
                draft.publish(name, replace=overwrite)
            except OSError as error:
                raise errors.from_target(error, name, "put the manifest in its place") from error
        finally:
            draft.discard()

    def __repr__(self) -> str:
        where = "" if self.path is None else f" from {self.path}"
        return f"<mfload manifest{where}: {len(self.tensors)} tensors, {len(self.files)} files>"


def checked_path(argument: str, given: Any) -> str:
    """The path of a manifest that an argument gives, as text."""
    try:
        return os.fsdecode(given)
    except TypeError:
        wanted = "a manifest, or the path of one"
        raise errors.UsageError(argument, expected=wanted, found=repr(given)) from None


def check_target(path: str, *, overwrite: bool, files: Sequence[str] = ()) -> None:
    """Refuses to write a manifest over anything but a manifest that may be replaced.

    `files` are those of the checkpoint, with its index.
    """
    suffixes = (discovery.SUFFIX, discovery.INDEX_SUFFIX)
    if path.endswith(suffixes) or any(_same(path, file) for file in files):
        raise errors.UsageError(
            "a manifest can't take the place of a checkpoint's file",
            file=path,
            expected=f"another name, such as model{SUFFIX}",
        )
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise errors.from_target(error, path, "look at the manifest") from error
    except ValueError:
        raise errors.UsageError("not a path", expected="a path", found=repr(path)) from None
    if not overwrite:
        raise errors.TargetExistsError(
            "there is a manifest already; overwrite=True replaces it", file=path
        )
    if not stat.S_ISREG(mode) or not is_manifest(path):
        raise errors.TargetExistsError(
            "something other than a manifest has the name; it is not replaced",
            file=path,
            expected="a manifest, or nothing",
        )


def is_manifest(path: str) -> bool:
    """Whether a file begins as a manifest does, damaged or not, or can be read as one."""
    try:
        source = LocalFile(path)
        if _MARK.match(source.read(0, min(source.size, 4096))):
            return True
        Manifest.read(path)
    except errors.MfloadError:
        return False
    return True


def beside(
    path: discovery.Path | Sequence[discovery.Path], files: Sequence[str], index: str | None = None
) -> str:
    """The default path of a manifest, given the path, the files and the index of a checkpoint.

    It is `model.checksums.json` for model.safetensors, for its index, and for its shards.
    """
    name = "" if not isinstance(path, str | bytes | os.PathLike) else os.fsdecode(path)
    if index is not None and index.endswith(discovery.INDEX_SUFFIX):
        name = index
    if name.endswith(discovery.INDEX_SUFFIX):
        stem = os.path.basename(name).removesuffix(discovery.INDEX_SUFFIX)
    else:
        stems = {discovery.stem(os.path.basename(file)) for file in files}
        stem = stems.pop() if len(stems) == 1 else ""
    return os.path.join(home(path, files), (stem or "checkpoint") + SUFFIX)


def home(path: discovery.Path | Sequence[discovery.Path], files: Sequence[str]) -> str:
    """The checkpoint's directory, to which a manifest's file names are relative."""
    if isinstance(path, str | bytes | os.PathLike):
        name = os.path.abspath(os.fsdecode(path))
        return name if os.path.isdir(name) else os.path.dirname(name)
    return os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files])


def _same(path: str, other: str) -> bool:
    """Whether two paths lead to one file, by whatever links."""
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):
        return os.path.realpath(path) == os.path.realpath(other)


def _lines(table: Mapping[str, Any]) -> str:
    rows = (f"  {json.dumps(name)}: {json.dumps(table[name]._asdict())}" for name in sorted(table))
    return "{\n" + ",\n".join(rows) + "\n }" if table else "{}"


def _parse(table: Any, path: str) -> Manifest:
    if type(table) is not dict or "mfload_checksums" not in table:
        raise _bad(path, '{"mfload_checksums": 1, …}', table, what="not a manifest of checksums")
    version = table["mfload_checksums"]
    if type(version) is not int or version != VERSION:
        raise _bad(path, VERSION, version, what="a manifest of another version")
    if table.keys() - _KEYS:
        raise _bad(path, "algorithm, tensors and files", list(table))
    if table.get("algorithm") != ALGORITHM:
        raise _bad(path, ALGORITHM, table.get("algorithm"), what="an unknown algorithm")
    tensors = _entries(table.get("tensors"), _TENSOR, path)
    files = _entries(table.get("files", {}), _FILE, path)
    return Manifest(
        {name: TensorEntry(x["dtype"], tuple(x["shape"]), x["digest"])
         for name, x in tensors.items()},
        {name: FileEntry(**x) for name, x in files.items()},
        path,
    )  # fmt: skip


def _entries(table: Any, form: _Form, path: str) -> dict[str, dict[str, Any]]:
    if type(table) is not dict:
        raise _bad(path, "objects by name", table)
    for name, entry in table.items():
        sound = type(entry) is dict and entry.keys() == form.keys()
        if not sound or not all(fits(entry[key]) for key, fits in form.items()):
            expected = '{"dtype", "shape", "digest": 32 digits}, or {"size", "sha256": 64 digits}'
            raise _bad(path, expected, entry, name)
    return table


def _hexadecimal(digits: int) -> Callable[[Any], bool]:
    pattern = re.compile(f"[0-9a-f]{{{digits}}}")
    return lambda value: type(value) is str and pattern.fullmatch(value) is not None


def _is_count(value: Any, bits: int) -> bool:
    return type(value) is int and 0 <= value < 1 << bits


_Form = dict[str, Callable[[Any], bool]]
_TENSOR: _Form = {
    "dtype": lambda value: type(value) is str,
    "shape": lambda value: type(value) is list and all(_is_count(dim, 64) for dim in value),
    "digest": _hexadecimal(32),
}
_FILE: _Form = {"size": lambda value: _is_count(value, 63), "sha256": _hexadecimal(64)}


def _bad(
    path: str,
    expected: object,
    found: Any,
    name: str | None = None,
    what: str = "the manifest is malformed",
) -> errors.HeaderError:
    return errors.HeaderError(what, file=path, tensor=name, expected=expected, found=brief(found))
