"""A training loop that saves each step by Orbax, for a test that kills it.

    python orbax_training.py DIRECTORY sync|async

Goes on from the newest complete step in `DIRECTORY/run`. Appends to `DIRECTORY/log` what it does:
"begun N" and "saved N".
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import orbax.checkpoint as ocp
from orbax_savers import manager
from restore_cases import linen_state, linen_step

import mfload


def main() -> None:
    directory, how = Path(sys.argv[1]), sys.argv[2]
    log = os.open(directory / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    root = directory / "run"
    state = linen_state()
    if root.exists() and any(name.isdigit() for name in os.listdir(root)):
        state = mfload.restore(root, state)
    with manager(root, max_to_keep=3, enable_async_checkpointing=how == "async") as steps:
        for number in range(state.step, 100_000):
            state = linen_step(state, number)
            os.write(log, f"begun {number + 1}\n".encode())
            steps.save(number + 1, args=ocp.args.StandardSave(state))
            steps.wait_until_finished()
            os.write(log, f"saved {number + 1}\n".encode())


if __name__ == "__main__":
    main()
