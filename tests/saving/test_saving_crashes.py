"""A loss of power at any moment leaves the old checkpoint or the new one, and nothing in the way.

What a call changes is recorded, and each state that a crash may leave of it is laid out and looked
at: see tests/recorder.py and tests/crashes.py. The scenarios are those of tests/scenarios.py, each
also on file systems that know no files without names, or no hard links.
"""

from __future__ import annotations

import collections
import os
import shutil
import sys
from pathlib import Path

import crashes
import pytest
import scenarios
from faults import MODES
from recorder import Recorder
from test_saving_kill import memory

import mfload

__all__ = ["memory"]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone")
SLOW = bool(os.environ.get("MFLOAD_SLOW"))
_SHOWN = 8
# On other file systems than most, only these unless all are asked for.
_QUICK = ("nothing-sharded-summed", "single-summed", "sharded-summed", "sharded-single-summed",
          "align-sharded-summed", "convert", "convert-npz")  # fmt: skip
CASES = [
    (name, mode)
    for name, mode in scenarios.cases(scenarios.CALLS)
    if SLOW or mode == "plain" or name in _QUICK
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_loss_of_power_at_any_moment(name: str, mode: str, memory: Path) -> None:
    scenario = scenarios.CALLS[name]
    old = scenarios.arrays(1)
    new = old if scenario.call == "align" else scenarios.arrays(2)
    folder = memory / "target"
    scenario.begin(folder, old)
    with MODES[mode](), Recorder(folder) as seen:
        saved = scenario.save(folder, new, overwrite=scenario.old != 0)
    assert seen.missed() == set(), "see the docstring of tests/recorder.py"
    wrong: list[str] = []
    if left := scenarios.strays(folder, scenario, saved):
        wrong.append(f"without a crash\n    too many: {sorted(left)}")
    whole: collections.Counter[str] = collections.Counter()
    for words, returned, state in crashes.states(seen, thorough=SLOW):
        shutil.rmtree(folder)
        state.lay_out(folder)
        try:
            found = scenarios.check(folder, scenario, old, new)
            whole[found] += 1
            assert not returned or found == "new", f"{found} after the call returned"
            if returned and scenario.summed:
                assert mfload.verify(scenario.path(folder), checksums="check").ok
            with MODES[mode]():
                overwrite = scenario.old != 0 or found == "new"
                saved = scenario.save(folder, new, overwrite=overwrite)
            assert scenarios.check(folder, scenario, old, new) == "new"
            scenarios.final(folder, scenario, saved)
        except Exception as error:
            wrong.append(f"{words}\n    {type(error).__name__}: {error}")
    shown = "\n".join(wrong[:_SHOWN])
    assert not wrong, f"{len(wrong)} of {whole.total()} states:\n{shown}"
    before = "new" if old is new else "nothing" if scenario.old == 0 else "old"
    assert whole.keys() == {before, "new"}
