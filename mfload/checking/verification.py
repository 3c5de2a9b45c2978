"""What a verification found, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mfload.checking.inspecting import Problem
from mfload.report import html_table, human, table

_SHOWN = 50


@dataclass(frozen=True, slots=True)
class Verification:
    """What `mfload.verify` found; prints well, and has `as_dict()`.

    Attributes:
        problems: All that is wrong; nothing where all is well.
        notes: What is worth a word and is not wrong.
        checked: What was looked at: "headers", "index", "checksums", "sha256", "against".
        files: How many files there are.
        tensors: How many tensors.
        bytes: Bytes of the tensors.
        read_bytes: Bytes that were read of them.
        seconds: How long it took.
        manifest: The manifest that was written or compared with.
    """

    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    checked: tuple[str, ...]
    files: int
    tensors: int
    bytes: int
    read_bytes: int
    seconds: float
    manifest: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        problems = [
            {key: value if isinstance(value, int | None) else str(value)
             for key, value in each._asdict().items()}
            for each in self.problems
        ]  # fmt: skip
        lists = {"notes": list(self.notes), "checked": list(self.checked)}
        return {"ok": self.ok, **fields, **lists, "problems": problems}

    def rows(self) -> list[tuple[str, str]]:
        """What it prints: names and values."""
        count = len(self.problems)
        verdict = "all is well" if self.ok else f"{count} problem{'s' * (count != 1)}"
        held = f"{self.tensors} tensors in {self.files} files, {human(self.bytes)}"
        speed = self.read_bytes / self.seconds / 2**30 if self.seconds else 0.0
        rows = [("verified", verdict), ("holds", held), ("checked", ", ".join(self.checked))]
        if self.read_bytes:
            read = f"{human(self.read_bytes)} in {self.seconds:.3g} s, {speed:.2f} GiB/s"
            rows.append(("read", read))
        if self.manifest is not None:
            rows.append(("manifest", self.manifest))
        rows += [("problem", str(each)) for each in self.problems[:_SHOWN]]
        if count > _SHOWN:
            rows.append(("problem", f"… and {count - _SHOWN} more"))
        return rows + [("note", note) for note in self.notes]

    def __str__(self) -> str:
        return table(self.rows())

    def _repr_html_(self) -> str:
        return html_table(self.rows())
