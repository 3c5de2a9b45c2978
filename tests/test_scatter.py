"""Boxes of one tensor, planned together: what NumPy gives, and each stored byte read once."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mfload import dtypes, errors, placement, planning, scatter, transfer
from mfload.arrangement import BufferSpec
from mfload.index import Box, Piece, TensorInfo
from mfload.io import buffers, route
from mfload.io.blocks import Costs
from mfload.io.deadline import Deadline
from mfload.io.pread import place as put
from mfload.io.source import LocalFile
from mfload.placement import Need

_STORED = ["U8", "I16", "F32", "BF16", "C64", "BOOL", "F4", "F6_E2M3"]
_TARGETS = {"I16": ["I32", "F32"], "F32": ["F64", "BF16"], "BF16": ["F32"], "BOOL": ["U8"]}


@dataclass
class Case:
    """A file in memory, needs of its tensors, and what must come out."""

    file: bytes
    needs: list[Need]
    expected: list[bytes]
    wanted: Any
    costs: Costs
    alignment: int | None


def _edges(draw: Any, length: int) -> list[int]:
    inner = draw(st.lists(st.integers(0, length), max_size=3))
    return sorted({0, length, *inner})


def _mesh(draw: Any, blocks: tuple[int, ...]) -> list[Box]:
    """A grid of boxes, some of them for several devices, some for none."""
    cuts = [list(itertools.pairwise(_edges(draw, length))) or [(0, length)] for length in blocks]
    grid = [tuple(box) for box in itertools.product(*cuts)]
    return draw(st.lists(st.sampled_from(grid), min_size=1, max_size=9)) if draw(
        st.booleans()
    ) else grid[:16]


def _any(draw: Any, blocks: tuple[int, ...]) -> list[Box]:
    """Boxes as they come, one over the other."""
    boxes: list[Box] = []
    for _ in range(draw(st.integers(1, 5))):
        ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in blocks]
        boxes.append(tuple((low, high) for low, high in ends))
    return boxes


def _array(raw: bytes, info: TensorInfo) -> Any:
    """The tensor, packed types in whole blocks."""
    dtype = info.dtype
    if dtype.elements == 1:
        return np.frombuffer(raw, dtype.numpy).reshape(info.shape)
    blocks = (*info.shape[:-1], info.shape[-1] // dtype.elements)
    return np.frombuffer(raw, f"V{dtype.nbytes}").reshape(blocks)


@st.composite
def cases(draw: Any, most: int = 12) -> Case:
    """A few tensors, each wanted in several boxes."""
    data = draw(st.binary(min_size=9, max_size=80))
    needs: list[Need] = []
    expected: list[bytes] = []
    wanted: list[int] = []
    for number in range(draw(st.integers(1, 3))):
        dtype = dtypes.TABLE[draw(st.sampled_from(_STORED))]
        rank = draw(st.integers(0 if dtype.elements == 1 else 1, 4))
        blocks = tuple(draw(st.integers(0 if n else 1, (most, 9, 6, 4)[n])) for n in range(rank))
        shape = (*blocks[:-1], blocks[-1] * dtype.elements) if rank else ()
        nbytes = dtype.size_of(shape) or 0
        raw = np.random.default_rng(number).bytes(nbytes)
        raw = bytes(byte & 1 for byte in raw) if dtype.name == "BOOL" else raw
        info = TensorInfo(f"t{number}", dtype, shape, (Piece(0, len(data), nbytes),))
        array = _array(raw, info)
        boxes = draw(st.sampled_from([_mesh, _any]))(draw, blocks)
        touched = np.zeros(blocks, np.bool_)
        for box in boxes:
            inner = tuple(slice(*ends) for ends in box)
            part = array[inner]
            ends = [(a, b) for a, b in box]
            if rank:
                ends[-1] = (ends[-1][0] * dtype.elements, ends[-1][1] * dtype.elements)
            to = dtypes.TABLE[draw(st.sampled_from([dtype.name] * 3 + _TARGETS.get(dtype.name, [])))]
            needs.append(Need(info, to, placement.boxed(info, tuple(ends))))
            if to is not dtype:
                with np.errstate(all="ignore"):
                    part = np.asarray(part).astype(to.numpy)
            expected.append(np.asarray(part).tobytes())
            touched[inner] = True
        places = np.flatnonzero(touched.reshape(-1))[:, None] * dtype.nbytes + len(data)
        wanted += (places + np.arange(dtype.nbytes)).reshape(-1).tolist()
        data += raw + draw(st.binary(max_size=5))
    order = draw(st.permutations(range(len(needs))))
    costs = Costs(
        block=draw(st.integers(16, 400)),
        merge_gap=draw(st.sampled_from([0, 1, 2, 5, 17, 60, 10_000])),
        staged=draw(st.integers(16, 400)),
    )
    flags = np.zeros(len(data), np.bool_)
    flags[wanted] = True
    return Case(
        data,
        [needs[n] for n in order],
        [expected[n] for n in order],
        flags,
        costs,
        draw(st.sampled_from([None, 64])),
    )


@pytest.fixture(autouse=True, params=[1 << 60, 5], ids=["staged", "straight"])
def _long(request: pytest.FixtureRequest) -> Iterator[None]:
    """All there is are short runs, or those that go straight to their places as well."""
    with mock.patch.object(scatter, "_LONG", request.param):
        yield


def _hold(case: Case, plan: planning.Plan, memory: list[Any]) -> None:
    for (need, buffer, at), expected in zip(plan.places, case.expected, strict=True):
        assert memory[buffer][at : at + need.nbytes].tobytes() == expected


@given(cases())
@settings(max_examples=400)
def test_each_byte_is_read_once_and_all_come_right(case: Case) -> None:
    plan = planning.make(case.needs, costs=case.costs, alignment=case.alignment)
    memory = [np.full(spec.nbytes, 0xAA, np.uint8) for spec in plan.buffers]
    read = np.zeros(len(case.file), np.int32)
    for block in plan.blocks:
        assert 0 < block.nbytes <= (case.costs.slot if block.staged else case.costs.block)
        read[block.offset : block.offset + block.nbytes] += 1
        landed = np.frombuffer(case.file, np.uint8)[block.offset : block.offset + block.nbytes]
        assert block.wanted == case.wanted[block.offset : block.offset + block.nbytes].sum()
        put(landed, block.offset, block, memory)
    _hold(case, plan, memory)
    assert read.max(initial=0) <= 1
    assert read[case.wanted].all()
    assert plan.read_bytes == read.sum()
    assert plan.wanted_bytes == case.wanted.sum()
    _check_gaps(read, case)


def _check_gaps(read: Any, case: Case) -> None:
    """What is read over is shorter than the limit."""
    over = np.concatenate([[False], (read > 0) & ~case.wanted, [False]])
    (edges,) = np.nonzero(over[1:] != over[:-1])
    gaps = edges[1::2] - edges[::2]
    assert (gaps < max(1, case.costs.merge_gap)).all()
    if case.costs.merge_gap <= 1:
        assert not gaps.size
