"""Sources of a user's own: that of the docs in every public call, and what is wrong with others."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples

import mfload
from mfload import errors, ondemand, sources
from mfload.sources.base import Costs

DOCS = Path(__file__).parents[2] / "docs/how-to/write-source.md"
STEM = "model.layers.0.mlp.experts"
W = np.arange(12, dtype=np.float32).reshape(3, 4)


def _sample() -> str:
    return re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[0]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The source that the docs write, of a member of an archive."""
    monkeypatch.chdir(tmp_path)
    arrays = {f"{STEM}.{n}.up_proj.weight": np.full(8, n, np.float32) for n in range(3)}
    samples.save(tmp_path / "experts", arrays)
    samples.save(tmp_path / "w.safetensors", {"w": W})
    up, down = np.ones((8, 4), np.float32), np.ones((4, 8), np.float32)
    samples.save(tmp_path / "plain", {"layers.0.fc1": up, "layers.0.fc2": down})
    ondemand.bundle("plain", "bundled", up=r"layers\.(\d+)\.fc1", down=r"layers\.(\d+)\.fc2")
    with tarfile.open("all.tar", "w") as tar:
        for name in ("experts", "plain", "bundled", "w.safetensors"):
            tar.add(name)
    found: dict[str, Any] = {}
    exec(_sample(), found)
    return lambda name: found["TarMember"]("all.tar", name)


def _close(opened: Any, use: Callable[[Any], object]) -> None:
    with opened:
        assert use(opened) is not None


CALLS: dict[str, Callable[[Any], Any]] = {
    "load": lambda of: mfload.load([of("w.safetensors")], "numpy", dtype="float64"),
    "open": lambda of: _close(mfload.open(of("w.safetensors")), lambda f: f.get_slice("w")[:, 1]),
    "plan": lambda of: mfload.plan(of("w.safetensors")),
    "stream": lambda of: dict(mfload.stream(of("w.safetensors"), "numpy")),
    "verify": lambda of: mfload.verify(of("w.safetensors"), against=of("w.safetensors")),
    "diff": lambda of: mfload.diff(of("w.safetensors"), of("plain")),
    "convert": lambda of: mfload.convert(of("w.safetensors"), "converted.safetensors"),
    "align": lambda of: mfload.align(of("w.safetensors"), "aligned.safetensors"),
    "doctor": lambda of: mfload.doctor(of("w.safetensors")),
    "ondemand.ExpertCache": lambda of: _close(
        ondemand.ExpertCache(of("experts")), lambda cache: cache.use(0, [1])[1]["up_proj"]
    ),
    "ondemand.LayerStream": lambda of: _close(ondemand.LayerStream(of("experts")), list),
    "ondemand.NeuronCache": lambda of: _close(
        ondemand.NeuronCache(of("bundled")), lambda cache: cache.use(0, [1])
    ),
    "ondemand.bundle": lambda of: ondemand.bundle(
        of("plain"), "again", up=r"layers\.(\d+)\.fc1", down=r"layers\.(\d+)\.fc2"
    ),
    "ondemand.unbundle": lambda of: ondemand.unbundle(of("bundled"), "back"),
    "ondemand.load_predictors": lambda of: ondemand.load_predictors(of("w.safetensors")),
}
OF_JAX = {
    "load_into": "mfload.load_into({'w': np.zeros((3, 4), np.float32)}, source)",
    "restore": "mfload.restore(source, {'w': np.zeros((3, 4), np.float32)})",
    "abstract": "mfload.abstract(source)",
}
REFUSED = {"ondemand.load_predictors": errors.FormatError}
"""What makes no sense of a source, or of this one, and says so."""


@pytest.mark.parametrize("call", CALLS)
def test_every_call_takes_the_source_of_the_docs(made: Callable[[str], Any], call: str) -> None:
    if call in REFUSED:
        with pytest.raises(REFUSED[call]):
            CALLS[call](made)
    else:
        CALLS[call](made)


def test_no_call_is_left_out() -> None:
    """Each public callable that takes a path, by its signature."""
    taking: set[str] = set()
    for prefix, module in (("", mfload), ("ondemand.", ondemand)):
        for name in module.__all__:
            call = getattr(module, name)
            if not callable(call) or (inspect.isclass(call) and issubclass(call, Exception)):
                continue
            signature = inspect.signature(call)
            types = [str(p.annotation) for p in signature.parameters.values()]
            if any("PathOrBytes" in each for each in types):
                taking.add(prefix + name)
    assert taking <= CALLS.keys() | OF_JAX.keys()
    assert "load" in taking


def test_calls_of_jax_take_it(tmp_path: Path) -> None:
    """In a process of their own."""
    code = "\n".join([_sample(), *(f"assert len({call}) == 1" for call in OF_JAX.values())])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr


class Plain:
    """A source without faults: the bytes of a file."""

    file, engine, costs, identity = None, "plain", Costs(), "once"

    def __init__(self, path: str = "w.safetensors") -> None:
        self.name = path
        self.size = os.path.getsize(path)

    def read(self, offset: int, nbytes: int) -> Any:
        return Path(self.name).read_bytes()[offset : offset + nbytes]

    def open(self, flags: int = 0) -> Any:
        return self

    def keep(self, keeps: bool) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...

    def beside(self, name: str) -> Any:
        raise KeyError(name)


class Vector(Plain):
    """The same, whose handle is what `Handle` says."""

    def open(self, flags: int = 0) -> Any:
        return Opened(self)


class Opened:
    fd = -1

    def __init__(self, source: Vector) -> None:
        self.source = source

    def read(self, vector: list[Any], offset: int, least: int | None = None) -> int:
        done = 0
        for part in vector:
            got = self.source.read(offset + done, part.nbytes)
            part[: len(got)] = np.frombuffer(got, np.uint8)
            done += len(got)
        return done

    def close(self) -> None: ...


@pytest.fixture
def here(made: object) -> None:
    """The directory of files."""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["size", "identity", "read", "beside", "keep", "check", "engine"])
def test_what_is_no_source(name: str) -> None:
    lacking = type("Lacking", (), {k: v for k, v in vars(Vector()).items() if k != name})
    for base in (Vector, Plain):
        for key, value in vars(base).items():
            if key != name and not key.startswith("__") and not hasattr(lacking, key):
                setattr(lacking, key, value)
    with pytest.raises(errors.UsageError, match="Lacking is not a source") as caught:
        mfload.load(lacking(), "numpy")  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert caught.value.found == f"missing or of another type: {name}"


@pytest.mark.usefixtures("here")
def test_what_a_source_gives_is_checked() -> None:
    def load(**parts: Any) -> Any:
        return mfload.load(type("Faulty", (Vector,), parts)(), "numpy")["w"]

    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("token=secret")

    def short(self: Any, offset: int, nbytes: int) -> Any:
        return Plain.read(self, offset, nbytes - 1)

    def broken(*_: Any, **__: Any) -> Any:
        raise ConnectionResetError("gone")

    assert samples.same(load(), W)
    for name in ("read", "open", "check"):
        with pytest.raises(errors.ReadError, match="raised ValueError") as caught:
            load(**{name: fails})
        assert caught.value.file == "w.safetensors"
        assert "secret" not in str(caught.value)
        with pytest.raises(errors.SourceError, match="gone"):
            load(**{name: broken})
    with pytest.raises(errors.SourceChangedError, match="ended before"):
        load(read=short)
    with pytest.raises(errors.ReadError, match="something else than the bytes"):
        load(read=lambda *_: "text")
    with pytest.raises(errors.ReadError, match="something else than the bytes") as caught:
        load(read=lambda *given: b"secret" * given[-1])
    assert "secret" not in str(caught.value)  # It may also be long.
    assert mfload.verify(Vector()).ok  # pyright: ignore[reportArgumentType]
    with mfload.open(Vector(), framework="numpy") as opened:  # pyright: ignore[reportArgumentType]
        assert samples.same(pickle.loads(pickle.dumps(opened)).get_tensor("w"), W)


@pytest.mark.usefixtures("here")
def test_what_a_source_says_of_itself_is_asked_once_and_checked() -> None:
    """Attributes that raise, change or can't be are typed errors in every call, and no secrets."""

    class Request(OSError):  # As those of `requests`, whose texts have the URL.
        pass

    def raising(error: Exception) -> Any:
        def get(_: Any) -> Any:
            raise error

        return property(get)

    def later(good: Any, bad: Any) -> Any:
        left = iter([good])
        return property(lambda _: next(left, bad))

    def fails(*_: Any) -> None:
        raise ValueError

    def load(**parts: Any) -> Any:
        source = type("Faulty", (Vector,), {"__init__": lambda self: None, **parts})()
        return mfload.load(source, "numpy")["w"]

    size = os.path.getsize("w.safetensors")
    right = {"name": "w.safetensors", "size": size}
    for name in ("name", "size", "identity", "engine"):
        for error in (ValueError("token=secret"), Request("token=secret")):
            with pytest.raises(errors.ReadError, match=f"{name} of the source raised") as caught:
                load(**right | {name: raising(error)})
            assert "secret" not in str(caught.value)
    for name, good in (("size", size), ("identity", 1), ("engine", "own")):
        assert samples.same(load(**right | {name: later(good, None)}), W)
    for costs in (Costs(block=0), Costs(staged=None), Costs(merge_gap=-1), Costs(concurrency=0)):  # pyright: ignore
        with pytest.raises(errors.UsageError, match="is not a source"):
            load(**right, costs=costs)
    with pytest.raises(errors.ReadError, match=r"keep\(\) of the source raised ValueError"):
        mfload.open(type("Faulty", (Vector,), {"keep": fails})())  # pyright: ignore


@pytest.mark.usefixtures("here")
def test_what_a_handle_gives_is_checked() -> None:
    def released(*_: Any) -> Any:
        view = memoryview(b"1234")
        view.release()
        return view

    def load(engine: Any = "auto", **parts: Any) -> Any:
        made = type("Faulty", (Vector,), parts)()
        return mfload.load(made, "numpy", options=mfload.Options(engine=engine))["w"]

    def opens(**parts: Any) -> Any:
        return lambda self, _=0: type("Handle", (Opened,), parts)(self)

    for found in (float("nan"), 1e9, None):
        with pytest.raises(errors.ReadError, match="raised TypeError"):
            load(open=opens(read=lambda *_, found=found: found))
    with pytest.raises(errors.ReadError, match="raised ValueError"):
        load(read=released)
    wide = lambda _, __, nbytes: memoryview(bytes(4 * nbytes)).cast("i")  # noqa: E731
    with pytest.raises(errors.ReadError, match="something else than the bytes"):
        load(read=wide)
    for engine in ("auto", "mmap", "pread", "direct"):
        with pytest.raises(errors.UsageError, match="no descriptor"):
            load(engine, file="w.safetensors")
    assert samples.same(load(open=opens(fd="none")), W)  # Without a file it counts for nothing.
    arrays = {f"{STEM}.{n}.up_proj.weight": W for n in range(3)}
    samples.save(Path("some"), arrays)
    source = type("Faulty", (Vector,), {"open": opens(fd="none")})("some")
    with ondemand.ExpertCache(source) as cache:
        assert samples.same(cache.use(0, [1])[1]["up_proj"], W)


@pytest.mark.parametrize("most", [0, 1, 9])
def test_calls_at_once_take_the_threads_that_there_are(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, start = list[threading.Thread](), threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        if len(begun) == most:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    called = list[int]()
    sources.at_once(called.append, range(6), 4)
    assert sorted(called) == [*range(6)]
    assert len(begun) == min(most, 4)
