"""`Options(cache=)`: what is read of files behind URLs is kept on the local disk."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import pickle
import random
import signal
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving
from hypothesis import HealthCheck, given, settings, strategies as st

import mfload
from mfload import errors
from mfload.options import LoadOptions
from mfload.report import human
from mfload.sources import base, cache, http

PIECE = cache.PIECE
ARRAYS = {
    f"w{n}": np.random.default_rng(n).integers(0, 255, (700, 1000), np.uint8) for n in range(6)
}
NAME = "/model.safetensors"
OPENING = (64 << 10) + 8  # Of the first answer, and of looks at the version.


@pytest.fixture
def served(tmp_path: Path) -> Iterator[serving.Server]:
    path = tmp_path / "m.safetensors"
    mfload.save(ARRAYS, path)
    with serving.serving({NAME: path.read_bytes()}) as server:
        yield server


@pytest.fixture
def kept(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def how(kept: str, **more: Any) -> mfload.Options:
    return mfload.Options(cache=kept, **more)


def sent(served: serving.Server) -> int:
    """Bytes that were asked for since the last call."""
    nbytes = 0
    for each in served.asked:
        first, last = map(int, (each.range or "bytes=0-0").removeprefix("bytes=").split("-"))
        nbytes += min(last + 1, len(served.files[NAME])) - first
    served.asked.clear()
    return nbytes


def check(loaded: Any) -> None:
    assert loaded.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(loaded[name], array)


def only(kept: str) -> cache.CachedFile:
    (found,) = cache.Cache(kept).files()
    return found


def source_of(served: serving.Server, kept: str, **more: Any) -> Any:
    options = LoadOptions(cache=kept, **more)
    return cache.cached(http.open_url(served.url(), options), options)


def test_the_second_load_asks_for_the_version_alone(served: serving.Server, kept: str) -> None:
    report = mfload.Report()
    check(mfload.load(served.url(), "numpy", options=how(kept)))
    size = len(served.files[NAME])
    assert size <= sent(served) <= size + 2 * PIECE  # The first bytes, twice.
    check(mfload.load(served.url(), "numpy", options=how(kept), report=report))
    assert sent(served) <= OPENING
    assert f"http, {human(size)} from the cache" in str(report)
    assert stat.S_IMODE(os.stat(kept).st_mode) == 0o700


def test_a_header_costs_a_piece(served: serving.Server, kept: str) -> None:
    with mfload.open(served.url(), options=how(kept)) as opened:
        assert opened.keys() == [*ARRAYS]
    assert sent(served) <= PIECE + OPENING
    with mfload.open(served.url(), options=how(kept)) as opened:
        part = opened.get_slice("w3")[5:9, 10:20]
        np.testing.assert_array_equal(part, ARRAYS["w3"][5:9, 10:20])
    assert sent(served) <= 2 * PIECE + OPENING


def test_another_version_is_another_file(served: serving.Server, kept: str, tmp_path: Path) -> None:
    check(mfload.load(served.url(), "numpy", options=how(kept)))
    turned = {name: array[::-1].copy() for name, array in ARRAYS.items()}
    mfload.save(turned, tmp_path / "n.safetensors")
    served.files[NAME] = (tmp_path / "n.safetensors").read_bytes()
    found = mfload.load(served.url(), "numpy", options=how(kept))
    np.testing.assert_array_equal(found["w0"], ARRAYS["w0"][::-1])
    assert len(cache.Cache(kept).files()) == 2


@pytest.mark.parametrize("where", ["data", "sums"])
def test_what_is_damaged_is_fetched_again(served: serving.Server, kept: str, where: str) -> None:
    check(mfload.load(served.url(), "numpy", options=how(kept)))
    path = Path(only(kept).path, where)
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 4
    path.write_bytes(held)
    sent(served)
    report = mfload.Report()
    check(mfload.load(served.url(), "numpy", options=how(kept), report=report))
    assert "damaged and fetched again: 1" in str(report)
    assert 0 < sent(served) <= PIECE + OPENING
    check(mfload.load(served.url(), "numpy", options=how(kept)))
    assert sent(served) <= OPENING  # It was mended.


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_reads_in_any_order(served: serving.Server, kept: str, data: st.DataObject) -> None:
    """Vectors of any buffers, between removals of all or one file, equal the file's bytes."""
    whole = served.files[NAME]
    source = source_of(served, kept)
    with source.open() as opened:
        for _ in range(data.draw(st.integers(1, 6))):
            if data.draw(st.integers(0, 4)) == 0:
                cache.Cache(kept).clear()
            start = data.draw(st.integers(0, len(whole) - 1))
            sizes = data.draw(st.lists(st.integers(0, PIECE + 9), min_size=1, max_size=4))
            if start + sum(sizes) > len(whole):
                with pytest.raises(errors.SourceChangedError):
                    opened.read([np.empty(sum(sizes), np.uint8)], start)
                continue
            vector = [np.zeros(size, np.uint8) for size in sizes]
            assert opened.read(vector, start) == sum(sizes)
            assert b"".join(map(bytes, vector)) == whole[start : start + sum(sizes)]


def test_threads_fetch_each_piece_once(served: serving.Server, kept: str) -> None:
    source, failed = source_of(served, kept), list[BaseException]()
    whole = served.files[NAME]
    assert source.size == len(whole)
    sent(served)

    def read(seed: int) -> None:
        try:
            with source.open() as opened:
                for start in random.Random(seed).sample(range(0, len(whole) - 9, PIECE // 2), 6):
                    data = np.zeros(min(PIECE, len(whole) - start), np.uint8)
                    opened.read([data], start)
                    assert bytes(data) == whole[start : start + data.size]
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed
    assert sent(served) <= len(whole)


def test_a_small_cache_keeps_what_was_used_last(served: serving.Server, kept: str) -> None:
    served.files["/other.safetensors"] = served.files[NAME]
    held = len(served.files[NAME])
    limit = how(kept, cache_size=held * 3 // 2)
    for path in (NAME, "/other.safetensors"):
        check(mfload.load(served.url(path), "numpy", options=limit))
        found = cache.Cache(kept).files()
        assert sum(each.held for each in found) <= held * 3 // 2
    assert found[-1].name.endswith("/other.safetensors")
    check(mfload.load(served.url(), "numpy", options=how(kept, cache_size=1000)))


def test_a_full_disk_ends_the_keeping_alone(
    served: serving.Server, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "_write", full)
    report = mfload.Report()
    check(mfload.load(served.url(), "numpy", options=how(kept), report=report))
    assert "kept no more: No space left on device" in str(report)


def test_a_half_written_piece_does_not_count(
    served: serving.Server, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill between two writes leaves it."""
    source = source_of(served, kept)
    write = cache._write  # pyright: ignore[reportPrivateUsage]

    def half(file: int, data: Any, offset: int) -> None:
        write(file, memoryview(data)[: max(1, len(data) // 2)], offset)

    monkeypatch.setattr(cache, "_write", half)
    check(mfload.load(source, "numpy"))
    monkeypatch.undo()
    sent(served)
    check(mfload.load(served.url(), "numpy", options=how(kept)))
    assert sent(served) >= len(served.files[NAME])


def _load(url: str, kept: str, times: int) -> None:
    for _ in range(times):
        check(mfload.load(url, "numpy", options=how(kept)))


def test_processes_share_it_and_may_be_killed(served: serving.Server, kept: str) -> None:
    context = multiprocessing.get_context("spawn")
    for n in range(4):
        one = context.Process(target=_load, args=(served.url(), kept, 50))
        one.start()
        two = context.Process(target=_load, args=(served.url(), kept, 1))
        two.start()
        end = time.monotonic() + 60
        while not served.asked and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.02 * n)
        one.kill()
        one.join()
        two.join(60)
        assert two.exitcode == 0
        assert one.exitcode == -signal.SIGKILL
        check(mfload.load(served.url(), "numpy", options=how(kept)))
        cache.Cache(kept).clear()
        served.asked.clear()


def test_a_fork_reads_on(served: serving.Server, kept: str) -> None:
    source = source_of(served, kept)
    source.turn(0).acquire()  # A thread is at it, which the child does not have.
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            check(mfload.load(source, "numpy"))
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_pickle_reads_on(served: serving.Server, kept: str) -> None:
    source = source_of(served, kept)
    check(mfload.load(pickle.loads(pickle.dumps(source)), "numpy"))
    assert only(kept).held


def test_another_user_s_cache_is_refused(
    served: serving.Server, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkdir(kept)
    os.chmod(kept, 0o777)
    with pytest.raises(errors.UsageError, match="other users can write to the cache"):
        mfload.load(served.url(), "numpy", options=how(kept))
    os.chmod(kept, 0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    os.chown(kept, 54321, -1)
    with pytest.raises(errors.UsageError, match="user 54321"):
        mfload.load(served.url(), "numpy", options=how(kept))


def test_a_link_in_its_place_is_not_followed(served: serving.Server, kept: str) -> None:
    check(mfload.load(served.url(), "numpy", options=how(kept)))
    data = Path(only(kept).path, "data")
    victim = data.parent.parent / "victim"
    victim.write_bytes(b"not to be touched")
    data.unlink()
    data.symlink_to(victim)
    report = mfload.Report()
    check(mfload.load(served.url(), "numpy", options=how(kept), report=report))
    assert victim.read_bytes() == b"not to be touched"
    assert "kept no more" in str(report)


def test_files_of_this_machine_are_not_kept(tmp_path: Path, kept: str) -> None:
    mfload.save(ARRAYS, tmp_path / "m.safetensors")
    check(mfload.load(tmp_path / "m.safetensors", "numpy", options=how(kept)))
    assert not os.path.exists(kept)


def test_no_secret_is_in_the_cache(served: serving.Server, kept: str) -> None:
    secret = "s3cr3t"
    url = f"{served.url()}?token={secret}"
    check(mfload.load(url, "numpy", options=how(kept, headers={"Authorization": secret})))
    for place, names, files in os.walk(kept):
        assert not [name for name in (*names, *files) if secret in name]
        for name in files:
            if name == "about":
                assert secret not in Path(place, name).read_text()
    assert base.redacted(url) == only(kept).name


def test_without_xxhash_it_is_crc32(
    served: serving.Server, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    check(mfload.load(served.url(), "numpy", options=how(kept)))
    monkeypatch.setitem(sys.modules, "xxhash", None)
    check(mfload.load(served.url(), "numpy", options=how(kept)))
    assert len(cache.Cache(kept).files()) == 2
    sent(served)
    check(mfload.load(served.url(), "numpy", options=how(kept)))
    assert sent(served) <= OPENING


@pytest.mark.parametrize("given", ["", "s3://bucket", "a\0b", 3])
def test_what_is_no_directory_is_refused(given: Any) -> None:
    with pytest.raises(errors.UsageError, match="the cache is not a directory"):
        mfload.Options(cache=given)


def test_the_command_lists_and_clears(
    served: serving.Server, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from mfload.cli import run

    served.files["/other.safetensors"] = served.files[NAME]
    for path in (NAME, "/other.safetensors"):
        assert run(["load", served.url(path), "--cache", kept, "--cache-size", "1GB"]) == 0
    capsys.readouterr()
    assert run(["cache", "ls", kept]) == 0
    out = capsys.readouterr()
    assert [line.split()[-1] for line in out.out.splitlines()[1:]] == [
        served.url(NAME),
        served.url("/other.safetensors"),
    ]
    assert "2 files, " in out.err
    assert run(["cache", "clear", kept, "--names", "other", "--json"]) == 0
    (gone,) = json.loads(capsys.readouterr().out)["files"]
    assert gone["name"] == served.url("/other.safetensors")
    assert gone["held"] >= gone["size"] == len(served.files[NAME])
    assert only(kept).name == served.url(NAME)
    assert run(["cache", "clear", kept]) == 0
    assert cache.Cache(kept).files() == []
    for wrong in (["cache", "list", kept], ["cache", "ls", kept, "--names", "("]):
        assert run(wrong) == 2


def test_files_that_differ_in_their_query_alone(served: serving.Server, kept: str) -> None:
    """A server may give both the same ETag and size."""
    other = bytearray(served.files[NAME])
    other[-1] ^= 1
    first = served.files[NAME]
    served.etags[NAME] = '"same"'
    check(mfload.load(f"{served.url()}?file=a", "numpy", options=how(kept)))
    served.files[NAME] = bytes(other)
    found = mfload.load(f"{served.url()}?file=b", "numpy", options=how(kept))
    assert found["w5"].tobytes()[-1] == first[-1] ^ 1


def test_what_changed_while_it_was_read_is_not_kept(
    served: serving.Server, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(served, kept)
    with source.open() as opened:
        opened.read([np.zeros(2 * PIECE, np.uint8)], 0)
    assert only(kept)

    def changed(_: Any) -> None:
        raise errors.SourceChangedError("the file changed", file="f")

    monkeypatch.setattr(http.HttpSource, "check", changed)
    with pytest.raises(errors.SourceChangedError):
        source.check()
    assert cache.Cache(kept).files() == []


def test_what_a_removal_left_is_made_anew(served: serving.Server, kept: str) -> None:
    check(mfload.load(served.url(), "numpy", options=how(kept)))
    Path(only(kept).path, "data").unlink()
    check(mfload.load(served.url(), "numpy", options=how(kept)))
    sent(served)
    check(mfload.load(served.url(), "numpy", options=how(kept)))
    assert sent(served) <= OPENING


def test_a_disk_that_fails_is_done_without(
    served: serving.Server, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(mfload.load(served.url(), "numpy", options=how(kept)))

    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    check(mfload.load(served.url(), "numpy", options=how(kept)))


@pytest.mark.parametrize("validator", ["ETag", "Last-Modified"])
def test_a_version_that_is_not_exact_is_not_kept(
    served: serving.Server, kept: str, validator: str
) -> None:
    """A file may be replaced within the second, with the same size."""
    served.validator = validator
    weak = 'W/"same"' if validator == "ETag" else "Sat, 28 Nov 2026 09:00:00 GMT"
    served.etags[NAME] = weak
    report = mfload.Report()
    mfload.load(served.url(NAME), "numpy", options=how(kept), report=report)
    assert any("no exact version" in note for note in report.notes)
    data = served.files[NAME]
    served.files[NAME] = data[:-1] + bytes([data[-1] ^ 1])
    mfload.load(served.url(NAME), "numpy", options=how(kept))
    loaded = mfload.load(served.url(NAME), "numpy", options=how(kept))
    assert b"".join(each.tobytes() for each in loaded.values())[-1:] == served.files[NAME][-1:]


def test_the_pieces_of_another_file_are_not_its_own(
    served: serving.Server, kept: str, tmp_path: Path
) -> None:
    mfload.save({name: 1 + each for name, each in ARRAYS.items()}, tmp_path / "o.safetensors")
    served.files["/o.safetensors"] = (tmp_path / "o.safetensors").read_bytes()
    for name in (NAME, "/o.safetensors"):
        mfload.load(served.url(name), "numpy", options=how(kept))
    one, two = sorted(Path(kept).iterdir())
    for name in ("data", "sums"):
        (one / name).write_bytes((two / name).read_bytes())
    loaded = mfload.load(served.url(NAME), "numpy", options=how(kept))
    other = mfload.load(served.url("/o.safetensors"), "numpy", options=how(kept))
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(loaded[name], array)
        np.testing.assert_array_equal(other[name], 1 + array)


def test_a_fifo_in_the_cache_blocks_nothing(served: serving.Server, kept: str) -> None:
    mfload.load(served.url(NAME), "numpy", options=how(kept))
    (entry,) = Path(kept).iterdir()
    (entry / "about").unlink()
    os.mkfifo(entry / "about")
    for size in (None, 1 << 20):
        loaded = mfload.load(
            served.url(NAME), "numpy", options=how(kept, cache_size=size, timeout=20)
        )
        np.testing.assert_array_equal(loaded["w0"], ARRAYS["w0"])
    assert cache.Cache(kept).files() is not None
