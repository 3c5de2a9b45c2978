"""The conformance suite, engine by engine."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import watch
from engine_suite import EngineSuite

from mfload import errors
from mfload.io import buffers


class TestPread(EngineSuite):
    """Through the page cache."""

    engine = "pread"


class TestDirect(EngineSuite):
    """Past it."""

    engine = "direct"


class TestMmap(EngineSuite):
    """In private maps."""

    engine = "mmap"

    @pytest.mark.parametrize("number", [errno.EFAULT, errno.EIO])
    def test_a_failing_disk_is_an_error_with_file_and_tensor(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        # The kernel says EFAULT where touching the page would kill, for whatever reason.
        def failing(*_: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(buffers, "madvise", failing)
        with watch.nothing_left():
            with pytest.raises(errors.ReadError) as info:
                self.load(path)
            assert info.value.errno == errno.EIO
            assert info.value.file == os.fspath(path)
            del info


class TestAuto(EngineSuite):
    """Whatever the route says."""

    engine = "auto"
