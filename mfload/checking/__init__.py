"""Checks: whether a checkpoint is whole, is what it was, and what differs between two."""
