"""Digests of a whole checkpoint in one read, made and compared."""

from __future__ import annotations

from collections.abc import Callable

from mfload import errors
from mfload.checking import streaming
from mfload.checking.checksums import Observer
from mfload.checking.expecting import Expecting
from mfload.checking.inspecting import Inspected, Problem
from mfload.checking.manifest import FileEntry, Manifest, TensorEntry, sayable
from mfload.checking.streaming import Range
from mfload.index import TensorInfo
from mfload.runtime import Deadline


class Digesting:
    """Hashes what is to be hashed of a checkpoint.

    Args:
        seen: The checkpoint; what is found is added to it.
        expecting: What its bytes should give.
    """

    def __init__(self, seen: Inspected, expecting: Expecting) -> None:
        self._seen = seen
        self._expecting = expecting
        self._found: dict[str, str] = {}
        self._hashed: dict[str, str] = {}
        self._tensors = expecting.tensors()
        self._rows: list[list[TensorInfo]] = [[] for _ in seen.sources]
        for info in self._tensors:
            self._rows[info.pieces[0].source].append(info)
        self._ranges = [self._range(n) for n in range(len(seen.sources))]

    def _range(self, number: int) -> Range:
        source = self._seen.sources[number]
        if self._summed(number):
            return Range(number, 0, source.size)
        pieces = [info.pieces[0] for info in self._rows[number]]
        start = min((piece.offset for piece in pieces), default=0)
        stop = max((piece.offset + piece.nbytes for piece in pieces), default=0)
        return Range(number, start, stop - start)

    def _summed(self, number: int) -> bool:
        expecting = self._expecting
        return expecting.writes or self._seen.sources[number].path in expecting.sums

    @property
    def nbytes(self) -> int:
        """Bytes to be read."""
        return sum(part.nbytes for part in self._ranges)

    def run(
        self, threads: int | None, deadline: Deadline, advance: Callable[[int], None] | None
    ) -> None:
        """Reads and hashes; a file that can't be read is a problem, and the others go on."""
        todo = {n for n, part in enumerate(self._ranges) if self._rows[n] or part.nbytes}
        while todo:
            observer = self._witness(sorted(todo))
            failed: set[int] = set()
            try:
                self._seen.notes += streaming.look(
                    self._seen.sources,
                    [self._ranges[number] for number in sorted(todo)],
                    observer,
                    threads=threads,
                    lanes=True,
                    deadline=deadline,
                    advance=advance,
                )
            except errors.LoadTimeoutError:
                raise
            except errors.SourceError as error:
                failed = {n for n in todo if self._seen.sources[n].path == error.file}
                if not failed:
                    raise
                self._seen.problems.append(Problem.of(error))
            done = {n for n in todo - failed if observer.complete(n)}
            for number in sorted(done):
                self._take(number, observer)
            # Those that were cut off in the middle are read again, from their beginning.
            todo -= done | failed
        self._compare()

    def _witness(self, numbers: list[int]) -> Observer:
        sizes = {n: self._seen.sources[n].size for n in numbers if self._summed(n)}
        tensors = [info for number in numbers for info in self._rows[number]]
        return Observer(tensors, sizes)

    def _take(self, number: int, observer: Observer) -> None:
        source = self._seen.sources[number]
        try:
            source.check()
        except errors.SourceError as error:
            self._seen.problems.append(Problem.of(error))
            return
        for info in self._rows[number]:
            self._found[info.name] = observer.tensor(info.name)
        if self._summed(number):
            self._hashed[source.path] = observer.file(number)

    def _compare(self) -> None:
        problems, known = self._seen.problems, self._expecting.known
        if known is not None:
            for info in self._tensors:
                expected, found = known.tensors[info.name].digest, self._found.get(info.name)
                if found is not None and found != expected:
                    what, file = "the tensor's bytes have changed", self._seen.file_of(info)
                    problems.append(Problem(what, file, info.name, expected, found))
        for file, digest in self._hashed.items():
            known_sum = self._expecting.sums.get(file)
            if known_sum is not None and known_sum.digest != digest:
                expected = f"{known_sum.digest} ({known_sum.origin})"
                problems.append(Problem("the file's SHA-256 differs", file, None, expected, digest))

    def write(self, *, overwrite: bool) -> str | None:
        """Writes the manifest where nothing is wrong; returns its path, None where it did not."""
        path = self._expecting.path
        if path is None or self._seen.problems:
            self._seen.notes.append("no manifest was written, since there are problems")
            return None
        tensors = {
            info.name: TensorEntry(info.dtype.name, info.shape, self._found[info.name])
            for info in self._tensors
        }
        files = {
            self._expecting.name(source.path): FileEntry(source.size, self._hashed[source.path])
            for source in self._seen.sources
        }
        for name in [name for name in files if not sayable(name)]:
            del files[name]
            note = f"the manifest leaves out the file {name!a}, whose name is no text"
            self._seen.notes.append(f"{note}; its tensors are in it")
        Manifest(tensors, files).write(path, overwrite=overwrite)
        return path
