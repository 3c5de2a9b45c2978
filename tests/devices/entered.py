"""Which fake devices are current where, for stubs that want to know."""

from __future__ import annotations

import threading
from typing import Any

_thread = threading.local()


def entered() -> list[Any]:
    """The devices that this thread made current, the innermost last."""
    return _thread.__dict__.setdefault("devices", [])
