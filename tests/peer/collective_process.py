"""Two processes of torch.distributed: a seed, and a reader that says what it saw."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import mfload
from mfload import Options, PeerOptions, Report, errors

COLLECTIVE = Options(peer=PeerOptions(transports=("collective",)))


def arrays(plus: int = 0) -> dict[str, Any]:
    """One longer than two messages, tiny ones, and several dtypes."""
    made = {f"t{n}": torch.arange(n * 1000, dtype=torch.int32) + plus for n in range(1, 60)}
    made["long"] = (torch.arange(2_500_001, dtype=torch.float32) + plus) / 7
    made["half"] = (torch.arange(999) + plus).to(torch.bfloat16)
    return made


def same(found: Any, plus: int = 0) -> bool:
    """Whether all are there, bit by bit."""
    expected = arrays(plus)
    return found.keys() == expected.keys() and all(
        found[name].dtype == each.dtype and torch.equal(found[name], each)
        for name, each in expected.items()
    )


def seed(folder: Path) -> None:
    """Publishes, then does what the reader says."""
    made = mfload.publish(
        arrays(), model="m", peer=mfload.PeerOptions(transports=("http", "collective"))
    )
    (folder / "url.part").write_text(made.url)
    (folder / "url.part").rename(folder / "url")
    store: Any = dist.distributed_c10d._get_default_store()
    store.get("update")
    made.update(arrays(1))
    store.set("updated", "")
    store.get("kill")
    os.kill(os.getpid(), 9)


def reader(folder: Path) -> dict[str, Any]:
    """Loads over and over."""
    while not (folder / "url").exists():
        time.sleep(0.05)
    url, report, said = (folder / "url").read_text(), Report(), {}
    store: Any = dist.distributed_c10d._get_default_store()
    said["same"] = same(mfload.load(url, "torch", options=COLLECTIVE, report=report))
    said["route"] = report.route[0][1:]
    # Their own messages are not mixed up with those of a load.
    mfload.load(url, "torch", report=report)
    said["default"] = report.route[0][1]
    unchecked = PeerOptions(transports=("collective",), checksums=False)
    with mfload.open(url, "torch", options=Options(peer=unchecked)) as opened:
        opened.get_tensor("t1")
        store.set("update", "")
        store.get("updated")
        try:
            opened.get_tensor("t2")
        except errors.SourceError as error:
            said["update"] = type(error).__name__
    said["again"] = same(mfload.load(url, "torch", options=COLLECTIVE), 1)
    with mfload.open(url, "torch", options=Options(peer=unchecked)) as opened:
        opened.get_tensor("t1")
        store.set("kill", "")
        time.sleep(0.3)
        start = time.monotonic()
        try:
            opened.get_tensor("t2")
        except errors.SourceError as error:
            said["killed"] = [type(error).__name__, time.monotonic() - start]
    return said


def main() -> None:
    rank, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    store = dist.TCPStore("127.0.0.1", int(port), 2, is_master=rank == 1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if rank == 0:
        seed(folder)
    np.testing.assert_equal(rank, 1)
    (folder / "said").write_text(json.dumps(reader(folder)))
    os._exit(0)  # The other process is dead: a group can't be left in good order.


if __name__ == "__main__":
    main()
