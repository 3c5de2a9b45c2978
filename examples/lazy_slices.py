# %% [markdown]
# # Read only the part you need
#
# `mfload.open` reads the header; each slice then reads its own bytes and no others.

# %%
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import mfload

table = np.arange(1000 * 16, dtype=np.float32).reshape(1000, 16)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.safetensors"
    save_file({"table": table, "scale": np.float32([2.0])}, path, metadata={"made": "here"})

    with mfload.open(path, framework="numpy") as file:
        print(len(file), "tensors:", sorted(file.keys()), file.metadata())
        scale = file.get_tensor("scale")

        # Nothing of the table is read until it is indexed; its shape is in the header.
        rows = file.get_slice("table")
        print("table", rows.get_dtype(), rows.get_shape())
        half = rows.get_shape()[0] // 2
        ranks = [rows[:half], rows[half:]]  # what each of two processes would read
        columns = rows[:, 8:16]
        every_tenth_row = rows[::10]
        last = rows[-1]

# %%
assert scale == 2.0
assert np.array_equal(np.concatenate(ranks), table)
assert np.array_equal(columns, table[:, 8:16])
assert np.array_equal(every_tenth_row, table[::10])
assert np.array_equal(last, table[-1])
print("slices", ranks[0].shape, columns.shape, every_tenth_row.shape, last.shape)
