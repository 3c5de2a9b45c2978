"""The samples of a run, and the figures that follow from them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, cast

from benchmarks.compared import LOADERS
from mfload.bench import loaders

MIB = 1 << 20


def is_ceiling(name: str) -> bool:
    """Whether a name is that of a ceiling's pattern."""
    return name.startswith("ceiling-")


def label(name: str) -> str:
    """What a loader or a ceiling's pattern is called in tables and plots."""
    return loaders.find(name).label


@dataclass
class Results:
    """A run.

    Args:
        machine: What `described.describe` gives.
        run: Seed, rounds and sizes.
        checkpoints: Each checkpoint in words and figures.
        samples: Every measurement.
        skipped: (case, name, reason) of what was not measured.
    """

    machine: dict[str, Any]
    run: dict[str, Any]
    checkpoints: dict[str, Any]
    samples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    skipped: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])

    def values(self, case: str, name: str, key: str) -> list[float]:
        """All values of one figure, of the samples that have it."""
        return [
            s[key] for s in self.samples if s["case"] == case and s["name"] == name and key in s
        ]

    def best(self, case: str, name: str, key: str = "seconds") -> float | None:
        """The least of the values, None if there is none."""
        return min(self.values(case, name, key), default=None)

    def median(self, case: str, name: str, key: str = "seconds") -> float | None:
        """The middle of the values, None if there is none."""
        values = self.values(case, name, key)
        return median(values) if values else None

    def worst(self, cases: Iterable[str], name: str, key: str) -> float | None:
        """The greatest of the values over several cases, None if there is none."""
        return max((v for case in cases for v in self.values(case, name, key)), default=None)

    def names(self, case: str) -> list[str]:
        """What was measured in a case: ceilings, then loaders, each in the tables' order."""
        seen = dict.fromkeys(s["name"] for s in self.samples if s["case"] == case)
        known = [*filter(is_ceiling, seen), *(name for name in LOADERS if name in seen)]
        return [*known, *(name for name in seen if name not in known)]

    def ceiling(self, case: str) -> tuple[str, float] | None:
        """The pattern that was fastest at its best, and its seconds."""
        found = [(name, self.best(case, name)) for name in self.names(case) if is_ceiling(name)]
        times = [(name, seconds) for name, seconds in found if seconds is not None]
        return min(times, key=lambda pair: pair[1], default=None)

    def ratio(self, case: str, name: str) -> float | None:
        """A loader's best time over the ceiling's."""
        best, ceiling = self.best(case, name), self.ceiling(case)
        return None if best is None or ceiling is None else best / ceiling[1]

    def summary(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """Best and median of each figure, by case and name."""
        cases = list(dict.fromkeys(s["case"] for s in self.samples))
        keys = ("seconds", "cpu_s", "cpu_load_s", "peak_over")
        return {
            case: {
                name: {
                    f"{kind}_{key}": take(case, name, key)
                    for key in keys
                    if self.values(case, name, key)
                    for kind, take in (("best", self.best), ("median", self.median))
                }
                for name in self.names(case)
            }
            for case in cases
        }

    def save(self, path: Path, **more: object) -> None:
        """Write everything as JSON.

        Args:
            path: Where to.
            more: What else belongs to the run, such as judged targets.
        """
        write_json(path, {**asdict(self), "summary": self.summary(), **more})

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read what `save` wrote."""
        found = json.loads(path.read_text("utf-8"))
        skipped = [(case, name, why) for case, name, why in found["skipped"]]
        parts = {key: found[key] for key in ("machine", "run", "checkpoints", "samples")}
        return cls(**parts, skipped=skipped)


def write_json(path: Path, data: object) -> None:
    """Writes figures as JSON, to be read by people as well."""
    path.write_text(json.dumps(rounded(data), indent=1, ensure_ascii=False) + "\n", "utf-8")


def rounded(value: Any) -> Any:
    """The same with floats cut to microseconds, which is more than they mean."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in cast(dict[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in cast(list[Any], value)]
    return value
