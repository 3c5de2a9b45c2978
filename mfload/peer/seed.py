"""Seeds: arrays of this process that other processes load."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import re
import secrets
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mfload import errors
from mfload.dtypes import DType
from mfload.formats import strict_json
from mfload.frameworks import private_api
from mfload.index import Box
from mfload.mesh import base as meshes
from mfload.peer import fragments, manifest as manifests, transports as ways
from mfload.peer.checkpoint import PeerUrl
from mfload.peer.data import Data, hasher
from mfload.peer.leases import Registration, connect
from mfload.peer.manifest import Entry, Fragment, SeedManifest
from mfload.peer.planner import Planner, SeedRecord, here
from mfload.peer.security import Tls, check_exposure, credentials, resolved
from mfload.peer.server import HttpRequest, Reply, Server, text
from mfload.peer_options import PeerOptions
from mfload.report import human
from mfload.runtime import Forked
from mfload.sources.base import ClosedAtEnd
from mfload.trees import outline

MAX_READERS = 3
"""Readers at once that a planner sends to a seed, if nothing else is said."""

_DATA = re.compile(r"/v1/(data|ways)/([0-9a-f]{32})/(\d{1,19})(?:/([a-z0-9_.-]{1,64}))?")
_drawn: set[str] = set()  # Runs of seeds that were told none.
# How many were drawn for each model, by the store of the process group.
_counts: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
_seeds: weakref.WeakSet[Seed] = weakref.WeakSet()
_loaded: list[Seed] = []  # Those of loads that publish.


class _Version:
    """One generation: the memory that is held, and what is said of it."""

    def __init__(self, held: Sequence[Any], metadata: Mapping[str, str], checksums: bool) -> None:
        self.data = Data()
        kinds: dict[tuple[str, tuple[int, ...]], tuple[int, DType, Box, int | None]] = {}
        names, kind, rest = list[str](), list[int](), list[Any]()
        counts = Counter(each.name for each in held)
        self.copied = 0
        for each in held:
            if not strict_json.encodable(each.name):
                what, expected = "invalid tensor name", "a string that UTF-8 can encode"
                raise errors.UsageError(what, expected=expected, found=repr(each.name))
            self.copied += each.memory.size if each.copied else 0
            key = each.dtype.name, each.shape
            if key not in kinds:
                whole = tuple([(0, length) for length in each.shape])
                kinds[key] = len(kinds), each.dtype, whole, each.dtype.size_of(each.shape)
            number, _, whole, nbytes = kinds[key]
            alone = not each.sharding and each.box == whole and counts[each.name] == 1
            end = self.data.size
            # One that shares the memory of another does not lie behind the others.
            if alone and each.memory.size == nbytes and self.data.add(each.memory) == end:
                names.append(each.name)
                kind.append(number)
            else:
                rest.append(each)
        given = [(dtype, shape) for (_, shape), (_, dtype, *_) in kinds.items()]
        self.whole = manifests.in_turn(names, given, kind)
        rows: dict[str, tuple[Any, list[Fragment]]] = {}
        for each in rest:
            offset = self.data.add(each.memory)
            box: Box = tuple((int(low), int(high)) for low, high in each.box)
            _, fragments = rows.setdefault(each.name, (each, []))
            fragments.append(Fragment(box, offset, each.memory.size))
        self.rows = tuple(
            Entry(
                name,
                each.dtype.name,
                tuple(each.shape),
                each.sharding[: manifests.MAX_SHARDING],
                tuple(fragments),
            )
            for name, (each, fragments) in rows.items()
        )
        self.metadata = dict(metadata)
        self.checksums, self.shared = self.data.checksums() if checksums else (None, "")
        self.offers: dict[str, ways.Offer] = {}
        self.manifest: Any = None
        self.text = b""

    @property
    def content(self) -> str | None:
        """The run of all seeds that hold just this and never change; None without checksums."""
        if self.checksums is None:
            return None
        kinds = [(dtype.name, shape) for dtype, shape in self.whole.kinds]
        about = self.rows, self.whole.names, kinds, self.whole.kind, self.checksums
        return hashlib.sha256(repr(about).encode()).hexdigest()[:32]

    def close(self) -> None:
        """Ends what is offered and lets go of the memory; requests under way keep it."""
        for each in self.offers.values():
            each.close()
        self.data, self.offers = Data(), {}


class Seed(ClosedAtEnd):
    """Arrays that other processes load; made by `mfload.publish`. A context manager.

    The arrays are held: to delete or donate them elsewhere takes nothing away. Bytes that are
    changed in place are found by readers, who compare checksums; `update` gives them new ones.

    Attributes:
        address: Where it listens, "host:port".
        model, revision: What it holds.
        part: Which part of the model, and of how many.
        run: The run that its generations belong to.
        generation: Which version of the weights: 0, then one more with each update.
        copied_bytes: Bytes of arrays that can't be read in place, and so were copied.
        reads: How many times others asked what it holds, as each load, `ls` and the like does.
    """

    def __init__(
        self,
        version: _Version,
        model: str,
        revision: str,
        address: str,
        *,
        token: str | None,
        tls: Tls | None,
        transports: Sequence[str],
        checksums: bool,
        metadata: Mapping[str, str],
        part: tuple[int, int],
        run: str,
        generation: int,
    ) -> None:
        self.model, self.revision, self.part = model, revision, part
        self.run, self.generation = run, generation - 1
        self._incarnation = secrets.token_hex(16)
        self._transports = {name: ways.find(name) for name in transports}
        self._checksums, self._metadata, self._version = checksums, metadata, version
        self._server: Server | None = None
        self._lock = threading.Lock()
        self._registration: Registration | None = None
        self._max_readers = 1
        self._asked = itertools.count(1)
        self.reads = 0
        self._closed = False
        self._begin(version)
        try:
            self._server = Server(address, self._answer, token=token, tls=tls)
        except BaseException:
            version.close()
            raise
        self.address = self._server.address
        self._forked = Forked()
        _seeds.add(self)

    @property
    def connections(self) -> int:
        """How many connections of readers are open; each reader has up to four."""
        return 0 if self._server is None else self._server.connections

    @property
    def url(self) -> str:
        """What `mfload.load` takes."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"peer://{self.address}/{self.model}{revision}"

    @property
    def open(self) -> bool:
        """Whether it is not closed, and is this process's own."""
        return not (self._closed or self._forked)

    @property
    def manifest(self) -> SeedManifest:
        """What it says of itself."""
        return self._version.manifest

    @property
    def copied_bytes(self) -> int:
        """Bytes that were copied when they were published."""
        return self._version.copied

    def update(self, arrays: Any) -> None:
        """Replaces the weights; readers of those before raise SourceChangedError.

        The arguments are those of `mfload.publish`; names and shapes may change. What was held
        before is let go of. In a fork of the process that published, it raises UsageError.
        """
        self._check_own()
        devices = not {*ways.ON_DEVICES}.isdisjoint(self._transports)
        made = _version(arrays, self._metadata, self._checksums, devices)
        with self._lock:
            if self._closed:
                raise errors.UsageError("the seed is closed")
            before = self._version
            self._begin(made)
            before.close()
        if self._registration is not None:
            self._registration.update(self._record())

    def close(self) -> None:
        """Ends it, with all connections; more than once does nothing."""
        if self._forked:
            return  # To a fork nothing of it belongs.
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self in _loaded:
            _loaded.remove(self)
        if self._registration is not None:
            self._registration.close()
        if self._server is not None:
            self._server.close()
        self._version.close()

    def __repr__(self) -> str:
        size = human(self.manifest.size)
        return f"<Seed {self.url} generation {self.generation}, {size}>"

    def register(self, planner: Planner, max_readers: int, patient: bool = False) -> None:
        """Makes the seed known to a planner until it is closed.

        Raises UsageError for an address that others can't connect to, such as 0.0.0.0.
        """
        self._check_own()
        _check_reached(self.address)
        self._max_readers = max_readers
        self._registration = Registration(planner, self._record(), patient)

    def _check_own(self) -> None:
        """Raises UsageError in a fork, whose changes no reader would ever see."""
        if self._forked:
            what = "the seed belongs to the parent of this process, which was forked"
            raise errors.UsageError(what, expected="a seed that this process has published")

    def _record(self) -> SeedRecord:
        about = self.manifest
        return SeedRecord(
            self.address,
            self.model,
            self.revision,
            about.incarnation,
            about.run,
            about.generation,
            about.layout,
            here(),
            about.size,
            *self.part,
            self._max_readers,
        )

    def _begin(self, version: _Version) -> None:
        number = self.generation + 1
        try:
            for name, transport in self._transports.items():
                offer = transport.offer(version.data, number)
                if offer is not None:
                    version.offers[name] = offer
            version.manifest = SeedManifest(
                self.model,
                self.revision,
                self._incarnation,
                self.run,
                number,
                self.part,
                version.data.size,
                version.rows,
                version.metadata,
                version.checksums,
                {name: offer.given for name, offer in version.offers.items()},
                version.shared,
                version.whole,
            )
            version.text = version.manifest.to_json()
            _check_readable(version.text)
        except BaseException:
            version.close()
            raise
        self._version, self.generation = version, number

    def _answer(self, request: HttpRequest) -> Reply:
        version = self._version
        data = version.data  # An update may let go of it at any moment.
        path = request.path.partition("?")[0]
        match = _DATA.fullmatch(path)
        way = match is not None and match[1] == "ways"
        if request.method != ("POST" if way else "GET"):
            return text(405, '{"error": "another method is needed"}')
        if path == "/v1/manifest":
            self.reads = next(self._asked)
            return text(200, version.text)
        if path == "/v1/state":
            state = {"incarnation": self._incarnation, "generation": self.generation}
            return text(200, json.dumps({**state, "readers": self.connections}))
        if match is None or way == (match[4] is None):
            return text(404, '{"error": "no such path"}')
        asked, about = (match[2], int(match[3])), version.manifest
        if asked != (about.incarnation, about.generation) or data.size != about.size:
            return text(410, '{"error": "another generation"}')
        if way:
            return _asked(version.offers.get(match[4]), request.body)
        if request.span is None or request.span[1] > data.size:
            return text(416, '{"error": "a range within the data is needed"}')
        low, high = request.span
        named = ("Content-Range", f"bytes {low}-{high - 1}/{data.size}")
        kind = "application/octet-stream"
        return Reply(206, data.parts(low, high), high - low, kind, (named,))


def _check_readable(manifest: bytes) -> None:
    """Raises UsageError for a manifest that readers would refuse."""
    if len(manifest) > manifests.MAX_MANIFEST:
        most, size = map(errors.amount, (manifests.MAX_MANIFEST, len(manifest)))
        what = "the manifest is too long"
        raise errors.UsageError(what, expected=f"at most {most}", found=size)
    try:
        given = strict_json.loads(manifest, "the seed", "manifest", most=manifests.MAX_PARSED)
        manifests.from_json(given, "the seed")
    except errors.HeaderError as error:
        raise errors.UsageError(
            error.message, tensor=error.tensor, expected=error.expected, found=error.found
        ) from None


def _asked(offer: ways.Offer | None, body: bytes) -> Reply:
    """What a transport answers to its reader's side."""
    if offer is None or offer.asked is None:
        return text(404, '{"error": "no such transport"}')
    try:
        found = offer.asked(strict_json.loads(body, "a reader", "request"))
    except (KeyError, TypeError, ValueError, errors.FormatError):
        return text(400, '{"error": "the request is malformed"}')
    return text(200, json.dumps(found))


def publish(
    arrays: Any,
    *,
    model: str,
    revision: str = "",
    max_readers: int = MAX_READERS,
    part: tuple[int, int] = (0, 1),
    run: str | None = None,
    generation: int = 0,
    metadata: Mapping[str, str] | None = None,
    peer: PeerOptions | None = None,
) -> Seed:
    """Publishes arrays of this process, so that others load them with `peer://`.

    Nothing is copied where the memory can be read in place. All of it is hashed, unless
    `PeerOptions(checksums=False)` says otherwise. While others read, a thread of this process
    answers them: with the manifest, and over HTTP with the bytes; for memfd it copies all of them,
    for the first reader.

    Of sharded arrays each process publishes what it holds, and readers name all of them:
    `peer://host:1,host:2/org/name`.

    Args:
        arrays: Arrays by name, of any framework, or a module: `torch.nn.Module`,
            `paddle.nn.Layer`, a Keras model, an `nnx.Module`, any pytree.
        model: Its name, such as "org/name".
        revision: Which version of the model.
        max_readers: Readers at once that the planner sends here, 1 or more.
        part: `(rank, size)` of processes that hold a model together: readers are told if one of
            them is missing, and a planner names them all.
        run: Name of the run that the weights belong to: up to 64 letters, digits, ".", "_" and "-",
            the same in all of its processes, another one after a restart. Weights of different runs
            are never loaded together. Default: that of an open seed of the model in this process,
            else one that the processes of a group (`torch.distributed`, `jax.distributed`) share,
            else a new one. Required for `part=` without a group.
        generation: The number of the weights within the run: of seeds with several, the planner and
            readers take the newest.
        metadata: Free-form strings, which readers find in the index.
        peer: Where the seed listens and how it is guarded, the planner that it registers with,
            whether it has checksums, and what transports it offers; see `mfload.PeerOptions`.

    Returns:
        The seed. It holds the arrays until it is closed; what is left open ends with the process.

    Raises:
        UsageError: An argument is invalid, or the address is taken or not guarded.
        UnsupportedArrayError: An array can't be published.
        FrameworkMissingError: Checksums need the package xxhash.
    """
    for what, value in (("model", model), ("revision", revision or "main")):
        if not isinstance(value, str) or not manifests.NAME.fullmatch(value):  # pyright: ignore
            expected = "letters, digits, '.', '_', '-' and '/', such as 'org/name'"
            raise errors.UsageError(f"{what}= is not a name", expected=expected, found=repr(value))
    if not manifests.is_part(part) or not manifests.is_generation(generation):
        expected = f"part=(rank, size) of at most {manifests.MOST_PARTS}, generation from 0 on"
        found = f"part={part!r}, generation={generation!r}"
        raise errors.UsageError("no such part or generation", expected=expected, found=found)
    if run is not None and not manifests.is_run(run):
        expected = "up to 64 letters, digits, '.', '_' and '-'"
        raise errors.UsageError("run is not a valid name", expected=expected, found=repr(run))
    if type(max_readers) is not int or not 0 < max_readers < 1 << 62:
        what = "max_readers= is not a number of readers"
        raise errors.UsageError(what, expected="1 or more", found=repr(max_readers))
    own = dict(metadata or {})
    if wrong := [each for each in (*own, *own.values()) if not strict_json.encodable(each)]:
        expected = "{str: str}, encodable as UTF-8"
        raise errors.UsageError("invalid metadata", expected=expected, found=repr(wrong[0]))
    how = PeerOptions() if peer is None else peer
    if not isinstance(how, PeerOptions):  # pyright: ignore[reportUnnecessaryIsInstance]
        what, expected = "peer must be an mfload.PeerOptions", "mfload.PeerOptions(…)"
        raise errors.UsageError(what, expected=expected, found=repr(how))
    transports = ways.DEFAULT if how.transports is None else how.transports
    token, tls = credentials(how)
    version = _version(arrays, own, how.checksums, not {*ways.ON_DEVICES}.isdisjoint(transports))
    given: dict[str, Any] = {"token": token, "tls": tls, "checksums": how.checksums}
    if run is None and _of_files(arrays):
        run = version.content  # All that hold the same are of one run.
    if run is None:
        run = _run(model, revision, part[1])
    given |= {"part": part, "run": run, "generation": generation, "metadata": own}
    seed = Seed(version, model, revision, how.address, transports=transports, **given)
    if how.planner is not None:
        try:
            seed.register(connect(how.planner, token=token, tls=tls), max_readers)
        except BaseException:
            seed.close()
            raise
    return seed


def _run(model: str, revision: str, parts: int) -> str:
    """The run of a seed that is told none: drawn here, or by the first of its process group."""
    for each in seeds():
        mine = each.run in _drawn and each not in _loaded
        if mine and (each.model, each.revision) == (model, revision):
            return each.run
    run, name = secrets.token_hex(16), f"{model}@{revision}"
    store = _store()
    if store is not None:
        counts = _counts.setdefault(store, Counter())
        counts[name] += 1
        run = store.first(f"mfload/run/{name}/{counts[name]}", run)
    elif parts > 1:
        what = "part= needs run= outside of a process group"
        expected = "run=, the same name in all processes, and another one after a restart"
        raise errors.UsageError(what, expected=expected)
    _drawn.add(run)
    return run


def _store() -> meshes.KeyValueStore | None:
    """Where the processes of the group that this one has joined keep texts."""
    torch: Any = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        return meshes.backend("torch").store()
    if "jax" in sys.modules and private_api.jax_store() is not None:
        return meshes.backend("jax").store()
    return None


def _of_files(arrays: Any) -> bool:
    """Whether it is what `mfload serve` publishes, or a load that had no peers."""
    held = isinstance(arrays, list) and arrays and isinstance(arrays[0], fragments.Held)
    return bool(held) or isinstance(arrays, _Version)


def _version(arrays: Any, metadata: Mapping[str, str], checksums: bool, devices: bool) -> _Version:
    if isinstance(arrays, _Version):
        return arrays
    if _of_files(arrays):
        return _Version(arrays, metadata, checksums)
    found, strings = outline.by_name(arrays, metadata)
    return _Version(fragments.held(found, devices), strings or {}, checksums)


def _check_reached(address: str) -> None:
    if any(each.is_unspecified for each in resolved(address)):
        what = "a planner needs the address that readers connect to"
        expected = "address= with one of this machine's own, such as 10.0.0.7:0"
        raise errors.UsageError(what, expected=expected, found=address)


def check(url: str, options: PeerOptions) -> None:
    """Looks, before a load, whether it could be published under a URL's name.

    Raises UsageError if it could not, and FrameworkMissingError if xxhash is not installed.
    """
    PeerUrl.of(url)
    token, tls = credentials(options)
    own = None if options.cert_file is None else tls
    check_exposure(options.address, token, own)
    if own is not None:
        own.context(server=True)
    if options.checksums:
        hasher()
    if options.planner is not None:
        _check_reached(options.address)
        connect(options.planner, token=token, tls=tls)


def publish_loaded(
    arrays: Any, url: str, options: PeerOptions, run: str | None = None, generation: int = 0
) -> Seed:
    """Publishes the model that a `peer://` URL names; the seed lives as long as the process.

    It has the run and the generation of the seeds that were read. Files have no run.
    Raises as `publish` does, but for a planner that is gone.
    """
    what = PeerUrl.of(url)
    if run is None:  # Files have none.
        arrays = _version(arrays, {}, options.checksums, devices=False)
    own = replace(options, planner=None, transports=None)  # A planner may be gone; see below.
    named: Any = {"model": what.model, "revision": what.revision or "", "run": run}
    seed = publish(arrays, **named, generation=generation, peer=own)
    _loaded.append(seed)
    if options.planner is not None:
        token, tls = credentials(options)
        planner = connect(options.planner, token=token, tls=tls)
        seed.register(planner, MAX_READERS, patient=True)
    return seed


def seeds() -> list[Seed]:
    """The seeds of this process that are open, those of loads with `publish=True` among them."""
    return [each for each in list(_seeds) if each.open]


@atexit.register
def _close_all() -> None:
    for each in seeds():
        each.close()
