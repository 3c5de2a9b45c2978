"""Checkpoints to measure with, written by safetensors' own writer, and what must be found in them.

The three files start their data at 8, 32 and 40 mod 64, as files found in the wild do, and a few
tensors have odd sizes, so that those behind them lose their alignment.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks.shapes import Family, Shapes, bytes_of, draw
from benchmarks.subject import Subject, whole

PAGE = 4096
DATA_STARTS = (8, 32, 40)
"""Where the data of each file starts, mod 64: what decides whether JAX can alias it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A written checkpoint and what a loader must find in it.

    Args:
        paths: The files.
        nbytes: Bytes of tensor data, all files together.
        tensors: Number of tensors.
        page_sum: Sum over every tensor's bytes 0, 4096, 8192, …: what touching must yield.
        file_sum: The same over whole files, for reads that know no tensors.
        starts: Where each file's data starts, mod 64.
        drawn: What the shapes were drawn from, in words.
        largest: Bytes of the largest tensor.
    """

    paths: tuple[str, ...]
    nbytes: int
    tensors: int
    page_sum: int
    file_sum: int
    starts: tuple[int, ...]
    drawn: str
    largest: int

    def subject(self) -> Subject:
        """The checkpoint as loaders and ceilings are given it."""
        files = list(self.paths)
        return Subject(
            path=files,
            files=files,
            extents=whole(files),
            nbytes=self.nbytes,
            tensors=self.tensors,
            page_sum=self.page_sum,
            file_sum=self.file_sum,
        )


def _data_start(path: str) -> int:
    """Offset of the first data byte: eight bytes of length, then the header."""
    with open(path, "rb") as file:
        return 8 + struct.unpack("<Q", file.read(8))[0]


def _fill(rng: np.random.Generator, shapes: Shapes) -> dict[str, np.ndarray]:
    """Random bf16 tensors of these shapes; random, so that nothing on the way can compress them."""
    return {
        name: np.frombuffer(rng.bytes(bytes_of([(name, shape)])), ml_dtypes.bfloat16).reshape(shape)
        for name, shape in shapes
    }


def _page_sum(arrays: dict[str, np.ndarray]) -> int:
    """Sum of every 4096th byte of each array, from its first."""
    flat = (array.reshape(-1).view(np.uint8) for array in arrays.values())
    return sum(int(array[::PAGE].sum(dtype=np.uint64)) for array in flat)


def _write(path: str, arrays: dict[str, np.ndarray], start: int | None) -> None:
    """Write one file, its data starting at `start` mod 64 (None: wherever it falls)."""
    save_file(arrays, path, metadata={"format": "pt", "note": ""})
    if start is not None:
        # The writer pads its header to 8 bytes, so a note longer by a multiple of 8 moves the data
        # by as much. Writing twice spares guessing at the writer's JSON.
        note = "-" * ((start - _data_start(path)) % 64)
        save_file(arrays, path, metadata={"format": "pt", "note": note})
        if _data_start(path) % 64 != start:
            raise RuntimeError(
                f"{path}: data starts at {_data_start(path) % 64} mod 64, not {start}"
            )
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _save(
    folder: Path,
    rng: np.random.Generator,
    parts: list[Shapes],
    starts: tuple[int | None, ...],
    drawn: str,
) -> Checkpoint:
    """Write the parts as the files of one checkpoint and note what must be found in them."""
    folder.mkdir(parents=True)
    paths: list[str] = []
    page_sum = file_sum = 0
    for i, (shapes, start) in enumerate(zip(parts, starts, strict=True), 1):
        path = str(folder / f"model-{i:05}-of-{len(parts):05}.safetensors")
        arrays = _fill(rng, shapes)
        _write(path, arrays, start)
        page_sum += _page_sum(arrays)
        file_sum += int(np.memmap(path, np.uint8, "r")[::PAGE].sum(dtype=np.uint64))
        paths.append(path)
    return Checkpoint(
        paths=tuple(paths),
        nbytes=sum(bytes_of(shapes) for shapes in parts),
        tensors=sum(len(shapes) for shapes in parts),
        page_sum=page_sum,
        file_sum=file_sum,
        starts=tuple(_data_start(path) % 64 for path in paths),
        drawn=drawn,
        largest=max(bytes_of([row]) for shapes in parts for row in shapes),
    )


def write_llama(folder: Path, seed: int, nbytes: int) -> Checkpoint:
    """Write a Llama-like bf16 checkpoint in three files.

    Args:
        folder: A folder to make.
        seed: What the shapes and the values follow from.
        nbytes: Bytes of tensor data to come close to.

    Returns:
        The checkpoint, its data starting at 8, 32 and 40 mod 64.
    """
    rng = np.random.default_rng(seed)
    return _save_llama(folder, rng, nbytes, *draw(rng, nbytes))


def write_divisible(folder: Path, seed: int, nbytes: int) -> Checkpoint:
    """The same with dims that 8 divides, but for a few odd tensors, and one large embedding.

    The embedding takes 0.3 to 0.4 of the bytes: of 1 GB, more than mfload holds beside a result.
    """
    rng = np.random.default_rng(seed)
    family, shapes = draw(rng, nbytes, (0.3, 0.4), tied=True, multiple=8)
    return _save_llama(folder, rng, nbytes, family, shapes)


def _save_llama(
    folder: Path, rng: np.random.Generator, nbytes: int, family: Family, shapes: Shapes
) -> Checkpoint:
    parts: list[Shapes] = [[], [], []]
    done = 0
    for name, shape in shapes:
        parts[min(2, 3 * done // nbytes)].append((name, shape))
        done += bytes_of([(name, shape)])
    return _save(folder, rng, parts, DATA_STARTS, f"like {family.name}")


def write_many_small(folder: Path, seed: int, tensors: int) -> Checkpoint:
    """Write one file of `tensors` bf16 tensors of 1 KiB each."""
    rng = np.random.default_rng(seed)
    shapes: Shapes = [(f"model.layers.{i}.weight", (512,)) for i in range(tensors)]
    return _save(folder, rng, [shapes], (None,), f"{tensors} tensors of 1 KiB")


def write_single(folder: Path, seed: int, nbytes: int) -> Checkpoint:
    """Write a Llama-like bf16 checkpoint of one file."""
    rng = np.random.default_rng(seed)
    family, shapes = draw(rng, nbytes)
    return _save(folder, rng, [shapes], DATA_STARTS[:1], f"like {family.name}, in one file")


def write_experts(folder: Path, seed: int, tensors: int, nbytes: int) -> Checkpoint:
    """Write one file of `tensors` bf16 matrices, alike in size, as small experts have them."""
    rng = np.random.default_rng(seed)
    rows = max(1, nbytes // tensors // 512)
    shapes: Shapes = [
        (f"model.layers.{i // 192}.mlp.experts.{i % 192}.weight", (rows, 256))
        for i in range(tensors)
    ]
    return _save(folder, rng, [shapes], (None,), f"{tensors} experts of {rows} × 256")
