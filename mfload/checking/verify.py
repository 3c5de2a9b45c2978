"""`verify`: whether a checkpoint is whole, by its headers, its checksums, or another copy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from mfload import deprecated, errors, sources
from mfload.checking import headers, manifest as manifests, published, scan as scanning
from mfload.checking.checksums import OTHER_DATA, Hasher
from mfload.checking.compare import Comparison, Pair, pairs
from mfload.checking.manifest import ALGORITHMS, FileEntry, Manifest
from mfload.checking.published import PublishedSum, Sums
from mfload.checking.scan import Advance, throughput
from mfload.errors import counted
from mfload.formats import base
from mfload.formats.base import Checksum
from mfload.formats.checkpoint import Headers, Problem
from mfload.loading.execute import reader_threads
from mfload.options import LoadOptions, Options, started
from mfload.planning.blocks import Block
from mfload.planning.lots import joined
from mfload.progress import shown
from mfload.report import Printable, human
from mfload.runtime import gc_paused
from mfload.saving import manifest_files, publishing
from mfload.sources import PathOrBytes, is_source
from mfload.sources.base import Source

Mode = Literal["auto", "write", "check"]

_SHOWN = 50
_MANIFEST = "the manifest"  # Origin of a sum.
_OTHER_SUM = "the file's SHA-256 differs"


@dataclass(frozen=True, slots=True)
class Verification(Printable):
    """What `mfload.verify` found. It prints well, is true if nothing is wrong, and has `as_dict()`.

    Attributes:
        problems: All that is wrong; each has `what`, `file`, `tensor`, `expected` and `found`.
        notes: What is worth knowing and not wrong.
        checked: What was looked at: "headers", "index", "checksums", "crc32", "sha256",
            "against".
        files: Number of files.
        tensors: Number of tensors.
        bytes: Bytes of the tensors.
        read_bytes: Bytes of data that were read.
        seconds: How long it took.
        manifest: Path of the manifest that was written or compared with; None if none was.
    """

    DERIVED = ("ok", "data_checked")

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
        return not {"checksums", "crc32", "sha256", "against"}.isdisjoint(self.checked)

    def __bool__(self) -> bool:
        return self.ok

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, as they are printed."""
        outcome = "headers only: they are sound; the data was not compared with anything"
        if self.problems:
            outcome = counted(len(self.problems), "problem")
        elif self.data_checked:
            outcome = "all is well"
        tensors, files = counted(self.tensors, "tensor"), counted(self.files, "file")
        held = f"{tensors} in {files}, {human(self.bytes)}"
        rows = [("verified", outcome), ("holds", held), ("checked", ", ".join(self.checked))]
        if self.read_bytes:
            rows.append(("read", throughput(self.read_bytes, self.seconds)))
        if self.manifest is not None:
            rows.append(("manifest", self.manifest))
        rows += [("problem", str(each)) for each in self.problems[:_SHOWN]]
        if (more := len(self.problems) - _SHOWN) > 0:
            rows.append(("problem", f"… and {more} more"))
        return rows + [("note", note) for note in self.notes]


def verify(
    path: PathOrBytes | Sequence[PathOrBytes],
    *,
    against: PathOrBytes | Sequence[PathOrBytes] | None = None,
    mode: Literal["auto", "write", "check"] = "auto",
    checksums: bool | Literal["xxh3", "sha256", "both"] = True,
    manifest: str | os.PathLike[str] | Manifest | None = None,
    sha256: str | os.PathLike[str] | Mapping[str, str] | None = None,
    overwrite: bool = False,
    progress: bool | Callable[[int, int], None] = False,
    options: Options | None = None,
) -> Verification:
    """Checks a checkpoint.

    The headers are always checked, and the index against them. A manifest that lies beside the
    checkpoint is compared with, and the checksums of archives and of `peer://` seeds. Everything
    that is hashed is read once; `against` reads the checkpoint once more, with the other one
    beside it.

    Args:
        path: As for `load`.
        against: Another checkpoint, however it is sharded: every tensor must have the same bits.
        mode: "auto" compares with the manifest if there is one, "check" requires one, "write"
            makes one.
        checksums: Which checksums are written, or compared with a manifest: "xxh3" of each tensor,
            "sha256" of each file, or "both", the same as True. XXH3 is hashed as fast as memory is
            read, SHA-256 several times slower. "both" compares what the manifest has. False ignores
            the manifest, and the checksums of archives and seeds.
        manifest: Path of the manifest, or one that was read. Default: the whole name of the
            checkpoint and `.checksums.json`, as in `model.safetensors.checksums.json`, in its
            directory. If the path is a symbolic link, in the directory of the file that it leads
            to; in a snapshot of the Hugging Face cache, in the snapshot.
        sha256: The SHA-256 of the files: 64 digits for one file, the path of a list as `sha256sum`
            writes it, `{file: digits}`, or "auto" for what the cache of the Hugging Face client
            says. The cache also counts wherever SHA-256 sums are written or compared.
        overwrite: Whether "write" may replace a manifest.
        progress: True for a bar, or a function of (bytes done, bytes in all).
        options: Engine, threads and timeout, and `max_host_overhead` for `against`; see
            `mfload.Options`.

    Returns:
        What was found. Damage is a problem in it, not an error.

    Raises:
        UsageError: An argument is invalid, or the manifest has no checksums of the algorithm.
        SourceError: Nothing is at the path, or the manifest or the list can't be read.
        SourceChangedError: The checkpoint was replaced before its manifest could be written, so
            that none was.
        FormatError: Several checkpoints are at the path, or the manifest or the list is malformed.
        TargetError: The manifest can't be written, or is there already.
        FrameworkMissingError: Checksums need the package xxhash.
        LoadTimeoutError: The timeout passed.
    """
    given = locals()
    if checksums in deprecated.MODES:  # pyright: ignore[reportUnnecessaryContains]
        return verify(**deprecated.renewed("mfload.verify", given) or {})
    start = time.perf_counter()
    how = started(options)
    errors.check_choice("mode", mode, get_args(Mode))
    if not isinstance(checksums, bool):
        errors.check_choice("checksums", checksums, ALGORITHMS)
    seen = _headers(path, how)
    choose = partial(_chosen, seen, manifest, mode, checksums, how, overwrite=overwrite)
    chosen = how.deadline.bound(choose, "reading the manifest", seen.found.name)
    check = _Check(seen, chosen, how, mode, checksums)
    check.expect(sha256)
    check.choose_ranges()
    total = check.read_bytes
    other = None if against is None else _headers(against, how)
    comparison = None
    if other is not None:
        with gc_paused():
            both = _pairs(seen, other)
            comparison = Comparison(seen.sources, other.sources, both, values=False)
        total += comparison.nbytes
        check.read_bytes += 2 * comparison.nbytes
    with shown(progress, total) as advance:
        check.hash(advance)
        check.judge()
        if other is not None and comparison is not None:
            _compare(seen, other, comparison, how, advance)
    check.look_again()
    check.write(overwrite=overwrite, compared=other is not None)
    return check.result(start, compared=other is not None)


class _Check:
    """A check of a checkpoint by checksums.

    What has a digest has a key: a tensor its name, a file its number, and a checksum in a file
    (number of the file, checksum).

    Attributes:
        seen: The headers, with all problems and notes so far.
        read_bytes: Bytes of data that are read.
        of_tensors: Whether digests of tensors are compared with a manifest, or written to one.
        of_files: The same of files.
    """

    def __init__(
        self, seen: Headers, chosen: _Chosen, how: LoadOptions, mode: str, checksums: bool | str
    ) -> None:
        known = chosen.known
        self.seen, self.read_bytes = seen, 0
        self.of_tensors = checksums != "sha256" and (known is None or known.hashed)
        self.of_files = checksums != "xxh3" and (mode == "write" or known is not None)
        self._chosen, self._how, self._mode, self._by_sums = chosen, how, mode, bool(checksums)
        self._expected: dict[Any, PublishedSum] = {}
        self._differing: list[Problem] = []  # From the manifest.
        self._sums: list[tuple[int, Checksum]] = []  # In the files themselves.
        self._compared: set[int] = set()  # Sources that compare what is read of them.
        self._keys: dict[int, list[Any]] = {}  # What is hashed of each file, by its number.
        self._ranges: dict[int, list[Block]] = {}  # What is read of it for that.
        self._digests: dict[Any, str] = {}
        self._written: str | None = None

    def expect(self, sha256: Sums) -> None:
        """Finds the digests that are known; what the headers show to differ is a problem."""
        seen, known, files = self.seen, self._chosen.known, self.seen.found.names
        sums = published.expected(sha256, files)
        if sha256 is not None and not isinstance(sha256, Mapping):
            missing = [file for file in files if file not in sums]
            seen.problems += [Problem("no SHA-256 is known of the file", file) for file in missing]
        if self.of_files:
            # What the user gave counts most, then the cache of the hub.
            sums = published.expected("auto", files) | sums
        if known is not None:
            self._expect_known(known, sums)
        for number, source in enumerate(seen.sources):
            if source.name in sums:
                self._expected[number] = sums[source.name]

    def _expect_known(self, known: Manifest, sums: dict[str, PublishedSum]) -> None:
        """Takes the digests of a manifest: of tensors, and of files that `sums` lacks."""
        seen, expected, differing = self.seen, self._expected, self._differing
        names = manifests.relative_names(seen.found.names, seen.found.index_file)
        for file, name in names.items():
            if self.of_files and name in known.files:
                sums.setdefault(file, PublishedSum(known.files[name].sha256, _MANIFEST))
        single = seen.found.index_file is None and not seen.found.whole
        others = known.files.keys() ^ {*names.values()}
        if part := single and manifests.part_of(known, names.values()):
            seen.notes.append("the manifest has other files, too, which were not checked")
            others = {*names.values()} - known.files.keys()
        if not self.of_tensors:
            what = "the file is in the manifest or in the checkpoint, and not in both"
            seen.problems += [Problem(what, name) for name in sorted(others)]
        elif known.files and others:
            seen.notes.append(
                f"the manifest knows other files than these ({len(others)}); tensors were compared"
            )
        for name in seen.tensors if self.of_tensors else ():
            if name in known.tensors and (digest := known.tensors[name].digest) is not None:
                expected[name] = PublishedSum(digest, _MANIFEST)
        for info, wanted, found in known.differences(seen.tensors.values()):
            what = "the tensor is not as in the manifest"
            differing.append(Problem(what, seen.file_of(info), info.name, wanted, found))
            expected.pop(info.name, None)
        what = "a tensor of the manifest is missing"
        missing = [name for name in known.tensors if name not in seen.tensors and not part]
        differing += [Problem(what, None, name) for name in missing]

    def choose_ranges(self) -> None:
        """Chooses what is read and hashed."""
        seen = self.seen
        hashed: dict[Any, None] = dict.fromkeys(self._expected)
        if self._mode == "write":
            hashed |= dict.fromkeys(seen.tensors if self.of_tensors else ())
            hashed |= dict.fromkeys(range(len(seen.sources)) if self.of_files else ())
        if self._by_sums:
            self._sums = _own_sums(seen)
            of = enumerate(seen.sources)
            self._compared = {n for n, each in of if getattr(each, "compares", False)}
        for info in seen.tensors.values() if self._compared else ():
            if info.pieces[0].source in self._compared:
                hashed[info.name] = None
        for key in (*hashed, *self._sums):
            number = seen.tensors[key].pieces[0].source if isinstance(key, str) else key
            number = number if isinstance(number, int) else number[0]
            self._keys.setdefault(number, []).append(key)
        self._ranges = {number: self._ranges_of(number) for number in self._keys}
        self.read_bytes = sum(part.nbytes for some in self._ranges.values() for part in some)

    def _ranges_of(self, number: int) -> list[Block]:
        """What is read of a file: all of it, or ranges of whole tensors, as many as readers.

        A tensor is hashed by one thread after the other, and so is a file.
        """
        source, keys = self.seen.sources[number], self._keys[number]
        if not all(isinstance(key, str) for key in keys):
            return [Block(number, 0, source.size, ())]
        pieces = [
            piece
            for key in keys
            for piece in self.seen.tensors[key].pieces
            if piece.stored is None or piece.stored.inline is None
        ]
        threads = self._how.threads or reader_threads(direct=False)
        most = max(scanning.BLOCK, sum(piece.nbytes for piece in pieces) // threads + 1)
        return [block for block, _ in joined(pieces, source.costs.merge_gap, most)]

    def hash(self, advance: Advance) -> None:
        """Reads and hashes; what can't be read is a problem."""
        seen, digests = self.seen, dict[Any, str]()
        rounds = [sorted(self._keys)]
        for numbers in rounds:
            wanted = [key for number in numbers for key in self._keys[number]]
            hasher = Hasher(
                [seen.tensors[key] for key in wanted if isinstance(key, str)],
                {key: seen.sources[key].size for key in wanted if isinstance(key, int)},
                [key for key in wanted if isinstance(key, tuple)],
            )
            parts = [part for number in numbers for part in self._ranges[number]]
            try:
                seen.notes += scanning.scan_ranges(seen.sources, parts, hasher, self._how, advance)
            except errors.LoadTimeoutError:
                raise
            except errors.ChecksumError as error:  # Of a source that compares what it reads.
                seen.problems.append(Problem.of(error))
                return
            except errors.SourceError as error:
                if len(numbers) == 1:
                    seen.problems.append(Problem.of(error))
                else:
                    # Each by itself: the failure of one file cut the others off.
                    rounds += [[number] for number in numbers]
            else:
                digests |= hasher.digests()
        self._digests = digests

    def judge(self) -> None:
        """Adds a problem for each digest that is not as it should be."""
        seen, known, digests, differing = (
            self.seen,
            self._chosen.known,
            self._digests,
            self._differing,
        )
        for key, (digest, origin) in self._expected.items():
            found = digests.get(key, digest)
            if found != digest and isinstance(key, str):
                what, file = "the tensor's bytes have changed", seen.file_of(seen.tensors[key])
                differing.append(Problem(what, file, key, digest, found))
            elif found != digest:
                file, wanted = seen.sources[key].name, f"{digest} ({origin})"
                told = differing if origin == _MANIFEST else seen.problems
                told.append(Problem(_OTHER_SUM, file, None, wanted, found))
        if differing and known is not None:
            look = partial(self._told, known)
            seen.problems += self._how.deadline.bound(look, "reading headers", known.path)
        for number, each in self._sums:
            if (found := digests.get((number, each), each.crc32)) != each.crc32:
                info = seen.tensors[each.tensor]
                seen.add("the CRC-32 differs from the archive's", info, each.crc32, found)

    def _told(self, known: Manifest) -> Sequence[Problem]:
        """What differs, with a single problem for the files that the manifest is not of."""
        seen, differing = self.seen, self._differing
        if known.hashed and all(each.what == _OTHER_SUM for each in differing):
            return differing  # Only SHA-256 sums differ: the tensors are those of the manifest.
        numbers = {source.name: number for number, source in enumerate(seen.sources)}
        named = [numbers.get(each.file or "") for each in differing]
        # A missing tensor may belong to any file.
        looked = (
            range(len(numbers)) if None in named else sorted({n for n in named if n is not None})
        )
        others = manifests.others(known, looked, seen.sources, seen.tensors)
        if not others:
            return differing
        file, (expected, found) = next(iter(others.items()))
        left = [each for each in differing if each.file in numbers and each.file not in others]
        left = [] if seen.found.directory is not None else left  # A directory is one checkpoint.
        return [Problem(OTHER_DATA, file, None, expected, found), *left]

    def look_again(self) -> None:
        """Puts in place of problems that sources changed since they were read, if any did."""
        seen = self.seen
        if seen.problems:
            at = [*seen.sources, seen.found.index, self._chosen.read_from]
            look = partial(_replaced, list(filter(None, at)))
            seen.problems[:] = self._how.deadline.bound(look, "looking again") or seen.problems

    def write(self, *, overwrite: bool, compared: bool) -> None:
        """Writes the manifest if one is asked for and nothing is wrong."""
        seen, chosen = self.seen, self._chosen
        if chosen.target is not None and not seen.problems:
            self._write(chosen.target, overwrite=overwrite)
        elif chosen.target is not None:
            seen.notes.append("no manifest was written, since there are problems")
        said = self._digests or chosen.known or compared or seen.problems
        if self._by_sums and self._mode == "auto" and not said:
            beside = "" if chosen.beside is None else f" at {chosen.beside}"
            seen.notes.append(f"there is no manifest{beside}: mode='write' makes one")

    def _write(self, target: Any, *, overwrite: bool) -> None:
        """Writes the manifest of what was hashed, unless the files were replaced meanwhile."""
        seen, digests, deadline = self.seen, self._digests, self._how.deadline
        names = manifests.relative_names(seen.found.names, seen.found.index_file)
        entries = {
            names[source.name]: FileEntry(source.size, digests[number])
            for number, source in enumerate(seen.sources)
            if self.of_files
        }
        numbers = range(len(seen.sources))
        identity = manifests.identify(numbers, seen.sources, seen.tensors)
        by_name = {names[seen.sources[number].name]: each for number, each in identity.items()}
        made = Manifest.of(seen.tensors, digests if self.of_tensors else None, entries, by_name)
        look = partial(sources.together, _check_now, seen.sources)
        check = partial(deadline.bound, look, "looking at the files again")
        files = [each.file for each in seen.sources if each.file is not None]
        text = made.text().encode()
        if is_source(target):
            from mfload.saving import uploads

            there: Any = target
            uploads.write_manifest(there, text, deadline, overwrite=overwrite, check=check)
            self._written = there.name
            return
        publishing.write_manifest(target, text, overwrite=overwrite, check=check, files=files)
        self._written = target
        for path in self._chosen.replaced:
            with errors.AsTarget(path, "remove the old manifest"):
                os.unlink(path)
            seen.notes.append(f"removed {path}, the manifest with its earlier name")

    def result(self, start: float, *, compared: bool) -> Verification:
        """What was found since `start`; `compared`: with another checkpoint."""
        seen, known = self.seen, self._chosen.known
        by_manifest = self._mode == "write" or (known is not None and self.of_tensors)
        checked = {
            "headers": True,
            "index": seen.found.index_file is not None,
            "checksums": by_manifest or bool(self._compared),
            "crc32": bool(self._sums),
            "sha256": any(isinstance(key, int) for key in self._expected),
            "against": compared,
        }
        columns = seen.tensors.columns
        others = columns.others.values()  # Of these, the column has the bytes of the first piece.
        return Verification(
            tuple(seen.problems),
            tuple(dict.fromkeys(seen.notes)),
            tuple(what for what, done in checked.items() if done),
            len(seen.found.files),
            len(seen.tensors),
            sum(columns.nbytes) + sum(info.nbytes - info.pieces[0].nbytes for info in others),
            self.read_bytes,
            time.perf_counter() - start,
            known.path if known is not None else self._written,
        )


def _headers(path: Any, how: LoadOptions) -> Headers:
    look = partial(headers.inspect, path, how)
    return how.deadline.bound(look, "reading headers", sources.shown(path))


def _replaced(given: Sequence[Source]) -> list[Problem]:
    """A problem for each source that changed since it was read, so that it can't be judged."""
    found: list[Problem] = []
    for source in given:
        try:
            sources.check_now(source)
        except errors.SourceChangedError as error:
            found.append(Problem.of(error))
        except errors.SourceError:
            continue
    return found


def _own_sums(seen: Headers) -> list[tuple[int, Checksum]]:
    """The checksums in the files themselves, with the number of the file."""
    found: list[tuple[int, Checksum]] = []
    if seen.found.directory is not None:
        return found
    for number, source in enumerate(seen.sources):
        of_format = getattr(base.find(source), "checksums", None)
        if of_format is not None:
            found += [(number, each) for each in of_format(source)]
    return found


class _Chosen(NamedTuple):
    """The manifest that a checkpoint is compared with, or the place of the one that is written.

    Attributes:
        target: A path, or an object of a store.
        read_from: Where `known` was read from.
        replaced: Paths of those that go when one is written.
        beside: Where one would lie.
    """

    known: Manifest | None = None
    target: Any = None
    read_from: Source | None = None
    replaced: Sequence[str] = ()
    beside: str | None = None


def _check_now(source: Any) -> None:
    """Raises if a file is another one by now; some ask again only if they are told to."""
    getattr(source, "check_now", source.check)()


def _chosen(
    seen: Headers,
    manifest: Any,
    mode: str,
    checksums: bool | str,
    how: LoadOptions,
    *,
    overwrite: bool,
) -> _Chosen:
    writes, given, notes = mode == "write", manifest, list[str]()
    if not checksums and mode != "auto":
        what = f"mode={mode!r} needs checksums"
        raise errors.UsageError(what, expected="checksums=True", found=repr(checksums))
    if manifest is None and checksums:
        given, notes = _manifest_beside(seen, written=writes)
    if (writes and isinstance(given, Manifest)) or (not checksums and given is not None):
        wanted = "a manifest for mode auto or check, the path of one for write"
        raise errors.UsageError("the manifest is not used", expected=wanted, found=repr(given))
    if writes and isinstance(given, str) and sources.is_store(given):
        given = sources.find(given, how)
    in_store = hasattr(given, "access")
    if (writes and is_source(given) and not in_store) or (given is None and mode != "auto"):
        what = "no manifest can lie beside this checkpoint, or be written there"
        what = "; ".join([what, *notes])
        raise errors.UsageError(what, file=seen.found.name, expected="manifest=, the path of one")
    if writes and in_store:
        seen.notes += notes
        return _Chosen(target=given)
    if writes:
        target = manifests.text_path(given)
        found, replaced = seen.found, list[str]()
        if manifest is None:
            of = found.names, found.index_file
            replaced = manifests.older(*of, whole=found.whole, tensors=lambda: seen.tensors)
        for each in replaced:
            manifest_files.check_target(each, overwrite=overwrite)
        names = manifests.relative_names(found.names, found.index_file)
        manifests.check_beside(target, names.values(), overwrite=overwrite)
        seen.notes += notes
        return _Chosen(target=target, replaced=replaced)
    known = read_from = None
    if given is not None:
        required = mode == "check" or manifest is not None
        known, read_from = _read_manifest(seen, given, notes, required=required)
    seen.notes += notes
    kind = {"xxh3": known.hashed, "sha256": known.files} if known is not None else {}
    if known is not None and not kind.get(str(checksums), True):
        raise errors.UsageError(
            "the manifest has no checksums of this algorithm",
            file=known.path,
            expected="checksums='both', which compares what there is",
            found=checksums,
        )
    beside = None if given is None else str(getattr(given, "name", given))
    return _Chosen(known, read_from=read_from, beside=beside)


def _manifest_beside(seen: Headers, *, written: bool) -> tuple[Any, list[str]]:
    """The manifest of a checkpoint, or its place, and notes.

    None if no file can lie beside the checkpoint.
    """
    found = seen.found
    known = (each for each in found.files if not isinstance(each, str))
    files = [each for each in known if each.file is None]
    near = files[0].beside if files else None
    of: Any = {"files": found.names, "index": found.index_file, "whole": found.whole}
    try:
        if not written:
            return manifests.find(**of, tensors=lambda: seen.tensors, near=near)
        path = manifests.beside(**of)
        return path if near is None else near(os.path.basename(path)), []
    except (errors.UsageError, errors.SourceNotFoundError):
        return None, []


def _read_manifest(
    seen: Headers, given: Any, notes: Sequence[str], *, required: bool
) -> tuple[Manifest | None, Source | None]:
    """The manifest, and where it was read from."""
    if isinstance(given, Manifest):
        return given, None
    try:
        source = sources.find(given if is_source(given) else manifests.text_path(given))
        return Manifest.read(source), source
    except (errors.SourceError, errors.FormatError) as error:
        error.message = "; ".join([error.message, *notes])
        # What is wrong with the checkpoint itself must not hide behind its manifest.
        if required and not seen.problems:
            raise
        # Some servers refuse access to what does not exist.
        absent = isinstance(error, errors.SourceNotFoundError) and not (
            isinstance(given, str) and os.path.islink(given)
        )
        refused = is_source(given) and isinstance(error, errors.SourcePermissionError)
        if required or not (refused or absent):
            seen.problems.append(Problem.of(error))
        return None, None


def _pairs(seen: Headers, other: Headers) -> list[Pair]:
    """The tensors of both checkpoints; what differs in the headers is a problem."""
    problems = seen.problems
    problems += [each._replace(what=f"the other one: {each.what}") for each in other.problems]
    found: list[Pair] = []
    for pair in pairs(seen.tensors.values(), other.tensors.values()):
        info, match = pair
        if pair.same_dtype and pair.comparable:
            found.append(pair)
        else:
            what = "the tensors differ in dtype or shape"
            if pair.same_dtype and info.shape == match.shape and info.nbytes == match.nbytes:
                what = "tensors of an unknown dtype that are not one raw range can't be compared"
            forms = [f"{row.dtype} {list(row.shape)}" for row in pair]
            problems.append(Problem(what, other.file_of(match), info.name, *forms))
    for name in seen.tensors:
        if name not in other.tensors:
            seen.add("the tensor is only here", seen.tensors[name])
    for name in other.tensors:
        if name not in seen.tensors:
            file = other.file_of(other.tensors[name])
            problems.append(Problem("the tensor is only there", file, name))
    return found


def _compare(
    seen: Headers, other: Headers, comparison: Comparison, how: LoadOptions, advance: Advance
) -> None:
    try:
        seen.notes += comparison.run(how, advance)
    except errors.LoadTimeoutError:
        raise
    except errors.SourceError as error:
        seen.problems.append(Problem.of(error))
        return
    for _, info in comparison.pairs:
        if info.name in comparison.first:
            place, expected, found = comparison.first_difference(info)
            what, file = f"the tensors differ from {place} on", other.file_of(info)
            seen.problems.append(Problem(what, file, info.name, expected, found))
