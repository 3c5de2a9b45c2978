"""Breaks the code of the GPU's rooms, one place at a time, and says which breaks no test sees.

`make mutants`, or `python tests/mutants.py [part of an identifier …]`. A mutant is a copy of the
code with one statement, condition, context, constant or flag of it changed. What survives is
listed in `mutants.toml` with the reason why no test without a GPU can tell; any other survivor
fails the run. Mutation testers of others know no operator that takes a statement away, and waits
are statements.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import concurrent.futures
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KNOWN = ROOT / "tests" / "mutants.toml"
_processes = multiprocessing.get_context("forkserver")
# What each process of tests has imported when it begins.
_processes.set_forkserver_preload(["hypothesis.strategies", "ml_dtypes", "numpy", "pytest"])
_SECONDS = 600
"""Of a run of a suite. A mutant that takes longer hangs, which is seen."""

# What adapters do with memory of their frameworks.
_MEMORY = ("_copy", "_current", "_write", "allocate", "allocating", "empty", "follow", "reserve",
           "slabs")  # fmt: skip


def _tests(room: str, *names: str) -> str:
    return " ".join(f"tests/{room}/test_{name}.py" for name in names)


# A module, the functions of it that are looked at (all, if none is named), and its suites: the one
# that sees most comes first, and the rest where that sees nothing.
ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mfload/cuda/copies.py": ((), (_tests("devices", "copies", "loads"), "tests/devices")),
    "mfload/cuda/cupy_device.py": (
        (), (_tests("devices", "cupy_stub", "cupy_loads"), "tests/devices")),
    "mfload/cuda/engine.py": ((), (_tests("devices", "overlap", "faults"), "tests/devices")),
    "mfload/cuda/memory.py": ((), (_tests("devices", "memory", "fake"), "tests/devices")),
    "mfload/cuda/staging.py": (
        (), (_tests("devices", "staging", "overlap", "kits", "slots"), "tests/devices")),
    "mfload/cuda/cufile.py": ((), (_tests("devices", "cufile", "gds", "gds_loads"),)),
    "mfload/io/buffers.py": (
        ("_AnonymousMap", "never_forked"), (_tests("devices", "slots"), _tests("io", "buffers"))),
    "mfload/frameworks/cupy_adapter.py": (
        _MEMORY, (_tests("devices", "cupy_memory"), _tests("frameworks", "cupy"))),
    "mfload/frameworks/torch_memory.py": (
        (), (_tests("frameworks", "torch_pool"), _tests("frameworks", "torch_into"))),
    "mfload/frameworks/torch_adapter.py": (
        _MEMORY, (_tests("frameworks", "torch_pool"), _tests("frameworks", "torch"))),
    "mfload/frameworks/jax_memory.py": (
        _MEMORY, (_tests("frameworks", "jax_waits"), _tests("frameworks", "jax_landing"))),
    "mfload/peer/cuda_ipc.py": ((), (_tests("peer", "peer_cuda_waits", "peer_cuda_ipc"),)),
}  # fmt: skip


class Mutant(NamedTuple):
    """A change of a module: what stands in place of the characters from `start` to `stop`."""

    module: str
    name: str
    start: int
    stop: int
    instead: str

    @property
    def identifier(self) -> str:
        return f"{self.module}: {self.name}"


class _Finder(ast.NodeVisitor):
    def __init__(self, module: str, text: str, only: tuple[str, ...]) -> None:
        self.found: list[Mutant] = []
        self._module, self._only, self._inside = module, only, [""]
        self._raw = text.encode()
        self._lines = [0]
        for line in self._raw.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._seen: Counter[str] = Counter()

    def _add(self, kind: str, node: Any, instead: str) -> None:
        if self._only and not set(self._only) & set(self._inside):
            return
        start = self._lines[node.lineno - 1] + node.col_offset
        stop = self._lines[node.end_lineno - 1] + node.end_col_offset
        said = " ".join(self._raw[start:stop].decode().split())
        name = f"{'.'.join(self._inside[1:]) or 'module'}: {kind} {said}"
        self._seen[name] += 1
        name += f" ({self._seen[name]})" if self._seen[name] > 1 else ""
        instead = instead.replace("@", self._raw[start:stop].decode())
        self.found.append(Mutant(self._module, name, start, stop, instead))

    def visit(self, node: ast.AST) -> None:
        named = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if named:
            self._inside.append(node.name)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
            self._add("without", node, "pass")
        elif isinstance(node, ast.Assign) and self._inside[-1] not in ("", "__init__"):
            if all(isinstance(each, ast.Subscript | ast.Attribute) for each in node.targets):
                self._add("without", node, "pass")
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            self._add("if not", node.test, "not (@)")
        elif isinstance(node, ast.With):
            for item in node.items:
                if item.optional_vars is None:
                    self._add(
                        "outside of", item.context_expr, "__import__('contextlib').nullcontext()"
                    )
        elif isinstance(node, ast.keyword) and getattr(node.value, "value", None) is True:
            self._add("without", node, "**{}")
        if isinstance(node, ast.Assign) and len(self._inside) == 1:
            parts = [each for each in ast.walk(node.value) if isinstance(each, ast.expr)]
            if all(_is_number(each) for each in parts):  # Such as 8 << 20.
                one = all(isinstance(each, ast.Constant) and each.value == 1 for each in parts)
                self._add(f"{ast.unparse(node.targets[0])} =", node.value, "2" if one else "1")
        self.generic_visit(node)
        if named:
            self._inside.pop()


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    return isinstance(node, ast.BinOp | ast.UnaryOp)


def mutants() -> Iterator[Mutant]:
    """All of them, in the order of the code."""
    for module, (only, _) in ROOMS.items():
        text = (ROOT / module).read_text()
        finder = _Finder(module, text, only)
        finder.visit(ast.parse(text))
        yield from finder.found


def survives(mutant: Mutant, copy: Path, suites: Sequence[str]) -> bool:
    """Whether suites pass on a copy of the repository that it is put into."""
    place = copy / mutant.module
    raw = (ROOT / mutant.module).read_bytes()
    place.write_bytes(raw[: mutant.start] + mutant.instead.encode() + raw[mutant.stop :])
    try:
        return all(_passes(copy, suite) for suite in suites)
    finally:
        place.write_bytes(raw)


def _passes(copy: Path, suite: str, shown: bool = False) -> bool:
    running = _processes.Process(target=_run, args=(str(copy), suite, shown))
    running.start()
    running.join(_SECONDS)
    if running.exitcode is None:
        os.killpg(running.pid or 0, signal.SIGKILL)
        running.join()
    return running.exitcode == 0


def _run(copy: str, suite: str, shown: bool) -> None:
    os.setsid()
    os.chdir(copy)
    os.environ.update(PYTHONPATH=copy, PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    sys.path.insert(0, copy)
    if not shown:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(nowhere, number)
    import pytest

    how = ["-x", "-q", "--timeout=30", "--assert=plain", "-p", "no:cacheprovider", "-m", "not gpu"]
    sys.exit(pytest.main([*how, *suite.split()]))


def main() -> int:
    """The exit status: 1 if one survives that is not listed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="of identifiers; default: all")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--at-once", type=int, default=cores, help="default: %(default)s")
    parser.add_argument("--near", action="store_true", help="runs the first suite of each alone")
    parser.add_argument("--list", action="store_true", help="names them, and runs none")
    asked = parser.parse_args()
    chosen = [
        each
        for each in mutants()
        if not asked.parts or any(part in each.identifier for part in asked.parts)
    ]
    if asked.list:
        print("\n".join(each.identifier for each in chosen))
        return 0
    known: dict[str, str] = tomllib.loads(KNOWN.read_text())["survivors"]
    begun, alive = time.monotonic(), set[str]()
    with tempfile.TemporaryDirectory() as folder:
        copies = [_copied(Path(folder) / str(n) / "mfload") for n in range(asked.at_once)]
        most = 1 if asked.near else None
        for suite in {suite for each in chosen for suite in ROOMS[each.module][1][:most]}:
            if not _passes(copies[0], suite, shown=True):
                print(f"fails without a mutant: {suite}", file=sys.stderr)
                return 2
        for number, mutant in enumerate(_survivors(chosen, copies, most), start=1):
            if mutant is not None:
                alive.add(mutant.identifier)
                if mutant.identifier not in known:
                    print(f"SURVIVES {mutant.identifier}", flush=True)
            if not number % 20:
                print(f"{number} of {len(chosen)}", file=sys.stderr, flush=True)
    for each in chosen:
        if each.identifier in known.keys() - alive:
            print(f"seen now, though listed: {each.identifier}")
    for identifier in sorted(known.keys() - {each.identifier for each in mutants()}):
        print(f"listed, but not in the code: {identifier}")
    new, took = len(alive - known.keys()), time.monotonic() - begun
    print(f"{len(chosen)} mutants, {len(alive)} survive, {new} of them not listed; {took:.0f} s")
    return int(new > 0)


def _survivors(
    chosen: list[Mutant], copies: list[Path], most: int | None
) -> Iterator[Mutant | None]:
    """Those that survive, in order, and None for each other one."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def tried(mutant: Mutant) -> Mutant | None:
        copy = free.get()
        try:
            suites = ROOMS[mutant.module][1][:most]
            return mutant if survives(mutant, copy, suites) else None
        finally:
            free.put(copy)

    with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
        yield from pool.map(tried, chosen)


def _copied(place: Path) -> Path:
    left = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, place, ignore=left, symlinks=True)
    compileall.compile_dir(place, quiet=2)  # No run of tests does.
    return place


if __name__ == "__main__":
    sys.exit(main())
