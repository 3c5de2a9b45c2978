"""The journal of drafts that outlive their writer: which ranges of them were written.

A line for each range, added once the range was written: the number of the draft, the first byte,
the bytes, and their hash. It is a claim, not a proof: what it says is compared with the disk before
a writer goes on, and before the drafts get their names. A line that a kill cut off does not count.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Sequence
from io import FileIO
from types import TracebackType

from mfload import errors
from mfload.planning.blocks import Block
from mfload.saving.descriptors import closed, number, opened
from mfload.saving.drafts import Draft, is_ours

_MAX_SIZE = 256 << 20  # Of some 20 TB.
_LINE = re.compile(rb"(\d{1,9}) (\d{1,19}) (\d{1,19}) ([0-9a-f]{32})\n")


class Journal:
    """What was written to some drafts; goes with them, unless they last.

    Attributes:
        found: The hash of each range that an earlier writer of the same drafts wrote; `source` is
            the number of the draft.
        left: Whether it could not be removed at the end. The next writer removes it.
    """

    def __init__(self, drafts: Sequence[Draft], key: str) -> None:
        self._drafts = drafts
        self.path = name(drafts[0].hidden)
        self.found: dict[Block, str] = {}
        self.left = False
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            if not (all(draft.resumed for draft in drafts) and _is_sound(self.path)):
                flags |= os.O_EXCL
                if os.path.lexists(self.path):
                    os.unlink(self.path)
            self._file = opened(self.path, flags, 0o600)
            lines = (self._file.readall() or b"").splitlines(keepends=True)
            head = f"{key}\n".encode()
            if lines[:1] == [head]:
                for line in filter(None, map(_LINE.fullmatch, lines[1:])):
                    self._take(*line.groups())
            if not self.found:
                self._file.truncate(0)
                self._append(head)
            elif not lines[-1].endswith(b"\n"):
                self._append(b"\n")
        except OSError as error:
            for draft in drafts:
                draft.lasting = False
            self.__exit__(None, None, None)
            raise errors.from_target(error, self.path, "note what is written") from error
        for n, draft in enumerate(drafts):
            draft.count(sum(each.nbytes for each in self.found if each.source == n))

    def _take(self, draft: bytes, offset: bytes, nbytes: bytes, digest: bytes) -> None:
        block = Block(int(draft), int(offset), int(nbytes), ())
        if block.source < len(self._drafts):
            self.found[block] = digest.decode()

    def add(self, block: Block, digest: str) -> None:
        """Notes a range that was written; several threads may."""
        line = f"{block.source} {block.offset} {block.nbytes} {digest}\n"
        with errors.AsTarget(self.path, "write to the journal"):
            self._append(line.encode())

    def _append(self, line: bytes) -> None:
        """Writes a whole line, under a lock: lines of several threads must not be mixed."""
        with self._lock:
            while line:
                done = os.write(number(self._file), line)
                if not done:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                line = line[done:]

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        closed(self._file)
        if not any(draft.lasting for draft in self._drafts):
            try:
                os.unlink(self.path)
            except FileNotFoundError:
                pass
            except OSError:
                self.left = True


def _is_sound(path: str) -> bool:
    """Whether a journal may be read and written to: nothing of others, or that has more names."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return is_ours(found) and found.st_nlink == 1 and found.st_size <= _MAX_SIZE


def name(hidden: str) -> str:
    """The path of the journal, given the hidden path of the first draft."""
    return f"{hidden.rpartition('-')[0]}-journal"
