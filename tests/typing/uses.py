"""What type checkers make of calls: read by pyright and mypy (`make lint`), and not run.

A call that must be refused has a comment for each of the two; one that is not needed is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, assert_type

import cupy
import jax
import numpy as np
import paddle
import tensorflow as tf
import torch
from jax.sharding import Mesh, PartitionSpec as P
from numpy.typing import NDArray

import mfload
import mfload.compat

Array = NDArray[Any]


def load(name: str, chosen: mfload.Framework, cuda: torch.device) -> None:
    assert_type(mfload.load("model/", framework="numpy"), dict[str, Array])
    assert_type(mfload.load(Path("model"), "np"), dict[str, Array])
    assert_type(mfload.load("model/", framework="jax"), dict[str, jax.Array])
    assert_type(mfload.load("model/", "flax"), dict[str, jax.Array])
    assert_type(mfload.load(b"bytes", framework="torch"), dict[str, torch.Tensor])
    assert_type(mfload.load(["a", Path("b")], "pt"), dict[str, torch.Tensor])
    assert_type(mfload.load("model/", "pytorch", device=cuda), dict[str, torch.Tensor])
    assert_type(mfload.load("model/", framework="tensorflow"), dict[str, tf.Tensor])
    assert_type(mfload.load("model/", "tf"), dict[str, tf.Tensor])
    assert_type(mfload.load("model/", framework="paddle"), dict[str, paddle.Tensor])
    assert_type(mfload.load("model/", framework="cupy"), dict[str, cupy.ndarray])
    assert_type(mfload.load("model/", torch), dict[str, Any])
    assert_type(mfload.load("model/", jax.numpy, device="cpu:1"), dict[str, Any])
    for array in mfload.load("model/", chosen).values():
        array.shape
    # A name that is no framework's; a name that is not known when types are checked.
    mfload.load("model/", "jaxx")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    mfload.load("model/", framework="pytorhc")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    mfload.load("model/", name)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    mfload.load("model/", "jax", engine="mmap")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    mfload.load("model/", "jax", unmatched="refuse")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    mfload.load(7, "jax")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


def load_with_arguments(mesh: Mesh, manifest: mfload.Manifest) -> None:
    report = mfload.Report()
    options = mfload.Options(engine="direct", exchange="once", max_host_overhead="64MiB")
    heads = mfload.load("model/", "numpy", names=r"\.q\.", dtype="float32", report=report)
    assert_type(heads, dict[str, Array])
    rules = [(r"norm", np.float32), (r"q", "bfloat16")]
    chosen = mfload.load("model/", "jax", names=lambda name: "q" in name, dtype=rules)
    assert_type(chosen, dict[str, jax.Array])
    shardings = [(r"\.q\.", P(None, "tp"))]
    sharded = mfload.load("model/", "jax", mesh=mesh, shardings=shardings, options=options)
    assert_type(sharded, dict[str, jax.Array])
    mine = mfload.load("model/", "torch", shardings=[("q", 0)], shard=(0, 2), verify=manifest)
    assert_type(mine, dict[str, torch.Tensor])
    again = mfload.load("peer://host/a", "jax", fallback=["model/"], prefer="fallback")
    assert_type(again, dict[str, jax.Array])
    mfload.load("model/", "numpy", names=["a"], verify="sums.json", progress=lambda n, of: None)
    mfload.Options(engine="fast")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def onto_several_devices(cuda: torch.device) -> None:
    several = mfload.load("model/", "torch", device=["cuda:0", "cuda:1"])
    assert_type(several, dict[str, list[Any]])
    assert_type(mfload.load("model/", "torch", device=[cuda, cuda]), dict[str, list[Any]])
    named = mfload.load("model/", "torch", device={"a": "cuda:0", "b": cuda})
    assert_type(named, dict[str, torch.Tensor])
    # Arrays of a single device, by rules that are a list.
    rules = [("a", "cuda:0"), ("b", "cuda:1")]
    assert_type(mfload.load("model/", "torch", device=rules), dict[str, Any])
    lazy = mfload.open("model/", "torch", device=["cuda:0", "cuda:1"])
    assert_type(lazy.get_tensor("a"), list[Any])
    for _, tensors in mfload.stream("model/", "torch", device=["cuda:0", "cuda:1"]):
        assert_type(tensors, list[Any])


def lazily(chosen: mfload.Framework) -> None:
    with mfload.open("model/") as opened:
        assert_type(opened, mfload.LazyCheckpoint[Array])
        assert_type(opened.get_tensor("a"), Array)
        assert_type(opened.get_slice("a"), mfload.TensorSlice[Array])
        assert_type(opened.get_slice("a")[:, 8:16], Array)
    with mfload.open("model/", "torch", "cuda:0", options=mfload.Options()) as lazy:
        assert_type(lazy.get_tensor("a"), torch.Tensor)
        assert_type(lazy.get_tensors(["a"]), dict[str, torch.Tensor])
        assert_type(lazy.keys(), list[str])
    assert_type(mfload.open("model/", "jax"), mfload.LazyCheckpoint[jax.Array])
    assert_type(mfload.open("model/", "tf"), mfload.LazyCheckpoint[tf.Tensor])
    assert_type(mfload.open("model/", "paddle"), mfload.LazyCheckpoint[paddle.Tensor])
    assert_type(mfload.open("model/", "cupy"), mfload.LazyCheckpoint[cupy.ndarray])
    assert_type(mfload.open("model/", np), mfload.LazyCheckpoint[Any])
    mfload.open("model/", chosen).get_tensor("a").shape
    mfload.open("model/", "numpi")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


def one_by_one(model: torch.nn.Module) -> None:
    for name, array in mfload.stream("model/", framework="numpy", order=["b", "a"]):
        assert_type(name, str)
        assert_type(array, Array)
    with mfload.stream("model/", framework="torch", lazy=True) as tensors:
        assert_type(tensors, mfload.Stream[torch.Tensor])
        weights: Iterable[tuple[str, torch.Tensor]] = tensors
        model.load_state_dict(dict(weights))
    assert_type(mfload.stream("model/", "jax"), mfload.Stream[jax.Array])
    assert_type(mfload.stream("model/", "tf", lazy=False), mfload.Stream[tf.Tensor])
    assert_type(mfload.stream("model/", "paddle"), mfload.Stream[paddle.Tensor])
    assert_type(mfload.stream("model/", "cupy"), mfload.Stream[cupy.ndarray])
    # What is read when it is used is an array of PyTorch alone.
    assert_type(mfload.stream("model/", "jax", lazy=True), mfload.Stream[Any])
    mfload.stream("model/", "jx")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


def into_a_model(mesh: Mesh, arrays: dict[str, jax.Array], anything: Any) -> None:
    linear = torch.nn.Linear(2, 3)
    assert_type(mfload.load_into(linear, "model/"), torch.nn.Linear)
    assert_type(mfload.load_into(linear, "model/", mapping={r"a": None}), torch.nn.Linear)
    assert_type(mfload.load_into(arrays, "model/", strict=False), dict[str, jax.Array])
    rule = {r"a": mfload.rule("b", transpose=(1, 0))}
    target = {"dense": {"kernel": jax.ShapeDtypeStruct((64, 64), np.float32)}}
    assert_type(mfload.load_into(target, "model/", mapping=rule), dict[str, Any])
    assert_type(mfload.restore("model/", framework="jax"), Any)
    assert_type(mfload.restore("run", step=3, framework="torch"), Any)
    assert_type(mfload.restore("run", target, mesh=mesh, dtype="stored"), dict[str, Any])
    assert_type(mfload.restore("run", linear), torch.nn.Linear)
    assert_type(mfload.restore("run", arrays, names="a"), dict[str, jax.Array])
    assert_type(mfload.restore("run", anything), Any)
    mfload.restore("run", framework="jaxx")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    mfload.load_into(linear, "model/", framework="torch")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def headers_only(mesh: Mesh) -> None:
    assert_type(mfload.abstract("model/", mesh=mesh), dict[str, jax.ShapeDtypeStruct])
    print(mfload.plan("model/", framework="jax").as_dict(), mfload.plan("model/"))
    mfload.plan("model/", "jaxx")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def saved_and_published(arrays: dict[str, jax.Array], tensors: dict[str, torch.Tensor]) -> None:
    assert_type(mfload.save(arrays, "a.safetensors", checksums="sha256"), mfload.Saved)
    mfload.save({"a": np.zeros(3), "b": tensors["b"]}, Path("b.safetensors"), overwrite=True)
    pending = mfload.save(arrays, "a.safetensors", background=True, timeout=60)
    assert_type(pending, mfload.PendingSave)
    assert_type(pending.result(timeout=60), mfload.Saved)
    assert_type(wait([pending]).done, set[Future[mfload.Saved]])
    either = mfload.save(arrays, "a.safetensors", background=bool(tensors), overwrite=True)
    assert_type(either, mfload.Saved | mfload.PendingSave)
    assert_type(mfload.verify("model/", mode="write"), mfload.Verification)
    assert_type(mfload.diff("model/", "a.safetensors"), mfload.Difference)
    with mfload.publish(tensors, model="org/name", revision="step-100") as seed:
        assert_type(seed.url, str)
        loaded = mfload.load(seed.url, framework="jax", fallback="model/")
        assert_type(loaded, dict[str, jax.Array])
    assert_type(mfload.unpack(arrays["a"], "F4", (2, 8)), Array)


def in_the_place_of_others() -> None:
    with mfload.compat.patch():
        pass


def larger_than_memory() -> None:
    with mfload.ondemand.LayerStream("model/", budget="1MiB", framework="jax") as stream:
        for layer, arrays in stream:
            assert_type(layer, int)
            print(layer, list(arrays))
    mfload.ondemand.LayerStream("model/", framework="jaxx")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mfload.ondemand.ExpertCache("model/", budget=1 << 30, framework="torch", policy="lfu")
