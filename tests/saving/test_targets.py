"""Where a path leads, and what is refused there."""

from __future__ import annotations

import errno
import inspect
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from mfload import errors
from mfload.saving import publishing
from mfload.saving.targets import Location, resolve


def touch(path: Path, text: str = "") -> Path:
    path.write_text(text)
    return path


class TestResolve:
    def test_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        root = str(tmp_path)
        path = f"{root}/a.safetensors"
        for given in (Path(path), path, f"{root}/./a.safetensors", os.fsencode(path)):
            assert resolve(given) == Location(root, "a.safetensors")
        assert resolve(tmp_path / "weights.dat") == Location(root, "weights.dat")
        monkeypatch.chdir(tmp_path)
        assert resolve("a.safetensors") == Location(root, "a.safetensors")

    def test_directories(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found = Location(str(tmp_path), "model.safetensors", whole=True)
        for given in (tmp_path, f"{tmp_path}/", f"{tmp_path}/."):
            assert resolve(given) == found
        monkeypatch.chdir(tmp_path)
        assert resolve(".") == resolve("./") == found
        (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
        assert resolve("link") == resolve("link/") == found
        assert resolve("link/x.safetensors") == Location(str(tmp_path), "x.safetensors")

    @pytest.mark.parametrize("path", ["no/a.safetensors", "no/", "no/no/a"])
    def test_directories_need_not_exist(self, path: str, tmp_path: Path) -> None:
        place = resolve(f"{tmp_path}/{path}")
        assert place.directory.startswith(str(tmp_path / "no"))
        assert place.whole == path.endswith("/")
        assert os.listdir(tmp_path) == []
        publishing._make_directory(place.directory)
        publishing._make_directory(place.directory)
        assert os.path.isdir(place.directory)

    @pytest.mark.parametrize("path", ["file/a", "file/", "file/a/b"])
    def test_a_file_is_not_a_directory(self, path: str, tmp_path: Path) -> None:
        touch(tmp_path / "file")
        with pytest.raises(errors.TargetError) as caught:
            resolve(f"{tmp_path}/{path}")
        assert caught.value.errno == errno.ENOTDIR
        assert str(caught.value.file).startswith(str(tmp_path))

    @pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json", ".json"])
    def test_names_of_indexes(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(errors.UsageError, match="index"):
            resolve(tmp_path / name)

    @pytest.mark.parametrize(
        "name", ["x.pt", "X.PT", "pytorch_model.bin", "w.gguf", "w.npz", "w.zarr"]
    )
    def test_names_of_other_formats(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "linked.pt").symlink_to(tmp_path / "w.safetensors")
        for path in (tmp_path / name, tmp_path / "linked.pt"):
            with pytest.raises(errors.UsageError, match="another format") as caught:
                resolve(path)
            assert str(caught.value.found).endswith(path.name)
        (tmp_path / name).mkdir()
        assert resolve(tmp_path / name).name == "model.safetensors"

    @pytest.mark.parametrize("path", ["", "\0", "a\0b", "\ud800", None, 5, [], ["a"], {}, object()])
    def test_what_is_no_path(self, path: Any) -> None:
        with pytest.raises(errors.UsageError, match="not a path"):
            resolve(path)

    def test_paths_that_the_system_refuses(self) -> None:
        with pytest.raises(errors.TargetError):
            resolve("/" + "x/" * 3000)

    def test_names_that_are_too_long(self, tmp_path: Path) -> None:
        with pytest.raises(errors.TargetError) as caught:
            resolve(tmp_path / ("x" * 300))
        assert caught.value.errno == errno.ENAMETOOLONG

    def test_what_is_no_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "d.safetensors").mkdir()
        os.mkfifo(tmp_path / "fifo")
        with socket.socket(socket.AF_UNIX) as sock:
            monkeypatch.chdir(tmp_path)  # Names of sockets are short.
            sock.bind("socket")
        for name, kind in (("d.safetensors", "directory"), ("fifo", "FIFO"), ("socket", "socket")):
            with pytest.raises(errors.TargetError) as caught:
                resolve(tmp_path / name)
            assert kind in str(caught.value.found)
        for path in ("/dev/null", "/dev/zero"):
            with pytest.raises(errors.TargetError, match="character device"):
                resolve(path)

    def test_links_are_followed(self, tmp_path: Path) -> None:
        (tmp_path / "there").mkdir()
        target = touch(tmp_path / "there" / "real.safetensors")
        link = tmp_path / "link.safetensors"
        link.symlink_to("there/real.safetensors")
        again = tmp_path / "again"
        again.symlink_to(link)
        assert resolve(link) == Location(str(target.parent), target.name, str(link))
        assert resolve(again) == Location(str(target.parent), target.name, str(again))
        target.unlink()
        assert resolve(link) == Location(str(target.parent), target.name, str(link))
        target.parent.rmdir()
        assert resolve(link) == Location(str(target.parent), target.name, str(link))

    def test_links_in_a_ring(self, tmp_path: Path) -> None:
        (tmp_path / "a").symlink_to("b")
        (tmp_path / "b").symlink_to("a")
        with pytest.raises(errors.TargetError) as caught:
            resolve(tmp_path / "a")
        assert caught.value.errno == errno.ELOOP


class TestNames:
    def test_hugging_face_s(self) -> None:
        place = Location("/d", "model.safetensors")
        assert place.names(1) == ["model.safetensors"]
        assert place.names(2) == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
        assert place.names(123_456)[-1] == "model-123456-of-123456.safetensors"
        assert place.names(123_456)[0] == "model-000001-of-123456.safetensors"
        assert place.index == "model.safetensors.index.json"

    def test_a_name_that_can_t_be_numbered(self) -> None:
        for name in ("weights.dat", ".safetensors"):
            place = Location("/d", name)
            assert place.names(1) == [name]
            assert place.stem == ""
            with pytest.raises(errors.UsageError):
                place.names(2)

    def test_hidden_names_are_short_and_those_of_the_name(self) -> None:
        prefix = Location("/d", "x" * 255).hidden
        assert prefix.startswith(".")
        assert len(prefix) < 50
        assert prefix == Location("/e", "x" * 255).hidden
        assert prefix != Location("/d", "model.safetensors").hidden


def test_directories_however_deep_are_made(tmp_path: Path) -> None:
    path, limit = tmp_path / Path(*"a" * 90), sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 60)
    try:
        publishing._make_directory(str(path))
    finally:
        sys.setrecursionlimit(limit)
    assert path.is_dir()
