# %% [markdown]
# # Save, and be sure of it
#
# Arrays go into a file whole or not at all; later you can tell whether the file is still the one
# that was written. Hashing needs the extra `mfload[verify]`.

# %%
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import mfload

folder = tempfile.TemporaryDirectory()
here = Path(folder.name)
params = {
    "embed.weight": np.arange(64 * 32, dtype=np.float32).reshape(64, 32),
    "layers.0.q.weight": np.ones((32, 32), np.float16),
    "layers.0.norm.weight": np.ones(32, np.float32),
}

# %% [markdown]
# ## Save
#
# Until the call returns nobody sees the new file under its name; afterwards it outlives a loss of
# power. A file that is there is replaced only if you say so.

# %%
saved = mfload.save(params, here / "model.safetensors", metadata={"step": "1000"})
print(saved.tensors, "tensors,", saved.bytes, "bytes in", [Path(f).name for f in saved.files])

# %%
try:
    mfload.save(params, here / "model.safetensors")
except mfload.errors.TargetExistsError as error:
    print(error.message)

# %% [markdown]
# ## In shards
#
# Named as others name them, with an index.

# %%
(here / "sharded").mkdir()
shards = mfload.save(params, here / "sharded", max_shard_size="8KiB")
print(*(Path(file).name for file in shards.files), sep="\n")

# %% [markdown]
# ## Remember what was written
#
# `verify` checks every rule of the format. With `checksums="write"` it also leaves a manifest
# beside the checkpoint: a hash of each tensor and of each file.

# %%
found = mfload.verify(here / "model.safetensors", checksums="write")
print(found.ok, found.checked, Path(found.manifest).name)
assert found.ok

# %% [markdown]
# ## Load what was written, or nothing
#
# With `verify=` the bytes are hashed while they land, so that a verified load reads the file once.

# %%
loaded = mfload.load(here / "model.safetensors", framework="numpy", verify=found.manifest)
print(len(loaded), "arrays, verified")
assert all(np.array_equal(loaded[name], params[name]) for name in params)

# %% [markdown]
# ## Something goes wrong
#
# One byte changes. The header is as good as before; the manifest knows better.

# %%
with open(here / "model.safetensors", "r+b") as file:
    file.seek(-1, 2)
    file.write(b"\x01")
print("headers alone:", mfload.verify(here / "model.safetensors").ok)
broken = mfload.verify(here / "model.safetensors", checksums="check")
for problem in broken.problems:
    print(problem.what, problem.tensor or "")
assert not broken.ok

# %%
try:
    mfload.load(here / "model.safetensors", framework="numpy", verify=found.manifest)
except mfload.errors.ChecksumError as error:
    print(type(error).__name__, error.tensor)

# %% [markdown]
# ## What is different?
#
# `diff` compares two checkpoints by name, however they are sharded.

# %%
difference = mfload.diff(here / "sharded", here / "model.safetensors")
for change in difference.changed:
    print(change.name, change.differing, "of", params[change.name].size, "numbers differ")
assert not difference.same
assert len(difference.changed) == 1

# %% [markdown]
# ## Make a file fast to read
#
# Most writers leave the data at an odd offset. `align` rewrites a checkpoint in bounded memory so
# that each tensor can be taken as it lies, reads back what it wrote, and compares.

# %%
save_file(params, here / "elsewhere.safetensors")
made = mfload.align(here / "elsewhere.safetensors", here / "aligned.safetensors")
print(made.tensors, "tensors rewritten")
assert mfload.diff(here / "elsewhere.safetensors", here / "aligned.safetensors").same
folder.cleanup()
