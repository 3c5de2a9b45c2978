"""What each client of TensorFlow's DTensor does in a test (see `launching`).

python tensorflow_cases.py RANK COUNT PORT DIRECTORY CASE…
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tensorflow as tf
import world
from calls import as_options
from tensorflow.experimental import dtensor
from world import io_error, kill

import mfload

LOCAL = 2
WHOLE = dtensor.UNSHARDED
SPECS: dict[str, Any] = {"rows": ["p", WHOLE], "columns": [WHOLE, "p"], "replicated": None}


class World(world.World):
    """A client of TensorFlow with two CPUs."""

    def __init__(self, rank: int, count: int, directory: Path) -> None:
        super().__init__(rank, count, directory)
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * LOCAL,
        )
        dtensor.initialize_accelerator_system("CPU")
        self.mesh = dtensor.create_distributed_mesh([("p", LOCAL * count)], device_type="CPU")

    def load(self, spec: Any, path: Path | None = None, **options: Any) -> dict[str, Any]:
        """Loads with one spec for all tensors of two dims."""
        return mfload.load(
            path or self.model,
            "tensorflow",
            mesh=self.mesh,
            shardings=[("^t", spec)],
            **as_options({"timeout": 30, **options}),
        )

    def check(self, arrays: dict[str, Any], spec: Any) -> None:
        """Compares the parts of this client's devices with slices of the file."""
        held: dict[str, Any] = {}
        for file in sorted(self.model.glob("*.safetensors")):
            held |= safetensors.numpy.load_file(file)
        assert set(arrays) == set(held)
        for name, array in arrays.items():
            axes = spec if spec and name.startswith("t.") else [WHOLE] * held[name].ndim
            assert array.shape == held[name].shape
            assert dtensor.fetch_layout(array) == dtensor.Layout(axes, self.mesh)
            for n, part in zip(self.mesh.local_device_ids(), dtensor.unpack(array), strict=True):
                like = held[name]
                if "p" in axes:
                    like = np.split(like, self.mesh.size, axes.index("p"))[n]
                assert tuple(part.shape) == like.shape
                assert np.asarray(part.numpy()).tobytes() == like.tobytes(), name


def values(here: World, name: str, exchange: str) -> dict[str, Any]:
    report = mfload.Report()
    with here.counted():
        arrays = here.load(SPECS[name], exchange=exchange, engine="pread", report=report)
    here.check(arrays, SPECS[name])
    fields = ("read_bytes", "exchanged_bytes", "over_read_bytes", "notes")
    return {each: getattr(report, each) for each in fields} | {"counted": here.read}


def dtypes(here: World, name: str, exchange: str) -> dict[str, Any]:
    """Every dtype, bit for bit."""
    report = mfload.Report()
    path = here.directory / "dtypes.safetensors"
    arrays = here.load(SPECS[name], path, exchange=exchange, report=report)
    kinds: dict[str, str] = {}
    for key, (kind, _, raw) in world.every_dtype().items():
        kinds[kind] = arrays[key].dtype.name
        for n, part in zip(here.mesh.local_device_ids(), dtensor.unpack(arrays[key]), strict=True):
            like = np.split(raw, here.mesh.size, SPECS[name].index("p"))[n]
            assert np.asarray(part.numpy()).tobytes() == like.tobytes(), key
    return {"exchanged": report.exchanged_bytes, "kinds": kinds}


def usable(here: World) -> None:
    """TensorFlow computes with what was loaded, over all clients."""
    arrays = here.load(SPECS["columns"])
    (file,) = here.model.glob("*1-of-*.safetensors")
    whole = safetensors.numpy.load_file(file)["t.b"]
    found = tf.reduce_sum(tf.abs(tf.cast(arrays["t.b"], tf.float64)))
    np.testing.assert_allclose(found.numpy(), np.abs(whole.astype(np.float64)).sum())


def missing(here: World) -> None:
    path = here.own()
    if here.rank == 1:
        (path / "model-00002-of-00002.safetensors").unlink()
    here.load(SPECS["rows"], path)


def misfit(here: World) -> None:
    here.load([WHOLE, "no" if here.rank == 1 else "p"])


def disk(here: World, exchange: str, after: str) -> None:
    with here.failing(int(after), io_error):
        here.load(SPECS["columns"], exchange=exchange, engine="pread")


def killed_reading(here: World, exchange: str) -> None:
    here.load(SPECS["rows"])
    with here.failing(1 << 20, kill):
        here.load(SPECS["columns"], exchange=exchange, engine="pread", timeout=60)


def late(here: World) -> None:
    """A client that does not come: the others give up at the deadline, and can end."""
    if here.rank == 1:
        time.sleep(8)
        return
    here.load(SPECS["rows"], timeout=3)


def after(here: World) -> None:
    here.load(SPECS["rows"], timeout=3)


def shards(here: World, exchange: str) -> None:
    """Plain shards of each dim, as torch.chunk cuts them: 5 rows over 4 are 2, 2, 1, 0."""
    whole = np.arange(5 * 7 * 3, dtype=np.float32).reshape(5, 7, 3)
    path = here.directory / "five.safetensors"
    for dim in range(-3, 3):
        made = mfload.load(
            path,
            "tensorflow",
            shardings=[("w", dim)],
            shard=(here.rank, here.count),
            options=mfload.Options(exchange=exchange, timeout=30),  # pyright: ignore
        )["w"]
        size = -(-whole.shape[dim] // here.count)
        at = np.arange(here.rank * size, min((here.rank + 1) * size, whole.shape[dim]))
        np.testing.assert_array_equal(made.numpy(), whole.take(at, dim))


def peers(here: World, first: str, second: str) -> dict[str, Any]:
    return here.peers(SPECS[first], SPECS[second], f"{first}-{second}")


def main(cases: dict[str, Any]) -> None:
    rank, count = map(int, sys.argv[1:3])
    directory = Path(sys.argv[4])
    os.environ |= {
        "DTENSOR_CLIENT_ID": str(rank),
        "DTENSOR_NUM_CLIENTS": str(count),
        "DTENSOR_JOB_NAME": "worker",
        "DTENSOR_JOBS": (directory / "ports").read_text(),
    }
    here = World(rank, count, directory)
    world.play(here, cases)


if __name__ == "__main__":
    main(globals())
