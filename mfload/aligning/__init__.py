"""Aligning: a checkpoint written anew, so that it suits zero-copy and direct reads."""
