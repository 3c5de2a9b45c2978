"""What `import mfload` and its public names cost beside NumPy.

    python -m benchmarks.import_time

Each import is timed in a fresh process, best of several: what is slower was disturbed.
"""

from __future__ import annotations

import subprocess
import sys

ROUNDS = 15

# Statements that are timed, and what was imported before the clock started.
STATEMENTS = {
    "import numpy": ("", "import numpy"),
    "import mfload": ("import numpy", "import mfload"),
    "mfload.load, open, plan": (
        "import numpy",
        "import mfload; mfload.load; mfload.open; mfload.plan",
    ),
    "the same, ml_dtypes there": (
        "import numpy, ml_dtypes",
        "import mfload; mfload.load; mfload.open; mfload.plan",
    ),
}


def milliseconds(before: str, statement: str) -> float:
    """Milliseconds of a statement in a fresh process, best of several."""
    code = (
        f"{before}\nimport time\nstart = time.perf_counter()\n{statement}\n"
        "print(time.perf_counter() - start)"
    )
    command = [sys.executable, "-c", code]
    runs = (
        subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(ROUNDS)
    )
    return 1000 * min(float(run.stdout) for run in runs)


def main() -> None:
    """Prints a table."""
    for name, (before, statement) in STATEMENTS.items():
        print(f"{name:28} {milliseconds(before, statement):7.1f} ms")


if __name__ == "__main__":
    main()
