"""URLs into trees of JAX arrays."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
import serving

import mfload
from mfload import errors

W = np.arange(300_000, dtype=np.float32).reshape(300, 1000)


def test_abstract_and_load_into() -> None:
    from safetensors.numpy import save

    raw = save({"w": W, "b": np.arange(5, dtype=np.int32)})
    target = {"w": jax.ShapeDtypeStruct((300, 1000), np.float32)}
    with serving.serving({"/model.safetensors": raw}) as server:
        found = mfload.abstract(server.url(), dtype=[("w", "bfloat16")])
        kinds = {name: (each.shape, str(each.dtype)) for name, each in found.items()}
        assert kinds == {"b": ((5,), "int32"), "w": ((300, 1000), "bfloat16")}
        made = mfload.load_into(target, server.url(), strict=False)
        assert np.array_equal(made["w"], W)
        server.validator = None
        for call in (mfload.abstract, partial(mfload.load_into, target)):
            with pytest.raises(errors.SourceError, match="which version"):
                call(server.url())
