"""Manifests that lie: each is refused with an error that names the peer, what was expected and
what was found; nothing of them is believed, and memory stays bounded."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import samples
import seeding
from hypothesis import given, settings, strategies as st
from seeding import MODEL, SeedProcess, options, publish, row

import mfload
from mfload import errors
from mfload.index import Columns
from mfload.peer import client as clients, manifest as manifests, source
from mfload.peer.data import Spans
from mfload.peer.manifest import BLOCK, Fragment
from mfload.peer.server import HttpRequest, Reply, Server, text

ARRAYS: dict[str, Any] = {
    "a": samples.numbers((300, 256), np.float32),
    "b": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
    "c": np.array(7, np.int64),
}


def published(sharding: str) -> dict[str, Any]:
    """The manifest of a seed, as it is sent."""
    held = [each._replace(sharding=sharding) for each in seeding.rows(ARRAYS)]
    with mfload.publish(held, model=MODEL, revision="main") as seed:
        return json.loads(seed.manifest.to_json())


VALID = published("in one part")
WHOLE = published("")


@contextlib.contextmanager
def answering(answer: Callable[[HttpRequest], Reply]) -> Generator[str]:
    """A server that speaks HTTP well, and lies; its URL."""
    server = Server("127.0.0.1:0", answer)
    try:
        yield f"peer://{server.address}/{MODEL}"
    finally:
        server.close()


def saying(data: Any, ok: int = 200) -> Any:
    """A seed with this manifest, and with nothing else."""
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    return answering(lambda request: text(ok if request.path == "/v1/manifest" else 404, body))


def refused(
    url: str, kind: type[errors.MfloadError], transports: str = "http"
) -> errors.MfloadError:
    """The error of a load, soon and of a peer by name."""
    begin = time.monotonic()
    with pytest.raises(kind) as info:
        mfload.load(url, "numpy", options=options(transports, stalled=1.0))
    assert time.monotonic() - begin < 4.0
    assert info.value.file == url.rpartition("/org/")[0]
    return info.value


def changed(path: Iterable[Any], value: Any, valid: Any = VALID) -> Any:
    """The valid manifest with one thing replaced; a function is called with what was there."""
    made = copy.deepcopy(valid)
    *outer, last = path
    inside = made
    for each in outer:
        inside = inside[each]
    inside[last] = value(inside[last]) if callable(value) else value
    return made


A, B, C = (("tensors", n) for n in range(3))
SHAPE, DTYPE, FRAGMENT, BOX = (*A, 2), (*A, 1), (*A, 4, 0), (*A, 4, 0, 0)
WRONG: list[tuple[tuple[Any, ...], Any]] = [
    # Of the whole.
    (("mfload_seed",), 1),
    (("mfload_seed",), 3),
    (("mfload_seed",), True),
    (("mfload_seed",), "1"),
    (("model",), ""),
    (("model",), "org/name\n"),
    (("model",), "org//name"),
    (("model",), "peer://elsewhere/org/name"),
    (("model",), ["org/name"]),
    (("revision",), None),
    (("revision",), "main\r\nX: y"),
    (("incarnation",), "0" * 31),
    (("incarnation",), "G" * 32),
    (("incarnation",), "0" * 32 + "\n"),
    (("generation",), -1),
    (("generation",), 1 << 62),
    (("generation",), 1.0),
    (("generation",), True),
    (("generation",), "0"),
    (("part",), [0]),
    (("part",), [1, 1]),
    (("part",), [-1, 1]),
    (("part",), [0, 0]),
    (("part",), [0, 1 << 40]),
    (("part",), None),
    (("size",), -1),
    (("size",), lambda size: size - 1),
    (("size",), lambda size: size + BLOCK),  # Of more checksums than there are.
    (("size",), 1 << 200),
    (("size",), 1e300),
    (("metadata",), {"a": 1}),
    (("metadata",), [["a", "b"]]),
    (("ways",), ["http"]),
    (("ways",), {str(n): True for n in range(1000)}),
    (("block",), 4096),
    (("block",), 0),
    (("checksums",), lambda sums: sums[:-1]),
    (("checksums",), lambda sums: sums + 16 * "0"),
    (("checksums",), lambda sums: sums[:-1] + "G"),
    (("checksums",), lambda sums: [sums]),
    (("shared",), lambda sums: sums[:-1]),
    (("shared",), lambda sums: sums[:-1] + "G"),
    (("shared",), None),
    (("tensors",), {}),
    (("tensors",), lambda rows: [*rows, rows[0]]),  # A name twice.
    # Of a tensor.
    (A, None),
    (A, lambda each: each[:4]),
    (A, lambda each: [*each, 1]),
    ((*A, 0), 1),
    ((*A, 0), None),
    (DTYPE, "F33"),
    (DTYPE, "BF16"),  # Half the bytes.
    (DTYPE, ["F32"]),
    (DTYPE, None),
    (SHAPE, [300]),
    (SHAPE, [300, 255]),
    (SHAPE, [300, -256]),
    (SHAPE, [300.0, 256]),
    (SHAPE, [True, 256]),
    (SHAPE, "300"),
    (SHAPE, [1 << 40, 1 << 40]),
    (SHAPE, [0, 1 << 61, 1 << 61]),
    (SHAPE, [1] * 65),
    ((*A, 3), 5),
    ((*A, 3), "x" * 10_000),
    # Of its fragments.
    ((*A, 4), None),
    ((*A, 4), [1]),
    (FRAGMENT, [1, 2]),
    ((*FRAGMENT, 1), -1),
    ((*FRAGMENT, 1), 1 << 61),
    ((*FRAGMENT, 1), 0.0),
    ((*FRAGMENT, 1), 8),  # Over those that follow.
    ((*FRAGMENT, 2), 0),
    ((*FRAGMENT, 2), lambda nbytes: nbytes - 1),
    ((*FRAGMENT, 2), lambda nbytes: nbytes + 1),
    ((*B, 4, 0, 1), 0),  # Over those before.
    (BOX, []),
    (BOX, [[0, 300]]),
    (BOX, [[0, 300], [0, 256], [0, 1]]),
    ((*BOX, 0), [0, 301]),
    ((*BOX, 0), [-1, 299]),
    ((*BOX, 0), [300, 0]),
    ((*BOX, 0), [0]),
    ((*BOX, 0), [0, "300"]),
    ((*BOX, 0), [False, 300]),
]


NUMBERS: Any = ("whole", 2)
WRONG_WHOLE: list[tuple[tuple[Any, ...], Any]] = [
    (("whole",), None),
    (("whole",), lambda whole: whole[:2]),
    (("whole", 0), None),
    (("whole", 0), "abc"),
    (("whole", 0), lambda names: names[:2]),
    (("whole", 0, 0), 1),
    (("whole", 0, 0), "b"),  # A name twice.
    (("whole", 0, 0), "\ud800"),
    (("whole", 1), None),
    (("whole", 1, 0), ["F32"]),
    (("whole", 1, 0, 0), "F33"),
    (("whole", 1, 0, 1), [1 << 40, 1 << 40]),
    (("whole", 1, 0, 1), [1 << 61]),  # Beyond the data.
    (("whole", 1, 0, 1), [300, -256]),
    (("whole", 1, 0, 1), [True]),
    (("whole", 1, 1), ["F4", [3]]),
    (NUMBERS, None),
    (NUMBERS, "012"),
    (NUMBERS, lambda numbers: numbers[:2]),
    ((*NUMBERS, 0), 3),
    ((*NUMBERS, 0), -1),
    ((*NUMBERS, 0), 0.0),
    ((*NUMBERS, 0), False),
    (("size",), 8),
    (("tensors",), [["a", "U8", [1], "", [[[[0, 1]], 307212, 1]]]]),  # A name twice.
    (("tensors",), [["d", "U8", [1], "", [[[[0, 1]], 0, 1]]]]),  # Over those.
]


class TestOneThingIsWrong:
    def test_valid(self) -> None:
        assert manifests.from_json(copy.deepcopy(VALID), "peer").to_json()

    def test_both_forms_say_the_same(self) -> None:
        one, other = (manifests.from_json(copy.deepcopy(each), "peer") for each in (VALID, WHOLE))
        assert len(one.rows) == len(other.whole) == len(ARRAYS)
        assert other.rows == ()
        assert [*other.entries] == [each._replace(sharding="") for each in one.entries]
        assert one.layout == other.layout
        assert json.loads(other.to_json()) == WHOLE

    @pytest.mark.parametrize(("path", "value"), WRONG_WHOLE)
    def test_whole_tensors(self, path: tuple[Any, ...], value: Any) -> None:
        with pytest.raises(errors.HeaderError, match="malformed") as info:
            manifests.from_json(changed(path, value, WHOLE), "peer://host:1")
        assert info.value.expected
        assert info.value.found
        assert len(str(info.value)) < 1000

    @pytest.mark.parametrize(("path", "value"), WRONG)
    def test_refused(self, path: tuple[Any, ...], value: Any) -> None:
        with pytest.raises(errors.HeaderError, match="malformed") as info:
            manifests.from_json(changed(path, value), "peer://host:1")
        error = info.value
        assert error.file == "peer://host:1"
        assert error.expected
        assert error.found
        assert len(str(error)) < 1000
        if path[:1] == ("tensors",) and len(path) > 3 and path[1] == 0:
            assert error.tensor in ("a", "b")

    def test_packed_dtypes_end_at_bytes(self) -> None:
        for shape, box in (([3], [[0, 3]]), ([4], [[0, 3]]), ([4], [[1, 3]])):
            tensor = ["x", "F4", shape, "", [[box, 0, 1]]]
            data = {**VALID, "tensors": [tensor], "size": 1, "checksums": None}
            with pytest.raises(errors.HeaderError):
                manifests.from_json(data, "peer")

    @pytest.mark.parametrize("name", sorted(VALID))
    def test_a_field_is_missing(self, name: str) -> None:
        data = {key: value for key, value in VALID.items() if key != name}
        if name == "checksums":
            assert manifests.from_json(data, "peer").checksums is None
            return
        if name == "shared":
            assert manifests.from_json(data, "peer").shared == ""
            return
        with pytest.raises(errors.HeaderError):
            manifests.from_json(data, "peer")

    @pytest.mark.parametrize("value", [None, [], "x", 1, [VALID]])
    def test_no_manifest(self, value: Any) -> None:
        with pytest.raises(errors.HeaderError):
            manifests.from_json(value, "peer")


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 70), 1 << 70),
        st.sampled_from([0, 1, 2, BLOCK, 1 << 62, (1 << 62) - 1]),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["F32", "BF16", "F4", "I64", "0" * 32]),
    ),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(), inside, max_size=2),
    max_leaves=6,
)


def places(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all that is inside a value."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return [path for k, v in items for path in ((*before, k), *places(v, (*before, k)))]


class TestWhatIsTakenHolds:
    @given(st.data(), st.sampled_from([VALID, WHOLE]))
    @settings(max_examples=300)
    def test_anything_else(self, data: st.DataObject, valid: dict[str, Any]) -> None:
        made = copy.deepcopy(valid)
        for _ in range(data.draw(st.integers(1, 3))):
            path = data.draw(st.sampled_from(places(made)))
            *outer, last = path
            inside = made
            for each in outer:
                inside = inside[each]
            inside[last] = data.draw(VALUES)
        try:
            found = manifests.from_json(made, "peer")
        except errors.HeaderError:
            return
        taken: list[tuple[int, int]] = []
        for entry in found.entries:
            kind = mfload.dtypes.TABLE[entry.dtype]
            for box, offset, nbytes in entry.fragments:
                assert 0 <= offset <= offset + nbytes <= found.size
                assert nbytes == kind.size_of(tuple(high - low for low, high in box))
                assert len(box) == len(entry.shape)
                for (low, high), length in zip(box, entry.shape, strict=True):
                    assert 0 <= low <= high <= length
                taken += [(offset, offset + nbytes)] if nbytes else []
        for one in taken:
            for two in taken:
                assert one == two or one[1] <= two[0] or two[1] <= one[0]

    @given(st.binary(max_size=300))
    def test_any_bytes(self, data: bytes) -> None:
        from mfload.formats import strict_json

        with pytest.raises(errors.HeaderError):
            manifests.from_json(strict_json.loads(data, "peer"), "peer")


class TestFromAServer:
    def test_each_kind_of_lie_names_the_peer(self) -> None:
        for path, value in WRONG[:: len(WRONG) // 8]:
            with saying(changed(path, value)) as url:
                refused(url, errors.HeaderError)

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"\xff\xfe",
            b"null",
            b"<html>hello</html>",
            b"[" * 200_000,
            b'{"a":' * 200_000,
            b'{"mfload_seed":1,"mfload_seed":1}',
            b'{"mfload_seed":NaN}',
            b"1" * 10_000,
            b'{"mfload_seed":1,"model":"\\ud800"}',
        ],
    )
    def test_no_json(self, body: bytes) -> None:
        with saying(body) as url:
            refused(url, errors.HeaderError)

    @pytest.mark.parametrize("status", [301, 302, 307, 308])
    def test_a_redirect_is_not_followed(self, status: int) -> None:
        asked: list[str] = []

        def elsewhere(request: HttpRequest) -> Reply:
            asked.append(request.path)
            return text(200, json.dumps(VALID))

        with answering(elsewhere) as other:
            where = other.replace("peer://", "http://").removesuffix(MODEL) + "v1/manifest"
            reply = text(status, "{}", ("Location", where))
            with answering(lambda _: reply) as url:
                error = refused(url, errors.ReadError)
        assert str(status) in str(error.found)
        assert not asked

    @pytest.mark.parametrize(
        ("status", "kind"),
        [
            (401, errors.SourcePermissionError),
            (403, errors.SourcePermissionError),
            (404, errors.SourceNotFoundError),
            (410, errors.SourceChangedError),
            (416, errors.ReadError),
            (500, errors.ReadError),
            (503, errors.ReadError),
            (206, errors.ReadError),
            (299, errors.ReadError),
        ],
    )
    def test_refusals(
        self, status: int, kind: type[errors.SourceError], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(clients, "_PATIENCE", 0.2)
        with saying(b'{"error": "\x1b[31mred\r\n"}' + b"x" * 100_000, status) as url:
            error = refused(url, kind)
        assert str(status) in str(error.found)
        assert "\x1b" not in str(error)
        assert len(str(error)) < 500

    def test_an_answer_over_the_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(manifests, "MAX_MANIFEST", 10_000)
        with saying(b" " * 10_001) as url:
            assert refused(url, errors.HeaderError).expected == "at most 10000 bytes"
        with saying({**VALID, "metadata": {"a": "b" * 5000}}) as url:
            refused(url, errors.SourceError)  # Fine so far: there is no data.

    def test_sizes_that_no_memory_holds(self) -> None:
        """Refused before anything is planned or asked of the system."""

        def promises(nbytes: int, count: int = 1) -> Any:
            tensors = [
                [f"t{n}", "U8", [nbytes], "", [[[[0, nbytes]], 0, nbytes]]] for n in range(count)
            ]
            return saying({**VALID, "size": nbytes, "checksums": None, "tensors": tensors})

        for nbytes, count in ((1 << 50, 1), (1 << 40, 1000)):  # And of shared ones.
            with promises(nbytes, count) as url:
                assert "promises too much" in str(refused(url, errors.HeaderError))
        with promises(1 << 42) as url, pytest.raises(errors.MemoryLimitError):
            mfload.load(url, "numpy", options=options("http"))

    @pytest.mark.parametrize("kind", ["peer", "file"])
    def test_claims_cost_a_look(self, kind: str, tmp_path: Path) -> None:
        """No read is planned of terabytes that don't fit."""
        nbytes = 1 << 43
        tensors = [["t", "U8", [nbytes], "", [[[[0, nbytes]], 0, nbytes]]]]
        said = {**VALID, "size": nbytes, "checksums": None, "shared": "", "tensors": tensors}
        header = json.dumps({"t": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}})
        path = tmp_path / "t.safetensors"
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header.encode())
            file.truncate(8 + len(header) + nbytes)
        with saying(said) as url:
            with mfload.open(url if kind == "peer" else path, "numpy", options=options("http")):
                pass  # What is imported counts for nothing.
            tracemalloc.start()
            begin = time.perf_counter()
            try:
                with pytest.raises(errors.MemoryLimitError):
                    mfload.load(url if kind == "peer" else path, "numpy", options=options("http"))
                assert time.perf_counter() - begin < 1.0
                assert tracemalloc.get_traced_memory()[1] < 4 << 20
            finally:
                tracemalloc.stop()

    @pytest.mark.parametrize("item", ["[]", "{}", "7", '"ab"', "[[[[0,1]]]]", '{"a":1}'])
    def test_no_text_takes_many_times_its_size(self, item: str) -> None:
        """What would is refused before it is parsed."""
        count = (24 << 20) // (len(item) + 1)
        body = json.dumps(VALID)[:-1].encode() + b',"x":[' + b",".join([item.encode()] * count)
        body += b"]}"
        with saying(body) as url:
            tracemalloc.start()
            try:
                error = refused(url, errors.HeaderError)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        assert "would take too much memory" in str(error)
        assert error.expected == "at most 268435456 bytes"
        assert peak < 4 * len(body)

    def test_a_peer_that_is_no_seed(self) -> None:
        for said in (b"SSH-2.0-OpenSSH_9.2\r\n", b"\x16\x03\x01\x02\x00" * 50, b"220 ready\r\n"):
            with raw(said) as url:
                refused(url, errors.ReadError)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@contextlib.contextmanager
def raw(first: bytes, again: bytes = b"", pause: float = 0.0) -> Generator[str]:
    """A peer that says something, and then something else for ever, at times."""

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), connection:
                connection.settimeout(5)
                connection.recv(65536)
                connection.sendall(first)
                while again:
                    connection.sendall(again)
                    time.sleep(pause)

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield f"peer://127.0.0.1:{listener.getsockname()[1]}/{MODEL}"
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


class TestEndlessReplies:
    MANY = b" " * 65536

    @pytest.mark.parametrize(
        ("first", "again"),
        [
            (HEAD + b"\r\n", MANY),
            (HEAD + b"Content-Length: 99999999999999\r\n\r\n", MANY),
            (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + MANY + b"\r\n"),
            (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 9999),
            (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0" + b";x" * 999, b";x" * 9999),
            (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n" * 9999),
            (HEAD, b"X: y\r\n" * 9999),
            (HEAD + b"X: ", MANY),
            (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n" * 999),
            (b"HTTP/1.1 200 ", MANY),
        ],
    )
    def test_end_in_bounded_memory(self, first: bytes, again: bytes) -> None:
        code = """
            import resource, sys, mfload
            from mfload.peer import checkpoint, manifest, source
            manifest.MAX_MANIFEST = 8 << 20
            peer = mfload.PeerOptions(transports="http", stalled=1.0)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            try:
                mfload.load(sys.argv[1], "numpy", options=mfload.Options(peer=peer))
            except (mfload.errors.HeaderError, mfload.errors.ReadError) as error:
                print(type(error).__name__, error)
            more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert more < 64 << 10, more
        """
        with raw(first, again) as url:
            begin = time.monotonic()
            run = [sys.executable, "-c", textwrap.dedent(code), url]
            done = subprocess.run(run, capture_output=True, text=True, timeout=30, check=False)
            assert time.monotonic() - begin < 20
        assert done.returncode == 0, done.stderr
        assert "Error" in done.stdout

    def test_a_manifest_that_drips(self) -> None:
        """A byte now and then is no progress."""
        with raw(HEAD + b"Content-Length: 9999\r\n\r\n", b" ", 0.3) as url:
            begin = time.monotonic()
            with pytest.raises(errors.ReadError, match="stalls"):
                mfload.load(url, "numpy", options=options(stalled=0.5))
            assert time.monotonic() - begin < 8  # Six times as long, on this machine.


class TestMemoryThatIsHandedOver:
    """What a seed sends over its Unix socket is as hostile as what it says."""

    def test_programs_that_are_started_do_not_get_it(self) -> None:
        with publish(ARRAYS) as seed:
            how: Any = options("memfd").peer
            opened = source.connect(*source.ask(seed.address, how), how)
            way: Any = opened.way
            assert not os.get_inheritable(way._fd)
            way.close()

    def test_a_seed_that_is_stopped_while_it_copies(self) -> None:
        """It is given up as soon as it no longer answers, however long a copy may take."""
        with SeedProcess() as seed:
            how: Any = options("memfd", stalled=0.3).peer
            found = source.ask(seed.url.split("/")[2], how)
            seed.send(signal.SIGSTOP)
            begin = time.monotonic()
            with pytest.raises(errors.ReadError, match="stalls"):
                source.connect(*found, how)
            assert time.monotonic() - begin < 3
            seed.send(signal.SIGCONT)

    @pytest.mark.parametrize(
        ("kind", "why"),
        [
            ("unsealed", "not sealed"),
            ("file", "not sealed"),
            ("pipe", "not sealed"),
            ("short", "another size"),
            ("nothing", "no memory"),
            ("several", ""),
        ],
    )
    def test_only_sealed_memory_of_that_size(self, kind: str, why: str, tmp_path: Path) -> None:
        import fcntl

        data = b"".join(each.tobytes() for each in ARRAYS.values())
        size = VALID["size"] - (kind == "short")
        memory = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.write(memory, data[:size])
        if kind in ("short", "several"):
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
        (tmp_path / "file").write_bytes(data)
        file, pipe = os.open(tmp_path / "file", os.O_RDONLY), os.pipe()
        sent = {"nothing": [], "file": [file], "pipe": pipe[:1], "several": [memory, file, *pipe]}

        def give() -> None:
            connection, _ = listener.accept()
            with connection:
                socket.send_fds(connection, [b"1"], sent.get(kind, [memory]))

        name = f"mfload-test-{os.getpid()}-{kind}"
        opened = len(os.listdir("/proc/self/fd"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            thread = threading.Thread(target=give)
            thread.start()
            body = json.dumps({**VALID, "ways": {"memfd": {"socket": name}}})
            state = json.dumps({key: VALID[key] for key in ("incarnation", "generation")})

            def answer(request: HttpRequest) -> Reply:
                return text(200, body if request.path == "/v1/manifest" else state)

            with answering(answer) as url:
                if why:
                    with pytest.raises(errors.SourceError, match="no transport") as info:
                        mfload.load(url, "numpy", options=options("memfd"))
                    assert why in str(info.value)
                    del info
                else:
                    found = mfload.load(url, "numpy", options=options("memfd"))
                    samples.assert_same(found, ARRAYS)
            thread.join()
        gc.collect()
        assert seeding.wait_until(lambda: len(os.listdir("/proc/self/fd")) <= opened)
        for each in (memory, file, *pipe):
            os.close(each)

    @pytest.mark.parametrize("name", ["/tmp/x", "", "mfload-" + "x" * 99, "other", 5, None, "\0x"])
    def test_names_of_sockets(self, name: Any) -> None:
        with saying({**VALID, "ways": {"memfd": {"socket": name}}}) as url:
            refused(url, errors.HeaderError, transports="memfd")

    @pytest.mark.parametrize(
        "given",
        [
            None,
            [],
            {"pid": 1},
            {"pid": -1, "proof": [1, "0" * 32], "spans": ""},
            {"pid": 1 << 40, "proof": [1, "0" * 32], "spans": ""},
            {"pid": 1, "proof": [1, "0" * 31], "spans": ""},
            {"pid": 1, "proof": [1, "0" * 32], "spans": Spans.told([[1 << 60, 8]])},
            {"pid": 1, "proof": [1, "0" * 32], "spans": Spans.told([[4096, -8]])},
            {"pid": 1, "proof": [1, "0" * 32], "spans": Spans.told([[4096, 8]])},
            {"pid": True, "proof": [1, "0" * 32], "spans": Spans.told([[4096, VALID["size"]]])},
            {"pid": 1, "proof": [1, "g" * 32], "spans": Spans.told([[4096, VALID["size"]]])},
            {"pid": 1, "proof": [1, 32], "spans": Spans.told([[4096, VALID["size"]]])},
        ],
    )
    def test_spans_of_memory(self, given: Any) -> None:
        with saying({**VALID, "ways": {"memory": given}}) as url:
            refused(url, errors.HeaderError, transports="memory")

    def test_the_memory_of_another_process(self) -> None:
        """Without the secret of the seed at that address nothing of it is read."""
        with publish(ARRAYS) as seed:
            about = json.loads(seed.manifest.to_json())
            for change in ({"pid": 1}, {"proof": [4096, "0" * 32]}, {"pid": os.getppid()}):
                ways = {"memory": {**about["ways"]["memory"], **change}}
                body = json.dumps({**about, "ways": ways})

                def answer(request: HttpRequest, body: str = body) -> Reply:
                    if request.path == "/v1/manifest":
                        return text(200, body)
                    return seed._answer(request)

                with answering(answer) as url:
                    error = refused(url, errors.SourceError, transports="memory")
                assert "memory: " in str(error)


class TestStale:
    @pytest.mark.parametrize("transport", seeding.TRANSPORTS)
    def test_a_manifest_of_before(self, transport: str) -> None:
        """A cache on the way has the manifest of weights that were replaced since."""
        with publish(ARRAYS) as seed:
            stale = seed.manifest.to_json()
            seed.update(seeding.rows({name: np.zeros_like(each) for name, each in ARRAYS.items()}))

            def answer(request: HttpRequest) -> Reply:
                return text(200, stale) if request.path == "/v1/manifest" else seed._answer(request)

            with answering(answer) as url, pytest.raises(errors.SourceChangedError) as info:
                mfload.load(url, "numpy", options=options(transport))
        assert info.value.file == url.rpartition("/org/")[0]

    @pytest.mark.parametrize("transport", seeding.TRANSPORTS)
    def test_another_process_took_the_port(self, transport: str) -> None:
        """What is open goes on with no seed but its own."""
        with contextlib.ExitStack() as stack:
            seed = stack.enter_context(publish(ARRAYS))
            opened = stack.enter_context(mfload.open(seed.url, options=options(transport)))
            assert samples.same(opened.get_tensor("a"), ARRAYS["a"])
            seed.close()
            others = {name: np.zeros_like(each) for name, each in ARRAYS.items()}
            stack.enter_context(publish(others, peer=mfload.PeerOptions(address=seed.address)))
            with pytest.raises(errors.SourceChangedError):
                opened.get_tensor("c")

    @pytest.mark.parametrize("transport", seeding.TRANSPORTS)
    def test_f16_for_bf16(self, transport: str) -> None:
        """Of as many bytes, and no checksum would find it."""
        one = row("w", np.arange(999, dtype=ml_dtypes.bfloat16))
        two = row("w", np.arange(999, dtype=ml_dtypes.bfloat16).view(np.float16))
        assert one.memory.tobytes() == two.memory.tobytes()
        how = options(transport)
        with (
            mfload.publish([one], model=MODEL, run="one") as seed,
            mfload.open(seed.url, options=how) as opened,
        ):
            seed.update([two])
            with pytest.raises(errors.SourceChangedError):
                opened.get_tensor("w")
        with (
            mfload.publish([one], model=MODEL, run="one") as seed,
            mfload.publish([two], model=MODEL, run="one") as other,
            pytest.raises(errors.CheckpointError) as info,
        ):
            mfload.load(f"peer://{seed.address},{other.address}/{MODEL}", "numpy", options=how)
        for word in ("F16", "BF16", "w", seed.address, other.address):
            assert word in str(info.value)


class TestBoxesOfSeveralSeeds:
    def test_a_shape_that_the_boxes_do_not_fill(self) -> None:
        with saying(changed(SHAPE, [300, 257])) as url:
            with pytest.raises(errors.CheckpointError, match="whole model") as info:
                mfload.load(url, "numpy")
            assert "a: no seed has all of it" in str(info.value)

    @pytest.mark.parametrize("by", [(0, 5), (3, 8), (0, 0)])
    def test_gaps_and_overlaps(self, by: tuple[int, int]) -> None:
        """The halves of two seeds must meet; what is written twice or never is refused."""
        array = samples.numbers((8, 4))
        halves = row("w", array, [(0, 4), (0, 4)]), row("w", array, [by, (0, 4)])
        with (
            mfload.publish([halves[0]], model=MODEL, run="one") as one,
            mfload.publish([halves[1]], model=MODEL, run="one") as two,
            pytest.raises(errors.CheckpointError, match="whole model"),
        ):
            mfload.load(f"peer://{one.address},{two.address}/{MODEL}", "numpy")

    def test_many_boxes_take_no_longer(self) -> None:
        """As many as a manifest holds, of which none fit together."""
        from mfload.peer.checkpoint import tiling

        begin = time.monotonic()
        boxes = [((n, n + 2), (n % 7, n % 7 + 3)) for n in range(50_000)]
        assert tiling((50_002, 10), boxes) is None
        assert time.monotonic() - begin < 5
        assert Fragment(boxes[0], 0, 6).box == boxes[0]

    @pytest.mark.parametrize("shape", [(), (4,), (0,), (2, 3)], ids=str)
    def test_none_at_all(self, shape: tuple[int, ...]) -> None:
        """A tensor without a fragment, even a scalar, is missing."""
        with publish({"a": np.ones(shape, np.float32), "b": np.ones(5, np.float32)}) as seed:
            version = seed._version
            rows = [
                row._replace(fragments=row.fragments * (row.name == "b"))
                for row in version.manifest.entries
            ]
            made = version.manifest._replace(rows=tuple(rows), whole=Columns())
            version.text = made.to_json()
            with pytest.raises(errors.CheckpointError, match="a: no seed has all of it"):
                mfload.load(seed.url, "numpy")

    def test_a_part_beside_the_whole(self) -> None:
        """A seed that has all is enough, though another is one of two."""
        arrays = {"a": np.arange(4.0), "b": np.arange(3.0)}
        with publish(arrays) as one, publish({"a": arrays["a"]}, part=(0, 2)) as two:
            url = f"peer://{one.address},{two.address}/{one.model}"
            found = mfload.load(url, "numpy")
            assert {name: each.tolist() for name, each in found.items()} == {
                name: each.tolist() for name, each in arrays.items()
            }
            with pytest.raises(errors.CheckpointError, match="parts of the model are missing"):
                mfload.load(two.url, "numpy")
