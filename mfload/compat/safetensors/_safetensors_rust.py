"""The module `safetensors._safetensors_rust`: where the original's own code is, and its error."""

from mfload.compat.safetensors import (
    SafetensorError,
    TensorSpec,
    __version__,
    _safe_open_handle,  # pyright: ignore[reportPrivateUsage]
    deserialize,
    safe_open,
    serialize,
    serialize_file,
)

__all__ = [
    "SafetensorError",
    "TensorSpec",
    "__version__",
    "_safe_open_handle",
    "deserialize",
    "safe_open",
    "serialize",
    "serialize_file",
]
