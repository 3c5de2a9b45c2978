"""Names from a stranger's header: one line each, harmless, and whole."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import samples
from hypothesis import example, given, strategies as st

from mfload import cli, errors, options
from mfload.cli import failures, output

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


@pytest.mark.parametrize(
    ("typed", "shown"), [("1KiB", "1 KiB"), ("1kB", "1 kB"), ("1000", "1000 bytes")]
)
def test_messages_use_the_unit_that_was_typed(
    typed: str, shown: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--engine", "direct", "--threads", "2", "--max-host-overhead", typed]
    assert cli.run(["plan", str(model), *more]) == 2
    said = capsys.readouterr().err
    assert f"  found: {shown}\n" in said
    assert re.search(r"  expected: [\d.]+ (KiB|kB|bytes) or more", said)
    unit = shown.partition(" ")[2]
    assert f" {unit} or more" in said
    # What is said to be enough is enough, typed as it was said.
    enough = re.search(r"expected: ([\d.]+) ", said)
    assert enough
    more[-1] = enough[1] + ("" if unit == "bytes" else unit)
    assert cli.run(["plan", str(model), *more]) == 0


@given(st.integers(1, 10**18), st.sampled_from(["kB", "KiB", "MB", "MiB", "GB", "GiB", "TB"]))
def test_an_amount_is_enough(nbytes: int, unit: str) -> None:
    said = errors.amount(nbytes, options.size(f"3{unit}"))
    assert said.endswith(f" {unit}")
    enough = options.size(said)
    assert nbytes <= enough
    assert enough - nbytes <= options.size(f"0.01{unit}") + 1


def test_sizes_keep_their_unit() -> None:
    import pickle

    made = options.Options(max_host_overhead="1.5GB")
    assert made.max_host_overhead == 1_500_000_000
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert errors.amount(10**9, again.max_host_overhead) == "1 GB"
    assert errors.amount(1) == "1 byte"
    assert errors.amount(2, 5) == "2 bytes"


def test_a_listing_is_in_the_units_of_its_limits(model: Path) -> None:
    assert "2 KiB" in _run("ls", model)
    assert "2 KiB" in _run("ls", model, "--larger-than", "1KiB")
    listed = _run("ls", model, "--larger-than", "1kB")
    assert "2.048 kB" in listed
    assert "KiB" not in listed


class _Screen(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_breaks_lines_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    long = "/a-path/that-has/many-parts/" + "x" * 50
    rows = [
        ("route", f"pread because it is a small read of {long} and so on"),
        ("threads", "2"),
        ("name", long),
    ]
    screen = _Screen()
    with redirect_stdout(screen):
        output.print_table(None, rows)
    drawn = re.sub(r"\x1b\[\d*m", "", screen.getvalue())
    assert drawn.splitlines() == [
        "route    pread because it is a small",
        "         read of",
        f"         {long}",
        "         and so on",
        "threads  2",
        f"name     {long}",
    ]
    assert screen.getvalue().startswith("\x1b[1mroute  \x1b[0m  pread")
    for stream in (StringIO(), _Screen()):
        with redirect_stderr(stream):
            failures.show(errors.UsageError("words " * 20, expected="more words"), as_json=False)
        lines = stream.getvalue().splitlines()
        assert len(lines) == (2 if type(stream) is StringIO else 5)
        assert "words" in lines[1]


def test_a_pipe_has_whole_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    row = ("a", "word " * 40)
    assert _lines(capsys, [list(row)]) == [f"a  {'word ' * 40}".rstrip()]
