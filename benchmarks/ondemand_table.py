"""Table 2 of "LLM in a flash" (Alizadeh et al., 2024) on this machine: ms a token, step by step.

    python -m benchmarks.ondemand_table

At the geometry of OPT-6.7B: width 4096, 16,384 neurons a layer, and four matrices of attention. I/O
is measured at 32 layers in f16 (26 GB of disk). Totals have the products of the layers in them, at
8 layers in f32, since NumPy has no fast product in f16. Weights are random numbers, written on the
spot and deleted. All reads go past the page cache, by O_DIRECT: it stops where it can't.

Activations are made up, after what the paper measured. Of OPT's neurons 3 % fire for a token, and
its predictor names some that do not: its table has 0.9 GB read of 8.6 GB, so 10 % are asked for.
Of these most were asked for by one of the last five tokens: it has 0.2 GB read with a window of
five, so 2.3 % of the neurons are new. The others are drawn evenly from those of the last five.

| row | in memory | read for each token |
|---|---|---|
| naive | one layer | all weights |
| hybrid | half of the weights: attention and a quarter of the others | the other half |
| + predictor | attention, predictors | what is asked for: a row of each projection, 8 KiB in f16 |
| + window | the same, and what the last five tokens asked for | what is new, in such rows |
| + bundle | the same | what is new, in bundles: `mfload.ondemand.NeuronCache` |

From "+ predictor" on, products include those of a predictor of rank 128 for each layer, as the
paper has for most layers. Its numbers are random: what is asked for is what was made up.

The rows take turns. A figure is the median over rounds of the mean over tokens, without those that
fill the window. "I/O" is the time in which the disk is waited for; "memory" what else a cache does.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import arguments, described, markdown
from mfload import dtypes, ondemand, sources
from mfload.formats import safetensors
from mfload.index import Piece, TensorInfo
from mfload.io import buffers
from mfload.io.gather import Gather, ReadColumns, open_gather
from mfload.ondemand.policies import Window
from mfload.ondemand.rows import RowCache
from mfload.options import Options
from mfload.saving import layout

WIDTH, NEURONS = 4096, 16384
WINDOW, ASKED, NEW = 5, 0.10, 0.023
ROOM = 0.33  # Share of the neurons that caches have slots for.
ROWS = ("naive", "hybrid", "+ predictor", "+ window", "+ bundle")
ASKED_FOR = {"naive to all": 20.0, "bundling": 1.5, "delete and insert": 20.0}
_TYPES = {"f16": (np.float16, "F16"), "f32": (np.float32, "F32")}
_RANK = 128  # Of predictors.
_BLOCK = 64 << 20  # Bytes of random numbers that weights are made of.


def write(path: Path, layers: int, kind: str) -> None:
    """A checkpoint whose layers have attention [4, d, d], up [neurons, d] and down [d, neurons]."""
    native, dtype = np.dtype(_TYPES[kind][0]), dtypes.lookup(_TYPES[kind][1])
    rows: list[TensorInfo] = []
    for layer in range(layers):
        shapes = {"attention": (4, WIDTH, WIDTH), "up": (NEURONS, WIDTH), "down": (WIDTH, NEURONS)}
        for name, shape in shapes.items():
            piece = Piece(0, 0, int(np.prod(shape)) * native.itemsize)
            rows.append(TensorInfo(f"layers.{layer}.{name}", dtype, shape, (piece,)))
    made = layout.lay_out(rows)
    random = np.random.default_rng(0)
    block = random.standard_normal(2 * _BLOCK // native.itemsize, np.float32) / 64
    raw = block.astype(native).view(np.uint8).data
    with path.open("wb", buffering=0) as file:
        file.write(made.header)
        left = made.size - len(made.header)
        while left:
            start = int(random.integers(0, len(raw) - _BLOCK)) // 4096 * 4096
            left -= file.write(raw[start : start + min(left, _BLOCK)])


def trace(seed: int, tokens: int) -> list[Any]:
    """The neurons that each token asks for; behind the window, as said above."""
    random, recent = np.random.default_rng(seed), deque[Any](maxlen=WINDOW)
    made: list[Any] = []
    for number in range(tokens):
        before = np.unique(np.concatenate(recent)) if recent else np.empty(0, np.int64)
        fresh = np.setdiff1d(np.arange(NEURONS), before, assume_unique=True)
        new = round((NEW if number else ASKED) * NEURONS)
        old = random.choice(before, round(ASKED * NEURONS) - new, False) if number else before
        made.append(np.sort(np.append(old, random.choice(fresh, new, False))))
        recent.append(made[-1])
    return made


class Disk:
    """A checkpoint that is read past the page cache; its clock runs while something is read."""

    def __init__(self, path: Path, kind: str) -> None:
        self.dtype, self.seconds, self.nbytes = np.dtype(_TYPES[kind][0]), 0.0, 0
        self.path, source = path, sources.find(path)
        self.gather = direct(open_gather([source], files="direct"))
        found, _ = safetensors.read(source, 0)
        self.at = {info.name: info.pieces[0] for info in found}

    def read(self, offset: Any, address: Any, nbytes: Any) -> None:
        """Reads ranges to addresses, all at once."""
        start = time.perf_counter()
        self.gather.read(ReadColumns.of(0, offset, address, nbytes))
        self.seconds += time.perf_counter() - start
        self.nbytes += int(np.broadcast_to(nbytes, np.shape(address)).sum())


def direct(gather: Gather) -> Gather:
    """The same; ends the process if it reads through the page cache."""
    if not gather.direct:
        sys.exit(f"the disk can't be read past the page cache: {gather.why}; see --workdir")
    return gather


Product = Callable[[Any, Any, Any], Any] | None
"""What is computed of attention, up and down of a layer; None if nothing is."""


class Token:
    """What one token took: seconds of I/O, of the memory's upkeep, and of products; and bytes."""

    def __init__(self) -> None:
        self.io = self.memory = self.compute = 0.0
        self.nbytes = 0


class Subject:
    """A row of the table: `token` does one token; `held` are the bytes that it keeps in memory."""

    predicts = True

    def __init__(self, path: Path, layers: int, kind: str, compute: bool, traces: Any) -> None:
        self.disk, self.layers, self.traces = Disk(path, kind), layers, traces
        self.item, self.compute = self.disk.dtype.itemsize, compute
        self.attention = 4 * WIDTH * WIDTH * self.item
        self.row = WIDTH * self.item
        self.x = np.ones(WIDTH, self.disk.dtype)
        self.kept = [self.load(f"layers.{n}.attention") for n in range(layers if compute else 0)]
        self.held = layers * self.attention
        self.predictors: list[ondemand.Predictor] = []
        random = np.random.default_rng(0)
        if self.predicts:
            self.held += layers * 4 * (WIDTH * _RANK + _RANK * NEURONS + NEURONS)
            for _ in range(layers if compute else 0):
                first = random.random((WIDTH, _RANK), np.float32)
                second = random.random((_RANK, NEURONS), np.float32)
                bias = np.zeros(NEURONS, np.float32)
                self.predictors.append(ondemand.Predictor(first, second, bias, 1e9, 1.0, 1.0))

    def load(self, name: str, nbytes: int | None = None) -> Any:
        """A tensor, or its first bytes, as rows."""
        piece = self.disk.at[name]
        memory = buffers.allocate(nbytes or piece.nbytes)
        self.disk.read([piece.offset], [memory.ctypes.data], memory.nbytes)
        return memory.view(self.disk.dtype).reshape(-1, WIDTH)

    def product(self, spent: Token, attention: Any, *parts: tuple[Any, Any]) -> None:
        """Multiplies as a layer does; parts are pairs of up and down."""
        if not self.compute:
            return
        start = time.perf_counter()
        made = [attention @ self.x]
        made += [np.maximum(self.x @ up.T, 0) @ down for up, down in parts]
        spent.compute += time.perf_counter() - start

    def layer(self, layer: int, number: int, spent: Token) -> None:
        """Does a layer of the token of that number."""
        raise NotImplementedError

    def token(self, number: int) -> Token:
        """Does a token; returns what it took."""
        spent = Token()
        for layer in range(self.layers):
            seconds, nbytes = self.disk.seconds, self.disk.nbytes
            if self.predictors:
                start = time.perf_counter()
                self.predictors[layer].predict(self.x)
                spent.compute += time.perf_counter() - start
            self.layer(layer, number, spent)
            spent.io += self.disk.seconds - seconds
            spent.nbytes += self.disk.nbytes - nbytes
        return spent

    def close(self) -> None:
        """Closes the file."""
        self.disk.gather.close()


class Streamed(Subject):
    """Reads a share of each layer's weights into one buffer: all, or three quarters of the FFN."""

    predicts = False

    def __init__(self, *given: Any, whole: bool) -> None:
        super().__init__(*given)
        self.whole, ffn = whole, 2 * NEURONS * self.row
        self.buffer = buffers.allocate(self.attention + ffn)
        buffers.populate(self.buffer)
        self.quarters: list[Any] = []
        self.held = self.buffer.nbytes
        if whole:
            self.kept = []
        else:
            self.held = self.layers * (self.attention + ffn // 4) + ffn * 3 // 4
            names = [f"layers.{n}.{part}" for n in range(self.layers) for part in ("up", "down")]
            if self.compute:
                self.quarters = [self.load(name, ffn // 8) for name in names]

    def layer(self, layer: int, number: int, spent: Token) -> None:  # noqa: D102
        names = ("attention", "up", "down")[0 if self.whole else 1 :]
        pieces = [self.disk.at[f"layers.{layer}.{name}"] for name in names]
        skipped = [0 if self.whole else piece.nbytes // 4 for piece in pieces]
        sizes = [piece.nbytes - skip for piece, skip in zip(pieces, skipped, strict=True)]
        places = np.append(0, np.cumsum(sizes))
        offsets = [piece.offset + skip for piece, skip in zip(pieces, skipped, strict=True)]
        self.disk.read(offsets, self.buffer.ctypes.data + places[:-1], np.array(sizes))
        flat = [
            self.buffer[start : start + size].view(self.disk.dtype).reshape(-1, WIDTH)
            for start, size in zip(places.tolist(), sizes, strict=False)
        ]
        attention = flat.pop(0) if self.whole else self.kept[layer] if self.compute else None
        parts = [(flat[0], flat[1])]
        if self.quarters:
            parts.append((self.quarters[2 * layer], self.quarters[2 * layer + 1]))
        self.product(spent, attention, *parts)


class Asked(Subject):
    """Reads a row of each projection of the neurons that are asked for, each time anew."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.buffer = buffers.allocate(2 * round(ASKED * NEURONS) * self.row)
        buffers.populate(self.buffer)
        self.held += self.buffer.nbytes

    def offsets(self, layer: int, keys: Any) -> Any:
        """Of the rows of up, then those of down, which is read as if it lay neuron by neuron."""
        up, down = (self.disk.at[f"layers.{layer}.{name}"].offset for name in ("up", "down"))
        return np.append(up + keys * self.row, down + keys * self.row)

    def layer(self, layer: int, number: int, spent: Token) -> None:  # noqa: D102
        keys = self.traces[layer][number]
        addresses = self.buffer.ctypes.data + np.arange(2 * len(keys)) * self.row
        self.disk.read(self.offsets(layer, keys), addresses, self.row)
        rows = self.buffer.view(self.disk.dtype).reshape(2, -1, WIDTH)
        self.product(spent, self.kept[layer] if self.compute else None, (rows[0], rows[1]))


class Windowed(Asked):
    """Keeps what the last tokens asked for in a cache of rows, and reads what is new."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.held -= self.buffer.nbytes
        self.buffer = buffers.allocate(0)
        count = round(ROOM * NEURONS)
        self.caches: list[RowCache] = []
        for layer in range(self.layers):
            arenas = [buffers.allocate(count * self.row).reshape(count, -1) for _ in range(2)]
            for each in arenas:
                buffers.populate(each.reshape(-1))
                self.held += each.nbytes
            policy = Window(NEURONS, count, WINDOW)
            self.caches.append(RowCache(self.fill(layer), NEURONS, arenas, policy))

    def fill(self, layer: int) -> Any:
        """What reads neurons of a layer into slots."""

        def fill(keys: Any, addresses: Any) -> tuple[int, int]:
            self.disk.read(self.offsets(layer, keys), addresses.T.reshape(-1), self.row)
            return 2 * keys.size, 2 * keys.size * self.row

        return fill

    def layer(self, layer: int, number: int, spent: Token) -> None:  # noqa: D102
        seconds, start = self.disk.seconds, time.perf_counter()
        lease = self.caches[layer].use(self.traces[layer][number])
        used = len(lease.keys)
        rows = [lease.whole(n)[:used].view(self.disk.dtype) for n in range(2)]
        spent.memory += time.perf_counter() - start - (self.disk.seconds - seconds)
        self.product(spent, self.kept[layer] if self.compute else None, (rows[0], rows[1]))


class Bundled(Subject):
    """The cache of mfload over bundles."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        nbytes = round(ROOM * NEURONS) * 2 * self.row * self.layers + (64 << 10) * self.layers
        self.cache = ondemand.NeuronCache(
            self.disk.path,
            nbytes,
            WINDOW,
            resident="nothing",
            options=Options(engine="direct"),
        )
        gather = direct(self.cache._store.gather)  # pyright: ignore[reportPrivateUsage]
        real = gather.read

        def read(reads: ReadColumns) -> None:
            start = time.perf_counter()
            real(reads)
            self.disk.seconds += time.perf_counter() - start
            self.disk.nbytes += int(reads.nbytes.sum())

        gather.read = read  # type: ignore[method-assign]
        for _, cache in self.cache._layers.values():  # pyright: ignore[reportPrivateUsage]
            for arena in cache._arenas:  # pyright: ignore[reportPrivateUsage]
                buffers.populate(arena.reshape(-1))  # As those of the row before.
        self.held += self.cache.report().peak_bytes

    def layer(self, layer: int, number: int, spent: Token) -> None:  # noqa: D102
        seconds, start = self.disk.seconds, time.perf_counter()
        with self.cache.use(layer, self.traces[layer][number]) as part:
            up, down = part.up, part.down
            spent.memory += time.perf_counter() - start - (self.disk.seconds - seconds)
            self.product(spent, self.kept[layer] if self.compute else None, (up, down))

    def close(self) -> None:  # noqa: D102
        self.cache.close()
        super().close()


def subject(name: str, paths: Sequence[Path], *given: Any) -> Subject:
    """What a row of the table is about."""
    plain, bundled = paths
    if name in ROWS[:2]:
        return Streamed(plain, *given, whole=name == "naive")
    kinds: dict[str, Any] = {"+ predictor": Asked, "+ window": Windowed, "+ bundle": Bundled}
    return kinds[name](bundled if name == "+ bundle" else plain, *given)


def measure(
    paths: Sequence[Path], layers: int, kind: str, compute: bool, rounds: int, tokens: int
) -> dict[str, Any]:
    """By row: seconds and bytes a token, of each round."""
    found: dict[str, Any] = {name: [] for name in ROWS}
    for number in range(rounds):
        traces = [trace(1000 * number + layer, WINDOW + tokens) for layer in range(layers)]
        for name in ROWS:
            each = subject(name, paths, layers, kind, compute, traces)
            few = name in ROWS[:2]
            first, last = (0, max(1, tokens // 10)) if few else (WINDOW, WINDOW + tokens)
            spent = [each.token(n) for n in range(last)][first:]
            each.close()
            sums = {f: sum(getattr(one, f) for one in spent) / len(spent) for f in vars(spent[0])}
            sums["held"] = each.held
            engine = each.disk.gather.name
            found[name].append(sums | {"engine": engine, "tokens": len(spent)})
            io, nbytes = sums["io"] * 1e3, sums["nbytes"] / 1e6
            said = f"{name:12} {io:8.1f} ms of I/O, {nbytes:8.0f} MB"
            print(f"  {kind}, round {number + 1}: {said}", flush=True)
            del each
    return found


def upkeep(rounds: int, tokens: int, kind: str) -> dict[str, list[float]]:
    """Seconds a token and layer of delete and insert, and of matrices made anew; no I/O in them."""
    row = WIDTH * np.dtype(_TYPES[kind][0]).itemsize
    found: dict[str, list[float]] = {"delete and insert": [], "reallocation": []}
    count = round(ROOM * NEURONS)
    for number in range(rounds):
        asked = trace(number, WINDOW + tokens)
        arena = buffers.allocate(count * 2 * row).reshape(count, -1)
        buffers.populate(arena.reshape(-1))
        cache = RowCache(lambda *_: (0, 0), NEURONS, [arena], Window(NEURONS, count, WINDOW))
        times = [*_cached(asked, cache)]
        found["delete and insert"].append(sum(times[WINDOW:]) / tokens)
        times = [*_reallocated(asked, row)]
        found["reallocation"].append(sum(times[WINDOW:]) / tokens)
    return found


def _cached(asked: Sequence[Any], cache: RowCache) -> Iterator[float]:
    for keys in asked:
        start = time.perf_counter()
        cache.use(keys)
        yield time.perf_counter() - start


def _reallocated(asked: Sequence[Any], row: int) -> Iterator[float]:
    """The same neurons in matrices that are made anew for each token, of the rows that stay."""
    last = np.full(NEURONS, -WINDOW)
    keys, held = np.empty(0, np.int64), [np.empty((0, row), np.uint8) for _ in range(2)]
    for number, each in enumerate(asked):
        start = time.perf_counter()
        last[each] = number
        stay = last[keys] > number - WINDOW
        new = np.setdiff1d(each, keys[stay], assume_unique=True)
        keys = np.append(keys[stay], new)
        for n, matrix in enumerate(held):
            made = np.empty((len(keys), row), np.uint8)
            np.compress(stay, matrix, 0, out=made[: len(keys) - len(new)])
            held[n] = made
        yield time.perf_counter() - start


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """What is asked of the table: medians over rounds."""
    made: dict[str, float] = {}
    if "io" in found:
        io = {name: median(each["io"] for each in runs) for name, runs in found["io"].items()}
        made["naive to all"] = io["naive"] / io["+ bundle"]
        made["bundling"] = io["+ window"] / io["+ bundle"]
    if "upkeep" in found:
        each = {name: median(times) for name, times in found["upkeep"].items()}
        made["delete and insert"] = each["reallocation"] / each["delete and insert"]
    return made


def tables(found: dict[str, Any]) -> str:
    """The figures as Markdown."""
    parts: list[str] = []
    for part, head in (("io", "I/O alone"), ("total", "with products")):
        if part not in found:
            continue
        taken = ("io", "memory", "compute")[: 3 if part == "total" else 2]
        rows: list[list[str]] = []
        for name, runs in found[part].items():
            mid = {
                field: median(run[field] for run in runs) for field in ("held", "nbytes", *taken)
            }
            row = [name, f"{mid['held'] / 2**30:.2f}", f"{mid['nbytes'] / 1e6:.0f}"]
            row += [f"{mid['nbytes'] / mid['io'] / 1e9:.2f}"]
            row += [f"{1e3 * mid[field]:.1f}" for field in taken]
            rows.append([*row, f"{1e3 * median(sum(run[f] for f in taken) for run in runs):.1f}"])
        layers, kind = found["given"][part]
        columns = [f"{head}, {layers} layers in {kind}", "in memory, GiB", "read, MB", "GB/s"]
        columns += [f"{field}, ms" for field in ("I/O", "memory", "products")[: len(taken)]]
        parts.append(markdown.table([*columns, "all, ms"], rows))
    if "upkeep" in found:
        times = [[name, f"{1e3 * median(each):.2f}"] for name, each in found["upkeep"].items()]
        parts.append(markdown.table(["rows of a layer for a token", "ms"], times))
    rows = [[name, f"{value:.2f}", f"{ASKED_FOR[name]:g}"] for name, value in ratios(found).items()]
    parts.append(markdown.table(["ratio", "found", "asked for"], rows))
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, and writes `ondemand_table.json`."""
    made = arguments.parser("ondemand_table", __doc__)
    made.add_argument("--layers", type=int, default=32, help="for I/O alone, in f16 (32)")
    made.add_argument("--product-layers", type=int, default=8, help="with products, in f32 (8)")
    made.add_argument("--tokens", type=int, default=20, help="a round; naive and hybrid a tenth")
    given = arguments.parsed(made, ("io", "total", "upkeep"), argv)
    target = given.out / "ondemand_table.json"
    if given.redraw:
        print(tables(json.loads(target.read_text())))
        return
    found: dict[str, Any] = {"given": {}, "window": WINDOW, "asked": ASKED, "new": NEW}
    with tempfile.TemporaryDirectory(dir=given.workdir) as folder:
        found["machine"] = described.describe(folder)
        cases = {"io": (given.layers, "f16"), "total": (given.product_layers, "f32")}
        for part, (layers, kind) in cases.items():
            if part not in given.cases:
                continue
            paths = [Path(folder) / "plain.safetensors", Path(folder) / "bundled.safetensors"]
            write(paths[0], layers, kind)
            rules: dict[str, Any] = {n: rf"layers\.(\d+)\.{n}" for n in ("up", "down")}
            print(ondemand.bundle(*paths, **rules), flush=True)
            found["given"][part] = layers, kind
            run = (paths, layers, kind, part == "total", given.rounds, given.tokens)
            found[part] = measure(*run)
            for each in paths:
                each.unlink()
    if "upkeep" in given.cases:
        found["upkeep"] = upkeep(given.rounds, given.tokens, "f16")
    found["ratios"] = ratios(found)
    target.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{described.sentence(found['machine'])}\n\n{tables(found)}")


if __name__ == "__main__":
    main()
