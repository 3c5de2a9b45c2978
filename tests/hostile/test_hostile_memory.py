"""Memory that is not there: a typed error, nothing half loaded, and a process that lives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import reference

import mfload
from mfload import errors
from mfload.io import probes

_CAPPED = """
import gc, resource, sys, threading
import mfload
from mfload import errors
path, room, engine, landing = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
options = dict(framework="numpy", options=mfload.Options(engine=engine, allocator=landing))
mfload.load(path, names=["small"], **options)  # All that is imported late.
with open("/proc/self/statm") as file:
    mapped = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + room, resource.RLIM_INFINITY))
report = mfload.Report()
try:
    mfload.load(path, report=report, **options)
except errors.MfloadError as error:
    print(type(error).__name__, error.found)
threads = [thread.name for thread in threading.enumerate()]
print(mfload.live_bytes(), report.tensors, threads)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(mfload.load(path, **options)["large"].nbytes)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "f.safetensors"
    held = {f"t{n}": reference.Tensor("U8", (8 << 20,), bytes(8 << 20)) for n in range(4)}
    held["large"] = reference.Tensor("U8", (65 << 20,), bytes(65 << 20))
    held["small"] = reference.Tensor("U8", (10,), bytes(10))
    path.write_bytes(reference.write(held))
    return path


@pytest.mark.parametrize("allocator", ["mfload", "framework"])
@pytest.mark.parametrize("engine", ["pread", "direct", "mmap"])
def test_cap_on_memory(engine: str, allocator: str, large: Path) -> None:
    room = 4 << 20
    done = subprocess.run(
        [sys.executable, "-c", _CAPPED, str(large), str(room), engine, allocator],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    error, left, after = done.stdout.splitlines()
    assert error.startswith("MemoryLimitError ")
    assert left == "0 0 ['MainThread']"
    assert after == str(65 << 20)


@pytest.mark.parametrize("exception", [MemoryError, np.exceptions.AxisError])
def test_only_a_lack_of_memory_becomes_a_memory_error(
    exception: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(reference.write({"w": reference.Tensor("U8", (4,), b"1234")}))

    def fail(*_: object) -> None:
        raise exception("none left")

    monkeypatch.setattr("mfload.frameworks.numpy_adapter.NumpyAdapter.wrap", fail)
    wanted = errors.MemoryLimitError if exception is MemoryError else exception
    with pytest.raises(wanted, match="none left"):
        mfload.load(path, framework="numpy")


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal: 100000 kB\nMemAvailable:    1000 kB\nSwapFree: 24 kB\nHugePages_Total:  0\n"
UNLIMITED = {"memory.max": "max\n", "memory.current": "1\n", "memory.stat": "anon 1\n"}


def _group(path: str, limit: int | str, used: int, **stat: int) -> dict[str, str]:
    lines = "".join(f"{key} {value}\n" for key, value in stat.items())
    files = {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": lines}
    return {f"sys/fs/cgroup/{path}/{name}": text for name, text in files.items()}


def _group_v1(path: str, limit: int, used: int, **stat: int) -> dict[str, str]:
    lines = "".join(f"{key} {value}\n" for key, value in stat.items())
    files = {"limit_in_bytes": f"{limit}\n", "usage_in_bytes": f"{used}\n", "stat": lines}
    return {f"sys/fs/cgroup/memory/{path}/memory.{name}": text for name, text in files.items()}


class TestRoomInMadeUpTrees:
    """Shapes of /proc and /sys as containers and odd kernels show them."""

    CASES: ClassVar[dict[str, tuple[dict[str, str], int | None]]] = {
        "nothing": ({}, None),
        "machine": ({"proc/meminfo": MEMINFO}, 1024 << 10),
        "no-swap": ({"proc/meminfo": MEMINFO.replace("SwapFree: 24 kB\n", "")}, 1000 << 10),
        "old-kernel": ({"proc/meminfo": "MemTotal: 100 kB\nMemFree: 1 kB\n"}, None),
        "garbage": ({"proc/meminfo": "MemAvailable: many\n"}, None),
        "no-colon": ({"proc/meminfo": "MemAvailable 5 kB\n"}, None),
        "empty": ({"proc/meminfo": "", "proc/self/cgroup": ""}, None),
        "group": ({"proc/self/cgroup": "0::/a/b\n", **_group("a/b", 5000, 2000)}, 3000),
        "cache-is-free": (
            {"proc/self/cgroup": "0::/a\n",
             **_group("a", 5000, 4500, anon=100, inactive_file=300, active_file=40)}, 840),
        "over-the-limit": ({"proc/self/cgroup": "0::/a\n", **_group("a", 5000, 9000)}, 0),
        "unlimited": ({"proc/self/cgroup": "0::/a\n", **_group("a", "max", 9000)}, None),
        "parent-is-tighter": (
            {"proc/self/cgroup": "0::/a/b\n", **_group("a", 1000, 900), **_group("a/b", 5000, 1)},
            100),
        "child-is-tighter": (
            {"proc/self/cgroup": "0::/a/b\n", **_group("a", 1000, 1), **_group("a/b", 50, 1)}, 49),
        "machine-is-tighter": (
            {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a\n", **_group("a", 1 << 40, 1)},
            1024 << 10),
        "namespace-shows-the-root": ({"proc/self/cgroup": "0::/\n", **_group(".", 700, 100)}, 600),
        "hybrid-v1-and-v2": (
            {"proc/self/cgroup": "12:memory:/docker/x\n0::/a\n", **_group("a", 700, 1)}, 699),
        "v1-alone": ({"proc/self/cgroup": "12:memory:/docker/x\n"}, None),
        "v1": ({"proc/self/cgroup": "12:memory:/docker/x\n", **_group_v1("docker/x", 800, 300)},
               500),
        "v1-of-a-container": (
            {"proc/self/cgroup": "3:cpu:/x\n2:hugetlb,memory:/docker/x\n0::/\n",
             **_group_v1(".", 800, 300, inactive_file=50)}, 550),
        "out-of-the-mount": ({"proc/self/cgroup": "0::/../../x\n", **_group("x", 7, 1)}, None),
        "group-is-gone": ({"proc/self/cgroup": "0::/a/b\n", **_group("a", 700, 1)}, 699),
    }  # fmt: skip

    @pytest.mark.parametrize("name", CASES)
    def test_room(self, name: str, tmp_path: Path) -> None:
        files, wanted = self.CASES[name]
        room = probes.memory_room(_tree(tmp_path, files))
        assert (None if room is None else room[0]) == wanted

    def test_the_reason_names_the_group(self, tmp_path: Path) -> None:
        files = {"proc/self/cgroup": "0::/a/b\n", **_group("a", 10, 5), **_group("a/b", 99, 5)}
        room = probes.memory_room(_tree(tmp_path, files))
        assert room is not None
        assert room[1].endswith("control group /a")


def test_a_load_that_the_group_has_no_room_for_is_refused(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = _tree(tmp_path, {"proc/self/cgroup": "0::/job\n", **_group("job", 90 << 20, 0)})
    true = probes.memory_room
    monkeypatch.setattr(probes, "memory_room", lambda: true(root))
    for engine in ("pread", "direct"):
        with pytest.raises(errors.MemoryLimitError, match="control group /job"):
            mfload.load(large, framework="numpy", options=mfload.Options(engine=engine))  # type: ignore[arg-type]
    # A part fits, and so does what is not copied.
    assert list(mfload.load(large, framework="numpy", names=["small"])) == ["small"]
    assert len(mfload.load(large, framework="numpy", options=mfload.Options(engine="mmap"))) == 6
