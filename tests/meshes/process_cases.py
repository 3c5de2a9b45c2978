"""What each process of a load does in a test (see `launching`).

    python process_cases.py RANK COUNT PORT DIRECTORY CASE…

Writes a line of JSON for each case to `DIRECTORY/said.RANK`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import safetensors.numpy
import world
from calls import as_options
from conformance import mesh_backend
from jax.sharding import Mesh, PartitionSpec as P
from world import at_swap, io_error, kill, press, signalled as signalled_world

import mfload
from mfload import errors
from mfload.formats import checkpoint
from mfload.io import buffers
from mfload.mesh import agree, link, load as mesh_load, redistribute
from mfload.mesh.jax_backend import JaxBackend

SPECS: dict[str, Any] = {
    "rows": P(("a", "b"), None),
    "columns": P(None, ("a", "b")),
    "grid": P("a", "b"),
    "across": P("b", "a"),
    "partly": P("a", None),
    "replicated": P(),
}
MANY_ROUNDS = 4 << 20  # Overhead so small that the exchange takes many.
EXPECTED = ("read_bytes", "exchanged_bytes", "over_read_bytes", "peak_bytes")


class World(world.World):
    """A process of JAX."""

    def __init__(self, rank: int, count: int, directory: Path) -> None:
        super().__init__(rank, count, directory)
        devices = np.array(jax.devices()).reshape(count, -1)
        self.mesh = Mesh(devices, ("a", "b"))

    def load(self, spec: Any, path: Path | None = None, **options: Any) -> dict[str, Any]:
        """Loads with one spec for all tensors of two dims."""
        shardings = [("^t", spec)] if spec != P() else [("^t", P())]
        return mfload.load(
            path or self.model,
            framework="jax",
            mesh=self.mesh,
            shardings=shardings,
            **as_options(options),
        )

    def check(self, arrays: dict[str, Any]) -> None:
        """Compares every shard of this process with the file, bit by bit."""
        held: dict[str, Any] = {}
        for file in sorted(self.model.glob("*.safetensors")):
            held |= safetensors.numpy.load_file(file)
        assert set(arrays) == set(held)
        for name, array in arrays.items():
            assert array.shape == held[name].shape
            for shard in array.addressable_shards:
                mine = np.asarray(shard.data)
                assert mine.tobytes() == held[name][shard.index].tobytes(), name
        del arrays


def values(world: World, name: str, exchange: str, **options: Any) -> dict[str, Any]:
    report = mfload.Report()
    with world.counted():
        arrays = world.load(
            SPECS[name], exchange=exchange, engine="pread", report=report, **options
        )
    world.check(arrays)
    arrays.clear()
    return {each: getattr(report, each) for each in EXPECTED} | {
        "counted": world.read,
        "notes": report.notes,
        "stages": report.stages,
    }


def compressed(world: World, name: str, exchange: str, overhead: str = "") -> dict[str, Any]:
    """Compares this process's shards of a compressed checkpoint with what was saved."""
    report, held = mfload.Report(), safetensors.numpy.load_file(world.directory / "held")
    with world.counted():
        arrays = mfload.load(
            world.directory / "compressed",
            framework="jax",
            mesh=world.mesh,
            shardings=[("^t", SPECS[name])],
            report=report,
            options=mfload.Options(
                exchange=exchange,  # type: ignore[arg-type]
                max_host_overhead=int(overhead) if overhead else None,
            ),
        )
    assert set(arrays) == set(held)
    for key, array in arrays.items():
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == held[key][shard.index].tobytes(), key
    del array, shard
    arrays.clear()
    return {"counted": world.read, "read_bytes": report.read_bytes, "notes": report.notes}


def damaged(world: World) -> None:
    path = world.own()
    if world.rank == 1:
        with (path / "model-00002-of-00002.safetensors").open("r+b") as file:
            file.seek(9)
            file.write(b"!!!!")
    world.load(P("a"), path)


def missing(world: World) -> None:
    path = world.own()
    if world.rank == 1:
        (path / "model-00002-of-00002.safetensors").unlink()
    world.load(P("a"), path)


def different(world: World) -> None:
    path = world.own()
    if world.rank == 1:
        file = path / "model-00001-of-00002.safetensors"
        arrays = safetensors.numpy.load_file(file)
        name = next(iter(arrays))
        safetensors.numpy.save_file(arrays | {name: arrays[name][:-8]}, file)
    with no_collectives():
        world.load(P("a"), path, exchange="once")


@contextlib.contextmanager
def no_collectives() -> Generator[None]:
    with mock.patch.object(link.Link, "start", None):
        yield


def disk(world: World, exchange: str, after: int) -> None:
    with world.failing(after, io_error):
        world.load(SPECS["columns"], exchange=exchange, engine="pread")


def shrinks(world: World) -> None:
    path = world.own()

    def cut() -> None:
        os.truncate(path / "model-00001-of-00002.safetensors", 4000)

    with world.failing(1 << 20, cut):
        world.load(SPECS["columns"], path, exchange="once", engine="pread")


def other_arguments(world: World) -> None:
    world.load(P("a") if world.rank else P("b"))


def other_exchange(world: World) -> None:
    world.load(P("a"), exchange="once" if world.rank else "never")


def silly(world: World) -> None:
    world.load(P("a"), dtype="nothing" if world.rank else None)


def alone(world: World) -> None:
    """Process 0 loads, the other does not come in time; then both go on."""
    if world.rank == 0:
        try:
            world.load(P("a"), timeout=1.0)
        except errors.LoadTimeoutError:
            (world.directory / "gave-up").touch()
            raise
    while not (world.directory / "gave-up").exists():
        time.sleep(0.05)
    world.load(P("a"), timeout=10.0)


def interrupted(world: World) -> None:
    """Ctrl-C in process 1, in the middle of an exchange."""
    with at_swap(world, 1, press):
        world.load(SPECS["columns"], exchange="once", max_host_overhead=MANY_ROUNDS)


def signalled(world: World, times: str) -> None:
    columns = SPECS["columns"]
    options: dict[str, Any] = {"exchange": "once", "max_host_overhead": MANY_ROUNDS}
    load = lambda: world.load(columns, **options)  # noqa: E731
    signalled_world(world, load, lambda: world.check(load()), times)


def overtaken(world: World) -> dict[str, Any]:
    """Process 1 comes to a round late, after the other gave up; both go on to an orderly exit."""
    timeout, said, pauses = 3.0 if world.rank == 0 else 30.0, "", iter([6.0])
    try:
        with world.failing(300_000, lambda: time.sleep(next(pauses, 0.0))):
            world.load(
                SPECS["columns"],
                exchange="once",
                engine="pread",
                timeout=timeout,
                max_host_overhead=MANY_ROUNDS,
            )
    except errors.MfloadError as error:
        said = f"{type(error).__name__}: {error}"
    world.meet("overtaken")  # The other is here as well: what hangs now hangs to the end.
    swaps = [each for each in threading.enumerate() if each.name == "mfload-swap"]
    for each in swaps:
        each.join(1)
    return {"said": said, "swapping": sum(each.is_alive() for each in swaps)}


def killed_before(world: World) -> None:
    world.load(P("a"))
    if world.rank == 1:
        kill()
    world.load(P("a"))


def killed_reading(world: World) -> None:
    with world.failing(1 << 20, kill):
        world.load(SPECS["columns"], exchange="never", engine="pread")


def killed_exchanging(world: World) -> None:
    with at_swap(world, 2, kill):
        world.load(SPECS["columns"], exchange="once", max_host_overhead=MANY_ROUNDS)


def silent(world: World) -> None:
    """Process 1 stops in the middle of an exchange, and is not dead."""
    with world.failing(1 << 20, lambda: time.sleep(3)):
        world.load(
            SPECS["columns"],
            exchange="once",
            engine="pread",
            timeout=1.5,
            max_host_overhead=MANY_ROUNDS,
        )


def alike(world: World) -> None:
    """Files of one name, size and header, with other numbers at the end of one."""
    path = world.own()
    if world.rank == 1:
        with (path / "model-00001-of-00002.safetensors").open("r+b") as file:
            file.seek(-1000, os.SEEK_END)
            file.write(b"\x01" * 1000)
    with no_collectives():
        world.load(P("a"), path, exchange="once")


WRONG: dict[str, dict[str, Any]] = {
    "options": {"options": {"threads": 1}},
    "unmatched": {"unmatched": "replicat"},
    "framework": {"framework": "jxx"},
    "torch": {"framework": "torch"},
    "device": {"device": "cpu:0"},
    "report": {"report": "mine"},
    "mesh": {"mesh": "oops"},
    "shardings": {"shardings": 3},
}


def wrong(world: World, what: str) -> None:
    """An argument of process 1 makes no sense."""
    right: dict[str, Any] = {"framework": "jax", "mesh": world.mesh, "shardings": P()}
    right["options"] = mfload.Options(timeout=20)
    mfload.load(world.model, **(right | (WRONG[what] if world.rank == 1 else {})))


def wrong_into(world: World, what: str) -> None:
    target = {"norm": jax.ShapeDtypeStruct((333,), np.float32)}
    given: dict[str, Any] = {"mesh": world.mesh, "strict": False}
    given["options"] = mfload.Options(timeout=20)
    if world.rank == 1:
        given |= {"report": {"report": 3}, "mesh": {"mesh": 3}}[what]
    mfload.load_into(target, world.model, **given)


def meshes(world: World) -> list[Mesh]:
    """A mesh of the devices of each process."""
    return [Mesh(row, ("b",)) for row in world.mesh.devices]


def joint(world: World, *ranks: int) -> Mesh:
    return Mesh(world.mesh.devices[list(ranks)], ("a", "b"))


def on(world: World, mesh: Any, **options: Any) -> None:
    arrays = mfload.load(
        world.model,
        framework="jax",
        mesh=mesh,
        shardings=P(),
        **as_options({"timeout": 20, **options}),
    )
    world.check(arrays)


def own_mesh(world: World) -> None:
    """Process 1 loads for itself, and ends; process 0 waits for it."""
    on(world, world.mesh)
    on(world, meshes(world)[1] if world.rank else world.mesh, timeout=None)


def all_lost(world: World) -> None:
    on(world, "oops", timeout=None)


def pair(world: World, number: str) -> None:
    done = world.directory / f"pair.{number}"
    if world.rank < 2:
        on(world, joint(world, 0, 1))
        done.touch()
    # Who waits for a process when it is lost hears of it, too.
    while not done.exists():
        time.sleep(0.05)


def crossing(world: World) -> None:
    """Groups that overlap, one process slow: nobody waits in vain."""
    for ranks in ((0, 1), (0, 2), (2, 3), (1, 3), (0, 1, 2, 3)):
        if world.rank in ranks:
            if (world.rank, ranks) == (1, (0, 1)):
                time.sleep(1.5)
            on(world, joint(world, *ranks))


def apart(world: World) -> None:
    """Meshes without common processes, at once."""
    for _ in range(5):
        on(world, joint(world, *((0, 1) if world.rank < 2 else (2, 3))))


def together(world: World, _number: str) -> None:
    on(world, world.mesh)


def given_up(world: World) -> dict[str, Any]:
    """Process 1 gives up between two rounds, so that process 0 begins one by itself."""
    world.load(SPECS["columns"], exchange="once")
    said = [""] * 2
    rounds: list[Any] = []

    def attempt(*given: Any) -> Any:
        rounds.append(given)
        if world.rank == 1 and len(rounds) == 4:
            time.sleep(0.3)
            raise KeyboardInterrupt
        return attempts(*given)

    attempts, redistribute._attempt = redistribute._attempt, attempt
    try:
        world.load(SPECS["columns"], exchange="once", max_host_overhead=MANY_ROUNDS)
    except (errors.ProcessError, KeyboardInterrupt) as error:
        said[0] = type(error).__name__
    finally:
        redistribute._attempt = attempts
    # Nothing says how far the collectives of the others have come since.
    report = mfload.Report()
    mesh_load.exchanged, choose = (
        lambda requests, options, *rest: choose(requests, options.replace(exchange="once"), *rest),
        mesh_load.exchanged,
    )
    try:
        world.check(world.load(SPECS["columns"], exchange="auto", report=report))
    finally:
        mesh_load.exchanged = choose
    try:
        world.load(SPECS["columns"], exchange="once")
    except errors.ProcessError as error:
        said[1] = str(error)
    return {"said": said, "notes": report.notes, "exchanged": report.exchanged_bytes}


def kept(world: World) -> dict[str, Any]:
    """What is held once an exchange has ended, whenever the next collection may be."""
    gc.collect()
    gc.disable()
    try:
        arrays = world.load(SPECS["columns"], exchange="once")
        held = buffers.live_bytes() - sum(
            shard.data.nbytes for each in arrays.values() for shard in each.addressable_shards
        )
    finally:
        gc.enable()
    return {"held": held}


def threads(world: World, order: str) -> dict[str, Any]:
    """Two threads load at once; on process 1 in another order, if that is asked for."""
    ended: dict[str, str] = {}

    def load(name: str) -> None:
        try:
            world.check(world.load(SPECS[name], exchange="once", timeout=20))
            ended[name] = "well"
        except errors.ProcessError as error:
            ended[name] = str(error)

    names = ["rows", "columns"]
    started = [threading.Thread(target=load, args=(name,)) for name in names]
    if order == "other" and world.rank == 1:
        started.reverse()
    for thread in started:
        thread.start()
        time.sleep(0.02)
    for thread in started:
        thread.join()
    return {"ended": ended}


def hasty(world: World, how: str) -> dict[str, Any]:
    """A thread of process 1 fails while another loads, slowly on process 0."""
    ended: dict[str, str] = {}
    true = checkpoint.choose
    options = {"unmatched": "no"} if how == "wrong" else {"timeout": 0.5}

    def choose(*given: Any, **more: Any) -> Any:
        checkpoint.choose = true  # The first thread alone is slow.
        time.sleep(0 if world.rank else 2)
        return true(*given, **more)

    def load(**given: Any) -> None:
        name = threading.current_thread().name
        try:
            world.check(world.load(SPECS["rows"], **{"timeout": 20, **given}))
            ended[name] = "well"
        except errors.MfloadError as error:
            ended[name] = f"{type(error).__name__}: {error}"

    asked, asks = threading.Event(), agree.ProcessGroup.__init__

    def ask(*given: Any) -> None:
        asks(*given)
        asked.set()

    first = threading.Thread(target=load, name="first")
    second = threading.Thread(target=load, name="second", kwargs=options if world.rank else {})
    checkpoint.choose, agree.ProcessGroup.__init__ = choose, ask
    try:
        first.start()
        assert asked.wait(60)  # In this order everywhere, or the first fails with the second.
        second.start()
        for thread in (first, second):
            thread.join()
    finally:
        checkpoint.choose, agree.ProcessGroup.__init__ = true, asks
    return ended


def obeyed(world: World, exchange: str) -> dict[str, Any]:
    """A cap that is too small, and then the one that the error asks for."""
    cap, errors_ = 1000, 0
    while errors_ < 5:
        try:
            world.check(world.load(SPECS["columns"], exchange=exchange, max_host_overhead=cap))
            break
        except errors.MfloadError as error:
            cap = max(map(int, re.findall(r"(\d+) bytes or more", str(error))))
            errors_ += 1
    return {"errors": errors_}


def without_a_store(world: World) -> dict[str, Any]:
    """JAX hides its store: processes agree by collectives, and errors reach all as well."""
    from mfload.frameworks import private_api

    true, said = private_api.jax_store, ""
    private_api.jax_store = lambda: None
    try:
        for exchange in ("never", "once"):
            world.check(world.load(SPECS["columns"], exchange=exchange))
        try:
            missing(world)
        except errors.MfloadError as error:
            said = f"{type(error).__name__}: {error}"
        world.check(world.load(SPECS["rows"], exchange="once"))
        try:
            other_arguments(world)
        except errors.MfloadError as error:
            said += f"; {error}"
        with contextlib.suppress(errors.MfloadError), world.failing(1 << 20, io_error):
            world.load(SPECS["columns"], exchange="once", engine="pread")
        world.check(world.load(SPECS["rows"], exchange="once"))
    finally:
        private_api.jax_store = true
    return {"said": said}


def first_killed(world: World) -> None:
    world.load(P())
    if world.rank == 0:
        kill()
    world.load(P())


def run(world: World, case: str) -> dict[str, Any]:
    head, *rest = case.split(":")
    if head == "values":
        options = {"max_host_overhead": int(rest[2])} if len(rest) > 2 else {}
        return values(world, rest[0], rest[1], **options)
    if head == "disk":
        disk(world, rest[0], int(rest[1]))
        return {}
    return globals()[head](world, *rest) or {}


def store(world: World) -> None:
    """What processes agree through does what that of every backend must."""
    if world.rank == 0:
        found = JaxBackend().store()
        assert found is not None
        mesh_backend.check_store(found)


def main() -> None:
    rank, count, port = map(int, sys.argv[1:4])
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)
    here = World(rank, count, Path(sys.argv[4]))
    failed = world.said(here, sys.argv[5:], lambda case: run(here, case))
    # A collective that was given up hangs at the exit of a process, too.
    if failed or "given_up" in sys.argv[5:]:
        world.leave(here)  # JAX waits at its exit for processes that are gone.


if __name__ == "__main__":
    main()
