"""`load_into` for modules of PyTorch with load hooks, against `load_state_dict`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize

import mfload
from mfload import errors
from mfload.trees import torch_modules

# -- modules with a say ----------------------------------------------------------------------


class Frozen(torch.nn.Module):
    """A FrozenBatchNorm as in torchvision: counts are dropped, whatever the file says."""

    def __init__(self, n: int = 4) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.zeros(n))

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        state.pop(prefix + "num_batches_tracked", None)
        super()._load_from_state_dict(state, prefix, *more)


class Scaled(torch.nn.Linear):
    """What it loads is another number than what is stored."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self._register_load_state_dict_pre_hook(self._double)

    def _double(self, state: Any, prefix: str, *_: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].flip(0) * 2


class Fused(torch.nn.Module):
    """Stored are q, k and v; it holds one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(4, 12, bias=False)
        self.out = torch.nn.Linear(4, 4)
        self.register_load_state_dict_pre_hook(self._fuse)

    @staticmethod
    def _fuse(_: Any, state: Any, prefix: str, *more: Any) -> None:
        if f"{prefix}q.weight" in state:
            every = [state.pop(f"{prefix}{name}.weight") for name in "qkv"]
            state[f"{prefix}qkv.weight"] = torch.cat(every)


class Extra(torch.nn.Linear):
    """Keeps what it was given besides its weights."""

    seen: Any = None

    def __init__(self) -> None:
        super().__init__(4, 4)

    def get_extra_state(self) -> Any:
        return torch.tensor([1.0, 2.0])

    def set_extra_state(self, state: Any) -> None:
        self.seen = state.clone()


class After(torch.nn.Module):
    """Computes of its weights what it does not save, and can do without one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.spare = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("total", torch.zeros(()), persistent=False)
        self.register_load_state_dict_post_hook(self._after)

    @staticmethod
    def _after(self: Any, keys: Any) -> None:
        if not self.inner.weight.is_meta:
            self.total = self.inner.weight.detach().sum()
        for names in keys:
            for name in [name for name in names if name.endswith(("spare", "old"))]:
                names.remove(name)


class Whole(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        named = {f"inner.{name}": tensor + 1 for name, tensor in state.items()}
        return super().load_state_dict(named, strict, assign)


class Copies(torch.nn.Module):
    """Fills itself, without what PyTorch does."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4))

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        with torch.no_grad():
            self.w.copy_(state[prefix + "w"].neg())


def normed() -> Any:
    return parametrizations.weight_norm(torch.nn.Conv1d(4, 4, 3))


def parametrized() -> Any:
    made = torch.nn.Linear(4, 4)
    parametrize.register_parametrization(made, "weight", torch.nn.Tanh(), unsafe=True)
    return made


KINDS: dict[str, tuple[Callable[[], Any], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "linear": (lambda: torch.nn.Linear(4, 4), dict),
    "batch": (lambda: torch.nn.BatchNorm1d(4), dict),
    "orthogonal": (lambda: parametrizations.orthogonal(torch.nn.Linear(4, 4)), dict),
    "spectral": (lambda: torch.nn.utils.spectral_norm(torch.nn.Linear(4, 4)), dict),
    "parametrized": (parametrized, dict),
    "wrapped": (lambda: checkpoint_wrapper(torch.nn.Linear(4, 4)), dict),
    "wrapped hooks": (lambda: checkpoint_wrapper(Scaled()), dict),
    "frozen": (Frozen, lambda state: state | {"num_batches_tracked": torch.tensor(3)}),
    "scaled": (Scaled, dict),
    "fused": (
        Fused,
        lambda state: (
            {name: each for name, each in state.items() if name != "qkv.weight"}
            | {f"{name}.weight": torch.randn(4, 4) for name in "qkv"}
        ),
    ),
    "fused already": (Fused, dict),
    "extra": (Extra, dict),
    "after": (After, lambda state: {n: t for n, t in state.items() if n != "spare"}),
    "after, spare": (After, lambda state: state | {"old": torch.zeros(1)}),
    "copies": (Copies, dict),
    "normed": (normed, dict),
    "normed, old names": (
        normed,
        lambda state: {
            "bias": state["bias"],
            "weight_g": state["parametrizations.weight.original0"],
            "weight_v": state["parametrizations.weight.original1"],
        },
    ),
    "lazy": (lambda: torch.nn.LazyLinear(4), lambda _: dict(torch.nn.Linear(3, 4).state_dict())),
}


def values(module: Any) -> dict[str, Any]:
    made = dict(module.state_dict())
    made |= {f"{path}|{name}": each for path, inner in module.named_modules()
             for name, each in inner._buffers.items() if each is not None}  # fmt: skip
    return made | {f"{path}|seen": inner.seen for path, inner in module.named_modules()
                   if getattr(inner, "seen", None) is not None}  # fmt: skip


def check(net: Any, like: Any) -> None:
    ours, theirs = values(net), values(like)
    assert ours.keys() == theirs.keys()
    bare = [n for n, each in ours.items() if torch.nn.parameter.is_lazy(each)]
    assert bare == [n for n, each in theirs.items() if torch.nn.parameter.is_lazy(each)]
    bare += [n for n, each in ours.items() if n.endswith("spare") and each.is_meta]
    wrong = [n for n, each in ours.items() if n not in bare and (each.dtype != theirs[n].dtype
             or not torch.equal(each.cpu(), theirs[n]))]  # fmt: skip
    assert wrong == []


def stored(module: Any, change: Any) -> dict[str, Any]:
    state = {
        name: torch.randn(each.shape).to(each.dtype) if each.is_floating_point() else each + 3
        for name, each in module.state_dict().items()
        if not torch.nn.parameter.is_lazy(each)
    }
    return change(state)


def write(path: Path, state: dict[str, Any]) -> Path:
    safetensors.torch.save_file({n: each.contiguous() for n, each in state.items()}, path)
    return path


def quietly(net: Any, path: Path, **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mfload.load_into(net, path, **more)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("at", ["", "a.0."])
def test_what_load_state_dict_makes_of_it(tmp_path: Path, kind: str, meta: bool, at: str) -> None:
    if meta and kind in ("copies", "orthogonal"):
        pytest.skip("it computes with what it holds")
    make, change = KINDS[kind]

    def build() -> Any:
        made = make()
        if at:
            made = torch.nn.ModuleDict({"a": torch.nn.Sequential(made, torch.nn.Linear(2, 2))})
        return made

    state = {f"{at}{name}": each for name, each in stored(make(), change).items()}
    if at:
        state |= {"a.1.weight": torch.randn(2, 2), "a.1.bias": torch.randn(2)}
    like = build()
    with torch.device("meta" if meta else "cpu"):
        net = build() if meta else copy.deepcopy(like)
    path = write(tmp_path / "x.safetensors", state)
    like.load_state_dict(safetensors.torch.load_file(path))
    assert quietly(net, path) is net
    check(net, like)


TREES = st.recursive(
    st.sampled_from(sorted(KINDS.keys() - {"orthogonal"})),
    lambda inner: st.lists(inner, min_size=1, max_size=3),
    max_leaves=6,
)


class Node(torch.nn.Module):
    """Modules in a list, with a weight of its own, and perhaps a hook of its own."""

    def __init__(self, inner: list[Any], hook: str) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleList(inner)
        self.own, self.outermost = torch.nn.Parameter(torch.zeros(3)), False
        if hook == "before":
            self._register_load_state_dict_pre_hook(self._before)
        if hook == "after":
            self.register_load_state_dict_post_hook(self._after)

    @staticmethod
    def _before(state: Any, prefix: str, *_: Any) -> None:
        for name in list(state):
            if name.startswith(prefix) and state[name].is_floating_point():
                state[name] = state[name] * 2

    @staticmethod
    def _after(self: Any, keys: Any) -> None:
        with torch.no_grad():
            self.own.add_(sum(each.sum() for each in self.inner.parameters()
                              if not torch.nn.parameter.is_lazy(each)))  # fmt: skip
        if self.outermost:  # Others would forgive what came before, wherever it is.
            keys.missing_keys.clear()


def build(tree: Any, hooks: Any, prefix: str = "") -> tuple[Any, dict[str, Any]]:
    if isinstance(tree, str):
        make, change = KINDS[tree]
        made = make()
        return made, {prefix + name: each for name, each in stored(made, change).items()}
    inner, state = [], {f"{prefix}own": torch.randn(3)}
    for n, each in enumerate(tree):
        made, more = build(each, hooks, f"{prefix}inner.{n}.")
        inner.append(made)
        state |= more
    return Node(inner, next(hooks)), state


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_random_trees_and_hooks(tmp_path: Path, data: Any) -> None:
    """Values, and whether it is refused: names too many or too few are what torch says they are."""
    tree = data.draw(TREES)
    hook = st.sampled_from(["", "", "before", "after"])
    like, state = build(tree, iter(lambda: data.draw(hook), None))
    like.outermost = True
    missing = data.draw(st.lists(st.sampled_from(sorted(state)), max_size=1))
    state = {name: each for name, each in state.items() if name not in missing}
    extra = data.draw(st.sampled_from([None, "other", "inner.0.other", "inner.0.inner.0.more"]))
    assume(state)  # Something must fit.
    state |= {} if extra is None else {extra: torch.ones(2)}
    strict = data.draw(st.booleans())
    net = copy.deepcopy(like)
    path = write(tmp_path / "x.safetensors", state)
    try:
        like.load_state_dict(safetensors.torch.load_file(path), strict=strict)
    except (RuntimeError, KeyError) as error:
        if any(name.endswith("num_batches_tracked") for name in missing):
            return
        with pytest.raises((errors.MappingError, type(error))):
            quietly(net, path, strict=strict)
        return
    quietly(net, path, strict=strict)
    check(net, like)


# -- which modules, and with what ------------------------------------------------------------


def test_only_modules_with_a_say_load_by_it(tmp_path: Path) -> None:
    net = torch.nn.Sequential(
        torch.nn.BatchNorm1d(4), checkpoint_wrapper(torch.nn.Linear(4, 4)), Scaled(), After()
    )
    assert torch_modules.make(net).own_code == ("2.",)
    like, report = copy.deepcopy(net), mfload.Report()
    path = write(tmp_path / "x.safetensors", stored(net, dict))
    like.load_state_dict(safetensors.torch.load_file(path))
    filled, copied = torch.Tensor.copy_, list[tuple[int, ...]]()

    def copy_(self: Any, *given: Any) -> Any:
        copied.append(tuple(self.shape))
        return filled(self, *given)

    with mock.patch.object(torch.Tensor, "copy_", copy_):
        mfload.load_into(net, path, report=report)
    assert copied == [(4, 3), (4,)]
    check(net, like)
    nbytes = sum(each.nbytes for each in net.state_dict().values())
    assert (report.read_bytes - report.over_read_bytes, report.tensors) == (nbytes, 12)


@pytest.mark.parametrize("first", [False, True])
def test_of_two_names_the_last_counts_if_one_is_a_hooked_modules(
    tmp_path: Path, first: bool
) -> None:
    def build() -> Any:
        made = [Scaled(), torch.nn.Linear(3, 4)][:: 1 if first else -1]
        made[1].weight = made[0].weight
        return torch.nn.Sequential(*made)

    net, like = build(), build()
    whole = {f"{n}.{name}": torch.randn(*shape) for n in range(2)
             for name, shape in (("weight", (4, 3)), ("bias", (4,)))}  # fmt: skip
    path = write(tmp_path / "x.safetensors", whole)
    like.load_state_dict(safetensors.torch.load_file(path))
    check(quietly(net, path), like)
    del whole["0.weight" if not first else "1.weight"]
    check(quietly(build(), write(path, whole)), like if not first else net_of(build(), whole))


def test_of_views_of_one_another_the_last_counts(tmp_path: Path) -> None:
    class Split(torch.nn.Module):
        """As bridges hold q and k beside the tensor that has both."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.plain = torch.nn.Linear(2, 6, bias=False), torch.nn.Linear(2, 2)
            self.parts = torch.nn.ParameterList(self.qkv.weight.data[n : n + 2] for n in (0, 2))
            self.turned = torch.nn.Parameter(self.plain.weight.data.t())

    net, like = Split(), Split()
    assert torch_modules.make(net).own_code == ("",)  # The root has one of them itself.
    del net.turned, like.turned
    assert torch_modules.make(net).own_code == ("qkv.", "parts.")
    whole = {name: torch.randn(each.shape) for name, each in like.state_dict().items()}
    like.load_state_dict(whole)
    path = write(tmp_path / "x.safetensors", whole)
    check(mfload.load_into(net, path), like)
    assert torch.equal(net.qkv.weight[:2], whole["parts.0"])

    net, like = Split(), Split()
    like.load_state_dict(whole, strict=False)
    check(mfload.load_into(net, path, strict=False), like)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("how", ["drops", "copies"])
def test_what_a_hook_of_state_dict_hides_is_loaded_and_missed(
    tmp_path: Path, how: str, meta: bool
) -> None:
    def hook(module: Any, state: Any, prefix: str, _: Any) -> None:
        """As adapters save nothing of what is frozen."""
        frozen = state.pop(f"{prefix}1.weight")
        if how == "copies":
            state[f"{prefix}1.weight"] = frozen.clone()

    def build() -> Any:
        with torch.device("meta" if meta else "cpu"):
            net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
        net._register_state_dict_hook(hook)
        return net

    whole = {"0.weight": torch.randn(2, 2), "0.bias": torch.randn(2), "1.weight": torch.ones(2, 2)}
    net = mfload.load_into(build(), write(tmp_path / "x.safetensors", whole))
    assert {name: each.tolist() for name, each in net.named_parameters()} == {
        name: each.tolist() for name, each in whole.items()
    }
    del whole["1.weight"]
    with pytest.raises(errors.MappingError, match=r"missing: 1\.weight"):
        mfload.load_into(build(), write(tmp_path / "y.safetensors", whole))


def test_counts_and_scalars_of_old_files_on_meta(tmp_path: Path) -> None:
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.0))
            self._register_load_state_dict_pre_hook(lambda *_: None)

    def build() -> Any:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(3), Scale())

    state = build().state_dict() | {"1.scale": torch.tensor([5.0])}
    del state["0.num_batches_tracked"]
    with torch.device("meta"):
        net, like = build(), build()
    like.load_state_dict(state, assign=True)
    check(mfload.load_into(net, write(tmp_path / "x.safetensors", state)), like)


def net_of(net: Any, state: dict[str, Any]) -> Any:
    net.load_state_dict(state, strict=False)
    return net


def test_a_hook_is_called_once_with_all_that_is_stored(tmp_path: Path, one_process: Any) -> None:
    """FSDP2 is told of new parameters without another call of hooks, which would have nothing."""
    calls: list[list[str]] = []

    def build() -> Any:
        made = torch.nn.Sequential(torch.nn.Linear(4, 4), checkpoint_wrapper(torch.nn.Linear(4, 2)))
        made[0]._register_load_state_dict_pre_hook(
            lambda state, *_: calls.append(sorted(state)) or state["0.weight"].neg_()
        )
        return made

    path = write(tmp_path / "x.safetensors", stored(torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), dict))  # fmt: skip
    like = build()
    like.load_state_dict(safetensors.torch.load_file(path))
    with torch.device("meta"):
        net = build()
    for each in (*net, net):
        fully_shard(each, mesh=one_process)
    calls.clear()
    assert mfload.load_into(net, path) is net
    assert calls == [["0.bias", "0.weight"]]
    for name, each in net.state_dict().items():
        assert torch.equal(each.full_tensor(), like.state_dict()[name])
    x = torch.randn(3, 4)
    assert torch.equal(net(x), like(x))


@pytest.fixture
def one_process() -> Iterator[Any]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_dtypes_of_what_has_no_memory(tmp_path: Path) -> None:
    state = {"weight": torch.randn(4, 3), "bias": torch.randn(4).bfloat16()}
    path = write(tmp_path / "x.safetensors", state)
    for dtype, kinds in (("target", ("float32", "float32")), ("stored", ("float32", "bfloat16")),
                         ("float16", ("float16", "float16")),
                         ({"weight": "float16"}, ("float16", "float32"))):  # fmt: skip
        with torch.device("meta"):
            net = Scaled()
        net.bias.requires_grad_(False)
        quietly(net, path, dtype=dtype)
        assert (net.weight.dtype, net.bias.dtype) == tuple(getattr(torch, kind) for kind in kinds)
        expected = state["weight"].to(net.weight.dtype).flip(0) * 2
        assert torch.equal(net.weight, expected)
        assert (net.weight.requires_grad, net.bias.requires_grad) == (True, False)
    with pytest.raises(errors.MappingError, match=r"holds torch\.float32 and keeps it"):
        mfload.load_into(Scaled(), path, dtype="float16")


def test_floats_without_infinity_are_checked_here_too(tmp_path: Path) -> None:
    class Narrow(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.zeros(3, dtype=torch.float8_e4m3fn))
            self._register_load_state_dict_pre_hook(lambda *_: None)

    path = write(tmp_path / "x.safetensors", {"w": torch.tensor([1.0, 3, 448])})
    assert mfload.load_into(Narrow(), path).w.float().tolist() == [1, 3, 448]
    write(path, {"w": torch.tensor([1.0, 3, 1000])})
    with pytest.raises(errors.LossyCastError, match="a value does not fit"):
        mfload.load_into(Narrow(), path)


@pytest.mark.parametrize(
    ("kind", "fits", "more"),
    [
        (torch.int32, torch.tensor([7]), torch.tensor([2**40])),
        (torch.int64, torch.tensor([2.0]), torch.tensor([2.5])),
        (torch.int64, torch.tensor([2.0]), torch.tensor([torch.nan])),
        (torch.float32, torch.tensor([2**24]), torch.tensor([2**24 + 1])),
        (torch.bool, torch.tensor([1]), torch.tensor([2])),
        (torch.uint8, torch.tensor([True]), torch.tensor([-1])),
        (torch.complex64, torch.tensor([1.5]), torch.tensor([2**24 + 1])),
    ],
)
def test_other_dtypes_are_kept_or_refused(
    tmp_path: Path, kind: torch.dtype, fits: torch.Tensor, more: torch.Tensor
) -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(1, dtype=kind))
            self._register_load_state_dict_pre_hook(lambda *_: None)

    made = mfload.load_into(Counts(), write(tmp_path / "fits.safetensors", {"n": fits}))
    assert made.n.dtype == kind
    assert made.n.tolist() == fits.tolist()
    with pytest.raises(errors.LossyCastError, match="a value does not fit the dtype of its target"):
        mfload.load_into(Counts(), write(tmp_path / "more.safetensors", {"n": more}))


def test_key_maps_give_the_names_that_hooks_see(tmp_path: Path) -> None:
    state = {f"old.{name}": torch.randn(4, 4) for name in "qkv"}
    state |= {"o.w": torch.randn(4, 4), "o.b": torch.randn(2), "o.c": torch.randn(2)}
    path = write(tmp_path / "x.safetensors", state)
    mapping = {
        r"old\.(q|k|v)": r"0.\1.weight",
        "o.w": mfload.rule("0.out.weight", transpose=(1, 0)),
        r"o\.(b|c)": mfload.rule("0.out.bias", concat=(0, 1, ("b", "c"))),
    }
    for device in ("cpu", "meta"):
        with torch.device(device):
            net = torch.nn.Sequential(Fused())
        mfload.load_into(net, path, mapping=mapping)
        fused = torch.cat([state[f"old.{name}"] for name in "qkv"])
        assert torch.equal(net[0].qkv.weight, fused)
        assert torch.equal(net[0].out.weight, state["o.w"].T)
        assert torch.equal(net[0].out.bias, torch.cat([state["o.b"], state["o.c"]]))


def test_a_load_state_dict_of_its_own(tmp_path: Path) -> None:
    state = {"weight": torch.randn(4, 4), "bias": torch.randn(4)}
    path = write(tmp_path / "x.safetensors", state)
    for device in ("cpu", "meta"):
        with torch.device(device):
            net = Whole()
        mfload.load_into(net, path)
        assert torch.equal(net.inner.weight, state["weight"] + 1)
    write(path, {"weight": state["weight"]})
    with pytest.raises(errors.MappingError, match="Missing key"):
        mfload.load_into(Whole(), path)
    net = mfload.load_into(Whole(), path, strict=False)
    assert torch.equal(net.inner.weight, state["weight"] + 1)


def test_what_is_wrong_after_hooks_comes_in_one_error(tmp_path: Path) -> None:
    net = torch.nn.Sequential(Scaled(), After())
    state = {"0.weight": torch.randn(4, 3), "0.more": torch.ones(1), "1.more": torch.ones(1),
             "1.inner.weight": torch.randn(4, 4)}  # fmt: skip
    path = write(tmp_path / "x.safetensors", state)
    with pytest.raises(errors.MappingError, match="says load_state_dict with its hooks") as raised:
        mfload.load_into(net, path)
    gone = {line.split(": ")[1] for line in raised.value.problems if line.startswith("missing")}
    assert gone == {"0.bias", "1.inner.bias"}
    over = {line.split(": ")[1] for line in raised.value.problems if line.startswith("extra")}
    assert over == {"0.more", "1.more"}
    report = mfload.Report()
    mfload.load_into(net, path, strict=False, report=report)
    assert any("nothing for 0.bias, 1.inner.bias" in note for note in report.notes)
    write(path, {"0.bias": torch.zeros(4)})
    with pytest.raises(KeyError) as failed:  # The hook's own, as by `load_state_dict`.
        mfload.load_into(net, path, strict=False)
    assert any("in load_state_dict of 0," in note for note in failed.value.__notes__)


def test_a_limit_that_hooks_do_not_fit_in_is_refused_before_anything_is_read(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "x.safetensors", {"w": torch.randn(2 << 20)})
    net = Copies()
    net.w = torch.nn.Parameter(torch.zeros(2 << 20))
    with pytest.raises(errors.MemoryLimitError, match="what a module's load hooks take at once"):
        mfload.load_into(net, path, options=mfload.Options(max_host_overhead="4MiB"))
    assert not net.w.any()
    mfload.load_into(net, path, options=mfload.Options(max_host_overhead="16MiB"))
    assert torch.equal(net.w, -safetensors.torch.load_file(path)["w"])


@pytest.mark.parametrize("how", ["removes itself", "loads again", "adds another"])
def test_hooks_may_change_while_they_are_called(tmp_path: Path, how: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 4))
    state = {name: torch.randn_like(tensor) for name, tensor in net.state_dict().items()}
    path = write(tmp_path / "x.safetensors", state)
    called, added = list[str](), list[Any]()

    def hook(module: Any, state: Any, prefix: str, *_: Any) -> None:
        called.append(prefix)
        if how == "removes itself":
            own.remove()
        elif how == "adds another":
            added.append(net[1].register_load_state_dict_pre_hook(lambda *_: None))
        elif len(called) == 1:
            mfload.load_into(net, path)

    own = net[0].register_load_state_dict_pre_hook(hook)
    before = own.hooks_dict_ref()
    mfload.load_into(net, path)
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())
    assert net[0]._load_state_dict_pre_hooks is before
    assert len(before) == (how != "removes itself")
    assert len(net[1]._load_state_dict_pre_hooks) == len(added)
    assert len(called) == 2 if how == "loads again" else 1


def test_a_module_with_hooks_may_hold_one_of_torchscript(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(3, 4)))
    state = {name: torch.randn_like(tensor) for name, tensor in net.state_dict().items()}
    called: list[str] = []
    net.register_load_state_dict_pre_hook(lambda *given: called.append(given[2]))
    mfload.load_into(net, write(tmp_path / "x.safetensors", state))
    assert called == [""]
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())
