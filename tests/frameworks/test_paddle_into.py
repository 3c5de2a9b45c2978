"""`load_into` of Paddle's layers, against `set_state_dict`."""

from __future__ import annotations

import errno
import functools
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import samples

import mfload
from mfload import errors
from mfload.io import pread

with warnings.catch_warnings():
    # Paddle looks for a compiler cache when it is imported, and for setuptools' old parts.
    warnings.simplefilter("ignore")
    import paddle

    from mfload.frameworks import paddle_adapter, private_api
    from mfload.trees import paddle_modules

WIDTH, ROWS = 48, 37


class Block(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.up = paddle.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = paddle.nn.Linear(2 * WIDTH, WIDTH, bias_attr=False)
        self.norm = paddle.nn.BatchNorm1D(WIDTH)
        self.register_buffer("count", paddle.zeros([3], dtype="int64"))
        self.register_buffer("table", paddle.ones([5]), persistable=False)

    def forward(self, x: Any) -> Any:
        return self.norm(x + self.down(self.up(x)))


class Net(paddle.nn.Layer):
    """Blocks, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = paddle.nn.Embedding(ROWS, WIDTH)
        self.blocks = paddle.nn.LayerList([Block() for _ in range(2)])
        self.head = paddle.nn.Linear(WIDTH, ROWS, bias_attr=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return paddle.matmul(x, self.head.weight, transpose_y=True)


class One(paddle.nn.Layer):
    """A layer with one parameter, `weight`."""

    def __init__(self, shape: list[int], dtype: str = "float32") -> None:
        super().__init__()
        self.register_buffer("weight", paddle.zeros(shape, dtype=dtype))


def numbers(net: Any) -> dict[str, Any]:
    """An array for each name of a state dict."""
    return {
        name: samples.numbers(tuple(each.shape), np.dtype(str(each.dtype)[7:]), seed)
        for seed, (name, each) in enumerate(net.state_dict().items())
    }


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    arrays = numbers(Net())
    del arrays["head.weight"]
    path = tmp_path_factory.mktemp("paddle") / "net.safetensors"
    samples.save(path, arrays)
    return path, arrays


def lazy(make: Any) -> Any:
    with paddle.LazyGuard():
        return make()


def same(tensor: Any, array: Any) -> bool:
    """Bit for bit: numbers here may be NaN."""
    return tuple(tensor.shape) == array.shape and tensor.numpy().tobytes() == array.tobytes()


def test_fills_a_layer_where_it_lies(stored: Any) -> None:
    path, arrays = stored
    net, like, report = Net(), Net(), mfload.Report()
    before = {name: (each, each.data_ptr()) for name, each in net.state_dict().items()}
    assert mfload.load_into(net, path, report=report) is net
    both = arrays | {"head.weight": arrays["embed.weight"]}
    like.set_state_dict({name: paddle.to_tensor(array) for name, array in both.items()})
    for name, tensor in net.state_dict().items():
        assert tensor is before[name][0]
        assert tensor.data_ptr() == before[name][1]
        assert same(tensor, like.state_dict()[name].numpy())
    assert net.head.weight is net.embed.weight
    assert (report.framework, report.tensors) == ("paddle", len(arrays))
    tokens = paddle.arange(12).reshape([3, 4])
    assert same(net.embed(tokens), like.embed(tokens).numpy())


def test_both_names_of_a_tied_weight(stored: Any, tmp_path: Path) -> None:
    path, arrays = stored
    net, report = Net(), mfload.Report()
    other = {"embed.weight": "head.weight"}
    mfload.load_into(net, path, mapping=lambda name: other.get(name, name))
    assert same(net.embed.weight, arrays["embed.weight"])
    both = arrays | {"head.weight": np.zeros_like(arrays["embed.weight"])}
    samples.save(tmp_path / "both.safetensors", both)
    with pytest.warns(UserWarning, match="embed.weight and head.weight are one variable"):
        mfload.load_into(net, tmp_path / "both.safetensors", report=report)
    assert same(net.head.weight, both["head.weight"])
    assert any("embed.weight was not loaded" in note for note in report.notes)


def test_one_memory_under_two_tensors(tmp_path: Path) -> None:
    net = paddle.nn.Linear(4, 4)
    net.register_buffer("alias", net.weight.detach())
    arrays = {name: each for name, each in numbers(net).items() if name != "alias"}
    samples.save(tmp_path / "x.safetensors", arrays)
    mfload.load_into(net, tmp_path / "x.safetensors")
    assert same(net.weight, arrays["weight"])
    assert same(net.alias, arrays["weight"])


@pytest.mark.parametrize("stored_as", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("held", ["float32", "bfloat16", "float16", "float64"])
def test_becomes_the_dtype_of_the_layer(tmp_path: Path, stored_as: str, held: str) -> None:
    values = samples.numbers((9, 5), np.dtype(stored_as), 3)
    samples.save(tmp_path / "x.safetensors", {"weight": values})
    net = One([9, 5], held)
    mfload.load_into(net, tmp_path / "x.safetensors")
    with np.errstate(over="ignore"):
        wanted = values.astype(np.dtype(held))
    assert net.weight.numpy().tobytes() == wanted.tobytes()


OWN = {
    kind: form.type
    for kind, form in paddle_adapter.PaddleAdapter.forms.items()
    if form.how != "bytes"
}


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("shape", [(), (7,), (3, 0), (4, 6)])
def test_every_dtype_bit_for_bit(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    values = samples.numbers(shape, np.dtype(OWN[kind]), 4)
    samples.save(tmp_path / "x.safetensors", {"weight": values})
    net = One([1])
    ((net.weight, _),) = mfload.frameworks.get("paddle", "cpu").empty([(OWN[kind], shape)])
    mfload.load_into(net, tmp_path / "x.safetensors")
    loaded = mfload.load(tmp_path / "x.safetensors", "paddle")["weight"]
    assert same(net.weight, loaded.numpy())
    if len(shape) == 2 and values.size:
        turned = {"weight": mfload.rule("weight", transpose=(1, 0), reshape=shape)}
        mfload.load_into(net, tmp_path / "x.safetensors", mapping=turned)
        assert same(net.weight, values.T.reshape(shape))


def test_rules_stack_join_and_cast(tmp_path: Path) -> None:
    names = [f"layers.{n}.{name}" for n in range(3) for name in ("q", "kk")]
    arrays = {name: np.random.rand(6, 4).astype(np.float16) for name in names}
    samples.save(tmp_path / "x.safetensors", arrays)
    net = One([3, 4, 12])
    rule = mfload.rule("weight", transpose=(1, 0), concat=(1, 2, ("q", "kk")), stack=1, scale=0.5)
    mfload.load_into(net, tmp_path / "x.safetensors", mapping={r"layers\.(\d)\.(.*)": rule})
    layers = [
        np.concatenate([arrays[q].T, arrays[k].T], 1)
        for q, k in zip(names[::2], names[1::2], strict=True)
    ]
    assert same(net.weight, np.stack(layers).astype(np.float32) * np.float32(0.5))


@pytest.mark.parametrize("asked", ["target", "bfloat16"])
def test_layers_made_lazily_get_memory(stored: Any, asked: str) -> None:
    path, arrays = stored
    net = lazy(Net)
    params = net.parameters()
    assert not any(map(paddle_modules._initialised, params))
    turned = r"blocks\.(\d)\.up\.weight"
    rule = mfload.rule(r"blocks.\1.up.weight", transpose=(1, 0), reshape=(WIDTH, 2 * WIDTH))
    mapping = {turned: rule, rf"(?!{turned})(.*)": r"\2"}
    dtype = "target" if asked == "target" else [("weight", asked)]
    mfload.load_into(net, path, mapping=mapping, dtype=dtype)
    assert all(a is b for a, b in zip(params, net.parameters(), strict=True))
    assert net.head.weight is net.embed.weight
    kind = np.dtype("float32" if asked == "target" else asked)
    with np.errstate(invalid="ignore"):
        arrays = {name: each.astype(kind) for name, each in arrays.items() if "weight" in name}
    assert same(net.embed.weight, arrays["embed.weight"])
    wanted = arrays["blocks.1.up.weight"].T.reshape(WIDTH, 2 * WIDTH)
    assert same(net.blocks[1].up.weight, wanted)
    assert same(net.blocks[1].down.weight, arrays["blocks.1.down.weight"])
    if asked == "target":
        net.eval()
        net.blocks[0](net.embed(paddle.arange(8))).sum().backward()
        assert net.embed.weight.grad is not None


def test_what_stays_uninitialised_is_named(stored: Any) -> None:
    path, _ = stored
    net = lazy(Net)
    with pytest.warns(UserWarning, match=r"without memory: blocks\.0\.up\.bias"):
        mfload.load_into(
            net,
            path,
            strict=False,
            mapping=lambda n: None if n == "blocks.0.up.bias" else n,
        )


def test_everything_wrong_in_one_error(tmp_path: Path, stored: Any) -> None:
    net = Net()
    arrays = dict(stored[1])
    arrays["embed.weight"] = arrays["embed.weight"].T.copy()
    arrays["more"] = arrays.pop("blocks.1.up.bias")
    arrays["blocks.0.count"] = arrays["blocks.0.count"].astype(np.float32)
    arrays["blocks.0.table"] = np.zeros(5, np.float32)
    samples.save(tmp_path / "x.safetensors", arrays)
    before = {name: each.numpy().copy() for name, each in net.state_dict().items()}
    with pytest.raises(errors.MappingError) as caught:
        mfload.load_into(net, tmp_path / "x.safetensors")
    text = "\n".join(caught.value.problems)
    for words in (
        "wrong shape: embed.weight: wants [37, 48]",
        "wrong dtype: blocks.0.count: wants I64",
        "missing: blocks.1.up.bias [96]",
        "extra: more [96]",
        "'blocks.0.table' can't hold a tensor",
    ):
        assert words in text
    assert all(same(each, before[n]) for n, each in net.state_dict().items())
    with pytest.raises(errors.MappingError, match="keeps it, BF16 is asked for"):
        mfload.load_into(net, stored[0], dtype="bfloat16")


def test_lenient(stored: Any, tmp_path: Path) -> None:
    arrays = dict(stored[1])
    del arrays["blocks.1.norm._mean"]
    arrays["more"] = np.zeros(3)
    samples.save(tmp_path / "x.safetensors", arrays)
    net, report = Net(), mfload.Report()
    before = net.blocks[1].norm._mean.numpy().copy()
    mfload.load_into(net, tmp_path / "x.safetensors", strict=False, report=report)
    assert same(net.blocks[1].norm._mean, before)
    assert same(net.blocks[1].norm._variance, arrays["blocks.1.norm._variance"])
    notes = " ".join(report.notes)
    assert "blocks.1.norm._mean" in notes
    assert "more" in notes


def test_a_fault_in_the_middle_says_so(tmp_path: Path) -> None:
    arrays = {str(n): samples.numbers((300, 1000), np.float32, n) for n in range(4)}
    samples.save(tmp_path / "x.safetensors", arrays)
    net = paddle.nn.Layer()
    for name in arrays:
        net.register_buffer(name, paddle.zeros([300, 1000]))
    true, calls = os.preadv, []

    def preadv(*args: Any) -> int:
        calls.append(1)
        if len(calls) > 2:
            raise OSError(errno.EIO, "Input/output error")
        return true(*args)

    options = mfload.Options(engine="pread", threads=1)
    with (
        mock.patch.object(pread, "_ROWS_A_MAP", 1 << 60),
        mock.patch.object(os, "preadv", preadv),
        pytest.raises(errors.MfloadError) as caught,
    ):
        mfload.load_into(net, tmp_path / "x.safetensors", options=options)
    assert "some may hold new values" in " ".join(caught.value.__notes__)
    assert set(net.mfload_torn) == set(arrays)


@pytest.mark.parametrize("rules", [False, True])
def test_an_atomic_load_leaves_the_old_values_or_the_new(tmp_path: Path, rules: bool) -> None:
    arrays = {str(n): np.full((300, 1000), n + 1.5, np.float32) for n in range(4)}
    paths = [samples.save(tmp_path / f"{n}.safetensors", {n: arrays[n]}) for n in arrays]
    mapping = {r"(.*)": mfload.rule(r"\1", scale=2.0)} if rules else None
    net = paddle.nn.Layer()
    for name in arrays:
        net.register_buffer(name, paddle.zeros([300, 1000]))
    true, calls = os.preadv, []

    def preadv(*args: Any) -> int:
        calls.append(1)
        if len(calls) > 2:
            raise OSError(errno.EIO, "Input/output error")
        return true(*args)

    load = functools.partial(mfload.load_into, net, paths, mapping=mapping, atomic=True)
    options = mfload.Options(engine="pread", threads=1)
    with mock.patch.object(os, "preadv", preadv), pytest.raises(errors.ReadError) as caught:
        load(options=options)
    assert not hasattr(caught.value, "__notes__")
    assert not hasattr(net, "mfload_torn")
    assert not any(each.numpy().any() for each in net.state_dict().values())
    load(options=options)
    for name, array in arrays.items():
        assert same(net.state_dict()[name], array * 2 if rules else array)


def test_nothing_lies_beside_the_layer(tmp_path: Path) -> None:
    """Whole tensors take no more; what a rule makes takes no more than the overhead."""
    shape = (4096, 1024)
    samples.save(tmp_path / "x.safetensors", {"weight": samples.numbers(shape, np.float32, 1)})
    net, report = One(list(shape)), mfload.Report()
    mfload.load_into(net, tmp_path / "x.safetensors", report=report)
    assert report.peak_bytes < 1 << 20
    turned = {"weight": mfload.rule("weight", transpose=(1, 0), reshape=shape)}
    options = mfload.Options(max_host_overhead=12 << 20, threads=1)
    mfload.load_into(
        net, tmp_path / "x.safetensors", mapping=turned, report=report, options=options
    )
    assert report.peak_bytes <= 12 << 20
    wanted = samples.numbers(shape, np.float32, 1).T.reshape(shape)
    assert same(net.weight, wanted)


def test_tensors_with_gaps(tmp_path: Path) -> None:
    values = samples.numbers((6, 4), np.float32, 1)
    samples.save(tmp_path / "x.safetensors", {"weight": values})
    net = One([4, 6])
    net.weight = net.weight.T
    assert not net.weight.is_contiguous()
    mfload.load_into(net, tmp_path / "x.safetensors")
    assert same(net.weight, values)
    net.weight = paddle.zeros([1, 4]).expand([6, 4])
    if 0 in net.weight.strides:
        with pytest.raises(errors.MappingError, match="share their memory"):
            mfload.load_into(net, tmp_path / "x.safetensors")
    net.weight = paddle.arange(24.0).as_strided([6, 4], [2, 1])
    if net.weight.strides == [2, 1]:
        with pytest.raises(errors.MappingError, match=r"share their memory \(strides \[2, 1\]\)"):
            mfload.load_into(net, tmp_path / "x.safetensors")


def test_autograd_refuses_what_it_kept(tmp_path: Path) -> None:
    net = paddle.nn.Linear(4, 4)
    samples.save(tmp_path / "x.safetensors", numbers(net))
    x = paddle.ones([2, 4])
    x.stop_gradient = False
    for mapping in (None, {"bias": "bias", "weight": mfload.rule("weight", transpose=(1, 0))}):
        out = net(x).sum()
        mfload.load_into(net, tmp_path / "x.safetensors", mapping=mapping)
        with pytest.raises(RuntimeError, match="tensor_version"):
            out.backward()


def test_without_the_private_calls() -> None:
    layer = lazy(lambda: paddle.nn.Linear(4, 4))
    new = np.full((4, 4), 3.0, np.float32)  # An array, which has none of them.
    private_api.paddle_give(new, layer.weight)
    private_api.paddle_written(new)
    assert same(layer.weight, new)


@pytest.mark.parametrize("how", ["held", "lazy", "turned", "lazy turned"])
def test_distributed_parameters_of_one_process(tmp_path: Path, how: str) -> None:
    from paddle import distributed as dist

    mesh = dist.ProcessMesh([[0]], ["x", "y"])
    net = lazy(lambda: paddle.nn.Linear(5, 4)) if "lazy" in how else paddle.nn.Linear(5, 4)
    values = {"weight": samples.numbers((5, 4), np.float32, 1), "bias": np.ones(4, np.float32)}
    net.weight = dist.shard_tensor(net.weight, mesh, [dist.Shard(0), dist.Shard(1)])
    held, mapping = net.weight, None
    if "turned" in how:
        mapping = {"weight": mfload.rule("weight", transpose=(1, 0)), "bias": "bias"}
    stored = values | ({"weight": values["weight"].T.copy()} if mapping else {})
    samples.save(tmp_path / "x.safetensors", stored)
    once = mfload.Options(exchange="once")
    mfload.load_into(net, tmp_path / "x.safetensors", mapping=mapping, options=once)
    assert net.weight is held
    assert net.weight.is_dist()
    assert net.weight.placements == [dist.Shard(0), dist.Shard(1)]
    assert same(net.weight._local_value(), values["weight"])
    assert same(net.bias, values["bias"])
    assert net.weight.stop_gradient is False
    part = One([1])
    part.weight = dist.shard_tensor(paddle.ones([5, 4]), mesh, [dist.Partial(), dist.Replicate()])
    with pytest.raises(errors.MappingError, match="does not say where values lie"):
        mfload.load_into(part, tmp_path / "x.safetensors", mapping=mapping, strict=False)


@pytest.mark.parametrize("argument", ["mesh", "shardings", "logical_axis_rules"])
def test_what_is_for_jax_is_refused(stored: Any, argument: str) -> None:
    with pytest.raises(errors.UsageError, match=f"{argument}="):
        mfload.load_into(Net(), stored[0], **{argument: [1]})


def test_an_exchange_of_one_process_is_refused(stored: Any) -> None:
    with pytest.raises(errors.UsageError, match="exchange='once' needs other processes"):
        mfload.load_into(Net(), stored[0], options=mfload.Options(exchange="once"))


def test_a_layer_is_saved_as_its_state_and_comes_back(tmp_path: Path) -> None:
    net, other = Net(), Net()
    mfload.save(net, tmp_path / "net.safetensors")
    mfload.load_into(other, tmp_path / "net.safetensors")
    for name, tensor in net.state_dict().items():
        assert np.array_equal(tensor.numpy(), other.state_dict()[name].numpy()), name
