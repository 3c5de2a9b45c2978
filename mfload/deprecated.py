"""Old spellings of public calls: they work for one version, with a warning that names the new one.

Arguments that a function has no more are found where Python refuses them (see `runtime.explained`),
so calls in the new spelling pass nothing of this.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from mfload import errors

_PEER = ("address", "ca_file", "cert_file", "checksums", "key_file", "planner", "token_file",
         "transports")  # fmt: skip

MODES = ("auto", "write", "check", "never")
"""What `checksums=` of `verify` said, beside `algorithm=`."""


def warn(old: str, new: str) -> None:
    """Warns of a spelling; points at the caller's line outside mfload."""
    errors.warn(f"{old} is deprecated; write {new}", DeprecationWarning)


def jax(old: str, new: str) -> Literal["jax"]:
    """The framework of a call that names none, whose default is going to be "numpy"."""
    warn(old, new.format("'jax'"))
    return "jax"


def renewed(label: str, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a public call in their new spelling; None if none of them is an old one."""
    return _RENEWED[label](dict(given)) if label in _RENEWED else None


def _publish(given: dict[str, Any]) -> dict[str, Any] | None:
    PeerOptions = importlib.import_module("mfload.peer_options").PeerOptions  # Above `runtime`.
    if not (old := {name: given.pop(name) for name in _PEER if name in given}):
        return None
    names = ", ".join(f"{name}=…" for name in old)
    warn(f"mfload.publish({names})", f"mfload.publish(peer=mfload.PeerOptions({names}))")
    return given | {"peer": replace(given.get("peer") or PeerOptions(), **old)}


def _verify(given: dict[str, Any]) -> dict[str, Any] | None:
    old: dict[str, Any] = {}
    new: dict[str, Any] = {}
    if (mode := given.get("checksums")) in MODES:
        old["checksums"] = given.pop("checksums")
        new |= {"checksums": False} if mode == "never" else {"mode": mode}
    if "algorithm" in given:
        old["algorithm"] = given.pop("algorithm")
        new.setdefault("checksums", old["algorithm"])
    if not old:
        return None
    texts = (", ".join(f"{name}={value!r}" for name, value in each.items()) for each in (old, new))
    warn(*(f"mfload.verify({text})" for text in texts))
    return given | new


_RENEWED: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    "mfload.publish": _publish,
    "mfload.verify": _verify,
}
