"""JAX against the suite that all adapters share, and what is its own."""

from __future__ import annotations

import gc
import warnings
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import material
from conformance.material import COMMON, FLOATS8, save
from conformance.suite import ENGINES, Conformance

import mfload
from mfload import errors, frameworks
from mfload.frameworks import seams


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
        assert seams.jax_capsule_importer(jax.devices("cpu")[0]) is not None


class TestJaxPublicWay(JaxConformance):
    """The same where the private import is gone."""

    @pytest.fixture(autouse=True)
    def no_seam(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(seams, "jax_capsule_importer", lambda device: None)

    @pytest.mark.parametrize("number", [0, 5])
    def test_devices(self, aligned: Any, number: int) -> None:
        path, rows = aligned
        loaded = mfload.load(path, framework="jax", device=f"cpu:{number}")
        self.assert_loaded(loaded, rows)
        assert {x for a in loaded.values() for x in a.devices()} == {jax.devices("cpu")[number]}
        gc.collect()
        assert mfload.live_bytes() >= sum(len(row.raw) for row in rows if row.dtype != "F4")


class TestSeam:
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
        assert seams.jax_capsule_importer(jax.devices("cpu")[0]) is None

    def test_what_is_gone_is_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = pytest.importorskip("jaxlib._jax")
        monkeypatch.delattr(module, "dlpack_managed_tensor_to_buffer")
        assert seams.jax_capsule_importer(jax.devices("cpu")[0]) is None


class TestDevices:
    @pytest.mark.parametrize("landing", ["mfload", "framework"])
    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("number", [0, 1, 7])
    def test_placement(self, aligned: Any, engine: str, landing: str, number: int) -> None:
        path, rows = aligned
        device = jax.devices("cpu")[number]
        for given in (f"cpu:{number}", device):
            loaded = mfload.load(
                path, framework="jax", device=given, engine=engine, landing=landing
            )
            assert {x for array in loaded.values() for x in array.devices()} == {device}
            TestJax().assert_loaded(loaded, rows)
        if landing == "mfload" and engine == "pread":
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

    @pytest.mark.parametrize("landing", ["mfload", "framework"])
    @pytest.mark.parametrize("seam", [True, False])
    def test_exact(
        self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, seam: bool, landing: str
    ) -> None:
        assert not jax.config.jax_enable_x64
        if not seam:
            monkeypatch.setattr(seams, "jax_capsule_importer", lambda device: None)
        numbers = np.array([2**40, -(2**63), 2**63 - 1], np.int64)
        rows = [material.Stored("n", "I64", (3,), numbers.tobytes())]
        path = save(tmp_path / "n.safetensors", rows)
        array = mfload.load(path, framework="jax", landing=landing)["n"]
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
            array = mfload.load(path, framework="jax", landing="framework")["w"]
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
        first = mfload.load(path, framework="jax", landing="framework")
        second = mfload.load(path, framework="jax", landing="framework")
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
