"""Whether it is right: values, places and dtypes of what is loaded; each a process of its own."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import gpu_memory
from benchmarks.gpu_given import (
    Given,
    Row,
    SkipError,
    doubled,
    fetched,
    floats,
    landings,
    write,
    wrong,
)
from mfload import dtypes, errors
from mfload.frameworks import resolve

_PADS = (0, 1, 7, 8, 24, 31, 32, 40, 63, 100, 255)
"""Spaces behind the header."""
_PAIRS = (
    ("F32", "bfloat16"), ("F32", "float16"), ("BF16", "float32"), ("F16", "float32"),
    ("F64", "float32"), ("F8_E4M3", "bfloat16"), ("F8_E5M2", "float16"), ("F32", "float8_e4m3fn"),
)  # fmt: skip


def _rows(dtype: str) -> list[Row]:
    """Tensors of a dtype: tiny, odd, empty, and longer than a slot of any size but the largest."""
    whole = dtypes.TABLE[dtype].elements
    shapes: list[tuple[int, ...]] = [(8,), (24, 40), (0, 8), (3, 1000, 1016)]
    shapes += [(), (3, 5), (4093,)] if whole == 1 else []
    return [Row(f"{dtype}.{i}", dtype, shape) for i, shape in enumerate(shapes)]


def all_dtypes(given: Given, framework: str, engine: str, allocator: str) -> str:
    """Every dtype, bit for bit: at the address, and as the framework fetches it."""
    given.try_engine(framework, engine)

    def one(dtype: str) -> None:
        number = list(dtypes.TABLE).index(dtype)
        path = given.folder / f"{dtype}.safetensors"
        stored = write(path, _rows(dtype), number, number)
        arrays = given.load(path, framework, engine=engine, allocator=allocator)
        for name, data in stored.items():
            if not _equal(given, framework, path, name, arrays[name], data):
                raise AssertionError(f"{name} {arrays[name].shape}: other bits than the file's")

    return _each(dtypes.TABLE, one)


def _each(dtypes: Iterable[str], one: Callable[[str], None]) -> str:
    """Tries every dtype, whatever becomes of the others.

    Raises:
        AssertionError: One failed, or none was right; says what came of each.
    """
    equal: list[str] = []
    refused: list[str] = []
    bad: list[str] = []
    for dtype in dtypes:
        try:
            one(dtype)
        except errors.UnsupportedDtypeError:
            refused.append(dtype)
        except Exception as error:  # noqa: BLE001  What a framework makes of a dtype is an answer.
            traceback.print_exc()
            bad.append(f"{dtype}: {type(error).__name__}: {str(error)[:100]}")
        else:
            equal.append(dtype)
    found = {"failed": bad, "equal": equal, "refused": refused}
    said = "; ".join(f"{what}: {', '.join(which)}" for what, which in found.items() if which)
    if bad or not equal:
        raise AssertionError(said)
    return said


def _equal(given: Given, framework: str, path: Path, name: str, array: Any, data: bytes) -> bool:
    [(_, nbytes)] = gpu_memory.spans(framework, {name: array})
    got = fetched(framework, array)
    if nbytes == len(data):
        return given.raw(framework, array) == data and got in (None, data)
    # The framework stores it otherwise than the file does: an element of F4 a byte in JAX.
    host = Given(gpu_memory.HOST, given.folder).load(path, framework, names=[name])[name]
    return got is not None and got == fetched(framework, host)


def alignment(given: Given, framework: str, allocator: str) -> str:
    """Addresses of arrays from files whose data starts anywhere, and computing with them."""
    least = 1 << 20
    for pad in _PADS:
        path = given.folder / f"{pad}.safetensors"
        rows = [Row("odd", "U8", (13,)), Row("half", "F16", (7,)), Row("w", "F32", (1001,))]
        write(path, rows, pad, pad)
        arrays = given.load(path, framework, allocator=allocator)
        for address, nbytes in gpu_memory.spans(framework, arrays):
            if nbytes:
                least = min(least, address & -address)
    if given.gpu and allocator == "mfload" and least < 256:
        raise AssertionError(f"an array lies on a boundary of {least} bytes, not 256")
    for pad in _PADS:
        small = given.folder / f"{pad}.floats.safetensors"
        values = floats(small, 3, 1 + pad, pad)
        found = doubled(framework, given.load(small, framework, allocator=allocator))
        bad = wrong(found, {name: value + value for name, value in values.items()})
        if bad:
            raise AssertionError(f"header + {pad}: wrong sums of {', '.join(bad)}")
    return f"every array on a boundary of {least} bytes or more"


def conversion(given: Given, framework: str) -> str:
    """`dtype=` against NumPy's `astype`, to the bit."""
    pairs = {f"{dtype} to {target}": (dtype, target) for dtype, target in _PAIRS}

    def one(pair: str) -> None:
        dtype, target = pairs[pair]
        source, wanted = dtypes.TABLE[dtype].numpy, dtypes.resolve(target).numpy
        assert source is not None
        assert wanted is not None
        path = given.folder / f"{target}.safetensors"
        write(path, [Row("w", dtype, (1001,))], 7, list(pairs).index(pair))
        values = np.random.default_rng(7).standard_normal(1001).astype(source)
        with path.open("r+b") as file:
            file.seek(-values.nbytes, 2)
            file.write(values.tobytes())
        array = given.load(path, framework, dtype=target)["w"]
        if given.raw(framework, array) != values.astype(wanted).tobytes():
            raise AssertionError("not what NumPy makes of it")

    return _each(pairs, one)


def donation(given: Given, allocator: str) -> str:
    """Arrays given to a jitted function that may write into them."""
    import jax

    path = given.folder / "donated.safetensors"
    values = floats(path, 3, 100_003, 1)
    arrays = given.load(path, "jax", allocator=allocator)
    places = dict(zip(arrays, gpu_memory.spans("jax", arrays), strict=True))
    step: Any = jax.jit(lambda array: array * 3, donate_argnums=0)
    kept: list[bool] = []
    for name, value in values.items():
        out = step(arrays[name])
        if np.asarray(out).tobytes() != (value * np.float32(3)).tobytes():
            raise AssertionError(f"{name}: wrong after donation")
        kept.append(out.unsafe_buffer_pointer() == places[name][0])
    if allocator == "framework" and not all(kept):
        raise AssertionError("XLA did not take the memory over")
    return "memory taken over" if all(kept) else "values right, memory not taken over"


def mesh(given: Given) -> str:
    """Rows, columns and replicas over all devices there are."""
    import jax
    from jax.sharding import Mesh, PartitionSpec as P

    devices = jax.devices("cuda" if given.gpu else "cpu")
    over = Mesh(np.array(devices), ("d",))
    side = 16 * len(devices)
    path = given.folder / "mesh.safetensors"
    rows = [Row(name, "F32", (side, 3 * side)) for name in ("rows", "columns", "all")]
    stored = write(path, rows, 3, 5)
    import mfload

    shardings = [("rows", P("d", None)), ("columns", P(None, "d"))]
    arrays = mfload.load(path, framework="jax", mesh=over, shardings=shardings)
    for name, data in stored.items():
        if np.asarray(arrays[name]).tobytes() != data:
            raise AssertionError(f"{name}: other bits than the file's")
    return f"{len(devices)} device{'s' if len(devices) > 1 else ''}"


def several(given: Given, framework: str) -> str:
    """Tensors spread over several devices by a mapping."""
    given.need_gpu()
    count = gpu_memory.cupy().cuda.runtime.getDeviceCount()
    if count < 2:
        raise SkipError("one device")
    import mfload

    path = given.folder / "several.safetensors"
    values = floats(path, 2 * count, 10_007, 4)
    where = {rf"^w\.{i}$": f"cuda:{i % count}" for i in range(2 * count)}
    found = doubled(framework, mfload.load(path, resolve(framework), device=where))
    bad = wrong(found, {name: value + value for name, value in values.items()})
    if bad:
        raise AssertionError(f"wrong sums of {', '.join(bad)}")
    return f"{count} devices"


def names(frameworks: list[str], engines: tuple[str, ...], *, gpu: bool) -> list[str]:
    """The trials of this module, by name."""
    found: list[str] = []
    for framework, engine in product(frameworks, engines):
        known = landings(framework)
        found += [f"dtypes/{framework}/{engine}/{allocator}" for allocator in known]
        if engine == engines[0]:
            found += [f"alignment/{framework}/{allocator}" for allocator in known]
            found.append(f"conversion/{framework}")
    if "jax" in frameworks:
        found += ["donation/auto", "donation/framework", "donation/mfload", "mesh"]
    if "torch" in frameworks and gpu:
        found.append("several/torch")
    return found
