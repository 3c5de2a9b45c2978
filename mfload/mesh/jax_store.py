"""Where processes of JAX meet: the store of `jax.distributed`, which keeps short texts."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from mfload import errors
from mfload.frameworks import private_api


class JaxBoard:
    """See `sharding.board.Board`.

    Args:
        store: Of `jax.distributed`.
    """

    def __init__(self, store: private_api.JaxStore) -> None:
        self.store = store
        self.place: Any = None
        self.kept: dict[str, int] = {}

    def post(self, key: str, text: str) -> None:
        """Puts a text there."""
        with _reaching():
            self.store.put(key, text)

    def look(self, prefix: str) -> dict[str, str]:
        """All texts under a prefix."""
        with _reaching():
            return self.store.under(prefix)

    def decide(self, key: str, text: str) -> str:
        """Puts a text where there is none; the one that was first."""
        with _reaching():
            return text if self.store.first(key, text) else self.store.get(key)

    def forget(self, prefix: str) -> None:
        """Takes away all texts under a prefix."""
        with _reaching():
            self.store.drop(prefix)


_boards: list[JaxBoard] = []


def board() -> JaxBoard | None:
    """The board of this process; None where processes are not joined.

    Raises:
        FrameworkVersionError: This version of JAX has no store for it.
    """
    store = private_api.jax_store()
    if store is None:
        return None
    if not _boards or _boards[0].store.client is not store.client:
        _boards[:] = [JaxBoard(store)]
    return _boards[0]


@contextlib.contextmanager
def _reaching() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        raise errors.ProcessError(
            "the store of jax.distributed can't be reached: process 0 keeps it",
            found=str(error).splitlines()[0][:300],
        ) from error
