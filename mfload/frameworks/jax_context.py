"""The context in which mfload calls JAX: nothing that users set for code of their own counts."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())


@contextlib.contextmanager
def undisturbed() -> Generator[None]:
    """A context in which nothing counts that users set for code of their own.

    64-bit types keep their width, and the mesh of `jax.set_mesh`, which refuses jitted functions
    on any other devices, is none.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_x64())
        if hasattr(jax, "set_mesh"):
            stack.enter_context(jax.set_mesh(_NO_MESH))
        yield


def _x64() -> contextlib.AbstractContextManager[Any]:
    # A context manager of jax since 0.8, of jax.experimental before.
    with contextlib.suppress(AttributeError):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # pyright: ignore

    return enable_x64(True)
