"""The planner: whom a reader is sent to, and what becomes of those that die or lie."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mfload
from mfload import Options, PeerOptions, errors
from mfload.peer import planner as planning, source as sourcing
from mfload.peer.client import SeedClient
from mfload.peer.etcd import EtcdPlanner
from mfload.peer.planner import Registry, SeedRecord, choose
from mfload.peer.planner_http import PlannerServer
from mfload.peer.server import Server, text

BEGAN = {"r": 1.0, "old": 0.0}


def _record(n: int, **given: Any) -> SeedRecord:
    made = SeedRecord(
        address=f"127.0.0.1:{7000 + n}",
        model="org/name",
        revision="main",
        incarnation=f"{n:032x}",
        run="r",
        generation=0,
        layout="x",
        host="here",
        size=100,
        part=0,
        parts=1,
        max_readers=3,
    )
    return made._replace(**given)


def test_runs_are_not_mixed() -> None:
    """The newest run that is whole counts, by when it was seen; generations count within it."""
    old = [_record(n, part=n, parts=2, run="old", generation=9) for n in range(2)]
    new = [_record(5 + n, part=n, parts=2) for n in range(2)]
    assert _numbers(choose([*old, *new], {}, "here", BEGAN)) == [5, 6]
    assert _numbers(choose([*old, new[0]], {}, "here", BEGAN)) == [0, 1]
    assert choose([old[0], new[1]], {}, "here", BEGAN) == ()
    assert choose([old[0]._replace(generation=0), new[1]], {}, "here", BEGAN) == ()
    huge = _record(9, run="old", generation=(1 << 62) - 1)
    assert _numbers(choose([huge, *new], {}, "here", BEGAN)) == [5, 6]


def test_a_run_began_when_the_planner_saw_it() -> None:
    """A reader that publishes an old run again makes it no newer, not even when it was gone."""
    clock = _Clock()
    registry = Registry(clock=clock)
    registry.register(_record(1, run="old", generation=3))
    registry.register(_record(2, run="new"))
    registry.register(_record(3, run="old", generation=4))
    assert _numbers(registry.take("org/name", None, "here").seeds) == [2]
    registry.leave(_record(2, run="new"))
    assert _numbers(registry.take("org/name", None, "here").seeds) == [3]
    clock.now += 2 * planning.LEASE  # All are forgotten.
    registry.register(_record(4, run="newest"))
    registry.register(_record(5, run="old", generation=(1 << 62) - 1))
    registry.register(_record(6, run="new", generation=7))
    assert _numbers(registry.take("org/name", None, "here").seeds) == [4]


def test_an_update_while_a_seed_is_looked_at() -> None:
    """Is no reason to send readers to an older run: they wait until it is looked at again."""
    seen: list[int] = []

    def probe(record: SeedRecord) -> bool:
        seen.append(record.generation)
        if len(seen) == 2:
            registry.register(_record(2, generation=1))
        return len(seen) != 2

    registry = Registry(probe)
    registry.register(_record(1, run="old", generation=3))
    registry.probe()
    registry.register(_record(2))
    assert registry.take("org/name", None, "here") is None
    registry.probe()
    assert registry.take("org/name", None, "here") is None
    registry.probe()
    assert _numbers(registry.take("org/name", None, "here").seeds) == [2]
    assert seen == [3, 0, 1]


def test_an_update_that_one_part_has_is_waited_for() -> None:
    """An older run is not handed out meanwhile."""
    old = _record(1, run="old", generation=9)
    new = [_record(5 + n, part=n, parts=2, generation=n) for n in range(2)]
    assert choose([old, *new], {}, "here", BEGAN) is None
    new[0] = new[0]._replace(generation=1)
    assert _numbers(choose([old, *new], {}, "here", BEGAN)) == [5, 6]
    assert _numbers(choose([old, new[1]], {}, "here", BEGAN)) == [1]


def test_a_planner_remembers_so_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those without seeds, the oldest are forgotten."""
    monkeypatch.setattr(planning, "_MOST_RUNS", 4)
    registry = Registry()
    registry.register(_record(0, run="held"))
    for n in range(1, 20):
        registry.register(_record(n, run=f"r{n}"))
        registry.leave(_record(n, run=f"r{n}"))
        assert len(registry._began) <= 4
    registry.register(_record(20, run="r19"))
    registry.register(_record(21, run="held"))
    assert _numbers(registry.take("org/name", None, "here").seeds) == [20]


def _numbers(found: Any) -> list[int]:
    return [int(each.incarnation, 16) for each in found]


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_nearest_and_then_the_least_busy_seed_is_chosen() -> None:
    """A seed on the reader's machine goes before one with fewer readers elsewhere."""
    there = [_record(1, host="far"), _record(2), _record(3)]
    assert _numbers(choose(there, {f"{2:032x}": 1}, "here", BEGAN)) == [3]
    assert _numbers(choose(there, {f"{2:032x}": 1, f"{3:032x}": 2}, "here", BEGAN)) == [2]
    full = {f"{2:032x}": 3, f"{3:032x}": 3}
    assert _numbers(choose(there, full, "here", BEGAN)) == [1]
    assert choose(there, {**full, f"{1:032x}": 3}, "here", BEGAN) is None


def test_a_larger_seed_takes_more() -> None:
    """The load counts for what a seed can take."""
    there = [_record(1, max_readers=10), _record(2, max_readers=2)]
    assert _numbers(choose(there, {f"{1:032x}": 3, f"{2:032x}": 1}, "here", BEGAN)) == [1]


def test_parts_come_together_or_not_at_all() -> None:
    """A group with a part missing is none; of each part the best seed is taken."""
    parts = [_record(n, part=n, parts=3) for n in range(3)]
    assert _numbers(choose(parts, {}, "here", BEGAN)) == [0, 1, 2]
    assert choose(parts[:2], {}, "here", BEGAN) == ()
    more = [*parts, _record(7, part=1, parts=3)]
    assert _numbers(choose(more, {f"{1:032x}": 1}, "here", BEGAN)) == [0, 7, 2]
    assert choose(parts, {f"{2:032x}": 3}, "here", BEGAN) is None


def test_the_newest_whole_generation_is_taken() -> None:
    """An update that not all parts have yet is not handed out."""
    there = [_record(0), _record(1, generation=4), _record(2, generation=5, parts=2)]
    assert _numbers(choose(there, {}, "here", BEGAN)) == [1]
    there.append(_record(3, generation=5, part=1, parts=2))
    assert _numbers(choose(there, {}, "here", BEGAN)) == [2, 3]


def test_parts_are_of_one_revision() -> None:
    """Readers that name none get those of one, and not the first half of another."""
    names = {0: "z", 1: "y", 2: "y", 3: "z"}
    there = [
        _record(n, revision=name, part=part, parts=2)
        for (n, name), part in zip(names.items(), (0, 1, 0, 1), strict=True)
    ]
    chosen = choose(there, {}, "here", BEGAN)
    assert chosen is not None
    assert len({each.revision for each in chosen}) == 1
    assert {each.part for each in chosen} == {0, 1}


def test_leases_and_tickets_end() -> None:
    """A seed that says no more is forgotten within its lease, a reader within its ticket."""
    clock = _Clock()
    registry = Registry(clock=clock)
    registry.register(_record(1, max_readers=1))
    ticket = registry.take("org/name", "main", "here")
    assert ticket is not None
    assert _numbers(ticket.seeds) == [1]
    assert registry.take("org/name", None, "here") is None
    for _ in range(5):
        clock.now += planning.LEASE * 0.9
        registry.register(_record(1, max_readers=1))
        registry.renew(ticket)
    assert registry.take("org/name", None, "here") is None
    for _ in range(4):
        clock.now += planning.LEASE * 0.9
        registry.register(_record(1, max_readers=1))
    assert registry.take("org/name", None, "here") is not None
    clock.now += planning.LEASE + 0.1
    gone = registry.take("org/name", None, "here")
    assert gone is not None
    assert gone.seeds == ()


def test_what_an_older_generation_says_replaces_nothing() -> None:
    """A renewal that was late on its way does not take an update back."""
    registry = Registry()
    registry.register(_record(1, generation=2))
    registry.register(_record(1, generation=1))
    ((record, _, _),) = registry.records()
    assert record.generation == 2


def test_a_new_process_takes_the_address_of_an_old_one() -> None:
    """The one before it is gone."""
    registry = Registry()
    registry.register(_record(1))
    registry.register(_record(2, address=_record(1).address))
    assert [record.incarnation for record, _, _ in registry.records()] == [f"{2:032x}"]


def test_a_seed_that_failed_comes_back_after_a_look() -> None:
    """What a reader blames rests, and is not handed out before the planner has read of it."""
    well, clock = [True], _Clock()
    registry = Registry(lambda _: well[0], clock)
    registry.register(_record(1))
    assert registry.take("org/name", None, "here") is None  # Not looked at yet.
    registry.probe()
    ticket = registry.take("org/name", None, "here")
    assert ticket is not None
    registry.done(ticket, ticket.seeds[0].incarnation.split())
    for now, seen in ((planning.RETRY - 0.1, True), (0.2, False)):
        clock.now += now
        well[0] = seen
        registry.probe()
        after = registry.take("org/name", None, "here")
        assert after is not None
        assert after.seeds == ()
    well[0] = True
    registry.probe()
    assert registry.take("org/name", None, "here").seeds  # pyright: ignore


def test_a_stranger_can_not_blame_a_seed() -> None:
    """Only who has a place at a seed may say that it failed."""
    registry = Registry(lambda _: True)
    registry.register(_record(1))
    registry.probe()
    registry.done(planning.Ticket("0" * 32, ()), [_record(1).incarnation])
    assert registry.take("org/name", None, "here").seeds  # pyright: ignore


def test_readers_become_seeds_in_log_n_rounds() -> None:
    """64 readers, one seed, three at once: each round has four times as many seeds."""
    registry, waiting, rounds, number = Registry(clock=_Clock()), 64, 0, 1
    registry.register(_record(0))
    while waiting:
        taken: list[planning.Ticket] = []
        while waiting and (ticket := registry.take("org/name", None, "here")) is not None:
            taken.append(ticket)
            waiting -= 1
        for ticket in taken:
            registry.done(ticket)
            registry.register(_record(number))
            number += 1
        rounds += 1
    assert rounds == 4  # 3, 12, 48 and the last one.


@pytest.fixture
def planner() -> Iterator[PlannerServer]:
    """A planner on loopback."""
    with PlannerServer() as made:
        yield made


def _options(planner: PlannerServer, **given: Any) -> Options:
    return Options(peer=PeerOptions(planner=planner.url, **given))


ARRAYS = {"x": np.arange(6000.0).reshape(60, 100), "y": np.arange(5, dtype=np.int8)}


def _same(found: Any, wanted: Any = ARRAYS) -> None:
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        np.testing.assert_array_equal(found[name], each, strict=True)


def test_a_load_asks_the_planner_and_gives_its_place_back(planner: PlannerServer) -> None:
    """While a checkpoint is open its place is taken, and not when it is closed and gone."""
    with mfload.publish(
        ARRAYS, model="org/name", revision="r1", peer=mfload.PeerOptions(planner=planner.url)
    ):
        _same(mfload.load("peer:///org/name@r1", "numpy", options=_options(planner)))
        opened = mfload.open("peer:///org/name", options=_options(planner))
        assert [readers for _, readers, _ in planner.registry.records()] == [1]
        np.testing.assert_array_equal(opened.get_tensor("y"), ARRAYS["y"])
        opened.close()
        del opened
        gc.collect()
        assert [readers for _, readers, _ in planner.registry.records()] == [0]
    assert planner.registry.records() == []


def test_a_load_that_publishes_becomes_a_seed(planner: PlannerServer) -> None:
    """The next reader finds it, also when the first seed is gone, with its generation."""
    report = mfload.Report()
    first = mfload.publish(
        ARRAYS, model="org/copied", peer=mfload.PeerOptions(planner=planner.url), generation=7
    )
    options = _options(planner, publish=True)
    _same(mfload.load("peer:///org/copied", "numpy", options=options, report=report))
    assert any(note.startswith("published at peer://") for note in report.notes)
    first.close()
    _same(mfload.load("peer:///org/copied", "numpy", options=_options(planner), report=report))
    (record,) = [r for r, _, _ in planner.registry.records() if r.model == "org/copied"]
    assert (record.generation, record.address != first.address) == (7, True)
    (seed,) = mfload.seeds()
    seed.close()
    assert mfload.seeds() == []


def test_several_parts_are_one_load(planner: PlannerServer) -> None:
    """Processes that hold a tensor each are handed out together."""
    peer = mfload.PeerOptions(planner=planner.url)
    given: dict[str, Any] = {"model": "org/parts", "peer": peer, "run": "job"}
    seeds = [
        mfload.publish({name: each}, part=(n, 2), **given)
        for n, (name, each) in enumerate(ARRAYS.items())
    ]
    _same(mfload.load("peer:///org/parts", "numpy", options=_options(planner)))
    seeds[1].close()
    with pytest.raises(errors.SourceNotFoundError, match="no seed has the model"):
        mfload.load("peer:///org/parts", "numpy", options=_options(planner))
    with pytest.raises(errors.CheckpointError, match="parts of the model are missing"):
        mfload.load(seeds[0].url, "numpy")
    seeds[0].close()


def test_a_killed_seed_is_not_handed_out_for_long(planner: PlannerServer) -> None:
    """A reader that finds it gone says so, and takes the other one."""
    code = (
        "import sys, numpy as np, mfload; "
        "peer = mfload.PeerOptions(planner=sys.argv[1]); "
        "s = mfload.publish({'x': np.ones(9)}, model='org/k', peer=peer); "
        "print(s.address, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, planner.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as seed:
        assert seed.stdout is not None
        seed.stdout.readline()
        mfload.load("peer:///org/k", "numpy", options=_options(planner))
        seed.kill()
    start = time.monotonic()
    with pytest.raises(errors.SourceNotFoundError):
        mfload.load("peer:///org/k", "numpy", options=_options(planner))
    assert time.monotonic() - start < 5
    with mfload.publish(
        {"x": np.zeros(9)}, model="org/k", peer=mfload.PeerOptions(planner=planner.url)
    ):
        found = mfload.load("peer:///org/k", "numpy", options=_options(planner))
    assert not found["x"].any()


def test_a_planner_that_is_gone_is_an_error_at_once() -> None:
    """And no reason to fail for a seed that is known there already."""
    with PlannerServer() as made:
        seed = mfload.publish(ARRAYS, model="org/name", peer=mfload.PeerOptions(planner=made.url))
    with pytest.raises(errors.SourceError, match=r"no peer listens there|broke off"):
        mfload.load("peer:///org/name", "numpy", options=_options(made))
    _same(mfload.load(seed.url, "numpy"))
    seed.update(ARRAYS)
    seed.close()
    with pytest.raises(errors.SourceError):
        mfload.publish(ARRAYS, model="org/name", peer=mfload.PeerOptions(planner=made.url))


_LIES = {
    "not JSON": b"{",
    "no object": b"[]",
    "no seeds": b'{"id": "00000000000000000000000000000000"}',
    "a wrong ticket": b'{"id": "x", "seeds": []}',
    "another model": json.dumps(
        {"id": "0" * 32, "seeds": [_record(1, model="org/other")._asdict()]}
    ).encode(),
    "an address that is none": json.dumps(
        {"id": "0" * 32, "seeds": [_record(1, address="file:///etc")._asdict()]}
    ).encode(),
    "a seed that is not there": json.dumps(
        {"id": "0" * 32, "seeds": [_record(1, address="127.0.0.1:1")._asdict()]}
    ).encode(),
    "too much": b" " * (2 << 20),
}


@pytest.mark.parametrize("lie", _LIES)
def test_a_planner_that_lies(lie: str) -> None:
    """Typed errors, quickly."""
    server = Server("127.0.0.1:0", lambda _: text(200, _LIES[lie]))
    start = time.monotonic()
    options = Options(peer=PeerOptions(planner=f"http://{server.address}"))
    with pytest.raises((errors.SourceError, errors.HeaderError)):
        mfload.load("peer:///org/name", "numpy", options=options)
    assert time.monotonic() - start < 5
    server.close()


@pytest.mark.parametrize(
    "change",
    [{"address": "x"}, {"part": 1}, {"parts": 0}, {"size": -1}, {"size": True}, {"model": "a b"},
     {"incarnation": "x"}, {"host": "x" * 301}, {"more": 1}, {"max_readers": 0}],
)  # fmt: skip
def test_a_seed_that_lies_is_refused(planner: PlannerServer, change: dict[str, Any]) -> None:
    """A record is taken strictly."""
    client = SeedClient(planner.address)
    with pytest.raises(errors.ReadError, match="400"):
        client.json("PUT", "/v1/seeds", _record(1)._asdict() | change)
    assert planner.registry.records() == []
    client.close()


def test_a_request_that_is_not_json_is_told_so(planner: PlannerServer) -> None:
    import http.client

    connection = http.client.HTTPConnection(planner.address)
    connection.request("PUT", "/v1/seeds", b"{", {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert (answer.status, json.load(answer)) == (400, {"error": "the request is not JSON"})
    connection.close()


def test_a_page_in_a_browser_can_not_register(planner: PlannerServer) -> None:
    """What a browser sends to another origin without asking is not JSON by its header."""
    import http.client

    connection = http.client.HTTPConnection(planner.address)
    body = json.dumps(_record(1)._asdict())
    connection.request("PUT", "/v1/seeds", body, {"Content-Type": "text/plain"})
    assert connection.getresponse().status == 415
    connection.close()


def test_tokens_guard_planner_and_seeds(tmp_path: Any) -> None:
    """One token file for all; without it, nothing."""
    token = tmp_path / "token"
    token.write_text("a-long-secret\n")
    with PlannerServer(token="a-long-secret") as made:
        with pytest.raises(errors.SourcePermissionError):
            mfload.publish(ARRAYS, model="org/name", peer=mfload.PeerOptions(planner=made.url))
        with mfload.publish(
            ARRAYS, model="org/name", peer=mfload.PeerOptions(planner=made.url, token_file=token)
        ):
            with pytest.raises(errors.SourcePermissionError) as caught:
                mfload.load("peer:///org/name", "numpy", options=_options(made))
            assert "secret" not in str(caught.value)
            _same(
                mfload.load("peer:///org/name", "numpy", options=_options(made, token_file=token))
            )


def test_readers_wait_for_a_free_place(planner: PlannerServer) -> None:
    """One seed that takes one reader serves four at once, one after the other."""
    found: list[Any] = []

    def load() -> None:
        found.append(mfload.load("peer:///org/name", "numpy", options=_options(planner)))
        gc.collect()

    with mfload.publish(
        ARRAYS, model="org/name", peer=mfload.PeerOptions(planner=planner.url), max_readers=1
    ):
        threads = [threading.Thread(target=load) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(30)
    assert len(found) == 4
    for each in found:
        _same(each)


def test_the_commands(tmp_path: Any) -> None:
    """`mfload planner` and `mfload serve`, typed; both end at an interrupt with exit code 0."""
    mfload.save(ARRAYS, tmp_path / "model.safetensors")
    started: list[subprocess.Popen[str]] = []

    def start(*given: str) -> str:
        command = [sys.executable, "-m", "mfload", *given]
        made = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(made.terminate)
        started.append(made)
        assert made.stdout is not None
        return made.stdout.readline().strip()

    with contextlib.ExitStack() as stack:
        url = start("planner")
        path = str(tmp_path / "model.safetensors")
        peer = start("serve", path, "--model", "org/served", "--revision", "a", "--planner", url)
        assert peer.endswith("/org/served@a")
        _same(mfload.load(peer, "numpy"))
        options = Options(peer=PeerOptions(planner=url))
        _same(mfload.load("peer:///org/served", "numpy", options=options))
        listed = subprocess.run(
            [sys.executable, "-m", "mfload", "ls", peer], capture_output=True, text=True, check=True
        )
        assert "[60, 100]" in listed.stdout
    assert [each.wait(20) for each in started] == [0, 0]


def test_seeds_that_hang_hold_up_no_others(planner: PlannerServer) -> None:
    """A rack that is cut off is not looked at one by one."""
    with contextlib.ExitStack() as stack:
        for n in range(8):
            hung = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            planner.registry.register(_record(n, address=f"127.0.0.1:{hung.getsockname()[1]}"))
        with mfload.publish(ARRAYS, model="org/new", peer=mfload.PeerOptions(planner=planner.url)):
            start = time.monotonic()
            _same(mfload.load("peer:///org/new", "numpy", options=_options(planner)))
            assert time.monotonic() - start < 4


def test_a_busy_fleet_is_waited_for_once(planner: PlannerServer) -> None:
    """Not once more for each seed that may be asked instead."""
    with mfload.publish(
        ARRAYS, model="org/b", peer=mfload.PeerOptions(planner=planner.url), max_readers=1
    ):
        opened = mfload.open("peer:///org/b", options=_options(planner))
        start = time.monotonic()
        with pytest.raises(errors.LoadTimeoutError, match="stayed busy"):
            mfload.load("peer:///org/b", "numpy", options=_options(planner, timeout=0.5))
        assert time.monotonic() - start < 1.2
        opened.close()


def test_an_update_is_not_held_against_a_seed(
    planner: PlannerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the manifest and the first byte, and while it has reached one part of two."""
    peer = mfload.PeerOptions(planner=planner.url)
    how: Any = {"model": "org/u", "run": "one", "peer": peer}
    with (
        mfload.publish(ARRAYS, part=(0, 2), **how) as one,
        mfload.publish({"z": ARRAYS["y"]}, part=(1, 2), **how) as other,
    ):
        mfload.load("peer:///org/u", "numpy", options=_options(planner))
        connect, left = sourcing.connect, [one, other]

        def changed(*given: Any) -> Any:
            if left:
                for each in (one, other):
                    each.update({str(each.part[0]): ARRAYS["x"]})
                left.clear()
            return connect(*given)

        monkeypatch.setattr(sourcing, "connect", changed)
        assert len(mfload.load("peer:///org/u", "numpy", options=_options(planner))) == 2
        assert all(well for *_, well in planner.registry.records())

        ask, slow = sourcing.ask, threading.Timer(1.0, other.update, [{"1": ARRAYS["y"]}])
        late = [slow]

        def halfway(*given: Any) -> Any:
            with contextlib.suppress(IndexError):  # Both parts are asked at once.
                late.pop().start()
                one.update({"0": ARRAYS["y"]})
            return ask(*given)

        monkeypatch.setattr(sourcing, "ask", halfway)
        assert len(mfload.load("peer:///org/u", "numpy", options=_options(planner))) == 2
        assert all(well for *_, well in planner.registry.records())
        slow.join()


def test_weights_that_changed_keep_no_place(
    planner: PlannerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of those before would wait for its own place, to find that others have them not."""
    monkeypatch.setattr("mfload.peer.checkpoint._WAIT", 4.0)
    with mfload.publish(
        ARRAYS, model="org/c", max_readers=1, peer=mfload.PeerOptions(planner=planner.url)
    ) as seed:
        opened = mfload.open("peer:///org/c", options=_options(planner))
        seed.update({"x": ARRAYS["x"] + 1})
        start = time.monotonic()
        with pytest.raises(errors.SourceChangedError):
            opened.get_tensor("y")
        assert time.monotonic() - start < 2.0
        opened.close()


def test_errors_of_arguments_keep_no_place(planner: PlannerServer) -> None:
    """Nor a thread that renews it."""
    with mfload.publish(ARRAYS, model="org/e", peer=mfload.PeerOptions(planner=planner.url)):
        count = sum(each.name == "mfload-renewal" for each in threading.enumerate())
        how = _options(planner, transports="htpp")
        with pytest.raises(errors.UsageError, match="no such transport"):
            mfload.load("peer:///org/e", "numpy", options=how)
        assert [readers for _, readers, _ in planner.registry.records()] == [0]
        time.sleep(0.1)
        assert sum(each.name == "mfload-renewal" for each in threading.enumerate()) == count


def test_a_fork_keeps_the_place_of_its_parent(planner: PlannerServer) -> None:
    """It ends as a program does, and gives back nothing."""
    code = """
import os, sys, mfload
opened = mfload.open("peer:///org/f", options=mfload.Options(
    peer=mfload.PeerOptions(planner=sys.argv[1])))
child = os.fork()
if not child:
    sys.exit(0)
os.waitpid(child, 0)
print("done", flush=True)
sys.stdin.read()
"""
    with mfload.publish(ARRAYS, model="org/f", peer=mfload.PeerOptions(planner=planner.url)):
        command = [sys.executable, "-c", code, planner.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"done\n"
            assert [readers for _, readers, _ in planner.registry.records()] == [1]
            reader.communicate()
        assert [readers for _, readers, _ in planner.registry.records()] == [0]


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1", "etcd://", "https://h:1/x"])
def test_planners_without_an_address(url: str) -> None:
    """The error says what is expected."""
    with pytest.raises(errors.UsageError, match="host:port"):
        mfload.load("peer:///m", "numpy", options=Options(peer=PeerOptions(planner=url)))


@pytest.mark.parametrize("url", [
    "http://me:s3cret@h:1", "https://me:s3cret@h:1", "etcd://me:s3cret@h:1", "ftp://me:s3cret@h:1",
    "me:s3cret@h:1", "http:me:s3cret@h:1", "http://h:1/#s3cret", "http://h:1/?s3cret",
])  # fmt: skip
def test_passwords_of_planners_are_not_shown(url: str) -> None:
    """They take none."""
    with pytest.raises(errors.UsageError) as caught:
        mfload.publish(ARRAYS, model="m", peer=mfload.PeerOptions(planner=url))
    assert "s3cret" not in str(caught.value)


def test_records_of_etcd_that_are_malformed_hide_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever wrote them, and whatever is answered when a lease is renewed."""
    stored = {b"/mfload/seeds/x": b"", b"/mfload/seeds/y": b"{}"}
    asked: list[str] = []

    def ask(path: str, body: Any) -> Any:
        asked.append(path)
        if path == "kv/put":
            stored[base64.b64decode(body["key"])] = base64.b64decode(body["value"])
        if path != "kv/range":
            return {"ID": "7", "result": {"TTL": "soon"}}
        low, high = (base64.b64decode(body[each]) for each in ("key", "range_end"))
        found = [row for row in stored.items() if low <= row[0] < high]
        names = "key", "value"
        rows = [zip(names, map(base64.b64encode, row), strict=True) for row in found]
        return {"kvs": [{**dict(row), "create_revision": "1"} for row in rows]}

    planner = EtcdPlanner("etcd://127.0.0.1:1", None, None, 1.0)
    monkeypatch.setattr(planner, "_ask", ask)
    planner.register(_record(1))
    planner.register(_record(1))
    assert asked.count("lease/grant") == 4  # Of the seed and of its run.
    ticket = planner.take("org/name", None, "here")
    assert ticket is not None
    assert ticket.seeds == (_record(1),)


def test_a_fork_does_not_end_the_way_of_its_parent() -> None:
    """As it would if the seed were told that the reader is done."""
    code = """
import os, sys, mfload
from mfload.peer.http import HttpWay
HttpWay.close = lambda self: print(os.getpid(), flush=True)
opened = mfload.open(sys.argv[1], options=mfload.Options(
    peer=mfload.PeerOptions(transports="http")))
child = os.fork()
if not child:
    sys.exit(0)
os.waitpid(child, 0)
print(os.getpid(), flush=True)
"""
    with mfload.publish(ARRAYS, model="m") as seed:
        command = [sys.executable, "-c", code, seed.url]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert len(found) == 2
    assert len(set(found)) == 1


def test_a_seed_that_was_updated_before_the_planner_heard_is_well(planner: PlannerServer) -> None:
    """Of another generation than its record: it is no reason to take an older run."""
    with mfload.publish(ARRAYS, model="m") as seed:
        record = seed._record()
        seed.update(ARRAYS)
        assert planner._well(record)
        assert not planner._well(record._replace(incarnation="0" * 32))
    assert not planner._well(record)
