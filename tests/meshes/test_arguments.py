"""`names`, `verify`, `fallback`, `progress` and `report` mean the same in every call."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples

import mfload
from mfload import errors
from mfload.checking import manifest as manifests
from mfload.checking.manifest import Manifest

MODEL = {f"layers.{n}.w": np.arange(n, n + 4096, dtype="f4").reshape(64, 64) for n in range(6)}
TREE = {"layers": [{"w": np.zeros((64, 64), "f4")} for _ in range(6)]}
SMALL = mfload.Options(max_host_overhead=16 << 20)


def _flat(tree: Any) -> dict[str, Any]:
    layers = tree["layers"]
    layers = layers.values() if isinstance(layers, dict) else layers
    return {f"layers.{n}.w": np.asarray(each["w"]) for n, each in enumerate(layers)}


def _module() -> Any:
    torch = pytest.importorskip("torch")
    linear = [torch.nn.Linear(64, 64, bias=False) for _ in range(6)]
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(linear)})


def _into_module(path: Any, **given: Any) -> dict[str, Any]:
    mapping = {r"(layers\.\d+)\.w": r"\1.weight"}
    made: Any = mfload.load_into(_module(), path, mapping=mapping, **given)
    state = made.state_dict()
    return {name.removesuffix("eight"): each.numpy() for name, each in state.items()}


def _transposed(path: Any, **given: Any) -> dict[str, Any]:
    rules = {r"(layers\.\d+\.w)": mfload.rule(r"\1", transpose=(1, 0))}
    made = mfload.load_into(TREE, path, mapping=rules, **given)
    return {name: each.T for name, each in _flat(made).items()}


def _opened(path: Any, **given: Any) -> dict[str, Any]:
    with mfload.open(path, **given) as opened:
        return {name: opened.get_tensor(name) for name in opened.offset_keys()}


def _sliced(path: Any, **given: Any) -> dict[str, Any]:
    with mfload.open(path, **given) as opened:
        slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
        return {name: np.concatenate([each[:9], each[9:]]) for name, each in slices.items()}


def _lazy(path: Any, **given: Any) -> dict[str, Any]:
    with mfload.stream(path, lazy=True, **given) as stream:
        return {name: np.concatenate([each[:9], each[9:]]) for name, each in stream}


CALLS: dict[str, Callable[..., dict[str, Any]]] = {
    "load": mfload.load,
    "load, sharded": lambda path, **given: mfload.load(
        path, shardings=[(".", 0)], shard=(0, 1), **given
    ),
    "open": _opened,
    "open, slices": _sliced,
    "stream": lambda path, **given: dict(mfload.stream(path, **given)),
    "stream, small batches": lambda path, **given: dict(
        mfload.stream(path, options=SMALL, **given)
    ),
    "stream, lazy": _lazy,
    "stream, sharded": lambda path, **given: dict(
        mfload.stream(path, shardings=[(".", 0)], shard=(0, 1), **given)
    ),
    "load_into": lambda path, **given: _flat(mfload.load_into(TREE, path, **given)),
    "load_into, transposed": _transposed,
    "load_into, a module": _into_module,
    "restore": lambda path, **given: _flat(
        mfload.restore(path, framework="numpy", **given)
    ),
    "restore, a target": lambda path, **given: _flat(mfload.restore(path, TREE, **given)),
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "good").mkdir()
    return samples.save(tmp_path / "good" / "model.safetensors", MODEL)


@pytest.fixture
def manifest(path: Path) -> Path:
    mfload.verify(path, mode="write")
    return path.with_name("model.safetensors.checksums.json")


@pytest.fixture
def damaged(path: Path, tmp_path: Path) -> Path:
    """The checkpoint with a flipped bit in the fifth tensor."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) - 64 * 64 * 4 - 100] ^= 1
    (tmp_path / "damaged.safetensors").write_bytes(raw)
    return tmp_path / "damaged.safetensors"


@pytest.mark.parametrize("call", CALLS)
def test_verify_compares_what_is_read(call: str, path: Path, manifest: Path, damaged: Path) -> None:
    for given in (manifest, Manifest.read(manifest)):
        report = mfload.Report()
        samples.assert_same(CALLS[call](path, verify=given, report=report), MODEL)
        assert report.notes[-1] == "6 tensors verified against the manifest"
    with pytest.raises(errors.ChecksumError) as caught:
        CALLS[call](damaged, verify=manifest)
    assert caught.value.tensor == "layers.4.w"
    assert caught.value.file == os.fspath(damaged)
    del caught
    assert mfload.live_bytes() == 0


@pytest.mark.parametrize("call", CALLS)
def test_verify_refuses_another_checkpoint(call: str, path: Path, tmp_path: Path) -> None:
    other = samples.save(tmp_path / "other.safetensors", {"x": np.zeros(3, "f4")})
    mfload.verify(other, mode="write")
    with pytest.raises(errors.ChecksumError, match=r"none in the manifest|of other data"):
        CALLS[call](path, verify=f"{other}.checksums.json")


@pytest.mark.parametrize("prefer", ["path", "fallback"])
@pytest.mark.parametrize("call", CALLS)
def test_fallback_stands_in_for_a_missing_place(
    call: str, prefer: str, path: Path, tmp_path: Path
) -> None:
    places = (tmp_path / "none", path) if prefer == "path" else (path, tmp_path / "none")
    report = mfload.Report()
    given: dict[str, Any] = {"fallback": places[1], "prefer": prefer, "report": report}
    samples.assert_same(CALLS[call](places[0], **given), MODEL)
    assert "none failed after" in report.notes[0]
    assert "model.safetensors was loaded instead" in report.notes[0]
    with pytest.raises(errors.SourceNotFoundError):
        CALLS[call](tmp_path / "none", fallback=tmp_path / "neither")
    with pytest.raises(errors.UsageError, match="prefer"):
        CALLS[call](path, fallback=path, prefer="both")


@pytest.mark.parametrize("call", [each for each in CALLS if each != "stream, lazy"])
def test_fallback_stands_in_for_a_damaged_place(
    call: str, path: Path, manifest: Path, damaged: Path
) -> None:
    report = mfload.Report()
    made = CALLS[call](damaged, verify=manifest, fallback=path, report=report)
    samples.assert_same(made, MODEL)
    assert any("damaged.safetensors failed" in note for note in report.notes)
    assert any(note.endswith("verified against the manifest") for note in report.notes)


@pytest.mark.parametrize("call", CALLS)
def test_report_counts_what_is_read(call: str, path: Path) -> None:
    report = mfload.Report()
    CALLS[call](path, report=report)
    assert report.read_bytes >= sum(each.nbytes for each in MODEL.values())
    assert report.result_bytes == sum(each.nbytes for each in MODEL.values())
    assert report.stages["headers"] > 0
    first = report.read_bytes
    CALLS[call](path, report=report)  # It is emptied first.
    assert report.read_bytes == first


SOME = ["layers.1.w", "layers.3.w"]


@pytest.mark.parametrize("names", [r"[13]\.w$", SOME, iter(SOME), lambda name: name in SOME])
@pytest.mark.parametrize("call", ["load", "open", "open, slices", "stream", "stream, lazy"])
def test_names_chooses_tensors(call: str, names: Any, path: Path) -> None:
    names = iter(SOME) if isinstance(names, Iterator) else names
    report = mfload.Report()
    made = CALLS[call](path, names=names, report=report, fallback=path)
    assert list(made) == SOME
    assert report.result_bytes == sum(MODEL[name].nbytes for name in SOME)
    with pytest.raises(errors.TensorNotFoundError):
        CALLS[call](path, names="nothing")


def test_progress_of_a_stream_with_a_fallback(path: Path, tmp_path: Path) -> None:
    said: list[tuple[int, int]] = []
    show: Any = lambda done, total: said.append((done, total))  # noqa: E731
    dict(mfload.stream(tmp_path / "none", fallback=path, progress=show))
    assert said[-1] == (total := sum(each.nbytes for each in MODEL.values()), total)


class _Broken:
    """Has reads of a file fail from a byte on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, start: int) -> None:
        self.real, self.start = os.preadv, start
        self.inode = path.stat().st_ino
        monkeypatch.setattr(os, "preadv", self.preadv)

    def preadv(self, fd: int, buffers: Any, offset: int, *flags: int) -> int:
        if os.fstat(fd).st_ino == self.inode and offset >= self.start:
            raise OSError(5, "Input/output error")
        return self.real(fd, buffers, offset, *flags)


BIG = {f"t{n}": np.full((1 << 20,), n, "f4") for n in range(6)}
BOUND = mfload.Options(max_host_overhead=24 << 20, engine="pread")


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    one = samples.save(tmp_path / "one.safetensors", BIG)
    return one, samples.save(tmp_path / "two.safetensors", BIG)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_stream_goes_on_with_its_fallback(
    sharded: bool, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _Broken(monkeypatch, two[0], 13 << 20)
    given: dict[str, Any] = {"shardings": [(".", 0)], "shard": (0, 1)} if sharded else {}
    report = mfload.Report()
    came: list[str] = []
    order = sorted(BIG)
    call: Any = mfload.stream
    for name, tensor in call(
        two[0], fallback=two[1], order=order, report=report, options=BOUND, **given
    ):
        came.append(name)
        assert (tensor == BIG[name]).all()
    assert came == order
    assert "one.safetensors failed after " in report.notes[0]
    count = int(report.notes[0].partition(" failed after ")[2].split()[0])
    assert 1 <= count <= 3
    assert report.tensors == len(BIG)
    tensor = None
    assert mfload.live_bytes() == 0


def test_what_two_places_of_a_stream_verified_is_one_note(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mfload.verify(two[1], mode="write")
    known = mfload.Manifest.read(f"{two[1]}.checksums.json")
    _Broken(monkeypatch, two[0], 13 << 20)
    report = mfload.Report()
    given: Any = {"verify": known, "report": report, "options": BOUND}
    assert {*dict(mfload.stream(two[0], fallback=two[1], **given))} == {*BIG}
    assert [note for note in report.notes if "verified" in note] == [
        "6 tensors verified against the manifest"
    ]


def test_an_error_of_the_second_place_tells_that_of_the_first(
    two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(error: BaseException) -> bool:
        notes = getattr(error, "__notes__", [])
        return len(notes) == 1 and "the first place failed before: " in notes[0]

    none = tmp_path / "none"
    for call in CALLS.values():
        with pytest.raises(errors.SourceNotFoundError) as caught:
            call(none, fallback=tmp_path / "neither")
        assert said(caught.value)
        assert str(none) in caught.value.__notes__[0]
    opened, slow = mfload.open(two[0], fallback=none), mfload.open(two[0], fallback=two[1])
    stream = mfload.stream(two[0], fallback=none, options=BOUND)
    pickled = pickle.dumps(opened)
    broken = _Broken(monkeypatch, two[0], 13 << 20)
    for read in (lambda: dict(stream), lambda: opened["t5"]):
        with pytest.raises(errors.SourceNotFoundError) as caught:
            read()
        assert said(caught.value)
        assert "Input/output error" in caught.value.__notes__[0]
    two[0].unlink()
    with pytest.raises(errors.SourceNotFoundError) as caught:
        pickle.loads(pickled)
    assert said(caught.value)
    broken.inode = two[1].stat().st_ino  # The second place can be opened, and not read.
    with pytest.raises(errors.ReadError) as caught:
        slow["t5"]
    assert said(caught.value)


def test_a_report_of_threads_that_turn_to_a_fallback_loses_nothing(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one adds what it read to the report, another turns to the second place."""
    adding, turned, held = threading.Event(), threading.Event(), list[Any]()

    class Slow(mfload.Report):
        def __setattr__(self, name: str, value: Any) -> None:
            late = name in ("stages", "notes") and threading.current_thread().name == "adder"
            if late and self is held[0]:
                adding.set()
                turned.wait(0.5)
            super().__setattr__(name, value)

    report = Slow()
    held.append(report)
    with mfload.open(two[0], fallback=two[1], report=report) as opened:
        adder = threading.Thread(target=lambda: opened["t0"], name="adder")
        _Broken(monkeypatch, two[0], 13 << 20)
        adder.start()
        assert adding.wait(10)
        assert (opened["t5"] == 5).all()
        turned.set()
        adder.join()
    assert len([note for note in report.notes if "the fallback is read instead" in note]) == 1
    headers = [span for span in report.timeline if span.kind == "headers"]
    assert report.stages["headers"] == pytest.approx(sum(s.stop - s.start for s in headers))
    assert len({span.start for span in headers}) == len(headers) >= 2


def test_a_checkpoint_that_is_closed_while_it_turns_to_its_fallback_leaves_nothing_open(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mfload.loading import lazy

    opened = mfload.open(two[0], fallback=two[1])
    _Broken(monkeypatch, two[0], 0)
    real, made = lazy.opened, list[Any]()

    def closed_meanwhile(*args: Any) -> Any:
        made.append(real(*args))
        opened.close()
        return made[0]

    monkeypatch.setattr(lazy, "opened", closed_meanwhile)
    with pytest.raises(errors.UsageError, match="closed"):
        opened["t0"]
    assert made[0].closed


def test_a_stream_that_is_closed_or_dropped_leaves_nothing(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _Broken(monkeypatch, two[0], 13 << 20)
    for count in (1, 5):
        stream = mfload.stream(two[0], fallback=two[1], options=BOUND)
        for _ in range(count):
            next(stream)
        stream.close()
        with pytest.raises(StopIteration):
            next(stream)
        again = mfload.stream(two[0], fallback=two[1], options=BOUND)
        for _ in range(count):
            next(again)
        del again
    for thread in threading.enumerate():
        if thread.name.startswith("mfload"):
            thread.join(10)
    assert mfload.live_bytes() == 0


def test_errors_of_arguments_go_to_no_fallback(path: Path, tmp_path: Path) -> None:
    for call in CALLS.values():
        with pytest.raises(errors.TensorNotFoundError):
            call(path, fallback=tmp_path / "none", names="nothing")


def test_an_opened_checkpoint_turns_to_its_fallback(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with mfload.open(two[0], fallback=two[1]) as opened:
        assert (opened["t0"] == 0).all()
        part = opened.get_slice("t4")
        _Broken(monkeypatch, two[0], 0)
        assert (part[5:8] == 4).all()
        assert (opened["t5"] == 5).all()
        assert (opened.get_tensors(["t2"])["t2"] == 2).all()
        again = pickle.loads(pickle.dumps(opened))
        assert (again["t3"] == 3).all()
        assert len([each for each in caplog.records if "one.safetensors failed" in each.message])
    with pytest.raises(errors.UsageError, match="closed"):
        opened.get_tensor("t1")


def test_an_opened_checkpoint_of_some_names(path: Path) -> None:
    with mfload.open(path, names=SOME) as opened:
        assert opened.keys() == opened.offset_keys() == SOME
        assert list(opened.get_tensors()) == SOME
        assert len(opened) == 2
        assert "layers.0.w" not in opened
        with pytest.raises(errors.TensorNotFoundError):
            opened.get_tensor("layers.0.w")
        with pytest.raises(errors.TensorNotFoundError):
            opened.get_slice("layers.0.w")
        assert opened.metadata() == mfload.open(path).metadata()
        assert pickle.loads(pickle.dumps(opened)).keys() == SOME


def test_shards_that_no_name_needs_are_not_opened(tmp_path: Path) -> None:
    mfload.save(MODEL, f"{tmp_path}/", max_shard_size=64 * 64 * 4 * 2)
    for shard in sorted(tmp_path.glob("model-*"))[1:]:
        shard.unlink()
    with mfload.open(tmp_path, names=["layers.0.w"]) as opened:
        samples.assert_same(dict(opened.items()), {"layers.0.w": MODEL["layers.0.w"]})


def test_a_damaged_module_keeps_its_values_if_atomic(manifest: Path, damaged: Path) -> None:
    module = _module()
    before = {name: each.clone() for name, each in module.state_dict().items()}
    given: dict[str, Any] = {"mapping": {r"(layers\.\d+)\.w": r"\1.weight"}, "verify": manifest}
    with pytest.raises(errors.ChecksumError):
        mfload.load_into(module, damaged, atomic=True, **given)
    assert all((each == before[name]).all() for name, each in module.state_dict().items())
    with pytest.raises(errors.ChecksumError) as caught:
        mfload.load_into(module, damaged, **given)
    assert "some may hold new values" in caught.value.__notes__[0]


def test_a_tensor_that_goes_to_several_leaves_is_verified(tmp_path: Path) -> None:
    fused = np.arange(48 * 8, dtype="f4").reshape(48, 8)
    path = samples.save(tmp_path / "m.safetensors", {"qkv": fused})
    mfload.verify(path, mode="write")
    target = {name: np.zeros((8, size), "f4") for name, size in (("q", 32), ("k", 8), ("v", 8))}
    mapping = {"qkv": mfload.rule(["q", "k", "v"], split=(0, [32, 8, 8]), transpose=(1, 0))}
    given: dict[str, Any] = {"mapping": mapping, "verify": f"{path}.checksums.json"}
    made = mfload.load_into(target, path, **given)
    parts = zip("qkv", np.split(fused, [32, 40]), strict=True)
    samples.assert_same(made, {name: np.ascontiguousarray(each.T) for name, each in parts})
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(errors.ChecksumError):
        mfload.load_into(target, path, **given)


def test_plan_and_abstract_take_a_fallback(path: Path, tmp_path: Path) -> None:
    assert mfload.plan(tmp_path / "none", fallback=path).read_bytes > 0
    pytest.importorskip("jax")
    assert len(mfload.abstract(tmp_path / "none", fallback=path)) == 6


def test_a_run_of_a_lazy_tensor_is_compared_as_the_tensor(
    path: Path, manifest: Path, damaged: Path
) -> None:
    torch = pytest.importorskip("torch")
    target = torch.zeros(10, 64)
    for name, tensor in mfload.stream(path, "torch", lazy=True, verify=manifest):
        target.copy_(tensor[20:30])
        assert (target.numpy() == MODEL[name][20:30]).all()
    with mfload.stream(damaged, "torch", lazy=True, verify=manifest) as stream:
        tensors = dict(stream)
        target.copy_(tensors["layers.3.w"][:10])
        with pytest.raises(errors.ChecksumError, match=r"layers\.4\.w"):
            target.copy_(tensors["layers.4.w"][:10])


def test_parts_are_compared_within_the_memory_limit(two: tuple[Path, Path]) -> None:
    mfload.verify(two[0], mode="write")
    options = mfload.Options(max_host_overhead=1 << 20, threads=2)
    manifest = f"{two[0]}.checksums.json"
    report = mfload.Report()
    with mfload.open(two[0], verify=manifest, report=report, options=options) as opened:
        assert (opened.get_slice("t3")[7:9] == 3).all()
        assert (opened.get_slice("t3")[70:90] == 3).all()
    assert report.notes == ("1 tensor verified against the manifest",)


@pytest.fixture
def half(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint whose second shard is damaged, and a place with other offsets and all of it."""
    folder = tmp_path / "half"
    folder.mkdir()
    shards = [
        {f"{s}{n}": np.full(8, 100 * k + n, "f4") for n in range(4)} for k, s in enumerate("ab")
    ]
    for number, shard in enumerate(shards):
        samples.save(folder / f"{number}.safetensors", {**shard, f"rest{number}": np.zeros(999)})
    names = {name: f"{n}.safetensors" for n, shard in enumerate(shards) for name in shard}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    (folder / "1.safetensors").write_bytes(b"\xff" * 400)
    one = {name: shards["ab".index(name[0])][name] for name in sorted(names, reverse=True)}
    return folder, samples.save(tmp_path / "whole.safetensors", one)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_what_a_damaged_shard_holds_comes_from_the_fallback(
    half: tuple[Path, Path], framework: Any
) -> None:
    """By the rows of that place: those of the first one lie elsewhere in its files."""
    pytest.importorskip(framework)
    takes: list[Callable[[Any, str], Any]] = [
        lambda opened, name: opened.get_tensor(name),
        lambda opened, name: opened[name],
        lambda opened, name: opened.get_slice(name)[:],
        lambda opened, name: opened.get_tensors([name])[name],
    ]
    for take in takes:
        for name, value in (("b3", 103), ("a1", 1), ("b0", 100)):
            with mfload.open(half[0], framework, fallback=half[1]) as opened:
                assert np.asarray(take(opened, name)).tolist() == [value] * 8


def test_all_of_an_opened_checkpoint_turns_to_its_fallback(half: tuple[Path, Path]) -> None:
    opened = mfload.open(half[0], fallback=half[1])
    assert len(opened) == 8
    with mfload.open(half[0], fallback=half[1]) as opened:
        assert "zz" not in opened
        assert "b3" in opened
    opened = mfload.open(half[0], fallback=half[1])
    assert "b3" in opened._repr_html_()
    shutil.rmtree(half[0])
    again = pickle.loads(pickle.dumps(opened))
    assert again["b2"].tolist() == [102] * 8


def test_the_place_that_is_not_preferred_is_the_fallback(two: tuple[Path, Path]) -> None:
    with mfload.open(two[0], fallback=two[1], prefer="fallback") as opened:
        assert (opened["t3"] == 3).all()
        os.truncate(two[1], 1000)
        assert (opened["t4"] == 4).all()


def test_lazy_tensors_outlive_the_stream_that_has_a_fallback(two: tuple[Path, Path]) -> None:
    tensors = dict(mfload.stream(two[0], lazy=True, fallback=two[1]))
    assert (np.asarray(tensors["t3"][:]) == 3).all()


def test_names_of_an_iterator_are_for_each_attempt(path: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"fallback": path}
    assert list(mfload.load(tmp_path / "none", names=iter(SOME), **given)) == SOME
    assert mfload.plan(tmp_path / "none", names=iter(SOME), **given).tensors == len(SOME)


def test_damage_that_is_found_late_is_no_timeout(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = manifests.others

    def slow(*given: Any) -> Any:
        time.sleep(0.05)
        return others(*given)

    monkeypatch.setattr(manifests, "others", slow)
    mfload.verify(two[0], mode="write")
    data = bytearray(two[0].read_bytes())
    data[-5] ^= 1
    two[0].write_bytes(data)
    given: dict[str, Any] = {"verify": f"{two[0]}.checksums.json"}
    with mfload.open(two[0], options=mfload.Options(timeout=0.3), **given) as opened:
        last = opened.offset_keys()[-1]
        time.sleep(0.4)
        with pytest.raises(errors.ChecksumError):
            opened.get_tensor(last)


@pytest.mark.parametrize("kind", ["jax", "numpy", "plain"])
def test_numbers_of_a_tree_are_no_tensors_of_a_manifest(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "state.safetensors"
    mfload.save({"a": {"step": 7, "w": np.ones((3, 4), "f4")}}, path, checksums=True)
    zero: Any = {"plain": 0, "numpy": np.zeros((), "i4")}.get(kind)
    if zero is None:
        zero = pytest.importorskip("jax.numpy").zeros((), "int32")
    target = {"a": {"step": zero, "w": np.zeros((3, 4), "f4")}}
    made: Any = mfload.restore(path, target, verify=f"{path}.checksums.json")
    assert made["a"]["step"] == 7
    assert (made["a"]["w"] == 1).all()
