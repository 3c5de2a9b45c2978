"""The tests that need a GPU, and what each of them requires: step 0 of `make gpu` runs them.

A process each, with whatever of the frameworks this Python has: most frameworks take hold of a
GPU's memory when they first touch it, and TensorFlow and Paddle crash one another.
"""

NEEDS = {
    "tests/devices": ("cupy",),
    "tests/frameworks/test_cupy.py": ("cupy",),
    "tests/frameworks/test_torch.py": ("cupy", "torch"),
    "tests/frameworks/test_torch_lazy.py": ("cupy", "torch"),
    "tests/frameworks/test_torch_dcp.py": ("cupy", "torch"),
    "tests/frameworks/test_torch_into.py": ("cupy", "torch"),
    "tests/compat/test_transformers.py": ("cupy", "torch", "transformers", "accelerate"),
    "tests/worlds/test_torch_devices.py": ("cupy", "torch"),
    "tests/frameworks/test_jax.py": ("cupy", "jax"),
    "tests/frameworks/test_jax_landing.py": ("cupy", "jax"),
    "tests/frameworks/test_cuda_ipc_gpu.py": ("cupy",),
    "tests/frameworks/test_several.py": ("cupy", "torch", "jax"),
    "tests/frameworks/test_tensorflow.py": ("cupy", "tensorflow"),
    "tests/frameworks/test_paddle.py": ("cupy", "paddle"),
}
