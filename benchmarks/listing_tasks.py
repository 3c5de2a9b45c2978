"""Ways to list a checkpoint from Python, each measured in a process of its own."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from benchmarks.tasks import Found, Job, Task

Row = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a tensor."""


def _headers(job: Job) -> list[Row]:
    """The floor: read every header, have Python's own JSON take it apart, check nothing."""
    rows: list[Row] = []
    for path in job["files"]:
        with open(path, "rb", buffering=0) as file:
            length = int.from_bytes(file.read(8), "little")
            table: dict[str, Any] = json.loads(file.read(length))
        table.pop("__metadata__", None)
        rows += [(name, row["dtype"], tuple(row["shape"])) for name, row in table.items()]
    return rows


def _mfload_open(job: Job) -> list[Row]:
    import mfload

    with mfload.open(job["path"]) as opened:
        infos = [opened.info(name) for name in opened]
        return [(info.name, info.dtype.name, info.shape) for info in infos]


def _mfload_plan(job: Job) -> list[Row]:
    import mfload

    places = mfload.plan(job["path"]).plan.places
    infos = [place.request.info for place in places]
    return [(info.name, info.dtype.name, info.shape) for info in infos]


def _safetensors(job: Job) -> list[Row]:
    safe_open: Any = import_module("safetensors").safe_open
    rows: list[Row] = []
    for path in job["files"]:
        with safe_open(path, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118  It has no other way.
                tensor = opened.get_slice(name)
                rows.append((name, tensor.get_dtype(), tuple(tensor.get_shape())))
    return rows


def _safetensors_keys(job: Job) -> list[str]:
    safe_open: Any = import_module("safetensors").safe_open
    names: list[str] = []
    for path in job["files"]:
        with safe_open(path, framework="np") as opened:
            names += opened.keys()
    return names


_TASKS = {
    "headers": ("read every header, json.loads, no check", _headers),
    "mfload.open": ("mfload.open: names, dtypes, shapes", _mfload_open),
    "mfload.plan": ("mfload.plan: the same, and a plan", _mfload_plan),
    "safe_open": ("safetensors.safe_open: names, dtypes, shapes", _safetensors),
    "safe_open-keys": ("safetensors.safe_open: names alone", _safetensors_keys),
}
LABELS = {name: label for name, (label, _) in _TASKS.items()}


def find(name: str) -> Task:
    """The task of a name."""
    return Task(_TASKS[name][1], lambda rows: Found(rows, [], len(rows)))
