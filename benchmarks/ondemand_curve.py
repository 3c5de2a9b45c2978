"""How long a machine takes for many short reads: its curve, and what follows from it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mfload import errors
from mfload.io.gather import DEPTH, PIECE

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_FIELDS = ("engine", "block", "depth", "gb_per_s")
_EXPECTED = "what `mfload bench --random --json` prints, or the file that its --out writes"


class Curve:
    """Random reads of a disk: GB/s by bytes of a read, and by how many are under way at once.

    Args:
        points: As `mfload bench --random` lists them: `engine`, `block` in bytes, `depth` and
            `gb_per_s`, 10⁹ bytes a second.
        engine: Whose points count. Default, and if it has none: of those that have points, the one
            that `mfload` prefers: io_uring, then threads.

    Attributes:
        engine: The engine.

    Raises:
        UsageError: There are no such points, or they are malformed.
    """

    def __init__(self, points: Sequence[Mapping[str, Any]], engine: str | None = None) -> None:
        try:
            rows = [tuple(each[field] for field in _FIELDS) for each in points]
            cells = {(row[0], int(row[1]), int(row[2])): float(row[3]) for row in rows}
            fine = bool(rows) and all(min(block, depth, speed) > 0 and speed < 1e6
                                      for (_, block, depth), speed in cells.items())  # fmt: skip
        except (KeyError, TypeError, ValueError, OverflowError):
            cells, fine = {}, False
        if not fine:
            found = f"{len(points)} points" if points else "no points"
            raise errors.UsageError("not a curve of random reads", expected=_EXPECTED, found=found)
        there = sorted({name for name, _, _ in cells})
        liked = [each for each in (engine, "io_uring", "threads") if each in there]
        self.engine: str = [*filter(None, liked), *there][0]
        own = {key[1:]: speed for key, speed in cells.items() if key[0] == self.engine}
        self._blocks, self._depths = (np.unique([key[n] for key in own]) for n in (0, 1))
        missing = [(b, d) for b in self._blocks for d in self._depths if (b, d) not in own]
        if missing:
            block, depth = missing[0]
            raise errors.UsageError(
                "the curve has a hole",
                expected="each size of a read at each depth",
                found=f"no point for {errors.amount(block)}, {depth} at once, of {self.engine}",
            )
        grid = [[own[int(b), int(d)] for d in self._depths] for b in self._blocks]
        self._speeds = np.log2(np.array(grid) * 1e9)

    @classmethod
    def of(
        cls,
        given: Curve | Mapping[str, Any] | str | os.PathLike[str],
        engine: str | None = None,
    ) -> Curve:
        """A curve, from what `mfload bench --random` gives or has written to a file.

        Raises:
            UsageError: It is not that.
            SourceError: The file can't be read.
        """
        if isinstance(given, Curve):
            return given
        found: Any = given
        name = None
        if isinstance(given, str | os.PathLike):
            name = os.fspath(given)
            try:
                with open(name, encoding="utf-8") as file:
                    found = json.load(file)
            except OSError as error:
                raise errors.from_os(error, name, "read") from error
            except (ValueError, RecursionError):
                found = None
        points = found.get("points") if isinstance(found, Mapping) else None
        if not isinstance(points, list):
            what, kind = "not a curve of random reads", type(found).__name__
            kind = "no JSON" if found is None else kind
            raise errors.UsageError(what, file=name, expected=_EXPECTED, found=kind)
        try:
            return cls(points, engine)
        except errors.UsageError as error:
            error.file = name
            raise

    def seconds(self, reads: ArrayLike, nbytes: ArrayLike) -> NDArray[np.float64]:
        """How long batches of reads take, each from its first read to its last.

        Between points of the curve, and beyond its ends: logarithms of speeds are interpolated; a
        read that is shorter than the shortest of the curve takes as long as that one.

        Args:
            reads: How many of a batch; longer ones are split as `mfload` splits them.
            nbytes: Bytes of all of them.

        Returns:
            Seconds of each batch, float64.
        """
        count, total = np.broadcast_arrays(np.asarray(reads, float), np.asarray(nbytes, float))
        count = np.maximum(count, np.ceil(total / PIECE))
        block = np.maximum(total / np.maximum(count, 1), self._blocks[0])
        low, share = _between(self._blocks, block)
        left, more = _between(self._depths, np.clip(count, 1, DEPTH))
        speeds = self._speeds
        high, right = low + (share > 0), left + (more > 0)
        below = speeds[low, left] * (1 - more) + speeds[low, right] * more
        above = speeds[high, left] * (1 - more) + speeds[high, right] * more
        return count * block / np.exp2(below * (1 - share) + above * share)


def _between(grid: NDArray[Any], value: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The place in a grid below values, and how far each is on the way to the next, 0 to 1."""
    place = np.interp(np.log2(value), np.log2(grid), np.arange(len(grid)))
    low = place.astype(np.int64)
    return low, place - low
