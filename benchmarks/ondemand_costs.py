"""What a model on a disk costs a token, and which budget buys what: said before it runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.ondemand_curve import Curve
from benchmarks.ondemand_rehearsal import Optimum, Rehearsal
from mfload import errors
from mfload.formats import checkpoint
from mfload.ondemand import bundles, experts, layers, neurons
from mfload.options import byte_count
from mfload.report import Printable, human

if TYPE_CHECKING:
    from mfload.ondemand.policies import Lru, Policy
    from mfload.options import Options
    from mfload.sources import PathOrBytes

_SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
_UNBOUND = 1 << 62
_PAGES = 64 << 10  # What keys of several sizes may need beyond their slots.
_WARM_UP, _PASSES = 2, 8  # Passes through layers; which of them stay changes from pass to pass.

Run = Callable[[int, Any], "BudgetCost"]
"""Rehearses with a budget and a policy."""


class BudgetCost(NamedTuple):
    """What a budget buys.

    Attributes:
        budget_bytes: The budget.
        memory_bytes: What of it is used: slots, and tensors that stay resident.
        hit_rate: Share of the experts or neurons asked for that are there, 0 to 1; of layers, the
            share of layers that stay in memory.
        misses: Experts, neurons or layers that are read a token.
        reads: Reads a token that are handed to the engine, as `OndemandReport.reads` counts them.
        read_bytes: Bytes of them that are wanted, a token.
        io_ms: Milliseconds a token that reading takes, if nothing else goes on meanwhile; None if
            there is no curve.
        least_bytes: Bytes a token that must be read with so many slots whatever the policy:
            Belady's optimum. None for layers, whose policy is the optimum.
    """

    budget_bytes: int
    memory_bytes: int
    hit_rate: float
    misses: float
    reads: float
    read_bytes: float
    io_ms: float | None
    least_bytes: float | None


@dataclass(frozen=True)
class OndemandPlan(Printable):
    """What `plan` found; it prints a table over budgets.

    Attributes:
        kind: "experts", "neurons" or "layers".
        tokens: How many the trace has; for layers, how many passes through all of them count.
        budget: What was asked for.
        budgets: The same for more budgets, up to one that holds everything, and for the one that
            was asked for.
        policy: Which experts or neurons leave.
        engine: What would read now.
        why: Why that one.
        curve: The engine of the curve; "" if there is no curve.
        notes: What else there is to know.
    """

    kind: str
    tokens: int
    budget: BudgetCost
    budgets: tuple[BudgetCost, ...]
    policy: str
    engine: str
    why: str
    curve: str
    notes: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, ...]]:
        """What it prints: a row a budget, figures a token."""
        head = ("budget", "memory", "hit rate", "read", "reads", "I/O ms", "least read")
        rows: list[tuple[str, ...]] = [head]
        for each in self.budgets:
            mark = " *" if each.budget_bytes == self.budget.budget_bytes else ""
            sizes = human(each.budget_bytes) + mark, human(each.memory_bytes)
            took = "–" if each.io_ms is None else _short(each.io_ms)
            least = "–" if each.least_bytes is None else human(each.least_bytes)
            read = human(each.read_bytes), _short(each.reads)
            rows.append((*sizes, f"{each.hit_rate:.1%}", *read, took, least))
        return rows

    def __str__(self) -> str:
        said = (f"{self.kind} from {self.engine} ({self.why}); figures a token", *self.notes)
        return "\n".join([Printable.__str__(self), *said])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws memory against latency, or against bytes a token if there is no curve.

        Args:
            path: Where to; its suffix says the format. It takes matplotlib, which the
                extra `plot` brings.

        Raises:
            FrameworkMissingError: matplotlib is not installed.
            TargetError: The file can't be written.
            UsageError: matplotlib does not know the suffix.
        """
        try:
            from matplotlib.figure import Figure

            from mfload import timeline_figure
        except ImportError as error:
            raise errors.missing("the plot needs matplotlib", "plot") from error
        timed = self.budget.io_ms is not None
        figure = Figure(figsize=(8, 4.4), layout="constrained")
        axes = figure.subplots()

        def height(cost: BudgetCost) -> float:
            return (cost.io_ms or 0.0) if timed else cost.read_bytes / 1e6

        def line(costs: Sequence[BudgetCost], heights: Sequence[float], **how: Any) -> None:
            axes.plot([cost.memory_bytes / 2**30 for cost in costs], heights, marker="o", **how)

        line(self.budgets, [*map(height, self.budgets)], color="#2a6fb0", label=self.policy)
        line([self.budget], [height(self.budget)], color="#d55e00", ls="", label="the budget")
        bound = [cost for cost in self.budgets if cost.least_bytes is not None]
        if bound and not timed:
            least = [(cost.least_bytes or 0.0) / 1e6 for cost in bound]
            line(bound, least, color="#4a4f57", ls="--", label="Belady's optimum")
        axes.set(xlabel="GiB of memory", ylabel="ms of I/O a token" if timed else "MB a token")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(color="#e4e6ea")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        axes.set_title(f"{self.kind}: what a budget buys", loc="left", fontsize=10)
        timeline_figure.write(figure, path, 150)


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def plan(
    path: PathOrBytes | Sequence[PathOrBytes],
    pattern: str | re.Pattern[str] | None = None,
    *,
    budget: int | str,
    trace: Any = None,
    curve: Curve | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    policy: str | Callable[[int, int], Lru] = "lru",
    window: int | None = 5,
    ahead: int = 1,
    resident: str | re.Pattern[str] | None = None,
    budgets: Sequence[int | str] | None = None,
    options: Options | None = None,
) -> OndemandPlan:
    """Says what a model that stays on the disk will cost, without reading it.

        trace = [[[3, 17], [5, 17]], [[3, 4], [5, 6]]]  # tokens, layers, experts
        found = plan("model/", budget="2GiB", trace=trace, curve="curve.json")
        print(found.budget.read_bytes, found.budget.io_ms)  # a token
        print(found)  # over budgets

    With a trace, `ExpertCache` is rehearsed on it, or `NeuronCache` if the file has bundles;
    without one, `LayerStream`, of which each token takes all layers. The caches themselves run,
    with no memory, and count instead of reading. So misses, reads and bytes are those of a run on
    the same trace. Layers are read ahead here while the one before computes; a thread that is early
    or late may read one more a pass, or one less.

    Milliseconds follow from the curve of the disk. Reads that are under way while something else
    computes take no time away; those of files in the page cache take less.

    Args:
        path: As for the caches.
        pattern: As for `ExpertCache` and `LayerStream`.
        budget: Bytes, or a text such as "2GiB".
        trace: For each token, the experts or neurons of each layer: a sequence in order of the
            layers, or a mapping from their numbers; int64[tokens, layers, k] will do. A cache
            begins empty, so a short trace says more about its beginning than about later tokens.
        curve: What random reads take on this machine: the JSON of `mfload bench --random`, or the
            path of it; of the engine that would read, if it has that. Default: measured now, for 2
            seconds or more, on the files.
        policy: As for `ExpertCache` and `NeuronCache`.
        window: As for `NeuronCache`.
        ahead: As for `LayerStream`.
        resident: As for `LayerStream` and `NeuronCache`.
        budgets: More budgets for the table. Default: what stays resident, and shares of the rest.
        options: As for the caches.

    Raises:
        MemoryLimitError: The budget is too small.
        UsageError: The trace or the curve is malformed, or as the caches raise it.
        TensorNotFoundError: No name matches the pattern.
        SourceError, FormatError: The checkpoint or the curve can't be read.
    """
    asked = byte_count("budget", budget, 1)
    own = [byte_count("budgets", each, 1) for each in budgets or ()]
    with closing(Rehearsal()) as rehearsal:
        requests = [None] * _PASSES if trace is None else _requests(trace)
        how: dict[str, Any] = {"options": options, "wait": 0.0}
        if trace is None:
            kind, policy = "layers", "cyclic"
            how |= {"pattern": pattern or layers.PATTERN, "ahead": ahead, "resident": resident}
            run = _passes(rehearsal, path, how)
        elif bundles.KEY in (checkpoint.read(path)[0].metadata or ()):
            kind, policy = "neurons", policy if window is None else f"window({window})"
            how |= {"resident": resident, "window": None}
            run = _uses(rehearsal, neurons.NeuronCache, path, how, requests, policy)
        else:
            kind = "experts"
            how |= {"pattern": pattern or experts.PATTERN}
            run = _uses(rehearsal, experts.ExpertCache, path, how, requests, policy)
        most = run(_UNBOUND, None).memory_bytes
        fixed = rehearsal.resident
        store = rehearsal.store
        assert store is not None
        notes: list[str] = []
        if curve is None:
            files = [source.file for source in store.opened.sources if source.file]
            given, why = _measured(files)
            notes += [why] if why else []
        else:
            given = Curve.of(curve, store.opened.name)
        if given is not None and given.engine != store.opened.name:
            notes.append(f"I/O ms are those of {given.engine}")
        if not store.opened.direct:
            notes.append("reads go through the page cache now; I/O ms are those of the disk")
        shares = [fixed + int((most - fixed) * share) + _PAGES for share in _SHARES]
        wanted = own or [each for each in shares if abs(each - asked) > (most - fixed) / 50]
        costs: list[BudgetCost] = []
        for each in sorted({asked, *wanted}):
            try:
                costs.append(run(each, given))
            except errors.MemoryLimitError:
                if each == asked or own:
                    raise
        name = policy if isinstance(policy, str) else getattr(policy, "__name__", "a function")
        return OndemandPlan(
            kind=kind,
            tokens=len(requests),
            budget=next(each for each in costs if each.budget_bytes == asked),
            budgets=tuple(costs),
            policy=name,
            engine=store.opened.name,
            why=store.gather.why,
            curve=given.engine if given else "",
            notes=tuple(notes),
        )


def _requests(trace: Any) -> list[Any]:
    """By token: the experts of each layer, a mapping from numbers of layers, or in their order."""
    try:
        made = [token if isinstance(token, Mapping) else [*token] for token in trace]
    except TypeError:
        made = []
    if not made:
        raise errors.UsageError(
            "the trace has no tokens",
            expected="for each token, the experts of each layer: [[[3, 17], [5, 17]], …]",
            found=errors.shown(repr(trace)),
        )
    return made


def _uses(
    rehearsal: Rehearsal,
    kind: Any,
    path: Any,
    how: dict[str, Any],
    requests: list[Any],
    policy: Policy,
) -> Run:
    optimum = Optimum()
    rehearsed = rehearsal.of(kind)

    def used(budget: int, policy: Policy) -> Any:
        with rehearsed(path, budget=budget, policy=policy, **how) as cache:
            rehearsal.start()
            order = list(cache.experts if kind is experts.ExpertCache else cache.neurons)
            for token in requests:
                if len(token) > len(order):
                    raise errors.UsageError(
                        "a token of the trace has more layers than the model",
                        expected=len(order),
                        found=len(token),
                    )
                mapped = isinstance(token, Mapping)
                for layer, ids in token.items() if mapped else zip(order, token, strict=False):
                    cache.use(layer, ids).close()
            return cache.report()

    used(_UNBOUND, optimum.note)

    def run(budget: int, curve: Curve | None) -> BudgetCost:
        made = used(budget, policy)
        cost = _cost(made, rehearsal.batches, len(requests), curve)
        least = used(budget, optimum.policy()).read_bytes / len(requests)
        return cost._replace(budget_bytes=budget, least_bytes=least)

    return run


def _passes(rehearsal: Rehearsal, path: Any, how: dict[str, Any]) -> Run:
    kind = rehearsal.of(layers.LayerStream)

    def walk(stream: layers.LayerStream, passes: int) -> None:
        for _ in range(passes):
            for _, _tensors in stream:  # They live until the next layer is there.
                rehearsal.compute()

    def run(budget: int, curve: Curve | None) -> BudgetCost:
        with kind(path, budget=budget, **how) as stream:
            rehearsal.start()
            walk(stream, _WARM_UP)
            before, begun = stream.report(), len(rehearsal.batches)
            walk(stream, _PASSES)
            made = stream.report()
        for name in ("misses", "prefetched", "reads", "read_bytes"):
            setattr(made, name, getattr(made, name) - getattr(before, name))
        made.misses += made.prefetched
        made.hits = _PASSES * len(stream.layers) - made.misses
        cost = _cost(made, rehearsal.batches[begun:], _PASSES, curve)
        return cost._replace(budget_bytes=budget)

    return run


def _cost(made: Any, batches: Any, tokens: int, curve: Curve | None) -> BudgetCost:
    took = None
    if curve is not None:
        took = float(curve.seconds(batches[:, 0], batches[:, 1]).sum()) * 1e3 / tokens
    return BudgetCost(
        made.budget_bytes,
        made.peak_bytes,
        made.hit_rate,
        made.misses / tokens,
        made.reads / tokens,
        made.read_bytes / tokens,
        took,
        None,
    )


def _measured(files: Sequence[str]) -> tuple[Curve | None, str]:
    """The curve of the disk of files, or why there is none."""
    from mfload.bench import machine, random_reads

    kinds = sorted({*map(machine.file_system, files)} & machine.MEMORY_FILE_SYSTEMS)
    if kinds or not files:
        why = f"{kinds[0]} keeps its files in memory" if kinds else "they are no local files"
        return None, f"no milliseconds: {why}"
    made = random_reads.measure(files)
    if not made["points"]:
        return None, f"no milliseconds: {made['why']}"
    return Curve(made["points"]), ""
