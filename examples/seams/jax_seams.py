"""mfload under the loading seams of Tunix, Levanter and MaxText.

Three functions to put in the place of theirs. Run as a script, it compares what they make, and the
peak memory of a process that loads 128 MB onto four CPU devices, with Tunix's own loader where
Tunix is installed. Levanter's and MaxText's are stand-ins: they read as those do, with safetensors.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from safetensors import safe_open
from safetensors.numpy import save_file

import mfload

LAYERS, WIDTH = 16, 1024


# Tunix: `tunix.models.safetensors_loader.load_and_create_model = tunix_load`
# fmt: off
def tunix_load(file_dir, model_class, config, key_mapping, mesh=None, preprocess_fn=None,
               dtype=None, mode="auto"):
    # fmt: on
    if preprocess_fn is not None:
        raise NotImplementedError("what preprocess_fn does is a rule of mfload's mapping")
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        model = nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(params=0)))
    shardings = {}
    if mesh is not None:
        placed = nnx.get_named_sharding(nnx.state(model), mesh).to_pure_dict()
        for path, sharding in jax.tree_util.tree_leaves_with_path(placed):
            shardings[".".join(str(getattr(key, "key", key)) for key in path)] = sharding
    mapping = {".*": None, **key_mapping(config)}  # As there, what has no key is left out.
    return mfload.load_into(
        model, file_dir, mapping=mapping, shardings=shardings or None, dtype=dtype or "stored"
    )


# Levanter: `HFCheckpointConverter.load_state_dict = levanter_load`
def levanter_load(self, ref=None, dtype=None):
    path, revision = self._get_ref(ref)
    if revision is not None:
        raise NotImplementedError("mfload reads a directory or a URL: download the revision first")

    def sharding(name, info):
        return best_effort_sharding(info.shape)

    return mfload.load(path, "jax", dtype=dtype, shardings=sharding)


# MaxText: `maxtext.checkpoint_conversion.to_maxtext.LazyHFLoader = MaxTextLoader`
class MaxTextLoader:
    """Takes the place of LazyHFLoader."""

    def __init__(self, model_id, token, revision=None):
        if revision is not None:
            raise NotImplementedError("mfload reads a directory or a URL: download it first")
        self._opened = mfload.open(model_id)
        self.shard_map = dict.fromkeys(self._opened.keys(), model_id)

    def get_tensor(self, key):
        return self._opened.get_tensor(key)


# ----- theirs -----


def best_effort_sharding(shape):
    """As Levanter's: the last dim that the devices divide, over all of them."""
    mesh = Mesh(np.array(jax.devices()), "d")
    dims = [n for n, size in enumerate(shape) if size % len(jax.devices()) == 0]
    last = dims[-1] if dims else None  # Of no such dim, all of it is on each device.
    return NamedSharding(mesh, P(*("d" if n == last else None for n in range(len(shape)))))


class Converter:
    """As Levanter's HFCheckpointConverter reads."""

    def __init__(self, path):
        self._path = path

    def _get_ref(self, ref):
        return ref or self._path, None

    def load_state_dict(self, ref=None, dtype=None):
        made = {}
        for path in sorted(Path(self._get_ref(ref)[0]).glob("*.safetensors")):
            with safe_open(path, framework="np") as file:
                for name in file.offset_keys():
                    part = file.get_slice(name)
                    shape = tuple(part.get_shape())
                    made[name] = jax.make_array_from_callback(
                        shape,
                        best_effort_sharding(shape),
                        lambda at, part=part: part[at] if dtype is None else part[at].astype(dtype),
                    )
        return made


class LazyHFLoader:
    """As MaxText's reads a local directory."""

    def __init__(self, model_id, token, revision=None):
        self._lock = threading.Lock()
        self._path = next(Path(model_id).glob("*.safetensors"))

    def get_tensor(self, key):
        with self._lock, safe_open(self._path, framework="np", device="cpu") as file:
            return file.get_tensor(key)


def tunix_theirs():
    """Tunix's loader, without the rest of its package, or None."""
    folder = Path(importlib.util.find_spec("flax").origin).parents[1] / "tunix"
    if not folder.exists():
        return None
    package = types.ModuleType("tunix")
    package.__path__ = [str(folder)]
    sys.modules["tunix"] = package
    from tunix.models import safetensors_loader

    return safetensors_loader.load_and_create_model


# ----- a model, and what is measured -----


class Net(nnx.Module):
    """Layers of one kernel each."""

    def __init__(self, config, rngs):
        key = rngs.params()
        self.layers = nnx.List(
            [
                nnx.Param(
                    jax.random.normal(key, (WIDTH, 4, WIDTH), jnp.bfloat16),
                    sharding=(None, "tp", None),
                )
                for _ in range(config)
            ]
        )


def key_mapping(config):
    return {r"layers\.([0-9]+)\.weight": (r"layers.\1", ((1, 0), (WIDTH, 4, WIDTH)))}


def load(seam, ours, path):
    """What a seam makes, as arrays in order."""
    if seam == "tunix":
        how = tunix_load if ours else tunix_theirs()
        mesh = Mesh(np.array(jax.devices()), "tp")
        model = how(str(path), Net, LAYERS, key_mapping, mesh=mesh)
        return jax.tree.leaves(nnx.state(model))
    if seam == "levanter":
        converter = Converter(path)
        made = levanter_load(converter) if ours else converter.load_state_dict()
        return [made[name] for name in sorted(made)]
    loader = (MaxTextLoader if ours else LazyHFLoader)(path, None, revision=None)
    stacked = np.stack([loader.get_tensor(f"layers.{n}.weight") for n in range(LAYERS)])
    return [stacked]


def resident(field):
    """Bytes of memory of this process, by a field of its status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def measure(seam, ours, path):
    """In a process of its own: bytes at the peak beside the result, and a digest of the result."""
    jax.block_until_ready(jnp.zeros(1))
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    before = resident("VmRSS")
    arrays = jax.block_until_ready(load(seam, ours, path))
    peak = resident("VmHWM") - before
    held = sum(each.nbytes for each in arrays)
    where = [str(getattr(each, "sharding", "")) for each in arrays]
    digest = hash(b"".join(np.asarray(each).tobytes() for each in arrays))
    print(json.dumps({"over": peak - held, "digest": digest, "where": where}))


def main():
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        path.mkdir()
        stored = {
            f"layers.{n}.weight": random.standard_normal((4 * WIDTH, WIDTH), np.float32).astype(
                ml_dtypes.bfloat16
            )
            for n in range(LAYERS)
        }
        save_file(stored, path / "model.safetensors")
        for seam in ("tunix", "levanter", "maxtext"):
            found = {}
            for ours in (True, False):
                if seam == "tunix" and not ours and tunix_theirs() is None:
                    print("tunix: not installed, its own loader was not run")
                    continue
                command = [sys.executable, __file__, seam, str(int(ours)), str(path)]
                environment = {**os.environ, "PYTHONHASHSEED": "0"}
                said = subprocess.run(command, check=True, capture_output=True, env=environment)
                found[ours] = json.loads(said.stdout.splitlines()[-1])
            for ours, each in found.items():
                assert each["digest"] == found[True]["digest"], seam
                assert each["where"] == found[True]["where"], (seam, found)
                who = "mfload" if ours else "theirs"
                print(f"{seam:9} {who}: {each['over'] / 1e6:6.0f} MB beside the result at the peak")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1], sys.argv[2] == "1", Path(sys.argv[3]))
    else:
        main()
