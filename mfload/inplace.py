"""A checkpoint that is to take its own place: where that is, and whether all of it would go."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from mfload import errors, published
from mfload.formats import finding
from mfload.formats.finding import Path
from mfload.index import Index


def own_place(source: Path | Sequence[Path], index: Index) -> str:
    """The place of the source itself, where all of it would be replaced.

    Raises:
        UsageError: Other files than those it is made of would lie there afterwards.
    """
    files = index.files
    for file in files:
        if published.is_blob(file):
            raise errors.UsageError(
                "a hub's cache names files by what they hold; name another target", file=file
            )
    if len(files) == 1:
        return files[0]
    found = finding.find(source)
    directory = os.path.dirname(files[0])
    if found.placed is not None and found.name is not None:
        stem = os.path.basename(found.name).removesuffix(finding.INDEX_SUFFIX)
    else:
        stem = finding.stem(os.path.basename(files[0]))
        shard = re.compile(re.escape(stem) + r"-\d+-of-\d+" + re.escape(finding.SUFFIX))
        names = [os.path.basename(file) for file in files if os.path.dirname(file) == directory]
        if found.name is None or not all(shard.fullmatch(name) for name in names):
            raise errors.UsageError(
                "several files that are no shards; name a target, or align one by one",
                file=directory,
            )
    return os.path.join(directory, stem + finding.SUFFIX)
