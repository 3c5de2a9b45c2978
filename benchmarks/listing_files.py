"""Checkpoints to be listed: many tensors, many shards, and many bytes that are not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from benchmarks.subject import Subject
from mfload import dtypes
from mfload.bench.ceilings import ByteRange
from mfload.index import Piece, TensorInfo
from mfload.saving import layout

_WIDE = 25_600
"""Columns of a tensor of 52 MB."""


class Listed(NamedTuple):
    """A checkpoint to list.

    Attributes:
        subject: Its path, its files, and their headers as extents.
        words: What it is, for people.
        short: The same in few words.
        nbytes: Bytes of tensor data, on the disk or not.
    """

    subject: Subject
    words: str
    short: str
    nbytes: int


def write(folder: Path, shards: int, tensors: int, columns: int, words: str, short: str) -> Listed:
    """Write shards of bf16 tensors whose data is a hole: only headers take room on the disk.

    Args:
        folder: A folder to make.
        shards: How many files; more than one get an index.
        tensors: How many in each.
        columns: Width of each tensor, of 1024 rows.
        words: What it is, for people.
        short: The same in few words.
    """
    folder.mkdir(parents=True)
    placed: dict[str, str] = {}
    files: list[str] = []
    headers: list[ByteRange] = []
    nbytes = 0
    for shard in range(shards):
        entries = [
            TensorInfo(
                f"model.layers.{shard}.experts.{n}.weight",
                dtypes.TABLE["BF16"],
                (1024, columns),
                (Piece(0, 0, 2 * 1024 * columns),),
            )
            for n in range(tensors)
        ]
        name = f"model-{shard + 1:05}-of-{shards:05}" if shards > 1 else "model"
        path = folder / f"{name}.safetensors"
        laid = layout.lay_out(entries)
        with open(path, "wb") as file:
            file.write(laid.header)
            file.truncate(laid.size)
            os.fsync(file.fileno())
        placed |= {entry.name: path.name for entry in entries}
        files.append(str(path))
        headers.append(ByteRange(str(path), 0, len(laid.header)))
        nbytes += laid.size - len(laid.header)
    where = Path(files[0])
    if shards > 1:
        where = folder / "model.safetensors.index.json"
        where.write_text(json.dumps({"metadata": {"total_size": nbytes}, "weight_map": placed}))
        headers.append(ByteRange(str(where), 0, where.stat().st_size))
    subject = Subject(str(where), files, headers, 0, len(placed))
    return Listed(subject, words, short, nbytes)


def write_all(folder: Path, scale: float) -> dict[str, Listed]:
    """The three checkpoints, by case.

    Args:
        folder: Where to.
        scale: A part of their full number of tensors and shards.
    """
    many, shards, huge = (max(1, int(n * scale)) for n in (20_000, 1_000, 200))
    terabytes = f"{huge * 100 * 1024 * _WIDE * 2 / 1e12:.2f} TB"
    return {
        "file": write(
            folder / "file",
            1,
            many,
            1,
            f"{many:,} tensors in one file",
            f"{many:,} tensors, one file",
        ),
        "shards": write(
            folder / "shards",
            shards,
            20,
            1,
            f"{shards:,} shards of 20 tensors, with an index",
            f"{shards:,} shards of 20 tensors",
        ),
        "huge": write(
            folder / "huge",
            huge,
            100,
            _WIDE,
            f"{terabytes} in {huge} sparse shards of 100 tensors, with an index",
            f"{terabytes} in {huge} shards",
        ),
    }
