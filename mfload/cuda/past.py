"""The way past host memory, as the route asks for it and as the engine takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mfload.cuda import gds
from mfload.cuda.cufile import CufileReader, CufileSlot
from mfload.cuda.device import Device
from mfload.cuda.paths import Direct
from mfload.runtime import Deadline
from mfload.sources.local import LocalFile

# A look that hangs must leave time for the load, which then goes by way of the host.
_SHARE = 0.25


class PastHost:
    """Says whether the bytes of a file can go to devices past host memory (see `io.route`).

    A look takes a share of the time that is left at most.

    Args:
        devices: Where they go.
        deadline: When to give up.
        against: What speaks against it from the start, None for nothing.
    """

    def __init__(
        self, devices: Sequence[Device], deadline: Deadline, against: str | None = None
    ) -> None:
        self._devices = devices
        self._deadline = deadline
        self._against = against

    def __call__(self, path: str, cold: int | None) -> tuple[bool, str]:
        """Asks (see `io.route.PastHost`)."""
        if self._against is not None:
            return False, self._against
        why = ""
        for device in self._devices:
            seconds = min(gds.TIMEOUT, self._deadline.left() * _SHARE)
            real, why = gds.verdict(path, device, timeout=seconds, cold=cold)
            if not real:
                return False, why
        return True, why


def direct(
    sources: Sequence[LocalFile], numbers: frozenset[int], note: Callable[[str], None]
) -> Direct:
    """The way of some sources through cuFile.

    Args:
        sources: The files, by number.
        numbers: Those that take it.
        note: Told of a fall-back.
    """
    return Direct(
        numbers,
        lambda number, device: CufileReader(sources[number], device),
        CufileSlot,
        lambda number, error: note(
            f"{sources[number].path}: fell back from gds to pinned: {error}"
        ),
    )
