"""Saving: the street run backwards, from arrays to files under their final names."""
