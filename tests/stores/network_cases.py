"""What each process of a load from network disks does in a test (see `launching`).

python network_cases.py RANK COUNT PORT DIRECTORY CASE…

Of the case "together" all see the same disk, as processes of one machine do; of "apart" every other
one has a mount of its own, whose pages it shares with no process of another.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import mfload


def main() -> None:
    rank, count, port = map(int, sys.argv[1:4])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=count)
    mesh, directory = init_device_mesh("cpu", (count,)), Path(sys.argv[4])
    expected: dict[str, Any] = mfload.load(directory / "stored", "numpy")
    for case in sys.argv[5:]:
        where = directory / f"{case}{rank % 2 if case == 'apart' else 0}"
        report = mfload.Report()
        given: Any = {"mesh": mesh, "shardings": [("", [Replicate()])], "report": report}
        found = mfload.load(where, "torch", **given)
        for name, each in found.items():
            assert isinstance(each, DTensor)
            assert np.array_equal(each.to_local().numpy(), expected[name]), name
        line = {"case": case, "read": report.read_bytes, "notes": report.notes}
        with open(directory / f"said.{rank}", "a", encoding="utf-8") as said:
            said.write(json.dumps(line) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
