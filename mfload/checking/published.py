"""The SHA-256 of files as others publish it: the Hugging Face cache, a list of sums, or digits."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mfload import errors, sources
from mfload.sources.base import read_whole
from mfload.sources.local import place_of

Sums = str | os.PathLike[str] | Mapping[str, str] | None
"""What `sha256=` takes: "auto", 64 digits, the path of a list, or {file name: digits}."""

_HEX = re.compile(r"[0-9a-fA-F]{64}")
# A line of `sha256sum`, one in the style of BSD, or digits alone.
_LINE = re.compile(
    r"(?P<gnu>[0-9a-fA-F]{64}) [ *](?P<gnu_name>.+)"
    r"|SHA256 \((?P<bsd_name>.+)\) = (?P<bsd>[0-9a-fA-F]{64})"
    r"|\s*(?P<alone>[0-9a-fA-F]{64})\s*"
)
_LOCAL = (".cache", "huggingface", "download")
_LEVELS = 4
_MAX_LIST = 64 << 20


class PublishedSum(NamedTuple):
    """A published digest, and where it was found."""

    digest: str
    origin: str


def expected(given: Sums, files: Sequence[str]) -> dict[str, PublishedSum]:
    """The SHA-256 that each file should have, by path; files without one are left out."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return _by_name(given, files, "given", every=True)
    if not isinstance(given, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        wanted = '"auto", 64 hexadecimal digits, a path, or {file: digits}'
        raise errors.UsageError("sha256", expected=wanted, found=repr(given))
    if given == "auto":
        return {file: known for file in files if (known := _of_hub(file)) is not None}
    if isinstance(given, str) and _HEX.fullmatch(given):
        if len(files) != 1:
            wanted = f"a list of sums for {errors.counted(len(files), 'file')}"
            raise errors.UsageError("one sha256 for several files", expected=wanted, found=given)
        return {files[0]: PublishedSum(given.lower(), "given")}
    path = os.fsdecode(given)
    try:
        return _by_name(_listed(path, files), files, path, every=False)
    except errors.SourceNotFoundError as error:
        error.message += "; sha256 takes 64 hexadecimal digits, the path of a list of sums, or auto"
        raise


def _of_hub(file: str) -> PublishedSum | None:
    """What the Hugging Face client knows of a file that it fetched.

    Its cache lays a snapshot as links to blobs that are named by their SHA-256, as Git LFS
    names its objects. A download into a directory of the user's keeps the digest in a file
    below `.cache/huggingface`, and the time: a file that was written to later holds other data.
    """
    blob = os.path.basename(os.path.realpath(file))
    if _HEX.fullmatch(blob):
        return PublishedSum(blob.lower(), "the name of its blob")
    path = place_of(file)
    directory = os.path.dirname(path)
    for _ in range(_LEVELS):
        record = os.path.join(directory, *_LOCAL, os.path.relpath(path, directory) + ".metadata")
        directory = os.path.dirname(directory)
        try:
            # As a source, which is a regular file: opening a FIFO would wait for a writer.
            source = sources.local_file(record)
            raw = source.read(0, min(source.size, 4096))
            _, digest, written = raw.decode("ascii", "replace").split()
            current = os.stat(path).st_mtime <= float(written)
        except (OSError, ValueError, errors.SourceError):
            continue
        # The second line is the hub's ETag: for large files their SHA-256.
        if current and _HEX.fullmatch(digest):
            return PublishedSum(digest.lower(), record)
    return None


def _by_name(
    digests: Mapping[Any, Any], files: Sequence[str], origin: str, *, every: bool
) -> dict[str, PublishedSum]:
    """The digests of files whose paths end with the names; `every` name must stand for one."""
    paths = [(file, os.path.abspath(file)) for file in files]
    paths += [(file, os.path.realpath(file)) for file in files]
    found: dict[str, PublishedSum] = {}
    for name, digest in digests.items():
        end = os.path.normpath(name) if isinstance(name, str | os.PathLike) else ""
        matching = [file for file, path in paths if end and (os.sep + path).endswith(os.sep + end)]
        if every and not matching:
            names = ", ".join(os.path.basename(file) for file in files[:5])
            raise errors.UsageError(
                "sha256 names an unknown file", expected=names, found=repr(name)
            )
        if not isinstance(digest, str) or not _HEX.fullmatch(digest):
            raise errors.UsageError("sha256", expected="64 hexadecimal digits", found=repr(digest))
        found.update((file, PublishedSum(digest.lower(), origin)) for file in matching)
    return found


def _listed(path: str, files: Sequence[str]) -> dict[str, str]:
    """The sums of a list; names are relative to its directory, as for `sha256sum -c` there."""
    source = sources.find(path)
    text = read_whole(source, _MAX_LIST, "not a list of sums")
    directory = os.path.dirname(os.path.abspath(path))
    found: dict[str, str] = {}
    for line in text.decode("utf-8", "replace").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or (match["alone"] and len(files) != 1):
            raise errors.HeaderError(
                "not a list of sums",
                file=source.name,
                expected="lines of sha256sum",
                found=line[:100],
            )
        name = match["gnu_name"] or match["bsd_name"] or os.path.abspath(files[0])
        found[os.path.join(directory, name)] = match["gnu"] or match["bsd"] or match["alone"]
    return found
