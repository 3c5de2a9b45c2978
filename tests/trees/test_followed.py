"""docs/design/copies.md follows a transposed leaf: it passes the functions that the page says."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mfload

torch: Any = pytest.importorskip("torch")
PAGE = Path(__file__).parents[2] / "docs" / "design" / "copies.md"


def test_a_transposed_leaf_passes_the_functions_of_the_page_in_their_order(tmp_path: Path) -> None:
    text = PAGE.read_text("utf-8").partition("## The same in a debugger")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \[([\w/]+)\.py\]\(\S+\) \| `([\w.]+)` \|", text, re.M)
    expected = [f"mfload.{file.replace('/', '.')}.{name}" for file, name in rows]
    path = tmp_path / "kernel.safetensors"
    kernel = np.arange(12, dtype=np.float32).reshape(3, 4)
    mfload.save({"head.kernel": kernel}, path)
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(3, 4, bias=False)})
    rule = mfload.rule("head.weight", transpose=(1, 0))
    entered: list[str] = []

    def enter(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call":
            entered.append(f"{frame.f_globals.get('__name__')}.{code.co_qualname}")

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        mfload.load_into(model, path, mapping={r"head\.kernel": rule})
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    np.testing.assert_array_equal(model["head"].weight.detach().numpy(), kernel.T)
    assert not {*expected} - {*entered}
    firsts = [entered.index(name) for name in expected]
    assert len(expected) == 6
    assert firsts == sorted(firsts)
