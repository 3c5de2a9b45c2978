"""The planner: who holds which model, who is well, and whom a reader is sent to.

The rules are pure (`choose`, `Registry`); the planner of `mfload planner` keeps them in memory and
speaks HTTP, and `mfload.peer.etcd` keeps the same records in an etcd cluster.
"""

from __future__ import annotations

import json
import platform
import re
import secrets
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from mfload import errors
from mfload.formats import strict_json
from mfload.formats.strict_json import brief
from mfload.peer.client import Client
from mfload.peer.manifest import NAME
from mfload.peer.security import Tls, split_address
from mfload.peer.server import Reply, Request, Server, text

LEASE = 10.0
"""Seconds that a seed stays known without a renewal; it renews three times as often."""

TICKET = 30.0
"""Seconds that a reader's place is kept for it without a renewal, such as after a kill."""

RETRY = 5.0
"""Seconds between looks at a seed that failed a reader."""

_MOST_SEEDS = 10_000
_MOST_PARTS = 4096
_PAUSE = 0.2  # Seconds between a reader's questions while all seeds are busy.
_PROBED = 64 << 10  # Bytes of the small real read that shows that a seed is well.
_NUMBERS = {"generation", "size", "part", "parts", "max_readers"}
_HEX = re.compile(r"[0-9a-f]{32}")


class SeedRecord(NamedTuple):
    """What a planner knows of a seed.

    Attributes:
        host: The machine, to find near ones.
        size: Bytes that it holds.
        part, parts: Which part of the model it holds, of how many; 0 and 1 for all of it.
        max_readers: Readers at once that it takes.
    """

    address: str
    model: str
    revision: str
    incarnation: str
    generation: int
    layout: str
    host: str
    size: int
    part: int
    parts: int
    max_readers: int

    @staticmethod
    def of(given: Any, name: str) -> SeedRecord:
        """A record of parsed JSON; raises HeaderError for what is not one."""
        fine = isinstance(given, dict) and given.keys() == set(SeedRecord._fields)
        for key, value in given.items() if fine else ():
            if key in _NUMBERS:
                fine = fine and type(value) is int and 0 <= value < 1 << 62
            else:
                fine = fine and type(value) is str and len(value) <= 300
        if fine:
            made = SeedRecord(**given)
            with suppress(errors.UsageError):
                split_address(made.address)
                fine = NAME.fullmatch(made.model) and _HEX.fullmatch(made.incarnation)
                if fine and made.max_readers and made.part < made.parts <= _MOST_PARTS:
                    return made
        what = "the record of a seed is malformed"
        raise errors.HeaderError(what, file=name, found=brief(given))


class Ticket(NamedTuple):
    """A reader's places at seeds that hold the model together."""

    id: str
    seeds: tuple[SeedRecord, ...]


class Planner(Protocol):
    """What seeds and readers ask; methods raise SourceError if the planner can't be reached."""

    def register(self, record: SeedRecord) -> None:
        """Makes a seed known for `LEASE` seconds, or longer: to be called again."""
        ...

    def leave(self, record: SeedRecord) -> None:
        """Makes it unknown."""
        ...

    def take(self, model: str, revision: str | None, host: str) -> Ticket | None:
        """Places at seeds; None if all are busy. Without seeds if nobody has the model."""
        ...

    def renew(self, ticket: Ticket) -> None:
        """Keeps places for `TICKET` seconds more."""
        ...

    def done(self, ticket: Ticket, failed: Iterable[str] = ()) -> None:
        """Gives places back; `failed` are incarnations that the reader had trouble with."""
        ...


def here() -> str:
    """What names this machine."""
    boot = ""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read(64).strip()
    return f"{platform.node()} {boot}".strip()[:300]


def choose(
    records: Iterable[SeedRecord], readers: Mapping[str, int], host: str
) -> Sequence[SeedRecord] | None:
    """The seeds that a reader is sent to; none if parts are missing, None if all are busy.

    They have the newest generation of which all parts are there. For each part it is the seed on
    the reader's machine, if there is one, that has the fewest readers for what it can take.
    """
    groups: dict[tuple[int, int], dict[int, list[SeedRecord]]] = {}
    for each in records:
        groups.setdefault((each.generation, each.parts), {}).setdefault(each.part, []).append(each)
    whole = {key: parts for key, parts in groups.items() if len(parts) == key[1]}
    if not whole:
        return ()
    newest = max(generation for generation, _ in whole)
    found: list[tuple[float, float, list[SeedRecord]]] = []
    for (generation, count), parts in whole.items():
        if generation != newest:
            continue
        chosen: list[tuple[bool, float, str, SeedRecord]] = []
        for seeds in parts.values():
            ways = [
                (each.host != host, load, each.incarnation, each)
                for each in seeds
                if (load := readers.get(each.incarnation, 0) / each.max_readers) < 1
            ]
            chosen += [min(ways)] if ways else []
        if len(chosen) == count:
            far, load = sum(way[0] for way in chosen) / count, max(way[1] for way in chosen)
            found.append((far, load, [way[-1] for way in chosen]))
    return min(found)[-1] if found else None


class _Known:
    def __init__(self, record: SeedRecord) -> None:
        self.record, self.until = record, 0.0
        self.tickets: dict[str, float] = {}
        self.well: bool | None = None  # Not known before the first look.


class Registry:
    """The records of one planner, in memory; threads may share it.

    Args:
        probe: A small real read of a seed; a seed that fails it is not handed out.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        probe: Callable[[SeedRecord], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seeds: dict[str, _Known] = {}
        self._lock = threading.Lock()
        self._probe, self._clock = probe, clock

    def register(self, record: SeedRecord) -> None:
        """See `Planner`; a new seed is handed out once the probe has shown that it is well."""
        with self._lock:
            self._forget()
            known = self._seeds.get(record.incarnation)
            if known is None:
                if len(self._seeds) >= _MOST_SEEDS:
                    raise errors.ReadError("the planner knows too many seeds")
                for other in [k for k, v in self._seeds.items() if v.record[0] == record.address]:
                    del self._seeds[other]  # The process that had the address is gone.
                known = self._seeds[record.incarnation] = _Known(record)
                known.well = True if self._probe is None else None
            if record.generation >= known.record.generation:
                known.record = record
            known.until = self._clock() + LEASE

    def leave(self, record: SeedRecord) -> None:
        """See `Planner`."""
        with self._lock:
            self._seeds.pop(record.incarnation, None)

    def take(self, model: str, revision: str | None, host: str) -> Ticket | None:
        """See `Planner`."""
        with self._lock:
            self._forget()
            there = [
                each
                for each in self._seeds.values()
                if each.record.model == model and revision in (None, each.record.revision)
            ]
            readers = {each.record.incarnation: len(each.tickets) for each in there}
            found = choose((each.record for each in there if each.well), readers, host)
            if found is None or (not found and any(each.well is None for each in there)):
                return None  # Busy, or not looked at yet.
            ticket = Ticket(secrets.token_hex(16), tuple(found))
            for each in found:
                self._seeds[each.incarnation].tickets[ticket.id] = self._clock() + TICKET
            return ticket

    def renew(self, ticket: Ticket) -> None:
        """See `Planner`."""
        with self._lock:
            for each in self._seeds.values():
                if ticket.id in each.tickets:
                    each.tickets[ticket.id] = self._clock() + TICKET

    def done(self, ticket: Ticket, failed: Iterable[str] = ()) -> None:
        """See `Planner`; a seed that failed is handed out again after a probe."""
        blamed = set(failed)
        with self._lock:
            for incarnation, each in self._seeds.items():
                held = each.tickets.pop(ticket.id, None) is not None
                if held and incarnation in blamed and self._probe is not None:
                    each.well = False

    def records(self) -> list[tuple[SeedRecord, int, bool | None]]:
        """All seeds, with their readers, and whether they are well."""
        with self._lock:
            self._forget()
            return [(each.record, len(each.tickets), each.well) for each in self._seeds.values()]

    def probe(self) -> None:
        """Looks at the seeds that are not known to be well."""
        if self._probe is None:
            return
        for record in [record for record, _, well in self.records() if not well]:
            well = self._probe(record)
            with self._lock:
                if record.incarnation in self._seeds:
                    self._seeds[record.incarnation].well = well

    def _forget(self) -> None:
        now = self._clock()
        for key in [key for key, each in self._seeds.items() if each.until < now]:
            del self._seeds[key]
        for each in self._seeds.values():
            for key in [key for key, until in each.tickets.items() if until < now]:
                del each.tickets[key]


class PlannerServer:
    """A planner that listens at an address, until it is closed. A context manager.

    The arguments are those of `mfload.publish`; the token and the certificates are the seeds', too.
    """

    def __init__(
        self, address: str = "127.0.0.1:0", *, token: str | None = None, tls: Tls | None = None
    ) -> None:
        self._token, self._tls = token, tls
        self.registry = Registry(self._well)
        self._ended, self._wake = threading.Event(), threading.Event()
        self._server = Server(address, self._answer, token=token, tls=tls, name="mfload-planner")
        self.address = self._server.address
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://{self.address}"
        threading.Thread(target=self._look, name="mfload-probe", daemon=True).start()

    def close(self) -> None:
        """Ends it."""
        self._ended.set()
        self._wake.set()
        self._server.close()

    def __enter__(self) -> PlannerServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look(self) -> None:
        while not self._ended.is_set():
            self._wake.wait(RETRY)
            self._wake.clear()
            if not self._ended.is_set():
                self.registry.probe()

    def _well(self, record: SeedRecord) -> bool:
        client = Client(record.address, token=self._token, tls=self._tls, stalled=1.0)
        try:
            state = client.json("GET", "/v1/state", seconds=1.0)
            about = {"incarnation": record.incarnation, "generation": record.generation}
            if not isinstance(state, dict) or not about.items() <= state.items():
                return False
            nbytes = min(_PROBED, record.size)
            path = f"/v1/data/{record.incarnation}/{record.generation}"
            client.read_into(path, [memoryview(bytearray(nbytes))], 0)
        except (errors.MfloadError, OSError):
            return False
        finally:
            client.close()
        return True

    def _answer(self, request: Request) -> Reply:
        path, _, query = request.path.partition("?")
        parts = path.strip("/").split("/")
        if request.method != "GET" and request.headers.get("Content-Type") != "application/json":
            return text(415, '{"error": "JSON is needed"}')  # No page in a browser may send it.
        try:
            body: Any = strict_json.loads(request.body, "request") if request.body else None
            if parts[:2] == ["v1", "seeds"]:
                return self._seeds(request.method, parts[2:], body)
            if parts[:2] == ["v1", "tickets"]:
                return self._tickets(request.method, parts[2:], body, query)
        except errors.HeaderError as error:
            return text(400, json.dumps({"error": error.message}))
        except errors.ReadError as error:
            return text(503, json.dumps({"error": error.message}))
        return text(404, '{"error": "no such path"}')

    def _seeds(self, method: str, rest: list[str], body: Any) -> Reply:
        if method == "GET" and not rest:
            rows = [
                {**record._asdict(), "readers": readers, "well": well}
                for record, readers, well in self.registry.records()
            ]
            return text(200, json.dumps(rows))
        record = SeedRecord.of(body, "request")
        if method == "PUT":
            self.registry.register(record)
            self._wake.set()
        elif method == "DELETE":
            self.registry.leave(record)
        return text(200, "{}")

    def _tickets(self, method: str, rest: list[str], body: Any, query: str) -> Reply:
        if method == "POST":
            given = body if isinstance(body, dict) else {}
            model, revision, host = (given.get(key) for key in ("model", "revision", "host"))
            texts = [model, host, revision or ""]
            if not all(isinstance(each, str) and len(each) <= 300 for each in texts):
                raise errors.HeaderError("a question needs a model and a host")
            ticket = self.registry.take(str(model), revision, str(host))
            if ticket is None:
                return text(200, '{"wait": true}')
            seeds = [each._asdict() for each in ticket.seeds]
            return text(200, json.dumps({"id": ticket.id, "seeds": seeds}))
        if len(rest) == 1 and _HEX.fullmatch(rest[0]):
            ticket = Ticket(rest[0], ())
            if method == "PUT":
                self.registry.renew(ticket)
            elif method == "DELETE":
                failed = urllib.parse.parse_qs(query).get("failed", [""])[0]
                self.registry.done(ticket, failed.split(","))
                self._wake.set()
            return text(200, "{}")
        raise errors.HeaderError("no such ticket")


class HttpPlanner:
    """A planner behind http:// or https:// (see `Planner`)."""

    def __init__(self, url: str, token: str | None, tls: Tls | None, stalled: float) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme == "https" and tls is None:
            tls = Tls()
        given = None if parts.scheme == "http" else tls
        self._client = Client(parts.netloc, token=token, tls=given, stalled=stalled, name=url)
        self._url = url

    def register(self, record: SeedRecord) -> None:
        """See `Planner`."""
        self._client.json("PUT", "/v1/seeds", record._asdict())

    def leave(self, record: SeedRecord) -> None:
        """See `Planner`."""
        self._client.json("DELETE", "/v1/seeds", record._asdict())

    def take(self, model: str, revision: str | None, host: str) -> Ticket | None:
        """See `Planner`; what the planner says is hostile input."""
        question = {"model": model, "revision": revision, "host": host}
        found = self._client.json("POST", "/v1/tickets", question)
        if isinstance(found, dict):
            if found.get("wait") is True:
                return None
            number, rows = found.get("id"), found.get("seeds")
            if isinstance(number, str) and _HEX.fullmatch(number) and isinstance(rows, list):
                seeds = tuple(SeedRecord.of(each, self._url) for each in rows)
                for each in seeds:
                    if each.model != model or revision not in (None, each.revision):
                        what = "the planner names seeds of another model"
                        found = f"{each.model}@{each.revision}"
                        raise errors.HeaderError(what, file=self._url, expected=model, found=found)
                return Ticket(number, seeds)
        what = "the planner's answer is malformed"
        raise errors.HeaderError(what, file=self._url, found=brief(found))

    def renew(self, ticket: Ticket) -> None:
        """See `Planner`."""
        self._client.json("PUT", f"/v1/tickets/{ticket.id}", {})

    def done(self, ticket: Ticket, failed: Iterable[str] = ()) -> None:
        """See `Planner`."""
        blamed = ",".join(failed)
        path = f"/v1/tickets/{ticket.id}?failed={blamed}"
        self._client.json("DELETE", path, {}, seconds=self._client.stalled)


def connect(
    url: str, *, token: str | None = None, tls: Tls | None = None, stalled: float = 1.5
) -> Planner:
    """The planner at a URL, which is not asked yet; raises UsageError for an unknown scheme."""
    scheme = url.partition("://")[0].lower()
    if scheme == "etcd":
        from mfload.peer.etcd import EtcdPlanner

        return EtcdPlanner(url, token, tls, stalled)
    if scheme not in ("http", "https"):
        what, expected = "no such planner", "http://, https:// or etcd://"
        raise errors.UsageError(what, expected=expected, found=url)
    return HttpPlanner(url, token, tls, stalled)


class Repeated:
    """Calls something again and again in a thread, until it is closed.

    What it raises is ignored: a planner that is gone may come back.
    """

    def __init__(self, call: Callable[[], object], seconds: float) -> None:
        self._call, self._seconds = call, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mfload-renewal", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            with suppress(errors.MfloadError):
                self._call()

    def close(self) -> None:
        """Ends it."""
        self._ended.set()


class Registration:
    """Keeps a seed known to a planner, until it is closed."""

    def __init__(self, planner: Planner, record: SeedRecord) -> None:
        self._planner, self._record = planner, record
        planner.register(record)
        self._repeated = Repeated(lambda: planner.register(self._record), LEASE / 3)

    def update(self, record: SeedRecord) -> None:
        """Tells of another generation; the planner hears of it with a renewal if it is gone now."""
        self._record = record
        with suppress(errors.SourceError):
            self._planner.register(record)

    def close(self) -> None:
        """Leaves the planner."""
        self._repeated.close()
        with suppress(errors.MfloadError):
            self._planner.leave(self._record)


class Use:
    """A reader's ticket while it reads: renewed, and given back at the end.

    Attributes:
        readers: How many still use it.
        failed: Incarnations of the seeds that they had trouble with.
    """

    def __init__(self, planner: Planner, ticket: Ticket) -> None:
        self._planner, self.ticket = planner, ticket
        self.failed: set[str] = set()
        self.readers = 1
        self._repeated = Repeated(lambda: planner.renew(ticket), TICKET / 3)

    def release(self) -> None:
        """Says that one reader is at its end; the last one gives the places back."""
        self.readers -= 1
        if not self.readers:
            self.close()

    def close(self) -> None:
        """Gives the places back, and tells which seeds failed."""
        self._repeated.close()
        with suppress(errors.MfloadError):
            self._planner.done(self.ticket, sorted(self.failed))


def find(planner: Planner, model: str, revision: str | None, seconds: float) -> Use:
    """Places at seeds of a model, waited for while all are busy.

    Raises:
        SourceNotFoundError: Nobody has the model.
        LoadTimeoutError: All seeds stayed busy for so many seconds.
        SourceError: The planner can't be reached.
    """
    until, host = time.monotonic() + seconds, here()
    while True:
        ticket = planner.take(model, revision, host)
        name = model if revision is None else f"{model}@{revision}"
        if ticket is not None:
            if ticket.seeds:
                return Use(planner, ticket)
            raise errors.SourceNotFoundError("no seed has the model", file=f"peer:///{name}")
        if time.monotonic() > until:
            what, expected = "all seeds stayed busy", f"a free one within {seconds:g} s"
            raise errors.LoadTimeoutError(what, file=f"peer:///{name}", expected=expected)
        time.sleep(_PAUSE)
