"""An index file says which shard to look at: the headers of the others are not read."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import serving
from hypothesis import strategies as st
from reference import Tensor, write

import mfload
from mfload import errors
from mfload.formats import safetensors

INDEX = "model.safetensors.index.json"


def lay(root: Path, shards: dict[str, list[str]], placed: dict[str, str] | None = None) -> Path:
    """Writes shards of small tensors, each with a value of its own, and an index."""
    root.mkdir(parents=True, exist_ok=True)
    number = 0
    for file, names in shards.items():
        tensors: dict[str, Tensor] = {}
        for name in names:
            number += 1
            tensors[name] = Tensor("U8", (3,), bytes([number] * 3))
        (root / file).write_bytes(write(tensors))
    placed = placed or {name: file for file, names in shards.items() for name in names}
    (root / INDEX).write_text(json.dumps({"weight_map": placed}))
    return root


SHARDS = {f"{n}.safetensors": [f"{n}.b", f"{n}.a"] for n in "312"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return lay(tmp_path / "model", SHARDS)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose headers are read, in order."""
    seen: list[str] = []
    true = safetensors.read

    def header(source: Any, number: int) -> Any:
        seen.append(os.path.basename(source.name))
        return true(source, number)

    monkeypatch.setattr(safetensors, "read", header)
    return seen


def test_a_name_reads_the_header_of_its_shard(model: Path, read: list[str]) -> None:
    whole = mfload.load(model, "numpy")
    assert sorted(read) == ["1.safetensors", "2.safetensors", "3.safetensors"]
    for names in (["2.a"], r"^2\.a$", lambda name: name == "2.a", iter(["2.a"])):
        read.clear()
        (found,) = mfload.load(model, "numpy", names=names).items()  # type: ignore[arg-type]
        assert found[0] == "2.a"
        np.testing.assert_array_equal(found[1], whole["2.a"])
        assert read == ["2.safetensors"]
    read.clear()
    assert mfload.plan(model, names=["3.b"]).tensors == 1
    assert read == ["3.safetensors"]


def test_an_opened_checkpoint_reads_headers_as_they_are_needed(
    model: Path, read: list[str]
) -> None:
    with mfload.open(model) as opened:
        assert opened.keys() == sorted(name for names in SHARDS.values() for name in names)
        assert len(opened) == 6
        assert "1.b" in opened
        assert "x" not in opened
        assert read == []
        opened.get_tensor("3.a")
        opened.get_slice("3.b")
        assert read == ["3.safetensors"]
        assert list(opened.get_tensors(["2.a", "3.a", "2.b"])) == ["2.a", "3.a", "2.b"]
        assert read == ["3.safetensors", "2.safetensors"]
        again = pickle.loads(pickle.dumps(opened))
        read.clear()
        assert again.get_tensor("1.b").tobytes() == opened.get_tensor("1.b").tobytes()
        assert read == ["1.safetensors"] * 2
        # Of all headers from here on.
        assert opened.offset_keys() == ["1.a", "1.b", "2.a", "2.b", "3.a", "3.b"]
        read.clear()
        assert len(opened.get_tensors()) == 6
        assert opened.metadata() is None
        with pytest.raises(errors.TensorNotFoundError, match=r"1\.b"):
            opened.get_tensor("1.bb")
        assert read == []


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32), count=st.integers(1, 6))
def test_any_subset_is_that_of_all_headers(
    seed: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(seed)
    shards = {
        f"{n}.safetensors": [f"{n}.{k}" for k in rng.sample(range(9), rng.randint(1, 5))]
        for n in range(count)
    }
    path = lay(tmp_path_factory.mktemp("any"), shards)
    whole = mfload.load(path, "numpy")
    wanted = rng.sample(list(whole), rng.randint(0, len(whole)))
    pattern = rng.choice("123")
    for names, chosen in (
        (wanted, set(wanted)),
        (lambda name: name in wanted, set(wanted)),
        (f"[{pattern}0]$", {name for name in whole if name[-1] in f"{pattern}0"}),
    ):
        if not chosen:
            with pytest.raises(errors.TensorNotFoundError, match="no tensor matches"):
                mfload.load(path, "numpy", names=names)  # type: ignore[arg-type]
            continue
        found = mfload.load(path, "numpy", names=names)  # type: ignore[arg-type]
        assert list(found) == [name for name in whole if name in chosen]
        for name, array in found.items():
            assert array.tobytes() == whole[name].tobytes()
        plan = mfload.plan(path, names=names)  # type: ignore[arg-type]
        assert plan.tensors == len(chosen)


class TestWhatIsWrong:
    def test_of_another_shard_is_found_when_it_is_needed(self, model: Path) -> None:
        (model / "3.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
        assert list(mfload.load(model, "numpy", names=["1.a"])) == ["1.a"]
        with mfload.open(model) as opened:
            assert opened.get_tensor("2.a").shape == (3,)
            with pytest.raises(errors.HeaderError) as caught:
                opened.get_tensor("3.a")
            assert caught.value.file == str(model / "3.safetensors")
            with pytest.raises(errors.HeaderError):
                opened.offset_keys()
            assert opened.get_tensor("1.a").shape == (3,)
        with pytest.raises(errors.HeaderError):
            mfload.load(model, "numpy")
        assert not mfload.verify(model).ok

    @pytest.mark.parametrize("names", [["1.a"], r"1\.a"])
    def test_a_shard_without_the_tensor(self, tmp_path: Path, names: Any) -> None:
        placed = {name: file for file, names in SHARDS.items() for name in names}
        lay(tmp_path, SHARDS, placed | {"1.a": "2.safetensors"})
        with mfload.open(tmp_path) as opened:
            assert opened.get_tensor("3.a").shape == (3,)
            for call in (
                lambda: opened.get_tensor("1.a"),
                lambda: opened.get_tensors(["3.a", "1.a"]),
                lambda: mfload.load(tmp_path, "numpy", names=names),
                lambda: mfload.load(tmp_path, "numpy"),
            ):
                with pytest.raises(errors.CheckpointError, match="not where the index") as caught:
                    call()
                (line,) = caught.value.problems
                assert "1.a" in line
                assert str(tmp_path / "2.safetensors") in line
                assert str(tmp_path / "1.safetensors") in line

    def test_a_tensor_that_the_index_leaves_out(self, tmp_path: Path) -> None:
        placed = {name: file for file, names in SHARDS.items() for name in names}
        del placed["3.a"]
        lay(tmp_path, SHARDS, placed)
        assert list(mfload.load(tmp_path, "numpy", names=["3.a"])) == ["3.a"]
        assert list(mfload.load(tmp_path, "numpy", names=r"3\.")) == ["3.a", "3.b"]
        # No warning of a rule that matches no tensor.
        assert mfload.load(tmp_path, "numpy", dtype={"3.a": "int32"})["3.a"].dtype == np.int32
        with mfload.open(tmp_path) as opened:
            assert opened.get_tensor("3.a").shape == (3,)
            every = sorted([*placed, "3.a"])
            assert opened.keys() == every
            assert sorted(opened.offset_keys()) == every
            assert sorted(opened.get_tensors()) == every
            assert opened.keys() == every

    def test_a_broken_link_is_found_when_it_is_needed(self, model: Path) -> None:
        file = model / "3.safetensors"
        file.unlink()
        file.symlink_to(model / "gone")
        assert list(mfload.load(model, "numpy", names=["1.a"])) == ["1.a"]
        with mfload.open(model) as opened:
            assert len(opened.keys()) == 6
            for call, held in (
                (lambda: opened.get_tensor("3.a"), "tensor '3.a'"),
                (opened.offset_keys, "2 tensors, '3.b' among them"),
                (lambda: mfload.load(model, "numpy"), "2 tensors, '3.b' among them"),
            ):
                with pytest.raises(errors.ShardNotFoundError) as caught:
                    call()
                (line,) = caught.value.problems
                assert "3.safetensors" in line
                assert f"is a broken link ({held})" in line
            assert opened.get_tensor("1.a").shape == (3,)

    def test_a_shard_that_goes_away_after_it_was_listed(self, model: Path) -> None:
        with mfload.open(model) as opened:
            (model / "3.safetensors").unlink()
            for call in (lambda: opened.get_tensor("3.a"), opened.get_tensors):
                with pytest.raises(errors.ShardNotFoundError, match="does not exist"):
                    call()

    def test_no_shard_is_looked_at_until_it_is_needed(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[str] = []
        for name in ("stat", "open"):
            true = getattr(os, name)

            def noted(path: Any, *more: Any, true: Any = true, **named: Any) -> Any:
                seen.append(os.path.basename(path))
                return true(path, *more, **named)

            monkeypatch.setattr(os, name, noted)
        mfload.load(model, "numpy", names=["2.a"])
        assert "2.safetensors" in seen
        assert not {"1.safetensors", "3.safetensors"} & {*seen}

    def test_shards_and_index_that_were_replaced_before_they_were_read(self, model: Path) -> None:
        with mfload.open(model) as opened:
            opened.get_tensor("1.a")
            again = pickle.loads(pickle.dumps(opened))
            (model / "new").write_bytes((model / INDEX).read_bytes())
            os.replace(model / "new", model / INDEX)
            for each in (opened, again, opened):  # What is refused stays so.
                with pytest.raises(errors.SourceChangedError) as caught:
                    each.get_tensor("2.a")
                assert caught.value.file == str(model / INDEX)
            assert opened.get_tensor("1.a").shape == (3,)

    def test_a_shard_that_changed_since_its_header_was_read(self, model: Path) -> None:
        with mfload.open(model) as opened:
            opened.get_tensor("2.b")
            file = model / "2.safetensors"
            other = write({"2.a": Tensor("U8", (3,), b"abc"), "2.b": Tensor("U8", (3,), b"abc")})
            (model / "new").write_bytes(other)
            os.replace(model / "new", file)
            with pytest.raises(errors.SourceChangedError) as caught:
                opened.get_tensor("2.a")
            assert caught.value.file == str(file)
            assert opened.get_tensor("1.a").shape == (3,)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: mfload.load(model, "numpy"),
        lambda model: mfload.load(model, "numpy", names=["1.a"]),
        lambda model: mfload.open(model).get_tensor("2.a"),
        mfload.verify,
    ],
)
@pytest.mark.parametrize("others", ["more shards", "other shards"])
def test_a_writer_that_replaces_the_checkpoint_while_headers_are_read(
    model: Path, others: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, times = safetensors.read, 0

    def header(source: Any, number: int = 0) -> Any:
        nonlocal times
        times += 1
        if times == 1:
            more = {f"{n}.safetensors": [f"{n}.a"] for n in "45"}
            lay(model, more | (SHARDS if others == "more shards" else {}))
        return true(source, number)

    monkeypatch.setattr(safetensors, "read", header)
    with pytest.raises(errors.SourceChangedError, match=r"changed since|load again"):
        call(model)
    monkeypatch.undo()
    call(model) if others == "more shards" else mfload.load(model, "numpy")


def test_behind_a_url_a_shard_is_one_request_and_one_of_the_index(model: Path) -> None:
    files = {f"/m/{path.name}": path.read_bytes() for path in model.iterdir()}
    with serving.serving(files) as server:
        index = server.url(f"/m/{INDEX}")
        with mfload.open(index) as opened:
            assert [asked.path for asked in server.asked] == [f"/m/{INDEX}"]
            opened.info("2.a")
            asked = [(asked.path, asked.range) for asked in server.asked[1:]]
            # The index may have been replaced since.
            assert asked == [("/m/2.safetensors", "bytes=0-65535"), (f"/m/{INDEX}", "bytes=0-0")]
            server.asked.clear()
            # All names are those of all shards, each of which is asked for once.
            assert len(opened.keys()) == 6
            assert {asked.path for asked in server.asked} == {f"/m/{n}.safetensors" for n in "13"}
            server.asked.clear()
            opened.info("1.a")
            # So may that one of which data may have been read.
            assert {asked.path for asked in server.asked} == {f"/m/{INDEX}", "/m/2.safetensors"}
            assert {asked.range for asked in server.asked} == {"bytes=0-0"}
            assert opened.get_tensor("2.a").tolist() == mfload.load(model, "numpy")["2.a"].tolist()
        server.asked.clear()
        mfload.plan(index, names=["3.a", "1.a"])
        assert [asked.path for asked in (server.asked[0], server.asked[-1])] == [f"/m/{INDEX}"] * 2
        rest = {asked.path for asked in server.asked[1:-1]}
        assert len(server.asked) == 4
        assert rest == {f"/m/{n}.safetensors" for n in "13"}


class TestMissingShards:
    """What is there can be had; nothing is taken for all, or for not there, that may be missing."""

    @pytest.fixture(params=["index", "url", "numbers"])
    def torn(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
        """A checkpoint with the second shard missing, and the name of that."""
        names = {n: f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}
        root = lay(tmp_path / "torn", {file: [f"{n}.a", f"{n}.b"] for n, file in names.items()})
        (root / names[2]).unlink()
        if request.param == "url":
            files = {f"/{file.name}": file.read_bytes() for file in root.iterdir()}
            with serving.serving(files) as server:
                yield server.url(f"/{INDEX}")
            return
        if request.param == "numbers":
            (root / INDEX).unlink()
        yield root

    def test_tensors_whose_shards_are_there(self, torn: Any) -> None:
        names = ["1.a", "3.b"]
        assert sorted(mfload.load(torn, "numpy", names=names)) == names
        assert sorted(name for name, _ in mfload.stream(torn, "numpy", names=names)) == names
        found = mfload.load(torn, "numpy", names=names, shardings=0, shard=(0, 3))
        assert {name: array.shape for name, array in found.items()} == dict.fromkeys(names, (1,))
        assert mfload.plan(torn, names=names).tensors == 2
        with mfload.open(torn) as opened, pickle.loads(pickle.dumps(opened)) as again:
            for each in (opened, again):
                assert {"1.a", "3.b"} <= {*each.keys()}
                assert each.get_tensor("3.b").shape == (3,)

    def test_one_in_the_missing_shard_is_missed_by_name(self, torn: Any) -> None:
        with mfload.open(torn) as opened:
            for call in (
                lambda: mfload.load(torn, "numpy", names=["1.a", "2.b"]),
                lambda: list(mfload.stream(torn, "numpy", names=["2.b"])),
                lambda: mfload.plan(torn, names=["2.b"]),
                lambda: opened.get_tensor("2.b"),
            ):
                with pytest.raises(errors.ShardNotFoundError) as caught:
                    call()
                assert isinstance(caught.value, errors.SourceNotFoundError)
                assert caught.value.tensor in ("2.b", None)
                (line,) = caught.value.problems
                assert "model-00002-of-00003" in line or line.startswith("shard 2 of 3 is missing")
                if "named by the index" in line:
                    assert caught.value.tensor == "2.b"
                    assert "(tensor '2.b')" in line

    def test_all_of_it_is_refused(self, torn: Any) -> None:
        with mfload.open(torn) as opened:
            for call in (
                lambda: mfload.load(torn, "numpy"),
                lambda: mfload.load(torn, "numpy", names=r"^[23]"),
                lambda: mfload.load(torn, "numpy", shardings=0, shard=(0, 3)),
                lambda: mfload.stream(torn, "numpy"),
                lambda: mfload.restore(torn, framework="numpy"),
                lambda: mfload.diff(torn, torn),
                opened.get_tensors,
                opened.offset_keys,
            ):
                with pytest.raises(errors.ShardNotFoundError):
                    call()
        problems = [str(each) for each in mfload.verify(torn).problems]
        assert len(problems) == 1
        assert "00002" in problems[0] or "shard 2 of 3 is missing" in problems[0]

    def test_a_plan_of_what_is_there(self, torn: Any) -> None:
        found = mfload.plan(torn)
        assert found.tensors == 4
        (note,) = (note for note in found.notes if "missing" in note)
        assert "00002" in note or "shard 2 of 3" in note


class TestSomeOfTheShards:
    """Calls that take some tensors, by names or by rules, need the shards that hold these."""

    SOME = ("1.a", "3.b")

    @pytest.fixture
    def torn(self, model: Path) -> Path:
        (model / "2.safetensors").unlink()
        return model

    @pytest.fixture
    def whole(self, tmp_path: Path) -> Path:
        return lay(tmp_path / "whole", SHARDS)

    @pytest.mark.parametrize("names", [SOME, r"^[13]\.[ab]$", lambda name: name in ("1.a", "3.b")])
    def test_by_names(self, torn: Path, whole: Path, names: Any, tmp_path: Path) -> None:
        expected = mfload.load(whole, "numpy", names=names)
        mfload.convert(torn, tmp_path / "new.safetensors", names=names)
        found = mfload.load(tmp_path / "new.safetensors", "numpy")
        assert sorted(found) == sorted(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
        for one, other in ((torn, whole), (whole, torn), (torn, tmp_path / "new.safetensors")):
            found = mfload.diff(one, other, names=names)
            assert found.equal
            assert {each.name for each in found.tensors} == {*expected}
        assert mfload.diff(expected, torn, names=names).equal
        tree = mfload.restore(torn, names=names, framework="numpy")
        assert {f"{n}.{key}" for n, held in tree.items() for key in held} == {*expected}

    def test_by_rules(self, torn: Path, tmp_path: Path) -> None:
        rules = {r"2\..*": None, r"([13])\.a": r"new.\1"}
        mfload.convert(torn, tmp_path / "new.safetensors", mapping=rules)
        assert sorted(mfload.load(tmp_path / "new.safetensors", "numpy")) == [
            *("1.b", "3.b"),
            *("new.1", "new.3"),
        ]

    @pytest.mark.parametrize("names", [("1.a", "2.a"), r"a$", None])
    def test_what_is_asked_for_must_be_there(
        self, torn: Path, whole: Path, names: Any, tmp_path: Path
    ) -> None:
        rules = {r"(2\.a)": r"new.\1", ".*": None}
        for call in (
            lambda: mfload.convert(torn, tmp_path / "new.safetensors", names=names),
            lambda: mfload.convert(torn, tmp_path / "new.safetensors", mapping=rules),
            lambda: mfload.diff(torn, whole, names=names),
            lambda: mfload.diff(whole, torn, names=names),
            lambda: mfload.restore(torn, names=names, framework="numpy"),
            lambda: mfload.align(torn),
        ):
            with pytest.raises(errors.ShardNotFoundError) as caught:
                call()
            assert "2.safetensors" in caught.value.problems[0]

    @pytest.mark.parametrize("algorithm", ["xxh3", "sha256"])
    def test_a_manifest_of_all_is_compared_with_what_is_taken(
        self, model: Path, tmp_path: Path, algorithm: Any
    ) -> None:
        mfload.verify(model, mode="write", checksums=algorithm)
        (model / "2.safetensors").unlink()
        mfload.convert(model, tmp_path / "new.safetensors", names=self.SOME)
        assert mfload.verify(tmp_path / "new.safetensors").ok
        file = model / "1.safetensors"
        file.write_bytes(file.read_bytes()[:-6] + b"??????")
        with pytest.raises(errors.ChecksumError, match=r"changed|differ|manifest"):
            mfload.convert(model, tmp_path / "other.safetensors", names=self.SOME)

    def test_a_saved_tree(self, tmp_path: Path) -> None:
        tree = {"a": [np.ones(2), np.zeros(2)], "b": {"c": np.ones(3)}}
        saved = mfload.save(tree, tmp_path / "tree" / "model.safetensors", max_shard_size=20)
        expected = mfload.restore(tmp_path / "tree", framework="numpy", names=r"^a")
        with mfload.open(tmp_path / "tree") as opened:
            os.unlink(opened.file_of(opened.info("b.c")))
        assert len(saved.files) > 2
        found = mfload.restore(tmp_path / "tree", framework="numpy", names=r"^a")
        assert [each.tolist() for each in found["a"]] == [each.tolist() for each in expected["a"]]
        mfload.convert(tmp_path / "tree", tmp_path / "new.safetensors", names=r"^a")
        again = mfload.restore(tmp_path / "new.safetensors", framework="numpy")
        assert [each.tolist() for each in again["a"]] == [[1, 1], [0, 0]]
