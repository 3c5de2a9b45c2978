"""Bundles and back: bit-equal, readable by others, refused by name, whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import samples
from hypothesis import given, settings, strategies as st

import mfload
from mfload import errors
from mfload.checking import copying
from mfload.io import buffers
from mfload.ondemand import bundle, bundles, unbundle
from mfload.planning import memory

RULES: dict[str, Any] = {
    "up": r"layers\.(\d+)\.fc1\.weight",
    "down": r"layers\.(\d+)\.fc2\.weight",
    "gate": r"layers\.(\d+)\.gate\.weight",
}
_NAMES = {np.dtype(kind): name for name, kind in samples.NUMPY.items()}
PLAIN: dict[str, Any] = {"up": RULES["up"], "down": RULES["down"]}


def weights(neurons: int, width: int, dtype: Any, layers: Any = (0,), gate: bool = False) -> Any:
    made: dict[str, Any] = {}
    for layer in layers:
        stem = f"m.layers.{layer}"
        made[f"{stem}.fc2.weight"] = samples.numbers((width, neurons), dtype, 3 * layer)
        made[f"{stem}.fc1.weight"] = samples.numbers((neurons, width), dtype, 3 * layer + 1)
        made[f"{stem}.fc1.bias"] = samples.numbers((neurons,), np.float32, layer)
        if gate:
            made[f"{stem}.gate.weight"] = samples.numbers((neurons, width), dtype, 3 * layer + 2)
    return made


def header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and the header; its tensors in order of offset."""
    raw = path.read_bytes()
    nbytes = int.from_bytes(raw[:8], "little")
    return 8 + nbytes, json.loads(raw[8 : 8 + nbytes])


def write(path: Path, arrays: dict[str, Any], metadata: dict[str, str] | None) -> None:
    """A file with the tensors in this order, aligned or not."""
    said: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        dtype = _NAMES[array.dtype]
        said[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(said).encode()
    raw = b"".join(array.tobytes() for array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw)


def rows(path: Path) -> list[Any]:
    """Names, dtypes, shapes and bytes, as they lie in the file; `...` stands for the metadata."""
    start, said = header(path)
    raw, metadata = path.read_bytes()[start:], said.pop("__metadata__", None)
    made: list[Any] = [metadata]
    for name, info in said.items():
        low, high = info["data_offsets"]
        made.append((name, info["dtype"], info["shape"], raw[low:high]))
    return made


_DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.int8, np.float64, np.complex64)


@settings(max_examples=60, deadline=None)
@given(
    neurons=st.integers(1, 40), width=st.integers(1, 70), dtype=st.sampled_from(_DTYPES),
    layers=st.sets(st.integers(0, 30), min_size=1, max_size=4), gate=st.booleans(),
    others=st.dictionaries(
        st.text(max_size=5).filter(lambda name: "bundle" not in name),
        st.tuples(st.sampled_from(_DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=5,
    ),
    metadata=st.none() | st.dictionaries(st.text(max_size=4), st.text(max_size=4), min_size=1),
    order=st.randoms(use_true_random=False), limit=st.none() | st.integers(1, 20_000),
    block=st.sampled_from([100, 1000, 4 << 20]),
)  # fmt: skip
def test_there_and_back(
    tmp_path_factory: pytest.TempPathFactory, neurons: int, width: int, dtype: Any,
    layers: set[int], gate: bool, others: dict[str, Any], metadata: dict[str, str] | None,
    order: Any, limit: int | None, block: int,
) -> None:  # fmt: skip
    where = tmp_path_factory.mktemp("there")
    arrays = weights(neurons, width, dtype, layers, gate)
    made = {name: samples.numbers(tuple(shape), kind) for name, (kind, shape) in others.items()}
    arrays |= {name: array for name, array in made.items() if name != "__metadata__"}
    names = list(arrays)
    order.shuffle(names)
    arrays = {name: arrays[name] for name in names}
    source = where / "source.safetensors"
    write(source, arrays, metadata)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "BLOCK", block)
        patch.setattr(memory, "OVERHEAD", 56 * block)
        there = where / "there" / "a.safetensors"
        done = bundle(source, there, **(RULES if gate else PLAIN), max_shard_size=limit)
        back = unbundle(done.files[-1], where / "back.safetensors")
    assert rows(where / "back.safetensors") == rows(source)
    assert str(back).startswith("unbundled")
    assert str(done).startswith("bundled")
    found = mfload.load(done.files[-1], "numpy")
    for layer in layers:
        stem = f"m.layers.{layer}"
        parts = [arrays[f"{stem}.fc1.weight"], arrays[f"{stem}.fc2.weight"].T]
        parts += [arrays[f"{stem}.gate.weight"]] if gate else []
        for number, part in enumerate(parts):
            assert samples.same(found[f"m.layers.{layer}.bundle"][:, number], part)
    kept = {name: array for name, array in arrays.items() if not name.endswith("weight")}
    samples.assert_same({name: found[name] for name in kept}, kept)
    assert len(found) == len(kept) + len(layers)
    for each in done.files if limit is None else ():
        start, said = header(Path(each))
        assert start % bundles.ALIGN == 0
        nbytes = neurons * len(parts) * width * np.dtype(dtype).itemsize
        for layer in layers:
            low, _ = said[f"m.layers.{layer}.bundle"]["data_offsets"]
            assert (start + low) % min(bundles.ALIGN, nbytes & -nbytes) == 0


def test_the_reference_reads_it(tmp_path: Path) -> None:
    arrays = weights(64, 32, np.float32, (0, 1)) | {"embed": samples.numbers((5, 32))}
    samples.save(tmp_path / "a.safetensors", arrays, {"format": "pt"})
    bundle(tmp_path / "a.safetensors", tmp_path / "b.safetensors", **PLAIN)
    with safetensors.safe_open(tmp_path / "b.safetensors", "numpy") as opened:
        assert opened.metadata()["format"] == "pt"
        for layer in (0, 1):
            found = opened.get_tensor(f"m.layers.{layer}.bundle")
            assert samples.same(found[:, 0], arrays[f"m.layers.{layer}.fc1.weight"])
            assert samples.same(found[:, 1], arrays[f"m.layers.{layer}.fc2.weight"].T)
        assert samples.same(opened.get_tensor("embed"), arrays["embed"])
    # The reference has another order of names than mfload.
    unbundle(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    assert rows(tmp_path / "c.safetensors") == rows(tmp_path / "a.safetensors")


def test_bundles_come_first_by_how_they_can_be_aligned(tmp_path: Path) -> None:
    arrays = {"embed": samples.numbers((64, 64))}
    arrays |= weights(3, 40, np.float32, (0,)) | weights(128, 16, np.float32, (1,))
    arrays |= weights(16, 96, np.float32, (2,))
    mfload.save(arrays, tmp_path / "a.safetensors")
    bundle(tmp_path / "a.safetensors", tmp_path / "b.safetensors", **PLAIN)
    start, said = header(tmp_path / "b.safetensors")
    names = [name for name in said if name != "__metadata__"]
    assert names[:3] == [f"m.layers.{layer}.bundle" for layer in (1, 2, 0)]
    assert names[3] == "embed"
    places = [start + said[name]["data_offsets"][0] for name in names[:3]]
    assert [places[0] % bundles.ALIGN, places[1] % 4096, places[2] % 64] == [0, 0, 0]


def test_shards_and_other_formats(tmp_path: Path) -> None:
    arrays = weights(32, 16, np.float16, (0, 1), gate=True)
    mfload.save(arrays, f"{tmp_path}/shards/", max_shard_size=3000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) == 3
    bundle(tmp_path / "shards", tmp_path / "b.safetensors", **RULES)
    np.savez(tmp_path / "a.npz", **arrays)
    bundle(tmp_path / "a.npz", tmp_path / "c.safetensors", **RULES)
    for each in "bc":
        unbundle(tmp_path / f"{each}.safetensors", tmp_path / f"{each}{each}.safetensors")
        samples.assert_same(mfload.load(tmp_path / f"{each}{each}.safetensors", "numpy"), arrays)
    np.savez_compressed(tmp_path / "d.npz", **arrays)
    with pytest.raises(errors.UsageError, match="encoded") as caught:
        bundle(tmp_path / "d.npz", tmp_path / "d.safetensors", **RULES)
    assert caught.value.tensor == "m.layers.0.fc1.weight"


def test_checksums_go_along(tmp_path: Path) -> None:
    names = [tmp_path / f"{name}.safetensors" for name in "abcd"]
    mfload.save(weights(64, 32, np.float32), names[0])
    mfload.verify(names[0], mode="write", checksums="both")
    bundle(names[0], names[1], **PLAIN)
    unbundle(names[1], names[2])
    assert all(mfload.verify(name, mode="check").ok for name in names[:3])
    with names[0].open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"abc")
    with pytest.raises(errors.ChecksumError) as caught:
        bundle(names[0], names[3], **PLAIN)
    assert caught.value.tensor == "m.layers.0.fc1.bias"
    assert not names[3].exists()


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A layer of 48 MiB goes through 8 MiB."""
    arrays = weights(6144, 1024, np.float32)
    mfload.save(arrays, tmp_path / "a.safetensors")
    del arrays
    limit = mfload.Options(max_host_overhead=8 << 20, threads=1)
    buffers.peak_bytes(reset=True)
    bundle(tmp_path / "a.safetensors", tmp_path / "b.safetensors", **PLAIN, options=limit)
    unbundle(tmp_path / "b.safetensors", tmp_path / "c.safetensors", options=limit)
    assert buffers.peak_bytes() < 24 << 20  # Slots of readers and writers are beside it.
    assert rows(tmp_path / "c.safetensors") == rows(tmp_path / "a.safetensors")


def _with(**changed: Any) -> dict[str, Any]:
    arrays = weights(8, 4, np.float32, (0, 1))
    return {name: array for name, array in (arrays | changed).items() if array is not None}


@pytest.mark.parametrize(
    ("arrays", "rules", "kind", "tensor", "text"),
    [
        (_with(**{"m.layers.1.fc2.weight": None}), {}, errors.UsageError,
         "m.layers.1.fc1.weight", "layer 1 has no tensor that down matches"),
        (_with(**{"m.layers.1.fc1.weight": None}), {}, errors.UsageError,
         "m.layers.1.fc2.weight", "layer 1 has no tensor that up matches"),
        (_with(), {"gate": RULES["gate"]}, errors.UsageError,
         "m.layers.0.fc1.weight", "layer 0 has no tensor that gate matches"),
        (_with(**{"n.layers.1.fc1.weight": np.ones(3)}), {}, errors.UsageError,
         "n.layers.1.fc1.weight", "two tensors of layer 1"),
        (_with(**{"m.layers.1.fc2.weight": np.ones((8, 4), np.float32)}), {},
         errors.UnsupportedShapeError, "m.layers.1.fc2.weight", "do not fit each other"),
        (_with(**{"m.layers.1.fc1.weight": np.ones((8, 4, 1), np.float32)}), {},
         errors.UnsupportedShapeError, "m.layers.1.fc1.weight", "do not fit each other"),
        (_with(**{"m.layers.0.fc2.weight": np.ones((4, 8), np.float16)}), {},
         errors.UnsupportedDtypeError, "m.layers.0.fc2.weight", "have one dtype"),
        (_with(**{"m.layers.0.bundle": np.ones(2)}), {}, errors.UsageError,
         "m.layers.0.bundle", "has the name that the bundle would have"),
        (_with(), {"down": RULES["up"]}, errors.UsageError, "m.layers.0.fc1.weight", "one tensor"),
        (_with(), {"up": r"(layers)\.\d+\.fc1"}, errors.UsageError, "m.layers.0.fc1.weight",
         "not the number of a layer"),
        (_with(), {"up": r"layers\.\d+\.fc1"}, errors.UsageError, None, "where the number"),
        (_with(), {"up": None}, errors.UsageError, None, "malformed regular"),
        (_with(), {"up": r"layers\.(\d+\.fc1"}, errors.UsageError, None, "malformed regular"),
        (_with(), {"up": r"h\.(\d+)\.fc1", "down": r"h\.(\d+)\.fc2"},
         errors.TensorNotFoundError, None, "no tensor matches"),
    ],
)  # fmt: skip
def test_what_is_refused(
    tmp_path: Path, arrays: Any, rules: dict[str, Any], kind: Any, tensor: str | None, text: str
) -> None:
    mfload.save(arrays, tmp_path / "a.safetensors")
    with pytest.raises(kind, match=text) as caught:
        bundle(tmp_path / "a.safetensors", tmp_path / "b.safetensors", **{**PLAIN, **rules})
    assert caught.value.tensor == tensor
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize("dtype", ["F4", "X9"])
def test_packed_and_unknown_dtypes(tmp_path: Path, dtype: str) -> None:
    shape, raw = (4, 4), bytes(8)
    names = ("layers.0.fc1.weight", "layers.0.fc2.weight")
    samples.save_raw(tmp_path / "a.safetensors", [(name, dtype, shape, raw) for name in names])
    with pytest.raises(errors.UnsupportedDtypeError, match=dtype) as caught:
        bundle(tmp_path / "a.safetensors", tmp_path / "b.safetensors", **PLAIN)
    assert caught.value.tensor == names[0]


def test_tensors_of_unknown_dtypes_stay(tmp_path: Path) -> None:
    arrays = weights(4, 4, np.float32)
    raw = [(n, "F32", a.shape, a.tobytes()) for n, a in arrays.items() if n.endswith("weight")]
    samples.save_raw(tmp_path / "a.safetensors", [*raw, ("new", "X9", (3,), b"12345")])
    bundle(tmp_path / "a.safetensors", tmp_path / "b.safetensors", **PLAIN)
    unbundle(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    assert rows(tmp_path / "c.safetensors") == rows(tmp_path / "a.safetensors")


def test_bundled_twice_and_not_at_all(tmp_path: Path) -> None:
    mfload.save(weights(8, 4, np.float32), tmp_path / "a.safetensors")
    with pytest.raises(errors.FormatError, match="has no bundles"):
        unbundle(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    bundle(tmp_path / "a.safetensors", tmp_path / "b.safetensors", **PLAIN)
    with pytest.raises(errors.UsageError, match="bundled already"):
        bundle(tmp_path / "b.safetensors", tmp_path / "c.safetensors", **PLAIN)
    with pytest.raises(errors.TargetExistsError):
        bundle(tmp_path / "a.safetensors", tmp_path / "b.safetensors", **PLAIN)
    # A file can take the place of what it is made of.
    bundle(tmp_path / "a.safetensors", tmp_path / "a.safetensors", **PLAIN, overwrite=True)
    assert rows(tmp_path / "a.safetensors") == rows(tmp_path / "b.safetensors")


def _said(**changed: Any) -> str:
    parts = [["m.layers.0.fc1.weight", 0], ["m.layers.0.fc2.weight", 1]]
    return json.dumps({"m.layers.0.bundle": {"layer": 0, "parts": parts} | changed})


HOSTILE: list[str] = [
    "", "[]", "null", "{", '{"x": 3}', json.dumps({"": {"layer": 0, "parts": []}}),
    _said(layer="0"), _said(layer=True), _said(parts=[["a", 0]]), _said(parts="ab"),
    _said(parts=[["a", 0], ["b", 1], ["c", 2]]), _said(parts=[["a", 0], ["b", 0]]),
    _said(parts=[["a", -1], ["b", 1]]), _said(parts=[["a", 0], ["b", 99]]),
    _said(parts=[["a", 0], ["a", 1]]), _said(parts=[["a", 0], ["m.layers.0.fc1.bias", 1]]),
    _said(parts=[["a", 0], [1, 1]]), _said(parts=[["a", 0], ["b", 1.0]]),
    json.dumps({"m.layers.0.fc1.bias": {"layer": 0, "parts": [["a", 0], ["b", 1]]}}),
    "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_descriptions(tmp_path: Path, text: str) -> None:
    arrays = {
        "m.layers.0.bundle": np.ones((8, 2, 4), np.float32),
        "m.layers.0.fc1.bias": np.ones(8),
    }
    mfload.save(arrays, tmp_path / "a.safetensors", metadata={bundles.KEY: text})
    with pytest.raises(errors.FormatError) as caught:
        unbundle(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert caught.value.file == os.fspath(tmp_path / "a.safetensors")
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize(("dtype", "width"), [("F4", 1), ("F4", 4), ("X9", 4)])
def test_bundles_whose_elements_are_no_whole_bytes(tmp_path: Path, dtype: str, width: int) -> None:
    """`bundle` writes none; rows of one of them end within a byte."""
    tensors = [("m.layers.0.bundle", dtype, (8, 2, width), bytes(8 * width))]
    samples.save_raw(tmp_path / "a.safetensors", tensors, metadata={bundles.KEY: _said()})
    with pytest.raises(errors.FormatError, match="whole bytes") as caught:
        unbundle(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert caught.value.tensor == "m.layers.0.bundle"
    with pytest.raises((errors.FormatError, errors.UnsupportedDtypeError), match=dtype):
        mfload.ondemand.NeuronCache(tmp_path / "a.safetensors")


def test_two_bundles_of_one_layer(tmp_path: Path) -> None:
    each = {"layer": 0, "parts": [["a", 0], ["b", 1]]}
    arrays = {name: np.ones((8, 2, 4), np.float32) for name in ("x.bundle", "y.bundle")}
    said = json.dumps(dict.fromkeys(arrays, each))
    mfload.save(arrays, tmp_path / "a.safetensors", metadata={bundles.KEY: said})
    with pytest.raises(errors.FormatError, match="one bundle of each layer"):
        unbundle(tmp_path / "a.safetensors", tmp_path / "b.safetensors")


def test_it_goes_on_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written before it is not written again, and no file has its name until the end."""
    monkeypatch.setattr(copying, "BLOCK", 64 << 10)
    monkeypatch.setattr(memory, "OVERHEAD", 2 << 20)
    arrays = weights(512, 256, np.float32, (0, 1))
    mfload.save(arrays, tmp_path / "a.safetensors")

    def interrupt(at: int, of: int) -> None:
        if at > of // 3:
            raise KeyboardInterrupt

    call: Callable[..., Any] = bundle
    given = (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with pytest.raises(KeyboardInterrupt):
        call(*given, **PLAIN, progress=interrupt)
    assert not (tmp_path / "b.safetensors").exists()
    done = call(*given, **PLAIN)
    assert any("went on after" in note for note in done.notes)
    # Other rules make another file, with which nothing is gone on.
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors"]
    unbundle(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    assert rows(tmp_path / "c.safetensors") == rows(tmp_path / "a.safetensors")
