"""What the pages and examples show: their blocks of code, and the environments that these run in.

It needs the standard library alone, since as a script it runs the blocks of a page in such an
environment.

- Blocks of a page share their names. A block that names a framework runs in a process of its own
  together with the page's plain blocks: TensorFlow and Paddle don't live in one process.
- A ```text block right after a python block is what it prints; `…` stands for anything within a
  line, and alone on a line for any lines. Runs of spaces count as one.
- A ```console block with a line `$ mfload …` is run by bash, all of a page in one directory: what
  follows a `$` line is what it prints, on stderr too.
- `<!-- docs: skip, because … -->` before a block keeps it from being run.
- A paragraph that begins with "Install:" names environments, each by a `pip install …`; so does a
  ```sh block of such lines, which together make one. A block runs in the first environment of its
  page that has the frameworks of the block.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import shlex
import sys
import tomllib
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    mark: str
    code: str
    output: str | None

    @property
    def frameworks(self) -> frozenset[str]:
        found = {name for name, each in FRAMEWORKS.items() if re.search(each, self.code, re.M)}
        # These are for JAX, where nothing else is named.
        if not found and re.search(r"mfload\.(load_into|restore|abstract)\(", self.code):
            found = {"jax"}
        return frozenset(found)


def _pattern(module: str, *aliases: str) -> str:
    names = "|".join((module, *aliases))
    return rf"framework=[\"']({names})[\"']|^\s*(import|from) {module}\b"


FRAMEWORKS = {
    "jax": _pattern("jax", "flax") + r"|^\s*(import|from) flax\b",
    "torch": _pattern("torch", "pt", "pytorch"),
    "tensorflow": _pattern("tensorflow", "tf", "keras") + r"|^\s*import keras\b",
    "paddle": _pattern("paddle", "paddlepaddle"),
    "cupy": _pattern("cupy"),
}


class Install(NamedTuple):
    """An environment, as a page names it: the arguments of each `pip install`."""

    commands: tuple[tuple[str, ...], ...]

    @property
    def packages(self) -> frozenset[str]:
        """What is installed by name, by mfload's extras too."""
        found: set[str] = set()
        for package in (each for command in self.commands for each in command):
            given = [package]
            if package.startswith("."):
                given = [each for extra in re.findall(r"\w+", package) for each in _extras()[extra]]
            found.update(re.split(r"[\[<>=~]", each)[0] for each in given)
        return frozenset(found)

    @property
    def frameworks(self) -> frozenset[str]:
        return frozenset(
            name for name in FRAMEWORKS if any(each.startswith(name) for each in self.packages)
        )


@functools.cache
def _extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return project["optional-dependencies"]


def installs(path: Path) -> list[Install]:
    """The environments that a page or an example names, in its order."""
    text = re.sub(r"^# ?", "", path.read_text("utf-8"), flags=re.M)
    found: list[tuple[int, list[str]]] = []
    for block in re.finditer(r"^```sh\n(.*?)^```", text, re.M | re.S):
        lines = re.findall(r"^(pip install .*)$", block[1], re.M)
        found.append((block.start(), [line for line in lines if re.search(r" '?\.[\[' ]", line)]))
    for paragraph in re.finditer(r"^Install: .*?(?=\n\n|\n$|\Z)", text, re.M | re.S):
        for span in re.finditer(r"`(pip\s+install\s[^`]*)`", paragraph[0]):
            found.append((paragraph.start() + span.start(), [span[1]]))
    commands = [tuple(tuple(shlex.split(line, comments=True)[2:]) for line in lines)
                for _, lines in sorted(found) if lines]  # fmt: skip
    return [Install(each) for each in commands]


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def fences(text: str) -> list[Block]:
    """All fenced blocks; a `text` block is the output of the block right before it."""
    blocks: list[Block] = []
    pattern = r"^( *)```(\w*)[^\n]*\n(.*?)^\1```[ ]*$"
    end = -1
    for match in re.finditer(pattern, text, re.M | re.S):
        before = text[: match.start()].rstrip()
        mark = re.search(r"<!-- docs: ([^>]*?) -->$", before)
        line = text.count("\n", 0, match.start()) + 2
        code = re.sub(rf"^{match[1]}", "", match[3], flags=re.M)
        follows = blocks and not text[end : match.start()].strip()
        if match[2] == "text" and follows and blocks[-1].language == "python":
            blocks[-1] = blocks[-1]._replace(output=code)
        else:
            blocks.append(Block(line, match[2], mark[1] if mark else "", code, None))
        end = match.end()
    return blocks


def code(page: Path) -> list[Block]:
    """The blocks that are run."""
    blocks = fences(page.read_text("utf-8"))
    return [b for b in blocks if b.language == "python" and not b.mark.startswith("skip")]


def consoles(page: Path) -> list[Block]:
    """The blocks that are run by bash."""
    return [
        block
        for block in fences(page.read_text("utf-8"))
        if block.language == "console"
        and re.search(r"^\$ mfload ", block.code, re.M)
        and not block.mark.startswith("skip")
    ]


def sample() -> str:
    """The code that makes the checkpoint `model/`."""
    return next(block.code for block in code(DOCS / "quickstart.md") if block.mark == "sample")


def _run_page() -> None:
    task = json.load(sys.stdin)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(task["before"], "before", "exec"), {"__name__": "__main__"})
    names: dict[str, object] = {"__name__": "__main__"}
    printed: list[str] = []
    for line, program in task["blocks"]:
        out = io.StringIO()
        # Padded, so that a traceback names the line of the page.
        compiled = compile("\n" * (line - 1) + program, task["page"], "exec")
        try:
            with contextlib.redirect_stdout(out):
                exec(compiled, names)
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None
        printed.append(out.getvalue())
        Path(task["answer"]).write_text(json.dumps(printed))


if __name__ == "__main__":
    _run_page()
