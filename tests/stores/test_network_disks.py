"""Network disks: known by their mounts, read by many readers, and asked again when they forget."""

from __future__ import annotations

import errno
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fuse
import launching
import numpy as np
import pytest
import samples
from fuse import SlowDisk

import mfload
from mfload import errors, runtime, sources
from mfload.dtypes import TABLE
from mfload.index import Piece, TensorInfo
from mfload.io import route
from mfload.loading import execute
from mfload.mesh import base as mesh_base, load as mesh_load
from mfload.options import LoadOptions
from mfload.planning.request import Request
from mfload.sources import network
from mfload.sources.base import CACHED
from mfload.sources.local import LocalFile

Mounter = Callable[..., SlowDisk]
_LARGE = 12 << 20  # More than is asked of the page cache without a look.


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mounter]:
    """Mounts `tmp_path/stored` at `tmp_path/disk`; skips the test where that is refused."""
    mounted: list[SlowDisk] = []
    (tmp_path / "stored").mkdir()

    def made(name: str = "disk", **how: Any) -> SlowDisk:
        (tmp_path / name).mkdir(exist_ok=True)
        try:
            mounted.append(SlowDisk(tmp_path / "stored", tmp_path / name, **how))
        except OSError as error:
            pytest.skip(f"{error.strerror}")
        return mounted[-1]

    network._mounted.cache_clear()
    yield made
    for each in mounted:
        each.close()
    network._mounted.cache_clear()
    network._device.cache_clear()


def stored(tmp_path: Path, nbytes: int = _LARGE, count: int = 3) -> dict[str, Any]:
    """Writes `count` tensors of `nbytes` together to `tmp_path/stored/model.safetensors`."""
    shape = (nbytes // 4 // count // 64, 64)
    arrays = {f"{n}.w": samples.numbers(shape) for n in range(count)}
    samples.save(tmp_path / "stored" / "model.safetensors", arrays)
    return arrays


class TestKinds:
    @pytest.mark.parametrize(
        ("name", "direct"),
        [
            *((name, True) for name in ("nfs", "nfs4", "lustre", "ceph", "beegfs", "gpfs")),
            *((name, False) for name in ("9p", "virtiofs", "cifs", "smb3", "fuse")),
            *((f"fuse.{name}", False) for name in ("gcsfuse", "s3fs", "juicefs", "rclone")),
        ],
    )
    def test_are_read_by_many(self, name: str, direct: bool) -> None:
        found = network.kind(name)
        assert found is not None
        assert (found.name, found.direct) == (name, direct)
        costs = found.costs
        assert costs.concurrency == 16
        assert costs.merge_gap > CACHED.merge_gap

    @pytest.mark.parametrize(
        "name", ["ext4", "xfs", "btrfs", "overlay", "tmpfs", "fuseblk", "fuse.fuse-overlayfs"]
    )
    def test_disks_of_this_machine_are_none(self, name: str) -> None:
        assert network.kind(name) is None

    def test_processes_of_one_machine_share_the_readers(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert network.kind("nfs4").costs.concurrency == 8  # type: ignore[union-attr]
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
        assert network.kind("nfs4").costs.concurrency == 4  # type: ignore[union-attr]


class TestMounts:
    @pytest.fixture(autouse=True)
    def _mounts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        lines = [
            "22 27 0:21 / /proc rw,relatime - proc proc rw",
            "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw",
            "damaged",
            "42 27 0:39 / /data\\040sets rw shared:2 master:1 - nfs4 host:/export rw,vers=4.2",
            "43 27 0:40 /sub /cache rw - fuse.gcsfuse bucket rw",
        ]
        (tmp_path / "mountinfo").write_text("\n".join([lines[0], *lines[1:2], *lines[3:]]) + "\n")
        (tmp_path / "damaged").write_text("\n".join(lines))
        monkeypatch.setattr(network, "_MOUNTS", str(tmp_path / "mountinfo"))
        network._mounted.cache_clear()
        yield
        network._mounted.cache_clear()

    def test_a_device_is_looked_up_by_its_number(self) -> None:
        nfs, bucket = (network.disk(os.makedev(0, n), "/x/y") for n in (39, 40))
        assert nfs is not None
        assert bucket is not None
        assert (nfs.name, bucket.name) == ("nfs4", "fuse.gcsfuse")
        assert nfs.place != bucket.place
        assert nfs.place.endswith("/0:39")

    def test_others_are_no_network_disks(self) -> None:
        assert network.disk(os.makedev(0, 21), "/proc/x") is None
        assert network.disk(os.makedev(254, 0), "/x") is None
        assert network.disk(os.makedev(0, 99), "/gone") is None

    def test_without_the_mounts_all_disks_are_local(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for name in ("missing", "damaged"):
            monkeypatch.setattr(network, "_MOUNTS", str(tmp_path / name))
            assert network.disk(os.makedev(0, 39), "/x/y") is None
            network._mounted.cache_clear()

    def test_the_costs_are_those_of_the_disk(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"abc")
        source = LocalFile(str(tmp_path / "a"))
        source.identity = source.identity._replace(device=os.makedev(0, 39))
        assert source.disk is not None
        assert source.costs == source.disk.costs
        source.identity = source.identity._replace(device=os.makedev(254, 0))
        assert source.disk is None
        assert source.costs == CACHED


class TestStatus:
    def test_is_that_of_stat(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        path.write_bytes(b"abc")
        os.utime(path, ns=(1, 1_234_567_890_123_456_789))
        seen = os.stat(path)
        expected = seen.st_ino, 3, 1_234_567_890_123_456_789, seen.st_dev
        assert network.status(str(path)) == expected
        with pytest.raises(FileNotFoundError):
            network.status(str(tmp_path / "b"))


class TestRoute:
    """What `choose` says of files, as if they lay on a disk of some kind."""

    @pytest.fixture
    def legs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., route.Leg]:
        (tmp_path / "a").write_bytes(bytes(1 << 20))
        cached: list[float | None] = [0.0]
        monkeypatch.setattr("mfload.io.probes.cached_share", lambda *_: cached[0])
        monkeypatch.setattr("mfload.io.probes.direct_alignment", lambda *_: (4096, 4096))
        monkeypatch.setattr("mfload.io.probes.memory_room", lambda **_: (1 << 40, "memory"))

        def leg(kind: str, share: float | None = 0.0, nbytes: int = 64 << 20, **how: Any) -> Any:
            disk, cached[0] = network.kind(kind), share
            assert disk is not None
            monkeypatch.setattr(LocalFile, "disk", disk)
            given = how.get("engine", "auto"), how.get("page_cache", "auto")
            source = LocalFile(str(tmp_path / "a"))
            return route.choose([(source, nbytes)], *given)[0]

        return leg

    def test_direct_reads_have_to_prove_themselves(self, legs: Callable[..., route.Leg]) -> None:
        leg = legs("fuse.s3fs")
        assert (leg.engine, leg.direct, leg.cold, leg.either) == ("pread", False, True, True)
        assert "on fuse.s3fs" in leg.why
        assert not legs("fuse.s3fs", page_cache="keep").either

    def test_more_than_memory_is_not_read_past_the_cache(
        self, legs: Callable[..., route.Leg], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("mfload.io.probes.memory_room", lambda **_: (1 << 20, "memory"))
        assert legs("fuse.s3fs").engine == "pread"
        assert legs("nfs4").engine == "direct"  # As of a disk of this machine.

    def test_what_is_cached_is_not_waited_for(self, legs: Callable[..., route.Leg]) -> None:
        assert not legs("nfs4", 0.9).cold
        assert legs("nfs4", None).cold
        assert legs("nfs4", nbytes=1 << 10).cold

    def test_an_engine_that_was_asked_for_is_taken(self, legs: Callable[..., route.Leg]) -> None:
        leg = legs("fuse.s3fs", engine="direct")
        assert (leg.engine, leg.direct) == ("direct", True)
        assert "may read slowly" in leg.why
        leg = legs("fuse.s3fs", engine="mmap")
        assert leg.engine == "mmap"
        assert "slow there" in leg.why
        assert legs("fuse.s3fs", page_cache="bypass").direct


@pytest.mark.parametrize("largest", [64 << 10, 1 << 20])
class TestLoads:
    def test_each_byte_is_asked_for_once(
        self, mount: Mounter, tmp_path: Path, largest: int
    ) -> None:
        expected = stored(tmp_path)
        disk = mount(largest=largest, keeps=False)
        report = mfload.Report()
        found = mfload.load(tmp_path / "disk", "numpy", report=report)
        samples.assert_same(found, expected)
        size = (tmp_path / "stored" / "model.safetensors").stat().st_size
        # The header is read before, and an open after that drops what was read with it.
        assert size <= disk.read + 4096 <= size + (1 << 20)
        assert "on fuse.slow" in report.route[0][2]

    def test_reads_are_under_way_side_by_side(
        self, mount: Mounter, tmp_path: Path, largest: int
    ) -> None:
        stored(tmp_path)
        disk = mount(largest=largest, delay=0.0)
        path = tmp_path / "disk" / "model.safetensors"
        source = sources.find(path)
        assert source.costs.concurrency == 16
        disk.delay(0.02)
        began, requests = time.perf_counter(), disk.count()
        mfload.load(path, "numpy")
        one_by_one = 0.02 * (disk.count() - requests)
        assert time.perf_counter() - began < one_by_one / 1.5

    @pytest.mark.parametrize("index", [True, False])
    def test_headers_are_asked_for_at_once(
        self, mount: Mounter, tmp_path: Path, largest: int, index: bool
    ) -> None:
        names = [f"model-{n:05}-of-00016.safetensors" for n in range(1, 17)]
        for n, name in enumerate(names):
            samples.save(tmp_path / "stored" / name, {f"{n}.w": samples.numbers((64,))})
        if index:
            placed = {f"{n}.w": name for n, name in enumerate(names)}
            text = json.dumps({"metadata": {}, "weight_map": placed})
            (tmp_path / "stored" / "model.safetensors.index.json").write_text(text)
        disk = mount(largest=largest, valid=60)
        assert sources.find(tmp_path / "disk" / names[0]).costs.concurrency == 16
        os.listdir(tmp_path / "disk")
        disk.delay(0.02)
        began, kinds = time.perf_counter(), (fuse.LOOKUP, fuse.OPEN, fuse.READ)
        asked = sum(map(disk.count, kinds))
        with mfload.open(tmp_path / "disk", "numpy") as opened:
            assert len(opened.keys()) == 16
        took, asked = time.perf_counter() - began, sum(map(disk.count, kinds)) - asked
        assert took < 0.02 * asked / 1.5

    def test_slices_and_lazy_tensors(self, mount: Mounter, tmp_path: Path, largest: int) -> None:
        expected = stored(tmp_path)
        mount(largest=largest)
        with mfload.open(tmp_path / "disk", "numpy") as opened:
            part = opened.get_slice("1.w")
            assert samples.same(part[:, 8:16], expected["1.w"][:, 8:16])
            assert samples.same(part[5:7], expected["1.w"][5:7])
            assert samples.same(opened.get_tensor("2.w"), expected["2.w"])
            del part

    @pytest.mark.parametrize("engine", ["pread", "direct", "mmap"])
    def test_engines_that_were_asked_for(
        self, mount: Mounter, tmp_path: Path, largest: int, engine: Any
    ) -> None:
        expected = stored(tmp_path)
        mount(largest=largest)
        options = mfload.Options(engine=engine)
        found = mfload.load(tmp_path / "disk", "numpy", options=options)
        samples.assert_same(found, expected)


class TestFaults:
    def source(self, mount: Mounter, tmp_path: Path, **how: Any) -> tuple[SlowDisk, LocalFile]:
        (tmp_path / "stored" / "a").write_bytes(bytes(range(256)) * 1024)
        disk = mount(delay=0.0, **how)
        return disk, LocalFile(str(tmp_path / "disk" / "a"))

    @pytest.mark.parametrize("keeps", [True, False])
    def test_a_forgotten_file_is_opened_again(
        self, mount: Mounter, tmp_path: Path, keeps: bool
    ) -> None:
        disk, source = self.source(mount, tmp_path, largest=64 << 10)
        source.keep(keeps)
        with source.open() as handle:
            number, into = handle.fd, np.zeros(1 << 18, np.uint8)
            disk.forget()
            handle.read([into[: 1 << 17], into[1 << 17 :]], 0)
            assert into.tobytes() == (tmp_path / "stored" / "a").read_bytes()
            assert handle.fd == number  # Other threads may read from it.
            assert not os.get_inheritable(number)
        source.keep(False)

    def test_a_header_of_a_forgotten_file(self, mount: Mounter, tmp_path: Path) -> None:
        disk, source = self.source(mount, tmp_path)
        source.keep(True)
        source.open()
        disk.forget()
        assert source.read(1, 255) == bytes(range(1, 256))
        source.keep(False)

    def test_in_a_load_with_many_readers(
        self, mount: Mounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = stored(tmp_path)
        disk = mount(delay=0.0, largest=64 << 10)
        opens = disk.count(fuse.OPEN)
        ahead = execute.read_ahead
        forgot = list[int]()

        def forgetful(cold: Any) -> Any:
            kept = ahead(cold)  # All readers share what this opened.
            disk.forget()
            forgot.append(disk.count(fuse.OPEN) - opens)
            return kept

        monkeypatch.setattr(execute, "read_ahead", forgetful)
        samples.assert_same(mfload.load(tmp_path / "disk", "numpy"), expected)
        assert len(forgot) == 1
        assert disk.count(fuse.OPEN) - opens > forgot[0]

    @pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
    def test_a_disk_that_goes_on_failing(self, mount: Mounter, tmp_path: Path, number: int) -> None:
        disk, source = self.source(mount, tmp_path)
        disk.fail(number, 1 << 20)
        with pytest.raises(errors.ReadError, match=os.strerror(number)):
            source.read(0, 256)
        stored(tmp_path)
        with pytest.raises(errors.SourceError, match=os.strerror(number)):
            mfload.load(tmp_path / "disk" / "model.safetensors", "numpy")

    @pytest.mark.parametrize("gone", [True, False])
    def test_another_file_in_its_place(self, mount: Mounter, tmp_path: Path, gone: bool) -> None:
        disk, source = self.source(mount, tmp_path)
        with source.open() as handle:
            (tmp_path / "stored" / "a").unlink()
            if not gone:
                (tmp_path / "stored" / "a").write_bytes(bytes(256 * 1024))
            disk.forget()
            into = np.zeros(256, np.uint8)
            said = "gone" if gone else "changed"
            with pytest.raises(errors.SourceChangedError, match=said):
                handle.read([into], 0)
            assert not into.any()

    def test_a_change_is_seen_past_the_kernels_attributes(
        self, mount: Mounter, tmp_path: Path
    ) -> None:
        _, source = self.source(mount, tmp_path, valid=60)
        source.check()
        seen = os.stat(source.name)
        os.utime(tmp_path / "stored" / "a", (1, 1))
        assert os.stat(source.name).st_mtime_ns == seen.st_mtime_ns  # Cached for a minute.
        with pytest.raises(errors.SourceChangedError):
            source.check()

    def test_copies_of_the_source_know_the_disk(self, mount: Mounter, tmp_path: Path) -> None:
        _, source = self.source(mount, tmp_path)
        copy = pickle.loads(pickle.dumps(source))
        assert copy.disk == source.disk
        assert copy.disk.name == "fuse.slow"
        late = LocalFile(source.name, now=False)
        assert late.disk == source.disk
        assert "identity" not in vars(late)  # It was not opened for that.


class TestSharing:
    """Whether processes read for each other, by where each sees the files."""

    def exchanged(self, lying: list[str], price: float = 2.5) -> Any:
        transport = mesh_base.ProcessTransport(price, 4 << 20, by_devices=False)
        backend: Any = SimpleNamespace(transport=transport, platform=lambda: "cpu")
        row = TABLE["F32"]
        tensor = TensorInfo("w", row, (1024, 1024), (Piece(0, 0, 4 << 20),))
        requests = {rank: [Request(tensor, row)] for rank in range(4)}
        return mesh_load.exchanged(requests, LoadOptions(), backend, (), lying)

    def test_machines_that_share_nothing_read_for_each_other(self) -> None:
        width, why = self.exchanged(["disk one/0:39", "disk two/0:39"] * 2)
        assert width is not None
        assert "every byte is read by one process" in why
        assert self.exchanged(["disk one/0:39", "", "", ""])[0] is not None

    def test_processes_of_one_machine_share_its_page_cache(self) -> None:
        assert self.exchanged(["disk one/0:39"] * 4)[0] is None
        assert self.exchanged([""] * 4)[0] is None

    def test_without_word_of_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.exchanged(["disk one/0:39"])[0] is not None
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert self.exchanged(["disk one/0:39"])[0] is None

    def test_four_processes_ask_for_each_byte_once(self, mount: Mounter, tmp_path: Path) -> None:
        pytest.importorskip("torch")
        arrays = {f"{n}.w": np.arange(1 << 20, dtype=np.int32).reshape(64, -1) for n in range(3)}
        samples.save(tmp_path / "stored" / "model.safetensors", arrays)
        nbytes = sum(each.nbytes for each in arrays.values())
        alone, *apart = (mount(name) for name in ("together0", "apart0", "apart1"))
        script = Path(__file__).with_name("network_cases.py")
        cases = ["together", "apart"]
        ended = launching.launch(tmp_path, cases, count=4, seconds=100, script=script)
        for each in ended:
            assert each.code == 0, each.log
        # Four that share a page cache find there what another one has read.
        assert [each.said["together"]["read"] for each in ended] == [nbytes] * 4
        assert alone.read < nbytes + (1 << 20)  # And a header.
        # Two and two that do not share it read for each other, after a look at some pages.
        assert sum(each.said["apart"]["read"] for each in ended) == nbytes
        assert sum(each.read for each in apart) < nbytes * 1.3
        for each in ended:
            assert "every byte is read by one process" in each.said["apart"]["notes"][0]

    def test_each_process_begins_elsewhere(
        self, mount: Mounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = stored(tmp_path, 32 << 20)
        mount(delay=0.0)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        monkeypatch.setenv("LOCAL_RANK", "3")
        assert runtime.local_rank() == 3
        first: list[int] = []
        read = LocalFile.open

        def opened(source: LocalFile, flags: int = 0) -> Any:
            handle = read(source, flags)
            reads = handle.read

            def noted(vector: Any, offset: int, least: int | None = None) -> int:
                first.append(offset)
                return reads(vector, offset, least)

            monkeypatch.setattr(handle, "read", noted)
            return handle

        with monkeypatch.context() as patched:
            patched.setattr(LocalFile, "open", opened)
            options = mfload.Options(threads=1, timeout=60)
            found = mfload.load(tmp_path / "disk" / "model.safetensors", "numpy", options=options)
        samples.assert_same(found, expected)
        assert first[0] > (32 << 20) * 5 // 8
        assert min(first) < 1 << 20


def test_closing_unmounts(mount: Mounter, tmp_path: Path) -> None:
    disk = mount()
    assert os.path.ismount(tmp_path / "disk")
    disk.close()
    assert not os.path.ismount(tmp_path / "disk")
