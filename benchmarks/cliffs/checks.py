"""Two checkpoints compared, one rewritten, and one hashed."""

from __future__ import annotations

import json
import mmap
import os
import random
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cliffs.row import Row


def rows(folder: Path, scale: float) -> Iterator[Row]:
    """`diff` and `align` of many tiny tensors and of large ones; `verify` by each algorithm."""
    for count in (2_000, 20_000):
        yield from _many(folder, max(10, int(count * scale)))
    for nbytes in (1e8, 1e9):
        yield from _large(folder, max(1 << 20, int(nbytes * scale)))


def _many(folder: Path, count: int) -> Iterator[Row]:
    import mfload

    data = np.random.default_rng(0).random((count, 64), np.float32)
    # Every other one is shorter, so that `align` moves them.
    tensors = {f"layer.{n}.weight": row[: 64 - n % 2] for n, row in enumerate(data)}
    shuffled = list(tensors)
    random.Random(0).shuffle(shuffled)
    one, other = folder / "one.safetensors", folder / "other.safetensors"
    out = folder / "out.safetensors"
    _write(one, tensors)
    _write(other, {name: tensors[name] for name in shuffled})
    assert mfload.diff(one, other).equal
    for path, what in ((one, "in one order"), (other, "in another")):
        theirs = partial(_two_loads, one, path)
        ours = partial(mfload.diff, one, path)
        yield Row(f"diff, {count} x 256 B, {what}", ours, "2 loads, comparison", theirs, 1.5)
    ours = partial(mfload.verify, one, against=other)
    theirs = partial(_two_loads, one, other)
    yield Row(f"verify against, {count} x 256 B", ours, "2 loads, comparison", theirs, 1.5)
    mfload.align(one, out, overwrite=True)
    assert mfload.diff(out, one).equal
    for path, what in ((one, "moved"), (out, "as they lie")):
        name, new = f"align, {count} x 256 B, {what}", folder / "new.safetensors"
        ours, theirs = (
            partial(mfload.align, path, new, overwrite=True),
            partial(_rewrite, path, new),
        )
        yield Row(name, ours, "load, save, sync, load", theirs, 1.5)


def _large(folder: Path, nbytes: int) -> Iterator[Row]:
    import mfload

    data = np.frombuffer(np.random.default_rng(0).bytes(nbytes // 40), np.uint8)
    path, size = folder / f"{nbytes}.safetensors", f"{nbytes / 1e9:g} GB"
    _write(path, {f"layer.{n}.weight": data for n in range(40)})
    threads = min(os.cpu_count() or 1, 8)
    write = partial(mfload.verify, path, mode="write", checksums="xxh3", overwrite=True)
    peer, theirs = f"xxh3 of a map, {threads} threads", partial(_hash, path, threads)
    sync = 0.01 if nbytes < 5e8 else 0.0  # Of the manifest, which the alternative does not write.
    yield Row(f"verify write, xxh3, {size}", write, peer, theirs, 1.2, allowance=sync)
    write()
    assert mfload.verify(path, checksums="xxh3").data_checked
    ours, theirs = partial(mfload.diff, path, path), partial(_two_loads, path, path)
    yield Row(f"diff, 40 x {nbytes / 4e7:g} MB", ours, "2 loads, comparison", theirs, 1.0)


def _write(path: Path, tensors: Mapping[str, Any]) -> None:
    """A safetensors file with tensors in the order given."""
    header: dict[str, Any] = {}
    end = 0
    for name, array in tensors.items():
        dtype = {"float32": "F32", "uint8": "U8"}[array.dtype.name]
        place = [end, end + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": place}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            file.write(array)


def _two_loads(one: Path, other: Path) -> None:
    from safetensors.numpy import load_file

    left, right = load_file(one), load_file(other)
    assert all(np.array_equal(array, right[name]) for name, array in left.items())


def _rewrite(path: Path, new: Path) -> None:
    from safetensors.numpy import load_file, save_file

    save_file(load_file(path), new)
    with new.open("rb") as file:
        os.fsync(file.fileno())
    load_file(new)


def _hash(path: Path, threads: int) -> None:
    """Hashes a map of a file, an equal part a thread."""
    from xxhash import xxh3_128

    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
        ThreadPoolExecutor(threads) as pool,
    ):
        part = -(-len(view) // threads)

        def work(n: int) -> None:
            with view[n * part : (n + 1) * part] as mine:
                xxh3_128(mine).digest()

        list(pool.map(work, range(threads)))
