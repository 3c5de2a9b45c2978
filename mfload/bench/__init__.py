"""Measuring: this machine's ceilings, and loaders against them.

`mfload bench` is made of it, and so are the project's own benchmarks. Linux only, since only its
page cache can be asked and told what it holds. Nothing here writes to what is measured.
"""
