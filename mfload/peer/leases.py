"""What keeps seeds and readers known to a planner while they are there, and finds seeds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from mfload import errors
from mfload.peer.etcd import EtcdPlanner
from mfload.peer.planner import LEASE, TICKET, Planner, SeedRecord, Ticket, here
from mfload.peer.planner_http import HttpPlanner
from mfload.peer.security import Tls
from mfload.runtime import forget_in_forks, start
from mfload.sources.base import redacted

_PAUSE = 0.2  # Seconds between a reader's questions while all seeds are busy.


def connect(
    url: str, *, token: str | None = None, tls: Tls | None = None, stalled: float = 1.5
) -> Planner:
    """The planner at a URL, which is not asked yet; raises UsageError for an unknown scheme."""
    scheme = url.partition("://")[0].lower()
    if scheme not in ("http", "https", "etcd"):
        what, expected = "no such planner", "http://, https:// or etcd://"
        raise errors.UsageError(what, expected=expected, found=redacted(url))
    if "@" in url:
        what, expected = "planners take no user and password", f"{scheme}://host:port"
        raise errors.UsageError(what, expected=expected, found=redacted(url))
    kind = EtcdPlanner if scheme == "etcd" else HttpPlanner
    return kind(url, token, tls, stalled)


class Repeated:
    """Calls something again and again in a thread, until it is closed.

    What it raises is ignored: a planner that is gone may come back.
    """

    def __init__(self, call: Callable[[], object], seconds: float) -> None:
        self._call, self._seconds = call, seconds
        self._ended = threading.Event()
        start(self._run, "mfload-renewal", service=True)

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            with suppress(errors.MfloadError):
                self._call()

    def close(self) -> None:
        """Ends it."""
        self._ended.set()


class Registration:
    """Keeps a seed known to a planner, until it is closed.

    With `patient`, a planner that can't be reached hears of it with a renewal, once it can.
    """

    def __init__(self, planner: Planner, record: SeedRecord, patient: bool = False) -> None:
        self._planner, self._record = planner, record
        try:
            planner.register(record)
        except (errors.SourceError, errors.FormatError):
            if not patient:
                raise
        self._repeated = Repeated(lambda: planner.register(self._record), LEASE / 3)

    def update(self, record: SeedRecord) -> None:
        """Tells of another generation; the planner hears of it with a renewal if it is gone now."""
        self._record = record
        with suppress(errors.SourceError, errors.FormatError):
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
    """

    def __init__(self, planner: Planner, ticket: Ticket) -> None:
        self._planner, self.ticket = planner, ticket
        self.readers = 1
        self._closed = threading.Lock()
        self._repeated = Repeated(lambda: planner.renew(ticket), TICKET / 3)
        forget_in_forks(self)

    def forget(self) -> None:
        """Leaves the places to the parent of this fork."""
        self._closed.acquire(blocking=False)

    def release(self) -> None:
        """Says that one reader is at its end; the last one gives the places back."""
        self.readers -= 1
        if not self.readers:
            self.close()

    def fail(self, *incarnations: str) -> None:
        """Tells at once which seeds failed, so that the next question gets others."""
        self.close(incarnations)

    def close(self, failed: Sequence[str] = ()) -> None:
        """Gives the places back."""
        if not self._closed.acquire(blocking=False):
            return
        self._repeated.close()
        with suppress(errors.MfloadError):
            self._planner.done(self.ticket, failed)


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
