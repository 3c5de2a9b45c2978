"""Seeds that lie, in every field of their manifest: no byte of another process is handed out."""

from __future__ import annotations

import copy
import itertools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mfload
from mfload import errors
from mfload.peer import source
from mfload.peer.data import Spans
from tests.peer.seeding import MODEL, TRANSPORTS, SeedProcess, options

MARK = b"a secret of process no 7"
"""16 bytes as a proof, and 8 that are a generation."""

VICTIM = """
    import ctypes, sys
    import numpy as np
    held = np.frombuffer(bytearray(sys.argv[1].encode() * 40_000), np.uint8)
    print(held.ctypes.data, held.size, flush=True)
    sys.stdin.read()
"""

HOSTILE = """
    import json, sys
    import numpy as np
    from mfload.peer.server import Reply, Server, text

    def answer(request):
        given = json.load(open(sys.argv[1]))
        path, manifest = request.path, given["manifest"]
        if path == "/v1/manifest":
            return text(200, json.dumps(manifest))
        if path == "/v1/state":
            return text(200, json.dumps(given["state"]))
        if request.span is None:
            return text(200, json.dumps(given["state"]))
        low, high = request.span
        size = given["size"]
        named = ("Content-Range", f"bytes {low}-{high - 1}/{size}")
        return Reply(206, (bytes(high - low),), high - low, "application/octet-stream", (named,))

    server = Server("127.0.0.1:0", answer)
    print(server.address, flush=True)
    sys.stdin.read()
"""


class Process:
    """A program that tells a line and waits."""

    def __init__(self, code: str, *arguments: str) -> None:
        run = [sys.executable, "-c", textwrap.dedent(code), *arguments]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(run, **pipes)
        assert self.process.stdout is not None
        self.said, self.pid = self.process.stdout.readline().split(), self.process.pid

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate("")


@pytest.fixture(scope="module")
def victim() -> Generator[Process]:
    """A process of the same user that serves nobody."""
    with Process(VICTIM, MARK.decode()) as made:
        yield made


@pytest.fixture(scope="module")
def manifest() -> Generator[dict[str, Any]]:
    """That of a well seed, whose process stays."""
    with SeedProcess(count=3, side=16) as seed:
        client, _ = source.ask(seed.url.split("/")[2], mfload.PeerOptions())
        yield client.json("GET", "/v1/manifest", limit=1 << 20)
        client.close()


class Hostile:
    """A seed in a process of its own that says what the test has it say."""

    def __init__(self, path: Path) -> None:
        self._path, self.process = path, Process(HOSTILE, str(path))
        self.pid = self.process.pid
        self.url = f"peer://{self.process.said[0]}/{MODEL}"

    def says(self, manifest: Any) -> None:
        """What its manifest is from now on; its state is what that one says."""
        state = {key: manifest.get(key) for key in ("incarnation", "generation")}
        size = manifest.get("size")
        text = json.dumps({"manifest": manifest, "state": state, "size": size})
        self._path.with_suffix(".new").write_text(text)
        os.replace(self._path.with_suffix(".new"), self._path)

    def load(self, *transports: str, **peer: Any) -> dict[str, Any] | None:
        """What a reader gets; None for a typed error."""
        try:
            return mfload.load(self.url, "numpy", options=options(*transports, **peer))
        except errors.MfloadError:
            return None


@pytest.fixture
def hostile(tmp_path: Path) -> Generator[Hostile]:
    made = Hostile(tmp_path / "said.json")
    with made.process:
        yield made


def holds_none(found: dict[str, Any] | None) -> bool:
    """Whether nothing of the victim is in what was loaded."""
    return not any(MARK[:8] in array.tobytes() for array in (found or {}).values())


def unchecked(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a seed without checksums."""
    return {**copy.deepcopy(manifest), "checksums": None, "shared": ""}


def naming(victim: Process, manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a seed that names the victim: its number, its bytes as proof and as data."""
    address, size = map(int, victim.said)
    told = unchecked(manifest)
    assert told["size"] < size
    told["generation"] = int.from_bytes(MARK[16:], "little")
    proof = [address, MARK[:16].hex()]
    told["ways"]["memory"] = {
        "pid": victim.pid, "proof": proof, "spans": Spans.told([[address, told["size"]]])
    }  # fmt: skip
    return told


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("transports", [("memory",), ("memory", "http"), ()])
def test_a_stranger_is_named(
    hostile: Hostile,
    victim: Process,
    manifest: dict[str, Any],
    transports: tuple[str, ...],
    checksums: bool,
) -> None:
    """Its process number, its own bytes as the proof, and its memory as the data."""
    hostile.says(naming(victim, manifest))
    found = hostile.load(*transports, checksums=checksums)
    assert holds_none(found)
    if transports == ("memory",):
        assert found is None
    elif transports:
        assert found is not None  # The seed serves bytes of its own, and they are taken for that.


def test_its_own_process_is_read_with_checksums_alone(
    hostile: Hostile, manifest: dict[str, Any]
) -> None:
    """A number that is right does not help one without checksums."""
    told = unchecked(manifest)
    given = {"pid": hostile.pid, "proof": [0x400000, "7f454c46020101000000000000000000"]}
    told["ways"] = {"memory": {**given, "spans": Spans.told([[0x400000, told["size"]]])}}
    hostile.says(told)
    assert hostile.load("memory") is None


def test_what_another_seed_says_is_relayed(hostile: Hostile, manifest: dict[str, Any]) -> None:
    """The other's proof is right, and it is not at the other end."""
    hostile.says(manifest)
    with pytest.raises(errors.SourceError, match="is not the seed"):
        mfload.load(hostile.url, "numpy", options=options("memory"))


@pytest.mark.parametrize("transports", [("memfd",), ("memfd", "http")])
def test_the_socket_of_another_seed_is_named(
    hostile: Hostile, manifest: dict[str, Any], transports: tuple[str, ...]
) -> None:
    """Every user of the machine sees names of sockets; what is handed over there is another's."""
    told = unchecked(manifest)
    del told["ways"]["memory"]
    hostile.says(told)
    found = hostile.load(*transports)
    assert (found is None) == (transports == ("memfd",))
    assert not any(array.any() for array in (found or {}).values())


@pytest.mark.parametrize("size", [64, 1 << 20])
def test_a_seed_of_this_process_is_said_to_be_of_another_size(hostile: Hostile, size: int) -> None:
    """Memory that nothing was read into is not handed out."""
    with mfload.publish(
        {"t": np.ones(256, np.uint8)}, model=MODEL, peer=mfload.PeerOptions(checksums=False)
    ) as seed:
        client, _ = source.ask(seed.address, mfload.PeerOptions())
        told = client.json("GET", "/v1/manifest")
        client.close()
        told["size"], told["whole"][1][0][1] = size, [size]
        told["ways"]["memory"]["spans"] = Spans.told([[1 << 20, size]])
        hostile.says(told)
        assert hostile.load("memory", checksums=False) is None


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all that is in JSON, the first two of each list."""
    yield path
    rows = value.items() if isinstance(value, dict) else ()
    rows = enumerate(value[:2]) if isinstance(value, list) else rows
    for key, each in rows:
        yield from leaves(each, (*path, key))


def changed(manifest: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The manifest with another value at a path."""
    made = copy.deepcopy(manifest)
    place = made
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return made


def wrong(victim: Process) -> list[Any]:
    address, size = map(int, victim.said)
    numbers = [-1, 0, 1, 3, 1 << 31, 1 << 44, (1 << 62) - 1, 1 << 62, 1 << 64, 1.5, True]
    texts = ["", "x", "../x", "\x1b[2J", "0" * 32, "f" * 96, "\ud800", "I4", "mfload-" + "0" * 32]
    others: list[Any] = [None, [], {}, [[]], [0, 0], [[0, 1 << 62]], {"": 0}]
    return [*numbers, victim.pid, address, [[address, size]], *texts, *others]


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_field_is_wrong(
    hostile: Hostile,
    victim: Process,
    manifest: dict[str, Any],
    transport: str,
    checksums: bool,
) -> None:
    """Typed errors or bytes of the seed; the process of the reader stays well."""
    base = naming(victim, manifest)
    if checksums:
        base |= {key: manifest[key] for key in ("checksums", "shared")}
    cases = [path for path in leaves(base) if path]
    values = wrong(victim)
    step = 1 if os.environ.get("MFLOAD_SLOW") else 7
    rows = itertools.islice(itertools.product(cases, values), 0, None, step)
    for path, value in rows:
        hostile.says(changed(base, path, value))
        found = hostile.load(transport, checksums=checksums, stalled=0.5)
        assert holds_none(found), (path, value)


def test_what_is_published_again_is_the_seed_s(
    hostile: Hostile, victim: Process, manifest: dict[str, Any]
) -> None:
    """`publish=True` hands on what was loaded: nothing of a stranger."""
    hostile.says(naming(victim, manifest))
    peer = mfload.PeerOptions(publish=True)
    before = {*mfload.seeds()}
    found = mfload.load(hostile.url, "numpy", options=mfload.Options(peer=peer))
    assert holds_none(found)
    for seed in {*mfload.seeds()} - before:
        with seed:
            assert holds_none(mfload.load(seed.url, "numpy", options=options("http")))
    assert not any(array.any() for array in found.values())
