"""Landing on devices: what all adapters have of it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

from mfload import errors
from mfload.cuda.device import Device
from mfload.cuda.memory import DeviceBuffer
from mfload.frameworks import base
from mfload.frameworks.base import Whose
from mfload.planning.requests import Request


class Landing:
    """What every adapter has of landing on devices; by itself, of landing on the host alone.

    Args:
        land: The one device whose memory arrays land in, None for none.
        notes: See `adapter.Adapter`.
    """

    landings: frozenset[Whose] = frozenset(("mfload", "framework"))

    def __init__(self, land: Device | None = None, notes: tuple[str, ...] = ()) -> None:
        self.devices: Sequence[Device] = () if land is None else (land,)
        self.notes = notes

    @property
    def allocator(self) -> Whose:
        """Whose memory is the better one on such a device (see `adapter.Adapter`)."""
        return "mfload"

    def assign(self, requests: Sequence[Request]) -> Sequence[Request]:
        """What is to be loaded where such tensors are wanted (see `adapter.Adapter`)."""
        return requests

    def results(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """What a user gets for each tensor (see `adapter.Adapter`)."""
        return arrays

    def lands(self, request: Request) -> int | None:
        """The number of the device that a need lands on (see `adapter.Adapter`)."""
        return 0 if self.devices else None

    def pool(self, number: int) -> base.Pool | None:
        """What the framework's allocator has of a device (see `adapter.Adapter`)."""
        return None


def on_device(memory: Any) -> bool:
    """Whether a view's memory is that of a device."""
    return isinstance(memory, DeviceBuffer)


@contextlib.contextmanager
def refusals(framework: str, *kinds: type[Exception]) -> Generator[None]:
    """A context in which a framework's own errors of a full device become mfload's.

    Raises:
        MemoryLimitError: An error of one of the kinds was raised inside.
    """
    try:
        yield
    except kinds as error:
        raise errors.MemoryLimitError(
            f"{framework} has no room on the device", found=str(error).partition("\n")[0]
        ) from error


def device_to_land_on(number: int) -> tuple[Device | None, tuple[str, ...]]:
    """What `Landing` is to be told of a CUDA device that a framework knows.

    Args:
        number: Which, as CUDA counts.

    Returns:
        The device and no notes; none, and a note that says why, where it is not to be had.
    """
    from mfload.cuda import finding

    try:
        return finding.find(number), ()
    except (errors.FrameworkMissingError, errors.DeviceError) as error:
        return None, (f"tensors are copied from the host, one after the other: {error}",)
