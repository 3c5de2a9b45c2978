"""The planner's records in a real etcd; `make etcd` runs these where CI may lack it."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mfload
from mfload import Options, PeerOptions, errors
from mfload.peer import leases, planner as planning
from mfload.peer.client import SeedClient

ETCD = shutil.which("etcd")
REQUIRED = bool(os.environ.get("MFLOAD_REQUIRE"))
pytestmark = pytest.mark.skipif(
    ETCD is None and not REQUIRED, reason="etcd is not installed (etcd-server)"
)
ARRAYS = {"x": np.arange(600.0).reshape(6, 100)}


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A member of its own on loopback."""
    client, peer = (f"http://127.0.0.1:{_port()}" for _ in range(2))
    folder: Path = tmp_path_factory.mktemp("etcd")
    command = [str(ETCD), "--data-dir", str(folder / "data"), "--logger", "zap"]
    for name, value in {"client-urls": client, "peer-urls": peer}.items():
        command += [f"--listen-{name}", value]
    command += ["--advertise-client-urls", client, "--initial-advertise-peer-urls", peer]
    command += ["--initial-cluster", f"default={peer}"]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        asked = SeedClient(client.removeprefix("http://"))
        for _ in range(100):
            with contextlib.suppress(errors.MfloadError):
                asked.json("POST", "/v3/kv/range", {"key": "AA=="})
                break
            time.sleep(0.1)
        asked.close()
        yield client.replace("http", "etcd")
        process.terminate()


def _load(url: str, **given: Any) -> Any:
    options = Options(peer=PeerOptions(planner=url, **given))
    return mfload.load("peer:///org/name", "numpy", options=options)


def test_seeds_are_found_and_leave(url: str) -> None:
    """What is published is found, until it is closed; loads that publish are seeds."""
    with mfload.publish(
        ARRAYS, model="org/name", peer=mfload.PeerOptions(planner=url), generation=2
    ):
        np.testing.assert_array_equal(_load(url, publish=True)["x"], ARRAYS["x"])
    np.testing.assert_array_equal(_load(url)["x"], ARRAYS["x"])
    (seed,) = mfload.seeds()
    assert seed.generation == 2
    seed.close()
    with pytest.raises(errors.SourceNotFoundError, match="no seed has the model"):
        _load(url)


def test_places_are_taken_and_come_back(url: str) -> None:
    """A seed that takes one reader is busy while its checkpoint is open."""
    options = Options(peer=PeerOptions(planner=url, timeout=0.5))
    with mfload.publish(
        ARRAYS, model="org/name", peer=mfload.PeerOptions(planner=url), max_readers=1
    ):
        opened = mfload.open("peer:///org/name", options=options)
        with pytest.raises(errors.LoadTimeoutError, match="busy"):
            mfload.open("peer:///org/name", options=options)
        opened.close()
        del opened
        gc.collect()
        np.testing.assert_array_equal(_load(url)["x"], ARRAYS["x"])


def test_a_dead_seed_and_a_dead_reader_are_forgotten(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their leases, within a second of these."""
    monkeypatch.setattr(planning, "LEASE", 2.0)
    monkeypatch.setattr(planning, "TICKET", 2.0)
    dead = leases.connect(url)
    record = planning.SeedRecord(
        "127.0.0.1:1", "org/dead", "", "d" * 32, "r", 0, "x", planning.here(), 1, 0, 1, 1
    )
    dead.register(record)
    assert dead.take("org/dead", None, "here") is not None
    assert dead.take("org/dead", None, "here") is None
    until = time.monotonic() + 3.5
    other = leases.connect(url)
    while time.monotonic() < until:
        ticket = other.take("org/dead", None, "here")
        if ticket is not None and not ticket.seeds:
            break
        if ticket is not None:
            other.done(ticket)
        time.sleep(0.2)
    else:
        pytest.fail("the seed is still there")


def test_a_seed_that_failed_is_left_out_for_a_while(url: str) -> None:
    """A killed seed's record is there until its lease ends, and is not handed out again at once."""
    planner = leases.connect(url)
    record = planning.SeedRecord(
        "127.0.0.1:1", "org/name", "", "e" * 32, "r", 0, "x", planning.here(), 1, 0, 1, 3
    )
    planner.register(record)
    with pytest.raises(errors.SourceNotFoundError):
        _load(url)
    ticket = planner.take("org/name", None, "here")
    assert ticket is not None
    assert ticket.seeds == ()
    planner.leave(record)


def test_a_cluster_that_is_gone() -> None:
    """An error at once, also of several members."""
    start = time.monotonic()
    with pytest.raises(errors.SourceError):
        _load(f"etcd://127.0.0.1:{_port()},127.0.0.1:{_port()}")
    assert time.monotonic() - start < 5
