"""Calls that do not fit: what is said to those who know other libraries, or half remember."""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples

import mfload
from mfload import errors, misuse, runtime

MODEL = {"layers.0.q.weight": np.ones((2, 3), np.float32), "layers.0.q.bias": np.zeros(2)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", MODEL)


def _raised(call: Callable[[], Any]) -> str:
    """The text of the one ArgumentError."""
    with pytest.raises(errors.ArgumentError) as caught:
        call()
    assert isinstance(caught.value, TypeError | ValueError)
    assert caught.value.__cause__ is None
    return str(caught.value)


KEYWORDS = {
    # Fields of options.
    "engine": ("mmap", ": use options=mfload.Options(engine='mmap')"),
    "max_host_overhead": ("1GiB", ": use options=mfload.Options(max_host_overhead='1GiB')"),
    "threads": (4, ": use options=mfload.Options(threads=4)"),
    "headers": ({"a": "b"}, ": use options=mfload.Options(headers=…)"),
    "planner": ("http://x", ": use options=mfload.Options(peer=mfload.PeerOptions(planner='http"),
    "engin": ("mmap", ", did you mean options=mfload.Options(engine='mmap')?"),
    "num_threads": (2, ", did you mean options=mfload.Options(threads=2)?"),
    # Arguments of other functions.
    "mapping": (
        {},
        ": it is an argument of mfload.convert(), mfload.load_into(), mfload.restore()",
    ),
    "strict": (False, ": it is an argument of mfload.load_into(), mfload.restore()"),
    "overwrite": (True, ": it is an argument of mfload."),
    # Slips.
    "name": ("q", ", did you mean names=?"),
    "dtypes": ("F16", ", did you mean dtype=?"),
    "sharding": ([], ", did you mean shardings=?"),
    "verfy": ("m", ", did you mean verify=?"),
    "devices": ("cpu", ", did you mean device=?"),
    # Other libraries'.
    "map_location": ("cpu", ", did you mean device=?"),
    "device_map": ("auto", ", did you mean device=?"),
    "torch_dtype": ("F16", ", did you mean dtype=?"),
    "weights_only": (True, ": leave it out, mfload unpickles nothing"),
    "tensor_parallel": (2, ": use mesh= and shardings=, or"),
    "revision": (
        "main",
        ": a model of the Hugging Face Hub is loaded by its URL: 'hf://org/name@revision'",
    ),
    "token": ("hf_x", "mfload.Options(headers={'Authorization': 'Bearer …'})"),
    "mmap": (True, ": use options=mfload.Options(engine='mmap')"),
    "checksums": (True, ", did you mean verify=?"),
    # Nothing near.
    "xyzzy": (1, "xyzzy=1 [expected: mfload.load(path, framework, *, device, "),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_an_unknown_argument_is_told_where_it_goes(path: Path, name: str) -> None:
    value, said = KEYWORDS[name]
    text = _raised(lambda: mfload.load(path, "numpy", **{name: value}))
    assert text.startswith(f"mfload.load() has no argument {name}=")
    assert said in text


@pytest.mark.parametrize("name", ["token", "hf_token", "api_key", "password", "headers", "auth"])
def test_secrets_are_not_shown(path: Path, name: str) -> None:
    assert "SECRET" not in _raised(lambda: mfload.load(path, "numpy", **{name: "SECRET"}))
    assert "SECRET" not in _raised(lambda: mfload.Options(**{name: "SECRET", "no": 1}))
    signed = "https://h/x?sig=SECRET"
    assert "SECRET" not in _raised(lambda: mfload.load(framework="numpy", url=signed))  # pyright: ignore


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "no path": (lambda: mfload.load(framework="jax"), "mfload.load() needs path ["),
    "misspelt": (lambda: mfload.load("m", framwork="np"), "'np', did you mean framework=? ["),
    "renamed": (lambda: mfload.load(filename="m", backend="np"), "did you mean path=?"),
    "by position": (lambda: mfload.load("m", "np", "cuda:0"), "such as device='cuda:0' ["),
    "two by position": (lambda: mfload.load("m", "np", 0, "q"), "such as device=0, names='q' ["),
    "twice": (lambda: mfload.load("m", "np", path="m"), "path twice, by position and by name"),
    "several": (lambda: mfload.load("m", x=1, y=2), "of mfload.load() are wrong"),
    "open": (lambda: mfload.open("m", dtype="f4"), "an argument of mfload.abstract(), mfload."),
    "into": (lambda: mfload.load_into({}, "m", framework="jax"), "of mfload.load(), mfload."),
    "model": (lambda: mfload.load_into(model={}, path="m"), "did you mean target=?"),
    "save": (lambda: mfload.save({}, filename="m"), "did you mean path=?"),
    "state_dict": (lambda: mfload.save(state_dict={}, path="m"), "did you mean arrays=?"),
    "verify": (lambda: mfload.verify("m", manfest="x"), "did you mean manifest=?"),
    "diff": (lambda: mfload.diff("m"), "mfload.diff() needs b ["),
    "rule": (lambda: mfload.rule("x", permute=(1, 0)), "mfload.rule() has no argument permute="),
    "field": (lambda: mfload.Options(engin="mmap"), "mfload.Options() has no argument engin="),
    "of a peer": (lambda: mfload.Options(planner="x"), "use peer=mfload.PeerOptions(planner='x')"),
    "of a load": (lambda: mfload.Options(device="cpu"), "it is an argument of mfload.load()"),
    "options": (lambda: mfload.Options("mmap"), "nothing by position, and the rest by name, such"),
    "peer": (lambda: mfload.PeerOptions(tokenfile="x"), "did you mean token_file=?"),
    "ondemand": (lambda: mfload.ondemand.LayerStream("m", bugdet=1), "did you mean budget=?"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_that_does_not_fit(kind: str) -> None:
    call, said = CALLS[kind]
    assert said in _raised(call)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(errors.UsageError) as caught:
        mfload.load(engine="mmap", names="q", nmaes="q")  # type: ignore[call-arg]
    assert [line.partition("(")[2][:20] for line in caught.value.problems] == [
        ") needs path", ") has no argument en", ") has no argument nm",
    ]  # fmt: skip


def test_every_public_function_explains() -> None:
    for module in (mfload, mfload.ondemand):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                label = f"{module.__name__}.{name}"
                assert f"{label}() has no argument xyzzy=1" in _raised(lambda: value(xyzzy=1))  # noqa: B023
                assert (value.__module__, value.__qualname__) == (module.__name__, name)
                assert pickle.loads(pickle.dumps(value)) is value
                inside = inspect.unwrap(value)
                assert inspect.signature(value) == inspect.signature(inside)
                assert getattr(importlib.import_module(inside.__module__), name) is inside


def test_what_goes_wrong_inside_stays_as_it_is(path: Path) -> None:
    """Also a TypeError, of a function that was given or of a line of the library's own."""

    def chosen(name: str) -> bool:
        return len(3) > 0  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len") as caught:
        mfload.load(path, "numpy", names=chosen)
    assert not isinstance(caught.value, mfload.MfloadError)
    assert caught.traceback[-1].name == "chosen"

    def inner(*, needed: int) -> int:
        return needed

    @functools.partial(runtime.explained, label="mfload.outer")
    def outer(**given: Any) -> int:
        return inner(**given)

    assert outer(needed=2) == 2
    with pytest.raises(TypeError, match="inner") as caught:
        outer(other=2)
    assert type(caught.value) is TypeError


def test_a_call_that_fits_has_no_fault() -> None:
    assert misuse.error(mfload.load, "mfload.load", ("m", "np"), {"names": "q"}) is None


def test_an_explained_call_costs_one_frame(path: Path) -> None:
    from mfload import api

    def frames(call: Callable[..., Any]) -> int:
        seen: list[str] = []
        sys.setprofile(lambda frame, event, _: seen.append(event) if event == "call" else None)
        try:
            call(path, "numpy")
        finally:
            sys.setprofile(None)
        return len(seen)

    frames(api.load), frames(mfload.load)
    # A buffer that is collected amid a call adds frames of its own.
    fewest = [min(frames(call) for _ in range(5)) for call in (api.load, mfload.load)]
    assert fewest[1] == fewest[0] + 1


# What else a newcomer gives.

FRAMEWORK_SLIPS = {
    "cuda:0": "that is a device: device='cuda:0', beside framework=",
    "cpu": "that is a device: device='cpu'",
    "bfloat16": "that is a dtype: dtype='bfloat16', beside framework=",
    "BF16": "that is a dtype",
    "a.safetensors": "a path comes first: load(path, framework)",
}


@pytest.mark.parametrize("given", FRAMEWORK_SLIPS)
def test_another_argument_in_the_place_of_the_framework(path: Path, given: str) -> None:
    with pytest.raises(errors.UsageError) as caught:
        mfload.load(path, given)
    assert FRAMEWORK_SLIPS[given] in str(caught.value)


@pytest.mark.parametrize("call", ["load", "open", "plan", "stream", "verify"])
@pytest.mark.parametrize("how", ["rb", "r", "bytes"])
def test_an_open_file_is_not_a_list_of_paths(path: Path, call: str, how: str) -> None:
    opened: Any = io.BytesIO(path.read_bytes()) if how == "bytes" else path.open(how)
    framework = {"framework": "numpy"} if call in ("load", "stream") else {}
    with (
        opened,
        pytest.raises(errors.UsageError, match=r"the bytes in it: file\.read"),
    ):
        getattr(mfload, call)(opened, **framework)


def test_an_open_file_in_a_list(path: Path) -> None:
    with path.open("rb") as opened, pytest.raises(errors.UsageError, match=r"file\.read"):
        mfload.load([opened], "numpy")  # type: ignore[list-item]


def test_the_signature_that_is_expected_is_python(path: Path) -> None:
    for call in (mfload.seeds, mfload.live_bytes, mfload.unpack, mfload.Report):
        with pytest.raises(errors.ArgumentError) as caught:
            call(*range(99))  # type: ignore[operator]
        assert "*" not in str(caught.value.expected)
        assert "by name" not in str(caught.value)


def test_what_is_no_path(path: Path) -> None:
    for given in (None, 5, np.ones(3), {"a": 1}, Path, object()):
        with pytest.raises(errors.UsageError, match=r"not a path: load\(path, framework\)"):
            mfload.load(given, "numpy")  # type: ignore[arg-type]
    with pytest.raises(errors.UsageError, match="at least one path"):
        mfload.load([], "numpy")


def test_swapped_arguments_are_told_without_jax(path: Path) -> None:
    code = (
        "import sys, mfload\nsys.modules['jax'] = None\n"
        "try: mfload.load_into(sys.argv[1], {})\n"
        "except mfload.errors.UsageError as error: print(error)\n"
        "try: mfload.load_into({}, sys.argv[1])\n"
        "except mfload.errors.FrameworkMissingError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0].startswith("the arguments are swapped: load_into(target, path)")
    assert "pip install 'jax>=" in said[1]


def test_an_opened_checkpoint_is_read_like_a_mapping(path: Path) -> None:
    with mfload.open(path) as opened:
        assert np.array_equal(opened["layers.0.q.weight"], MODEL["layers.0.q.weight"])
        assert dict(opened.items()).keys() == dict(opened).keys() == MODEL.keys()
        assert len(opened) == 2
        assert "layers.0.q.bias" in opened
        with pytest.raises(KeyError, match=r"a name like layers\.0\.q\.weight"):
            opened["layers.0.q.wieght"]
        with pytest.raises(KeyError, match="a name such as layers"):
            opened["else"]
    with pytest.raises(errors.UsageError, match="closed"):
        opened["layers.0.q.bias"]


def test_a_report_is_plotted_to_a_file(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = mfload.Report()
    mfload.load(path, "numpy", report=report)
    report.plot(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(errors.UsageError, match="can't write the plot"):
        report.plot(tmp_path / "x.xyz")
    with pytest.raises(errors.TargetError):
        report.plot(tmp_path / "none" / "x.png")


def test_a_name_that_is_not_there_has_python_suggest_one() -> None:
    code = "import mfload; mfload.lod"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "has no attribute 'lod'. Did you mean: 'load'?" in done.stderr


def test_a_value_that_can_not_be_printed() -> None:
    with pytest.raises(mfload.errors.ArgumentError, match=r"threads=…"):
        mfload.load("model", "numpy", threads=10**5000)  # type: ignore[call-overload]
