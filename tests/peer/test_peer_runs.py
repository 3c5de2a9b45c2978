"""Seeds of several runs are never mixed: by a URL, by a planner, by those that publish again.

`MFLOAD_SLOW=1` has the soak run for ten minutes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from seeding import publish

import mfload
from mfload import Options, PeerOptions, errors
from mfload.peer import source
from mfload.peer.planner_http import PlannerServer

SECONDS = 600.0 if os.environ.get("MFLOAD_SLOW") else 8.0
NAMES = [f"t{n}" for n in range(10)]


@pytest.fixture
def planner() -> Iterator[PlannerServer]:
    with PlannerServer() as made:
        yield made
    for each in mfload.seeds():
        each.close()


def _arrays(value: float, names: Any = NAMES) -> dict[str, Any]:
    return {name: np.full((40, 9), value) for name in names}


def _load(planner: PlannerServer, url: str = "peer:///m", **peer: Any) -> Any:
    how = Options(timeout=20, peer=PeerOptions(planner=planner.url, **peer))
    return mfload.load(url, "numpy", options=how)


def _value(found: Any, names: Any = NAMES) -> float:
    assert sorted(found) == sorted(names)
    values = {float(each) for array in found.values() for each in np.unique(array)}
    assert len(values) == 1, f"a mixture: {values}"
    return values.pop()


class TestAddresses:
    def test_two_runs(self) -> None:
        """Without a planner nothing says which is newer, whatever generations they claim."""
        one = mfload.publish(_arrays(1, NAMES[:5]), model="m", run="one", generation=7)
        two = mfload.publish(_arrays(2, NAMES[5:]), model="m", run="two")
        with one, two, pytest.raises(errors.CheckpointError, match="different runs") as raised:
            mfload.load(f"peer://{one.address},{two.address}/m", "numpy")
        for each in (one, two):
            assert f"{each.address}: run {each.run}" in str(raised.value)

    def test_two_processes_that_say_nothing(self) -> None:
        """Each is a run of its own."""
        code = (
            "import sys, numpy as np, mfload; "
            "s = mfload.publish({'x': np.ones(9)}, model='m'); "
            "print(s.address, flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-c", code]
        with (
            mfload.publish({"y": np.ones(3)}, model="m") as one,
            subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as other,
        ):
            assert other.stdout is not None
            address = other.stdout.readline().decode().strip()
            with pytest.raises(errors.CheckpointError, match=r"different runs[\s\S]*\(run=\)"):
                mfload.load(f"peer://{one.address},{address}/m", "numpy")
            other.communicate()

    def test_seeds_of_a_model_in_one_process_are_of_one_run(self) -> None:
        """As long as one of them is open; then another begins."""
        with mfload.publish(_arrays(1, NAMES[:5]), model="m") as one:
            with mfload.publish(_arrays(1, NAMES[5:]), model="m") as two:
                assert _value(mfload.load(f"peer://{one.address},{two.address}/m", "numpy")) == 1
            with mfload.publish(_arrays(1), model="another") as other:
                assert other.run != one.run
        with mfload.publish(_arrays(1), model="m") as again:
            assert again.run != one.run

    def test_parts_need_a_run(self) -> None:
        """Without a group that could agree."""
        with pytest.raises(errors.UsageError, match="part= needs run="):
            mfload.publish(_arrays(1), model="m", part=(0, 2))

    @pytest.mark.parametrize("run", ["", "a b", "x" * 65, "a/b", 7, b"x"])
    def test_names_of_runs(self, run: Any) -> None:
        with pytest.raises(errors.UsageError, match="run is not a valid name"):
            mfload.publish(_arrays(1), model="m", run=run)

    def test_files_with_the_same_bytes_are_one_run(self, tmp_path: Path) -> None:
        """In whatever process; other bytes are another run, and so is a name."""
        runs: list[str] = []
        for n, value in enumerate((1.0, 1.0, 2.0, 1.0)):
            save_file(_arrays(value), tmp_path / f"{n}.safetensors")
            command = [sys.executable, "-m", "mfload", "serve", tmp_path / f"{n}.safetensors"]
            command += ["--model", "m", *(["--run", "named"] if n == 3 else [])]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as served:
                assert served.stdout is not None
                url = served.stdout.readline().decode().strip()
                runs.append(_run(url))
                served.terminate()
        assert runs[0] == runs[1] != runs[2]
        assert runs[3] == "named"


def _run(url: str) -> str:
    client, manifest = source.ask(url.split("/")[2], PeerOptions())
    client.close()
    return manifest.run


class TestReplicas:
    def test_other_bytes_of_a_box(self) -> None:
        """Of one run and generation: small tensors, large ones, and edges of blocks."""
        random = np.random.default_rng(0)
        arrays = {f"t{n}": random.integers(0, 9, size, np.uint8) for n, size in
                  enumerate([3, 70_000, 262_144, 900_001, 5, 0])}  # fmt: skip
        arrays["alone"] = random.integers(0, 9, 100, np.uint8)
        for name in arrays:
            others = {other: array.copy() for other, array in reversed(arrays.items())}
            if not arrays[name].size:
                continue
            others[name][-1] ^= 1
            for theirs in ({key: others[key] for key in arrays}, {name: others[name]}):
                with publish(arrays) as one, publish(theirs) as two:
                    url = f"peer://{one.address},{two.address}/{one.model}"
                    # Alone, a large one lies on other blocks.
                    if name not in ("t2", "t3") or len(theirs) > 1:
                        with pytest.raises(errors.CheckpointError, match="different bytes") as e:
                            mfload.load(url, "numpy")
                        assert f"{name}: peer://{two.address} differs from" in str(e.value)

    @pytest.mark.parametrize("seed", range(20))
    def test_the_same_bytes_in_another_order(self, seed: int) -> None:
        """Are never taken for other ones."""
        random = np.random.default_rng(seed)
        arrays = {
            f"t{n}": random.integers(0, 9, random.choice([0, 7, 9000, 300_000]), np.uint8)
            for n in range(12)
        }
        arrays["block"] = random.integers(0, 9, 1 << 20, np.uint8)
        names = random.permutation(list(arrays))
        with publish(arrays) as one, publish({str(name): arrays[name] for name in names}) as two:
            found = mfload.load(f"peer://{one.address},{two.address}/{one.model}", "numpy")
        for name, each in arrays.items():
            np.testing.assert_array_equal(found[name], each)


class TestPlanner:
    def test_a_restarted_trainer(self, planner: PlannerServer) -> None:
        """Begins at generation 0 and goes before a reader that published the old run's third."""
        given: dict[str, Any] = {"model": "m", "peer": mfload.PeerOptions(planner=planner.url)}
        old = mfload.publish(_arrays(1), **given, generation=3)
        assert _value(_load(planner, publish=True)) == 1
        (again,) = (each for each in mfload.seeds() if each is not old)
        assert (again.run, again.generation) == (old.run, 3)
        old.close()
        new = mfload.publish(_arrays(2), **given)
        for _ in range(5):
            assert _value(_load(planner)) == 2
        new.close()
        assert _value(_load(planner)) == 1

    def test_a_rank_of_the_old_run(self, planner: PlannerServer) -> None:
        """Is not completed by the new run's others."""
        given: dict[str, Any] = {"model": "m", "peer": mfload.PeerOptions(planner=planner.url)}
        halves = NAMES[:5], NAMES[5:]
        old = [
            mfload.publish(_arrays(1, names), **given, part=(n, 2), run="old")
            for n, names in enumerate(halves)
        ]
        old[0].close()
        new = [mfload.publish(_arrays(2, halves[0]), **given, part=(0, 2), run="new")]
        for _ in range(5):
            with pytest.raises(errors.SourceNotFoundError, match="no seed has the model"):
                _load(planner)
        new.append(mfload.publish(_arrays(2, halves[1]), **given, part=(1, 2), run="new"))
        for _ in range(20):
            assert _value(_load(planner)) == 2

    def test_a_huge_generation(self, planner: PlannerServer) -> None:
        """Ends with its run, though it was published again."""
        given: dict[str, Any] = {"model": "m", "peer": mfload.PeerOptions(planner=planner.url)}
        with mfload.publish(_arrays(1), **given, generation=(1 << 62) - 1) as huge:
            _load(planner, publish=True)
            with pytest.raises(errors.UsageError, match="generation"):
                huge.update(_arrays(3))
        with mfload.publish(_arrays(2), **given):
            assert _value(_load(planner)) == 2

    def test_two_loads_at_once(self, planner: PlannerServer) -> None:
        """Each publishes what it read: one URL names seeds of two runs, one after the other."""
        given: dict[str, Any] = {"model": "m", "peer": mfload.PeerOptions(planner=planner.url)}
        failed: list[BaseException] = []

        def reader() -> None:
            try:
                for _ in range(20):
                    _load(planner, publish=True)
            except BaseException as error:
                failed.append(error)

        seed = mfload.publish(_arrays(0), **given, run="r")
        threads = [threading.Thread(target=reader) for _ in range(3)]
        for each in threads:
            each.start()
        n = 0
        while any(each.is_alive() for each in threads):
            n += 1
            seed.update(_arrays(n))
            time.sleep(0.01)
        assert [str(each) for each in failed if not isinstance(each, errors.SourceError)] == []
        for each in mfload.seeds():
            found = mfload.load(f"peer://{each.address}/m", "numpy")
            assert _value(found) == each.generation


GROUP = """
import sys
rank, port, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if kind == "torch":
    import torch.distributed as dist
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
else:
    import jax
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
import numpy as np, mfload, json
runs = []
for part in ((rank, 2), (0, 1), (rank, 2)):
    with mfload.publish({"x": np.ones(3)}, model="m", part=part) as seed:
        runs.append(seed.run)
print(json.dumps(runs), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_processes_of_a_group_share_a_run(kind: str) -> None:
    """Of each model that they publish; what they publish anew is of another."""
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    made = [
        subprocess.Popen([sys.executable, "-c", GROUP, str(rank), str(port), kind], **given)
        for rank in range(2)
    ]
    try:
        said = [json.loads(each.stdout.readline()) for each in made]  # pyright: ignore
    finally:
        for each in made:
            each.stdin.close()  # pyright: ignore
        for each in made:
            each.wait(60)
            each.stdout.close()  # pyright: ignore
    assert said[0] == said[1]
    assert len({*said[0]}) == 3


def test_the_content_of_files(tmp_path: Path) -> None:
    """A load that fell back to files is of the run of all that have the same bytes."""
    save_file(_arrays(1), tmp_path / "m.safetensors")
    how = Options(peer=PeerOptions(publish=True))
    for _ in range(2):
        given: dict[str, Any] = {"fallback": tmp_path / "m.safetensors", "options": how}
        mfload.load("peer://127.0.0.1:9/m", "numpy", **given)
    one, two = mfload.seeds()
    assert (one.run, one.generation) == (two.run, 0)
    for each in (one, two):
        each.close()


TRAINER = """
import sys, time, numpy as np, mfload
run, planner, rank = float(sys.argv[1]), sys.argv[2], int(sys.argv[3])
names = [f"t{n}" for n in range(10)][rank::2]
arrays = lambda value: {name: np.full((300, 99), value) for name in names}
with mfload.publish(
    arrays(run), model="m", planner=planner, part=(rank, 2), run=f"run-{run}", max_readers=50
) as seed:
    print(seed.address, flush=True)
    for line in sys.stdin:
        seed.update(arrays(run + seed.generation / 1000 + 0.001))
"""


class _Trainer:
    """Both ranks of a run whose weights are its number, and its updates a thousandth each."""

    def __init__(self, number: int, planner: str) -> None:
        given: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        code = [sys.executable, "-c", TRAINER, str(number), planner]
        self.number = number
        self.ranks = [subprocess.Popen([*code, str(rank)], **given) for rank in range(2)]
        self.addresses = [each.stdout.readline().strip() for each in self.ranks]  # pyright: ignore

    def update(self) -> None:
        for each in self.ranks:
            each.stdin.write("update\n")  # pyright: ignore
            each.stdin.flush()  # pyright: ignore

    def end(self, killed: bool, rank: int | None = None) -> None:
        for each in self.ranks if rank is None else [self.ranks[rank]]:
            if killed:
                each.kill()
            if not each.stdin.closed:  # pyright: ignore
                each.stdin.close()  # pyright: ignore
            each.wait(30)
            each.stdout.close()  # pyright: ignore


@pytest.mark.timeout(900)
def test_soak(planner: PlannerServer) -> None:
    """Runs are restarted, updated and killed, readers publish again: each load is of one run.

    What a reader gets is whole and of one generation, and of the newest run from when both of
    its ranks are known until it ends.
    """
    random = np.random.default_rng(7)
    until = time.monotonic() + SECONDS
    values, misses, stale, wrong = [], [], [], []
    newest = [0]

    def reader(number: int) -> None:
        kept: list[Any] = []
        while time.monotonic() < until:
            least, known = newest[0], set(mfload.seeds())
            try:
                found = _load(planner, publish=not number)
                values.append(value := _value(found))
                if value < least == newest[0]:  # It was there all the time.
                    stale.append(f"run {value} while {least} was there")
            except (errors.SourceError, errors.FormatError) as error:
                misses.append(type(error).__name__)
            except BaseException as error:
                wrong.append(repr(error))
            if not number:
                kept += [each for each in mfload.seeds() if each not in known]
                while len(kept) > 3:
                    kept.pop(0).close()
                time.sleep(0.2)

    threads = [threading.Thread(target=reader, args=(number,)) for number in range(3)]
    number = 1
    trainers = [_Trainer(number, planner.url)]
    for each in threads:
        each.start()
    try:
        while time.monotonic() < until:
            newest[0] = number  # Both ranks have registered.
            for _ in range(random.integers(1, 6)):
                trainers[-1].update()
                time.sleep(random.random() / 3)
            url = f"peer://{','.join(trainers[-1].addresses)}/m"
            if len(trainers) > 1:  # A rank of each run.
                mixed = f"peer://{trainers[-2].addresses[0]},{trainers[-1].addresses[1]}/m"
                with pytest.raises((errors.CheckpointError, errors.SourceError)):
                    mfload.load(mixed, "numpy")
                with pytest.raises((errors.CheckpointError, errors.SourceError)):
                    mfload.load(f"{url[:-2]},{trainers[-2].addresses[0]}/m", "numpy")
                trainers.pop(0).end(killed=bool(random.integers(2)))
            if random.integers(2):  # One of the old run's ranks stays.
                newest[0] = 0
                trainers[-1].end(killed=bool(random.integers(2)), rank=1)
            number += 1
            trainers.append(_Trainer(number, planner.url))
    finally:
        for each in threads:
            each.join()
        for each in trainers:
            each.end(killed=False)
    print(f"{len(values)} loads of {number} runs, {len(misses)} missed, stale: {stale}")
    assert wrong == stale == []
    assert len(values) > SECONDS
    assert len({int(each) for each in values}) > 1
