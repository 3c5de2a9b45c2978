"""Where a checkpoint is to lie."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from mfload import errors
from mfload.formats.discovery import INDEX_SUFFIX, SUFFIX

_DEFAULT = "model" + SUFFIX
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


@dataclass(frozen=True, slots=True)
class Place:
    """A directory and the name of a single file in it.

    Attributes:
        directory: Absolute, links resolved.
        name: What one file would be called.
        linked: The symbolic link that led here, None where there was none.
        whole: Whether the directory was named, not a file in it.
    """

    directory: str
    name: str
    linked: str | None = None
    whole: bool = False

    @property
    def path(self) -> str:
        """Of the single file."""
        return os.path.join(self.directory, self.name)

    @property
    def stem(self) -> str | None:
        """What the names of shards begin with; None where the name is no safetensors name."""
        found = self.name.removesuffix(SUFFIX)
        return found if found not in (self.name, "") else None

    @property
    def index(self) -> str | None:
        """What the index of the shards is called."""
        return None if self.stem is None else self.stem + INDEX_SUFFIX

    def names(self, count: int) -> list[str]:
        """What so many files are called: Hugging Face's names where there are several.

        Raises:
            UsageError: Several, of a name that can't be numbered.
        """
        if count == 1:
            return [self.name]
        if self.stem is None:
            raise errors.UsageError(
                "shards need a name to count up from",
                file=self.path,
                expected=f"a name that ends in {SUFFIX}",
                found=self.name,
            )
        width = max(5, len(str(count)))
        return [
            f"{self.stem}-{number:0{width}}-of-{count:0{width}}{SUFFIX}"
            for number in range(1, count + 1)
        ]

    def hidden(self) -> str:
        """A prefix for names that nothing else has; the same file's are known by their start."""
        return f"{self._hidden}{secrets.token_hex(8)}-"

    @property
    def _hidden(self) -> str:
        # Not the name itself: it may be as long as a name can be.
        return f".mfload-{hashlib.sha256(os.fsencode(self.name)).hexdigest()[:12]}-"

    def hidden_among(self, names: Iterable[str]) -> frozenset[str]:
        """Those of many names that `hidden` made for this place, in any process."""
        start = self._hidden
        token = re.compile("[0-9a-f]{16}-")
        return frozenset(
            name for name in names if name.startswith(start) and token.match(name, len(start))
        )


def resolve(path: str | os.PathLike[str]) -> Place:
    """Takes apart what a user gave.

    Args:
        path: A file, or a directory that is there or ends with a separator: a file
            `model.safetensors` in it is meant then.

    Raises:
        UsageError: It is no path, or the name of an index.
        TargetError: The directory is not there, or something other than a file has the name.
    """
    try:
        given = os.fsdecode(path)
        os.fsencode(given)
    except (TypeError, UnicodeError):
        raise errors.UsageError("not a path", expected="a path", found=repr(path)) from None
    if not given or "\0" in given:
        raise errors.UsageError("not a path", expected="a path", found=repr(given))
    try:
        place = _resolved(given)
        directory = os.stat(place.directory)
    except OSError as error:
        raise errors.from_target(error, given, "look at the target") from error
    if not stat.S_ISDIR(directory.st_mode):
        raise _missing(place.directory, errno.ENOTDIR)
    if place.name.endswith(".json"):
        raise errors.UsageError(
            "an index is written beside its shards, on its own accord",
            file=given,
            expected=f"a {SUFFIX} file or a directory",
            found=place.name,
        )
    check_names(place.directory, [place.name])
    return place


def _resolved(given: str) -> Place:
    separators = tuple(filter(None, (os.sep, os.altsep)))
    inside = given.endswith(separators) or os.path.basename(given) in (".", "..")
    if inside or (os.path.isdir(given) and not given.endswith(SUFFIX)):
        directory, name = given, _DEFAULT
    else:
        directory, name = os.path.split(given)
    directory = os.path.realpath(directory or ".")
    if not os.path.lexists(directory):
        raise _missing(directory, errno.ENOENT)
    path = os.path.join(directory, name)
    if not os.path.islink(path):
        return Place(directory, name, whole=name is _DEFAULT)
    # As an editor would: what the link leads to is replaced, the link stays.
    target = os.path.realpath(path)
    if os.path.islink(target):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if not os.path.isdir(os.path.dirname(target)):
        raise _missing(os.path.dirname(target), errno.ENOENT)
    return Place(*os.path.split(target), path)


def _missing(directory: str, number: int) -> errors.TargetError:
    error = errors.TargetError(
        "no such directory; it is not made on the way",
        file=directory,
        expected="a directory",
        found=os.strerror(number),
    )
    error.errno, error.strerror = number, os.strerror(number)
    return error


def check_names(directory: str, names: list[str], *, links: bool = True) -> None:
    """Refuses names that no file of ours can take.

    Args:
        directory: Where.
        names: Of files to be.
        links: Whether a symbolic link may be there.

    Raises:
        TargetError: One is too long, or something other than a regular file has it.
    """
    for name in names:
        path = os.path.join(directory, name)
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            continue
        except OSError as error:
            raise errors.from_target(error, path, "look at the target") from error
        if stat.S_ISREG(mode) or (links and stat.S_ISLNK(mode)):
            continue
        raise errors.TargetError(
            "something other than a file has the name",
            file=path,
            expected="a regular file, or nothing",
            found=_KINDS.get(stat.S_IFMT(mode), "something else"),
        )
