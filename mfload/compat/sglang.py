"""`--load-format mfload` for SGLang: its entry point, and the loader.

Used of SGLang, beside its plug-ins: `DefaultModelLoader`, of which this is a subclass, with
`_get_weights_iterator`, `_prepare_weights` and `_filter_mtp_weights`; and
`LoadConfig._verify_load_format`, which is hooked, since it knows the formats of SGLang only.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any

from mfload import errors
from mfload.compat import serving

_log = logging.getLogger(__name__)
_QUANTISED = ("auto-round-int8", "modelopt", "modelopt_fp8", "modelopt_mixed")


@functools.cache
def loader() -> type[Any]:
    """The class of the loader; SGLang's modules for models are imported here."""
    from sglang.srt.configs.load_config import LoadFormat
    from sglang.srt.model_loader import loader as loaders, weight_utils

    class MfloadModelLoader(loaders.DefaultModelLoader, serving.WeightsLoader):  # pyright: ignore
        """Reads what the weight loaders of the model copy, and no more, on every rank.

        `model_loader_extra_config` takes `path`, where the weights lie for `mfload.load`, and the
        fields of `mfload.Options`; `{"exchange": "once"}` has each byte read by one rank.

        Raises:
            UsageError: `model_loader_extra_config` is invalid.
        """

        def __init__(self, load_config: Any) -> None:
            self._weights = serving.Weights(load_config.model_loader_extra_config or {})
            # For SGLang these are safetensors files: it finds or downloads them.
            given = {"load_format": LoadFormat.SAFETENSORS, "model_loader_extra_config": {}}
            super().__init__(dataclasses.replace(load_config, **given))

        def download_model(self, model_config: Any) -> None:
            """Downloads a model from the Hub; files elsewhere are read where they are."""
            if self._weights.path(model_config.model_path) is None:
                super().download_model(model_config)

        def load_model(self, *, model_config: Any, device_config: Any) -> Any:
            """Makes a model and loads its weights.

            Raises:
                UsageError: SGLang quantises the model while it loads, with a loader of its own.
                MfloadError: As `mfload.load` does.
            """
            _check(model_config)
            model = super().load_model(model_config=model_config, device_config=device_config)
            _log.info("%s", self.report)
            return model

        def _get_weights_iterator(self, source: Any, **_: Any) -> Iterator[tuple[str, Any]]:
            path: Any = self._weights.path(source.model_or_path)
            if path is None:
                given = source.model_or_path, source.revision, False
                folder, path, _ = self._prepare_weights(*given, source.allow_patterns_overrides)
                if source.model_config is not None:
                    index, config = "model.safetensors.index.json", source.model_config.hf_config
                    path = weight_utils.maybe_add_mtp_safetensors(path, folder, index, config)
                if self._weights.once:
                    path = sorted(path)
            rows = self._weights.rows(path)
            if (number := self.load_config.draft_model_idx) is not None:
                return self._filter_mtp_weights(rows, source.prefix, number)
            return ((source.prefix + name, tensor) for name, tensor in rows)

    MfloadModelLoader.__qualname__ = MfloadModelLoader.__name__  # For pickles of LoadConfig.
    return MfloadModelLoader


def _check(model_config: Any) -> None:
    """Refuses a model that SGLang quantises while it loads."""
    kind = model_config.quantization
    stored = kind != "auto-round-int8" and model_config._is_already_quantized()
    if getattr(model_config, "modelopt_quant", None) or (kind in _QUANTISED and not stored):
        what = "SGLang quantises this model with a loader of its own"
        raise errors.UsageError(what, expected="--load-format auto", found=kind)


def __getattr__(name: str) -> Any:
    if name == "MfloadModelLoader":
        return loader()
    raise AttributeError(name)


def register() -> None:
    """Adds the load format to the command line and to `LoadConfig`; SGLang calls it."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if "mfload" in choices.LOAD_FORMAT_CHOICES:
        return
    choices.add_load_format_choices(["mfload"])
    target = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
    HookRegistry.register(target, _verify, HookType.AROUND)


def _verify(original: Any, config: Any) -> None:
    # SGLang takes a class in the place of the name of a format.
    if isinstance(config.load_format, str) and config.load_format.lower() == "mfload":
        config.load_format = loader()
    original(config)
