"""vLLM's own layers and loaders over mfload: `make vllm` runs this in an environment of its own."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import mfload
from mfload import errors

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from vllm import config as configs
from vllm.config import LoadConfig
from vllm.distributed import parallel_state
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models import gpt_oss

from mfload.compat import serving, vllm as ours

HIDDEN, HEADS, KV_HEADS, HEAD, MIDDLE, VOCAB, EXPERTS = 512, 16, 2, 32, 1024, 640, 4
# The name of a tensor: the layer, and as which of its parts it is loaded.
PARTS = {
    "q": ("qkv", "q"), "k": ("qkv", "k"), "v": ("qkv", "v"),
    "gate": ("gate_up", 0), "up": ("gate_up", 1),
}  # fmt: skip
SPREAD = re.compile(r"^o\.|\.w2\.")  # Of these a rank uses columns.


class Experts(RoutedExperts):  # pyright: ignore[reportUntypedBaseClass]
    """Fused experts with vLLM's own loaders, without the kernels that they would run on."""

    def __init__(self, rank: int, size: int, expert_parallel: bool) -> None:
        torch.nn.Module.__init__(self)
        count = EXPERTS // size if expert_parallel else EXPERTS
        middle = MIDDLE if expert_parallel else MIDDLE // size
        tp = (0, 1) if expert_parallel else (rank, size)
        first = rank * count if expert_parallel else 0
        self.quant_config, self._fused_shared_expert_quantizer = None, None
        self.quant_method = SimpleNamespace()
        self.moe_config: Any = SimpleNamespace(
            tp_rank=tp[0],
            is_act_and_mul=True,
            tp_shard_with_padding=False,
            num_logical_experts=EXPERTS,
            moe_parallel_config=SimpleNamespace(tp_size=tp[1]),
        )
        self.expert_map_manager: Any = SimpleNamespace(
            num_fused_shared_experts=0,
            map_global_to_local=lambda n: n - first if first <= n < first + count else -1,
        )
        for name, shape in (("w13", (2 * middle, HIDDEN)), ("w2", (HIDDEN, middle))):
            weight = torch.nn.Parameter(torch.zeros(count, *shape), requires_grad=False)
            weight.weight_loader = self.weight_loader  # pyright: ignore
            setattr(self, f"{name}_weight", weight)


class Toy(torch.nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """The layers of a transformer, with the loop over weights that vLLM's models have."""

    def __init__(self, rank: int = 0, size: int = 1, expert_parallel: bool = False) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(VOCAB, HIDDEN)
        self.qkv = linear.QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, bias=False)
        self.o = linear.RowParallelLinear(HEADS * HEAD, HIDDEN, bias=False)
        self.gate_up = linear.MergedColumnParallelLinear(HIDDEN, [MIDDLE] * 2, bias=False)
        self.column = linear.ColumnParallelLinear(HIDDEN, MIDDLE, bias=True)
        self.norm = torch.nn.LayerNorm(HIDDEN, bias=False)
        self.experts = Experts(rank, size, expert_parallel)
        for parameter in self.parameters():
            parameter.requires_grad_(False).fill_(-1)

    skips = re.compile(r"^$")

    def load_weights(self, weights: Any) -> set[str]:
        found = dict(self.named_parameters())
        done: set[str] = set()
        for name, weight in weights:
            if Toy.skips.search(name):
                continue
            layer, _, kind = name.rpartition(".")
            if layer.startswith("m.experts."):
                number, which = layer.split(".")[2:]
                full = "experts.w2_weight" if which == "w2" else "experts.w13_weight"
                parameter = found[full]
                parameter.weight_loader(parameter, weight, full, which, int(number))
            elif layer in PARTS:
                own, part = PARTS[layer]
                full = f"{own}.{kind}"
                parameter = found[full]
                parameter.weight_loader(parameter, weight, part)
            else:
                full, parameter = name, found[name]
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)
            done.add(full)
        return done


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two files with an index."""
    path = tmp_path_factory.mktemp("vllm") / "model"
    path.mkdir()
    shapes = {
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
    }
    for n in range(EXPERTS):
        shapes |= {f"m.experts.{n}.{w}.weight": (MIDDLE, HIDDEN) for w in ("w1", "w3")}
        shapes[f"m.experts.{n}.w2.weight"] = HIDDEN, MIDDLE
    torch.manual_seed(1)
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    index: dict[str, str] = {}
    for n, names in enumerate((list(weights)[:12], list(weights)[12:])):
        file = f"model-{n + 1:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in names}, path / file)
        index |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


@contextlib.contextmanager
def ranked(rank: int, size: int, **parallel: Any) -> Generator[Any]:
    """vLLM's functions say this rank and size of the tensor-parallel group."""
    group, before = SimpleNamespace(rank_in_group=rank, world_size=size), parallel_state._TP
    parallel_state._TP = group  # pyright: ignore
    vllm_config = configs.VllmConfig(device_config=configs.DeviceConfig("cpu"))
    for name, value in {"tensor_parallel_size": size, **parallel}.items():
        setattr(vllm_config.parallel_config, name, value)
    try:
        with configs.set_current_vllm_config(vllm_config):
            yield vllm_config
    finally:
        parallel_state._TP = before


def described(model: Any, **more: Any) -> Any:
    """What loaders ask of a ModelConfig."""
    given = {"quantization": None, "is_moe": False, "multimodal_config": None, "revision": None}
    return SimpleNamespace(model=str(model), **given | more)


def loaded(
    model: Any, format: str, rank: int = 0, size: int = 1, track: bool = True, **extra: Any
) -> Any:
    """A toy that a loader of vLLM's registry filled, and the loader."""
    given = {"model_loader_extra_config": extra, "use_tqdm_on_load": False}
    loader: Any = get_model_loader(LoadConfig(load_format=format, **given))
    loader.enable_weights_track = track
    with ranked(rank, size):
        toy = Toy(rank, size)
        loader.load_weights(toy, described(model))
    return toy, loader


@contextlib.contextmanager
def serving_files(folder: Path) -> Generator[str]:
    """The URL of a folder behind a server that knows ranges."""
    from serving import serving as served  # Not found by the processes that are started here.

    with served({f"/{file.name}": file.read_bytes() for file in folder.iterdir()}) as server:
        yield server.url("")


def same(one: Any, other: Any) -> None:
    mine, true = dict(one.named_parameters()), dict(other.named_parameters())
    assert mine.keys() == true.keys()
    for name, parameter in mine.items():
        assert torch.equal(parameter, true[name]), name


@pytest.fixture(autouse=True)
def registered() -> None:
    serving._models.clear()  # pyright: ignore[reportPrivateUsage]
    ours.register()
    ours.register()  # Twice is as good as once.


def test_the_entry_point_registers_the_format_in_a_fresh_process() -> None:
    code = """
        from vllm.plugins import load_general_plugins
        load_general_plugins()
        from vllm.config import LoadConfig
        from vllm.model_executor.model_loader import get_model_loader
        print(type(get_model_loader(LoadConfig(load_format="mfload"))).__module__)
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-1] == "mfload.compat.vllm"


def wanted(name: str, nbytes: int, size: int) -> int:
    """Bytes of a tensor that a rank of so many uses."""
    if name.startswith("norm"):
        return nbytes
    return nbytes // min(size, KV_HEADS) if name[:2] in ("k.", "v.") else nbytes // size


def sizes(model: Path) -> dict[str, int]:
    with mfload.open(model, "numpy") as f:
        return {
            name: 4 * int(torch.Size(f.get_slice(name).get_shape()).numel())
            for name in f.keys()  # noqa: SIM118
        }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_reads_what_its_layers_copy(model: Path, size: int) -> None:
    every = sum(wanted(name, nbytes, size) for name, nbytes in sizes(model).items())
    columns = [name for name in sizes(model) if SPREAD.search(name)]
    for rank in range(size):
        toy, loader = loaded(model, "mfload", rank, size)
        true, _ = loaded(model, "safetensors", rank, size)
        same(toy, true)
        report = loader.report
        plan = mfload.plan(model, "torch", names=columns, shardings=[(r".", 1)], shard=(rank, size))
        assert report.read_bytes - report.over_read_bytes == every
        assert report.over_read_bytes <= plan.over_read_bytes
        assert report.whole_reads == 0


@pytest.mark.parametrize("size", [1, 2, 4])
def test_of_rows_a_rank_reads_its_share_to_the_byte(model: Path, size: int) -> None:
    rows = {name: nbytes for name, nbytes in sizes(model).items() if not SPREAD.search(name)}
    for rank in range(size):
        with mock.patch.object(Toy, "skips", SPREAD):
            _, loader = loaded(model, "mfload", rank, size, track=False)
        assert loader.report.read_bytes == sum(wanted(*row, size) for row in rows.items())
        assert loader.report.over_read_bytes == 0


@pytest.mark.parametrize("filtered", [False, True])
def test_experts_of_other_ranks_are_not_read(model: Path, filtered: bool) -> None:
    experts = {name: nbytes for name, nbytes in sizes(model).items() if ".experts." in name}
    given = {"enable_expert_parallel": True, "enable_ep_weight_filter": filtered}
    others = re.compile(r"^(?!m\.experts)")
    for rank in range(2):
        loader: Any = get_model_loader(LoadConfig(load_format="mfload"))
        with ranked(rank, 2, **given), mock.patch.object(Toy, "skips", others):
            toy = Toy(rank, 2, expert_parallel=True)
            asked = described(model, is_moe=True, get_num_experts=lambda: EXPERTS)
            loader._init_ep_weight_filter(asked)
            names = [name for name, _ in loader.get_all_weights(asked, toy)]
            assert len(names) == len(sizes(model)) - filtered * len(experts) // 2
            toy.load_weights(loader.get_all_weights(asked, toy))
        assert loader.report.read_bytes == sum(experts.values()) // 2
        with mfload.open(model, "torch") as f:
            for n in range(2):
                true = f.get_tensor(f"m.experts.{2 * rank + n}.w2.weight")
                assert torch.equal(toy.experts.w2_weight[n], true)


def real_experts(rank: int, expert_parallel: bool, transposed: bool = False) -> Any:
    """Fused experts as vLLM's models of mixtures have them, with their own loop over weights."""
    made: Any = Experts(rank, 2, expert_parallel)
    made.layer_name, made.lora_base_layer_prefix = "m.experts", ""
    made.ckpt_gate_proj_name, made.ckpt_up_proj_name = "gate_proj", "up_proj"
    made.ckpt_down_proj_name = "down_proj"
    made.moe_config.num_experts = EXPERTS
    made.is_fused_checkpoint_transposed = transposed
    return made


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_the_loader_of_fused_experts(tmp_path: Path, rank: int, expert_parallel: bool) -> None:
    """It adds a dim and takes it away again, of every expert, before it knows whose that is."""
    shapes = {"gate_proj": (MIDDLE, HIDDEN), "up_proj": (MIDDLE, HIDDEN)}
    shapes |= {"down_proj": (HIDDEN, MIDDLE)}
    stored = {
        f"{n}.{which}.weight": torch.randn(shape)
        for n in range(EXPERTS)
        for which, shape in shapes.items()
    }
    save_file(stored, tmp_path / "experts.safetensors")
    weights = serving.Weights({})
    with ranked(rank, 2):
        one, other = (real_experts(rank, expert_parallel) for _ in range(2))
        assert list(one.load_weights(weights.rows(str(tmp_path / "experts.safetensors"))))
        list(other.load_weights(iter(stored.items())))
    same(one, other)
    total, columns = sum(each.nbytes for each in stored.values()), MIDDLE * HIDDEN * 4 * EXPERTS
    # Of columns the gaps are read over, but for those before the first and after the last.
    most = total / 2 + (0 if expert_parallel else columns / 2)
    assert total / 2 <= weights.report.read_bytes <= most
    assert weights.report.whole_reads == 0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_stack_of_all_experts(tmp_path: Path, rank: int, transposed: bool) -> None:
    stored = {
        "gate_up_proj": torch.randn(EXPERTS, 2 * MIDDLE, HIDDEN),
        "down_proj": torch.randn(EXPERTS, HIDDEN, MIDDLE),
    }
    if transposed:
        stored = {name: each.transpose(1, 2).contiguous() for name, each in stored.items()}
    save_file(stored, tmp_path / "experts.safetensors")
    weights = serving.Weights({})
    with ranked(rank, 2):
        one, other = (real_experts(rank, False, transposed) for _ in range(2))
        assert list(one.load_weights(weights.rows(str(tmp_path / "experts.safetensors"))))
        list(other.load_weights(iter(stored.items())))
    same(one, other)
    assert one.w13_weight.any()
    assert weights.report.whole_reads == 0
    assert weights.report.peak_bytes < 2 * MIDDLE * HIDDEN * 4 * EXPERTS  # Never the whole stack.


def test_a_weight_that_gpt_oss_sets_to_zero(tmp_path: Path) -> None:
    name = "layers.0.mlp.experts.w2_bias"
    stored = {name: torch.randn(EXPERTS, 16)}
    save_file(stored, tmp_path / "w.safetensors")
    (cls,) = (each for each in vars(gpt_oss).values() if "_load_weights_other" in vars_of(each))
    one = SimpleNamespace(world_size=1, rank_in_group=0)
    patches = {
        "get_tensor_model_parallel_world_size": lambda: 2,
        "get_dp_group": lambda: one,
        "get_pcp_group": lambda: one,
        "is_pp_missing_parameter": lambda *_: False,
        "remap_moe_expert_weights": lambda rows, _: rows,
    }
    lazy = serving.Weights({}).rows(str(tmp_path / "w.safetensors"))
    for weights in ([(name, stored[name].clone())], lazy):
        bias = torch.nn.Parameter(torch.ones(EXPERTS, 16), requires_grad=False)
        made = SimpleNamespace(
            parallel_config=SimpleNamespace(enable_expert_parallel=False),
            config=SimpleNamespace(intermediate_size=32, num_local_experts=EXPERTS),
            named_parameters=lambda bias=bias: [(name, bias)],
            _try_load_streamed_expert=lambda *_: False,
        )
        parallel, flat = gpt_oss.FusedMoEParallelConfig, "flatten_tp_across_dp_and_pcp"
        rank = mock.patch.object(parallel, flat, return_value=(2, 1))
        with rank, mock.patch.multiple(gpt_oss, **patches):
            cls._load_weights_other(made, 0, EXPERTS, list(weights), [])
        assert not bias.any()


def vars_of(value: Any) -> Any:
    return vars(value) if isinstance(value, type) else {}


def test_vllm_reloads_a_model_in_place(model: Path, tmp_path: Path) -> None:
    """As after sleep at level 2: parameters lose what they held, and stay where they are."""
    from vllm.model_executor.model_loader.reload import inplace

    made: list[Any] = []
    init = ours.MfloadModelLoader.__init__

    def kept(self: Any, load_config: Any) -> None:
        made.append(self)
        init(self, load_config)

    with ranked(0, 1) as vllm_config:
        vllm_config.model_config = described(model, dtype=torch.float32)
        vllm_config.load_config = LoadConfig(load_format="mfload")
        toy = torch.nn.Module()
        toy.column = linear.ColumnParallelLinear(HIDDEN, MIDDLE, bias=True)
        toy.o = linear.RowParallelLinear(HEADS * HEAD, HIDDEN, bias=False)
        toy.load_weights = lambda weights: Toy.load_weights(toy, weights)  # pyright: ignore
        layerwise.record_metadata_for_reloading(toy)
        places = {name: each.data_ptr() for name, each in toy.named_parameters()}
        for parameter in toy.parameters():
            parameter.data.zero_()
        with (
            mock.patch.object(Toy, "skips", re.compile(r"^(?!column|o\.)"), create=True),
            mock.patch.object(ours.MfloadModelLoader, "__init__", kept),
        ):
            inplace.reload_weights(vllm_config, toy, None, None, True)
    assert {name: each.data_ptr() for name, each in toy.named_parameters()} == places
    # vLLM passes the weights twice, once to count their elements.
    (loader,) = made
    every = sum(each.nbytes for each in toy.parameters())
    assert loader.report.read_bytes == every
    with mfload.open(model, "torch") as f:
        for name, parameter in toy.named_parameters():
            assert torch.equal(parameter, f.get_tensor(name)), name


def test_a_path_of_its_own_and_a_url(model: Path) -> None:
    true, _ = loaded(model, "safetensors")
    index = str(model / "model.safetensors.index.json")
    same(loaded("org/name", "mfload", path=str(model))[0], true)
    same(loaded("org/name", "mfload", path={"org/name": index, "org/other": "nowhere"})[0], true)
    with serving_files(model) as url:
        same(loaded("org/name", "mfload", path=f"{url}/model.safetensors.index.json")[0], true)


def test_a_subfolder_of_a_path_is_refused(model: Path) -> None:
    loader: Any = get_model_loader(
        LoadConfig(load_format="mfload", model_loader_extra_config={"path": str(model)})
    )
    source = DefaultModelLoader.Source("org/name", None, subfolder="text")
    with pytest.raises(errors.UsageError, match="subfolder"):
        loader._get_weights_iterator(source)


def test_vllm_knows_when_loading_began(model: Path) -> None:
    _, loader = loaded(model, "mfload")
    assert 0 < loader.counter_before_loading_weights < loader.counter_after_loading_weights


def test_one_path_is_for_one_model(model: Path) -> None:
    loaded("org/name", "mfload", path=str(model))
    with pytest.raises(errors.UsageError, match="another is loaded"):
        loaded("org/draft", "mfload", path=str(model))


@pytest.mark.parametrize(
    "extra", [{"nonsense": 1}, {"threads": 0}, {"exchange": "twice"}, {"path": 3}]
)
def test_settings_that_are_wrong_are_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError):
        get_model_loader(LoadConfig(load_format="mfload", model_loader_extra_config=extra))


def test_a_setting_of_vllms_own_loader() -> None:
    config = LoadConfig(
        load_format="mfload", model_loader_extra_config={"enable_weights_track": True}
    )
    assert get_model_loader(config).enable_weights_track is True


def test_files_without_weights_that_a_model_uses_are_not_read(model: Path) -> None:
    first, *rest = sorted(model.glob("*.safetensors"))
    with safe_open(first, "pt") as file:
        unused = set(file.keys())
    made: Any = get_model_loader(LoadConfig(load_format="mfload"))
    source = DefaultModelLoader.Source(str(model), None, is_unused_weight=unused.__contains__)
    names = {name for name, _ in made._get_weights_iterator(source)}
    assert names
    assert not names & unused
    assert rest


def test_weights_that_a_model_lists_are_not_kept(tmp_path: Path) -> None:
    save_file({str(n): torch.ones(512, 512) for n in range(64)}, tmp_path / "w.safetensors")
    rows = list(serving.Weights({}).rows(str(tmp_path / "w.safetensors")))
    for _, lazy in rows:
        torch.empty(512, 512, dtype=torch.float16).copy_(lazy)
        assert not getattr(lazy.whole.part, "_kept", None)


def test_weights_that_are_missing_or_damaged_are_errors(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    second = copy / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-4])
    with pytest.raises(errors.MfloadError):
        loaded(copy, "mfload")
    second.write_bytes((copy / "model-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(errors.MfloadError):  # Each tensor of it is there twice.
        loaded(copy, "mfload")
    second.unlink()
    (copy / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="not initialized"):
        loaded(copy, "mfload")


def test_of_families_vllm_chooses_and_other_files_are_refused(model: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(model, mixed)
    with mfload.open(model, "torch") as f:
        save_file(f.get_tensors(), mixed / "consolidated.safetensors")
    made = loaded(mixed, "mfload")
    assert str(made[1].report.route).count("consolidated")
    assert "00001-of" not in str(made[1].report.route)
    same(made[0], loaded(model, "safetensors")[0])
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(errors.UsageError, match=r"pytorch_model\.bin"):
        loaded(pickled, "mfload")


def test_names_that_vllm_maps_and_skips(model: Path) -> None:
    """As models with `hf_to_vllm_mapper` do."""
    from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

    weights = serving.Weights({})
    with ranked(1, 2):
        holder: Any = torch.nn.Module()
        holder.inner = linear.ColumnParallelLinear(HIDDEN, MIDDLE, bias=True)
        prefixes: dict[str, Any] = {name.partition(".")[0] + ".": None for name in sizes(model)}
        mapper = WeightsMapper(orig_to_new_prefix=prefixes | {"column.": "inner."})
        loader = AutoWeightsLoader(holder)
        done = loader.load_weights(weights.rows(str(model)), mapper=mapper)
    assert done == {"inner.weight", "inner.bias"}
    assert weights.report.read_bytes == holder.inner.weight.nbytes + holder.inner.bias.nbytes
    with mfload.open(model, "torch") as f:
        for kind in ("weight", "bias"):
            true = f.get_tensor(f"column.{kind}").chunk(2)[1]
            assert torch.equal(getattr(holder.inner, kind), true)


def test_scales_of_quantised_layers(tmp_path: Path) -> None:
    """Parameters of quantised layers: whole tensors, blocks of rows, one number a part."""
    from vllm.model_executor import parameter as kinds

    torch.manual_seed(1)
    stored = {
        "q.weight": torch.randn(64, 32).to(torch.float8_e4m3fn),
        "q.weight_scale": torch.tensor(0.25),
        "k.weight": torch.randn(64, 32).to(torch.float8_e4m3fn),
        "k.weight_scale": torch.tensor([0.5]),
        "blocks": torch.randn(8, 4),
    }
    save_file(stored, tmp_path / "model.safetensors")
    given: Any = {"weight_loader": lambda *_: None}
    with ranked(1, 2):
        weight = kinds.ModelWeightParameter(
            data=torch.zeros(64, 32, dtype=torch.float8_e4m3fn), input_dim=1, output_dim=0, **given
        )
        scale = kinds.PerTensorScaleParameter(data=torch.zeros(2), **given)
        block = kinds.BlockQuantScaleParameter(
            data=torch.zeros(4, 4), input_dim=1, output_dim=0, **given
        )
        for name, tensor in serving.Weights({}).rows(str(tmp_path)):
            part = {"shard_offset": 32 * name.startswith("k"), "shard_size": 32}
            if name == "blocks":
                block.load_column_parallel_weight(tensor)
            elif name.endswith("scale"):
                scale.load_merged_column_weight(tensor, shard_id=int(name.startswith("k")))
            else:
                weight.load_merged_column_weight(tensor, **part)
    assert scale.tolist() == [0.25, 0.5]
    assert torch.equal(block, stored["blocks"][4:])
    wanted = [stored[name][32:].float() for name in ("q.weight", "k.weight")]
    assert torch.equal(weight.float(), torch.cat(wanted))


def test_torchao_is_refused(model: Path) -> None:
    loader: Any = get_model_loader(LoadConfig(load_format="mfload"))
    loader.load_config.safetensors_load_strategy = "torchao"
    with pytest.raises(errors.UsageError, match="torchao"):
        next(loader.get_all_weights(described(model), torch.nn.Module()))


@pytest.mark.parametrize("size", [1, 2])
def test_processes_read_each_byte_once(model: Path, tmp_path: Path, size: int) -> None:
    store = tmp_path / "store"
    command = [sys.executable, __file__, str(model), str(store), str(size)]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    said = [json.loads(each.communicate(timeout=200)[0].splitlines()[-1]) for each in processes]
    assert [each.returncode for each in processes] == [0] * size
    whole = sum(sizes(model).values())
    assert sum(read for read, _ in said) == whole
    assert all(moved == whole - read for read, moved in said)


def fail(name: str) -> None:
    raise KeyError(name)


def process(model: str, store: str, size: str, rank: str) -> None:
    """One of the processes of the test above."""
    count, number = int(size), int(rank)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=number, world_size=count
    )
    ours.register()
    toy, loader = loaded(model, "mfload", number, count, exchange="once", timeout=100)
    same(toy, loaded(model, "safetensors", number, count)[0])
    if count > 1:  # A model that fails on one rank ends the load on the other.
        fails = mock.patch.object(Toy, "skips", SimpleNamespace(search=fail))
        expected = KeyError if number else errors.ProcessError
        more = {"timeout": 100, "max_host_overhead": "16MiB"}  # It takes several batches.
        with fails if number else contextlib.nullcontext(), pytest.raises(expected):
            loaded(model, "mfload", number, count, exchange="once", **more)
    print(json.dumps([loader.report.read_bytes, loader.report.exchanged_bytes]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    process(*sys.argv[1:])
