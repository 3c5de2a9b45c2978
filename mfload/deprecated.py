"""Old spellings of public calls: they work for one version, with a warning that names the new one.

Arguments that a function has no more are found where Python refuses them (see `runtime.explained`),
so calls in the new spelling pass nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mfload import errors

_PEER = ("address", "ca_file", "cert_file", "checksums", "key_file", "planner", "token_file",
         "transports")  # fmt: skip


def warn(old: str, new: str) -> None:
    """Warns of a spelling; points at the caller's line outside mfload."""
    errors.warn(f"{old} is deprecated; write {new}", DeprecationWarning)


def renewed(label: str, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a public call in their new spelling; None if none of them is an old one."""
    return _RENEWED[label](dict(given)) if label in _RENEWED else None


def _publish(given: dict[str, Any]) -> dict[str, Any] | None:
    from mfload.options import PeerOptions

    if not (old := {name: given.pop(name) for name in _PEER if name in given}):
        return None
    names = ", ".join(f"{name}=…" for name in old)
    warn(f"mfload.publish({names})", f"mfload.publish(peer=mfload.PeerOptions({names}))")
    return given | {"peer": replace(given.get("peer") or PeerOptions(), **old)}


_RENEWED: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    "mfload.publish": _publish,
}
