"""What the library says of its arguments, in the words of a command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Run

import mfload
from mfload import errors
from mfload.cli.spelling import spoken

ROOT = Path(mfload.__file__).parent
# What no command reaches: meshes, trees, lazy tensors, streams, arrays to save, and what programs
# alone give.
_PROGRAMS = (
    "mesh/", "trees/", "compat/", "misuse.py", "bench/", "api.py", "options.py", "report.py",
    "loading/lazy", "loading/stream", "loading/attempts.py", "saving/export.py", "dtypes.py",
    "saving/together.py", "saving/save.py", "formats/steps.py", "formats/orbax.py", "packed.py",
    "frameworks/jax_adapter.py", "planning/request.py", "ondemand/",
)  # fmt: skip
_NAMED = r"(?<![-\w?&/%])[a-z_]\w*=(?!=)|\w*Options\b|(?<!')\bmfload\.[a-z]|\w\(\w+="
_PYTHON = re.compile(_NAMED)
# Given by programs alone; a range of HTTP; options of mounts.
_THEIRS = (
    "PeerOptions(…)",
    "access.answer()",  # Run by another interpreter.
    "search=…",  # Queries of the hub.
    "author=…",
    "an mfload.PeerOptions",
    "publish=",
    "part=",
    "load_state_dict",
    "bytes=",
    "data=ordered",
    "proto=rdma",
)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("there already; overwrite=True replaces it", "there already; --overwrite replaces it"),
        ("invalid max_shard_size", "invalid --max-shard-size"),
        ("checksums=... is for checkpoints", "--checksums NAME is for checkpoints"),
        ("two threads met", "two threads met"),
        ("engine='mmap' reads files", "--engine mmap reads files"),
        ("ask for it: dtype={name: dtype}", "ask for it: --dtype [REGEX=]DTYPE"),
        ("checksums=False on both sides", "--no-checksums on both sides"),
        ("use Options(headers=…) or ~/.netrc", "use --header HEADER or ~/.netrc"),
        ("or Options(peer=PeerOptions(planner=…))", "or --planner URL"),
        ("options=mfload.Options(threads=2)", "--threads 2"),
        ("token_file=, or cert_file=", "--token-file, or --cert-file"),
        ("mfload.verify, which reads", "mfload verify, which reads"),
        (
            "mfload.verify(path, mode='write') makes one",
            "mfload verify PATH --mode write makes one",
        ),
        ("mfload.ondemand.bundle writes one", "mfload bundle writes one"),
        ("/data/threads=4/m and http://h/?names=x", "/data/threads=4/m and http://h/?names=x"),
        ("nothing=1 and what_is_this", "nothing=1 and what_is_this"),
    ],
)
def test_arguments_become_options(said: str, shown: str) -> None:
    assert spoken(said) == shown


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The string literals of a module but docstrings; what is put into them is `…`."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (each.value if isinstance(each, ast.Constant) else "…" for each in node.values)
            yield node.lineno, "".join(map(str, parts))


def _raised(path: Path) -> Iterator[tuple[int, str]]:
    """Texts of a module that may be a message."""
    for line, text in _texts(ast.parse(path.read_text("utf-8"))):
        if re.search(r"[a-z] [a-z]|^\w+=", text) and "\n" not in text and "{" not in text[:1]:
            yield line, text


def test_no_message_that_a_command_may_show_is_python() -> None:
    seen = 0
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(_PROGRAMS):
            continue
        for line, text in _raised(path):
            seen += 1
            shown = spoken(text).partition("in Python, ")[0]
            if not any(each in text for each in _THEIRS):
                assert not _PYTHON.search(shown), f"{name}:{line}: {shown!r}"
    assert seen > 1000


WRONG: tuple[tuple[str, ...], ...] = (
    ("load", "MODEL", "--threads", "0"),
    ("load", "MODEL", "--timeout", "0"),
    ("load", "MODEL", "--engine", "direct", "--page-cache", "keep"),
    ("load", "MODEL", "--engine", "direct", "--max-host-overhead", "1KiB"),
    ("load", "MODEL", "--page-cache", "kep"),
    ("load", "MODEL", "--dtype", "int8"),
    ("load", "MODEL", "--dtype", "a=f32", "--dtype", "f16"),
    ("load", "MODEL", "--device", "cuda:9"),
    ("load", "MODEL", "--device", "a=cpu", "--device", "cpu"),
    ("load", "MODEL", "--prefer", "second"),
    ("load", "MODEL", "--verify", "missing.json"),
    ("load", "MODEL", "--key-file", "key.pem"),
    ("load", "MODEL", "--planner", "nowhere"),
    ("load", "MODEL", "--header", "Host: x"),
    ("load", "MODEL", "--header", "no colon"),
    ("load", "MODEL", "--header", "@missing"),
    ("load", "peer:///org/name"),
    ("load", "peer://127.0.0.1:1/a b"),
    ("load", "peer://127.0.0.1:1/m", "--token-file", "missing"),
    ("load", "http://user:secret@127.0.0.1:1/m.safetensors"),
    ("load", "http://127.0.0.1:1/directory/"),
    ("load", "ftp://127.0.0.1/m.safetensors"),
    ("load", "https://127.0.0.1:1/m.safetensors", "--ca-file", "missing"),
    ("ls", "MODEL", "--names", "["),
    ("ls", "MODEL", "--names", "nothing"),
    ("ls", "MODEL", "--dtype", "bfloat"),
    ("ls", "MODEL", "--sort", "weight"),
    ("verify", "MODEL", "--mode", "check"),
    ("verify", "MODEL", "--checksums", "some"),
    ("verify", "MODEL", "--checksums", "md5"),
    ("verify", "MODEL", "--sha256", "12"),
    ("verify", "MODEL", "--against", "missing"),
    ("diff", "MODEL", "missing"),
    ("align", "MODEL"),
    ("align", "MODEL", "--align", "3"),
    ("align", "MODEL", "to.safetensors", "--max-shard-size", "0"),
    ("convert", "MODEL", "MODEL"),
    ("convert", "MODEL", "/dev/null/to.safetensors"),
    ("convert", "MODEL", "http://127.0.0.1/x.safetensors"),
    ("bundle", "MODEL", "to.safetensors", "--up", "x", "--down", "y"),
    ("unbundle", "MODEL", "to.safetensors"),
    ("serve", "MODEL", "--model", "a b"),
    ("serve", "MODEL", "--model", "a", "--address", "0.0.0.0:0"),
    ("serve", "MODEL", "--model", "a", "--address", "here"),
    ("serve", "MODEL", "--model", "a", "--key-file", "x"),
    ("serve", "MODEL", "--model", "a", "--ca-file", "x"),
    ("serve", "MODEL", "--model", "a", "--transports", "pigeon"),
    ("serve", "MODEL", "--model", "a", "--token-file", "missing"),
    ("planner", "--address", "0.0.0.0:0"),
    ("planner", "--key-file", "x"),
    ("bench", "MODEL", "--random", "--names", "x"),
    ("bench", "MODEL", "--out", "MODEL"),
    ("bench", "MODEL", "--engines", "quick"),
)


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_errors_name_options(
    run: Run, model: Path, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run(*(str(model) if word == "MODEL" else word for word in words))
    assert ran.code not in (0, 70), ran
    for line in ran.err.replace(str(tmp_path), "").splitlines():
        if not line.startswith("  found:"):  # What was typed.
            assert not _PYTHON.search(line), line
            for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", line):
                assert option in run(words[0], "--help").out, f"{option} in {line!r}"


def test_notes_and_warnings_name_options(run: Run, model: Path) -> None:
    ran = run("verify", model)
    assert "--mode write makes one" in ran.out
    ran = run("plan", model, "--page-cache", "keep", "--engine", "pread")
    assert "page_cache" not in ran.out


def test_values_that_were_typed_stay(capsys: pytest.CaptureFixture[str]) -> None:
    from mfload.cli import failures

    failures.show(errors.UsageError("x", found="overwrite=True"), as_json=False)
    assert "  found: overwrite=True\n" in capsys.readouterr().err
