"""Dense layers that stay on the disk: while one computes, the next is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mfload import errors
from mfload.ondemand.policies import Cyclic
from mfload.ondemand.pools import Pooled, Pools
from mfload.ondemand.store import RowPart, Slots, Store
from mfload.options import byte_count
from mfload.planning.selection import compiled

if TYPE_CHECKING:
    from mfload.frameworks import Framework
    from mfload.options import Options
    from mfload.sources import PathOrBytes

PATTERN = r"(?<!\bmtp\.)layers\.(\d+)\."
_FIRST = np.zeros(1, np.int64)


class LayerStream(Pooled):
    """The layers of a model, one after the other, read from an unmodified checkpoint.

        with mfload.ondemand.LayerStream("model/", budget="4GiB", framework="torch") as stream:
            hidden = stream.resident["model.embed_tokens.weight"][tokens]
            for layer, tensors in stream:
                hidden = forward(hidden, tensors)

    Each iteration goes through all layers once, in order of their numbers, and reads ahead: past
    the last layer, the first ones for the iteration that follows. Layers for which the budget has
    room stay in memory, so that no later iteration reads them. Layers of another size have slots of
    their own; if there is no room for that, all share slots of the size of the largest.

    The slot of a layer stays as it is as long as one of its arrays lives, through views, DLPack
    capsules and running computations; then another layer takes it. Arrays that are kept beyond the
    next layer take a slot away, and a stream that has none left raises an error. Arrays of NumPy
    refuse writing; those of other frameworks must not be written to.

    Args:
        path: As for `mfload.load`; tensors are stored raw, in one piece, as in all safetensors.
        pattern: A regex that is searched for in each name. Its group is the layer: the first, or
            "(?P<layer>…)". Default: as most models name them, without those below `mtp.`, which
            predict further tokens.
        budget: Bytes, or a text such as "4GiB", for layers and what is resident. Default: what is
            resident and `ahead` + 1 of the largest layers, two at least.
        ahead: Layers that are read ahead of the one that computes.
        framework: As for `mfload.load`. The arrays lie in host memory.
        resident: What stays in memory: a regex that is searched for in names, also in those of
            layers, which then come without these tensors. Default: the tensors of no layer, such as
            embeddings and head. What is neither resident nor of a layer is not read.
        options: How files are opened and read: `engine` ("auto", "pread" or "direct"),
            `page_cache`, `threads`, and `timeout`, which opening has, and each request.
        gather: What reads: "auto", "io_uring" or "threads".
        wait: Seconds to wait for a slot, such as for a computation that still runs.

    Attributes:
        layers: Numbers of the layers, in order.
        resident: The tensors that stay, by name.

    Raises:
        UsageError: An argument is invalid; or tensors are compressed, or in several pieces.
        TensorNotFoundError: No name is one of a layer.
        MemoryLimitError: The budget has no room for what is resident and `ahead` + 1 layers, two at
            least, and the error says which has; or the system refuses the memory.
        SourceError: A file is missing or can't be read.
        FormatError: The checkpoint is malformed.
    """

    _opens = Store

    def __init__(
        self,
        path: PathOrBytes | Sequence[PathOrBytes],
        pattern: str | re.Pattern[str] = PATTERN,
        budget: int | str | None = None,
        ahead: int = 1,
        framework: Framework | ModuleType = "numpy",
        *,
        resident: str | re.Pattern[str] | None = None,
        options: Options | None = None,
        gather: Literal["auto", "io_uring", "threads"] = "auto",
        wait: float = 10.0,
    ) -> None:
        limit = None if budget is None else byte_count("budget", budget, 1)
        self._ahead = byte_count("ahead", ahead, 0)
        names = _Names(pattern, resident)
        store = self._opens(path, names.wanted, framework, options=options, gather=gather)
        try:
            kept: list[RowPart] = []
            layers: dict[int, list[RowPart]] = {}
            for info in store.tensors:
                layer = names.layer(info.name)
                (kept if layer is None else layers.setdefault(layer, [])).append(store.part(info))
            if not layers:
                raise errors.TensorNotFoundError(
                    "no name is one of a layer", file=store.file, expected=names.pattern
                )
            self.layers = tuple(sorted(layers))
            slots = Slots(store, [kept])
            self._pools = Pools(
                store,
                [[layers[layer]] for layer in self.layers],
                limit,
                lambda keys, capacity, _: Cyclic(keys, capacity),
                beside=slots.nbytes,
                least=max(2, self._ahead + 1),
                mixed=True,
                what="layer",
                wait=wait,
            )
            self.resident: Mapping[str, Any] = MappingProxyType(slots.load()[0])
        except BaseException:
            vars(self).clear()  # The error may be kept.
            store.close()
            raise

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Goes through the layers: the number of each, and its arrays by their names in the file.

        Raises as `ExpertCache.use` does.
        """
        count = len(self.layers)
        for number, layer in enumerate(self.layers):
            lease = self._pools.use(number, _FIRST)[0]
            next_ones = [(number + n) % count for n in range(1, min(self._ahead + 1, count))]
            self._pools.prefetch([(each, _FIRST) for each in next_ones], patient=True)
            tensors = self._pools.arrays(number, lease)
            del lease
            yield layer, tensors
            del tensors


class _Names:
    """What the names of tensors say: the layer that each is of, and which tensors stay."""

    def __init__(
        self, pattern: str | re.Pattern[str], resident: str | re.Pattern[str] | None
    ) -> None:
        find = compiled(pattern, "pattern=")
        if not find.groups:
            what = "pattern has no group for the number of the layer"
            raise errors.UsageError(what, expected=PATTERN, found=find.pattern)
        self._stays = None if resident is None else compiled(resident, "resident=").search
        self._find, self._group = find.search, find.groupindex.get("layer", 1)
        self.pattern = find.pattern

    def layer(self, name: str) -> int | None:
        """The layer of a tensor; None for one that stays, or that is of none."""
        found, group = self._find(name), self._group
        if found is None or (self._stays is not None and self._stays(name)):
            return None
        try:
            return int(found[group])
        except (TypeError, ValueError):
            what = "the pattern takes something else for the number of a layer"
            raise errors.UsageError(what, tensor=name, found=repr(found[group])) from None

    def wanted(self, name: str) -> bool:
        """Whether a tensor is of a layer, or stays."""
        stays = self._stays
        return stays is None or stays(name) is not None or self.layer(name) is not None
