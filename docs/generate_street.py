"""Writes the two tables of docs/street.md: `python docs/generate_street.py`.

One lists every module with the first line of its docstring, room by room. The other is the trace of
a plain load into NumPy: each module that it enters, in order, with the functions called there. With
`--check` nothing is written, and the exit status says whether the page is up to date.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "street.md"
ROOMS = (
    ("", "vocabulary and public face"),
    ("sources", "bytes by offset"),
    ("formats", "headers to an index"),
    ("planning", "requests to buffers and reads; pure"),
    ("io", "engines and memory of the host"),
    ("cuda", "engines and memory of CUDA devices"),
    ("frameworks", "views to arrays"),
    ("loading", "one load"),
    ("mesh", "shardings and several processes"),
    ("trees", "load_into and key maps"),
    ("saving", "arrays to files"),
    ("checking", "verify, diff, align"),
    ("peer", "loads from running processes"),
    ("ondemand", "weights that stay on flash"),
    ("diagnostics", "doctor"),
    ("compat", "seams of other libraries"),
    ("compat/safetensors", "the interface of that package"),
    ("cli", "the command"),
    ("bench", "mfload bench"),
)
TRACE = """
import json, os, sys
import numpy, mfload
mfload.load(sys.argv[1], framework="numpy")
found, package = {}, os.path.dirname(mfload.__file__) + os.sep
def enter(frame, event, argument):
    path = frame.f_code.co_filename
    if event == "call" and path.startswith(package):
        name, function = path.removeprefix(package), frame.f_code.co_qualname
        if "<" not in function.replace("<locals>", ""):
            found.setdefault(name, {}).setdefault(function.replace(".<locals>", ""))
sys.setprofile(enter)
mfload.load(sys.argv[1], framework="numpy")
sys.setprofile(None)
print(json.dumps([[name, list(functions)] for name, functions in found.items()]))
"""


def modules() -> str:
    """Every module and what it is."""
    lines: list[str] = []
    for room, title in ROOMS:
        lines += [f"**{room or 'mfload'}**: {title}", "", "| module | |", "|---|---|"]
        for path in sorted((ROOT / "mfload" / room).glob("*.py")):
            if path.name in ("__init__.py", "__main__.py"):
                continue
            doc = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            first = " ".join(doc.partition("\n\n")[0].split()).replace("|", "\\|")
            where = path.relative_to(ROOT).as_posix()
            lines.append(f"| [{_escaped(path.name)}](../{where}) | {first} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def trace() -> str:
    """What a plain load enters."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]}})
    padded = header.encode() + b" " * (-len(header) % 8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w.safetensors"
        path.write_bytes(len(padded).to_bytes(8, "little") + padded + bytes(256))
        done = subprocess.run(
            [sys.executable, "-P", "-c", TRACE, str(path)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
    rows = json.loads(done.stdout)
    lines = ["| module | functions |", "|---|---|"]
    for name, functions in rows:
        lines.append(
            f"| [{_escaped(name)}](../mfload/{name}) | {', '.join(f'`{f}`' for f in functions)} |"
        )
    count = sum(len(functions) for _, functions in rows)
    return f"{len(rows)} modules and {count} functions:\n\n" + "\n".join(lines)


def _escaped(name: str) -> str:
    return name.replace("_", "\\_")


def page(text: str) -> str:
    """The page with both tables made anew."""
    for mark, made in (("modules", modules()), ("trace", trace())):
        start, end = f"<!-- {mark} -->\n", f"\n<!-- end of {mark} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = f"{before}{start}\n{made}\n{end}{after}"
    return text


def main() -> int:
    """Writes the page, or says whether it is up to date."""
    old = PAGE.read_text("utf-8")
    made = page(old)
    if "--check" in sys.argv[1:]:
        if made != old:
            print("docs/street.md is out of date: run python docs/generate_street.py")
        return int(made != old)
    PAGE.write_text(made, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
