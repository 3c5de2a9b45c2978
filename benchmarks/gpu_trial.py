"""One trial, in a process of its own, so that a crash is a result and not the end.

    python -m benchmarks.gpu_trial NAME DEVICE FOLDER

Prints one line of JSON: `{"status": "pass", "said": …}`, with fail or skip for pass.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from benchmarks import gpu_checks, gpu_questions, gpu_streams, gpu_stress
from benchmarks.gpu_given import Given, SkipError

TRIALS: dict[str, Callable[..., str]] = {
    "dtypes": gpu_checks.all_dtypes,
    "alignment": gpu_checks.alignment,
    "conversion": gpu_checks.conversion,
    "donation": gpu_checks.donation,
    "mesh": gpu_checks.mesh,
    "several": gpu_checks.several,
    "lifetime": gpu_stress.lifetime,
    "pins": gpu_stress.pins,
    "truncated": gpu_stress.truncated,
    "failing": gpu_stress.failing,
    "overhead": gpu_stress.overhead,
    "streams": gpu_streams.streams,
    "busy-mmap": gpu_streams.busy_mmap,
    "dropped": gpu_streams.dropped,
    "lazy": gpu_streams.lazy,
    "gds": gpu_questions.gds,
    "waking": gpu_questions.waking,
}
"""What a trial's name begins with."""


def run(name: str, given: Given) -> dict[str, str]:
    """Runs a trial; what it raises is an answer."""
    what, *arguments = name.split("/")
    try:
        return {"status": "pass", "said": TRIALS[what](given, *arguments)}
    except SkipError as error:
        return {"status": "skip", "said": str(error)}
    except Exception as error:  # noqa: BLE001  Whatever it is, it is told.
        traceback.print_exc()
        said = f"{type(error).__name__}: {error}"
        return {"status": "fail", "said": " ".join(said.split())[:600]}


def main() -> None:
    """Runs the trial that the arguments name."""
    # Libraries print what they like: their output goes to the log, ours to the parent alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, device, folder = sys.argv[1:]
    print(json.dumps(run(name, Given(device, Path(folder)))), file=answers, flush=True)
    os._exit(0)  # Some frameworks crash when they are torn down; all is said.


if __name__ == "__main__":
    main()
