"""Try and measure loading onto a GPU: is it right, how fast is it, what is it measured against.

    python -m benchmarks.gpu [--steps 0,1,2,3,4,5,6,7,8] [--minutes 15]

One command on any machine with an NVIDIA GPU, with whatever of the packages it finds. It writes
`gpu-NAME.json`, `.md`, `.png` and, where tests failed, `.log`, named after the GPU, into `--out`
($OUT, or `docs/performance`), again after every sample; with the JSON of an earlier run there, it
goes on from it. Ends with status 1 if a check failed, and 2 without a GPU. `--device cpu` rehearses
all of it on host arrays.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT, arguments, gpu_facts, gpu_steps, gpu_tables, gpu_trials, pages
from benchmarks.gpu_memory import HOST
from benchmarks.gpu_run import Run, Setting, put
from benchmarks.results import Results


def redraw(folder: Path, root: Path | None = None) -> None:
    """Pages and plots again from each `gpu-*.json` of a folder.

    Args:
        folder: Where they are.
        root: Of the checkout whose front page and page about GPUs show the last run on one.
    """
    found = {path: Results.read(path) for path in sorted(folder.glob("gpu-*.json"))}
    # Older ones have other cases.
    found = {path: results for path, results in found.items() if "steps" in results.run}
    for path, results in found.items():
        put(results, path.with_suffix(""))
        _draw(results, path.with_suffix(".png"))
    measured = [path for path, results in found.items() if gpu_tables.has_front(results)]
    if root is not None and measured:
        last = max(measured, key=lambda path: found[path].run["ended"])
        pages.put(root / "README.md", gpu_tables.front(found[last]))
        about = root / "docs" / "performance" / "gpu.md"
        pages.put(about, gpu_tables.summary(found[last], last.stem))


def _draw(results: Results, path: Path) -> None:
    try:
        gpu_tables.draw(results, path)
    except ImportError as error:
        print(f"nothing is drawn: {error}; `--redraw` does it later, anywhere", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("gpu", __doc__)
    parser.set_defaults(out=os.environ.get("OUT") and Path(os.environ["OUT"]))
    parser.add_argument("--device", choices=("cuda:0", HOST), default="cuda:0")
    every = ",".join(map(str, gpu_steps.PARTS))
    parser.add_argument("--steps", type=_steps, default=every, help=f"which ({every})")
    parser.add_argument("--minutes", type=float, default=15, help="what it may take in all (15)")
    parser.add_argument(
        "--wheels", type=Path, help="a folder of wheels of what is measured against"
    )
    parser.add_argument("--gib", type=float, default=8, help="size of the checkpoint in GiB (8)")
    return parser


def _steps(text: str) -> tuple[int, ...]:
    found = tuple(map(int, text.split(",")))
    unknown = sorted({*found} - {*gpu_steps.PARTS})
    if unknown:
        raise argparse.ArgumentTypeError(f"no such step: {', '.join(map(str, unknown))}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments, those of the process by default.

    Returns:
        The exit status: 0, 1 if a check failed, 2 if there is no GPU.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.device == HOST and args.out is None:
        parser.error("--device cpu measures nothing worth keeping: say where to write with --out")
    out: Path = args.out or ROOT / "docs" / "performance"
    out.mkdir(parents=True, exist_ok=True)
    if args.redraw:
        redraw(out, ROOT if args.out is None else None)
        return 0
    gpu: dict[str, Any] | str = {} if args.device == HOST else gpu_facts.look()
    if isinstance(gpu, str):
        print(f"benchmarks.gpu needs an NVIDIA GPU: {gpu}", file=sys.stderr)
        return 2
    name = gpu_facts.slug(gpu["name"]) if gpu else "rehearsal"
    seed = secrets.randbelow(2**32) if args.seed is None else args.seed
    setting = Setting(
        args.device, gpu, gpu_facts.cores(), args.steps, args.minutes, args.gib, args.rounds, seed,
        out / f"gpu-{name}",
    )  # fmt: skip
    print(f"{gpu_facts.sentence(gpu)}; seed {seed}", flush=True)
    if args.workdir is not None:
        args.workdir.mkdir(parents=True, exist_ok=True)
    with _tidy_end(), tempfile.TemporaryDirectory(prefix="mfload-bench-", dir=args.workdir) as into:
        if args.wheels is not None:
            _unpack(args.wheels, Path(into) / "site")
        results = Run(setting, Path(into)).all()
    print("\n" + gpu_tables.targets(gpu_tables.judge(results)))
    failed = gpu_trials.failed(results.run["trials"])
    print(f"\nchecks that failed: {', '.join(failed) or 'none'}", flush=True)
    # From what was written, as `--redraw` does it.
    _draw(Results.read(setting.out.with_suffix(".json")), setting.out.with_suffix(".png"))
    return int(bool(failed))


def _unpack(wheels: Path, site: Path) -> None:
    """Puts wheels before what is installed, for this process and those that it starts."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target"]
    subprocess.run([*pip, str(site), *map(str, wheels.glob("*.whl"))], check=True)
    sys.path.insert(0, str(site))
    places = filter(None, [str(site), os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(places)


@contextlib.contextmanager
def _tidy_end() -> Generator[None]:
    """SIGTERM unwinds: whoever ends it from outside is not left with gigabytes of a checkpoint.

    Only as long as it runs: a worker of `multiprocessing.Pool` that inherits a handler in Python
    may wait for ever for a lock when its pool terminates it.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
