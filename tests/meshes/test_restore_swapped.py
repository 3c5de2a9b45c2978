"""Trees that are restored from a URL while another checkpoint takes its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import serving
from swapping import INDEX, LAYOUTS, OLD, SAID, Swapped, swap_everywhere

import mfload
from mfload.sources import http


def _into(url: str) -> Any:
    return mfload.load_into({name: np.zeros_like(array) for name, array in OLD.items()}, url)


def _restore(url: str) -> Any:
    return mfload.restore(url, framework="jax")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", [_into, _restore])
def test_a_swap_before_any_request(
    call: Callable[[str], Any], layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(http, "_HEAD", 2048)
    monkeypatch.setenv("NETRC", str(tmp_path / "no netrc"))
    with serving.serving({}) as server:

        def act(swapped: Swapped) -> dict[str, Any]:
            server.always = swapped
            leaves = jax.tree_util.tree_flatten_with_path(call(server.url(INDEX)))[0]
            return {".".join(key.key for key in path): leaf for path, leaf in leaves}

        swap_everywhere(act, layout, {"say": SAID["digest"], "redirects": True})
