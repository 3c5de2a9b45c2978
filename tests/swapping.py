"""A checkpoint behind a URL that is replaced by another one between two requests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import numpy as np
from safetensors.numpy import save as saved

from mfload import errors

INDEX = "/m/model.safetensors.index.json"
Files = dict[str, bytes]
Say = Callable[[str, bytes, int], dict[str, str]]


def model(seed: int) -> dict[str, Any]:
    """Tensors of the same names, shapes and dtypes, and other bits for each seed."""
    names = [f"model.layers.{n}.mlp.experts.0.up_proj.weight" for n in (0, 1)]
    random = np.random.default_rng(seed)
    arrays: dict[str, Any] = {name: random.random((16, 32), np.float32) for name in names}
    return arrays | {"model.norm.weight": random.integers(0, 1 << 30, 5)}


OLD, NEW = model(1), model(2)


def checkpoint(arrays: dict[str, Any], *, stem: str = "model", moved: int = 0) -> Files:
    """One shard a tensor and an index; `moved`: each tensor lies in a shard so many further on."""
    names = [*arrays]
    files, placed = dict[str, bytes](), dict[str, str]()
    for n, name in enumerate(names):
        shard = f"{stem}-{(n + moved) % len(names) + 1:05}-of-{len(names):05}.safetensors"
        files[f"/m/{shard}"], placed[name] = saved({name: arrays[name]}), shard
    files[INDEX] = json.dumps({"metadata": {}, "weight_map": placed}).encode()
    return files


LAYOUTS: dict[str, Files] = {
    "same index": checkpoint(NEW),
    "other index": checkpoint(NEW, moved=1),
    "new names": checkpoint(NEW, stem="other"),
    "old ones stay": {**checkpoint(OLD), **checkpoint(NEW, stem="other")},
}
"""What takes the place of the old checkpoint."""


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:20]


SAID: dict[str, Say] = {
    "digest": lambda _, raw, version: {"ETag": f'"{_digest(raw)}"'},
    "weak": lambda path, _, version: {"ETag": f'W/"{path}.{version}"'},
    "date": lambda _, raw, version: {"Last-Modified": formatdate(1e9 + version, usegmt=True)},
}
"""What tells the versions of a file apart."""


class Swapped:
    """A server whose checkpoint is replaced before one of its requests.

    Args:
        new: The files that come; those that they do not have are gone.
        at: The number of that request.
        say: Headers of a file, by its path, its bytes and how often it was replaced.
        redirects: Whether files lie under URLs of their content, which stay valid.
    """

    def __init__(self, new: Files, at: int, say: Say, *, redirects: bool = False) -> None:
        self.old, self.new, self.at, self.say = checkpoint(OLD), new, at, say
        self.redirects, self.blobs = redirects, dict[str, bytes]()
        self.served, self.version = dict(self.old), 0
        self.count = 0

    def __call__(self, handler: Any) -> bool:
        """Answers one request (see `serving.Server.always`)."""
        if self.count == self.at:
            self.served, self.version = dict(self.new), 1
        self.count += 1
        path = handler.path
        if (raw := self.blobs.get(path)) is None:
            raw = self.served.get(path)
            if raw is None:
                handler.plain(404)
                return True
            if self.redirects:
                self.blobs[f"/blobs/{_digest(raw)}"] = raw
                handler.plain(302, Location=f"/blobs/{_digest(raw)}")
                return True
        handler.served.files[path] = raw
        if handler.span()[0] >= len(raw):
            handler.plain(416, Content_Range=f"bytes */{len(raw)}")
            return True
        said = {"ETag": None, **self.say(path, raw, self.version)}
        handler.wfile.write(handler.head(**said))
        return True


def assert_one(found: dict[str, Any]) -> str:
    """Which checkpoint it is of; fails for a mixture."""
    for name, arrays in (("old", OLD), ("new", NEW)):
        if all(np.array_equal(found[each], arrays[each]) for each in found):
            return name
    raise AssertionError("old and new tensors in one result")


def swap_everywhere(
    act: Callable[[Swapped], dict[str, Any]], layout: str, how: dict[str, Any]
) -> None:
    """Swaps before the first request, before the second, and so on until none is left."""
    at, seen = 0, set[str]()
    while True:
        swapped = Swapped(LAYOUTS[layout], at, **how)
        try:
            seen.add(assert_one(act(swapped)))
        except errors.SourceChangedError as error:
            seen.add("changed" if "/m/" in str(error.file) else str(error))
        if swapped.count <= at:
            break
        at += 1
    assert {"old", "new", "changed"} >= seen > {"old"}
