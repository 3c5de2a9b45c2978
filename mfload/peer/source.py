"""A seed as a source: its data by offset, over one transport, compared with its checksums."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn, TypeVar

from mfload import errors
from mfload.peer import manifest as manifests, security, transports
from mfload.peer.client import SeedClient
from mfload.peer.data import hasher, overlap, spread, take
from mfload.peer.manifest import BLOCK, DIGITS, SeedManifest
from mfload.peer.transports import Remote, SeedReader
from mfload.peer_options import PeerOptions
from mfload.runtime import forget_in_forks
from mfload.sources.base import ClosedAtEnd, shrunk

T = TypeVar("T")

_SHOWN = 8  # Tensors that an error names.


class Generation(NamedTuple):
    """What tells one version of a seed's data from the next."""

    incarnation: str
    generation: int

    @staticmethod
    def of(manifest: SeedManifest) -> Generation:
        """That of a manifest."""
        return Generation(manifest.incarnation, manifest.generation)

    def __str__(self) -> str:
        return f"generation {self.generation} of seed {self.incarnation[:8]}"


def ask(address: str, options: PeerOptions) -> tuple[SeedClient, SeedManifest]:
    """The manifest of the seed at an address.

    Raises:
        SourceError: It can't be reached, or refuses.
        HeaderError: Its manifest is malformed.
    """
    token, tls = security.credentials(options)
    name = f"peer://{address}"
    client = SeedClient(
        address, token=token, tls=tls, stalled=options.stalled, patience=options.timeout, name=name
    )
    bounds = {"limit": manifests.MAX_MANIFEST, "most": manifests.MAX_PARSED}
    given = client.json("GET", "/v1/manifest", **bounds, seconds=60.0)
    return client, manifests.from_json(given, name)


def connect(client: SeedClient, manifest: SeedManifest, options: PeerOptions) -> PeerSource:
    """The source of a seed, over the first transport that leads there.

    Raises SourceError, with what is against each, if none does.
    """
    compares = options.checksums and manifest.checksums is not None
    remote = Remote(client.name, manifest, client, options.stalled, compares)
    against: list[str] = []
    for name in options.transports or transports.DEFAULT:
        transport = transports.find(name)
        if name not in manifest.ways:
            against.append(f"{name}: the seed does not offer it")
            continue
        found = transport.connect(manifest.ways[name], remote)
        if not isinstance(found, str):
            skipped = "".join(f"; no {each}" for each in against)
            return PeerSource(client, manifest, found, name, options, f"{found.why}{skipped}")
        against.append(f"{name}: {found}")
    if not remote.check():
        raise _changed(client.name, Generation.of(manifest), None)
    what = "no transport leads to the seed"
    raise errors.SourceError(what, file=client.name, found="; ".join(against))


def reopen(address: str, options: PeerOptions, identity: Generation) -> PeerSource:
    """The source again, in another process; raises SourceChangedError for another version."""
    source = connect(*ask(address, options), options)
    if source.identity != identity:
        raise _changed(source.name, identity, source.identity)
    return source


def _changed(name: str, expected: object, found: object) -> errors.SourceChangedError:
    what = "the seed has other weights than when the load began"
    return errors.SourceChangedError(what, file=name, expected=expected, found=found)


class PeerSource:
    """The data of a seed as a `Source`.

    Attributes:
        manifest: What the seed said of itself.
        why: The transport, and what was against better ones.
        on_failure: Called with the seed's incarnation when a reader has trouble with it, and with
            nothing when it has other weights, so that no place there is kept.
        others: Seeds to go on with, of those that hold the same bytes, when this one fails.
        failures: What failed with those before this one, for a report.
    """

    file = None

    def __init__(
        self,
        client: SeedClient,
        manifest: SeedManifest,
        way: SeedReader,
        transport: str,
        options: PeerOptions,
        why: str,
    ) -> None:
        self.name, self.size, self.manifest = client.name, manifest.size, manifest
        self.identity = Generation.of(manifest)
        self.engine, self.why, self.costs = f"peer-{transport}", why, way.costs
        self.way, self._client, self._options = way, client, options
        self.on_failure: Callable[..., object] = bool
        self.others: Iterator[tuple[SeedClient, SeedManifest]] = iter(())
        self.failures: list[str] = []
        self._moving, self._taken = threading.Lock(), list[PeerSource]()
        self.new = None
        if options.checksums and manifest.checksums is not None:
            self.new = hasher()
        elif options.checksums:
            self.why += "; the seed has no checksums"
        self._closes = weakref.finalize(self, _close, way, client)
        forget_in_forks(self)

    @property
    def lying(self) -> Any:
        """What gives device memory (see `loading.near`); raises AttributeError if nothing does."""
        way: Any = self.way
        return way.lying

    @property
    def compares(self) -> bool:
        """Whether bytes are compared with checksums as they are read, so that reading verifies."""
        return self.new is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return reopen, (self._client.address, self._options, self.identity)

    def forget(self) -> None:
        """Leaves the way to the parent of this fork: to end it would end the parent's."""
        self._closes.detach()

    def at_end(self, call: Callable[[], object]) -> None:
        """Has something called when the source is no longer used."""
        weakref.finalize(self, call)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Reads exactly that range (see `Source`)."""
        data = bytearray(nbytes)
        with self.open() as opened:
            opened.read([memoryview(data)], offset)
        return bytes(data)

    def open(self, flags: int = 0) -> PeerHandle:
        """A handle for one thread (see `Source`)."""
        del flags
        return PeerHandle(self)

    def keep(self, keeps: bool) -> None:
        """At the checkpoint's end, closes connections that wait, and lets go of device memory."""
        if not keeps:
            self._client.close()
            if hasattr(self.way, "lying"):
                self.way.close()

    def check(self) -> None:
        """Raises SourceChangedError if the seed has another generation now."""
        self.with_others(self._check)

    def _check(self) -> None:
        with self.blamed():
            if not self.way.check():
                raise _changed(self.name, self.identity, None)

    def with_others(self, call: Callable[[], T]) -> T:
        """What a call gives with this seed, or if that fails, with another of the same bytes."""
        while True:
            way = self.way
            try:
                return call()
            except errors.LoadTimeoutError:
                raise
            except (OSError, errors.FormatError) as error:
                if not self._go_on(way, error):
                    raise

    def _go_on(self, failed: SeedReader, error: Exception) -> bool:
        """Takes the next of the others, if another thread did not; False if none is left.

        What was read before is theirs too, since all of it was compared with the same checksums.
        """
        with self._moving:
            if self.way is not failed:
                return True
            if self.new is None or hasattr(failed, "lying"):
                return False
            with suppress(errors.SourceError, errors.FormatError):  # A planner is asked for more.
                for client, manifest in self.others:
                    if client is self._client or manifest.contents != self.manifest.contents:
                        continue
                    with suppress(errors.SourceError, errors.FormatError):
                        self._take(connect(client, manifest, self._options), error)
                        return True
        return False

    def _take(self, other: PeerSource, error: Exception) -> None:
        """Goes on as another source, which closes its way at the end."""
        self.failures.append(f"a seed failed, others were asked: {error}")
        logging.getLogger("mfload").warning(self.failures[-1])
        self._taken.append(other)
        self.name, self.manifest, self.identity = other.name, other.manifest, other.identity
        self.engine, self._client, self.way = other.engine, other._client, other.way

    def check_after(self, error: Exception) -> None:
        """Raises SourceChangedError if the seed can be asked, and has another generation now."""
        same = True
        with suppress(errors.SourceError, errors.FormatError):
            same = self.way.check()
        if not same:
            raise _changed(self.name, self.identity, None) from error

    @contextmanager
    def blamed(self) -> Generator[None]:
        """A context of which an error counts against the seed, but for other weights."""
        try:
            yield
        except errors.SourceChangedError:
            self.on_failure()
            raise
        except (OSError, errors.MfloadError):
            self.on_failure(self.identity.incarnation)
            raise

    @contextmanager
    def reading(self) -> Generator[None]:
        """A context of reads of the way: those that fail since the weights changed say so."""
        with self.blamed():
            try:
                yield
            except errors.SourceChangedError:
                raise
            except OSError as error:
                # Some ways end with the weights, and break off before the seed can tell why. One
                # that stalls was waited for already.
                if not isinstance(error.__cause__, TimeoutError):
                    self.check_after(error)
                raise

    def past_host(self, devices: Sequence[Any]) -> str | None:
        """Why nothing gets to these devices without the host, "" if it does.

        None if the transport reaches no devices of the seed.
        """
        lands = getattr(self.way, "lands", None)
        if lands is None:
            return None
        if self.new is not None:
            return "checksums are compared there, unless checksums=False"
        return lands(devices)

    def on_devices(self, offset: int, nbytes: int) -> bool:
        """Whether a range lies where it can get to a device without the host."""
        return self.way.on_devices(offset, nbytes)  # pyright: ignore - of one that `lands`

    def onto(self, device: Any) -> PeerDeviceReader:
        """What lands blocks on a device without the host (see `device.Reader`)."""
        return PeerDeviceReader(self, device)

    def beside(self, name: str) -> PeerSource:
        """Raises UsageError: nothing lies beside a seed."""
        raise errors.UsageError("nothing lies beside a peer", found=name)

    def fits(self, block: int, parts: Sequence[Any]) -> bool:
        """Whether the bytes of a block are those that the seed published."""
        return self._sum(parts) == self._published(block)

    def _published(self, block: int) -> str:
        return (self.manifest.checksums or "")[DIGITS * block : DIGITS * (block + 1)]

    def _sum(self, parts: Sequence[Any]) -> str:
        made = self.new()  # pyright: ignore[reportOptionalCall] - asked for where there are sums
        for part in parts:
            made.update(part)
        return made.hexdigest()

    def refuse(self, block: int, parts: Sequence[Any]) -> NoReturn:
        """Raises ChecksumError for a block that does not fit, with the tensors that changed."""
        self.check()  # Of weights that were replaced there may be anything in their place.
        start, rows = block * BLOCK, self.manifest.parts(block)
        stop = min(start + BLOCK, self.size)
        changed = [
            names
            for low, high, names, expected in rows
            if self._sum(take(parts, low - start, high - start)) != expected
        ]
        names = [name for some in changed for name in some]
        told = len(rows) < 2 or bool(rows[0][3])  # Other seeds have no sums of parts.
        what = "bytes of the peer differ from those that it published: they were changed in place, "
        what += "or damaged on the way"
        if len(names) > 1:
            some = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
            what += f", in {len(names)} tensors: {some}" if told else f", in one or more of {some}"
        raise errors.ChecksumError(
            what,
            file=self.name,
            tensor=names[0] if told and names else None,
            expected=f"xxh3 {self._published(block)} of bytes {start} to {stop}",
            found=self._sum(parts),
        )


def _close(way: SeedReader, client: SeedClient) -> None:
    way.close()
    client.close()


class PeerHandle(ClosedAtEnd):
    """Reads a seed's data for one thread (see `Handle`).

    Where there are checksums, whole blocks are read: those at the edges of a range, into memory of
    the handle, which keeps the last one for the range that follows.
    """

    fd = -1

    def __init__(self, source: PeerSource) -> None:
        self._source = source
        self._block, self._kept = -1, bytearray()

    def read(self, vector: list[Any], offset: int, least: int | None = None) -> int:
        """Fills the buffers of a vector (see `Handle`)."""
        return self._source.with_others(lambda: self._reading(vector, offset, least))

    def _reading(self, vector: list[Any], offset: int, least: int | None) -> int:
        with self._source.reading():
            return self._read(vector, offset, least)

    def _read(self, vector: list[Any], offset: int, least: int | None) -> int:
        source, wanted = self._source, sum(each.nbytes for each in vector)
        stop = min(offset + wanted, source.size)
        if stop - offset < (wanted if least is None else least):
            raise shrunk(source.name, offset + wanted, source.size)
        if source.new is None:
            source.way.read(take(vector, 0, stop - offset), offset)
            return stop - offset
        first, last = -(-offset // BLOCK), stop // BLOCK
        if stop == source.size:
            last = -(-stop // BLOCK)
        if first >= last:  # No whole block.
            for block in range(offset // BLOCK, -(-stop // BLOCK)):
                self._edge(vector, offset, stop, block)
            return stop - offset
        if first * BLOCK > offset:
            self._edge(vector, offset, stop, first - 1)
        end = min(last * BLOCK, stop)
        whole = take(vector, first * BLOCK - offset, end - offset)
        source.way.read(whole, first * BLOCK)
        for block in range(first, last):
            at = (block - first) * BLOCK
            parts = take(whole, at, at + BLOCK)
            if not source.fits(block, parts):
                if not overlap(vector):
                    source.refuse(block, parts)
                self._edge(vector, offset, stop, block)  # A gap has the bytes of a later one.
        if end < stop:
            self._edge(vector, offset, stop, last)
        return stop - offset

    def close(self) -> None:
        """Frees the block that is kept."""
        self._block, self._kept = -1, bytearray()

    def _edge(self, vector: list[Any], offset: int, stop: int, block: int) -> None:
        """Copies what a range wants of a block."""
        start = block * BLOCK
        if self._block != block:
            end = min(start + BLOCK, self._source.size)
            if len(self._kept) != end - start:
                self._kept = bytearray(end - start)
            self._block = -1
            kept = [memoryview(self._kept)]
            self._source.way.read(kept, start)
            if not self._source.fits(block, kept):
                self._source.refuse(block, kept)
            self._block = block
        low, high = max(offset, start), min(stop, start + len(self._kept))
        spread(memoryview(self._kept)[low - start :], vector, low - offset, high - offset)


class PeerDeviceReader:
    """Lands blocks of a seed on a device (see `device.Reader`)."""

    def __init__(self, source: PeerSource, device: Any) -> None:
        self._source = source
        self._reader = source.way.onto(device)  # pyright: ignore - of one that `lands`

    def land(self, block: Any, slot: Any) -> int:
        """Reads a block into the first bytes of a slot."""
        with self._source.reading():
            self._reader.read(slot, block.offset, block.nbytes)
        return 0

    def close(self) -> None:
        """Lets go of the slots."""
        self._reader.close()
