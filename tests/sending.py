"""What a process does that tensors of PyTorch are sent to."""

from __future__ import annotations

from typing import Any


def total(given: Any, results: Any) -> None:
    """Sends back the sum of the bytes of each tensor of the first list that comes."""
    import torch

    tensors = given.get(timeout=60)
    results.put([int(each.view(torch.uint8).sum(dtype=torch.int64)) for each in tensors])
    del tensors
    given.get(timeout=60)  # Its memory is held by the sender until then.
