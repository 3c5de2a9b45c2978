"""What every engine has to do; each is a class of a few lines in test_engines.py."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import watch
from calls import as_options

import mfload
from mfload import errors
from mfload.planning import blocks, layout

MODEL = samples.model()
# These lie apart in the file: a map has several ranges of them to bring in.
APART = ["scalar", "embed", "layer.0.norm", "odd"]


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """What is freed here, is freed by counting references."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def _replace(path: Path) -> None:
    other = path.with_suffix(".other")
    shutil.copy2(path, other)
    os.replace(other, path)


def _rewrite(path: Path) -> None:
    data = path.read_bytes()
    before = path.stat().st_mtime_ns
    while path.stat().st_mtime_ns == before:
        with path.open("r+b") as file:
            file.write(data)


def _remove(path: Path) -> None:
    path.unlink()


CHANGES = [_shrink, _cut_to_nothing, _grow, _replace, _rewrite, _remove]


class EngineSuite:
    """Subclasses name the engine."""

    engine: Any = ""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return samples.save(tmp_path / "model.safetensors", MODEL)

    @pytest.fixture
    def many_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Blocks small enough that a small file has many, whatever the threads do."""
        small = blocks.Costs(block=64 << 10)
        monkeypatch.setattr("mfload.sources.local.LocalFile.costs", small)

    def load(self, path: Any, **options: Any) -> dict[str, Any]:
        return mfload.load(
            path, framework="numpy", **as_options({"engine": self.engine, **options})
        )

    def test_every_byte_arrives(self, path: Path) -> None:
        with watch.nothing_left():
            samples.assert_same(self.load(path), MODEL)

    @pytest.mark.parametrize("threads", [1, 2, 5])
    @pytest.mark.usefixtures("many_blocks")
    def test_threads_share_the_work(self, path: Path, threads: int) -> None:
        for _ in range(3):
            with watch.nothing_left():
                samples.assert_same(self.load(path, threads=threads), MODEL)

    @pytest.mark.parametrize("start", [0, 8, 32, 40, 56])
    def test_data_may_begin_anywhere(self, tmp_path: Path, start: int) -> None:
        names = {np.dtype(kind): name for name, kind in samples.NUMPY.items()}
        rows = [
            (name, names[array.dtype], array.shape, array.tobytes())
            for name, array in MODEL.items()
        ]
        path = samples.save_raw(tmp_path / "raw.safetensors", rows, start)
        samples.assert_same(self.load(path), MODEL)

    def test_several_files(self, tmp_path: Path) -> None:
        names = list(MODEL)
        for n in range(3):
            part = {name: MODEL[name] for name in names[n::3]}
            samples.save(tmp_path / f"model-0000{n + 1}-of-00003.safetensors", part)
        with watch.nothing_left():
            samples.assert_same(self.load(tmp_path), MODEL)

    def test_some_names(self, path: Path) -> None:
        for names in (["wide"], ["odd", "scalar"], ["empty"]):
            samples.assert_same(self.load(path, names=names), {name: MODEL[name] for name in names})

    def test_conversions(self, path: Path) -> None:
        loaded = self.load(path, dtype=[("embed|wide", "float64"), ("layer.1", "int32")])
        expected = dict(MODEL)
        for name, dtype in (("embed", "f8"), ("wide", "f8"), ("layer.1.q", "i4")):
            with np.errstate(all="ignore"):
                expected[name] = MODEL[name].astype(dtype)
        samples.assert_same(loaded, expected)

    def test_slices(self, path: Path) -> None:
        with (
            watch.nothing_left(),
            mfload.open(path, options=mfload.Options(engine=self.engine)) as opened,
        ):
            for name, index in (
                ("embed", (slice(3, 600, 7), slice(None, 100, 3))),
                ("embed", (slice(None), 128)),
                ("wide", (1, slice(149_990, None))),
                ("layer.0.q", (..., slice(None, None, -2))),
                ("scalar", ...),
                ("empty", (slice(None), 2)),
            ):
                assert samples.same(opened.get_slice(name)[index], MODEL[name][index])

    def test_arrays_outlive_the_file(self, path: Path) -> None:
        loaded = self.load(path)
        path.unlink()
        samples.assert_same(loaded, MODEL)

    def test_on_tmpfs(self, request: pytest.FixtureRequest) -> None:
        if not os.path.isdir("/dev/shm"):
            pytest.skip("no /dev/shm")
        path = Path(f"/dev/shm/mfload-{os.getpid()}-{self.engine}.safetensors")
        request.addfinalizer(lambda: path.unlink(missing_ok=True))
        samples.save(path, MODEL)
        samples.assert_same(self.load(path), MODEL)

    @pytest.mark.parametrize("change", CHANGES)
    def test_a_file_that_changed_after_its_header_is_refused(
        self, path: Path, change: Callable[[Path], None]
    ) -> None:
        opened = mfload.open(path, options=mfload.Options(engine=self.engine))
        change(path)
        with watch.nothing_left():
            self._assert_refused(lambda: opened.get_tensors(), path)

    @pytest.mark.parametrize("at", [0, 1, 2])
    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.usefixtures("many_blocks")
    def test_a_file_that_changes_under_the_read_is_refused(
        self,
        path: Path,
        monkeypatch: pytest.MonkeyPatch,
        change: Callable[[Path], None],
        at: int,
    ) -> None:
        done = threading.Event()

        def action(number: int) -> None:
            if number >= at and not done.is_set():
                done.set()
                change(path)

        # Apart, so that a map has several ranges to bring in as well.
        watch.before_read(monkeypatch, action)
        with watch.nothing_left():
            self._assert_refused(lambda: self.load(path, names=APART), path)
        assert done.is_set()

    def _assert_refused(self, load: Callable[[], Any], path: Path) -> None:
        with _no_collector():
            with pytest.raises(errors.SourceError) as info:
                load()
            # Also while somebody looks at the error, and with nobody collecting cycles.
            assert mfload.live_bytes() == 0
        # A file that is gone when it is to be opened is as good as never there.
        gone = errors.SourceChangedError if path.exists() else errors.SourceNotFoundError
        assert isinstance(info.value, errors.SourceChangedError | gone)
        assert info.value.file == os.fspath(path)

    @pytest.mark.usefixtures("many_blocks")
    def test_a_failing_disk_is_an_error_with_file_and_tensor(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def action(number: int) -> None:
            if number == 1:
                raise OSError(5, "Input/output error")

        watch.before_read(monkeypatch, action)
        with watch.nothing_left(), _no_collector():
            with pytest.raises(errors.ReadError, match="Input/output") as info:
                self.load(path, names=APART)
            assert mfload.live_bytes() == 0
        assert info.value.errno == 5
        assert info.value.file == os.fspath(path)
        monkeypatch.undo()
        samples.assert_same(self.load(path), MODEL)

    @pytest.mark.usefixtures("many_blocks")
    def test_a_hung_disk_ends_in_time_and_its_memory_stays_its_own(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        release = threading.Event()

        def action(number: int) -> None:
            if number >= 1:
                release.wait(30)

        watch.before_read(monkeypatch, action)
        try:
            start = time.monotonic()
            with pytest.raises(errors.LoadTimeoutError) as info:
                self.load(path, timeout=0.3, names=APART)
            assert 0.25 < time.monotonic() - start < 5
            assert info.value.file in (None, os.fspath(path))
            assert isinstance(info.value, TimeoutError)
            assert watch.readers()
            # What a reader can still write to is still counted, and nobody else's.
            if self.engine != "mmap":
                assert mfload.live_bytes() > 0
        finally:
            release.set()
        assert watch.wait_for(lambda: not watch.readers())
        assert watch.wait_for(lambda: mfload.live_bytes() == 0)
        assert os.fspath(path) not in watch.open_files()

    def test_a_hung_open_ends_in_time(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        release = threading.Event()
        real = os.open

        def slow(name: Any, *args: Any, **options: Any) -> int:
            if os.fspath(name) == os.fspath(path):
                release.wait(30)
            return real(name, *args, **options)

        monkeypatch.setattr(os, "open", slow)
        try:
            with pytest.raises(errors.LoadTimeoutError, match="header"):
                self.load(path, timeout=0.1)
            with pytest.raises(errors.LoadTimeoutError, match="header"):
                mfload.open(path, options=mfload.Options(timeout=0.1))
            with pytest.raises(errors.LoadTimeoutError, match="header"):
                mfload.plan(path, options=mfload.Options(timeout=0.1))
        finally:
            release.set()
        assert watch.wait_for(lambda: not watch.readers())

    def test_an_open_that_hangs_after_the_header_ends_in_time(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = mfload.open(path, options=mfload.Options(engine=self.engine, timeout=0.1))
        release = threading.Event()
        real = os.open

        def slow(name: Any, *args: Any, **options: Any) -> int:
            if os.fspath(name) == os.fspath(path):
                release.wait(30)
            return real(name, *args, **options)

        monkeypatch.setattr(os, "open", slow)
        try:
            with pytest.raises(errors.LoadTimeoutError):
                opened.get_tensor("embed")
        finally:
            release.set()
        assert watch.wait_for(lambda: not watch.readers())

    @pytest.mark.usefixtures("many_blocks")
    def test_loads_in_several_threads_do_not_meet(self, path: Path) -> None:
        results: list[Any] = []

        def work() -> None:
            results.append(self.load(path))

        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert len(results) == 4
        for result in results:
            samples.assert_same(result, MODEL)

    def test_a_whole_load_reads_each_byte_once(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reads = watch.spy(monkeypatch)
        report = mfload.Report()
        loaded = self.load(path, report=report)
        data = sum(array.nbytes for array in MODEL.values())
        assert sum(array.nbytes for array in loaded.values()) == data
        if self.engine == "mmap":
            assert reads == []
            assert (report.read_bytes, report.mapped_bytes) == (0, data)
            return
        assert report.read_bytes == data
        assert report.over_read_bytes == 0
        # A direct read is rounded to the disk's own blocks at both ends.
        spare = 2 * 4096 * len(reads) if self.engine == "direct" else 0
        assert data <= sum(read.got for read in reads) <= data + spare

    def test_buffers_hold_no_more_than_they_should(self, path: Path) -> None:
        loaded = self.load(path, names=["odd", "scalar"])
        if self.engine != "mmap":
            assert 0 < mfload.live_bytes() <= 4096 + 200
        kept = loaded.pop("odd")
        loaded.clear()
        assert samples.same(kept, MODEL["odd"])
        assert mfload.live_bytes() <= layout.BUFFER
