"""The parts that measure: extents, patterns, page cache, touching, figures."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples

from benchmarks import compared, described, markdown, memory, results
from benchmarks.results import Results
from benchmarks.subject import whole
from mfload import errors
from mfload.bench import ceilings, loaders, machine, measuring
from mfload.bench.ceilings import MIB, ByteRange, Pattern
from mfload.bench.measuring import entrants_of
from mfload.formats import checkpoint
from mfload.io import probes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", samples.model())


def _on_disk(path: Path) -> bool:
    return machine.file_system(path) not in machine.MEMORY_FILE_SYSTEMS


# Extents ----------------------------------------------------------------------------------


def test_extents_join_what_nearly_touches(model: Path) -> None:
    index, _ = checkpoint.read(model)
    rows = list(index.tensors.values())
    (one,) = ceilings.extents_of(index, rows)
    first = min(row.pieces[0].offset for row in rows)
    assert one == ByteRange(str(model), first, model.stat().st_size)
    large = sorted(rows, key=lambda row: row.nbytes)[-2:]
    apart = ceilings.extents_of(index, large)
    assert sum(stop - start for _, start, stop in apart) == sum(row.nbytes for row in large)
    assert ceilings.paths_of(apart) == [str(model)]


def test_an_empty_tensor_has_no_extent(model: Path) -> None:
    index, _ = checkpoint.read(model)
    assert ceilings.extents_of(index, [index["empty"]]) == []


# Ceilings ---------------------------------------------------------------------------------


def _held(found: ceilings.Bytes) -> list[bytes]:
    return [ctypes.string_at(address, nbytes) for address, nbytes in found.spans]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("direct", [False, True])
def test_a_pattern_reads_the_bytes_of_every_extent(
    tmp_path: Path, threads: int, direct: bool
) -> None:
    if direct and not _on_disk(tmp_path):
        pytest.skip("no O_DIRECT here")
    data = np.random.default_rng(0).bytes(5 * MIB + 777)
    path = tmp_path / "data"
    path.write_bytes(data)
    parts = [
        ByteRange(str(path), 0, 100),
        ByteRange(str(path), 5000, 5001),
        ByteRange(str(path), 8191, 3 * MIB + 1),
        ByteRange(str(path), 4 * MIB, len(data)),
    ]
    found = ceilings.read(parts, Pattern(threads, 1 * MIB, direct=direct))
    assert _held(found) == [data[start:stop] for _, start, stop in parts]


def test_used_slots_hold_the_last_block_alone(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"a" * MIB + b"b" * MIB)
    found = ceilings.read(whole([str(path)]), Pattern(1, MIB, reuse=True))
    assert _held(found) == [b"b" * MIB]


def test_a_pattern_refuses_a_file_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"a" * 5000)
    with pytest.raises(OSError, match="ended early"):
        ceilings.read([ByteRange(str(path), 0, 10_000)], compared.WARM)


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_patterns_on_trial_are_known_by_name(cores: int) -> None:
    for cold in (False, True):
        few = ceilings.trial(cores, cold=cold, quick=True)
        many = ceilings.trial(cores, cold=cold, quick=False)
        assert 0 < len(few) <= len(many)
        assert {loaders.find(name).kind for name in (*few, *many)} == {"ceiling"}
        assert {ceilings.named(name).name for name in many} == {*many}  # pyright: ignore
        # A loader keeps what it reads: so does one of them at least.
        assert any(loaders.find(name).keeps for name in few)


def test_touching_numpy_reads_every_page() -> None:
    array = np.random.default_rng(0).integers(0, 65_536, 10_000, dtype=np.uint16)
    spans = loaders.ours("numpy").spans({"a": array, "empty": array[:0]})
    assert spans == [memory.SPAN["numpy"](array), (array.ctypes.data, 0)]
    assert loaders.touch(spans) == int(array.view(np.uint8)[::4096].sum())
    with pytest.raises(ValueError, match="contiguous"):
        memory.SPAN["numpy"](array[::2])


# Page cache ---------------------------------------------------------------------------------


def test_the_page_cache_is_filled_and_dropped(tmp_path: Path) -> None:
    if not _on_disk(tmp_path):
        pytest.skip("a file system in memory")
    path = tmp_path / "data"
    path.write_bytes(np.random.default_rng(0).bytes(3 * MIB + 5))
    parts = [ByteRange(str(path), 4096, 2 * MIB), ByteRange(str(path), 2 * MIB + 4096, 3 * MIB + 5)]
    for cold in (True, False, False, True):
        machine.fill_or_drop(parts, cold=cold)
        assert machine.cached_share(parts) in (not cold, None)
    machine.prepare(parts, 4 * MIB, cold=True)
    assert machine.cached_share(parts) in (0, None)


def test_memory_file_systems_are_not_cold() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or machine.file_system(shm) != "tmpfs":
        pytest.skip("no tmpfs here")
    path = shm / f"mfload-test-{os.getpid()}"
    try:
        path.write_bytes(bytes(MIB))
        with pytest.raises(machine.UnfitError, match="tmpfs keeps its files in memory"):
            machine.fill_or_drop(whole([str(path)]), cold=True)
    finally:
        path.unlink()


def test_what_stays_cached_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(MIB))
    parts = whole([str(path)])
    monkeypatch.setattr(machine, "MEMORY_FILE_SYSTEMS", frozenset())
    monkeypatch.setattr(machine, "cached_share", lambda _: 0.5)
    for cold, why in ((True, r"still holds 50\.0%"), (False, r"keeps only 50\.0%")):
        with pytest.raises(machine.UnfitError, match=why):
            machine.fill_or_drop(parts, cold=cold)
    # A kernel that does not say what it caches is asked all the same.
    monkeypatch.setattr(machine, "cached_share", lambda _: None)
    machine.fill_or_drop(parts, cold=True)


def test_headers_are_dropped_too(tmp_path: Path) -> None:
    if not _on_disk(tmp_path):
        pytest.skip("a file system in memory")
    path = tmp_path / "data"
    path.write_bytes(bytes(3 * MIB))
    machine.fill_or_drop(whole([str(path)]), cold=True)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(4096)
    machine.fill_or_drop([ByteRange(str(path), MIB, 3 * MIB)], cold=True)
    assert machine.cached_share([ByteRange(str(path), 0, 4096)]) in (0, None)


def test_memory_is_primed_and_counted() -> None:
    assert machine.prime(1 << 20)
    assert 0 < machine.memory_status("VmRSS") <= machine.memory_status("VmHWM")


# What is measured ---------------------------------------------------------------------------


def test_all_of_a_checkpoint_is_measured(model: Path) -> None:
    job, notes = measuring.choose(str(model), None, 1 << 30)
    assert (job["names"], notes) == (None, [])
    assert job["tensors"] == len(samples.model())
    assert job["nbytes"] == sum(array.nbytes for array in samples.model().values())


def test_of_a_large_checkpoint_a_part_is_measured(model: Path) -> None:
    job, (note,) = measuring.choose(str(model), None, 500_000)
    assert 0 < job["nbytes"] <= 500_000
    assert job["tensors"] == len(job["names"]) < len(samples.model())
    assert f"{job['tensors']} of {len(samples.model())} tensors" in note
    assert "--max-bytes 500000 bytes" in note


def test_what_is_measured_fits_into_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "memory_room", lambda: (1_000_000, "test"))
    job, (note,) = measuring.choose(str(model), None, 1 << 30)
    assert job["nbytes"] <= 350_000
    assert "left in the test" in note
    monkeypatch.setattr(probes, "memory_room", lambda: (1, "test"))
    with pytest.raises(errors.UsageError, match="nothing to measure"):
        measuring.choose(str(model), "^wide$", 1 << 30)


def test_what_is_measured_can_be_named(model: Path) -> None:
    job, _ = measuring.choose(str(model), r"layer\.0", 1 << 30)
    assert job["names"] == ["layer.0.q", "layer.0.norm"]
    with pytest.raises(errors.UsageError, match="nothing to measure"):
        measuring.choose(str(model), "empty", 1 << 30)


# Options and loaders ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"frameworks": ("tensor",)}, {"engines": ("fast",)}, {"rounds": 0}, {"threads": -1},
     {"max_bytes": 0}, {"timeout": 0.0}],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(model: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError):
        measuring.bench(str(model), lambda *_: None, **wrong)


def test_loaders_are_found_by_name() -> None:
    for name, loader in compared.LOADERS.items():
        assert loaders.find(name).label == loader.label
        assert (loader.kind == "mfload") == name.startswith("mfload-")
    assert loaders.find("mfload-jax-direct").label == "mfload → jax, engine direct"
    for wrong in ("mfload-nothing", "nothing", "safetensors-x"):
        with pytest.raises(KeyError):
            loaders.find(wrong)


def test_entrants_say_why_they_cannot_take_part() -> None:
    found = entrants_of((), ("auto",), peers=False, everything=True)
    assert list(found) == [
        f"mfload-{name}" for name in ("numpy", "jax", "torch", "tensorflow", "paddle", "cupy")
    ]
    assert found["mfload-numpy"] is None
    assert found["mfload-cupy"]
    part = entrants_of(("np", "numpy"), ("pread", "mmap"), peers=True, everything=False)
    assert list(part) == ["mfload-numpy-pread", "mfload-numpy-mmap", "safetensors-numpy"]
    assert "whole files only" in (part["safetensors-numpy"] or "")


# Figures --------------------------------------------------------------------------------------


def _results() -> Results:
    made = Results({}, {}, {})
    times = {"ceiling-buffered-2x16-fresh": (2.0, 1.0, 4.0), "mfload-jax": (3.0, 1.5, 9.0),
             "ceiling-buffered-1x16-fresh": (5.0,), "another": (1.0, 2.0)}  # fmt: skip
    for name, values in times.items():
        made.samples += [{"case": "warm", "name": name, "seconds": v, "peak": v} for v in values]
    made.samples.append({"case": "cold", "name": "mfload-jax", "seconds": 0.5})
    return made


def test_figures_are_best_median_and_ratio() -> None:
    made = _results()
    assert made.best("warm", "mfload-jax") == 1.5
    assert made.median("warm", "mfload-jax") == 3.0
    assert made.median("warm", "another") == 1.5
    assert made.ceiling("warm") == ("ceiling-buffered-2x16-fresh", 1.0)
    assert made.ratio("warm", "mfload-jax") == 1.5
    assert made.worst(["warm", "cold"], "mfload-jax", "peak") == 9.0
    assert made.names("warm") == [
        "ceiling-buffered-2x16-fresh", "ceiling-buffered-1x16-fresh", "mfload-jax", "another"
    ]  # fmt: skip


def test_what_was_not_measured_has_no_figures() -> None:
    made = _results()
    assert made.best("warm", "mfload-torch") is None
    assert made.median("warm", "mfload-torch") is None
    assert made.ceiling("cold") is None
    assert made.ratio("cold", "mfload-jax") is None
    assert made.best("warm", "mfload-jax", "cpu_s") is None


def test_results_come_back_from_json(tmp_path: Path) -> None:
    made = _results()
    made.skipped.append(("warm", "mfload-torch", "not there"))
    made.save(tmp_path / "r.json", targets=[1])
    again = Results.read(tmp_path / "r.json")
    assert again == made
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["targets"] == [1]
    assert written["summary"]["warm"]["mfload-jax"] == {"best_seconds": 1.5, "median_seconds": 3.0}


def test_floats_are_cut_to_microseconds() -> None:
    assert results.rounded({"a": [0.12345678, (1, "x", None)]}) == {"a": [0.123457, [1, "x", None]]}


def test_markdown_tables() -> None:
    assert markdown.table(("a", "b"), [("c", "d")]) == "| a | b |\n| --- | --: |\n| c | d |"
    assert (markdown.seconds(None), markdown.seconds(1.23456)) == ("–", "1.235")
    assert (markdown.times(None), markdown.times(1.239)) == ("–", "1.24")


def test_the_machine_is_named(tmp_path: Path) -> None:
    found = described.describe(tmp_path, 0.01)
    assert found["cores"] == os.cpu_count()
    assert 0 <= float(str(found["busy_share_before"])) <= 1
    assert str(found["kernel"]) in described.sentence(found)
    assert "numpy" in described.versions_sentence(found)
