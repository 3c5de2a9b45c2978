"""Loads as a whole: memory beside the result, waves, previews that come true."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from calls import as_options
from safetensors.numpy import save_file

import mfload
from mfload import dtypes, errors, frameworks
from mfload.frameworks.base import Form
from mfload.frameworks.numpy_adapter import NumpyAdapter
from mfload.index import Piece, TensorInfo
from mfload.io import buffers, probes
from mfload.loading import execute
from mfload.options import OVERHEAD, LoadOptions
from mfload.planning.memory import Limits, Readers
from mfload.planning.request import Allocation, Request

MODEL = samples.model()
# Two tensors of some blocks each, whose data begin at an odd place.
LARGE = {
    "x": samples.numbers((1_500_001,), np.int16, 1),
    "y": samples.numbers((900, 801), np.int16),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", MODEL)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    rows = [(name, "I16", array.shape, array.tobytes()) for name, array in LARGE.items()]
    return samples.save_raw(tmp_path / "large.safetensors", rows, 40)


@pytest.mark.parametrize("engine", ["pread", "direct"])
@pytest.mark.parametrize("dtype", [None, {"x": "int32", "y": "float64"}])
@pytest.mark.parametrize("limit", [1 << 20, 3 << 20, None])
@pytest.mark.parametrize("threads", [1, 2])
def test_memory_beside_the_result_is_bounded(
    large: Path, engine: Any, dtype: Any, limit: int | None, threads: int
) -> None:
    options: dict[str, Any] = {
        "engine": engine, "dtype": dtype, "threads": threads, "max_host_overhead": limit,
    }  # fmt: skip
    preview = mfload.plan(large, **as_options(options))
    report = mfload.Report()
    loaded = mfload.load(large, framework="numpy", report=report, **as_options(options))
    held = sum(spec.nbytes for spec in preview.plan.buffers)
    assert report.peak_bytes - held <= preview.overhead_bytes
    assert preview.overhead_bytes <= (limit or OVERHEAD)
    # What is held for the result is the result, and a page at most for each tensor.
    assert 0 <= held - report.result_bytes <= 4096 * len(loaded)
    if dtype is None:
        samples.assert_same(loaded, LARGE)
    else:
        assert samples.same(loaded["x"], LARGE["x"].astype(np.int32))
        assert samples.same(loaded["y"], LARGE["y"].astype(np.float64))
        assert report.peak_bytes > held  # What is converted passes through slots.


@pytest.mark.parametrize("limit", [0, 4096, 100_000])
def test_too_little_overhead_is_refused_with_what_it_takes(path: Path, limit: int) -> None:
    with pytest.raises(errors.UsageError, match="too small") as info:
        mfload.load(
            path, framework="numpy", options=mfload.Options(max_host_overhead=limit, threads=2)
        )
    least = int(str(info.value.expected).split()[0])
    loaded = mfload.load(
        path, framework="numpy", options=mfload.Options(max_host_overhead=least, threads=2)
    )
    samples.assert_same(loaded, MODEL)


class _Copying(NumpyAdapter):
    """A framework that takes no memory of others."""

    name = "copying"
    forms = {name: Form("copy", "") for name in dtypes.TABLE}  # noqa: RUF012

    def wrap(self, views: Any) -> list[Any]:
        self.largest = max(
            getattr(self, "largest", 0), sum(v.dtype.size_of(v.shape) for v in views)
        )
        return [array.copy() for array in super().wrap(views)]


def test_what_a_framework_copies_waits_in_waves(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = _Copying()
    monkeypatch.setattr(frameworks, "get", lambda *_: adapter)
    report = mfload.Report()
    limit = MODEL["wide"].nbytes + 1000
    loaded = mfload.load(
        path, framework="numpy", report=report, options=mfload.Options(max_host_overhead=limit)
    )
    samples.assert_same(loaded, MODEL)
    assert mfload.live_bytes() == 0
    assert 0 < adapter.largest <= limit
    assert report.peak_bytes <= limit + 4096 * len(MODEL)
    assert report.tensors == len(MODEL)
    assert report.aliased_bytes == 0
    with pytest.raises(errors.MemoryLimitError, match="larger than the overhead") as info:
        mfload.load(path, framework="numpy", options=mfload.Options(max_host_overhead=limit - 2000))
    assert info.value.tensor == "wide"


def test_a_failure_in_a_late_wave_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(_Copying):
        def wrap(self, views: Any) -> list[Any]:
            names = [view.name for view in views]
            if "layer.1.q" in names:
                del views
                raise RuntimeError("the framework fell over")
            # Not copied, so that what came before would keep our memory alive.
            return NumpyAdapter().wrap(views)

    monkeypatch.setattr(frameworks, "get", lambda *_: Failing())
    with pytest.raises(RuntimeError, match="fell over") as info:
        mfload.load(
            path, framework="numpy", options=mfload.Options(max_host_overhead=MODEL["wide"].nbytes)
        )
    assert mfload.live_bytes() == 0
    assert info.value is not None


def test_landing_in_memory_of_the_framework(path: Path) -> None:
    loaded = mfload.load(
        path,
        framework="numpy",
        dtype=[("layer.1", "int32")],
        options=mfload.Options(allocator="framework"),
    )
    assert mfload.live_bytes() == 0
    samples.assert_same(loaded, {**MODEL, "layer.1.q": MODEL["layer.1.q"].astype(np.int32)})
    assert all(array.flags.writeable for array in loaded.values())


def test_what_has_no_type_lands_with_us_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NumpyAdapter, "forms", NumpyAdapter.forms | {"F16": Form("copy", "")})
    path = samples.save_raw(
        tmp_path / "a.safetensors",
        [("f16", "F16", (2, 3), bytes(range(12))), ("u8", "U8", (5,), bytes(range(5)))],
    )
    report = mfload.Report()
    loaded = mfload.load(
        path, framework="numpy", report=report, options=mfload.Options(allocator="framework")
    )
    assert len(report.notes) == 1
    assert report.notes[0] == "in mfload's memory, since numpy can't allocate such dtypes: 1 tensor"
    assert loaded["f16"].tobytes() == bytes(range(12))
    assert mfload.live_bytes() > 0


@pytest.mark.parametrize("engine", ["pread", "direct", "mmap"])
def test_a_preview_comes_true(path: Path, engine: Any) -> None:
    report = mfload.Report()
    preview = mfload.plan(path, options=mfload.Options(engine=engine))
    assert mfload.live_bytes() == 0
    loaded = mfload.load(
        path, framework="numpy", report=report, options=mfload.Options(engine=engine)
    )
    figures = preview.as_dict()
    for name in ("framework", "tensors", "result_bytes", "read_bytes", "over_read_bytes",
                 "mapped_bytes", "threads"):  # fmt: skip
        assert figures[name] == getattr(report, name), name
    assert figures["result_bytes"] == sum(array.nbytes for array in loaded.values())
    assert [tuple(leg.values())[:3] for leg in figures["route"]] == list(report.route)
    assert mfload.live_bytes() == figures["buffer_bytes"]
    assert buffers.peak_bytes() <= figures["buffer_bytes"] + figures["overhead_bytes"]


def test_a_preview_shows_itself(path: Path) -> None:
    preview = mfload.plan(path, names=["embed", "odd"], options=mfload.Options(engine="direct"))
    text, page = str(preview), preview._repr_html_()
    for part in ("2 numpy tensors", "direct (asked for)", str(path), "unwanted", "overhead"):
        assert part in text
        assert part in page
    assert page.startswith("<table>")
    assert json.loads(json.dumps(preview.as_dict())) == preview.as_dict()
    assert repr(preview).startswith("<mfload plan: 2 numpy tensors, ")
    assert repr(preview).endswith(", engine direct>")


def test_a_long_route_is_cut(tmp_path: Path) -> None:
    files = [samples.save(tmp_path / f"x{n:02}.safetensors", {f"t{n}": np.zeros(1)})
             for n in range(20)]  # fmt: skip
    report = mfload.Report()
    mfload.load(files, framework="numpy", report=report)
    assert "and 4 more files" in str(mfload.plan(files))
    assert "and 12 more files" in str(report)
    assert len(report.route) == 20


def test_names_are_shown_as_text(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "<b>&.safetensors", {"a": np.zeros(3)})
    page = mfload.plan(path)._repr_html_()
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;" in page


def test_notes_of_the_index_reach_report_and_preview(tmp_path: Path) -> None:
    samples.save(tmp_path / "model-1.safetensors", {"a": np.zeros(3), "b": np.zeros(2)})
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    report = mfload.Report()
    mfload.load(tmp_path, framework="numpy", report=report)
    assert any("not in the index" in note for note in report.notes)
    assert mfload.plan(tmp_path).notes == report.notes
    assert report.notes[0] in str(report)


RSS = """
    import resource, sys
    import numpy as np
    import mfload, mfload.api, mfload.frameworks.numpy_adapter

    path, engine, dtype = sys.argv[1:]
    def peak():
        with open("/proc/self/status") as status:
            return next(int(x.split()[1]) << 10 for x in status if x.startswith("VmHWM"))
    mfload.load(path, framework="numpy", names=["small"])
    before = peak()
    loaded = mfload.load(path, framework="numpy", dtype=[(".", dtype)] if dtype else None,
                         options=mfload.Options(engine=engine, threads=2))
    data = sum(array.nbytes for array in loaded.values())
    print(peak() - before - data)
"""


@pytest.mark.parametrize(
    ("engine", "dtype"), [("auto", ""), ("pread", ""), ("direct", ""), ("pread", "int8")]
)
def test_the_process_takes_little_more_than_the_data(
    tmp_path: Path, engine: str, dtype: str
) -> None:
    """At most 64 MiB over 512 MiB of data, as the system counts it."""
    path = tmp_path / "sparse.safetensors"
    header: dict[str, Any] = {}
    end = 0
    for n in range(16):
        size = 32 << 20
        span = [end, end + size]
        header[f"t{n}"] = {"dtype": "F8_E4M3", "shape": [size], "data_offsets": span}
        end += size
    header["small"] = {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [end, end + 8]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end + 8)
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RSS), path, engine, dtype],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) <= 64 << 20


def test_waves_go_one_way_decided_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wave is small where the load is not: what counts for the route is the load."""
    path = tmp_path / "many.safetensors"
    written = {f"w{n}": np.full(1 << 18, n, np.float32) for n in range(12)}
    save_file(written, path)
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if (probes.cached_share(opened.fileno(), path.stat().st_size) or 0.0) > 0.1:
            pytest.skip("the page cache keeps the file here, so every route is the same")
        if probes.direct_alignment(opened.fileno()) is None:
            pytest.skip("this file system takes no O_DIRECT")
    monkeypatch.setattr(frameworks, "get", lambda *_: _Copying())
    report = mfload.Report()
    caplog.set_level("INFO", logger="mfload")
    options = {"framework": "numpy", "max_host_overhead": 3 << 20, "page_cache": "bypass"}
    expected = mfload.plan(path, **as_options(options))
    caplog.clear()
    loaded = mfload.load(path, report=report, **as_options(options))
    samples.assert_same(loaded, written)
    assert [engine for _, engine, _ in report.route] == ["direct"]
    assert [leg.engine for leg in expected.route] == ["direct"]
    assert report.notes == (expected.notes[0],)
    assert "4 batches" in report.notes[0]
    assert "as one" in expected.notes[1]
    assert [record.message for record in caplog.records if "direct" in record.message] != []
    assert len(caplog.records) == 1


def test_a_load_in_waves_that_does_not_fit_never_begins(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Half(_Copying):
        forms = _Copying.forms | {"F32": Form("alias", "")}

    asked: list[int] = []
    monkeypatch.setattr(frameworks, "get", lambda *_: Half())
    monkeypatch.setattr(
        "mfload.loading.allocate.check_host",
        lambda needed, specs: asked.append(needed + sum(spec.nbytes for spec in specs)),
    )
    copied = [a.nbytes for a in MODEL.values() if a.dtype != np.float32]
    mfload.load(path, framework="numpy", options=mfload.Options(max_host_overhead=max(copied)))
    assert asked[0] >= sum(array.nbytes for array in MODEL.values())
    assert len(asked) > 2


def test_maps_take_no_slots(path: Path) -> None:
    for overhead in (0, 4096):
        options = mfload.Options(engine="mmap", max_host_overhead=overhead)
        loaded = mfload.load(path, "numpy", names=["embed"], options=options)
        samples.assert_same(loaded, {"embed": MODEL["embed"]})
        assert mfload.plan(path, names=["embed"], options=options).overhead_bytes == 0
        # What is converted is read all the same.
        with pytest.raises(errors.UsageError, match="too small"):
            mfload.load(path, "numpy", names=["embed"], dtype="float64", options=options)


@pytest.mark.parametrize("engine", ["pread", "direct", "mmap"])
@pytest.mark.parametrize("allocator", ["mfload", "framework"])
def test_the_peak_of_a_plan_and_of_a_report_mean_the_same(
    large: Path, engine: Any, allocator: Any
) -> None:
    options = mfload.Options(engine=engine, allocator=allocator)
    stated = mfload.plan(large, dtype={"x": "int32"}, options=options).peak_bytes
    report = mfload.Report()
    loaded = mfload.load(large, "numpy", dtype={"x": "int32"}, report=report, options=options)
    own = mfload.live_bytes()
    assert own <= report.peak_bytes <= stated <= own + OVERHEAD
    del loaded


def test_the_peak_is_that_of_the_load_alone(path: Path) -> None:
    stated = mfload.plan(path).peak_bytes
    report = mfload.Report()
    kept = mfload.load(path, "numpy")
    more = mfload.load(path, "numpy", report=report)
    assert 0 < report.peak_bytes <= stated
    assert kept.keys() == more.keys()


def test_the_peak_of_batches(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "get", lambda *_: _Copying())
    limit = MODEL["wide"].nbytes
    options = mfload.Options(max_host_overhead=limit)
    stated = mfload.plan(path, options=options).peak_bytes
    report = mfload.Report()
    mfload.load(path, "numpy", report=report, options=options)
    assert 0 < report.peak_bytes <= stated <= 2 * limit + 4096 * len(MODEL)


def test_a_report_separates_import_and_shows_what_it_cost(path: Path) -> None:
    report = mfload.Report()
    mfload.load(path, "numpy", report=report)
    rest = sum(seconds for name, seconds in report.stages.items() if name != "import")
    assert report.gib_per_s == pytest.approx(report.result_bytes / rest / 2**30)
    assert report.user_seconds + report.system_seconds >= 0
    assert report.page_faults > 0
    assert "page faults" in str(report)


LIMITED = """
    import resource, sys
    import mfload
    from mfload import errors

    path, name, engine, room = sys.argv[1:]
    mfload.load(path, "numpy", names=["small"])  # Whatever has to be imported.
    key = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}[name]
    lines = open("/proc/self/status").read().splitlines()
    used = next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))
    resource.setrlimit(getattr(resource, name), (used + int(room),) * 2)
    options = mfload.Options(engine=engine)
    report = mfload.Report()
    try:
        mfload.load(path, "numpy", names=["large"], options=options, report=report)
    except errors.MemoryLimitError as error:
        assert name in str(error) and "in use" in str(error), error
        assert "MiB" in error.expected, error
    else:
        sys.exit("not refused")
    notes = mfload.plan(path, names=["large"], options=options).notes
    assert any(name in note for note in notes), notes
    mfload.load(path, "numpy", names=["small"])
    print("done")
"""


@pytest.mark.parametrize("engine", ["pread", "direct", "mmap"])
@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
@pytest.mark.parametrize("large", [96 << 20, 12 << 20])
def test_limits_of_the_process_are_known(
    tmp_path: Path, name: str, engine: str, large: int
) -> None:
    arrays = {"large": np.zeros(large, np.uint8), "small": np.zeros(8)}
    path = samples.save(tmp_path / "a.safetensors", arrays)
    room = str(large * 2 // 3)
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), path, name, engine, room],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (found.stdout, found.stderr) == ("done\n", "")


def _sparse(path: Path, sizes: dict[str, int]) -> Path:
    """A file of tensors of so many bytes, which takes no room on the disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, nbytes in sizes.items():
        span = [end, end := end + nbytes]
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": span}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)
    return path


def test_blocks_and_readers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _sparse(tmp_path / "large.safetensors", {"a": 1 << 30})
    for engine, most in (("pread", 16 << 20), ("direct", 4 << 20)):
        options: Any = mfload.Options(engine=engine, threads=2)
        assert max(b.nbytes for b in mfload.plan(path, options=options).plan.blocks) == most
    for cores, direct, readers in ((1, False, 1), (5, False, 5), (64, False, 8), (1, True, 8)):
        monkeypatch.setattr(execute, "share_of_cores", lambda cores=cores: cores)
        assert execute.reader_threads(direct) == readers
    # Only what the page cache holds is worth more of them.
    for devices, cold, readers in ((1, False, 16), (1, True, 8), (8, False, 32), (0, False, 8)):
        monkeypatch.setattr(execute, "share_of_cores", lambda: 64)
        assert execute.reader_threads(cold, devices, cold=cold) == readers
    # Onto a device: a sixteenth in two slots for each reader, but for what 4 MiB each comes to.
    for nbytes, most in ((1 << 34, 8 << 20), (3 << 27, 6 << 20), (1 << 20, 4 << 20)):
        row = TensorInfo("a", dtypes.TABLE["U8"], (nbytes,), (Piece(0, 0, nbytes),))
        landing = Allocation(0, "mfload", copied=False)
        how = Readers()
        how.threads = 2
        limits = Limits([Request(row, row.dtype)], [landing], LoadOptions(), how)
        assert limits.costs.block == most
        how.cold = True
        limits = Limits([Request(row, row.dtype)], [landing], LoadOptions(), how)
        assert limits.costs.block == min(most, 8 << 20)


@pytest.mark.parametrize(("gap", "reads"), [((64 << 10) - 1, 1), (64 << 10, 2)])
def test_short_gaps_are_read_over_within_a_block(tmp_path: Path, gap: int, reads: int) -> None:
    for size, count in ((1000, reads), (100 << 20, 2)):
        path = _sparse(tmp_path / "gap", {"a": size, "between": gap, "b": size})
        plan = mfload.plan(path, names=["a", "b"])
        assert sum(len(block.segments) > 1 for block in plan.plan.blocks) == 2 - count
        assert plan.as_dict()["over_read_bytes"] == gap * (2 - count)
