"""Transformers: models of Hugging Face, made without memory and filled by mfload."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from mfload import api, errors
from mfload.frameworks import torch_adapter
from mfload.loading.lazy import LazyCheckpoint, TensorSlice
from mfload.options import Options

_REFUSED = (
    "state_dict",
    "gguf_file",
    "variant",
    "subfolder",
    "revision",
    "offload_folder",
    "quantization_config",
    "use_safetensors",
)
_ELSEWHERE = ("transformers_weights", "extra_files", "quantization_config")
_PARTED = ("tp_plan", "tp_size", "device_mesh", "distributed_config")
_THEIRS = "from_pretrained of transformers"
_DISK = "no part of the model can stay on disk"
_FIRST = ("model.safetensors", "model.safetensors.index.json")  # As transformers looks for them.


def from_pretrained(
    cls: Any, path: str | os.PathLike[str], *, options: Options | None = None, **given: Any
) -> Any:
    """Makes a model, as `cls.from_pretrained(path, …)` of transformers does, and loads it.

    The model is made on the meta device. Tied weights, buffers that are not saved, dtypes and
    device maps are up to transformers. As there, weights are private maps of the files, which must
    stay as they are while the model lives. With another engine than "mmap" each is read once it has
    its place, as slices are for a model that `tp_plan=` or `device_mesh=` shards.

    Args:
        cls: A model's class, or one such as `transformers.AutoModelForCausalLM`.
        path: A local directory with `config.json` and the weights, in safetensors.
        options: As for `mfload.load`, but `engine="auto"` maps the files.
        given: As for `cls.from_pretrained`: `dtype`, `device_map`, `config` and others.

    Returns:
        The model.

    Raises:
        UsageError: An argument that is not for local safetensors, a part of the model that is to
            stay on disk, or a directory with an adapter.
        MfloadError: As `mfload.load` does.
    """
    path = os.fspath(path)
    if given.get("revision") == "main":  # As of the Hub by default.
        del given["revision"]
    for name in _REFUSED:
        if given.get(name) or (name == "use_safetensors" and given.get(name) is False):
            what = f"{name}= is not taken: weights come from a local directory, and go to memory"
            raise errors.UsageError(what, expected=_THEIRS, file=path)
    devices = given.get("device_map")
    if isinstance(devices, dict) and "disk" in devices.values():
        raise errors.UsageError(_DISK, found=repr(devices)[:200])
    if os.path.exists(os.path.join(path, "adapter_config.json")):
        what = "the directory holds an adapter, which would not be loaded"
        raise errors.UsageError(what, file=path, expected=_THEIRS)
    auto = getattr(cls, "config_class", None) is None
    config = given.pop("config", None)
    if config is None or isinstance(config, str | os.PathLike):
        from transformers import AutoConfig  # pyright: ignore

        # Arguments that are part of the config go into it; the dtype of the weights is none.
        kept = {name: given.pop(name) for name in ("dtype", "torch_dtype") if name in given}
        maker, where = AutoConfig if auto else cls.config_class, config or path
        config, given = maker.from_pretrained(where, return_unused_kwargs=True, **given)
        given |= kept
    for name in _ELSEWHERE:
        if found := getattr(config, name, None):
            what = f"the config names what only a loader of files finds: {name}"
            raise errors.UsageError(what, file=path, expected=_THEIRS, found=str(found)[:200])
    if auto:
        trusted = {"trust_remote_code": True} if given.get("trust_remote_code") else {}
        with torch.device("meta"):
            cls = type(cls.from_config(config, **trusted))
    weights = (os.path.join(path, name) for name in _FIRST)
    first = next(filter(os.path.exists, weights), path)
    options = options or Options()
    parted = any(given.get(name) is not None for name in _PARTED)
    if options.engine == "auto" and options.page_cache == "auto" and not parted:
        options = dataclasses.replace(options, engine="mmap")
    with api.open(first, "torch", "cpu", options=options) as opened:
        # Of "auto" the first weight of the first file says the dtype.
        names = sorted(opened, key=lambda name: (opened.file_of(opened.info(name)), name))
        state: Any = {name: _Weight(opened, name) for name in names}
        if options.engine == "mmap":
            state = opened.get_tensors(names)
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


class _Weight(TensorSlice):
    """A tensor that is read when transformers has a place for it."""

    __slots__ = ()

    def __init__(self, opened: LazyCheckpoint, name: str) -> None:
        super().__init__(opened, opened.get_slice(name)._info)  # pyright: ignore

    @property
    def dtype(self) -> Any:
        """What PyTorch calls its dtype."""
        return getattr(torch, torch_adapter.TorchAdapter.forms[self.get_dtype()].type)

    def is_floating_point(self) -> bool:
        """Whether it holds floats."""
        return self.dtype.is_floating_point
