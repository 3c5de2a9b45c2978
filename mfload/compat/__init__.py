"""Where people already load: the seams of other libraries, with mfload under them."""

from mfload.compat.patching import patch

__all__ = ["patch"]
