"""Weights from a running process: seeds, readers and the planner between them."""
