"""Forks of a process with seeds or readers: they keep no descriptor of them."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forgets(Protocol):
    """Has descriptors that only the process that opened them is to keep."""

    def forget(self) -> None:
        """Closes them in a fork; what they stand for goes on in the parent."""
        ...


_there: weakref.WeakSet[Forgets] = weakref.WeakSet()


def forget_in_forks(owner: Forgets) -> None:
    """Has `owner.forget()` called in each fork of this process, as long as the owner is there.

    A connection that a fork held too would stay open after a kill of its parent.
    """
    _there.add(owner)


def _forget() -> None:
    for each in list(_there):
        each.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
