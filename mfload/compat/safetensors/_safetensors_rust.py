"""The module `safetensors._safetensors_rust`: where the original's own code is, and its error."""

from mfload.compat.safetensors import (
    SafetensorError as SafetensorError,
    TensorSpec as TensorSpec,
    __version__ as __version__,
    _safe_open_handle as _safe_open_handle,  # pyright: ignore[reportPrivateUsage]
    deserialize as deserialize,
    safe_open as safe_open,
    serialize as serialize,
    serialize_file as serialize_file,
)
