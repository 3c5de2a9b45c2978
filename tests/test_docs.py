"""The pages say what is so: their links lead somewhere, and what they name is there.

tests/test_pages.py runs their code.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from pages import DOCS, ROOT, name_of, pages

import mfload

SECONDS = 120


def test_every_page_is_parsed() -> None:
    for page in pages():
        if page.exists():
            text = page.read_text("utf-8")
            assert len(re.findall(r"^ *```", text, re.M)) % 2 == 0, f"{name_of(page)}: open fence"


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


@pytest.mark.parametrize("page", _PROSE, ids=name_of)
def test_links_of_the_page_resolve(page: Path) -> None:
    links = _links(page.read_text("utf-8"))
    broken = [link for link in links if not _leads(page, link)]
    assert not broken, f"{name_of(page)} links to what is not there: {', '.join(broken)}"


_MACHINE = re.compile(r"(?<![\w.])/(work\b|root\b|home/\w|Users/\w|tmp/\w|mnt/\w)|\.pyenv|/\.venv/")


@pytest.mark.parametrize("page", [*_PROSE, *DOCS.rglob("*.svg")], ids=name_of)
def test_no_page_names_a_path_of_a_machine(page: Path) -> None:
    text = page.read_text("utf-8")
    own = [str(path) for path in (ROOT, Path(os.path.expanduser("~"))) if len(path.parts) > 2]
    lines = [
        f"{name_of(page)}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if _MACHINE.search(line) or any(path in line for path in own)
    ]
    assert not lines, "\n".join(lines)


# What pages say of the code -----------------------------------------------------------------


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_prose_gives_fields_of_options_as_such(page: Path) -> None:
    names = "|".join(field.name for field in dataclasses.fields(mfload.Options))
    prose = re.sub(r"(?ms)^```.*?^```", "", page.read_text("utf-8"))
    found = set(re.findall(rf"`({names})=", prose))
    # README is short of room; a doctor has a timeout of its own.
    own = {"README.md": {"engine"}, "doctor.md": {"timeout"}, "api.md": {"timeout"}}
    assert found <= own.get(page.name, set())


_DOTTED = re.compile(r"(?<!from )(?<!import )(?<![\w./@-])mfload(?:\.[A-Za-z_]\w*)+")
_NO_ATTRIBUTES = {"mfload.transports", "mfload.tree"}  # A group of entry points, a key of metadata.
_REACHED = """
import importlib, sys

for name in sys.argv[1:]:
    for module in [each for each in sys.modules if each.split(".")[0] == "mfload"]:
        del sys.modules[module]
    found = importlib.import_module("mfload")
    try:
        for part in name.split(".")[1:]:
            found = getattr(found, part)
    except AttributeError as error:
        print(name, error)
    except ModuleNotFoundError as error:  # Of the library that a seam is for.
        assert not error.name.startswith("mfload"), name
"""


def test_what_the_pages_name_is_reached_from_import_mfload() -> None:
    """By attributes alone: `import mfload; mfload.compat.patch()`."""
    named = {name for page in pages() for name in _DOTTED.findall(page.read_text("utf-8"))}
    assert "mfload.compat.patch" in named
    done = subprocess.run(
        [sys.executable, "-P", "-c", _REACHED, *sorted(named - _NO_ATTRIBUTES)],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert not done.stdout, done.stdout


# Promises: words that leave no exception, and so need a test that shows it.
_PROMISE = re.compile(r"\b(?:never|always|at\s+most|once)\b", re.I)
_NAMED = re.compile(r"<!-- test: ([^>]*?) -->")
_GUIDES = [*ROOT.glob("[RS]E*.md"), *DOCS.glob("*.md"), *DOCS.glob("how-to/*.md")]
_GUIDES.remove(DOCS / "street.md")  # It is about the inside.


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, items of lists, and tables of a page, each with its line and its comments."""
    text = re.sub(r"(?ms)^( *)```.*?^\1```", lambda fence: re.sub(".+", "", fence[0]), text)
    item = r"(?:[-*]|\d+\.) "
    for match in re.finditer(rf"^.*\S.*\n(?:(?!{item}).*\S.*\n)*", f"{text}\n", re.M):
        yield text.count("\n", 0, match.start()) + 1, match[0]


@pytest.mark.parametrize("page", _GUIDES, ids=name_of)
def test_promises_of_the_page_name_their_tests(page: Path) -> None:
    """What says never, always, at most or once has `<!-- test: file::test -->` right behind it."""
    untested: list[str] = []
    for line, paragraph in _paragraphs(page.read_text("utf-8")):
        prose = re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->|^#.*", "", paragraph, flags=re.M)
        words = {" ".join(word.split()) for word in _PROMISE.findall(prose)}
        if words and not _NAMED.search(paragraph):
            untested.append(f"{name_of(page)}:{line}: {', '.join(sorted(words))}")
    assert not untested, "promises that name no test:\n" + "\n".join(untested)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_tests_that_the_page_names_are_there(page: Path) -> None:
    for named in " ".join(_NAMED.findall(page.read_text("utf-8"))).split():
        file, _, test = named.partition("::")
        assert (ROOT / file).is_relative_to(ROOT / "tests"), named
        text = (ROOT / file).read_text("utf-8")
        assert re.search(rf"^\s*def {test}\(", text, re.M), f"{name_of(page)} names {named}"


def test_readme_says_where_mfload_loses_as_it_was_measured() -> None:
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    rows = json.loads((DOCS / "performance/cliffs.json").read_text())

    def times(names: str, peer: str, digits: int) -> str:
        found = [
            min(row["ours"]) / min(row["theirs"])
            for row in rows
            if row["peer"] == peer and re.search(names, row["name"]) and not row["cold"]
        ]
        return f"{min(found):.{digits}f} to {max(found):.{digits}f} times"

    narrow, wide = r"float32 to (float|int)(8|16)", r"to (float32|bfloat16)"
    assert f"float8, float16 and int8, which take {times(narrow, 'load_file, .to', 1)}" in readme
    assert f"bfloat16 take {times(wide, 'load_file, .to', 1)}" in readme
    apart = r"\[:, 8:16\]|\[::-?\d{3,}\]"
    assert f"far apart, which take {times(apart, 'memmap', 0)}" in readme
    summary = json.loads((DOCS / "performance/streams.json").read_text())["summary"].values()
    more = {
        kind: sorted(100 * each["stream"][kind] / each["load"][kind] - 100 for each in summary)
        for kind in ("best_seconds", "median_seconds")
    }
    (a, b), (c, d) = more.values()
    assert f"takes {a:.0f} to {b:.0f} % longer" in readme
    assert f"from {-c:.0f} % less to {d:.0f} % more by the median" in readme


def test_index_names_every_page() -> None:
    index = DOCS / "index.md"
    linked = {(DOCS / link.split("#")[0]).resolve() for link in _links(index.read_text("utf-8"))}
    missing = sorted(name_of(page) for page in DOCS.rglob("*.md") if page not in linked | {index})
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
    missing = sorted(name_of(path) for path in modules - linked)
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
