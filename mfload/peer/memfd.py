"""Transport "memfd": a sealed copy of the data, handed to a process of the same user.

Where the kernel does not let one process read another. The copy is made when a reader asks for it
first, once a generation; it has no name, so that nothing is left behind after a kill.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from mfload import errors
from mfload.peer import connections
from mfload.peer.data import Data
from mfload.peer.transports import Offer, Remote, malformed
from mfload.runtime import Task, forget_in_forks
from mfload.sources.base import Costs

_PIECE = 64 << 20
_WAIT = 5.0  # Seconds that a reader has to take what it asked for.
_LEAST = 64 << 10  # Bytes that are copied within the seconds of `stalled`, at least.
_PAUSE = 0.05
_CREDENTIALS = struct.Struct("3i")


def offer(data: Data, generation: int) -> Offer | None:
    """Listens on a Unix socket without a name in the file system."""
    del generation
    if not hasattr(os, "memfd_create"):
        return None
    name, listener = listening()
    giver = _Giver(data, listener)
    giver.start()
    forget_in_forks(giver)
    return Offer({"socket": name}, giver.close)


def listening() -> tuple[str, socket.socket]:
    """The name of a Unix socket without one in the file system, and what listens there."""
    name = f"mfload-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(socket.SOMAXCONN)  # Beyond, readers are refused at once.
    return name, listener


def trusted(connection: socket.socket) -> bool:
    """Whether the process at the other end is of the same user, or of root."""
    return _at_other_end(connection)[1] in (os.geteuid(), 0)


def _at_other_end(connection: socket.socket) -> tuple[int, ...]:
    """Numbers of the process, its user and its group, as the kernel says."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)


def is_socket(name: Any) -> bool:
    """Whether a seed's manifest names such a socket."""
    return isinstance(name, str) and name.startswith("mfload-") and len(name) <= 80


class _Giver:
    """Hands the copy to readers, one after the other."""

    def __init__(self, data: Data, listener: socket.socket) -> None:
        self._data, self._listener, self._fd = data, listener, -1
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None  # The reader's whose turn it is.
        self._closed = False
        self._task: Task[None] = Task(self._run, service=True)
        self.start = partial(self._task.start, "mfload-memfd")

    def _run(self) -> None:
        while not self._closed:
            try:
                self._connection, _ = self._listener.accept()
            except OSError:
                if not self._closed:
                    time.sleep(_PAUSE)  # No descriptors are left.
                continue
            with self._connection as connection, suppress(OSError, errors.MfloadError):
                connection.settimeout(_WAIT)
                if trusted(connection):
                    with self._lock:
                        if self._closed:
                            return
                        socket.send_fds(connection, [b"1"], [self._copied()])

    def close(self) -> None:
        """Ends listening; readers keep what they have."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
        self._task.join(_WAIT)
        self._listener.close()

    def forget(self) -> None:
        """Closes the descriptors of a fork."""
        self._closed = True
        self._listener.close()
        if self._connection is not None:
            self._connection.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _copied(self) -> int:
        if self._fd < 0:
            fd = os.memfd_create("mfload-seed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                for start in range(0, self._data.size, _PIECE):
                    for part in self._data.parts(start, min(start + _PIECE, self._data.size)):
                        view = memoryview(part)
                        while view:
                            if self._closed:
                                raise OSError("the seed ends")
                            view = view[os.write(fd, view) :]
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
            except BaseException:
                os.close(fd)
                raise
            self._fd = fd
        return self._fd


def connect(given: Any, remote: Remote) -> MemfdWay | str:
    """Takes the copy from the seed; what it sends must have the size of the data."""
    name = given.get("socket") if isinstance(given, dict) else None
    if not is_socket(name):
        raise malformed(remote.name, "its socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(remote.stalled)
            connection.connect(f"\0{name}")
            # Names of sockets are seen by all users: without sums it may be another seed's.
            if not remote.compares:
                against = connections.held_by(_at_other_end(connection)[0], remote)
                if against:
                    return f"nothing is compared with checksums, and {against}"
            descriptors = _received(connection, remote)
        except OSError as error:
            if isinstance(error, errors.MfloadError):
                raise
            return f"the seed's socket can't be reached: {error}"
    if not descriptors:
        return "the seed hands over no memory"
    for extra in descriptors[1:]:
        os.close(extra)
    os.set_inheritable(descriptors[0], False)
    way = MemfdWay(descriptors[0], remote)
    if not _sealed(descriptors[0]):
        wrong = "is not sealed"
    elif os.fstat(descriptors[0]).st_size != remote.manifest.size:
        wrong = "has another size"
    else:
        return way
    way.close()
    return f"the memory that the seed hands over {wrong}"


def _received(connection: socket.socket, remote: Remote) -> Sequence[int]:
    """The descriptors that the seed sends once its copy is made; it must answer meanwhile."""
    most = remote.stalled * remote.manifest.size / _LEAST  # As long as HTTP may take for it.
    until = time.monotonic() + 2 * _WAIT + most
    while True:
        try:
            return socket.recv_fds(connection, 1, 4)[1]
        except TimeoutError:
            if time.monotonic() > until or not remote.check():
                raise


def _sealed(fd: int) -> bool:
    """Whether it is memory that no one changes: no file, which may hang or shrink."""
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted == wanted
    except OSError:
        return False


class MemfdWay:
    """Reads a copy of the data that no one changes any more (see `Way`)."""

    costs = Costs()
    why = "a memfd over a Unix socket: the seed made one copy of all"

    def __init__(self, fd: int, remote: Remote) -> None:
        self._fd, self._remote = fd, remote
        self.check = remote.check

    def read(self, vector: Sequence[Any], offset: int) -> None:
        """Fills buffers (see `Way`)."""
        for each in vector:
            view = memoryview(each).cast("B")
            while view:
                got = os.preadv(self._fd, [view], offset)
                if not got:
                    what = "the seed's memory ended before its data"
                    raise errors.SourceChangedError(what, file=self._remote.name)
                view, offset = view[got:], offset + got

    def close(self) -> None:
        """Gives the memory back."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
