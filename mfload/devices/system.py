"""Files of `/proc`, `/sys` and the like, with a plain answer where there is none."""

from __future__ import annotations

from pathlib import Path


class System:
    """The machine as its kernel describes it.

    Args:
        root: Where `proc`, `sys`, `etc` and `run` are; tests lay made-up trees.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def text(self, path: str) -> str | None:
        """A file's text without blanks around it, None where it can't be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
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
        except OSError:
            return False

    def names(self, path: str) -> list[str]:
        """What a directory holds, sorted; nothing where there is none."""
        try:
            return sorted(each.name for each in (self.root / path).iterdir())
        except OSError:
            return []
