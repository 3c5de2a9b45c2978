"""The options that the benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import ROOT


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser with rounds, seed and places.

    Args:
        name: Of the module.
        doc: Its docstring.
    """
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc)
    made.add_argument("--rounds", type=int, default=7, help="rounds a case (7)")
    made.add_argument("--seed", type=int, help="what shapes and orders follow from (drawn)")
    made.add_argument("--out", type=Path, default=ROOT / "docs" / "performance")
    made.add_argument("--workdir", type=Path, help="where to write checkpoints (a new folder)")
    made.add_argument(
        "--redraw", action="store_true", help="table and plot again from the JSON in --out"
    )
    return made


def parsed(
    made: argparse.ArgumentParser, known: Sequence[str], argv: Sequence[str] | None
) -> argparse.Namespace:
    """Parses, with `--cases` added; makes the folders that are missing.

    Args:
        made: What `parser` made, and more options.
        known: The cases there are.
        argv: The arguments, those of the process by default.
    """
    made.add_argument("--cases", default=",".join(known), help="which of %(default)s")
    args = made.parse_args(argv)
    args.cases = args.cases.split(",")
    unknown = set(args.cases) - set(known)
    if unknown:
        made.error(f"no such case: {', '.join(sorted(unknown))}")
    for folder in (args.out, args.workdir):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    return args
