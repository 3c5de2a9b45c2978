"""The fields of the JSON are those that docs/commands.md lists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from mfload.bench import results

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def _documented(of: str) -> set[str]:
    page = PAGE.read_text("utf-8")
    table = page.split(f"| field of {of} | what |\n")[1].split("\n\n")[0]
    return {
        name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }


def _inner(of: str, field: str) -> set[str]:
    """The words that the line of a field sets as code."""
    page = PAGE.read_text("utf-8").split(f"| field of {of} | what |\n")[1]
    line = next(line for line in page.splitlines() if line.startswith(f"| `{field}`"))
    return {*re.findall(r"`(\w+)`", line)}


@pytest.mark.parametrize("name", ["ls", "plan", "load", "verify", "diff", "align", "doctor"])
def test_fields_are_documented(run: Run, model: Path, tmp_path: Path, name: str) -> None:
    more: list[Any] = {"diff": [model, "--all"], "align": [tmp_path / "x.safetensors"]}.get(
        name, []
    )
    found = run(name, model, *more, "--json").json
    found = found["runs"][0] if name == "load" else found
    assert set(found) == _documented(f"`{name}`")
    for field, value in found.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            assert set(value[0]) <= _inner(f"`{name}`", field)


def test_rows_of_a_bench_are_documented() -> None:
    assert set(results._row({}, "warm", "mfload-numpy")) == _documented("`bench`")


def test_errors_are_documented(run: Run, model: Path) -> None:
    error = run("ls", model.parent / "nothing", "--json").json["error"]
    assert set(error) == _documented("an error")
