"""Local files: opened afresh, checked to be the same, and closed."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import watch
from hypothesis import given, settings, strategies as st

from mfload import errors, sources
from mfload.sources import local
from mfload.sources.base import Identity
from mfload.sources.local import LocalFile, OpenFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "file"
    found.write_bytes(bytes(range(200)))
    return found


def test_bytes_by_offset(path: Path) -> None:
    source = LocalFile(path)
    assert (source.name, source.size) == (os.fspath(path), 200)
    with watch.nothing_left():
        assert source.read(10, 5) == bytes(range(10, 15))
        assert source.read(0, 0) == b""
        assert source.read(0, 200) == path.read_bytes()
        source.check()


class TestPlaces:
    BLOBS = (
        f"blobs/{'0a' * 32}",  # Hugging Face, of large files.
        f"blobs/{'0a' * 20}",  # And of small ones.
        "blobs/an-etag-of-a-mirror",
        f"blobs/sha256-{'0a' * 32}",  # Ollama.
        f"blobs/sha256/{'0a' * 32}",  # OCI.
        f"files/md5/ab/{'c9' * 15}",  # DVC.
        f"annex/objects/x/SHA256E-s123--{'0a' * 32}.safetensors",  # git-annex.
        f"linked/{'0a' * 32}",
        "linked/etag",
    )

    @pytest.mark.parametrize("exists", [True, False])
    @pytest.mark.parametrize("blob", BLOBS)
    def test_a_link_into_a_cache_is_not_followed(
        self, blob: str, exists: bool, tmp_path: Path
    ) -> None:
        (tmp_path / "blobs").mkdir()
        (tmp_path / "linked").symlink_to("blobs")
        (tmp_path / blob).parent.mkdir(parents=True, exist_ok=True)
        if exists:
            (tmp_path / blob).write_bytes(b"")
        link = os.path.join(tmp_path, "link")
        other = os.path.join(tmp_path, "other")
        os.symlink(blob, link)
        os.symlink(link, other)
        assert local.is_cached(link)
        assert not local.is_cached(other)
        assert not local.is_cached(os.path.join(tmp_path, blob))
        assert local.place_of(link) == local.place_of(other) == link

    def test_names_of_the_user_s(self, tmp_path: Path) -> None:
        """Directories may be called by a hash, as those of runs and snapshots are."""
        names = ["model.safetensors", "step-00000000000000001000", "0123abcd",
                 "a/blobs.safetensors", "blobs/x/model.safetensors",
                 f"{'0a' * 20}/model.safetensors",
                 "3f0c6b1e-8e4c-4b4e-9d3a-0f6d5c1b2a39.safetensors"]  # fmt: skip
        for n, name in enumerate(names):
            link = os.path.join(tmp_path, f"link{n}")
            os.symlink(name, link)
            assert local.place_of(link) == os.path.join(tmp_path, name)
        (tmp_path / ("0a" * 32)).mkdir()
        (tmp_path / "latest").symlink_to("0a" * 32)
        assert local.place_of(os.path.join(tmp_path, "latest")) == str(tmp_path / ("0a" * 32))

    @settings(max_examples=200, deadline=None)
    @given(st.data())
    def test_elsewhere_it_is_where_the_system_looks(self, data: st.DataObject) -> None:
        """Random links between files and directories, some of which lead nowhere."""
        parts = st.sampled_from(["a", "b", "c", "d", "..", "."])
        paths = st.lists(parts, min_size=1, max_size=4).map("/".join)
        with tempfile.TemporaryDirectory() as made:
            root = os.path.realpath(made)
            for name in data.draw(st.lists(paths, max_size=8)):
                with contextlib.suppress(OSError):
                    if data.draw(st.booleans()):
                        target = data.draw(paths)
                        absolute = data.draw(st.booleans())
                        os.symlink(os.path.join(root, target) if absolute else target,
                                   os.path.join(root, name))  # fmt: skip
                    elif data.draw(st.booleans()):
                        os.mkdir(os.path.join(root, name))
                    else:
                        Path(root, name).write_text(name)
            for name in (data.draw(paths), "a", "b", "a/c"):
                path = os.path.join(root, name)
                place = local.place_of(path)
                try:
                    expected = os.stat(path)
                except OSError:
                    continue  # A loop, or nothing.
                assert local.place_of(place) == place
                assert os.path.samestat(os.stat(place), expected)
                if name[-1] != "." and os.path.isfile(path):
                    assert place == os.path.realpath(path)

    def test_what_is_no_link(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert local.place_of("x") == str(tmp_path / "x")
        assert local.place_of("a\0b/x") == "a\0b/x"
        assert not local.is_cached("x\0")
        os.symlink("x", "x")
        assert local.place_of("x") == str(tmp_path / "x")


def test_short_reads_are_taken_up_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = LocalFile(path)
    real, vectored = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: real(fd, min(nbytes, 7), at))
    monkeypatch.setattr(os, "preadv", lambda fd, vector, at: vectored(fd, [vector[0][:7]], at))
    assert source.read(3, 150) == path.read_bytes()[3:153]
    memory = memoryview(bytearray(150))
    with OpenFile(source) as opened:
        opened.read([memory], 3)
    assert memory == path.read_bytes()[3:153]


def test_an_end_before_its_time_is_a_change(path: Path) -> None:
    with pytest.raises(errors.SourceChangedError, match="210 bytes") as info:
        LocalFile(path).read(190, 20)
    with (
        OpenFile(LocalFile(path)) as opened,
        pytest.raises(errors.SourceChangedError, match="210 bytes"),
    ):
        opened.read([memoryview(bytearray(20))], 190)
    assert info.value.file == os.fspath(path)


def test_a_failing_read_is_a_read_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = LocalFile(path)

    def fail(*_: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    with watch.nothing_left():
        with pytest.raises(errors.ReadError) as info:
            source.read(0, 10)
        assert info.value.errno == errno.EIO
        del info


def _socket(path: Path) -> Any:
    made = socket.socket(socket.AF_UNIX)
    with contextlib.chdir(path.parent):  # The path of a socket has 107 bytes at most.
        made.bind(path.name)
    return made


@pytest.mark.parametrize("kind", ["nothing", "directory", "fifo", "socket", "loop", "device",
                                  "through a file", "null byte", "dangling"])  # fmt: skip
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    held = None
    expected: type[Exception] = errors.SourceError
    match kind:
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "socket":
            held = _socket(path)
        case "loop":
            path.symlink_to(path)
        case "device":
            path = Path("/dev/null")
        case "through a file":
            path.write_bytes(b"")
            path = path / "below"
            expected = errors.SourceNotFoundError
        case "null byte":
            path = Path(f"{path}\0")
            expected = errors.SourceNotFoundError
        case "dangling":
            path.symlink_to(tmp_path / "nowhere")
            expected = errors.SourceNotFoundError
        case _:
            expected = errors.SourceNotFoundError
    before = sorted(watch.open_files())
    with pytest.raises(expected) as info:
        LocalFile(path)
    assert isinstance(info.value, errors.SourceError)
    assert info.value.file == os.fspath(path)
    assert sorted(watch.open_files()) == before
    if held is not None:
        held.close()


def test_what_may_not_be_read_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(errors.SourcePermissionError) as info:
        LocalFile(path).read(0, 1)
    assert isinstance(info.value, PermissionError)
    assert info.value.errno == errno.EACCES


def test_no_descriptor_is_left_when_looking_fails(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    source = LocalFile(path)
    before = sorted(watch.open_files())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail)
        with pytest.raises(errors.ReadError):
            source.read(0, 1)
    assert sorted(watch.open_files()) == before


@pytest.mark.parametrize("field", range(4))
def test_every_field_of_an_identity_counts(path: Path, field: int) -> None:
    source = LocalFile(path)
    assert source.identity is not None
    other = list(source.identity)
    other[field] += 1
    with pytest.raises(errors.SourceChangedError, match="changed") as info:
        source.compare(Identity(*other))
    assert info.value.expected == source.identity
    assert pickle.loads(pickle.dumps(source.identity)).matches(source.identity)
    source.identity = Identity(*other)
    with pytest.raises(errors.SourceChangedError):
        source.check()
    with watch.nothing_left(), pytest.raises(errors.SourceChangedError):
        OpenFile(source)


def test_a_file_that_is_gone_changed(path: Path) -> None:
    source = LocalFile(path)
    path.unlink()
    with pytest.raises(errors.SourceChangedError, match="gone"):
        source.check()


def test_links_are_followed(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    source = LocalFile(link)
    assert source.read(0, 3) == b"\0\1\2"
    other = tmp_path / "other"
    other.write_bytes(bytes(range(200)))
    link.unlink()
    link.symlink_to(other)
    with pytest.raises(errors.SourceChangedError):
        source.check()


def test_closing_twice_is_closing_once(path: Path) -> None:
    opened = OpenFile(LocalFile(path))
    with opened:
        pass
    opened.close()
    assert opened.fd == -1


def test_another_machine_numbers_its_devices_differently(path: Path) -> None:
    """An identity that was pickled counts without its device number; every other field counts."""
    source = LocalFile(path)
    sent = pickle.loads(pickle.dumps(source.identity._replace(device=99)))
    source.compare(sent)
    for field in ("inode", "size", "mtime_ns"):
        with pytest.raises(errors.SourceChangedError):
            source.compare(sent._replace(**{field: 1}))


def test_a_file_is_kept_when_asked(path: Path) -> None:
    source = LocalFile(path)
    with watch.nothing_left():
        with source.open() as first, source.open() as second:
            assert first.fd != second.fd
        source.keep(True)
        before = watch.open_files()
        assert source.read(3, 2) == b"\3\4"
        with source.open() as first, source.open() as second, source.open(os.O_NOATIME) as apart:
            assert first.fd == second.fd != apart.fd
        del first, second, apart
        assert sorted(watch.open_files()) == sorted([*before, os.path.realpath(path)])
        assert os.path.exists(f"/proc/self/fd/{_fd(source)}")
        source.keep(False)
        source.keep(False)


def test_an_error_keeps_no_file_open(path: Path) -> None:
    source = LocalFile(path)
    source.keep(True)
    source.identity = source.identity._replace(size=1)
    before = watch.open_files()
    with pytest.raises(errors.SourceChangedError) as info:
        source.open()
    assert watch.open_files() == before
    assert info.value.file == source.name


def _fd(source: LocalFile) -> int:
    with source.open() as opened:
        return opened.fd


def test_a_kept_number_is_no_other_files_while_someone_reads(path: Path, tmp_path: Path) -> None:
    source = LocalFile(path)
    source.keep(True)
    reading = source.open()
    source.keep(False)
    others = [os.open(tmp_path, os.O_RDONLY) for _ in range(4)]
    assert reading.fd not in others
    memory = memoryview(bytearray(200))
    reading.read([memory], 0)
    assert memory == path.read_bytes()
    number = reading.fd
    reading.close()
    del reading
    assert os.open(tmp_path, os.O_RDONLY) == number
    for each in (*others, number):
        os.close(each)


def test_a_source_that_is_dropped_closes_what_it_kept(path: Path) -> None:
    with watch.nothing_left():
        source = LocalFile(path)
        source.keep(True)
        assert source.read(0, 1) == b"\0"
        del source


def test_a_file_that_is_no_longer_kept_while_it_opens(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = LocalFile(path)
    source.keep(True)
    real = local._open

    def slow(*args: Any) -> Any:
        source.keep(False)  # As another thread may do meanwhile.
        return real(*args)

    monkeypatch.setattr(local, "_open", slow)
    with watch.nothing_left():
        assert source.read(0, 3) == b"\0\1\2"


def test_of_too_many_files_the_oldest_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_most_kept", lambda: 4)
    sources: list[LocalFile] = []
    for n in range(10):
        (tmp_path / str(n)).write_bytes(bytes([n]) * 9)
        sources.append(LocalFile(tmp_path / str(n)))
        sources[-1].keep(True)

    def kept() -> set[int]:
        names = (os.path.split(name) for name in watch.open_files())
        return {int(name) for folder, name in names if folder == os.path.realpath(tmp_path)}

    with watch.nothing_left():
        for n in range(10):
            assert sources[n].read(2, 3) == bytes([n]) * 3
            assert kept() == set(range(max(0, n - 3), n + 1))
        order = [int(n) for n in np.random.default_rng(0).integers(0, 10, 300)]
        for n in order:
            assert sources[n].read(0, 9) == bytes([n]) * 9
            assert len(kept()) <= 4
        sources[3].keep(False)
        assert 3 not in kept()
        for n in range(10):
            sources[n].keep(False)
            sources[n].keep(False)


def test_at_most_a_quarter_of_the_descriptors_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in ((1024, 256), (3, 1), (10**6, 1024), (-1, 1024)):
        monkeypatch.setattr(os, "sysconf", lambda _, limit=limit: limit)
        assert local._most_kept() == most


def test_what_is_kept_gives_way_where_descriptors_run_out(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = LocalFile(path)
    source.keep(True)
    kept = _fd(source)
    real, tried = os.open, 0

    def full(*args: Any) -> int:
        nonlocal tried
        tried += 1
        if tried == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(*args)

    monkeypatch.setattr(os, "open", full)
    assert len(LocalFile(tmp_path / "file").read(0, 200)) == 200
    assert tried == 2
    assert not os.path.exists(f"/proc/self/fd/{kept}")
    tried = 0
    source.keep(False)
    with pytest.raises(errors.SourceError, match="many open files"):
        LocalFile(path).read(0, 1)


def test_a_forked_child_closes_what_was_kept(path: Path) -> None:
    source = LocalFile(path)
    source.keep(True)
    kept = _fd(source)
    child = os.fork()
    if child == 0:
        gone = not os.path.exists(f"/proc/self/fd/{kept}")
        os._exit(0 if gone and source.read(0, 3) == b"\0\1\2" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert _fd(source) == kept
    source.keep(False)


@pytest.mark.parametrize("count", [1, 5])
def test_an_error_of_any_kind_ends_what_is_called_at_once(count: int) -> None:
    def call(number: int) -> None:
        if number == count - 1:
            raise IndexError(number)

    with pytest.raises(IndexError):
        sources.at_once(call, range(count), 2)


def test_what_is_called_at_once_does_not_hold_up_the_exit() -> None:
    daemons: list[bool] = []
    sources.at_once(lambda _: daemons.append(threading.current_thread().daemon), range(3), 2)
    assert daemons == [True] * 3
