"""Transports: how the bytes of a seed get into a reader's memory.

A transport is a module with `offer` and `connect`. Others come as entry points of the group
`mfload.transports`, and are used if a reader names them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mfload import errors
from mfload.sources.base import Costs

if TYPE_CHECKING:
    from mfload.cuda.memory import DeviceBuffer
    from mfload.peer.client import SeedClient
    from mfload.peer.data import Data
    from mfload.peer.manifest import SeedManifest

_NAMES = ("memory", "memfd", "http", "nixl", "cuda_ipc", "collective")
TRANSPORTS = {name: f"mfload.peer.{name}" for name in _NAMES}
"""Modules of the transports by name."""

DEFAULT = ("memory", "memfd", "http")
"""Those that need no consent, best first: they open nothing, and disturb nothing."""

ON_DEVICES = ("cuda_ipc", "nixl", "collective")
"""Those that read arrays on CUDA devices: a seed that offers one leaves them there."""

GROUP = "mfload.transports"


class Offer(NamedTuple):
    """What a seed offers of a transport.

    Attributes:
        given: JSON for the manifest.
        close: Ends it; called when the generation or the seed ends.
        asked: Answers JSON that a reader's transport sends to the seed (see `Remote.ask`), with
            JSON; hostile input, of which a KeyError, TypeError or ValueError is told the reader.
    """

    given: Any
    close: Callable[[], object] = bool
    asked: Callable[[Any], Any] | None = None


class Remote(NamedTuple):
    """A seed, as a reader's transport is told of it.

    Attributes:
        stalled: Seconds without progress after which it is given up.
        compares: Whether what is read is compared with checksums.
    """

    name: str
    manifest: SeedManifest
    client: SeedClient
    stalled: float
    compares: bool

    def ask(self, transport: str, body: Any) -> Any:
        """What the seed's side of a transport answers; raises SourceError or HeaderError."""
        about = self.manifest
        path = f"/v1/ways/{about.incarnation}/{about.generation}/{transport}"
        return self.client.json("POST", path, body, seconds=self.stalled)

    def check(self) -> bool:
        """Asks the seed whether it still has this generation; raises SourceError or HeaderError."""
        state = self.client.json("GET", "/v1/state")
        if not isinstance(state, dict):
            raise errors.HeaderError("the seed's state is malformed", file=self.name)
        about = self.manifest
        known = {"incarnation": about.incarnation, "generation": about.generation}
        return known.items() <= state.items()


class SeedReader(Protocol):
    """Reads the data of a seed, for several threads at once.

    One that reaches the seed's devices also has `lands(devices)`: why nothing of them gets to these
    devices of the reader without the host, "" if it does; `on_devices(offset, nbytes)`: whether all
    of a range can; and `onto(device)`: a `DeviceReader`.

    Attributes:
        costs: What a read costs.
        why: For the report's route: what speaks for it, and what it does to the seed.
    """

    costs: Costs
    why: str

    def read(self, vector: Sequence[Any], offset: int) -> None:
        """Fills buffers with the data from `offset` on; raises SourceError or OSError.

        When it has returned or raised, nothing writes to the buffers any more; a transport that
        can't promise that keeps what it may still write to.
        """
        ...

    def check(self) -> bool:
        """Whether the seed still has this generation; raises SourceError if it is gone."""
        ...

    def close(self) -> None:
        """Ends it; more than once does nothing."""
        ...


class DeviceReader(Protocol):
    """Reads the data of a seed into memory of one device of the reader, for one thread."""

    def read(self, buffer: DeviceBuffer, offset: int, nbytes: int) -> None:
        """Fills the first bytes of a buffer; raises SourceError or OSError.

        When it returns, the bytes are there for every stream. When it has raised, nothing writes to
        the buffer any more, or the reader keeps it.
        """
        ...

    def close(self) -> None:
        """Lets go of the buffers; never raises."""
        ...


class Transport(Protocol):
    """A transport: a module, or an object, with these functions."""

    def offer(self, data: Data, generation: int) -> Offer | None:
        """What a seed offers for its data; None if it can't here."""
        ...

    def connect(self, given: Any, remote: Remote) -> SeedReader | str:
        """The way to a seed that offers `given`, hostile input; or why there is none."""
        ...


def malformed(name: str, what: str) -> errors.HeaderError:
    """The error of a seed that says of `what` belongs to a transport what can't be."""
    return errors.HeaderError(
        f"the seed's manifest is malformed: what it says of {what}", file=name
    )


def find(name: str) -> Any:
    """The transport of a name; raises UsageError if there is none."""
    if name in TRANSPORTS:
        return importlib.import_module(TRANSPORTS[name])
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP, name=name):
        return point.load()
    known = [*TRANSPORTS, *(each.name for each in entry_points(group=GROUP))]
    raise errors.UsageError("no such transport", expected=" | ".join(known), found=name)
