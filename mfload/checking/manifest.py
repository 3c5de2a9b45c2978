"""The manifest: checksums of a checkpoint, as JSON beside it.

    {
      "mfload_checksums": 2,
      "algorithm": "xxh3_128",
      "tensors": {"w": {"dtype": "F32", "shape": [2, 3], "digest": "…32 digits…"}},
      "files": {"model.safetensors": {"size": 1234, "sha256": "…64 digits…"}},
      "identity": {"model.safetensors": {"size": 1234, "header": "…64 digits…"}}
    }

The digest of a tensor is of its stored bytes alone: it does not change when a checkpoint is sharded
differently or aligned. The SHA-256 of a file holds for this very file. A manifest may have one of
them alone: it then has no files, or no "algorithm" and no digests. The identity has the size of
each file and the SHA-256 of its header (of a format without one, of names, dtypes, shapes and
places of its tensors). It is used if something differs, to tell other data from damage. Version 1
has no identity. Names are sorted and each has a line, so that two manifests can be compared as
text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, Literal, NamedTuple, TypeVar, get_args
from urllib.parse import unquote

from mfload import errors, sources
from mfload.formats import discovery, safetensors, strict_json
from mfload.formats.strict_json import brief, encodable
from mfload.index import Index, Table, TensorInfo
from mfload.saving import manifest_files, manifests, publishing
from mfload.saving.manifests import MAX_SIZE
from mfload.sources.base import Source, read_whole
from mfload.sources.local import place_of, resolved

Algorithm = Literal["xxh3", "sha256", "both"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)

VERSION = 2
ALGORITHM = "xxh3_128"

Tensors = Callable[[], Mapping[str, TensorInfo]]

_FORMAT = (
    '{"mfload_checksums": 1 or 2, "algorithm": "xxh3_128", '
    '"tensors": {name: {"dtype", "shape", "digest": 32 digits}}, '
    '"files": {path: {"size", "sha256": 64 digits}}, '
    '"identity": {path: {"size", "header": 64 digits}}}, or without algorithm and digests; '
    "version 1 without identity"
)


class TensorEntry(NamedTuple):
    """The entry of a tensor in a manifest; the digest is of its stored bytes, in hexadecimal."""

    dtype: str
    shape: tuple[int, ...]
    digest: str | None


class FileEntry(NamedTuple):
    """The entry of a file in a manifest: size in bytes, and SHA-256 in hexadecimal digits."""

    size: int
    sha256: str


class FileIdentity(NamedTuple):
    """Identifies a file of a manifest: size in bytes, and SHA-256 of its header in hexadecimal."""

    size: int
    header: str

    def __str__(self) -> str:
        return f"{errors.amount(self.size)} with the header {self.header[:16]}…"


_OfFile = TypeVar("_OfFile", FileEntry, FileIdentity)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Checksums of a checkpoint.

    Attributes:
        tensors: Dtype, shape and digest of each tensor, by name; all digests are None if the
            manifest has checksums of files alone.
        files: Size and SHA-256 of each file, by path relative to the checkpoint's directory; empty
            if the manifest has checksums of tensors alone.
        path: Where it was read from; None if it was made by this process.
        identity: Size of each file and SHA-256 of its header, by path; empty in a manifest of
            version 1. With it, a manifest of another checkpoint is told from damage.
    """

    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry] = field(default_factory=dict[str, FileEntry])
    path: str | None = field(default=None, compare=False)
    identity: Mapping[str, FileIdentity] = field(default_factory=dict[str, FileIdentity])

    @staticmethod
    def of(
        tensors: Mapping[str, TensorInfo],
        digests: Mapping[str, str] | None,
        files: Mapping[str, FileEntry],
        identity: Mapping[str, FileIdentity],
    ) -> Manifest:
        """A manifest of tensors and files; files whose names are not text are left out."""
        return Manifest(
            {name: TensorEntry(dtype.name, shape, digests[name] if digests else None)
             for name, dtype, shape, _ in tensors.values()},
            {name: entry for name, entry in files.items() if encodable(name)},
            identity={name: entry for name, entry in identity.items() if encodable(name)},
        )  # fmt: skip

    @staticmethod
    def read(path: str | os.PathLike[str] | Source) -> Manifest:
        """Reads a manifest, as strictly as a header.

        Raises:
            SourceError: It can't be read.
            HeaderError: It is malformed, or the file is something else.
        """
        source = sources.find(path if sources.is_source(path) else text_path(path))
        text = read_whole(source, MAX_SIZE, "the manifest is too long")
        table = strict_json.loads(text, source.name, "manifest")
        return _parse(table, source.name)

    @property
    def names(self) -> set[str]:
        """Paths of the files that it was made of; empty if it lists none (version 1, "xxh3")."""
        return {*self.files, *self.identity}

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
        files, identity = (
            _lines(table, lambda entry: json.dumps(entry._asdict()))
            for table in (self.files, self.identity)
        )
        return (
            f'{{\n "mfload_checksums": {VERSION},\n{hashed}'
            f' "tensors": {tensors},\n "files": {files},\n "identity": {identity}\n}}\n'
        )

    def write(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes it, all or nothing. When the call returns, it is on disk.

        Raises:
            UsageError: The name is one of a checkpoint.
            TargetExistsError: A file exists there and `overwrite` is not set, or the file is not a
                manifest.
            TargetError: It can't be written.
        """
        text = self.text().encode()
        publishing.write_manifest(text_path(path), text, overwrite=overwrite)

    def __repr__(self) -> str:
        where = "" if self.path is None else f" from {self.path}"
        tensors = errors.counted(len(self.tensors), "tensor")
        return f"<mfload manifest{where}: {tensors}, {errors.counted(len(self.files), 'file')}>"


def text_path(path: Any) -> str:
    """The path of a manifest as text; raises UsageError if it is not a path."""
    try:
        return os.fsdecode(path)
    except TypeError:
        wanted = "a manifest or its path; mfload.verify(path, mode='write') makes one"
        raise errors.UsageError("not a manifest", expected=wanted, found=repr(path)) from None


def beside(files: Sequence[str], index: str | None = None, *, whole: bool = False) -> str:
    """The default path of a manifest, given the files of a checkpoint and its index.

    For model.safetensors, its index and all its shards it is `model.safetensors.checksums.json`:
    see `mfload.saving.manifests`. It lies where the data is, if symbolic links are followed.
    `whole` says that a directory was given.
    """
    return _places(files, index, whole=whole)[1][0]


def find(
    files: Sequence[str],
    index: str | None = None,
    *,
    whole: bool = False,
    tensors: Tensors | None = None,
    near: Callable[[str], Source] | None = None,
) -> tuple[str | Source | Manifest | None, list[str]]:
    """Finds the manifest of a checkpoint, under its default name or others that are still read.

    Earlier versions gave several checkpoints one name, and a shard may have the manifest of its
    set. So a manifest with another name than `beside` returns is used only if it lists these files.
    If it lists none, its tensors must be the same by name, dtype and shape, and no other checkpoint
    in the directory may have had that name.

    Args:
        tensors: Returns the tensors of the files.
        near: Returns the source of a name beside the files, if they are not local.

    Returns:
        The manifest if it had to be read, else its place, which is the default one if there is no
        manifest; None if the default name is taken by another checkpoint's. And a note for each
        manifest that is for other files.
    """
    notes: list[str] = []
    names, paths = _places(files, index, whole=whole)
    places = paths if near is None else [near(os.path.basename(path)) for path in paths]
    default: str | Source | None = places[0]
    for place in places:
        rivals: list[str] = []
        if isinstance(place, str):
            if not manifests.is_there(place):
                continue
            rivals = _rivals(place, names, index)
            if place == places[0] and not rivals:
                break
        try:
            known = Manifest.read(place)
        except errors.SourceNotFoundError:
            continue
        except (errors.SourceError, errors.FormatError) as error:
            # Some servers refuse access to what does not exist.
            if near is not None and isinstance(error, errors.SourcePermissionError):
                continue
            return place, notes
        why = _misfit(known, names, rivals, None if place is places[0] else tensors or dict)
        if why is None:
            return known, notes
        notes.append(f"the manifest {known.path} is for other files and was not used: {why}")
        default = None if place is places[0] else default
    return default, notes


def check_beside(path: str, names: Collection[str], *, overwrite: bool) -> None:
    """Raises if a manifest of these files may not be written to a path."""
    path = place_of(path)
    manifest_files.check_target(path, overwrite=overwrite)
    rivals = manifests.rivals(*os.path.split(path), names)
    if rivals and os.path.lexists(path):
        # A damaged manifest may be replaced; one that is gone was another writer's.
        with contextlib.suppress(errors.FormatError, errors.SourceNotFoundError):
            why = _misfit(Manifest.read(path), names, rivals, None)
            if why is not None:
                what = "an old manifest of another checkpoint has the name; rename that one"
                raise errors.TargetExistsError(
                    what,
                    file=path,
                    expected=f"{manifests.named(rivals[0])}, for {rivals[0]}",
                    found=why,
                )


def older(files: Sequence[str], index: str | None, *, whole: bool, tensors: Tensors) -> list[str]:
    """Paths of manifests of exactly these files that have another name than the default."""
    found: list[str] = []
    names, paths = _places(files, index, whole=whole)
    for path in filter(os.path.isfile, paths[1:]):
        with contextlib.suppress(errors.SourceError, errors.FormatError):
            known = Manifest.read(path)
            rivals = _rivals(path, names, index)
            same = known.names == {*names} if known.names else not manifests.incomplete(names)
            if same and _misfit(known, names, rivals, tensors) is None:
                found.append(path)
    return found


def _rivals(path: str, names: Sequence[str], index: str | None) -> list[str]:
    """Other checkpoints to which a manifest in this directory may belong."""
    directory, name = os.path.split(path)
    found = manifests.rivals(directory, name, [*names, os.path.basename(index or "")])
    if manifests.incomplete(names):
        # The single file with the name of the set of these shards.
        single = manifests.saved_as(names[0])
        found += [single] if os.path.lexists(os.path.join(directory, single)) else []
    return found


def _misfit(
    known: Manifest, names: Collection[str], rivals: Sequence[str], tensors: Tensors | None
) -> str | None:
    """Why a manifest is not for files of these names; None if it is.

    Without `tensors` it has the default name, and is for them unless it lists files of rivals only.
    """
    if tensors is None:
        # It may also be of files before they were renamed or replaced: the caller compares.
        foreign = known.names.isdisjoint(names) and not known.names.isdisjoint(rivals)
        return f"it has {brief(min(known.names))}" if foreign else None
    if known.names:
        missing = sorted({*names} - known.names)
        return f"it has {brief(min(known.names))}, not {brief(missing[0])}" if missing else None
    if rivals:
        return f"it may be of {brief(rivals[0])}"
    held = tensors()
    fits = manifests.incomplete(names) or held.keys() == known.tensors.keys()
    return None if fits and not any(known.differences(held.values())) else "its tensors are others"


def part_of(known: Manifest, names: Collection[str]) -> bool:
    """Whether files of these names are some of those of a manifest, and not all."""
    if known.names.isdisjoint(names):
        return manifests.incomplete(names)
    return {*names} < known.names


def identify(
    numbers: Iterable[int], sources: Sequence[Source], index: Index | Table
) -> dict[int, FileIdentity]:
    """The identities of files of a checkpoint, by their number; reads headers again."""
    hashes = {number: hashlib.sha256() for number in numbers}
    others = dict[int, Any]()  # Without a header.
    for number, made in hashes.items():
        source = sources[number]
        head = source.read(0, min(source.size, 9))
        end = 8 + int.from_bytes(head[:8], "little")
        if safetensors.recognise(head, "") and end <= source.size:
            made.update(source.read(0, end))
        else:
            others[number] = made
    for info in index.columns if others else ():
        for number, *place in info.pieces:
            if number in others:
                row = info.name, info.dtype.name, info.shape, *place
                others[number].update(f"{row}\n".encode(errors="surrogatepass"))
    return {n: FileIdentity(sources[n].size, made.hexdigest()) for n, made in hashes.items()}


def others(
    made: Manifest, numbers: Iterable[int], sources: Sequence[Source], index: Index | Table
) -> dict[str, tuple[str, str]]:
    """Files that a manifest was not made of, by path, with its identity and that of the file.

    Empty if the manifest is of version 1, or the headers can't be read again.
    """
    known, some = set(made.identity.values()), ", ".join([*made.identity][:3])
    found: dict[str, tuple[str, str]] = {}
    with contextlib.suppress(errors.SourceError):
        for number, each in identify(numbers if known else (), sources, index).items():
            if each not in known:
                path = sources[number].name
                wanted = made.identity.get(os.path.basename(path), f"the data of {some}")
                found[path] = str(wanted), str(each)
    return found


def relative_names(files: Sequence[str], index: str | None) -> dict[str, str]:
    """Names of files as a manifest has them: paths relative to its directory, as text."""
    return dict(zip(files, map(manifests.as_text, _relative(files, index)[1]), strict=True))


def _relative(files: Sequence[str], index: str | None) -> tuple[str, list[str]]:
    """The directory of a checkpoint, and paths of its files relative to that."""
    paths = _data(files, index)
    directory = os.path.commonpath([os.path.dirname(path) for path in paths])
    names = (os.path.relpath(path, directory) for path in paths[: len(files)])
    return directory, [name.replace(os.sep, "/") for name in names]


def _places(files: Sequence[str], index: str | None, *, whole: bool) -> tuple[list[str], list[str]]:
    """What a manifest calls the files, and the paths it may have; the first one is written."""
    if index is None and files[-1].endswith(discovery.INDEX_SUFFIX):
        files, index = files[:-1], files[-1]  # Of a save, whose index comes last.
    base = None if index is None else os.path.basename(_plain(index))
    directory, names = _relative(files, index)
    found = manifests.names_of(names, base, whole=whole)
    return list(map(manifests.as_text, names)), [os.path.join(directory, each) for each in found]


def _data(files: Sequence[str], index: str | None) -> list[str]:
    """Paths of files and index with links followed, unless these lead to several directories."""
    paths = [_plain(path) for path in ([*files, index] if index else files)]
    places = [place_of(path) for path in paths]
    apart = len({os.path.dirname(place) for place in places}) > 1
    return [resolved(path) for path in paths] if apart else places


def _plain(name: str) -> str:
    """A path; that of a URL without its query, decoded."""
    return unquote(name.partition("?")[0]) if "://" in name else name


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
        and table.keys() <= {"mfload_checksums", "algorithm", "tensors", "files", "identity"}
        and type(table.get("mfload_checksums")) is int
        and table["mfload_checksums"] in (1, VERSION)
        and ("identity" in table) == (table["mfload_checksums"] == VERSION)
        and table.get("algorithm", ALGORITHM) == ALGORITHM
        and type(table.get("tensors")) is dict
        and type(table.get("files", {})) is dict
        and type(table.get("identity", {})) is dict
    )
    if not sound:
        raise _malformed(path, table)
    hashed = "algorithm" in table
    return Manifest(
        {name: _tensor(entry, name, path, hashed) for name, entry in table["tensors"].items()},
        {n: _of_file(FileEntry, each, n, path) for n, each in table.get("files", {}).items()},
        path,
        {n: _of_file(FileIdentity, each, n, path) for n, each in table.get("identity", {}).items()},
    )


def _tensor(entry: Any, name: str, path: str, hashed: bool) -> TensorEntry:
    keys = {"dtype", "shape", "digest"} if hashed else {"dtype", "shape"}
    if type(entry) is dict and entry.keys() == keys:
        dtype, shape, digest = entry["dtype"], entry["shape"], entry.get("digest")
        counts = type(shape) is list and all(_is_count(dim, 64) for dim in shape)
        if counts and type(dtype) is str and (not hashed or _is_hex(digest, 32)):
            return TensorEntry(dtype, tuple(shape), digest)
    raise _malformed(path, entry, name)


def _of_file(kind: type[_OfFile], entry: Any, name: str, path: str) -> _OfFile:
    size, digest = kind._fields
    known = type(entry) is dict and entry.keys() == {size, digest}
    if known and _is_count(entry[size], 63) and _is_hex(entry[digest], 64):
        return kind(**entry)
    raise _malformed(path, entry, name)


def _is_hex(text: Any, digits: int) -> bool:
    return type(text) is str and re.fullmatch(f"[0-9a-f]{{{digits}}}", text) is not None


def _is_count(value: Any, bits: int) -> bool:
    return type(value) is int and 0 <= value < 1 << bits


def _malformed(path: str, found: Any, name: str | None = None) -> errors.HeaderError:
    what = "not a manifest of checksums, or a malformed one"
    return errors.HeaderError(what, file=path, tensor=name, expected=_FORMAT, found=brief(found))
