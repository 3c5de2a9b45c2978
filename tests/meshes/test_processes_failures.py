"""Several processes: what fails in one raises in all, promptly and typed, and none hangs."""

from __future__ import annotations

import time
from pathlib import Path

import launching
import process_cases
import pytest
from world import model

# Each failure is followed by a load that works. (case, error of process 0, error of process 1)
FAILURES = [
    ("damaged", "ProcessError", "HeaderError"),
    ("missing", "ProcessError", "ShardNotFoundError"),
    ("different", "ProcessError", "ProcessError"),
    ("alike", "ProcessError", "ProcessError"),
    ("disk:never:1000000", "ProcessError", "ReadError"),
    ("disk:once:0", "ProcessError", "ReadError"),
    ("disk:once:3000000", "ProcessError", "ReadError"),
    ("shrinks", "ProcessError", "SourceChangedError"),
    ("other_arguments", "ProcessError", "ProcessError"),
    ("other_exchange", "ProcessError", "ProcessError"),
    ("silly", "ProcessError", "UsageError"),
    ("alone", "LoadTimeoutError", "ProcessError"),
    ("interrupted", "ProcessError", "KeyboardInterrupt"),
    *((f"wrong:{what}", "ProcessError", "UsageError") for what in process_cases.WRONG),
    *((f"wrong_into:{what}", "ProcessError", "UsageError") for what in ("report", "mesh")),
]
WORDS = {
    "damaged": ("process 1", "HeaderError", "model-00002"),
    "missing": ("process 1", "model-00002"),
    "different": ("process 0: model-00001", "process 1: model-00001"),
    "disk:once:3000000": ("process 1", "ReadError", "Input/output"),
    "alike": ("process 0: model-00001", "process 1: model-00001", "sampled"),
    "wrong:unmatched": ("process 1 failed", "did you mean 'replicate'"),
    "other_arguments": ("P('a',)", "P('b',)"),
    "other_exchange": ("once", "never"),
    "interrupted": ("KeyboardInterrupt",),
    "alone": ("process 1",),
}


def test_what_fails_in_one_fails_in_all_and_the_next_load_works(tmp_path: Path) -> None:
    model(tmp_path / "model")
    names: list[str] = []
    for number, (case, *_) in enumerate(FAILURES):
        # Cases are kept by name, so that each load in between has one of its own.
        names += [case, f"values:columns:once:{(4 << 20) + number}"]
    ended = launching.launch(tmp_path, names, count=2, devices=2, seconds=90)
    for each in ended:
        assert each.code == 0, each.log
        assert list(each.said) == names, each.log
    for case, *expected in FAILURES:
        for each, error in zip(ended, expected, strict=True):
            line = each.said[case]
            assert line["error"] == error or error is None, (case, line)
            assert line["error"] is not None
            assert line["typed"] or line["error"] == "KeyboardInterrupt"
            assert line["seconds"] < 5
        for word in WORDS.get(case, ()):
            assert word in ended[0].said[case]["text"], ended[0].said[case]
    for number, (case, *_) in enumerate(FAILURES):
        for each in ended:
            line = each.said[f"values:columns:once:{(4 << 20) + number}"]
            assert line["error"] is None, (case, line)
            assert line["live"] == 0, (case, line)


def test_ctrl_c_in_an_exchange_leaves_the_group_whole(tmp_path: Path) -> None:
    model(tmp_path / "model")
    ended = launching.launch(tmp_path, ["signalled:8"], count=2, devices=2, seconds=90)
    launching.assert_ended(ended, ["signalled:8"], {})


def test_one_that_comes_late_ends_as_the_others_do(tmp_path: Path) -> None:
    """No collective is under way when the interpreters end: JAX would abort."""
    model(tmp_path / "model")
    ended = launching.launch(tmp_path, ["overtaken"], count=2, devices=2, seconds=60)
    for each in ended:
        assert each.code == 0, each.log
        assert each.said["overtaken"]["swapping"] == 0
    first, second = (each.said["overtaken"]["said"] for each in ended)
    assert first.startswith("LoadTimeoutError")
    assert "process 1 did not come to round" in first
    assert second.startswith("ProcessError: process 0 failed")


@pytest.mark.parametrize("case", ["killed_before", "killed_reading", "killed_exchanging"])
def test_a_killed_process_is_missed_at_once(tmp_path: Path, case: str) -> None:
    model(tmp_path / "model")
    ended = launching.launch(tmp_path, [case], count=4, devices=1, seconds=60)
    assert ended[1].code == -9, ended[1].log
    others = (ended[0], *ended[2:])
    for each in others:
        line = each.said.get(case, {"error": each.log})
        assert line["error"] == "ProcessError", line
        assert line["seconds"] < 5
    gone = [each.said[case]["text"] for each in others]
    assert any("process 1 is gone" in text for text in gone), gone


def test_a_silent_process_is_not_waited_for_after_the_timeout(tmp_path: Path) -> None:
    model(tmp_path / "model")
    ended = launching.launch(tmp_path, ["silent"], count=2, devices=2, seconds=60)
    for each in ended:
        assert each.code == 0, each.log
        assert each.said["silent"]["error"] in ("LoadTimeoutError", "ProcessError"), each.said
        assert each.said["silent"]["seconds"] < 5
    assert "LoadTimeoutError" in {each.said["silent"]["error"] for each in ended}


def test_process_0_killed_ends_the_others(tmp_path: Path) -> None:
    """JAX ends them: it keeps its store in process 0. None hangs."""
    model(tmp_path / "model")
    start = time.monotonic()
    ended = launching.launch(tmp_path, ["first_killed"], count=3, devices=1, seconds=60)
    assert time.monotonic() - start < 30
    assert ended[0].code == -9, ended[0].log
    for each in ended[1:]:
        line = each.said.get("first_killed")
        assert each.code != 0 or (line and line["error"] == "ProcessError"), each.log
