# %% [markdown]
# # Flax: restore a train state, and resume
#
# Install: `pip install '.[flax,orbax]' orbax-checkpoint`.
#
# A run saved by Orbax on one mesh goes on another. `mfload.restore` reads Orbax's checkpoints
# itself, gives the state back in the type of the target, and takes the sharding from `mesh=` and
# rules, not from the devices of the run that saved it.

# %%
import os
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn, serialization
from flax.training.train_state import TrainState
from jax.sharding import Mesh, PartitionSpec as P

import mfload

# %% [markdown]
# ## A run
#
# A small model, AdamW, made-up data. All of it is replicated on two devices.


# %%
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, name="out")(nn.relu(nn.Dense(64, name="hidden")(x)))


model, optimizer = Model(), optax.adamw(1e-2)


def fresh():
    params = model.init(jax.random.key(0), jnp.ones((1, 16)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def batch(number):
    x = np.random.default_rng(number).standard_normal((32, 16), np.float32)
    return x, x.sum(axis=1, keepdims=True)


@jax.jit
def train(state, x, y):
    def loss(params):
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


folder = tempfile.TemporaryDirectory()
run = Path(folder.name) / "run"
state = fresh()
with ocp.CheckpointManager(run) as manager:
    for number in range(6):
        state, loss = train(state, *batch(number))
        if number in (1, 3):
            manager.save(int(state.step), args=ocp.args.StandardSave(state))
        print(f"step {int(state.step)}, loss {loss:.3f}")
print("saved:", sorted(path.name for path in run.iterdir() if path.name.isdigit()))

# %% [markdown]
# ## Restore it on eight devices
#
# The target is made of shapes alone. Of the directory of a run, the newest complete step is
# restored; `step=` asks for another.

# %%
mesh = Mesh(np.array(jax.devices()), ("model",))
shardings = [(r"hidden\.kernel", P(None, "model")), (r"out\.kernel", P("model", None))]
restored = mfload.restore(run, jax.eval_shape(fresh), mesh=mesh, shardings=shardings)
moment = restored.opt_state[0].mu["hidden"]["kernel"]
print(type(restored).__name__, "of step", int(restored.step), moment.sharding.spec)
assert int(restored.step) == 4

# %% [markdown]
# ## Resume
#
# The steps that follow are those of the run that was not interrupted.

# %%
for number in range(4, 6):
    restored, loss = train(restored, *batch(number))
    print(f"step {int(restored.step)}, loss {loss:.3f}")
for mine, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
print("as if it had never stopped")

# %% [markdown]
# ## A msgpack file of Flax
#
# The same call. Without a target it gives a nested dict, for any framework.

# %%
file = Path(folder.name) / "state.msgpack"
file.write_bytes(serialization.to_bytes(state))
again = mfload.restore(file, jax.eval_shape(fresh), mesh=mesh, shardings=shardings)
same = jax.tree.map(np.array_equal, again, state)
print("bit-equal:", all(jax.tree.leaves(same)))
assert all(jax.tree.leaves(same))
print(list(mfload.restore(file, framework="jax")["params"]))

# %% [markdown]
# ## The wrong model
#
# All that does not fit is said in one error, before anything is read.

# %%
wrong = {"params": {"hidden": {"weight": jax.ShapeDtypeStruct((16, 64), np.float32)}}}
try:
    mfload.restore(file, wrong, mesh=mesh)
except mfload.errors.MappingError as error:
    print("\n".join(str(error).splitlines()[1:5]), "\n …")
else:
    raise AssertionError("another model's state was restored")
folder.cleanup()
