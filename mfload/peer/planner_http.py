"""The planner of `mfload planner`: records in memory, over HTTP."""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Iterable
from contextlib import closing, suppress
from typing import Any

from mfload import errors
from mfload.formats import strict_json
from mfload.formats.strict_json import brief
from mfload.peer.client import SeedClient
from mfload.peer.manifest import is_generation
from mfload.peer.planner import ID, RETRY, Registry, SeedRecord, Ticket
from mfload.peer.security import Tls
from mfload.peer.server import HttpRequest, Reply, Server, text
from mfload.runtime import start
from mfload.sources.base import ClosedAtEnd

_LOOKS = 3
_PROBED = 64 << 10  # Bytes of the small real read that shows that a seed is well.


class PlannerServer(ClosedAtEnd):
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
        start(self._look, "mfload-probe", service=True)

    def close(self) -> None:
        """Ends it."""
        self._ended.set()
        self._wake.set()
        self._server.close()

    def _look(self) -> None:
        while not self._ended.is_set():
            self._wake.wait(RETRY)
            self._wake.clear()
            if not self._ended.is_set():
                self.registry.probe()

    def _well(self, record: SeedRecord) -> bool:
        given: Any = {"token": self._token, "tls": self._tls, "stalled": 1.0}
        try:
            with closing(SeedClient(record.address, **given)) as client:
                # It may be updated before the planner is told, and while it is looked at.
                for _ in range(_LOOKS):
                    state = client.json("GET", "/v1/state", seconds=1.0)
                    if (
                        not isinstance(state, dict)
                        or state.get("incarnation") != record.incarnation
                    ):
                        return False
                    if not is_generation(number := state.get("generation")):
                        return False
                    nbytes = min(_PROBED, record.size)
                    path = f"/v1/data/{record.incarnation}/{number}"
                    with suppress(errors.SourceChangedError):
                        client.read_into(path, [memoryview(bytearray(nbytes))], 0)
                        return True
        except (errors.MfloadError, OSError):
            pass
        return False

    def _answer(self, request: HttpRequest) -> Reply:
        path, _, query = request.path.partition("?")
        parts = path.strip("/").split("/")
        if request.method != "GET" and request.headers.get("Content-Type") != "application/json":
            return text(415, '{"error": "JSON is needed"}')  # No page in a browser may send it.
        try:
            named = request.body, "request", "request"
            body: Any = strict_json.loads(*named) if request.body else None
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
        if len(rest) == 1 and ID.fullmatch(rest[0]):
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
        scheme, _, address = url.partition("://")
        given = None if scheme.lower() == "http" else tls or Tls()
        self._client = SeedClient(
            address.rstrip("/"), token=token, tls=given, stalled=stalled, name=url
        )
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
            if isinstance(number, str) and ID.fullmatch(number) and isinstance(rows, list):
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
