# %% [markdown]
# # Layers from flash
#
# Install: `pip install '.[torch]'`.
#
# A dense model uses all of its layers for each token, one after the other.
# `mfload.ondemand.LayerStream` leaves them on the disk and reads the next one while one computes.
# Here a model of 24 layers runs in PyTorch, in a tenth and in half of its size, and computes the
# same to the last bit.

# %%
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

import mfload

VOCABULARY, WIDTH, LAYERS, HEADS = 256, 128, 24, 4
torch.manual_seed(0)
torch.set_num_threads(1)  # The products are small.


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.ffn_norm = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(x)


folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "dense.safetensors"
mfload.save(Model().state_dict(), path)
size = path.stat().st_size
print(f"{size / 2**20:.1f} MiB on disk")

# %% [markdown]
# ## The usual way
#
# All weights are in memory.

# %%
prompts = torch.randint(VOCABULARY, (8, 32))
with torch.device("meta"):
    model = Model()
with torch.no_grad():
    expected = mfload.load_into(model, path)(prompts)

# %% [markdown]
# ## A layer at a time
#
# One block on `meta` has the code, and `functional_call` gives it the weights of each layer. What
# belongs to no layer, the embedding and the head, is in `stream.resident`. One pass serves a whole
# batch of prompts, so prompts are read fast: the weights come from the disk once for all of their
# tokens.

# %%
with torch.device("meta"):
    block = Block()


@torch.no_grad()
def logits_of(tokens, stream):
    x = F.embedding(tokens, stream.resident["embed.weight"])
    for _, tensors in stream:
        named = {name.split(".", 2)[2]: tensor for name, tensor in tensors.items()}
        x = torch.func.functional_call(block, named, (x,))
    return x @ stream.resident["head.weight"].T


for budget in (size // 10, size // 2):
    with mfload.ondemand.LayerStream(path, budget=budget, framework="torch") as stream:
        for _ in range(3):
            assert torch.equal(logits_of(prompts, stream), expected)
        report = stream.report()
        assert report.peak_bytes <= budget
        print(f"\n{budget / size:.0%} of its size: logits equal, bit for bit")
        print(report)

# %% [markdown]
# With half of the size, some layers stay in memory from pass to pass, and less is read.
#
# ## A budget that will not do
#
# It must have room for what is resident and two layers: one computes, one is read.

# %%
try:
    mfload.ondemand.LayerStream(path, budget=size // 100, framework="torch")
except mfload.errors.MemoryLimitError as error:
    print(error)

# %%
folder.cleanup()
