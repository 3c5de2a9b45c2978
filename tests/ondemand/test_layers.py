"""A stream of layers: order, what stays, reading ahead, arguments and faults."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from conformance.ondemand import least
from hypothesis import HealthCheck, given, settings, strategies as st

import mfload
from mfload import errors
from mfload.io import gather
from mfload.ondemand import LayerStream, policies

COUNT = 8


def weights(value: int = 0) -> dict[str, Any]:
    made: dict[str, Any] = {"embed": np.full(700, -1, np.float32), "head": np.full(9, -2, np.int8)}
    for layer in range(COUNT):
        made[f"model.layers.{layer}.w"] = np.full((64, 65), value + layer, np.float32)
        made[f"model.layers.{layer}.norm"] = np.full(64, value - layer, np.float32)
    return made


LAYER = 64 * 65 * 4 + 64 * 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "layers.safetensors", weights())


def check(stream: LayerStream) -> None:
    """A pass through all layers gives what they hold."""
    seen: list[int] = []
    for layer, tensors in stream:
        seen.append(layer)
        names = {f"model.layers.{layer}.{name}" for name in ("w", "norm")}
        assert tensors.keys() == names
        assert (tensors[f"model.layers.{layer}.w"] == layer).all()
        assert (tensors[f"model.layers.{layer}.norm"] == -layer).all()
    assert seen == [*stream.layers]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    slots=st.floats(0, COUNT), ahead=st.integers(0, COUNT + 1), passes=st.integers(1, 3),
    direct=st.booleans(), waits=st.booleans(),
)  # fmt: skip
def test_any_budget(
    tmp_path_factory: pytest.TempPathFactory,
    slots: float, ahead: int, passes: int, direct: bool, waits: bool,
) -> None:  # fmt: skip
    path = samples.save(tmp_path_factory.mktemp("any") / "any.safetensors", weights())
    how: dict[str, Any] = {
        "ahead": ahead,
        "options": mfload.Options(engine="direct" if direct else "pread"),
    }
    budget = least(lambda budget: LayerStream(path, budget=budget, **how)) + int(slots * LAYER)
    with LayerStream(path, budget=budget, **how) as stream:
        for _ in range(passes):
            check(stream)
            if waits:
                time.sleep(0.002)
        assert (stream.resident["embed"] == -1).all()
        assert (stream.resident["head"] == -2).all()
    report = stream.report()
    assert report.requests == report.hits + report.misses == passes * COUNT
    assert report.peak_bytes <= budget
    assert report.read_bytes == (report.misses + report.prefetched) * LAYER


@pytest.mark.parametrize("ahead", [0, 1, 3, 20])
def test_the_default_budget_holds_what_computes_and_what_is_read_ahead(
    path: Path, ahead: int
) -> None:
    with LayerStream(path, ahead=ahead) as stream:
        check(stream)
        check(stream)
        report = stream.report()
    most = (min(COUNT, max(2, ahead + 1)) + 1) * LAYER + 700 * 4
    assert report.peak_bytes <= report.budget_bytes <= most
    with pytest.raises(errors.MemoryLimitError):
        LayerStream(path, ahead=ahead, budget=report.budget_bytes - 4096)


def test_the_next_layer_is_read_meanwhile(path: Path) -> None:
    """It arrives before it is asked for; the first of the next pass, too."""
    budget = least(lambda budget: LayerStream(path, budget=budget))
    with LayerStream(path, budget=budget) as stream:
        cache = stream._pools._pools[0].cache
        assert cache.capacity == 2
        for _ in range(2):
            for layer, _ in stream:
                end = time.monotonic() + 10
                while (slot := cache.slot_of[(layer + 1) % COUNT]) < 0 or cache._busy[slot]:
                    assert time.monotonic() < end
                    time.sleep(0.001)
    report = stream.report()
    assert (report.misses, report.hits) == (1, 2 * COUNT - 1)
    assert report.prefetched == 2 * COUNT


def test_layers_that_fit_stay(path: Path) -> None:
    """Of a model for which five slots are there, at least two layers are never read again."""
    with LayerStream(path, budget=5 * (LAYER + 256) + 4096) as stream:
        assert stream._pools._pools[0].cache.capacity == 5
        check(stream)
        time.sleep(0.05)
        before = stream.report()
        for _ in range(10):
            check(stream)
        report = stream.report()
    read = report.misses + report.prefetched - before.misses - before.prefetched
    assert read <= 10 * (COUNT - 2)


def test_a_pass_that_is_left_early(path: Path) -> None:
    """Another begins at the first layer."""
    with LayerStream(path, budget="100KB") as stream:
        for layer, _ in stream:
            if layer == 3:
                break
        check(stream)
        one, other = iter(stream), iter(stream)
        assert [next(one)[0], next(other)[0], next(one)[0], next(other)[0]] == [0, 0, 1, 1]
        del one, other


def test_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    """As in Qwen3-Next: they are others than the model's, and stay."""
    made = {
        f"{stem}layers.{n}.w": np.full(64, n)
        for stem, n in (("model.", 0), ("model.", 1), ("mtp.", 0))
    }
    with LayerStream(samples.save(tmp_path / "a.safetensors", made)) as stream:
        assert stream.layers == (0, 1)
        assert [*stream.resident] == ["mtp.layers.0.w"]
        for layer, tensors in stream:
            assert [*tensors] == [f"model.layers.{layer}.w"]


def test_what_stays(path: Path) -> None:
    """What the user names, also of layers; nothing else that is of no layer."""
    with LayerStream(path, budget="200KB", resident=r"embed|\.norm$") as stream:
        assert stream.resident.keys() == {
            "embed",
            *(f"model.layers.{n}.norm" for n in range(COUNT)),
        }
        for layer, tensors in stream:
            assert tensors.keys() == {f"model.layers.{layer}.w"}
            assert (stream.resident[f"model.layers.{layer}.norm"] == -layer).all()
        with pytest.raises(TypeError):
            stream.resident["x"] = 0  # pyright: ignore[reportIndexIssue]
        kept = stream.resident["embed"]
    assert (kept == -1).all()
    with LayerStream(path, budget="200KB", resident="nothing") as stream:
        assert stream.resident == {}
        check(stream)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pattern": "("}, "malformed regular expression in pattern="),
        ({"pattern": "layers"}, "no group"),
        ({"pattern": r"(model)"}, "something else"),
        ({"resident": "("}, "malformed regular expression in resident="),
        ({"ahead": -1}, "ahead must be 0 or more"),
        ({"ahead": "x"}, "ahead is not a size"),
        ({"budget": "much"}, "budget is not a size"),
    ],
)
def test_arguments(path: Path, given: Any, says: str) -> None:
    with pytest.raises(errors.UsageError, match=says):
        LayerStream(path, **given)


def test_no_layer(path: Path) -> None:
    with pytest.raises(errors.TensorNotFoundError, match="no name is one of a layer"):
        LayerStream(path, r"blocks\.(\d)")


def test_a_closed_stream(path: Path) -> None:
    stream = LayerStream(path, budget="100KB")
    stream.close()
    with pytest.raises(errors.UsageError, match="closed"):
        next(iter(stream))
    stream.close()


@pytest.mark.parametrize("engine", ["direct", "pread"])
def test_the_file_changes_between_passes(path: Path, engine: Any) -> None:
    with LayerStream(path, budget="100KB", options=mfload.Options(engine=engine)) as stream:
        check(stream)
        os.replace(samples.save(path.with_name("other"), weights(5)), path)
        with pytest.raises(errors.SourceChangedError) as caught:
            check(stream)
        assert caught.value.file == str(path)
    del caught


def test_a_read_ahead_that_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is tried again when the layer is asked for."""
    with LayerStream(path, budget="70KB", gather="io_uring") as stream:
        drive, failing = gather._drive, [True]

        def broken(*given: Any) -> Any:
            results = drive(*given)
            if failing and threading.current_thread().name == "mfload read ahead":
                results[failing.pop() - 1] = -errno.EIO
            return results

        monkeypatch.setattr(gather, "_drive", broken)
        for _ in stream:
            time.sleep(0.01)
        assert not failing
        check(stream)
        assert stream.report().misses >= 2


def test_resident_tensors_that_can_not_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that is kept keeps no memory."""

    def broken(*_: Any) -> Any:
        raise errors.ReadError("the disk is gone", file=str(path))

    monkeypatch.setattr(gather.Gather, "read", broken)
    with pytest.raises(errors.ReadError) as caught:
        LayerStream(path)
    gc.collect()
    assert mfload.live_bytes() == 0
    del caught


def test_layers_of_two_sizes(tmp_path: Path) -> None:
    """Each size has its slots: small layers take no large ones."""
    made = {f"layers.{n}.w": np.full(1000 if n < 3 else 50_000, n, np.float32) for n in range(9)}
    path = samples.save(tmp_path / "a.safetensors", made)
    with LayerStream(path, budget=3 * 200_000 + 3 * 4096 + 2 * 4096) as stream:
        for _ in range(3):
            for layer, tensors in stream:
                assert (tensors[f"layers.{layer}.w"] == layer).all()
        capacities = [pool.cache.capacity for pool in stream._pools._pools]
        assert sorted(capacities) == [2, 3] or sorted(capacities) == [3, 3]


def test_layers_that_all_have_another_size(tmp_path: Path) -> None:
    """They share slots of the largest: what fits into memory is two of them, and not each once."""
    sizes = [*range(5_000, 55_000, 5_000)]
    made = {f"layers.{n}.w": np.full(size, n, np.float32) for n, size in enumerate(sizes)}
    path = samples.save(tmp_path / "a.safetensors", made)
    for engine in ("direct", "pread"):
        how: dict[str, Any] = {"options": mfload.Options(engine=engine)}
        budget = least(lambda budget, how=how: LayerStream(path, budget=budget, **how))
        assert budget <= 2 * (4 * sizes[-1] + 8192)
        for more in (0, 300_000, 2_000_000):
            with LayerStream(path, budget=budget + more, **how) as stream:
                for _ in range(3):
                    for layer, tensors in stream:
                        assert (tensors[f"layers.{layer}.w"] == layer).all()
                assert stream.report().peak_bytes <= budget + more


def test_the_policy() -> None:
    """What is needed last leaves first, whatever was read ahead."""
    cyclic = policies.Cyclic(6, 3)
    cyclic.use(np.array([2]))
    assert cyclic.victims(np.array([0, 1, 3, 4]), 2).tolist() in ([1, 0], [0, 1])


EXIT = """
    import sys, time
    import mfload
    options = mfload.Options(engine=sys.argv[2])
    stream = mfload.ondemand.LayerStream(sys.argv[1], budget="100KB", options=options)
    end = time.monotonic() + float(sys.argv[3])
    while time.monotonic() < end:
        for _ in stream:
            pass
    layers = iter(stream)
    kept = next(layers)
"""


@pytest.mark.parametrize("engine", ["direct", "pread"])
def test_the_end_of_the_program(path: Path, engine: str) -> None:
    """In the middle of a pass, while the next layer is read."""
    for wait in ("0", "0.01", "0.05"):
        found = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(EXIT), str(path), engine, wait],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork(path: Path) -> None:
    with LayerStream(path, budget="100KB") as stream:
        layers = iter(stream)
        _, tensors = next(layers)
        if not (child := os.fork()):
            code = 1
            try:
                assert (tensors["model.layers.0.w"] == 0).all()
                assert (stream.resident["embed"] == -1).all()
                next(layers)
            except errors.UsageError as error:
                code = 0 if "made before a fork" in str(error) else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert next(layers)[0] == 1
        del layers
