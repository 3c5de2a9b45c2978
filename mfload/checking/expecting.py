"""What a checkpoint's bytes should give: by a manifest, a hub, or the user."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

from mfload import errors
from mfload.checking import published
from mfload.checking.inspecting import Inspected, Problem
from mfload.checking.manifest import Manifest, beside, check_target, home
from mfload.checking.published import Sum, Sums
from mfload.formats.discovery import Path
from mfload.index import TensorInfo

Checksums = Literal["write", "check"] | None


class Expecting:
    """What is known of a checkpoint's bytes.

    Args:
        seen: The checkpoint; what is found is added to it.
        path: What it was named by.
        checksums: Whether a manifest is made or compared with.
        manifest: Where it lies, or what it says.
        sha256: What the user knows of the files.
        overwrite: Whether a manifest may be replaced.

    Attributes:
        known: The manifest to compare with, None where there is none.
        path: Where the manifest lies or is to lie, None where there is none.
        sums: The SHA-256 that files should have, by path.
        writes: Whether a manifest is to be made.

    Raises:
        UsageError: The arguments make no sense together.
        SourceError: The manifest or the list of sums can't be read.
        HeaderError: One of them is malformed.
        TargetExistsError: There is a manifest already, or something that is none.
    """

    def __init__(
        self,
        seen: Inspected,
        path: Path | Sequence[Path],
        *,
        checksums: Checksums,
        manifest: str | os.PathLike[str] | Manifest | None,
        sha256: Sums,
        overwrite: bool,
    ) -> None:
        self._seen = seen
        self._home = home(path, seen.files)
        self._checksums = checksums
        self.writes = checksums == "write"
        self.known: Manifest | None = None
        self.path: str | None = None
        if checksums is None and manifest is not None:
            wanted = 'checksums="write" or "check"'
            raise errors.UsageError("a manifest, and nothing to do with it", expected=wanted)
        if checksums is not None:
            self._take_manifest(path, manifest, overwrite=overwrite)
        self.sums = published.expected(sha256, seen.files)
        if sha256 is not None and not isinstance(sha256, Mapping):
            seen.problems += [
                Problem("no SHA-256 is known of the file", file)
                for file in seen.files
                if file not in self.sums
            ]
        self._add_sums()

    def _take_manifest(
        self,
        path: Path | Sequence[Path],
        manifest: str | os.PathLike[str] | Manifest | None,
        *,
        overwrite: bool,
    ) -> None:
        if self._checksums not in ("write", "check"):
            found = repr(self._checksums)
            raise errors.UsageError("checksums", expected="write | check", found=found)
        if isinstance(manifest, Manifest):
            if self._checksums == "write":
                raise errors.UsageError("the manifest to write", expected="a path")
            self.known, self.path = manifest, manifest.path
            return
        seen = self._seen
        index = seen.name if seen.indexed else None
        self.path = beside(path, seen.files, index) if manifest is None else _text(manifest)
        if self._checksums == "write":
            check_target(self.path, overwrite=overwrite, files=seen.files, index=index)
            return
        try:
            self.known = Manifest.read(self.path)
        except (errors.SourceError, errors.FormatError) as error:
            # What is wrong with the checkpoint itself must not hide behind its manifest.
            if not seen.problems:
                raise
            seen.problems.append(Problem.of(error))
            self._checksums = self.path = None

    def _add_sums(self) -> None:
        """Where all is read anyway, whatever else is known of the files is looked at."""
        if self._checksums is None:
            return
        for file in self._seen.files:
            if file not in self.sums:
                found = published.of_hub(file)
                if found is not None:
                    self.sums[file] = found
        if self.known is None:
            return
        names = {self.name(file): file for file in self._seen.files}
        for name, entry in self.known.files.items():
            if name in names:
                # One that the user gave counts for more.
                self.sums.setdefault(names[name], Sum(entry.sha256, "the manifest"))
        others = len(names.keys() ^ self.known.files.keys())
        if self.known.files and others:
            note = f"the manifest knows other files than these ({others}); tensors were compared"
            self._seen.notes.append(note)

    @property
    def looks(self) -> bool:
        """Whether checksums of tensors are made or compared with."""
        return self._checksums is not None

    def tensors(self) -> list[TensorInfo]:
        """The tensors to hash; what can't be right is told now."""
        tensors = self._seen.tensors
        if self.known is None:
            return list(tensors.values()) if self._checksums else []
        problems = self._seen.problems
        found: list[TensorInfo] = []
        for info in tensors.values():
            entry = self.known.tensors.get(info.name)
            what = None if entry is None else entry.unlike(info)
            if entry is None:
                file = self._seen.file_of(info)
                problems.append(Problem("the manifest does not know the tensor", file, info.name))
            elif what is not None:
                file = self._seen.file_of(info)
                problems.append(Problem("not the tensor of the manifest", file, info.name, *what))
            else:
                found.append(info)
        for name in self.known.tensors:
            if name not in tensors:
                problems.append(Problem("the manifest's tensor is not there", None, name))
        return found

    def name(self, file: str) -> str:
        """What a manifest calls a file."""
        return os.path.relpath(os.path.abspath(file), self._home).replace(os.sep, "/")


def _text(path: str | os.PathLike[str]) -> str:
    try:
        return os.fsdecode(path)
    except TypeError:
        raise errors.UsageError("manifest", expected="a path", found=repr(path)) from None
