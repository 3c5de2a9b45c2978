"""`verify`: whether a checkpoint is whole, by its headers, its checksums, or another copy."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from mfload.checking import inspecting
from mfload.checking.digesting import Digesting
from mfload.checking.equality import Equality
from mfload.checking.expecting import Checksums, Expecting
from mfload.checking.manifest import Manifest
from mfload.checking.published import Sums
from mfload.checking.verification import Verification
from mfload.formats.discovery import Path
from mfload.options import Options, started
from mfload.progress import Progress, shown


def verify(
    path: Path | Sequence[Path],
    *,
    against: Path | Sequence[Path] | None = None,
    checksums: Checksums = None,
    manifest: str | os.PathLike[str] | Manifest | None = None,
    sha256: Sums = None,
    overwrite: bool = False,
    progress: Progress = False,
    options: Options | None = None,
) -> Verification:
    """Checks a checkpoint.

    The headers are always checked, and the index against them. The rest is done where it is
    asked for, and reads every byte once, however much of it is asked for; `against` reads it
    once more, with the other one beside it.

    Args:
        path: As for `load`.
        against: Another checkpoint, however it is sharded: every tensor must be the same in
            every bit.
        checksums: "write" makes a manifest, "check" compares with it.
        manifest: Where the manifest lies; `<name>.checksums.json` beside the checkpoint where
            None. To be checked, it may also be one that was read.
        sha256: What the files' SHA-256 must be: 64 digits for one file, the path of a list as
            `sha256sum` writes it, `{file: digits}`, or "auto" for what the cache of the
            Hugging Face client says. What that says is also looked at when checksums are.
        overwrite: Whether "write" may replace a manifest.
        progress: True for a bar, or a function of (bytes done, bytes in all).
        options: `threads` and `timeout` of an `mfload.Options`.

    Returns:
        What was found. Damage is a problem in it and no error.

    Raises:
        UsageError: An argument makes no sense.
        SourceError: There is nothing at the path, or the manifest or the list can't be read.
        FormatError: Nobody can say which checkpoint is meant, or the manifest or the list is
            malformed.
        TargetError: The manifest can't be written, or is there already.
        FrameworkMissingError: Checksums need the package xxhash.
        LoadTimeoutError: The time ran out.
    """
    start = time.perf_counter()
    how = started(options)
    threads, deadline = how.threads, how.deadline
    seen = deadline.bound(lambda: inspecting.inspect(path), "reading headers")
    expecting = Expecting(
        seen, path, checksums=checksums, manifest=manifest, sha256=sha256, overwrite=overwrite
    )
    digesting = Digesting(seen, expecting)
    equality = None
    if against is not None:
        other = deadline.bound(lambda: inspecting.inspect(against), "reading headers")
        equality = Equality(seen, other)
    total = digesting.nbytes + (equality.nbytes if equality is not None else 0)
    with shown(progress, total) as advance:
        digesting.run(threads, deadline, advance)
        if equality is not None:
            equality.run(threads, deadline, advance)
    lies = digesting.write(overwrite=overwrite) if expecting.writes else expecting.path
    tensors = seen.tensors
    checked = {
        "headers": True,
        "index": seen.indexed,
        "checksums": expecting.looks,
        "sha256": bool(expecting.sums),
        "against": equality is not None,
    }
    return Verification(
        tuple(seen.problems),
        tuple(dict.fromkeys(seen.notes)),
        tuple(what for what, done in checked.items() if done),
        len(seen.files),
        len(tensors),
        sum(info.nbytes for info in tensors.values()),
        total + (equality.nbytes if equality is not None else 0),
        time.perf_counter() - start,
        lies,
    )
