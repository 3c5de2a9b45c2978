"""Reads drafts back from the disk, compares them with what was written, and makes their manifest.

That happens before the drafts get their names, so that no other writer can interfere.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mfload import errors
from mfload.checking.checksums import Hasher, Stopped, tensor_hash
from mfload.checking.manifest import ALGORITHMS, Algorithm, FileEntry, FileIdentity, Manifest
from mfload.checking.scan import BLOCK, Advance, in_turns, scan
from mfload.options import LoadOptions, started
from mfload.planning.blocks import Block, Lot
from mfload.planning.lots import cut, raw
from mfload.saving.drafts import Draft
from mfload.saving.layout import FileLayout
from mfload.saving.manifests import as_text


class Seal:
    """Hashes what is written to drafts, and compares it with what the disk gives back.

    Args:
        tensors: Whether the manifest has checksums of tensors.
        files: Whether it has SHA-256 sums of files.
        new: The hash of what is written. Default: that of tensors.

    Attributes:
        written: The hash of each range that was written; `source` is the number of the draft. If
            it is empty (other processes wrote), the drafts are read but not compared.
    """

    def __init__(
        self, *, tensors: bool, files: bool, new: Callable[..., Any] | None = None
    ) -> None:
        self.written: dict[Block, str] = {}
        self._tensors, self._files, self._new = tensors, files, new or tensor_hash()

    def __str__(self) -> str:
        return " and ".join(["of tensors"] * self._tensors + ["of files"] * self._files)

    @staticmethod
    def of(checksums: bool | Algorithm) -> Seal:
        """The seal for an argument `checksums` of `mfload.save`."""
        if checksums is not True:
            errors.check_choice("checksums", checksums, ALGORITHMS)
        alone = checksums == "sha256"
        new = hashlib.sha256 if alone else None  # XXH3 would need the package xxhash.
        return Seal(tensors=not alone, files=checksums != "xxh3", new=new)

    def write(
        self, number: int, draft: Draft, offset: int, pieces: Sequence[Any], *tensor: Any
    ) -> int:
        """Writes pieces to a draft, as `Draft.write`, and hashes them."""
        hashed = self._new()
        for piece in pieces:
            hashed.update(piece)
        nbytes = draft.write(offset, pieces, *tensor)
        self.written[Block(number, offset, nbytes, ())] = hashed.hexdigest()
        return nbytes

    def take_over(
        self, found: Mapping[Block, str], drafts: Sequence[Draft], how: LoadOptions
    ) -> None:
        """Counts ranges that an earlier run wrote as written, if the disk gives them back.

        After a loss of power, a journal may know of more than the drafts hold.
        """
        lots = [raw(block, key=found[block]) for block in sorted(found)]
        files = [draft.source() for draft in drafts] if lots else []
        try:
            scan(files, lots, _Found(self.written, self._new), how.replace(engine="direct"))
        except errors.SourceError as error:
            if isinstance(error, TimeoutError):
                raise

    def manifest(
        self,
        drafts: Sequence[Draft],
        layouts: Sequence[FileLayout],
        how: LoadOptions | None = None,
        advance: Advance = None,
    ) -> bytes | None:
        """Reads synced drafts past the page cache and compares them; returns the manifest's bytes.

        Returns None if the manifest would have no checksums. Raises WriteError if a draft can't be
        read, or differs from what was written.
        """
        how = started(None) if how is None else how
        rows: list[list[Lot]] = [[] for _ in drafts]
        for block in sorted(self.written):
            rows[block.source].append(raw(block, key=self.written[block]))
        for number, draft in enumerate(drafts):
            if not self.written:
                rows[number] = list(map(raw, cut(Block(number, 0, draft.size, ()), BLOCK)))
        infos = [
            info._replace(pieces=(info.pieces[0]._replace(source=number),))
            for number, made in enumerate(layouts if self._tensors or self._files else ())
            for info in made.tensors
        ]
        sizes = {number: made.size for number, made in enumerate(layouts) if self._files}
        hasher = Hasher(infos if self._tensors else (), sizes)
        reader = _ReadBack(drafts, layouts, hasher, self._new)
        try:
            files = [draft.source() for draft in drafts]
            scan(files, in_turns(rows, how), reader, how.replace(engine="direct"), advance)
        except errors.MfloadError as error:
            shown = {draft.path: draft.shown for draft in drafts}
            error.file = shown.get(error.file or "", error.file)
            if isinstance(error, errors.SourceError) and not isinstance(error, TimeoutError):
                what = "what was written can't be read back"
                raise errors.WriteError(what, file=error.file, found=error.message) from error
            raise
        if not (self._tensors or self._files):
            return None
        digests = hasher.digests()
        names = [as_text(os.path.basename(each.shown)) for each in drafts]
        entries = {names[n]: FileEntry(size, digests[n]) for n, size in sizes.items()}
        identity = {
            name: FileIdentity(made.size, hashlib.sha256(made.header).hexdigest())
            for name, made in zip(names, layouts, strict=True)
        }
        table = {info.name: info for info in infos}
        sums = digests if self._tensors else None
        return Manifest.of(table, sums, entries, identity).text().encode()


class _Found(NamedTuple):
    """Place of what an earlier run wrote; notes the ranges that are as it said."""

    written: dict[Block, str]
    new: Callable[..., Any]

    def take(self, lot: Lot, number: int, data: Any, stopped: Stopped) -> None:
        """Takes the next range."""
        if self.new(data).hexdigest() == lot.key:
            self.written[lot.blocks[number]] = lot.key


class _ReadBack(NamedTuple):
    """Place of what is read of the drafts; compares each range with what was written there."""

    drafts: Sequence[Draft]
    layouts: Sequence[FileLayout]
    hasher: Hasher
    new: Callable[..., Any]

    def take(self, lot: Lot, number: int, data: Any, stopped: Stopped) -> None:
        """Takes the next range."""
        source, offset, *_ = lot.blocks[number]
        wanted = lot.key
        found = wanted and self.new(data).hexdigest()
        if found != wanted:
            what, tensor = "the disk gave back other bytes than were written", None
            made = self.layouts[source]
            head = made.header[offset : offset + data.size]
            if bytes(data[: len(head)]) != head:
                what = "the header read back differs from the one written"
            elif not head:
                ends = ((row.name, row.pieces[0]) for row in made.tensors)
                tensor = next(name for name, each in ends if each.offset + each.nbytes > offset)
            where = f"in bytes {offset} to {offset + data.size}"
            raise errors.WriteError(
                what,
                file=self.drafts[source].shown,
                tensor=tensor,
                expected=f"{self.new().name} {wanted} {where}",
                found=found,
            )
        self.hasher.take(lot, number, data, stopped)
