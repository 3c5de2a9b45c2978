"""Loads with a second place: what is wrong with the first ends in the other, within the time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mfload
from mfload import Options, PeerOptions, Report, errors
from mfload.loading import attempts
from mfload.peer.server import Server, text

ARRAYS = {f"t{n}": np.arange(n, n + 1000.0) for n in range(20)}


@pytest.fixture
def files(tmp_path: Path) -> str:
    """The same arrays in a file."""
    mfload.save(ARRAYS, tmp_path / "model.safetensors")
    return str(tmp_path / "model.safetensors")


def _load(path: str, files: str, **given: Any) -> tuple[float, Report]:
    report, start = Report(), time.monotonic()
    found = mfload.load(path, "numpy", fallback=files, report=report, **given)
    took = time.monotonic() - start
    assert found.keys() == ARRAYS.keys()
    for name, each in ARRAYS.items():
        np.testing.assert_array_equal(found[name], each, strict=True)
    return took, report


def test_a_peer_that_serves_is_taken(files: str) -> None:
    """And the files are not looked at."""
    with mfload.publish(ARRAYS, model="m") as seed:
        _, report = _load(seed.url, files + "-not-there")
    assert report.notes == ()
    assert report.route[0][1].startswith("peer-")


def test_a_file_in_memory_is_not_taken_for_a_url(files: str) -> None:
    """Its text would be several times as long as the file."""

    class Data(bytes):
        def __str__(self) -> str:
            raise AssertionError

        __repr__ = __str__

    _load(Data(Path(files).read_bytes()), files)  # pyright: ignore


def test_nobody_listens(files: str) -> None:
    """The report says why the files were loaded."""
    took, report = _load("peer://127.0.0.1:1/m", files)
    assert took < 2
    assert "no peer listens there" in report.notes[0]
    assert report.route[0][0] == files


def test_another_model_is_not_taken(files: str) -> None:
    """Neither is another revision."""
    with mfload.publish({"x": np.ones(3)}, model="other", revision="a") as seed:
        address = seed.address
        _, report = _load(f"peer://{address}/m", files)
        assert "the seed has another model" in report.notes[0]
        _, report = _load(f"peer://{address}/other@b", files)
        assert "the seed has another model" in report.notes[0]


def test_a_wrong_checksum(files: str) -> None:
    """Weights that changed in place are not taken."""
    changed = {name: each.copy() for name, each in ARRAYS.items()}
    with mfload.publish(changed, model="m") as seed:
        changed["t3"][7] = -1
        _, report = _load(seed.url, files)
        assert "differ from those that it published" in report.notes[0]
        with pytest.raises(errors.ChecksumError) as caught:
            mfload.load(seed.url, "numpy")
        assert caught.value.file == f"peer://{seed.address}"


def test_a_peer_that_never_answers(files: str) -> None:
    """Within the seconds of `stalled`, or half of the timeout."""
    with mfload.publish(ARRAYS, model="m") as seed:
        assert seed.address
    server = Server("127.0.0.1:0", lambda _: text(200, str(time.sleep(30))))
    url = f"peer://{server.address}/m"
    options = Options(peer=PeerOptions(stalled=0.5))
    took, report = _load(url, files, options=options)
    assert took < 4.5
    assert "stalls" in report.notes[0]
    took, report = _load(url, files, options=Options(timeout=1.5))
    assert took < 1.5
    took, report = _load(url, files, options=Options(peer=PeerOptions(timeout=0.3)))
    assert took < 1.5
    server.close()


@contextmanager
def _seed() -> Generator[tuple[subprocess.Popen[str], str]]:
    code = (
        "import sys, numpy as np, mfload; "
        "a = {f't{n}': np.arange(n, n + 1000.0) for n in range(20)}; "
        "s = mfload.publish(a, model='m'); print(s.url, flush=True); sys.stdin.read()"
    )
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        yield process, process.stdout.readline().strip()  # pyright: ignore
        process.kill()


def test_a_killed_and_a_stopped_peer(files: str) -> None:
    """A fall-back begins at once if a process of this machine is gone; a stopped one has longer."""
    with _seed() as (process, url):
        _, report = _load(url, files)
        assert report.notes == ()
        os.kill(process.pid, signal.SIGSTOP)
        options = Options(peer=PeerOptions(stalled=0.3))
        took, report = _load(url, files, options=options)
        assert took < 3
        assert "stalls" in report.notes[0]
        os.kill(process.pid, signal.SIGCONT)
        _, report = _load(url, files)
        assert report.notes == ()
        process.kill()
        process.wait()
        took, report = _load(url, files)
        assert took < 1


def test_other_seeds_before_files(files: str) -> None:
    """A planner knows more seeds than the one that failed."""
    from mfload.peer.planner_http import PlannerServer

    with PlannerServer() as planner, ExitStack() as stack:
        peer = mfload.PeerOptions(planner=planner.url, transports=("http",))
        given: Any = {"model": "m", "peer": peer}
        copies = [{name: each.copy() for name, each in ARRAYS.items()} for _ in range(2)]
        made = [(stack.enter_context(mfload.publish(each, **given)), each) for each in copies]
        while not all(well for *_, well in planner.registry.records()):
            time.sleep(0.01)
        # The planner prefers the first by number, of two that are alike.
        made.sort(key=lambda each: each[0].manifest.incarnation)
        while not all(well for _, _, well in planner.registry.records()):
            time.sleep(0.01)  # The first that is well is handed out, until the second is.
        how = Options(peer=PeerOptions(planner=planner.url))
        made[0][1]["t3"][7] = -1
        _, report = _load("peer:///m", files, options=how)
        assert report.route[0][:2] == (f"peer://{made[1][0].address}", "peer-http")
        (note,) = report.notes
        assert note.startswith("a seed failed, others were asked")
        made[1][1]["t3"][7] = -1
        with pytest.raises(errors.ChecksumError):
            mfload.load("peer:///m", "numpy", options=how)
        _, report = _load("peer:///m", files, options=how)
        assert "was loaded instead" in report.notes[0]


def test_files_first(files: str, tmp_path: Path) -> None:
    """`prefer="fallback"`: the peer is asked if the files are missing or damaged."""
    _, report = _load("peer://127.0.0.1:1/m", files, prefer="fallback")
    assert report.notes == ()
    with mfload.publish(ARRAYS, model="m") as seed:
        _, report = _load(seed.url, str(tmp_path / "none"), prefer="fallback")
        assert "was loaded instead" in report.notes[0]
        damaged = tmp_path / "damaged.safetensors"
        damaged.write_bytes(b"\xff" * 100)
        _, report = _load(seed.url, str(damaged), prefer="fallback")
        assert report.route[0][1].startswith("peer-")


def test_both_fail(tmp_path: Path) -> None:
    """The error is that of the second place, with the first as its note in the log."""
    report = Report()
    with pytest.raises(errors.SourceNotFoundError) as caught:
        mfload.load("peer://127.0.0.1:1/m", "numpy", fallback=tmp_path / "none", report=report)
    assert f"{tmp_path / 'none'} was tried instead: " in report.notes[0]
    assert caught.value.file == str(tmp_path / "none")


def test_who_looks_at_frames_changes_nothing(files: str, tmp_path: Path) -> None:
    """As debuggers do, and handlers of logs."""

    def look(frame: Any, *_: Any) -> Any:
        dict(frame.f_locals)
        return look

    calls = [mfload.load, mfload.restore, mfload.plan]
    for call in calls:
        sys.settrace(look)
        try:
            found = call(tmp_path / "none.safetensors", framework="numpy", fallback=files)
        finally:
            sys.settrace(None)
        assert call is mfload.plan or set(found) == set(ARRAYS)


def test_places_without_a_name_of_their_own(files: str, tmp_path: Path) -> None:
    _, report = _load([str(tmp_path / "a"), str(tmp_path / "b")], [files])  # pyright: ignore
    assert report.notes[0].startswith(f"{tmp_path / 'a'} and 1 more failed after ")
    assert f", {files} was loaded instead: " in report.notes[0]


def test_errors_of_arguments_are_not_answered_by_files(files: str) -> None:
    """They would be the same there."""
    for url in ("peer:///m", "peer://h/m", "peer://h:1/", "peer://u:p@h:1/m", "peer://h:1/m?x"):
        with pytest.raises(errors.UsageError):
            mfload.load(url, "numpy", fallback=files)
    with mfload.publish(ARRAYS, model="m") as seed:
        with pytest.raises(errors.TensorNotFoundError):
            mfload.load(seed.url, "numpy", names=["none"], fallback=files)
        with pytest.raises(errors.UsageError):
            mfload.load(seed.url, "numpy", prefer="both", fallback=files)  # pyright: ignore


def test_publishing_needs_a_whole_model(files: str) -> None:
    """A part of the tensors is no model."""
    options = Options(peer=PeerOptions(publish=True))
    with mfload.publish(ARRAYS, model="m") as seed:
        with pytest.raises(errors.UsageError, match="whole checkpoint"):
            mfload.load(seed.url, "numpy", names=["t1"], options=options)
        with pytest.raises(errors.UsageError):
            mfload.load(files, "numpy", options=options)
        assert mfload.seeds() == [seed]


def test_what_is_converted_is_not_published() -> None:
    options = Options(peer=PeerOptions(publish=True))
    with mfload.publish(ARRAYS, model="m") as seed:
        for target in (None, {name: np.zeros(1000, "f2") for name in ARRAYS}):
            with pytest.raises(errors.UsageError, match="a whole checkpoint as it is stored"):
                mfload.restore(
                    seed.url, target, framework="numpy", dtype="float16", options=options
                )


def test_load_into_has_a_fall_back(files: str) -> None:
    """In a process with JAX."""
    code = """
import sys, numpy as np, mfload
target = {f"t{n}": np.zeros(1000) for n in range(20)}
report = mfload.Report()
found = mfload.load_into(target, "peer://127.0.0.1:1/m", fallback=sys.argv[1], report=report)
assert float(found["t3"][5]) == 8.0, found["t3"]
assert "no peer listens" in report.notes[0], report.notes
"""
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code, files], check=True, env=environment)


def test_the_time_of_peers_is_not_that_of_files(files: str) -> None:
    """`PeerOptions(timeout=)` is no limit of files that are asked first."""
    limits: list[float | None] = []

    def load(path: Any, *, options: Options) -> str:
        limits.append(options.timeout)
        return path

    options = Options(peer=PeerOptions(timeout=0.5))
    url = "peer://127.0.0.1:1/m"
    for places in ((files, url, "path"), (url, files, "fallback")):
        assert attempts.run(load, *places, options, None, whole=True) == files
    assert limits == [None, None]
    attempts.run(load, url, files, "path", options, None, whole=True)
    assert 0 < (limits[-1] or 0) <= 0.5


def test_the_failed_attempt_is_a_stage(files: str, tmp_path: Path) -> None:
    """Seconds and bytes of what failed are in the report, and the stages make up the wall time."""
    arrays = {f"t{n}": np.full(300_000, n, np.float32) for n in range(8)}
    mfload.save(arrays, path := tmp_path / "large.safetensors")
    with mfload.publish(arrays, model="m", peer=mfload.PeerOptions(transports=["http"])) as seed:
        arrays["t7"][-1] = -1.0
        report, start = Report(), time.perf_counter()
        options = Options(threads=1)
        mfload.load(seed.url, "numpy", fallback=path, report=report, options=options)
        took = time.perf_counter() - start
        failed = report.stages["failed attempt"]
        assert 0 < failed < took
        assert took * 0.8 - 0.02 < report.seconds <= took
        size = sum(each.nbytes for each in arrays.values())
        assert report.result_bytes == size
        assert size < report.read_bytes <= 2 * size + (1 << 20)
        assert report.over_read_bytes == report.read_bytes - size
        (span,) = (each for each in report.timeline if each.kind == "failed attempt")
        assert (span.nbytes, span.file) == (report.over_read_bytes, seed.url)
        assert any(each.file == f"peer://{seed.address}" for each in report.timeline)
        said = report.notes[0]
        assert f"{seed.url} failed after " in said
        assert "MiB read, " in said
        assert "t7" in said
        with pytest.raises(errors.SourceNotFoundError):
            mfload.load(seed.url, "numpy", fallback=tmp_path / "none", report=report)
        assert {*report.stages} == {"failed attempt"}
        assert report.tensors == report.result_bytes == 0
        assert report.read_bytes == report.over_read_bytes > 0


def test_a_failed_attempt_without_a_report(files: str) -> None:
    with _seed() as (process, url):
        process.kill()
        process.wait()
        assert mfload.load(url, "numpy", fallback=files).keys() == ARRAYS.keys()


def test_a_manifest_that_differs_counts_too(files: str, tmp_path: Path) -> None:
    """Also if all was loaded before it was known, and with shards."""
    mfload.verify(files, mode="write")
    known = mfload.Manifest.read(files + ".checksums.json")
    bad = tmp_path / "bad" / "model.safetensors"
    mfload.save({name: each + 1 for name, each in ARRAYS.items()}, bad)
    for sharded in ({}, {"shardings": 0, "shard": (0, 1)}):
        report = Report()
        given: Any = {"fallback": files, "verify": known, "report": report, **sharded}
        mfload.load(str(bad), "numpy", **given)
        assert report.stages["failed attempt"] > 0
        assert report.over_read_bytes > 0
        assert "not as the manifest says" in report.notes[0]
