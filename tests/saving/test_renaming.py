"""Renames that replace nothing; the changes made of them are in test_publishing and the kills."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from mfload.saving import renaming

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone")


class TestRenameFree:
    @pytest.mark.parametrize("code", [None, errno.EINVAL, errno.ENOSYS])
    def test_it_replaces_nothing(
        self, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if code is not None:
            # As on systems that have no such call.
            monkeypatch.setattr(renaming, "_linux", False)
        a, b = tmp_path / "a", tmp_path / "b"
        a.write_text("a")
        b.write_text("b")
        with pytest.raises(FileExistsError):
            renaming._rename_free(str(a), str(b))
        assert (a.read_text(), b.read_text()) == ("a", "b")
        b.unlink()
        renaming._rename_free(str(a), str(b))
        assert b.read_text() == "a"
        with pytest.raises(OSError) as caught:
            renaming._rename_free(str(a), str(tmp_path / "c"))
        assert caught.value.errno == errno.ENOENT
