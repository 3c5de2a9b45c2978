"""A loss of power at any moment leaves the old checkpoint or the new one, and nothing in the way.

What a call changes is recorded, and each state that a crash may leave of it is laid out and looked
at: see tests/recorder.py and tests/crashes.py. The scenarios are those of tests/scenarios.py, each
also on file systems that know no files without names, or no hard links.
"""

from __future__ import annotations

import collections
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import crashes
import pytest
import scenarios
from faults import MODES
from recorder import Recorder
from test_saving_kill import memory

import mfload
from mfload.saving import drafts

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
    whole, wrong = replayed(scenario, mode, memory, thorough=SLOW)
    shown = "\n".join(wrong[:_SHOWN])
    assert not wrong, f"{len(wrong)} of {whole.total()} states:\n{shown}"
    before = "new" if scenario.keeps else "nothing" if scenario.old == 0 else "old"
    assert whole.keys() == {before, "new"}


def replayed(
    scenario: scenarios.Scenario, mode: str, where: Path, *, thorough: bool
) -> tuple[collections.Counter[str], list[str]]:
    """Replays the crashes of one call; returns what was found how often, and what is wrong."""
    old, new, third = (scenarios.arrays(seed) for seed in (1, 2, 3))
    new = old if scenario.keeps else new
    folder = where / "target"
    scenario.begin(folder, old)
    with MODES[mode](), Recorder(folder) as seen:
        saved = scenario.save(folder, new, overwrite=scenario.old != 0)
    assert seen.missed() == set(), "see the docstring of tests/recorder.py"
    wrong: list[str] = []
    if left := scenarios.strays(folder, scenario, saved):
        wrong.append(f"without a crash\n    too many: {sorted(left)}")
    whole: collections.Counter[str] = collections.Counter()
    for words, returned, state in crashes.states(seen, thorough=thorough):
        shutil.rmtree(folder)
        state.lay_out(folder)
        try:
            found = scenarios.check(folder, scenario, old, new)
            whole[found] += 1
            assert not returned or found == "new", f"{found} after the call returned"
            if returned and scenario.summed:
                assert mfload.verify(scenario.path(folder), mode="check").ok
            if mode == "no-links" and found == "new" and scenario.new is not None:
                continue  # Without hard links, shards are not replaced.
            overwrite = scenario.old != 0 or found == "new"
            # What a call over nothing leaves is the hardest to tell.
            several = scenario.call == "save" and (thorough or found == "nothing")
            for way in scenarios.AGAIN if several else scenarios.AGAIN[:1]:
                shutil.rmtree(folder)
                state.lay_out(folder)
                with MODES[mode]():
                    scenario.again(folder, way, new, third, overwrite=overwrite)
        except Exception as error:
            wrong.append(f"{words}\n    {type(error).__name__}: {error}")
    return whole, wrong


class TestReplays:
    """They find what they are made to find."""

    @pytest.mark.parametrize("kind", [stat.S_IFREG, stat.S_IFDIR])
    @pytest.mark.parametrize("name", ["nothing-single", "single-single"])
    def test_a_sync_that_is_left_out(
        self, name: str, kind: int, memory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.fsync

        def fsync(fd: int) -> None:
            if stat.S_IFMT(os.fstat(fd).st_mode) != kind:
                real(fd)

        monkeypatch.setattr(drafts, "fsync", lambda fd: None if fd < 0 else fsync(fd))
        assert replayed(scenarios.CALLS[name], "plain", memory, thorough=False)[1]

    def test_a_change_that_the_recorder_does_not_see(self, memory: Path) -> None:
        (memory / "gone").write_text("")
        with Recorder(memory) as seen:
            subprocess.run(["rm", memory / "gone"], check=True)
            (memory / "made").write_text("by the standard library's own open")
        assert seen.missed() == {"gone", "made"}

    def test_states_are_those_of_the_changes(self, memory: Path) -> None:
        with Recorder(memory) as seen:
            fd = os.open(memory / "a", os.O_WRONLY | os.O_CREAT)
            os.write(fd, b"12")
            os.fsync(fd)
            os.write(fd, b"34")
            os.close(fd)
            os.replace(memory / "a", memory / "b")
        found = {
            tuple((name, state.contents[node].data) for name, node in state.names.items())
            for _, returned, state in crashes.states(seen, thorough=True)
            if returned
        }
        datas = [b"12", b"1234", b"12\0\0", b"123\0"]
        assert found == {(), *((((name, data)),) for name in "ab" for data in datas)}
