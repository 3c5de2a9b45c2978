"""Files of `/proc`, `/sys` and the like, with a plain answer where there is none."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_MOST = 1 << 20
# A pipe that nobody writes to must not hold the caller up, and a terminal not become its own.
# Systems that lack a flag have nothing of the kind to guard against.
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_NOCTTY"))


class System:
    """The machine as its kernel describes it.

    Args:
        root: Where `proc`, `sys`, `etc` and `run` are; tests lay made-up trees.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def text(self, path: str, most: int = _MOST) -> str | None:
        """A file's text without blanks around it, None where it can't be read or is no file.

        Args:
            path: Below the root.
            most: Bytes that are read; what comes behind them is left out.
        """
        try:
            fd = os.open(self.root / path, _FLAGS)
            try:
                # Users can name paths in variables: pipes and devices may have no end.
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    return None
                with open(fd, "rb", closefd=False) as file:
                    return file.read(most).decode(errors="replace").strip()
            finally:
                os.close(fd)
        except (OSError, ValueError):
            return None

    def number(self, path: str) -> int | None:
        """The number that a file holds, None where it holds none."""
        text = self.text(path)
        try:
            return None if text is None else int(text)
        except ValueError:
            return None

    def choice(self, path: str) -> str | None:
        """The chosen one of `always [madvise] never`."""
        words = (self.text(path) or "").split()
        return next((word[1:-1] for word in words if word.startswith("[")), None)

    def exists(self, path: str) -> bool:
        """Whether there is such a file or directory."""
        try:
            return (self.root / path).exists()
        except (OSError, ValueError):
            return False

    def names(self, path: str) -> list[str]:
        """What a directory holds, sorted; nothing where there is none."""
        try:
            return sorted(each.name for each in (self.root / path).iterdir())
        except (OSError, ValueError):
            return []
