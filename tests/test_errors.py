"""Errors travel, and nothing else gets out of a public function."""

from __future__ import annotations

import ast
import contextlib
import copy
import errno
import itertools
import os
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
import pytest
import reference
from calls import as_options
from hypothesis import strategies as st

import mfload
from mfload import errors

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.MfloadError)
}


class TestTree:
    @pytest.mark.parametrize("name", [name for name in CLASSES if name != "MfloadError"])
    def test_callers_catch_what_they_always_caught(self, name: str) -> None:
        assert len(CLASSES) > 15
        builtin = [
            base
            for base in CLASSES[name].__mro__
            if base.__module__ == "builtins" and base not in (Exception, BaseException, object)
        ]
        assert builtin

    def test_what_is_public(self) -> None:
        assert mfload.errors is errors
        assert mfload.MfloadError is errors.MfloadError


FIELDS: dict[str, Any] = {
    "file": "/some/f.safetensors",
    "tensor": "a.b",
    "expected": "4 bytes",
    "found": 7,
}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("move", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy])
def test_errors_travel_with_all_they_carry(name: str, move: Callable[[Any], Any]) -> None:
    more = {"problems": ("one", "two")} if issubclass(CLASSES[name], errors.FormatError) else {}
    error = CLASSES[name]("what is wrong", **FIELDS, **more)
    error.add_note("what it was part of")
    arrived = move(error)
    assert arrived.__notes__ == ["what it was part of"]
    assert type(arrived) is type(error)
    assert arrived.message == "what is wrong"
    assert {key: getattr(arrived, key) for key in [*FIELDS, *more]} == {**FIELDS, **more}
    assert str(arrived) == str(error)
    values = [value for value in FIELDS.values() if value != 7]
    for value in ("what is wrong", "7", *values, *more.get("problems", ())):
        assert value in str(arrived)


def test_an_error_of_the_system_travels_with_its_number() -> None:
    error = errors.from_os(OSError(errno.EACCES, "Permission denied"), "f", "open")
    arrived = pickle.loads(pickle.dumps(error))
    assert (arrived.errno, arrived.strerror) == (errno.EACCES, "Permission denied")
    assert arrived.filename == "f"


def test_fields_that_can_t_travel_go_as_text() -> None:
    error = errors.UsageError("x", found=lambda: 1, expected=(1, 2))
    arrived = pickle.loads(pickle.dumps(error))
    assert str(arrived) == str(error)
    assert arrived.expected == "(1, 2)"


def test_fields_are_none_and_silent_where_they_mean_nothing() -> None:
    error = errors.MfloadError("just this")
    assert (error.file, error.tensor, error.expected, error.found) == (None, None, None, None)
    assert str(error) == "just this"


def test_paths_are_text() -> None:
    assert errors.SourceError("x", file=Path("a") / "b").file == os.path.join("a", "b")


def test_text_is_short_and_harmless_whatever_it_quotes() -> None:
    bad = "\x1b[2J\ud800\n\u202e" + "x" * 10**6
    error = errors.CheckpointError(
        "m", file=bad, tensor=bad, expected=bad, found=[bad], problems=(bad,) * 1000
    )
    text = str(error)
    assert text.replace("\n", "").isprintable()
    assert text.encode()
    assert text.count("\n") == 51
    assert "and 950 more" in text
    assert len(text) < 50 * 600
    assert error.problems == (bad,) * 1000


class TestFromOs:
    KINDS: ClassVar[dict[int, type[errors.SourceError]]] = {
        errno.ENOENT: errors.SourceNotFoundError,
        errno.ENOTDIR: errors.SourceNotFoundError,
        errno.ENAMETOOLONG: errors.SourceNotFoundError,
        errno.EACCES: errors.SourcePermissionError,
        errno.EPERM: errors.SourcePermissionError,
    }

    @pytest.mark.parametrize("action", ["open", "list", "read"])
    def test_every_number(self, action: str) -> None:
        other = errors.ReadError if action == "read" else errors.SourceError
        for number in errno.errorcode:
            wanted = errors.ReadError if number == errno.EIO else self.KINDS.get(number, other)
            error = errors.from_os(OSError(number, os.strerror(number)), "some/f", action)
            assert type(error) is wanted
            assert (error.errno, error.strerror) == (number, os.strerror(number))
            assert error.file == "some/f"
            assert str(error) == f"could not {action}: {os.strerror(number)} [file: some/f]"

    def test_without_a_number(self) -> None:
        error = errors.from_os(OSError("odd"), "f", "open")
        assert type(error) is errors.SourceError
        assert "could not open: odd" in str(error)
        assert "could not open: OSError" in str(errors.from_os(OSError(), "f", "open"))

    def test_ours_goes_through_as_it_is(self) -> None:
        error = errors.SourceChangedError("x")
        assert errors.from_os(error, "f", "read") is error


class TestFromTarget:
    FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

    @pytest.mark.parametrize("action", ["write", "write to the disk", "rename"])
    def test_every_number(self, action: str) -> None:
        other = errors.WriteError if action.startswith("write") else errors.TargetError
        for number in errno.errorcode:
            wanted = errors.WriteError if number in self.FAILED else other
            if number == errno.EEXIST:
                wanted = errors.TargetExistsError
            error = errors.from_target(OSError(number, os.strerror(number)), "some/f", action)
            assert type(error) is wanted
            assert (error.errno, error.strerror) == (number, os.strerror(number))
            assert str(error) == f"could not {action}: {os.strerror(number)} [file: some/f]"
            arrived = pickle.loads(pickle.dumps(error))
            assert (arrived.errno, str(arrived)) == (number, str(error))

    def test_what_it_carries(self) -> None:
        error = errors.from_target(OSError("odd"), "f", "link", expected=1, found=2)
        assert str(error) == "could not link: odd [file: f; expected: 1; found: 2]"
        assert errors.from_target(error, "g", "x") is error


# --- nothing else gets out -----------------------------------------------------------------------


class PathLike:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __fspath__(self) -> Any:
        return self.value


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("errors") / "f.safetensors"
    row = reference.Tensor("F32", (2, 3), bytes(range(24)))
    path.write_bytes(reference.write({"a": row, "b": row._replace(dtype="I32")}))
    return path


def only_ours(call: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Calls; an argument of a wrong type may be a TypeError, all else must be ours."""
    with contextlib.suppress(TypeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Rules that match nothing warn.
        try:
            call(*args, **as_options(options))
        except errors.MfloadError as error:
            pickle.dumps((error, str(error)))


def short(value: Any) -> str:
    """An id that is the same in every process: no addresses."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))[:30]


PATHS: list[Any] = [
    None, 5, 5.5, True, b"", b"\xff", "", "\0", "a\0b", "\ud800", "\udcff", ".", "..", "/", "~",
    "/dev/null", "/dev/zero", "/proc/self/mem", "/proc/self/environ", "/proc/self/fd", "/sys",
    "x" * 5000, "/" + "x/" * 3000, "file:///x", "\n", "x.json", b"x.json", "x\0.json", [], [None],
    [5], [b"\xff"], [""], ["\0"], [[]], {}, {"a": 1}, set(), PathLike("x"), PathLike(b"x"),
    PathLike("\0"), object(), memoryview(b"x"), bytearray(b"x"), Path(""), iter([]),
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS, ids=short)
@pytest.mark.parametrize("timeout", [None, 5.0])
def test_odd_paths(
    path: Any, timeout: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"  # Nor does the directory above hold anything that loads.
    here.mkdir()
    monkeypatch.chdir(here)
    for call in (mfload.load, mfload.open, mfload.plan):
        with pytest.raises(errors.MfloadError) as caught:
            call(path, framework="numpy", **as_options({"timeout": timeout}))
        assert str(caught.value)


@hypothesis.given(path=st.text() | st.binary() | st.lists(st.text(), max_size=3))
def test_any_path(path: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    only_ours(mfload.open, path)


VALUES: list[Any] = [
    None, 0, -1, -2, 1.5, True, 2**64, 10**30, -(10**30), 1e30, float("nan"), float("inf"), "", "x",
    "(", "[", "a" * 100, "\ud800", b"x", "float32", "int8", "cpu", "cpu:1", "cpu:" + "9" * 5000,
    "cuda:0", [], [None], ["zzz"], [5], [[1]], {}, {"(": 1}, {5: "float32"}, {"a": 5}, {"a": "x"},
    re.compile(b"x"), re.compile("a"), range(3), (0, 0), (0, 0, 0), (True,), ..., (..., ...),
    object(), slice(None), slice("x"), slice(None, None, 0), slice(2**70),
]  # fmt: skip
ARGUMENTS = ["framework", "device", "names", "dtype", "engine", "allocator", "max_host_overhead",
             "threads", "timeout"]  # fmt: skip


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_odd_arguments(argument: str, file: Path) -> None:
    for value in VALUES:
        options = {"framework": "numpy", argument: value}
        only_ours(mfload.load, file, **options)
        only_ours(mfload.plan, file, **options)
        if argument in ("framework", "device", "engine", "threads", "timeout"):
            only_ours(mfload.open, file, **options)


@hypothesis.given(st.dictionaries(st.sampled_from(ARGUMENTS), st.sampled_from(VALUES), max_size=3))
def test_odd_arguments_together(file: Path, options: dict[str, Any]) -> None:
    only_ours(mfload.load, file, **{"framework": "numpy", **options})


@pytest.mark.parametrize("path", PATHS, ids=short)
def test_odd_targets(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(path, str | bytes) and os.fsdecode(path).startswith(("/", "~")):
        pytest.skip("not in the test's own directory")
    monkeypatch.chdir(tmp_path)
    only_ours(mfload.save, {"w": b"no array"}, path)
    only_ours(mfload.save, {}, path)
    # Where it went well, it is a file that loads.
    for each in tmp_path.iterdir():
        assert mfload.load(each, framework="numpy") == {}


@pytest.mark.parametrize("argument", ["metadata", "align", "max_shard_size", "overwrite"])
def test_odd_arguments_of_a_save(argument: str, tmp_path: Path) -> None:
    for value in VALUES:
        only_ours(mfload.save, {}, tmp_path / "f.safetensors", **{argument: value})


@pytest.mark.parametrize("arrays", VALUES, ids=short)
def test_odd_arrays(arrays: Any, tmp_path: Path) -> None:
    only_ours(mfload.save, arrays, tmp_path)
    only_ours(mfload.save, {"w": arrays}, tmp_path, overwrite=True)


def test_odd_questions_to_an_opened_checkpoint(file: Path) -> None:
    with mfload.open(file) as opened:
        for value in [*VALUES, "a"]:
            for ask in (opened.get_tensor, opened.get_tensors, opened.get_slice, opened.info):
                only_ours(ask, value)
            only_ours(opened.get_slice("a").__getitem__, value)
            only_ours(mfload.unpack, value, "F4", [2])
            only_ours(mfload.unpack, b"", value, [2])
            only_ours(mfload.unpack, b"1", "F4", value)
    for ask in (opened.get_tensor, opened.get_tensors):
        with pytest.raises(errors.UsageError, match="closed"):
            ask(["a"][0])


_NOUNS = re.compile(
    "tensors|files|shards|bytes|arrays|processes|steps|pieces|buffers|rows|devices|readers|threads|"
    "names|dims|elements|problems|parts|blocks|chunks|columns|seeds|ranks|values|entries|keys|"
    "rounds|tries|layers|neurons|experts|cores|times|connections|batches|operations|faults|slots"
)
# What is there more than once, or is not a count.
_NEVER_ONE = {
    "bench/random_reads.py: {_ROUNDS} rounds in", "checking/beside.py: {_MOST} files",
    "checking/headers.py: {_ALIGNED} bytes",
    "formats/discovery.py: {n} files", "io/decode.py: {'fewer' if left else 'more'} bytes than",
    "io/route.py: {gain} times as",
    "loading/session.py: {MAX_RANK} dims", "loading/session.py: {len(batches)} batches",
    "loading/session.py: {name} copies tensors",
    "mesh/jax_backend.py: {info.dtype.elements} elements in",
    "ondemand/experts.py: {layer} lacks tensors",
    "peer/manifest.py: {MAX_RANK} dims and", "peer/source.py: {self._published(block)} of bytes",
    "peer/source.py: {len(names)} tensors", "planning/slicing.py: {block} elements of",
    "saving/export.py: {row.elements} elements of", "sources/http.py: {_REDIRECTS} times",
    "trees/recipe.py: {len(claims)} tensors such",
}  # fmt: skip


def _plurals(path: Path) -> list[str]:
    """Numbers in messages of a module before a noun that is always in the plural."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.JoinedStr):
            for value, after in itertools.pairwise(node.values):
                text = after.value if isinstance(after, ast.Constant) else ""
                words = re.match(r" ([a-z]+)(?: ([a-z]+))?\b", str(text))
                named = words and any(_NOUNS.fullmatch(each or "") for each in words.groups())
                if isinstance(value, ast.FormattedValue) and words and named:
                    found.append(f"{{{ast.unparse(value.value)}}}{words[0]}")
    return found


def test_one_is_singular() -> None:
    """Messages count by one helper, which knows the singular."""
    root = Path(mfload.__file__).parent
    found = {
        f"{path.relative_to(root)}: {each}"
        for path in root.rglob("*.py")
        for each in _plurals(path)
    }
    assert found == _NEVER_ONE


def test_counts() -> None:
    assert errors.counted(1, "file") == "1 file"
    assert errors.counted(0, "file") == "0 files"
    assert errors.counted(1, "entry", "entries") == "1 entry"
    assert errors.counted(2, "entry", "entries") == "2 entries"
