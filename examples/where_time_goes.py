# %% [markdown]
# # Where the time goes
#
# Install: `pip install '.[plot]'`.
#
# Three looks at one load: the plan before it, the timeline after it, and what the machine could
# have done at most. 192 MiB in three files stand for a model; a path of your own gives figures that
# mean more.

# %%
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import mfload

folder = tempfile.TemporaryDirectory()
path = Path(folder.name)
random = np.random.default_rng(0)
for number in range(3):
    layers = {f"layers.{number}.{n}": random.random((1024, 2048), np.float32) for n in range(8)}
    mfload.save(layers, path / f"model-{number + 1:05}-of-00003.safetensors")

# %% [markdown]
# ## Before: the plan
#
# How many bytes in how many reads, how much memory, and for each file the engine and the reason.

# %%
mfload.plan(path, framework="numpy")

# %% [markdown]
# ## The ceiling
#
# What plain reads into fresh memory give, by as many threads as there are cores, of the same files
# in the same state of the page cache.
# `mfload bench` measures it with more care: several patterns, in fresh processes, warm and cold.


# %%
def read(file):
    memory = np.empty(file.stat().st_size, np.uint8)
    with open(file, "rb", buffering=0) as opened:
        done = 0
        while done < memory.nbytes:
            done += opened.readinto(memoryview(memory)[done:])
    return memory


def plain():
    start = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        held = list(pool.map(read, path.glob("*.safetensors")))
    return sum(map(len, held)) / (time.perf_counter() - start) / 2**30


ceiling = max(plain() for _ in range(5))
print(f"plain reads: {ceiling:.1f} GiB/s")

# %% [markdown]
# ## After: the report
#
# The stages, and whether processor time went into the kernel (copying from the page cache,
# providing pages) or into the process itself. The first load of a process takes imports along, so
# this is the second.

# %%
mfload.load(path, framework="numpy")
report = mfload.Report()
params = mfload.load(path, framework="numpy", report=report)
report

# %% [markdown]
# ## The timeline
#
# A lane for each thread, and the rate at which bytes came. Here all is reading.

# %%
report.plot(ceiling=ceiling)

# %% [markdown]
# ## What a conversion costs
#
# Each thread now rounds to bfloat16 as well: it reads 2 MiB into a slot, and what it copies from
# there into place, rounded, is "copy".

# %%
del params
mfload.load(path, framework="numpy", dtype="bfloat16", report=report)
report.plot(ceiling=ceiling)

# %% [markdown]
# ## In figures
#
# `report.timeline` are rows of (thread, kind, start, stop, nbytes, file), for a data frame or a few
# lines of Python.

# %%
seconds = {}
for span in report.timeline:
    if span.thread != "load":
        key = span.thread, span.kind
        seconds[key] = seconds.get(key, 0) + span.stop - span.start
for (thread, kind), took in sorted(seconds.items()):
    print(f"{thread:9} {kind:5} {took * 1e3:7.1f} ms")
came = sum(span.nbytes for span in report.timeline if span.kind in ("read", "map"))
assert came >= report.read_bytes
folder.cleanup()
