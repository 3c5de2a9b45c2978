"""Several processes: who loads with whom, and what is left behind."""

from __future__ import annotations

from pathlib import Path

import launching
from world import model


def test_groups_of_processes(tmp_path: Path) -> None:
    model(tmp_path / "model")
    cases = {
        "apart": (None,) * 4,
        "crossing": (None,) * 4,
        "all_lost": ("UsageError",) * 4,
    }
    names: list[str] = []
    for number, case in enumerate(cases):
        # Cases are kept by name, so that the loads in between have one of their own.
        names += [case, f"pair:{number}", f"together:{number}"]
    ended = launching.launch(tmp_path, names, count=4, devices=2, seconds=90)
    for rank, each in enumerate(ended):
        assert each.code == 0, each.log
        assert list(each.said) == names, each.log
        for name, line in each.said.items():
            expected = cases[name][rank] if name in cases else None
            assert line["error"] == expected, (rank, name, line)
            assert line["seconds"] < 8, (rank, name, line)
            assert line["live"] == 0, (rank, name, line)


def test_who_ends_is_waited_for_no_more(tmp_path: Path) -> None:
    """Also where JAX has it wait at its end for the one that waits for it."""
    model(tmp_path / "model")
    waits, ends = launching.launch(tmp_path, ["own_mesh"], count=2, devices=2, seconds=60)
    assert ends.said["own_mesh"]["error"] is None, ends.log
    line = waits.said["own_mesh"]
    assert line["error"] == "ProcessError", waits.log
    assert "process 1 is gone" in line["text"]
    assert line["seconds"] < 8


def test_what_an_exchange_leaves_behind(tmp_path: Path) -> None:
    model(tmp_path / "model")
    names = [
        *("store", "kept", "obeyed:never", "obeyed:once", "obeyed:auto"),
        *("threads:same", "threads:other", "given_up"),
    ]
    ended = launching.launch(tmp_path, names, count=2, devices=4, seconds=90)
    for each in ended:
        assert each.code == 0, each.log
        for name in names:
            line = each.said.get(name, {"error": each.log})
            assert line["error"] is None, (name, line)
        # Buffers are aligned, and what they hold is rounded up.
        assert each.said["kept"]["held"] < 65536
        for exchange in ("never", "once", "auto"):
            assert each.said[f"obeyed:{exchange}"]["errors"] == 1
        assert each.said["threads:same"]["ended"] == {"rows": "well", "columns": "well"}
        for text in each.said["threads:other"]["ended"].values():
            assert "do not see the same arguments" in text
        line = each.said["given_up"]
        assert line["said"][0] == ("KeyboardInterrupt" if each is ended[1] else "ProcessError")
        assert "out of step" in line["said"][1]
        assert line["exchanged"] == 0
        assert any("out of step" in note for note in line["notes"])


def test_without_a_store(tmp_path: Path) -> None:
    model(tmp_path / "model")
    ended = launching.launch(tmp_path, ["without_a_store"], count=2, devices=2, seconds=60)
    for each in ended:
        assert each.code == 0, each.log
        assert each.said["without_a_store"]["error"] is None, each.said
        assert each.said["without_a_store"]["live"] == 0
    other, own = (each.said["without_a_store"]["said"] for each in ended)
    assert other.startswith("ProcessError: process 1 failed")
    assert "model-00002" in other
    assert own.startswith("ShardNotFoundError")
    for text in (other, own):
        assert "do not see the same arguments" in text
        assert "process 1: " in text


def test_a_thread_that_fails_before_its_turn_leaves_the_others(tmp_path: Path) -> None:
    model(tmp_path / "model")
    names = ["hasty:wrong", "together:0", "hasty:late", "together:1"]
    ended = launching.launch(tmp_path, names, count=2, devices=2, seconds=60)
    for each in ended:
        assert each.code == 0, each.log
        for name in names:
            assert each.said[name]["error"] is None, (name, each.said[name])
        assert [each.said[name]["first"] for name in names[::2]] == ["well", "well"]
    (told, late), (own, gave_up) = [[e.said[n]["second"] for n in names[::2]] for e in ended]
    assert own.startswith("UsageError: unknown unmatched")
    assert "process 1 failed" in told
    assert "UsageError: unknown unmatched" in told
    assert "LoadTimeoutError" in gave_up
    assert "process 1 failed" in late
    assert "a load of another thread" in late
