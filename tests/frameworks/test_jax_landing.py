"""JAX on devices that tensors land on: its own memory and ours, alone and on several devices."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samples
from conformance import material
from conformance.device_memory import (
    DeviceMemoryConformance,
    Ground,
    allocation,
    disjoint,
    request,
    wrapped,
    write,
)
from conformance.material import Stored
from conformance.suite import no_gpu
from devices.fake import FakeDevice
from hypothesis import given, strategies as st
from leaks import left
from test_jax import JaxConformance

import mfload
from mfload import dtypes, errors, frameworks
from mfload.cuda import memory
from mfload.cuda.device import Device
from mfload.dlpack import View
from mfload.frameworks import base, jax_adapter, jax_memory, private_api
from mfload.frameworks.base import Adapter
from mfload.io import buffers
from mfload.mesh import jax_backend
from mfload.mesh.jax_backend import Spot


def cpu(number: int) -> Any:
    return jax.devices("cpu")[number]


def in_use(ground: Ground) -> int:
    """Bytes that XLA has given away; 0 if it does not say."""
    return (ground.adapter.place.memory_stats() or {}).get("bytes_in_use", 0)


class TestJaxLanding(DeviceMemoryConformance):
    look = JaxConformance()
    landings = ("mfload",)  # Buffers of XLA's: nothing is lent.

    def adapter(self, land: Device) -> Adapter:
        return jax_adapter.JaxAdapter(cpu(0), land)

    def test_all_that_lands_has_a_place(self, ground: Ground) -> None:
        assert self.lendable(ground) == set()
        rows = self.rows(ground, material.zoo())
        arrays = wrapped(ground, rows, own=False)
        self.check(rows, arrays)
        assert memory.live_bytes() == 0  # It is XLA's.
        alike = [n for n, row in enumerate(rows) if self.look.aliased(row.dtype)]
        disjoint((self.look.address(arrays[n]), len(rows[n].raw)) for n in alike)

    def test_lent_bytes_keep_the_array(self, ground: Ground) -> None:
        """A buffer lives as long as any view of it, and its slabs go with it."""
        rows = [material.stored(f"w{n}", "F32", (1 << 8, 64), n) for n in range(4)]
        used = in_use(ground)
        buffer = ground.adapter.allocator(0, [4 << 16])(4 << 16)
        gone = weakref.ref(buffer)
        write(ground.device, [(buffer, n << 16, row.raw) for n, row in enumerate(rows)])
        views = [View(row.name, dtypes.TABLE["F32"], row.shape, buffer, n << 16)
                 for n, row in enumerate(rows)]  # fmt: skip
        arrays = ground.adapter.wrap(views)
        del buffer, views
        last = arrays.pop()
        arrays.clear()
        churn = [ground.adapter.allocator(0, [4 << 16])(4 << 16) for _ in range(4)]
        for each in churn:
            write(ground.device, [(each, 0, bytes(4 << 16))])
        self.check(rows[3:], [last])
        assert gone() is not None
        del last, churn, each
        end = time.monotonic() + 5  # XLA lets go in threads of its own.
        while (gone() is not None or in_use(ground) > used) and time.monotonic() < end:
            gc.collect()
        assert gone() is None
        assert in_use(ground) <= used

    def test_programs_of_one_load_serve_the_next(
        self, ground: Ground, zoo: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(frameworks, "get", lambda *_: ground.adapter)
        told: list[Any] = []
        real = ground.adapter.allocator
        monkeypatch.setattr(
            ground.adapter, "allocator", lambda *given: told.append(given) or real(*given)
        )
        path, rows = zoo(8)
        self.look.assert_loaded(self.look.load(path), rows)
        known = jax_memory._slab_program.cache_info().misses
        first = told.copy()
        for allocator in ("framework", "mfload"):
            report = mfload.Report()
            self.look.load(path, allocator=allocator, report=report)
            assert not any("memory" in note for note in report.notes)
        assert jax_memory._slab_program.cache_info().misses == known
        assert first
        assert told == 2 * first  # Nothing for memory of ours.

    def test_it_has_to_fit_in_xlas_pool(
        self, ground: Ground, aligned: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever else the device has; only memory of ours lies beside the pool."""
        monkeypatch.setattr(frameworks, "get", lambda *_: ground.adapter)
        free = sum(len(row.raw) for row in aligned[1]) // 2
        monkeypatch.setattr(ground.adapter, "pool", lambda _: base.Pool(free, "set less aside"))
        for allocator in ("auto", "framework"):
            with pytest.raises(errors.MemoryLimitError, match=r"memory that jax has.*set less"):
                self.look.load(aligned[0], allocator=allocator)
        self.look.assert_loaded(self.look.load(aligned[0], allocator="mfload"), aligned[1])

    def test_64_bits_stay_exact(self, ground: Ground) -> None:
        assert not jax.config.jax_enable_x64
        numbers = np.array([2**40, -(2**63), 2**63 - 1], np.int64)
        row = Stored("n", "I64", (3,), numbers.tobytes())
        for own in (True, False):
            (array,) = wrapped(ground, [row], own=own)
            assert array.dtype == np.int64
            assert np.asarray(array).tolist() == numbers.tolist()

    def test_donated_views(self, ground: Ground) -> None:
        """What a view was donated for is right, whatever becomes of the slab and its other views.

        A GPU's memory is written over, which a CPU does for no view.
        """
        rows = [material.stored(f"w{n}", "I32", (128, 64), n) for n in range(4)]
        arrays = wrapped(ground, rows, own=False)
        address = self.look.address(arrays[1])
        negate = jax.jit(lambda x: -x, donate_argnums=0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            made = jax.block_until_ready(negate(arrays.pop(1)))
            if not isinstance(ground.device, FakeDevice):
                assert self.look.address(made) == address
            self.check([rows[0], *rows[2:]], arrays)
            del arrays
            gc.collect()
            nbytes = 4 * len(rows[0].raw)
            for slab in [ground.adapter.allocator(0, [nbytes])(nbytes) for _ in range(8)]:
                write(ground.device, [(slab, 0, bytes(nbytes))])
            expected = -np.frombuffer(rows[1].raw, np.int32).reshape(128, 64)
            assert (np.asarray(made) == expected).all()
            assert (np.asarray(negate(made)) == -expected).all()

    @pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
    def test_memory_of_ours_is_not_given_away(self, ground: Ground) -> None:
        row = material.stored("w", "I32", (128, 64))
        (array,) = wrapped(ground, [row])
        kept = array
        new = jax.jit(lambda x: -x, donate_argnums=0)(array)
        assert (np.asarray(new) == -np.frombuffer(row.raw, np.int32).reshape(128, 64)).all()
        del array, kept, new
        assert left() == 0

    def test_a_mesh_of_the_users_is_no_matter(self, ground: Ground) -> None:
        if not hasattr(jax, "set_mesh"):
            pytest.skip("this version has no jax.set_mesh")
        rows = material.aligned(("F32", "I64", "F4"))
        mesh = jax.sharding.Mesh(np.array(jax.devices()[-1:]), ("x",))
        with jax.set_mesh(mesh):
            arrays = [*wrapped(ground, rows), *wrapped(ground, rows[:2], own=False)]
        self.check(rows, arrays[:3])
        self.check(rows[:2], arrays[3:])

    @pytest.mark.parametrize(
        "what", ["disable_jit", "debug_nans", "check_tracer_leaks", "enable_x64"]
    )
    def test_what_users_set_is_no_matter(self, what: str) -> None:
        before = getattr(jax.config, f"jax_{what}")
        land = FakeDevice()
        jax_memory._slab_program.cache_clear()
        jax.config.update(f"jax_{what}", True)
        try:
            assert jax_memory.fillable(cpu(0), land)
            (array,) = wrapped(
                Ground(self.adapter(land), land), material.aligned(("I64",)), own=False
            )
            self.check(material.aligned(("I64",)), [array])
        finally:
            jax.config.update(f"jax_{what}", before)

    def test_transfer_guards_are_no_matter(self, tmp_path: Path) -> None:
        """A load or a save is a copy that the user asked for."""
        land, path = FakeDevice(), tmp_path / "m.safetensors"
        private_api.jax_capsule_importer.cache_clear()
        jax_memory._slab_program.cache_clear()
        numbers = jnp.arange(6, dtype=jnp.int32).astype(jnp.float4_e2m1fn)  # Copied to be saved.
        before = jax.config.jax_transfer_guard  # pyright: ignore
        jax.config.update("jax_transfer_guard", "disallow_explicit")
        try:
            assert jax_memory.fillable(cpu(0), land)
            take = jax_memory.importer(cpu(0), land)
            mfload.save({"w": numbers}, path)
            (loaded,) = mfload.load(path, "jax").values()
            # While a function is traced, too.
            jax.jit(lambda: mfload.save({"w": numbers}, path, overwrite=True) and None)()
        finally:
            jax.config.update("jax_transfer_guard", before)
        private_api.jax_capsule_importer.cache_clear()
        assert take.__name__ == jax_memory.importer(cpu(0), land).__name__
        assert np.array_equal(np.asarray(loaded), np.asarray(numbers))

    @pytest.mark.parametrize("allocator", ["auto", "framework", "mfload"])
    def test_while_a_function_is_traced(self, tmp_path: Path, allocator: Any) -> None:
        """A load gives arrays with numbers, which become constants there."""
        path = samples.save(tmp_path / "m.safetensors", {"w": np.arange(6.0, dtype="f4")})
        options, found = mfload.Options(allocator=allocator), list[Any]()

        def traced(given: Any) -> Any:
            found.append(mfload.load(path, "jax", options=options)["w"])
            return found[-1] * given

        assert np.asarray(jax.jit(traced)(2.0)).tolist() == [0, 2, 4, 6, 8, 10]
        assert jax.eval_shape(traced, 2.0).shape == (6,)
        assert all(np.asarray(each).tolist() == list(range(6)) for each in found)

    def test_what_is_said_of_device_memory(self) -> None:
        land = FakeDevice(place=(2, 1))
        for place, buffer in (((2, 1), land.allocate(64)), ((1, 3), buffers.allocate(64))):
            view = View("w", dtypes.TABLE["F32"], (4, 4), buffer, 0)
            given = jax_memory.OnDevice(view, cpu(3))
            assert given.__dlpack_device__() == place
            # Whatever stream JAX names, there is nothing to wait for.
            capsule = given.__dlpack__(stream=7)
            assert "dltensor" in repr(capsule)
            del capsule, given, view

    def test_the_number_of_the_device(self) -> None:
        land = FakeDevice(place=(1, 3))
        ground = Ground(jax_adapter.JaxAdapter(cpu(3), land), land)
        rows = material.aligned()
        for own in (True, False):
            arrays = wrapped(ground, rows, own=own)
            assert {array.device for array in arrays} == {cpu(3)}
            self.check(rows, arrays)
            del arrays
            assert left() == 0
        land.assert_clean()


def test_what_is_lent_on_a_cpu_is_given_away() -> None:
    lent = jax_adapter.lend([request(material.stored("w", "I32", (128, 64)))], [(cpu(0), None)])
    address, array = lent[0].array.unsafe_buffer_pointer(), lent.pop().array
    new = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert new.unsafe_buffer_pointer() == address
    assert array.is_deleted()


class TestNoRoom:
    def test_a_device_that_is_full(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def maker(*_: Any) -> Any:
            def make() -> Any:
                raise jax.errors.JaxRuntimeError(f"{said}: 7 GiB\nand more")

            return make

        monkeypatch.setattr(jax_memory, "_program", maker)
        wanted = [jax_memory.NewArray(cpu(0), None, "int8", (3,))]
        said = "RESOURCE_EXHAUSTED"
        with pytest.raises(errors.MemoryLimitError, match="no room") as caught:
            jax_memory.allocate(wanted)
        assert caught.value.found == "RESOURCE_EXHAUSTED: 7 GiB"
        said = "INTERNAL"
        with pytest.raises(jax.errors.JaxRuntimeError):
            jax_memory.allocate(wanted)


class TestNewArrays:
    def test_no_two_share_memory(self) -> None:
        # Equal ones, and others of as many bytes.
        kinds = [("int32", (16, 4)), ("float32", (16, 4)), ("float32", (64,)), ("bool", (256,))]
        wanted = [jax_memory.NewArray(cpu(n), None, *kind) for kind in kinds * 5 for n in (0, 3, 0)]
        made = jax_memory.allocate(wanted)
        for array, (device, _, dtype, shape) in zip(made, wanted, strict=True):
            assert (array.device, array.dtype, array.shape) == (device, dtype, shape)
        starts = sorted(array.unsafe_buffer_pointer() for array in made)
        assert all(start + 256 <= following for start, following in itertools.pairwise(starts))

    def test_a_gpu_has_nothing_to_compute(self) -> None:
        if not hasattr(jax.lax, "empty"):
            pytest.skip("this version of JAX has no arrays of nothing")
        program = jax.jit(lambda: jax_memory._new((7,), "uint8")).trace()
        text = program.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("AllocateBuffer") == 1
        assert "broadcast" not in text


class TestOnAMesh:
    """The adapter of a mesh with three devices to land on, one that does not, and a memory kind."""

    @pytest.fixture
    def lands(self) -> Any:
        found = {cpu(n): FakeDevice((1, n), f"fake:{n}") for n in (1, 2, 4)}
        yield found
        for device in found.values():
            device.assert_clean()

    @pytest.fixture
    def mesh(self, lands: Any, monkeypatch: pytest.MonkeyPatch) -> jax_backend.JaxMeshAdapter:
        found = lambda device: (lands.get(device), ("said",))  # noqa: E731
        monkeypatch.setattr(jax_memory, "find_device", found)
        kind = cpu(1).default_memory().kind
        spots = [*(Spot(cpu(n), None) for n in (4, 0, 1, 2)), Spot(cpu(1), kind)]
        return jax_backend.JaxMeshAdapter(spots)

    def test_what_lands_where(self, lands: Any, mesh: jax_backend.JaxMeshAdapter) -> None:
        row = material.stored("w", "F32", (4, 8))
        assert [device.name for device in mesh.devices] == ["fake:4", "fake:1", "fake:2"]
        found = [allocation(mesh, row, devices=(n,)) for n in range(5)]
        assert [each.device for each in found] == [0, None, 1, 2, None]
        assert [each.owner for each in found] == [*["mfload"] * 4, "framework"]
        assert not any(each.copied for each in found)
        assert allocation(mesh, row).device is None
        assert mesh.notes == ("said",)
        assert allocation(mesh, material.stored("f", "F4", (4, 8)), devices=(0,)).copied
        pool = mesh.pool(1)
        assert pool is not None
        assert pool.free is None
        assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in pool.advice

    def test_arrays_on_each(self, lands: Any, mesh: jax_backend.JaxMeshAdapter) -> None:
        rows = material.zoo()
        for spot, number in ((0, 4), (2, 1), (3, 2)):
            ground = Ground(mesh, lands[cpu(number)])
            for own in (True, False):
                arrays = wrapped(ground, rows, (spot,), own=own)
                loaded = {row.name: x for row, (x,) in zip(rows, arrays, strict=True)}
                assert {array.device for array in loaded.values()} == {cpu(number)}
                TestJaxLanding.look.assert_loaded(loaded, rows)
                del arrays, loaded
                assert left() == 0


class TestPrograms:
    def test_one_for_many_shapes_on_a_host(self) -> None:
        # 24 layers of three shapes and one tensor besides, on three devices.
        shapes = [(2, 3), (5,), (4, 4)] * 24 + [(7, 7)]
        wanted = [
            jax_memory.NewArray(cpu(n), None, "float32", x) for n in (4, 1, 2) for x in shapes
        ]
        jax_memory._program.cache_clear()
        made = jax_memory.allocate(wanted)
        assert jax_memory._program.cache_info().misses == 2
        assert [each.shape for each in made] == [each.shape for each in wanted]
        assert len({each.unsafe_buffer_pointer() for each in made}) == len(wanted)

    @given(nbytes=st.one_of(st.integers(0, 1 << 20), st.integers(0, 1 << 40)))
    def test_slabs_are_little_larger(self, nbytes: int) -> None:
        size = jax_memory.slab_bytes(nbytes)
        assert nbytes <= size
        assert size - nbytes <= max(256, min(nbytes // 8, 2 << 20))
        assert jax_memory.slab_bytes(size) == size

    def test_few_for_small_slabs(self) -> None:
        assert len({jax_memory.slab_bytes(n) for n in range(0, 1 << 20, 7)}) <= 8 * 12

    def test_slabs_of_one_size_share_one(self) -> None:
        jax_memory._slab_program.cache_clear()
        slabs = jax_memory.slabs(cpu(0), [70_003, 301, 70_002, 70_001])
        assert jax_memory._slab_program.cache_info().misses == 2
        assert len({each.unsafe_buffer_pointer() for each in slabs}) == 4
        assert {each.dtype for each in slabs} == {np.dtype(np.uint8)}

    def test_slabs_are_ready(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Until then, what ran before may still use their memory."""
        waited: list[Any] = []

        class Late:
            def block_until_ready(self) -> None:
                waited.append(self)

        program: Future[Any] = Future()
        program.set_result(Late)
        monkeypatch.setattr(jax_memory, "begin_slab", lambda *_: program)
        assert jax_memory.slabs(cpu(0), [1, 2, 3]) == waited
        assert len(waited) == 3

    def test_it_is_compiled_beside_the_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        free, threads = threading.Event(), set[int]()

        def late(act: Any) -> Any:
            def wait() -> Any:
                threads.add(threading.get_ident())
                assert free.wait(60)
                return act()

            return started(wait)

        started = jax_memory._started
        monkeypatch.setattr(jax_memory, "_started", late)
        jax_memory._slab_program.cache_clear()
        land = FakeDevice()
        make = jax_memory.Slabs(cpu(0), land, [1 << 10, 5 << 10])  # Returns before they are.
        assert jax_memory._slab_program.cache_info().misses == 1
        free.set()
        made = [make(1 << 10), make(5 << 10)]
        assert made[0].address + (1 << 10) == made[1].address
        assert threading.get_ident() not in threads
        land.assert_clean()

    def test_a_program_that_failed_is_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        jax_memory._slab_program.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(jax_memory, "_new", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                jax_memory.slabs(cpu(0), [1000])
        assert [each.nbytes for each in jax_memory.slabs(cpu(0), [1000])] == [1024]


class Slab:
    """An array of XLA's at an address."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.unsafe_buffer_pointer = lambda: address


class TestPlaces:
    """Of buffers in slabs."""

    @given(
        sizes=st.lists(st.integers(0, 40)),
        gaps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20)), max_size=12),
        order=st.randoms(use_true_random=False),
    )
    def test_any(self, sizes: list[int], gaps: list[tuple[int, int]], order: Any) -> None:
        slabs, at = list[Slab](), 1000
        for gap, nbytes in gaps:
            slabs.append(Slab(at + gap, nbytes))
            at += gap + nbytes
        order.shuffle(slabs)
        places = jax_memory._placed(sizes, slabs)
        wanted = [nbytes for nbytes in sizes if nbytes]
        assert len(places) == len(wanted)
        taken = [(p[1], n) for p, n in zip(places, wanted, strict=True) if p]
        disjoint(taken)
        for place, nbytes in zip(places, wanted, strict=True):
            if place is None:
                continue
            held, at = place
            spans = [(x.unsafe_buffer_pointer(), x.nbytes) for x in held]
            own = set(range(at, at + nbytes))
            for start, length in spans:  # None that it does not lie in.
                assert own & set(range(start, start + length))
                own -= set(range(start, start + length))
            assert not own
        if not any(gap for gap, _ in gaps[1:]) and sum(wanted) <= sum(n for _, n in gaps):
            assert None not in places  # No byte is lost where slabs follow each other.

    def test_a_load_in_many_slabs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As a GPU gives them; the last one is as large as the others only where it pays."""
        monkeypatch.setattr(jax_memory, "SLAB", 1 << 12)
        given: list[int] = []
        memory_of = np.zeros(1 << 20, np.uint8)
        first = -(-memory_of.ctypes.data // 256) * 256

        def slabs_of(_: Any, wanted: Sequence[int]) -> list[Slab]:
            starts = itertools.accumulate(wanted, initial=first)
            given.extend(wanted)
            return [Slab(start, nbytes) for start, nbytes in zip(starts, wanted, strict=False)]

        monkeypatch.setattr(jax_memory, "slabs", slabs_of)
        monkeypatch.setattr(jax_memory, "fillable", lambda *_: True)
        monkeypatch.setattr(jax_memory, "begin_trial", lambda *_: None)
        begun: list[int] = []
        monkeypatch.setattr(jax_memory, "begin_slab", lambda _, nbytes: begun.append(nbytes))
        for sizes, slabs, programs in (
            ([5000, 100, 0, 9000], [4096] * 3 + [2304], [4096, 2304]),
            ([5000] * 14, [4096] * 18, [4096]),
            ([100, 200], [512], [512]),
            ([8192], [4096] * 2, [4096]),
        ):
            given.clear()
            begun.clear()
            land = FakeDevice()
            make = jax_memory.Slabs(cpu(0), land, sizes)
            made = [make(nbytes) for nbytes in sizes]
            assert given == slabs
            assert begun == programs
            assert [each.nbytes for each in made] == sizes
            disjoint((each.address, each.nbytes) for each in made)
            assert all(each.address % 256 == 0 for each in made if each.nbytes)
            del made
            land.assert_clean()

    def test_what_finds_no_place(self) -> None:
        """Slabs of a CPU do not follow each other: what needs two has its own."""
        sizes = [jax_memory.SLAB // 2 + 256, jax_memory.SLAB, 1000]
        land = FakeDevice(total=1 << 40)
        make = jax_memory.Slabs(cpu(0), land, sizes)
        made = [make(nbytes) for nbytes in sizes]
        assert [each.nbytes for each in made] == sizes
        disjoint((each.address, each.nbytes) for each in made)
        rows = [(each, each.nbytes - 8, bytes([n] * 8)) for n, each in enumerate(made)]
        write(land, rows)
        for each, at, raw in rows:
            view = View("w", dtypes.TABLE["U8"], (8,), each, at)
            (array,) = jax_adapter.JaxAdapter(cpu(0), land).wrap([view])
            assert np.asarray(array).tobytes() == raw
            del array, view
        del made, each, rows
        land.assert_clean()


class TestTrial:
    """Whether JAX's own memory can be filled in place; the answer is no where anything is odd."""

    def test_all_is_well(self) -> None:
        land = FakeDevice()
        assert jax_memory.fillable(cpu(0), land)
        streams = land.calls["stream"]
        assert streams > 0
        assert jax_memory.fillable(cpu(0), land)  # Known by now.
        assert land.calls["stream"] == streams
        land.assert_clean()

    def test_one_program_is_compiled(self) -> None:
        jax_memory._slab_program.cache_clear()
        assert jax_memory.fillable(cpu(0), FakeDevice())
        assert jax_memory._slab_program.cache_info().misses == 1

    def test_a_device_that_is_full_for_now(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "mfload")

        def full(*_: Any) -> Any:
            raise errors.MemoryLimitError("JAX has no room on the device")

        land = FakeDevice()
        with monkeypatch.context() as patch:
            patch.setattr(jax_memory, "slabs", full)
            assert not jax_memory.fillable(cpu(0), land)
        assert "no room" in caplog.text
        assert jax_memory.fillable(cpu(0), land)

    def test_memory_that_is_not_locked_will_do(self) -> None:
        land = FakeDevice(fail={"pin": 1})
        assert jax_memory.fillable(cpu(0), land)
        land.assert_clean()

    @pytest.mark.parametrize("verb", ["stream", "copy_in", "synchronize"])
    def test_a_device_that_fails(self, verb: str, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", "mfload")
        land = FakeDevice(fail={verb: 1})
        assert not jax_memory.fillable(cpu(0), land)
        assert "told to fail" in caplog.text
        land.assert_clean()

    def test_writes_that_nobody_sees(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jax_memory, "_write", lambda *_: None)
        assert not jax_memory.fillable(cpu(0), FakeDevice())

    def test_writes_that_go_too_far(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "mfload")
        made: list[Any] = []
        real, slabs = jax_memory._write, jax_memory.slabs
        monkeypatch.setattr(jax_memory, "slabs", lambda *x: made.extend(slabs(*x)) or made)

        def twice(land: Device, target: Any, numbers: Any) -> None:
            real(land, target, numbers)
            beside = made[0].unsafe_buffer_pointer()
            real(land, memory.DeviceBuffer(land, beside, 4, made[0], own=False), numbers[:1])

        monkeypatch.setattr(jax_memory, "_write", twice)
        land = FakeDevice()
        assert not jax_memory.fillable(cpu(0), land)
        assert "in another" in caplog.text

    def test_slabs_that_share_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one = jax_memory.slabs(cpu(0), [1 << 14])
        monkeypatch.setattr(jax_memory, "slabs", lambda *_: one * 2)
        assert not jax_memory.fillable(cpu(0), FakeDevice())

    def test_no_pointers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jax_memory, "slabs", lambda *_: [object()] * 2)
        assert not jax_memory.fillable(cpu(0), FakeDevice())


class Told:
    """A `jax.Device` that says what it has."""

    def __init__(self, **stats: int) -> None:
        self.memory_stats = lambda: stats or None


class TestPool:
    @pytest.mark.parametrize(
        ("stats", "free"),
        [
            ({}, None),
            ({"bytes_in_use": 5}, None),
            ({"bytes_limit": 750, "bytes_in_use": 50}, 700),
            # All is set aside: the rest of the device is no matter.
            ({"bytes_limit": 750, "bytes_in_use": 50, "pool_bytes": 750}, 700),
            # What it does not know is -1.
            ({"bytes_limit": 750, "bytes_in_use": 50, "pool_bytes": -1}, 700),
            ({"bytes_limit": -1, "bytes_in_use": 50}, None),
            # Nothing is, and others have most of the device: 10 in the pool, 100 beside it.
            ({"bytes_limit": 750, "bytes_in_use": 50, "pool_bytes": 60}, 110),
        ],
    )
    def test_what_is_free(self, stats: dict[str, int], free: int | None) -> None:
        land = FakeDevice(total=1000)
        land.taken = 900
        assert jax_memory.pool(Told(**stats), land).free == free


def test_the_trial_begins_with_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before headers are read."""
    land = FakeDevice()
    monkeypatch.setattr(jax_memory, "find_device", lambda _: (land, ()))
    jax_memory.begin_trial.cache_clear()
    adapter = jax_adapter.make("cpu:0")
    assert jax_memory.begin_trial.cache_info().misses == 1
    buffer = adapter.allocator(0, [1000])(1000)
    assert jax_memory.begin_trial.cache_info().misses == 1
    assert isinstance(buffer.owner[0], jax.Array)
    assert memory.live_bytes() == 0
    del buffer
    land.assert_clean()


def test_memory_of_ours_where_that_of_xla_cannot_be_filled() -> None:
    land = FakeDevice(fail={"copy_in": 1})
    buffer = jax_adapter.JaxAdapter(cpu(0), land).allocator(0, [1000])(1000)
    assert memory.live_bytes() == buffer.nbytes == 1000
    del buffer
    land.assert_clean()


class TestLandOn:
    class Gpu:
        local_hardware_id = 1

        def __init__(self, platform: str, version: str) -> None:
            self.platform = platform
            self.client = self
            self.platform_version = version

    def test_nvidia_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: Sequence[int] = []
        from mfload.cuda import discovery

        land = FakeDevice()
        monkeypatch.setattr(discovery, "find", lambda number: asked.append(number) or land)
        assert jax_memory.find_device(self.Gpu("gpu", "PJRT C API\ncuda 13000")) == (land, ())
        assert asked == [1]
        for platform, version in (("gpu", "rocm 7"), ("tpu", "libtpu"), ("METAL", "jax 0.5")):
            assert jax_memory.find_device(self.Gpu(platform, version)) == (None, ())
        assert asked == [1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:A large amount of constants")  # So JAX calls the slab.
def test_a_real_gpu_gives_its_memory() -> None:
    """Whether XLA's pool can be landed in, which decides where tensors go."""
    if reason := no_gpu():
        pytest.skip(reason)
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"JAX knows no GPU: {error}")
    land, notes = jax_memory.find_device(device)
    if land is None:
        pytest.skip(f"nothing lands: {notes}")
    assert jax_memory.fillable(device, land)
    pool = jax_memory.pool(device, land)
    assert pool.free is not None
    with pytest.raises(errors.MemoryLimitError):
        jax_memory.slabs(device, [pool.free * 2])
    assert jnp.zeros(3, device=device).sum() == 0
