"""A checkpoint that is to take its own place: where that is, and whether all of it would go."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from mfload import errors
from mfload.checking import published
from mfload.formats import discovery
from mfload.formats.discovery import Path
from mfload.index import Index


def own_place(source: Path | Sequence[Path], index: Index) -> str:
    """The place of the source itself, where all of it would be replaced.

    Raises:
        UsageError: Other files than those it is made of would lie there afterwards.
    """
    files = index.files
    refuse_hub(files)
    found = discovery.find(source)
    directory = os.path.dirname(files[0])
    if found.placed is not None and found.name is not None:
        # The new index takes the place of this one, so the files must lie beside it.
        directory, name = os.path.split(found.name)
        stem = name.removesuffix(discovery.INDEX_SUFFIX)
        if stem == name or any(os.path.dirname(file) != directory for file in files):
            raise errors.UsageError(
                "an index whose files can't all be replaced beside it; name a target",
                file=found.name,
                expected=f"NAME{discovery.INDEX_SUFFIX}, and files in its own directory",
            )
    elif len(files) == 1:
        return files[0]
    else:
        stem = discovery.stem(os.path.basename(files[0]))
        shard = re.compile(re.escape(stem) + r"-\d+-of-\d+" + re.escape(discovery.SUFFIX))
        names = [os.path.basename(file) for file in files if os.path.dirname(file) == directory]
        if found.name is None or not all(shard.fullmatch(name) for name in names):
            raise errors.UsageError(
                "several files that are no shards; name a target, or align one by one",
                file=directory,
            )
    return os.path.join(directory, stem + discovery.SUFFIX)


def refuse_hub(files: Sequence[str]) -> None:
    """Refuses to replace files that a hub's client keeps account of.

    Raises:
        UsageError: Their SHA-256 is on record, and theirs alone will ever verify.
    """
    for file in files:
        known = published.of_hub(file)
        if known is not None:
            raise errors.UsageError(
                "a hub's client keeps the SHA-256 of the file; name another target",
                file=file,
                found=known.origin,
            )
