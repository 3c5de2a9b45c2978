"""Where parts land in slots, the reads that bring them, and checkpoints that are refused."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import samples
from hypothesis import HealthCheck, given, settings, strategies as st

import mfload
from mfload import errors
from mfload.frameworks import base
from mfload.io import buffers, probes
from mfload.ondemand import store as stores
from mfload.ondemand.store import Slots, Store


def everything(_: str) -> bool:
    return True


def opened(path: Any, engine: Any = "direct", **more: Any) -> Store:
    return Store(path, everything, options=mfload.Options(engine=engine), **more)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_parts_land_whole_and_aligned(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any parts of any keys; no slot touches the next."""
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 3, 24, 64, 512, 640, 4096, 9001])))
    names = [f"t{n}" for n in range(len(lengths))]
    rng = np.random.default_rng(len(lengths))
    raw = {name: rng.bytes(n) for name, n in zip(names, lengths, strict=True)}
    path = tmp_path_factory.mktemp("parts") / "parts.safetensors"
    rows = [(name, "U8", (len(x),), x) for name, x in raw.items()]
    samples.save_raw(path, rows, data.draw(st.sampled_from([0, 8, 13, 40])))
    some = st.lists(st.sampled_from(names), unique=True) if names else st.just([])
    keys = data.draw(st.lists(some, min_size=1, max_size=5))
    align = data.draw(st.sampled_from([1, 8, 64]))
    with opened(path, data.draw(st.sampled_from(["direct", "pread"]))) as store:
        store.alignment = align
        infos = {info.name: info for info in store.tensors}
        slots = Slots(store, [[store.part(infos[name]) for name in each] for each in keys])
        [arena] = store.arenas([(len(keys), slots.nbytes)])
        arena[:] = 0xEE
        chosen = data.draw(st.lists(st.sampled_from(range(len(keys))), unique=True))
        addresses = arena.ctypes.data + slots.nbytes * np.array(chosen, np.int64)[:, None]
        reads, nbytes = slots.fill(np.array(chosen, np.int64), addresses)
        assert nbytes == sum(len(raw[name]) for key in chosen for name in keys[key])
        assert reads <= sum(len(keys[key]) for key in chosen)
        for key, row in enumerate(arena):
            if key not in chosen:
                assert (row == 0xEE).all()
                continue
            found = slots.arrays(key, row)
            assert {name: array.tobytes() for name, array in found.items()} == {
                name: raw[name] for name in keys[key]
            }
            for array in found.values():
                assert not array.size or array.ctypes.data % align == 0
                with pytest.raises(ValueError, match="read-only"):
                    array[:] = 0
        arena = row = found = array = None


def test_a_disk_whose_unit_is_larger_than_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads are rounded to it, and none reaches into the next slot."""
    monkeypatch.setattr(probes, "direct_alignment", lambda _: (512, 16384))
    rng = np.random.default_rng(0)
    rows = [(f"t{n}", "U8", (20_000,), rng.bytes(20_000)) for n in range(6)]
    path = samples.save_raw(tmp_path / "a.safetensors", rows, 8)
    with opened(path) as store:
        assert store.gather.unit == 16384
        slots = Slots(store, [[store.part(info)] for info in store.tensors])
        assert slots._nbytes.max() == 49152
        [arena] = store.arenas([(6, slots.nbytes)])
        for key in reversed(range(6)):
            slots.fill(np.array([key]), np.array([[arena[key].ctypes.data]]))
        for key in range(6):
            assert slots.arrays(key, arena[key])[f"t{key}"].tobytes() == rows[key][3]
        del arena


@pytest.mark.parametrize(("align", "moves"), [(8, 0), (64, 1)])
def test_neighbours_are_one_read(tmp_path: Path, align: int, moves: int) -> None:
    """And are moved at once, only if they lie where the framework can't use them."""
    rows = [(name, "U8", (6400,), bytes(6400)) for name in "abcd"]
    path = samples.save_raw(tmp_path / "a.safetensors", rows, 8)
    with opened(path) as store:
        store.alignment = align
        slots = Slots(store, [[store.part(info) for info in store.tensors if info.name != "c"]])
        [arena] = store.arenas([(1, slots.nbytes)])
        with (
            mock.patch.object(store.gather, "read", wraps=store.gather.read) as read,
            mock.patch.object(ctypes, "memmove", wraps=ctypes.memmove) as move,
        ):
            reads, nbytes = slots.fill(np.arange(1), np.array([[arena.ctypes.data]]))
        assert (reads, nbytes) == (2, 3 * 6400)
        assert len(read.call_args.args[0]) == 2
        assert move.call_count == 2 * moves
        del arena


def test_the_last_bytes_of_a_file(tmp_path: Path) -> None:
    """Direct reads are rounded up past the end, and what is missing before it is an error."""
    rows = [("a", "U8", (5000,), bytes(range(250)) * 20)]
    path = samples.save_raw(tmp_path / "a.safetensors", rows, 8)
    with opened(path) as store:
        slots = Slots(store, [[store.part(store.tensors[0])]])
        assert slots.load()[0]["a"].tobytes() == rows[0][3]
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
        with pytest.raises(errors.SourceChangedError) as caught:
            slots.load()
        gc.collect()
        assert buffers.live_bytes() == 0  # Though the error is kept.
        assert caught.value.file == str(path)


def test_rows(tmp_path: Path) -> None:
    rows = [
        ("f4", "F4", (3, 2, 3), bytes(range(9))),
        ("odd", "F4", (4, 3), bytes(6)),
        ("scalar", "F32", (), bytes(4)),
        ("none", "F32", (0, 7), b""),
    ]
    with opened(samples.save_raw(tmp_path / "a.safetensors", rows), "pread") as store:
        infos = {info.name: info for info in store.tensors}
        parts = store.rows(infos["f4"], "x")
        assert [(part.name, part.shape, part.nbytes) for part in parts] == [("x", (2, 3), 3)] * 3
        [arrays] = Slots(store, [[parts[1]]]).load()
        assert arrays["x"].tobytes() == bytes([3, 4, 5])
        assert store.rows(infos["none"]) == []
        for name in ("odd", "scalar"):
            with pytest.raises(errors.UnsupportedShapeError, match="row by row") as caught:
                store.rows(infos[name])
            assert caught.value.tensor == name


def test_arenas(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "a.safetensors", {"a": np.zeros(3)})
    with opened(path) as store:
        arenas = store.arenas([(3, 100), (0, 64), (2, 4096)])
        assert [each.shape for each in arenas] == [(3, 100), (0, 64), (2, 4096)]
        assert all(each.ctypes.data % 4096 == 0 for each in arenas if each.size)
        assert store.allocated == buffers.live_bytes() == 4096 + 2 * 4096
        report = store.report(7)
        assert (report.peak_bytes, report.budget_bytes) == (3 * 4096, 7)
        last = arenas[0]
        arenas.clear()
        assert buffers.live_bytes() == 3 * 4096
        del last
    assert buffers.live_bytes() == 0
    with opened(path) as store, pytest.raises(errors.MemoryLimitError):
        store.arenas([(1 << 40, 1 << 20)])


def test_sources_that_hold_nothing_are_not_opened(tmp_path: Path) -> None:
    """Of many shards, those whose tensors are wanted."""
    for n in range(3):
        samples.save(tmp_path / f"{n}.safetensors", {f"t{n}": np.full(5, n)})
    with Store(tmp_path, lambda name: name in ("t0", "t2")) as store:
        parts = [store.part(info) for info in store.tensors]
        assert [(part.name, part.source) for part in parts] == [("t0", 0), ("t2", 1)]
        assert len(store.gather._handles) == 2
        [arrays] = Slots(store, [parts]).load()
        assert {name: x[0] for name, x in arrays.items()} == {"t0": 0, "t2": 2}


def test_bytes_in_memory(tmp_path: Path) -> None:
    """What is no local file is read by threads."""
    path = samples.save(tmp_path / "a.safetensors", {"a": np.arange(7)})
    with Store(path.read_bytes(), everything) as store:
        assert store.gather.name == "threads"
        assert Slots(store, [[store.part(store.tensors[0])]]).load()[0]["a"].tolist() == list(
            range(7)
        )


class TestRefused:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return samples.save(tmp_path / "a.safetensors", {"a": np.zeros(3)})

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ({"options": mfload.Options(engine="mmap")}, "unknown engine"),
            ({"options": {"engine": "direct"}}, "must be an mfload.Options"),
            ({"framework": "jaxx"}, "unknown framework"),
            ({"gather": "uring"}, "no such gather engine"),
        ],
    )
    def test_arguments(self, path: Path, given: Any, says: str) -> None:
        with pytest.raises(errors.UsageError, match=says):
            Store(path, everything, **given)

    def test_a_framework_without_arrays_on_the_host(self, path: Path) -> None:
        adapter = base.Adapter()
        adapter.on_host, adapter.name = False, "gpu"
        with (
            mock.patch.object(stores.frameworks, "get", return_value=adapter),
            pytest.raises(errors.DeviceError, match="host memory"),
        ):
            Store(path, everything)

    def test_what_is_compressed(self, tmp_path: Path) -> None:
        """All of it is named; the rest of the checkpoint does not matter."""
        path = tmp_path / "a.npz"
        np.savez_compressed(path, a=np.zeros(900), b=np.zeros(900))
        with pytest.raises(errors.UsageError, match="mfload convert") as caught:
            Store(path, everything)
        assert caught.value.problems == ("'a'", "'b'")
        assert caught.value.file == str(path)
        with Store(path, lambda _: False) as store:
            assert len(store.tensors) == 0

    def test_an_unknown_dtype(self, tmp_path: Path) -> None:
        path = samples.save_raw(tmp_path / "a.safetensors", [("a", "F3", (4,), bytes(8))])
        with pytest.raises(errors.UnsupportedDtypeError) as caught:
            Store(path, everything)
        assert caught.value.tensor == "a"

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(errors.SourceNotFoundError):
            Store(tmp_path / "none.safetensors", everything)
