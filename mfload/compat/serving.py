"""What the loaders for serving systems share: the weights of a model, one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import fields
from os import path as os_path
from typing import Any

import mfload
from mfload import errors
from mfload.formats import discovery
from mfload.runtime import set_local_processes

_OPTIONS = [field.name for field in fields(mfload.Options)]
_PEER_OPTIONS = [field.name for field in fields(mfload.PeerOptions)]

_SMALL = 1 << 20  # Bytes of a vector that is kept.

# The model that each single path of `model_loader_extra_config` was first used for.
_models: dict[str, str] = {}


class WeightsLoader:
    """What the loaders of all serving systems have."""

    _weights: Weights

    @property
    def report(self) -> mfload.Report:
        """What this process has read so far."""
        return self._weights.report


class Weights:
    """The weights that `model_loader_extra_config` says: `path`, and fields of `mfload.Options`.

    `peer` may be a JSON object of the fields of `mfload.PeerOptions`.

    Raises:
        UsageError: A key or a value is invalid.
    """

    def __init__(self, given: Any) -> None:
        if not isinstance(given, Mapping):
            what, found = "model_loader_extra_config is invalid", type(given).__name__
            raise errors.UsageError(what, expected="a JSON object", found=found)
        rest = dict(given)
        self._path = rest.pop("path", None)
        if not isinstance(self._path, str | Mapping | None):
            what, expected = "path is invalid", "a path or URL, or {model: path}"
            raise errors.UsageError(what, expected=expected, found=repr(self._path))
        _check_keys("model_loader_extra_config", rest, ["path", *_OPTIONS])
        if isinstance(peer := rest.get("peer"), Mapping):
            _check_keys("peer in model_loader_extra_config", peer, _PEER_OPTIONS)
            rest["peer"] = mfload.PeerOptions(**peer)
        self._options = mfload.Options(**rest)
        self._reports: list[mfload.Report] = []

    @property
    def once(self) -> bool:
        """Whether each byte is read by one process: all must iterate over the same files alike."""
        return self._options.exchange == "once"

    @property
    def report(self) -> mfload.Report:
        """What this process has read so far."""
        total = mfload.Report()
        for each in self._reports:
            total.add(each)
        return total

    def path(self, model: str) -> str | None:
        """Where the weights of a model lie for mfload; None to ask the serving system.

        Raises:
            UsageError: The one `path` that was given is for another model.
        """
        if isinstance(self._path, Mapping):
            given = self._path.get(model)
        else:
            given = self._path
            # A draft model, or weights of another model to go on with, must not get these.
            if given is not None and _models.setdefault(given, model) != model:
                raise errors.UsageError(
                    "path in model_loader_extra_config is for one model, and another is loaded",
                    expected=f'{{"path": {{{_models[given]!r}: {given!r}, {model!r}: …}}}}',
                    found=model,
                )
        if given is None and ("://" in model or os_path.isfile(model)):
            return model
        return given

    def rows(
        self, path: str | list[str], skip: Callable[[str], bool] | None = None
    ) -> Generator[tuple[str, Any]]:
        """Names and tensors of PyTorch in the order of the files, in host memory.

        They are lazy: what the model's loaders copy is read when they copy it. Of
        `exchange="once"` they are whole, and all processes of the default process group must
        iterate alike.

        Args:
            path: What `mfload.load` takes.
            skip: Whether a tensor is not handed out, by its name. Default: all are.

        Raises:
            MfloadError: As `mfload.stream` does.
        """
        import torch  # Late: a mistake in the settings is told without it.
        from torch import distributed

        self._reports.append(mfload.Report())
        given: dict[str, Any] = {"device": "cpu", "report": self._reports[-1]}
        if distributed.is_initialized():
            # No launcher of theirs says how many run here: on a host with GPUs one for each.
            world = distributed.get_world_size()
            here = min(world, torch.cuda.device_count() or world)
            set_local_processes(here, distributed.get_rank() % here)
        if self.once:
            if not distributed.is_initialized():
                what, expected = "exchange='once' needs a process group", "torch.distributed"
                raise errors.UsageError(what, expected=f"{expected}, or exchange='auto'")
            given["shardings"] = _whole
            given["shard"] = distributed.get_rank(), distributed.get_world_size()
        # It is not closed: what loads a layer at a time keeps lazy tensors for later.
        given |= {"lazy": not self.once, "options": self._options}
        try:
            opened = mfload.stream(path, "torch", **given)
        except errors.CheckpointError:  # Such as two files with tensors of one name.
            if (index := _index_of(path)) is None:
                raise
            opened = mfload.stream(index, "torch", **given)
        for name, tensor in opened:
            if skip is None or not skip(name):
                # A model may keep all its weights in a list first.
                if not self.once and tensor.like.dim() < 2 and tensor.like.nbytes <= _SMALL:
                    tensor.whole.part = _KeptVector(tensor.whole.part, {}, ())
                yield name, tensor


def _check_keys(where: str, given: Mapping[str, Any], known: list[str]) -> None:
    if unknown := [key for key in given if key not in known]:
        what, found = f"{where} has a key that mfload does not know", ", ".join(map(repr, unknown))
        raise errors.UsageError(what, expected=", ".join(known), found=found)


def _index_of(path: str | list[str]) -> str | None:
    """The index of just these files, if they have one beside them."""
    if isinstance(path, list):
        with contextlib.suppress(errors.MfloadError):
            found = discovery.find(os_path.dirname(path[0]))
            named, given = ({*map(os_path.basename, each)} for each in (found.names, path))
            return found.index_file if named == given else None
    return None


class _KeptVector:
    """A lazy part of a small vector, which is kept: vLLM copies biases twice when it reloads."""

    def __init__(self, part: Any, kept: dict[Any, Any], indices: tuple[str, ...]) -> None:
        self._part, self._kept, self._indices = part, kept, indices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> _KeptVector:
        return _KeptVector(self._part[index], self._kept, (*self._indices, repr(index)))

    def run(self, *place: Any) -> _KeptVector | None:
        part = self._part.run(*place)
        return (
            None if part is None else _KeptVector(part, self._kept, (*self._indices, repr(place)))
        )

    def __repr__(self) -> str:
        return repr(self._part)

    def read(self, lent: Any = None, *, unknown: bool = False) -> Any:
        kept = self._kept.get(self._indices)
        if lent is not None:
            if kept is None:
                return self._part.read(lent)
            return lent.array.copy_(kept.view(lent.array.shape))
        if kept is None:
            kept = self._kept[self._indices] = self._part.read(unknown=unknown)
        return kept.clone()  # It may be changed.


def _whole(name: str, info: Any) -> None:
    """The sharding of each tensor: none."""
