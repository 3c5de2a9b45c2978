"""What lies around a path where no checkpoint is: names of files and directories, nothing more.

Asked only when an error is about to be raised. Listings are cut, so that a directory of
millions of files is no reason to wait.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
from collections.abc import Iterator, Sequence

from mfload import errors
from mfload.formats import hints
from mfload.sources.local import LocalFile

_MANY = 2000
_SOME = 64
_FEW = 3

_CHECKPOINT = (".safetensors", ".safetensors.index.json")
_WEIGHTS = re.compile(
    r".*\.(bin|pt|pth|ckpt|gguf|ggml|h5|hdf5|keras|onnx|npz|npy|msgpack|pdparams|pkl|pickle|pb|"
    r"tflite|zip|tar|tgz|gz|zst|xz|bz2|7z|incomplete|part|partial|crdownload)|"
    r".*\.safetensors\..*",
    re.IGNORECASE | re.DOTALL,
)
_ORBAX = frozenset({"_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "ocdbt.process_0"})
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def of_directory(directory: str, names: Sequence[str]) -> str:
    """What a directory without a checkpoint holds instead, to be put after a message.

    Args:
        directory: Its path.
        names: What lies in it.

    Returns:
        Text that begins with a separator; empty where there is nothing to say.
    """
    told = _hub_cache(directory, names) or _known(names) or _within(directory, names)
    if told is None:
        files = [_seeming(os.path.join(directory, name)) for name in _weights(names)]
        told = "; ".join(filter(None, files)) or None
    return "" if told is None else f"; {told}"


def _known(names: Sequence[str]) -> str | None:
    there = frozenset(names)
    if there & _ORBAX:
        return "it is an Orbax checkpoint: restore it with Orbax, write it with mfload.save"
    if "saved_model.pb" in there:
        return "it is a TensorFlow SavedModel: load it with tf.saved_model.load"
    if any(name.endswith(".distcp") for name in names):
        return (
            "it is a checkpoint of torch.distributed: join it with "
            "torch.distributed.checkpoint.format_utils, write it with mfload.save"
        )
    if any(re.search(r"\.data-\d{5}-of-\d{5}$", name) for name in names):
        return "it has a TensorFlow checkpoint: load it with tf.train.load_checkpoint"
    if there & {".zgroup", ".zarray", "zarr.json"}:
        return "it is a Zarr store"
    return None


def _hub_cache(directory: str, names: Sequence[str]) -> str | None:
    """The snapshot inside a repository of the Hugging Face cache."""
    name = os.path.basename(directory.rstrip("/" + os.sep))
    if not name.startswith("models--") or "snapshots" not in names:
        return None
    snapshot = _snapshot(directory)
    if snapshot is None:
        return "it is a repository of the Hugging Face cache without safetensors in it"
    return f"it is a repository of the Hugging Face cache; its snapshot is {_printed(snapshot)}"


def _snapshot(directory: str) -> str | None:
    """The snapshot of a repository of the cache that has a checkpoint: main's, or the first."""
    snapshots = os.path.join(directory, "snapshots")
    found = [each for each in _listed(snapshots, _SOME) if _holds(os.path.join(snapshots, each))]
    if not found:
        return None
    main = _main(directory)
    return os.path.join(snapshots, main if main in found else found[0])


def _main(directory: str) -> str | None:
    """The snapshot that a repository of the cache calls main."""
    with contextlib.suppress(errors.MfloadError, OSError, UnicodeDecodeError):
        file = LocalFile(os.path.join(directory, "refs", "main"))
        return file.read(0, min(file.size, 100)).decode().strip()
    return None


def _within(directory: str, names: Sequence[str]) -> str | None:
    """Directories below that do have a checkpoint, one or two levels down."""
    found: list[str] = []
    for name in itertools.islice(names, _SOME):
        below = os.path.join(directory, name)
        if name.startswith("models--"):
            snapshot = _snapshot(below)
            found += [snapshot] if snapshot else []
        elif _holds(below):
            found.append(below)
    if not found:
        return None
    shown = ", ".join(_printed(each) for each in found[:_FEW])
    if len(found) == 1:
        return f"the checkpoint is in {shown}"
    return f"checkpoints are in {shown}{' …' if len(found) > _FEW else ''}"


def _weights(names: Sequence[str]) -> list[str]:
    return list(itertools.islice((name for name in names if _WEIGHTS.fullmatch(name)), _FEW))


def _seeming(path: str) -> str | None:
    """What one file seems to be; what is no regular file is not opened."""
    with contextlib.suppress(errors.MfloadError, OSError):
        if stat.S_ISREG(os.stat(path).st_mode):
            what = hints.of(LocalFile(path))
            return (
                None if what is None else f"{_printed(os.path.basename(path))} seems to be {what}"
            )
    return None


def explain(error: errors.SourceNotFoundError, asked: object) -> errors.SourceNotFoundError:
    """Adds to an error what lies near a path that is not there.

    Args:
        error: What was raised.
        asked: The path as the caller gave it.
    """
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and error.file:
        text = asked if isinstance(asked, str) else error.file
        with contextlib.suppress(OSError, ValueError):
            error.message += "".join(f"; {each}" for each in _near(error.file, text))
            error.args = (error.message,)
    return error


def _near(path: str, asked: str) -> Iterator[str]:
    if re.match(r"[A-Za-z][\w+.-]*://", asked):
        yield "mfload loads local files: download it first"
        return
    if asked.startswith("~"):
        yield "~ stands for the home directory to a shell alone: use os.path.expanduser"
        return
    if os.path.islink(path):
        yield f"it is a link to {_printed(os.readlink(path))}, which is not there"
        return
    parent, name = os.path.split(path.rstrip("/" + os.sep))
    while parent and not os.path.isdir(parent) and os.path.dirname(parent) != parent:
        parent, name = os.path.split(parent)
    # Names of files have their ends in common: those are no likeness.
    close = errors.close_names(name, _listed(parent or ".", _MANY), cutoff=0.8)
    if close:
        yield f"close to it are {', '.join(_printed(each) for each in close)}"
    if _HUB_ID.fullmatch(asked) and not os.path.isdir(os.path.dirname(asked)):
        kept = _cached(asked)
        if kept is None:
            yield (
                "mfload loads local files: if this is a model of the Hugging Face Hub, "
                f"`hf download {asked}` prints the directory to load"
            )
        else:
            yield f"the Hugging Face cache has it in {_printed(kept)}"


def _cached(hub_id: str) -> str | None:
    """The snapshot of a model in the Hugging Face cache, where it is there."""
    home = os.environ.get("HF_HOME") or os.path.join("~", ".cache", "huggingface")
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    return _snapshot(os.path.join(os.path.expanduser(hub), f"models--{hub_id.replace('/', '--')}"))


def _holds(directory: str) -> bool:
    """Whether a directory has files of a checkpoint."""
    return any(name.endswith(_CHECKPOINT) for name in _listed(directory, _MANY))


def _listed(directory: str, most: int) -> list[str]:
    """Names in a directory, sorted; none where it can't be listed."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in itertools.islice(entries, most))
    except (OSError, ValueError):
        return []


def _printed(text: str) -> str:
    """A name for a message, harmless for a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:1000])
