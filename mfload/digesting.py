"""Digests of a whole checkpoint in one read, made and compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from mfload import errors, published, streaming
from mfload.checksums import Witness
from mfload.formats.finding import Path
from mfload.index import TensorInfo
from mfload.inspecting import Inspected, Problem
from mfload.io.deadline import Deadline
from mfload.manifest import FileEntry, Manifest, TensorEntry, beside, home
from mfload.published import Sum, Sums
from mfload.streaming import Range

Checksums = Literal["write", "check"] | None


class Digesting:
    """What is to be hashed of a checkpoint, and what it should give.

    Args:
        seen: The checkpoint; what is found is added to it.
        path: What it was named by.
        checksums: Whether a manifest is made or compared with.
        manifest: Where it lies, or what it says.
        sha256: What is known of the files.
        overwrite: Whether a manifest may be replaced.

    Attributes:
        sums: The SHA-256 that files should have, by path.
        manifest: Where the manifest lies, None where there is none.

    Raises:
        UsageError: The arguments make no sense together.
        SourceError: The manifest or the list of sums can't be read.
        HeaderError: One of them is malformed.
        TargetExistsError: There is a manifest already.
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
        self._overwrite = overwrite
        self._checksums = checksums
        self._known: Manifest | None = None
        self.manifest: str | None = None
        self._found: dict[str, str] = {}
        self._hashed: dict[str, str] = {}
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
        self._tensors = self._comparable()
        self._rows: list[list[TensorInfo]] = [[] for _ in seen.sources]
        for info in self._tensors:
            self._rows[info.pieces[0].source].append(info)
        self._ranges = [self._range(n) for n in range(len(seen.sources))]

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
            self._known, self.manifest = manifest, manifest.path
            return
        self.manifest = beside(path, self._seen.files) if manifest is None else _text(manifest)
        if self._checksums == "check":
            self._known = Manifest.read(self.manifest)
        elif not overwrite and os.path.lexists(self.manifest):
            raise errors.TargetExistsError(
                "there is a manifest already; overwrite=True replaces what it knows",
                file=self.manifest,
            )

    def _add_sums(self) -> None:
        """Where all is read anyway, whatever else is known of the files is looked at."""
        if self._checksums is None:
            return
        for file in self._seen.files:
            if file not in self.sums:
                found = published.of_hub(file)
                if found is not None:
                    self.sums[file] = found
        if self._known is None:
            return
        names = {self._name(file): file for file in self._seen.files}
        for name, entry in self._known.files.items():
            if name in names:
                # One that the user gave counts for more.
                self.sums.setdefault(names[name], Sum(entry.sha256, "the manifest"))
        others = len(names.keys() ^ self._known.files.keys())
        if self._known.files and others:
            note = f"the manifest knows other files than these ({others}); tensors were compared"
            self._seen.notes.append(note)

    def _comparable(self) -> list[TensorInfo]:
        """The tensors to hash; what can't be right is told now."""
        tensors = self._seen.tensors
        if self._known is None:
            return list(tensors.values()) if self._checksums else []
        problems = self._seen.problems
        found: list[TensorInfo] = []
        for info in tensors.values():
            entry = self._known.tensors.get(info.name)
            what = None if entry is None else entry.unlike(info)
            if entry is None:
                file = self._seen.file_of(info)
                problems.append(Problem("the manifest does not know the tensor", file, info.name))
            elif what is not None:
                file = self._seen.file_of(info)
                problems.append(Problem("not the tensor of the manifest", file, info.name, *what))
            else:
                found.append(info)
        for name in self._known.tensors:
            if name not in tensors:
                problems.append(Problem("the manifest's tensor is not there", None, name))
        return found

    def _range(self, number: int) -> Range:
        source = self._seen.sources[number]
        if self._summed(number):
            return Range(number, 0, source.size)
        pieces = [info.pieces[0] for info in self._rows[number]]
        start = min((piece.offset for piece in pieces), default=0)
        stop = max((piece.offset + piece.nbytes for piece in pieces), default=0)
        return Range(number, start, stop - start)

    def _summed(self, number: int) -> bool:
        return self._checksums == "write" or self._seen.sources[number].path in self.sums

    @property
    def nbytes(self) -> int:
        """Bytes to be read."""
        return sum(part.nbytes for part in self._ranges)

    def run(
        self, threads: int | None, deadline: Deadline, advance: Callable[[int], None] | None
    ) -> None:
        """Reads and hashes; a file that can't be read is a problem, and the others go on."""
        todo = list(range(len(self._seen.sources))) if self._checksums or self.sums else []
        while todo:
            witness = self._witness(todo)
            failed: str | None = None
            try:
                self._seen.notes += streaming.look(
                    self._seen.sources,
                    [self._ranges[number] for number in todo],
                    witness,
                    threads=threads,
                    lanes=True,
                    deadline=deadline,
                    advance=advance,
                )
            except errors.LoadTimeoutError:
                raise
            except errors.SourceError as error:
                if error.file is None:
                    raise
                failed = error.file
                self._seen.problems.append(Problem.of(error))
            done = [n for n in todo if witness.complete(n)]
            for number in done:
                if self._seen.sources[number].path != failed:
                    self._take(number, witness)
            todo = [n for n in todo if n not in done and self._seen.sources[n].path != failed]
        self._compare()

    def _witness(self, numbers: list[int]) -> Witness:
        sizes = {n: self._seen.sources[n].size for n in numbers if self._summed(n)}
        tensors = [info for number in numbers for info in self._rows[number]]
        return Witness(tensors, sizes)

    def _take(self, number: int, witness: Witness) -> None:
        for info in self._rows[number]:
            self._found[info.name] = witness.tensor(info.name)
        if self._summed(number):
            self._hashed[self._seen.sources[number].path] = witness.file(number)

    def _compare(self) -> None:
        problems, known = self._seen.problems, self._known
        if known is not None:
            for info in self._tensors:
                expected, found = known.tensors[info.name].digest, self._found.get(info.name)
                if found is not None and found != expected:
                    what, file = "the tensor's bytes have changed", self._seen.file_of(info)
                    problems.append(Problem(what, file, info.name, expected, found))
        for file, digest in self._hashed.items():
            known_sum = self.sums.get(file)
            if known_sum is not None and known_sum.digest != digest:
                expected = f"{known_sum.digest} ({known_sum.origin})"
                problems.append(Problem("the file's SHA-256 differs", file, None, expected, digest))

    def write(self) -> None:
        """Writes the manifest where that was asked for, and nothing is wrong."""
        if self._checksums != "write" or self.manifest is None:
            return
        if self._seen.problems:
            self._seen.notes.append("no manifest was written, since there are problems")
            self.manifest = None
            return
        tensors = {
            info.name: TensorEntry(info.dtype.name, info.shape, self._found[info.name])
            for info in self._tensors
        }
        files = {
            self._name(source.path): FileEntry(source.size, self._hashed[source.path])
            for source in self._seen.sources
        }
        Manifest(tensors, files).write(self.manifest, overwrite=self._overwrite)

    def _name(self, file: str) -> str:
        return os.path.relpath(os.path.abspath(file), self._home).replace(os.sep, "/")


def _text(path: str | os.PathLike[str]) -> str:
    try:
        return os.fsdecode(path)
    except TypeError:
        raise errors.UsageError("manifest", expected="a path", found=repr(path)) from None
