"""Sdist and wheel hold what they should, agree on what they are, and work where nothing else is.

`make package` builds into dist/ and names it in MFLOAD_DIST; alone, these tests build for
themselves. The wheel is installed into .venv/wheel, where it may be tried afterwards.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import yaml

import mfload
from mfload import extras

ROOT = Path(__file__).resolve().parent.parent
VERSION = mfload.__version__
STEM = f"mfload-{VERSION}"


def _run(*command: object, code: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, and the wheel that was built out of it."""
    if "MFLOAD_DIST" in os.environ:
        return ROOT / os.environ["MFLOAD_DIST"]
    if importlib.util.find_spec("build") is None:
        pytest.skip("the package `build` is not installed")
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    (path,) = dist.glob("*.whl")
    assert path.name == f"{STEM}-py3-none-any.whl"
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def sdist(dist: Path) -> tarfile.TarFile:
    (path,) = dist.glob("*.tar.gz")
    assert path.name == f"{STEM}.tar.gz"
    return tarfile.open(path)


def _tree(*under: str) -> set[str]:
    """Files of the repository, those included that are not committed yet."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no repository to compare with")
    trust = f"safe.directory={ROOT}"  # It may belong to another user.
    listed = ("ls-files", "-z", "--cached", "--others", "--exclude-standard", *under)
    names = _run("git", "-c", trust, *listed, cwd=ROOT).stdout.split("\0")
    return {name for name in names if name and (ROOT / name).is_file()}


# What they hold -------------------------------------------------------------------------------


def test_the_wheel_is_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    about = f"{STEM}.dist-info"
    package = {name for name in wheel.namelist() if not name.startswith(f"{about}/")}
    assert package == _tree("mfload")
    assert "mfload/py.typed" in package
    assert {name.removeprefix(f"{about}/") for name in set(wheel.namelist()) - package} == {
        "METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt",
    }  # fmt: skip
    assert wheel.read(f"{about}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    for name in package:
        assert wheel.read(name) == (ROOT / name).read_bytes(), name


def test_the_sdist_is_the_repository(sdist: tarfile.TarFile) -> None:
    """All that is needed to build, test and document; nothing that lies about by chance."""
    held = {m.name.removeprefix(f"{STEM}/") for m in sdist.getmembers() if m.isfile()}
    made = {"PKG-INFO", "setup.cfg"} | {name for name in held if name.startswith("mfload.egg-info")}
    hosting = {name for name in _tree() if name.startswith((".github/", ".gitignore"))}
    assert held - made == _tree() - hosting


def test_the_wheel_out_of_the_sdist_is_the_same_wheel(
    wheel: zipfile.ZipFile, sdist: tarfile.TarFile, tmp_path: Path
) -> None:
    sdist.extractall(tmp_path, filter="data")
    source = tmp_path / STEM
    _run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "-o", tmp_path, source)
    (path,) = tmp_path.glob("*.whl")
    again = zipfile.ZipFile(path)
    assert sorted(again.namelist()) == sorted(wheel.namelist())
    for name in wheel.namelist():
        assert again.read(name) == wheel.read(name), name


# What they say --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Any:
    return HeaderParser().parsestr(wheel.read(f"{STEM}.dist-info/METADATA").decode())


def _citation() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))


def test_the_version_is_said_in_one_place_and_the_same_everywhere(
    metadata: Any, sdist: tarfile.TarFile
) -> None:
    told = sdist.extractfile(f"{STEM}/PKG-INFO")
    assert told is not None
    assert metadata["Version"] == VERSION
    assert HeaderParser().parsestr(told.read().decode())["Version"] == VERSION
    assert str(_citation()["version"]) == VERSION
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert newest is not None
    assert newest[1] == VERSION
    literal = [
        name
        for name in _tree("mfload", "pyproject.toml", "docs/conf.py")
        if re.search(rf"version.*[\"']{re.escape(VERSION)}", (ROOT / name).read_text("utf-8"))
    ]
    assert literal == ["mfload/__init__.py"]


def test_the_metadata_says_what_people_look_for(metadata: Any) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Author"] == "the mfload developers"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    names = {
        "jax",
        "flax",
        "torch",
        "tensorflow",
        "paddle",
        "cuda13",
        "gds",
        "progress",
        "cli",
        "verify",
        "peer",
        "orbax",
        "plot",
        "stores",
    }
    assert set(metadata.get_all("Provides-Extra")) == names | {"bench", "all"}
    plain = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(re.split(r"[<>= ]", line)[0] for line in plain) == ["ml_dtypes", "numpy"]


def test_all_is_all_extras_that_any_machine_can_have() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = project["optional-dependencies"]
    (everything,) = declared["all"]
    named = everything.removeprefix("mfload[").removesuffix("]").split(",")
    assert sorted(named) == sorted(declared.keys() - {"all", "cuda13", "gds"})


def test_commands_that_install_name_what_the_extras_bring() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = project["optional-dependencies"]
    del declared["all"]
    assert {name: [*packages] for name, packages in extras.EXTRAS.items()} == declared
    assert {*declared["orbax"]} <= {*declared["flax"]}  # By default Flax saves with Orbax.


def test_nothing_is_to_be_installed_by_a_name_that_no_index_has() -> None:
    names = _tree("mfload", "examples", "docs", "README.md", "CONTRIBUTING.md")
    wrong = re.compile(r"mfload\[[a-z0-9,]+\]|pip install (?:-\S+ )*[\"']?mfload\b")
    said = [
        f"{name}: {line}"
        for name in sorted(names - {"mfload/extras.py", "docs/reference/api.md"})
        if name.endswith((".py", ".md", ".ipynb", ".toml", ".html"))
        for line in (ROOT / name).read_text("utf-8").splitlines()
        if wrong.search(line)
    ]
    assert said == []


def test_the_citation_follows_its_format() -> None:
    """The rules of the Citation File Format 1.2.0 for the fields that are there."""
    found = _citation()
    assert found["cff-version"] == "1.2.0"
    assert found["type"] == "software"
    required = {"cff-version", "message", "title", "authors"}
    allowed = required | {"type", "abstract", "version", "license", "keywords", "date-released"}
    assert required <= found.keys() <= allowed
    for name in found.keys() - {"authors", "keywords"}:
        assert isinstance(found[name], str), name
        assert found[name]
    assert len(set(found["keywords"])) == len(found["keywords"]) > 0
    assert found["license"] == "Apache-2.0"
    # No person but those who chose to be named: an entity.
    assert found["authors"] == [{"name": "the mfload developers"}]


def test_issue_forms_are_whole() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    if not forms:
        pytest.skip("an sdist leaves them out")
    kinds = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    asked = ""
    for form in forms:
        found = yaml.safe_load(form.read_text("utf-8"))
        if form.name == "config.yml":
            continue
        assert {"name", "description", "body"} <= found.keys(), form.name
        ids = [part["id"] for part in found["body"] if part["type"] != "markdown"]
        assert len(set(ids)) == len(ids) > 0, form.name
        for part in found["body"]:
            assert part["type"] in kinds, form.name
            assert part["attributes"].get("label") or part["type"] == "markdown", form.name
        asked += json.dumps(found)
    for what in ("mfload.Report", "mfload ls --json", "mfload bench", "mfload diff"):
        assert what in asked


# What they do ---------------------------------------------------------------------------------


def _install(python: Path, *what: object) -> None:
    pins = ROOT / "requirements" / "test.txt"
    quiet = ("--quiet", "--disable-pip-version-check", "--constraint", pins)
    _run(python, "-m", "pip", "install", *quiet, *what)


@pytest.fixture(scope="module")
def bare(dist: Path) -> Path:
    """The folder of the programs of an environment with the wheel and what it can't be without."""
    home = ROOT / ".venv" / "wheel"
    _run(sys.executable, "-m", "venv", "--clear", home)
    (path,) = dist.glob("*.whl")
    _install(home / "bin" / "python", path)
    return home / "bin"


@pytest.fixture(scope="module")
def full(bare: Path, dist: Path) -> Path:
    """The same, the command line and checksums added. Tests of `bare` come before."""
    (path,) = dist.glob("*.whl")
    _install(bare / "python", f"{path}[cli,verify]")
    return bare


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", {"w": np.arange(12).reshape(3, 4)})


def test_the_wheel_alone_loads_into_numpy(bare: Path, file: Path) -> None:
    code = """if True:
        import sys, mfload
        array = mfload.load(sys.argv[1], framework="numpy")["w"]
        print(mfload.__version__, array.dtype, array.shape, array.sum(), mfload.__file__)
    """
    said = _run(bare / "python", "-I", "-W", "error", "-c", code, file).stdout.split()
    assert said[:5] == [VERSION, "int64", "(3,", "4)", "66"]
    assert Path(said[5]).is_relative_to(bare.parent)
    held = _run(bare / "python", "-m", "pip", "list", "--format", "json").stdout
    assert {each["name"] for each in json.loads(held)} <= {
        "mfload", "ml_dtypes", "numpy", "pip", "setuptools",
    }  # fmt: skip


@pytest.mark.parametrize("how", ["script", "module"])
def test_the_command_says_which_extra_is_missing(bare: Path, file: Path, how: str) -> None:
    start = [bare / "mfload"] if how == "script" else [bare / "python", "-I", "-m", "mfload"]
    done = _run(*start, "ls", file, code=5)
    assert done.stderr.endswith(f"; {extras.install('cli')}\n")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_what_is_missing_comes_with_a_command_that_works(bare: Path, file: Path) -> None:
    """Typed as it stands, in the environment that has the wheel, from indexes without mfload."""
    code = "import sys, mfload; mfload.load(sys.argv[1], framework='jax')"
    said = _run(bare / "python", "-I", "-c", code, file, code=1).stderr
    assert f"jax is not installed; {extras.install('jax')} [" in said
    code = "import sys, mfload; print(mfload.verify(sys.argv[1], mode='write').ok)"
    said = _run(bare / "python", "-I", "-c", code, file, code=1).stderr
    command = said.strip().rpartition("; ")[2]
    path = f"{bare}{os.pathsep}{os.environ['PATH']}"
    _run("sh", "-c", command, env={**os.environ, "PATH": path})
    assert _run(bare / "python", "-I", "-c", code, file).stdout == "True\n"


def test_the_command_works_with_its_extra(full: Path, file: Path) -> None:
    assert VERSION in _run(full / "mfload", "--version").stdout
    assert re.search(r"I64 .*w", _run(full / "mfload", "ls", file).stdout)
    assert json.loads(_run(full / "mfload", "ls", file, "--json").stdout)


# Make -----------------------------------------------------------------------------------------


def test_make_clean_asks_for_no_python() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    assert "rm -rf" in _run("make", "-n", "clean", "PYTHON=false", cwd=ROOT).stdout
    for goals in (["test"], [], ["clean", "test"]):
        refused = _run("make", "-n", *goals, "PYTHON=false", code=2, cwd=ROOT).stderr
        assert "needs Python 3.11" in refused


def test_contributing_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    phony = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", makefile, re.M)
    assert phony is not None
    told = re.findall(r"^\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M)
    seams = re.search(r"^SEAMS := (.*)$", makefile, re.M)
    assert seams is not None
    found = phony[1].replace("\\", "").replace("$(SEAMS)", seams[1]).split()
    others = ["test", "gpu", "mutants", "etcd", "clean"]
    assert sorted([*told, *others]) == sorted(found)
    for name in others:
        assert f"make {name}" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    test = re.search(r"^test:.*?--output-sync=target \\\n\t *(.*?)$", makefile, re.M | re.S)
    assert test is not None
    # Of the seams, only Tunix is small enough.
    assert set(test[1].split()) == {*told} - ({*seams[1].split(), "nixl"} - {"tunix"})
