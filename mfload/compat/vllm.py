"""`--load-format mfload` for vLLM: its entry point, and the loader.

Used of vLLM, beside what it documents for plug-ins: `DefaultModelLoader`, of which this is a
subclass, with `_get_weights_iterator`, `_prepare_weights`, `local_expert_ids` and the two filters
of files.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Iterator
from typing import Any

from vllm.model_executor.model_loader import register_model_loader, weight_utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

from mfload import errors
from mfload.compat import serving

_log = logging.getLogger(__name__)
_TRACK = "enable_weights_track"  # A setting of vLLM's default loader.


class MfloadModelLoader(DefaultModelLoader, serving.WeightsLoader):  # pyright: ignore
    """Reads what the weight loaders of the model copy, and no more, on every rank.

    `model_loader_extra_config` takes `path`, where the weights lie for `mfload.load`, and the
    fields of `mfload.Options`; `{"exchange": "once"}` has each byte read by one rank.

    Raises:
        UsageError: `model_loader_extra_config` is invalid.
    """

    def __init__(self, load_config: Any) -> None:
        own, extra = dict[str, Any](), load_config.model_loader_extra_config
        if isinstance(extra, dict) and _TRACK in extra:
            own = {_TRACK: extra[_TRACK]}
            extra = {key: value for key, value in extra.items() if key != _TRACK}
        self._weights = serving.Weights(extra)
        # vLLM finds or downloads the files that it would take without mfload.
        given = {"load_format": "auto", "model_loader_extra_config": own}
        super().__init__(dataclasses.replace(load_config, **given))

    def download_model(self, model_config: Any) -> None:
        """Downloads a model from the Hub; files elsewhere are read where they are."""
        if self._weights.path(model_config.model) is None:
            super().download_model(model_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Loads the weights into a model of vLLM, in place.

        Raises:
            MfloadError: As `mfload.load` does.
            ValueError: Weights of the model are missing in the checkpoint.
        """
        super().load_weights(model, model_config)
        _log.info("%s", self.report)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Any]]:
        if self.load_config.safetensors_load_strategy == "torchao":
            what, expected = "mfload does not rebuild torchao's tensors", "another --load-format"
            raise errors.UsageError(what, expected=expected, found=source.model_or_path)
        path: Any = self._weights.path(source.model_or_path)
        if path is None:
            given = source.model_or_path, source.subfolder, source.revision, False
            found = self._prepare_weights(*given, source.allow_patterns_overrides)
            folder, path, safe, index = found
            if not safe:
                what, expected = "the model has no safetensors files", "another --load-format"
                raise errors.UsageError(what, expected=expected, found=min(path))
            if (prefixes := self._encoder_only_lm_prefixes) is not None:
                mapper = self._encoder_only_weights_mapper
                path = weight_utils.filter_mm_encoder_only_safetensors_files(
                    path, folder, index, prefixes, weights_mapper=mapper
                )
            if (unused := source.is_unused_weight) is not None:
                path = weight_utils.filter_safetensors_files_by_weight_name(path, unused)
            path = sorted(path)
        elif source.subfolder is not None:
            raise errors.UsageError(
                "path in model_loader_extra_config has no subfolders, and the model loads from one",
                expected="no path for this model",
                found=source.subfolder,
            )
        if self.counter_before_loading_weights == 0.0:  # vLLM logs the seconds since.
            self.counter_before_loading_weights = time.perf_counter()
        skip = functools.partial(should_skip_weight, local_expert_ids=self.local_expert_ids)
        rows = self._weights.rows(path, skip)
        return ((source.prefix + name, tensor) for name, tensor in rows)


@functools.cache
def register() -> None:
    """Registers the load format; vLLM calls it in each of its processes."""
    register_model_loader("mfload")(MfloadModelLoader)
