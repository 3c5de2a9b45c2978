"""What is seen of an old checkpoint, and what is nobody's business."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mfload import errors
from mfload.saving.targets import Existing, Location, look


def touch(path: Path, text: str = "") -> Path:
    path.write_text(text)
    return path


def index(path: Path, *files: str) -> None:
    path.write_text(json.dumps({"weight_map": {f"w{n}": file for n, file in enumerate(files)}}))


NOTHING = Existing([], False, frozenset(), frozenset(), frozenset())


class TestLook:
    PLACE = "model.safetensors"

    def look(self, folder: Path, name: str = PLACE) -> Existing:
        return look(Location(str(folder), name))

    def test_nothing(self, tmp_path: Path) -> None:
        touch(tmp_path / "config.json")
        found = self.look(tmp_path)
        assert found == NOTHING

    def test_everything(self, tmp_path: Path) -> None:
        place = Location(str(tmp_path), self.PLACE)
        hidden = place.hidden + "00001.safetensors"
        shard, stray = "model-00001-of-00002.safetensors", "model-00001-of-00003.safetensors"
        for name in (self.PLACE, shard, stray, "free.safetensors", "adapter.safetensors", hidden,
                     ".other.safetensors", "model-x-of-y.safetensors"):  # fmt: skip
            touch(tmp_path / name)
        index(tmp_path / "model.safetensors.index.json", shard, "./free.safetensors", "gone",
              "sub/x.safetensors", "../up.safetensors", "/abs")  # fmt: skip
        index(tmp_path / "adapter.safetensors.index.json", "adapter.safetensors", stray)
        found = self.look(tmp_path)
        assert found.found == [self.PLACE, "model.safetensors.index.json"]
        assert found.sharded
        assert found.files == {self.PLACE, shard, "free.safetensors"}
        assert found.left == {hidden}
        assert found.kept == {"adapter.safetensors", stray}

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "5", "{}", '{"weight_map": 5}', '{"weight_map": {"a": 5}}',
                 '{"weight_map": {"a": []}}', "[" * 100_000, "\xff"]
    )  # fmt: skip
    def test_an_index_that_is_none(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("latin1"))
        found = self.look(tmp_path)
        assert found.sharded
        assert found.files == frozenset()
        assert found.doubt == "model.safetensors.index.json"

    def test_without_an_index_a_complete_set_is_the_checkpoint_s(self, tmp_path: Path) -> None:
        names = {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
        for name in (*names, "model-1-of-2.safetensors"):
            touch(tmp_path / name)
        assert self.look(tmp_path).files == names
        touch(tmp_path / "model-00001-of-00003.safetensors")
        assert self.look(tmp_path).files == frozenset()

    def test_an_index_names_files_that_are_not_ours(self, tmp_path: Path) -> None:
        for name in ("config.json", "notes.txt", "a.safetensors"):
            touch(tmp_path / name)
        own = "model.safetensors.index.json"
        index(tmp_path / own, "config.json", "notes.txt", own, "a.safetensors")
        assert self.look(tmp_path).files == {"a.safetensors"}

    def test_an_index_that_is_a_fifo(self, tmp_path: Path) -> None:
        touch(tmp_path / self.PLACE)
        os.mkfifo(tmp_path / "other.safetensors.index.json")
        assert self.look(tmp_path).doubt == "other.safetensors.index.json"

    def test_a_name_that_is_no_safetensors_name_has_no_neighbours(self, tmp_path: Path) -> None:
        touch(tmp_path / "weights.dat")
        touch(tmp_path / "weights-00001-of-00002.safetensors")
        found = self.look(tmp_path, "weights.dat")
        assert found == NOTHING._replace(found=["weights.dat"], files=frozenset({"weights.dat"}))

    def test_names_that_regexes_know(self, tmp_path: Path) -> None:
        touch(tmp_path / "a+b-00001-of-00001.safetensors")
        touch(tmp_path / "aab-00001-of-00001.safetensors")
        assert self.look(tmp_path, "a+b.safetensors").files == {"a+b-00001-of-00001.safetensors"}

    def test_a_directory_that_can_t_be_listed(self, tmp_path: Path) -> None:
        assert self.look(tmp_path / "gone") == NOTHING
        touch(tmp_path / "file")
        with pytest.raises(errors.TargetError):
            self.look(tmp_path / "file")
