"""What a measuring process loads, and onto which device.

A task is called `device/way`: `cuda:0/peak`, `cuda:0/safetensors.torch`, and
`cuda:0/mfload:torch:framework:slot=4,depth=2` for mfload with a framework, an allocator, and what
is varied. Afterwards, off the clock, the sum over the pages of what lies on the device must be the
checkpoint's, in the first round.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from benchmarks import gpu_ceilings, gpu_memory, gpu_seams
from benchmarks.calls import as_options
from benchmarks.gpu_memory import HOST, MIB
from benchmarks.gpu_peers import PEERS
from benchmarks.tasks import Found, Job, Task
from mfload.bench.loaders import Span
from mfload.peer_options import PeerOptions
from mfload.report import Report, human

_READERS = 64
"""More than mfload takes by itself."""


class Way(NamedTuple):
    """A way for mfload to load.

    Attributes:
        framework: Of the arrays.
        allocator: What is asked for.
        slot: MiB of a slot of the ring, the default where None.
        depth: Slots a reader, likewise.
        threads: Readers, likewise.
        kept: Bytes of slots that the process keeps for its next load, likewise.
        cache: What becomes of the page cache, likewise.
        served: From a seed that holds the checkpoint on the device: "mapped" or "copied".
        again: 1 where the process has loaded the same before, off the clock; 0 where it has loaded
            nothing, not even a tiny checkpoint.
    """

    framework: str
    allocator: str = "auto"
    slot: int | None = None
    depth: int | None = None
    threads: int | None = None
    kept: int | None = None
    cache: str | None = None
    served: str | None = None
    again: int | None = None

    @property
    def name(self) -> str:
        """Its name in the results."""
        varied = self._asdict()
        parts = ["mfload", varied.pop("framework"), varied.pop("allocator")]
        given = ",".join(f"{key}={value}" for key, value in varied.items() if value is not None)
        return ":".join([*parts, given] if given else parts)

    @property
    def label(self) -> str:
        """What it is called in tables and plots."""
        parts = [f"mfload → {self.framework}"]
        parts += [] if self.allocator == "auto" else [f"allocator {self.allocator}"]
        parts += [] if self.slot is None else [f"slots of {self.slot} MiB"]
        parts += [] if self.depth is None else [f"{_many(self.depth, 'slot')} a reader"]
        parts += [] if self.threads is None else [_many(self.threads, "reader")]
        parts += ["slots not kept"] if self.kept == 0 else []
        parts += [] if self.cache is None else [f"page cache {self.cache}"]
        parts += [] if self.served is None else [f"{self.served} from a seed on the device"]
        whens = {0: ["first load of the process"], 1: ["next load of the process"], None: []}
        parts += whens[self.again]
        return ", ".join(parts)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def way(name: str) -> Way:
    """The way of a name."""
    _, framework, allocator, *rest = name.split(":")
    pairs = [pair.split("=") for part in rest for pair in part.split(",")]
    words = ("cache", "served")
    varied: dict[str, Any] = {key: value if key in words else int(value) for key, value in pairs}
    return Way(framework, allocator, **varied)


def is_ours(name: str) -> bool:
    """Whether a name is that of a way of mfload's."""
    return name.startswith("mfload:")


def label(name: str) -> str:
    """What a name is called."""
    if gpu_ceilings.is_ceiling(name):
        return gpu_ceilings.label(name)
    if gpu_seams.is_seam(name):
        return gpu_seams.label(name)
    return way(name).label if is_ours(name) else PEERS[name].label


def framework(name: str) -> str:
    """The framework that a name's process imports, "" for none."""
    if gpu_ceilings.is_ceiling(name):
        return ""
    if gpu_seams.is_seam(name):
        return "torch"
    return way(name).framework if is_ours(name) else PEERS[name].framework


def why_not(name: str, device: str) -> str | None:
    """Why a name can't be measured on a device, None where it can."""
    if gpu_ceilings.is_ceiling(name):
        return None
    if gpu_seams.is_seam(name):
        return gpu_seams.why_not(name)
    if not is_ours(name):
        return PEERS[name].why_not(device)
    wanted = way(name).framework
    if find_spec(wanted) is None:
        return f"not installed: {wanted}"
    return "needs a GPU" if device == HOST and wanted == "cupy" else None


_defaults: dict[str, int] = {}


def _vary(ours: Way) -> dict[str, int]:
    """Sets what the ring is made of, for this load; gives what to tell mfload beside it."""
    slot = _set("mfload.cuda.staging", "SLOT", ours.slot and ours.slot * MIB)
    depth = _set("mfload.cuda.staging", "DEPTH", ours.depth)
    _set("mfload.cuda.staging", "KEPT", ours.kept)
    if ours.slot is ours.depth is ours.threads is None:
        _set("mfload.planning.memory", "_LEAST_SLOT", None)
        return {}
    # Or slots would be smaller for a small checkpoint, and smaller still where they are many.
    _set("mfload.planning.memory", "_LEAST_SLOT", slot)
    return {"max_host_overhead": (ours.threads or _READERS) * depth * (slot + MIB)}


def _set(module: str, name: str, value: int | None) -> int:
    """Sets a constant of mfload's, to what it was at first where there is no value."""
    found = import_module(module)
    if value is None and not hasattr(found, name):  # KEPT: older ones keep nothing.
        return 0
    if not hasattr(found, name):
        raise RuntimeError(f"{module} has no {name}")
    default = _defaults.setdefault(f"{module}.{name}", int(getattr(found, name)))
    setattr(found, name, default if value is None else value)
    return int(getattr(found, name))


def _given(ours: Way, device: str) -> dict[str, Any]:
    """What mfload is told."""
    given: dict[str, Any] = {"framework": ours.framework, "allocator": ours.allocator}
    on = {} if ours.framework == "numpy" else {"device": device}
    kept: dict[str, Any] = {} if ours.cache is None else {"page_cache": ours.cache}
    if ours.served is not None and device != HOST:
        copied: dict[str, Any] = {"copy": True} if ours.served == "copied" else {}
        kept["peer"] = PeerOptions(transports=("cuda_ipc",), **copied)
    return {**given, **on, **kept, "threads": ours.threads, **_vary(ours)}


_Made = tuple[dict[str, Any], Any, Report | None]
"""Arrays, what keeps them valid or what they are loaded from, and how."""
_loaded: set[str] = set()
"""By which names this process has loaded."""


class _Loading:
    """Loads by one way, and checks what lies on the device."""

    def __init__(self, name: str, device: str) -> None:
        self._name, self._device = name, device
        self._ours = way(name) if is_ours(name) else None
        self._framework = framework(name)
        self._given = {} if self._ours is None else _given(self._ours, device)
        self._summed = True
        self._begun = self._ours is None or self._ours.again != 0

    def prepare(self, job: Job) -> None:
        """Loads once, off the clock, where it is the next load that counts."""
        self._summed = job["page_sum"] is not None
        again = self._ours is not None and self._ours.again
        if again and self._ours and self._ours._replace(again=None).name not in _loaded:
            self.run(job)
        _loaded.add(self._name)

    def run(self, job: Job) -> _Made:
        """Load, until the arrays can be used."""
        if not self._begun:  # In place of the tiny checkpoint.
            self._begun = True
            gpu_memory.begin(self._framework, self._device)
            return {}, None, None
        if self._ours is None:
            arrays, keep = PEERS[self._name].load(job["files"], self._device)
            report = None
        else:
            import mfload

            report, keep = Report(), job["path"]
            arrays = mfload.load(keep, report=report, **as_options(self._given))
        gpu_memory.synchronize(self._framework, arrays, self._device)
        return arrays, keep, report

    def find(self, made: _Made) -> Found:
        """What was loaded, in blocks of which size, and what each stage took."""
        arrays, path, report = made
        if report is not None:
            import mfload

            if self._ours is not None and self._ours.served is None:
                blocks = mfload.plan(path, **as_options(self._given)).plan.blocks
                longest = max((block.nbytes for block in blocks), default=0)
                report.notes += (f"blocks of up to {human(longest)}",) if longest else ()
            stages = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in report.stages.items())
            report.notes += (f"ms: {stages}",)
        if not self._summed:
            return Found(made, [], len(arrays), report, total=0)
        spans = gpu_memory.spans(self._framework, arrays)
        if self._device == HOST:  # Pages that are mapped only are not loaded yet.
            return Found(made, spans, len(arrays), report)
        total = gpu_memory.page_sum(spans, self._device)
        none: list[Span] = []
        return Found(made, none, len(arrays), report, total=total)


def find(name: str) -> Task:
    """The task of a name."""
    device, _, rest = name.partition("/")
    if gpu_ceilings.is_ceiling(rest):
        return gpu_ceilings.find(rest, device)
    if gpu_seams.is_seam(rest):
        return gpu_seams.find(rest, device)
    made = _Loading(rest, device)
    return Task(made.run, made.find, made.prepare)
