"""Rewrites a checkpoint as safetensors: what `convert`, `align` and bundles have in common.

What is written is noted in a journal beside the drafts, so that a rewrite that was killed goes on
where it ended; the drafts get their names when they were read back and compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from mfload import dtypes, errors, sources
from mfload.checking import beside, copying, manifest, renaming
from mfload.checking.beside import Beside
from mfload.checking.checksums import Hasher, refuse
from mfload.checking.copying import Copier
from mfload.checking.manifest import Manifest
from mfload.checking.sealing import Seal
from mfload.checking.verify import verify
from mfload.formats import base, checkpoint, discovery, safetensors, structure
from mfload.formats.discovery import CheckpointFiles
from mfload.index import Index
from mfload.loading import session
from mfload.options import LoadOptions, Options, started
from mfload.planning import selection
from mfload.planning.memory import Ledger
from mfload.planning.request import Request
from mfload.planning.selection import Dtypes, Names
from mfload.progress import Progress, shown
from mfload.saving import layout, manifests
from mfload.saving.drafts import BLOCK, Draft
from mfload.saving.journal import Journal
from mfload.saving.layout import FileLayout
from mfload.saving.publishing import SaveTarget
from mfload.saving.save import open_target
from mfload.sources import PathOrBytes
from mfload.sources.memory import MemorySource
from mfload.trees import nested

# What a second run can go on after, so that drafts and journal stay.
_CONTINUES = (KeyboardInterrupt, errors.LoadTimeoutError, errors.SourceError)

# Names by which adapters and models of diffusers are found in a directory.
_NAMED = frozenset({"adapter_model", "diffusion_pytorch_model"})

# Of the ranges in which drafts are written: other ones are not gone on with.
_VERSION = 2


@dataclass(frozen=True, slots=True)
class RewriteWishes:
    """How a checkpoint is rewritten.

    Attributes:
        limit: Bytes of tensors a file; None for one file, or those of the source.
        align: Multiple of which the data begins.
        change: Makes other tensors of those of the source, which then lie in the order in which it
            gives them.
        beside: Whether what lies beside the weights goes to another directory as well.
        resume: Whether drafts are kept. Only then are other formats than safetensors taken.
    """

    limit: int | None
    align: int
    overwrite: bool
    progress: Progress
    options: Options | None
    names: Names = None
    dtype: Dtypes = None
    mapping: Any = None
    change: Callable[[Index], Index] | None = None
    beside: bool = False
    resume: bool = False


class _Rewrite:
    """A checkpoint that is rewritten, and where to.

    Attributes:
        index: The source, with the metadata to write.
        rows: What is written.
        others: Whether names differ from those of the source.
        place: The target.
        old: Where the manifest of the source lies; None if it has none.
        notes: What is worth knowing, in order.
    """

    def __init__(self, source: Any, target: Any, wishes: RewriteWishes, how: LoadOptions) -> None:
        if sources.is_url(source) and not sources.is_checkpoint(source):
            source = sources.place(source, how)  # Lists a directory of a store once.
        self.wishes, self._source, self._how = wishes, source, how
        self.index, self.sources = checkpoint.read_every(source, how)
        self.found = found = discovery.find(source, how)
        self.old, notes = _manifest_of(self.index, found)
        directory = found.directory is not None
        foreign = [s for s in self.sources if directory or base.find(s) is not safetensors]
        if foreign and not wishes.resume:
            raise errors.UsageError(
                "align rewrites safetensors files; mfload.convert takes other formats",
                file=foreign[0].name,
            )
        if wishes.names is not None:
            self.index = _part(self.index, wishes.names)
        if wishes.mapping is None:
            self.index.require(self.index.tensors)
        if wishes.change is not None:
            self.index = wishes.change(self.index)
        self.rows: Sequence[Any]  # Of `renaming.Row`.
        self.rows, self.others = renaming.entries(self.index, wishes.dtype, wishes.mapping)
        if self.others:
            self.index = renaming.without_tree(self.index)
        in_files = not foreign and wishes.names is None and wishes.change is None
        name = _named(self.index.files) if in_files else None
        where = _own_place(self.index.files, found) if target is None else target
        sealed = self.old is not None
        self.place = open_target(
            where, wishes.overwrite, name, sealed=sealed, options=wishes.options
        )
        self.notes = [*self.index.notes, *notes]
        if foreign:
            self._check_dtypes()
        in_files &= target is None or self.place.place.whole
        self.layouts = self._layouts(each_file=in_files)
        block = min(BLOCK, max((made.size for made in self.layouts), default=0))
        Ledger(how).readers(2 * block, how.threads, 1)  # Raises if there is no room for them.
        self.loaded = [row for row in self.rows if not row.simple and row.nbytes]
        session.check([Request(copying.info_of(row), row.dtype) for row in self.loaded], self.index)

    def _check_dtypes(self) -> None:
        for row in self.rows:
            if not row.dtype.known:
                raise errors.UnsupportedDtypeError(
                    "safetensors has no such dtype",
                    file=self.index.files[row.pieces[0].source],
                    tensor=row.name,
                    expected=dtypes.INSTEAD.get(row.dtype.name),
                    found=row.dtype.name,
                )

    def _layouts(self, *, each_file: bool) -> list[FileLayout]:
        wishes, rows, ranked = self.wishes, self.rows, self.wishes.change is None
        if wishes.limit is not None or len(self.sources) == 1 or not each_file:
            parts = layout.split(rows, wishes.limit, ranked=ranked)
            given = self.index.metadata, wishes.align
            return [layout.lay_out(part, *given, ranked=ranked) for part in parts]
        files: list[list[Any]] = [[] for _ in self.sources]
        for row in rows:
            files[row.pieces[0].source].append(row)
        # Each file keeps metadata of its own.
        metadata = [safetensors.read(file, n)[1] for n, file in enumerate(self.sources)]
        if self.others and metadata:
            tree = structure.KEY
            metadata = [m and {key: m[key] for key in m if key != tree} for m in metadata]
        return [layout.lay_out(*each, wishes.align) for each in zip(files, metadata, strict=True)]

    def known(self) -> Manifest | None:
        """The manifest of the source, compared with it unless that is done while copying."""
        if self.old is None:
            return None
        known = Manifest.read(self.old)
        if self.compared(known):
            return known
        given: Any = {"manifest": known, "options": self.wishes.options}
        held = {self.index.files[piece.source] for row in self.rows for piece in row.pieces}
        for problem in verify(self._source, **given).problems:
            if self.index.absent and problem.file not in held:
                continue  # It is of a shard that nothing is taken from.
            fields = problem._asdict()
            raise errors.ChecksumError(fields.pop("what"), **fields)
        return known

    def compared(self, known: Manifest) -> bool:
        """Whether the source is compared with its manifest while it is copied."""
        return known.hashed and not (self.loaded or self.others)

    def key(self) -> str:
        """Tells conversions apart: what is read, and what is written where."""
        key = hashlib.sha256(f"{_VERSION} {BLOCK}".encode())
        for each in self.sources:
            key.update(f"\n{each.name}\n{each.identity!r}".encode(errors="surrogatepass"))
        for row in self.rows if self.others else self.loaded:
            key.update(repr(row.pieces).encode())
        for made in self.layouts:
            key.update(made.header)
        return key.hexdigest()[:32]

    def copy(
        self, drafts: Sequence[Draft], journal: Journal | None, known: Manifest | None
    ) -> bytes | None:
        """Fills the drafts; returns their manifest, if the source has one."""
        how, index, sources = self._how, self.index, self.sources
        rows = self.rows
        compared = known is not None and self.compared(known)
        hasher = Hasher(rows if compared else ())
        seal = Seal(
            tensors=known is not None and known.hashed,
            files=known is not None and bool(known.files),
        )
        # Both passes tell of the same bytes, but for the headers.
        nbytes = sum(made.size for made in self.layouts) + sum(row.nbytes for row in rows)
        with shown(self.wishes.progress, nbytes) as advance:
            copier = Copier(drafts, self.layouts, sources, how, hasher, seal, journal)
            if copier.resumed:
                resumed = errors.amount(copier.resumed)
                self.notes.append(f"went on after {resumed} that an earlier run wrote")
            copier.run(advance)
            for draft in drafts:
                how.deadline.bound(draft.sync, "writing to the disk", draft.shown)
            if known is not None and compared:
                offenders = [*known.differences(rows, hasher.digests())]
                refuse(offenders, len(rows), known, index, sources, how.deadline)
            return seal.manifest(drafts, self.layouts, how, advance)


def rewrite(
    source: PathOrBytes | Sequence[PathOrBytes],
    target: str | os.PathLike[str] | None,
    wishes: RewriteWishes,
) -> tuple[Any, ...]:
    """Rewrites a checkpoint; returns the values of `Saved`."""
    start = time.perf_counter()
    how = started(wishes.options)
    work = _Rewrite(source, target, wishes, how)
    files, notes = [], work.notes
    narrow = dtypes.NARROW.keys() & {kind.name for kind, _ in work.index.columns.kinds}
    notes += [f"{n} as {dtypes.NARROW[n].wide}: safetensors has no {n}" for n in sorted(narrow)]
    if wishes.beside and work.place.place.whole:
        files, more = beside.find(work.found, work.place.place.directory)
        notes += more
    others = Beside(files, work.place)
    known = work.known()
    # Sums of the source are of all its bytes, read in one go. Bytes in memory have no identity.
    in_memory = any(isinstance(each, MemorySource) for each in work.sources)
    all_at_once = in_memory or (known is not None and work.compared(known))
    lasting = wishes.resume and work.place.lasting and not all_at_once
    key = work.key() if lasting else None
    waits = wishes.options is not None and wishes.options.timeout is not None
    making = work.place.drafts(work.layouts, key, how.deadline if waits else None)
    with making as drafts:
        noting = Journal(drafts, key) if key else contextlib.nullcontext()
        with noting as journal, _kept(drafts, work.place):
            sums = work.copy(drafts, journal, known)
            with others.written(), others.published():
                there, more = work.place.publish(drafts, work.layouts, sums)
    if isinstance(noting, Journal) and noting.left:
        notes.append(f"{noting.path} could not be removed; the next save to the target removes it")
    if others.names:
        notes.append(f"copied with it: {', '.join(others.names)}")
    notes += more
    took, size = time.perf_counter() - start, sum(made.size for made in work.layouts)
    return tuple(there), len(work.rows), size, took, tuple(dict.fromkeys(notes))


def _manifest_of(index: Index, found: CheckpointFiles) -> tuple[str | None, list[str]]:
    """Path of the manifest of a source, or None; a note for each manifest of other files."""
    given, notes = manifest.find(
        index.files, found.index_file, whole=found.whole, tensors=lambda: index.tensors
    )
    path = given.path if isinstance(given, Manifest) else given
    return path if isinstance(path, str) and manifests.is_there(path) else None, notes


def _part(index: Index, names: Names) -> Index:
    """The index of some of the tensors, with the part of the tree that holds them."""
    part = index.part(selection.select(index, names))
    part.metadata = dict(index.metadata or {})
    if structure.KEY in part.metadata:
        tree, wanted = nested.tree_of(index), {*part.names}
        kept = {str(name): name for name in nested.tensors(tree) if name in wanted}
        part.metadata[structure.KEY] = structure.dumps(nested.filled(tree, kept, plain=False))
    return part


@contextlib.contextmanager
def _kept(drafts: Sequence[Draft], place: SaveTarget) -> Generator[None]:
    """Has lasting drafts stay after errors that a second run can go on after, and no others."""
    try:
        yield
    except BaseException as error:
        goes_on = isinstance(error, _CONTINUES) and not isinstance(error, errors.SourceChangedError)
        goes_on = goes_on and not place.placed()
        for draft in drafts:
            draft.lasting = draft.lasting and goes_on
        raise
    for draft in drafts:
        draft.lasting = False


def _own_place(files: Sequence[str], found: CheckpointFiles) -> str:
    """The place of the source itself; a UsageError if only a part of it would be replaced."""
    directory = os.path.dirname(found.index_file or files[0])
    if found.index_file is not None:
        # The new index takes the place of this one, so the files must lie beside it.
        beside = all(os.path.dirname(file) == directory for file in files)
        if beside and found.index_file.endswith(discovery.INDEX_SUFFIX):
            return found.index_file.removesuffix(discovery.INDEX_SUFFIX) + discovery.SUFFIX
        raise errors.UsageError(
            "the files of the index can't all be replaced beside it; name a target",
            file=found.index_file,
            expected=f"NAME{discovery.INDEX_SUFFIX}, and files in its own directory",
        )
    if len(files) == 1:
        return files[0]
    stem = os.path.join(directory, discovery.stem(os.path.basename(files[0])))
    shard = re.compile(re.escape(stem) + r"-\d+-of-\d+" + re.escape(discovery.SUFFIX))
    if found.name is None or not all(map(shard.fullmatch, files)):
        raise errors.UsageError(
            "several files that are not shards of one; name a target, or align one by one",
            file=directory,
        )
    return stem + discovery.SUFFIX


def _named(files: Sequence[str]) -> str | None:
    """The name of the files in a directory, if their readers look for another than model."""
    stems = {discovery.stem(os.path.basename(file)) for file in files}
    return stems.pop() if len(stems) == 1 and stems <= _NAMED else None
