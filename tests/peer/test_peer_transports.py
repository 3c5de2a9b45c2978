"""Transports: what they offer, what they make of hostile offers, and such as others bring."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from agents import Agent, agents as agents
from launching import free_port
from nccl import Nccl, Place, Tensor, ranks as ranks

import mfload
from mfload import Options, PeerOptions, Report, errors
from mfload.peer import collective, memory, nixl, transports
from mfload.peer.data import Data, Spans, cut, hasher
from mfload.peer.manifest import BLOCK
from mfload.peer.transports import Offer

ROOT = Path(__file__).parents[2]
ARRAYS: dict[str, Any] = {f"t{n}": np.arange(n * 1000, dtype=np.int32) for n in range(1, 30)}
ARRAYS["long"] = np.arange(2_500_001, dtype=np.float32)


def _options(*names: str, **more: Any) -> Options:
    return Options(peer=PeerOptions(transports=names, **more))


def _same(found: Any) -> None:
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


@pytest.mark.parametrize("name", transports.TRANSPORTS)
def test_each_name_is_a_transport(name: str) -> None:
    """With both sides, imported without the package that it needs."""
    module = transports.find(name)
    assert callable(module.offer)
    assert callable(module.connect)


def test_none_that_opens_something_is_a_default() -> None:
    """A seed offers, and a reader takes, what needs no consent."""
    assert set(transports.DEFAULT) == {"memory", "memfd", "http"}
    with mfload.publish(ARRAYS, model="m") as seed:
        assert set(seed.manifest.ways) <= set(transports.DEFAULT)


def test_no_such_transport() -> None:
    """The names that there are."""
    with mfload.publish({"x": np.ones(3)}, model="m") as seed:
        with pytest.raises(errors.SourceError, match="collective: the seed does not offer it"):
            mfload.load(seed.url, "numpy", options=_options("collective"))
        with pytest.raises(errors.UsageError, match=r"memory \| memfd"):
            mfload.load(seed.url, "numpy", options=_options("nothing"))
    with pytest.raises(errors.UsageError, match=r"memory \| memfd"):
        mfload.publish(
            {"x": np.ones(3)}, model="m", peer=mfload.PeerOptions(transports=("nothing",))
        )


def test_a_transport_that_can_t_be_offered() -> None:
    """Ends those that were offered before it."""
    before = threading.active_count()
    names = ("memfd", "collective")
    with pytest.raises(errors.UsageError, match="collective can't serve"):
        mfload.publish({"x": np.ones(3)}, model="m", peer=mfload.PeerOptions(transports=names))
    until = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [1],
        [BLOCK],
        [BLOCK - 1, 1, 1],
        [5, 3 * BLOCK, 7, BLOCK],
        [3, 3, BLOCK - 7, 1, 2 * BLOCK],
        [2 * BLOCK + 1, 2],
    ],
)
def test_checksums_of_blocks(sizes: list[int]) -> None:
    """Of the bytes of all arrays, however these lie."""
    data, arrays = Data(), [np.arange(size).astype(np.uint8) for size in sizes]
    for each in arrays:
        data.add(each)
    whole = b"".join(each.tobytes() for each in arrays)
    blocks = [whole[at : at + BLOCK] for at in range(0, len(whole), BLOCK)]
    made, shared = data.checksums()
    assert made == "".join(hasher()(each).hexdigest() for each in blocks)
    parts: dict[int, list[bytes]] = {}
    at = 0
    for size in sizes:
        for block in range(at // BLOCK, -(-(at + size) // BLOCK)):
            low, high = max(at, block * BLOCK), min(at + size, (block + 1) * BLOCK)
            parts.setdefault(block, []).append(whole[low:high])
        at += size
    several = [part for block in parts.values() if len(block) > 1 for part in block]
    assert shared == "".join(hasher()(each).hexdigest() for each in several)


def test_a_copy_that_fails_is_made_for_the_next_reader() -> None:
    """As on a device that has no memory for a moment."""
    with mfload.publish(ARRAYS, model="m", peer=mfload.PeerOptions(transports=("memfd",))) as seed:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Data, "parts", _failing)
            with pytest.raises(errors.SourceError, match="the seed hands over no memory"):
                mfload.load(seed.url, "numpy", options=_options("memfd"))
        _same(mfload.load(seed.url, "numpy", options=_options("memfd")))


def _failing(*_: Any) -> Any:
    raise errors.DeviceError("out of memory")


# Ranges of several arrays


def test_cut_against_a_plain_loop() -> None:
    """Every range of arrays of all small sizes."""
    sizes = [3, 1, 4, 2]
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    flat = [(n, at) for n, size in enumerate(sizes) for at in range(size)]
    spans = Spans(np.array([(100 * n, size) for n, size in enumerate(sizes)]))
    for start in range(11):
        for stop in range(start, 11):
            found = [
                (n, at) for n, low, high in cut(starts, 10, start, stop) for at in range(low, high)
            ]
            assert found == flat[start:stop]
            where = [(n, 100 * n + at) for n, size in enumerate(sizes) for at in range(size)]
            assert where[start:stop] == [
                (n, at)
                for n, address, nbytes in spans.within(start, stop).tolist()
                for at in range(address, address + nbytes)
            ]


def test_parts_of_arrays_of_all_sizes() -> None:
    """Small ones come together, and others by themselves, wherever a range begins and ends."""
    rng = np.random.default_rng(0)
    sizes = [*rng.integers(0, 40, 2500), *rng.choice([1, 8191, 8192, 300_000], 120)]
    arrays, data = [rng.integers(0, 256, size, np.uint8) for size in sizes], Data()
    for each in arrays:
        data.add(each)
    whole = b"".join(arrays)
    for start, stop in [(0, data.size), *rng.integers(0, data.size, (200, 2)).tolist()]:
        found = [*data.parts(start, stop)]
        assert b"".join(found) == whole[start:stop]
        assert len(found) < 200


def test_small_arrays_that_lie_apart_cost_no_calls_each() -> None:
    """Neither to tell where they lie, nor to find them there, nor to send them."""
    block, data, calls = np.zeros(20_000, np.uint8), Data(), list[str]()
    for n in range(0, block.size, 2):
        data.add(block[n : n + 1])

    def made() -> None:
        spans = Spans.of(Spans.told(data.runs()), data.size)
        assert [len(each) for each in (data.spans(), spans.within(1, 9999))] == [10_000, 9998]
        assert sum(map(len, data.parts(1, 9999))) == 9998

    sys.setprofile(lambda _frame, event, _what: calls.append(event))
    try:
        made()
    finally:
        sys.setprofile(None)
    assert len(calls) < 1000


@pytest.mark.parametrize(
    "given",
    [
        None,
        7,
        [[1, 10]],
        "",
        "ab",
        "zz" * 16,
        "é" * 32,
        Spans.told([1]),
        Spans.told([1, 10, 3]),
        Spans.told([1, 5]),
        Spans.told([1, 11]),
        Spans.told([0, 10]),
        Spans.told([-1, 10]),
        Spans.told([1 << 60, 10]),
        Spans.told([[1, 12], [5, -2]]),
        Spans.told([[1, 10], [5, 0]]),
        Spans.told([[1, 1 << 55]] * 512 + [[1, 10]]),  # As many in 64 bits.
    ],
)
def test_hostile_spans(given: Any) -> None:
    """Pairs of positive numbers, of as many bytes as the seed has."""
    with pytest.raises((TypeError, ValueError)):
        Spans.of(given, 10)
    assert Spans.of(Spans.told([[1, 4], [2, 6]]), 10).size == 10


# What readers send to a transport of a seed


class Echo:
    """A transport whose seed's side answers."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def offer(self, data: Data, generation: int) -> Offer:
        def answer(given: Any) -> Any:
            self.asked.append(given)
            return {"twice": given["n"] * 2}

        return Offer({"size": data.size, "generation": generation}, asked=answer)

    def connect(self, given: Any, remote: Any) -> str:
        return f"asked, it says {remote.ask('echo', {'n': given['size']})}"


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Echo:
    """A transport named "echo"."""
    made, true = Echo(), transports.find
    monkeypatch.setattr(transports, "find", lambda name: made if name == "echo" else true(name))
    return made


def _post(seed: Any, path: str, body: bytes, method: str = "POST") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(seed.address, timeout=5)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_seed_answers_for_its_transports(echo: Echo) -> None:
    """JSON for JSON; what is malformed, of another generation or another transport is refused."""
    with mfload.publish(
        {"x": np.ones(4)}, model="m", peer=mfload.PeerOptions(transports=("http", "echo"))
    ) as seed:
        with pytest.raises(errors.SourceError, match="'twice': 64"):
            mfload.load(seed.url, "numpy", options=_options("echo"))
        about = seed.manifest
        path = f"/v1/ways/{about.incarnation}/0/echo"
        assert _post(seed, path, b'{"n": 2}') == (200, b'{"twice": 4}')
        for body in (b"", b"{", b"[]", b"{}", b"\xff", b'{"n": NaN}', b'{"n": null}'):
            assert _post(seed, path, body)[0] == 400, body
        assert _post(seed, path, b'{"n": 2}', "GET")[0] == 405
        assert _post(seed, f"/v1/data/{about.incarnation}/0", b"{}")[0] == 405
        assert _post(seed, f"/v1/ways/{about.incarnation}/1/echo", b"{}")[0] == 410
        assert _post(seed, f"/v1/ways/{'0' * 32}/0/echo", b"{}")[0] == 410
        assert _post(seed, f"/v1/ways/{about.incarnation}/0/http", b"{}")[0] == 404
        assert _post(seed, f"/v1/ways/{about.incarnation}/0/no", b"{}")[0] == 404
        assert _post(seed, f"/v1/ways/{about.incarnation}/0", b"{}")[0] == 404
        assert _post(seed, f"/v1/data/{about.incarnation}/0/echo", b"", "GET")[0] == 404
    assert echo.asked[:2] == [{"n": 32}, {"n": 2}]


def test_they_need_the_token_too(echo: Echo, tmp_path: Path) -> None:
    """Without it nothing is asked of a transport."""
    (tmp_path / "token").write_text("a-long-secret")
    peer = mfload.PeerOptions(token_file=tmp_path / "token", transports=("echo",))
    with mfload.publish({"x": np.ones(4)}, model="m", peer=peer) as seed:
        path = f"/v1/ways/{seed.manifest.incarnation}/0/echo"
        assert _post(seed, path, b'{"n": 2}')[0] == 401
    assert echo.asked == []


# NIXL, without it


@pytest.mark.usefixtures("agents")
def test_nixl_reads_what_is_registered() -> None:
    """And lets go of it in the end."""
    report = Report()
    with mfload.publish(ARRAYS, model="m", peer=mfload.PeerOptions(transports=("nixl",))) as seed:
        _same(mfload.load(seed.url, "numpy", options=_options("nixl"), report=report))
        serving = next(iter(Agent.known.values()))
        assert serving.pumped
        assert report.route[0][1] == "peer-nixl"
    assert serving.spans == []
    assert nixl._kept == []  # pyright: ignore[reportPrivateUsage]


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize("state", ["PROC", "ERR", "raise"])
def test_nixl_keeps_what_it_may_still_write_to(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot of a transfer that did not end well outlives the load, which ends in time."""
    monkeypatch.setattr(Agent, "state", state)
    with mfload.publish(ARRAYS, model="m", peer=mfload.PeerOptions(transports=("nixl",))) as seed:
        start = time.monotonic()
        with pytest.raises(errors.ReadError, match=r"stalls|broke off|has ended"):
            mfload.load(seed.url, "numpy", options=_options("nixl", stalled=0.3))
        assert time.monotonic() - start < 2
    kept: list[Any] = nixl._kept  # pyright: ignore[reportPrivateUsage]
    assert any(isinstance(each, np.ndarray) for each in kept)
    assert any(isinstance(each, Agent) for each in kept)


@pytest.mark.usefixtures("agents")
def test_nixl_keeps_a_transfer_of_a_seed_that_can_t_be_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may go on, and so its handle, its slot and its agent are kept."""
    begun: list[Any] = []
    ask = transports.Remote.ask

    def asked(remote: transports.Remote, transport: str, body: Any) -> Any:
        if begun:
            raise errors.ReadError("the seed can't be asked")
        return ask(remote, transport, body)

    def transfer(_: Agent, handle: Any) -> str:
        begun.append(handle)
        return "PROC"

    monkeypatch.setattr(Agent, "state", "PROC")
    monkeypatch.setattr(Agent, "transfer", transfer)
    monkeypatch.setattr(transports.Remote, "ask", asked)
    monkeypatch.setattr(nixl, "_ASKED", 0.0)
    with (
        mfload.publish(ARRAYS, model="m", peer=mfload.PeerOptions(transports=("nixl",))) as seed,
        pytest.raises(errors.ReadError, match="can't be asked"),
    ):
        mfload.load(seed.url, "numpy", options=_options("nixl"))
    kept: list[Any] = nixl._kept  # pyright: ignore[reportPrivateUsage]
    assert any(each is begun[0] for each in kept)
    assert any(isinstance(each, np.ndarray) for each in kept)
    assert any(isinstance(each, Agent) for each in kept)


def _remote(**given: Any) -> Any:
    about = {"size": 10, "incarnation": "0" * 32, "generation": 0}
    return SimpleNamespace(name="peer://x", manifest=SimpleNamespace(**about), stalled=1.0, **given)


_HOSTILE: list[Any] = [None, 7, "x", [], {}, {"metadata": 1, "spans": [], "rank": "1", "key": 3}]


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize(
    "given",
    [
        *_HOSTILE,
        {"metadata": "QQ==", "spans": Spans.told([[1, 2]])},
        {"metadata": "=", "spans": ""},
        {"metadata": "QQ==", "spans": Spans.told([[1, 10]]), "devices": [0, 0]},
        {"metadata": "QQ==", "spans": Spans.told([[1, 10]]), "devices": [-2]},
        {"metadata": "QQ==", "spans": Spans.told([[1, 10]]), "devices": [True]},
        {"metadata": "QQ==", "spans": Spans.told([[1, 10]]), "devices": [[]]},
    ],
)
def test_hostile_offers_of_nixl(given: Any) -> None:
    """What is not metadata and spans of the seed's size."""
    with pytest.raises(errors.HeaderError, match="what it says of NIXL"):
        nixl.connect(given, _remote())


@pytest.mark.usefixtures("agents")
def test_metadata_that_nixl_refuses() -> None:
    """Another transport is taken."""
    found = nixl.connect({"metadata": "QQ==", "spans": Spans.told([[1, 10]])}, _remote())
    assert found == "KeyError: 'A'"


def test_nixl_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed that is to offer it does not start; a reader takes another transport."""
    monkeypatch.setattr(nixl, "PACKAGES", ("no_such_package",))
    with pytest.raises(errors.FrameworkMissingError, match="nixl-cu13"):
        mfload.publish(ARRAYS, model="m", peer=mfload.PeerOptions(transports=("nixl",)))
    found = nixl.connect({"metadata": "QQ==", "spans": Spans.told([[1, 10]])}, _remote())
    assert found == "the package nixl-cu13 is not installed"


# Collectives


def test_two_processes_of_gloo(tmp_path: Path) -> None:
    """A load over torch.distributed, new weights, and a seed that is killed."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    script, port = Path(__file__).parent / "collective_process.py", str(free_port())
    both = [
        subprocess.Popen([sys.executable, script, str(rank), port, tmp_path], env=environment)
        for rank in range(2)
    ]
    try:
        assert [each.wait(120) for each in both] == [-9, 0]
    finally:
        for each in both:
            each.kill()
            each.wait()
    said = json.loads((tmp_path / "said").read_text())
    assert said["same"]
    assert said["route"][0] == "peer-collective"
    assert "the seed is disturbed" in said["route"][1]
    assert said["default"] == "peer-http"  # Though the seed offers it, the reader has to ask.
    assert said["update"] == "SourceChangedError"
    assert said["again"]
    kind, seconds = said["killed"]
    assert kind in ("ReadError", "SourceNotFoundError")
    assert seconds < 2


def test_nccl_over_a_fake(ranks: list[int]) -> None:
    """Through the device that each side had when it began, which its threads have not."""
    report = Report()
    with mfload.publish(
        ARRAYS, model="m", peer=mfload.PeerOptions(transports=("collective",))
    ) as seed:
        ranks[0] = 1
        _same(mfload.load(seed.url, "numpy", options=_options("collective"), report=report))
        assert "(nccl): the seed is disturbed" in report.route[0][2]
        assert Nccl.places == [(Place("cuda", 3), (0, 1))] * 2
        ranks[0] = 0
        with pytest.raises(errors.SourceError, match="no other process of the group"):
            mfload.load(seed.url, "numpy", options=_options("collective"))
    ranks[0] = 1
    given = seed.manifest.ways["collective"]
    assert collective.connect(given, _remote()) == "the seed is in another process group"


def test_a_message_that_does_not_come(ranks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the load in time; what it would land in is kept."""
    sent = SimpleNamespace(wait=lambda timeout: None)
    monkeypatch.setattr(Nccl, "send", lambda *_: sent)
    with mfload.publish(
        ARRAYS, model="m", peer=mfload.PeerOptions(transports=("collective",))
    ) as seed:
        ranks[0], start = 1, time.monotonic()
        with pytest.raises(errors.ReadError, match="the seed stalls"):
            mfload.load(seed.url, "numpy", options=_options("collective", stalled=0.3))
        assert time.monotonic() - start < 2
    ((tensor, _, _),) = collective._kept  # pyright: ignore[reportPrivateUsage]
    assert isinstance(tensor, Tensor)


@pytest.mark.parametrize("at", ["recv", "wait"])
def test_weights_replaced_before_a_group_breaks_off(
    ranks: list[int], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The seed's side ends with its generation: the message fails before the seed is asked."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    unchecked = PeerOptions(transports=("collective",), checksums=False)
    with mfload.publish(
        ARRAYS, model="m", peer=mfload.PeerOptions(transports=("collective",))
    ) as seed:
        ranks[0] = 1
        with mfload.open(seed.url, "numpy", options=Options(peer=unchecked)) as opened:
            name = opened.keys()[-1]
            opened.get_tensor(name)
            ranks[0] = 0
            seed.update(ARRAYS)
            ranks[0] = 1
            broken = fail if at == "recv" else lambda *_: SimpleNamespace(wait=fail)
            monkeypatch.setattr(Nccl, "recv", broken)
            for _ in range(2):
                with pytest.raises(errors.SourceChangedError):
                    opened.get_tensor(name)


def test_what_a_seed_is_asked_to_send(ranks: list[int]) -> None:
    """Ranks of others, names once, and ranges within the data."""
    name = "0" * 32
    with mfload.publish(
        ARRAYS, model="m", peer=mfload.PeerOptions(transports=("collective",))
    ) as seed:
        path = f"/v1/ways/{seed.manifest.incarnation}/0/collective"
        size = seed.manifest.size

        def ask(**given: Any) -> int:
            return _post(seed, path, json.dumps(given).encode())[0]

        for rank in (0, 2, -1, True, "1", None):
            assert ask(name=name, rank=rank) == 400, rank
        for wrong in ("", "x" * 32, 7, ["a"]):
            assert ask(name=wrong, rank=1) == 400, wrong
        assert ask(name=name, offset=0, nbytes=1) == 400
        assert ask(name=name, rank=1) == 200
        assert ask(name=name, rank=1) == 400
        for offset, nbytes in (
            (-1, 1),
            (0, 0),
            (0, -1),
            (size, 1),
            (0, 1 << 40),
            (0.0, 1),
            (0, "1"),
        ):
            assert ask(name=name, offset=offset, nbytes=nbytes) == 400, (offset, nbytes)
        assert ask(name=name, offset=size - 1, nbytes=1) == 200
        assert ask(name=name) == 200


def test_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed that is to offer it does not start; a reader takes another transport."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(errors.UsageError, match=r"torch\.distributed has no process group"):
        mfload.publish(ARRAYS, model="m", peer=mfload.PeerOptions(transports=("collective",)))
    given = {"rank": 0, "key": "mfload/seed/1", "backend": "gloo"}
    assert collective.connect(given, _remote()) == "torch.distributed has no process group here"


@pytest.mark.parametrize(
    "given",
    [
        *_HOSTILE,
        {"rank": 0, "key": "other", "backend": "gloo"},
        {"rank": 0, "key": "mfload/seed/1", "backend": "mpi"},
        {"rank": True, "key": "mfload/seed/1", "backend": "gloo"},
    ],
)
def test_hostile_offers_of_collective(given: Any) -> None:
    """What is not a rank, a key of a seed and a backend."""
    with pytest.raises(errors.HeaderError, match="what it says of its process group"):
        collective.connect(given, _remote())


# Transports of other packages


def _install(folder: Path, name: str, module: str) -> None:
    """What pip leaves of a package with an entry point."""
    about = folder / f"{module}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[mfload.transports]\n{name} = {module}\n")


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Any]:
    """The example, installed, with a fake of Mooncake; gives its module."""
    example = ROOT / "examples/mooncake"
    declared = (example / "pyproject.toml").read_text()
    assert '[project.entry-points."mfload.transports"]\nmooncake = "mfload_mooncake"' in declared
    _install(tmp_path, "mooncake", "mfload_mooncake")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(example)
    engine: Any = ModuleType("mooncake.engine")
    engine.TransferEngine = Engine
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", engine)
    monkeypatch.delitem(sys.modules, "mfload_mooncake", raising=False)
    monkeypatch.setattr(Engine, "registered", {})
    monkeypatch.setattr(Engine, "error", 0)
    return lambda: sys.modules["mfload_mooncake"]


class Engine:
    """As much of Mooncake as the example uses, in one process."""

    registered: dict[int, int] = {}  # noqa: RUF012
    error = 0

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        return 0 if (metadata, protocol, device) == ("P2PHANDSHAKE", "tcp", "") else -1

    def get_rpc_port(self) -> int:
        return 7

    def register_memory(self, address: int, nbytes: int) -> int:
        self.registered[address] = nbytes
        return 0

    def unregister_memory(self, address: int) -> int:
        del self.registered[address]
        return 0

    def batch_register_memory(self, addresses: list[int], sizes: list[int]) -> int:
        self.registered.update(zip(addresses, sizes, strict=True))
        return 0

    def batch_unregister_memory(self, addresses: list[int]) -> int:
        for each in addresses:
            del self.registered[each]
        return 0

    def batch_transfer_sync_read(
        self, name: str, mine: list[int], theirs: list[int], sizes: list[int]
    ) -> int:
        assert name == "127.0.0.1:7"
        if len(mine) > 1024 or self.error:
            return -1
        for target, start, nbytes in zip(mine, theirs, sizes, strict=True):
            ctypes.memmove(target, start, nbytes)
        return 0


def test_mooncake_by_its_entry_point(mooncake: Callable[[], Any]) -> None:
    """It is found by its name, if both sides say it, and not before."""
    report = Report()
    with mfload.publish(ARRAYS, model="m") as seed:
        assert "mooncake" not in seed.manifest.ways
        assert "mfload_mooncake" not in sys.modules
    with mfload.publish(
        ARRAYS, model="m", peer=mfload.PeerOptions(transports=("http", "mooncake"))
    ) as seed:
        _same(mfload.load(seed.url, "numpy", report=report))
        assert report.route[0][1] == "peer-http"
        _same(mfload.load(seed.url, "numpy", options=_options("mooncake"), report=report))
        assert report.route[0][1] == "peer-mooncake"
        assert "can write to the seed" in report.route[0][2]
    assert not mooncake()._kept
    assert not Engine.registered


def test_mooncake_ranges_beyond_a_batch(mooncake: Callable[[], Any]) -> None:
    """Mooncake takes 1024 ranges at once; the example gives it fewer."""
    many = {f"t{n}": np.full(3, n, np.int16) for n in range(3000)}
    with mfload.publish(many, model="m", peer=mfload.PeerOptions(transports=("mooncake",))) as seed:
        found = mfload.load(seed.url, "numpy", options=_options("mooncake"))
    assert all((found[name] == each).all() for name, each in many.items())


def test_mooncake_keeps_what_it_may_still_write_to(mooncake: Callable[[], Any]) -> None:
    """A slot of a failed read is never used again."""
    with mfload.publish(
        ARRAYS, model="m", peer=mfload.PeerOptions(transports=("mooncake",))
    ) as seed:
        Engine.error = -1
        with pytest.raises(errors.ReadError, match="Mooncake's read failed"):
            mfload.load(seed.url, "numpy", options=_options("mooncake"))
    ((_, slot),) = mooncake()._kept
    assert slot.size == mooncake().SLOT


def test_names_of_other_packages_are_listed(mooncake: Callable[[], Any]) -> None:
    """Among those that there are."""
    with pytest.raises(errors.UsageError, match=r"http.*mooncake"):
        transports.find("nothing")


# What a checksum says


def _small(count: int) -> dict[str, Any]:
    return {f"t{n:03}": np.arange(n, n + 999.0) for n in range(count)}


@pytest.mark.parametrize("transport", ["memory", "http"])
@pytest.mark.parametrize("names", [None, "t(05|1[12])", ["t117"]])
def test_the_tensor_that_changed_is_named(transport: str, names: Any) -> None:
    """Not the first of its block, of which a block has some thirty."""
    arrays = _small(120)
    with mfload.publish(
        arrays, model="m", peer=mfload.PeerOptions(transports=(transport,))
    ) as seed:
        arrays["t117"][-1] = -1
        with pytest.raises(errors.ChecksumError, match="in place") as caught:
            mfload.load(seed.url, "numpy", names=names, options=_options(transport))
        assert caught.value.tensor == "t117"
        problems = mfload.verify(seed.url, options=_options(transport)).problems
        assert [each.tensor for each in problems] == ["t117"]
        for name in ("t115", "t118"):
            arrays[name][3] = -1
        with pytest.raises(errors.ChecksumError, match="3 tensors: t115, t117, t118") as caught:
            mfload.load(seed.url, "numpy", names=["t116"], options=_options(transport))
        assert caught.value.tensor == "t115"


def test_one_that_lies_in_several_blocks_or_has_two_names() -> None:
    big = np.zeros(3 * BLOCK + 5, np.uint8)
    arrays = {"a": np.ones(7), "big": big, "same": big, "z": np.ones(9)}
    with mfload.publish(arrays, model="m", peer=mfload.PeerOptions(transports=("memory",))) as seed:
        for at in (0, BLOCK + 1, 3 * BLOCK + 4):
            big[at] = 1
            with pytest.raises(errors.ChecksumError, match="2 tensors: big, same") as caught:
                mfload.load(seed.url, "numpy", options=_options("memory"))
            assert caught.value.tensor == "big"
            big[at] = 0
        assert len(mfload.load(seed.url, "numpy", options=_options("memory"))) == 4


def test_a_seed_without_sums_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said for sure."""
    true = Data.checksums
    monkeypatch.setattr(Data, "checksums", lambda self: (true(self)[0], ""))
    arrays = {name: np.ones(3) for name in "abc"}
    with mfload.publish(arrays, model="m", peer=mfload.PeerOptions(transports=("memory",))) as seed:
        arrays["b"][0] = 2
        with pytest.raises(errors.ChecksumError, match="one or more of a, b, c") as caught:
            mfload.load(seed.url, "numpy", options=_options("memory"))
        assert caught.value.tensor is None


@pytest.mark.parametrize("transport", ["memory", "http"])
def test_gaps_that_are_read_over_are_no_damage(transport: str) -> None:
    """Several of a block go into the same memory, of which the last one is what stays."""
    random = np.random.default_rng(4)
    arrays = {f"t{n}": random.integers(0, 255, size, np.uint8)
              for n, size in enumerate(random.integers(1, 40_000, 120))}  # fmt: skip
    with mfload.publish(
        arrays, model="m", peer=mfload.PeerOptions(transports=(transport,))
    ) as seed:
        for names in (["t0", "t2", "t4"], *(random.permutation([*arrays])[:40] for _ in range(8))):
            found = mfload.load(seed.url, "numpy", names=[*names], options=_options(transport))
            for name in names:
                np.testing.assert_array_equal(found[name], arrays[name])
        arrays["t60"][-1] ^= 1
        with pytest.raises(errors.ChecksumError) as caught:
            mfload.load(seed.url, "numpy", names="[02468]$", options=_options(transport))
        assert caught.value.tensor == "t60"


def test_a_seed_of_this_process_is_read_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates are seen without checksums, and each load is whole."""
    monkeypatch.setattr(memory.MemoryWay, "read", None)
    options, ended = _options("memory", checksums=False), threading.Event()

    def made(generation: int) -> dict[str, Any]:
        return {f"t{n}": np.full(3000, generation, np.int32) for n in range(4)}

    def update(seed: mfload.Seed) -> None:
        for generation in range(1, 1 << 30):
            if ended.is_set():
                return
            seed.update(made(generation))

    with mfload.publish(made(0), model="m", peer=mfload.PeerOptions(checksums=False)) as seed:
        with mfload.open(seed.url, "numpy", options=options) as opened:
            seed.update(made(1))
            with pytest.raises(errors.SourceChangedError):
                opened.get_tensor("t0")
        thread = threading.Thread(target=update, args=(seed,))
        thread.start()
        whole = 0
        try:
            for _ in range(200):
                with contextlib.suppress(errors.SourceChangedError):
                    found = mfload.load(seed.url, "numpy", options=options)
                    assert len({int(each) for array in found.values() for each in array}) == 1
                    whole += 1
        finally:
            ended.set()
            thread.join()
    assert whole


def test_words_of_generations_are_never_freed() -> None:
    """What takes the place of freed memory may hold the secret of a generation that ended."""
    with mfload.publish(
        {"a": np.ones(9)}, model="m", peer=mfload.PeerOptions(transports=["memory"])
    ) as seed:
        places = set[int]()
        for _ in range(20):
            given = seed.manifest.ways["memory"]["proof"]
            places.add(given[0])
            seed.update({"a": np.ones(9)})
            word = ctypes.string_at(given[0], 24)
            assert given[1] not in word.hex()
        assert len(places) <= 3
