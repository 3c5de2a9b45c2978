"""Every hostile file gets its error, every odd one loads as the reference loads it."""

from __future__ import annotations

import ast
import fnmatch
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path

import hostile_files
import hostile_layouts
import numpy as np
import pytest
import reference
import safetensors
from hostile_files import entry, header

import mfload
from mfload import errors

HOSTILE, ODD = hostile_files.HOSTILE, hostile_files.ODD


@pytest.fixture
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The file of a name, written; its name is nothing that a message could be mistaken for."""
    path = tmp_path / "f.safetensors"
    raw = HOSTILE[request.param].raw if request.param in HOSTILE else ODD[request.param]
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(("name", "file"), [(n, n) for n in HOSTILE], indirect=["file"])
def test_hostile_file_is_refused(name: str, file: Path) -> None:
    case = HOSTILE[name]
    start = time.monotonic()
    for call in (mfload.load, mfload.open, mfload.plan):
        with pytest.raises(errors.HeaderError) as caught:
            call(file, framework="numpy")
        error = caught.value
        assert case.says in error.message
        assert error.file == str(file)
        assert case.tensor is None or error.tensor == case.tensor
        assert not case.fields or error.expected is not None or error.found is not None
        text = str(error)
        assert len(text) < 3000
        assert text.encode().decode().isprintable()
        assert str(pickle.loads(pickle.dumps(error))) == text
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("name", HOSTILE)
def test_reference_refuses_it_too(name: str) -> None:
    case = HOSTILE[name]
    if case.ours:
        reference.read(case.raw)
    else:
        with pytest.raises(safetensors.SafetensorError):
            reference.read(case.raw)


@pytest.mark.parametrize(("name", "file"), [(n, n) for n in ODD], indirect=["file"])
def test_odd_file_loads_as_the_reference_loads_it(name: str, file: Path) -> None:
    assert reference.ours(file) == reference.read(ODD[name])
    loaded = mfload.load(file, framework="numpy")
    with safetensors.safe_open(file, "numpy") as opened, mfload.open(file) as ours:
        assert sorted(loaded) == sorted(opened.keys()) == ours.keys()
        assert ours.metadata() == opened.metadata()
        # safetensors knows no order of names without bytes that lie at one place.
        assert {*ours.offset_keys()} == {*opened.offset_keys()}
        for tensor in opened.keys():  # noqa: SIM118 - safe_open does not iterate
            if ours.info(tensor).dtype.name != "F4":
                np.testing.assert_array_equal(loaded[tensor], opened.get_tensor(tensor))
                assert loaded[tensor].dtype == opened.get_tensor(tensor).dtype
                assert loaded[tensor].shape == opened.get_tensor(tensor).shape


def test_readme_has_a_note_on_each() -> None:
    text = Path(__file__).with_name("README.md").read_text()
    patterns = re.findall(r"`([^`]+)`", "".join(re.findall(r"(?m)^\| (`[^|]*) \|", text)))
    names = [*HOSTILE, *ODD, *hostile_layouts.REFUSED, *hostile_layouts.LOADS]
    without = [n for n in names if not any(fnmatch.fnmatchcase(n, p) for p in patterns)]
    idle = [p for p in patterns if not fnmatch.filter(names, p)]
    assert (without, idle) == ([], [])


UNKNOWN = header(a=entry(), b=entry("F31", (7,), (4, 9)), c=entry("U8", (1,), (9, 10)))


class TestUnknownDtype:
    """A dtype mfload does not know fails the tensor that has it, and no other."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "f.safetensors"
        path.write_bytes(reference.join(UNKNOWN, bytes(range(10))))
        return path

    def test_all_is_refused_by_name(self, path: Path) -> None:
        for call in (mfload.load, mfload.plan):
            with pytest.raises(errors.UnsupportedDtypeError) as caught:
                call(path, framework="numpy")
            assert (caught.value.tensor, caught.value.found) == ("b", "F31")
            assert caught.value.file == str(path)

    def test_the_others_load(self, path: Path) -> None:
        loaded = mfload.load(path, framework="numpy", names=["a", "c"])
        assert {n: a.tobytes() for n, a in loaded.items()} == {"a": bytes(range(4)), "c": b"\x09"}

    def test_it_can_be_opened_and_listed(self, path: Path) -> None:
        with mfload.open(path) as opened:
            assert opened.keys() == ["a", "b", "c"]
            assert opened.get_slice("b").get_shape() == [7]
            assert opened.get_slice("b").get_dtype() == "F31"
            assert opened.get_tensor("c").tolist() == [9]
            for ask in (opened.get_tensor, lambda name: opened.get_slice(name)[:2]):
                with pytest.raises(errors.UnsupportedDtypeError, match="F31"):
                    ask("b")

    def test_a_conversion_does_not_help(self, path: Path) -> None:
        for dtype in ("float32", [(".", "float32")]):
            with pytest.raises(errors.UnsupportedDtypeError):
                mfload.load(path, framework="numpy", dtype=dtype)

    @pytest.mark.parametrize("name", ["", "f32", "F32 ", "F32\0", "\x1b[31m", "é", "x" * 10_000])
    def test_whatever_its_name(self, name: str, tmp_path: Path) -> None:
        path = tmp_path / "f.safetensors"
        path.write_bytes(reference.join(header(w=entry(name)), bytes(4)))
        with pytest.raises(errors.UnsupportedDtypeError) as caught:
            mfload.load(path, framework="numpy")
        assert caught.value.found == name
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 2000

    def test_its_place_is_checked_all_the_same(self, tmp_path: Path) -> None:
        path = tmp_path / "f.safetensors"
        path.write_bytes(reference.join(UNKNOWN.replace("[4, 9]", "[4, 8]"), bytes(10)))
        with pytest.raises(errors.HeaderError, match="hole"):
            mfload.open(path)


class TestShapeThatNoArrayHas:
    """Legal in the format, for the tensor has no bytes or dims of one: fails that tensor alone."""

    SHAPES = ([0, 2**62], [2**62, 0], [0, 2**64 - 1], [0, 2**40, 2**40], [1] * 65)

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_fails_by_name(self, shape: list[int], tmp_path: Path) -> None:
        path = tmp_path / "f.safetensors"
        size = 4 if 0 not in shape else 0
        text = header(a=entry(), b=entry("F32", shape, (4, 4 + size)))
        path.write_bytes(reference.join(text, bytes(4 + size)))
        reference.read(path.read_bytes())
        for call in (mfload.load, mfload.plan):
            with pytest.raises(errors.UnsupportedShapeError) as caught:
                call(path, framework="numpy")
            assert caught.value.tensor == "b"
        with mfload.open(path) as opened:
            assert opened.get_tensor("a").tolist() == [0.0]
            with pytest.raises(errors.UnsupportedShapeError):
                opened.get_tensor("b")


_BOMB = """
import re, resource, sys, time
import mfload
from mfload import errors
from mfload.frameworks import numpy_adapter  # All that is imported late, before memory is short.
from mfload.loading import lazy
path, room, call = sys.argv[1], int(sys.argv[2]), mfload.open
def peak():
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\\s*(\\d+)", file.read())[1]) << 10
before = peak()
if room:
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + room, mapped + room))
start = time.monotonic()
try:
    call(path)
except errors.MfloadError as error:
    print(type(error).__name__, peak() - before, time.monotonic() - start)
"""

_SIZE = 10 << 20
BOMBS = {
    "lists": '{"w":[' + "[]," * (_SIZE // 3) + "[]]}",
    "objects": '{"w":[' + "{}," * (_SIZE // 3) + "{}]}",
    "names": "{" + ",".join(f'"{n:x}":{{}}' for n in range(_SIZE // 11)) + "}",
    "numbers": '{"w":{"dtype":"F32","shape":[' + "9223372036854775808," * (_SIZE // 20) + "1],"
    '"data_offsets":[0,4]}}',
    "zero-then-numbers": '{"w":{"dtype":"F32","shape":[0,' + "9223372036854775808," * (_SIZE // 20)
    + "1]," '"data_offsets":[0,4]}}',
    "unknown-field": header(w=entry(x="[" + "[]," * (_SIZE // 3) + "{]")),
    "unknown-field-deep": header(w=entry(x="[" + "[[[[]]]]," * (_SIZE // 9) + "NaN]")),
    "string": '{"' + "x" * _SIZE + '":1}',
    "escapes": '{"' + "\\u00e9" * (_SIZE // 6) + '":1}',
    "depth": "[" * _SIZE,
}  # fmt: skip


def _bomb(tmp_path: Path, text: str, room: int) -> list[str]:
    path = tmp_path / "f.safetensors"
    path.write_bytes(reference.join(text, bytes(4)))
    done = subprocess.run(
        [sys.executable, "-c", _BOMB, str(path), str(room)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.parametrize("name", BOMBS)
def test_bomb_costs_memory_and_time_in_proportion(name: str, tmp_path: Path) -> None:
    kind, grown, seconds = _bomb(tmp_path, BOMBS[name], 0)
    assert kind == "HeaderError"
    assert int(grown) < 48 * len(BOMBS[name])
    assert float(seconds) < 10


@pytest.mark.parametrize("name", ["lists", "names", "string"])
def test_bomb_in_too_little_memory(name: str, tmp_path: Path) -> None:
    # Room for the text and not for what it becomes.
    room = {"string": 1 << 20}.get(name, 3 * _SIZE)
    assert _bomb(tmp_path, BOMBS[name], room)[0] == "MemoryLimitError"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="locales of Linux")
def test_an_index_may_name_files_that_the_locale_can_not(tmp_path: Path) -> None:
    path = hostile_layouts.index(tmp_path, {"a": "\u00e9.safetensors"})
    load = "import sys, mfload\ntry: mfload.open(sys.argv[1])\nexcept OSError as e: print(type(e))"
    done = subprocess.run(
        [sys.executable, "-c", load, str(path)],
        capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )  # fmt: skip
    assert "ShardNotFoundError" in done.stdout


def test_nothing_unpickles() -> None:
    """No module imports what unpickles, or calls what does so in NumPy and the frameworks."""
    modules = {"pickle", "_pickle", "dill", "shelve", "marshal", "joblib", "cloudpickle"}
    calls = r"(torch|paddle|np|numpy)\.load|.*_object(_list)?"
    for path in Path(mfload.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call):
                assert not re.fullmatch(calls, ast.unparse(node.func)), (path, node.lineno)
            assert not modules.intersection(name.partition(".")[0] for name in names), path
