"""Saving: from arrays to files under their final names."""
