"""Which keys leave a full cache: experts of a layer, layers of a model, or neurons.

A policy keeps what it knows by key, in NumPy columns, so that thousands of neurons cost as many
calls as eight experts, and a key that comes back is known. One object serves one cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from mfload import errors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Keys = NDArray[np.int64]

    Policy = str | Callable[[int, int], "Lru"]


class Lru:
    """The least recently used leave first.

    Args:
        keys: How many there are; they are the numbers from 0.
        capacity: How many of them the cache holds.

    Attributes:
        now: Number of requests so far.
        last: By key, the request that asked for it last; 0 or less if none has.
    """

    def __init__(self, keys: int, capacity: int) -> None:
        self.capacity, self.now = capacity, 0
        self.last = np.zeros(keys, np.int64)

    def use(self, keys: Keys) -> None:
        """A request asks for keys, each once."""
        self.now += 1
        self.last[keys] = self.now

    def expect(self, keys: Keys) -> None:
        """Keys are read ahead for the next request."""
        self.last[keys] = self.now

    def rank(self, keys: Keys) -> NDArray[np.number]:
        """A number for each key; the lowest leave first."""
        return self.last[keys]

    def victims(self, keys: Keys, count: int) -> Keys:
        """Those `count` of the keys that leave."""
        if count >= keys.size:
            return keys
        return keys[np.argpartition(self.rank(keys), count - 1)[:count]] if count else keys[:0]

    def expired(self, keys: Keys) -> Keys:
        """Those of the keys that leave even if there is room; none but of a window."""
        return keys[:0]


class LayeredLru(Lru):
    """The least recently used of a layer leave first, of the layers that hold the most.

    For layers that take turns in one cache. Each gets as many slots as if it had its own, and there
    may be fewer than one request of each layer needs. Of layers that hold as many, the one that was
    used last loses first: its turn comes last.

    Args:
        layer: By key, its layer.
    """

    def __init__(self, keys: int, capacity: int, layer: Keys) -> None:
        super().__init__(keys, capacity)
        self._layer = layer
        self._asked = np.zeros(1 + layer.max(initial=0), np.int64)  # By layer, keys of a request.

    def use(self, keys: Keys) -> None:
        """A request asks for keys."""
        super().use(keys)
        self._asked = np.bincount(self._layer[keys], minlength=self._asked.size)

    def victims(self, keys: Keys, count: int) -> Keys:
        """Those `count` of the keys that leave."""
        last, layer = self.last[keys], self._layer[keys]
        order = np.lexsort((-last, layer))
        # By key, how many of its layer were used later.
        later = self._asked[layer]
        later[order] += np.arange(keys.size) - np.searchsorted(layer[order], layer[order])
        return keys[np.lexsort((-last, -later))[:count]]


class Window(Lru):
    """Keeps what the last `size` requests asked for, as far as there is room."""

    def __init__(self, keys: int, capacity: int, size: int = 4) -> None:
        super().__init__(keys, capacity)
        self.size = size
        self.last -= size  # What only drafts asked for that do not count is out of it at once.

    def expired(self, keys: Keys) -> Keys:
        """Those that none of the last `size` requests asked for, the one under way included."""
        return keys[self.last[keys] <= self.now - self.size]


class Lfu(Lru):
    """The least often used leave first; a use counts for half after `half_life` requests.

    Keys that left keep their count.
    """

    def __init__(self, keys: int, capacity: int, half_life: float = 64.0) -> None:
        super().__init__(keys, capacity)
        self.count = np.zeros(keys)
        self._ageing = 0.5 ** (1 / half_life)

    def use(self, keys: Keys) -> None:
        """A request asks for keys."""
        super().use(keys)
        self.count *= self._ageing
        self.count[keys] += 1.0

    def rank(self, keys: Keys) -> NDArray[np.number]:
        """The aged count; what is read ahead for the next request stays until it comes."""
        return self.count[keys] + np.where(self.last[keys] == self.now, self.now + 1.0, 0.0)


class PinLru(Lfu):
    """Some keys stay, and the least recently used of the others leave first.

    Args:
        pinned: The keys that stay. Default: those most often used so far, as `Lfu` counts, in
            half of the slots.
    """

    def __init__(
        self,
        keys: int,
        capacity: int,
        pinned: Iterable[int] | None = None,
        half_life: float = 64.0,
    ) -> None:
        super().__init__(keys, capacity, half_life)
        self._pinned: Keys | None = None if pinned is None else np.array(list(pinned), np.int64)

    def rank(self, keys: Keys) -> NDArray[np.number]:
        """The last use, and more for the pinned."""
        pinned, most = self._pinned, min(self.capacity // 2, self.count.size - 1)
        if pinned is None:
            pinned = np.argpartition(-self.count, most)[:most]
        return self.last[keys] + np.where(np.isin(keys, pinned), self.now + 1, 0)


class Cyclic(Lru):
    """For keys that come in order, over and over: what is needed last leaves first.

    So of a model that does not fit, some layers just stay.
    """

    _current = -1

    def use(self, keys: Keys) -> None:
        """A request asks for a key."""
        super().use(keys)
        self._current = int(keys[-1]) if keys.size else self._current

    def rank(self, keys: Keys) -> NDArray[np.number]:
        """How soon each is needed; what was used just now is needed last."""
        return -((keys - self._current - 1) % self.last.size)


_EXPECTED = "'lru' | 'lfu' | 'pin+lru' | 'window(k)', or a function of (keys, capacity)"


def make(policy: Policy, keys: int, capacity: int, layer: Keys | None = None) -> Lru:
    """The policy for a cache, from its name or from a function of (keys, capacity).

    Names: "lru", "lfu" (with ageing), "pin+lru", and "window(k)" of the last k requests. If layers
    share the cache, what is said of requests holds for requests of each; `layer` gives the layer of
    each key, from 0 on.

    Raises:
        UsageError: There is no policy of that name, or the function makes none.
    """
    if callable(policy):
        made = policy(keys, capacity)
        if not isinstance(made, Lru):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.UsageError(
                "the function makes no policy",
                expected="an object of a class of mfload.ondemand.policies",
                found=repr(made),
            )
        return made
    match = re.fullmatch(r"(window)\(\s*([1-9]\d{0,8})\s*\)|lru|lfu|pin\+lru", str(policy))
    if match is None:
        meant = errors.did_you_mean(str(policy), ("lru", "lfu", "pin+lru", "window(4)"))
        raise errors.UsageError(f"unknown policy{meant}", expected=_EXPECTED, found=policy)
    layers = 1 if layer is None else 1 + int(layer.max(initial=0))
    if match[1]:
        return Window(keys, capacity, int(match[2]) * layers)
    if match[0] == "lru":
        return Lru(keys, capacity) if layer is None else LayeredLru(keys, capacity, layer)
    kind = PinLru if match[0] == "pin+lru" else Lfu
    return kind(keys, capacity, half_life=64.0 * layers)
