"""What loads on a mesh want of each tensor, and the backend that knows the mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mfload import errors, frameworks
from mfload.dtypes import DType
from mfload.index import Box, TensorInfo
from mfload.planning.request import Request, Share, boxed

if TYPE_CHECKING:  # Imports JAX.
    from mfload.mesh.jax_backend import JaxBackend


MESH_GAP = 64 << 10
"""The `Costs.merge_gap` of loads onto a mesh: to read a part of a row by a call of its own costs as
much as to read some 100 KiB over (2 cores, page cache). Disks and networks are slower than that."""


class TensorShares(NamedTuple):
    """A tensor, the dtype it is delivered in, and which part each device of each process holds.

    Devices that hold the same part get memory of their own if `separate`.
    """

    info: TensorInfo
    dtype: DType
    checked: bool
    shares: tuple[Share, ...]
    separate: bool = False


def backend(framework: str) -> JaxBackend:
    """A new backend; raises FrameworkMissingError if the framework can't be imported."""
    return frameworks.require(framework, f"mfload.mesh.{framework}_backend").make()


def requests(wanted: Iterable[TensorShares]) -> dict[int, list[Request]]:
    """What each process requests, by its number; the same on every process.

    A part that several devices of a process hold is one request, unless they get separate memory.
    """
    made: dict[int, list[Request]] = {}
    for info, dtype, checked, shares, separate in wanted:
        held: dict[tuple[int, Box], list[int]] = {}
        for process, device, box in shares:
            held.setdefault((process, box), []).append(device)
        for (process, box), devices in held.items():
            try:
                selection = boxed(info, box)
            except errors.SliceError as error:
                raise errors.ShardingError(
                    f"a shard would cut through elements of {info.dtype} that share a byte",
                    tensor=info.name,
                    expected=error.expected,
                    found=f"shard {[list(pair) for pair in box]} of shape {list(info.shape)}",
                ) from None
            each = [(n,) for n in devices] if separate else [tuple(devices)]
            made.setdefault(process, []).extend(
                Request(info, dtype, selection, checked, numbers) for numbers in each
            )
    return made


def stored_bytes(requests: Sequence[Request]) -> int:
    """Bytes of the files that requests want, each part counted once."""
    seen = {(request.info.name, request.selection): request for request in requests}
    return sum(request._replace(dtype=request.info.dtype).nbytes for request in seen.values())
