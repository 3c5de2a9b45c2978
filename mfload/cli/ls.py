"""`mfload ls`: what a checkpoint holds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import typer

from mfload import errors, trees
from mfload.cli import listing, options
from mfload.cli.output import print_json, print_table, write
from mfload.cli.text import clean
from mfload.formats import checkpoint
from mfload.index import Index, TensorInfo
from mfload.report import human
from mfload.runtime import gc_paused

EPILOG = "Example: mfload ls model/ --names 'q_proj' --larger-than 64MiB --sort size"

_FEW_FILES = 16

Filter = Annotated[
    list[str] | None,
    typer.Option("--dtype", metavar="DTYPE", help="Only this dtype; may be given several times."),
]
Shard = Annotated[
    str | None, typer.Option(metavar="FILE", help="Only tensors of this file; * and ? match.")
]
Larger = Annotated[int | None, options.sized("--larger-than", "Only tensors above this size.")]
Smaller = Annotated[int | None, options.sized("--smaller-than", "Only tensors below this size.")]
Sort = Annotated[
    str,
    typer.Option(
        metavar="KEY",
        help="offset (the order of the files), name, or size.",
        autocompletion=lambda incomplete: [x for x in listing.SORTS if x.startswith(incomplete)],
    ),
]


def command(
    path: options.Checkpoint,
    names: options.Names = None,
    dtype: Filter = None,
    shard: Shard = None,
    larger_than: Larger = None,
    smaller_than: Smaller = None,
    sort: Sort = "offset",
    tree: Annotated[bool, typer.Option("--tree", help="Group by the dots in names.")] = False,
    depth: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Levels of the tree; all.")
    ] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Totals only, of each file.")] = False,
    metadata: Annotated[
        bool, typer.Option("--metadata", help="Show the metadata of the headers as well.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Rows only: no head, no totals.")
    ] = False,
    exact: Annotated[bool, typer.Option("--bytes", "-b", help="Sizes in bytes.")] = False,
    as_json: options.Json = False,
) -> None:
    """List the tensors of a checkpoint; reads headers only.

    Prints dtype, shape, bytes and name of each tensor, then totals by dtype and by file. Names
    come last on their lines and are never cut; what can't be printed in them is escaped.
    """
    if sort not in listing.SORTS:
        raise errors.UsageError("unknown order", expected=" | ".join(listing.SORTS), found=sort)
    with gc_paused():
        index, sources = checkpoint.read(path)
        rows = listing.select(
            trees.select(index, names),
            index,
            dtype=dtype or (),
            shard=shard,
            larger_than=larger_than,
            smaller_than=smaller_than,
        )
        key = listing.SORTS[sort]
        if key is not None:
            rows.sort(key=key)
        if as_json:
            print_json(_data(index, rows, [source.size for source in sources], summary))
            return
        shown = str if exact else human
        if tree or depth is not None:
            _print_tree(rows, depth, shown, quiet)
        elif not summary:
            _print_rows(index, rows, shown, quiet)
    if metadata:
        print_table(None if quiet else ["metadata", "value"], (index.metadata or {}).items())
    if not quiet:
        _print_totals(index, rows, summary, shown, gap=not summary or metadata)


def _data(
    index: Index, rows: Sequence[TensorInfo], sizes: Sequence[int], summary: bool
) -> dict[str, Any]:
    by_file = listing.totals(rows, _source)
    data: dict[str, Any] = {
        "tensors": [
            {
                "name": row.name,
                "dtype": row.dtype.name,
                "shape": row.shape,
                "bytes": row.nbytes,
                "file": index.files[row.pieces[0].source],
                "offset": row.pieces[0].offset,
            }
            for row in rows
        ],
        "total": {"tensors": len(rows), "bytes": sum(row.nbytes for row in rows)},
        "dtypes": {
            name: {"tensors": total.tensors, "bytes": total.bytes}
            for name, total in listing.totals(rows, _dtype).items()
        },
        "files": [
            {
                "file": file,
                "size": sizes[n],
                "tensors": by_file[n].tensors if n in by_file else 0,
                "bytes": by_file[n].bytes if n in by_file else 0,
            }
            for n, file in enumerate(index.files)
        ],
        "metadata": index.metadata,
        "notes": index.notes,
    }
    if summary:
        del data["tensors"]
    return data


def _source(row: TensorInfo) -> int:
    return row.pieces[0].source


def _dtype(row: TensorInfo) -> str:
    return row.dtype.name


def _print_rows(index: Index, rows: Sequence[TensorInfo], shown: Any, quiet: bool) -> None:
    several = len(index.files) > 1
    files = [clean(os.path.basename(file)) for file in index.files]
    lines: Iterator[Sequence[object]] = (
        (
            row.dtype.name,
            list(row.shape),
            shown(row.nbytes),
            *([files[row.pieces[0].source]] if several else []),
            row.name,
        )
        for row in rows
    )
    head = ["dtype", "shape", "bytes", *(["file"] if several else []), "name"]
    print_table(None if quiet else head, lines, right=[2])


def _print_tree(rows: Sequence[TensorInfo], depth: int | None, shown: Any, quiet: bool) -> None:
    nodes = [
        (node.total.tensors, shown(node.total.bytes), before + clean(name) + _leaf(node, left_out))
        for before, name, node, left_out in listing.walk(listing.grow(rows), depth)
    ]
    print_table(None if quiet else ["tensors", "bytes", "name"], nodes, right=[0, 1])


def _leaf(node: listing.Node, left_out: bool) -> str:
    tensor = "" if node.row is None else f"  {clean(node.row.dtype)} {list(node.row.shape)}"
    return tensor + ("  …" if left_out else "")


def _print_totals(
    index: Index, rows: Sequence[TensorInfo], summary: bool, shown: Any, gap: bool
) -> None:
    files = len(index.files)
    size = shown(sum(row.nbytes for row in rows))
    by_file = sorted(listing.totals(rows, _source).items())
    if len(rows) == len(index):
        line = f"{len(rows)} tensors, {size}, in {files} file{'s' if files > 1 else ''}"
    else:
        line = f"{len(rows)} of {len(index)} tensors, {size}, in {len(by_file)} of {files} files"
    write([*([""] if gap else []), line])
    _print_sums("dtype", listing.totals(rows, _dtype).items(), shown)
    if files > 1 and (summary or files <= _FEW_FILES):
        named = [(os.path.basename(index.files[n]), total) for n, total in by_file]
        _print_sums("file", named, shown)
    if index.notes:
        write(["", *(f"note: {clean(note)}" for note in index.notes)])


def _print_sums(of: str, sums: Iterable[tuple[str, listing.Sum]], shown: Any) -> None:
    rows = [(total.tensors, shown(total.bytes), name) for name, total in sums]
    if rows:
        write([""])
        print_table(["tensors", "bytes", of], rows, right=[0, 1])
