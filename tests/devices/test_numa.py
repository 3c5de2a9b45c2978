"""Which CPUs are next to a device, on made-up machines; and threads that stay there."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from mfload.cuda import numa

PCI = "0000:3b:00.0"


def machine(root: Path, node: str | None, lists: dict[int, str], online: str | None = None) -> Path:
    files = {f"sys/devices/system/node/node{n}/cpulist": text for n, text in lists.items()}
    if node is not None:
        files[f"sys/bus/pci/devices/{PCI}/numa_node"] = node
    files["sys/devices/system/node/online"] = online or ",".join(map(str, lists))
    # What else is there, and is no node.
    files |= {"sys/devices/system/node/nodes": "", "sys/devices/system/node/has_cpu": "0-1\n"}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


TWO = {0: "0-3,8-11\n", 1: "4-7,12-15\n"}
ALL = range(16)


@pytest.mark.parametrize(
    ("node", "lists", "online", "allowed", "expected"),
    [
        ("1\n", TWO, "0-1\n", ALL, {4, 5, 6, 7, 12, 13, 14, 15}),
        ("0\n", TWO, None, ALL, {0, 1, 2, 3, 8, 9, 10, 11}),
        # A control group or taskset leaves some, others, or none.
        ("0\n", TWO, "0-1\n", {3, 4, 8}, {3, 8}),
        ("0\n", TWO, "0-1\n", {4, 5}, None),
        # Numbers with a hole; a node that is not online keeps its directory.
        ("2\n", {0: "0-1", 2: "2-3"}, "0,2\n", ALL, {2, 3}),
        ("2\n", {0: "0-1", 2: "2-3"}, None, ALL, {2, 3}),
        ("0\n", {0: "0-3", 1: ""}, "0\n", ALL, None),
        # Memory alone: there is nowhere to go.
        ("1\n", {0: "0-3", 1: "\n"}, "0-1\n", ALL, None),
        ("0\n", {0: "0-3"}, "0\n", ALL, None),
        # Sysfs does not know, or does not say.
        ("-1\n", TWO, "0-1\n", ALL, None),
        (None, TWO, "0-1\n", ALL, None),
        ("one\n", TWO, "0-1\n", ALL, None),
        ("", TWO, "0-1\n", ALL, None),
        ("7\n", TWO, "0-1\n", ALL, None),
        ("1\n", {0: "0-3", 1: "4-"}, "0-1\n", ALL, None),
        ("1\n", {0: "0-3", 1: "four"}, "0-1\n", ALL, None),
        ("1\n", {0: "0-3", 1: "5"}, "0-1\n", ALL, {5}),
    ],
)
def test_the_node_of_a_device(
    tmp_path: Path,
    node: str | None,
    lists: dict[int, str],
    online: str | None,
    allowed: set[int],
    expected: set[int] | None,
) -> None:
    root = machine(tmp_path, node, lists, online)
    found = numa.cpus(PCI, root, allowed)
    assert found == expected


def test_devices_without_an_address_and_machines_without_sysfs(tmp_path: Path) -> None:
    assert numa.cpus(None, machine(tmp_path / "a", "1", TWO)) is None
    assert numa.cpus(PCI, tmp_path / "none") is None


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs CPU affinities")
def test_what_this_thread_may_use_counts(tmp_path: Path) -> None:
    here = min(os.sched_getaffinity(0))
    root = machine(tmp_path / "this", "1", {0: str(here + 1), 1: str(here)})
    assert numa.cpus(PCI, root) == {here}
    root = machine(
        tmp_path / "other", "1", {0: str(here), 1: str(max(os.sched_getaffinity(0)) + 1)}
    )
    assert numa.cpus(PCI, root) is None


@pytest.mark.parametrize("text", ["0-3,8-11", "0,1,2,3,8-11", "0-3,8-9,10-11"])
def test_lists_of_the_kernel(text: str) -> None:
    assert numa.parse(text) == {0, 1, 2, 3, 8, 9, 10, 11}


def test_a_system_that_tells_no_affinities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Being near is a matter of speed: no load fails of it."""

    def refuse(_: int) -> set[int]:
        raise PermissionError("by seccomp")

    monkeypatch.setattr(os, "sched_getaffinity", refuse, raising=False)
    assert numa.cpus(PCI, machine(tmp_path, "1", TWO)) is None
    with numa.bound({0}):
        pass


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs CPU affinities")
def test_a_bound_thread_is_bound_alone_and_set_free() -> None:
    before = os.sched_getaffinity(0)
    seen: list[set[int]] = []
    other = threading.Event()

    def bystander() -> None:
        other.wait(10)
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=bystander)
    thread.start()
    with contextlib.suppress(ZeroDivisionError), numa.bound({min(before)}):
        assert os.sched_getaffinity(0) == {min(before)}
        other.set()
        thread.join()
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == before
    assert seen == [before]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs CPU affinities")
@pytest.mark.parametrize("cpus", [None, frozenset(), frozenset({100_000})])
def test_what_can_not_be_bound_goes_on(cpus: frozenset[int] | None) -> None:
    before = os.sched_getaffinity(0)
    with numa.bound(cpus):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before
