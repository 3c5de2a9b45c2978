"""What a call does to the files of one directory: each change noted, and any call can fail.

`Recorder` stands between mfload and `os` for as long as it is entered, in this process alone:

    with Recorder(folder) as seen:
        mfload.save(arrays, folder)
    seen.calls      # ["open", "write", …]: the calls on what lies in the folder, in order
    seen.changes    # what they changed; `crashes.states` makes the states of crashes of it
    seen.missed()   # what lies there now and was not seen to be made: must be empty

What changes files past these functions of `os` is not noted: `missed` tells. A function that mfload
comes to use is added to `CHANGES`, with a method that notes what it did, or to `LOOKS`.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import io
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from mfload.saving import drafts

DATA = ("write", "writev", "pwrite", "pwritev", "fallocate", "ftruncate", "posix_fallocate")
NAMES = ("link", "symlink", "rename", "replace", "unlink", "remove", "mkdir", "rmdir")
ATTRIBUTES = ("fchmod", "chmod", "fchown", "chown", "setxattr", "removexattr", "utime")
CHANGES = ("open", *DATA, *NAMES, *ATTRIBUTES, "fsync", "fdatasync")
LOOKS = (
    "stat", "lstat", "fstat", "readlink", "access", "listdir", "scandir", "statvfs", "getxattr",
    "listxattr", "read", "pread", "preadv", "flock", "open to read",
)  # fmt: skip
"""Calls that change nothing; "open to read" is an open of a file or directory for reading."""

Before = Callable[[int, str], None]


class Node:
    """A file, a directory or a symbolic link, whatever names it has.

    Attributes:
        kind: "file", "directory" or "link".
        start: What is in it before anything is noted; the target of a link.
    """

    def __init__(self, kind: str, start: bytes = b"", mode: int = 0o644) -> None:
        self.kind, self.start, self.mode = kind, start, mode


class Change(NamedTuple):
    """One change.

    Attributes:
        what: "write", "size", "time" or "sync" of a node; "names" in a directory, or their "names
            synced".
        offset: Where is written, or the size, or the time of change in nanoseconds.
        names: Relative paths, and what they lead to from then on; None for nothing.
    """

    what: str
    node: Node | None = None
    offset: int = 0
    data: bytes = b""
    directory: str = ""
    names: tuple[tuple[str, Node | None], ...] = ()


class Content(NamedTuple):
    """What is in a file, and its time of change, if that was set since."""

    data: bytes
    changed: int | None = None


class Tree(NamedTuple):
    """Relative paths, what has them, and what is in each."""

    names: dict[str, Node]
    contents: dict[Node, Content]

    def key(self) -> tuple[object, ...]:
        """Equal for trees of which no program can tell one from the other."""
        numbers: dict[Node, int] = {}
        rows: list[object] = []
        for name, node in sorted(self.names.items()):
            number = numbers.setdefault(node, len(numbers))
            rows.append((name, node.kind, number, hash(self.contents[node])))
        return tuple(rows)

    def lay_out(self, folder: Path) -> None:
        """Makes it, in a directory that does not exist yet."""
        folder.mkdir()
        made: dict[Node, Path] = {}
        for name, node in sorted(self.names.items()):
            path = folder / name
            if node.kind == "directory":
                path.mkdir()
            elif node.kind == "link":
                path.symlink_to(os.fsdecode(self.contents[node].data))
            elif node in made:
                os.link(made[node], path)
            else:
                data, changed = self.contents[node]
                path.write_bytes(data)
                path.chmod(node.mode)
                if changed is not None:
                    os.utime(path, ns=(changed, changed))
                made[node] = path


def tree(folder: str | Path) -> tuple[Tree, dict[tuple[int, int], Node]]:
    """What lies in a directory; and the node of each inode."""
    found, nodes = Tree({}, {}), dict[tuple[int, int], Node]()
    for directory, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(directory, name)
            status = os.lstat(path)
            inode = status.st_dev, status.st_ino
            if inode not in nodes:
                kind, data = "file", b""
                if stat.S_ISDIR(status.st_mode):
                    kind = "directory"
                elif stat.S_ISLNK(status.st_mode):
                    kind, data = "link", os.fsencode(os.readlink(path))
                else:
                    data = Path(path).read_bytes()
                nodes[inode] = Node(kind, data, stat.S_IMODE(status.st_mode))
                found.contents[nodes[inode]] = Content(data, status.st_mtime_ns)
            found.names[os.path.relpath(path, folder)] = nodes[inode]
    return found, nodes


def applied(content: Content, change: Change) -> Content:
    """What is in a file after a change of it."""
    data, offset = content.data, change.offset
    if change.what == "sync":
        return content
    if change.what == "time":
        return Content(data, offset)
    if change.what == "size":
        return Content(data[:offset].ljust(offset, b"\0"))
    rest = data[offset + len(change.data) :]
    return Content(data[:offset].ljust(offset, b"\0") + change.data + rest)


class Recorder:
    """Notes what this process does in a directory.

    Args:
        folder: The directory, which exists.
        before: Called with number and name before each call on what lies there; it may raise the
            OSError that the call shall raise, or kill the process.

    Attributes:
        calls: Names of the calls; `paths` has what each was about, relative to the directory.
        changes: What they changed.
        start: What was there before.
    """

    def __init__(self, folder: Path, before: Before = lambda number, name: None) -> None:
        self.root, self._before = os.path.realpath(folder), before
        self.calls: list[str] = []
        self.paths: list[str] = []
        self.changes: list[Change] = []
        self._lock, self._inside = threading.RLock(), threading.local()
        self.start, self._nodes = tree(self.root)
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        for name in (*CHANGES, *LOOKS):
            owner: Any = fcntl if name == "flock" else os
            if hasattr(owner, name):
                self._watch(owner, name, name)
        self._watch(drafts, "_fallocate", "fallocate")
        for owner in (builtins, io):
            self._watch(owner, "open", "open to read")
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def missed(self) -> set[str]:
        """Paths at which something else lies than what was noted."""
        names, contents = dict(self.start.names), dict(self.start.contents)
        for change in self.changes:
            for name, node in change.names:
                names.pop(name, None)
                if node is not None:
                    names[name] = node
            if change.node is not None:
                before = contents.get(change.node, Content(change.node.start))
                contents[change.node] = applied(before, change)

        def rows(of: Tree) -> set[tuple[str, str, bytes]]:
            return {
                (name, node.kind, of.contents.get(node, Content(node.start)).data)
                for name, node in of.names.items()
            }

        return {row[0] for row in rows(Tree(names, contents)) ^ rows(tree(self.root)[0])}

    def _watch(self, owner: Any, attribute: str, name: str) -> None:
        real = getattr(owner, attribute)
        note = getattr(self, f"_{name}", None)

        def call(*args: Any, **options: Any) -> Any:
            if getattr(self._inside, "on", False):
                return real(*args, **options)
            with self._lock, self._apart():
                path = self._path(name, args, options)
                if not self._is_ours(path):
                    return real(*args, **options)
                told = name
                if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                    told = "open to read"
                self.calls.append(told)
                self.paths.append(self._relative(path))
                try:
                    self._before(len(self.calls), told)
                except OSError as error:
                    if name == "fallocate":  # It returns its errors.
                        return error.errno
                    raise
                if note is None:
                    return real(*args, **options)
                return note(lambda: real(*args, **options), path, *args, **options)

        self._patches.enter_context(mock.patch.object(owner, attribute, call))

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """What we call ourselves is not noted."""
        self._inside.on = True
        try:
            yield
        finally:
            self._inside.on = False

    def _path(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> str:
        """The path of what a call is about, its last part as it is."""
        given = args[1] if name in ("link", "symlink", "rename", "replace") else (*args, ".")[0]
        if isinstance(given, int):
            return self._of_descriptor(given)
        given = os.fsdecode(given)
        base = options.get("dst_dir_fd", options.get("dir_fd"))
        if base is not None:
            given = os.path.join(self._of_descriptor(base), given)
        if given.startswith("/proc/self/fd/"):
            return self._of_descriptor(int(given.rpartition("/")[2]))
        directory, last = os.path.split(os.path.abspath(given))
        return os.path.join(os.path.realpath(directory), last)

    def _of_descriptor(self, number: int) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            return ""

    def _is_ours(self, path: str) -> bool:
        return path == self.root or path.startswith(self.root + os.sep)

    def _relative(self, path: str) -> str:
        return os.path.relpath(path, self.root)

    def _node(self, of: str | int) -> Node:
        status = os.fstat(of) if isinstance(of, int) else os.lstat(of)
        return self._nodes[status.st_dev, status.st_ino]

    def _new(self, of: str | int, kind: str, start: bytes = b"") -> Node:
        status = os.fstat(of) if isinstance(of, int) else os.lstat(of)
        made = Node(kind, start, stat.S_IMODE(status.st_mode))
        self._nodes[status.st_dev, status.st_ino] = made
        return made

    def _named(self, *names: tuple[str, Node | None]) -> None:
        pairs = tuple((self._relative(path), node) for path, node in names)
        directories = {os.path.dirname(name) or "." for name, _ in pairs}
        assert len(directories) == 1, f"a rename between directories: {pairs}"
        self.changes.append(Change("names", directory=directories.pop(), names=pairs))

    # What each call does. `real` makes it.

    def _open(self, real: Any, path: str, given: Any, flags: int, *_: Any, **__: Any) -> int:
        existed = os.path.lexists(path)
        fd: int = real()
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            self._new(fd, "file")
        elif flags & os.O_CREAT and not existed:
            self._named((path, self._new(fd, "file")))
        elif flags & os.O_TRUNC:
            self.changes.append(Change("size", self._node(fd)))
        return fd

    def _wrote(self, fd: int, offset: int, data: bytes, done: int) -> int:
        self.changes.append(Change("write", self._node(fd), offset, data[:done]))
        return done

    def _write(self, real: Any, path: str, fd: int, data: Any) -> int:
        appends = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
        offset = os.fstat(fd).st_size if appends else os.lseek(fd, 0, os.SEEK_CUR)
        return self._wrote(fd, offset, bytes(data), real())

    def _writev(self, real: Any, path: str, fd: int, pieces: Any) -> int:
        return self._write(real, path, fd, b"".join(map(bytes, pieces)))

    def _pwrite(self, real: Any, path: str, fd: int, data: Any, offset: int) -> int:
        return self._wrote(fd, offset, bytes(data), real())

    def _pwritev(self, real: Any, path: str, fd: int, pieces: Any, offset: int, *_: Any) -> int:
        return self._wrote(fd, offset, b"".join(map(bytes, pieces)), real())

    def _ftruncate(self, real: Any, path: str, fd: int, size: int) -> None:
        real()
        self.changes.append(Change("size", self._node(fd), size))

    def _fallocate(self, real: Any, path: str, fd: int, size: int) -> int:
        code: int = real()
        if code == 0:
            self._grown(fd)
        return code

    def _posix_fallocate(self, real: Any, path: str, fd: int, *_: Any) -> None:
        real()
        self._grown(fd)

    def _grown(self, fd: int) -> None:
        self.changes.append(Change("size", self._node(fd), os.fstat(fd).st_size))

    def _fchmod(self, real: Any, path: str, fd: int, mode: int) -> None:
        real()
        self._node(fd).mode = mode

    def _utime(self, real: Any, path: str, of: Any, *_: Any, **__: Any) -> None:
        real()
        status = os.fstat(of) if isinstance(of, int) else os.stat(of)
        node = self._nodes[status.st_dev, status.st_ino]
        self.changes.append(Change("time", node, status.st_mtime_ns))

    def _fsync(self, real: Any, path: str, fd: int) -> None:
        real()
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            self.changes.append(Change("names synced", directory=self._relative(path)))
        else:
            self.changes.append(Change("sync", self._node(fd)))

    _fdatasync = _fsync

    def _link(self, real: Any, path: str, *_: Any, **__: Any) -> None:
        real()
        self._named((path, self._node(path)))

    def _symlink(self, real: Any, path: str, target: Any, *_: Any, **__: Any) -> None:
        real()
        self._named((path, self._new(path, "link", os.fsencode(target))))

    def _replace(self, real: Any, path: str, old: Any, new: Any, **options: Any) -> None:
        source = self._path("unlink", (old,), {"dir_fd": options.get("src_dir_fd")})
        node = self._node(source)
        real()
        self._named((source, None), (path, node))

    _rename = _replace

    def _unlink(self, real: Any, path: str, *_: Any, **__: Any) -> None:
        real()
        self._named((path, None))

    _remove = _rmdir = _unlink

    def _mkdir(self, real: Any, path: str, *_: Any, **__: Any) -> None:
        real()
        self._named((path, self._new(path, "directory")))
