"""Modules of PyTorch: parameters and buffers by the names of `state_dict`, DTensors among them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mfload import errors
from mfload.dtypes import DType
from mfload.frameworks import base, torch_adapter, torch_memory
from mfload.trees.modules import Module, New, overlapping, stored, tied, unfit
from mfload.trees.recipe import Leaf

# Integers of the width of each item: they are copied bit for bit, whatever they stand for.
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchModule(Module):
    """A `torch.nn.Module`, taken apart (see `modules.Module`)."""

    framework = "torch"
    sharded_by = (
        "a module that is sharded already, by torch.distributed.fsdp.fully_shard, "
        "torch.distributed.tensor.distribute_module or parallelize_module"
    )

    def __init__(self, module: Any) -> None:
        fsdp = _class("torch.distributed.fsdp", "FullyShardedDataParallel")
        if any(isinstance(each, fsdp) for each in module.modules()):
            raise errors.UsageError(
                "FullyShardedDataParallel keeps parameters in flat ones, which no stored tensor is",
                expected="fully_shard(module), or load_into before the module is wrapped",
                found="FullyShardedDataParallel",
            )
        self._module = module
        # With the tensors themselves; FSDP2 takes the sharded ones back first.
        state: dict[str, Any] = module.state_dict(keep_vars=True)
        self._owners: dict[int, list[tuple[Any, str]]] = {}
        for each in module.modules():
            for name, tensor in _variables(each, recurse=False):
                self._owners.setdefault(id(tensor), []).append((each, name))
        found = tied(state, _key)
        self.tensors = [tensor for _, tensor in found]
        self.leaves: Sequence[Leaf] = [self._leaf(*each) for each in found]
        saved = set(map(id, state.values()))
        self.leaves += [
            unfit((name,), "a buffer that the module does not save (persistent=False)", True)
            for name, buffer in module.named_buffers(remove_duplicate=False)
            if id(buffer) not in saved and name not in state
        ]
        self._new: dict[int, Any] = {}
        self._mesh = next((t.device_mesh for t in self.tensors if _is_dtensor(t)), None)

    def _leaf(self, names: Sequence[str], tensor: Any) -> Leaf:
        if (why := self._unfit(tensor)) is not None:
            return unfit(names, why, id(tensor) not in self._owners)
        row = base.ROWS[_name(tensor)]
        shape = tuple(tensor.shape)
        if row.elements > 1 and shape:
            shape = (*shape[:-1], shape[-1] * row.elements)
        # Files from before there were such counts lack them.
        optional = all(name.endswith("num_batches_tracked") for name in names)
        return Leaf(tuple(names), shape, row, tensor, optional=optional, abstract=tensor.is_meta)

    def _unfit(self, tensor: Any) -> str | None:
        """Why no stored tensor can become it."""
        if not isinstance(tensor, torch.Tensor) or id(tensor) not in self._owners:
            return "what the module makes when it is saved"
        if torch.nn.parameter.is_lazy(tensor):
            return "a parameter that is not initialised yet: run the module once"
        kinds = {kind.__name__ for kind in type(tensor).__mro__}
        if "FakeTensor" in kinds or tensor.is_nested or tensor.layout != torch.strided:
            return "a fake, nested or sparse tensor"
        if tensor.is_quantized or _name(tensor) not in base.ROWS:
            return str(tensor.dtype)
        if tensor.is_meta:
            return None
        local = self.local(tensor)
        if (why := overlapping(local.shape, local.stride())) is not None:
            return why
        try:
            last = local.storage_offset() * local.element_size() + local.nbytes
            held = local.untyped_storage().nbytes() >= last or not local.is_contiguous()
        except (RuntimeError, NotImplementedError):  # A subclass that wraps others.
            return None
        return None if held else "a tensor whose memory was given back"

    def placed(self, tensor: Any) -> tuple[Any, Sequence[Any]] | None:
        """Those of a DTensor."""
        return (tensor.device_mesh, tensor.placements) if _is_dtensor(tensor) else None

    def local(self, tensor: Any) -> Any:
        """What this process holds, without autograd."""
        plain = tensor.detach()
        if not _is_dtensor(plain):
            return plain
        with torch.no_grad():
            return plain.to_local()

    def memory(self, number: int) -> Any:
        return torch_memory.memory_of(self.local(self.tensors[number]))

    def put(self, number: int, start: tuple[int, ...], array: Any) -> None:
        target = self._new.get(number)
        if target is None:
            target = self.local(self.tensors[number])
        row = self.leaves[number].dtype
        first = (*start[:-1], start[-1] // row.elements) if row and start else start
        units = torch.from_numpy(array.view(f"i{array.itemsize}" if array.itemsize > 1 else "u1"))
        with torch.no_grad(), torch.inference_mode(target.is_inference()):
            part = target[tuple(slice(a, a + n) for a, n in zip(first, array.shape, strict=True))]
            if type(target) is torch.Tensor and not target.is_conj() and not target.is_neg():
                part.view(_UNITS[array.itemsize]).copy_(units)
                return
            try:
                part.copy_(units.view(target.dtype))
            except (RuntimeError, TypeError, NotImplementedError) as error:
                raise errors.UnsupportedArrayError(
                    f"{type(target).__name__} does not take values by copy_",
                    tensor=self.leaves[number].name,
                    found=str(error).partition("\n")[0],
                ) from error

    def adapter(self) -> base.Adapter:
        if not any(leaf.abstract for leaf in self.leaves):
            return torch_adapter.make("cpu")
        if self._mesh is None or self._mesh.device_type == "cpu":
            return torch_adapter.make(None if self._mesh is None else "cpu")
        module = torch.get_device_module(self._mesh.device_type)
        return torch_adapter.make(torch.device(self._mesh.device_type, module.current_device()))

    def empty(self, number: int, shape: tuple[int, ...], dtype: DType) -> Any:
        kind = getattr(torch, torch_adapter.TorchAdapter.forms[dtype.name].type)
        device = self.adapter().place
        self._new[number] = torch.empty(stored(dtype, shape), dtype=kind, device=device)
        return self._new[number]

    def install(self, made: Mapping[int, New], written: Iterable[int]) -> None:
        for number in written:  # Autograd refuses what it kept of the values from before.
            torch.autograd.graph.increment_version(self.local(self.tensors[number]))
        sharded: list[Any] = []
        for number, new in made.items():
            old, array = self.tensors[number], self.assembled(number, new)
            if isinstance(old, torch.nn.Parameter):
                array = _parameter(old, array)
            for key, value in vars(old).items():
                vars(array).setdefault(key, value)
            for owner, name in self._owners[id(old)]:
                setattr(owner, name, array)
                sharded += [owner] if new.sharding is not None else []
        for owner in dict.fromkeys(sharded):
            # Loads nothing; its hooks tell FSDP2 of the new parameters.
            owner.load_state_dict({}, strict=False)

    def bare(self) -> list[str]:
        return [name for name, tensor in _variables(self._module) if tensor.is_meta]


make = TorchModule


def _class(module: str, name: str) -> tuple[type, ...]:
    """A class of a module of PyTorch if that was imported; none else."""
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)


def _is_dtensor(tensor: Any) -> bool:
    return isinstance(tensor, _class("torch.distributed.tensor", "DTensor"))


def _name(tensor: Any) -> str:
    """What NumPy and others call its dtype."""
    return str(tensor.dtype).removeprefix("torch.").removesuffix("_x2")


def _variables(module: Any, *, recurse: bool = True) -> Any:
    how: dict[str, bool] = {"recurse": recurse, "remove_duplicate": False}
    return itertools.chain(module.named_parameters(**how), module.named_buffers(**how))


def _key(tensor: Any) -> Any:
    """What parameters have in common that are one: the object, or all of their memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or torch.nn.parameter.is_lazy(tensor):
        return id(tensor)
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _parameter(old: Any, data: Any) -> Any:
    """A parameter of the class of another."""
    kind = type(old) if issubclass(type(old), torch.nn.Parameter) else torch.nn.Parameter
    trains = old.requires_grad and (data.is_floating_point() or data.is_complex())
    return torch.nn.Parameter.__new__(kind, data, trains)
