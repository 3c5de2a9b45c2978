"""The manifest: checksums of a checkpoint, as JSON beside it.

    {
      "mfload_checksums": 1,
      "algorithm": "xxh3_128",
      "tensors": {"w": {"dtype": "F32", "shape": [2, 3], "digest": "…32 digits…"}},
      "files": {"model.safetensors": {"size": 1234, "sha256": "…64 digits…"}}
    }

The digest of a tensor is of its stored bytes alone: it holds wherever the tensor lies, after other
shards are cut or the file is aligned. The SHA-256 of a file holds for this very file. A manifest
may have one of them alone: it then has no files, or no "algorithm" and no digests. Names are sorted
and each has a line, so that two manifests can be compared as text.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from mfload import errors, sources
from mfload.formats import discovery, strict_json
from mfload.formats.strict_json import brief, encodable
from mfload.index import TensorInfo
from mfload.saving.drafts import Draft
from mfload.sources.base import Source
from mfload.sources.local import is_cached, place_of, resolved

Algorithm = Literal["xxh3", "sha256", "both"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)

VERSION = 1
ALGORITHM = "xxh3_128"
SUFFIX = ".checksums.json"
MAX_SIZE = 256 << 20
"""Bytes of the longest manifest that is read: some two million tensors."""

_MARK = re.compile(rb'\s*\{\s*"mfload_checksums"\s*:')
_FORMAT = (
    '{"mfload_checksums": 1, "algorithm": "xxh3_128", '
    '"tensors": {name: {"dtype", "shape", "digest": 32 digits}}, '
    '"files": {path: {"size", "sha256": 64 digits}}}, or without algorithm and digests'
)


class TensorEntry(NamedTuple):
    """What a manifest knows of a tensor; the digest is of its stored bytes, in hexadecimal."""

    dtype: str
    shape: tuple[int, ...]
    digest: str | None


class FileEntry(NamedTuple):
    """What a manifest knows of a file: its bytes, and their SHA-256 in hexadecimal digits."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Checksums of a checkpoint.

    Attributes:
        tensors: Dtype, shape and digest of each tensor, by name; all digests are None if the
            manifest has checksums of files alone.
        files: Size and SHA-256 of each file, by path relative to the checkpoint's directory; empty
            if the manifest has checksums of tensors alone.
        path: Where it was read from; None if it was made here.
    """

    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry] = field(default_factory=dict[str, FileEntry])
    path: str | None = field(default=None, compare=False)

    @staticmethod
    def of(
        tensors: Mapping[str, TensorInfo],
        digests: Mapping[str, str] | None,
        files: Mapping[str, FileEntry] | None = None,
    ) -> Manifest:
        """A manifest of tensors and files; files whose names are not text are left out."""
        return Manifest(
            {name: TensorEntry(dtype.name, shape, digests[name] if digests else None)
             for name, dtype, shape, _ in tensors.values()},
            {name: entry for name, entry in (files or {}).items() if encodable(name)},
        )  # fmt: skip

    @staticmethod
    def read(path: str | os.PathLike[str] | Source) -> Manifest:
        """Reads a manifest, as strictly as a header.

        Raises:
            SourceError: It can't be read.
            HeaderError: It is malformed, or the file is something else.
        """
        source = sources.find(path if sources.is_source(path) else text_path(path))
        if source.size > MAX_SIZE:
            most, size = f"at most {errors.amount(MAX_SIZE)}", errors.amount(source.size)
            what = "the manifest is too long"
            raise errors.HeaderError(what, file=source.name, expected=most, found=size)
        table = strict_json.loads(source.read(0, source.size), source.name, "manifest")
        return _parse(table, source.name)

    @property
    def hashed(self) -> bool:
        """Whether it has checksums of tensors."""
        return all(entry.digest is not None for entry in self.tensors.values())

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
                yield info, entry.digest or "a digest in the manifest", digests[info.name]

    def text(self) -> str:
        """The JSON as it is written."""
        hashed = f' "algorithm": "{ALGORITHM}",\n' if self.hashed else ""
        tensors = _lines(self.tensors, _tensor_text)
        files = _lines(self.files, lambda entry: json.dumps(entry._asdict()))
        return (
            f'{{\n "mfload_checksums": {VERSION},\n{hashed}'
            f' "tensors": {tensors},\n "files": {files}\n}}\n'
        )

    def write(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes it, all or nothing.

        Raises:
            UsageError: The name is one of a checkpoint.
            TargetExistsError: Something is there, and `overwrite` is not set, or it is something
                other than a manifest.
            TargetError: It can't be written.
        """
        name = place_of(text_path(path))
        check_target(name, overwrite=overwrite)
        directory, base = os.path.split(name)
        raw = np.frombuffer(self.text().encode(), np.uint8)
        draft = Draft(os.path.join(directory, f".{base}.{os.getpid()}"), raw.size, name)
        try:
            draft.write(0, [raw])
            draft.sync()
            if overwrite:
                check_target(name, overwrite=True)  # Another file may have come meanwhile.
            try:
                draft.publish(name, replace=overwrite)
            except OSError as error:
                raise errors.from_target(error, name, "put the manifest in its place") from error
        finally:
            draft.discard()

    def __repr__(self) -> str:
        where = "" if self.path is None else f" from {self.path}"
        tensors = errors.counted(len(self.tensors), "tensor")
        return f"<mfload manifest{where}: {tensors}, {errors.counted(len(self.files), 'file')}>"


def text_path(path: Any) -> str:
    """The path of a manifest as text; raises UsageError if it is not a path."""
    try:
        return os.fsdecode(path)
    except TypeError:
        wanted = "a manifest or its path; mfload.verify(path, checksums='write') makes one"
        raise errors.UsageError("not a manifest", expected=wanted, found=repr(path)) from None


def check_target(path: str, *, overwrite: bool) -> None:
    """Refuses to write a manifest over anything but a manifest that may be replaced."""
    path = place_of(path)
    if path.endswith((discovery.SUFFIX, discovery.INDEX_SUFFIX)):
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
    replaceable = False
    if overwrite and (stat.S_ISREG(mode) or is_cached(path)):
        with contextlib.suppress(errors.SourceError):
            source = sources.find(path)
            replaceable = _MARK.match(source.read(0, min(source.size, 4096))) is not None
    if not replaceable:
        what = "the file exists already; overwrite=True replaces it if it is a manifest"
        raise errors.TargetExistsError(what, file=path)


def beside(files: Sequence[str], index: str | None = None) -> str:
    """The default path of a manifest, given the files of a checkpoint and its index.

    It is `model.checksums.json` for model.safetensors, for its index, and for its shards. It lies
    where the data is, also if that is reached through symbolic links.
    """
    places, alone = _places(files, index), len(files) == 1
    name = os.path.basename(places[-1])
    stems = {discovery.stem(os.path.basename(file), alone=alone) for file in places[: len(files)]}
    if name.endswith(discovery.INDEX_SUFFIX):
        stems = {name.removesuffix(discovery.INDEX_SUFFIX)}
    stem = stems.pop() if len(stems) == 1 else ""
    return os.path.join(_directory(places), (stem or "checkpoint") + SUFFIX)


def there(files: Sequence[str], index: str | None = None) -> str:
    """The same for one to be read: also under the name that earlier versions gave it.

    They left out the number of a file alone, so that of `w1` lies in w.checksums.json; if there is
    a `w` beside it, that is the manifest of `w`.
    """
    path = beside(files, index)
    if index or len(files) != 1 or os.path.lexists(path):
        return path
    directory, name = os.path.split(place_of(files[0]))
    stem = os.path.join(directory, discovery.stem(name))
    of_another = os.path.lexists(stem + discovery.SUFFIX)
    return stem + SUFFIX if os.path.lexists(stem + SUFFIX) and not of_another else path


def relative_names(files: Sequence[str], index: str | None) -> dict[str, str]:
    """What a manifest calls the files of a checkpoint: paths relative to its directory."""
    places = _places(files, index)
    directory = _directory(places)
    return {
        file: os.path.relpath(place, directory).replace(os.sep, "/")
        for file, place in zip(files, places, strict=False)  # The index is no file of it.
    }


def _places(files: Sequence[str], index: str | None) -> list[str]:
    """Where the files are, and the index; the links to them, if they lie here and there."""
    paths = [*files, index] if index else [*files]
    places = [place_of(path) for path in paths]
    apart = len({os.path.dirname(place) for place in places}) > 1
    return [resolved(path) for path in paths] if apart else places


def _directory(places: Sequence[str]) -> str:
    return os.path.commonpath([os.path.dirname(place) for place in places])


def _tensor_text(entry: TensorEntry) -> str:
    # By hand: `json` takes ten times as long, and there may be very many.
    digest = "" if entry.digest is None else f', "digest": "{entry.digest}"'
    return f'{{"dtype": {_quoted(entry.dtype)}, "shape": {list(entry.shape)}{digest}}}'


def _lines(table: Mapping[str, Any], text: Callable[[Any], str]) -> str:
    rows = (f"  {_quoted(name)}: {text(table[name])}" for name in sorted(table))
    return "{\n" + ",\n".join(rows) + "\n }" if table else "{}"


def _parse(table: Any, path: str) -> Manifest:
    sound = (
        type(table) is dict
        and table.keys() <= {"mfload_checksums", "algorithm", "tensors", "files"}
        and type(table.get("mfload_checksums")) is int
        and table["mfload_checksums"] == VERSION
        and table.get("algorithm", ALGORITHM) == ALGORITHM
        and type(table.get("tensors")) is dict
        and type(table.get("files", {})) is dict
    )
    if not sound:
        raise _malformed(path, table)
    hashed = "algorithm" in table
    return Manifest(
        {name: _tensor(entry, name, path, hashed) for name, entry in table["tensors"].items()},
        {name: _file(entry, name, path) for name, entry in table.get("files", {}).items()},
        path,
    )


def _tensor(entry: Any, name: str, path: str, hashed: bool) -> TensorEntry:
    keys = {"dtype", "shape", "digest"} if hashed else {"dtype", "shape"}
    if type(entry) is dict and entry.keys() == keys:
        dtype, shape, digest = entry["dtype"], entry["shape"], entry.get("digest")
        counts = type(shape) is list and all(_is_count(dim, 64) for dim in shape)
        if counts and type(dtype) is str and (not hashed or _is_hex(digest, 32)):
            return TensorEntry(dtype, tuple(shape), digest)
    raise _malformed(path, entry, name)


def _file(entry: Any, name: str, path: str) -> FileEntry:
    known = type(entry) is dict and entry.keys() == {"size", "sha256"}
    if known and _is_count(entry["size"], 63) and _is_hex(entry["sha256"], 64):
        return FileEntry(entry["size"], entry["sha256"])
    raise _malformed(path, entry, name)


def _is_hex(text: Any, digits: int) -> bool:
    return type(text) is str and re.fullmatch(f"[0-9a-f]{{{digits}}}", text) is not None


def _is_count(value: Any, bits: int) -> bool:
    return type(value) is int and 0 <= value < 1 << bits


def _malformed(path: str, found: Any, name: str | None = None) -> errors.HeaderError:
    what = "not a manifest of checksums, or a malformed one"
    return errors.HeaderError(what, file=path, tensor=name, expected=_FORMAT, found=brief(found))
