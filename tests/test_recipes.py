"""What pages hold beside code that runs: manifests, lists of extras, where figures come from."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import mfload

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PERFORMANCE = sorted((DOCS / "performance").glob("*.md"))


def _blocks(page: Path, language: str) -> list[str]:
    text = page.read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def _containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    pod = manifest.get("spec", {}).get("template", {}).get("spec", {})
    return [*pod.get("initContainers", []), *pod.get("containers", [])]


def test_manifests_are_whole_and_their_commands_are_there() -> None:
    yaml = pytest.importorskip("yaml")
    blocks = _blocks(DOCS / "how-to/kubernetes.md", "yaml")
    manifests = [each for block in blocks for each in yaml.safe_load_all(block)]
    kinds = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert kinds == [("Deployment", "server"), ("Service", "planner"), ("Deployment", "planner"),
                     ("Deployment", "seed")]  # fmt: skip
    commands: dict[str, set[str]] = {}
    for manifest in manifests:
        spec = manifest["spec"]
        if manifest["kind"] == "Deployment":
            labels = spec["template"]["metadata"]["labels"]
            assert spec["selector"]["matchLabels"] == labels
            volumes = {each["name"] for each in spec["template"]["spec"]["volumes"]}
            for each in _containers(manifest):
                assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
                if each["command"][0] == "mfload":
                    options = [word.partition("=")[0] for word in each["command"][2:]]
                    found = commands.setdefault(each["command"][1], set())
                    found.update(word for word in options if word.startswith("--"))
    assert set(commands) == {"verify", "planner", "serve"}
    for command, options in commands.items():
        done = subprocess.run(
            [sys.executable, "-m", "mfload", command, "--help"],
            capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "200"},
        )  # fmt: skip
        assert options <= set(re.findall(r"--[a-z-]+", done.stdout)), command


def test_the_reader_of_the_manifests_is_called_right(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = _blocks(DOCS / "how-to/kubernetes.md", "python")
    signature, seen = inspect.signature(mfload.load), list[Any]()

    def load(*given: Any, **named: Any) -> None:
        seen.append(signature.bind(*given, **named).arguments)

    monkeypatch.setattr(mfload, "load", load)
    monkeypatch.setenv("POD_IP", "10.0.0.9")
    exec(compile(block, "kubernetes.md", "exec"), {})
    assert seen[0]["options"].peer.address == "10.0.0.9:7000"


def test_the_table_of_extras_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = {
        name: {re.split(r"[\[<>=]", each)[0] for each in packages}
        for name, packages in project["optional-dependencies"].items()
    }
    page = (DOCS / "install.md").read_text("utf-8").partition("## Extras")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.M))
    assert set(rows) == set(extras)
    for name, brought in rows.items():
        if name != "all":
            assert {each.strip() for each in brought.split(",")} == extras[name], name
    named = set(re.findall(r"mfload\[(.*)\]", " ".join(project["optional-dependencies"]["all"])))
    left_out = set(re.findall(r"`(\w+)`", rows["all"]))
    assert set(named.pop().split(",")) == set(extras) - {"all"} - left_out


@pytest.mark.parametrize("page", PERFORMANCE, ids=lambda page: page.stem)
def test_what_measures_stands_at_the_end_of_a_page(page: Path) -> None:
    before, _, last = page.read_text("utf-8").partition("\n## Measured by\n")
    assert "-m benchmarks" not in before
    assert not re.search(r"^## ", last, re.M)
