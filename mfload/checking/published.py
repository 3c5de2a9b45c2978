"""The SHA-256 of files as others publish it: a hub's cache, a list of sums, or by hand."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mfload import errors
from mfload.sources.local import LocalFile

Sums = str | os.PathLike[str] | Mapping[str, str] | None
"""What `sha256=` takes: "auto", 64 digits, the path of a list, or {file name: digits}."""

AUTO = "auto"
_HEX = re.compile(r"[0-9a-fA-F]{64}")
# As `sha256sum` writes them, in its own style and in that of BSD.
_GNU = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_BSD = re.compile(r"SHA256 \((.+)\) = ([0-9a-fA-F]{64})")
_LOCAL = (".cache", "huggingface", "download")
_LEVELS = 4
_MAX_LIST = 64 << 20


class Sum(NamedTuple):
    """A digest that somebody published, and where it was found."""

    digest: str
    origin: str


def expected(given: Sums, files: Sequence[str]) -> dict[str, Sum]:
    """The SHA-256 that each file should have.

    Args:
        given: What the user gave.
        files: Paths.

    Returns:
        By path; files of which nothing is known are left out.

    Raises:
        UsageError: It is no digest and no list, or one digest for several files.
        SourceError: The list can't be read.
        HeaderError: The list has a line that is none of a list of sums.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return _named(given, files)
    if not isinstance(given, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        wanted = '"auto", 64 hexadecimal digits, a path, or {file: digits}'
        raise errors.UsageError("sha256", expected=wanted, found=repr(given))
    if given == AUTO:
        found = {file: of_hub(file) for file in files}
        return {file: each for file, each in found.items() if each is not None}
    if isinstance(given, str) and _HEX.fullmatch(given):
        if len(files) != 1:
            wanted = f"a list of sums for {len(files)} files"
            raise errors.UsageError("one sha256 for several files", expected=wanted, found=given)
        return {files[0]: Sum(given.lower(), "given")}
    try:
        return _listed(os.fsdecode(given), files)
    except errors.SourceNotFoundError as error:
        error.message += "; sha256 takes 64 hexadecimal digits, the path of a list of sums, or auto"
        error.args = (error.message,)
        raise


def of_hub(file: str) -> Sum | None:
    """What the Hugging Face client left beside a file that it fetched.

    Its cache lays a snapshot as links to blobs that are named by their SHA-256, as Git LFS
    names its objects. A download into a directory of the user's keeps the digest in a file
    below `.cache/huggingface`.
    """
    if is_blob(file):
        return Sum(os.path.basename(os.path.realpath(file)).lower(), "the name of its blob")
    path = os.path.abspath(file)
    directory = os.path.dirname(path)
    for _ in range(_LEVELS):
        record = os.path.join(directory, *_LOCAL, os.path.relpath(path, directory) + ".metadata")
        digest = _recorded(record)
        if digest is not None:
            return Sum(digest, record)
        directory = os.path.dirname(directory)
    return None


def is_blob(file: str) -> bool:
    """Whether a file, or what a link leads to, is named by its SHA-256."""
    return _HEX.fullmatch(os.path.basename(os.path.realpath(file))) is not None


def _recorded(record: str) -> str | None:
    """The second of three lines is the hub's ETag: for large files their SHA-256."""
    try:
        with open(record, "rb") as opened:
            lines = opened.read(4096).decode("ascii", "replace").splitlines()
    except (OSError, ValueError):
        return None
    return lines[1].lower() if len(lines) > 1 and _HEX.fullmatch(lines[1]) else None


def _named(given: Mapping[Any, Any], files: Sequence[str]) -> dict[str, Sum]:
    found: dict[str, Sum] = {}
    for name, digest in given.items():
        matching = [file for file in files if _is_called(file, name)]
        if not matching:
            names = ", ".join(os.path.basename(file) for file in files[:5])
            raise errors.UsageError("sha256 names no such file", expected=names, found=repr(name))
        if not isinstance(digest, str) or not _HEX.fullmatch(digest):
            wanted = "64 hexadecimal digits"
            raise errors.UsageError("sha256", expected=wanted, found=repr(digest))
        found.update((file, Sum(digest.lower(), "given")) for file in matching)
    return found


def _is_called(file: str, name: Any) -> bool:
    try:
        text = os.fsdecode(name)
    except TypeError:
        return False
    parts = os.path.normpath(text).split(os.sep)
    return os.path.abspath(file).split(os.sep)[-len(parts) :] == parts or file == text


def _listed(path: str, files: Sequence[str]) -> dict[str, Sum]:
    """The sums of a list; names are relative to its directory, as `sha256sum -c` there has it."""
    directory = os.path.dirname(os.path.abspath(path))
    wanted = {os.path.realpath(file): file for file in files}
    wanted |= {os.path.abspath(file): file for file in files}
    found: dict[str, Sum] = {}
    for line in _text(path).splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        gnu, bsd = _GNU.fullmatch(line), _BSD.fullmatch(line)
        if gnu is not None:
            digest, name = gnu[1], gnu[2]
        elif bsd is not None:
            name, digest = bsd[1], bsd[2]
        elif _HEX.fullmatch(line.strip()) and len(files) == 1:
            found[files[0]] = Sum(line.strip().lower(), path)
            continue
        else:
            raise errors.HeaderError(
                "no list of sums", file=path, expected="lines of sha256sum", found=line[:100]
            )
        file = wanted.get(os.path.normpath(os.path.join(directory, name)))
        if file is not None:
            found[file] = Sum(digest.lower(), path)
    return found


def _text(path: str) -> str:
    source = LocalFile(path)
    if source.size > _MAX_LIST:
        raise errors.HeaderError(
            "no list of sums", file=path, expected=f"{_MAX_LIST} bytes at most", found=source.size
        )
    return source.read(0, source.size).decode("utf-8", "replace")
