"""The pages are true: their code runs and prints what they show, their links lead somewhere.

Every ```python block of README.md and docs/ is executed, in the order of the page, in a directory
of its own that holds the sample checkpoint (the block of docs/quickstart.md marked `sample`).

- Blocks of a page share their names. A block that names a framework runs in a process of its own
  together with the page's plain blocks: TensorFlow and Paddle don't live in one process.
- A ```text block right after a python block is what it prints; `…` stands for anything within a
  line, and alone on a line for any lines. Runs of spaces count as one.
- A ```console block with a line `$ mfload …` is run by bash, all of a page in one directory: what
  follows a `$` line is what it prints, on stderr too.
- `<!-- docs: skip, because … -->` before a block keeps it from being run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest

import mfload

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
QUICKSTART = DOCS / "quickstart.md"
SECONDS = 120


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    mark: str
    code: str
    output: str | None

    @property
    def frameworks(self) -> frozenset[str]:
        return frozenset(
            name for name, pattern in FRAMEWORKS.items() if re.search(pattern, self.code, re.M)
        )


def _pattern(module: str, *aliases: str) -> str:
    names = "|".join((module, *aliases))
    return rf"framework=[\"']({names})[\"']|^\s*(import|from) {module}\b"


FRAMEWORKS = {
    # These two are for JAX alone, and need not say so.
    "jax": _pattern("jax", "flax") + r"|mfload\.(load_into|restore|abstract)\(",
    "torch": _pattern("torch", "pt", "pytorch"),
    "tensorflow": _pattern("tensorflow", "tf", "keras"),
    "paddle": _pattern("paddle", "paddlepaddle"),
    "cupy": _pattern("cupy"),
}


def _pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _fences(text: str) -> list[Block]:
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


def _code(page: Path) -> list[Block]:
    blocks = _fences(page.read_text("utf-8"))
    return [b for b in blocks if b.language == "python" and not b.mark.startswith("skip")]


def _sample() -> str:
    return next(block.code for block in _code(QUICKSTART) if block.mark == "sample")


def _runs() -> Iterator[tuple[str, frozenset[str]]]:
    """A page and the frameworks of each process that it needs."""
    for page in _pages():
        if not page.exists():
            yield _name(page), frozenset()
            continue
        code = _code(page)
        groups = {block.frameworks for block in code}
        yield from ((_name(page), each) for each in sorted(groups, key=sorted))


def _title(run: tuple[str, frozenset[str]]) -> str:
    return "-".join((run[0], *sorted(run[1])))


@pytest.mark.parametrize("run", list(_runs()), ids=_title)
def test_code_of_the_page_runs_and_prints_what_is_shown(
    run: tuple[str, frozenset[str]], tmp_path: Path
) -> None:
    name, wanted = run
    page = ROOT / name
    if not page.exists():
        pytest.skip(f"{name} is not there yet")
    assert not {"tensorflow", "paddle"} <= wanted, "TensorFlow and Paddle crash each other"
    for framework in sorted(wanted):
        if importlib.util.find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed")
    blocks = [block for block in _code(page) if block.frameworks <= wanted]
    work, answer = tmp_path / "work", tmp_path / "answer.json"
    work.mkdir()
    task = {"page": str(page), "sample": _sample(), "answer": str(answer)}
    task["blocks"] = [(block.line, block.code) for block in blocks]
    done = subprocess.run(
        [sys.executable, "-P", __file__],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        cwd=work,
        timeout=SECONDS,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    results = json.loads(answer.read_text()) if answer.exists() else []
    at = blocks[min(len(results), len(blocks) - 1)].line
    assert done.returncode == 0, f"{name}:{at} ended with {done.returncode}\n{done.stderr[-3000:]}"
    for block, printed in zip(blocks, results, strict=True):
        if block.output is not None:
            shown = _expected(block.output)
            assert re.fullmatch(shown, _plain(printed)), (
                f"{name}:{block.line} shows\n{block.output}\nand prints\n{printed}"
            )


_MARK = "--- end of a command ---"


def _consoles(page: Path) -> list[Block]:
    return [
        block
        for block in _fences(page.read_text("utf-8"))
        if block.language == "console"
        and re.search(r"^\$ mfload ", block.code, re.M)
        and not block.mark.startswith("skip")
    ]


def _commands(block: Block) -> list[tuple[str, str]]:
    """Commands of a console block, and what each prints."""
    found: list[tuple[str, str]] = []
    for line in block.code.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif found and found[-1][0].endswith("\\"):
            found[-1] = (f"{found[-1][0]}\n{line}", "")
        else:
            assert found, f"line {block.line}: output of no command"
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
    return found


@pytest.mark.parametrize("page", [page for page in _pages() if _consoles(page)], ids=_name)
def test_commands_of_the_page_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    work, tools = tmp_path / "work", tmp_path / "tools"
    work.mkdir()
    tools.mkdir()
    for name, module in {"mfload": "-m mfload", "python": ""}.items():
        tool = tools / name
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P {module} "$@"\n')
        tool.chmod(0o755)
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{tools}:{os.environ['PATH']}"}
    env |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TERM": "dumb", "HF_HUB_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-P", "-c", _sample()], cwd=work, env=env, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    for block in _consoles(page):
        commands = _commands(block)
        # The status is kept, for a line that prints it.
        script = "".join(f'{command}\nstatus=$?; echo "{_MARK}"; (exit $status)\n'
                         for command, _ in commands)  # fmt: skip
        done = subprocess.run(
            ["bash", "-c", f"exec 2>&1\n{script}"],
            cwd=work, env=env, stdout=subprocess.PIPE, text=True, timeout=SECONDS,
        )  # fmt: skip
        printed = done.stdout.split(f"{_MARK}\n")
        for (command, shown), found in zip(commands, printed, strict=False):
            assert re.fullmatch(_expected(shown), _plain(found)), (
                f"{_name(page)}:{block.line}: {command} shows\n{shown}\nand prints\n{found}"
            )


def _plain(text: str) -> str:
    return re.sub(r"[ \t]+", " ", re.sub(r"[ \t]+$", "", text.strip("\n"), flags=re.M))


def _expected(text: str) -> str:
    lines = [re.escape(line).replace("…", "[^\n]*") for line in _plain(text).split("\n")]
    return "".join(
        "(?:[^\n]*\n)*" if line == "[^\n]*" and n < len(lines) - 1
        else "(?s:.*)" if line == "[^\n]*"
        else line + ("\n" if n < len(lines) - 1 else "")
        for n, line in enumerate(lines)
    )  # fmt: skip


def test_every_page_is_parsed() -> None:
    for page in _pages():
        if page.exists():
            text = page.read_text("utf-8")
            assert len(re.findall(r"^ *```", text, re.M)) % 2 == 0, f"{_name(page)}: open fence"


# Links ------------------------------------------------------------------------------------

_PROSE = [
    *ROOT.glob("*.md"),
    *DOCS.rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    *(ROOT / "benchmarks").rglob("*.md"),
]


def _links(text: str) -> list[str]:
    prose = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.M | re.S)
    prose = re.sub(r"`[^`\n]+`", "`code`", prose)
    found = re.findall(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)", prose)
    found += re.findall(r"^\[[^\]]+\]:\s*(\S+)", prose, re.M)
    return found + re.findall(r"(?:src|href|srcset)=\"([^\"]+)\"", prose)


def _anchors(text: str) -> set[str]:
    """Anchors of headings, as GitHub names them."""
    prose = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.M | re.S)
    found: set[str] = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", prose))
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose, re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = base = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        count = 0
        while slug in found:
            count += 1
            slug = f"{base}-{count}"
        found.add(slug)
    return found


def _leads(page: Path, link: str) -> bool:
    """Whether a link of a page leads to something: outside, or there in this repository."""
    if re.match(r"[a-z][a-z0-9+.-]*:", link):
        return link.startswith(("https:", "http:", "mailto:"))
    where, _, anchor = link.partition("#")
    target = (page.parent / where).resolve() if where else page
    if ROOT not in (target, *target.parents) or not target.exists():
        return False
    if not anchor or target.suffix != ".md":
        return True
    return anchor in _anchors(target.read_text("utf-8"))


@pytest.mark.parametrize("page", _PROSE, ids=_name)
def test_links_of_the_page_resolve(page: Path) -> None:
    links = _links(page.read_text("utf-8"))
    broken = [link for link in links if not _leads(page, link)]
    assert not broken, f"{_name(page)} links to what is not there: {', '.join(broken)}"


_MACHINE = re.compile(r"(?<![\w.])/(work\b|root\b|home/\w|Users/\w|tmp/\w|mnt/\w)|\.pyenv|/\.venv/")


@pytest.mark.parametrize("page", [*_PROSE, *DOCS.rglob("*.svg")], ids=_name)
def test_no_page_names_a_path_of_a_machine(page: Path) -> None:
    text = page.read_text("utf-8")
    own = [str(path) for path in (ROOT, Path(os.path.expanduser("~"))) if len(path.parts) > 2]
    lines = [
        f"{_name(page)}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if _MACHINE.search(line) or any(path in line for path in own)
    ]
    assert not lines, "\n".join(lines)


# What pages say of the code -----------------------------------------------------------------


@pytest.mark.parametrize("page", _pages(), ids=_name)
def test_prose_gives_fields_of_options_as_such(page: Path) -> None:
    names = "|".join(field.name for field in dataclasses.fields(mfload.Options))
    prose = re.sub(r"(?ms)^```.*?^```", "", page.read_text("utf-8"))
    found = set(re.findall(rf"`({names})=", prose))
    # README is short of room; a doctor has a timeout of its own.
    own = {"README.md": {"engine"}, "doctor.md": {"timeout"}, "api.md": {"timeout"}}
    assert found <= own.get(page.name, set())


def test_index_names_every_page() -> None:
    index = DOCS / "index.md"
    linked = {(DOCS / link.split("#")[0]).resolve() for link in _links(index.read_text("utf-8"))}
    missing = sorted(_name(page) for page in DOCS.rglob("*.md") if page not in linked | {index})
    assert not missing, f"docs/index.md does not name {', '.join(missing)}"


def _error_tree() -> tuple[str, dict[str, str]]:
    """The drawing on the page of errors, and the text beside each name."""
    lines = (DOCS / "errors.md").read_text("utf-8").split("\n")
    drawing = [line for line in lines if re.match(r"MfloadError$|[│├└]", line)]
    names = [re.match(r"[│├└─ ]*(\w+)", line)[1] for line in drawing]  # pyright: ignore
    return "\n".join(drawing), dict(zip(names, drawing, strict=True))


def test_the_drawn_tree_is_the_tree() -> None:
    from mfload import errors

    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.MfloadError)
    }
    drawing, lines = _error_tree()
    assert set(lines) == set(classes)
    parents: list[str] = []
    for line in drawing.split("\n"):
        match = re.match(r"([│├└─ ]*)(\w+)(?: \((\w+)\))?", line)
        assert match is not None
        depth, kind = len(match[1]) // 4, classes[match[2]]
        del parents[depth:]
        assert [base.__name__ for base in kind.__bases__] == [
            *(parents[-1:] or ["Exception"]), *filter(None, [match[3]])
        ], line  # fmt: skip
        parents.append(match[2])


def test_errors_page_has_a_section_for_each() -> None:
    text = (DOCS / "errors.md").read_text("utf-8")
    _, lines = _error_tree()
    sections = re.findall(r"^#{2,4} `(\w+)`$", text, re.M)
    assert sections == [name for name in lines if name != "MfloadError"]


def test_street_names_modules_that_are_there() -> None:
    picture = ElementTree.parse(DOCS / "street.svg").getroot()
    words = " ".join(picture.itertext())
    named = set(re.findall(r"[\w/]+\.py", words))
    missing = sorted(name for name in named if not (ROOT / "mfload" / name).exists())
    assert named
    assert not missing, f"docs/street.svg names {', '.join(missing)}"


def test_street_places_every_module() -> None:
    page = DOCS / "street.md"
    linked = {(DOCS / link).resolve() for link in _links(page.read_text("utf-8"))}
    modules = {
        path
        for path in (ROOT / "mfload").rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    missing = sorted(_name(path) for path in modules - linked)
    assert not missing, f"docs/street.md does not link to {', '.join(missing)}"


def test_the_trace_is_the_same_wherever_the_checkout_lies(tmp_path: Path) -> None:
    """NumPy below a folder that is called mfload, as in an environment in a clone."""
    root = tmp_path / "mfload" / "über links"
    shutil.copytree(ROOT / "mfload", root / "mfload", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "docs").mkdir()
    shutil.copy(DOCS / "generate_street.py", root / "docs")
    for each in Path(np.__file__).parents[1].glob("numpy*"):
        (root / each.name).symlink_to(each)
    code = "import generate_street; print(generate_street.trace())"
    here, there = (
        subprocess.run(
            [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True,
            check=True, env=os.environ | {"PYTHONPATH": str(each / "docs")},
        ).stdout
        for each in (ROOT, root)
    )  # fmt: skip
    assert there == here


_ELSEWHERE = """
import mmap, os, sys
import ml_dtypes, numpy as np
from safetensors.numpy import save_file

written = np.arange(3 << 20, dtype=np.float32)
save_file({"w": written}, "large.safetensors")
platform, *missing = sys.argv[1:]
for name in missing:
    for module in (os, mmap):
        if hasattr(module, name):
            delattr(module, name)
sys.platform = platform
import mfload

for engine in ("auto", "pread", "direct", "mmap"):
    report = mfload.Report()
    array = mfload.load("large.safetensors", framework="numpy", report=report,
                        options=mfload.Options(engine=engine))["w"]
    assert (array == written).all(), engine
    print(report.route[0][1], end=" ")
"""
_NOT_ON_MACOS = ("O_DIRECT", "posix_fadvise", "sched_getaffinity", "MADV_HUGEPAGE")
_NOT_ON_WINDOWS = (*_NOT_ON_MACOS, "preadv", "pread", "sysconf", "fork", "register_at_fork",
                   "O_NONBLOCK", "O_CLOEXEC")  # fmt: skip


@pytest.mark.parametrize(
    ("platform", "missing"), [("darwin", _NOT_ON_MACOS), ("win32", _NOT_ON_WINDOWS)]
)
def test_other_systems_have_their_stand_ins(
    platform: str, missing: tuple[str, ...], tmp_path: Path
) -> None:
    """docs/engines.md says so: what other systems lack is taken away."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _ELSEWHERE, platform, *missing],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=SECONDS,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["pread", "pread", "pread", "mmap"]


# The process that runs a page ---------------------------------------------------------------


def _run_page() -> None:
    task = json.load(sys.stdin)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(task["sample"], "sample", "exec"), {"__name__": "__main__"})
    names: dict[str, object] = {"__name__": "__main__"}
    printed: list[str] = []
    for line, code in task["blocks"]:
        out = io.StringIO()
        # Padded, so that a traceback names the line of the page.
        program = compile("\n" * (line - 1) + code, task["page"], "exec")
        try:
            with contextlib.redirect_stdout(out):
                exec(program, names)
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None
        printed.append(out.getvalue())
        Path(task["answer"]).write_text(json.dumps(printed))


if __name__ == "__main__":
    _run_page()
