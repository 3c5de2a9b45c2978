"""Directories: names of files below a place, on a file system or in a store.

Formats whose checkpoint is a directory, and what looks for a checkpoint in one, ask no more than
this, so that they do not know where it lies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from mfload import errors, sources
from mfload.sources.base import Source


class Directory(Protocol):
    """Files below a place. A name may lead further down, with slashes in it."""

    @property
    def name(self) -> str:
        """Its path or URL, for messages; it holds no secrets."""
        ...

    def names(self) -> list[str]:
        """Names of the files and directories in it, in order.

        Raises:
            SourceError: It can't be listed.
        """
        ...

    def is_directory(self, name: str) -> bool:
        """Whether a directory has the name."""
        ...

    def is_file(self, name: str) -> bool:
        """Whether a file has the name."""
        ...

    def at(self, name: str) -> Any:
        """What `discovery.find` takes for what has the name; nothing is opened."""
        ...

    def file(self, name: str) -> Source:
        """The source of a file; raises SourceError if there is none, or when it is read."""
        ...

    def below(self, name: str) -> Directory:
        """The directory of a name."""
        ...

    @property
    def above(self) -> tuple[Directory, str] | None:
        """The directory that holds it, and its name there; None at the top."""
        ...

    def walk(self) -> Iterator[tuple[str, int]]:
        """The names of all files below it, with slashes in them, and their bytes.

        Raises:
            SourceError: A file can't be looked at.
        """
        ...


class LocalDirectory(NamedTuple):
    """A directory of a file system as a `Directory`."""

    name: str

    def names(self) -> list[str]:
        """Names in it, in order; raises SourceError if it can't be listed."""
        try:
            return sorted(os.listdir(self.name))
        except OSError as error:
            raise errors.from_os(error, self.name, "list") from error

    def is_directory(self, name: str) -> bool:
        """Whether a directory has the name, or a link to one."""
        return os.path.isdir(self.at(name))

    def is_file(self, name: str) -> bool:
        """Whether a file has the name, or a link to one."""
        return os.path.isfile(self.at(name))

    def at(self, name: str) -> str:
        """The path of a name."""
        return os.path.join(self.name, name)

    def file(self, name: str) -> Source:
        """The source of a file; raises SourceError if there is none."""
        return sources.local_file(self.at(name))

    def below(self, name: str) -> LocalDirectory:
        """The directory of a name."""
        return LocalDirectory(self.at(name))

    @property
    def above(self) -> tuple[LocalDirectory, str] | None:
        """The directory that holds it, and its name there."""
        directory, name = os.path.split(os.path.abspath(self.name))
        return (LocalDirectory(directory), name) if name else None

    def walk(self) -> Iterator[tuple[str, int]]:
        """The names of all files below it, and their bytes."""
        front = len(self.at(""))
        for place, _, files in os.walk(self.name):
            for name in files:
                path = os.path.join(place, name)
                try:
                    size = os.stat(path).st_size
                except OSError as error:
                    raise errors.from_os(error, path, "open") from error
                yield path[front:].replace(os.sep, "/"), size
