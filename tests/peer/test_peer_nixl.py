"""The transport "nixl" with NIXL itself, on one machine; `make nixl` runs these."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mfload
from mfload import Options, PeerOptions, Report, errors
from mfload.peer import nixl, source
from mfload.peer.data import Data

REQUIRED = bool(os.environ.get("MFLOAD_REQUIRE"))
pytestmark = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, nixl.PACKAGES)) and not REQUIRED,
    reason="NIXL is not installed: make nixl",
)
NIXL = Options(peer=PeerOptions(transports=("nixl",)))
UNCHECKED = Options(peer=PeerOptions(transports=("nixl",), checksums=False))


def _arrays(plus: int = 0) -> dict[str, Any]:
    """Some longer than a slot, many tiny, one empty."""
    found: dict[str, Any] = {
        f"t{n}": (np.arange(n * 700_001) % 251 + plus).astype(np.uint8) for n in range(1, 12)
    }
    found |= {f"s{n}": np.full((n, 3), n + plus, np.float32) for n in range(300)}
    return found


def _same(found: Any, plus: int = 0) -> None:
    expected = _arrays(plus)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


def _seed(*transports: str) -> None:
    """A seed in this process, which takes a line at a time."""
    with mfload.publish(
        _arrays(), model="m", peer=mfload.PeerOptions(transports=transports or ("nixl",))
    ) as seed:
        print(seed.url, flush=True)
        for line in sys.stdin:
            if line == "update\n":
                seed.update(_arrays(1))
            names = [each.name for each in threading.enumerate()]
            print(json.dumps([names, time.process_time()]), flush=True)


class Process:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.pid = process, process.pid
        assert process.stdout is not None
        self.url = process.stdout.readline().strip()

    def tell(self, what: str) -> tuple[list[str], float]:
        """Has it do something; its threads, and seconds of CPU."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        names, seconds = json.loads(self.process.stdout.readline())
        return names, seconds


@contextmanager
def seeding(*transports: str) -> Generator[Process]:
    command = [sys.executable, __file__, *transports]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    path = os.pathsep.join([str(Path(mfload.__file__).parents[1]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        yield Process(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) in (0, -signal.SIGKILL)


@pytest.mark.parametrize("options", [NIXL, UNCHECKED])
def test_every_byte_arrives(options: Options) -> None:
    """Of arrays that cross slots, and of such as share one."""
    report = Report()
    with seeding() as seed:
        _same(mfload.load(seed.url, "numpy", options=options, report=report))
        assert report.route[0][1] == "peer-nixl"
        assert report.route[0][2].startswith("NIXL: pulled")
        with mfload.open(seed.url, "numpy", options=options) as checkpoint:
            part = checkpoint.get_slice("t11")[4_000_000:5_000_000]
            np.testing.assert_array_equal(part, _arrays()["t11"][4_000_000:5_000_000])


def test_any_range_into_any_buffers() -> None:
    """Of many arrays, within one and across slots."""
    arrays = _arrays()
    options, random = PeerOptions(transports=("nixl",)), np.random.default_rng(7)
    with mfload.publish(arrays, model="m", peer=mfload.PeerOptions(transports=("nixl",))) as seed:
        opened = source.connect(*source.ask(seed.address, options), options)
        whole = np.concatenate([each.reshape(-1).view(np.uint8) for each in arrays.values()])
        assert opened.size == whole.size
        for most in [3000] * 30 + [9 << 20] * 6:
            nbytes = int(random.integers(0, most))
            offset = int(random.integers(0, whole.size - nbytes))
            ends = sorted(random.integers(0, nbytes + 1, 3).tolist())
            sizes = np.diff([0, *ends, nbytes]).tolist()
            vector = [memoryview(bytearray(size)) for size in sizes]
            opened.way.read(vector, offset)
            assert b"".join(vector) == whole[offset : offset + nbytes].tobytes()
        del opened


def test_it_is_used_if_both_sides_name_it() -> None:
    """A seed that offers it serves a reader that does not ask for it otherwise."""
    report = Report()
    with seeding("http", "nixl") as seed:
        _same(mfload.load(seed.url, "numpy", report=report))
        assert report.route[0][1] == "peer-http"
    with seeding("http") as seed:
        with pytest.raises(errors.SourceError, match="nixl: the seed does not offer it"):
            mfload.load(seed.url, "numpy", options=NIXL)
        both = Options(peer=PeerOptions(transports=("nixl", "http")))
        _same(mfload.load(seed.url, "numpy", options=both, report=report))
        assert "no nixl: the seed does not offer it" in report.route[0][2]


def _segments() -> set[str]:
    """Shared memory that outlives its processes, POSIX's and System V's."""
    rows = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    keys = {row[1] for row in rows if not int(row[2], 8) & 0o1000}  # SHM_DEST: it goes with them.
    return {each.name for each in Path("/dev/shm").iterdir()} | keys


def _listening(pid: int) -> list[str]:
    """Addresses at which a process takes connections of TCP."""
    sockets = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    found: list[str] = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1])
    return found


def test_nothing_else_listens_and_nothing_runs_between_loads() -> None:
    """The seed's HTTP server is all; its pump ends, and then it takes no CPU."""
    with seeding() as seed:
        port = int(seed.url.split(":")[2].split("/")[0])
        _same(mfload.load(seed.url, "numpy", options=NIXL))
        assert _listening(seed.pid) == [f"0100007F:{port:04X}"]
        assert _listening(os.getpid()) == []
        assert "mfload-nixl" in seed.tell("")[0]
        time.sleep(nixl.PUMPED + 0.3)
        names, before = seed.tell("")
        assert "mfload-nixl" not in names
        time.sleep(1)
        assert seed.tell("")[1] - before < 0.01


def test_new_weights() -> None:
    """Readers of the weights before are told; a new load gets the new ones."""
    with seeding() as seed:
        with mfload.open(seed.url, "numpy", options=UNCHECKED) as checkpoint:
            seed.tell("update")
            with pytest.raises(errors.SourceChangedError):
                checkpoint.get_tensor("t1")
        _same(mfload.load(seed.url, "numpy", options=NIXL), 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_seed_that_ends_in_the_middle(number: signal.Signals) -> None:
    """Is noticed, in time; no shared memory is left."""
    before = _segments()
    with seeding() as seed, mfload.open(seed.url, "numpy", options=UNCHECKED) as checkpoint:
        assert checkpoint.get_tensor("t1")[1] == 1
        os.kill(seed.pid, number)
        try:
            start = time.monotonic()
            with pytest.raises(errors.SourceError):
                checkpoint.get_tensor("t11")
            assert time.monotonic() - start < 4
        finally:
            os.kill(seed.pid, signal.SIGCONT)
    assert _segments() <= before


def test_metadata_that_are_damaged() -> None:
    """NIXL refuses them, and the next transport is taken; it does not crash."""
    about = SimpleNamespace(size=10, incarnation="0" * 32, generation=0)
    remote: Any = SimpleNamespace(name="peer://x", manifest=about, stalled=1.0)
    data = Data()
    data.add(np.arange(10, dtype=np.uint8))
    offered = nixl.offer(data, 0)
    true = base64.b64decode(offered.given["metadata"])
    for raw in (b"", true[:17], true[: len(true) // 2], true[:-5], bytes(400), true[40:]):
        given = {**offered.given, "metadata": base64.b64encode(raw).decode()}
        found = nixl.connect(given, remote)
        assert isinstance(found, str), raw
        assert found.startswith("nixl"), raw
    offered.close()


def test_many_readers_at_once() -> None:
    """Threads of one process, each with an agent of its own."""
    found: list[Any] = []
    with seeding() as seed:
        work = [
            threading.Thread(
                target=lambda: found.append(mfload.load(seed.url, "numpy", options=NIXL))
            )
            for _ in range(6)
        ]
        for each in work:
            each.start()
        for each in work:
            each.join()
    assert len(found) == 6
    for each in found:
        _same(each)


if __name__ == "__main__":
    _seed(*sys.argv[1:])
