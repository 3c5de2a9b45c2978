# %% [markdown]
# # Read only the part you need
#
# `mfload.open` reads the header; each slice then reads its own bytes and no others. Here is a table
# of a thousand rows to take from.

# %%
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import mfload

folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "model.safetensors"
table = np.arange(1000 * 16, dtype=np.float32).reshape(1000, 16)
save_file({"table": table, "scale": np.float32([2.0])}, path, metadata={"made": "here"})

# %% [markdown]
# ## What is in it
#
# What `open` returns has the methods of `safetensors.safe_open`, and opens whole checkpoints too.
# Nothing of the data has been read yet: names, dtypes and shapes are in the header.

# %%
file = mfload.open(path, framework="numpy")
print(len(file), "tensors:", file.keys(), file.metadata())
rows = file.get_slice("table")
print("table", rows.get_dtype(), rows.get_shape())

# %% [markdown]
# ## Take a part
#
# Ints, ranges with steps, negatives and `...` work as in NumPy. What each of two processes of a
# sharded run would take:

# %%
half = rows.get_shape()[0] // 2
ranks = [rows[:half], rows[half:]]
print([rank.shape for rank in ranks])
assert np.array_equal(np.concatenate(ranks), table)

# %%
columns = rows[:, 8:16]
every_tenth_row = rows[::10]
last = rows[-1]
print(columns.shape, every_tenth_row.shape, last.shape)
assert np.array_equal(columns, table[:, 8:16])
assert np.array_equal(every_tenth_row, table[::10])
assert np.array_equal(last, table[-1])

# %% [markdown]
# ## Whole tensors, several at once
#
# `get_tensors` reads all that it is asked for in one go.

# %%
both = file.get_tensors(["scale", "table"])
print({name: array.shape for name, array in both.items()})
assert both["scale"] == 2.0

# %% [markdown]
# ## Share it
#
# It holds no open file and no thread, so threads may share it, forks inherit it, and a pickle takes
# it to another process, such as a worker of a data loader.

# %%
with ThreadPoolExecutor(4) as pool:
    parts = list(pool.map(lambda start: rows[start::4], range(4)))
print([part.shape for part in parts])
assert sum(len(part) for part in parts) == len(table)
folder.cleanup()
