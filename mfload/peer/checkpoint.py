"""`peer://` as a checkpoint: what several seeds hold together, as one index.

The reader's boxes meet those of the seeds in the plan: each fragment is a piece of its tensor, and
each byte comes from one seed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mfload import dtypes, errors, sources
from mfload.index import Box, Columns, Piece, TensorInfo
from mfload.options import LoadOptions
from mfload.peer import leases, security, source as reading
from mfload.peer.client import SeedClient
from mfload.peer.manifest import BLOCK, DIGITS, NAME, Entry, Fragment, SeedManifest
from mfload.peer.planner import Planner
from mfload.peer.security import split_address
from mfload.peer.source import PeerSource
from mfload.peer_options import PeerOptions
from mfload.sources.base import redacted
from mfload.stored import Stored

_URL = re.compile(r"peer://([^/?#]*)/([^@?#]+)(?:@([^?#]+))?")
_EXAMPLE = "peer://host:port/org/name@revision, or peer:///org/name with a planner"

_TRIES = 3  # Tickets that a load takes, if seeds of those before fail at once.
_UPDATE = (0.05, 0.1, 0.2)  # Seconds between looks at parts of several generations.
_WAIT = 60.0  # Seconds that a load waits for a seed that is not busy.

Seen = tuple[SeedClient, SeedManifest]


class PeerUrl(NamedTuple):
    """What a `peer://` URL says."""

    addresses: tuple[str, ...]
    model: str
    revision: str | None

    @staticmethod
    def of(url: str) -> PeerUrl:
        """Takes a URL apart; raises UsageError for one that is malformed."""
        match = _URL.fullmatch(url)
        if match is None or not NAME.fullmatch(match[2]) or not NAME.fullmatch(match[3] or "x"):
            raise errors.UsageError(
                "the URL is malformed", expected=_EXAMPLE, found=sources.shown(url)
            )
        if "@" in match[1]:
            what, expected = "peer:// URLs have no user and password", "a token: token_file="
            raise errors.UsageError(what, expected=expected, found=sources.shown(url))
        addresses = tuple(match[1].split(",")) if match[1] else ()
        for each in addresses:
            split_address(each)
        return PeerUrl(addresses, match[2], match[3])


def find(url: str, options: LoadOptions) -> Peers:
    """What reads the checkpoint of a URL; raises UsageError for one that is malformed."""
    return Peers(url, options.peer or PeerOptions())


class Peers:
    """Reads the manifests of seeds."""

    def __init__(self, url: str, options: PeerOptions) -> None:
        self._url, self._name, self._options = PeerUrl.of(url), redacted(url), options
        if not self._url.addresses and options.planner is None:
            what = "the URL names no host, and there is no planner"
            expected = "peer://host:port/…, or Options(peer=PeerOptions(planner=…))"
            raise errors.UsageError(what, expected=expected, found=url)

    def __call__(
        self, source: int = 0
    ) -> tuple[Sequence[PeerSource], Sequence[TensorInfo], dict[str, str]]:
        """The seeds that are read, and the tensors that they hold together.

        Raises:
            SourceError: No seed can be reached, or none has the model.
            CheckpointError: What they hold does not fit together, or is not all of a tensor.
        """
        if self._url.addresses:
            made, rows = self._open(self._url.addresses, self._name, source)
        else:
            made, rows = self._by_planner(self._name, source)
        note: list[Any] = getattr(self._options, "read", [])  # Of a load that publishes.
        note[:] = made[0].manifest.run, made[0].manifest.generation
        metadata: dict[str, str] = {}
        for each in reversed(made):
            metadata |= each.manifest.metadata
        return made, rows, metadata

    def _by_planner(self, name: str, source: int) -> tuple[list[PeerSource], Columns]:
        options = self._options
        token, tls = security.credentials(options)
        given: Any = options.planner
        planner = leases.connect(given, token=token, tls=tls, stalled=options.stalled)
        for left in reversed(range(_TRIES)):
            use = leases.find(planner, *self._url[1:], options.timeout or _WAIT)
            try:
                seeds = use.ticket.seeds
                made, rows = self._open([each.address for each in seeds], name, source)
            except (errors.SourceError, errors.FormatError) as error:
                # An update is no failure of a seed; nor is one at fault where several differ.
                fine = isinstance(error, errors.SourceChangedError | errors.CheckpointError)
                use.fail(*(each.incarnation for each in use.ticket.seeds if not fine))
                if not left:
                    raise
                continue
            except BaseException:
                use.close()
                raise
            use.readers = len(made)
            for each in made:
                each.on_failure = use.fail
                each.at_end(use.release)
                each.others = itertools.chain(each.others, self._more(planner))
            return made, rows
        raise AssertionError("unreachable")

    def _more(self, planner: Planner) -> Iterator[Seen]:
        """Seeds of further tickets, which are taken as they are asked for, and kept meanwhile."""
        for _ in range(_TRIES - 1):
            use = leases.find(planner, *self._url[1:], self._options.timeout or _WAIT)
            with contextlib.closing(use):
                yield from self._ask([each.address for each in use.ticket.seeds])[0]

    def _open(
        self, addresses: Sequence[str], name: str, source: int
    ) -> tuple[list[PeerSource], Columns]:
        seen, failed = self._ask(addresses)
        for pause in _UPDATE:
            about = [manifest for _, manifest in seen if manifest.part[1] > 1]
            runs, numbers = {each.run for each in about}, {each.generation for each in about}
            if len(runs) > 1 or len(numbers) < 2:
                break
            time.sleep(pause)  # An update has not reached all parts yet.
            seen, failed = self._ask(addresses)
        seen = self._checked(seen, failed)
        while True:
            used, rows = together(seen, name, source, failed)
            made: list[PeerSource] = []
            for each in used:
                try:
                    made.append(reading.connect(*each, self._options))
                except (errors.SourceError, errors.FormatError) as error:
                    failed.append(error)
                    seen = [other for other in seen if other is not each]
                    break
                made[-1].others = iter(used)
            else:
                return made, rows
            if not seen:
                raise failed[-1]

    def _ask(self, addresses: Sequence[str]) -> tuple[list[Seen], list[errors.MfloadError]]:
        """The manifests of seeds, and why others gave none."""
        seen: dict[str, Seen] = {}
        failed: list[errors.MfloadError] = []

        def ask(address: str) -> None:
            try:
                seen[address] = reading.ask(address, self._options)
            except (errors.SourceError, errors.FormatError) as error:
                failed.append(error)

        sources.at_once(ask, addresses, 16)
        return [seen[each] for each in addresses if each in seen], failed

    def _checked(self, seen: list[Seen], failed: list[errors.MfloadError]) -> list[Seen]:
        """Those that have the model and the revision; the others join those that failed."""
        model, revision = self._url.model, self._url.revision
        fine: list[Seen] = []
        for client, manifest in seen:
            if manifest.model == model and revision in (None, manifest.revision):
                fine.append((client, manifest))
                continue
            expected = model + (f"@{revision}" if revision else "")
            found = f"{manifest.model}@{manifest.revision}"
            what = "the seed has another model"
            failed.append(
                errors.SourceNotFoundError(what, file=client.name, expected=expected, found=found)
            )
        if not fine:
            raise failed[0]
        return fine


def together(
    seen: Sequence[Seen], name: str, source: int, failed: Sequence[errors.MfloadError] = ()
) -> tuple[list[Seen], Columns]:
    """The seeds that are read, and each tensor as pieces of them; the first is number `source`.

    Raises CheckpointError if the seeds disagree or a tensor has gaps, or the error of a seed that
    failed and may have had them.
    """
    used, problems = _newest(seen, name)
    parts = {manifest.part for _, manifest in used}
    missing = {
        count: [str(n) for n in range(count) if (n, count) not in parts] for _, count in parts
    }
    if all(missing.values()):
        if failed:
            raise failed[0]
        count = min(missing)
        what = "parts of the model are missing"
        expected = f"seeds of {errors.counted(count, 'part')} in all"
        found = f"no seed of part {', '.join(missing[count][:8])}"
        raise errors.CheckpointError(what, file=name, expected=expected, found=found)
    held: dict[str, tuple[Entry, list[tuple[int, Fragment]]]] = {}
    wrong: list[str] = []
    found = Columns()
    if len(used) == 1:  # Of several seeds, each tensor may be of any.
        found.extend(used[0][1].whole)
        found.sources = array("q", [source]) * len(found)
    for number, (client, manifest) in enumerate(used):
        for entry in manifest.rows if found else manifest.entries:
            first, there = held.setdefault(entry.name, (entry, []))
            if (entry.dtype, entry.shape) != (first.dtype, first.shape):
                here, before = (f"{e.dtype} {list(e.shape)}" for e in (entry, first))
                wrong.append(f"{client.name}: {entry.name} is {here}, elsewhere {before}")
            there += [(number, each) for each in entry.fragments]
    if wrong:
        what = "the seeds disagree about tensors"
        raise errors.CheckpointError(what, file=name, problems=tuple(wrong))
    _check_replicas([manifest for _, manifest in used], held, [each.name for each, _ in used], name)
    load = [0] * len(used)
    known: dict[Any, list[Box] | None] = {}
    rows: list[TensorInfo] = []
    for entry, there in held.values():
        pieces = _pieces(entry, there, load, known)
        if pieces is None:
            problems.append(f"{entry.name}: no seed has all of it, and neither have all together")
            continue
        moved = tuple(each._replace(source=each.source + source) for each in pieces)
        rows.append(TensorInfo(entry.name, dtypes.TABLE[entry.dtype], entry.shape, moved))
    if len(rows) < len(held):
        if failed:
            raise failed[0]
        what = "the seeds do not hold the whole model"
        raise errors.CheckpointError(what, file=name, problems=tuple(problems))
    found.extend(Columns.of(rows))
    return used, found


def _newest(seen: Sequence[Seen], name: str) -> tuple[list[Seen], list[str]]:
    """The seeds with the newest generation, and what is wrong with the others.

    Raises CheckpointError if the seeds are of several runs or revisions.
    """
    if len({manifest.run for _, manifest in seen}) > 1:
        what = "the seeds belong to different runs, whose generations can't be compared"
        expected = "seeds of one run: name it with publish(run=), or let a planner find the newest"
        told = [f"{client.name}: run {manifest.run}" for client, manifest in seen]
        raise errors.CheckpointError(what, file=name, expected=expected, problems=tuple(told))
    newest = max(manifest.generation for _, manifest in seen)
    used = [each for each in seen if each[1].generation == newest]
    revisions = sorted({manifest.revision for _, manifest in used})
    if len(revisions) > 1:
        what, expected = "the seeds have several revisions", "peer://…/name@revision"
        found = ", ".join(revisions)
        raise errors.CheckpointError(what, file=name, expected=expected, found=found)
    return used, [
        f"{client.name} has generation {manifest.generation}, others have {newest}"
        for client, manifest in seen
        if manifest.generation != newest
    ]


def _check_replicas(
    manifests: Sequence[SeedManifest],
    held: Mapping[str, tuple[Entry, list[tuple[int, Fragment]]]],
    names: Sequence[str],
    file: str,
) -> None:
    """Raises CheckpointError if checksums show that two seeds differ in a box of a tensor."""
    sums: dict[int, dict[tuple[int, int], str]] = {}

    def told(number: int, fragment: Fragment) -> dict[tuple[int, int], str]:
        """Checksums by the bytes of the fragment that they are of, the whole blocks' as one."""
        manifest, start = manifests[number], fragment.offset
        if manifest.checksums is None:
            return {}
        if number not in sums:
            sums[number] = manifest.sums()
        stop = start + fragment.nbytes
        low, high = -(-start // BLOCK) * BLOCK, stop // BLOCK * BLOCK
        edges = (start, min(low, stop)), (max(high, start), stop)
        found = {edge: sums[number][edge] for edge in edges if edge in sums[number]}
        if low < high:
            found[low, high] = manifest.checksums[low // BLOCK * DIGITS : high // BLOCK * DIGITS]
        return {(low - start, high - start): text for (low, high), text in found.items()}

    wrong: list[str] = []
    for entry, there in held.values():
        first: dict[Box, tuple[int, Fragment]] = {}
        for number, fragment in there if len(there) > 1 else ():
            other = first.setdefault(fragment.box, (number, fragment))
            if other[0] == number:
                continue
            mine, theirs = told(number, fragment), told(*other)
            if any(mine[span] != theirs[span] for span in mine.keys() & theirs.keys()):
                wrong.append(f"{entry.name}: {names[number]} differs from {names[other[0]]}")
    if wrong:
        what = "seeds of one run and generation hold different bytes of the same tensors"
        expected = "equal bytes, or another run: publish(run=), or another generation: update()"
        raise errors.CheckpointError(what, file=file, expected=expected, problems=tuple(wrong))


def _pieces(
    entry: Entry,
    held: Sequence[tuple[int, Fragment]],
    load: list[int],
    known: dict[Any, list[Box] | None],
) -> tuple[Piece, ...] | None:
    """Pieces that make up a tensor, each from the seed that has the least to give so far."""
    holders: dict[Box, list[tuple[int, Fragment]]] = {}
    for number, fragment in held:
        holders.setdefault(fragment.box, []).append((number, fragment))
    key = entry.shape, tuple(holders)
    if key not in known:
        known[key] = tiling(entry.shape, list(holders))
    boxes = known[key]
    if boxes is None:
        return None
    made: list[Piece] = []
    elements = dtypes.TABLE[entry.dtype].elements
    for box in boxes:
        number, fragment = min(holders[box], key=lambda each: load[each[0]])
        load[number] += fragment.nbytes
        stored = None
        if len(boxes) > 1:
            if elements > 1:
                low, high = box[-1]
                box = (*box[:-1], (low // elements, high // elements))
            stored = Stored(box=box)
        made.append(Piece(number, fragment.offset, fragment.nbytes, stored))
    return tuple(made)


def tiling(shape: tuple[int, ...], boxes: Sequence[Box]) -> list[Box] | None:
    """Boxes, of those given, that make up a shape without overlap; None if none are found.

    A whole box is taken if there is one, else slabs along a dim, each made up in the same way.
    """
    region = tuple((0, length) for length in shape)
    if not boxes or not math.prod(shape):
        return list(boxes[:1]) or None
    some = [box for box in boxes if all(low < high for low, high in box)]
    for dims in ([*range(len(shape))], [*reversed(range(len(shape)))]):
        found = _slabs(region, dict.fromkeys(some), dims)
        if found is not None:
            return found
    return None


def _slabs(region: Box, boxes: Iterable[Box], dims: Sequence[int]) -> list[Box] | None:
    """Boxes that make up a region; each of them is the region's in the dims that are not given."""
    if not dims:
        return list(boxes)
    dim, rest = dims[0], dims[1:]
    groups: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        groups.setdefault(box[dim], []).append(box)
    start, stop = region[dim]
    reached: dict[int, tuple[int, list[Box]]] = {start: (0, [])}  # Boxes, and the last slab's.
    before: dict[int, int] = {}
    for low, high in sorted(groups):
        there = reached.get(low)
        if there is None or (high in reached and reached[high][0] <= there[0] + 1):
            continue
        slab = _slabs(region, groups[low, high], rest)
        if slab is None:
            continue
        count = there[0] + len(slab)
        if high not in reached or count < reached[high][0]:
            reached[high], before[high] = (count, slab), low
    if stop not in reached:
        return None
    found: list[Box] = []
    while stop != start:
        found += reached[stop][1]
        stop = before[stop]
    return found
