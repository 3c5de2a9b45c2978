"""What replaces a file has its owner, group, permissions, access control list and attributes."""

from __future__ import annotations

import errno
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pytest
import scenarios
from test_saving_kill import memory

import mfload
from mfload.saving import drafts
from mfload.saving.drafts import Draft

__all__ = ["memory"]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone")
OLD, NEW = scenarios.arrays(1), scenarios.arrays(2)
ACL = "system.posix_acl_access"
DEFAULT_ACL = "system.posix_acl_default"
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
WAYS: list[Callable[[], AbstractContextManager[None]]] = [
    nullcontext,
    faults.no_tmpfile,
    faults.no_links,
]


def acl(user: int, group: int, mask: int, other: int, named: tuple[int, int]) -> bytes:
    """A list with one named user: number and permissions."""
    none = 0xFFFFFFFF
    rows = [(1, user, none), (2, named[1], named[0]), (4, group, none), (16, mask, none),
            (32, other, none)]  # fmt: skip
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *row) for row in rows)


def put(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EPERM):
            pytest.skip("the file system has none")
        raise


def seen(path: Path) -> tuple[Any, ...]:
    found = path.stat()
    extended = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    return stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, extended


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@root
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", ["save", "shards", "single", "convert", "align"])
def test_all_of_it_is_taken_over(
    call: str, way: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    if way is faults.no_links and call in ("shards", "single"):
        pytest.skip("refused")
    target = tmp_path / "to" / "model.safetensors"
    old = mfload.save(OLD, target, max_shard_size=9000 if call in ("shards", "single") else None)
    for file in map(Path, old.files):
        os.chown(file, 1234, 2345)
        file.chmod(0o640)
        put(file, "user.note", b"mine")
        put(file, ACL, acl(6, 4, 4, 0, (1111, 4)))
    wanted = seen(Path(old.files[0]))
    mfload.save(NEW, tmp_path / "new.safetensors", align=8)
    with way():
        made = {
            "save": lambda: mfload.save(NEW, target, overwrite=True),
            "single": lambda: mfload.save(NEW, target, overwrite=True),
            "shards": lambda: mfload.save(NEW, target, max_shard_size=6000, overwrite=True),
            "convert": lambda: mfload.convert(tmp_path / "new.safetensors", target, overwrite=True),
            "align": lambda: mfload.align(tmp_path / "new.safetensors", target, overwrite=True),
        }[call]()
    assert wanted[1:3] == (1234, 2345)
    assert [seen(Path(file)) for file in made.files] == [wanted] * len(made.files)
    assert len(made.files) > 3 or call != "shards"


def test_what_lies_beside_the_weights_keeps_its_permissions(tmp_path: Path) -> None:
    source, target = tmp_path / "from", tmp_path / "to"
    for number, arrays in enumerate((OLD, NEW)):
        mfload.save(arrays, source / "model.safetensors", overwrite=True)
        (source / "config.json").write_text(f"{number}")
        mfload.convert(source, f"{target}/", overwrite=True)
        for path in () if number else target.iterdir():
            path.chmod(0o600)
    assert (target / "config.json").read_text() == "1"
    assert [stat.S_IMODE(path.stat().st_mode) for path in target.iterdir()] == [0o600, 0o600]


def test_a_default_list_of_the_directory_grants_nothing_new(tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    mfload.save(OLD, target)
    target.chmod(0o664)
    put(tmp_path, DEFAULT_ACL, acl(7, 7, 7, 0, (1111, 7)))
    wanted = seen(target)
    assert ACL not in wanted[3]
    for way in WAYS:
        with way():
            mfload.save(NEW, target, overwrite=True)
        assert seen(target) == wanted
    mfload.save(NEW, tmp_path / "other.safetensors")  # A new file has what the directory says.
    assert ACL in seen(tmp_path / "other.safetensors")[3]


@pytest.mark.parametrize(
    ("refused", "mode", "listed", "left"),
    [
        ("fchown", 0o660, False, 0o600),
        ("fchown", 0o644, False, 0o644),
        ("fchown", 0o664, False, 0o644),
        ("fchown", 0o604, False, 0o600),
        ("fchown", 0o660, True, 0o600),
        ("setxattr", 0o664, True, 0o600),
        ("setxattr", 0o640, False, 0o640),
        ("removexattr", 0o664, False, 0o664),
    ],
)
@root
def test_what_is_refused_is_never_more(
    refused: str,
    mode: int,
    listed: bool,
    left: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tmp_path / "model.safetensors"
    mfload.save(OLD, target)
    os.chown(target, 1234, 2345)
    target.chmod(mode)
    put(target, "user.note", b"mine")
    if listed:
        put(target, ACL, acl(6, 4, mode >> 3 & 7, mode & 7, (1111, 6)))

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, refused, refuse)
        mfload.save(NEW, target, overwrite=True)
    found, _, _, extended = seen(target)
    assert found == left
    assert ACL not in extended or refused == "removexattr"
    assert scenarios.found(target, {"new": NEW}) == "new"


@root
def test_a_user_who_may_not_give_files_away(memory: Path) -> None:
    target = memory / "model.safetensors"
    mfload.save(OLD, target)
    os.chown(target, 1234, 2345)
    target.chmod(0o664)
    memory.chmod(0o777)
    code = (
        "import os, sys, numpy, mfload\n"
        "mfload.save({}, sys.argv[2])\n"
        "os.setgroups([]); os.setgid(4321); os.setuid(4321)\n"
        "mfload.save({'w': numpy.ones(9)}, sys.argv[1], overwrite=True)\n"
    )
    command = [sys.executable, "-c", code, str(target), str(memory / "root.safetensors")]
    subprocess.run(command, check=True)
    assert seen(target) == (0o644, 4321, 4321, {})


@pytest.mark.parametrize("way", WAYS)
def test_nobody_may_do_more_meanwhile(
    way: Callable[[], AbstractContextManager[None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before each call that changes something: only its owner can open the draft."""
    target = tmp_path / "model.safetensors"
    mfload.save(OLD, target)
    target.chmod(0o640)
    modes: list[int] = []
    real = Draft.write

    def write(self: Draft, *given: Any) -> int:
        modes.append(stat.S_IMODE(os.fstat(self._fd).st_mode))
        return real(self, *given)

    monkeypatch.setattr(Draft, "write", write)
    with way():
        mfload.save(NEW, target, overwrite=True)
    assert set(modes) == {0o600}
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_file_that_may_not_be_written_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of a conversion that has ended after they got their permissions."""
    np.savez(tmp_path / "a.npz", **OLD)
    target = tmp_path / "model.safetensors"
    mfload.save(NEW, target)
    target.chmod(0o400)
    real = drafts.opened

    def opened(path: str, flags: int, *mode: int) -> Any:
        private = flags & os.O_RDWR and path.endswith("-00001") and os.path.exists(path)
        if private and stat.S_IMODE(os.stat(path).st_mode) == 0o400:
            raise PermissionError(errno.EACCES, "as for any user but root")
        return real(path, flags, *mode)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mfload.saving.publishing.SaveTarget.publish", stop)
        with pytest.raises(KeyboardInterrupt):
            mfload.convert(tmp_path / "a.npz", target, overwrite=True)
    assert [name for name in scenarios.hidden(tmp_path) if name.endswith("-00001")]
    monkeypatch.setattr(drafts, "opened", opened)
    mfload.convert(tmp_path / "a.npz", target, overwrite=True)
    assert scenarios.hidden(tmp_path) == []
    assert stat.S_IMODE(target.stat().st_mode) == 0o400
    assert scenarios.found(target, {"old": OLD}) == "old"


def test_one_private_file_keeps_all_private(tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    mfload.save(OLD, target, max_shard_size=9000)
    sorted(tmp_path.glob("model-*"))[-1].chmod(0o600)
    mfload.save(NEW, target, max_shard_size=9000, overwrite=True)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    assert scenarios.found(tmp_path, {"new": NEW}) == "new"
