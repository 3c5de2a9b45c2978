"""How `mfload serve` and `mfload planner` end: by a supervisor, in a terminal, as a shell's job."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

import mfload

SECONDS = 30


@pytest.fixture(params=["serve", "planner"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The command line of each that serves."""
    found = [sys.executable, "-m", "mfload", request.param]
    if request.param == "planner":
        return found
    path = tmp_path / "model.safetensors"
    mfload.save({"w": np.zeros((8, 8), np.float32)}, path)
    return [*found, str(path), "--model", "m"]


@contextlib.contextmanager
def started(*command: str) -> Generator[subprocess.Popen[str]]:
    """A process, killed at the end."""
    out = subprocess.PIPE
    with subprocess.Popen(command, stdout=out, stderr=out, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("stopped", [False, True])
def test_asked_to_end(command: list[str], stopped: bool) -> None:
    """As soon as the URL is there, or while it is stopped: then the kernel wakes any thread of it
    for the signal, and not only the main one."""
    with contextlib.ExitStack() as stack:
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        processes = [stack.enter_context(started(*command)) for _ in numbers]
        for process, number in zip(processes, numbers, strict=True):
            assert "://" in _line(process)
            if stopped:
                process.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
        for out, err in (each.communicate(timeout=SECONDS) for each in processes):
            assert out == ""
            assert err.startswith("mfload: ready; Ctrl-C ends it\n")
            assert "Traceback" not in err
        assert [each.returncode for each in processes] == [0] * 3


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_jobs_of_a_shell(command: list[str]) -> None:
    """Ctrl-Z, then `kill %1`, typed at a terminal."""
    spawn = "import pty; pty.spawn(['bash', '--norc', '--noprofile', '-i'])"
    pipe, deadline = subprocess.PIPE, time.monotonic() + SECONDS

    def type_until(text: str, pattern: str) -> str:
        """Types a text, then empty lines until the shell has told how things are."""
        assert shell.stdin is not None
        assert shell.stdout is not None
        seen = ""
        while not (found := re.search(pattern, seen)):
            assert time.monotonic() < deadline, seen
            shell.stdin.write(text.encode())
            text = "\n"
            while select.select([shell.stdout], [], [], 0.5)[0]:
                seen += os.read(shell.stdout.fileno(), 4096).decode()
        return found[0]

    with subprocess.Popen(
        [sys.executable, "-c", spawn], stdin=pipe, stdout=pipe, bufsize=0
    ) as shell:
        try:
            type_until(f"PS1=; stty -echo; {shlex.join(command)}\n", "http://|peer://")
            type_until("\x1a", "Stopped")
            assert type_until("kill %1\n", "Done|Exit|Terminated") == "Done"
        finally:
            shell.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="needs pipes of a known size")
def test_a_reader_of_its_messages_that_stopped(tmp_path: Path) -> None:
    """It goes on serving, and ends."""
    path = tmp_path / "model.safetensors"
    mfload.save({"w": np.zeros((8, 8), np.float32)}, path)
    command = [sys.executable, "-m", "mfload", "serve", str(path), "--model", "m"]
    unread, messages = os.pipe()
    os.set_blocking(messages, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(messages, b"x")
    os.set_blocking(messages, True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages, text=True) as process:
        try:
            url = _line(process)
            assert list(mfload.load(url, "numpy")) == ["w"]
            time.sleep(1)  # It has something to tell.
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()
            os.close(unread)
            os.close(messages)


SLOW = """
import os, signal, sys, time
from mfload.peer import serve

class Slow:
    def __enter__(self):
        return self
    def __exit__(self, *_):
        print("closing", flush=True)
        time.sleep(float(sys.argv[1]))

def look():
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    return handlers, sorted(os.listdir("/proc/self/fd")) if os.path.exists("/proc") else []

signal.signal(signal.SIGHUP, signal.SIG_IGN)
before = look()
try:
    serve.run(Slow(), lambda: print("serving", flush=True))
except KeyboardInterrupt:
    print("interrupted")
assert look() == before
assert signal.set_wakeup_fd(-1) == -1
"""


def test_asked_again_while_it_closes() -> None:
    """SIGTERM changes nothing; Ctrl-C, of one who does not want to wait, ends it at once."""
    with started(sys.executable, "-c", SLOW, "60") as process:
        assert _line(process) == "serving"
        process.send_signal(signal.SIGINT)
        assert _line(process) == "closing"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=SECONDS) == ("interrupted\n", "")
        assert process.returncode == 0


def test_what_was_ignored_stays_ignored() -> None:
    """As under nohup; and all is as before at the end."""
    with started(sys.executable, "-c", SLOW, "0") as process:
        assert _line(process) == "serving"
        process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=SECONDS) == ("closing\n", "")
        assert process.returncode == 0


_CONTAINED = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]


def _contains() -> bool:
    """Whether a process can be the first of its own PID namespace here, as in a container."""
    return bool(shutil.which("unshare")) and not subprocess.run([*_CONTAINED, "true"]).returncode


@pytest.mark.skipif(not _contains(), reason="no PID namespaces here")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("asked", ["load", "serve"])
def test_the_first_process_of_a_container_ends_while_it_loads(asked: str, name: str) -> None:
    """It has no default actions: without a handler of its own, only SIGKILL would end it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/model.safetensors"
        command = [sys.executable, "-m", "mfload", asked, url]
        more = ["--model", "m"] if asked == "serve" else []
        with started(*_CONTAINED, *command, *more) as process:
            silent.settimeout(SECONDS)
            with silent.accept()[0]:
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                os.kill(int(children), getattr(signal, name))
                process.communicate(timeout=SECONDS)
                assert process.returncode == 130
