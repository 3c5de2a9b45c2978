"""Packages on the way to a GPU, and their settings: what CuPy can do, what XLA takes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping

from mfload.diagnostics.findings import Finding
from mfload.io.subprocess_probe import Answer

_SHARE = 0.75
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def cupy(answer: Answer | None) -> Finding:
    """CuPy, which allocates and copies on the device.

    Args:
        answer: What `probe_cupy` said, None where CuPy is not installed.
    """
    if answer is None:
        advice = "pip install cupy-cuda13x: loads onto the GPU go through host arrays without it"
        return Finding("gpu", "CuPy", "not installed", "note", advice)
    answer = answer.of(version=str, compiling=str | None)
    if answer.trouble:
        advice = "loads onto the GPU may hang or fail with it"
        return Finding("gpu", "CuPy", answer.trouble, "trouble", advice)
    if "error" in answer.data:
        advice = "it does not fit this driver, or two of its packages are installed (pip list)"
        return Finding("gpu", "CuPy", answer.data["error"], "trouble", advice)
    found, failed = answer.data["version"], answer.data["compiling"]
    if failed:
        advice = (
            "dtypes are converted on the host then, and not on the device: pip install "
            "nvidia-cuda-runtime brings the headers that its compiler looks for"
        )
        return Finding("gpu", "CuPy", f"{found}; compiles no kernels: {failed}", "note", advice)
    return Finding("gpu", "CuPy", found, data=found)


def xla(environment: Mapping[str, str]) -> Iterator[Finding]:
    """What JAX leaves to others of a card.

    Args:
        environment: Variables of this process.
    """
    if importlib.util.find_spec("jax") is None:
        return
    if not any(importlib.util.find_spec(name) for name in _PLUGINS):
        advice = "JAX has no CUDA plugin here: pip install 'jax[cuda13]' has it use the card"
        yield Finding("gpu", "XLA's pool", "none", "ok", advice)
        return
    allocator = environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower()
    eager = environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() not in ("false", "0")
    share = _number(environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION"))
    if allocator == "platform" or not eager:
        yield Finding("gpu", "XLA's pool", "grows as needed")
        return
    advice = (
        "JAX takes it with its first array; allocator='framework' lands in it, and what lands "
        "elsewhere has the rest: XLA_PYTHON_CLIENT_PREALLOCATE=false or "
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.4 leave more"
    )
    found = f"{share:.0%} of each card, at once"
    yield Finding("gpu", "XLA's pool", found, "ok", advice, share)


def _number(text: str | None) -> float:
    # XLA has it with a dot in front, as in ".9", and above 1 for cards that can page.
    try:
        return float(text or _SHARE)
    except ValueError:
        return _SHARE
