"""What every device must do. Each device's test subclasses it and says how to make one."""

from __future__ import annotations

import concurrent.futures
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from mfload import errors
from mfload.cuda import memory
from mfload.cuda.device import DeviceRows
from mfload.cuda.memory import DeviceBuffer
from mfload.dtypes import TABLE
from mfload.io import buffers
from mfload.planning.layout import DEVICE_ALIGNMENT as ALIGNMENT

NUMPY = [row.numpy for row in TABLE.values() if row.numpy is not None]
drawn = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25
)


def noise(nbytes: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@contextmanager
def pinned(device: Any, nbytes: int) -> Iterator[Any]:
    stage = buffers.allocate(nbytes)
    device.pin(stage)
    try:
        yield stage
    finally:
        device.unpin(stage)


@contextmanager
def streams(device: Any, count: int = 1) -> Iterator[Any]:
    made = [device.stream() for _ in range(count)]
    try:
        yield made if count > 1 else made[0]
    finally:
        for stream in made:
            stream.close()


def flat(nbytes: int) -> DeviceRows:
    return DeviceRows(1, nbytes, nbytes)


def upload(device: Any, data: Any) -> DeviceBuffer:
    made = device.allocate(data.nbytes)
    with pinned(device, max(data.nbytes, 1)) as stage, streams(device) as stream:
        stage[: data.nbytes] = data.reshape(-1).view(np.uint8)
        stream.copy_in(made, 0, stage, flat(data.nbytes))
    return made


def download(buffer: DeviceBuffer) -> Any:
    back = np.empty(buffer.nbytes, np.uint8)
    with streams(buffer.device) as stream:
        stream.copy_out(back, buffer, 0)
        stream.synchronize()
    return back


class Contract:
    """Subclasses give `device`, and where they can `other` and `hard_limit`."""

    @pytest.fixture
    def device(self) -> Any:
        raise NotImplementedError

    @pytest.fixture
    def other(self) -> Any:
        pytest.skip("there is one device only")

    def test_what_it_is_called(self, device: Any) -> None:
        kind, number = device.place
        assert isinstance(kind, int)
        assert device.name.endswith(f":{number}")
        assert device.pci is None or device.pci == device.pci.lower()

    def test_it_is_current_as_long_as_it_is_wanted(self, device: Any) -> None:
        with device.current():
            with pytest.raises(ZeroDivisionError), device.current():
                _ = 1 // 0
            made = upload(device, noise(1000))
        assert download(made).tobytes() == noise(1000).tobytes()

    @pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 257, 100_000])
    def test_memory_is_aligned_and_counted(self, device: Any, nbytes: int) -> None:
        before = memory.live_bytes()
        made = [device.allocate(nbytes) for _ in range(3)]
        assert all(m.address % ALIGNMENT == 0 and m.nbytes == nbytes for m in made)
        assert all(m.device is device for m in made)
        starts = sorted(m.address for m in made)
        assert starts[0] + nbytes <= starts[1]
        assert starts[1] + nbytes <= starts[2]
        assert len(set(starts)) == 3
        assert memory.live_bytes() == before + 3 * nbytes
        del made
        gc.collect()
        assert memory.live_bytes() == before

    def test_room(self, device: Any) -> None:
        before = device.memory_info()
        assert 0 < before.free <= before.total
        held = device.allocate(32 << 20)
        assert device.memory_info().free <= before.free - (32 << 20)
        assert device.memory_info().total == before.total
        del held
        gc.collect()
        assert device.memory_info().free >= before.free

    def test_too_much_memory(self, device: Any) -> None:
        with pytest.raises(errors.MemoryLimitError, match=device.name) as caught:
            device.allocate(device.memory_info().total + ALIGNMENT)
        assert str(device.memory_info().total + ALIGNMENT) in str(caught.value.expected)
        assert caught.value.found is not None
        device.allocate(1024)

    @drawn
    @given(at=st.integers(0, 3000), start=st.integers(0, 3000), nbytes=st.integers(0, 5000))
    def test_copy_in_and_out(self, device: Any, at: int, start: int, nbytes: int) -> None:
        data = noise(start + nbytes + 7, nbytes)
        target = upload(device, np.zeros(at + nbytes + 9, np.uint8))
        with pinned(device, data.nbytes) as stage, streams(device) as stream:
            stage[:] = data
            stream.copy_in(target, at, stage[start:], flat(nbytes))
            back = np.empty(nbytes, np.uint8)
            stream.copy_out(back, target, at)
            stream.synchronize()
        assert back.tobytes() == data[start : start + nbytes].tobytes()
        around = download(target)
        assert not around[:at].any()
        assert not around[at + nbytes :].any()

    @drawn
    @given(
        count=st.integers(0, 40),
        nbytes=st.integers(0, 70),
        gap=st.integers(0, 50),
        at=st.integers(0, 300),
        within=st.booleans(),
    )
    def test_rows(
        self, device: Any, count: int, nbytes: int, gap: int, at: int, within: bool
    ) -> None:
        rows = DeviceRows(count, nbytes, nbytes + gap)
        data = noise(5 + max(0, count - 1) * (nbytes + gap) + nbytes)
        target = upload(device, np.zeros(at + count * nbytes + 3, np.uint8))
        if within:
            source = upload(device, data)
            with streams(device) as stream:
                stream.copy_within(target, at, source, 5, rows)
        else:
            with pinned(device, data.nbytes) as stage, streams(device) as stream:
                stage[:] = data
                stream.copy_in(target, at, stage[5:], rows)
        lines = [data[5 + n * rows.pitch :][:nbytes].tobytes() for n in range(count)]
        assert download(target).tobytes() == bytes(at) + b"".join(lines) + bytes(3)

    def test_copies_from_another_device(self, device: Any, other: Any) -> None:
        data = noise(5000)
        source, target = upload(other, data), device.allocate(3000)
        with streams(device) as stream:
            stream.copy_within(target, 0, source, 1000, flat(3000))
        assert download(target).tobytes() == data[1000:4000].tobytes()
        with streams(device) as stream:
            stream.copy_within(target, 0, source, 0, DeviceRows(30, 100, 160))
        assert download(target).tobytes() == data[:4800].reshape(30, 160)[:, :100].tobytes()

    def test_memory_pinned_by_one_serves_another(self, device: Any, other: Any) -> None:
        target = other.allocate(4096)
        with pinned(device, 4096) as stage, streams(other) as stream:
            stage[:] = noise(4096)
            stream.copy_in(target, 0, stage, flat(4096))
            stream.synchronize()
        assert download(target).tobytes() == noise(4096).tobytes()

    def test_work_of_a_stream_keeps_its_order(self, device: Any) -> None:
        target, steps = device.allocate(64), 50
        with pinned(device, 64 * steps) as stage, streams(device) as stream:
            for n in range(steps):
                stage[64 * n : 64 * (n + 1)] = n
                stream.copy_in(target, 0, stage[64 * n :], flat(64))
        assert set(download(target)) == {steps - 1}

    def test_a_slot_is_free_once_its_event_is_done(self, device: Any) -> None:
        target, blocks = device.allocate(40 * 1000), noise(40 * 1000).reshape(40, 1000)
        with pinned(device, 1000) as stage, streams(device) as stream:
            event = None
            for n, block in enumerate(blocks):
                if event is not None and n % 2:
                    event.wait()
                while event is not None and not event.done():
                    pass
                stage[:] = block
                stream.copy_in(target, n * 1000, stage, flat(1000))
                event = stream.record()
            assert event is not None
            event.wait()
            assert event.done()
        assert download(target).tobytes() == blocks.tobytes()

    def test_a_stream_waits_for_an_event_of_another(self, device: Any) -> None:
        data = noise(20_000)
        first, second = device.allocate(20_000), device.allocate(20_000)
        with pinned(device, 20_000) as stage, streams(device, 2) as (one, two):
            stage[:] = data
            for n in range(20):
                part = flat(1000)
                one.copy_in(first, n * 1000, stage[n * 1000 :], part)
                two.wait(one.record())
                two.copy_within(second, n * 1000, first, n * 1000, part)
            two.synchronize()
            assert download(second).tobytes() == data.tobytes()

    def test_an_event_says_nothing_of_what_comes_later(self, device: Any) -> None:
        target = device.allocate(1000)
        with pinned(device, 1000) as stage, streams(device, 2) as (one, two):
            event = one.record()
            two.copy_in(target, 0, stage, flat(1000))
            one.copy_in(target, 0, stage, flat(1000))
            event.wait()
            assert event.done()
            two.synchronize()
            one.synchronize()

    def test_an_event_outlives_its_stream(self, device: Any) -> None:
        with streams(device) as stream:
            event = stream.record()
        event.wait()
        assert event.done()

    def test_closing_waits_and_may_be_done_twice(self, device: Any) -> None:
        data, target = noise(4096), device.allocate(4096)
        with pinned(device, 4096) as stage:
            stage[:] = data
            stream = device.stream()
            stream.copy_in(target, 0, stage, flat(4096))
            stream.close()
            stream.close()
            stage[:] = 0
        assert download(target).tobytes() == data.tobytes()

    def test_nothing_is_copied(self, device: Any) -> None:
        target, source = device.allocate(0), device.allocate(0)
        with pinned(device, 1) as stage, streams(device) as stream:
            for rows in (
                DeviceRows(0, 0, 0),
                DeviceRows(1, 0, 0),
                DeviceRows(5, 0, 9),
                DeviceRows(0, 8, 8),
            ):
                stream.copy_in(target, 0, stage, rows)
                stream.copy_within(target, 0, source, 0, rows)
            stream.copy_out(np.empty(0, np.uint8), source, 0)
            stream.synchronize()

    def test_many_small_copies(self, device: Any) -> None:
        data, target = noise(6000), device.allocate(6000)
        order = np.random.default_rng(3).permutation(2000).tolist()
        with pinned(device, 6000) as stage, streams(device, 3) as several:
            stage[:] = data
            for n in order:
                several[n % 3].copy_in(target, 3 * n, stage[3 * n :], flat(3))
        assert download(target).tobytes() == data.tobytes()

    def test_threads(self, device: Any) -> None:
        data, target = noise(8 * 5000), device.allocate(8 * 5000)

        def work(n: int) -> None:
            begin = n * 5000
            with pinned(device, 1000) as stage, streams(device) as stream:
                for at in range(begin, begin + 5000, 1000):
                    stage[:] = data[at : at + 1000]
                    stream.copy_in(target, at, stage, flat(1000))
                    event = stream.record()
                    device.allocate(100 + n)
                    event.wait()

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert download(target).tobytes() == data.tobytes()

    def test_events_may_be_waited_for_by_any_thread(self, device: Any) -> None:
        with streams(device) as stream, concurrent.futures.ThreadPoolExecutor(4) as pool:
            event = stream.record()
            list(pool.map(lambda _: event.wait(), range(8)))
            assert all(pool.map(lambda _: event.done(), range(8)))

    def test_memory_is_locked_and_given_back(self, device: Any) -> None:
        for _ in range(3):  # What stays locked can't be locked again.
            with pinned(device, 3 << 20) as stage:
                stage[:] = 1
