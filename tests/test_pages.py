"""Pages and examples do what they show, on what the install line above them brings.

`make fresh` runs them so, each in an environment that was made by that line and has nothing else,
in the folder that MFLOAD_FRESH names. Alone, these tests run in the environment that they stand in.
tests/pages.py has the rules. The sample checkpoint `model/` is there beside each page: the block of
docs/quickstart.md that is marked `sample`.
"""

from __future__ import annotations

import filecmp
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import (
    DOCS,
    ROOT,
    Block,
    Install,
    code,
    consoles,
    fences,
    installs,
    name_of,
    pages,
    sample,
)

SECONDS = 240
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
README = ROOT / "README.md"
QUIET = ("--quiet", "--disable-pip-version-check")
PINS = [f"--constraint={ROOT}/requirements/{name}.txt" for name in ("test", "transformers")]
NOT_CARRIED = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")

Environment = Callable[[Install], tuple[Path, dict[str, str]]]


@pytest.fixture(scope="session")
def environment() -> Environment:
    """Gives the Python of an environment, and the variables for it; each is made once."""
    fresh, variables = os.environ.get("MFLOAD_FRESH"), dict(os.environ)
    variables |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TERM": "dumb"}
    if not fresh:
        return lambda _: (Path(sys.executable), variables | {"PYTHONPATH": str(ROOT)})
    variables.pop("PYTHONPATH", None)
    made: dict[frozenset[str], Path] = {}
    held: dict[tuple[Path, int], Path] = {}
    _share(Path(sys.prefix), held)
    folder = ROOT / fresh
    shutil.rmtree(folder, ignore_errors=True)
    # Installs write into the checkout that they are made from.
    checkout = shutil.copytree(ROOT, folder / "mfload", ignore=NOT_CARRIED)

    def make(install: Install) -> tuple[Path, dict[str, str]]:
        if install.packages not in made:
            place = folder / f"{len(made)}"
            subprocess.run([sys.executable, "-m", "venv", place], check=True)
            python = made[install.packages] = place / "bin" / "python"
            for each in install.commands:
                command = [python, "-m", "pip", "install", *QUIET, *PINS, *each]
                subprocess.run(command, cwd=checkout, env=variables, check=True)
                _share(place, held)
        python = made[install.packages]
        return python, variables | {"PATH": f"{python.parent}{os.pathsep}{variables['PATH']}"}

    return make


def _share(environment: Path, held: dict[tuple[Path, int], Path]) -> None:
    """Files that environments have in common become links to one: all of them took 16 GB else.

    `held` has a file of each name and size, of the environments before.
    """
    for path in environment.rglob("*"):
        if path.is_symlink() or not path.is_file() or (size := path.stat().st_size) < 4096:
            continue
        first = held.setdefault((path.relative_to(environment), size), path)
        if first.samefile(path) or not filecmp.cmp(first, path, shallow=False):
            continue
        link = path.with_name(f"{path.name}.link")
        link.hardlink_to(first)
        link.replace(path)


def _need(names: set[str]) -> None:
    """Skips where there is no environment with these packages, and they are not in this one."""
    if not os.environ.get("MFLOAD_FRESH"):
        for name in sorted(names - set(sys.stdlib_module_names)):
            if importlib.util.find_spec(name) is None:
                pytest.skip(f"{name} is not installed")


def _imported(text: str) -> set[str]:
    return set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.M))


def _install(page: Path, wanted: frozenset[str]) -> Install:
    """The first environment that a page names with what is wanted, by frameworks or packages."""
    named = installs(page)
    assert named, f"{name_of(page)} does not say what it needs: `Install: pip install …`"
    able = [each for each in named if wanted <= each.frameworks | each.packages]
    assert able, f"{name_of(page)} names no environment with {', '.join(sorted(wanted))}"
    return able[0]


def _run(
    page: Path, blocks: list[Block], where: tuple[Path, dict[str, str]], work: Path, before: str
) -> list[str]:
    """What each block prints."""
    answer = work / ".answer.json"
    answer.unlink(missing_ok=True)
    task: dict[str, Any] = {"page": str(page), "before": before, "answer": str(answer)}
    task["blocks"] = [(block.line, block.code) for block in blocks]
    done = subprocess.run(
        [where[0], "-P", ROOT / "tests" / "pages.py"],
        input=json.dumps(task), capture_output=True, text=True, cwd=work, timeout=SECONDS,
        env=where[1],
    )  # fmt: skip
    results = json.loads(answer.read_text()) if answer.exists() else []
    at = blocks[min(len(results), len(blocks) - 1)].line
    name = name_of(page)
    assert done.returncode == 0, f"{name}:{at} ended with {done.returncode}\n{done.stderr[-3000:]}"
    return results


def _runs() -> Iterator[Any]:
    """A page and the frameworks of each process that it needs."""
    for page in pages():
        for each in sorted({block.frameworks for block in code(page)}, key=sorted):
            yield pytest.param(page, each, id="-".join((name_of(page), *sorted(each))))


@pytest.mark.parametrize(("page", "wanted"), list(_runs()))
def test_code_of_the_page_runs_and_prints_what_is_shown(
    page: Path, wanted: frozenset[str], environment: Environment, tmp_path: Path
) -> None:
    assert not {"tensorflow", "paddle"} <= wanted, "TensorFlow and Paddle crash each other"
    blocks = [block for block in code(page) if block.frameworks <= wanted]
    _need(_imported("\n".join(block.code for block in blocks)) | wanted)
    results = _run(page, blocks, environment(_install(page, wanted)), tmp_path, sample())
    for block, printed in zip(blocks, results, strict=True):
        if block.output is not None:
            shown = _expected(block.output)
            assert re.fullmatch(shown, _plain(printed)), (
                f"{name_of(page)}:{block.line} shows\n{block.output}\nand prints\n{printed}"
            )


_MARK = "--- end of a command ---"


def _commands(block: Block) -> list[tuple[str, str]]:
    """Commands of a console block, and what each prints."""
    found: list[tuple[str, str]] = []
    for line in block.code.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif found and found[-1][0].endswith("\\"):
            found[-1] = (f"{found[-1][0]}\n{line}", "")
        else:
            assert found, f"line {block.line}: output of no command"
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
    return found


@pytest.mark.parametrize("page", [page for page in pages() if consoles(page)], ids=name_of)
def test_commands_of_the_page_print_what_is_shown(
    page: Path, environment: Environment, tmp_path: Path
) -> None:
    python, env = environment(_install(page, frozenset({"typer"})))
    work = tmp_path / "work"
    work.mkdir()
    if not os.environ.get("MFLOAD_FRESH"):
        for name, module in {"mfload": "-m mfload", "python": ""}.items():
            tool = tmp_path / name
            tool.write_text(f'#!/bin/sh\nexec "{python}" -P {module} "$@"\n')
            tool.chmod(0o755)
        env = env | {"PATH": f"{tmp_path}:{env['PATH']}"}
    env = env | {"HF_HUB_CACHE": str(tmp_path)}
    subprocess.run([python, "-P", "-c", sample()], cwd=work, env=env, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    for block in consoles(page):
        commands = _commands(block)
        # The status is kept, for a line that prints it.
        script = "".join(f'{command}\nstatus=$?; echo "{_MARK}"; (exit $status)\n'
                         for command, _ in commands)  # fmt: skip
        done = subprocess.run(
            ["bash", "-c", f"exec 2>&1\n{script}"],
            cwd=work, env=env, stdout=subprocess.PIPE, text=True, timeout=SECONDS,
        )  # fmt: skip
        printed = done.stdout.split(f"{_MARK}\n")
        for (command, shown), found in zip(commands, printed, strict=False):
            assert re.fullmatch(_expected(shown), _plain(found)), (
                f"{name_of(page)}:{block.line}: {command} shows\n{shown}\nand prints\n{found}"
            )


def _plain(text: str) -> str:
    return re.sub(r"[ \t]+", " ", re.sub(r"[ \t]+$", "", text.strip("\n"), flags=re.M))


def _expected(text: str) -> str:
    lines = [re.escape(line).replace("…", "[^\n]*") for line in _plain(text).split("\n")]
    return "".join(
        "(?:[^\n]*\n)*" if line == "[^\n]*" and n < len(lines) - 1
        else "(?s:.*)" if line == "[^\n]*"
        else line + ("\n" if n < len(lines) - 1 else "")
        for n, line in enumerate(lines)
    )  # fmt: skip


@pytest.mark.parametrize("script", EXAMPLES, ids=name_of)
def test_the_example_runs(script: Path, environment: Environment, tmp_path: Path) -> None:
    python, env = environment(_install(script, frozenset()))
    done = subprocess.run(
        [python, script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"


# What transformers saves, under the names of Hugging Face: in one file, or in several. Llama has
# weights alone, Qwen biases of the same names too.
_SAVED = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM

_, family, size = sys.argv
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **heads)).bfloat16()
model.save_pretrained("model", max_shard_size=size)
"""


@pytest.mark.parametrize("checkpoint", ["sample", "llama 1GB", "llama 100KB", "qwen2 1GB"])
def test_the_readme_typed_in_order_works_twice(
    checkpoint: str, environment: Environment, tmp_path: Path
) -> None:
    where = environment(_install(README, frozenset()))
    if checkpoint == "sample":
        program, maker = sample(), where
    else:
        _need({"transformers"})
        program = _SAVED
        maker = environment(_install(DOCS / "how-to/transformers.md", frozenset({"transformers"})))
    subprocess.run(
        [maker[0], "-P", "-c", program, *checkpoint.split()],
        cwd=tmp_path, env=maker[1], check=True, capture_output=True,
    )  # fmt: skip
    blocks = [b for b in fences(README.read_text("utf-8")) if b.language == "python"]
    for _ in range(2):
        printed = _run(README, blocks, where, tmp_path, before="")
        assert "bfloat16" in printed[0]
