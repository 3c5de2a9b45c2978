"""Any selection of a seed's tensors has the bytes that were published, by each transport.

Blocks of checksums, gaps that are read over and edges that several tensors share meet in ways that
no list of cases covers. `MFLOAD_SLOW=1` takes ten thousand selections.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from seeding import TRANSPORTS, options, rows

import mfload
from mfload.peer.fragments import Held

COUNT = 10_000 if os.environ.get("MFLOAD_SLOW") else 60
A_SEED = 50  # Selections of what a seed holds, before the next one is made.
DTYPES = ("u1", "f2", "i4", "f8")


def model(random: np.random.Generator) -> dict[str, Any]:
    """Many small tensors and some of a few blocks, with names that patterns tell apart."""
    found: dict[str, Any] = {}
    for n in range(random.integers(5, 120)):
        most = random.choice([1, 8, 2000, 40_000, 300_000], p=[0.1, 0.3, 0.3, 0.25, 0.05])
        shape = random.integers(1, most + 1), random.choice([1, 1, 3])
        kind = random.choice(["weight", "bias", "norm.weight"])
        data = random.integers(0, 255, (*shape, 8), np.uint8)
        dtype = str(random.choice(DTYPES))
        found[f"layers.{n}.{kind}"] = data.view(dtype).reshape(shape[0], -1)
    return found


def held(arrays: dict[str, Any], random: np.random.Generator) -> list[Held]:
    """Tensors as a seed may hold them: whole, in two parts, and one that shares memory."""
    found: list[Held] = []
    for each in rows(arrays):
        cut = int(random.integers(0, each.shape[0] + 1)) if random.random() < 0.2 else 0
        if not 0 < cut < each.shape[0]:
            found.append(each)
            continue
        at = each.memory.size // each.shape[0] * cut
        (_, stop), *rest = each.box
        halves = ((0, cut), each.memory[:at]), ((cut, stop), each.memory[at:])
        found += [each._replace(box=(span, *rest), memory=some) for span, some in halves]
    tied = found[int(random.integers(len(found)))]
    if tied.box == tuple((0, length) for length in tied.shape):
        found.append(tied._replace(name="tied"))
        arrays["tied"] = arrays[tied.name]
    return found


def selections(arrays: dict[str, Any], random: np.random.Generator) -> Iterator[Any]:
    """Lists of names, patterns, and None for slices, without end."""
    names = [*arrays]
    while True:
        yield [*random.permutation(names)[: random.integers(1, len(names) + 1)]]
        yield random.choice(["weight$", "bias$", "[02468][.]", r"^layers[.]\d[.]", "norm|tied"])
        yield names[:: random.integers(1, 4)]
        yield None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_selections(transport: str) -> None:
    random = np.random.default_rng([39, len(transport)])
    done = 0
    share = -(-COUNT // len(TRANSPORTS))
    while done < share:
        arrays = model(random)
        given = options(transport)
        with mfload.publish(
            held(arrays, random), model="m", peer=mfload.PeerOptions(transports=(transport,))
        ) as seed:
            for names, _ in zip(selections(arrays, random), range(A_SEED), strict=False):
                if names is None:
                    slices(seed.url, arrays, random, given)
                else:
                    whole = not isinstance(names, str)
                    wanted = names if whole else [n for n in arrays if re.search(names, n)]
                    if not wanted:
                        continue
                    found = mfload.load(seed.url, "numpy", names=names, options=given)
                    assert {*found} == {*wanted}
                    for name, each in found.items():
                        np.testing.assert_array_equal(each, arrays[name], name)
                done += 1


def slices(url: str, arrays: dict[str, Any], random: np.random.Generator, given: Any) -> None:
    """Some rows of some tensors, with steps."""
    with mfload.open(url, "numpy", options=given) as opened:
        for name in random.permutation([*arrays])[:3]:
            length = arrays[name].shape[0]
            low, high = sorted(random.integers(0, length + 1, 2))
            part = slice(int(low), int(high), int(random.integers(1, 4)))
            np.testing.assert_array_equal(opened.get_slice(name)[part], arrays[name][part], name)
