"""Devices are asked for in an order in which nothing hangs: driver, devices, and only then CuPy."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from devices.cupy_stub import Machine

from mfload import errors
from mfload.cuda import discovery

ROOT = Path(__file__).parents[2]


def library(init: int = 0, count: int = 2, counting: int = 0) -> Any:
    """CUDA's driver library, as far as `count` asks it."""

    def get_count(number: Any) -> int:
        number._obj.value = count
        return counting

    def get_name(code: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_MADE_UP"
        return 0

    def get_by_pci(number: Any, pci: bytes) -> int:
        number._obj.value = int(pci.removeprefix(b"0000:3b:00."))
        return 0 if number._obj.value < count else 101

    return SimpleNamespace(
        cuInit=lambda _: init,
        cuDeviceGetCount=get_count,
        cuGetErrorName=get_name,
        cuDeviceGetByPCIBusId=get_by_pci,
    )


@pytest.fixture(autouse=True)
def nothing_found() -> Iterator[None]:
    discovery._found.clear()
    yield
    discovery._found.clear()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(made: Any) -> None:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: made)

    return use


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(errors.DeviceError, match=r"no CUDA driver.*libcuda\.so\.1") as caught:
        discovery.find(0)
    assert "cannot open" in str(caught.value.found)


@pytest.mark.parametrize("given", [{"init": 802}, {"counting": 999}])
def test_a_driver_that_fails(driver: Any, given: dict[str, int]) -> None:
    driver(library(**given))
    with pytest.raises(errors.DeviceError, match=r"driver does not work.*MADE_UP \((802|999)\)"):
        discovery.find(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_learns_what_a_fork_takes(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(library())
    machine = Machine()
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: machine.driver())
    monkeypatch.setitem(sys.modules, "cupy", machine.cupy())
    discovery.find(0)
    locked, release = threading.Event(), threading.Event()

    def hold() -> None:
        with discovery._lock:
            locked.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait(10)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        driver(library(init=3))
        try:
            discovery.find(0)
        except errors.DeviceError as error:
            said = "spawn" in str(error) and "MADE_UP (3)" in str(error)
            os._exit(0 if said else 2)
        os._exit(1)
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        release.set()
        holder.join()


@pytest.mark.parametrize("given", [{"init": 100}, {"counting": 100}, {"count": 0}])
def test_no_device(driver: Any, given: dict[str, int]) -> None:
    driver(library(**given))
    assert discovery.count() == 0
    with pytest.raises(errors.DeviceError, match=r"no such CUDA device.*cuda:0, of 0 devices"):
        discovery.find(0)


@pytest.mark.parametrize("number", [2, -1, 100])
def test_a_number_out_of_range(driver: Any, number: int) -> None:
    driver(library(count=2))
    with pytest.raises(errors.DeviceError, match=rf"cuda:0 to cuda:1.*cuda:{number}, of 2 device"):
        discovery.find(number)


def test_a_device_by_its_pci_address(driver: Any) -> None:
    driver(library(count=2))
    assert discovery.numbered("0000:3b:00.1") == 1
    with pytest.raises(errors.DeviceError, match=r"process sees: 2 devices.*0000:3b:00.7"):
        discovery.numbered("0000:3b:00.7")


def test_cupy_is_missing(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(library())
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(errors.FrameworkMissingError, match="pip install 'cupy-cuda13x>="):
        discovery.find(0)


def test_devices_are_found_once(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(library())
    machine = Machine()
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: machine.driver())
    monkeypatch.setitem(sys.modules, "cupy", machine.cupy())
    first, second = discovery.find(0), discovery.find(1)
    assert (first.name, second.name) == ("cuda:0", "cuda:1")
    assert discovery.find(0) is first
    assert discovery.count() == 2


DRIVERS = {
    "none": "raise OSError('no libcuda')",
    "broken": "return stub(999, 1)",
    "empty": "return stub(0, 0)",
    "hidden": "return stub(100, 0)",
    "few": "return stub(0, 1)",
}


@pytest.mark.parametrize("case", DRIVERS)
def test_no_package_for_devices_is_touched(case: str, tmp_path: Path) -> None:
    """Without a device cuFile's driver, once opened, spins for ever: here its package does."""
    for name in ("cupy", "kvikio"):
        (tmp_path / name).mkdir()
        touched = tmp_path / f"{name}.touched"
        (tmp_path / name / "__init__.py").write_text(
            f"open({str(touched)!r}, 'w')\nwhile 1: pass\n"
        )
    script = f"""
        import ctypes, json, sys, types
        sys.path[:0] = {[str(tmp_path), str(ROOT)]!r}
        real = ctypes.CDLL

        def stub(init, count):
            def get_count(number):
                number._obj.value = count
                return 0
            return types.SimpleNamespace(
                cuInit=lambda _: init, cuDeviceGetCount=get_count, cuGetErrorName=lambda *_: 0)

        def load(name, *rest, **more):
            if name != "libcuda.so.1":
                return real(name, *rest, **more)
            {DRIVERS[case]}

        ctypes.CDLL = load
        from mfload import errors
        from mfload.cuda import discovery
        said = []
        for number in (1, 7):
            try:
                discovery.find(number)
            except errors.DeviceError as error:
                said.append(str(error))
        print(json.dumps([said, [m for m in ("cupy", "kvikio") if m in sys.modules]]))
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    said, imported = json.loads(ran.stdout)
    assert len(said) == 2
    assert not imported
    assert not list(tmp_path.glob("*.touched"))


def test_a_cupy_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library())

    def broken(_: str) -> Any:
        raise RuntimeError("built for another CUDA")

    monkeypatch.setattr(discovery.importlib, "import_module", broken)
    with pytest.raises(errors.FrameworkMissingError, match="CuPy is needed") as caught:
        discovery.find(0)
    assert caught.value.found == "built for another CUDA"
