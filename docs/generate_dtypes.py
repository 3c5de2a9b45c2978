"""Writes the tables of docs/dtypes.md from the adapters: `python docs/generate_dtypes.py`.

Each framework is asked in a process of its own: TensorFlow and Paddle don't live in one. With
`--check` nothing is written, and the exit status says whether the page is up to date.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "dtypes.md"
PINS = ROOT / "requirements"
MAIN, OLDEST, NEWEST = "test.txt", "oldest.txt", "newest.txt"

# Title, and the distribution that the pins name.
FRAMEWORKS = {
    "numpy": ("NumPy", "numpy"),
    "jax": ("JAX", "jax"),
    "torch": ("PyTorch", "torch"),
    "tensorflow": ("TensorFlow", "tensorflow-cpu"),
    "paddle": ("Paddle", "paddlepaddle"),
    "cupy": ("CuPy", "cupy-cuda13x"),
}


def ask(framework: str) -> dict[str, Any]:
    """What this process's version of a framework does with each dtype.

    Args:
        framework: Its name; it is imported, CuPy excepted.

    Returns:
        `version`, `oldest`, `alignment` (bytes or None), and `forms`: (how, type) by dtype.
    """
    module = importlib.import_module(f"mfload.frameworks.{framework}_adapter")
    adapter = getattr(module, f"{framework.capitalize()}Adapter")
    known = pinned(framework, MAIN) if framework == "cupy" else importlib.import_module(framework)
    return {
        "version": known if isinstance(known, str) else known.__version__.split("+")[0],
        "oldest": module.OLDEST,
        "alignment": adapter.alignment,
        "forms": {name: tuple(form) for name, form in adapter.forms.items()},
    }


def pinned(framework: str, pins: str) -> str:
    """The version that a file of requirements names."""
    distribution = FRAMEWORKS[framework][1]
    text = (PINS / pins).read_text(encoding="utf-8")
    found = re.search(rf"^{distribution}==(\S+)$", text, re.M)
    return found[1] if found else "none"


def column(told: dict[str, Any]) -> dict[str, str]:
    """The cells of a framework, by dtype."""
    return {name: _cell(how, kind) for name, (how, kind) in told["forms"].items()}


def _cell(how: str, kind: str) -> str:
    return "bytes" if how == "bytes" else f"`{kind}`" if how == "alias" else f"`{kind}`, copied"


def documented(text: str, framework: str) -> dict[str, str]:
    """The cells of a framework as a page has them."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in _between(text, "forms").strip().splitlines()
    ]
    at = rows[0].index(FRAMEWORKS[framework][0])
    return {row[0].strip("`"): row[at] for row in rows[2:]}


def page(text: str, answers: dict[str, dict[str, Any]]) -> str:
    """The page with its tables made anew."""
    titles = [FRAMEWORKS[name][0] for name in answers]
    columns = [column(told) for told in answers.values()]
    forms = [["stored", *titles]]
    forms += [[f"`{name}`", *(cells[name] for cells in columns)] for name in columns[0]]
    versions = [["", "oldest", "tested as oldest", "tested as newest", "alignment"]]
    for name, told in answers.items():
        oldest, newest = pinned(name, OLDEST), pinned(name, NEWEST)
        newest = told["version"] if newest == "none" else newest
        if name == "cupy":
            newest = f"{newest}, without a GPU"
        alignment = f"{told['alignment']} bytes" if told["alignment"] else "that of the dtype"
        versions.append([FRAMEWORKS[name][0], told["oldest"], oldest, newest, alignment])
    return _put(_put(text, "forms", _table(forms)), "versions", _table(versions))


def _table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _between(text: str, name: str) -> str:
    return text.split(f"<!-- table: {name} -->\n")[1].split("<!-- end of table -->")[0]


def _put(text: str, name: str, table: str) -> str:
    return text.replace(
        f"<!-- table: {name} -->\n{_between(text, name)}", f"<!-- table: {name} -->\n{table}\n"
    )


def main(arguments: list[str]) -> int:
    """Asks every framework and writes the page."""
    if arguments[:1] == ["--ask"]:
        print(json.dumps(ask(arguments[1])))
        return 0
    answers: dict[str, dict[str, Any]] = {}
    for name in FRAMEWORKS:
        command = [sys.executable, __file__, "--ask", name]
        paths = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=paths, check=False)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        answers[name] = json.loads(done.stdout.splitlines()[-1])
    text = PAGE.read_text(encoding="utf-8")
    new = page(text, answers)
    if "--check" in arguments:
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
