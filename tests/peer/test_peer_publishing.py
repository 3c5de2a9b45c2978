"""Who may publish to whom: planners that are gone, certificates, and pages in a browser."""

from __future__ import annotations

import contextlib
import gc
import http.client
import os
import platform
import subprocess
import sys
import time
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mfload
from mfload import Options, PeerOptions, errors
from mfload.dtypes import TABLE
from mfload.peer import leases, manifest
from mfload.peer.fragments import Held
from mfload.peer.planner_http import PlannerServer
from mfload.peer.server import Server, text

ARRAYS = {"a": np.arange(1000, dtype=np.float32), "b": np.ones((3, 5), np.int8)}


@contextlib.contextmanager
def published() -> Generator[None]:
    """Closes the seeds that loads made."""
    try:
        yield
    finally:
        for seed in mfload.seeds():
            seed.close()


def _how(planner: str, **given: Any) -> Options:
    return Options(timeout=20, peer=PeerOptions(planner=planner, **given))


def test_a_planner_that_is_gone_hears_of_the_seed_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LEASE", 0.3)
    path = tmp_path / "model.safetensors"
    mfload.save(ARRAYS, path)
    with PlannerServer() as planner:
        url, address = planner.url, planner.address
    report = mfload.Report()
    with published():
        how = _how(url, publish=True)
        found = mfload.load("peer:///m", "numpy", fallback=path, options=how, report=report)
        np.testing.assert_array_equal(found["a"], ARRAYS["a"])
        (seed,) = mfload.seeds()
        assert any("was loaded instead" in note for note in report.notes)
        assert report.notes[-1] == f"published at {seed.url}"
        with PlannerServer(address) as planner:
            until = time.monotonic() + 10
            while not planner.registry.records():
                assert time.monotonic() < until
                time.sleep(0.05)
            again = mfload.load("peer:///m", "numpy", options=_how(url), report=report)
            assert report.route[0][0] == f"peer://{seed.address}"
            np.testing.assert_array_equal(again["b"], ARRAYS["b"])


def test_a_seed_that_is_published_by_hand_needs_its_planner() -> None:
    with PlannerServer() as planner:
        url = planner.url
    with pytest.raises(errors.SourceError):
        mfload.publish(ARRAYS, model="m", peer=mfload.PeerOptions(planner=url))
    assert mfload.seeds() == []


def test_an_authority_without_a_certificate(tmp_path: Path) -> None:
    """A seed that would listen without TLS among those that have it is refused at once."""
    with pytest.raises(errors.UsageError, match="cert_file"):
        PeerOptions(publish=True, ca_file=tmp_path / "ca.pem")
    with pytest.raises(errors.UsageError, match="certificate"):
        mfload.publish(ARRAYS, model="m", peer=mfload.PeerOptions(ca_file=tmp_path / "ca.pem"))
    assert PeerOptions(ca_file=tmp_path / "ca.pem").ca_file


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:{port}", 200), ("localhost", 200), ("LOCALHOST:{port}", 200),
     ("[::1]:{port}", 200), ("127.0.0.1", 200), (platform.node(), 200), ("evil.example", 421),
     ("evil.example:{port}", 421), ("127.0.0.1.evil.example:{port}", 421), ("", 421), ("0", 421),
     ("[::1", 421)],
)  # fmt: skip
def test_names_of_others_are_not_answered(host: str, status: int) -> None:
    """A page's own name may lead to this machine: the browser would let it read the weights."""
    with mfload.publish(ARRAYS, model="m") as seed:
        name, port = seed.address.split(":")
        connection = http.client.HTTPConnection(name, int(port), timeout=10)
        connection.putrequest("GET", "/v1/manifest", skip_host=True)
        connection.putheader("Host", host.format(port=port))
        connection.endheaders()
        assert connection.getresponse().status == status
        connection.close()


def test_any_name_will_do_with_a_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-secret-of-many-characters")
    with mfload.publish(ARRAYS, model="m", peer=mfload.PeerOptions(token_file=token)) as seed:
        name, port = seed.address.split(":")
        connection = http.client.HTTPConnection(name, int(port), timeout=10)
        headers = {"Host": "node7.example", "Authorization": "Bearer a-secret-of-many-characters"}
        connection.request("GET", "/v1/state", headers=headers)
        assert connection.getresponse().status == 200
        connection.close()


def test_a_list_is_a_tree() -> None:
    """Its arrays are named by their places."""
    with mfload.publish([np.ones(3), {"a": np.arange(4)}], model="m") as seed:
        found = mfload.load(seed.url, "numpy")
    assert {name: each.tolist() for name, each in found.items()} == {
        "0": [1.0] * 3,
        "1.a": [0, 1, 2, 3],
    }
    with pytest.raises(errors.UnsupportedArrayError):
        mfload.publish([1, 2], model="m")


@pytest.mark.parametrize("transport", ["memory", "memfd", "http"])
def test_a_closed_seed_holds_no_arrays(transport: str) -> None:
    """At once, and though it is kept itself: nobody has to wait for a collection of garbage."""
    array = np.arange(5000, dtype=np.float32)
    there = weakref.ref(array)
    with mfload.publish({"a": array}, model="m") as seed:
        del array
        options = Options(peer=PeerOptions(transports=(transport,)))
        found = mfload.load(seed.url, "numpy", options=options)
        gc.collect()
        assert there() is not None
        gc.disable()
    try:
        until = time.monotonic() + 5  # The thread of a connection ends by itself.
        while there() is not None and time.monotonic() < until:
            time.sleep(0.01)
        assert there() is None
    finally:
        gc.enable()
    np.testing.assert_array_equal(found["a"], np.arange(5000))
    assert repr(seed).startswith("<Seed peer://")


@pytest.mark.parametrize(
    "given",
    [
        {"generation": -1},
        {"generation": 1 << 62},
        {"generation": 1.5},
        {"part": 3},
        {"part": (2, 2)},
        {"part": (0, 5000)},
        {"metadata": {"a": 1}},
        {"metadata": {"a": "\ud800"}},
        {"model": "no name"},
        {"peer": PeerOptions(transports=("htpp",))},
        {"peer": "http://127.0.0.1:80"},
        {"max_readers": 0},
        {"max_readers": 1.5},
        {"max_readers": 1 << 62},
        {"arrays": {"none": np.empty((0, 1 << 62), np.int8)}},
        {"arrays": {"\ud800": np.ones(1)}},
    ],
    ids=str,
)
def test_what_no_reader_would_take_is_not_published(given: dict[str, Any]) -> None:
    """Readers are strict; who publishes hears of it first."""
    how: dict[str, Any] = {"arrays": ARRAYS, "model": "m", **given}
    with pytest.raises(errors.UsageError):
        mfload.publish(**how)
    assert mfload.seeds() == []


@pytest.mark.parametrize("transport", ["memory", "memfd", "http"])
def test_generations_may_be_times(transport: str) -> None:
    """Such as nanoseconds, of 19 digits."""
    with mfload.publish(
        ARRAYS, model="m", generation=time.time_ns(), peer=mfload.PeerOptions(transports=transport)
    ) as seed:
        found = mfload.load(seed.url, "numpy")
    np.testing.assert_array_equal(found["a"], ARRAYS["a"])


def test_a_manifest_that_takes_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MAX_PARSED", 1000)
    shared = np.zeros(4, np.float32)
    with pytest.raises(errors.UsageError, match="the manifest would take too much memory"):
        mfload.publish({f"t{n}": shared for n in range(100)}, model="m")


def test_a_manifest_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by the seed, not by each reader; an update leaves the weights before."""
    with mfload.publish(ARRAYS, model="m") as seed:
        monkeypatch.setattr(manifest, "MAX_MANIFEST", 2000)
        many = {f"t{n}": np.ones(1) for n in range(100)}
        with pytest.raises(errors.UsageError, match="the manifest is too long"):
            seed.update(many)
        with pytest.raises(errors.UsageError, match="the manifest is too long"):
            mfload.publish(many, model="m")
        assert mfload.load(seed.url, "numpy").keys() == ARRAYS.keys()
        assert mfload.seeds() == [seed]


@pytest.mark.parametrize("lie", ["together", "apart"])
def test_many_small_tensors_take_few_calls_each(lie: str) -> None:
    """A microsecond for each of them is what a load from a file takes in all."""
    count = 2000
    arrays = dict(
        zip(map(str, range(count)), np.arange(4.0 * count).reshape(count, 4), strict=True)
    )
    if lie == "apart":
        arrays = {name: each.copy() for name, each in arrays.items()}
    calls = [0]

    def call(*_: Any) -> None:
        calls[0] += 1

    def counted(function: Any) -> tuple[Any, float]:
        calls[0] = 0
        sys.setprofile(call)
        try:
            found = function()
        finally:
            sys.setprofile(None)
        return found, calls[0] / count

    how = Options(peer=PeerOptions(transports=("memory",), stalled=30))
    with mfload.publish({"a": np.ones(3)}, model="first") as first:
        mfload.load(first.url, "numpy", options=how)
    seed, publishing = counted(lambda: mfload.publish(arrays, model="m"))
    with seed:
        found, loading = counted(lambda: mfload.load(seed.url, "numpy", options=how))
    assert len(found) == count
    np.testing.assert_array_equal(found["7"], arrays["7"])
    assert publishing < 60  # Events of calls and returns: before there were columns, 340
    assert loading < 28  # and 220.


def test_a_long_text_of_the_sharding_is_cut() -> None:
    """Some frameworks name each device in it."""
    held = Held("a", TABLE["I8"], (4,), ((0, 4),), np.arange(4, dtype=np.uint8), "x" * 5000)
    with mfload.publish([held], model="m") as seed:
        assert mfload.load(seed.url, "numpy")["a"].tolist() == [0, 1, 2, 3]


def test_new_weights_have_their_own_tree() -> None:
    """What was said of the tree before is not said of them; what the user said is."""
    more = {"metadata": {"step": "7"}}
    with mfload.publish([np.ones(3), np.zeros(2)], model="m", **more) as seed:  # pyright: ignore
        assert seed.manifest.metadata.keys() > {"step"}
        seed.update(ARRAYS)
        assert seed.manifest.metadata == {"step": "7"}


def test_a_planner_that_talks_nonsense_stops_no_update() -> None:
    """The readers have the new weights all the same."""
    said = [b"{}"]
    planner = Server("127.0.0.1:0", lambda request: text(200, said[0]))
    with mfload.publish(
        ARRAYS, model="m", peer=mfload.PeerOptions(planner=f"http://{planner.address}")
    ) as seed:
        said[0] = b"nonsense"
        seed.update({"a": np.zeros(3)})
        assert seed.generation == 1
    planner.close()


@pytest.mark.parametrize(
    "address", ["0.0.0.0:0", "0:0", "[::]:0", "[0::0]:0", "[::ffff:0.0.0.0]:0"]
)
def test_readers_can_t_connect_to_all_addresses(address: str, tmp_path: Path) -> None:
    """A planner would send each of them to itself."""
    token = tmp_path / "token"
    token.write_text("a-secret-of-many-characters")
    with PlannerServer(token=token.read_text()) as planner:
        peer = PeerOptions(planner=planner.url, token_file=token, address=address)
        with pytest.raises(errors.UsageError, match="the address that readers connect to"):
            mfload.publish(ARRAYS, model="m", peer=peer)
        assert planner.registry.records() == []
        how = _how(planner.url, publish=True, token_file=token, address=address)
        with pytest.raises(errors.UsageError, match="the address that readers connect to"):
            mfload.load("peer:///m", "numpy", options=how)
    assert mfload.seeds() == []


def test_what_can_not_be_published_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The errors come before the load, which may be long."""
    none = tmp_path / "none"
    with pytest.raises(errors.UsageError, match="needs the name of the model"):
        mfload.load(none, "numpy", options=Options(peer=PeerOptions(publish=True)))
    url = "peer://127.0.0.1:1/m"
    for address in ("127.0.0.1", "0.0.0.0:0"):
        options = Options(peer=PeerOptions(publish=True, address=address))
        with pytest.raises(errors.UsageError, match=r"address|listener"):
            mfload.load(url, "numpy", fallback=none, options=options)
    options = Options(peer=PeerOptions(publish=True, planner="ftp://h:1"))
    with pytest.raises(errors.UsageError, match="no such planner"):
        mfload.load(url, "numpy", fallback=none, options=options)
    (cert := tmp_path / "cert.pem").write_text("none")
    options = Options(peer=PeerOptions(publish=True, cert_file=cert))
    with pytest.raises(errors.UsageError, match="a certificate can't be used"):
        mfload.load(none, "numpy", fallback=url, options=options)
    options = Options(peer=PeerOptions(publish=True))
    with pytest.raises(errors.UsageError, match="the URL is malformed"):
        mfload.load(none, "numpy", fallback="peer://127.0.0.1:1/", options=options)
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(errors.FrameworkMissingError, match="xxhash"):
        mfload.load(none, "numpy", fallback=url, options=options)


def test_the_model_is_published_whichever_place_it_came_from(tmp_path: Path) -> None:
    """With the generation of the seed, or none of the files."""
    path = tmp_path / "model.safetensors"
    mfload.save(ARRAYS, path)
    options = Options(peer=PeerOptions(publish=True))

    def generation(*places: Any, **given: Any) -> int:
        mfload.load(places[0], "numpy", fallback=places[1], options=options, **given)
        (made,) = [each for each in mfload.seeds() if each is not seed]
        made.close()
        assert made.model == "org/m"
        return made.generation

    with mfload.publish(ARRAYS, model="org/m", generation=5) as seed:
        url = seed.url
        assert generation(url, path) == 5
        assert generation(url, path, prefer="fallback") == 0
        assert generation(path, url) == 0
        assert generation(path, url, prefer="fallback") == 5
        assert generation(url, tmp_path / "none", prefer="fallback") == 5
        assert generation(tmp_path / "none", url) == 5


@pytest.mark.parametrize("stalled", [None, float("inf"), 1e12, 0, -1, "1"])
def test_peers_are_not_waited_for_without_end(stalled: Any) -> None:
    """No socket takes such times."""
    with pytest.raises(errors.UsageError):
        PeerOptions(stalled=stalled)


def test_what_is_restored_is_published() -> None:
    """With a target or without; in a process with JAX."""
    code = """
import numpy as np, mfload
arrays = {"layer": {"w": np.arange(1000.0), "b": np.ones(3)}}
target = {"layer": {"w": np.zeros(1000), "b": np.zeros(3)}}
how = mfload.Options(peer=mfload.PeerOptions(publish=True))
with mfload.publish(arrays, model="m") as seed:
    for given in ({"target": target}, {"framework": "numpy"}):
        report = mfload.Report()
        found = mfload.restore(seed.url, options=how, report=report, **given)
        (own,) = (each for each in mfload.seeds() if each is not seed)
        assert report.notes == (f"published at {own.url}",), report.notes
        again = mfload.load(own.url, "numpy")
        assert again.keys() == {"layer.w", "layer.b"}, again.keys()
        assert (again["layer.w"] == arrays["layer"]["w"]).all()
        own.close()
"""
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
