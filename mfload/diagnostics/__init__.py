"""What this machine can do for a load, found out without harm.

Each module looks at one part and yields findings. What could hang or crash (a driver, a library of
NVIDIA's) is asked in a process of its own, for a bounded time.
"""
