"""PyTorch: every dtype but F6 is aliased through DLPack; any alignment will do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import dlpack

from mfload.dlpack import View, capsule
from mfload.frameworks import adapter
from mfload.placement import Need

OLDEST = "2.4"

_OWN = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}


class TorchAdapter:
    """See `adapter.Adapter`.

    Args:
        device: Where the tensors go.
    """

    name = "torch"
    alignment = None
    readonly_maps = False
    # Older versions lack the youngest types: what is not there arrives as bytes.
    forms = adapter.forms(
        {key: name for key, name in (adapter.COMMON | _OWN).items() if hasattr(torch, name)}
    )
    lendable = adapter.lendable(forms)

    def __init__(self, device: Any) -> None:
        self._device = device
        self.on_host = device.type == "cpu"

    def wrap(self, views: Sequence[View]) -> list[Any]:
        """A tensor for each view, in order."""
        take = dlpack.from_dlpack
        tensors = [take(capsule(view)) for view in views]
        return tensors if self.on_host else [tensor.to(self._device) for tensor in tensors]

    def lend(self, needs: Sequence[Need]) -> list[adapter.Lent]:
        """Tensors of torch's own allocator, one for each need."""
        lent: list[adapter.Lent] = []
        for need in needs:
            name, shape = adapter.lent_as(self.forms[need.dtype.name], need)
            tensor = torch.empty(shape, dtype=getattr(torch, name), device="cpu")
            lent.append(adapter.Lent(tensor, tensor.reshape(-1).view(torch.uint8).numpy()))
        return lent


def make(device: object) -> TorchAdapter:
    """The adapter for a device.

    Raises:
        DeviceError: There is no such device.
    """
    adapter.check_version("torch", torch.__version__, OLDEST)
    if device is None:
        return TorchAdapter(torch.get_default_device())
    try:
        wanted = torch.device(device)  # pyright: ignore[reportArgumentType, reportCallIssue]
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError) as error:
        raise adapter.no_device("torch", device, str(error).splitlines()[0]) from error
    return TorchAdapter(wanted)
