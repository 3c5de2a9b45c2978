"""CUDA IPC on a GPU: another process holds weights, and this one has arrays in its memory."""

from __future__ import annotations

import contextlib
import gc
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.suite import no_gpu

import mfload
from mfload import Options, PeerOptions, Report

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(no_gpu() is not None, reason=str(no_gpu()))]

SECONDS = 60
MAPPED = Options(peer=PeerOptions(transports=("cuda_ipc",)))
COPIED = Options(peer=PeerOptions(transports=("cuda_ipc",), copy=True))
FRAMEWORKS = ["cupy", "torch", "jax"]
SERVER = """
import sys
import mfload
from mfload.peer import cuda_ipc, serve
held, _ = serve.stored(sys.argv[1], devices=["cuda:0"])
seed = mfload.publish(held, model="m", peer=mfload.PeerOptions(transports=("cuda_ipc", "http")))
say = lambda text: print(text, file=sys.stderr, flush=True)
serve.run(serve.told(seed, say, cuda_ipc.leases), lambda: print(seed.url, flush=True))
"""
"""As `mfload serve --device cuda:0`, without what the command line needs."""
TENSORS = """
import sys
import torch
import mfload
held = {f"t{n}": torch.arange(n * 1000, dtype=torch.float32, device="cuda:0") for n in range(1, 9)}
peer = mfload.PeerOptions(transports=("cuda_ipc", "http"))
with mfload.publish(held, model="m", peer=peer) as seed:
    print(seed.url, flush=True)
    sys.stdin.read()
"""


def _arrays() -> dict[str, Any]:
    """Small ones share allocations, and one is larger than those."""
    found: dict[str, Any] = {f"t{n}": np.arange(n * 999, dtype=np.int32) for n in range(1, 20)}
    found["half"] = np.linspace(-1, 1, 4096, dtype=np.float16).reshape(64, 64)
    found["large"] = np.arange(3 << 20, dtype=np.float32).reshape(3, -1)
    return found


ARRAYS = _arrays()


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX, which is imported in this process, leaves others some."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@contextlib.contextmanager
def _started(*command: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """A process and the URL that it prints; killed at the end."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("peer://"), url
            yield process, url
        finally:
            process.kill()


@pytest.fixture
def served(tmp_path: Path) -> Generator[tuple[subprocess.Popen[str], str]]:
    path = tmp_path / "x.safetensors"
    mfload.save(ARRAYS, path)
    with _started(sys.executable, "-c", SERVER, str(path)) as found:
        yield found


def _host(array: Any) -> Any:
    if hasattr(array, "get"):
        return array.get()
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


def _same(found: Any, arrays: Any) -> None:
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(_host(found[name]), array)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_arrays_in_the_memory_of_a_server(served: Any, framework: Any) -> None:
    """All of them, and parts; none takes memory of its own."""
    pytest.importorskip(framework)
    report = Report()
    found = mfload.load(served[1], framework, device="cuda:0", options=MAPPED, report=report)
    _same(found, ARRAYS)
    assert report.mapped_bytes == report.result_bytes
    assert report.read_bytes == report.device_peak_bytes == 0
    assert report.route[0][1] == "peer-cuda_ipc"
    with mfload.open(served[1], framework, "cuda:0", options=MAPPED) as opened:
        for index in (np.s_[1:2], np.s_[:, 100:3000], np.s_[::2, ::-3]):
            part = opened.get_slice("large")[index]
            np.testing.assert_array_equal(_host(part), ARRAYS["large"][index])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_copies_that_outlive_a_server(served: Any, framework: Any) -> None:
    """Those that a load was asked for, in the framework's memory or mfload's."""
    pytest.importorskip(framework)
    process, url = served
    found = mfload.load(url, framework, device="cuda:0", options=COPIED)
    peer = PeerOptions(transports=("cuda_ipc",))
    how = Options(peer=peer, allocator="framework")
    own = mfload.load(url, framework, device="cuda:0", options=how)
    process.kill()
    process.wait(SECONDS)
    _same(found, ARRAYS)
    _same(own, ARRAYS)


def test_a_server_that_is_killed(served: Any) -> None:
    """The driver keeps the memory for those that have it open."""
    cupy: Any = pytest.importorskip("cupy")
    process, url = served
    found = mfload.load(url, "cupy", device="cuda:0", options=MAPPED)
    process.kill()
    process.wait(SECONDS)
    more = [cupy.full(1 << 24, 7, cupy.uint8) for _ in range(8)]
    _same(found, ARRAYS)
    del more


def test_a_server_waits_for_its_readers(served: Any) -> None:
    """Asked to end, it does so when the last array is gone."""
    process, url = served
    found = mfload.load(url, "cupy", device="cuda:0", options=MAPPED)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    _same(found, ARRAYS)
    found.clear()
    gc.collect()
    assert process.wait(SECONDS) == 0


def test_work_that_is_under_way_when_arrays_go(served: Any) -> None:
    """It sees what it was given: the memory is let go of once it has ended."""
    cupy: Any = pytest.importorskip("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        busy = cupy.ones(1 << 26, cupy.float32)
        for _ in range(3):
            found = mfload.load(served[1], "cupy", device="cuda:0", options=MAPPED)
            for _ in range(50):
                busy = busy * 0.5 + 1
            after = found["large"] + 1
            found.clear()
            gc.collect()
            np.testing.assert_array_equal(after.get(stream=stream), ARRAYS["large"] + 1)


def test_tensors_of_another_process() -> None:
    """In memory of PyTorch's own allocator, of which several share an allocation of CUDA's."""
    pytest.importorskip("torch")
    arrays = {f"t{n}": np.arange(n * 1000, dtype=np.float32) for n in range(1, 9)}
    with _started(sys.executable, "-c", TENSORS) as (_, url):
        for options in (MAPPED, COPIED):
            _same(mfload.load(url, "cupy", device="cuda:0", options=options), arrays)
        _same(mfload.load(url, "numpy"), arrays)
