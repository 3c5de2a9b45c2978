"""Headers: one tensor of many shards, many small shards, and very many tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cliffs.row import Row

_SHARD = 80 << 10


def rows(folder: Path, scale: float) -> Iterator[Row]:
    """What reads headers and little beside them."""
    import mfload

    yield from _of_shards(folder / "shards", max(10, int(1000 * scale)))
    counts = [max(100, int(count * scale)) for count in (20_000, 200_000)]
    few, many = (_write(folder / f"{count}.safetensors", count, 1024) for count in counts)
    for path, count in zip((few, many), counts, strict=True):
        assert _keys(path) == sorted(_peer_keys(path))
        ours, theirs = partial(_keys, path), partial(_peer_keys, path)
        yield Row(f"open and keys, {count:,} tensors", ours, "safe_open", theirs, 1.3)
        plan, load = partial(mfload.plan, path), partial(mfload.load, path, "numpy")
        yield Row(f"plan, {count:,} tensors of 1 KiB", plan, "our load", load, 1 / 3)
    ten = _repeated(partial(_keys, few), 10)
    name = f"keys of {counts[1]:,} tensors"
    yield Row(name, partial(_keys, many), f"10 of {counts[0]:,}", ten, 1.5)
    for path in (few, many):
        path.unlink()
    counts = [max(100, int(count * scale)) for count in (100_000, 300_000)]
    few, many = (_write(folder / f"{count}.safetensors", count, 16) for count in counts)
    whole = partial(mfload.load, many, "numpy")
    three = _repeated(partial(mfload.load, few, "numpy"), 3)
    yield Row(f"load {counts[1]:,} of 16 bytes", whole, f"3 of {counts[0]:,}", three, 1.2)


def _of_shards(folder: Path, count: int) -> Iterator[Row]:
    import safetensors
    import safetensors.numpy

    import mfload

    folder.mkdir()
    files: list[Path] = []
    placed: dict[str, str] = {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        files.append(_write(folder / name, 2, _SHARD // 2, f"layers.{number}"))
        placed |= {f"layers.{number}.{n}": name for n in range(2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    middle = count // 2
    wanted = f"layers.{middle}.1"

    def one() -> Any:
        with safetensors.safe_open(files[middle], "numpy") as opened:
            return opened.get_tensor(wanted)

    def get() -> Any:
        with mfload.open(folder, "numpy") as opened:
            return opened.get_tensor(wanted)

    def all_files() -> Any:
        made: dict[str, Any] = {}
        for file in files:
            made |= safetensors.numpy.load_file(file)
        return made

    names = partial(mfload.load, folder, "numpy", names=[wanted])
    plan = partial(mfload.plan, folder, names=[wanted])
    load = partial(mfload.load, folder, "numpy")
    assert names()[wanted].tobytes() == get().tobytes() == one().tobytes()
    ours, theirs = load(), all_files()
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    for what, call in (("load names=", names), ("open, get_tensor", get), ("plan names=", plan)):
        text = f"{what}: one tensor of {count:,} shards"
        yield Row(text, call, "safe_open of the file", one, 1, allowance=5e-3)
    yield Row(f"load {count:,} shards of 80 KiB", load, "load_file of each", all_files, 1.3)


def _write(path: Path, count: int, nbytes: int, prefix: str = "t") -> Path:
    from safetensors.numpy import save_file

    data = np.frombuffer(np.random.default_rng(0).bytes(count * nbytes), np.float32)
    save_file({f"{prefix}.{n}": each for n, each in enumerate(data.reshape(count, -1))}, path)
    return path


def _keys(path: Path) -> list[str]:
    import mfload

    with mfload.open(path) as opened:
        return opened.keys()


def _peer_keys(path: Path) -> list[str]:
    import safetensors

    with safetensors.safe_open(path, "numpy") as opened:
        return list(opened.keys())


def _repeated(call: Callable[[], Any], times: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(times):
            call()

    return repeated
