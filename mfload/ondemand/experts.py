"""Experts of a mixture that stay on the disk: each layer reads those that its router names."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mfload import errors
from mfload.index import TensorInfo
from mfload.ondemand import policies
from mfload.ondemand.cache import Lease, layer_in, numbers, whole
from mfload.ondemand.pools import Pooled, Pools
from mfload.ondemand.store import RowPart, Store
from mfload.options import byte_count
from mfload.planning.selection import compiled
from mfload.sources.base import ClosedAtEnd

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mfload.frameworks import Framework
    from mfload.ondemand.cache import Numbers
    from mfload.ondemand.policies import Lru
    from mfload.options import Options
    from mfload.sources import PathOrBytes

# The layers of the model itself, not those that predict tokens beyond the next.
PATTERN = r"(?<!\bmtp\.)layers\.(\d+)\.mlp\.experts\.(\d+)\.([\w.]+?)(?:\.weight)?"
_GROUPS = "(layer)(expert)(name), or (layer)(name) for stacked experts; or these names of groups"


class Experts(ClosedAtEnd, Mapping[int, Mapping[str, Any]]):
    """Experts of a layer by number, each its arrays by name.

    Their slots stay as they are until the end of the block and, of each expert, as long as one of
    its arrays lives, through views, DLPack capsules and running computations. Arrays of NumPy
    refuse writing; those of other frameworks must not be written to.
    """

    def __init__(self, pools: Pools, layer: int, leases: dict[int, Lease]) -> None:
        self._pools, self._layer, self._leases = pools, layer, leases
        self._made: dict[int, dict[str, Any]] = {}

    def __getitem__(self, expert: int) -> Mapping[str, Any]:
        """The arrays of an expert by name.

        Raises TensorNotFoundError if it was not asked for, or the block is over.
        """
        number = whole(expert)
        if number is None or number not in self._leases:
            raise errors.TensorNotFoundError(
                "the expert was not asked for, or its block is over",
                expected=f"one of {list(self._leases)}",
                found=repr(expert),
            )
        if number not in self._made:
            self._made[number] = self._pools.arrays(self._layer, self._leases[number])
        return self._made[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._leases)

    def __len__(self) -> int:
        return len(self._leases)

    def close(self) -> None:
        """Lets go of the slots of which no array lives."""
        self._leases, self._made = {}, {}


class ExpertCache(Pooled):
    """Experts of the layers of a model, read from an unmodified checkpoint when they are used.

        with mfload.ondemand.ExpertCache("model/", budget="8GiB", framework="jax") as cache:
            with cache.use(layer, [3, 17]) as experts:
                up = experts[17]["up_proj"]

    The budget is allocated when the cache is made, as slots of one expert each. Layers share them:
    with "lru", each holds as many as if it had its own, and there may be fewer than one step needs.
    Experts of another size have slots of their own, in proportion. All other tensors are loaded as
    always: `mfload.load(path, framework, names=...)`.

    Any number of threads, and of sequences, may use it at once. Experts that are quantised stay as
    they are stored, several elements in a byte as uint8 (`mfload.unpack`), and their scales are
    tensors like others.

    Args:
        path: As for `mfload.load`; tensors are stored raw, in one piece, as in all safetensors.
        pattern: A regex that is searched for in each name and reaches to its end; what it does not
            match is no expert's. Its groups are layer, expert and name: "(…)" in this order, or
            "(?P<layer>…)" in any. Without one for the expert, a tensor holds all experts of the
            layer, `[experts, …]`, and each gets a row. Default: a tensor an expert, as DeepSeek,
            Qwen and OLMoE name them, without those below `mtp.`; "up_proj" is a weight, and what
            else an expert has keeps its ending, "up_proj.weight_scale_inv".
        budget: Bytes, or a text such as "2GiB".
        framework: As for `mfload.load`. The arrays lie in host memory.
        policy: Which experts leave: "lru", "lfu" (with ageing), "pin+lru", "window(k)", or a
            function of (keys, capacity) to an object of a class of `mfload.ondemand.policies`; the
            keys of the first layer come first.
        options: How files are opened and read: `engine` ("auto", "pread" or "direct"),
            `page_cache`, `threads`, and `timeout`, which opening has, and each request.
        gather: What reads: "auto", "io_uring" or "threads".
        wait: Seconds to wait for slots that are pinned.

    Attributes:
        experts: By layer, how many it has. Their numbers are those in the names, such as 4 to 7 of
            a rank's part of a model.

    Raises:
        UsageError: An argument is invalid; or tensors are compressed, or in several pieces.
        TensorNotFoundError: No name matches, or an expert lacks tensors that others of its layer
            have.
        UnsupportedShapeError: Stacked tensors of a layer have two dims at most, so that their rows
            can't be the matrices of experts.
        MemoryLimitError: The budget has no room for one expert, or the system refuses it.
        SourceError: A file is missing or can't be read.
        FormatError: The checkpoint is malformed.
    """

    _opens = Store

    def __init__(
        self,
        path: PathOrBytes | Sequence[PathOrBytes],
        pattern: str | re.Pattern[str] = PATTERN,
        budget: int | str = 2 << 30,
        framework: Framework | ModuleType = "numpy",
        policy: str | Callable[[int, int], Lru] = "lru",
        *,
        options: Options | None = None,
        gather: Literal["auto", "io_uring", "threads"] = "auto",
        wait: float = 10.0,
    ) -> None:
        limit, match = byte_count("budget", budget, 1), _Pattern(pattern)
        store = self._opens(path, match, framework, options=options, gather=gather)
        try:
            layers = _by_layer(store, match)
            self._pools = Pools(
                store,
                [[*keys.values()] for keys in layers.values()],
                limit,
                functools.partial(policies.make, policy),
                what="expert",
                wait=wait,
            )
        except BaseException:
            store.close()
            raise
        self.experts = {layer: len(keys) for layer, keys in layers.items()}
        each = (np.array([*keys], np.int64) for keys in layers.values())
        self._layers = dict(zip(layers, enumerate(each), strict=True))

    def use(self, layer: int, experts: Iterable[int] | NDArray[np.int64]) -> Experts:
        """Experts of a layer, for a `with` block; those that are not there are read.

        Args:
            layer: Number of the layer, as in the names of its tensors.
            experts: Numbers of experts, in any order; each counts once.

        Returns:
            A mapping from the number of an expert to its arrays by name.

        Raises:
            UsageError: There is no such layer or expert; or the cache was closed, or made before a
                fork.
            MemoryLimitError: The budget is too small for so many at once, and the error says which
                is not; or slots are pinned by arrays that still live, and none became free in time.
            SourceChangedError: A file is no longer the one that was opened.
            ReadError: The system can't read it.
            LoadTimeoutError: The timeout passed. A read under way keeps its slots until it returns.
        """
        number, keys, names = self._known(layer, experts)
        leases = self._pools.use(number, keys)
        return Experts(self._pools, number, {int(names[key]): leases[key] for key in leases})

    def prefetch(self, layer: int, experts: Iterable[int] | NDArray[np.int64]) -> None:
        """Has a thread read experts ahead, the first of them first, into slots that are not pinned.

        What was asked for before, and is not begun, is dropped. What fails is read again when it is
        used, and raised then.

        Args:
            layer: Number of the layer.
            experts: Numbers of the experts that are likely to be used next.

        Raises:
            UsageError: As `use`.
        """
        self._pools.prefetch([self._known(layer, experts)[:2]])

    def _known(self, layer: int, experts: Iterable[int] | Numbers) -> tuple[int, Numbers, Numbers]:
        """The number of a layer, the keys of its experts, and the numbers of all that it has."""
        number, there = layer_in(self._layers, layer, "experts")
        asked = numbers(experts, "expert")
        keys = there.searchsorted(asked)
        wrong = asked[there.take(keys, mode="clip") != asked]
        if wrong.size:
            low, high, count = there[0], there[-1], there.size
            gaps = f", {count} of them" if count <= high - low else ""
            raise errors.UsageError(
                f"layer {layer} has no such expert",
                expected=f"numbers from {low} to {high}{gaps}",
                found=wrong[0],
            )
        return number, keys, there


class _Pattern:
    """Layer, expert (None if they are stacked) and name in names of tensors."""

    def __init__(self, given: str | re.Pattern[str]) -> None:
        self.regex = compiled(given, "pattern=")
        names = ["layer", "name"] if self.regex.groups == 2 else ["layer", "expert", "name"]
        self.groups = self.regex.groupindex or {name: n for n, name in enumerate(names, 1)}
        named = {"layer", "name"} <= self.groups.keys() <= {"layer", "expert", "name"}
        if not named or (not self.regex.groupindex and self.regex.groups != len(names)):
            raise errors.UsageError(
                "pattern has other groups", expected=_GROUPS, found=self.regex.pattern
            )

    def __call__(self, name: str) -> tuple[int, int | None, str] | None:
        """What a name says; None if the pattern does not match it."""
        found = self.regex.search(name)
        found = found and self.regex.fullmatch(name, found.start())
        if found is None:
            return None
        said = {group: found[number] for group, number in self.groups.items()}
        try:
            expert = said.get("expert")
            return int(said["layer"]), None if expert is None else int(expert), said["name"]
        except (TypeError, ValueError):
            raise errors.UsageError(
                "the pattern takes something else for the number of a layer or an expert",
                tensor=name,
                expected=_GROUPS,
                found=repr(said),
            ) from None


def _by_layer(store: Store, match: _Pattern) -> dict[int, dict[int, Sequence[RowPart]]]:
    """By layer, and by number of the expert, its parts."""
    layers: dict[int, dict[int, dict[str, RowPart]]] = {}
    stacked: dict[int, list[TensorInfo]] = {}
    holders: dict[RowPart, TensorInfo] = {}
    for info in store.tensors:
        found = match(info.name)
        assert found is not None
        layer, expert, name = found
        parts = [store.part(info, name)] if expert is not None else store.rows(info, name)
        if expert is None:
            stacked.setdefault(layer, []).append(info)
        for number, part in enumerate(parts, expert or 0):
            there = layers.setdefault(layer, {}).setdefault(number, {}).setdefault(name, part)
            if holders.setdefault(there, info) is not info:
                raise errors.UsageError(
                    "the pattern takes two tensors for the same",
                    tensor=info.name,
                    expected=_GROUPS,
                    found=f"{holders[there].name!r} for layer {layer}, expert {number}, {name!r}",
                )
    if not layers:
        raise errors.TensorNotFoundError(
            "no name is one of an expert", file=store.file, expected=match.regex.pattern
        )
    everywhere = set[int]().union(*layers.values())
    for layer, experts in sorted(layers.items()):
        names = {name for each in experts.values() for name in each}
        if layer in stacked and all(len(info.shape) < 3 for info in stacked[layer]):
            raise errors.UnsupportedShapeError(
                "the tensor has no dim of experts: reshape it, and save it anew",
                file=store.file,
                tensor=stacked[layer][0].name,
                expected="[experts, rows, columns], of one of the layer's tensors at least",
                found=list(stacked[layer][0].shape),
            )
        # A rank's part of a model may begin and end anywhere; what other layers have is no gap.
        gaps = {number for number in everywhere if min(experts) < number < max(experts)}
        for number in sorted(gaps | experts.keys()):
            lacking = names - experts.get(number, {}).keys()
            if lacking:
                raise errors.TensorNotFoundError(
                    f"expert {number} of layer {layer} lacks tensors that others have",
                    file=store.file,
                    expected=", ".join(sorted(names)),
                    found=f"no {', '.join(sorted(lacking))}",
                )
    return {
        layer: {number: list(experts[number].values()) for number in sorted(experts)}
        for layer, experts in sorted(layers.items())
    }
