"""`convert` and `align`: rewrite a checkpoint as safetensors that suit zero-copy and direct reads.

What is written is noted in a journal beside the drafts, so that a conversion that was killed goes
on where it ended; the drafts get their names when they were read back and compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mfload import dtypes, errors
from mfload.checking import manifest, published
from mfload.checking.checksums import Hasher, refuse
from mfload.checking.copying import Copier, read_back
from mfload.checking.manifest import Algorithm, FileEntry, Manifest
from mfload.checking.scan import scan
from mfload.checking.verify import verify, with_manifest
from mfload.formats import base, checkpoint, discovery, safetensors, structure
from mfload.formats.discovery import CheckpointFiles
from mfload.index import Index, Table, TensorInfo
from mfload.load_options import started
from mfload.options import Options
from mfload.planning import selection
from mfload.planning.selection import Names, Regex
from mfload.progress import Progress, shown
from mfload.saving import layout, targets
from mfload.saving.drafts import BLOCK, Draft
from mfload.saving.journal import Journal
from mfload.saving.layout import Layout
from mfload.saving.publishing import SaveTarget
from mfload.saving.save import Saved
from mfload.sources import PathOrBytes
from mfload.sources.base import Source
from mfload.sources.memory import MemorySource
from mfload.trees import nested

# What a second run can go on after, so that drafts and journal stay.
_CONTINUES = (KeyboardInterrupt, errors.LoadTimeoutError, errors.SourceError)

# Of the ranges in which drafts are written: other ones are not gone on with.
_VERSION = 2


@dataclass(frozen=True, slots=True)
class Converted(Saved):
    """What `mfload.convert` did. It prints well, and has the attributes of `Saved`."""

    VERB = "converted"

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, as they are printed."""
        (_, written), *rows = Saved.rows(self)
        return [(self.VERB, f"{written}, read back and compared"), *rows]


@dataclass(frozen=True, slots=True)
class Aligned(Converted):
    """What `mfload.align` did. It prints well, and has the attributes of `Saved`."""

    VERB = "aligned"


def convert(
    source: PathOrBytes | Sequence[PathOrBytes],
    target: str | os.PathLike[str],
    *,
    names: Regex | Iterable[str] | Callable[[str], bool] | None = None,
    align: int | str = layout.ALIGN,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    progress: bool | Callable[[int, int], None] = False,
    options: Options | None = None,
) -> Converted:
    """Turns a checkpoint of any format into safetensors, in bounded memory.

    Tensors keep their names, dtypes and bytes, and the metadata is kept, also the tree that
    `mfload.restore` rebuilds. The new files are read back from the disk and compared before they
    get their names, all of them at once. If a manifest lies beside the source, the source is
    compared with it, and one is written for the new files.

    After a kill, Ctrl-C, a timeout or an error of the source, hidden files stay beside the target;
    the same call goes on with them if the source is the same, and a note says so. Any other
    conversion or save to that target removes them. Other errors, and a source that changed, leave
    nothing, and bytes in memory are not gone on with.

    Args:
        source: As for `load`.
        target: Where to, as for `save`.
        names: Which tensors, as for `load`: "^params" takes the parameters of a train state. The
            tree becomes that of these tensors.
        align: Multiple of which the data begins, in bytes: a power of two.
        max_shard_size: Bytes of tensors a file, as for `save`. Default: each safetensors file of
            the source becomes one; other formats, and a choice of names, become a single file.
        overwrite: Whether what is there may be replaced.
        progress: True for a bar, or a function of (bytes done, bytes in all). Bytes count twice,
            once written and once read back.
        options: Threads, timeout and `max_host_overhead`, which bounds the memory of tensors that
            are not one raw range of their file; see `mfload.Options`.

    Raises:
        UsageError: An argument is invalid, or the source can't be replaced as a whole.
        TensorNotFoundError: No tensor has one of the names, or matches.
        SourceError: The source can't be read.
        FormatError: The source is malformed.
        UnsupportedDtypeError: Safetensors has no dtype for a tensor.
        ChecksumError: The source differs from the manifest beside it.
        TargetError: The target is there already, is being written, or can't be written.
        FrameworkMissingError: Hashing needs the package xxhash, or decoding another one.
        LoadTimeoutError: The timeout passed.
    """
    targets.resolve(target)  # None is for align.
    made = layout.shard_limit(max_shard_size), layout.checked_align(align)
    given = *made, overwrite, progress, options
    return Converted(*rewrite(source, target, *given, names=names, resume=True))


def align(
    source: PathOrBytes | Sequence[PathOrBytes],
    target: str | os.PathLike[str] | None = None,
    *,
    align: int | str = layout.ALIGN,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    progress: bool | Callable[[int, int], None] = False,
    options: Options | None = None,
) -> Aligned:
    """Rewrites a safetensors checkpoint so that it suits zero-copy and direct reads.

    The data of each file begins on a multiple of `align`, and tensors lie on multiples of 64
    bytes where their sizes allow it. The new files are read back from the disk and compared
    before they get their names. Metadata is kept, and so are tensors of unknown dtypes. If a
    manifest lies beside the source, the source is compared with it, and one is written for the
    new files.

    Unlike `convert`, it can replace the source, and leaves nothing if it is killed.

    Args:
        source: As for `load`.
        target: Where to, as for `save`. Default: the place of the source, which takes
            `overwrite=True`.
        align: Multiple of which the data begins, in bytes: a power of two.
        max_shard_size: Bytes of tensors a file, as for `save`. Default: each file of the source
            becomes one.
        overwrite: Whether what is there may be replaced.
        progress: True for a bar, or a function of (bytes done, bytes in all). Bytes are read
            twice.
        options: Threads and timeout; see `mfload.Options`.

    Raises:
        UsageError: An argument is invalid, or the source can't be replaced as a whole.
        SourceError: The source can't be read.
        FormatError: The source is malformed.
        ChecksumError: The source differs from the manifest beside it.
        TargetError: The target is there already, or can't be written.
        FrameworkMissingError: Hashing needs the package xxhash.
        LoadTimeoutError: The timeout passed.
    """
    made = layout.shard_limit(max_shard_size), layout.checked_align(align)
    return Aligned(*rewrite(source, target, *made, overwrite, progress, options, resume=False))


def rewrite(
    source: PathOrBytes | Sequence[PathOrBytes],
    target: str | os.PathLike[str] | None,
    limit: int | None,
    begin: int,
    overwrite: bool,
    progress: Progress,
    options: Options | None,
    *,
    names: Names = None,
    change: Callable[[Index], Index] | None = None,
    resume: bool,
) -> tuple[Any, ...]:
    """Rewrites a checkpoint; returns the values of `Saved`.

    Only if it may `resume` are other formats than safetensors taken, and drafts kept. `change`
    makes other tensors of those of the source, which then lie in the order in which it gives them.
    """
    start = time.perf_counter()
    how = started(options)
    index, sources = checkpoint.read(source, how)
    found = discovery.find(source, how)
    directory = found.directory is not None
    foreign = [each for each in sources if directory or base.find(each) is not safetensors]
    if foreign and not resume:
        raise errors.UsageError(
            "align rewrites safetensors files; mfload.convert takes other formats",
            file=foreign[0].name,
        )
    if names is not None:
        index = _part(index, names)
    if change is not None:
        index = change(index)
    rows = index.tensors
    place = SaveTarget(_own_place(index.files, found) if target is None else target, overwrite)
    in_place = [f for f in index.files if target is None or os.path.realpath(f) == place.path]
    for file, recorded in published.expected("auto", in_place).items():
        raise errors.UsageError(
            "the Hugging Face client keeps the SHA-256 of the file; name another target",
            file=file,
            found=recorded.origin,
        )
    if foreign:
        for info in rows.values():
            if not info.dtype.known:
                raise errors.UnsupportedDtypeError(
                    "safetensors has no such dtype",
                    file=index.files[info.pieces[0].source],
                    tensor=info.name,
                    expected=dtypes.INSTEAD.get(info.dtype.name),
                    found=info.dtype.name,
                )
    kept = not foreign and names is None and change is None
    layouts = _layouts(index, sources, limit, begin, each_file=kept, ranked=change is None)
    loaded = [info for info in rows.values() if not info.simple and info.nbytes]
    old = manifest.beside(index.files, found.index_file)
    new = manifest.beside([place.path])
    same = os.path.realpath(new) == os.path.realpath(old)
    known = Manifest.read(old) if os.path.exists(old) else None
    if known is not None:
        manifest.check_target(new, overwrite=overwrite or same)
    if known is not None and (loaded or not known.hashed):
        for problem in verify(source, manifest=known, options=options).problems:
            given = problem._asdict()
            raise errors.ChecksumError(given.pop("what"), **given)
    # Bytes of tensors that are stored in another way have other sums when they are raw.
    anew, known = (known, None) if loaded else (None, known)
    size = sum(made.size for made in layouts)
    hasher = Hasher(rows.values() if known is not None and known.hashed else ())
    notes = list(index.notes)
    # Sums of the source are of all its bytes, read in one go. Bytes in memory have no identity.
    resume = resume and known is None and not any(isinstance(s, MemorySource) for s in sources)
    key = _key(sources, layouts, loaded) if resume else None
    with place.drafts(layouts, key) as drafts, contextlib.ExitStack() as stack:
        journal = stack.enter_context(Journal(drafts, key)) if key else None
        stack.enter_context(_kept(drafts))
        # Both passes tell of the same bytes, but for the headers.
        stored = sum(info.nbytes for info in rows.values())
        with shown(progress, size + stored) as advance:
            copier = Copier(drafts, layouts, sources, hasher, journal)
            if copier.resumed:
                notes.append(
                    f"went on after {errors.amount(copier.resumed)} that an earlier run wrote"
                )
            scan(sources, copier.left(advance), copier, how, advance)
            copier.load(index, sources, how, advance)
            for draft in drafts:
                how.deadline.bound(draft.sync, "writing to the disk", draft.shown)
            digests = hasher.digests() or None
            if known is not None:
                refuse([*known.differences(rows.values(), digests)], len(rows), index.files)
            wants_sums = known is not None and bool(known.files)
            sums = read_back(copier, how, advance, sums=wants_sums)
        if same and digests is not None:
            # Files change when the drafts get their names; tensors are the same before and after.
            Manifest.of(rows, digests).write(new, overwrite=True)
        elif (known or anew) is not None and os.path.lexists(new):
            os.unlink(new)
        try:
            there, more = place.publish(drafts, layouts)
        except BaseException:
            if same and known is not None:
                with contextlib.suppress(errors.MfloadError):
                    for each in sources:
                        each.check()
                    known.write(new, overwrite=True)  # It still holds.
            raise
    notes += more
    if known is not None:
        # The index comes last, and has no sum.
        files = {
            os.path.basename(file): FileEntry(made.size, digest)
            for file, made, digest in zip(there, layouts, sums, strict=False)
        }
        try:
            Manifest.of(rows, digests, files).write(new, overwrite=True)
        except errors.TargetError as error:
            error.message += "; the checkpoint itself is whole and in its place"
            raise
        notes.append(f"checksums written to {new}")
    took = time.perf_counter() - start
    saved = Saved(tuple(there), len(index), size, took, tuple(dict.fromkeys(notes)))
    if anew is not None:
        algorithm: Algorithm = "xxh3" if not anew.files else "both" if anew.hashed else "sha256"
        saved = with_manifest(saved, write=algorithm)
    return saved.files, saved.tensors, saved.bytes, saved.seconds, saved.notes


def _part(index: Index, names: Names) -> Index:
    """The index of some of the tensors, with the part of the tree that holds them."""
    columns, metadata = selection.select(index, names), dict(index.metadata or {})
    if structure.KEY in metadata:
        kept = {name: structure.TensorName(name) for name in columns.names}
        tree = nested.filled(nested.tree_of(index), kept, plain=False)
        metadata[structure.KEY] = structure.dumps(tree)
    return Index(index.files, Table(columns), metadata, index.notes)


@contextlib.contextmanager
def _kept(drafts: Sequence[Draft]) -> Generator[None]:
    """Has lasting drafts stay after errors that a second run can go on after, and no others."""
    try:
        yield
    except BaseException as error:
        goes_on = isinstance(error, _CONTINUES) and not isinstance(error, errors.SourceChangedError)
        for draft in drafts:
            draft.lasting = draft.lasting and goes_on
        raise
    for draft in drafts:
        draft.lasting = False


def _key(sources: Sequence[Source], layouts: Sequence[Layout], loaded: Sequence[TensorInfo]) -> str:
    """Tells conversions apart: what is read, and what is written where."""
    key = hashlib.sha256(f"{_VERSION} {BLOCK}".encode())
    for each in sources:
        key.update(f"\n{each.name}\n{each.identity!r}".encode(errors="surrogatepass"))
    for info in loaded:
        key.update(repr(info.pieces).encode())
    for made in layouts:
        key.update(made.header)
    return key.hexdigest()[:32]


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


def _layouts(
    index: Index,
    sources: Sequence[Source],
    limit: int | None,
    align: int,
    *,
    each_file: bool,
    ranked: bool,
) -> list[Layout]:
    if limit is not None or len(sources) == 1 or not each_file:
        parts = layout.split(index.tensors.values(), limit, ranked=ranked)
        return [layout.lay_out(rows, index.metadata, align, ranked=ranked) for rows in parts]
    # Each file keeps metadata of its own.
    headers = [safetensors.read(file, number) for number, file in enumerate(sources)]
    return [layout.lay_out(rows, metadata, align) for rows, metadata in headers]
