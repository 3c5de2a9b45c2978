"""How fast mfload is, against its peers and against the ceiling of the same machine.

`python -m benchmarks.load` is the first of the commands; `benchmarks/README.md` says what they
measure. What measures is `mfload.bench`, which `mfload bench` is made of too.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
