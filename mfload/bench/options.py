"""What a bench is asked to measure, and who can take part on this machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from mfload import errors, frameworks
from mfload.bench import loaders
from mfload.bench.loaders import LOADERS, Loader
from mfload.bench.touch import SPAN
from mfload.io.route import ENGINES
from mfload.trees import Names

CASES = ("warm", "cold")


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure.

    Args:
        frameworks: Their names or aliases; all where empty.
        engines: mfload's engines; each is measured into each framework.
        cases: Of "warm" and "cold".
        rounds: How often each loader is measured.
        threads: mfload's readers at once, chosen by it where None.
        names: Which tensors, as for `mfload.load`.
        peers: Whether safetensors and fastsafetensors are measured too.
        quick: Whether to try few patterns for the ceilings.
        max_bytes: The most bytes of tensors to measure.
        timeout: Seconds that a measuring process may take to get ready, and to be measured.
        seed: What the orders follow from, drawn where None.

    Raises:
        UsageError: One makes no sense.
    """

    frameworks: tuple[str, ...] = ()
    engines: tuple[str, ...] = ("auto",)
    cases: tuple[str, ...] = CASES
    rounds: int = 5
    threads: int | None = None
    names: Names = None
    peers: bool = False
    quick: bool = False
    max_bytes: int = 4 << 30
    timeout: float = 120.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in self.frameworks:
            frameworks.resolve(name)
        for engine in self.engines:
            if engine not in ENGINES:
                expected = " | ".join(ENGINES)
                raise errors.UsageError("unknown engine", expected=expected, found=engine)
        for what in ("rounds", "threads", "max_bytes", "timeout"):
            value = getattr(self, what)
            # Nothing waits for ever; and NaN is not above 0, either.
            if value is not None and not 0 < value < math.inf:
                raise errors.UsageError(what, expected="a finite number above 0", found=value)


class Entrant(NamedTuple):
    """A loader that was asked for.

    Attributes:
        loader: The loader.
        why_not: Why it can't be measured here, None where it can.
    """

    loader: Loader
    why_not: str | None


def entrants(options: Options, *, everything: bool) -> list[Entrant]:
    """The loaders that the options ask for, and why some can't be measured.

    Args:
        options: What to measure.
        everything: Whether it is the whole checkpoint.
    """
    wanted = [frameworks.resolve(name) for name in options.frameworks] or list(frameworks.NAMES)
    found = [
        Entrant(loader, _why_not(loader))
        for framework in dict.fromkeys(wanted)
        for loader in (loaders.ours(framework, engine) for engine in options.engines)
    ]
    if options.peers:
        part = None if everything else "it loads whole files only, and not all was measured"
        found += [
            Entrant(loader, _why_not(loader) or part)
            for loader in LOADERS.values()
            if not loader.ours and loader.framework in wanted
        ]
    return found


def _why_not(loader: Loader) -> str | None:
    missing = loader.missing()
    if missing:
        return f"not installed: {', '.join(missing)}"
    if loader.framework not in SPAN:
        return "its arrays live on a GPU, and this measures host memory"
    return None
