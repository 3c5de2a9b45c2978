"""A slow network disk for tests: a read-only FUSE file system that mirrors a directory.

It runs in a process of its own, since a test that waits for a page while it holds the interpreter
lock would wait for itself. The parent sets the delay and the faults, and reads the counters, in
memory that both share; when the parent ends, the file system is unmounted.

Protocol: `include/uapi/linux/fuse.h`, version 7.31.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import mmap
import os
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE = 1, 2, 3, 14, 15, 17, 18
FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, DESTROY = 25, 26, 27, 28, 29, 36, 38
BATCH_FORGET = 42
_ASYNC_READ, _PARALLEL_DIRECTORIES, _MAX_PAGES = 1 << 0, 1 << 18, 1 << 22
_KEEP_CACHE = 2
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MNT_DETACH = 1, 2, 4, 2
_IN, _OUT, _READ_IN = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ"), struct.Struct("<QQI")
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
# Shared numbers, 8 bytes each: settings that the parent makes, then what the server counts.
DELAY, ERROR, ERRORS, ON, FORGOTTEN, OPENED = range(6)
_COUNTED = 6
_BYTES = 64
_ROOT, _THREADS = 1, 48


class Numbers:
    """Integers of 8 bytes in memory that two processes share."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)

    def __getitem__(self, place: int) -> int:
        return struct.unpack_from("<q", self._memory, 8 * place)[0]

    def __setitem__(self, place: int, value: int) -> None:
        struct.pack_into("<q", self._memory, 8 * place, value)


class SlowDisk:
    """A mounted mirror of a directory; a context manager that unmounts it.

    Args:
        root: What it shows.
        where: An empty directory, where it is mounted.
        delay: Seconds that each request takes.
        largest: Bytes of a READ, at most.
        kind: The type that the kernel shows: "fuse." and a name.
        keeps: Whether the page cache outlives an open, as the server says to the kernel.
        valid: Seconds for which names and attributes may be taken from the kernel's cache.
        background: READs of the kernel's own reading ahead that may be under way.

    Raises:
        OSError: Mounting is refused.
    """

    def __init__(
        self,
        root: Path,
        where: Path,
        *,
        delay: float = 0.002,
        largest: int = 1 << 20,
        kind: str = "fuse.slow",
        keeps: bool = True,
        valid: int = 0,
        background: int = 12,
    ) -> None:
        self.where, memory = where, os.memfd_create("slow-disk")
        os.truncate(memory, mmap.PAGESIZE)
        self._numbers = Numbers(memory)
        self.delay(delay)
        how = [*map(str, (root, where, memory, largest, kind, int(keeps), valid, background))]
        self._server = subprocess.Popen(
            [sys.executable, __file__, *how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(memory,),
        )
        os.close(memory)
        assert self._server.stdout is not None
        if (number := int(self._server.stdout.readline() or errno.EIO)) != 0:
            self.close()
            raise OSError(number, f"mount of a FUSE: {os.strerror(number)}")

    def delay(self, seconds: float) -> None:
        """Sets what each request takes from now on."""
        self._numbers[DELAY] = int(seconds * 1e9)

    def fail(self, number: int, times: int = 1, on: int = READ) -> None:
        """Has the next requests of a kind fail with an error number."""
        self._numbers[ERROR], self._numbers[ON], self._numbers[ERRORS] = number, on, times

    def forget(self) -> None:
        """Has READs of files that are open now fail with ESTALE, until they are opened again."""
        self._numbers[FORGOTTEN] = self._numbers[OPENED]

    @property
    def failing(self) -> int:
        """How many requests are still to fail."""
        return self._numbers[ERRORS]

    @property
    def read(self) -> int:
        """Bytes that READs have sent."""
        return self._numbers[_COUNTED + _BYTES]

    def count(self, kind: int = READ) -> int:
        """Requests of a kind."""
        return self._numbers[_COUNTED + kind]

    def close(self) -> None:
        """Unmounts it and ends the server."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(30)
        self._server.stdout.close()

    def __enter__(self) -> SlowDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server:
    def __init__(self, given: argparse.Namespace, fuse: int) -> None:
        self._fuse, self._given, self._numbers = fuse, given, Numbers(given.memory)
        self._lock, self._paths = threading.Lock(), {_ROOT: given.root}
        self._nodes, self._open_files = {given.root: _ROOT}, dict[int, int]()
        self._answers = {
            LOOKUP: self._look_up,
            GETATTR: lambda node, body: (
                struct.pack("<QII", self._given.valid, 0, 0) + self._attributes(self._paths[node])
            ),
            OPEN: self._open,
            OPENDIR: lambda node, body: struct.pack("<QII", 0, 0, 0),
            READ: self._read,
            READDIR: self._list,
            STATFS: lambda node, body: struct.pack("<QQQQQIIII24x", 0, 0, 0, 0, 0, 4096, 255, 0, 0),
            RELEASE: self._release,
            RELEASEDIR: lambda node, body: b"",
            FLUSH: lambda node, body: b"",
            DESTROY: lambda node, body: b"",
            INIT: self._begin,
        }

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._fuse, 1 << 17)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                return  # ENODEV: it is unmounted.
            _, kind, unique, node, *_ = _IN.unpack_from(request)
            if kind in (FORGET, BATCH_FORGET, INTERRUPT):
                continue
            number, answer = self._answer(kind, node, request[_IN.size :])
            header = _OUT.pack(_OUT.size + len(answer), -number, unique)
            try:
                os.writev(self._fuse, [header, answer])
            except OSError:  # Nobody waits for it any more.
                continue

    def _answer(self, kind: int, node: int, body: bytes) -> tuple[int, bytes]:
        if kind != INIT:
            time.sleep(self._numbers[DELAY] / 1e9)
        with self._lock:
            self._numbers[_COUNTED + kind] += 1
            fails = self._numbers[ERRORS] > 0 and self._numbers[ON] == kind
            if fails:
                self._numbers[ERRORS] -= 1
        if fails:
            return self._numbers[ERROR], b""
        if kind not in self._answers:
            return errno.ENOSYS, b""
        try:
            return 0, self._answers[kind](node, body)
        except OSError as error:
            return error.errno or errno.EIO, b""

    def _begin(self, node: int, body: bytes) -> bytes:
        ahead, flags = struct.unpack_from("<II", body, 8)
        flags &= _ASYNC_READ | _PARALLEL_DIRECTORIES | _MAX_PAGES
        background, pages = self._given.background, max(1, self._given.largest >> 12)
        how = background, background * 3 // 4, 1 << 16, 1, pages
        return struct.pack("<IIIIHHIIHH32x", 7, 31, ahead, flags, *how, 0)

    def _node(self, path: str) -> int:
        with self._lock:
            node = self._nodes.setdefault(path, len(self._nodes) + 1)
            self._paths[node] = path
        return node

    def _look_up(self, node: int, body: bytes) -> bytes:
        path = os.path.join(self._paths[node], os.fsdecode(body[:-1]))
        found, valid = self._attributes(path), self._given.valid
        return struct.pack("<QQQQII", self._node(path), 0, valid, valid, 0, 0) + found

    def _attributes(self, path: str) -> bytes:
        of = os.stat(path)
        times = (of.st_atime_ns, of.st_mtime_ns, of.st_ctime_ns)
        seconds, rest = ([each[n] for each in (divmod(t, 10**9) for t in times)] for n in (0, 1))
        who = of.st_mode, of.st_nlink, of.st_uid, of.st_gid, 0, 4096, 0
        return _ATTRIBUTES.pack(of.st_ino, of.st_size, of.st_blocks, *seconds, *rest, *who)

    def _open(self, node: int, body: bytes) -> bytes:
        fd = os.open(self._paths[node], os.O_RDONLY)
        with self._lock:
            self._numbers[OPENED] += 1
            number = self._numbers[OPENED]
            self._open_files[number] = fd
        return struct.pack("<QII", number, _KEEP_CACHE if self._given.keeps else 0, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        number, offset, size = _READ_IN.unpack_from(body)
        if number <= self._numbers[FORGOTTEN]:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        data = os.pread(self._open_files[number], size, offset)
        with self._lock:
            self._numbers[_COUNTED + _BYTES] += len(data)
        return data

    def _release(self, node: int, body: bytes) -> bytes:
        os.close(self._open_files.pop(struct.unpack_from("<Q", body)[0]))
        return b""

    def _list(self, node: int, body: bytes) -> bytes:
        _, offset, size = _READ_IN.unpack_from(body)
        made = b""
        names = [".", "..", *sorted(os.listdir(self._paths[node]))]
        for n, name in enumerate(names[offset:], offset + 1):
            raw = os.fsencode(name)
            kind = stat.S_IFMT(os.stat(os.path.join(self._paths[node], name)).st_mode) >> 12
            entry = struct.pack("<QQII", n, n, len(raw), kind) + raw
            entry += bytes(-len(entry) % 8)
            if len(made) + len(entry) > size:
                break
            made += entry
        return made


def _main() -> NoReturn:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("where")
    for name in ("memory", "largest"):
        parser.add_argument(name, type=int)
    parser.add_argument("kind")
    for name in ("keeps", "valid", "background"):
        parser.add_argument(name, type=int)
    given = parser.parse_args()
    libc: Any = ctypes.CDLL(None, use_errno=True)
    try:
        fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        print(error.errno, flush=True)
        sys.exit()
    options = f"fd={fuse},rootmode={stat.S_IFDIR:o},user_id={os.getuid()},group_id={os.getgid()}"
    options += f",max_read={given.largest},allow_other"
    where, flags = os.fsencode(given.where), _MS_RDONLY | _MS_NOSUID | _MS_NODEV
    failed = libc.mount(b"slow", where, os.fsencode(given.kind), flags, options.encode())
    if failed:
        print(ctypes.get_errno(), flush=True)
        sys.exit()
    server = _Server(given, fuse)
    for _ in range(_THREADS):
        threading.Thread(target=server.serve, daemon=True).start()
    print(0, flush=True)
    sys.stdin.read()  # Until the parent closes it, or ends.
    libc.umount2(where, _MNT_DETACH)
    os._exit(0)


if __name__ == "__main__":
    _main()
