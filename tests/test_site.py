"""The site is whole: every page in the menu, every link and anchor there, nothing from outside.

`make docs` builds the site, warnings being errors, and names it in MFLOAD_SITE. Alone, these
tests build it for themselves.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).resolve().parent.parent
FIRST_HOUR = (
    "quickstart",
    "six_frameworks",
    "torch_fast_start",
    "jax_into_nnx",
    "restore_and_resume",
    "where_time_goes",
)
PHONE, DESK = 390, 1280


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "MFLOAD_SITE" in os.environ:
        return ROOT / os.environ["MFLOAD_SITE"]
    for name in ("sphinx", "furo", "myst_nb", "jupytext"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    folder = tmp_path_factory.mktemp("docs")
    command = (sys.executable, "-m", "sphinx", "-q", "-E", "-n", "-W", "--keep-going", "-c", "docs",
               "-d", str(folder / "doctrees"), ".", str(folder / "site"))  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


class _Page(HTMLParser):
    """What a page links to, what it loads, and the anchors it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.anchors: set[str] = set()
        self.text = path.read_text("utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.assets.append(found["href"])
        for name in ("src", "srcset", "data", "poster"):
            if found.get(name):
                self.assets.append(found[name])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, _Page]:
    found = {path.relative_to(site).as_posix(): _Page(path) for path in site.rglob("*.html")}
    assert len(found) > 20
    return found


def _documents() -> list[Path]:
    """Every page that people write, the README apart."""
    return [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*.py"),
        ROOT / "CHANGELOG.md",
    ]


def _built(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix(".html").as_posix()


# Pages and links ------------------------------------------------------------------------------


def test_every_page_is_in_the_menu(pages: dict[str, _Page]) -> None:
    start = pages["docs/index.html"].text
    menu = start[start.index('class="sidebar-tree"') : start.index("</aside>")]
    listed = set(re.findall(r'href="([^"#]+)"', menu))
    for path in _documents():
        if path.name != "index.md":
            target = os.path.relpath(_built(path), "docs").replace(os.sep, "/")
            assert target in listed, f"{path.name} is not in the menu"


def test_the_menu_has_the_groups_of_the_how_tos(pages: dict[str, _Page]) -> None:
    start = pages["docs/index.html"].text
    captions = re.findall(r'class="caption-text">([^<]+)<', start)
    index = (ROOT / "docs/index.md").read_text("utf-8")
    groups = re.findall(r"^### (.+)$", index, re.M)
    assert len(groups) == 5
    at = captions.index(groups[0])
    assert captions[at : at + 5] == groups
    assert captions[:2] == ["Install", "Start here"]


def test_every_link_and_anchor_leads_somewhere(pages: dict[str, _Page], site: Path) -> None:
    broken: list[str] = []
    for name, page in pages.items():
        for link in {*page.links, *page.assets}:
            where, anchor = urldefrag(link)
            where = where.partition("?")[0]
            if re.match(r"[a-z]+:", where):
                continue
            target = (site / name).parent.joinpath(unquote(where)) if where else site / name
            file = target.resolve()
            if not file.is_file():
                broken.append(f"{name}: {link}")
                continue
            other = pages.get(file.relative_to(site.resolve()).as_posix())
            if anchor and other is not None and unquote(anchor) not in other.anchors:
                broken.append(f"{name}: {link}")
    assert not broken, "\n".join(broken)


def test_pages_ask_no_other_host_for_anything(pages: dict[str, _Page], site: Path) -> None:
    outside = [
        f"{name}: {asset}"
        for name, page in pages.items()
        for asset in page.assets
        if re.match(r"([a-z]+:)?//", asset)
    ]
    for path in site.rglob("*.css"):
        found = re.findall(
            r"(?:url\(\s*[\"']?|@import\s+[\"'])([a-z]*:?//[^\"')]+)", path.read_text()
        )
        outside += [f"{path.name}: {address}" for address in found]
    assert not outside, "\n".join(outside)


def test_the_start_leads_to_the_pages(pages: dict[str, _Page]) -> None:
    assert pages["index.html"].links == ["docs/index.html"]


def test_search_works_without_a_server(site: Path) -> None:
    index = (site / "searchindex.js").read_text("utf-8")
    assert index.startswith("Search.setIndex(")
    assert '"docs/quickstart"' in index


# What is documented ---------------------------------------------------------------------------


SCRIPTS = ("generate_api.py", "generate_commands.py", "generate_street.py")


@pytest.mark.parametrize("script", SCRIPTS)
def test_references_are_up_to_date(script: str) -> None:
    """Frameworks are hidden: building a reference needs none."""
    code = """if True:
        import runpy, sys
        for name in ("jax", "torch", "tensorflow", "paddle", "cupy"):
            sys.modules[name] = None
        sys.argv[:] = [sys.argv[1], "--check"]
        runpy.run_path(sys.argv[0], run_name="__main__")
    """
    done = subprocess.run(
        [sys.executable, "-c", code, f"docs/{script}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"run python docs/{script}\n{done.stdout}{done.stderr}"


def test_examples_are_shown_with_what_they_print(pages: dict[str, _Page]) -> None:
    scripts = sorted((ROOT / "examples").glob("*.py"))
    assert {*FIRST_HOUR} <= {script.stem for script in scripts}
    for script in scripts:
        text = script.read_text("utf-8")
        assert text.startswith("# %% [markdown]\n# # "), f"{script.name} has no title"
        page = pages[_built(script)].text
        shown = re.findall(r'class="output [^"]*stream', page)
        assert shown, f"{script.name} prints nothing"
        assert "Traceback" not in page, script.name


def test_every_example_is_a_notebook_to_download(pages: dict[str, _Page], site: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    for script in sorted((ROOT / "examples").glob("*.py")):
        page = pages[_built(script)]
        name = f"{script.stem}.ipynb"
        assert name in page.links, f"{script.name} has no link to its notebook"
        assert page.text.index(f'href="{name}" download') < page.text.index("<pre>")
        notebook = nbformat.read(site / _built(script).replace(".html", ".ipynb"), as_version=4)
        nbformat.validate(notebook)
        assert notebook.metadata.kernelspec.name == "python3"
        for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
            assert cell.source in script.read_text("utf-8")


# How it looks ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


# One page measures all: each in a frame of that width. The theme lets the content scroll
# sideways before the page does, so that is looked at too.
_MEASURE = """<!doctype html><title>measuring</title><iframe width="{width}" height="800"></iframe>
<pre></pre><script>
const pages = {pages}, found = {{}}, frame = document.querySelector("iframe");
(async () => {{
  for (const page of pages) {{
    await new Promise(done => {{ frame.onload = done; frame.src = page; }});
    const seen = frame.contentDocument;
    const parts = [seen.documentElement, ...seen.querySelectorAll(".main, .content")];
    const over = parts.map(part => part.scrollWidth - part.clientWidth);
    const tables = [...seen.querySelectorAll("article table")].filter(table => {{
      const box = table.closest(".table-wrapper, .output") || table.parentElement;
      return box.scrollWidth > box.clientWidth && getComputedStyle(box).overflowX != "auto";
    }});
    found[page] = [Math.max(...over), seen.documentElement.clientWidth, tables.length];
  }}
  document.querySelector("pre").textContent = JSON.stringify(found);
}})();
</script>"""


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_no_page_is_wider_than_its_window_and_no_table_is_cut_off(
    width: int, pages: dict[str, _Page], site: Path, address: str, tmp_path: Path
) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
    if browser is None:
        pytest.skip("no Chromium here to look at the pages with")
    names = sorted(name for name in pages if name != "index.html" and not name.startswith("_"))
    measuring = site / "_measuring.html"
    measuring.write_text(_MEASURE.format(width=width, pages=json.dumps(names)), "utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               f"--user-data-dir={tmp_path}", "--virtual-time-budget=120000", "--dump-dom",
               f"{address}/{measuring.name}"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    finally:
        measuring.unlink()
    found = re.search(r"<pre>(\{.*?\})</pre>", done.stdout)
    assert found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    widths = json.loads(found[1])
    assert sorted(widths) == names
    assert all(seen == width for _, seen, _ in widths.values())
    wide = [f"{name}: {over} px" for name, (over, _, _) in widths.items() if over > 0]
    assert not wide, "wider than the window by: " + ", ".join(wide)
    cut = [name for name, (_, _, tables) in widths.items() if tables]
    assert not cut, "tables that are cut off: " + ", ".join(cut)
