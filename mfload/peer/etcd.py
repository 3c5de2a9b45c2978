"""The planner's records in an etcd cluster, by its JSON gateway (v3.4 and newer).

A seed is a key with a lease; so is each reader's place at it, and each complaint. So what dies
without a word is forgotten, and no process of mfload's is in the middle. Guarded by certificates
alone: users and passwords of etcd are not supported.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from mfload import errors
from mfload.formats import strict_json
from mfload.peer import planner
from mfload.peer.client import SeedClient
from mfload.peer.planner import SeedRecord, Ticket
from mfload.peer.security import Tls

_ROOT = "/mfload/"
_LIMIT = 64 << 20


class EtcdPlanner:
    """A planner without a process of its own (see `Planner`).

    Args:
        url: "etcd://host:port", also several with commas between.
        tls: Certificates, with which connections use TLS.
    """

    def __init__(self, url: str, token: str | None, tls: Tls | None, stalled: float) -> None:
        del token  # It is the seeds'.
        hosts = url.partition("://")[2].rstrip("/").split(",")
        self._clients = [SeedClient(each, tls=tls, stalled=stalled, name=url) for each in hosts]
        self._url = url
        self._leases: dict[str, str] = {}

    def register(self, record: SeedRecord) -> None:
        """See `Planner`."""
        # Before the seed is there; each seed of the run keeps it.
        self._keep(f"runs/{record.run}", "", planner.RUN)
        key = f"seeds/{record.incarnation}"
        self._keep(key, json.dumps(record._asdict()), planner.LEASE)

    def leave(self, record: SeedRecord) -> None:
        """See `Planner`."""
        self._revoke(f"seeds/{record.incarnation}")

    def take(self, model: str, revision: str | None, host: str) -> Ticket | None:
        """See `Planner`.

        The place is taken first and then looked at: of more than a seed takes, the last ones go.
        """
        records: list[SeedRecord] = []
        for _, value, _ in self._under("seeds/"):
            with suppress(errors.FormatError):  # One that is malformed hides no others.
                records.append(SeedRecord.of(strict_json.loads(value, self._url), self._url))
        failed = {key.rpartition("/")[2] for key, _, _ in self._under("failed/")}
        there = [
            each
            for each in records
            if each.model == model
            and revision in (None, each.revision)
            and each.incarnation not in failed
        ]
        readers: dict[str, int] = {}
        for key, _, _ in self._under("readers/"):
            incarnation = key.rpartition("/")[0].rpartition("/")[2]
            readers[incarnation] = readers.get(incarnation, 0) + 1
        began = {key.rpartition("/")[2]: float(made) for key, _, made in self._under("runs/")}
        there = [each for each in there if each.run in began]
        found = planner.choose(there, readers, host, began)
        if found is None:
            return None
        ticket = Ticket(secrets.token_hex(16), tuple(found))
        for each in found:
            self._keep(_place(each, ticket), host, planner.TICKET)
        for each in found:
            rows = sorted(self._under(f"readers/{each.incarnation}/"), key=lambda row: row[2])
            mine = [key for key, _, _ in rows[: each.max_readers] if key.endswith(ticket.id)]
            if not mine:
                self.done(ticket)
                return None
        return ticket

    def renew(self, ticket: Ticket) -> None:
        """See `Planner`."""
        for each in ticket.seeds:
            self._keep(_place(each, ticket), "", planner.TICKET)

    def done(self, ticket: Ticket, failed: Iterable[str] = ()) -> None:
        """See `Planner`; a seed that failed is left out for `RETRY` seconds."""
        for each in ticket.seeds:
            self._revoke(_place(each, ticket))
        for incarnation in failed:
            self._keep(f"failed/{incarnation}", "", planner.RETRY, again=True)

    def _keep(self, key: str, value: str, seconds: float, again: bool = False) -> None:
        """Puts a key, or keeps the lease of one that was put; puts it again with `again`."""
        lease = self._leases.get(key)
        if lease is not None and not again:
            answer = self._ask("lease/keepalive", {"ID": lease}).get("result", {})
            try:
                alive = int(answer["TTL"]) > 0
            except (KeyError, TypeError, ValueError):
                alive = False
            if alive and not key.startswith(("seeds/", "runs/")):
                return
            lease = lease if alive else None
        if lease is None or again:
            granted = self._ask("lease/grant", {"TTL": int(seconds)})
            lease = self._leases[key] = str(granted.get("ID", ""))
        data = {"key": _coded(_ROOT + key), "value": _coded(value), "lease": lease}
        self._ask("kv/put", data)

    def _revoke(self, key: str) -> None:
        lease = self._leases.pop(key, None)
        if lease is not None:
            self._ask("lease/revoke", {"ID": lease})

    def _under(self, prefix: str) -> list[tuple[str, bytes, int]]:
        """Keys below a prefix, which ends with a slash: key, value, and when it was made."""
        start = _ROOT + prefix
        found = self._ask("kv/range", {"key": _coded(start), "range_end": _coded(start[:-1] + "0")})
        rows: list[tuple[str, bytes, int]] = []
        try:
            for row in found.get("kvs", ()):
                key, value = (base64.b64decode(row.get(each, "")) for each in ("key", "value"))
                rows.append((key.decode(), value, int(row["create_revision"])))
        except (KeyError, TypeError, ValueError, AttributeError):
            what = "etcd's answer is malformed"
            raise errors.HeaderError(what, file=self._url) from None
        return rows

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Asks the members of the cluster in turn, until one answers."""
        for number, client in enumerate(self._clients, 1):
            try:
                found = client.json("POST", f"/v3/{path}", body, limit=_LIMIT)
            except errors.SourceError:
                if number == len(self._clients):
                    raise
                continue
            return found if isinstance(found, dict) else {}
        raise AssertionError("unreachable")


def _place(seed: SeedRecord, ticket: Ticket) -> str:
    return f"readers/{seed.incarnation}/{ticket.id}"


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
