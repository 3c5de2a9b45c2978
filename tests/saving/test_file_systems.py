"""File systems that lock, link and refuse unlike a local disk: NFS, SMB, FUSE, mounts."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import faults
import numpy as np
import pytest
import scenarios

import mfload
from mfload import errors
from mfload.saving import drafts, locks
from mfload.saving.publishing import SaveTarget

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone")
OLD, NEW = scenarios.arrays(1), scenarios.arrays(2)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def refused(code: int) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> None:
        raise OSError(code, os.strerror(code))

    return call


def can_write(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY


@contextmanager
def locks_for_writers() -> Generator[None]:
    """NFS: flock is a lock of the bytes, which takes a descriptor that may write them."""
    real = fcntl.flock

    def flock(fd: int, what: int) -> None:
        if what & fcntl.LOCK_EX and not can_write(fd):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(fd, what)

    with faults.no_tmpfile(), mock.patch.object(fcntl, "flock", flock):
        yield


@contextmanager
def locks_that_bind() -> Generator[None]:
    """SMB: the bytes of a locked file can't be read or written through another descriptor."""
    held: dict[tuple[int, int], int] = {}
    real = fcntl.flock

    def key(fd: int) -> tuple[int, int]:
        found = os.fstat(fd)
        return found.st_dev, found.st_ino

    def flock(fd: int, what: int) -> None:
        real(fd, what)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            if what & fcntl.LOCK_UN:
                held.pop(key(fd), None)
            else:
                held[key(fd)] = fd

    def locked_by(fd: int) -> int:
        holder = held.get(key(fd), fd)
        with suppress(OSError):
            if key(holder) == key(fd):
                return holder
        return fd  # It was closed.

    def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(fd: int, *args: Any) -> Any:
            if locked_by(fd) != fd:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return call(fd, *args)

        return inner

    with faults.no_tmpfile(), mock.patch.object(fcntl, "flock", flock):
        names = "read", "pread", "preadv", "write", "pwrite", "pwritev"
        patches = [mock.patch.object(os, name, guarded(getattr(os, name))) for name in names]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def test_a_killed_draft_goes_where_only_writers_lock(target: Path) -> None:
    place = SaveTarget(target).place
    left = Path(place.at(f"{place.hidden}0123456789abcdef-00001"))
    left.write_bytes(b"half")
    with locks_for_writers():
        mfload.save(NEW, target)
    assert os.listdir(target.parent) == [target.name]


def test_a_killed_draft_that_stays_is_told(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without locks it can't be told from that of a save which is at work."""
    monkeypatch.setattr(fcntl, "flock", faults.no_locks)
    place = SaveTarget(target).place
    left = Path(place.at(f"{place.hidden}0123456789abcdef-00001"))
    left.write_bytes(b"half")
    for limit in (None, 6000):
        saved = mfload.save(NEW, target, overwrite=True, max_shard_size=limit)
        assert [left.name in note for note in saved.notes if "did not finish" in note] == [True]
    left.unlink()
    assert "did not finish" not in str(mfload.save(NEW, target, overwrite=True))


@pytest.mark.parametrize("limit", [None, 1 << 20])
def test_locks_that_keep_other_descriptors_out(limit: int | None, target: Path) -> None:
    arrays = {name: np.full(3 << 20, 7, np.uint8) for name in ("a", "b")}
    with locks_that_bind():
        saved = mfload.save(arrays, target, checksums=True, max_shard_size=limit)
        made = mfload.align(saved.files[-1], target.with_name("aligned.safetensors"))
        assert mfload.verify(saved.files[-1]).ok
    assert mfload.verify(made.files[-1]).ok


def test_a_lock_whose_file_is_gone(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS: the other writer removed it between the open and the lock."""
    real, gone = fcntl.flock, list[int]()
    path = locks.lock_of(SaveTarget(target).place)

    def flock(fd: int, what: int) -> None:
        if not gone and stat.S_ISREG(os.fstat(fd).st_mode):
            gone.append(fd)
            os.unlink(path)
            Path(path).touch()  # The next writer's.
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        real(fd, what)

    monkeypatch.setattr(fcntl, "flock", flock)
    place = SaveTarget(target).place
    with locks.only_writer(place, None):
        assert gone
        with open(path) as file, pytest.raises(BlockingIOError):
            real(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    "code",
    [errno.EPERM, errno.EIO, errno.ENOSYS, errno.EXDEV, errno.ENOTSUP, errno.EACCES, 524],
)
@pytest.mark.parametrize("limit", [None, 6000])
def test_without_links_however_that_is_said(code: int, limit: int | None, target: Path) -> None:
    with faults.no_links(code):
        mfload.save(OLD, target, max_shard_size=limit, checksums=True)
        with pytest.raises(errors.TargetExistsError):
            mfload.save(NEW, target, max_shard_size=limit)
        if limit is None:
            mfload.save(NEW, target, overwrite=True, checksums=True)
    assert scenarios.found(target.parent, {"old": OLD, "new": NEW}) == ("old" if limit else "new")
    assert scenarios.hidden(target.parent) == []


@contextmanager
def no_rename_of_open_files() -> Generator[None]:
    """A mount of an object store: no links, and a rename only of what is closed."""
    real = os.replace

    def replace(old: str, new: str) -> None:
        opened = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
        if any(os.path.exists(fd) and os.path.samefile(fd, old) for fd in opened):
            refused(errno.EOPNOTSUPP)()
        real(old, new)

    with faults.no_links(errno.ENOSYS), mock.patch.object(os, "replace", replace):
        yield


@pytest.mark.parametrize("limit", [None, 6000])
def test_an_open_file_that_can_t_be_renamed(limit: int | None, target: Path) -> None:
    with no_rename_of_open_files():
        mfload.save(OLD, target, max_shard_size=limit, checksums=True)
        if limit is None:
            mfload.save(NEW, target, checksums=True, overwrite=True)
    assert mfload.verify(target.parent).ok
    assert scenarios.found(target.parent, {"old": OLD, "new": NEW}) == ("old" if limit else "new")
    assert scenarios.hidden(target.parent) == []


def test_no_renames_at_all(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mfload.save(OLD, target, checksums=True)
    monkeypatch.setattr(os, "replace", refused(errno.ENOSYS))
    with faults.no_links(errno.ENOSYS):
        for path in (target, target.with_name("other.safetensors")):
            with pytest.raises(errors.TargetError, match="could not put the files in their place"):
                mfload.save(NEW, path, overwrite=True, checksums=True)
    monkeypatch.undo()
    assert mfload.verify(target).ok
    assert scenarios.found(target, {"old": OLD}) == "old"
    assert scenarios.hidden(target.parent) == []


@pytest.mark.parametrize("call", ["fchmod", "fchown", "setxattr"])
@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL])
def test_what_can_t_be_changed_is_left(
    call: str, code: int, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mfload.save(OLD, target)
    monkeypatch.setattr(os, call, refused(code))
    mfload.save(NEW, target, overwrite=True)
    assert scenarios.found(target, {"new": NEW}) == "new"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, 524])
def test_a_directory_that_can_t_be_synced(
    code: int, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: refused(code)() if stat.S_ISDIR(os.fstat(fd).st_mode) else real(fd),
    )
    mfload.save(NEW, target, checksums=True, max_shard_size=6000)
    assert mfload.verify(target.parent).ok


@pytest.mark.parametrize("there", [False, True])
def test_a_directory_whose_sync_fails(
    there: bool, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on WSL's mounts of shares. The error says what lies there now."""
    if there:
        mfload.save(OLD, target)
    real = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: refused(errno.EIO)() if stat.S_ISDIR(os.fstat(fd).st_mode) else real(fd),
    )
    with pytest.raises(errors.WriteError, match="the new file is there, whole"):
        mfload.save(NEW, target, overwrite=True)
    assert scenarios.found(target, {"old": OLD, "new": NEW}) == "new"


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENODEV, errno.ENOSYS, 524])
def test_no_room_can_be_made(code: int, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_fallocate", lambda fd, nbytes: code)
    mfload.save(NEW, target)
    assert scenarios.found(target, {"new": NEW}) == "new"


def test_a_file_that_is_a_mount(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's: the error says what to do, and the old checkpoint keeps its manifest."""
    mfload.save(OLD, target, checksums=True)
    monkeypatch.setattr(os, "replace", refused(errno.EBUSY))
    with pytest.raises(errors.TargetError, match="mount its directory") as caught:
        mfload.save(NEW, target, overwrite=True, checksums=True)
    assert caught.value.errno == errno.EBUSY
    monkeypatch.undo()
    assert mfload.verify(target).ok
    assert scenarios.found(target, {"old": OLD}) == "old"
    assert scenarios.hidden(target.parent) == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("background", [False, True])
def test_a_directory_that_can_t_be_written(
    background: bool, code: int, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is of the directory, not of a lock, which was never there."""
    real = os.open

    def call(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT and target.parent == Path(path).parent:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", call)
    save: Callable[[], object] = partial(mfload.save, NEW, target)
    if background:
        save = mfload.save(NEW, target, background=True).result
    with pytest.raises(errors.TargetError, match="could not make files in the target's directory"):
        save()
    assert os.listdir(target.parent) == []


def test_a_label_of_selinux_stays(target: Path) -> None:
    mfload.save(OLD, target)
    label = b"system_u:object_r:container_file_t:s0"
    try:
        os.setxattr(target, "security.selinux", label)
    except OSError:
        pytest.skip("it can't be set here")
    mfload.save(NEW, target, overwrite=True)
    assert os.getxattr(target, "security.selinux") == label
