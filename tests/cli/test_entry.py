"""The command as a process: how it starts, how it ends, what it says where."""

from __future__ import annotations

import itertools
import os
import pty
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import SECONDS, Ran, Run, command, environment, process

import mfload
from mfload import extras
from mfload.cli import app

FRAMEWORKS = {"jax", "jaxlib", "torch", "tensorflow", "paddle", "cupy", "flax", "keras"}
LOADED = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"


def test_version_imports_next_to_nothing() -> None:
    ran = process("--version", code=LOADED)
    assert (ran.code, ran.out) == (0, f"mfload {mfload.__version__}\n")
    assert not {*ran.err.split()} & {*FRAMEWORKS, "numpy", "tqdm", "mfload.api"}


@pytest.mark.parametrize("options", [[], ["--tree"], ["--json"], ["--summary"]])
def test_ls_imports_no_framework_and_no_typer(model: Path, options: list[str]) -> None:
    ran = process("ls", model, *options, code=LOADED)
    assert ran.code == 0
    loaded = {*ran.err.split()}
    assert "mfload.formats.checkpoint" in loaded
    assert not loaded & {*FRAMEWORKS, "numpy", "typer", "tqdm", "safetensors", "mfload.api"}


@pytest.mark.parametrize("missing", ["typer", "tqdm"])
def test_without_the_extra_there_is_one_line_and_no_trace(missing: str, model: Path) -> None:
    hide = f"""
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {missing!r} else real(name, *rest)
"""
    ran = process("ls", model, code=hide)
    line = f"mfload: error: the command needs {missing}; {extras.install('cli')}\n"
    assert ran == (5, "", line)


def test_the_entry_point_and_its_extra_are_declared() -> None:
    root = Path(mfload.__path__[0]).parent / "pyproject.toml"
    if not root.exists():
        pytest.skip("an installed package")
    project = tomllib.loads(root.read_text())["project"]
    assert project["scripts"] == {"mfload": "mfload.cli:main"}
    extra = {each.split(">")[0] for each in project["optional-dependencies"]["cli"]}
    assert extra == {"typer", "tqdm"}
    script = Path(sys.executable).parent / "mfload"
    if script.exists():
        done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60)
        assert done.stdout == f"mfload {mfload.__version__}\n"


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    import samples

    names = [(f"tensor.{n}." + "x" * 200, "U8", (1,), b"x") for n in range(5000)]
    path = samples.save_raw(tmp_path / "x.safetensors", names)
    for options, unbuffered in itertools.product(([], ["--tree"], ["--json"]), ("", "1")):
        pipe = subprocess.Popen(
            command("ls", path, *options),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment(PYTHONUNBUFFERED=unbuffered),
        )  # fmt: skip
        assert pipe.stdout
        assert pipe.stderr
        assert pipe.stdout.read(10)
        pipe.stdout.close()
        assert pipe.stderr.read() == b""
        pipe.stderr.close()
        assert pipe.wait(SECONDS) == 141


def test_a_reader_that_never_reads_is_no_error(model: Path) -> None:
    for unbuffered in ("", "1"):
        pipe = subprocess.Popen(
            command("ls", model), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment(PYTHONUNBUFFERED=unbuffered),
        )  # fmt: skip
        assert pipe.stdout
        assert pipe.stderr
        pipe.stdout.close()
        assert pipe.stderr.read() == b""
        pipe.stderr.close()
        assert pipe.wait(SECONDS) == 141


def test_a_full_device_is_an_error(model: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command("ls", model), stdout=full, stderr=subprocess.PIPE, env=environment(), timeout=60
        )
    assert done.returncode == 3
    assert done.stderr.startswith(b"mfload: error: No space left on device")
    assert done.stderr.count(b"\n") == 1


def _into(model: Path, streams: str, *arguments: object, unbuffered: str = "") -> Ran:
    """Runs the command in a shell that redirects its streams."""
    line = shlex.join(command(*arguments))
    done = subprocess.run(
        ["sh", "-c", f"exec {line} {streams}"],
        capture_output=True, text=True, timeout=SECONDS,
        env=environment(PYTHONUNBUFFERED=unbuffered),
    )  # fmt: skip
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_no_code(model: Path, streams: str, unbuffered: str) -> None:
    for code, *arguments in (
        (0, "ls", model), (0, "ls", model, "--json"), (0, "--version"), (0, "verify", model),
        (3, "ls", model / "x"), (3, "ls", model / "x", "--json"), (2, "lss"),
    ):  # fmt: skip
        ran = _into(model, streams, *arguments, unbuffered=unbuffered)
        assert ran.code == code, (arguments, ran)
        assert "Traceback" not in ran.err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_streams_are_told_once_and_by_the_code(model: Path, unbuffered: str) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    for code, *arguments in (
        (3, "ls", model), (3, "ls", model, "--json"), (3, "--version"), (3, "ls", "--help"),
        (3, "verify", model), (3, "ls", model / "x", "--json"), (2, "lss", "--json"),
    ):  # fmt: skip
        ran = _into(model, ">/dev/full", *arguments, unbuffered=unbuffered)
        assert (ran.code, ran.err.count("mfload: error: ")) == (code, 1), (arguments, ran)
        assert "Traceback" not in ran.err
    for code, *arguments in ((0, "ls", model), (3, "ls", model / "x"), (2, "lss"), (2,)):
        ran = _into(model, "2>/dev/full", *arguments, unbuffered=unbuffered)
        assert ran.code == code, (arguments, ran)


def test_a_warning_is_one_line(model: Path) -> None:
    ran = process("plan", model, "--dtype", "no such name=bfloat16", "--dtype", ".=bfloat16")
    assert ran.code == 0
    said = (
        "mfload: warning: --dtype has rules that match no tensor: 'no such name'; names are such as"
    )
    assert ran.err.startswith(said)
    assert ran.err.count("\n") == 1


SLOW = """
import sys, time
import mfload.api
def load(*_, **__):
    print("there", file=sys.stderr, flush=True)
    time.sleep(60)
mfload.api.load = load
"""


def test_ctrl_c_ends_with_130_and_no_trace(model: Path) -> None:
    slow = subprocess.Popen(
        command("load", model, code=SLOW), stderr=subprocess.PIPE, env=environment(), text=True
    )
    assert slow.stderr
    assert slow.stderr.readline() == "there\n"
    slow.send_signal(signal.SIGINT)
    assert slow.stderr.read() == ""
    slow.stderr.close()
    assert slow.wait(SECONDS) == 130


def test_ctrl_c_while_it_starts_is_no_different(model: Path) -> None:
    early = """
import importlib.util
def find_spec(*_):
    raise KeyboardInterrupt
importlib.util.find_spec = find_spec
"""
    assert process("ls", model, code=early) == (130, "", "")


def test_output_for_a_locale_without_the_characters(tmp_path: Path) -> None:
    import samples

    path = samples.save_raw(tmp_path / "x.safetensors", [("é雪", "U8", (1,), b"x")])
    ran = process("ls", path, "--quiet", "--tree", PYTHONIOENCODING="ascii")
    assert ran == (0, "1  1 B  \\xe9\\u96ea  U8 [1]\n", "")


# On a terminal ----------------------------------------------------------------------------


def terminal(
    *arguments: object, code: str | None = None, columns: int = 50, **changes: str
) -> tuple[int, str]:
    """Runs the command on a terminal; gives what was on its screen."""
    import fcntl
    import struct
    import termios

    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    running = subprocess.Popen(
        command(*arguments, code=code),
        stdin=inside, stdout=inside, stderr=inside, env=environment(**changes),
    )  # fmt: skip
    os.close(inside)
    screen = b""
    while True:
        try:
            part = os.read(outside, 65536)
        except OSError:  # Linux says so at the end.
            break
        if not part:
            break
        screen += part
    os.close(outside)
    return running.wait(SECONDS), screen.decode()


def test_a_terminal_shows_a_drawn_table(model: Path) -> None:
    code, screen = terminal("ls", model)
    assert code == 0
    assert "───" in screen
    assert "\x1b[1m" in screen
    assert "layers.10.q.weight" in screen


def test_a_narrow_terminal_gets_whole_lines(model: Path) -> None:
    code, screen = terminal("ls", model, columns=8)
    assert code == 0
    assert "─" * 8 in screen
    assert "─" * 9 not in screen
    assert "layers.10.q.weight\r\n" in screen


@pytest.mark.parametrize("changes", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_who_wants_no_colours_gets_none(model: Path, changes: dict[str, str]) -> None:
    for arguments in (["ls", model], ["plan", model], ["ls", model.parent / "x"], ["lss"]):
        _, screen = terminal(*arguments, **changes)
        assert "\x1b[3" not in screen
        assert "\x1b[1;3" not in screen
    if changes.get("TERM") == "dumb":
        assert "\x1b" not in terminal("ls", model, **changes)[1]


def test_errors_are_red_on_a_terminal_alone(model: Path) -> None:
    code, screen = terminal("ls", model.parent / "x")
    assert code == 3
    assert "\x1b[1;31merror:" in screen
    assert "\x1b" not in process("ls", model.parent / "x").err


def test_piped_lines_are_whole_whatever_the_width(tmp_path: Path) -> None:
    import samples

    name = "a.very.long.name." * 20
    path = samples.save_raw(tmp_path / "x.safetensors", [(name, "U8", (1,), b"x")])
    ran = process("ls", path, "--quiet", COLUMNS="40")
    assert ran.out == f"U8  [1]  1 B  {name}\n"
    assert str(path) in process("plan", path, COLUMNS="40").out


BAR = """
import mfload.cli.terminal as progress
import mfload.api, time
progress._PATIENCE = 0.0
real = mfload.api.load
def load(*given, progress, report, **options):
    real(*given, report=report, **options)
    for done in range(1, 5):
        progress(done << 30, 4 << 30)
        time.sleep(0.15)
mfload.api.load = load
"""


def test_long_work_has_a_bar_with_speed_and_time_left(model: Path) -> None:
    code, screen = terminal("load", model, code=BAR)
    assert code == 0
    assert "loading" in screen
    assert "B/s" in screen
    assert "<00:00" in screen
    assert "numpy tensors" in screen
    # It is cleared away: what stays is the result.
    assert "\r" + " " * 20 in screen[: screen.index("numpy tensors")]


def test_a_pipe_has_no_bar(model: Path) -> None:
    ran = process("load", model)
    assert (ran.code, ran.err) == (0, "")
    _, screen = terminal("load", model, code=BAR, TERM="dumb")
    assert "GB/s" not in screen


def test_short_work_has_no_bar(model: Path) -> None:
    _, screen = terminal("load", model)
    assert "loading" not in screen


def test_traces_are_shown_to_who_asks(run: Run, model: Path) -> None:
    gone = model.parent / "gone.safetensors"
    for arguments, changes in (
        (["--traceback", "ls", gone], {}),
        (["ls", "--traceback", gone], {}),
        (["ls", gone], {"MFLOAD_TRACEBACK": "1"}),
    ):
        ran = process(*arguments, **changes)
        assert ran.code == 3
        assert "Traceback (most recent call last)" in ran.err
        assert "SourceNotFoundError" in ran.err
        assert ran.out == ""
    ran = process("ls", gone, MFLOAD_TRACEBACK="0")
    assert ran.err.startswith("mfload: error: ")


def test_a_fault_of_ours_is_told_apart(model: Path) -> None:
    broken = "import mfload.cli.ls as x; x.totals = lambda *_: 1 / 0"
    ran = process("ls", model, code=broken)
    assert ran.code == 70
    assert "ZeroDivisionError" in ran.err
    assert "--traceback" in ran.err
    assert "Traceback" not in ran.err
    assert "Traceback" in process("ls", model, "--traceback", code=broken).err


def test_every_command_of_the_list_is_there() -> None:
    assert {"ls", "plan", "load"} <= {*app.COMMANDS}
