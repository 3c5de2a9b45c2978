"""The module `safetensors.tensorflow`: files into arrays of TensorFlow, and back."""

from mfload.compat.safetensors import loaders, safe_open, save, save_file

load_file, load = loaders(__name__)
__all__ = ["load", "load_file", "safe_open", "save", "save_file"]
