"""Help, completion, and what is said to who mistypes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import Run, command, environment, process

from mfload.cli import app, options
from mfload.errors import UsageError

COMMANDS = list(app.COMMANDS)


def test_help_lists_the_commands(run: Run) -> None:
    ran = run("--help")
    assert (ran.code, ran.err) == (0, "")
    for name in COMMANDS:
        line = re.search(rf"^  {name} +(\S.*)$", ran.out, re.M)
        assert line, name
        assert len(line[1]) > 10
        # Short enough to be shown whole.
        assert not line[1].endswith("..."), name
    for option in ("--version", "--traceback", "--install-completion", "--show-completion"):
        assert option in ran.out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(run: Run, name: str) -> None:
    ran = run(name, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"Usage: mfload {name} [OPTIONS]")
    # Each has JSON, and an example that begins as one would type it.
    assert "--json" in ran.out
    example = " ".join(ran.out.split("Example")[-1].split())
    assert re.search(rf"mfload {name} \S", example)
    # Every option says what it is for.
    for line in ran.out.splitlines():
        assert not re.fullmatch(r"  (-\w, )?--[\w-]+( [A-Z]+)?", line) or "--" in line
    assert "\x1b" not in ran.out
    assert run(name, "-h") == ran


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_no_word_of_the_help_is_cut(
    run: Run, name: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [name, "-h"] if name else ["-h"]
    monkeypatch.setenv("COLUMNS", "1000")
    whole = set(run(*arguments).out.split())
    monkeypatch.setenv("COLUMNS", str(columns))
    out = run(*arguments).out
    assert max(map(len, out.splitlines())) <= columns
    cut = set(out.split()) - whole - {"..."}
    # What is too long for the list of commands ends with dots, after a word.
    assert not {word for word in cut if not word.endswith("...") or word[:-3] not in whole}


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in {"doctor", "planner"}])
def test_without_arguments_it_is_said_what_is_missing(run: Run, name: str) -> None:
    ran = run(name)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("mfload: error: Missing argument")
    assert f"mfload {name} --help" in ran.err


def test_alone_it_helps_and_is_wrong_usage(run: Run) -> None:
    ran = run()
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("Usage: mfload")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lss"], "No such command 'lss'. Did you mean 'ls'?"),
        (["laod", "x"], "Did you mean 'load'?"),
        (["ls", "x", "--jsn"], "--json"),
        (["--vesion"], "--version"),
        (["load", "x", "--threads", "many"], "'--threads'"),
        (["load", "x", "--repeat", "0"], "'--repeat'"),
        (["load", "x", "--max-host-overhead", "3 apples"], "256MiB"),
        (["ls", "x", "y"], "unexpected extra argument"),
    ],
)
def test_wrong_usage(run: Run, arguments: list[str], said: str) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("mfload: error: ")
    assert said in ran.err
    error = run(*arguments, "--json").json["error"]
    assert error["type"] == "UsageError"
    assert said in error["message"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model/", "ls"], "the command first: mfload ls model/ …"),
        (["show", "x"], "expected: ls | plan | load"),
        (["load", "x", "-f"], "See mfload load --help"),
    ],
)
def test_what_to_type_instead(run: Run, arguments: list[str], said: str) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_help_as_a_word(run: Run) -> None:
    assert run("help") == run("--help") == run("-h")
    assert run("help", "ls") == run("ls", "--help")
    assert run("-V") == run("--version")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--framework", "pytroch"], "unknown framework, did you mean 'torch'?"),
        (["--framework", "Tensorflw"], "did you mean 'tensorflow'?"),
        (["--engine", "dierct"], "unknown engine, did you mean 'direct'?"),
        (["--allocator", "framwork"], "unknown allocator, did you mean 'framework'?"),
        (["--dtype", "bflot16"], "unknown dtype, did you mean 'bfloat16'?"),
        (["--names", "LAYERS"], "(?i)LAYERS"),
        (["--names", "layrs.0.q.weight"], "layers.0.q.weight"),
        (["--names", "*weight"], "what a shell writes * is .* here"),
        (["--threads", "0"], "1 or more"),
        (["--timeout", "-1"], "timeout"),
    ],
)
def test_names_that_nobody_knows(run: Run, model: Path, arguments: list[str], said: str) -> None:
    for name in ("load", "plan"):
        ran = run(name, model, *arguments)
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.err


def test_dtypes_for_all_or_by_name() -> None:
    assert options.by_name("--dtype", None) is None
    assert options.by_name("--dtype", []) is None
    assert options.by_name("--dtype", ["bf16"]) == "bf16"
    rules = [("a=b$", "int8"), ("c", "f32")]
    assert options.by_name("--dtype", [r"a=b$=int8", "c=f32"]) == rules
    for wrong in (["bf16", "a=f32"], ["bf16", "f32"], ["=f32"]):
        with pytest.raises(UsageError, match="--dtype takes a regex"):
            options.by_name("--dtype", wrong)


# Completion -------------------------------------------------------------------------------


def _completed(*words: str) -> list[str]:
    ran = process(
        _MFLOAD_COMPLETE="complete_bash",
        COMP_WORDS=shlex.join(("mfload", *words)),
        COMP_CWORD=str(len(words)),
    )
    assert (ran.code, ran.err) == (0, "")
    return ran.out.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["l"], {"ls", "load"}),
        (["load", "x", "--framework", "t"], {"torch", "tensorflow"}),
        (["load", "x", "-f", "pa"], {"paddle"}),
        (["plan", "x", "--engine", "p"], {"pread", "pinned"}),
        (["plan", "x", "--allocator", "f"], {"framework"}),
        (["ls", "x", "--sort", "n"], {"name"}),
        (["ls", "x", "--tr"], {"--tree"}),
    ],
)
def test_what_the_tab_key_offers(words: list[str], offered: set[str]) -> None:
    assert {*_completed(*words)} == offered


def test_completion_is_shown() -> None:
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("no bash")
    line = shlex.join(command("--show-completion"))
    done = subprocess.run(
        [shell, "-c", f"{line}; true"],
        capture_output=True, text=True, env=environment(), timeout=60,
    )  # fmt: skip
    assert "_MFLOAD_COMPLETE=complete_bash" in done.stdout
