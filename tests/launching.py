"""Starts the processes of one load, and brings home what each of them says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SCRIPT = Path(__file__).parent / "meshes" / "process_cases.py"


class Ended(NamedTuple):
    """How a process ended.

    Attributes:
        code: Exit status, negative for a signal.
        said: What it wrote, case by case.
        log: The end of its output.
    """

    code: int
    said: dict[str, Any]
    log: str


def assert_ended(ended: Sequence[Ended], names: Sequence[str], failed: Mapping[str, str]) -> None:
    """All processes ran all cases, agree on their errors, and hold no bytes.

    Args:
        ended: The processes, in the order of their ranks.
        names: The cases.
        failed: The error of process 1 in some cases, in which the others miss it.
    """
    for each in ended:
        assert each.code == 0, each.log
        assert list(each.said) == list(dict.fromkeys(names)), each.log
    for name in names:
        lines = [each.said[name] for each in ended]
        expected: list[str | None] = [None] * len(ended)
        if name in failed:
            expected = ["ProcessError"] * len(ended)
            expected[1] = failed[name]
        assert [line["error"] for line in lines] == expected, (name, lines)
        assert all(line["live"] == 0 for line in lines), (name, lines)


def launch(
    directory: Path,
    cases: Sequence[str],
    *,
    count: int,
    seconds: float,
    devices: int = 1,
    script: Path | None = None,
) -> list[Ended]:
    """Runs cases in `count` processes with `devices` CPU devices each; none outlives the time."""
    port, script = free_port(), script or SCRIPT
    paths = (Path(__file__).parents[1], Path(__file__).parent, script.parent)
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    started: list[subprocess.Popen[bytes]] = []
    logs = [directory / f"log.{rank}" for rank in range(count)]
    try:
        for rank in range(count):
            command = [sys.executable, "-u", str(script), str(rank), str(count), str(port)]
            with logs[rank].open("wb") as log:
                started.append(
                    subprocess.Popen(
                        [*command, str(directory), *cases],
                        env=environment,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        end = time.monotonic() + seconds
        for process in started:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)
                process.wait(5)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [
        Ended(process.returncode, _said(directory / f"said.{rank}"), _tail(logs[rank]))
        for rank, process in enumerate(started)
    ]


def _said(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["case"]: line for line in lines}


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-6000:]


def free_port() -> int:
    """A port of the loopback that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
