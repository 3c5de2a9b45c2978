"""SGLang's own layers and loaders over mfload: `make sglang` runs this."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import mfload
from mfload import errors

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: make sglang", allow_module_level=True)
if importlib.util.find_spec("torchvision") is None:  # For the processes that start here, too.
    sys.path.append(str(Path(__file__).with_name("stubs")))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))

import sglang.srt.model_loader.loader
import torch
from safetensors.torch import save_file
from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.layers import linear, vocab_parallel_embedding
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models import gemma
from sglang.srt.plugins.hook_registry import HookRegistry

from mfload.compat import serving, sglang as ours

HIDDEN, HEADS, KV_HEADS, HEAD, MIDDLE, VOCAB, EXPERTS = 512, 16, 4, 32, 1024, 640, 4
PARTS = {
    "q": ("qkv", "q"), "k": ("qkv", "k"), "v": ("qkv", "v"),
    "gate": ("gate_up", 0), "up": ("gate_up", 1),
}  # fmt: skip
SHAPES = {
    "embed.weight": (VOCAB, HIDDEN),
    "q.weight": (HEADS * HEAD, HIDDEN),
    "k.weight": (KV_HEADS * HEAD, HIDDEN),
    "v.weight": (KV_HEADS * HEAD, HIDDEN),
    "o.weight": (HIDDEN, HEADS * HEAD),
    "gate.weight": (MIDDLE, HIDDEN),
    "up.weight": (MIDDLE, HIDDEN),
    "column.weight": (MIDDLE, HIDDEN),
    "column.bias": (MIDDLE,),
    "norm.weight": (HIDDEN,),
    **{f"m.experts.{n}.{w}.weight": (MIDDLE, HIDDEN) for n in range(EXPERTS) for w in ("w1", "w3")},
    **{f"m.experts.{n}.w2.weight": (HIDDEN, MIDDLE) for n in range(EXPERTS)},
}
SPREAD = re.compile(r"^o\.|\.w2\.")  # Of these a rank uses columns.


class Experts(FusedMoE):  # pyright: ignore[reportUntypedBaseClass]
    """Fused experts with SGLang's own loaders, without the kernels that they would run on."""

    def __init__(self, rank: int, size: int, expert_parallel: bool) -> None:
        torch.nn.Module.__init__(self)
        split = (0, 1) if expert_parallel else (rank, size)
        count, middle = EXPERTS // (size // split[1]), MIDDLE // split[1]
        self.quant_config = self.scheme = None
        self.quant_method = SimpleNamespace(process_weights_after_loading=bool)
        self.moe_tp_rank, self.moe_tp_size = split
        self.moe_runner_config: Any = SimpleNamespace(is_gated=True)
        self._num_local_routed = self.num_local_experts = count
        self._expert_storage_rank = rank if expert_parallel else 0
        self.uses_expert_location = self._has_fused_shared = self.use_padded_loading = False
        self.use_flashinfer_trtllm_moe = self.use_triton_kernels = False
        self.use_presharded_weights = False
        for name, shape in (("w13", (2 * middle, HIDDEN)), ("w2", (HIDDEN, middle))):
            weight: Any = torch.nn.Parameter(torch.zeros(count, *shape), requires_grad=False)
            weight.weight_loader = self.weight_loader
            setattr(self, f"{name}_weight", weight)


class Toy(torch.nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """The layers of a transformer, with the loop over weights that SGLang's models have."""

    skips = re.compile(r"^$")

    def __init__(self, rank: int = 0, size: int = 1, expert_parallel: bool = False) -> None:
        super().__init__()
        group = SimpleNamespace(rank_in_group=rank, world_size=size)
        parallel = SimpleNamespace(tp_group=group, tp_rank=rank, tp_size=size)
        with (
            mock.patch.object(linear, "get_parallel", return_value=parallel),
            mock.patch.object(vocab_parallel_embedding, "get_parallel", return_value=parallel),
        ):
            self.embed = vocab_parallel_embedding.VocabParallelEmbedding(VOCAB, HIDDEN)
            self.qkv = linear.QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, bias=False)
            self.o = linear.RowParallelLinear(HEADS * HEAD, HIDDEN, bias=False)
            self.gate_up = linear.MergedColumnParallelLinear(HIDDEN, [MIDDLE] * 2, bias=False)
            self.column = linear.ColumnParallelLinear(HIDDEN, MIDDLE, bias=True)
        self.norm = torch.nn.LayerNorm(HIDDEN, bias=False)
        self.experts = Experts(rank, size, expert_parallel)
        for parameter in self.parameters():
            parameter.requires_grad_(False).fill_(-1)

    def load_weights(self, weights: Any) -> None:
        found: dict[str, Any] = dict(self.named_parameters())
        for name, weight in weights:
            layer, _, kind = name.rpartition(".")
            if Toy.skips.search(name):
                continue
            if layer.startswith("m.experts."):
                number, which = layer.split(".")[2:]
                full = "experts.w2_weight" if which == "w2" else "experts.w13_weight"
                found[full].weight_loader(found[full], weight, full, which, int(number))
            elif layer in PARTS:
                own, part = PARTS[layer]
                parameter = found[f"{own}.{kind}"]
                parameter.weight_loader(parameter, weight, part)
            else:
                parameter = found[name]
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two files with an index."""
    path = tmp_path_factory.mktemp("sglang") / "model"
    path.mkdir()
    torch.manual_seed(1)
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    index: dict[str, str] = {}
    for n, names in enumerate((list(weights)[:12], list(weights)[12:])):
        file = f"model-{n + 1:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in names}, path / file)
        index |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    serving._models.clear()  # pyright: ignore[reportPrivateUsage]
    started(monkeypatch)
    ours.register()  # Twice is as good as once.


def started(patch: pytest.MonkeyPatch) -> None:
    # No server runs, so there are no arguments of one.
    patch.setattr(sglang.srt.model_loader.loader, "get_server_args", lambda: None)
    given = {"weight_loader_disable_mmap": False, "weight_loader_prefetch_checkpoints": False}
    more = {"weight_loader_prefetch_num_threads": 1, "weight_loader_drop_cache_after_load": False}
    asked = SimpleNamespace(**given, **more)
    patch.setattr(sglang.srt.model_loader.loader, "get_model", lambda: asked)
    ours.register()
    HookRegistry.apply_hooks()


def loader(load_format: str = "mfload", **extra: Any) -> Any:
    given: Any = {"load_format": load_format, "model_loader_extra_config": extra}
    return get_model_loader(LoadConfig(**given))


def source(path: object) -> Any:
    return DefaultModelLoader.Source(str(path), None)


def filled(made: Any, path: object, *parallel: Any) -> Any:
    """A toy with the weights that a loader of SGLang gives."""
    toy = Toy(*parallel)
    made.load_weights_and_postprocess(
        toy, made._get_weights_iterator(source(path)), torch.device("cpu")
    )
    return toy


def same(one: Any, other: Any) -> None:
    mine, true = dict(one.named_parameters()), dict(other.named_parameters())
    assert mine.keys() == true.keys()
    for name, parameter in mine.items():
        assert torch.equal(parameter, true[name]), name


def sizes() -> dict[str, int]:
    return {name: 4 * torch.Size(shape).numel() for name, shape in SHAPES.items()}


def test_the_format_is_known_once() -> None:
    assert LOAD_FORMAT_CHOICES.count("mfload") == 1
    made = loader()
    assert isinstance(made, DefaultModelLoader)
    assert type(made) is ours.loader()
    assert type(get_model_loader(LoadConfig(load_format="auto"))) is DefaultModelLoader
    with pytest.raises(ValueError, match="nonsense"):
        LoadConfig(load_format="nonsense")


def test_the_entry_point_registers_the_format_in_a_fresh_process() -> None:
    code = """
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader.loader import get_model_loader
        print(type(get_model_loader(LoadConfig(load_format="mfload"))).__module__)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-1] == "mfload.compat.sglang"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_reads_what_its_layers_copy(model: Path, size: int) -> None:
    norm = sizes()["norm.weight"]
    every = (sum(sizes().values()) - norm) // size + norm
    spread = [name for name in sizes() if SPREAD.search(name)]
    for rank in range(size):
        made = loader()
        same(filled(made, model, rank, size), filled(loader("safetensors"), model, rank, size))
        plan = mfload.plan(model, "torch", names=spread, shardings=[(r".", 1)], shard=(rank, size))
        assert made.report.read_bytes - made.report.over_read_bytes == every
        assert made.report.over_read_bytes <= plan.over_read_bytes
        assert made.report.whole_reads == 0
        with mock.patch.object(Toy, "skips", SPREAD):
            made = loader()
            filled(made, model, rank, size)
        rows = sum(sizes().values()) - sum(sizes()[name] for name in spread) - norm
        assert made.report.read_bytes == rows // size + norm


def test_experts_of_other_ranks_are_not_read(model: Path) -> None:
    for rank in range(2):
        made = loader()
        with mock.patch.object(Toy, "skips", re.compile(r"^(?!m\.experts)")):
            toy = filled(made, model, rank, 2, True)
        experts = [nbytes for name, nbytes in sizes().items() if ".experts." in name]
        assert made.report.read_bytes == sum(experts) // 2
        with mfload.open(model, "torch") as f:
            for n in range(2):
                true = f.get_tensor(f"m.experts.{2 * rank + n}.w2.weight")
                assert torch.equal(toy.experts.w2_weight[n], true)


def test_a_model_is_filled_again_in_place(model: Path) -> None:
    """As `/update_weights_from_disk` does: another loader, the same parameters."""
    toy = filled(loader(), model)
    places = {name: each.data_ptr() for name, each in toy.named_parameters()}
    for parameter in toy.parameters():
        parameter.zero_()
    again = loader()
    again.load_weights_and_postprocess(
        toy, again._get_weights_iterator(source(model)), torch.device("cpu")
    )
    assert {name: each.data_ptr() for name, each in toy.named_parameters()} == places
    assert again.report.read_bytes == sum(sizes().values())
    same(toy, filled(loader("safetensors"), model))


@pytest.mark.parametrize("ours", [False, True])
def test_a_norm_that_gemma_changes_in_place(tmp_path: Path, ours: bool) -> None:
    stored = {"model.norm.weight": torch.randn(16)}
    save_file(stored, tmp_path / "w.safetensors")
    made = torch.nn.Module()
    made.model = torch.nn.Module()
    made.model.norm = torch.nn.LayerNorm(16, bias=False).requires_grad_(False)
    rows = serving.Weights({}).rows(str(tmp_path / "w.safetensors"))
    copies = [(name, each.clone()) for name, each in stored.items()]
    gemma.GemmaForCausalLM.load_weights(made, rows if ours else copies)
    assert torch.equal(made.model.norm.weight, stored["model.norm.weight"] + 1)


@pytest.mark.parametrize(
    ("quantization", "stored", "refused"),
    [
        ("modelopt_fp8", False, True), ("modelopt_fp8", True, False),
        ("modelopt_fp4", False, False), ("auto-round-int8", True, True), (None, False, False),
    ],
)  # fmt: skip
def test_models_that_sglang_quantises_are_refused(
    quantization: str | None, stored: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(
        quantization=quantization, modelopt_quant=None, _is_already_quantized=lambda: stored
    )
    monkeypatch.setattr(DefaultModelLoader, "load_model", lambda *_, **__: "model")
    made = get_model_loader(LoadConfig(load_format="mfload"), config)
    given = {"model_config": config, "device_config": None}
    if refused:
        with pytest.raises(errors.UsageError, match="quantises") as caught:
            made.load_model(**given)
        assert caught.value.found == quantization
    else:
        assert made.load_model(**given) == "model"


def test_the_config_can_be_pickled() -> None:
    config = pickle.loads(pickle.dumps(LoadConfig(load_format="mfload")))
    assert type(get_model_loader(config)) is ours.loader()


def test_paths_and_settings(model: Path) -> None:
    made = loader(path=str(model / "model.safetensors.index.json"))
    found = [name for name, _ in made._get_weights_iterator(source("org/name"))]
    assert sorted(found) == sorted(SHAPES)
    with pytest.raises(errors.UsageError, match="another is loaded"):
        made._get_weights_iterator(source("org/other"))
    made.download_model(SimpleNamespace(model_path="org/name"))
    with pytest.raises(errors.UsageError, match="'nonsense'"):
        loader(nonsense=1)


def test_a_url(model: Path) -> None:
    from serving import serving as served  # Not found by the processes that are started here.

    with served({f"/{file.name}": file.read_bytes() for file in model.iterdir()}) as server:
        url = server.url("/model.safetensors.index.json")
        toy = filled(loader(path={"org/name": url}), "org/name")
    same(toy, filled(loader("safetensors"), model))


def test_processes_read_each_byte_once(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(model), str(tmp_path / "store")]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [json.loads(each.communicate(timeout=200)[0].splitlines()[-1]) for each in processes]
    assert [each.returncode for each in processes] == [0, 0]
    whole = sum(sizes().values())
    assert sum(read for read, _ in said) == whole
    assert all(moved == whole - read for read, moved in said)


def process(model: str, store: str, rank: str) -> None:
    """One of the two processes of the test above."""
    given: Any = {"init_method": f"file://{store}", "rank": int(rank), "world_size": 2}
    torch.distributed.init_process_group("gloo", **given)
    with pytest.MonkeyPatch.context() as patch:
        started(patch)
        made = loader(exchange="once", timeout=100)
        toy = filled(made, model, int(rank), 2)
        same(toy, filled(loader("safetensors"), model, int(rank), 2))
    print(json.dumps([made.report.read_bytes, made.report.exchanged_bytes]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    process(*sys.argv[1:])
