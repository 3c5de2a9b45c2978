"""Transport "http": ranges of the data over HTTP, or HTTPS where both sides have certificates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mfload.peer.data import Data
from mfload.peer.transports import Offer, Remote
from mfload.runtime import share_of_cores
from mfload.sources.base import Costs

_COSTS = Costs(block=8 << 20, merge_gap=64 << 10)
_FEWEST, _MOST = 2, 4  # Connections: each keeps a core of the reader and one of the seed busy.


def offer(data: Data, generation: int) -> Offer:
    """The seed's server sends the data."""
    del data, generation
    return Offer(True)


def connect(given: Any, remote: Remote) -> HttpWay | str:
    """The way to the server that sent the manifest."""
    return HttpWay(remote) if given is True else "the seed does not offer it"


class HttpWay:
    """Reads ranges from a seed's server (see `Way`)."""

    why = "HTTP: the seed sends from where the weights lie"

    def __init__(self, remote: Remote) -> None:
        count = min(max(share_of_cores(), _FEWEST), _MOST)
        self.costs = _COSTS._replace(concurrency=count)
        self._client, about = remote.client, remote.manifest
        self._path = f"/v1/data/{about.incarnation}/{about.generation}"
        self.check = remote.check

    def read(self, vector: Sequence[Any], offset: int) -> None:
        """Fills buffers (see `Way`)."""
        self._client.read_into(self._path, vector, offset)

    def close(self) -> None:
        """Closes the connections that wait."""
        self._client.close()
