from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mfload import dtypes, errors
from mfload.trees import jax_transforms
from mfload.trees.transforms import Branch, Transform

DEVICES = jax.devices()
TURN = ("transpose", (1, 0))
TURNED = Transform((Branch((2, 3), (TURN,)),))


def reshaped(shape, wanted):
    return Transform((Branch(shape, (("reshape", wanted),)),))


@contextmanager
def compiles() -> Iterator[list[str]]:
    """Collects a line for each transform that XLA compiles."""
    found: list[str] = []

    def listen(event: str, _seconds: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def rows(*shapes, devices=DEVICES, dtype=np.float32):
    made = []
    for n, device in enumerate(devices):
        row = []
        for m, shape in enumerate(shapes):
            size = int(np.prod(shape))
            values = np.arange(size, dtype=np.float32).reshape(shape) + 100 * n + 10 * m
            row.append(jax.device_put(values.astype(dtype), device))
        made.append(tuple(row))
    return made


def on(given):
    return tuple(row[0].device for row in given)


def expected(transform, given):
    return [transform.evaluate([np.asarray(each) for each in row], np) for row in given]


def same(made, wanted, given):
    for array, numbers, row in zip(made, wanted, given, strict=True):
        assert array.dtype == numbers.dtype
        assert array.shape == numbers.shape
        assert np.asarray(array).tobytes() == np.ascontiguousarray(numbers).tobytes()
        assert array.device == row[0].device
        assert isinstance(array.sharding, jax.sharding.SingleDeviceSharding)


@pytest.mark.parametrize("devices", [DEVICES, DEVICES[3:4], DEVICES[5:1:-1]])
@pytest.mark.parametrize(
    ("transform", "shapes"),
    [
        (TURNED, [(2, 3)]),
        (reshaped((6,), (3, 2)), [(6,)]),
        (Transform((Branch((4, 3), (TURN,)),), scale=0.5, dtype="BF16"), [(4, 3)]),
        (Transform((Branch((2, 3), (TURN,)), Branch((5, 2)))), [(2, 3), (5, 2)]),
        (Transform((Branch((2, 5), (TURN,)),), counts=(3,), axes=(1,)), [(2, 5)] * 3),
        (reshaped((), (1, 1)), [()]),
        (reshaped((1, 1), ()), [(1, 1)]),
    ],
)
def test_each_device_makes_its_own(devices, transform, shapes):
    given = rows(*shapes, devices=devices)
    same(jax_transforms.run(transform, on(given), given), expected(transform, given), given)


@pytest.mark.parametrize("dtype", ["F64", "I64", "U64"])
def test_64_bits_keep_their_width(dtype):
    wide = dtypes.TABLE[dtype].numpy
    with jax.enable_x64(True):
        given = [(jax.device_put(np.array([[2**40, 3]], wide), each),) for each in DEVICES]
    assert not jax.config.jax_enable_x64
    same(jax_transforms.run(TURNED, on(given), given), expected(TURNED, given), given)


@pytest.mark.parametrize(
    "dtype",
    [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.complex64, bool],
)
def test_unusual_dtypes(dtype):
    given = rows((3, 4), dtype=dtype)
    same(jax_transforms.run(TURNED, on(given), given), expected(TURNED, given), given)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_mesh_that_the_user_has_set_is_left_alone(kind):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
    given = rows((2, 3))
    with jax.set_mesh(mesh):
        made = jax_transforms.run(TURNED, on(given), given)
        wholes = jax_transforms.empty(tuple(DEVICES), (3, 2), np.float32)
        wholes = jax_transforms.run(TURNED, on(given), given, wholes, (0, 0))
        assert jax.sharding.get_mesh() == mesh
    same(made, expected(TURNED, given), given)
    same(wholes, expected(TURNED, given), given)


def test_parts_are_put_into_the_memory_of_the_whole():
    given = rows((2, 3))
    wholes = jax_transforms.empty(tuple(DEVICES), (4, 5), np.float32)
    pointers = [each.unsafe_buffer_pointer() for each in wholes]
    wholes = jax_transforms.run(TURNED, on(given), given, wholes, (1, 0))
    wholes = jax_transforms.run(TURNED, on(given), given, wholes, (1, 3))
    jax_transforms.wait(wholes)
    assert [each.unsafe_buffer_pointer() for each in wholes] == pointers
    for whole, part in zip(wholes, expected(TURNED, given), strict=True):
        numbers = np.zeros((4, 5), np.float32)
        numbers[1:, :2] = numbers[1:, 3:] = part
        assert (np.asarray(whole) == numbers).all()


def test_parts_put_elsewhere_share_a_compilation():
    given = rows((3, 2), devices=DEVICES[:3])
    wholes = jax_transforms.empty(tuple(DEVICES[:3]), (2, 21), np.float32)
    wholes = jax_transforms.run(TURNED, on(given), given, wholes, (0, 0))
    with compiles() as made:
        for at in range(3, 21, 3):
            wholes = jax_transforms.run(TURNED, on(given), given, wholes, (0, at))
    assert made == []


def test_layers_share_a_compilation():
    shape = (7, 11)
    with compiles() as made:
        for _ in range(12):
            jax_transforms.wait(jax_transforms.run(TURNED, tuple(DEVICES), rows(shape)))
    assert len(made) == 1


def test_what_was_made_shares_no_memory_with_on_what_came():
    (given,) = rows((4, 4), devices=DEVICES[:1])
    for transform in (reshaped((4, 4), (16,)), Transform((Branch((4, 4)),))):
        (made,) = jax_transforms.run(transform, on([given]), [given])
        assert made.unsafe_buffer_pointer() != given[0].unsafe_buffer_pointer()


def test_what_was_made_can_be_donated():
    made = jax_transforms.run(TURNED, tuple(DEVICES), rows((64, 32)))
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    for each in made:
        pointer = each.unsafe_buffer_pointer()
        assert double(each).unsafe_buffer_pointer() == pointer


def test_nothing_is_there_without_elements():
    made = jax_transforms.empty(tuple(DEVICES), (0, 3), ml_dtypes.bfloat16)
    assert [each.device for each in made] == DEVICES
    assert all(each.shape == (0, 3) and each.dtype == jnp.bfloat16 for each in made)


def test_no_room(monkeypatch):
    def refuse(_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying\nmore")

    monkeypatch.setattr(jax, "block_until_ready", refuse)
    with pytest.raises(errors.MemoryLimitError, match="Out of memory while trying]"):
        jax_transforms.wait([])
