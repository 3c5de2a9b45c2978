"""How fast mfload loads, against its peers and against the ceiling of the same machine.

`python -m benchmarks.load` is the one command; `benchmarks/README.md` says what it measures.
"""
