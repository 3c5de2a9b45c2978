"""`convert` and `align`: a checkpoint as safetensors that suit zero-copy and direct reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mfload.checking.rewriting import RewriteWishes, rewrite
from mfload.dtypes import DTypeLike
from mfload.options import Options
from mfload.planning.selection import Regex
from mfload.saving import layout, targets
from mfload.saving.save import Saved
from mfload.sources import PathOrBytes


@dataclass(frozen=True, slots=True)
class Converted(Saved):
    """What `mfload.convert` did. It prints well, and has the attributes of `Saved`."""

    VERB = "converted"

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, as they are printed."""
        (_, written), *rows = Saved.rows(self)
        return [(self.VERB, f"{written}, read back and compared"), *rows]


@dataclass(frozen=True, slots=True)
class Aligned(Converted):
    """What `mfload.align` did. It prints well, and has the attributes of `Saved`."""

    VERB = "aligned"


def convert(
    source: PathOrBytes | Sequence[PathOrBytes],
    target: str | os.PathLike[str],
    *,
    names: Regex | Iterable[str] | Callable[[str], bool] | None = None,
    dtype: DTypeLike | Sequence[tuple[Regex, DTypeLike]] | Mapping[str, DTypeLike] = None,
    mapping: Any = None,
    align: int | str = layout.ALIGN,
    max_shard_size: int | str | None = None,
    only_weights: bool = False,
    overwrite: bool = False,
    progress: bool | Callable[[int, int], None] = False,
    options: Options | None = None,
) -> Converted:
    r"""Turns a checkpoint of any format into safetensors, in bounded memory.

    Tensors keep their names, dtypes and bytes unless others are asked for, and the metadata is
    kept, also the tree that `mfload.restore` rebuilds. Integers of 2 and 4 bits, which safetensors
    lacks, become 8-bit ones, with a note. The new files are read back from the disk
    and compared before they get their names, all of them at once. If a manifest lies beside the
    source, the source is compared with it, and one is written for the new files. A manifest of the
    replaced checkpoint is removed.

    To a directory, the files that lie beside the weights of a Hugging Face model go as well:
    config, tokenizer, chat template, the code of the model (which is not run), licence and README,
    up to 64 MiB each, as they are. Other weights, indexes, manifests and folders do not.

    After a kill, Ctrl-C, a timeout or an error of the source, hidden files stay beside the target;
    the same call goes on with them if the source is the same, and a note says so. Any other
    conversion or save to that target removes them. Other errors, and a source that changed, leave
    nothing, and bytes in memory are not gone on with.

    Args:
        source: As for `load`.
        target: Where to, as for `save`: a file, or a directory, which exists or ends with a slash.
            A name that ends as another format's is refused.
        names: Which tensors, as for `load`: "^params" takes the parameters of a train state. The
            tree becomes that of these tensors.
        dtype: As for `load`: a dtype for all floating tensors, or rules for names of the source.
        mapping: New names, in the forms of `load_into`: `{regex: name}` or a list of pairs, where
            the regex has to match all of a name and the new one may have `\1` for its groups; or a
            function of the name. A list of names writes the tensor under each, and None leaves it
            out. What no rule matches keeps its name. A tree in the metadata is left out.
        align: Multiple of which the data begins, in bytes: a power of two.
        max_shard_size: Bytes of tensors a file, as for `save`. Default: one file. In a directory,
            each safetensors file of the source becomes one, unless `names` takes a part.
        only_weights: Whether what lies beside the weights stays behind.
        overwrite: Whether what is there may be replaced.
        progress: True for a bar, or a function of (bytes done, bytes in all). Bytes count twice,
            once written and once read back.
        options: Threads, timeout and `max_host_overhead`, which bounds the memory of tensors that
            are converted or not one raw range of their file; see `mfload.Options`. With a timeout,
            waits for another writer of the target. Default: raise TargetError at once.

    Raises:
        UsageError: An argument is invalid, or the source can't be replaced as a whole.
        TensorNotFoundError: No tensor has one of the names, or matches.
        MappingError: Two tensors get one name, or a rule matches none.
        LossyCastError: A conversion would lose values, and was not asked for by name.
        SourceError: The source can't be read.
        FormatError: The source is malformed.
        UnsupportedDtypeError: Safetensors has no dtype for a tensor, or no conversion exists.
        ChecksumError: The source differs from the manifest beside it.
        TargetError: The target is there already, is being written, or can't be written.
        FrameworkMissingError: Hashing needs the package xxhash, or decoding another one.
        LoadTimeoutError: The timeout passed.
    """
    targets.key_of(target)  # None is for align.
    made = layout.shard_limit(max_shard_size), layout.checked_align(align)
    wishes = RewriteWishes(
        *made, overwrite, progress, options, names=names, dtype=dtype, mapping=mapping,
                    beside=not only_weights, resume=True)  # fmt: skip
    return Converted(*rewrite(source, target, wishes))


def align(
    source: PathOrBytes | Sequence[PathOrBytes],
    target: str | os.PathLike[str] | None = None,
    *,
    align: int | str = layout.ALIGN,
    max_shard_size: int | str | None = None,
    only_weights: bool = False,
    overwrite: bool = False,
    progress: bool | Callable[[int, int], None] = False,
    options: Options | None = None,
) -> Aligned:
    """Rewrites a safetensors checkpoint so that it suits zero-copy and direct reads.

    The data of each file begins on a multiple of `align`, and tensors lie on multiples of 64
    bytes where their sizes allow it. The new files are read back from the disk and compared
    before they get their names. Metadata is kept, and so are tensors of unknown dtypes. If a
    manifest lies beside the source, the source is compared with it, and one is written for the new
    files. A manifest of the replaced checkpoint is removed. What lies beside the weights goes to
    another directory as with `convert`.

    Unlike `convert`, it can replace the source, and leaves nothing if it is killed.

    Args:
        source: As for `load`.
        target: Where to, as for `save`. Default: the place of the source, which takes
            `overwrite=True`.
        align: Multiple of which the data begins, in bytes: a power of two.
        max_shard_size: Bytes of tensors a file, as for `save`. Default: one file for a target that
            is one; in place and in a directory, each file of the source becomes one.
        only_weights: Whether what lies beside the weights stays behind.
        overwrite: Whether what is there may be replaced.
        progress: True for a bar, or a function of (bytes done, bytes in all). Bytes are read
            twice.
        options: Threads and timeout; see `mfload.Options`. With a timeout, waits for another writer
            of the target. Default: raise TargetError at once.

    Raises:
        UsageError: An argument is invalid, or the source can't be replaced as a whole.
        SourceError: The source can't be read.
        FormatError: The source is malformed.
        ChecksumError: The source differs from the manifest beside it.
        TargetError: The target is there already, is being written, or can't be written.
        FrameworkMissingError: Hashing needs the package xxhash.
        LoadTimeoutError: The timeout passed.
    """
    made = layout.shard_limit(max_shard_size), layout.checked_align(align)
    wishes = RewriteWishes(*made, overwrite, progress, options, beside=not only_weights)
    return Aligned(*rewrite(source, target, wishes))
