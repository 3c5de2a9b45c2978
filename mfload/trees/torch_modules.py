"""Modules of PyTorch: parameters and buffers by the names of `state_dict`, DTensors among them."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mfload import errors
from mfload.dtypes import DType
from mfload.frameworks import base, private_api, torch_adapter, torch_memory
from mfload.mesh import base as mesh_base
from mfload.planning import selection
from mfload.trees import torch_hooks
from mfload.trees.landing import Target
from mfload.trees.modules import Module, New, overlapping, stored, tied, unfit
from mfload.trees.recipe import OPEN, Leaf, new_row

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # Tensors are asked thousands of times what they are.
_COUNT = "num_batches_tracked"
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
        says = torch_hooks.whole(module)
        for each in module.modules():
            if isinstance(each, fsdp):
                raise errors.UsageError(
                    "FullyShardedDataParallel keeps parameters in flat ones, which no stored "
                    "tensor is",
                    expected="fully_shard(module), or load_into before the module is wrapped",
                    found="FullyShardedDataParallel",
                )
            says = says or torch_hooks.says(each)
        self._module = module
        # With the tensors themselves; FSDP2 takes the sharded ones back first.
        state: dict[str, Any] = module.state_dict(keep_vars=True)
        self._owners: dict[int, list[tuple[Any, str]]] = {}
        for each in module.modules():
            for name, tensor in _variables(each, recurse=False):
                self._owners.setdefault(id(tensor), []).append((each, name))
        by_key = tied(state, _key)
        found = list(by_key.values())
        self.tensors = [tensor for _, tensor in found]
        self._parts: dict[str, Any] = {}
        self._wrong: dict[str, torch_hooks.Wrong] = {}
        saved = set(map(id, state.values()))
        also = self._left_to_torch(by_key, saved)
        if says or also:
            self._aliases = {name: names for names, _ in found for name in names}
            self._parts = {part.prefix: part.module for part in self._find_parts(state, also)}
            self.own_code = tuple(self._parts)
            self.own_names = [name for name in state if name.startswith(self.own_code)]
            self.judged = (*self.own_code, *torch_hooks.listening(module))
            found = [each for each in found if not each[0][0].startswith(self.own_code)]
            filled = [tensor for _, tensor in found]
            self.tensors = [*filled, *(state[name] for name in self.own_names)]
        self.leaves: Sequence[Leaf] = [self._leaf(*each) for each in found]
        self.leaves += [
            unfit((name,), "a buffer that the module does not save (persistent=False)", True)
            for name, buffer in module.named_buffers(remove_duplicate=False)
            if id(buffer) not in saved and name not in state
            if not name.startswith(self.own_code)
        ]
        self._new: dict[int, Any] = {}
        self._mesh = next((t.device_mesh for t in self.tensors if _is_dtensor(t)), None)

    def _left_to_torch(self, by_key: Mapping[Any, Any], saved: set[int]) -> set[int]:
        """Owners of tensors that share memory, and of those that hooks keep out of `state_dict`."""
        found = set(map(id, _overlapping(by_key))) | (self._owners.keys() - saved)
        return {
            id(owner)
            for each in found
            for owner, name in self._owners.get(each, ())
            if private_api.torch_saves(owner, name)
        }

    def _find_parts(
        self, state: Mapping[str, Any], also: set[int]
    ) -> list[torch_hooks.HookedModule]:
        """What loads by code of its own, and owners of what that shares: the last value counts."""
        while parts := torch_hooks.parts(self._module, also):
            inside = tuple(part.prefix for part in parts)
            shared = {
                id(owner)
                for names in self._aliases.values()
                if len({name.startswith(inside) for name in names}) > 1
                for name in names
                for owner, _ in self._owners.get(id(state[name]), ())
            }
            if shared <= also:
                break
            also |= shared
        return parts

    def _leaf(self, names: Sequence[str], tensor: Any) -> Leaf:
        if (why := self._unfit(tensor)) is not None:
            return unfit(names, why, id(tensor) not in self._owners)
        row = base.ROWS[_name(tensor)]
        shape = tuple(tensor.shape)
        if row.elements > 1 and shape:
            shape = (*shape[:-1], shape[-1] * row.elements)
        # Files from before there were such counts lack them.
        optional = names[0].endswith(_COUNT) and all(name.endswith(_COUNT) for name in names)
        said = tuple(names), shape, row, tensor, None, None, optional, False, True, tensor.is_meta
        return new_row(Leaf, (*said, ()))

    def _unfit(self, tensor: Any) -> str | None:
        """Why no stored tensor can become it."""
        if not isinstance(tensor, torch.Tensor) or id(tensor) not in self._owners:
            return "what the module makes when it is saved"
        if torch.nn.parameter.is_lazy(tensor):
            return "a parameter that is not initialised yet: run the module once"
        plain = type(tensor) in _PLAIN
        fake = not plain and "FakeTensor" in {kind.__name__ for kind in type(tensor).__mro__}
        if fake or tensor.is_nested or tensor.layout != torch.strided:
            return "a fake, nested or sparse tensor"
        if tensor.is_quantized or _name(tensor) not in base.ROWS:
            return str(tensor.dtype)
        if tensor.is_meta:
            return None
        local = tensor if plain else self.local(tensor)
        dense = plain and tensor.is_contiguous()
        if not dense and (why := overlapping(local.shape, local.stride())) is not None:
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

    def target(self, number: int) -> Target | None:
        tensor: Any = self._new.get(number)
        if tensor is None:
            tensor = self.tensors[number]
            if type(tensor) not in _PLAIN:
                tensor = self.local(tensor)
        if not tensor.is_cpu or torch_memory.device_of(tensor.device) is not None:
            return None
        plain = type(tensor) in _PLAIN and tensor.layout == torch.strided
        if not plain or tensor.is_conj() or tensor.is_neg():
            return None
        return Target(tensor, tensor.data_ptr(), tensor.stride())

    def put(self, number: int, start: tuple[int, ...], array: Any) -> None:
        target = self._new.get(number)
        if target is None:
            target = self.local(self.tensors[number])
        row = base.ROWS[_name(target)]
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
        made = any(leaf.abstract for leaf in self.leaves if leaf.shape != OPEN)
        return self._on_device() if made else self.own_adapter()

    def own_adapter(self) -> base.Adapter:
        return torch_adapter.make("cpu")  # As from `safetensors.torch.load_file`.

    def _on_device(self) -> torch_adapter.TorchAdapter:
        """Where what has no memory gets it."""
        if self._mesh is None or self._mesh.device_type == "cpu":
            return torch_adapter.make(None if self._mesh is None else "cpu")
        module = torch.get_device_module(self._mesh.device_type)
        return torch_adapter.make(torch.device(self._mesh.device_type, module.current_device()))

    def empty(self, number: int, shape: tuple[int, ...], dtype: DType) -> Any:
        kind = getattr(torch, torch_adapter.TorchAdapter.forms[dtype.name].type)
        own = self.leaves[number].shape == OPEN
        device = (self.own_adapter() if own else self.adapter()).place
        self._new[number] = torch.empty(stored(dtype, shape), dtype=kind, device=device)
        return self._new[number]

    def install(self, made: Mapping[int, New], written: Iterable[int]) -> None:
        for number in written:  # Autograd refuses what it kept of the values from before.
            tensor = self.tensors[number]
            plain = type(tensor) in _PLAIN
            torch.autograd.graph.increment_version(tensor if plain else self.local(tensor))
        sharded: list[Any] = []
        for number, new in made.items():
            old = self.tensors[number]
            self._replace(old, self.assembled(self.leaves[number].shape, new))
            if new.sharding is not None:
                sharded += (owner for owner, _ in self._owners[id(old)])
        torch_hooks.tell_fsdp(dict.fromkeys(sharded))
        for number, leaf in enumerate(self.leaves):
            if leaf.optional and leaf.abstract and number not in made:
                old = self.tensors[number]  # A count that starts anew.
                self._replace(old, torch.zeros_like(old, device=self._on_device().place))

    def _replace(self, old: Any, array: Any, *where: tuple[Any, str]) -> None:
        """Puts a new tensor in the place of another: in its owners, or `where` if it is new."""
        if isinstance(old, torch.nn.Parameter):
            array = _parameter(old, array)
        for key, value in vars(old).items():
            vars(array).setdefault(key, value)
        for owner, name in self._owners.get(id(old), where):
            setattr(owner, name, array)

    # Modules that are loaded by code of their own.

    def take(self, prefix: str, state: dict[str, Any], wish: Any, *, strict: bool) -> None:
        part, own = (
            torch_hooks.HookedModule(prefix, self._parts[prefix]),
            torch_hooks.whole(self._module),
        )
        if own and strict:  # One name is enough for a variable.
            for name in self._aliases.keys() - state.keys():
                known = (other for other in self._aliases[name] if other in state)
                state.update((name, state[other]) for other in known)
        meet = functools.partial(self._meet, wish)
        try:
            self._wrong[prefix] = torch_hooks.load(part, state, meet, strict, own)
        except Exception as error:
            where = prefix[:-1] or "the module"
            error.add_note(f"raised in load_state_dict of {where}, which has load hooks of its own")
            raise

    def _meet(self, wish: Any, module: Any, state: dict[str, Any], prefix: str) -> None:
        """Gives memory to what is about to be copied to, and shards what is copied."""
        for name, tensor in list(_variables(module, recurse=False)):
            key = prefix + name
            value: Any = state.get(key)
            if not isinstance(value, torch.Tensor) or not private_api.torch_saves(module, name):
                continue
            if value.shape == (1,) and not (torch.nn.parameter.is_lazy(tensor) or tensor.ndim):
                value = state[key] = value[0]  # As `load_state_dict` does for old files.
            if torch.nn.parameter.is_lazy(tensor) or tensor.shape != value.shape:
                continue  # Said by `load_state_dict`.
            kind = _asked(wish, key, tensor, value)
            if kind != tensor.dtype and not tensor.is_meta:
                what = f"the module holds {tensor.dtype} and keeps it, {kind} is asked for"
                expected = "the module converted first, or made without memory (on meta)"
                raise errors.MappingError(what, tensor=key, expected=expected)
            torch_adapter.check_range(key, value, kind)
            sharded = _is_dtensor(tensor) and not _is_dtensor(value)
            if sharded:
                value = state[key] = self._part(key, tensor, value.to(kind))
            if tensor.is_meta:
                given: dict[str, Any] = {"dtype": kind, "device": self._on_device().place}
                made = value if sharded else torch.empty(tensor.shape, **given)
                self._replace(tensor, made, (module, name))

    def _part(self, name: str, tensor: Any, value: Any) -> Any:
        """What a DTensor is to hold of a value, as a DTensor."""
        backend, shape, row = (
            mesh_base.backend("torch"),
            tuple(value.shape),
            base.ROWS[_name(value)],
        )
        sharding = self.sharding(name, shape, tensor, row, backend)
        shares = backend.shares(sharding, shape)
        box = next(share.box for share in shares if share.process == backend.rank)
        device = self._on_device().place if tensor.is_meta else self.local(tensor).device
        mine = value[tuple(slice(*dim) for dim in box)].to(device).clone().contiguous()
        return self.assembled(shape, New(mine, row, sharding))

    def finish(
        self, missing: Iterable[str], unexpected: Iterable[str]
    ) -> tuple[list[str], list[str], list[str]]:
        wrong = torch_hooks.finish(self._module, self._wrong, missing, unexpected)
        absent = set(wrong.missing)
        missing = [
            name
            for name in wrong.missing
            if absent.issuperset(self._aliases.get(name, ())) and not name.endswith(_COUNT)
        ]
        return missing, wrong.unexpected, wrong.errors

    def bare(self) -> list[str]:
        return [name for name, tensor in _variables(self._module) if tensor.is_meta]


make = TorchModule


def _class(module: str, name: str) -> tuple[type, ...]:
    """A class of a module of PyTorch if that was imported; none else."""
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)


def _asked(wish: Any, name: str, tensor: Any, value: Any) -> Any:
    """The dtype of a tensor that gets memory for a value."""
    by_name = isinstance(wish, selection.Rules)
    asked = wish.find(name) if by_name else wish
    if asked is None:
        return tensor.dtype if by_name else value.dtype
    if not by_name and not (asked.kind == "float" and value.is_floating_point()):
        return value.dtype
    return getattr(torch, torch_adapter.TorchAdapter.forms[asked.name].type)


def _is_dtensor(tensor: Any) -> bool:
    kind = type(tensor)
    return kind not in _PLAIN and issubclass(kind, _class("torch.distributed.tensor", "DTensor"))


def _name(tensor: Any) -> str:
    """What NumPy and others call its dtype."""
    return _dtype_name(tensor.dtype)


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.").removesuffix("_x2")


def _variables(module: Any, *, recurse: bool = True) -> Any:
    how: dict[str, bool] = {"recurse": recurse, "remove_duplicate": False}
    return itertools.chain(module.named_parameters(**how), module.named_buffers(**how))


def _key(tensor: Any) -> Any:
    """What parameters have in common that are one: the object, or all of their memory."""
    if type(tensor) not in _PLAIN or torch.nn.parameter.is_lazy(tensor):
        return id(tensor)
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _overlapping(by_key: Mapping[Any, tuple[list[str], Any]]) -> list[Any]:
    """Tensors that begin inside another, such as views of it, and these others."""
    spans = [(key[0], each.nbytes, each) for key, (_, each) in by_key.items() if type(key) is tuple]
    found: dict[int, Any] = {}
    end, reaching = 0, None
    for start, size, tensor in sorted(spans, key=operator.itemgetter(0)):
        # Where memory was given back, it is an offset.
        if start < end and tensor.untyped_storage().data_ptr():
            found |= {id(reaching): reaching, id(tensor): tensor}
        if start + size > end:
            end, reaching = start + size, tensor
    return [*found.values()]


def _parameter(old: Any, data: Any) -> Any:
    """A parameter of the class of another."""
    kind = type(old) if issubclass(type(old), torch.nn.Parameter) else torch.nn.Parameter
    trains = old.requires_grad and (data.is_floating_point() or data.is_complex())
    return torch.nn.Parameter.__new__(kind, data, trains)
