"""`mfload.save`: what is written is what the reference reads, and what a second save writes."""

from __future__ import annotations

import errno
import gc
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import pytest
import reference
import safetensors
import samples
import scenarios
from hypothesis import strategies as st

import mfload
from mfload import dtypes, errors
from mfload.io import buffers
from mfload.saving import drafts, save as saving

KINDS = [row.numpy for row in dtypes.TABLE.values() if row.numpy is not None]
NAMES = st.text(max_size=12).filter(lambda name: name != "__metadata__")
METADATA = st.none() | st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3)


@st.composite
def array(draw: st.DrawFn) -> Any:
    """Of any dtype, small, and not always contiguous."""
    kind = draw(st.sampled_from(KINDS))
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    how = draw(st.sampled_from(["plain", "turned", "stepped", "fortran", "spread"]))
    seed = draw(st.integers(0, 1000))
    if how == "turned":
        return samples.numbers(shape, kind, seed).T[::-1] if shape else samples.numbers((), kind)
    if how == "stepped" and shape:
        return samples.numbers((*shape[:-1], 2 * shape[-1]), kind, seed)[..., ::2]
    if how == "fortran":
        return np.asfortranarray(samples.numbers(shape, kind, seed))
    if how == "spread":
        return np.broadcast_to(samples.numbers((1,), kind, seed), (*shape, 3))
    return samples.numbers(shape, kind, seed)


ARRAYS = st.dictionaries(NAMES, array(), max_size=7)


def raw(path: Path | str) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(Path(path).iterdir())}


def as_stored(arrays: dict[str, Any]) -> dict[str, reference.Tensor]:
    rows = {row.numpy: name for name, row in dtypes.TABLE.items()}
    return {
        name: reference.Tensor(rows[value.dtype], value.shape, value.tobytes())
        for name, value in arrays.items()
    }


class TestRoundTrip:
    @hypothesis.given(ARRAYS, METADATA, st.sampled_from([8, 64, 4096]))
    def test_the_reference_reads_every_file(
        self, arrays: dict[str, Any], metadata: dict[str, str] | None, align: int
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "f.safetensors")
            saved = mfload.save(arrays, path, metadata=metadata, align=align)
            content = Path(path).read_bytes()
            assert reference.read(content) == as_stored(arrays)
            start = 8 + int.from_bytes(content[:8], "little")
            assert start % align == 0
            assert start - len(content[:start].rstrip(b" ")) < align
            with safetensors.safe_open(path, "np") as opened:
                assert opened.metadata() == metadata
            assert saved.bytes == len(content)
            assert saved.tensors == len(arrays)

    @hypothesis.given(ARRAYS, METADATA, st.none() | st.integers(1, 300))
    def test_saving_what_was_loaded_changes_nothing(
        self, arrays: dict[str, Any], metadata: dict[str, str] | None, limit: int | None
    ) -> None:
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
            saved = mfload.save(arrays, first, metadata=metadata, max_shard_size=limit)
            loaded = mfload.load(first, framework="numpy")
            samples.assert_same(loaded, {k: np.asarray(v, order="C") for k, v in arrays.items()})
            with mfload.open(first) as opened:
                assert opened.metadata() == metadata
            again = mfload.save(loaded, second, metadata=metadata, max_shard_size=limit)
            assert raw(first) == raw(second)
            names = [os.path.basename(file) for file in saved.files]
            assert names == [os.path.basename(file) for file in again.files]
            assert sorted(names) == list(raw(first))
            for name in names[: None if len(names) == 1 else -1]:
                reference.read(Path(first, name).read_bytes())

    @pytest.mark.parametrize("name", ["F4", "F6_E2M3", "F6_E3M2"])
    def test_packed_types(self, name: str, tmp_path: Path) -> None:
        kind = {"F4": ml_dtypes.float4_e2m1fn, "F6_E2M3": ml_dtypes.float6_e2m3fn,
                "F6_E3M2": ml_dtypes.float6_e3m2fn}[name]  # fmt: skip
        numbers = np.arange(48).reshape(6, 8).astype(np.float32).astype(kind)
        mfload.save({"w": numbers}, tmp_path)
        (tensor,) = reference.read((tmp_path / "model.safetensors").read_bytes()).values()
        assert (tensor.dtype, tensor.shape) == (name, (6, 8))
        found = mfload.load(tmp_path, framework="numpy")["w"]
        assert mfload.unpack(found, name, [6, 8]).tobytes() == numbers.tobytes()

    def test_large_tensors_by_threads(self, tmp_path: Path) -> None:
        block = drafts.BLOCK
        arrays = {
            f"w{n}": np.random.default_rng(n).integers(0, 256, size, np.uint8)
            for n, size in enumerate([3 * block + 17, 5, block, 64, 2 * block - 4096, 999_999])
        }
        arrays["turned"] = np.random.default_rng(9).standard_normal((1500, 700)).T
        for limit in (None, "5MB"):
            mfload.save(arrays, tmp_path, max_shard_size=limit, overwrite=True)
            samples.assert_same(mfload.load(tmp_path, framework="numpy"), arrays)

    def test_many_small_tensors_are_few_writes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        arrays = {f"layer.{n}.w": np.full(512, n, np.uint16) for n in range(20_000)}
        writes: list[int] = []
        real = os.pwritev
        monkeypatch.setattr(os, "pwritev", lambda fd, v, at: writes.append(at) or real(fd, v, at))
        saved = mfload.save(arrays, tmp_path)
        assert len(writes) <= saved.bytes // drafts.BLOCK + 3
        samples.assert_same(mfload.load(tmp_path, framework="numpy"), arrays)

    def test_a_header_of_several_blocks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun: list[int] = []
        real = drafts.Draft.write

        def write(draft: Any, offset: int, *args: Any) -> int:
            begun.append(offset)
            return real(draft, offset, *args)

        monkeypatch.setattr(drafts.Draft, "write", write)
        metadata = {"long": "x" * (2 * drafts.BLOCK + 99)}
        data = np.random.default_rng(0).integers(0, 256, 2 * drafts.BLOCK, np.uint8)
        mfload.save({"w": data}, tmp_path, metadata=metadata, align=8)
        # Blocks begin where they can be written past the page cache.
        assert sorted(begun) == [n * drafts.BLOCK for n in range(5)]
        with mfload.open(tmp_path) as opened:
            assert opened.metadata() == metadata
            assert (opened.get_tensor("w") == data).all()

    def test_frameworks_together(self, tmp_path: Path) -> None:
        import torch

        weight = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
        saved = mfload.save({"t": weight.T, "n": np.arange(3), "tied": weight}, tmp_path)
        found = mfload.load(tmp_path, framework="torch")
        assert torch.equal(found["t"], weight.T)
        assert torch.equal(found["tied"], weight)
        assert "same memory" in saved.notes[0]


class TestSharing:
    def notes(self, folder: Path, **arrays: Any) -> tuple[str, ...]:
        saved = mfload.save(arrays, folder, overwrite=True)
        samples.assert_same(
            mfload.load(folder, framework="numpy"),
            {name: np.asarray(value, order="C") for name, value in arrays.items()},
        )
        return saved.notes

    def test_tied_and_overlapping(self, tmp_path: Path) -> None:
        base = np.arange(100.0)
        said = "lie in the same memory, each is written in full: "
        assert self.notes(tmp_path, a=base, b=base.copy(), c=base) == (f"{said}a, c",)
        assert self.notes(tmp_path, a=base[:60], b=base[50:], c=base[99:]) == (f"{said}a, b, c",)
        assert self.notes(tmp_path, a=base[:50], b=base[50:]) == ()
        assert self.notes(tmp_path, a=base[:0], b=base[:0], c=base) == ()
        assert self.notes(tmp_path, a=base, b=base[50:]) == (f"{said}a, b",)
        assert self.notes(tmp_path, a=base[:50], b=base[50:80], c=base[60:80]) == (f"{said}b, c",)
        other = np.arange(9)
        assert self.notes(tmp_path, x=other, a=base, y=other, b=base[::-2]) == tuple(
            sorted(
                [f"{said}x, y", f"{said}a, b"],
                key=lambda note: other.ctypes.data if "x" in note else base.ctypes.data,
            )
        )

    def test_many(self, tmp_path: Path) -> None:
        base = np.arange(10)
        (note,) = self.notes(tmp_path, **{f"w{n}": base for n in range(30)})
        assert note.endswith("w14, w15 and 22 more")


class TestOntoItself:
    @pytest.mark.parametrize("limit", [None, 200_000])
    def test_what_is_mapped_from_the_file_that_is_replaced(
        self, limit: int | None, tmp_path: Path
    ) -> None:
        first = samples.model()
        mfload.save(first, tmp_path, max_shard_size=limit)
        mapped = mfload.load(tmp_path, framework="numpy", options=mfload.Options(engine="mmap"))
        mfload.save(mapped, tmp_path, max_shard_size=limit, overwrite=True)
        samples.assert_same(mfload.load(tmp_path, framework="numpy"), first)
        samples.assert_same(mapped, first)

    def test_a_memmap_of_numpy(self, tmp_path: Path) -> None:
        path = tmp_path / "f.safetensors"
        data = np.random.default_rng(0).integers(0, 256, 9 << 20, np.uint8)
        mfload.save({"w": data}, path)
        mapped = np.memmap(path, np.uint8, "r", offset=4096)
        mfload.save({"w": mapped[1:]}, path, overwrite=True)
        assert (mfload.load(path, framework="numpy")["w"] == data[1:]).all()

    def test_what_was_loaded_directly(self, tmp_path: Path) -> None:
        first = samples.model()
        mfload.save(first, tmp_path)
        for engine in ("direct", "pread"):
            loaded = mfload.load(tmp_path, framework="numpy", options=mfload.Options(engine=engine))
            mfload.save(loaded, tmp_path, overwrite=True)
        samples.assert_same(mfload.load(tmp_path, framework="numpy"), first)


class TestLetGo:
    @pytest.mark.parametrize("limit", [None, "5MB"])
    def test_copies_live_no_longer_than_their_writes(
        self, limit: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        size = 17 << 20  # Of more blocks than may wait.
        monkeypatch.setattr(saving, "threads_for", lambda size: 1)
        made: list[weakref.ref[Any]] = []
        most: list[int] = []
        real = saving.export

        def export(arrays: Any) -> Any:
            def fetch() -> Any:
                whole = np.ones(size, np.uint8)
                made.append(weakref.ref(whole))
                most.append(sum(each() is not None for each in made))
                return whole

            return [each._replace(fetch=fetch, cut=None) for each in real(arrays)]

        monkeypatch.setattr(saving, "export", export)
        small = np.broadcast_to(np.ones(1, np.uint8), (size,))
        mfload.save({f"w{n}": small for n in range(4)}, tmp_path, max_shard_size=limit)
        assert len(most) == 4
        assert max(most) <= 2

    def test_nothing_is_kept_after(self, tmp_path: Path) -> None:
        arrays = {"w": np.ones(9 << 20, np.uint8)}
        gone = weakref.ref(arrays["w"])
        threads = threading.active_count()
        saved = mfload.save(arrays, tmp_path)
        del arrays
        gc.collect()
        assert gone() is None
        assert threading.active_count() == threads
        assert buffers.live_bytes() == 0
        assert saved.tensors == 1


class TestSaved:
    def test_what_it_says(self, tmp_path: Path) -> None:
        saved = mfload.save({"a": np.ones(10), "b": np.ones(3)}, tmp_path, max_shard_size=80)
        assert [os.path.basename(file) for file in saved.files] == [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ]
        assert saved.tensors == 2
        sizes = [os.path.getsize(file) for file in saved.files[:2]]
        assert saved.bytes == sum(sizes)
        assert saved.seconds > 0
        table = saved.as_dict()
        assert json.loads(json.dumps(table))["files"] == list(saved.files)
        assert math.isclose(table["gib_per_s"], saved.bytes / saved.seconds / 2**30)
        for shown in (str(saved), saved._repr_html_()):
            assert "2 tensors" in shown
            assert str(tmp_path) in shown
        many = saving.Saved(tuple(map(str, range(99))), 1, 1, 0.0, ("a note",))
        assert "and 91 more" in str(many)
        assert "a note" in str(many)

    def test_the_index(self, tmp_path: Path) -> None:
        arrays = {"b": np.ones(10), "a": np.ones(10), "c": np.ones(1, np.uint8)}
        saved = mfload.save(arrays, tmp_path / "x.safetensors", max_shard_size=81)
        index = json.loads(Path(saved.files[-1]).read_text())
        assert index == {
            "metadata": {"total_size": 161},
            "weight_map": {
                "a": "x-00002-of-00002.safetensors",
                "b": "x-00001-of-00002.safetensors",
                "c": "x-00002-of-00002.safetensors",
            },
        }

    def test_metadata_is_in_every_shard(self, tmp_path: Path) -> None:
        saved = mfload.save({"a": np.ones(9), "b": np.ones(9)}, tmp_path,
                            metadata={"format": "pt"}, max_shard_size=72)  # fmt: skip
        for file in saved.files[:2]:
            with safetensors.safe_open(file, "np") as opened:
                assert opened.metadata() == {"format": "pt"}

    def test_what_fits_in_one_file_has_no_index(self, tmp_path: Path) -> None:
        saved = mfload.save({"a": np.ones(9)}, tmp_path, max_shard_size="1GB")
        assert saved.files == (str(tmp_path / "model.safetensors"),)
        assert os.listdir(tmp_path) == ["model.safetensors"]

    def test_a_tensor_larger_than_a_shard_has_one_of_its_own(self, tmp_path: Path) -> None:
        arrays = {"a": np.ones(8), "huge": np.ones(80), "b": np.ones(8), "c": np.ones(8)}
        saved = mfload.save(arrays, tmp_path, max_shard_size=128)
        held = [list(mfload.open(file).keys()) for file in saved.files[:-1]]
        assert held == [["a"], ["huge"], ["b", "c"]]

    def test_transformers_names(self, tmp_path: Path) -> None:
        """As `save_pretrained` calls them, and `huggingface_hub` looks for them."""
        saved = mfload.save({f"{n}": np.ones(8) for n in range(3)}, tmp_path, max_shard_size=64)
        assert os.path.basename(saved.files[0]) == "model-00001-of-00003.safetensors"


class TestProgress:
    @pytest.mark.parametrize("size", [10, 9 << 20])
    def test_all_bytes_are_told(self, size: int, tmp_path: Path) -> None:
        calls: list[tuple[int, int]] = []
        threads: set[int] = set()

        def progress(done: int, total: int) -> None:
            calls.append((done, total))
            threads.add(threading.get_ident())

        saved = mfload.save({"w": np.ones(size, np.uint8)}, tmp_path, progress=progress)
        assert calls[-1] == (saved.bytes, saved.bytes)
        assert calls == sorted(calls)
        assert threads == {threading.get_ident()}

    def test_a_progress_that_raises_stops_the_save(self, tmp_path: Path) -> None:
        def stop(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            mfload.save({"w": np.ones(9 << 20, np.uint8)}, tmp_path, progress=stop)
        assert os.listdir(tmp_path) == []


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"align": 3}, "align"),
            ({"align": None}, "align"),
            ({"max_shard_size": 0}, "max_shard_size"),
            ({"max_shard_size": "many"}, "max_shard_size"),
            ({"metadata": {"a": 1}}, "metadata"),
            ({"metadata": "a"}, "metadata"),
        ],
    )
    def test_odd_ones_are_refused_before_anything_is_written(
        self, options: dict[str, Any], said: str, tmp_path: Path
    ) -> None:
        with pytest.raises(errors.UsageError, match=said):
            mfload.save({"w": np.ones(3)}, tmp_path / "f.safetensors", **options)
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("name", ["__metadata__", "\ud800", "a\udc80"])
    def test_names_that_can_t_be_written(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(errors.UsageError):
            mfload.save({name: np.ones(3)}, tmp_path)
        assert os.listdir(tmp_path) == []

    def test_any_file_name(self, tmp_path: Path) -> None:
        for name in ("weights", "weights.dat", "ä b.st", ".hidden"):
            saved = mfload.save({"w": np.ones(3)}, tmp_path / name)
            assert saved.files == (str(tmp_path / name),)
            assert mfload.load(tmp_path / name, framework="numpy")["w"].sum() == 3
        with pytest.raises(errors.UsageError, match="index can list"):
            mfload.save({"a": np.ones(3), "b": np.ones(3)}, tmp_path / "x.dat", max_shard_size=24)

    def test_a_name_as_long_as_names_can_be(self, tmp_path: Path) -> None:
        path = tmp_path / ("x" * 243 + ".safetensors")
        arrays = {"a": np.ones(3), "b": np.ones(3)}
        mfload.save(arrays, path)
        mfload.save(arrays, path, overwrite=True)
        with pytest.raises(errors.TargetError) as caught:
            mfload.save(arrays, path, max_shard_size=24, overwrite=True)
        assert caught.value.strerror == "File name too long"
        assert os.listdir(tmp_path) == [path.name]

    def test_no_tensors(self, tmp_path: Path) -> None:
        saved = mfload.save({}, tmp_path, metadata={"only": "this"})
        assert (saved.tensors, saved.bytes) == (0, 4096)
        with mfload.open(tmp_path) as opened:
            assert list(opened.keys()) == []
            assert opened.metadata() == {"only": "this"}

    def test_relative_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert mfload.save({"w": np.ones(3)}, "f.safetensors").files == (
            str(tmp_path / "f.safetensors"),
        )
        mfload.save({"w": np.ones(3)}, ".")
        assert sorted(os.listdir(tmp_path)) == ["f.safetensors", "model.safetensors"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone")
def test_a_forked_child_can_save(tmp_path: Path) -> None:
    mfload.save(scenarios.arrays(1), tmp_path)
    code = (
        "import os, sys, mfload, numpy as np\n"
        "arrays = {'w': np.ones(9 << 20, np.uint8)}\n"
        "mfload.save(arrays, sys.argv[1], overwrite=True)\n"
        "child = os.fork()\n"
        "mfload.save(arrays, sys.argv[1] + f'/{os.getpid()}.safetensors')\n"
        "if child == 0: os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert len(os.listdir(tmp_path)) == 3


def test_what_it_prints_is_one_page(tmp_path: Path) -> None:
    out = io.StringIO()
    print(mfload.save({"w": np.ones(3)}, tmp_path), file=out)
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["saved", "time", "file"]


OPTIONS: list[Callable[[], Any]] = [list, dict, lambda: 5, lambda: b"x", object]


@pytest.mark.parametrize("make", OPTIONS)
def test_odd_arguments_are_ours_to_refuse(make: Callable[[], Any], tmp_path: Path) -> None:
    for options in ({"metadata": make()}, {"align": make()}, {"max_shard_size": make()}):
        try:
            mfload.save({"w": np.ones(1)}, tmp_path / "f", overwrite=True, **options)
        except errors.UsageError:
            continue
        assert next(iter(options)) != "align" or make() == 5


@pytest.mark.parametrize("name", ["a/b/model.safetensors", "a/b/", "a/b/model-{}"])
@pytest.mark.parametrize("limit", [None, 20])
def test_directories_are_made(name: str, limit: int | None, tmp_path: Path) -> None:
    arrays = {"w": np.ones(5), "v": np.zeros(2)}
    if limit and name.endswith("}"):
        with pytest.raises(errors.UsageError, match="shards need a name"):
            mfload.save(arrays, f"{tmp_path}/{name}", max_shard_size=limit)
        assert os.listdir(tmp_path) == []
        return
    saved = mfload.save(arrays, f"{tmp_path}/{name}", max_shard_size=limit)
    assert all(os.path.dirname(file) == str(tmp_path / "a" / "b") for file in saved.files)
    samples.assert_same(mfload.load(saved.files[-1], framework="numpy"), arrays)


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(errors.TargetError) as caught:
        mfload.save({"w": np.ones(3)}, tmp_path / "a" / "b" / "model.safetensors")
    assert caught.value.errno == errno.ENOTDIR
    assert (tmp_path / "a").read_text() == "mine"


def test_align_is_a_size(tmp_path: Path) -> None:
    saved = mfload.save({"w": np.ones(3)}, tmp_path, align="64KiB")
    assert int.from_bytes(Path(saved.files[0]).read_bytes()[:8], "little") == (64 << 10) - 8
