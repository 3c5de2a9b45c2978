"""Seeds and readers that are killed, stopped, updated or lied to: typed errors, soon, no leaks."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import seeding
from seeding import MODEL, TOTAL, TRANSPORTS, SeedProcess, options, publish, wait_until, weights

import mfload
from mfload import errors
from mfload.peer import checkpoint, client as clients, memfd
from mfload.peer.server import Reply, Server
from mfload.sources.timed import Timed

SOON = 5.0  # Seconds; an answer has 6 times `stalled` to begin.


@pytest.fixture
def seed() -> Any:
    with SeedProcess() as made:
        yield made


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def segments() -> set[str]:
    """Shared memory that has a name, but for the folders of tests."""
    return {each for each in os.listdir("/dev/shm") if not each.startswith("mfload-test-")}


@pytest.fixture(autouse=True)
def nothing_left() -> Any:
    """No descriptors, threads or segments are left, whatever was killed."""
    before = segments()
    threads, opened = threading.active_count(), descriptors()
    yield
    assert wait_until(lambda: threading.active_count() <= threads), threading.enumerate()
    assert wait_until(lambda: descriptors() <= opened), seeding.sockets()
    assert wait_until(lambda: segments() <= before), segments() - before


def failing(call: Callable[[], object], since: list[float]) -> errors.MfloadError:
    """The error of a call that fails, soon after `since`."""
    with pytest.raises(errors.MfloadError) as info:
        call()
    assert since, "there was no fault"
    assert time.monotonic() - since[0] < SOON, info.value
    return info.value


class TestKilledAndStopped:
    @pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_killed(
        self, seed: SeedProcess, transport: str, part: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        when: list[float] = []

        def kill() -> None:
            when.append(time.monotonic())
            seed.send(signal.SIGKILL)

        how = options(transport, stalled=0.6)
        with seeding.counted(monkeypatch, block=1 << 20) as reads:
            reads.at(part * TOTAL, kill)
            error = failing(lambda: mfload.load(seed.url, "numpy", options=how), when)
            assert reads.total < TOTAL or transport == "memfd"
        assert isinstance(error, errors.ReadError | errors.SourceNotFoundError)
        assert error.file == seed.url.rpartition("/org/")[0]

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_stopped_and_continued(
        self, seed: SeedProcess, transport: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        how = options(transport, stalled=0.6)
        for part in (0.1, 0.5, 0.9):
            when: list[float] = []

            def stop(when: list[float] = when) -> None:
                when.append(time.monotonic())
                seed.send(signal.SIGSTOP)

            def load() -> dict[str, Any]:
                return mfload.load(seed.url, "numpy", options=how)

            with seeding.counted(monkeypatch, block=1 << 20) as reads:
                reads.at(part * TOTAL, stop)
                if transport == "memory":  # The kernel needs no help of the seed.
                    samples.assert_same(load(), weights())
                    assert when
                else:
                    assert isinstance(failing(load, when), errors.ReadError)
            # Where no one answers, a new load says so too.
            begin = [time.monotonic()]
            assert isinstance(failing(load, begin), errors.ReadError)
            seed.send(signal.SIGCONT)
            samples.assert_same(load(), weights())

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
    @pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
    def test_in_the_middle_of_an_answer(
        self, seed: SeedProcess, number: int, part: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        when: list[float] = []
        came, lock = [0], threading.Lock()
        receive = Timed.readinto

        def readinto(timed: Any, buffer: Any) -> int:
            got = receive(timed, buffer)
            with lock:
                came[0] += got
                if came[0] > part * TOTAL and not when:
                    when.append(time.monotonic())
                    seed.send(number)
            return got

        monkeypatch.setattr(Timed, "readinto", readinto)
        how = options("http", stalled=0.6)
        error = failing(lambda: mfload.load(seed.url, "numpy", options=how), when)
        assert isinstance(error, errors.ReadError | errors.SourceNotFoundError)

    def test_by_default_too(self, seed: SeedProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        when: list[float] = []

        def kill() -> None:
            when.append(time.monotonic())
            seed.send(signal.SIGKILL)

        with seeding.counted(monkeypatch, block=1 << 20) as reads:
            reads.at(TOTAL / 2, kill)
            failing(lambda: mfload.load(seed.url, "numpy"), when)

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_what_was_handed_out_stays(self, seed: SeedProcess, transport: str) -> None:
        expected, found = weights(), {}
        how = mfload.Options(
            peer=options(transport, stalled=0.6).peer, max_host_overhead=8 << 20
        )  # A stream that reads no further ahead.
        stream = iter(mfload.stream(seed.url, "numpy", options=how))
        found.update(itertools.islice(stream, 3))
        when = [time.monotonic()]
        seed.send(signal.SIGKILL)

        def rest() -> None:
            for name, array in stream:
                found[name] = array

        failing(rest, when)
        assert 3 <= len(found) < len(expected)
        samples.assert_same(found, {name: expected[name] for name in found})


class TestChanged:
    @pytest.mark.parametrize(
        ("transport", "checksums"),
        [*((t, True) for t in TRANSPORTS), *((t, False) for t in TRANSPORTS[1:])],
    )
    def test_an_update_in_the_middle(
        self, seed: SeedProcess, transport: str, checksums: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        how = options(transport, checksums=checksums)
        for generation, part in enumerate((0.0, 0.1, 0.5, 0.9), 1):
            with seeding.counted(monkeypatch, block=1 << 20) as reads:
                reads.at(part * TOTAL, lambda: seed.tell("update"))
                with pytest.raises(errors.SourceChangedError):
                    mfload.load(seed.url, "numpy", options=how)
            found = mfload.load(seed.url, "numpy", options=how)
            samples.assert_same(found, weights(generation))

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_updates_all_the_time_are_never_mixed(self, transport: str) -> None:
        versions = [weights(n, count=8, side=256) for n in range(3)]
        with publish(versions[0]) as seed:
            ends = threading.Event()

            def update() -> None:
                n = 0
                while not ends.wait(0.003):
                    seed.update(seeding.rows(versions[n := (n + 1) % 3]))

            writer = threading.Thread(target=update)
            writer.start()
            whole = changed = 0
            end = time.monotonic() + 1.5
            try:
                while time.monotonic() < end:
                    try:
                        how = options(transport, checksums=False)
                        found = mfload.load(seed.url, "numpy", options=how)
                    except errors.SourceChangedError:
                        changed += 1
                        continue
                    whole += 1
                    n = int(found["t00"][0, 0]) // 1_000_003
                    samples.assert_same(found, versions[n])
            finally:
                ends.set()
                writer.join()
        assert changed

    def test_an_opened_checkpoint_notices(self) -> None:
        arrays = weights(count=2)
        with publish(arrays) as seed, mfload.open(seed.url) as opened:
            before = opened.get_tensor("t00")
            seed.update(seeding.rows(weights(1, count=2)))
            for call in (opened.get_tensor, lambda name: opened.get_slice(name)[3:5]):
                with pytest.raises(errors.SourceChangedError):
                    call("t01")
            assert samples.same(before, arrays["t00"])

    @pytest.mark.parametrize("transport", ["memory", "http"])
    def test_written_in_place(
        self, seed: SeedProcess, transport: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with seeding.counted(monkeypatch, block=1 << 20) as reads:
            reads.at(TOTAL / 2, lambda: seed.tell("write"))
            with pytest.raises(errors.ChecksumError, match="in place") as info:
                mfload.load(seed.url, "numpy", options=options(transport))
        assert info.value.tensor is not None
        # Without checksums no claim is made but that of shapes.
        found = mfload.load(seed.url, "numpy", options=options("http", checksums=False))
        assert sorted(found) == sorted(weights())

    def test_written_in_place_before_a_copy_is_made(self, seed: SeedProcess) -> None:
        mfload.load(seed.url, "numpy", options=options("memfd"))
        seed.tell("write")  # The copy was made before.
        samples.assert_same(mfload.load(seed.url, "numpy", options=options("memfd")), weights())
        seed.tell("update")
        seed.tell("write")
        with pytest.raises(errors.ChecksumError):
            mfload.load(seed.url, "numpy", options=options("memfd"))


class TestReplicas:
    """Of two seeds with the same bytes one fails: the other goes on."""

    @pytest.fixture
    def two(self) -> Any:
        with SeedProcess() as one, SeedProcess() as two:
            where = ",".join(each.url.split("/")[2] for each in (one, two))
            yield one, f"peer://{where}/{MODEL}@main"

    @staticmethod
    def fail(seed: SeedProcess, how: Any) -> None:
        if isinstance(how, str):
            seed.tell(how)
        else:
            seed.send(how)

    @pytest.mark.parametrize("transport", TRANSPORTS)
    @pytest.mark.parametrize(
        ("how", "part"),
        [(signal.SIGKILL, 0.1), (signal.SIGKILL, 0.9), (signal.SIGSTOP, 0.5), ("close", 0.5),
         ("update", 0.5), ("write", 0.1)],
    )  # fmt: skip
    def test_one_fails_in_the_middle(
        self, two: Any, transport: str, how: Any, part: float, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        with seeding.counted(monkeypatch, block=1 << 20) as reads:
            reads.at(part * TOTAL, lambda: self.fail(two[0], how))
            report = mfload.Report()
            by = options(transport, stalled=0.6)
            found = mfload.load(two[1], "numpy", options=by, report=report)
        samples.assert_same(found, weights())
        # A copy that was taken, and memory of a process that stands still, are read to the end.
        if (transport, how) not in (("memfd", "write"), ("memory", signal.SIGSTOP)):
            (note,) = report.notes
            assert note.startswith("a seed failed, others were asked: ")
            assert note in caplog.text
            (other,) = {name for name, *_ in report.route}
            assert not two[0].url.startswith(other)

    def test_open_checkpoints_and_streams(self, two: Any) -> None:
        how = options("http", stalled=0.6)
        with mfload.open(two[1], options=how) as opened:
            arrays = mfload.stream(two[1], "numpy", options=how)
            found = dict([next(arrays)])
            two[0].send(signal.SIGKILL)
            found |= dict(arrays)
            samples.assert_same(found, weights())
            samples.assert_same({name: opened.get_tensor(name) for name in weights()}, weights())

    def test_a_planner_is_asked_for_another(self) -> None:
        from mfload.peer.planner_http import PlannerServer

        with PlannerServer() as planner, contextlib.ExitStack() as stack:
            made = [stack.enter_context(SeedProcess(planner=planner.url)) for _ in range(2)]
            assert wait_until(lambda: len(planner.registry.records()) == 2)
            how = options("http", stalled=0.6, planner=planner.url)
            with mfload.open(f"peer:///{MODEL}@main", options=how) as opened:
                found = {"t00": opened.get_tensor("t00")}
                (busy,) = (each for each in made if int(each.tell("connections")))
                busy.send(signal.SIGKILL)
                found |= {name: opened.get_tensor(name) for name in weights()}
                samples.assert_same(found, weights())
            del opened, found

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_one_fails_once_it_was_asked(
        self, two: Any, transport: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = checkpoint.together

        def together(*given: Any) -> Any:
            if two[0].process.poll() is None:
                two[0].send(signal.SIGKILL)
            return real(*given)

        monkeypatch.setattr(checkpoint, "together", together)
        found = mfload.load(two[1], "numpy", options=options(transport, stalled=0.6))
        samples.assert_same(found, weights())

    def test_not_without_checksums(self, two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing would show that what was read before is the same."""
        with seeding.counted(monkeypatch, block=1 << 20) as reads:
            reads.at(0.5 * TOTAL, lambda: two[0].send(signal.SIGKILL))
            with pytest.raises(errors.SourceError):
                mfload.load(two[1], "numpy", options=options("http", checksums=False))

    def test_both_fail(self, two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        with SeedProcess() as other, seeding.counted(monkeypatch, block=1 << 20) as reads:

            def stop() -> None:
                two[0].send(signal.SIGKILL)
                other.send(signal.SIGKILL)

            url = two[1].replace(two[1].split("/")[2].split(",")[1], other.url.split("/")[2])
            reads.at(0.5 * TOTAL, stop)
            with pytest.raises(errors.SourceError):
                mfload.load(url, "numpy", options=options("http", stalled=0.6))


class TestOnTheWay:
    """A proxy before the seed."""

    ARRAYS = weights(count=4)

    def load(self, change: Callable[[bytes, int], bytes | None], **more: Any) -> Any:
        how = options("http", stalled=0.5, **more)
        with publish(self.ARRAYS) as seed, seeding.through(seed.address, change) as (where, _):
            return mfload.load(f"peer://{where}/{MODEL}", "numpy", options=how)

    def test_nothing_changed(self) -> None:
        samples.assert_same(self.load(lambda data, _: data), self.ARRAYS)

    def test_a_flipped_byte(self) -> None:
        def flip(data: bytes, done: int) -> bytes:
            if done <= 2_000_000 < done + len(data):
                at = 2_000_000 - done
                return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
            return data

        with pytest.raises(errors.ChecksumError, match="damaged on the way"):
            self.load(flip)

    @pytest.mark.parametrize("after", [10, 1_000_000])
    def test_cut_off(self, after: int) -> None:
        cut = lambda data, done: None if done + len(data) > after else data  # noqa: E731
        with pytest.raises(errors.ReadError, match="broke off"):
            self.load(cut)

    @pytest.mark.parametrize(
        ("pattern", "by"),
        [
            (rb"Content-Range: bytes 0-", b"Content-Range: bytes 1-"),
            (rb"Content-Length: (\d{7})", b"Content-Length: 99\\1"),
            (rb"Content-Length: \d(\d{6})", b"Content-Length: \\1"),
            (rb"Content-Length: \d{7}\r\n", b""),
            (rb"HTTP/1.1 206 Partial Content", b"HTTP/1.1 200 OK"),
            (rb"HTTP/1.1 206 Partial Content", b"HTTP/1.1 100 Continue"),
            (rb"HTTP/1.1 206", b"ICY"),
            (rb"Content-Type: application/octet", b"Transfer-Encoding: chunked\r\nX: "),
        ],
    )
    def test_another_answer_than_was_asked_for(self, pattern: bytes, by: bytes) -> None:
        def change(data: bytes, done: int) -> bytes:
            return re.sub(pattern, by, data) if b"206 Partial" in data else data

        begin = time.monotonic()
        with pytest.raises(errors.ReadError):
            self.load(change, checksums=False)
        assert time.monotonic() - begin < SOON

    def test_bytes_that_drip(self) -> None:
        def change(data: bytes, done: int) -> bytes:
            if done > 100_000:
                time.sleep(0.3)
                return data[:10]
            return data

        begin = time.monotonic()
        with pytest.raises(errors.ReadError, match="stalls"):
            self.load(change)
        assert time.monotonic() - begin < SOON

    def test_an_answer_that_breaks_off(self) -> None:
        """Though what came is whole for itself: not a malformed answer, nor a good one."""
        short = Reply(200, (b"{}",), 9, headers=(("Connection", "close"),))
        server = Server("127.0.0.1:0", lambda _: short)
        with pytest.raises(errors.ReadError, match="broke off"):
            clients.SeedClient(server.address).json("GET", "/")
        server.close()

    def test_a_chunk_of_a_negative_size(self) -> None:
        chunked = (("Transfer-Encoding", "chunked"), ("Connection", "close"))
        server = Server("127.0.0.1:0", lambda _: Reply(200, (b"-5\r\n{}",), 6, headers=chunked))
        with pytest.raises(errors.ReadError, match="broke off"):
            clients.SeedClient(server.address).json("GET", "/")
        server.close()

    @pytest.mark.parametrize("drip", [b"a", b"HTTP/1.1 100 Continue\r\n\r\n", b"X: y\r\n"])
    def test_a_head_that_never_ends(self, drip: bytes) -> None:
        import socket

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                try:
                    if drip != b"HTTP/1.1 100 Continue\r\n\r\n":
                        connection.sendall(b"HTTP/1.1 200 OK\r\n")
                    while True:
                        connection.sendall(drip)
                        time.sleep(0.05)
                except OSError:
                    return

        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=answer)
            thread.start()
            where = f"127.0.0.1:{listener.getsockname()[1]}"
            begin = time.monotonic()
            with pytest.raises(errors.ReadError):
                mfload.load(f"peer://{where}/{MODEL}", "numpy", options=options(stalled=0.5))
            assert time.monotonic() - begin < SOON
            thread.join(5)

    def test_no_one_there(self) -> None:
        with publish(self.ARRAYS) as seed:
            url = seed.url
        with pytest.raises(errors.SourceNotFoundError, match="no peer listens") as info:
            mfload.load(url, "numpy")
        assert info.value.file == url.rpartition("/org/")[0]


READER = """
    import os, sys, time, mfload
    from mfload.peer import memfd, memory
    from mfload.sources.timed import Timed
    came = [0]
    def pausing(kind, name):
        call = getattr(kind, name)
        def called(self, buffers, *more):
            got = call(self, buffers, *more)
            came[0] += sum(each.nbytes for each in buffers) if more else got
            if came[0] > 4 << 20:
                came[0] = -(1 << 60)
                os.write(1, b"reading\\n")
                sys.stdin.readline()
            return got
        setattr(kind, name, called)
    pausing(Timed, "readinto")
    pausing(memory.MemoryWay, "read")
    pausing(memfd.MemfdWay, "read")
    peer = mfload.PeerOptions(transports=sys.argv[2])
    try:
        mfload.load(sys.argv[1], "numpy", options=mfload.Options(peer=peer))
    except mfload.errors.SourceError as error:
        print(type(error).__name__)
"""


def reader(url: str, transport: str) -> Any:
    """A process that waits in the middle of a load."""
    run = [sys.executable, "-c", textwrap.dedent(READER), url, transport]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    made = subprocess.Popen(run, **pipes)
    assert made.stdout is not None
    assert made.stdout.readline() == "reading\n"
    return made


class TestReadersAndForks:
    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_a_reader_killed_while_it_reads(self, seed: SeedProcess, transport: str) -> None:
        for each in ("http", transport):
            found = mfload.load(seed.url, "numpy", options=options(each, stalled=30))
            samples.assert_same(found, weights())
            del found
        before = json.loads(seed.tell("threads"))
        memory = int(seed.tell("memory"))
        opened = len(os.listdir(f"/proc/{seed.pid}/fd"))
        for _ in range(4):
            with reader(seed.url, transport) as made:
                assert len(json.loads(seed.tell("threads"))) > len(before) or transport != "http"
                made.kill()
        # What its main thread, the listener and the copier are; idle readers go too.
        assert wait_until(lambda: len(json.loads(seed.tell("threads"))) <= len(before))
        assert wait_until(lambda: len(os.listdir(f"/proc/{seed.pid}/fd")) <= opened)
        assert int(seed.tell("memory")) < memory + (8 << 10)  # In KiB.
        assert seed.end() == 0

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_a_reader_ends_as_a_program_does(self, seed: SeedProcess, transport: str) -> None:
        """Though its seed was killed meanwhile; it says so, and nothing hangs."""
        with reader(seed.url, transport) as made:
            seed.send(signal.SIGKILL)
            begin = time.monotonic()
            said, _ = made.communicate("\n", timeout=20)
            assert time.monotonic() - begin < SOON
        assert said.strip() in ("ReadError", "SourceNotFoundError", "SourceChangedError")
        assert made.returncode == 0

    def test_a_seed_ends_as_a_program_does(self, seed: SeedProcess) -> None:
        for each in TRANSPORTS:
            mfload.load(seed.url, "numpy", options=options(each))
        assert seed.end() == 0
        with pytest.raises(errors.SourceNotFoundError):
            mfload.load(seed.url, "numpy")

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_a_fork_neither_answers_nor_closes(self, seed: SeedProcess, transport: str) -> None:
        how = options(transport, stalled=0.6)
        with mfload.open(seed.url, options=how) as opened:
            first = opened.get_tensor("t00")
            assert seed.tell("fork") == "0"
            assert samples.same(opened.get_tensor("t00"), first)
        samples.assert_same(mfload.load(seed.url, "numpy", options=how), weights())
        assert seed.tell("update") == "done"
        samples.assert_same(mfload.load(seed.url, "numpy", options=how), weights(1))

    def test_a_fork_changes_nothing(self) -> None:
        """What it did would be seen by no reader, in its own copy of the seed."""
        with mfload.publish({"x": np.ones(9)}, model="m") as seed:
            child = os.fork()
            if not child:
                wrong = 2
                planner: Any = None
                for change in (lambda: seed.update({}), lambda: seed.register(planner, 1)):
                    with contextlib.suppress(errors.UsageError):
                        change()
                        break
                    wrong -= 1
                os._exit(wrong)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            seed.update({"x": np.zeros(9)})
            assert not mfload.load(seed.url, "numpy")["x"].any()

    @pytest.mark.parametrize("where", [
        "user:hunter2@127.0.0.1:9", "127.0.0.1:9,u:hunter2@h:2", "u:x,hunter2@h:1", "u:hunter2@",
    ])  # fmt: skip
    def test_no_error_shows_a_password(self, where: str, tmp_path: Path) -> None:
        url, file = f"peer://{where}/m", tmp_path / "x.safetensors"
        mfload.save({"x": np.ones(3)}, file)
        peer: Any = functools.partial(mfload.PeerOptions, planner=where)
        calls: list[Callable[[], object]] = [
            lambda: mfload.load(url, "numpy"),
            lambda: mfload.load([file, url], "numpy"),
            lambda: list(mfload.stream(url, "numpy")),
            lambda: mfload.open(url),
            lambda: mfload.restore(url, framework="jax"),
            lambda: mfload.verify(url),
            lambda: mfload.diff(file, url),
            lambda: mfload.convert(url, tmp_path / "y.safetensors"),
            lambda: mfload.save({"x": np.ones(3)}, url),
            lambda: mfload.publish(
                {"x": np.ones(3)}, model="m", peer=mfload.PeerOptions(address=where)
            ),
            lambda: mfload.publish(
                {"x": np.ones(3)}, model="m", peer=mfload.PeerOptions(planner=f"http://{where}")
            ),
            peer,
        ]
        for call in calls:
            with pytest.raises(errors.MfloadError) as caught:
                call()
            assert "hunter2" not in f"{caught.value}{vars(caught.value)}"

    def test_memfd_waits_for_a_busy_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A copy takes as long as it takes, while the seed answers."""
        real = memfd._Giver._copied

        def slow(self: Any) -> int:
            time.sleep(1.0)
            return real(self)

        monkeypatch.setattr(memfd._Giver, "_copied", slow)
        with mfload.publish(
            {"x": np.ones(9)}, model="m", peer=mfload.PeerOptions(transports="memfd")
        ) as seed:
            assert mfload.load(seed.url, "numpy", options=options("memfd", stalled=0.1))["x"].all()

    def test_a_fork_while_memory_is_handed_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It keeps no connection of the seed's."""
        real, inside, go = socket.send_fds, threading.Event(), threading.Event()

        def slow(*given: Any) -> Any:
            inside.set()
            go.wait(10)
            return real(*given)

        monkeypatch.setattr(socket, "send_fds", slow)
        peer = mfload.PeerOptions(transports=("memfd",))
        with mfload.publish({"x": np.ones(9)}, model="m", peer=peer) as seed:
            load = functools.partial(mfload.load, seed.url, "numpy", options=options("memfd"))
            reader = threading.Thread(target=load)
            reader.start()
            assert inside.wait(10)
            child = os.fork()
            if not child:  # The seed's end of the connection has the name of its listener.
                os._exit(sum("@mfload-" in each for each in seeding.sockets().values()))
            try:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            finally:
                go.set()
                reader.join()

    def test_a_fork_leaves_the_planner_alone(self) -> None:
        """What it closes at its end is its parent's still."""
        from mfload.peer.planner_http import PlannerServer

        with PlannerServer() as planner, SeedProcess(planner=planner.url) as seed:
            how = options("http", planner=planner.url)
            for _ in range(2):
                found = mfload.load(f"peer:///{MODEL}@main", "numpy", options=how)
                samples.assert_same(found, weights())
                assert seed.tell("fork") == "0"

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_a_reader_that_forks(self, seed: SeedProcess, transport: str) -> None:
        code = """
            import os, sys, mfload
            peer = mfload.PeerOptions(transports=sys.argv[2])
            with mfload.open(sys.argv[1], options=mfload.Options(peer=peer)) as opened:
                sums = [int(opened.get_tensor(f"t{n:02}").sum()) for n in range(8)]
                children = []
                for _ in range(3):
                    children.append(os.fork())
                    if not children[-1]:
                        for _ in range(3):
                            for n in range(8):
                                assert int(opened.get_tensor(f"t{n:02}").sum()) == sums[n]
                        os._exit(0)
                for _ in range(3):
                    for n in range(8):
                        assert int(opened.get_tensor(f"t{n:02}").sum()) == sums[n]
                for child in children:
                    assert os.waitpid(child, 0)[1] == 0
        """
        run = [sys.executable, "-c", textwrap.dedent(code), seed.url, transport]
        done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_closed_while_readers_read(
        self, transport: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        when: list[float] = []
        seed = publish(weights())

        def close() -> None:
            when.append(time.monotonic())
            seed.close()

        with seeding.counted(monkeypatch, block=1 << 20) as reads:
            reads.at(TOTAL / 2, close)
            how = options(transport, stalled=0.6)
            error = failing(lambda: mfload.load(seed.url, "numpy", options=how), when)
        assert isinstance(error, errors.SourceError)
        seed.close()
        with pytest.raises(errors.UsageError, match="closed"):
            seed.update(seeding.rows(weights(count=1)))

    def test_arrays_are_let_go_of(self) -> None:
        import weakref

        memory = np.zeros(1000, np.uint8).view(_Watched)
        watched = weakref.ref(memory)
        held = seeding.row("w", np.zeros(1000, np.uint8))._replace(memory=memory)
        seed = mfload.publish([held], model=MODEL)
        mfload.load(seed.url, "numpy", options=options("http"))
        del memory, held
        assert watched() is not None
        seed.update(seeding.rows({"w": np.zeros(3)}))
        assert wait_until(lambda: gc.collect() >= 0 and watched() is None)
        seed.close()


class _Watched(np.ndarray):
    """An array with a weak reference to it."""
