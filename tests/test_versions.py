"""One oldest version a framework: the adapter's, the extra's and the page's are the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = {
    "jax": "jax",
    "torch": "torch",
    "tensorflow": "tensorflow",
    "paddle": "paddle",
    "cupy": "cuda13",
}


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if re.match(r"[\w-]+==[\w.]+$", line))


@pytest.mark.parametrize("name", EXTRAS)
def test_oldest_version_is_one(name: str) -> None:
    code = (ROOT / f"mfload/frameworks/{name}_adapter.py").read_text("utf-8")
    oldest = re.search(r'^OLDEST = "([\d.]+)"', code, re.MULTILINE)
    assert oldest is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (floor,) = project["optional-dependencies"][EXTRAS[name]]
    assert floor.split(">=")[1] == oldest[1]
    row = re.search(rf"^\| {name} \| ([\d.]+) \|", _versions(), re.MULTILINE | re.IGNORECASE)
    assert row is not None
    assert row[1] == oldest[1]


def _versions() -> str:
    page = (ROOT / "docs/dtypes.md").read_text("utf-8")
    return page.split("<!-- table: versions -->")[1].replace("PyTorch", "torch")


def test_demo_and_tests_pin_the_same() -> None:
    tests, demo = _pins("requirements/test.txt"), _pins("examples/minilm/requirements.txt")
    shared = tests.keys() & demo.keys()
    assert {"jax", "jaxlib", "numpy", "ml_dtypes", "tqdm"} <= shared
    assert {name: tests[name] for name in shared} == {name: demo[name] for name in shared}
