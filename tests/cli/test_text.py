"""Names from a stranger's header: one line each, harmless, and whole."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import samples
from hypothesis import example, given, strategies as st

from mfload import cli, errors, options
from mfload.cli import output

NASTY = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from(
            ["\x1b[31m", "\x1b]0;title\x07", "\x9b2J", "[red]", "[/]", "[link=x]", "\n", "\r", "\t",
             "\u2028", "\u202e", "\x85", "雪", "👩‍🚀", "e\u0301", ".", "..", " ", "\\n", "%s", "{}",
             "\0", ":smile:"]
        ),
        max_size=12,
    ).map("".join),
)  # fmt: skip


@contextmanager
def _file(names: list[str]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        rows = [(name, "U8", (1,), b"x") for name in names]
        yield samples.save_raw(Path(directory) / "x.safetensors", rows)


def _run(*arguments: object) -> str:
    out = StringIO()
    with redirect_stdout(out):
        assert cli.run([str(each) for each in arguments]) == 0
    return out.getvalue()


@given(st.lists(NASTY.filter(lambda x: x != "__metadata__"), unique=True, max_size=6))
@example(["", " ", "a\nb", "a\\nb"])
def test_one_harmless_line_a_tensor(names: list[str]) -> None:
    with _file(names) as path:
        printed = _run("ls", path, "--quiet")
        lines = printed.split("\n")
        assert lines.pop() == ""
        assert len(lines) == len(names)
        assert printed.replace("\n", "").isprintable()
        for line, name in zip(lines, names, strict=True):
            assert line == f"U8  [1]  1 B  {errors.printable(name)}".rstrip()
        assert _run("ls", path, "--tree").replace("\n", "").isprintable()
        data = json.loads(_run("ls", path, "--json"))
        assert [each["name"] for each in data["tensors"]] == names


@given(NASTY)
def test_a_drawn_table_is_as_harmless(name: str) -> None:
    class Screen(StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    environment = {"TERM": "xterm", "COLUMNS": "200", "NO_COLOR": "1"}
    before = {key: os.environ.get(key) for key in environment}
    os.environ.update(environment)
    try:
        with redirect_stdout(screen):
            output.print_table(["head"], [[name]])
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
    drawn = re.sub(r"\x1b\[\d*m", "", screen.getvalue())
    assert drawn.replace("\n", "").isprintable()
    assert errors.printable(name).strip() in drawn


@given(st.text())
def test_clean_leaves_what_is_harmless(value: str) -> None:
    cleaned = errors.printable(value)
    assert cleaned.isprintable()
    if value.isprintable():
        assert cleaned == value


def _lines(
    capsys: pytest.CaptureFixture[str], rows: list[list[str]], right: tuple[int, ...] = ()
) -> list[str]:
    output.print_table(None, rows, right=right)
    return capsys.readouterr().out.splitlines()


def test_columns(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [["a", "1", "x"], ["bbb", "200", ""]]
    assert _lines(capsys, rows, (1,)) == ["a      1  x", "bbb  200"]
    assert _lines(capsys, []) == []


@pytest.mark.parametrize(
    ("typed", "nbytes"),
    [("0", 0), ("4096", 4096), ("256MiB", 256 << 20), ("1.5GB", 1_500_000_000), ("64k", 64_000),
     ("64K", 64_000), ("1 GiB", 1 << 30), ("2tib", 2 << 40), ("0.5KiB", 512), ("1b", 1),
     ("1.000000000001TB", 10**12 + 1), (" 3 ", 3), ("7Gi", 7 << 30), ("1PB", 10**15)],
)  # fmt: skip
def test_sizes_as_typed(typed: str, nbytes: int) -> None:
    assert options.size(typed) == nbytes


@pytest.mark.parametrize(
    "typed", ["", "x", "-1", "1.2.3", "MiB", "1 apple", "1e9", "0x10", "1iB", "1i", "١"]
)
def test_what_is_no_size(typed: str) -> None:
    with pytest.raises(errors.UsageError, match="not a size"):
        options.size(typed)


@given(st.integers(0, 10**18))
def test_bytes_are_taken_as_they_are(nbytes: int) -> None:
    assert options.size(str(nbytes)) == nbytes


def test_numbers_that_json_lacks_are_strings(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"nan": float("nan"), "x": [-float("inf"), 1.5], "name": "NaN"})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out, parse_constant=lambda x: pytest.fail(x)) == {
        "nan": "nan", "x": ["-inf", 1.5], "name": "NaN",
    }  # fmt: skip
