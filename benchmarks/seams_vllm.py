"""A Llama of vLLM, made and loaded on a CPU as its `load_model` does.

vLLM's wheel is for GPUs, and its kernels are missing on a CPU: `process_weights_after_loading`,
which follows and is the same for every loader, is left out.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any


@functools.cache
def _start(ranks: int) -> None:
    """Makes vLLM's process groups over the default one."""
    os.environ |= {"VLLM_PLUGINS": "mfload", "VLLM_LOGGING_LEVEL": "ERROR"}
    import torch.distributed as dist
    import vllm.platforms
    from vllm.distributed import parallel_state
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()  # The wheel finds no GPU, and so none at all.
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.init_distributed_environment(ranks, dist.get_rank(), "env://", 0, "gloo")
    from mfload.compat import vllm as ours

    ours.register()


def load(ours: bool, path: Path, ranks: int) -> list[Any]:
    """The weights of this process, by mfload or by vLLM's default loader."""
    _start(ranks)
    from vllm import config as configs
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.utils.torch_utils import set_default_torch_dtype

    given: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "bfloat16"}
    model_config = configs.ModelConfig(model=str(path), enforce_eager=True, **given)
    vllm_config = configs.VllmConfig(
        model_config=model_config,
        parallel_config=configs.ParallelConfig(tensor_parallel_size=ranks),
        load_config=configs.LoadConfig(load_format="mfload" if ours else "auto"),
        device_config=configs.DeviceConfig("cpu"),
    )
    with configs.set_current_vllm_config(vllm_config), set_default_torch_dtype(model_config.dtype):
        if parallel_state._TP is None:
            parallel_state.initialize_model_parallel(ranks, 1)
        made: Any = get_model_loader(vllm_config.load_config)
        model = made.create_model(vllm_config, model_config)
        made.load_weights(model, model_config)
    return [each.data for each in model.parameters()]
