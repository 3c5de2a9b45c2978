"""Peers and JAX: what is published from one mesh is read onto another, in place and held."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mfload
from mfload import Report, errors
from mfload.peer import fragments

SPECS = [P(), P("a"), P("b"), P(None, "a"), P(None, "b"), P("a", "b"), P("b", "a"),
         P(("a", "b")), P(None, ("b", "a"))]  # fmt: skip


def _mesh(rows: int, columns: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: rows * columns]).reshape(rows, columns), ("a", "b"))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.sampled_from([(2, 4), (4, 2), (1, 8), (2, 2), (2, 3)]),
    reader=st.sampled_from([(2, 4), (2, 2), (3, 2), (1, 1), (1, 4)]),
    published=st.sampled_from(SPECS),
    wanted=st.sampled_from(SPECS),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "float8_e4m3fn", "bool", "complex64"]),
    transport=st.sampled_from(["memory", "http"]),
)
def test_any_sharding_becomes_any_other(
    seed: tuple[int, int],
    reader: tuple[int, int],
    published: Any,
    wanted: Any,
    dtype: str,
    transport: str,
) -> None:
    """Bit for bit, without a copy on the seed."""
    full = np.random.default_rng(0).integers(0, 2, (48, 24)).astype(dtype)
    array = jax.device_put(full, NamedSharding(_mesh(*seed), published))
    options = mfload.Options(peer=mfload.PeerOptions(transports=transport))
    with mfload.publish({"x": array}, model="m") as made:
        assert made.copied_bytes == 0
        found = mfload.load(
            made.url, "jax", mesh=_mesh(*reader), shardings=wanted, options=options
        )["x"]
    assert found.sharding.spec == wanted
    np.testing.assert_array_equal(np.asarray(found).view(np.uint8), full.view(np.uint8))


def test_each_byte_travels_once() -> None:
    """Eight shards become four, six and one."""
    array = jax.device_put(np.arange(48 * 64.0, dtype=np.float32).reshape(48, 64))
    array = jax.device_put(array, NamedSharding(_mesh(2, 4), P("a", "b")))
    options = mfload.Options(peer=mfload.PeerOptions(checksums=False))
    with mfload.publish({"x": array}, model="m") as made:
        for rows, columns, spec in [(4, 1, P("a")), (6, 1, P("a")), (1, 1, P()), (1, 4, P("b"))]:
            report = Report()
            how: dict[str, Any] = {"mesh": _mesh(rows, columns), "shardings": spec}
            mfload.load(made.url, "jax", **how, report=report, options=options)
            assert report.read_bytes == array.nbytes
            assert report.over_read_bytes == 0


def test_donated_and_deleted_arrays_stay() -> None:
    """The seed holds what a jitted step was given to use again."""
    mesh = _mesh(2, 4)
    arrays = {
        "one": jnp.arange(1 << 18, dtype=jnp.float32),
        "sharded": jax.device_put(jnp.arange(4096.0).reshape(64, 64), NamedSharding(mesh, P("a"))),
    }
    wanted = {name: np.array(each) for name, each in arrays.items()}
    deleted = jnp.ones(1000)
    with mfload.publish({**arrays, "deleted": deleted}, model="m") as made:
        step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
        for _ in range(4):
            arrays = step(arrays)
        deleted.delete()
        more = [jnp.full(1 << 18, n, jnp.float32) for n in range(8)]
        found = mfload.load(made.url, "numpy")
        del more
    for name, each in wanted.items():
        np.testing.assert_array_equal(found[name], each)
    assert found["deleted"].all()


def test_a_model_and_its_tree() -> None:
    """An nnx module is published as it is saved: restored, and loaded into another one."""
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    with mfload.publish(model, model="m") as made:
        tree = mfload.restore(made.url, framework="jax")
        np.testing.assert_array_equal(tree["kernel"], model.kernel[...])
        other = mfload.load_into(nnx.Linear(8, 4, rngs=nnx.Rngs(1)), made.url)
    np.testing.assert_array_equal(other.kernel[...], model.kernel[...])


def test_what_can_not_be_published_is_named() -> None:
    """Deleted arrays, tracers, keys, and packed elements in parts."""
    gone = jnp.ones(3)
    gone.delete()
    packed = jax.device_put(
        jnp.zeros((8, 8), jnp.float4_e2m1fn), NamedSharding(_mesh(2, 4), P("a"))
    )
    for array in (gone, jax.random.key(0), packed):
        with pytest.raises(errors.UnsupportedArrayError) as caught:
            fragments.held({"x": array})
        assert caught.value.tensor == "x"


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize(("seeds", "readers"), [(4, 2), (2, 4)])
def test_two_processes_to_two_processes(seeds: int, readers: int) -> None:
    """From 8 devices to 4, and from 4 to 8: each process reads what its devices hold."""
    script, port = Path(__file__).with_name("peer_process.py"), _port()
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:

        def start(role: str, rank: int, port: int, devices: int, *more: str) -> Any:
            given = [role, *map(str, (rank, 2, port, devices)), *more]
            made = subprocess.Popen([sys.executable, str(script), *given], **pipes)
            stack.enter_context(made)
            stack.callback(made.kill)
            return made

        there = [start("publish", rank, port, seeds) for rank in range(2)]
        addresses = ",".join(each.stdout.readline().strip() for each in there)
        url, port = f"peer://{addresses}/org/mesh", _port()
        reading = [start("read", rank, port, readers, url) for rank in range(2)]
        said = [each.communicate(timeout=120)[0].strip() for each in reading]
        assert said == ["['columns', 'grid', 'rows', 'whole']"] * 2
        assert [each.returncode for each in reading] == [0, 0]
        for each in there:
            each.stdin.close()
        assert [each.wait(60) for each in there] == [0, 0]
