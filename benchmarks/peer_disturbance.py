"""Measure what readers do to a process that computes while it is read.

    python -m benchmarks.peer_disturbance

Prints the time of a jitted JAX step without readers and with them, side by side, one transport
after the other in turns, so that what else the machine does meets all of them. The readers are
processes that load all weights again and again. They share cores and memory with the step, and cost
time even where the seed does nothing: processes that copy as much memory of their own, which have
nothing to do with the seed, say how much.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from mfload.peer.transports import DEFAULT

ALONE, BESIDE = "no readers", "own copies"


def main() -> None:
    """Runs the rounds, and prints a table."""
    parser = argparse.ArgumentParser(description="step times of a seed with readers and without")
    parser.add_argument("--readers", type=int, default=1, help="processes that read at once")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each case")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--mb", type=int, default=256, help="size of the weights")
    parser.add_argument("--transports", nargs="+", default=DEFAULT)
    given = parser.parse_args()

    import jax
    import jax.numpy as jnp

    import mfload

    side = 1024
    count = max(1, given.mb * 10**6 // (side * side * 4))
    keys = jax.random.split(jax.random.key(0), count)
    params = {f"w{n}": jax.random.normal(key, (side, side)) for n, key in enumerate(keys)}

    def layers(params: dict[str, Any], x: Any) -> Any:
        for n in range(8):
            x = jnp.tanh(x @ params[f"w{n % count}"])
        return x

    step: Any = jax.jit(layers)
    x = step(params, jnp.ones((256, side))).block_until_ready()
    times: dict[str, list[float]] = {name: [] for name in (ALONE, BESIDE, *given.transports)}
    loads = dict.fromkeys(times, 0)
    with mfload.publish(
        params, model="benchmark", peer=mfload.PeerOptions(transports=given.transports)
    ) as seed:
        run = [sys.executable, "-m", "benchmarks.peer_disturbance", "--read", seed.url]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        readers: list[Any] = [subprocess.Popen(run, **pipes, env=env) for _ in range(given.readers)]
        try:
            for _ in range(given.rounds):
                for name, found in times.items():
                    begun = [] if name == ALONE else readers
                    for each in begun:
                        _tell(each, [name, given.seconds, seed.manifest.size])
                    if begun:
                        time.sleep(0.1)
                    end = time.perf_counter() + given.seconds - 0.2
                    while (start := time.perf_counter()) < end:
                        step(params, x).block_until_ready()
                        found.append(time.perf_counter() - start)
                    loads[name] += sum(json.loads(each.stdout.readline()) for each in begun)
        finally:
            for each in readers:
                each.stdin.close()
                each.wait()
    _print(times, loads, seed.manifest.size, given)


def _tell(reader: Any, what: Any) -> None:
    reader.stdin.write(json.dumps(what) + "\n")
    reader.stdin.flush()


def _print(times: dict[str, list[float]], loads: dict[str, int], nbytes: int, given: Any) -> None:
    base = statistics.median(times[ALONE])
    seconds = given.rounds * given.seconds
    print(f"{os.cpu_count()} cores, {nbytes / 1e6:.0f} MB of weights, readers: {given.readers}")
    print(f"{'':12} {'step, median':>13} {'90 %':>9} {'of alone':>9} {'read':>12}")
    for name, found in times.items():
        middle = statistics.median(found)
        late = statistics.quantiles(found, n=10)[-1]
        rate = loads[name] * nbytes / seconds / 1e9
        row = f"{middle * 1e3:10.2f} ms {late * 1e3:6.2f} ms {middle / base:9.2f}"
        print(f"{name:12} {row} {rate:7.2f} GB/s")


def read(url: str) -> None:
    """Loads over the transports that are named on lines, for as long as they say."""
    import numpy as np

    import mfload

    for line in sys.stdin:
        name, seconds, nbytes = json.loads(line)
        peer = mfload.PeerOptions(transports=None if name == BESIDE else name, stalled=30.0)
        own = np.ones(nbytes if name == BESIDE else 0, np.uint8)
        end, count = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            if name == BESIDE:
                own.copy()
            else:
                mfload.load(url, "numpy", options=mfload.Options(peer=peer))
            count += 1
        print(count, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        read(sys.argv[2])
    else:
        main()
