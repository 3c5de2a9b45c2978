"""Transformers: models of Hugging Face, made without memory and filled by mfload."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import threading
from collections import deque
from importlib.util import find_spec
from typing import Any

import torch

from mfload import api, errors, sources
from mfload.frameworks import torch_adapter
from mfload.frameworks.base import find_device
from mfload.loading.lazy import LazyCheckpoint, TensorSlice
from mfload.options import Options
from mfload.planning.memory import grouped

_REFUSED = (
    "state_dict", "gguf_file", "variant", "subfolder", "revision", "offload_folder",
    "quantization_config",
)  # fmt: skip
_ELSEWHERE = ("transformers_weights", "extra_files", "quantization_config")
_PARTED = ("tp_plan", "tp_size", "device_mesh", "distributed_config")
_THEIRS = "from_pretrained of transformers"
_DISK = "no part of the model can stay on disk"
_ANY_DEVICE = ("auto", "balanced", "balanced_low_0", "sequential")
_DTYPE, _SUFFIX = ("dtype", "torch_dtype"), ".safetensors"
_GROUP, _LARGEST = 1 << 30, 8 << 30  # Bytes; a larger weight is one that some keep on the host.
_HELD = 2  # Groups at once.
_BESIDE = 1.25  # Of a device that is to hold a model, what there must be for each byte of it.
_FIRST = ("model.safetensors", "model.safetensors.index.json")  # As transformers looks for them.


def from_pretrained(
    cls: Any, path: str | os.PathLike[str], *, options: Options | None = None, **given: Any
) -> Any:
    """Makes a model, as `cls.from_pretrained(path, …)` of transformers does, and loads it.

    The model is made on the meta device. Tied weights, buffers that are not saved, dtypes and
    device maps are up to transformers. As there, weights are private maps of the files, which must
    stay as they are while the model lives. With another engine than "mmap" each is read once it has
    its place, as slices are for a model that `tp_plan=` or `device_mesh=` shards.

    Where `device_map=` puts the whole model on one CUDA device, weights are read onto it in groups
    of a GiB (with CuPy), into memory of PyTorch's; else each is copied from the host. Of "auto"
    that is so on a machine with one GPU that has room for the files and a quarter more.

    Args:
        cls: A model's class, or one such as `transformers.AutoModelForCausalLM`.
        path: A local directory with `config.json` and the weights, in safetensors.
        options: As for `mfload.load`, but on the host `Options(engine="auto")` maps them.
        given: As for `cls.from_pretrained`: `dtype`, `device_map`, `config` and others.

    Returns:
        The model.

    Raises:
        UsageError: An argument that is not for local safetensors, a part of the model that is to
            stay on disk, or a directory with an adapter.
        MfloadError: As `mfload.load` does.
    """
    path = os.fspath(path)
    _check(path, given)
    devices, auto = given.get("device_map"), getattr(cls, "config_class", None) is None
    config, given = _configured(cls, path, auto, given)
    if auto:
        trusted = {"trust_remote_code": True} if given.get("trust_remote_code") else {}
        with torch.device("meta"):
            cls = type(cls.from_config(config, **trusted))
    weights = (os.path.join(path, name) for name in _FIRST)
    first = next(filter(os.path.exists, weights), path)
    on_host = options = options or Options()
    parted = any(given.get(name) is not None for name in _PARTED)
    place = None
    if not parted and options.engine != "mmap":
        place = _one_device(devices, path, config, given)
    if place is not None or (options.engine == options.page_cache == "auto" and not parted):
        on_host = dataclasses.replace(options, engine="mmap", page_cache="auto")
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(api.open(first, "torch", "cpu", options=on_host))
        # Of "auto" the first weight of the first file says the dtype.
        names = sorted(opened, key=lambda name: (opened.file_of(opened.info(name)), name))
        groups = None
        if (there := _open_there(first, place, options)) is not None:
            groups = _Groups(stack.enter_context(there))
            stack.callback(groups.close)
        if groups is None and on_host.engine == "mmap":
            state: Any = opened.get_tensors(names)
        else:
            state = {name: _Weight(opened, name, groups) for name in names}
        try:
            made = cls.from_pretrained(None, config=config, state_dict=state, **given)
        except ValueError as error:  # Of device_map="auto" only transformers knows the result.
            if "offloaded to the disk" not in str(error):
                raise
            expected = f"a larger max_memory=, or {_THEIRS}"
            raise errors.UsageError(_DISK, file=path, expected=expected, found=devices) from error
    model = made[0] if given.get("output_loading_info") else made
    model.name_or_path = model.config.name_or_path = path
    if model.can_generate():
        local = {"cache_dir": None, "force_download": False, "proxies": None, "token": None}
        local |= {"local_files_only": True, "revision": None, "subfolder": ""}
        trusted = given.get("trust_remote_code", False)
        asked = given.get("generation_config"), auto, None, path
        model.adjust_generation_fn(*asked, **local, trust_remote_code=trusted)
    return made


def _check(path: str, given: dict[str, Any]) -> None:
    """Refuses arguments that are not for local safetensors; takes out those that say nothing."""
    if sources.is_url(path):
        what = "a URL is not taken: transformers reads config and tokenizer from a local directory"
        expected = "a directory that `mfload convert URL DIRECTORY/` has made of it"
        raise errors.UsageError(what, expected=expected, found=sources.shown(path))
    if given.get("revision") == "main":  # As of the Hub by default.
        del given["revision"]
    refused = [name for name in _REFUSED if given.get(name)]
    if given.pop("use_safetensors", None) is False:  # Nothing else is read here.
        refused.append("use_safetensors")
    for name in refused:
        what = f"{name}= is not taken: weights come from a local directory, and go to memory"
        raise errors.UsageError(what, expected=_THEIRS, file=path)
    devices = given.get("device_map")
    if isinstance(devices, dict) and "disk" in devices.values():
        raise errors.UsageError(_DISK, found=repr(devices)[:200])
    if os.path.exists(os.path.join(path, "adapter_config.json")):
        what = "the directory holds an adapter, which would not be loaded"
        raise errors.UsageError(what, file=path, expected=_THEIRS)


def _configured(
    cls: Any, path: str, auto: bool, given: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The config of a model, and the arguments that are no part of it."""
    config = given.pop("config", None)
    if config is None or isinstance(config, str | os.PathLike):
        from transformers import AutoConfig  # pyright: ignore

        # Arguments that are part of the config go into it; the dtype of the weights is none.
        kept = {name: given.pop(name) for name in _DTYPE if name in given}
        maker, where = AutoConfig if auto else cls.config_class, config or path
        config, given = maker.from_pretrained(where, return_unused_kwargs=True, **given)
        given |= kept
    for name in _ELSEWHERE:
        if found := getattr(config, name, None):
            what = f"the config names what only a loader of files finds: {name}"
            raise errors.UsageError(what, file=path, expected=_THEIRS, found=str(found)[:200])
    return config, given


def _one_device(devices: Any, path: str, config: Any, given: dict[str, Any]) -> str | None:
    """The CUDA device that a device map puts a whole model on, if weights can land there."""
    if isinstance(devices, dict):
        every = list(devices.values())
        devices = every[0] if every and all(each == every[0] for each in every) else None
    if devices is None or not torch.cuda.is_available() or find_spec("cupy") is None:
        return None
    if isinstance(devices, str) and devices in _ANY_DEVICE:
        alone = torch.cuda.device_count() == 1 and not given.get("max_memory")
        dtypes = (given.get(name, getattr(config, name, None)) for name in _DTYPE)
        if not alone or any("float32" in str(each) for each in dtypes):
            return None
        found = [each for each in os.scandir(path) if each.name.endswith(_SUFFIX)]
        files = (each.stat().st_size for each in found if each.is_file())
        return "cuda:0" if sum(files) * _BESIDE < torch.cuda.mem_get_info("cuda:0")[0] else None
    if devices == "cuda":  # As transformers takes it.
        return f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.device("cuda", devices) if type(devices) is int else torch.device(devices)
    except (RuntimeError, TypeError):
        return None  # Transformers says what is wrong with it.
    return str(device) if device.type == "cuda" and device.index is not None else None


def _open_there(first: str, place: str | None, options: Options) -> LazyCheckpoint[Any] | None:
    """The weights on a device; None if there is no such one, or nothing can land on it."""
    if place is None:
        return None
    found, notes = find_device(torch.device(place).index)
    if found is None:
        logging.getLogger("mfload").warning("%s: %s", first, *notes)
        return None
    if options.allocator == "auto":
        options = dataclasses.replace(options, allocator="framework")
    return api.open(first, "torch", place, options=options)


class _Weight(TensorSlice[Any]):
    """A tensor that is read when transformers has a place for it, perhaps with others."""

    __slots__ = ("_groups",)

    def __init__(
        self, opened: LazyCheckpoint[Any], name: str, groups: _Groups | None = None
    ) -> None:
        super().__init__(opened, opened.get_slice(name)._info)  # pyright: ignore
        self._groups = groups

    @property
    def dtype(self) -> Any:
        """What PyTorch calls its dtype."""
        return getattr(torch, torch_adapter.TorchAdapter.forms[self.get_dtype()].type)

    def is_floating_point(self) -> bool:
        """Whether it holds floats."""
        return self.dtype.is_floating_point

    def __getitem__(self, index: Any) -> Any:
        found = None
        if self._groups is not None and index is ...:
            found = self._groups.take(self._info.name)
        return super().__getitem__(index) if found is None else found


class _Groups:
    """Weights that are read onto a device in groups, in the order in which they are wanted.

    None is read before the first is wanted: by then PyTorch has set the memory aside. Each is
    handed out once, and two groups are held at most: what transformers leaves out goes soon.
    """

    def __init__(self, opened: LazyCheckpoint[Any]) -> None:
        self._opened = opened
        self._lock = threading.Lock()  # Transformers has several threads.
        self._error: BaseException | None = None
        self._group_of: dict[str, list[str]] = {}
        self._made: deque[dict[str, Any]] = deque()
        names = sorted((n for n in opened if opened.info(n).nbytes <= _LARGEST), key=_in_order)
        for group in grouped(names, _GROUP, lambda name: opened.info(name).nbytes):
            self._group_of.update(dict.fromkeys(group, group))

    def close(self) -> None:
        """Lets go of what is left."""
        self._made.clear()
        self._error = None

    def take(self, name: str) -> Any:
        """A weight; None if it is too large for a group, or was taken before."""
        with self._lock:
            if self._error is not None:  # Other threads don't begin it again.
                raise self._error
            group = self._group_of.pop(name, None)
            if group is None:
                return None
            if not any(name in made for made in self._made):
                if len(self._made) == _HELD:  # What is left of a group is read one by one.
                    for each in self._made.popleft():
                        self._group_of.pop(each, None)
                left = [each for each in group if each == name or each in self._group_of]
                try:
                    self._made.append(self._opened.get_tensors(left))
                except BaseException as error:
                    self._made.clear()
                    self._error = error
                    raise
            return next(made.pop(name) for made in self._made if name in made)


def _in_order(name: str) -> list[Any]:
    """A key that sorts layer 10 behind layer 9, as transformers does."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
