"""Whether a busy consumer sees the right values: loads beside kernels that are still running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import gpu_memory
from benchmarks.gpu_given import Given, doubled, floats, landings, need_kernels, wrong

_ELEMENTS = 1_000_003
"""Floats of a tensor: no multiple of anything, and several to a slot."""
_BUSY = 600_000_000
"""Cycles that a stream is kept busy: a third of a second or so."""
_RACES = 20


def streams(given: Given, framework: str, allocator: str) -> str:
    """Loads while the consumer's stream is busy; uses, frees and loads again at once."""
    busy = {"torch": _torch, "jax": _jax, "cupy": _cupy}[framework]
    first, second = given.folder / "1.safetensors", given.folder / "2.safetensors"
    values = [floats(path, 5, _ELEMENTS, seed) for seed, path in enumerate((first, second))]
    paths = (first, second)
    rounds = 4 if given.gpu else 2

    def load(number: int) -> dict[str, Any]:
        return given.load(paths[number], framework, allocator=allocator)

    for turn in range(rounds):
        for number, found in busy(given, load):
            twice = {name: value + value for name, value in values[number].items()}
            bad = wrong(found, twice)
            if bad:
                raise AssertionError(f"round {turn + 1}, load {number + 1}: wrong {', '.join(bad)}")
    return f"{rounds} rounds"


Found = list[tuple[int, dict[str, np.ndarray]]]


def _torch(given: Given, load: Callable[[int], dict[str, Any]]) -> Found:
    import torch

    if not given.gpu:
        return [(number, doubled("torch", load(number))) for number in (0, 1)]
    side: Any = torch.cuda.Stream()
    # Memory that torch's allocator takes back while a kernel is still going to write there: a
    # load that lands in it must wait.
    stale = [torch.empty(_ELEMENTS, device=given.device) for _ in range(5)]
    torch.cuda._sleep(_BUSY)
    stale = [each.fill_(float("nan")) for each in stale]
    del stale
    arrays = load(0)
    with torch.cuda.stream(side):
        torch.cuda._sleep(_BUSY)
        first = {name: array + array for name, array in arrays.items()}
    # The arrays go while the stream has yet to read them, and their memory may be used again.
    while arrays:
        arrays.popitem()[1].record_stream(side)
    with torch.cuda.stream(side):
        arrays = load(1)
        second = {name: array + array for name, array in arrays.items()}
    torch.cuda.synchronize()
    return [(n, {name: a.cpu().numpy() for name, a in found.items()})
            for n, found in enumerate((first, second))]  # fmt: skip


def _jax(given: Given, load: Callable[[int], dict[str, Any]]) -> Found:
    import jax
    import jax.numpy as jnp

    side = 6000 if given.gpu else 60
    slow: Any = jax.jit(lambda m: jax.lax.fori_loop(0, 8, lambda _, x: jnp.tanh(x @ m), m))
    twice: Any = jax.jit(lambda array: array + array)
    device = jax.devices("cuda" if given.gpu else "cpu")[0]
    found: Found = []
    matrix = jax.device_put(np.full((side, side), 1e-3, np.float32), device)
    for number in (0, 1):
        stale = [jnp.full(_ELEMENTS, jnp.nan) for _ in range(5)]
        running = slow(matrix)
        late = [each + running[0, 0] for each in stale]
        del stale
        arrays = load(number)  # The device is still at work on the matrix.
        outs = {name: twice(array) for name, array in arrays.items()}
        arrays.clear()
        again = load(1 - number)
        found.append((number, {name: np.asarray(out) for name, out in outs.items()}))
        outs = {name: twice(array) for name, array in again.items()}
        found.append((1 - number, {name: np.asarray(out) for name, out in outs.items()}))
        jax.block_until_ready(late)
    return found


def _spin(cp: Any) -> Any:
    """A kernel that takes so many cycles."""
    source = 'extern "C" __global__ void spin(long long n) { long long t = clock64(); '
    return cp.RawKernel(source + "while (clock64() - t < n) {} }", "spin")


def _cupy(given: Given, load: Callable[[int], dict[str, Any]]) -> Found:
    given.need_gpu()
    need_kernels()
    cp = gpu_memory.cupy()
    stream = cp.cuda.Stream(non_blocking=True)
    spin = _spin(cp)
    found: Found = []
    for number in (0, 1):
        with stream:
            spin((1,), (1,), (_BUSY,))
            arrays = load(number)
            outs = {name: array + array for name, array in arrays.items()}
            spin((1,), (1,), (_BUSY,))
            more = {name: array + array for name, array in arrays.items()}
            arrays.clear()
            again = load(1 - number)
            last = {name: array + array for name, array in again.items()}
        stream.synchronize()
        found += [(n, {name: a.get() for name, a in which.items()})
                  for n, which in ((number, outs), (number, more), (1 - number, last))]  # fmt: skip
    return found


def busy_mmap(given: Given) -> str:
    """CuPy through a map of the file, on a stream that is busy and does not block the null one."""
    given.need_gpu()
    need_kernels()
    cp = gpu_memory.cupy()
    path = given.folder / "mmap.safetensors"
    values = floats(path, 5, _ELEMENTS, 3)
    stream, spin = cp.cuda.Stream(non_blocking=True), _spin(cp)
    for turn in range(_RACES):
        with stream:
            spin((1,), (1,), (_BUSY // 10,))
            arrays = given.load(path, "cupy", engine="mmap")
            outs = {name: array + array for name, array in arrays.items()}
            arrays.clear()
        stream.synchronize()
        _right(turn, {name: out.get() for name, out in outs.items()}, values)
    return f"{_RACES} rounds"


def dropped(given: Given) -> str:
    """Tensors of a stream, used and dropped on a side stream while the next are being loaded."""
    import torch

    import mfload

    given.need_gpu()
    path = given.folder / "dropped.safetensors"
    values = floats(path, 8, _ELEMENTS, 4)
    side: Any = torch.cuda.Stream()
    for turn in range(_RACES):
        outs: dict[str, Any] = {}
        with torch.cuda.stream(side):
            torch.cuda._sleep(_BUSY // 10)
            with mfload.stream(path, "torch", device=given.device) as tensors:
                for name, tensor in tensors:
                    outs[name] = tensor + tensor
                    del tensor
        side.synchronize()
        _right(turn, {name: out.cpu().numpy() for name, out in outs.items()}, values)
    return f"{_RACES} rounds"


def lazy(given: Given) -> str:
    """Lazy `copy_` into parameters, used at once on the same stream, without waiting."""
    import torch

    import mfload

    path = given.folder / "lazy.safetensors"
    values = floats(path, 8, _ELEMENTS, 5)
    targets = {name: torch.empty(_ELEMENTS, device=given.device) for name in values}
    side: Any = torch.cuda.Stream() if given.gpu else None
    for turn in range(_RACES if given.gpu else 1):
        with torch.cuda.stream(side):
            for target in targets.values():
                target.fill_(float("nan"))
            if given.gpu:
                torch.cuda._sleep(_BUSY // 10)
            with mfload.stream(path, "torch", lazy=True) as tensors:
                outs: dict[str, Any] = {}
                for name, tensor in tensors:
                    outs[name] = targets[name].copy_(tensor) * 2
        if given.gpu:
            side.synchronize()
        _right(turn, {name: out.cpu().numpy() for name, out in outs.items()}, values)
    return f"{_RACES} rounds"


def _right(turn: int, outs: dict[str, np.ndarray], values: dict[str, np.ndarray]) -> None:
    bad = wrong(outs, {name: value + value for name, value in values.items()})
    if bad:
        raise AssertionError(f"round {turn + 1}: wrong {', '.join(bad)}")


def races(frameworks: list[str], *, gpu: bool) -> list[str]:
    """The trials of races that were found by reading, by name."""
    found = ["busy-mmap"] if "cupy" in frameworks else []
    if "torch" in frameworks:
        found += [*(["dropped"] if gpu else []), "lazy"]
    return found


def names(frameworks: list[str]) -> list[str]:
    """The trials of this module, by name."""
    return [
        f"streams/{framework}/{allocator}"
        for framework in frameworks
        if framework != "numpy"
        for allocator in landings(framework)
    ]
