"""The manifest: what is known of a checkpoint's bytes, as JSON beside it.

    {
      "mfload_checksums": 1,
      "algorithm": "xxh3_128",
      "tensors": {"w": {"dtype": "F32", "shape": [2, 3], "digest": "…32 digits…"}},
      "files": {"model.safetensors": {"size": 1234, "sha256": "…64 digits…"}}
    }

A tensor's digest is of its stored bytes alone: it holds wherever the tensor lies, after other
shards are cut or the file is aligned. What is said of files holds for these very files. Names
are sorted and a line holds one of them, so that two manifests can be compared as text.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mfload import errors
from mfload.checking.checksums import ALGORITHM
from mfload.formats import discovery, strict_json
from mfload.formats.strict_json import brief
from mfload.index import TensorInfo
from mfload.saving import renaming
from mfload.saving.drafts import Draft
from mfload.sources.local import LocalFile

VERSION = 1
SUFFIX = ".checksums.json"
MAX_SIZE = 256 << 20
"""Bytes of the longest manifest that is read: some two million tensors."""

_DIGEST = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MARK = re.compile(rb'\s*\{\s*"mfload_checksums"\s*:')


class TensorEntry(NamedTuple):
    """What a manifest knows of a tensor.

    Attributes:
        dtype: By the format's name.
        shape: In elements.
        digest: Of the stored bytes, in hexadecimal digits.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str

    def unlike(self, info: TensorInfo) -> tuple[str, str] | None:
        """How a tensor's header differs from this: expected and found, None where it does not."""
        if (self.dtype, self.shape) == (info.dtype.name, info.shape):
            return None
        return f"{self.dtype} {list(self.shape)}", f"{info.dtype} {list(info.shape)}"


class FileEntry(NamedTuple):
    """What a manifest knows of a file: its bytes, and their SHA-256 in hexadecimal digits."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is known of a checkpoint's bytes.

    Attributes:
        tensors: By name.
        files: By path relative to the checkpoint's directory.
        path: Where it was read from, None where it was made here.
    """

    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry] = field(default_factory=dict[str, FileEntry])
    path: str | None = field(default=None, compare=False)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Manifest:
        """Reads a manifest, as strictly as a header.

        Raises:
            SourceError: It can't be read.
            HeaderError: It is none, or malformed.
        """
        source = LocalFile(path)
        if source.size > MAX_SIZE:
            raise errors.HeaderError(
                "the manifest is over the cap",
                file=source.path,
                expected=f"at most {MAX_SIZE} bytes",
                found=f"{source.size} bytes",
            )
        table = strict_json.loads(source.read(0, source.size), source.path, "manifest")
        return _parse(table, source.path)

    def text(self) -> str:
        """The JSON as it is written."""
        tensors = {name: entry._asdict() for name, entry in self.tensors.items()}
        files = {name: entry._asdict() for name, entry in self.files.items()}
        return (
            f'{{\n "mfload_checksums": {VERSION},\n "algorithm": "{ALGORITHM}",\n'
            f' "tensors": {_lines(tensors)},\n "files": {_lines(files)}\n}}\n'
        )

    def write(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes it; whoever looks finds the old one or the new one, whole.

        Raises:
            UsageError: The name is one of a checkpoint.
            TargetExistsError: Something is there, and `overwrite` is not set, or it is no
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
                    check_target(name, overwrite=True)  # Whoever came between keeps his file.
                    os.replace(draft.appear(), name)
                    draft.published()
                else:
                    renaming.place(draft, name)
            except OSError as error:
                raise errors.from_target(error, name, "put the manifest in its place") from error
        finally:
            draft.discard()

    def __repr__(self) -> str:
        where = "" if self.path is None else f" from {self.path}"
        return f"<mfload manifest{where}: {len(self.tensors)} tensors, {len(self.files)} files>"


def check_target(
    path: str, *, overwrite: bool, files: Sequence[str] = (), index: str | None = None
) -> None:
    """Refuses to write a manifest where a file lies that is none.

    Args:
        path: Where the manifest is to lie.
        overwrite: Whether a manifest may be replaced; nothing else ever is.
        files: Files of the checkpoint.
        index: Its index, None where it has none.

    Raises:
        UsageError: The path is a file of the checkpoint, or a name that a checkpoint would have.
        TargetExistsError: Something is there, and it may not be replaced.
        TargetError: Nobody can look.
    """
    own = [*files, *([] if index is None else [index])]
    if path.endswith((discovery.SUFFIX, discovery.INDEX_SUFFIX)) or any(
        _same(path, f) for f in own
    ):
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
            "there is a manifest already; overwrite=True replaces what it knows", file=path
        )
    if not stat.S_ISREG(mode) or not _is_manifest(path):
        raise errors.TargetExistsError(
            "something other than a manifest has the name; it is not replaced",
            file=path,
            expected="a manifest, or nothing",
        )


def _same(path: str, other: str) -> bool:
    """Whether two paths lead to one file, by whatever links."""
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):
        return os.path.realpath(path) == os.path.realpath(other)


def _is_manifest(path: str) -> bool:
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
    """Where the manifest of a checkpoint lies unless somebody says otherwise.

    Args:
        path: What the checkpoint was named by.
        files: Its files.
        index: Its index, None where it has none; the manifest is named after it.

    Returns:
        `model.checksums.json` for model.safetensors, for its index, and for its shards.
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


def sayable(name: str) -> bool:
    """Whether JSON can hold a name: what is no UTF-8 on the disk has no text."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _lines(table: Mapping[str, Any]) -> str:
    if not table:
        return "{}"
    rows = (f"  {json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table))
    return "{\n" + ",\n".join(rows) + "\n }"


def _parse(table: Any, path: str) -> Manifest:
    if type(table) is not dict or "mfload_checksums" not in table:
        raise _bad(path, '{"mfload_checksums": 1, …}', table, what="no manifest of checksums")
    version = table["mfload_checksums"]
    if type(version) is not int or version != VERSION:
        raise _bad(path, VERSION, version, what="a manifest of another version")
    if table.keys() - {"mfload_checksums", "algorithm", "tensors", "files"}:
        raise _bad(path, "algorithm, tensors and files", list(table))
    if table.get("algorithm") != ALGORITHM:
        raise _bad(path, ALGORITHM, table.get("algorithm"), what="an algorithm that is not known")
    tensors, files = table.get("tensors"), table.get("files", {})
    if type(tensors) is not dict or type(files) is not dict:
        raise _bad(path, "objects by name", [tensors, files])
    return Manifest(
        {name: _tensor(name, entry, path) for name, entry in tensors.items()},
        {name: _file(name, entry, path) for name, entry in files.items()},
        path,
    )


def _tensor(name: str, entry: Any, path: str) -> TensorEntry:
    expected = '{"dtype": …, "shape": […], "digest": 32 digits}'
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "digest"}:
        raise _bad(path, expected, entry, name)
    dtype, shape, digest = entry["dtype"], entry["shape"], entry["digest"]
    dims = type(shape) is list and all(type(dim) is int and 0 <= dim < 2**64 for dim in shape)
    if type(dtype) is not str or not dims or not _is(_DIGEST, digest):
        raise _bad(path, expected, entry, name)
    return TensorEntry(dtype, tuple(shape), digest)


def _file(name: str, entry: Any, path: str) -> FileEntry:
    expected = '{"size": bytes, "sha256": 64 digits}'
    if type(entry) is not dict or entry.keys() != {"size", "sha256"}:
        raise _bad(path, expected, {name: entry})
    size = entry["size"]
    if type(size) is not int or not 0 <= size < 2**63 or not _is(_SHA256, entry["sha256"]):
        raise _bad(path, expected, {name: entry})
    return FileEntry(size, entry["sha256"])


def _is(pattern: re.Pattern[str], value: Any) -> bool:
    return type(value) is str and pattern.fullmatch(value) is not None


def _bad(
    path: str, expected: object, found: Any, tensor: str | None = None, what: str = "malformed"
) -> errors.HeaderError:
    what = "the manifest is malformed" if what == "malformed" else what
    return errors.HeaderError(what, file=path, tensor=tensor, expected=expected, found=brief(found))
