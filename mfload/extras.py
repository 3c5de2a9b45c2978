"""What each extra of mfload brings, and the command that installs it.

The command names these packages and not `mfload[torch]`: it works whether mfload came from a
checkout, a repository, a wheel or an index.
"""

from __future__ import annotations

import shlex

EXTRAS = {
    "jax": ("jax>=0.5.3",),
    "flax": ("jax>=0.5.3", "flax>=0.12", "zstandard>=0.22"),
    "torch": ("torch>=2.4",),
    "tensorflow": ("tensorflow>=2.19",),
    "paddle": ("paddlepaddle>=3.0",),
    "cuda13": ("cupy-cuda13x>=14.2",),
    "gds": ("cupy-cuda13x>=14.2", "kvikio-cu13>=26.10"),
    "progress": ("tqdm>=4.60",),
    "cli": ("typer>=0.15.4", "tqdm>=4.60"),
    "verify": ("xxhash>=3.4",),
    "peer": ("xxhash>=3.4",),
    "orbax": ("zstandard>=0.22",),
    "bench": ("matplotlib>=3.8",),
    "plot": ("matplotlib>=3.8",),
    "stores": ("obstore>=0.8",),
}
"""The requirements of each extra, as pyproject.toml has them."""


def install(extra: str) -> str:
    """The command that installs what an extra brings, such as `pip install 'torch>=2.4'`.

    A name that is not an extra is that of a package.
    """
    return shlex.join(["pip", "install", *EXTRAS.get(extra, (extra,))])
