"""`verify`: whether a checkpoint is whole, by its headers, its checksums, or another copy."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mfload import errors
from mfload.checking import headers, manifest as manifests, published
from mfload.checking.checksums import Hasher
from mfload.checking.compare import Comparison, Pair
from mfload.checking.headers import Inspection, Problem
from mfload.checking.manifest import FileEntry, Manifest
from mfload.checking.published import PublishedSum, Sums
from mfload.checking.scan import Advance, Range, scan, span
from mfload.formats.discovery import Path
from mfload.index import TensorInfo
from mfload.options import LoadOptions, Options, check_choice, started
from mfload.progress import Progress, shown
from mfload.report import Printable, human
from mfload.saving import targets
from mfload.saving.save import Saved

Checksums = Literal["auto", "write", "check", "never"]
CHECKSUMS = ("auto", "write", "check", "never")

_SHOWN = 50


@dataclass(frozen=True, slots=True)
class Verification(Printable):
    """What `mfload.verify` found. It prints well, is true if nothing is wrong, and has `as_dict()`.

    Attributes:
        problems: All that is wrong; each has `what`, `file`, `tensor`, `expected` and `found`.
        notes: What is worth a word and is not wrong.
        checked: What was looked at: "headers", "index", "checksums", "sha256", "against".
        files: Number of files.
        tensors: Number of tensors.
        bytes: Bytes of the tensors.
        read_bytes: Bytes of data that were read.
        seconds: How long it took.
        manifest: Path of the manifest that was written or compared with; None if none was.
    """

    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    checked: tuple[str, ...]
    files: int
    tensors: int
    bytes: int
    read_bytes: int
    seconds: float
    manifest: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with what was checked."""
        return not self.problems

    @property
    def data_checked(self) -> bool:
        """Whether the data was compared with anything, or the headers alone were looked at."""
        return not {"checksums", "sha256", "against"}.isdisjoint(self.checked)

    def __bool__(self) -> bool:
        return self.ok

    def as_dict(self) -> dict[str, Any]:
        """As plain data: "ok", "data_checked" and all attributes by name.

        Each problem has "what", "file", "tensor", "expected" and "found", null where not known.
        """
        problems = [
            {key: value if isinstance(value, int | None) else str(value)
             for key, value in each._asdict().items()}
            for each in self.problems
        ]  # fmt: skip
        fields = {name: getattr(self, name) for name in Verification.__slots__}
        lists = {"notes": list(self.notes), "checked": list(self.checked), "problems": problems}
        return {"ok": self.ok, "data_checked": self.data_checked, **fields, **lists}

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, as they are printed."""
        count = len(self.problems)
        if count:
            outcome = f"{count} problem{'s' * (count != 1)}"
        elif self.data_checked:
            outcome = "all is well"
        else:
            outcome = "headers only: they are sound; the data was not compared with anything"
        held = f"{self.tensors} tensors in {self.files} files, {human(self.bytes)}"
        rows = [("verified", outcome), ("holds", held), ("checked", ", ".join(self.checked))]
        if self.read_bytes:
            speed = self.read_bytes / self.seconds / 2**30 if self.seconds else 0.0
            read = f"{human(self.read_bytes)} in {self.seconds:.3g} s, {speed:.2f} GiB/s"
            rows.append(("read", read))
        if self.manifest is not None:
            rows.append(("manifest", self.manifest))
        rows += [("problem", str(each)) for each in self.problems[:_SHOWN]]
        if count > _SHOWN:
            rows.append(("problem", f"… and {count - _SHOWN} more"))
        return rows + [("note", note) for note in self.notes]


def verify(
    path: Path | Sequence[Path],
    *,
    against: Path | Sequence[Path] | None = None,
    checksums: Checksums = "auto",
    manifest: str | os.PathLike[str] | Manifest | None = None,
    sha256: Sums = None,
    overwrite: bool = False,
    progress: Progress = False,
    options: Options | None = None,
) -> Verification:
    """Checks a checkpoint.

    The headers are always checked, and the index against them. A manifest that lies beside the
    checkpoint is compared with. Everything that is hashed is read once; `against` reads the
    checkpoint once more, with the other one beside it.

    Args:
        path: As for `load`.
        against: Another checkpoint, however it is sharded: every tensor must have the same bits.
        checksums: "auto" compares with the manifest if there is one, "check" requires one,
            "write" makes one, "never" ignores it.
        manifest: Path of the manifest, or one that was read. Default: `<name>.checksums.json`
            beside the checkpoint.
        sha256: The SHA-256 of the files: 64 digits for one file, the path of a list as `sha256sum`
            writes it, `{file: digits}`, or "auto" for what the cache of the Hugging Face client
            says. The cache also counts wherever checksums are written or compared.
        overwrite: Whether "write" may replace a manifest.
        progress: True for a bar, or a function of (bytes done, bytes in all).
        options: Engine, threads and timeout; see `mfload.Options`.

    Returns:
        What was found. Damage is a problem in it, not an error.

    Raises:
        UsageError: An argument is invalid.
        SourceError: Nothing is at the path, or the manifest or the list can't be read.
        FormatError: Several checkpoints are at the path, or the manifest or the list is malformed.
        TargetError: The manifest can't be written, or is there already.
        FrameworkMissingError: Checksums need the package xxhash.
        LoadTimeoutError: The timeout passed.
    """
    start = time.perf_counter()
    how = started(options)
    check_choice("checksums", checksums, CHECKSUMS)
    seen = how.deadline.bound(lambda: headers.inspect(path), "reading headers")
    check = _DataCheck(seen, path, checksums, manifest, overwrite=overwrite)
    check.expect(sha256)
    other = comparison = None
    total = sum(part.nbytes for part in check.ranges().values())
    read = total
    if against is not None:
        other = how.deadline.bound(lambda: headers.inspect(against), "reading headers")
        comparison = _pairs(seen, other)
        total += comparison.nbytes
        read += 2 * comparison.nbytes
    with shown(progress, total) as advance:
        check.run(how, advance)
        if other is not None and comparison is not None:
            _compare(seen, other, comparison, how, advance)
    lies = check.write(overwrite=overwrite) if checksums == "write" else check.path
    checked = {
        "headers": True,
        "index": seen.index is not None,
        "checksums": checksums == "write" or check.known is not None,
        "sha256": bool(check.sums),
        "against": other is not None,
    }
    found = Verification(
        tuple(seen.problems),
        tuple(dict.fromkeys(seen.notes)),
        tuple(what for what, done in checked.items() if done),
        len(seen.files),
        len(seen.tensors),
        sum(info.nbytes for info in seen.tensors.values()),
        read,
        time.perf_counter() - start,
        lies,
    )
    at = manifests.beside(path, seen.files, seen.index)
    if found.data_checked or seen.problems or checksums != "auto" or os.path.lexists(at):
        return found
    note = f"no manifest at {at}; checksums='write' makes one"
    return replace(found, notes=(*found.notes, note))


def check_save_target(path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Raises what `with_manifest` would raise after a save to a path, before it."""
    place = targets.resolve(path).path
    manifests.check_target(manifests.beside(place, [place]), overwrite=overwrite)


def with_manifest(saved: Saved, *, write: bool) -> Saved:
    """Reads back what was saved and writes a manifest beside it, or warns of one that is there."""
    path = saved.files[-1]
    at = manifests.beside(path, saved.files)
    if write:
        found = verify(path, checksums="write", overwrite=True)
        if not found.ok:
            raise errors.WriteError(f"what was saved is damaged: {found.problems[0]}", file=path)
        note = f"checksums written to {at}"
    elif os.path.lexists(at):
        note = f"the manifest {at} was written for other data; save(checksums=True) replaces it"
    else:
        return saved
    return replace(saved, notes=(*saved.notes, note))


class _DataCheck:
    """Hashes a checkpoint's data and compares it with a manifest and with SHA-256 of files.

    The manifest to compare with is `known`; `path` is where it lies or is to be written. `sums` are
    the SHA-256 that files should have, by path.
    """

    def __init__(
        self,
        seen: Inspection,
        path: Path | Sequence[Path],
        checksums: Checksums,
        given: str | os.PathLike[str] | Manifest | None,
        *,
        overwrite: bool,
    ) -> None:
        self.known: Manifest | None = None
        self.path: str | None = None
        self.sums: dict[str, PublishedSum] = {}
        self._seen = seen
        self._writes = checksums == "write"
        self._home = manifests.home(path, seen.files)
        self._tensors: list[TensorInfo] = []
        self._whole: set[int] = set()  # Numbers of the files that are hashed as a whole.
        self._digests: dict[str, str] = {}
        self._hashed: dict[str, str] = {}
        if checksums == "never":
            if given is not None:
                wanted = 'checksums="auto", "check" or "write"'
                raise errors.UsageError("a manifest is given and not used", expected=wanted)
        elif isinstance(given, Manifest):
            if self._writes:
                wanted, found = "a path", repr(given)
                raise errors.UsageError("the manifest to write", expected=wanted, found=found)
            self.known, self.path = given, given.path
        else:
            beside = manifests.beside(path, seen.files, seen.index)
            self.path = beside if given is None else manifests.checked_path("manifest", given)
            if self._writes:
                files = [*seen.files, *([seen.index] if seen.index else [])]
                manifests.check_target(self.path, overwrite=overwrite, files=files)
            else:
                self._read(self.path, optional=checksums == "auto" and given is None)

    def _read(self, path: str, *, optional: bool) -> None:
        try:
            self.known = Manifest.read(path)
        except (errors.SourceError, errors.FormatError) as error:
            self.path = None
            # What is wrong with the checkpoint itself must not hide behind its manifest.
            if not optional and not self._seen.problems:
                raise
            foreign = isinstance(error, errors.FormatError) and not manifests.is_manifest(path)
            if optional and foreign:
                self._seen.notes.append(f"{path} is not a manifest of mfload: it was not compared")
            elif not optional or not isinstance(error, errors.SourceNotFoundError):
                self._seen.problems.append(Problem.of(error))

    def expect(self, sha256: Sums) -> None:
        """Takes stock of what the data should be; what can't be right is a problem already."""
        seen, known = self._seen, self.known
        self.sums = published.expected(sha256, seen.files)
        if sha256 is not None and not isinstance(sha256, Mapping):
            missing = [file for file in seen.files if file not in self.sums]
            seen.problems += [Problem("no SHA-256 is known of the file", file) for file in missing]
        if self._writes or known is not None:
            self._tensors = list(seen.tensors.values())
            # What the user gave counts most, then the cache of the hub.
            self.sums = published.expected("auto", seen.files) | self.sums
        if known is not None:
            names = {self._relative(file): file for file in seen.files}
            for name in names.keys() & known.files.keys():
                digest = known.files[name].sha256
                self.sums.setdefault(names[name], PublishedSum(digest, "the manifest"))
            others = len(names.keys() ^ known.files.keys())
            if known.files and others:
                seen.notes.append(
                    f"the manifest knows other files than these ({others}); tensors were compared"
                )
            comparable = dict(seen.tensors)
            for info, *values in known.differences(self._tensors):
                seen.add("the tensor is not as in the manifest", info, *values)
                del comparable[info.name]
            self._tensors = list(comparable.values())
            for name in known.tensors.keys() - seen.tensors.keys():
                seen.problems.append(Problem("a tensor of the manifest is missing", None, name))
        numbered = enumerate(seen.sources)
        self._whole = {n for n, file in numbered if self._writes or file.path in self.sums}

    def _relative(self, file: str) -> str:
        """What a manifest calls a file."""
        return os.path.relpath(os.path.abspath(file), self._home).replace(os.sep, "/")

    def ranges(self) -> dict[int, Range]:
        """What is read of each file, by number."""
        found: dict[int, Range] = {}
        for part in map(span, self._tensors):
            known = found.get(part.source, part)
            start = min(known.offset, part.offset)
            stop = max(known.offset + known.nbytes, part.offset + part.nbytes)
            found[part.source] = Range(part.source, start, stop - start)
        sizes = {number: self._seen.sources[number].size for number in self._whole}
        return found | {number: Range(number, 0, size) for number, size in sizes.items()}

    def run(self, how: LoadOptions, advance: Advance) -> None:
        """Hashes and compares; a file that can't be read is a problem, and the others go on."""
        seen, ranges = self._seen, self.ranges()
        left = sorted(ranges)
        while left:
            rows = [info for info in self._tensors if span(info).source in left]
            hasher = Hasher(rows, {n: ranges[n].nbytes for n in left if n in self._whole})
            failed: str | None = None
            try:
                parts = [ranges[number] for number in left]
                seen.notes += scan(seen.sources, parts, hasher, how, advance, interleave=True)
            except errors.SourceError as error:
                failed = error.file
                names = {seen.sources[number].path for number in left}
                if isinstance(error, errors.LoadTimeoutError) or failed not in names:
                    raise
                seen.problems.append(Problem.of(error))
            left = [number for number in left if seen.sources[number].path != failed]
            done = [number for number in left if hasher.complete(number)]
            for number in done:
                self._take(number, rows, hasher)
            # Files that the failure of another one cut off are read again.
            left = [number for number in left if number not in done]
        self._compare()

    def _take(self, number: int, rows: Sequence[TensorInfo], hasher: Hasher) -> None:
        source = self._seen.sources[number]
        try:
            source.check()
        except errors.SourceError as error:
            self._seen.problems.append(Problem.of(error))
            return
        names = [info.name for info in rows if span(info).source == number]
        self._digests |= {name: hasher.tensor(name) for name in names}
        if number in self._whole:
            self._hashed[source.path] = hasher.file(number)

    def _compare(self) -> None:
        seen = self._seen
        if self.known is not None:
            hashed = [seen.tensors[name] for name in self._digests]
            for info, *values in self.known.differences(hashed, self._digests):
                seen.add("the tensor's bytes have changed", info, *values)
        for file, digest in self._hashed.items():
            known = self.sums.get(file, PublishedSum(digest, ""))
            if known.digest != digest:
                what, expected = "the file's SHA-256 differs", f"{known.digest} ({known.origin})"
                seen.problems.append(Problem(what, file, None, expected, digest))

    def write(self, *, overwrite: bool) -> str | None:
        """Writes the manifest if nothing is wrong; returns its path, or None."""
        seen, path = self._seen, self.path
        if path is None or seen.problems:
            seen.notes.append("no manifest was written, since there are problems")
            return None
        files = {
            self._relative(source.path): FileEntry(source.size, self._hashed[source.path])
            for source in seen.sources
        }
        made = Manifest.of(seen.tensors, self._digests, files)
        for name in files.keys() - made.files.keys():
            note = f"the manifest leaves out the file {name!a}, whose name is no text"
            seen.notes.append(f"{note}; its tensors are in it")
        made.write(path, overwrite=overwrite)
        return path


def _pairs(seen: Inspection, other: Inspection) -> Comparison:
    """The tensors of both checkpoints; what differs in the headers is a problem."""
    problems = seen.problems
    problems += [each._replace(what=f"the other one: {each.what}") for each in other.problems]
    pairs: list[Pair] = []
    for name, info in seen.tensors.items():
        match = other.tensors.get(name)
        if match is None:
            seen.add("the tensor is only here", info)
            continue
        forms = [f"{row.dtype} {list(row.shape)}" for row in (info, match)]
        if forms[0] == forms[1] and info.nbytes == match.nbytes:
            pairs.append(Pair(info, match))
        else:
            what = "the tensors differ in dtype or shape"
            problems.append(Problem(what, other.file_of(match), name, *forms))
    for name, info in other.tensors.items():
        if name not in seen.tensors:
            problems.append(Problem("the tensor is only there", other.file_of(info), name))
    return Comparison(seen.sources, other.sources, pairs, values=False)


def _compare(
    seen: Inspection, other: Inspection, comparison: Comparison, how: LoadOptions, advance: Advance
) -> None:
    try:
        seen.notes += comparison.run(how, advance)
        for pair in comparison.pairs:
            if pair.left.name in comparison.first:
                place, expected, found = comparison.first_difference(pair)
                what, file = f"the tensors differ from {place} on", other.file_of(pair.right)
                seen.problems.append(Problem(what, file, pair.left.name, expected, found))
    except errors.SourceError as error:
        if isinstance(error, errors.LoadTimeoutError):
            raise
        seen.problems.append(Problem.of(error))
