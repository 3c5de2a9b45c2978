"""The server of seeds and planners against strangers: fuzzers, slow ones, many, without a token."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import samples
import seeding
from seeding import MODEL, SeedProcess, options, publish, wait_until, weights
from serving import own

import mfload
from mfload import errors
from mfload.peer import security, seed as seeds, server as servers, source
from mfload.peer.planner import SeedRecord
from mfload.peer.planner_http import PlannerServer
from mfload.peer.server import MAX_BODY, MAX_CONNECTIONS, HttpRequest, Server, text

TOKEN = "s3cret-token-of-a-seed"
ARRAYS = weights(count=3, side=256)
SLOW = bool(os.environ.get("MFLOAD_SLOW"))


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return str(path)


def connect(address: str, seconds: float = 5.0) -> socket.socket:
    host, _, port = address.rpartition(":")
    made = socket.create_connection((host, int(port)), seconds)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    parts: list[bytes] = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


def said(address: str, data: bytes) -> bytes:
    """What a server answers to bytes that end there."""
    with connect(address) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        return received(connection)


def status(answer: bytes) -> int:
    match = re.match(rb"HTTP/1\.[01] (\d{3}) ", answer)
    return int(match[1]) if match else 0


def connections() -> int:
    """Threads that answer."""
    return sum(each.name == "mfload-connection" for each in threading.enumerate())


class TestRequests:
    """Strict, and nothing but the published ranges."""

    @pytest.fixture
    def seed(self) -> Any:
        with publish(ARRAYS) as made:
            yield made

    @pytest.mark.parametrize(
        ("request_line", "expected"),
        [
            ("GET /v1/manifest HTTP/1.1", 200),
            ("GET /v1/state HTTP/1.1", 200),
            ("GET /v1/state?x=y HTTP/1.1", 200),
            ("GET / HTTP/1.1", 404),
            ("GET /v1/manifest/ HTTP/1.1", 404),
            ("GET /v1/data HTTP/1.1", 404),
            ("GET /v1/data/../../etc/passwd HTTP/1.1", 404),
            ("GET /etc/passwd HTTP/1.1", 404),
            ("GET http://[ HTTP/1.1", 404),
            ("GET /v1/data/{incarnation}/0 HTTP/1.1", 416),
            ("GET /v1/data/{incarnation}/1 HTTP/1.1", 410),
            ("GET /v1/data/{incarnation}/-1 HTTP/1.1", 404),
            ("GET /v1/data/{incarnation}/{large} HTTP/1.1", 404),
            ("GET /v1/data/00000000000000000000000000000000/0 HTTP/1.1", 410),
            ("PUT /v1/manifest HTTP/1.1", 405),
            ("POST /v1/data/{incarnation}/0 HTTP/1.1", 405),
            ("DELETE /v1/manifest HTTP/1.1", 405),
            ("HEAD /v1/manifest HTTP/1.1", 501),
            ("CONNECT example.org:443 HTTP/1.1", 501),
            ("BREW /v1/manifest HTTP/1.1", 501),
            ("GET /v1/manifest HTTP/2.0", 505),
            ("GET /v1/manifest HTTP/1.1.1", 400),
            ("GET /v1/manifest FTP/1.1", 400),
            ("GET", 400),
            ("\x00", 400),
        ],
    )
    def test_paths_and_methods(self, seed: Any, request_line: str, expected: int) -> None:
        names = {"incarnation": seed.manifest.incarnation, "large": 10**30}
        line = request_line.format(**names).encode("latin-1")
        assert status(said(seed.address, line + b"\r\nConnection: close\r\n\r\n")) == expected

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("bytes=0-0", 206),
            ("bytes=0-{last}", 206),
            ("bytes={last}-{last}", 206),
            ("bytes=0-{size}", 416),
            ("bytes={size}-{size}", 416),
            ("bytes=5-4", 416),
            ("bytes=-5", 416),
            ("bytes=5-", 416),
            ("bytes=0-1,4-5", 416),
            ("bytes= 0-1", 416),
            ("bytes=0-99999999999999999999999", 416),
            ("bytes=٠-١", 416),
            ("bytes=0x0-0x1", 416),
            ("items=0-1", 416),
            ("", 416),
        ],
    )
    def test_ranges(self, seed: Any, value: str, expected: int) -> None:
        size = seed.manifest.size
        value = value.format(size=size, last=size - 1)
        path = f"/v1/data/{seed.manifest.incarnation}/0"
        head = f"GET {path} HTTP/1.1\r\nRange: {value}\r\nConnection: close\r\n\r\n"
        answer = said(seed.address, head.encode())
        assert status(answer) == expected
        if expected == 206:
            low, high = (int(each) for each in value[6:].split("-"))
            data = b"".join(each.tobytes() for each in ARRAYS.values())
            assert answer.partition(b"\r\n\r\n")[2] == data[low : high + 1]

    @pytest.mark.parametrize(
        ("headers", "expected"),
        [
            ("Content-Length: 5\r\n\r\nhello", 200),
            ("Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400),
            ("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
            ("Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
            ("Content-Length: -5\r\n\r\n", 413),
            ("Content-Length: +5\r\n\r\nhello", 413),
            ("Content-Length: 5,5\r\n\r\nhello", 413),
            ("Content-Length: ٥\r\n\r\nhello", 413),
            (f"Content-Length: {MAX_BODY + 1}\r\n\r\n", 413),
            (f"Content-Length: {10**30}\r\n\r\n", 413),
            ("no colon\r\n\r\n", 400),
            ("X: y\r\n" * 200 + "\r\n", 431),
            ("X: " + "y" * 70_000 + "\r\n\r\n", 431),
            ("X: " + "y" * 60_000 + "\r\n" + ("Y: " + "y" * 60_000 + "\r\n") * 3 + "\r\n", 431),
        ],
    )
    def test_heads_and_bodies(self, seed: Any, headers: str, expected: int) -> None:
        head = f"GET /v1/state HTTP/1.1\r\nConnection: close\r\n{headers}".encode()
        assert status(said(seed.address, head)) == expected

    def test_a_body_is_no_request(self, seed: Any) -> None:
        inner = b"GET /v1/manifest HTTP/1.1\r\n\r\n"
        head = b"GET /v1/state HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(inner)
        answer = said(seed.address, head + inner)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"tensors" not in answer

    def test_one_after_the_other(self, seed: Any) -> None:
        answer = said(seed.address, b"GET /v1/state HTTP/1.1\r\n\r\n" * 20)
        assert answer.count(b"HTTP/1.1 200 ") == 20

    def test_an_error_inside_tells_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        def fails(_: HttpRequest) -> Any:
            raise RuntimeError("/home/user/private")

        server = Server("127.0.0.1:0", fails)
        try:
            for _ in range(3):
                answer = said(server.address, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
                assert status(answer) == 500
                assert b"private" not in answer
        finally:
            server.close()
        assert "private" in caplog.text


TEMPLATES = [
    b"GET /v1/manifest HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/state HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer guess-guess\r\n\r\n",
    b"GET /v1/data/%s/0 HTTP/1.1\r\nRange: bytes=1000-70000\r\n\r\n",
    b"GET /v1/data/%s/0 HTTP/1.1\r\nRange: bytes=0-9\r\nContent-Length: 4\r\n\r\nbody",
    b"PUT /v1/manifest HTTP/1.1\r\nContent-Length: 20\r\n\r\n{'a': 1}",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"",
]
PIECES = [
    *(b"\r\n", b"\r\n\r\n", b"\n", b"\0", b": ", b"-", b" ", b"%00", b"\xff\xfe", b"HTTP/0.9"),
    *(b"Range: bytes=", b"bytes=0-0", b"9" * 40, b"X" * 9000, b"Connection: keep-alive\r\n"),
    *(b"Content-Length: 999999\r\n", b"Transfer-Encoding: chunked\r\n"),
    b"Expect: 100-continue\r\n",
]


def garbage(rng: random.Random, incarnation: bytes) -> bytes:
    """A request that something is wrong with, as a rule."""
    data = bytearray()
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        template = rng.choice(TEMPLATES)
        data += template.replace(b"%s", incarnation)
    for _ in range(rng.randrange(6)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            data[at:at] = rng.choice(PIECES)
        elif kind == 1:
            del data[at : at + rng.randrange(20)]
        elif kind == 2:
            data[at : at + 1] = rng.randbytes(1)
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.randrange(300))
        else:
            del data[at:]
    return bytes(data)


class TestFuzzer:
    @pytest.mark.parametrize("guarded", [True, False])
    def test_garbage(self, guarded: bool, token_file: str) -> None:
        """Nothing but what is published is answered, and nothing without the token."""
        given: Any = {"token_file": token_file} if guarded else {}
        how = options(**given)
        count = 5000 if SLOW else 400
        with SeedProcess(count=3, side=256, **given) as seed:
            url = seed.url
            address = url.removeprefix("peer://").partition("/")[0]
            _, manifest = source.ask(address, how.peer or mfload.PeerOptions())
            incarnation = manifest.incarnation.encode()
            data = b"".join(each.tobytes() for each in ARRAYS.values())
            threads, memory = json.loads(seed.tell("threads")), 0
            opened_files = len(os.listdir(f"/proc/{seed.pid}/fd"))
            rng = random.Random(17)
            seen: set[int] = set()
            for n in range(count):
                if n == count // 4:
                    memory = int(seed.tell("memory"))
                answer = said(address, garbage(rng, incarnation))
                seen.add(status(answer))
                if guarded:
                    assert b"tensors" not in answer
                    assert b"incarnation" not in answer
                    assert b" 206 " not in answer[:20]
                for match in re.finditer(rb"Content-Range: bytes (\d+)-(\d+)/", answer):
                    low, high = int(match[1]), int(match[2]) + 1
                    end = answer.index(b"\r\n\r\n", match.end()) + 4
                    assert answer[end : end + high - low] == data[low:high]
                if n % 100 == 0:
                    samples.assert_same(mfload.load(url, "numpy", options=how), ARRAYS)
            assert seen >= ({400, 401} if guarded else {200, 206, 400, 404, 405})
            assert 500 not in seen
            samples.assert_same(mfload.load(url, "numpy", options=how), ARRAYS)
            assert wait_until(lambda: len(json.loads(seed.tell("threads"))) <= len(threads))
            assert wait_until(lambda: len(os.listdir(f"/proc/{seed.pid}/fd")) <= opened_files)
            assert int(seed.tell("memory")) < memory + (8 << 10)
            assert seed.end() == 0


class TestSlowAndMany:
    def test_slow_loris(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who sends a byte now and then is sent away; others are served meanwhile."""
        monkeypatch.setattr(servers, "IDLE", 0.8)
        monkeypatch.setattr(servers, "_BODY", 0.8)
        heads = [
            b"",
            b"GET /v1/state HTTP/1.1\r\nX: ",
            b"GET /v1/state HTTP/1.1\r\nContent-Length: 1000\r\n\r\n",
            b"GET /v1/st",
        ]
        with publish(ARRAYS) as seed, contextlib.ExitStack() as stack:
            slow = [stack.enter_context(connect(seed.address)) for _ in range(60)]
            begin = time.monotonic()
            for n, each in enumerate(slow):
                each.sendall(heads[n % 4])
            left = set(slow)
            loaded = 0
            while left and time.monotonic() < begin + 8:
                for each in list(left):
                    try:
                        each.sendall(b"a")
                        each.setblocking(False)
                        gone = not each.recv(9999)
                    except BlockingIOError:
                        gone = False
                    except OSError:
                        gone = True
                    if gone:
                        left.discard(each)
                if time.monotonic() < begin + 0.6:
                    samples.assert_same(mfload.load(seed.url, "numpy", options=options()), ARRAYS)
                    loaded += 1
                time.sleep(0.05)
            assert loaded
            assert not left
            assert time.monotonic() < begin + 4
            assert wait_until(lambda: connections() == 0)

    def test_readers_that_take_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who asks for much and reads none of it holds a thread for a while only."""
        monkeypatch.setattr(servers, "_SENDING", 0.5)
        arrays = weights(count=16, side=1024)
        with publish(arrays) as seed, contextlib.ExitStack() as stack:
            path = f"/v1/data/{seed.manifest.incarnation}/0"
            head = f"GET {path} HTTP/1.1\r\nRange: bytes=0-{seed.manifest.size - 1}\r\n\r\n"
            for _ in range(20):
                stack.enter_context(connect(seed.address)).sendall(head.encode())
            assert wait_until(lambda: connections() == 20)
            begin = time.monotonic()
            samples.assert_same(mfload.load(seed.url, "numpy", options=options("http")), arrays)
            assert wait_until(lambda: connections() == 0)
            assert time.monotonic() - begin < 5

    def test_handshakes_that_never_end(
        self, certificates: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(servers, "_BODY", 0.5)
        with publish(ARRAYS, **own(certificates, "seed")) as seed:
            with connect(seed.address) as one, connect(seed.address) as two:
                begin = time.monotonic()
                two.sendall(b"\x16\x03\x01")
                while time.monotonic() < begin + 1.5:
                    with contextlib.suppress(OSError):
                        two.sendall(b"\x02")
                    time.sleep(0.05)
                assert not received(one)
            assert wait_until(lambda: connections() == 0)
            how = options("http", ca_file=certificates / "ca.pem")
            samples.assert_same(mfload.load(seed.url, "numpy", options=how), ARRAYS)

    def test_connections_that_ask_for_nothing_give_way(self) -> None:
        """Of more than there are places for; and they have a second."""
        with publish(ARRAYS) as seed, contextlib.ExitStack() as stack:
            idle = [stack.enter_context(connect(seed.address)) for _ in range(MAX_CONNECTIONS)]
            for _ in range(3):
                samples.assert_same(mfload.load(seed.url, "numpy", options=options("http")), ARRAYS)
            assert seed.connections <= servers.MAX_STRANGERS + 4
            assert wait_until(lambda: seed.connections <= 4, 4 * servers.FIRST)
            assert all(each.recv(1) == b"" for each in idle)

    def test_readers_that_rest_give_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(servers, "MAX_CONNECTIONS", 8)
        head = b"GET /v1/state HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with publish(ARRAYS) as seed, contextlib.ExitStack() as stack:
            kept = [stack.enter_context(connect(seed.address)) for _ in range(8)]
            for count, each in enumerate(kept, 1):
                each.sendall(head)
                assert each.recv(9999).startswith(b"HTTP/1.1 200")
                assert wait_until(lambda count=count: sum(seed._server._open.values()) == count)
            samples.assert_same(mfload.load(seed.url, "numpy", options=options("http")), ARRAYS)
            while kept[0].recv(9999):  # The one that rested longest: its answer, and the end.
                pass

    def test_readers_wait_for_their_turn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As long as theirs is not over."""
        monkeypatch.setattr(servers, "MAX_CONNECTIONS", 1)
        held, answer = threading.Event(), seeds.Seed._answer

        def slow(self: Any, request: HttpRequest) -> Any:
            if request.client == "127.0.0.1" and "Slow" in request.headers:
                held.wait(20)
            return answer(self, request)

        monkeypatch.setattr(seeds.Seed, "_answer", slow)
        with publish(ARRAYS) as seed, connect(seed.address) as busy:
            busy.sendall(b"GET /v1/state HTTP/1.1\r\nHost: localhost\r\nSlow: 1\r\n\r\n")
            assert wait_until(lambda: seed.connections == 1)
            time.sleep(0.1)
            begin = time.monotonic()
            with pytest.raises(errors.ReadError, match="busy"):
                mfload.load(seed.url, "numpy", options=options("http", timeout=0.5))
            assert time.monotonic() - begin < 5
            threading.Timer(0.5, held.set).start()
            samples.assert_same(mfload.load(seed.url, "numpy", options=options("http")), ARRAYS)

    def test_300_readers_at_once(self) -> None:
        """Each makes one load; none is turned away."""
        wrong: list[BaseException] = []
        ready = threading.Barrier(300)
        how = options("http", stalled=20.0)

        def read() -> None:
            try:
                ready.wait()
                found = mfload.load(seed.url, "numpy", options=how)
                samples.assert_same(found, weights(count=2, side=64))
            except BaseException as error:
                wrong.append(error)

        with SeedProcess(count=2, side=64) as seed:
            readers = [threading.Thread(target=read) for _ in range(300)]
            for each in readers:
                each.start()
            for each in readers:
                each.join()
        assert not wrong, (len(wrong), wrong[0])

    def test_a_program_that_keeps_the_interpreter_busy(self) -> None:
        """It gives up the lock for moments alone, 0.9 s apart, and is not taken for dead."""
        with SeedProcess(count=2, side=64) as seed:
            seed.tell("hold")
            found = mfload.load(seed.url, "numpy", options=options("memory"))
            samples.assert_same(found, weights(count=2, side=64))

    @pytest.mark.parametrize("transport", seeding.TRANSPORTS)
    def test_64_readers_at_once(self, transport: str) -> None:
        wrong: list[BaseException] = []
        ready = threading.Barrier(64)
        how = options(transport, stalled=20.0)

        def read() -> None:
            try:
                ready.wait()
                for _ in range(3 if SLOW else 1):
                    samples.assert_same(mfload.load(seed.url, "numpy", options=how), weights())
            except BaseException as error:
                wrong.append(error)

        with SeedProcess() as seed:
            before = json.loads(seed.tell("threads"))
            memory = int(seed.tell("memory"))
            readers = [threading.Thread(target=read) for _ in range(64)]
            for each in readers:
                each.start()
            for each in readers:
                each.join()
            assert not wrong, wrong[0]
            assert wait_until(lambda: len(json.loads(seed.tell("threads"))) <= len(before))
            one = 24 << 10 if transport == "memfd" else 0  # KiB, of the one copy.
            assert int(seed.tell("memory")) < memory + one + (24 << 10)

    def test_connections_that_come_and_go(self) -> None:
        with publish(ARRAYS) as seed:
            for n in range(300):
                with connect(seed.address) as each:
                    if n % 3:
                        each.sendall(b"GET /v1/manifest HTTP/1.1\r\n\r\n")
                    if n % 3 == 2:  # Reset, and not closed.
                        linger = b"\1\0\0\0\0\0\0\0"
                        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            samples.assert_same(mfload.load(seed.url, "numpy", options=options("http")), ARRAYS)
            assert wait_until(lambda: connections() == 0)
            assert seed._server.connections == 0


class TestTokens:
    @pytest.mark.parametrize(
        "header",
        [
            None,
            "",
            TOKEN,
            f"Basic {TOKEN}",
            f"bearer {TOKEN}",
            f"Bearer {TOKEN}x",
            f"Bearer {TOKEN[:-1]}",
            f"Bearer  {TOKEN}",
            f"Bearer {TOKEN} x",
            "Bearer \xe9\xff",
            "Bearer " + "x" * 30_000,
        ],
    )
    def test_each_wrong_one_is_refused(self, header: str | None, token_file: str) -> None:
        with publish(ARRAYS, peer=mfload.PeerOptions(token_file=token_file)) as seed:
            for path in ("/v1/manifest", "/v1/state", "/nothing"):
                head = f"GET {path} HTTP/1.1\r\n"
                head += "" if header is None else f"Authorization: {header}\r\n"
                answer = said(seed.address, (head + "\r\n").encode("latin-1"))
                assert status(answer) == 401
                assert MODEL.encode() not in answer
            right = f"GET /v1/state HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
            assert status(said(seed.address, right.encode())) == 200

    def test_compared_in_constant_time(
        self, token_file: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By `hmac.compare_digest`, whatever is sent."""
        import hmac

        seen: list[tuple[bytes, bytes]] = []
        compare = hmac.compare_digest

        def compared(one: bytes, two: bytes) -> bool:
            seen.append((one, two))
            return compare(one, two)

        with publish(ARRAYS, peer=mfload.PeerOptions(token_file=token_file)) as seed:
            monkeypatch.setattr(hmac, "compare_digest", compared)
            for header in ("", "Authorization: Bearer s\r\n", f"Authorization: Bearer {TOKEN}\r\n"):
                said(seed.address, f"GET /v1/state HTTP/1.1\r\n{header}\r\n".encode())
        assert [one for one, _ in seen] == [b"", b"Bearer s", b"Bearer " + TOKEN.encode()]

    @pytest.mark.parametrize("transport", seeding.TRANSPORTS)
    def test_never_shown(
        self,
        transport: str,
        token_file: str,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        """Neither in errors, nor logs, nor texts of objects; another's guess neither."""
        caplog.set_level(logging.DEBUG)
        guess = tmp_path / "guess"
        guess.write_text("another-guess-of-it")
        right, wrong = (options(transport, token_file=each) for each in (token_file, guess))
        shown = [repr(right), str(right)]
        with publish(ARRAYS, peer=mfload.PeerOptions(token_file=token_file)) as seed:
            report = mfload.Report()
            samples.assert_same(
                mfload.load(seed.url, "numpy", options=right, report=report), ARRAYS
            )
            opened: Any
            with mfload.open(seed.url, options=right) as opened:
                peer = opened._sources[0]
                shown += [repr(each) for each in (opened, peer, peer._client, peer.way)]
                shown += [repr(seed._server), repr(peer.manifest)]
            for how in (wrong, options(transport)):
                with pytest.raises(errors.SourcePermissionError) as info:
                    mfload.load(seed.url, "numpy", options=how)
                shown += [
                    str(info.value),
                    repr(info.value),
                    *traceback.format_exception(info.value),
                ]
            shown += [repr(seed), str(seed.manifest), str(report), repr(report)]
            shown += [str(mfload.plan(seed.url, options=right))]
        with pytest.raises(errors.MfloadError) as info:
            mfload.load(seed.url, "numpy", options=right)
        shown += traceback.format_exception(info.value)
        everything = "\n".join([*shown, caplog.text, *capfd.readouterr()])
        assert "GET /v1/manifest" in caplog.text
        assert TOKEN not in everything
        assert "another-guess" not in everything

    @pytest.mark.parametrize("before", [0, 50, 150])
    def test_an_answer_that_repeats_it(self, before: int, token_file: str) -> None:
        """Wherever the shown part of the answer ends."""

        def answer(request: HttpRequest) -> Any:
            return text(400, b"x" * before + request.headers["Authorization"].encode())

        server = Server("127.0.0.1:0", answer)
        how = options("http", token_file=token_file)
        with pytest.raises(errors.ReadError, match="400 ") as info:
            mfload.load(f"peer://{server.address}/m", "numpy", options=how)
        server.close()
        assert TOKEN[:5] not in str(info.value)

    @pytest.mark.parametrize(
        "content", [b"", b"short", b"\xff" * 20, b"two lines\nof it", b"x" * 513, b"with space x"]
    )
    def test_files_that_hold_none(self, content: bytes, tmp_path: Path) -> None:
        path = tmp_path / "token"
        path.write_bytes(content)
        with pytest.raises(errors.UsageError) as info:
            publish(ARRAYS, peer=mfload.PeerOptions(token_file=path))
        assert str(path) in str(info.value)
        assert content.decode("latin-1") not in str(info.value) or not content
        with pytest.raises(errors.SourceError):
            publish(ARRAYS, peer=mfload.PeerOptions(token_file=tmp_path / "missing"))


class TestCertificates:
    @pytest.mark.parametrize("transport", seeding.TRANSPORTS)
    def test_tls(self, certificates: Path, transport: str) -> None:
        with publish(ARRAYS, **own(certificates, "seed")) as seed:
            how = options(transport, ca_file=certificates / "ca.pem")
            samples.assert_same(mfload.load(seed.url, "numpy", options=how), ARRAYS)
            # In the clear nothing is said.
            assert not status(said(seed.address, b"GET /v1/state HTTP/1.1\r\n\r\n"))
            with pytest.raises(errors.SourceError):
                mfload.load(seed.url, "numpy", options=options(transport))
            # A certificate of another authority is not believed.
            how = options(transport, ca_file=certificates / "stranger.pem")
            with pytest.raises(errors.ReadError, match="secure"):
                mfload.load(seed.url, "numpy", options=how)

    @pytest.mark.parametrize("name", ["other", "old"])
    def test_of_another_host_or_time(self, certificates: Path, name: str) -> None:
        with publish(ARRAYS, **own(certificates, name)) as seed:
            how = options("http", ca_file=certificates / "ca.pem")
            with pytest.raises(errors.ReadError, match="secure"):
                mfload.load(seed.url, "numpy", options=how)

    def test_mutual_tls(self, certificates: Path) -> None:
        ca = certificates / "ca.pem"
        with publish(
            ARRAYS, **own(certificates, "seed"), peer=mfload.PeerOptions(ca_file=ca)
        ) as seed:
            how = options("http", **own(certificates, "reader"), ca_file=ca)
            samples.assert_same(mfload.load(seed.url, "numpy", options=how), ARRAYS)
            for given in ({}, own(certificates, "stranger"), own(certificates, "old")):
                how = options("http", **given, ca_file=ca)
                with pytest.raises(errors.SourceError) as caught:
                    mfload.load(seed.url, "numpy", options=how)
                assert given or "cert_file=" in str(caught.value)
            assert wait_until(lambda: connections() == 0)
            assert wait_until(lambda: seed._server.connections == 0)

    def test_with_a_token_too(self, certificates: Path, token_file: str) -> None:
        ca = certificates / "ca.pem"
        with publish(
            ARRAYS, **own(certificates, "seed"), peer=mfload.PeerOptions(token_file=token_file)
        ) as seed:
            with pytest.raises(errors.SourcePermissionError):
                mfload.load(seed.url, "numpy", options=options("http", ca_file=ca))
            how = options("http", ca_file=ca, token_file=token_file)
            samples.assert_same(mfload.load(seed.url, "numpy", options=how), ARRAYS)

    def test_garbage_inside_and_outside(self, certificates: Path) -> None:
        rng = random.Random(3)
        with publish(ARRAYS, **own(certificates, "seed")) as seed:
            for _ in range(100):
                assert b"tensors" not in said(seed.address, garbage(rng, b"0" * 32))
            assert wait_until(lambda: connections() == 0)
            assert wait_until(lambda: seed._server.connections == 0)
            how = options("http", ca_file=certificates / "ca.pem")
            samples.assert_same(mfload.load(seed.url, "numpy", options=how), ARRAYS)

    def test_files_that_hold_none(self, certificates: Path, tmp_path: Path) -> None:
        empty = tmp_path / "empty.pem"
        empty.write_text("")
        for given in (
            {"cert_file": empty},
            {"cert_file": tmp_path / "missing"},
            {"cert_file": certificates / "seed.pem", "key_file": certificates / "reader.key"},
            {**own(certificates, "seed"), "ca_file": empty},
            {"ca_file": certificates / "ca.pem"},
        ):
            with pytest.raises(errors.UsageError):
                publish(ARRAYS, **given)

    def test_a_planner_whose_files_are_gone_for_a_while(
        self, certificates: Path, tmp_path: Path
    ) -> None:
        """It goes on looking at seeds."""
        ca = Path(shutil.copy(certificates / "ca.pem", tmp_path))
        how: dict[str, Any] = {**own(certificates, "seed"), "ca_file": ca}
        record = SeedRecord("127.0.0.1:1", MODEL, "", "0" * 32, "r", 0, "x", "here", 1, 0, 1, 1)
        with PlannerServer(tls=security.Tls(**how)) as planner:
            ca.rename(tmp_path / "moved")
            planner.registry.register(record)
            planner.registry.probe()
            (tmp_path / "moved").rename(ca)
            planner.registry.leave(record)
            peer = mfload.PeerOptions(planner=planner.url, **how)
            with publish(ARRAYS, peer=mfload.PeerOptions(planner=planner.url), **how):
                given = mfload.Options(timeout=10, peer=peer)
                samples.assert_same(mfload.load(f"peer:///{MODEL}", "numpy", options=given), ARRAYS)


class TestExposure:
    @pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "10.1.2.3:80"])
    def test_refused_if_nothing_guards_it(
        self, address: str, token_file: str, certificates: Path
    ) -> None:
        ca = certificates / "ca.pem"
        with pytest.raises(errors.UsageError, match="token or mutual TLS"):
            publish(ARRAYS, peer=mfload.PeerOptions(address=address))
        with pytest.raises(errors.UsageError, match="token or mutual TLS"):
            publish(ARRAYS, peer=mfload.PeerOptions(address=address), **own(certificates, "seed"))
        seed = security.Tls(**own(certificates, "seed"))
        with pytest.raises(errors.UsageError, match="token or mutual TLS"):
            security.check_exposure(address, None, seed)
        security.check_exposure(address, TOKEN, None)
        security.check_exposure(
            address, None, security.Tls(**own(certificates, "seed"), ca_file=ca)
        )

    def test_by_the_commands_too(self, tmp_path: Path) -> None:
        path = samples.save(tmp_path / "model.safetensors", ARRAYS)
        for command in (["serve", str(path), "--model", "m"], ["planner"]):
            run = [sys.executable, "-m", "mfload", *command, "--address", "0.0.0.0:0"]
            done = subprocess.run(run, capture_output=True, text=True, timeout=30, check=False)
            assert done.returncode not in (0, -9), done.stdout
            assert "token" in done.stderr
            assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        "address",
        [
            "",
            "127.0.0.1",
            ":80",
            "127.0.0.1:99999",
            "host name:1",
            "127.0.0.1:80:80",
            "a..b:1",
            ".:1",
            f"{'a' * 64}:1",
            80,
        ],
    )
    def test_no_address(self, address: Any) -> None:
        with pytest.raises(errors.UsageError):
            publish(ARRAYS, peer=mfload.PeerOptions(address=address))
        with pytest.raises(errors.UsageError):
            security.split_address(address)

    def test_an_address_that_is_taken(self) -> None:
        with publish(ARRAYS) as seed:
            with pytest.raises(errors.UsageError, match="listen") as info:
                publish(ARRAYS, peer=mfload.PeerOptions(address=seed.address))
            assert seed.address in str(info.value)
            samples.assert_same(mfload.load(seed.url, "numpy", options=options()), ARRAYS)

    @pytest.mark.parametrize("transport", seeding.TRANSPORTS)
    def test_what_listens(self, transport: str) -> None:
        """One socket on loopback, one Unix socket; nothing else, of readers nothing at all."""
        with SeedProcess(count=3, side=256) as seed:
            listening = sorted(seeding.sockets(seed.pid).values())
            assert len(listening) == 2, listening
            assert re.fullmatch(r"tcp 127\.0\.0\.1:\d+ listen", listening[0])
            assert re.fullmatch(r"unix @mfload-[0-9a-f]{32} listen", listening[1])
            with mfload.open(seed.url, options=options(transport)) as opened:
                opened.get_tensor("t00")
                assert not [each for each in seeding.sockets().values() if "listen" in each]
            seed.tell("update")
            assert len([e for e in seeding.sockets(seed.pid).values() if "listen" in e]) == 2
            seed.tell("close")
            assert wait_until(lambda: not seeding.sockets(seed.pid))
        with SeedProcess(count=3, side=256, transports=["memory", "http"]) as seed:
            (listening,) = seeding.sockets(seed.pid).values()
            assert listening.startswith("tcp 127.0.0.1:")

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
    def test_memory_is_not_handed_to_other_users(self) -> None:
        """Whoever finds the name of the Unix socket."""
        code = """
            import os, socket, sys
            if sys.argv[2] != "0":
                os.setgid(65534)
                os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(5)
                connection.connect("\\0" + sys.argv[1])
                print(len(socket.recv_fds(connection, 1, 4)[1]))
        """
        with SeedProcess(count=3, side=256) as seed:
            address = seed.url.removeprefix("peer://").partition("/")[0]
            _, manifest = source.ask(address, mfload.PeerOptions())
            name = manifest.ways["memfd"]["socket"]
            for user, count in (("0", "1"), ("65534", "0")):
                run = [sys.executable, "-c", textwrap.dedent(code), name, user]
                done = subprocess.run(run, capture_output=True, text=True, check=False)
                assert done.stdout.strip() == count, done.stderr


def cpu(pid: int) -> float:
    """Seconds of processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class TestIdle:
    def test_a_seed_that_no_one_reads(self) -> None:
        """Less than 1 % of a core, with connections that wait as well."""
        with SeedProcess() as seed:
            how = options("http")
            address = seed.url.removeprefix("peer://").partition("/")[0]
            with mfload.open(seed.url, options=how) as opened, contextlib.ExitStack() as stack:
                for _ in range(20):
                    stack.enter_context(connect(address))
                opened.get_tensor("t00")
                time.sleep(0.3)
                before = cpu(seed.pid)
                time.sleep(3)
                assert cpu(seed.pid) - before <= 0.03


def test_a_server_that_is_closed_lets_go() -> None:
    """Of its port, its threads and its connections, whatever they wait for."""
    for _ in range(20):
        server = Server("127.0.0.1:0", lambda _: text(200, "{}"))
        with connect(server.address) as idle, connect(server.address) as begun:
            begun.sendall(b"GET / HTTP/1.1\r\n")
            assert wait_until(lambda server=server: server.connections == 2)
            server.close()
            assert not received(idle)
            assert not received(begun)
            with pytest.raises(OSError):
                connect(server.address)
            server.close()
    assert wait_until(lambda: connections() == 0)
    assert "mfload-peer" not in [each.name for each in threading.enumerate()]
