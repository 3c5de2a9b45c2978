"""Hosts of a small network, as network namespaces; to be run by `unshare` in namespaces of its
own, which end with it. One host is cut off by taking its link down."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import seeding

HOSTS = {"one": "10.77.0.1", "two": "10.77.0.2", "reader": "10.77.0.3"}

READER = """
import hashlib, json, os, sys, time
import mfload
from mfload.sources import timed
url, given, more, wait = json.loads(sys.argv[1])
came, receive = [0], timed.Timed.readinto
def readinto(self, buffer):
    got = receive(self, buffer)
    came[0] += got
    if wait and came[0] > wait:
        came[0] = -(1 << 60)
        print("half", flush=True)
        sys.stdin.readline()
        came.append(time.monotonic())
    return got
timed.Timed.readinto = readinto
begin, report, found = time.monotonic(), mfload.Report(), {}
try:
    how = mfload.Options(peer=mfload.PeerOptions(transports="http", **given))
    arrays = mfload.load(url, "numpy", options=how, report=report, **more)
    whole = b"".join(arrays[name].tobytes() for name in sorted(arrays))
    found["digest"] = hashlib.sha256(whole).hexdigest()
except mfload.errors.MfloadError as error:
    found["error"], found["text"] = type(error).__name__, str(error)
took = time.monotonic() - max(begin, *came[1:], begin)
print(json.dumps({**found, "took": took, "route": report.route, "notes": report.notes}), flush=True)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def build() -> None:
    """Three hosts at one bridge."""
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    ip("link", "add", "bridge", "type", "bridge")
    ip("link", "set", "bridge", "up")
    for name, address in HOSTS.items():
        ip("netns", "add", name)
        ip("link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth", "netns", name)
        ip("link", "set", f"to-{name}", "master", "bridge", "up")
        ip("-n", name, "address", "add", f"{address}/24", "dev", "eth")
        for link in ("eth", "lo"):
            ip("-n", name, "link", "set", link, "up")


def cut_off(name: str, off: bool = True) -> None:
    """Takes a host's link down, or up again."""
    ip("link", "set", f"to-{name}", "down" if off else "up")


@contextlib.contextmanager
def on(name: str, *command: str) -> Generator[subprocess.Popen[str]]:
    """A Python process on a host."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(["ip", "netns", "exec", name, sys.executable, *command], **pipes) as made:
        try:
            yield made
        finally:
            made.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def seed(stack: contextlib.ExitStack, host: str, **more: Any) -> str:
    """A seed on a host; where it listens."""
    given = {"address": f"{HOSTS[host]}:0", **more}
    path = str(Path(seeding.__file__))
    url = line(stack.enter_context(on(host, path, json.dumps(given))))
    return url.removeprefix("peer://").partition("/")[0]


def load(url: str, given: Any, half: Callable[[], object] | None = None, **more: Any) -> Any:
    """What a reader on a host of its own found; `half` is called in the middle."""
    told = json.dumps([url, given, more, seeding.TOTAL // 2 if half else 0])
    with on("reader", "-c", READER, told) as process:
        if half is not None:
            assert line(process) == "half"
            half()
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return json.loads(line(process))


def several(stack: contextlib.ExitStack, given: Any, files: str, digest: str) -> None:
    """Two seeds share a load; one that is cut off is done without."""
    places = [seed(stack, host, **given) for host in ("one", "two")]
    url = f"peer://{','.join(places)}/{seeding.MODEL}"
    found = load(url, given)
    assert found["digest"] == digest, found
    assert {name for name, *_ in found["route"]} == {f"peer://{each}" for each in places}, found
    cut_off("one")
    found = load(url, given)
    assert found["digest"] == digest, found
    assert {name for name, *_ in found["route"]} == {f"peer://{places[1]}"}, found
    cut_off("one", off=False)
    time.sleep(0.5)
    assert load(url, given)["digest"] == digest


def in_the_middle(stack: contextlib.ExitStack, given: Any, files: str, digest: str) -> None:
    """Of a load: an error, or the files, soon."""
    url = f"peer://{seed(stack, 'one', **given)}/{seeding.MODEL}"
    found = load(url, given, half=lambda: cut_off("one"))
    assert found["error"] == "ReadError", found
    assert url.rpartition("/org/")[0] in found["text"], found
    assert found["took"] < 3.5, found
    cut_off("one", off=False)
    found = load(url, given, half=lambda: cut_off("one"), fallback=files)
    assert found["digest"] == digest, found
    assert found["notes"], found
    assert found["route"][-1][0] == files, found
    assert found["took"] < 4.5, found


def by_a_planner(stack: contextlib.ExitStack, given: Any, files: str, digest: str) -> None:
    """The planner no longer hands out the seed that is cut off."""
    address, token = ("--address", f"{HOSTS['two']}:0"), ("--token-file", given["token_file"])
    planner = stack.enter_context(on("two", "-m", "mfload", "planner", *address, *token, "--json"))
    told = json.loads(line(planner))
    where = told["url"] if isinstance(told, dict) else told
    places = [seed(stack, host, **given, planner=where) for host in ("one", "two")]
    given = {**given, "planner": where}
    url = f"peer:///{seeding.MODEL}@main"
    assert load(url, given)["digest"] == digest
    cut_off("one")
    for _ in range(3):
        found = load(url, given, fallback=files)
        assert found["digest"] == digest, found
        assert {name for name, *_ in found["route"]} == {f"peer://{places[1]}"}, found
        assert found["took"] < 6, found
    cut_off("two")
    found = load(url, given, fallback=files)
    assert found["digest"] == digest, found
    assert found["route"][-1][0] == files, found


if __name__ == "__main__":
    given, files, digest = sys.argv[2:]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    build()
    with contextlib.ExitStack() as stack:
        globals()[sys.argv[1]](stack, json.loads(given), files, digest)
