"""`convert`: any format into safetensors, in bounded memory, and on after a kill."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import mfload
from mfload import errors
from mfload.checking import copying, rewriting, sealing
from mfload.planning import lots, memory
from mfload.saving import journal, publishing
from mfload.saving.drafts import Draft
from mfload.saving.publishing import SaveTarget

_random = np.random.default_rng(16)
ARRAYS: dict[str, Any] = {
    "large": _random.standard_normal((300, 500)).astype(np.float32),
    "swapped": np.arange(1000, dtype=">i4").reshape(10, 100),
    "columns": np.asfortranarray(_random.standard_normal((70, 90))),
    "deep": _random.integers(0, 255, (2, 3, 40, 50), np.uint8),
    "scalar": np.float64(2.5),
    "none": np.empty((0, 3), np.int16),
    "odd": np.arange(7, dtype=np.int8),
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BLOCK", 64 << 10)


@pytest.fixture(params=["stored", "deflated", "safetensors"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return _source(tmp_path / "in", request.param)


def _source(directory: Path, kind: str) -> Path:
    directory.mkdir(exist_ok=True)
    if kind == "safetensors":
        native = {k: v.astype(v.dtype.newbyteorder("="), order="C") for k, v in _items()}
        path = directory / "a.safetensors"
        safetensors.numpy.save_file(native, path, {"who": "me"})
        return path
    path = directory / "a.npz"
    (np.savez_compressed if kind == "deflated" else np.savez)(path, **ARRAYS)
    return path


def _items() -> Iterator[tuple[str, Any]]:
    return ((name, np.asarray(array)) for name, array in ARRAYS.items())


def _assert_same(path: Path) -> None:
    found = mfload.load(path, "numpy")
    assert found.keys() == ARRAYS.keys()
    for name, array in _items():
        wanted = array.astype(array.dtype.newbyteorder("="))
        assert found[name].dtype == wanted.dtype
        assert found[name].shape == wanted.shape
        assert found[name].tobytes() == wanted.tobytes()


def _hidden(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.startswith(".mfload"))


@pytest.mark.parametrize("limit", [None, 100_000])
@pytest.mark.parametrize("overhead", [None, 4 << 20])
def test_every_tensor(
    source: Path, tmp_path: Path, limit: int | None, overhead: int | None
) -> None:
    seen: list[tuple[int, int]] = []
    done = mfload.convert(
        source,
        f"{tmp_path}/out/",
        max_shard_size=limit,
        progress=lambda at, of: seen.append((at, of)),
        options=mfload.Options(max_host_overhead=overhead, threads=2),
    )
    _assert_same(tmp_path / "out")
    assert done.tensors == len(ARRAYS)
    assert (len(done.files) > 1) == (limit is not None)
    assert str(done).startswith("converted")
    assert seen[-1][0] == seen[-1][1]
    assert not _hidden(tmp_path / "out")
    assert mfload.verify(tmp_path / "out").ok
    assert not mfload.diff(source, tmp_path / "out").changed


def test_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size of slab cuts the same tensors, also inside of the later dims."""
    path = _source(tmp_path, "deflated")
    for nbytes in (1, 50, 999, 4321, 70_000):
        monkeypatch.setattr(memory, "OVERHEAD", nbytes)
        boxes = [
            list(lots.ranges([info], nbytes, nbytes))
            for info in mfload.open(path)._index.tensors.values()  # pyright: ignore
            if info.nbytes
        ]
        assert any(len(each) > 1 for each in boxes)
        if nbytes > 900:
            mfload.convert(path, tmp_path / f"{nbytes}.safetensors")
            _assert_same(tmp_path / f"{nbytes}.safetensors")


def test_metadata_stays(tmp_path: Path) -> None:
    path = _source(tmp_path, "safetensors")
    mfload.convert(path, tmp_path / "b.safetensors")
    with safetensors.safe_open(tmp_path / "b.safetensors", "numpy") as opened:
        assert opened.metadata() == {"who": "me"}


def test_some_of_the_tensors(tmp_path: Path) -> None:
    x = np.arange(12.0).reshape(3, 4)
    state = {"params": {"w": x, "b": [x[0], x[1]]}, "opt": [x, x], "step": 3}
    mfload.save(state, f"{tmp_path}/in/", max_shard_size=100, metadata={"who": "me"})
    mfload.verify(tmp_path / "in", mode="write")
    done = mfload.convert(tmp_path / "in", tmp_path / "p.safetensors", names="^params")
    assert done.files == (str(tmp_path / "p.safetensors"),)
    found = mfload.restore(tmp_path / "p.safetensors", framework="numpy")
    assert found.keys() == {"params"}
    assert (found["params"]["w"] == x).all()
    assert (found["params"]["b"][1] == x[1]).all()
    with safetensors.safe_open(tmp_path / "p.safetensors", "numpy") as opened:
        assert sorted(opened.keys()) == ["params.b.0", "params.b.1", "params.w"]
        assert opened.metadata()["who"] == "me"
    assert mfload.verify(tmp_path / "p.safetensors", mode="check").ok
    np.savez(tmp_path / "c.npz", good=np.asfortranarray(x), bad=np.zeros(3, np.complex128))
    mfload.convert(tmp_path / "c.npz", tmp_path / "c.safetensors", names=["good"])
    assert (mfload.load(tmp_path / "c.safetensors", "numpy")["good"] == x).all()
    with pytest.raises(errors.TensorNotFoundError):
        mfload.convert(tmp_path / "c.npz", tmp_path / "d.safetensors", names="nothing")


def test_manifests_go_along(source: Path, tmp_path: Path) -> None:
    mfload.verify(source, mode="write", checksums="both")
    mfload.convert(source, tmp_path / "out.safetensors")
    assert mfload.verify(tmp_path / "out.safetensors", mode="check").ok
    with source.open("r+b") as file:
        file.seek(source.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(errors.MfloadError):
        mfload.convert(source, tmp_path / "bad.safetensors")
    assert not (tmp_path / "bad.safetensors").exists()
    assert not _hidden(tmp_path)


class _Stop(KeyboardInterrupt):
    pass


def _stopping(monkeypatch: pytest.MonkeyPatch, writes: int, error: BaseException) -> list[int]:
    """Has writes fail after so many; returns the offsets of all."""
    made: list[int] = []
    real = Draft.write

    def write(self: Draft, offset: int, *given: Any) -> int:
        if len(made) >= writes:
            raise error
        made.append(offset)
        return real(self, offset, *given)

    monkeypatch.setattr(Draft, "write", write)
    return made


def test_goes_on_after_an_interrupt(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.safetensors"
    with monkeypatch.context() as patch:
        first = _stopping(patch, 6, _Stop())
        with pytest.raises(KeyboardInterrupt):
            mfload.convert(source, target)
    assert len(_hidden(tmp_path)) == 2
    assert not target.exists()
    with monkeypatch.context() as patch:
        second = _stopping(patch, 10**6, _Stop())
        done = mfload.convert(source, target)
    assert len(first) == 6
    assert not set(first) & set(second)
    assert "went on after" in str(done)
    _assert_same(target)
    assert not _hidden(tmp_path)


@pytest.mark.parametrize(("first", "second"), [(50_000, 99_000), (99_000, 50_000), (1, 200_000)])
def test_goes_on_with_slabs_of_another_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, second: int
) -> None:
    """As with another `max_host_overhead`, after a conversion that took too much memory."""
    source, target = _source(tmp_path / "in", "stored"), tmp_path / "out.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(memory, "OVERHEAD", 8 * first)
        made = _stopping(patch, 6, _Stop())
        with pytest.raises(KeyboardInterrupt):
            mfload.convert(source, target)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "OVERHEAD", 8 * second)
        again = _stopping(patch, 10**6, _Stop())
        done = mfload.convert(source, target)
    assert not set(made) & set(again)
    assert "went on after" in str(done)
    _assert_same(target)


def test_another_source_or_layout_starts_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.safetensors"
    for how in ("layout", "source", "save"):
        with monkeypatch.context() as patch:
            _stopping(patch, 6, _Stop())
            with pytest.raises(KeyboardInterrupt):
                mfload.convert(source, target, overwrite=True)
        assert len(_hidden(tmp_path)) == 2
        if how == "save":
            mfload.save({"x": np.zeros(3)}, target, overwrite=True)
        else:
            os.utime(source)
            done = mfload.convert(
                source, target, overwrite=True, align=64 if how == "layout" else 4096
            )
            assert "went on" not in str(done)
            _assert_same(target)
        assert not _hidden(tmp_path)


_DIES = """
import os, sys
import mfload
from mfload.checking import copying
from mfload.saving.drafts import Draft
copying.BLOCK = 64 << 10
left, real = int(sys.argv[3]), Draft.publish
def publish(self, *given, **more):
    global left
    if not left:
        os._exit(9)
    left -= 1
    return real(self, *given, **more)
Draft.publish = publish
mfload.convert(sys.argv[1], sys.argv[2], max_shard_size=40_000)
"""


@pytest.mark.skipif(not hasattr(os, "link"), reason="names are given by hard links")
@pytest.mark.parametrize("named", [0, 1, 2, 3])
@pytest.mark.parametrize("then", ["convert", "save"])
def test_a_kill_while_files_get_their_names(named: int, then: str, tmp_path: Path) -> None:
    """Shards without their index are no checkpoint that would have to be replaced."""
    source = _source(tmp_path / "in", "stored")
    arguments = [source, f"{tmp_path}/out/", named]
    command = [sys.executable, "-c", _DIES, *map(str, arguments)]
    assert subprocess.run(command, check=False, timeout=60).returncode == 9
    shown = [name for name in os.listdir(tmp_path / "out") if name.startswith("model")]
    assert len(shown) == named
    if then == "save":
        mfload.save({"x": np.zeros(3)}, f"{tmp_path}/out/")
        assert os.listdir(tmp_path / "out") == ["model.safetensors"]
        return
    done = mfload.convert(source, f"{tmp_path}/out/", max_shard_size=40_000)
    assert len(done.files) == 5
    _assert_same(tmp_path / "out")
    assert not _hidden(tmp_path / "out")


@pytest.mark.parametrize("target", [None, 5, ""])
def test_a_target_that_is_no_path(source: Path, target: Any) -> None:
    before = source.read_bytes()
    with pytest.raises(errors.UsageError, match="not a path"):
        mfload.convert(source, target, overwrite=True)
    assert source.read_bytes() == before


def test_bytes_in_memory_are_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells them from other bytes of the same size."""
    target, arrays = tmp_path / "out.safetensors", [np.full(10**5, n, np.int32) for n in (1, 2)]
    first, second = (safetensors.numpy.save({"x": each}) for each in arrays)
    with monkeypatch.context() as patch:
        _stopping(patch, 3, _Stop())
        with pytest.raises(KeyboardInterrupt):
            mfload.convert(first, target)  # pyright: ignore[reportArgumentType]
    assert os.listdir(tmp_path) == []
    mfload.convert(second, target)  # pyright: ignore[reportArgumentType]
    assert (mfload.load(target, "numpy")["x"] == arrays[1]).all()


def test_a_source_that_changes_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later call could go on with it."""
    real = Draft.write
    times = iter([1, 2])

    def write(self: Draft, *given: Any) -> int:
        if (seconds := next(times, None)) is not None:
            os.utime(source, (seconds, seconds))
        return real(self, *given)

    monkeypatch.setattr(Draft, "write", write)
    with pytest.raises(errors.SourceChangedError):
        mfload.convert(source, tmp_path / "out.safetensors")
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    _stopping(monkeypatch, 3, errors.from_target(OSError(code, "no"), "x", "write"))
    with pytest.raises(errors.WriteError):
        mfload.convert(source, tmp_path / "out.safetensors")
    assert os.listdir(tmp_path) == ["in"]


def test_no_room_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def allocate(fd: int, nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("mfload.saving.drafts.allocate_file", allocate)
    with pytest.raises(errors.WriteError):
        mfload.convert(source, tmp_path / "out.safetensors", max_shard_size=100_000)
    assert os.listdir(tmp_path) == ["in"]


def test_what_an_earlier_run_wrote_is_compared_with_the_disk(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.safetensors"
    with monkeypatch.context() as patch:
        made = _stopping(patch, 8, _Stop())
        with pytest.raises(KeyboardInterrupt):
            mfload.convert(source, target)
    (draft,) = (name for name in _hidden(tmp_path) if not name.endswith("journal"))
    with (tmp_path / draft).open("r+b") as file:
        file.seek(made[-1])
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    mfload.convert(source, target)
    _assert_same(target)


@pytest.mark.parametrize("text", [b"", b"x", b"0 0 99999999999 " + b"0" * 32 + b"\n"])
def test_a_journal_that_lies(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    target = tmp_path / "out.safetensors"
    with monkeypatch.context() as patch:
        _stopping(patch, 8, _Stop())
        with pytest.raises(KeyboardInterrupt):
            mfload.convert(source, target)
    (name,) = (name for name in _hidden(tmp_path) if name.endswith("journal"))
    lines = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(lines + text if text else text)
    try:
        mfload.convert(source, target)
    except errors.WriteError:  # Never half of it.
        assert os.listdir(tmp_path) == ["in"]
    else:
        _assert_same(target)


@pytest.mark.parametrize("which", ["draft", "journal", "link"])
def test_what_others_left_is_not_gone_on_with(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """In a directory that others may write to: both could have been made to fit each other."""
    if which != "link" and os.geteuid():
        pytest.skip("needs root")
    target = tmp_path / "out.safetensors"
    with monkeypatch.context() as patch:
        _stopping(patch, 6, _Stop())
        with pytest.raises(KeyboardInterrupt):
            mfload.convert(source, target)
    path = next(
        tmp_path / n for n in _hidden(tmp_path) if n.endswith("journal") == (which == "journal")
    )
    mine = tmp_path / "mine"
    if which == "link":
        path.rename(mine)
        path.symlink_to(mine)
        before = mine.read_bytes()
    else:
        os.chown(path, 4242, -1)
    done = mfload.convert(source, target)
    assert "went on" not in str(done)
    _assert_same(target)
    assert not _hidden(tmp_path)
    assert target.stat().st_uid == os.geteuid()
    assert which != "link" or mine.read_bytes() == before


@pytest.mark.parametrize("end", ["-journal", "-00001"])
@pytest.mark.parametrize("kind", ["fifo", "socket", "link", "hard link", "huge"])
def test_something_else_of_such_a_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, end: str
) -> None:
    with monkeypatch.context() as patch:
        _stopping(patch, 6, _Stop())
        with pytest.raises(KeyboardInterrupt):
            mfload.convert(source, tmp_path / "out.safetensors")
    (name,) = (name for name in _hidden(tmp_path) if name.endswith(end))
    path, mine = tmp_path / name, tmp_path / "mine"
    path.unlink()
    mine.write_text("mine")
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "socket":
            monkeypatch.chdir(tmp_path)
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(name)
        case "link":
            path.symlink_to(mine)
        case "hard link":
            path.hardlink_to(mine)
        case _:
            with path.open("wb") as file:
                file.truncate(1 << 40)
    mfload.convert(source, tmp_path / "out.safetensors")
    _assert_same(tmp_path / "out.safetensors")
    assert mine.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["in", "mine", "out.safetensors"]


class TestFailures:
    """Of what lies beside the files: told, and nothing is left or lost."""

    @pytest.mark.parametrize("call", ["opened", "write"])
    def test_a_journal_that_can_t_be_written(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        real = getattr(journal if call == "opened" else os, call)

        def fail(where: Any, *given: Any) -> Any:
            if call == "opened" or "journal" in os.readlink(f"/proc/self/fd/{where}"):
                raise OSError(errno.EIO, "broken")
            return real(where, *given)

        monkeypatch.setattr(journal if call == "opened" else os, call, fail)
        with pytest.raises(errors.WriteError, match="could not note what is written"):
            mfload.convert(source, tmp_path / "out.safetensors")
        assert os.listdir(tmp_path) == ["in"]

    def test_short_writes_to_a_journal(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A line of which a part is missing would be joined to the next, which may read as one."""
        real, target = os.write, tmp_path / "out.safetensors"
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
            _stopping(patch, 8, _Stop())
            with pytest.raises(KeyboardInterrupt):
                mfload.convert(source, target)
        (name,) = (name for name in _hidden(tmp_path) if name.endswith("journal"))
        lines = (tmp_path / name).read_bytes().splitlines()
        assert len(lines) > 3
        assert all(len(line.split()) == 4 for line in lines[1:])
        assert "went on after" in str(mfload.convert(source, target))
        _assert_same(target)

    @pytest.mark.parametrize("code", [errno.ENOENT, errno.EIO])
    def test_a_journal_that_can_t_be_removed(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        real = os.unlink

        def unlink(path: Any, **given: Any) -> None:
            if str(path).endswith("journal"):
                raise OSError(code, os.strerror(code))
            real(path, **given)

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", unlink)
            done = mfload.convert(source, tmp_path / "out.safetensors")
        assert ("could not be removed" in str(done)) == (code == errno.EIO)
        _assert_same(tmp_path / "out.safetensors")

    def test_bytes_that_can_t_be_read_back(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The disk failed, not the source: there is nothing to go on with."""

        def fail(*_: Any) -> Any:
            raise errors.ReadError("could not read: broken", file="x")

        monkeypatch.setattr(sealing, "scan", fail)
        with pytest.raises(errors.WriteError, match="what was written can't be read back"):
            mfload.convert(source, tmp_path / "out.safetensors")
        assert os.listdir(tmp_path) == ["in"]

    @pytest.mark.parametrize("at", ["before", "after"])
    def test_ctrl_c_while_the_files_get_their_names(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
    ) -> None:
        """What lies beside the weights goes with them, or not at all."""
        _source(tmp_path / "in", "safetensors")
        (tmp_path / "in" / "config.json").write_text("{}")
        real, out = SaveTarget.publish, tmp_path / "out"

        def publish(*given: Any) -> Any:
            if at == "after":
                real(*given)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(SaveTarget, "publish", publish)
            with pytest.raises(KeyboardInterrupt):
                mfload.convert(tmp_path / "in", f"{out}/")
        if at == "after":
            assert sorted(os.listdir(out)) == ["config.json", "model.safetensors"]
            _assert_same(out)
        else:
            assert len(_hidden(out)) == len(os.listdir(out)) == 2
            assert "went on after" in str(mfload.convert(tmp_path / "in", f"{out}/"))

    def test_a_full_disk_leaves_no_journal_of_drafts_that_are_gone(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = tmp_path / "out.safetensors"
        with monkeypatch.context() as patch:
            _stopping(patch, 8, _Stop())
            with pytest.raises(KeyboardInterrupt):
                mfload.convert(source, target)
        (draft,) = (name for name in _hidden(tmp_path) if not name.endswith("journal"))
        (tmp_path / draft).unlink()

        def full(*_: Any, **__: Any) -> None:
            raise errors.TargetError("could not write: no space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(publishing, "Draft", full)
            with pytest.raises(errors.TargetError):
                mfload.convert(source, target)
        assert [name for name in _hidden(tmp_path) if name.endswith("journal")] == []
        mfload.convert(source, target)
        _assert_same(target)

    def test_ctrl_c_before_the_journal_is_begun(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """New drafts, and what an earlier journal says of older ones."""
        target = tmp_path / "out.safetensors"
        with monkeypatch.context() as patch:
            _stopping(patch, 8, _Stop())
            with pytest.raises(KeyboardInterrupt):
                mfload.convert(source, target)
        (draft,) = (name for name in _hidden(tmp_path) if not name.endswith("journal"))
        (tmp_path / draft).unlink()

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(rewriting, "Journal", stop)
            with pytest.raises(KeyboardInterrupt):
                mfload.convert(source, target)
        mfload.convert(source, target)
        _assert_same(target)


def test_two_at_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.safetensors"
    real = SaveTarget.publish

    def publish(self: Any, *given: Any) -> Any:
        with pytest.raises(errors.TargetError, match="this thread is already saving to this"):
            mfload.convert(source, target)
        return real(self, *given)

    monkeypatch.setattr(SaveTarget, "publish", publish)
    mfload.convert(source, target)
    _assert_same(target)
    assert not _hidden(tmp_path)


def test_what_can_t_be_converted(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(3, np.complex128))
    with pytest.raises(errors.UnsupportedDtypeError):
        mfload.convert(tmp_path / "a.npz", tmp_path / "b.safetensors")
    path = _source(tmp_path, "deflated")
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("large.npy").header_offset
    with path.open("r+b") as file:
        file.seek(at + 2000)
        file.write(b"\0" * 500)
    with pytest.raises(errors.FormatError):
        mfload.convert(path, tmp_path / "b.safetensors")
    assert "b.safetensors" not in os.listdir(tmp_path)
    good = _source(tmp_path, "stored")
    (tmp_path / "b.safetensors").write_bytes(b"")
    with pytest.raises(errors.TargetExistsError):
        mfload.convert(good, tmp_path / "b.safetensors")


def test_the_time_runs_out(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Draft.write

    def write(*given: Any) -> int:
        time.sleep(0.05)
        return real(*given)

    monkeypatch.setattr(Draft, "write", write)
    with pytest.raises(errors.LoadTimeoutError):
        mfload.convert(source, tmp_path / "out.safetensors", options=mfload.Options(timeout=0.12))
    while any(each.name.startswith("mfload") for each in threading.enumerate()):
        time.sleep(0.01)  # Writes under way end.
    monkeypatch.undo()
    monkeypatch.setattr(copying, "BLOCK", 64 << 10)
    mfload.convert(source, tmp_path / "out.safetensors")
    _assert_same(tmp_path / "out.safetensors")


_CHILD = r"""
import json, re, sys
from pathlib import Path
import mfload
from mfload.checking import copying
if sys.argv[3] == "small":
    copying.BLOCK = 64 << 10
def peak():  # KiB; unlike ru_maxrss, not that of the process that started this one
    status = Path("/proc/self/status")
    return int(re.search(r"VmHWM:\s*(\d+)", status.read_text())[1]) if status.exists() else 0
before = peak()
how = mfload.Options(max_host_overhead=32 << 20, threads=2)
print("begun", flush=True)
done = mfload.convert(sys.argv[1], sys.argv[2], options=how)
print(json.dumps([peak() - before, list(done.notes)]))
"""


def _child(*arguments: Path | str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(_CHILD), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_bounded(tmp_path: Path) -> None:
    one = np.tile(np.arange(1 << 20, dtype=np.float32), 40).reshape(-1, 1 << 10)
    np.savez(tmp_path / "a.npz", x=np.asfortranarray(one), y=one.astype(">f4"))
    child = _child(tmp_path / "a.npz", tmp_path / "b.safetensors", "large")
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    grown, _ = json.loads(out.splitlines()[-1])
    assert grown < 120 << 10, grown  # KiB, of 160 MiB a tensor
    assert (mfload.load(tmp_path / "b.safetensors", "numpy")["x"] == one).all()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_one_slab_at_a_time(tmp_path: Path) -> None:
    """A deflated tensor is decoded in slabs as large as the limit, of which one lives at a time."""
    one = np.tile(np.arange(1 << 18, dtype=np.float32), (96, 1))
    np.savez_compressed(tmp_path / "a.npz", x=one)
    child = _child(tmp_path / "a.npz", tmp_path / "b.safetensors", "large")
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    grown, _ = json.loads(out.splitlines()[-1])
    assert grown < 56 << 10, grown  # KiB, of a limit of 32 MiB
    assert (mfload.load(tmp_path / "b.safetensors", "numpy")["x"] == one).all()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is promised, on Linux")
def test_kills_at_random(tmp_path: Path) -> None:
    _random = np.random.default_rng()
    arrays = {f"x{n}": _random.standard_normal((500, 700)) for n in range(12)}
    swapped = {name: np.asfortranarray(each) for name, each in arrays.items()}
    np.savez(tmp_path / "a.npz", **swapped, raw=arrays["x0"])  # pyright: ignore[reportArgumentType]
    target, went_on, took = tmp_path / "b.safetensors", 0, 0.4
    for number in range(6):
        finished = False
        while not finished:
            child = _child(tmp_path / "a.npz", target, "small")
            assert child.stdout is not None
            assert child.stdout.readline() == "begun\n"
            start = time.perf_counter()
            if number:
                try:
                    child.wait(_random.uniform(0.2, 1.0) * took)
                except subprocess.TimeoutExpired:
                    child.send_signal(signal.SIGKILL)
            out, _ = child.communicate(timeout=60)
            took = took if number else time.perf_counter() - start
            finished = child.returncode == 0
            if target.exists():
                assert (mfload.load(target, "numpy")["x3"] == arrays["x3"]).all()
                break
            if finished:
                went_on += "went on" in out
        found = mfload.load(target, "numpy")
        assert all((found[name] == each).all() for name, each in arrays.items())
        mfload.convert(tmp_path / "a.npz", target, overwrite=True)
        assert not _hidden(tmp_path)
        target.unlink()
