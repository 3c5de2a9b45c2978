"""`convert` to other names and dtypes, into one file or a directory, with what lies beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import samples

import mfload
from mfload import errors
from mfload.checking import beside, copying
from mfload.checking.copying import Copier
from mfload.formats import discovery
from mfload.planning import memory
from mfload.saving.publishing import SaveTarget

MODEL = samples.model()
SHARDS = 3
NAMES = [f"model-0000{n}-of-0000{SHARDS}.safetensors" for n in range(1, SHARDS + 1)]
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BLOCK", 64 << 10)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model as Hugging Face lays it out, in three shards."""
    root = tmp_path / "model"
    for n, name in enumerate(NAMES):
        mfload.save(
            {key: MODEL[key] for key in list(MODEL)[n::SHARDS]},
            root / name,
            metadata={"format": "pt", "part": str(n)},
        )
    placed = {key: NAMES[n % SHARDS] for n, key in enumerate(MODEL)}
    (root / INDEX).write_text(f'{{"weight_map": {str(placed).replace(chr(39), chr(34))}}}')
    return root


BROUGHT = {
    "config.json": '{"model_type": "x"}', "generation_config.json": "{}", "tokenizer.json": "[]",
    "tokenizer_config.json": "{}", "tokenizer.model": "sp", "special_tokens_map.json": "{}",
    "chat_template.jinja": "{{ x }}", "preprocessor_config.json": "{}", "vocab.bpe": "a b",
    "merges.txt": "", "modeling_x.py": "x = 1", "LICENSE": "free", "README.md": "# x",
}  # fmt: skip
LEFT = {
    "pytorch_model.bin": "w", "pytorch_model.bin.index.json": "{}", "model.gguf": "w",
    "model.onnx": "w", "training_args.bin": "w", "model.checksums.json.bak": "w", ".hidden": "w",
    "flax_model.msgpack": "w", "optimizer.pt": "w", "x.npz": "w", "events.out.tfevents.1": "w",
}  # fmt: skip


@pytest.fixture
def whole(source: Path) -> Path:
    """The same with what lies beside weights."""
    for name, text in {**BROUGHT, **LEFT}.items():
        (source / name).write_text(text)
    (source / "onnx").mkdir()
    return source


def _visible(directory: Path) -> set[str]:
    return set(os.listdir(directory))


class TestFiles:
    @pytest.mark.parametrize("rewrite", [mfload.convert, mfload.align])
    def test_a_file_is_one_file(self, rewrite: Any, source: Path, tmp_path: Path) -> None:
        out = tmp_path / "out" / "all.safetensors"
        done = rewrite(source, out)
        assert done.files == (str(out),)
        assert _visible(out.parent) == {out.name}
        assert mfload.diff(source, out)
        assert mfload.open(out).metadata() == {"format": "pt", "part": str(SHARDS - 1)}
        done = rewrite(source, tmp_path / "cut.safetensors", max_shard_size="300kB")
        assert len(done.files) > 2
        assert ("file", done.files[0]) in done.rows()

    @pytest.mark.parametrize("rewrite", [mfload.convert, mfload.align])
    def test_a_directory_keeps_the_shards(self, rewrite: Any, source: Path, tmp_path: Path) -> None:
        done = rewrite(source, f"{tmp_path}/out/")
        assert _visible(tmp_path / "out") == {*NAMES, INDEX}
        assert done.files[-1].endswith(INDEX)
        for n, name in enumerate(NAMES):
            assert mfload.open(tmp_path / "out" / name).metadata()["part"] == str(n)

    def test_the_error_of_a_file_that_lies_there_in_shards(
        self, source: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out.safetensors"
        mfload.convert(source, out, max_shard_size="300kB")
        with pytest.raises(errors.SourceNotFoundError) as caught:
            mfload.load(out, "numpy")
        assert f"it lies there in shards: load {tmp_path}/out.{INDEX[6:]}" in str(caught.value)

    @pytest.mark.parametrize("stem", ["adapter_model", "diffusion_pytorch_model"])
    def test_names_by_which_others_find_weights(self, stem: str, tmp_path: Path) -> None:
        mfload.save(MODEL, tmp_path / "in" / f"{stem}.safetensors")
        mfload.convert(tmp_path / "in", f"{tmp_path}/out/")
        assert _visible(tmp_path / "out") == {f"{stem}.safetensors"}


class TestBeside:
    @pytest.mark.parametrize("rewrite", [mfload.convert, mfload.align])
    @pytest.mark.parametrize("by_index", [False, True])
    def test_config_and_tokenizer_go_along(
        self, rewrite: Any, by_index: bool, whole: Path, tmp_path: Path
    ) -> None:
        done = rewrite(whole / INDEX if by_index else whole, f"{tmp_path}/out/")
        assert _visible(tmp_path / "out") == {*NAMES, INDEX, *BROUGHT}
        for name, text in BROUGHT.items():
            assert (tmp_path / "out" / name).read_text() == text
        assert f"copied with it: {', '.join(sorted(BROUGHT))}" in done.notes

    def test_a_file_that_grows_is_not_cut_off(
        self, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = beside.find(discovery.find(whole), str(tmp_path))
        with (whole / "config.json").open("a") as file:
            file.write(" ")
        monkeypatch.setattr(beside, "find", lambda *_: found)
        with pytest.raises(errors.SourceChangedError, match="changed"):
            mfload.convert(whole, f"{tmp_path}/out/")
        assert not (tmp_path / "out").exists() or not _visible(tmp_path / "out")

    def test_a_file_that_is_all_of_the_model(self, whole: Path, tmp_path: Path) -> None:
        mfload.convert(whole, f"{tmp_path}/one/", max_shard_size="1GB")
        mfload.convert(tmp_path / "one" / "model.safetensors", f"{tmp_path}/out/")
        assert _visible(tmp_path / "out") == {"model.safetensors", *BROUGHT}

    def test_weights_alone(self, whole: Path, tmp_path: Path) -> None:
        mfload.convert(whole, f"{tmp_path}/out/", only_weights=True)
        assert _visible(tmp_path / "out") == {*NAMES, INDEX}
        mfload.convert(whole, tmp_path / "file" / "x.safetensors")
        assert _visible(tmp_path / "file") == {"x.safetensors"}
        mfload.convert(whole / NAMES[0], f"{tmp_path}/one/")
        assert _visible(tmp_path / "one") == {"model.safetensors"}

    def test_a_directory_without_a_config_is_no_model(self, whole: Path, tmp_path: Path) -> None:
        for file in whole.glob("*config.json"):
            file.unlink()
        mfload.convert(whole, f"{tmp_path}/out/")
        assert _visible(tmp_path / "out") == {*NAMES, INDEX}

    def test_links_of_a_cache_are_followed(self, whole: Path, tmp_path: Path) -> None:
        snapshot = tmp_path / "hub" / "snapshots" / "a"
        snapshot.mkdir(parents=True)
        for file in whole.iterdir():
            (snapshot / file.name).symlink_to(file)
        mfload.convert(snapshot, f"{tmp_path}/out/")
        for name, text in BROUGHT.items():
            assert not (tmp_path / "out" / name).is_symlink()
            assert (tmp_path / "out" / name).read_text() == text

    def test_nothing_is_replaced_unasked(self, whole: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "config.json").write_text("mine")
        (out / "README.md").write_text(BROUGHT["README.md"])
        with pytest.raises(errors.TargetExistsError, match="only_weights=True") as caught:
            mfload.convert(whole, out)
        assert caught.value.file == str(out / "config.json")
        assert _visible(out) == {"config.json", "README.md"}
        mfload.convert(whole, out, only_weights=True)
        assert (out / "config.json").read_text() == "mine"
        mfload.convert(whole, out, overwrite=True)
        assert (out / "config.json").read_text() == BROUGHT["config.json"]

    def test_what_is_no_file_stays(self, whole: Path, tmp_path: Path) -> None:
        (whole / "folder.json").mkdir()
        os.mkfifo(whole / "pipe.json")
        (whole / "broken.json").symlink_to("nowhere")
        (whole / "loop.json").symlink_to("loop.json")
        mfload.convert(whole, f"{tmp_path}/out/")
        assert _visible(tmp_path / "out") == {*NAMES, INDEX, *BROUGHT}
        (tmp_path / "other" / "config.json").mkdir(parents=True)
        with pytest.raises(errors.TargetError, match="other than a file"):
            mfload.convert(whole, tmp_path / "other", overwrite=True)

    def test_large_ones_stay(
        self, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (whole / "big.json").write_text("x" * 100)
        monkeypatch.setattr(beside, "_LARGEST", 99)
        done = mfload.convert(whole, f"{tmp_path}/out/")
        assert "big.json" not in _visible(tmp_path / "out")
        assert any("not copied" in note and "big.json" in note for note in done.notes)

    def test_a_failure_leaves_none(
        self, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: Any) -> Any:
            raise OSError(5, "no")

        (tmp_path / "out").mkdir()
        for place in ((SaveTarget, "publish"), (Copier, "take")):
            with monkeypatch.context() as patch:
                patch.setattr(*place, fails)
                with pytest.raises((OSError, errors.MfloadError)):
                    mfload.convert(whole, tmp_path / "out")
            assert not {n for n in _visible(tmp_path / "out") if not n.startswith(".mfload")}

    def test_in_place_they_lie_there(self, whole: Path) -> None:
        before = {name: (whole / name).stat().st_mtime_ns for name in BROUGHT}
        done = mfload.align(whole, overwrite=True)
        assert before == {name: (whole / name).stat().st_mtime_ns for name in BROUGHT}
        assert not any("copied" in note for note in done.notes)


class TestDtypes:
    @pytest.mark.parametrize("to", ["file.safetensors", "directory/"])
    @pytest.mark.parametrize(
        "dtype",
        ["bfloat16", "float64", [("embed", "float16"), (".", "float32")], {"wide": "float8_e5m2"}],
    )
    def test_as_a_load_converts(
        self, dtype: Any, to: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory, "OVERHEAD", 240_000)
        rules = dtype
        if isinstance(dtype, list):
            floats = [n for n, array in MODEL.items() if array.dtype.kind in "fV"]
            rules = {name: "float16" if "embed" in name else "float32" for name in floats}
        wanted = mfload.load(source, "numpy", dtype=rules)
        done = mfload.convert(source, f"{tmp_path}/{to}", dtype=rules)
        found = mfload.load(f"{tmp_path}/{to}", "numpy")
        assert {name: array.dtype for name, array in found.items()} == {
            name: array.dtype for name, array in wanted.items()
        }
        assert mfload.diff(found, wanted)
        assert done.tensors == len(MODEL)
        if to.endswith("/"):
            assert _visible(tmp_path / to) == {*NAMES, INDEX}
        assert mfload.verify(f"{tmp_path}/{to}")

    def test_from_another_format(self, tmp_path: Path) -> None:
        arrays = {"a": np.linspace(0, 1, 999, dtype=np.float32), "n": np.arange(5)}
        np.savez_compressed(tmp_path / "a.npz", **arrays)
        out = tmp_path / "a.safetensors"
        mfload.convert(tmp_path / "a.npz", out, dtype="bfloat16")
        assert mfload.diff(out, {"a": arrays["a"].astype(ml_dtypes.bfloat16), "n": arrays["n"]})

    def test_what_would_lose_values(self, tmp_path: Path) -> None:
        path = tmp_path / "a.safetensors"
        mfload.save({"a": np.array([1.0, 3e9]), "n": np.arange(300)}, path)
        for dtype in ("int32", {"a": "int32"}, {"n": "uint8"}):
            with pytest.raises(errors.LossyCastError):
                mfload.convert(path, tmp_path / "b.safetensors", dtype=dtype)
            assert _visible(tmp_path) == {path.name}
        with pytest.raises(errors.TensorNotFoundError, match="match no tensor"):
            mfload.convert(path, tmp_path / "c.safetensors", dtype={"none": "float32"})

    def test_a_manifest_is_made_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "a" / "a.safetensors"
        mfload.save({"a": np.ones(9, np.float32)}, path, checksums=True)
        for given in ({"dtype": "float16"}, {"mapping": {"a": "b"}}):
            out = tmp_path / next(iter(given)) / "b.safetensors"
            mfload.convert(path, out, **given)
            assert mfload.verify(out, mode="check")
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        with pytest.raises(errors.ChecksumError):
            mfload.convert(path, tmp_path / "x" / "b.safetensors", mapping={"a": "b"})


class TestNames:
    def test_a_mapping_that_leaves_nothing(self, path: Path, tmp_path: Path) -> None:
        with pytest.raises(errors.MappingError, match="leaves no tensor"):
            mfload.convert(path, tmp_path / "b.safetensors", mapping=lambda _: None)
        assert _visible(tmp_path) == {path.name}

    ARRAYS: ClassVar[Any] = {
        "model.layers.0.w": np.ones(3), "model.layers.1.w": np.full(3, 2.0), "head": np.zeros(2),
    }  # fmt: skip

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        mfload.save(self.ARRAYS, tmp_path / "a.safetensors")
        return tmp_path / "a.safetensors"

    @pytest.mark.parametrize(
        ("mapping", "wanted"),
        [
            ({r"model\.(.*)": r"\1"}, ["layers.0.w", "layers.1.w", "head"]),
            ([(r"model\.layers\.(?P<n>\d+)\.w", r"h\g<n>"), ("head", None)], ["h0", "h1"]),
            ({"head": ["head", "tied"]}, ["model.layers.0.w", "model.layers.1.w", "head", "tied"]),
            (lambda name: name.upper(), ["MODEL.LAYERS.0.W", "MODEL.LAYERS.1.W", "HEAD"]),
            ({r"model\.layers\.0\.w": "model.layers.1.w", r"model\.layers\.1\.w":
              "model.layers.0.w"}, ["model.layers.1.w", "model.layers.0.w", "head"]),
            # In the form of Tunix, of which a rule replaces the front of a name.
            ({r"model\.layers": ("h", None)}, ["h.0.w", "h.1.w", "head"]),
            ({"head": mfload.rule(["x", "y"])}, ["model.layers.0.w", "model.layers.1.w", "x", "y"]),
        ],
    )  # fmt: skip
    def test_new_names(self, mapping: Any, wanted: list[str], path: Path, tmp_path: Path) -> None:
        done = mfload.convert(path, tmp_path / "b.safetensors", mapping=mapping)
        found = safetensors.numpy.load_file(tmp_path / "b.safetensors")
        values = [*self.ARRAYS.values()]
        expected = dict(zip(wanted, [*values, values[-1]], strict=False))
        assert found.keys() == {*wanted}
        assert done.tensors == len(wanted)
        assert mfload.diff(found, expected)

    @pytest.mark.parametrize(
        ("mapping", "says"),
        [
            ({r"model\.layers\.\d\.w": "w"}, "w: the name of several tensors, model.layers.0.w"),
            ({r"model\.layers\.0\.w": "head"}, "head: the name of several"),
            ({r"layers": "x"}, "'layers' matches no name; it has to match all of one"),
            ({r"head": "x", "h.*": "y"}, "head: several rules match, 'head', 'h.*'"),
            (lambda name: "x", "x: the name of several"),
        ],
    )
    def test_names_that_do_not_fit(
        self, mapping: Any, says: str, path: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(errors.MappingError) as caught:
            mfload.convert(path, tmp_path / "b.safetensors", mapping=mapping)
        assert any(says in line for line in caught.value.problems)
        assert _visible(tmp_path) == {path.name}

    @pytest.mark.parametrize(
        "mapping",
        [{"(": "x"}, 3, {"head": mfload.rule("x", transpose=(0,))}, {"head": r"\1"},
         {"head": mfload.rule("x", cast="float16")}, lambda name: 3],
    )  # fmt: skip
    def test_what_is_no_renaming(self, mapping: Any, path: Path, tmp_path: Path) -> None:
        with pytest.raises(errors.UsageError):
            mfload.convert(path, tmp_path / "b.safetensors", mapping=mapping)

    def test_names_and_dtypes_at_once(self, path: Path, tmp_path: Path) -> None:
        out = tmp_path / "b.safetensors"
        given: Any = {"names": "model", "dtype": {"model.layers.1.w": "float16"}}
        mfload.convert(path, out, mapping={r"model\.(.*)": r"\1"}, **given)
        assert mfload.diff(out, {"layers.0.w": np.ones(3), "layers.1.w": np.full(3, 2, np.float16)})

    def test_a_tree_is_left_out(self, tmp_path: Path) -> None:
        mfload.save({"a": {"b": np.ones(3)}, "n": 5}, tmp_path / "a.safetensors")
        out = tmp_path / "b.safetensors"
        done = mfload.convert(tmp_path / "a.safetensors", out, mapping={r"a\.b": "x.y"})
        assert any("the tree that was saved is left out" in note for note in done.notes)
        assert mfload.restore(out, framework="numpy").keys() == {"x"}

    def test_shards_stay(self, source: Path, tmp_path: Path) -> None:
        mfload.convert(source, f"{tmp_path}/out/", mapping={"(.*)": r"x.\1"})
        assert _visible(tmp_path / "out") == {*NAMES, INDEX}
        wanted = {f"x.{name}": array for name, array in MODEL.items()}
        assert mfload.diff(f"{tmp_path}/out", wanted)

    def test_other_names_are_not_gone_on_with(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Headers are the same, and what was written is not."""
        arrays = {name: np.full(100_000, n, np.float32) for n, name in enumerate("abc")}
        mfload.save(arrays, path := tmp_path / "in.safetensors")
        true, count = Copier.take, 0

        def take(*given: Any) -> None:
            nonlocal count
            count += 1
            if count > 3:
                raise KeyboardInterrupt
            true(*given)

        out = tmp_path / "out.safetensors"
        with monkeypatch.context() as patch:
            patch.setattr(Copier, "take", take)
            with pytest.raises(KeyboardInterrupt):
                mfload.convert(path, out, mapping={"a": "x", "b": None})
        done = mfload.convert(path, out, mapping={"b": "x", "a": None})
        assert not any("went on" in note for note in done.notes)
        assert mfload.diff(out, {"x": arrays["b"], "c": arrays["c"]})
