"""mfload.compat.transformers against from_pretrained of transformers, in an environment of its own.

`make transformers` makes that and runs this file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conformance.suite import no_gpu

import mfload
from mfload import errors

WHY = "transformers and PyTorch are installed by `make transformers` alone"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)
pytest.importorskip("accelerate", reason=WHY)

safetensors = pytest.importorskip("safetensors.torch", reason=WHY)
load_file, save_file = safetensors.load_file, safetensors.save_file
from mfload.compat import transformers as compat  # noqa: E402
from mfload.compat.transformers import from_pretrained  # noqa: E402
from mfload.cuda import discovery  # noqa: E402
from mfload.loading.lazy import LazyCheckpoint  # noqa: E402

SMALL = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
EXPERTS = {
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MODELS = {
    "llama": ("LlamaForCausalLM", {**SMALL, "num_key_value_heads": 2}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**SMALL, **EXPERTS}),
    "bert": ("BertModel", SMALL),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Any:
    """A directory for each model; of Llama with several files."""
    made: dict[str, tuple[Any, Any, Path]] = {}
    for name, (kind, given) in MODELS.items():
        cls, directory = getattr(transformers, kind), tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        model = cls(cls.config_class(**given))
        model.save_pretrained(directory, max_shard_size="100KB" if name == "llama" else "1GB")
        auto = transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM
        made[name] = cls, auto, directory
    return made


def same(one: Any, other: Any) -> None:
    """Every weight and buffer, what is tied, settings and outputs."""
    assert type(one) is type(other)
    state, expected = (
        dict(each.named_parameters(remove_duplicate=False))
        | dict(each.named_buffers(remove_duplicate=False))
        for each in (one, other)
    )
    assert list(state) == list(expected)
    ties = [
        sorted(sorted(n for n in some if some[n] is some[name]) for name in some)
        for some in (state, expected)
    ]
    assert ties[0] == ties[1]
    for name, wanted in expected.items():
        given = state[name]
        assert (given.dtype, given.device) == (wanted.dtype, wanted.device), name
        assert given.requires_grad == wanted.requires_grad, name
        assert torch.equal(given, wanted), name
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(one(tokens)[0], other(tokens)[0])
    assert one.training == other.training
    assert one.name_or_path == other.name_or_path
    assert one.config.to_dict() == other.config.to_dict()
    if one.can_generate():
        assert one.generation_config.to_dict() == other.generation_config.to_dict()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize(
    "given", [{}, {"dtype": "bfloat16"}, {"dtype": "auto"}, {"device_map": {"": "cpu"}}]
)
def test_the_same_model(saved: Any, name: str, auto: bool, given: dict[str, Any]) -> None:
    cls, general, path = saved[name]
    cls = general if auto else cls
    expected = cls.from_pretrained(path, **given)
    for options in (None, mfload.Options(engine="pread")):
        same(from_pretrained(cls, path, options=options, **given), expected)


def test_the_dtype_of_the_files(saved: Any, tmp_path: Path) -> None:
    cls, _, path = saved["bert"]
    model = cls.from_pretrained(path, dtype="float16")
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float16",', ""))
    made = from_pretrained(cls, tmp_path)
    assert made.dtype == torch.float16
    same(made, cls.from_pretrained(tmp_path))


@pytest.mark.parametrize("first", [True, False])
def test_auto_takes_the_dtype_of_the_first_weight(saved: Any, tmp_path: Path, first: bool) -> None:
    cls, _, path = saved["llama"]
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32",', ""))
    assert '"dtype"' not in config.read_text()
    every = sorted(tmp_path.glob("*.safetensors"))
    assert len(every) > 1
    for file in every[:1] if first else every[1:]:
        state = {name: each.half() for name, each in load_file(file).items()}
        save_file(state, file, {"format": "pt"})
    made = from_pretrained(cls, tmp_path, dtype="auto")
    assert made.dtype == (torch.float16 if first else torch.float32)
    same(made, cls.from_pretrained(tmp_path, dtype="auto"))


@pytest.mark.parametrize("auto", [False, True])
def test_generation_settings_that_only_the_config_has(
    saved: Any, tmp_path: Path, auto: bool
) -> None:
    cls, general, path = saved["llama"]
    for file in path.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "config.json"
    extra = {"num_beams": 4, "max_length": 142, "no_repeat_ngram_size": 3}
    config.write_text(json.dumps(json.loads(config.read_text()) | extra))
    cls = general if auto else cls
    made = from_pretrained(cls, tmp_path)
    assert made.generation_config.num_beams == 4
    same(made, cls.from_pretrained(tmp_path))
    asked = {"generation_config": transformers.GenerationConfig(max_length=7)}
    same(from_pretrained(cls, path, **asked), cls.from_pretrained(path, **asked))


def test_names_of_the_hub(saved: Any) -> None:
    cls, _, path = saved["llama"]
    same(from_pretrained(cls, path, revision="main"), cls.from_pretrained(path))
    same(from_pretrained(cls, path, use_safetensors=True), cls.from_pretrained(path))
    for given in ({"revision": "v2"}, {"use_safetensors": False}):
        with pytest.raises(errors.UsageError, match=next(iter(given))):
            from_pretrained(cls, path, **given)


def test_training_leaves_the_files_as_they_are(saved: Any) -> None:
    cls, _, path = saved["gpt2"]
    (file,) = path.glob("*.safetensors")
    before = file.read_bytes()
    model = from_pretrained(cls, path)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    assert file.read_bytes() == before
    same(from_pretrained(cls, path), cls.from_pretrained(path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transformers_weights", '"model.safetensors"'),
        ("quantization_config", '{"quant_method": "fp8"}'),
    ],
)
@pytest.mark.parametrize("auto", [False, True])
def test_what_a_config_names_beside_is_refused(
    saved: Any, tmp_path: Path, name: str, value: str, auto: bool
) -> None:
    cls, general, path = saved["bert"]
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("{", f'{{"{name}": {value},', 1))
    with pytest.raises(errors.UsageError, match=name):
        from_pretrained(general if auto else cls, tmp_path)


def test_arguments_of_the_config_and_the_loading_info(saved: Any) -> None:
    cls, general, path = saved["gpt2"]
    for each in (cls, general):
        given: dict[str, Any] = {"resid_pdrop": 0.5, "output_loading_info": True}
        (one, said), (other, expected) = (
            from_pretrained(each, path, **given),
            each.from_pretrained(path, **given),
        )
        same(one, other)
        assert said == expected
        assert one.config.resid_pdrop == 0.5


def test_the_file_that_transformers_takes(saved: Any, tmp_path: Path) -> None:
    cls, _, path = saved["bert"]
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "consolidated.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    same(from_pretrained(cls, tmp_path), cls.from_pretrained(tmp_path))


def test_a_weight_that_the_index_leaves_out(saved: Any, tmp_path: Path) -> None:
    cls, _, path = saved["llama"]
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    del table["weight_map"]["model.layers.0.mlp.up_proj.weight"]
    index.write_text(json.dumps(table))
    expected, whole = cls.from_pretrained(tmp_path), cls.from_pretrained(path).state_dict()
    assert all(torch.equal(each, whole[name]) for name, each in expected.state_dict().items())
    for options in (None, mfload.Options(engine="pread")):
        same(from_pretrained(cls, tmp_path, options=options), expected)


@pytest.mark.parametrize(
    "given",
    [{name: "a"} for name in ("state_dict", "variant", "subfolder", "quantization_config")],
)
def test_what_is_refused(saved: Any, given: dict[str, Any], tmp_path: Path) -> None:
    cls, _, path = saved["bert"]
    with pytest.raises(errors.UsageError, match=next(iter(given))):
        from_pretrained(cls, path, **given)
    with pytest.raises(errors.UsageError, match="disk"):
        from_pretrained(cls, path, device_map={"encoder": "disk", "": "cpu"})
    small = {"device_map": "auto", "max_memory": {"cpu": 100_000}}
    for folder in ({}, {"offload_folder": str(tmp_path / "off")}):
        with pytest.raises(errors.UsageError, match=r"disk|offload_folder"):
            from_pretrained(cls, path, **small, **folder)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(errors.UsageError, match="adapter"):
        from_pretrained(cls, tmp_path)


def test_a_damaged_file(saved: Any, tmp_path: Path) -> None:
    cls, _, path = saved["bert"]
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(errors.HeaderError, match=r"model\.safetensors"):
        from_pretrained(cls, tmp_path)
    weights.unlink()
    with pytest.raises(errors.SourceNotFoundError):
        from_pretrained(cls, tmp_path, options=mfload.Options(timeout=5))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("given", [{}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("group", [1 << 30, 20_000])
def test_weights_land_on_the_device_of_a_map_in_groups(
    saved: Any, name: str, given: dict[str, Any], group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host: what is done for a GPU, with the host as the device."""
    cls, _, path = saved[name]
    monkeypatch.setattr(compat, "_one_device", lambda *_: "cpu")
    monkeypatch.setattr(compat, "find_device", lambda _: ("cpu", ()))
    monkeypatch.setattr(compat, "_GROUP", group)
    monkeypatch.setattr(compat, "_LARGEST", group)
    landed = count_groups(monkeypatch)
    made = from_pretrained(cls, path, device_map={"": "cpu"}, **given)
    same(made, cls.from_pretrained(path, device_map={"": "cpu"}, **given))
    most = [sum(each.nbytes for each in some.values()) for some in landed]
    assert max(most) <= group
    assert (len(landed) == 1) == (group > 20_000)
    names = [each for some in landed for each in some]
    # Of its four threads one may be late, with groups as small as these.
    assert len(names) - len(set(names)) <= (0 if group > 20_000 else 4)
    if name != "qwen2_moe" and not given and group > 20_000:  # Experts are stacked.
        there = {each.data_ptr() for some in landed for each in some.values()}
        assert {each.data_ptr() for each in made.parameters()} <= there


def count_groups(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is read together from now on."""
    landed: list[dict[str, Any]] = []
    real = LazyCheckpoint.get_tensors

    def get_tensors(self: Any, names: Any = None) -> Any:
        made = real(self, names)
        landed.append(dict(made))
        return made

    monkeypatch.setattr(LazyCheckpoint, "get_tensors", get_tensors)
    return landed


def test_a_weight_that_is_wanted_again_or_of_no_group_is_read_alone(
    saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved["bert"][2] / "model.safetensors"
    with mfload.open(path, "torch") as opened:
        monkeypatch.setattr(compat, "_GROUP", 10_000)
        monkeypatch.setattr(compat, "_LARGEST", 10_000)
        groups = compat._Groups(opened)
        sizes = {name: opened.info(name).nbytes for name in opened}
        for name, nbytes in sizes.items():
            weight = compat._Weight(opened, name, groups)
            assert torch.equal(weight[...], opened.get_tensor(name))
            assert torch.equal(weight[...], opened.get_tensor(name))
            assert torch.equal(weight[:1], opened.get_tensor(name)[:1])
            assert groups.take(name) is None, nbytes
        assert max(sizes.values()) > 10_000


def test_two_groups_are_held_at_most(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved["bert"][2] / "model.safetensors"
    monkeypatch.setattr(compat, "_GROUP", 20_000)
    monkeypatch.setattr(compat, "_LARGEST", 20_000)
    with mfload.open(path, "torch") as opened:
        groups = compat._Groups(opened)
        names = list(groups._group_of)
        first = groups._group_of[names[0]]
        for name in names[1:]:  # One of the first group is left out.
            assert torch.equal(groups.take(name), opened.get_tensor(name))
            held = sum(each.nbytes for made in groups._made for each in made.values())
            assert held <= 2 * 20_000
        assert not any(first[0] in made for made in groups._made)
        assert groups.take(names[0]) is None  # It is read alone.


def test_a_weight_larger_than_a_group_is_one_of_its_own(
    saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved["bert"][2] / "model.safetensors"
    monkeypatch.setattr(compat, "_GROUP", 10_000)
    with mfload.open(path, "torch") as opened:
        groups = compat._Groups(opened)
        for name in list(groups._group_of):
            assert torch.equal(groups.take(name), opened.get_tensor(name))
        groups.close()
        assert not groups._made


@pytest.mark.parametrize("error", [errors.FrameworkMissingError, errors.DeviceError])
def test_weights_pass_through_the_host_where_none_can_land(
    saved: Any, error: type[errors.MfloadError], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    cls, _, path = saved["llama"]
    monkeypatch.setattr(compat, "_one_device", lambda *_: "cuda:0")

    def find(number: int) -> Any:
        assert number == 0
        raise error("no way")

    monkeypatch.setattr(discovery, "find", find)
    made = from_pretrained(cls, path, device_map={"": "cpu"})
    same(made, cls.from_pretrained(path, device_map={"": "cpu"}))
    assert "copied from the host, one after the other: no way" in caplog.text


def test_a_read_that_fails_is_begun_once(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, _, path = saved["llama"]
    monkeypatch.setattr(compat, "_one_device", lambda *_: "cpu")
    begun: list[int] = []

    def get_tensors(*_: Any) -> Any:
        begun.append(1)
        raise errors.ReadError("could not read")

    monkeypatch.setattr(LazyCheckpoint, "get_tensors", get_tensors)
    with pytest.raises((errors.ReadError, RuntimeError)):
        from_pretrained(cls, path, device_map={"": "cpu"})
    assert begun == [1]


@pytest.mark.parametrize(
    ("devices", "there"),
    [
        (None, None), ("cuda", "cuda:3"), ("cuda:2", "cuda:2"), (2, "cuda:2"), ("cpu", None),
        ({"": "cuda:0"}, "cuda:0"), ({"a": 0, "b": 0}, "cuda:0"), ({"a": 0, "b": "cpu"}, None),
        ({"": "cuda"}, "cuda:3"), ({"": [0]}, None), ({}, None), (torch.device("cuda"), None),
        (torch.device("cuda", 1), "cuda:1"), ("auto", "cuda:0"), ("balanced", "cuda:0"),
        ("meta", None), ("nonsense", None),
    ],
)  # fmt: skip
def test_which_device_a_map_means(
    devices: Any, there: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, config = torch.cuda, transformers.LlamaConfig()
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "mem_get_info", lambda place: (1000, 1000))
    monkeypatch.setattr(compat, "find_spec", lambda name: name)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert compat._one_device(devices, tmp_path, config, {}) == there
    if there is None or not isinstance(devices, str) or "cuda" in devices:
        return
    assert compat._one_device(devices, tmp_path, config, {"max_memory": {0: 10}}) is None
    assert compat._one_device(devices, tmp_path, config, {"dtype": torch.float32}) is None
    config.dtype = torch.float32
    assert compat._one_device(devices, tmp_path, config, {}) is None
    config.dtype = torch.bfloat16
    (tmp_path / "model.safetensors").write_bytes(bytes(801))
    assert compat._one_device(devices, tmp_path, config, {}) is None
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    assert compat._one_device(devices, tmp_path, config, {}) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("devices", ["cuda:0", "auto", {"": 0}])
@pytest.mark.parametrize("given", [{}, {"dtype": "bfloat16"}])
def test_models_on_a_gpu(saved: Any, name: str, devices: Any, given: dict[str, Any]) -> None:
    if reason := no_gpu():
        pytest.skip(reason)
    cls, _, path = saved[name]
    made = from_pretrained(cls, path, device_map=devices, **given)
    like = cls.from_pretrained(path, device_map=devices, **given)
    state, expected = made.state_dict(), like.state_dict()
    assert list(state) == list(expected)
    for each, wanted in zip(state.values(), expected.values(), strict=True):
        assert (each.dtype, each.device) == (wanted.dtype, wanted.device)
        assert torch.equal(each, wanted)


CHECK = """
whole = AutoModelForCausalLM.from_pretrained("llama/").eval()
ids = torch.arange(8)[None]
assert torch.equal(model(ids).logits, whole(ids).logits)
tied = config.tie_word_embeddings
assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
dist.destroy_process_group()
"""


@pytest.mark.parametrize("tied", [False, True])
def test_the_recipe_for_fsdp_runs_on_two_processes(tmp_path: Path, tied: bool) -> None:
    given = {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    config = transformers.LlamaConfig(**given)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    page = Path(mfload.__file__).parent.parent / "docs/how-to/fsdp.md"
    recipe = re.search(r"^```python\n(# torchrun.*?)^```", page.read_text("utf-8"), re.M | re.S)
    assert recipe is not None
    (tmp_path / "recipe.py").write_text(recipe[1] + CHECK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", "2", "recipe.py"]  # fmt: skip
    root = str(page.parent.parent.parent)
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "model.rotary_emb.inv_freq" in done.stderr


class TestConverted:
    """What `mfload.convert` writes to a directory is a model to transformers."""

    @pytest.mark.parametrize("name", MODELS)
    def test_a_directory(self, name: str, saved: Any, tmp_path: Path) -> None:
        cls, auto, source = saved[name]
        mfload.convert(source, f"{tmp_path}/out/")
        found, expected = auto.from_pretrained(tmp_path / "out"), auto.from_pretrained(source)
        expected.config._name_or_path = expected.name_or_path = found.name_or_path
        assert type(found) is type(expected) is cls
        same(found, expected)

    def test_another_dtype_in_one_file(self, saved: Any, tmp_path: Path) -> None:
        cls, _, source = saved["llama"]
        done = mfload.convert(source, f"{tmp_path}/out/", dtype="bfloat16", max_shard_size="1GB")
        assert [Path(file).name for file in done.files] == ["model.safetensors"]
        found, expected = (
            cls.from_pretrained(path, dtype="bfloat16") for path in (tmp_path / "out", source)
        )
        expected.config._name_or_path = expected.name_or_path = found.name_or_path
        same(found, expected)
