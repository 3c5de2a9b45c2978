"""Sizes of shards, as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from mfload import errors
from mfload.formats import options


@pytest.mark.parametrize(
    ("given", "found"),
    [(None, None), (7, 7), ("7", 7), ("5GB", 5 * 10**9), ("500MiB", 500 << 20), ("1.5 kB", 1500),
     (" 2GiB ", 2 << 30), ("3g", 3 * 10**9), ("1TiB", 1 << 40), ("0.001MB", 1000)],
)  # fmt: skip
def test_limits(given: Any, found: int | None) -> None:
    assert options.shard_limit(given) == found


@pytest.mark.parametrize(
    "given",
    ["", "GB", "-1", "0", "5XB", "5i", "1e9", "0.1", "nan", "9" * 5000, True, 1.5, 0, -1, []],
)
def test_limits_that_are_none(given: Any) -> None:
    with pytest.raises(errors.UsageError, match="max_shard_size"):
        options.shard_limit(given)
