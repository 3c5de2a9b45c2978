"""vLLM's start-up with `--load-format mfload` beside its default: `python benchmarks/vllm_gpu.py`.

Not yet run on a GPU. It needs one, vLLM, and mfload installed into vLLM's environment. Each load
format has a process of its own; cold ones begin with the files out of the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def start(model: str, load_format: str, ranks: int) -> None:
    """Starts an engine, and prints its seconds and the tokens of a prompt, as JSON."""
    from vllm import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(model, load_format=load_format, tensor_parallel_size=ranks, enforce_eager=True)
    seconds = time.perf_counter() - begin
    (out,) = llm.generate(["The capital of France is"], SamplingParams(temperature=0))
    print(json.dumps({"seconds": seconds, "tokens": list(out.outputs[0].token_ids)}))


def forget(model: str) -> None:
    """Takes the files of a model out of the page cache."""
    for path in Path(model).glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def main() -> None:
    """Compares both formats, warm and cold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a local directory with safetensors files")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        return start(given.model, given.one, given.ranks)
    tokens: set[tuple[int, ...]] = set()
    for cold in (False, True):
        for load_format in ("auto", "mfload") * given.rounds:
            if cold:
                forget(given.model)
            command = [sys.executable, __file__, given.model, "--one", load_format]
            command += ["--ranks", str(given.ranks)]
            log = {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}  # By default it is stdout.
            taken: Any = {"env": os.environ | log, "stdout": subprocess.PIPE, "text": True}
            run = subprocess.run(command, **taken, check=True)
            said = json.loads(run.stdout.splitlines()[-1])
            tokens.add(tuple(said["tokens"]))
            print(f"{'cold' if cold else 'warm'}  {load_format:8} {said['seconds']:.2f} s")
    print("tokens agree" if len(tokens) == 1 else f"TOKENS DIFFER: {tokens}")
    return None


if __name__ == "__main__":
    main()
