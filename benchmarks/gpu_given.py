"""What a trial is given: a device, files that it knows every byte of, and ways to read back."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import gpu_memory
from benchmarks.calls import as_options
from benchmarks.gpu_memory import HOST
from mfload import dtypes, frameworks


def landings(framework: str) -> tuple[str, ...]:
    """What is asked for as `allocator=`."""
    return ("mfload",) if framework == "numpy" else ("auto", "mfload", "framework")


class SkipError(Exception):
    """A trial does not apply here; the message says why."""


class Row(NamedTuple):
    """A tensor to write: its name, and dtype and shape as the format has them."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return dtypes.TABLE[self.dtype].size_of(self.shape) or 0


def write(path: Path, rows: Iterable[Row], seed: int, pad: int = 0) -> dict[str, bytes]:
    """Writes a file of random bits; a header of any length, which no library would write.

    Args:
        path: Where to.
        rows: The tensors, in the order of the file.
        seed: What the bits follow from.
        pad: Spaces behind the header: they move the data.

    Returns:
        The bytes of each tensor.
    """
    rng = np.random.default_rng(seed)
    table: dict[str, Any] = {}
    data: dict[str, bytes] = {}
    at = 0
    for row in rows:
        raw = rng.bytes(row.nbytes)
        data[row.name] = bytes(b & 1 for b in raw) if row.dtype == "BOOL" else raw
        table[row.name] = {
            "dtype": row.dtype, "shape": row.shape, "data_offsets": [at, at + row.nbytes]
        }  # fmt: skip
        at += row.nbytes
    header = json.dumps(table).encode() + b" " * pad
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(data.values()))
    return data


def floats(path: Path, count: int, elements: int, seed: int) -> dict[str, np.ndarray]:
    """Writes float32 tensors of ordinary values."""
    rows = [Row(f"w.{i}", "F32", (elements,)) for i in range(count)]
    write(path, rows, seed)
    rng = np.random.default_rng(seed)
    values = {row.name: rng.standard_normal(elements, np.float32) for row in rows}
    with path.open("r+b") as file:
        file.seek(-4 * count * elements, 2)
        for value in values.values():
            file.write(value.tobytes())
    return values


class Given(NamedTuple):
    """A trial's surroundings.

    Attributes:
        device: "cpu" or "cuda:0".
        folder: A folder of its own.
    """

    device: str
    folder: Path

    @property
    def gpu(self) -> bool:
        """Whether there is one."""
        return self.device != HOST

    def need_gpu(self) -> None:
        """Skips the trial without one."""
        if not self.gpu:
            raise SkipError("needs a GPU")

    def load(self, path: Path, framework: str, **options: Any) -> dict[str, Any]:
        """`mfload.load` onto the device."""
        import mfload

        if framework != "numpy":
            options["device"] = self.device
        return mfload.load(path, frameworks.resolve(framework), **as_options(options))

    def try_engine(self, framework: str, engine: str) -> None:
        """Skips the trial where mfload takes another engine than the one asked for."""
        from mfload import Report

        path = self.folder / "try.safetensors"
        write(path, [Row("w", "F32", (4 << 20,))], 0)
        report = Report()
        self.load(path, framework, engine=engine, report=report)
        for _, taken, why in report.route:
            if engine not in ("auto", taken):
                raise SkipError(f"{engine} was asked for and {taken} taken: {why}")

    def raw(self, framework: str, array: Any) -> bytes:
        """The bytes that lie at an array's address."""
        [(address, nbytes)] = gpu_memory.spans(framework, {"": array})
        return gpu_memory.read(address, nbytes, self.device) if nbytes else b""


def fetched(framework: str, array: Any) -> bytes | None:
    """An array's bytes as its framework brings them to the host; None where NumPy has no such."""
    if framework == "torch":
        import torch

        return array.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    if framework == "jax":
        return np.asarray(array).tobytes()
    if framework == "cupy":
        return array.get().tobytes()
    return array.tobytes() if framework == "numpy" else None


def need_kernels() -> None:
    """Skips the trial where CuPy compiles none: it brings no headers of CUDA's along."""
    cupy = gpu_memory.cupy()
    try:
        kernel = cupy.ElementwiseKernel("float16 x", "float32 y", "y = x + 1", "mfload_probe")
        float(kernel(cupy.zeros(3, "float16"))[2])
    except Exception as error:
        raise SkipError(f"CuPy compiles no kernels here: {error}") from error


def doubled(framework: str, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Twice each array, computed on its device; skips the trial where nothing can be."""
    if framework == "jax":
        import jax

        twice: Any = jax.jit(lambda array: array + array)
        return {name: np.asarray(twice(array)) for name, array in arrays.items()}
    if framework == "torch":
        return {name: (array + array).cpu().numpy() for name, array in arrays.items()}
    if framework == "cupy":
        need_kernels()
        return {name: (array + array).get() for name, array in arrays.items()}
    return {name: array + array for name, array in arrays.items()}


def wrong(arrays: Mapping[str, np.ndarray], values: Mapping[str, np.ndarray]) -> Sequence[str]:
    """The names whose values are not equal to the bit."""
    return [name for name, value in values.items() if arrays[name].tobytes() != value.tobytes()]
