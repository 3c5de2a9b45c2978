"""What batches of reads take, from points that were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from benchmarks.ondemand_curve import Curve
from mfload import errors

BLOCKS, DEPTHS = (4096, 65536, 1 << 20), (1, 16, 128)


def points(engine: str = "io_uring", factor: float = 1.0) -> list[dict[str, Any]]:
    """A disk that takes 100 µs a read, 16 at once at most, and gives 40 GB/s at most."""
    made: list[dict[str, Any]] = []
    for block in BLOCKS:
        for depth in DEPTHS:
            speed = min(40.0, block * min(depth, 16) / 100e-6 / 1e9) * factor
            made.append({"engine": engine, "block": block, "depth": depth, "gb_per_s": speed})
    return made


def test_points_are_on_the_curve() -> None:
    curve = Curve(points())
    for point in points():
        nbytes = point["block"] * point["depth"]
        took = curve.seconds(point["depth"], nbytes)
        assert took == pytest.approx(nbytes / point["gb_per_s"] / 1e9)


def test_beyond_its_ends_and_between() -> None:
    curve = Curve(points())
    one = curve.seconds(1, 4096)
    assert curve.seconds(1, 100) == one  # As long as the shortest read.
    assert curve.seconds([0, 1], [0, 4096]).tolist() == [0, one]
    assert curve.seconds(1000, 1000 * 4096) == pytest.approx(1000 * 4096 / 0.6553e9, rel=1e-3)
    # A read of 64 MiB is 64 of 1 MiB for the engine.
    assert curve.seconds(1, 64 << 20) == curve.seconds(64, 64 << 20)
    assert curve.seconds(1, 64 << 20) < 32 * curve.seconds(1, 1 << 20)
    between = curve.seconds(1, 16384)
    assert between == pytest.approx(100e-6)  # Straight between logarithms.


@given(st.integers(1, 3000), st.integers(1, 3 << 20))
def test_more_takes_longer(reads: int, nbytes: int) -> None:
    curve = Curve(points())
    took = curve.seconds(reads, reads * nbytes)
    assert took > 0
    assert curve.seconds(reads + 128, (reads + 128) * nbytes) >= took * 0.999
    both = curve.seconds([reads, 1], [reads * nbytes, 4096])
    assert both.tolist() == [took, curve.seconds(1, 4096)]


def test_the_preferred_engine_counts() -> None:
    mixed = [*points("threads", 0.5), *points()]
    assert Curve(mixed).engine == "io_uring"
    assert Curve(mixed, "threads").engine == "threads"
    assert Curve(mixed, "threads").seconds(1, 1 << 20) == 2 * Curve(mixed).seconds(1, 1 << 20)
    assert Curve(mixed, "fast").engine == "io_uring"


def test_threads_that_were_not_measured_so_deep() -> None:
    """At most 32 of them read at once."""
    short = [point for point in points("threads") if point["depth"] < 128]
    curve = Curve(short)
    assert curve.seconds(128, 128 << 20) == pytest.approx((128 << 20) / 40e9)


def test_what_bench_wrote(tmp_path: Path) -> None:
    found = {"schema": 1, "points": points()}
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(found))
    nbytes = np.arange(1, 100) * 4096
    wanted = Curve(points()).seconds(7, nbytes).tolist()
    for each in (str(path), path, found, Curve(points())):
        assert Curve.of(each).seconds(7, nbytes).tolist() == wanted


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "[1]", "{}", '{"points": 3}', '{"points": []}', '{"points": [3]}',
     '{"points": [{"engine": "threads"}]}', "[" * 100_000],
)  # fmt: skip
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "curve.json"
    path.write_text(text)
    with pytest.raises(errors.UsageError) as met:
        Curve.of(path)
    assert met.value.file == str(path)
    assert "mfload bench --random" in str(met.value)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), "x", None, 1e9])
@pytest.mark.parametrize("field", ["block", "depth", "gb_per_s"])
def test_points_that_can_not_be(field: str, wrong: Any) -> None:
    if field != "gb_per_s" and wrong == 1e9:
        return
    with pytest.raises(errors.UsageError):
        Curve([*points(), {**points()[0], field: wrong}])


def test_a_hole_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="a hole") as met:
        Curve(points()[:-1])
    assert met.value.found == "no point for 1048576 bytes, 128 at once, of io_uring"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(errors.SourceNotFoundError):
        Curve.of(tmp_path / "nothing.json")
