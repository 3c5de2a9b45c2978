"""An error in any call on the target is a typed error or no matter, and what was there stays.

Each call of tests/scenarios.py is made once for each of the calls to the system that it makes on
its directory (tests/recorder.py counts them), with that one failing.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import leaks
import pytest
import recorder
import scenarios
from faults import MODES
from recorder import Recorder, Tree
from test_saving_kill import memory

import mfload
from mfload import errors

__all__ = ["memory"]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone")
SLOW = bool(os.environ.get("MFLOAD_SLOW"))
_SHOWN = 8

_BY_PATH = {*recorder.NAMES, "open", "open to read", "stat", "lstat", "listdir", "scandir"}
CODES = {
    errno.EIO: {*recorder.CHANGES, *recorder.LOOKS},
    errno.ENOSPC: {*recorder.DATA, "open", "link", "replace", "rename", "mkdir", "fsync"},
    errno.EACCES: {*_BY_PATH, "fchmod", "fchown"},
    errno.EMFILE: {"open", "open to read", "listdir", "scandir"},
    errno.EDQUOT: {*recorder.DATA, "open", "link", "replace", "rename", "mkdir", "fsync"},
    errno.EROFS: {*recorder.NAMES, *recorder.ATTRIBUTES, "open"},
    0: {*recorder.CHANGES, *recorder.LOOKS},
}
"""What each error is an answer to; 0 is Ctrl-C."""

# Only these unless all are asked for.
_QUICK = {
    errno.EIO: {"nothing-deeper", "nothing-sharded-summed", "single-summed", "single-sharded",
                "sharded-single-summed", "align-summed", "convert-npz", "link-summed",
                "verify-again"},
    errno.ENOSPC: {"nothing-sharded-summed", "sharded-summed", "align-sharded-summed", "convert"},
    errno.EMFILE: {"nothing-sharded-summed", "sharded-summed", "convert-npz"},
    0: {"sharded-summed", "single-summed", "align", "convert"},
}  # fmt: skip
CASES = [
    pytest.param(name, mode, code, id=f"{name}-{mode}-{errno.errorcode.get(code, 'Ctrl-C')}")
    for name, mode in scenarios.cases(scenarios.CALLS)
    for code in CODES
    if SLOW or (mode == "plain" and name in _QUICK.get(code, ()))
]


def files(folder: Path) -> dict[str, bytes]:
    """Relative paths and contents of all files in a directory."""
    there: Tree = recorder.tree(folder)[0]
    return {
        name: there.contents[node].data
        for name, node in there.names.items()
        if node.kind != "directory"
    }


# After Ctrl-C right behind an open, the garbage collector closes the file, and says so.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize(("name", "mode", "code"), CASES)
def test_an_error_in_any_call(name: str, mode: str, code: int, memory: Path) -> None:
    scenario = scenarios.CALLS[name]
    old = scenarios.arrays(1)
    new = old if scenario.keeps else scenarios.arrays(2)
    folder = memory / "target"
    scenario.begin(folder, old)
    with MODES[mode](), Recorder(folder) as seen:
        scenario.save(folder, new, overwrite=scenario.old != 0)
    shutil.rmtree(folder)
    seen.start.lay_out(folder)
    wrong: list[str] = []
    numbers = [n for n, call in enumerate(seen.calls, 1) if call in CODES[code]]
    for number in numbers:
        shutil.rmtree(folder)
        seen.start.lay_out(folder)
        try:
            _fail(scenario, mode, folder, old, new, code, number)
        except Exception as error:
            call = f"{number}, {seen.calls[number - 1]} {seen.paths[number - 1]}"
            wrong.append(f"call {call}\n    {type(error).__name__}: {str(error).splitlines()[0]}")
    shown = "\n".join(wrong[:_SHOWN])
    assert not wrong, f"{len(wrong)} of {len(numbers)} calls:\n{shown}"


def _fail(
    scenario: scenarios.Scenario,
    mode: str,
    folder: Path,
    old: Any,
    new: Any,
    code: int,
    number: int,
) -> None:
    """Has one call fail, looks at what is there, and makes the same call again.

    Raises:
        AssertionError: Something is not as it should be.
        Exception: What should have been typed.
    """
    failed: list[str] = []

    def before(at: int, call: str) -> None:
        if at == number:
            failed.append(call)
            if code == 0:
                raise KeyboardInterrupt
            raise OSError(code, os.strerror(code))

    start, descriptors = files(folder), len(os.listdir("/proc/self/fd"))
    told = ""
    saved: mfload.Saved | None = None
    with MODES[mode](), Recorder(folder, before) as seen:
        try:
            saved = scenario.save(folder, new, overwrite=scenario.old != 0)
        except (errors.MfloadError, KeyboardInterrupt) as error:
            told = str(error) or type(error).__name__
    assert failed, "the call was never reached"
    open_now = len(os.listdir("/proc/self/fd"))
    if open_now > descriptors:  # What errors and their frames held goes with them.
        gc.collect()
        open_now = len(os.listdir("/proc/self/fd"))
    # Ctrl-C after an open may come before anything knows of the descriptor.
    if code or failed[0] in recorder.CHANGES:
        assert open_now <= descriptors, f"{open_now - descriptors} descriptors stay open"
    assert leaks.left() == 0
    whole = scenarios.check(folder, scenario, old, new)
    # A hidden file that the call was about, such as a lock, may stay: the next writer removes it.
    about = seen.paths[number - 1]
    hidden = {about} if os.path.basename(about).startswith(".") else set[str]()
    there = {name: data for name, data in files(folder).items() if name not in hidden}
    # A removal that fails leaves what it would have removed, for the next writer or for a note.
    may_stay = failed[0] in ("unlink", "remove")
    if code == 0 and scenario.call.startswith("convert"):
        may_stay = True  # It goes on the next time.
    if saved is not None:
        assert whole == "new"
        strays = scenarios.strays(folder, scenario, saved) - hidden
        shown = {each for each in strays if not os.path.basename(each).startswith(".")}
        assert may_stay or not strays, f"left without need: {sorted(strays)}"
        unsaid = [each for each in shown if not any(each in note for note in saved.notes)]
        assert not unsaid, f"left without a note: {unsaid}"
    elif whole != "new" or there == start:
        more = sorted(there.keys() - start.keys())
        assert may_stay or there == start, f"left after {told}: {more}, or something changed"
    elif scenario.sharded and code:
        assert "is whole" in told, f"it does not say that the new one is there: {told}"
    overwrite = scenario.old != 0 or whole == "new"
    with MODES[mode]():
        scenario.again(folder, "the same", new, new, overwrite=overwrite)
