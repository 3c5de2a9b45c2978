"""The module `safetensors.numpy`: files into arrays of NumPy, and back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mfload.compat import safetensors
from mfload.compat.safetensors import (  # Libraries import them from here too.
    TensorSpec as TensorSpec,
    deserialize as deserialize,
    loaders,
    safe_open as safe_open,
    serialize as serialize,
    serialize_file as serialize_file,
)

load_file, load = loaders(__name__)


def save_file(
    tensor_dict: Mapping[str, Any],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a file; one of that name is replaced once the new one is whole."""
    safetensors.save_file(tensor_dict, filename, metadata)


def save(tensor_dict: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a file."""
    return safetensors.save(tensor_dict, metadata)
