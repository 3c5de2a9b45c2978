"""Seeds of each framework, read into each framework; every one in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conformance import material

import mfload

FRAMEWORKS = [
    name
    for name in ("numpy", "jax", "torch", "tensorflow", "paddle")
    if importlib.util.find_spec(name)
]
# What all of them have; others travel as bytes where a framework lacks them.
DTYPES = ("BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64", "C64",
          "F8_E4M3", "F8_E5M2")  # fmt: skip
SECONDS = 120

_SEED = """
import sys
import mfload

framework, path = sys.argv[1:]
with mfload.publish(mfload.load(path, framework), model="m") as seed:
    print("seed", seed.url, seed.copied_bytes, flush=True)
    sys.stdin.read()
"""

_READER = """
import json, sys
import mfload
from mfload.saving.export import export

framework, path, seeds = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

def bits(arrays):
    return {row.name: (row.dtype.name, row.shape, row.fetch().tobytes()) for row in export(arrays)}

expected = bits(mfload.load(path, framework))
parts = {"framework": framework, "shardings": [("m", 0)], "names": "^m", "shard": (1, 2)}
part = bits(mfload.load(path, **parts))
wrong = []
for name, url in seeds.items():
    for transport in ("memory", "http"):
        options = mfload.Options(timeout=60, peer=mfload.PeerOptions(transports=transport))
        if bits(mfload.load(url, framework, options=options)) != expected:
            wrong.append((name, transport, "whole"))
        if bits(mfload.load(url, **parts, options=options)) != part:
            wrong.append((name, transport, "part"))
print(json.dumps([len(expected), len(part), wrong]))
"""


def _start(stack: ExitStack, code: str, *given: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    )
    stack.callback(process.kill)
    return process


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = material.zoo(DTYPES) + [material.stored(f"m {each}", each, (60, 34)) for each in DTYPES]
    return material.save(tmp_path_factory.mktemp("peers") / "m.safetensors", rows)


@pytest.fixture(scope="module")
def seeds(path: Path) -> Iterator[dict[str, str]]:
    """URLs by framework."""
    with ExitStack() as stack:
        started = {name: _start(stack, _SEED, name, path) for name in FRAMEWORKS}
        found: dict[str, str] = {}
        for name, process in started.items():
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            line = next((each for each in lines if each.startswith("seed ")), "")
            assert line, process.communicate()[1]
            _, found[name], copied = line.split()
            # Each but single numbers of TensorFlow is read in place.
            assert int(copied) <= (100 if name == "tensorflow" else 0), name
        yield found


@pytest.mark.parametrize("reader", FRAMEWORKS)
def test_bits_are_the_same(reader: str, path: Path, seeds: dict[str, str]) -> None:
    assert list(seeds) == FRAMEWORKS
    with ExitStack() as stack:
        process = _start(stack, _READER, reader, path, json.dumps(seeds))
        said, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
    whole, part, wrong = json.loads(said.splitlines()[-1])
    assert wrong == []
    assert (whole, part) == (len(mfload.load(path, "numpy")), len(DTYPES))
