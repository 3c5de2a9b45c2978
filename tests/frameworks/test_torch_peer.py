"""Tensors and modules of PyTorch as seeds, and filled from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.peers import PeerConformance, by, stored

import mfload
from mfload import errors


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(90, 24)
        self.norm = torch.nn.BatchNorm1d(24)
        self.wide = torch.nn.Linear(24, 48, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(24, 90, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


class TestTorchPeers(PeerConformance):
    framework = "torch"

    def network(self, seed: int) -> Any:
        torch.manual_seed(seed)
        made = Net()
        made.norm.running_mean.uniform_()  # pyright: ignore
        return made

    def state(self, module: Any) -> dict[str, Any]:
        return dict(module.state_dict())

    def overwrite(self, array: Any) -> None:
        with torch.no_grad():
            array.fill_(3)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8])
def test_what_is_not_contiguous_is_copied(kind: Any) -> None:
    base = torch.arange(2 * 30 * 40).reshape(2, 30, 40).to(kind)
    arrays = {
        "turned": base[0].T,
        "steps": base[0, ::3, 1::2],
        "spread": base[1, 0].expand(5, 40),
        "permuted": base.permute(2, 0, 1),
        "slice": base[1],  # Contiguous, beyond the start of its storage.
    }
    copied = sum(each.nbytes for name, each in arrays.items() if name != "slice")
    with mfload.publish(arrays, model="m") as seed:
        assert seed.copied_bytes == copied
        found = mfload.load(seed.url, framework="torch")
    for name, each in arrays.items():
        assert found[name].dtype == kind
        assert torch.equal(found[name], each)


def test_conjugates_and_negatives_are_values() -> None:
    values = torch.randn(9, dtype=torch.complex64)
    arrays = {"conjugate": values.conj(), "negative": values.conj().imag}
    with mfload.publish(arrays, model="m") as seed:
        found = mfload.load(seed.url, framework="torch")
    assert torch.equal(found["conjugate"], arrays["conjugate"].resolve_conj())
    assert torch.equal(found["negative"], arrays["negative"].resolve_neg())


def test_tensors_without_values_are_refused() -> None:
    with pytest.raises(errors.UnsupportedArrayError, match="head"):
        mfload.publish({"head": torch.empty(3, device="meta")}, model="m")
    assert mfload.seeds() == []


def test_a_storage_that_is_made_smaller() -> None:
    """As FSDP frees the parameters of a layer: PyTorch refuses it."""
    tensor = torch.arange(1 << 16, dtype=torch.float32)
    expected = tensor.clone()
    with mfload.publish({"w": tensor}, model="m") as seed:
        with pytest.raises(RuntimeError, match="resizable"):
            tensor.untyped_storage().resize_(0)
        found = mfload.load(seed.url, framework="torch", options=by("http"))
    assert torch.equal(found["w"], expected)


def test_what_was_saved_can_be_resized(tmp_path: Path) -> None:
    """Not what was published, not even after that: PyTorch has no way back."""
    tensor, strided = torch.arange(1 << 16), torch.zeros(300, 400).T
    mfload.save({"w": tensor, "s": strided}, tmp_path / "a.safetensors")
    assert mfload.diff({"w": tensor, "s": strided}, tmp_path / "a.safetensors")
    assert tensor.untyped_storage().resizable()
    assert strided.untyped_storage().resizable()
    with mfload.publish({"w": tensor}, model="m"):
        pass
    assert not tensor.untyped_storage().resizable()


def test_a_parameter_gets_other_memory() -> None:
    """What a module makes of its parameters later is no longer the seed's."""
    torch.manual_seed(0)
    module = Net()
    expected = {name: each.clone() for name, each in module.state_dict().items()}
    with mfload.publish(module, model="m") as seed:
        module.to(torch.float16)
        module.embed.weight.data = torch.zeros(90, 24)
        found = mfload.load(seed.url, framework="torch")
    assert stored(found) == stored(expected)


def test_a_module_on_meta_is_filled() -> None:
    torch.manual_seed(0)
    module = Net()
    with torch.device("meta"):
        empty = Net()
    empty.table = torch.arange(4.0)  # It is not saved.
    with mfload.publish(module, model="m") as seed:
        mfload.load_into(empty, seed.url)
    assert stored(dict(empty.state_dict())) == stored(dict(module.state_dict()))
    assert empty.head.weight is empty.embed.weight
