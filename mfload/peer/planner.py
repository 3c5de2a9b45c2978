"""The planner: who holds which model, who is well, and whom a reader is sent to.

The rules, without a network: `mfload.peer.planner_http` serves them over HTTP, and
`mfload.peer.etcd` keeps the same records in an etcd cluster.
"""

from __future__ import annotations

import platform
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from mfload import errors, sources
from mfload.formats.strict_json import brief
from mfload.peer.manifest import MOST_PARTS, NAME, is_run
from mfload.peer.security import split_address

LEASE = 10.0
"""Seconds that a seed stays known without a renewal; it renews three times as often."""

TICKET = 30.0
"""Seconds that a reader's place is kept for it without a renewal, such as after a kill."""

RETRY = 5.0
"""Seconds between looks at a seed that failed a reader."""

ID = re.compile(r"[0-9a-f]{32}")
"""Of incarnations and tickets."""

RUN = 30 * 24 * 3600.0
"""Seconds that a run without seeds is known in etcd."""

_MOST_SEEDS = 10_000
_MOST_RUNS = 20_000
_PROBES = 16  # Looks at once: one that hangs holds up the others.
_NUMBERS = {"generation", "size", "part", "parts", "max_readers"}


class SeedRecord(NamedTuple):
    """What a planner knows of a seed.

    Attributes:
        run: The run that its generations belong to (see `Manifest`).
        host: The machine, to find near ones.
        size: Bytes that it holds.
        part, parts: Which part of the model it holds, of how many; 0 and 1 for all of it.
        max_readers: Readers at once that it takes.
    """

    address: str
    model: str
    revision: str
    incarnation: str
    run: str
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
                fine = NAME.fullmatch(made.model) and ID.fullmatch(made.incarnation)
                fine = fine and is_run(made.run)
                if fine and made.max_readers and made.part < made.parts <= MOST_PARTS:
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
    records: Iterable[SeedRecord],
    readers: Mapping[str, int],
    host: str,
    began: Mapping[str, float],
) -> Sequence[SeedRecord] | None:
    """The seeds that a reader is sent to; none if parts are missing, None if all are busy.

    They have one revision and one run: the one that `began` last, as the planner saw it, of those
    of which all parts are there. Of it they have the newest such generation; None, too, if there is
    none yet. For each part it is the seed on the reader's machine, if there is one, that has the
    fewest readers for what it can take.
    """
    runs: dict[tuple[float, str, int, str], set[int]] = {}
    groups: dict[tuple[_Age, int, str], dict[int, list[SeedRecord]]] = {}
    for each in records:
        key = (began[each.run], each.run, each.generation), each.parts, each.revision
        groups.setdefault(key, {}).setdefault(each.part, []).append(each)
        run = (began[each.run], each.run, each.parts, each.revision)
        runs.setdefault(run, set()).add(each.part)
    there = [run[:2] for run, parts in runs.items() if len(parts) == run[2]]
    if not there:
        return ()
    whole = {key: parts for key, parts in groups.items() if len(parts) == key[1]}
    newest = max((age for age, *_ in whole), default=None)
    if newest is None or newest[:2] < max(there):
        return None  # An update has not reached all parts yet.
    found: list[tuple[float, float, list[SeedRecord]]] = []
    for (age, count, _), parts in whole.items():
        if age != newest:
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


_Age = tuple[float, str, int]  # When a run began, its name, and a generation of it.


class _Known:
    def __init__(self, record: SeedRecord) -> None:
        self.record, self.until = record, 0.0
        self.rests = 0.0  # Until then it is not looked at again.
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
        # Runs in the order in which they were seen first. One without seeds stays: a reader that
        # loaded it may publish it again.
        self._began: dict[str, int] = {}
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
            if record.generation > known.record.generation:
                known.record = record
                if self._due(known):
                    known.well = None  # What was looked at is gone.
            known.until = self._clock() + LEASE
            self._remember(record.run)

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
            well = [each.record for each in there if each.well]
            found = choose(well, readers, host, self._began)
            new = [each.record for each in there if each.well is None]
            newer = choose([*well, *new], {}, host, self._began) if new else ()
            if found is None or newer is None:
                return None  # Busy, or an update has not reached all parts yet.
            runs = [self._began[each.run] for each in (*found[:1], *newer[:1])]
            if newer and (not found or runs[1] > runs[0]):
                return None  # A newer run is not looked at yet.
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
        """See `Planner`; a seed that failed rests, and is handed out again after a probe."""
        blamed = set(failed)
        with self._lock:
            for incarnation, each in self._seeds.items():
                held = each.tickets.pop(ticket.id, None) is not None
                if held and incarnation in blamed and self._probe is not None:
                    each.well, each.rests = False, self._clock() + RETRY

    def records(self) -> list[tuple[SeedRecord, int, bool | None]]:
        """All seeds, with their readers, and whether they are well."""
        with self._lock:
            self._forget()
            return [(each.record, len(each.tickets), each.well) for each in self._seeds.values()]

    def probe(self) -> None:
        """Looks at the seeds that are not known to be well, and do not rest."""
        if self._probe is None:
            return
        with self._lock:
            self._forget()
            looked = [each for each in self._seeds.values() if self._due(each)]
        probe = self._probe

        def look(each: _Known) -> None:
            record = each.record
            well = probe(record)
            with self._lock:
                # A reader may have blamed it meanwhile, or an update ended what was looked at.
                if self._due(each) and (well or each.record is record):
                    each.well = well

        sources.at_once(look, looked, _PROBES)

    def _remember(self, run: str) -> None:
        self._began.setdefault(run, 1 + next(reversed(self._began.values()), 0))
        if len(self._began) > _MOST_RUNS:
            held = {each.record.run for each in self._seeds.values()}
            for gone in [each for each in self._began if each not in held][: _MOST_RUNS // 2]:
                del self._began[gone]

    def _due(self, known: _Known) -> bool:
        return not known.well and known.rests <= self._clock()

    def _forget(self) -> None:
        now = self._clock()
        for key in [key for key, each in self._seeds.items() if each.until < now]:
            del self._seeds[key]
        for each in self._seeds.values():
            for key in [key for key, until in each.tickets.items() if until < now]:
                del each.tickets[key]
