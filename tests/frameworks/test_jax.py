"""JAX against the suite that all adapters share, and what is its own."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.flax
from conformance import material
from conformance.export import ExportConformance, bits, give, read
from conformance.material import BITS, COMMON, FLOATS8, Stored, save
from conformance.suite import ENGINES, ROOT, Conformance, no_gpu

import mfload
from mfload import errors, frameworks
from mfload.frameworks import jax_adapter, jax_memory, private_api
from mfload.saving.export import export


class JaxConformance(Conformance):
    framework = "jax"
    bfloat16 = jnp.bfloat16
    own = COMMON | FLOATS8
    copied: ClassVar = {"F4": "float4_e2m1fn"}
    unpacked = frozenset({"F4"})
    parts_alias = False
    no_device = ("cuda:0", "cpu:99", "nonsense", "no:such:device", "", 3)

    def type_name(self, array: Any) -> str:
        assert isinstance(array, jax.Array)
        return array.dtype.name

    def raw(self, array: Any) -> bytes:
        return np.asarray(array).tobytes()

    def address(self, array: Any) -> int:
        return array.unsafe_buffer_pointer()


class TestJax(JaxConformance):
    def test_the_seam_is_in_use(self) -> None:
        # Otherwise the class below tests the same thing again. Older versions have no such
        # module, and take the public way.
        pytest.importorskip("jaxlib._jax")
        assert private_api.jax_capsule_importer(jax.devices("cpu")[0]) is not None


class TestJaxPublicWay(JaxConformance):
    """The same where the private import is gone."""

    @pytest.fixture(autouse=True)
    def no_seam(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(private_api, "jax_capsule_importer", lambda *_: None)

    @pytest.mark.parametrize("number", [0, 5])
    def test_devices(self, aligned: Any, number: int) -> None:
        path, rows = aligned
        loaded = mfload.load(path, framework="jax", device=f"cpu:{number}")
        self.assert_loaded(loaded, rows)
        assert {x for a in loaded.values() for x in a.devices()} == {jax.devices("cpu")[number]}
        gc.collect()
        assert mfload.live_bytes() >= sum(len(row.raw) for row in rows if row.dtype != "F4")


class TestPrivateImport:
    @pytest.fixture(autouse=True)
    def probed_anew(self) -> Iterator[None]:
        private_api.jax_capsule_importer.cache_clear()
        yield
        private_api.jax_capsule_importer.cache_clear()

    def test_probed_once_a_process(self, aligned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        probes: list[Any] = []
        real = private_api._jax_memory
        monkeypatch.setattr(private_api, "_jax_memory", lambda *x: probes.append(x) or real(*x))
        for _ in range(3):
            mfload.load(aligned[0], framework="jax", names=["F32"])
        assert len(probes) <= 1  # None where this version has no such function.

    @pytest.mark.parametrize(
        "private",
        [
            lambda capsule, device, stream: 1 / 0,
            lambda capsule, device, stream: jax.device_put(np.array([-(2**40)], np.float32)),
            lambda capsule, device, stream: jnp.zeros(1, jnp.int32),
        ],
    )
    def test_what_misbehaves_is_not_used(
        self, monkeypatch: pytest.MonkeyPatch, private: Any
    ) -> None:
        module = pytest.importorskip("jaxlib._jax")
        monkeypatch.setattr(module, "dlpack_managed_tensor_to_buffer", private)
        assert private_api.jax_capsule_importer(jax.devices("cpu")[0]) is None

    def test_what_is_gone_is_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = pytest.importorskip("jaxlib._jax")
        monkeypatch.delattr(module, "dlpack_managed_tensor_to_buffer")
        assert private_api.jax_capsule_importer(jax.devices("cpu")[0]) is None


def test_addresses_without_the_private_call() -> None:
    class Array:
        def __init__(self, array: jax.Array) -> None:
            self.__dlpack__ = array.__dlpack__

    for array in (jnp.arange(7, dtype=jnp.int32)[2:], jnp.ones((3, 4), jnp.bfloat16)):
        assert private_api.jax_address(Array(array)) == private_api.jax_address(array) > 0


class TestDevices:
    @pytest.mark.parametrize("allocator", ["mfload", "framework"])
    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("number", [0, 1, 7])
    def test_placement(self, aligned: Any, engine: str, allocator: str, number: int) -> None:
        path, rows = aligned
        device = jax.devices("cpu")[number]
        for given in (f"cpu:{number}", device):
            loaded = mfload.load(
                path,
                framework="jax",
                device=given,
                options=mfload.Options(engine=engine, allocator=allocator),
            )
            assert {x for array in loaded.values() for x in array.devices()} == {device}
            TestJax().assert_loaded(loaded, rows)
        if allocator == "mfload" and engine == "pread":
            gc.collect()
            aliased = sum(len(row.raw) for row in rows if row.dtype != "F4")
            assert mfload.live_bytes() >= aliased

    def test_jax_default_device(self, aligned: Any) -> None:
        with jax.default_device(jax.devices("cpu")[3]):
            loaded = mfload.load(aligned[0], framework="jax", names=["F32"])
        assert loaded["F32"].devices() == {jax.devices("cpu")[3]}

    def test_sum_on_another_device(self, aligned: Any) -> None:
        path, rows = aligned
        array = mfload.load(path, framework="flax", names=["I32"], device="cpu:2")["I32"]
        stored = next(np.frombuffer(row.raw, np.int32) for row in rows if row.dtype == "I32")
        total = jax.jit(lambda x: x.sum(dtype=jnp.int32))(array)
        assert total.devices() == {jax.devices("cpu")[2]}
        assert int(total) == int(stored.sum(dtype=np.int32))


class TestWide:
    """64-bit types where `jax_enable_x64` is off, as it is unless somebody says otherwise."""

    @pytest.mark.parametrize("allocator", ["mfload", "framework"])
    @pytest.mark.parametrize("seam", [True, False])
    def test_exact(
        self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, seam: bool, allocator: str
    ) -> None:
        assert not jax.config.jax_enable_x64
        if not seam:
            monkeypatch.setattr(private_api, "jax_capsule_importer", lambda *_: None)
        numbers = np.array([2**40, -(2**63), 2**63 - 1], np.int64)
        rows = [material.Stored("n", "I64", (3,), numbers.tobytes())]
        path = save(tmp_path / "n.safetensors", rows)
        array = mfload.load(path, framework="jax", options=mfload.Options(allocator=allocator))["n"]
        assert array.dtype == np.int64
        assert np.asarray(array).tolist() == numbers.tolist()
        assert int(array[0]) == 2**40
        assert not jax.config.jax_enable_x64


class TestDonation:
    def test_arrays_of_jax_are_given_away(self, tmp_path: Any) -> None:
        numbers = np.random.default_rng(2).normal(size=(128, 64))
        step = jax.jit(lambda x: -x, donate_argnums=0)
        for dtype, kind in (("F32", np.float32), ("BF16", jnp.bfloat16)):
            before = numbers.astype(kind)
            row = material.Stored("w", dtype, (128, 64), before.tobytes())
            path = save(tmp_path / f"{dtype}.safetensors", [row])
            array = mfload.load(
                path, framework="jax", options=mfload.Options(allocator="framework")
            )["w"]
            address = array.unsafe_buffer_pointer()
            new = step(array)
            assert new.unsafe_buffer_pointer() == address
            assert array.is_deleted()
            assert np.asarray(new).tobytes() == (-before).tobytes()

    def test_arrays_of_mfload_are_copied_and_stay_whole(self, tmp_path: Any) -> None:
        row = material.stored("w", "F32", (256, 64))
        path = save(tmp_path / "w.safetensors", [row])
        array = mfload.load(path, framework="jax")["w"]
        address = array.unsafe_buffer_pointer()
        with warnings.catch_warnings():
            # Older versions say that the donation came to nothing.
            warnings.simplefilter("ignore")
            new = jax.jit(lambda x: -x, donate_argnums=0)(array)
        assert new.unsafe_buffer_pointer() != address

    def test_loads_of_one_shape_share_no_memory(self, tmp_path: Any) -> None:
        rows = [material.stored(f"w{n}", "F32", (64, 64), n) for n in range(4)]
        path = save(tmp_path / "w.safetensors", rows)
        first = mfload.load(path, framework="jax", options=mfload.Options(allocator="framework"))
        second = mfload.load(path, framework="jax", options=mfload.Options(allocator="framework"))
        everything = [*first.values(), *second.values()]
        assert len({array.unsafe_buffer_pointer() for array in everything}) == 8
        TestJax().assert_loaded(first, rows)


class TestComputing:
    def test_results_are_those_of_numpy(self, tmp_path: Any) -> None:
        numbers = np.random.default_rng(3).normal(size=(65, 129)).astype(np.float32)
        odd = material.stored("odd", "U8", (3,))
        row = material.Stored("w", "F32", (65, 129), numbers.tobytes())
        path = save(tmp_path / "w.safetensors", [odd, row], 8)
        array = mfload.load(path, framework="jax")["w"]
        np.testing.assert_allclose(jax.jit(lambda x: x @ x.T)(array), numbers @ numbers.T, 1e-3)


def test_a_device_of_another_kind() -> None:
    with pytest.raises(errors.DeviceError, match="not a device"):
        frameworks.get("jax", object())


class TestJaxGives(ExportConformance):
    framework = "jax"
    gives = tuple(key for key in BITS if not key.startswith("F6_"))
    unpacked = ("F4",)
    turned = False
    frozen = True
    refused: ClassVar = {
        "complex128": "no dtype",
        "float8_e3m4": "no dtype",
        "key": "key_data.*wrap_key_data.*impl='threefry2x32'",
        "jit": "tracer",
        "grad": "tracer",
        "vmap": "tracer",
        "struct": "without numbers",
        "deleted": "deleted",
        "donated": "deleted",
        "dtype": "not an array",
    }

    def made(self, array: np.ndarray) -> Any:
        with jax_memory.undisturbed():
            return jax.block_until_ready(jnp.array(array))

    def address(self, array: Any) -> int:
        return array.unsafe_buffer_pointer()

    def turn(self, array: Any, axes: tuple[int, ...]) -> Any:
        with jax_memory.undisturbed():
            if array.dtype != jnp.bfloat16:
                return jax.block_until_ready(array.transpose(axes))
            # As bits, each step by itself: XLA for CPUs moves these by way of float32 at times,
            # where a NaN becomes another.
            bits = array.view(jnp.uint16).transpose(axes)
            return jax.block_until_ready(bits.view(jnp.bfloat16))

    def reference_save(self, arrays: dict[str, Any]) -> bytes:
        return safetensors.flax.save(arrays)

    def let_go(self, array: Any) -> None:
        array.delete()

    @pytest.mark.parametrize("way", ["made", "put", "loaded", "replicated", "sharded"])
    @pytest.mark.parametrize("end", ["donated", "deleted"])
    def test_saved_in_the_background(self, way: str, end: str, tmp_path: Path) -> None:
        numbers = np.arange(1 << 20, dtype=np.float32).reshape(1024, -1)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
        spec = jax.sharding.PartitionSpec("x" if way == "sharded" else None)
        if way == "made":
            array = jnp.array(numbers)
        elif way == "loaded":
            mfload.save({"w": numbers}, tmp_path / "w.safetensors")
            array = mfload.load(tmp_path / "w.safetensors", "jax")["w"]
        else:
            place = None if way == "put" else jax.sharding.NamedSharding(mesh, spec)
            array = jax.device_put(numbers.copy(), place)
        pending = mfload.save({"w": array}, tmp_path / "kept.safetensors", background=True)
        step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
        if end == "donated":
            after = [step(array)]
        else:
            array.delete()
            after = []
        after += [jnp.full(numbers.shape, n) for n in range(4)]
        jax.block_until_ready(after)
        del array
        assert pending.result(60).held == (0 if way == "sharded" else numbers.nbytes)
        found = mfload.load(tmp_path / "kept.safetensors", "numpy")["w"]
        assert (found == numbers).all()

    def refusal(self, word: str) -> Any:
        kept: list[Any] = []
        ones = jnp.ones(3)

        def keep(x: Any) -> Any:
            kept.append(x)
            return x.sum()

        if word in ("jit", "grad", "vmap"):
            getattr(jax, word)(keep)(jnp.ones((2, 2)) if word == "vmap" else ones)
            return kept[0]
        if word == "deleted":
            ones.delete()
            return ones
        if word == "donated":
            given = jax.block_until_ready(jnp.ones((64, 64)) + 1)
            jax.block_until_ready(jax.jit(lambda x: x * 2, donate_argnums=0)(given))
            return given
        if word == "key":
            return jax.random.key(0)
        if word == "struct":
            return jax.ShapeDtypeStruct((2,), jnp.float32)
        if word == "dtype":
            return jnp.float32(1).sharding
        return self.made(np.zeros(2, getattr(ml_dtypes, word, word)))

    def test_packed_elements_from_another_type(self) -> None:
        if not hasattr(jnp, "float4_e2m1fn"):
            pytest.skip("this version has no such type")
        values = [0.5, -1, 6, 1.5, -0.0, 3]
        given = give(jnp.array(values).astype(jnp.float4_e2m1fn).reshape(2, 3))
        codes = np.array(values).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).tobytes()
        assert read(given) == Stored("w", "F4", (2, 3), bits("F4", codes))

    def test_another_order_in_memory(self) -> None:
        layouts = pytest.importorskip("jax.experimental.layout")
        if not hasattr(layouts, "Format"):
            pytest.skip("this version has other names for it")
        numbers = np.arange(15, dtype=np.float32).reshape(3, 5)
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        layout = layouts.Layout(major_to_minor=(1, 0))
        array = jax.jit(lambda x: x + 0, out_shardings=layouts.Format(layout, where))(numbers)
        assert read(give(array)).raw == numbers.tobytes()

    def test_an_array_deleted_in_between(self) -> None:
        array = jnp.ones(3)
        given = give(array)
        array.delete()
        with pytest.raises(errors.UnsupportedArrayError, match="could not be read") as caught:
            given.fetch()
        assert caught.value.tensor == "w"
        assert "deleted" in str(caught.value)

    @pytest.mark.gpu
    def test_arrays_on_a_gpu(self) -> None:
        if reason := no_gpu():
            pytest.skip(reason)
        device = jax.devices("cuda")[0]
        for dtype in self.gives:
            row, array = self.numbers(dtype, (5, 4))
            with jax_memory.undisturbed():
                given = give(jax.device_put(array, device))
            assert (read(given), given.span) == (row, None)


class TestJaxGivesShards:
    P = jax.sharding.PartitionSpec
    NUMBERS = np.arange(8 * 4 * 6, dtype=np.float32).reshape(8, 4, 6)

    @pytest.mark.parametrize(
        ("spec", "reads"),
        [
            (P("x"), 4),
            (P(None, "y"), 2),
            (P(("x", "y")), 8),
            (P("x", "y"), 8),
            (P(), 1),
        ],
    )
    def test_each_number_is_read_once(
        self, monkeypatch: pytest.MonkeyPatch, spec: Any, reads: int
    ) -> None:
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
        array = jax.device_put(self.NUMBERS, jax.sharding.NamedSharding(mesh, spec))
        taken: list[int] = []
        on_host = jax_adapter.on_host
        monkeypatch.setattr(
            jax_adapter, "on_host", lambda x: (taken.append(x.nbytes), on_host(x))[1]
        )
        given = give(array)
        assert given.span is None
        assert not taken
        assert read(given) == Stored("w", "F32", (8, 4, 6), self.NUMBERS.tobytes())
        assert len(taken) == reads
        assert sum(taken) == self.NUMBERS.nbytes

    @pytest.mark.parametrize("dtype", [key for key in BITS if not key.startswith("F6_")])
    def test_every_dtype(self, dtype: str) -> None:
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
        row, array = TestJaxGives().numbers(dtype, (16, 8))
        with jax_memory.undisturbed():
            sharded = jax.device_put(array, jax.sharding.NamedSharding(mesh, self.P("x")))
        assert read(give(sharded)) == row

    def test_scalars_and_arrays_of_no_size(self) -> None:
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
        for shape in ((), (0,), (8, 0)):
            array = jax.device_put(
                np.ones(shape, np.float32),
                jax.sharding.NamedSharding(mesh, self.P("x") if len(shape) > 1 else self.P()),
            )
            given = read(give(array))
            assert (given.shape, given.raw) == (shape, np.ones(shape, np.float32).tobytes())

    @pytest.mark.parametrize("dtype", ["float32", "float4_e2m1fn"])  # The second is unpacked.
    @pytest.mark.parametrize("spec", [P("x"), P()])
    def test_no_copy_stays_with_the_array(self, spec: Any, dtype: str) -> None:
        if not hasattr(jnp, dtype):
            pytest.skip("this version has no such type")
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
        where = jax.sharding.NamedSharding(mesh, spec)
        array = jax.jit(lambda: jnp.ones((1024, 2048), dtype), out_shardings=where)()
        array.block_until_ready()
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(5):
                assert give(array).fetch().size == (8 << 20 if dtype == "float32" else 1 << 20)
            # The last copy may wait to be collected, not all five; JAX's threads let go late.
            assert tracemalloc.get_traced_memory()[0] < 6 << 20
            deadline = time.monotonic() + 10
            while tracemalloc.get_traced_memory()[0] > 1 << 19 and time.monotonic() < deadline:
                gc.collect()
                time.sleep(0.01)
            assert tracemalloc.get_traced_memory()[0] < 1 << 19
        finally:
            tracemalloc.stop()
        assert not array.is_deleted()

    def test_on_a_device_that_is_not_the_first(self) -> None:
        array = jax.device_put(self.NUMBERS, jax.devices()[5])
        given = give(array)
        assert given.fetch().ctypes.data == array.unsafe_buffer_pointer()
        assert read(given).raw == self.NUMBERS.tobytes()


PROCESS = """
import sys
import jax, numpy as np
from mfload import errors
from mfload.saving.export import TensorToSave, export
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
P = jax.sharding.PartitionSpec
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
numbers = np.arange(8, dtype=np.float32).reshape(4, 2)
for spec in (P("x"), P()):
    where = jax.sharding.NamedSharding(mesh, spec)
    array = jax.make_array_from_callback((4, 2), where, lambda index: numbers[index])
    assert not array.is_fully_addressable
    try:
        (given,) = export({"w": array})
        assert given.fetch().tobytes() == numbers.tobytes()
        print("given")
    except errors.UnsupportedArrayError as error:
        print("refused", error)
"""


def test_arrays_of_several_processes() -> None:
    """What lies with others is refused by name; a whole copy here is enough."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        for process in running:
            said, complaint = process.communicate(timeout=120)
            assert process.returncode == 0, complaint[-3000:]
            refused, given = said.strip().splitlines()
            assert refused.startswith("refused jax: part of the array lies with other processes")
            assert "tensor: 'w'" in refused
            assert given == "given"
    finally:
        for process in running:
            process.kill()
            process.wait()


class TestBoxes:
    def test_flax_variables(self) -> None:
        """Stand-ins for what nnx, in its versions, and Linen wrap an array in."""
        array = jnp.arange(3.0)
        for name, held in (
            ("get_raw_value", lambda self: array),
            ("raw_value", property(lambda self: array)),
            ("value", property(lambda self: array)),
        ):
            kind = type("Param", (), {name: held, "__module__": "flax.nnx.variablelib"})
            given = export({"w": kind()})[0]
            assert read(given).raw == np.arange(3, dtype=np.float32).tobytes()


def test_arrays_are_compared() -> None:
    a, b = {"x": jnp.arange(6.0).reshape(2, 3).T}, {"x": np.arange(6, dtype="f4").reshape(2, 3).T}
    assert mfload.diff(a, b)
    assert not mfload.diff(a, {"x": b["x"] + 1e-3})
    assert mfload.diff(a, {"x": b["x"] + 1e-3}, atol=0.01)
